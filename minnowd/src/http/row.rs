//! An output as a row of items, one after the other: for dialects whose streams open and close each text and each call.

use super::answer::{News, Output};
use crate::text::Delta;

/// What happens in a row. Numbers count its items from 0; one is open at a time.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Change {
    /// An item begins.
    Begin(usize),
    /// More of a text.
    Text(usize, String),
    /// More of a call's arguments.
    Arguments(usize, String),
    /// An item ends: a call because it is complete or was given up, a text because something else follows.
    End(usize),
}

/// A growing output.
#[derive(Debug, Default)]
pub(crate) struct Row {
    output: Output,
    /// The item that has begun and not ended.
    open: Option<usize>,
}

impl Row {
    /// What is there so far.
    pub(crate) fn output(&self) -> &Output {
        &self.output
    }

    /// Adds a delta and gives what that changes, in order.
    pub(crate) fn push(&mut self, delta: Delta) -> Vec<Change> {
        let before = self.output.items().len();
        let Some(news) = self.output.push(delta) else { return Vec::new() };
        let mut changes = Vec::new();
        let last = self.output.items().len().saturating_sub(1);
        if last >= before {
            changes.extend(self.close());
            changes.push(Change::Begin(last));
            self.open = Some(last);
        }
        match news {
            News::Text(text) => changes.push(Change::Text(last, text)),
            News::Arguments(_, fragment) => changes.push(Change::Arguments(last, fragment)),
            News::Call(_) => {}
            News::CallEnd(_) => changes.extend(self.close()),
        }
        changes
    }

    /// Ends the open item, if there is one: another follows, or nothing does.
    pub(crate) fn close(&mut self) -> Option<Change> {
        self.open.take().map(Change::End)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(text: &str) -> Delta {
        Delta::Content(text.to_owned())
    }

    fn begin(index: usize) -> Delta {
        Delta::CallBegin { index, name: "f".to_owned() }
    }

    #[test]
    fn one_item_is_open_at_a_time() {
        let mut row = Row::default();
        let arguments = Delta::CallArguments { index: 0, fragment: "{}".to_owned() };
        let deltas =
            [content("a"), content("b"), begin(0), arguments, Delta::CallEnd { index: 0 }, begin(1), content("c")];
        let mut changes: Vec<Change> = deltas.into_iter().flat_map(|delta| row.push(delta)).collect();
        changes.extend(row.close());
        assert_eq!(row.close(), None);
        let text = |index, text: &str| Change::Text(index, text.to_owned());
        assert_eq!(
            changes,
            [
                Change::Begin(0),
                text(0, "a"),
                text(0, "b"),
                Change::End(0),
                Change::Begin(1),
                Change::Arguments(1, "{}".to_owned()),
                Change::End(1),
                Change::Begin(2),
                Change::End(2),
                Change::Begin(3),
                text(3, "c"),
                Change::End(3),
            ]
        );
        assert_eq!(row.output().items().len(), 4);
    }

    #[test]
    fn nothing_new_changes_nothing() {
        let mut row = Row::default();
        assert_eq!((row.push(content("")), row.close()), (Vec::new(), None));
    }
}
