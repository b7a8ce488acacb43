//! Finding fixed texts in text that comes in pieces: stop strings, and tags that are not tokens.

/// Looks for any of some literals in a text that comes in pieces: the one that starts first, the longest of those that
/// start together. Holds back the longest end of the text that is a proper beginning of a literal.
#[derive(Clone, Debug, Default)]
pub(super) struct Literals {
    literals: Vec<String>,
    held: String,
}

/// What a search found: `before` is certain not to belong to a literal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) before: String,
    /// Index of the literal that follows, if one does.
    pub(super) literal: Option<usize>,
}

impl Literals {
    /// Empty literals are left out: they would be everywhere.
    pub(super) fn new(literals: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let literals = literals.into_iter().map(Into::into).filter(|literal: &String| !literal.is_empty()).collect();
        Self { literals, held: String::new() }
    }

    /// The literal with this index.
    pub(super) fn literal(&self, index: usize) -> Option<&str> {
        self.literals.get(index).map(String::as_str)
    }

    /// Adds text and looks for the first literal. Text after a literal stays inside: push nothing more to go on.
    pub(super) fn push(&mut self, text: &str) -> Found {
        self.held.push_str(text);
        self.search(false)
    }

    /// Like [`push`](Self::push), knowing that no text follows.
    pub(super) fn finish(&mut self) -> Found {
        self.search(true)
    }

    fn search(&mut self, is_end: bool) -> Found {
        let starts = self.held.char_indices().map(|(at, _)| at);
        for at in starts {
            let rest = &self.held[at..];
            let longest = self
                .literals
                .iter()
                .enumerate()
                .filter(|(_, literal)| rest.starts_with(literal.as_str()))
                .max_by_key(|(_, literal)| literal.len());
            if let Some((index, literal)) = longest {
                let found = Found { before: self.held[..at].to_owned(), literal: Some(index) };
                self.held.drain(..at + literal.len());
                return found;
            }
            if !is_end && self.literals.iter().any(|literal| literal.starts_with(rest)) {
                return Found { before: self.held.drain(..at).collect(), literal: None };
            }
        }
        Found { before: std::mem::take(&mut self.held), literal: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use minnow_common::random::keyed;

    /// The text before the first literal, the plain way.
    fn naive(text: &str, literals: &[&str]) -> String {
        let first = literals.iter().filter_map(|literal| text.find(literal)).min();
        text[..first.unwrap_or(text.len())].to_owned()
    }

    #[test]
    fn every_cut_finds_the_same_first_literal() {
        let sets: [&[&str]; 5] =
            [&["aab"], &["abab", "ba"], &["ab", "abc", "c"], &["b\u{e9}b", "\u{e9}"], &["aaa", "aab"]];
        for literals in sets {
            for seed in 0..400 {
                let letter = |i| ['a', 'b', 'c', '\u{e9}'][keyed(seed, &[i]) as usize % 4];
                let text: String = (0..seed % 14).map(letter).collect();
                let expected = naive(&text, literals);
                let cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
                for &first in &cuts {
                    for &second in cuts.iter().filter(|&&second| second >= first) {
                        let mut search = Literals::new(literals.iter().copied());
                        let mut out = String::new();
                        let pieces = [&text[..first], &text[first..second], &text[second..]];
                        let mut is_found = false;
                        for piece in pieces {
                            let found = search.push(piece);
                            out.push_str(&found.before);
                            if found.literal.is_some() {
                                is_found = true;
                                break;
                            }
                        }
                        if !is_found {
                            out.push_str(&search.finish().before);
                        }
                        assert_eq!(out, expected, "{text} by {literals:?} at {first}, {second}");
                    }
                }
            }
        }
    }

    #[test]
    fn only_what_may_become_a_literal_is_held_back() {
        let mut search = Literals::new(["</tag>", "x"]);
        assert_eq!(search.push("a<b</ta"), Found { before: "a<b".to_owned(), literal: None });
        assert_eq!(search.push("g"), Found { before: String::new(), literal: None });
        assert_eq!(search.push("s>x</tag>rest"), Found { before: "</tags>".to_owned(), literal: Some(1) });
        assert_eq!(search.push(""), Found { before: String::new(), literal: Some(0) });
        assert_eq!(search.push(""), Found { before: "rest".to_owned(), literal: None });
    }
}
