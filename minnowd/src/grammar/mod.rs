//! Grammars that an output must follow while it is refined: JSON schemas, regular expressions, Lark grammars, tool calls.
//!
//! [`Grammars`] knows a checkpoint's vocabulary and turns a [`Grammar`] into a [`Language`] for the decoder; the parser
//! behind it is the `llguidance` crate. Control tokens are never text: only a grammar that names one by its id gets it.
//! An output may end where its grammar may, and must where nothing else is possible.

mod calls;
mod schema;

use std::fmt;
use std::sync::{Arc, OnceLock};

use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use serde_json::Value;
use thiserror::Error;

use crate::decoder::{Language, LanguageError, TokenSet};
use crate::text::{SpecialTokens, Token, Tokenizer};

pub use calls::{CallGrammar, CallStart, CallTool};
pub use schema::check as check_schema;

/// What an output must look like, from its first token on.
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    /// JSON that fits a schema (2020-12; what llguidance supports of it).
    Json(Value),
    /// All of the output matches this regular expression, in the syntax of the `regex` crate.
    Regex(String),
    /// A grammar in llguidance's variant of Lark, whose rule `start` is all of the output.
    Lark(String),
    /// Tool calls in the form of the checkpoint's template.
    Calls(CallGrammar),
}

/// Why a grammar cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum GrammarError {
    /// A keyword of JSON Schema that cannot be enforced while decoding.
    #[error("{path} is not supported in output schemas")]
    Keyword {
        /// Where it is, from the schema on: `properties.a.not`.
        path: String,
    },
    /// Not a grammar, or one that is too large, or one that nothing satisfies.
    #[error("{0}")]
    Unusable(String),
}

/// Makes languages over one checkpoint's vocabulary.
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    vocab_size: u32,
    special: SpecialTokens,
    /// Made when it is first needed, since it takes a moment and some megabytes.
    factory: OnceLock<Result<ParserFactory, String>>,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Grammars(vocabulary of {})", self.vocab_size)
    }
}

impl Grammars {
    /// For a model with `vocab_size` rows of logits. Outputs end with any of the stop ids of `special`.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize, special: SpecialTokens) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "token ids are u32")]
        let vocab_size = vocab_size as u32;
        Self { tokenizer, vocab_size, special, factory: OnceLock::new() }
    }

    /// A language that stands at its beginning. Takes milliseconds, and the first time for a large vocabulary a good
    /// part of a second: not for threads that others wait for.
    pub fn compile(&self, grammar: &Grammar) -> Result<Box<dyn Language>, GrammarError> {
        let factory = self.factory.get_or_init(|| self.factory()).as_ref();
        let factory = factory.map_err(|message| GrammarError::Unusable(message.clone()))?;
        let source = match grammar {
            Grammar::Json(schema) => TopLevelGrammar::from_json_schema(schema::enforceable(schema)?),
            Grammar::Regex(pattern) => TopLevelGrammar::from_regex(pattern),
            Grammar::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
            Grammar::Calls(calls) => TopLevelGrammar::from_lark(calls.lark(&self.tokenizer)?),
        };
        let unusable = |message: String| GrammarError::Unusable(first_line(&message));
        let parser = factory.create_parser(source).map_err(|error| unusable(error.to_string()))?;
        let mut matcher = Matcher::new(Ok(parser));
        // An empty language shows itself at the first token.
        matcher.compute_mask_or_eos().map_err(|error| unusable(error.to_string()))?;
        Ok(Box::new(Parsed { matcher, stop_ids: Arc::clone(&self.special.stop) }))
    }

    fn factory(&self) -> Result<ParserFactory, String> {
        let refused = |error: anyhow::Error| format!("no grammars for this vocabulary: {error}");
        let unused = [Some(self.special.mask), self.special.delete, self.special.split];
        let word = |id| if unused.contains(&Some(id)) { Vec::new() } else { self.word(id) };
        let words: Vec<Vec<u8>> = (0..self.vocab_size).map(word).collect();
        let stop = &self.special.stop;
        let trie = TokTrie::from(&TokRxInfo::new(self.vocab_size, stop[0]), &words).with_eos_tokens(stop);
        let environment: TokEnv = Arc::new(Environment { trie, tokenizer: Arc::clone(&self.tokenizer) });
        let capabilities = InferenceCapabilities { ff_tokens: true, ..InferenceCapabilities::default() };
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&environment, capabilities, &slices).map_err(refused)?;
        factory.quiet();
        Ok(factory)
    }

    /// What the parser calls a token; nothing for ids that stand for nothing, or for bytes that are in no UTF-8, which
    /// the parser marks control tokens with.
    fn word(&self, id: u32) -> Vec<u8> {
        match self.tokenizer.token(id) {
            Some(Token::Text(bytes)) if !bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER) => bytes.to_vec(),
            Some(Token::Special(bytes)) => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
            _ => Vec::new(),
        }
    }
}

/// The tokenizer as the parser wants it.
struct Environment {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        // What cannot be encoded, which no text is, would be spelled by the longest tokens.
        let encode = |text: &str| {
            self.tokenizer.encode_plain(text).unwrap_or_else(|_| self.trie.greedy_tokenize(text.as_bytes()))
        };
        self.trie.tokenize_with_greedy_fallback(bytes, encode)
    }
}

/// A parser at some place of its grammar.
struct Parsed {
    matcher: Matcher,
    stop_ids: Arc<[u32]>,
}

impl fmt::Debug for Parsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Parsed({:?})", self.matcher.stop_reason())
    }
}

impl Language for Parsed {
    fn forced(&mut self) -> Vec<u32> {
        if self.matcher.is_stopped() { Vec::new() } else { self.matcher.compute_ff_tokens() }
    }

    fn allowed(&mut self) -> Result<TokenSet, LanguageError> {
        let mask = self.matcher.compute_mask_or_eos().map_err(failed)?;
        Ok(TokenSet::from_words(mask.as_slice().to_vec()))
    }

    fn accept(&mut self, token: u32) -> Result<(), LanguageError> {
        // Where nothing can follow, the parser has stopped by itself.
        if self.matcher.stop_reason().is_ok() && self.matcher.is_stopped() && self.stop_ids.contains(&token) {
            return Ok(());
        }
        self.matcher.consume_token(token).map_err(failed)
    }

    fn boxed_clone(&self) -> Box<dyn Language> {
        Box::new(Self { matcher: self.matcher.deep_clone(), stop_ids: Arc::clone(&self.stop_ids) })
    }
}

fn failed(error: anyhow::Error) -> LanguageError {
    LanguageError(first_line(&error.to_string()))
}

/// The parser's messages go on for pages.
fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().chars().take(300).collect()
}
