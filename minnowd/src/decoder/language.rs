//! The language that an output must stay in: what may come next, one token after another.
//!
//! Only the interface, so that the decoder knows no grammar; [`crate::grammar`] has the real one.

use std::fmt;

use thiserror::Error;

/// A language and the place in it that the output has reached. A pure function of the tokens accepted so far.
pub trait Language: Send + Sync + fmt::Debug {
    /// Tokens that must come next as far as there is only one way to go on and to write it; often none.
    fn forced(&mut self) -> Vec<u32>;

    /// Everything that may come next. A stop id is in it if and only if the output may end here, and then all are;
    /// nothing else is in it if the output must.
    fn allowed(&mut self) -> Result<TokenSet, LanguageError>;

    /// Moves past `token`, which must be allowed.
    fn accept(&mut self, token: u32) -> Result<(), LanguageError>;

    /// The same place, to go on from independently.
    fn boxed_clone(&self) -> Box<dyn Language>;
}

impl Clone for Box<dyn Language> {
    fn clone(&self) -> Self {
        self.boxed_clone()
    }
}

/// A set of token ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenSet {
    /// Bit `id % 32` of word `id / 32`.
    words: Vec<u32>,
}

impl TokenSet {
    /// The set in which id `i` is if bit `i % 32` of word `i / 32` is set.
    #[must_use]
    pub fn from_words(words: Vec<u32>) -> Self {
        Self { words }
    }

    /// Whether `id` is in it.
    #[must_use]
    pub fn contains(&self, id: u32) -> bool {
        self.words.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }

    /// Takes `id` out.
    pub fn remove(&mut self, id: u32) {
        if let Some(word) = self.words.get_mut(id as usize / 32) {
            *word &= !(1 << (id % 32));
        }
    }
}

/// Why a language cannot be followed any further: it is too complex for its budgets.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the output's grammar cannot be followed: {0}")]
pub struct LanguageError(pub String);
