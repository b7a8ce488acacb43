//! Which token ids mean something: found in the checkpoint's own files, never assumed.

use std::sync::Arc;

use minnow_common::ModelConfig;
use serde_json::Value;
use thiserror::Error;

use super::tokenizer::Tokenizer;
use crate::decoder::SpecialIds;

/// The ids that decoding and the end of an output depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Stands at undecided positions.
    pub mask: u32,
    /// Removes a slot; LLaDA2.2 only.
    pub delete: Option<u32>,
    /// Opens a slot; LLaDA2.2 only.
    pub split: Option<u32>,
    /// Ids that end an output, ascending; never empty.
    pub stop: Arc<[u32]>,
}

/// What is missing or contradictory.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SpecialTokensError {
    /// No mask token.
    #[error("no mask token: config.json has no mask_token_id and tokenizer.json no <|mask|>")]
    NoMask,
    /// No stop token.
    #[error(
        "no stop token: no eos_token_id in generation_config.json or config.json, no <|endoftext|> or <|role_end|> in tokenizer.json"
    )]
    NoStop,
    /// An id that the model has no row for.
    #[error("{name} token {id} is outside the vocabulary of {vocab}")]
    OutsideVocabulary {
        /// Its meaning.
        name: &'static str,
        /// The id.
        id: u32,
        /// `vocab_size` of the configuration.
        vocab: usize,
    },
    /// One id with two meanings.
    #[error("token {id} is both the {first} and the {second} token")]
    Twice {
        /// The id.
        id: u32,
        /// One meaning.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// `generation_config.json` cannot be read.
    #[error("generation_config.json: {0}")]
    GenerationConfig(String),
}

impl SpecialTokens {
    /// Looks in `config.json` first, then among the tokenizer's tokens. Stop ids are all of: `eos_token_id` of
    /// `generation_config.json` and of `config.json`, `<|endoftext|>` and `<|role_end|>`.
    pub fn resolve(
        config: &ModelConfig,
        generation_config: Option<&str>,
        tokenizer: &Tokenizer,
    ) -> Result<Self, SpecialTokensError> {
        let ids = &config.ids;
        let mask = ids.mask.or_else(|| tokenizer.id("<|mask|>")).ok_or(SpecialTokensError::NoMask)?;
        let delete = ids.delete.or_else(|| tokenizer.id("<|delete|>"));
        let split = ids.split.or_else(|| tokenizer.id("<|split|>"));
        let mut stop = eos_ids(generation_config)?;
        stop.extend(&ids.eos);
        stop.extend(["<|endoftext|>", "<|role_end|>"].into_iter().filter_map(|text| tokenizer.id(text)));
        stop.sort_unstable();
        stop.dedup();
        if stop.is_empty() {
            return Err(SpecialTokensError::NoStop);
        }

        let vocab = config.vocab_size;
        let edits = [("mask", Some(mask)), ("delete", delete), ("split", split)];
        let mut named: Vec<(&'static str, u32)> =
            edits.into_iter().filter_map(|(name, id)| id.map(|id| (name, id))).collect();
        named.extend(stop.iter().map(|&id| ("stop", id)));
        for (index, &(name, id)) in named.iter().enumerate() {
            if id as usize >= vocab {
                return Err(SpecialTokensError::OutsideVocabulary { name, id, vocab });
            }
            if let Some(&(first, _)) = named[..index].iter().find(|other| other.1 == id) {
                return Err(SpecialTokensError::Twice { id, first, second: name });
            }
        }
        Ok(Self { mask, delete, split, stop: stop.into() })
    }

    /// The ids that the decoder treats specially.
    #[must_use]
    pub fn decoder_ids(&self) -> SpecialIds {
        SpecialIds { mask: self.mask, delete: self.delete, split: self.split }
    }
}

/// `eos_token_id` of `generation_config.json`: absent, a number or a list of numbers.
fn eos_ids(generation_config: Option<&str>) -> Result<Vec<u32>, SpecialTokensError> {
    let wrong = |message: String| SpecialTokensError::GenerationConfig(message);
    let Some(text) = generation_config else { return Ok(Vec::new()) };
    let config: Value = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
    let id = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| wrong("eos_token_id is neither a token id nor a list of them".to_owned()))
    };
    match &config["eos_token_id"] {
        Value::Null => Ok(Vec::new()),
        Value::Array(values) => values.iter().map(id).collect(),
        value => Ok(vec![id(value)?]),
    }
}
