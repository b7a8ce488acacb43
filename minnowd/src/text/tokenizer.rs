//! `tokenizer.json` as a byte-level tokenizer: text to ids, and ids to exactly the bytes they stand for.
//!
//! A tokenizer has two kinds of tokens. The model's own come from splitting text; added tokens (markers such as
//! `<|role_end|>`) are found in the text as a whole first. [`Tokenizer::encode`] does both, [`Tokenizer::encode_plain`]
//! never finds an added token, and [`Tokenizer::encode_pieces`] finds those that a template wrote and not those that a
//! client wrote. Nothing is ever added at either end.

use std::collections::BTreeMap;

use serde::Deserialize;
use thiserror::Error;
use tokenizers::{
    DecoderWrapper, Model, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, Tokenizer as Inner,
};

use super::template::Rendered;

/// A checkpoint's tokenizer.
pub struct Tokenizer {
    inner: Inner,
    /// Bytes of all ids, one after another.
    bytes: Vec<u8>,
    /// Where the bytes of each id end, and what kind of token it is; the index is the id.
    entries: Vec<(usize, Kind)>,
    added: Vec<AddedText>,
}

/// An added token as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AddedText {
    /// How it is written.
    pub(super) text: String,
    /// Whether it is a control token, hidden from text.
    pub(super) is_special: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Unused,
    Text,
    Special,
}

/// What an id stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token<'a> {
    /// Bytes of text; not always whole characters.
    Text(&'a [u8]),
    /// A control token and how templates write it.
    Special(&'a [u8]),
}

/// Why a `tokenizer.json` cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TokenizerError {
    /// Not what the `tokenizers` library reads.
    #[error("tokenizer.json: {0}")]
    Json(String),
    /// Its tokens are not bytes.
    #[error("tokenizer.json: the decoder is not ByteLevel, so ids do not stand for bytes")]
    NotByteLevel,
    /// An id beyond any vocabulary.
    #[error("tokenizer.json: token id {0} is too large")]
    IdRange(u32),
    /// The library numbers an added token by its place, and the file says otherwise.
    #[error("tokenizer.json: added token {text} is listed with id {listed}, but its place gives {found}")]
    AddedId {
        /// The token.
        text: String,
        /// What the file says.
        listed: u32,
        /// What the library made of it.
        found: u32,
    },
}

/// Why a text cannot be encoded.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the text cannot be encoded: {0}")]
pub struct EncodeError(String);

