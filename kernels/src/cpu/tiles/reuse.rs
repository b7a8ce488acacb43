//! Arrays that live through several phases: taken from what their thread keeps, and given back.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

use super::Line;

/// Arrays that a thread keeps: as many as one product with experts needs at once.
const KEPT_MAX: usize = 4;

thread_local! {
    static KEPT: RefCell<Vec<Vec<Line>>> = const { RefCell::new(Vec::new()) };
}

/// Lines that hold anything at first.
pub(super) struct Lines {
    lines: Vec<Line>,
    len: usize,
}

impl Lines {
    pub(super) fn new(len: usize) -> Self {
        let mut lines = KEPT.with_borrow_mut(|kept| {
            // The smallest that is large enough, or else the largest.
            let fit = kept.iter().position(|lines| lines.len() >= len).or(kept.len().checked_sub(1));
            fit.map_or_else(Vec::new, |index| kept.remove(index))
        });
        if lines.len() < len {
            lines.resize(len, Line::ZERO);
        }
        Self { lines, len }
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        KEPT.with_borrow_mut(|kept| {
            let place = kept.partition_point(|other| other.len() < lines.len());
            kept.insert(place, lines);
            if kept.len() > KEPT_MAX {
                kept.remove(0);
            }
        });
    }
}

impl Deref for Lines {
    type Target = [Line];

    fn deref(&self) -> &[Line] {
        &self.lines[..self.len]
    }
}

impl DerefMut for Lines {
    fn deref_mut(&mut self) -> &mut [Line] {
        &mut self.lines[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_comes_back_and_only_a_few_are_kept() {
        let address = |lines: &Lines| lines.as_ptr();
        let first = Lines::new(100);
        let kept = address(&first);
        drop(first);
        let again = Lines::new(60);
        assert_eq!((address(&again), again.len()), (kept, 60));
        drop((0..10).map(Lines::new).collect::<Vec<_>>());
        assert!(KEPT.with_borrow(Vec::len) <= KEPT_MAX);
    }
}