/// More ids than any vocabulary has; bounds the table of their bytes.
const ID_MAX: u32 = 1 << 24;

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} ids, {} added tokens)", self.entries.len(), self.added.len())
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json`. Truncation and padding it may ask for are ignored.
    pub fn from_json(json: &str) -> Result<Self, TokenizerError> {
        let inner: Inner = json.parse().map_err(|error: tokenizers::Error| TokenizerError::Json(error.to_string()))?;
        if !inner.get_decoder().is_some_and(is_byte_level) {
            return Err(TokenizerError::NotByteLevel);
        }
        check_added_ids(json, &inner)?;
        let mut tokens: Vec<(u32, Vec<u8>, Kind)> =
            inner.get_vocab(false).into_iter().map(|(text, id)| (id, token_bytes(&text), Kind::Text)).collect();
        let mut added = BTreeMap::new();
        for (id, token) in inner.get_added_tokens_decoder() {
            let kind = if token.special { Kind::Special } else { Kind::Text };
            tokens.push((id, token.content.clone().into_bytes(), kind));
            added.insert(id, AddedText { text: token.content, is_special: token.special });
        }
        // Added tokens come last among equal ids, since the sort is stable, and so win below.
        tokens.sort_by_key(|(id, ..)| *id);
        let mut bytes = Vec::new();
        let mut entries: Vec<(usize, Kind)> = Vec::new();
        for (index, (id, token, kind)) in tokens.iter().enumerate() {
            if tokens.get(index + 1).is_some_and(|next| next.0 == *id) {
                continue;
            }
            if *id > ID_MAX {
                return Err(TokenizerError::IdRange(*id));
            }
            entries.resize(*id as usize, (bytes.len(), Kind::Unused));
            bytes.extend_from_slice(token);
            entries.push((bytes.len(), *kind));
        }
        let added = added.into_values().filter(|token| !token.text.is_empty()).collect();
        Ok(Self { inner, bytes, entries, added })
    }

    /// Encodes text as it is: added tokens in it become their ids.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, EncodeError> {
        self.tokenize(self.inner.get_added_vocabulary().extract_and_normalize(self.inner.get_normalizer(), text))
    }

    /// Encodes text in which nothing is an added token.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, EncodeError> {
        // An added vocabulary without tokens finds none and still normalizes.
        let nothing = tokenizers::AddedVocabulary::new();
        let ids = self.tokenize(nothing.extract_and_normalize(self.inner.get_normalizer(), text))?;
        let is_control = |id: &u32| matches!(self.token(*id), Some(Token::Special(_)));
        if !ids.iter().any(is_control) || text.chars().nth(1).is_none() {
            return Ok(ids);
        }
        // A vocabulary may hold a marker's text as a word of its own. Its characters one by one cannot form it.
        let characters = text.char_indices().map(|(at, c)| self.encode_plain(&text[at..at + c.len_utf8()]));
        Ok(characters.collect::<Result<Vec<_>, _>>()?.concat())
    }

    /// Encodes a rendered conversation: added tokens that the template wrote become their ids, what looks like one in
    /// the text of a client is encoded as text. Without such text this is [`encode`](Self::encode) of the whole.
    pub fn encode_pieces(&self, rendered: &Rendered) -> Result<Vec<u32>, EncodeError> {
        let Some(mark) = rendered.mark() else { return self.encode(rendered.marked()) };
        let marked = rendered.marked();
        let split = self.inner.get_added_vocabulary().extract_and_normalize(self.inner.get_normalizer(), marked);
        let mut ids = Vec::new();
        for (_, (start, end), tokens) in split.get_splits(OffsetReferential::Original, OffsetType::Byte) {
            match tokens {
                Some(tokens) => ids.extend(tokens.iter().map(|token| token.id)),
                None => {
                    ids.extend(self.encode_plain(&marked[start..end].replace(mark, ""))?);
                }
            }
        }
        Ok(ids)
    }

    /// What an id stands for; `None` outside the vocabulary.
    #[must_use]
    pub fn token(&self, id: u32) -> Option<Token<'_>> {
        let index = id as usize;
        let (end, kind) = *self.entries.get(index)?;
        let start = if index == 0 { 0 } else { self.entries[index - 1].0 };
        match kind {
            Kind::Unused => None,
            Kind::Text => Some(Token::Text(&self.bytes[start..end])),
            Kind::Special => Some(Token::Special(&self.bytes[start..end])),
        }
    }

    /// The id of a token by its text, as `tokenizer.json` writes it.
    #[must_use]
    pub fn id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// One more than the largest id. Models may have further rows in their vocabulary, which stand for nothing.
    #[must_use]
    pub fn id_count(&self) -> usize {
        self.entries.len()
    }

    /// The text of `ids`, control tokens left out. Bytes that are no UTF-8 become U+FFFD.
    #[must_use]
    pub fn decode(&self, ids: &[u32]) -> String {
        self.text_of(ids, |token| matches!(token, Token::Text(_)))
    }

    /// The text of `ids`, control tokens as templates write them. Bytes that are no UTF-8 become U+FFFD.
    #[must_use]
    pub fn decode_with_specials(&self, ids: &[u32]) -> String {
        self.text_of(ids, |_| true)
    }

    /// The added tokens, by ascending id.
    pub(super) fn added(&self) -> &[AddedText] {
        &self.added
    }

    fn text_of(&self, ids: &[u32], keeps: impl Fn(&Token<'_>) -> bool) -> String {
        let tokens = ids.iter().filter_map(|&id| self.token(id)).filter(keeps);
        let bytes: Vec<u8> = tokens.flat_map(|token| token.bytes().to_vec()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Ids of a text whose added tokens were taken out already.
    fn tokenize(&self, mut text: PreTokenizedString) -> Result<Vec<u32>, EncodeError> {
        let refused = |error: tokenizers::Error| EncodeError(error.to_string());
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut text).map_err(refused)?;
        }
        text.tokenize(|word| self.inner.get_model().tokenize(word.get())).map_err(refused)?;
        let splits = text.get_splits(OffsetReferential::Original, OffsetType::None);
        let tokens = splits.into_iter().flat_map(|(_, _, tokens)| tokens.iter().flatten());
        Ok(tokens.map(|token| token.id).collect())
    }
}

impl<'a> Token<'a> {
    /// The bytes it stands for.
    #[must_use]
    pub fn bytes(self) -> &'a [u8] {
        match self {
            Self::Text(bytes) | Self::Special(bytes) => bytes,
        }
    }
}

/// Every added token has the id that the file lists: models are trained on those.
fn check_added_ids(json: &str, inner: &Inner) -> Result<(), TokenizerError> {
    #[derive(Deserialize)]
    struct File {
        #[serde(default)]
        added_tokens: Vec<Listed>,
    }
    #[derive(Deserialize)]
    struct Listed {
        id: u32,
        content: String,
    }
    let file: File = serde_json::from_str(json).map_err(|error| TokenizerError::Json(error.to_string()))?;
    for Listed { id: listed, content: text } in file.added_tokens {
        if let Some(found) = inner.token_to_id(&text).filter(|&found| found != listed) {
            return Err(TokenizerError::AddedId { text, listed, found });
        }
    }
    Ok(())
}

fn is_byte_level(decoder: &DecoderWrapper) -> bool {
    match decoder {
        DecoderWrapper::ByteLevel(_) => true,
        DecoderWrapper::Sequence(sequence) => sequence.get_decoders().iter().any(is_byte_level),
        _ => false,
    }
}

/// The bytes of a token of the model: byte-level vocabularies write each byte as one printable character. A token with
/// any other character stands for its own UTF-8.
fn token_bytes(text: &str) -> Vec<u8> {
    text.chars().map(byte_of).collect::<Option<Vec<u8>>>().unwrap_or_else(|| text.as_bytes().to_vec())
}

/// Whether GPT-2's table writes a byte as the Latin-1 character of the same number.
const fn is_itself(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The other bytes, in the order of the characters from U+0100 on that stand for them.
const SHIFTED: [u8; 68] = {
    let mut shifted = [0; 68];
    let (mut byte, mut count) = (0, 0);
    while byte <= u8::MAX as usize {
        if !is_itself(byte as u8) {
            shifted[count] = byte as u8;
            count += 1;
        }
        byte += 1;
    }
    shifted
};

fn byte_of(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ 0..=0xFF => u8::try_from(code).ok().filter(|&byte| is_itself(byte)),
        code => SHIFTED.get((code - 0x100) as usize).copied(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Tokenizer {
        Tokenizer::from_json(&json()).unwrap()
    }

    /// A byte-level vocabulary of the 256 bytes, two added tokens, and the word `ab`, which is a control token too.
    fn json() -> String {
        let character = |byte: u8| match SHIFTED.iter().position(|&shifted| shifted == byte) {
            Some(index) => char::from_u32(0x100 + index as u32).unwrap(),
            None => char::from(byte),
        };
        let mut vocab: serde_json::Map<String, serde_json::Value> =
            (0..=255u8).map(|byte| (character(byte).to_string(), byte.into())).collect();
        vocab.insert("ab".to_owned(), 256.into());
        let added = |id: u32, content: &str, special: bool| {
            serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special})
        };
        let file = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
            "added_tokens": [added(257, "<|end|>", true), added(258, "<think>", false), added(256, "ab", true)],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
                "merges": [["a", "b"]]},
        });
        file.to_string()
    }

    #[test]
    fn every_byte_has_a_token_that_stands_for_it() {
        let tokenizer = tokenizer();
        for byte in 0..=255u8 {
            assert_eq!(tokenizer.token(u32::from(byte)), Some(Token::Text(&[byte])));
        }
        assert_eq!(tokenizer.token(257), Some(Token::Special(b"<|end|>")));
        assert_eq!(tokenizer.token(258), Some(Token::Text(b"<think>")));
        assert_eq!((tokenizer.token(259), tokenizer.id_count()), (None, 259));
        assert_eq!(tokenizer.decode(&[0xF0, 0x9F, 257, 0x99, 0x82, 5000]), "\u{1F642}");
        assert_eq!(tokenizer.decode_with_specials(&[104, 0xF0, 257]), "h\u{FFFD}<|end|>");
    }

    #[test]
    fn plain_text_never_becomes_an_added_token() {
        let tokenizer = tokenizer();
        assert_eq!(tokenizer.encode("a<|end|><think>").unwrap(), [97, 257, 258]);
        assert_eq!(tokenizer.encode_plain("<|end|>").unwrap(), b"<|end|>".map(u32::from));
        // Here the model's own merges lead to a control token.
        assert_eq!(tokenizer.encode_plain("xab").unwrap(), b"xab".map(u32::from));
        assert_eq!(tokenizer.encode_plain("").unwrap(), [0u32; 0]);
    }

    #[test]
    fn a_tokenizer_whose_ids_would_be_misread_is_refused() {
        assert!(matches!(Tokenizer::from_json("{}"), Err(TokenizerError::Json(_))));
        let words = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
            "pre_tokenizer":null,"post_processor":null,"decoder":null,
            "model":{"type":"WordLevel","vocab":{"[UNK]":0},"unk_token":"[UNK]"}}"#;
        assert_eq!(Tokenizer::from_json(words).unwrap_err(), TokenizerError::NotByteLevel);
        let moved = json().replace("\"id\":258", "\"id\":300");
        let refused = TokenizerError::AddedId { text: "<think>".to_owned(), listed: 300, found: 258 };
        assert_eq!(Tokenizer::from_json(&moved).unwrap_err(), refused);
    }
}
