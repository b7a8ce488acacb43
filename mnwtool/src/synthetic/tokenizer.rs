//! A tokenizer for synthetic checkpoints: byte-level BPE without merges, so text becomes one token a byte.
//!
//! Every id up to the vocabulary's end decodes to something: the 256 bytes, then made-up words that only a model can
//! produce, then the special tokens in the places that the chat format gives them.

use serde_json::{Map, Value, json};

/// The special tokens that have a meaning, in order from the first id after the base vocabulary.
const NAMED: [&str; 15] = [
    "<|startoftext|>",
    "<|endoftext|>",
    "[CLS]",
    "[gMASK]",
    "<|mask|>",
    "<tools>",
    "</tools>",
    "<think>",
    "</think>",
    "<|role_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
];
/// The two special tokens at the very end.
const LAST: [&str; 2] = ["<role>", "</role>"];
/// How many named tokens the upstream numbering of reserved ones leaves out.
const UNCOUNTED: usize = 4;

/// Where the special tokens lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpecialTokens {
    /// Ids below are bytes and words; at least 256.
    pub(super) base_tokens: u32,
    /// Special tokens from there on.
    pub(super) count: usize,
    /// Id that deletes a position.
    pub(super) delete: u32,
    /// Id that splits a position.
    pub(super) split: u32,
}

impl SpecialTokens {
    /// Id of a named special token.
    fn id(self, name: &str) -> u32 {
        let index = NAMED.iter().position(|named| *named == name).expect("a name of the table above");
        self.base_tokens + index as u32
    }

    /// Id that ends a text and pads.
    pub(super) fn eos(self) -> u32 {
        self.id("<|endoftext|>")
    }

    fn contents(self) -> impl Iterator<Item = (u32, String)> {
        let reserved = NAMED.len()..self.count - LAST.len();
        let named = NAMED.iter().map(|name| (*name).to_owned());
        let reserved = reserved.map(|index| format!("<|reserved_token_{}|>", index - UNCOUNTED));
        let last = LAST.iter().map(|name| (*name).to_owned());
        (self.base_tokens..).zip(named.chain(reserved).chain(last))
    }

    /// `tokenizer.json`.
    pub(super) fn tokenizer(self) -> String {
        let words = (0..self.base_tokens as usize - 256).map(word);
        let vocab: Map<String, Value> =
            byte_alphabet().map(String::from).chain(words).zip((0u32..).map(Value::from)).collect();
        let added: Vec<Value> = self
            .contents()
            .map(|(id, content)| {
                json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                       "normalized": false, "special": true})
            })
            .collect();
        let byte_level = |add_prefix_space: bool| json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": true});
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": null,
            "pre_tokenizer": byte_level(false),
            "post_processor": null,
            "decoder": byte_level(true),
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": vocab, "merges": [],
            },
        })
        .to_string()
    }

    /// `tokenizer_config.json`.
    pub(super) fn tokenizer_config(self, positions: usize) -> String {
        let config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|startoftext|>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "cls_token": "[CLS]",
            "mask_token": "<|mask|>",
            "add_bos_token": false,
            "add_eos_token": false,
            "clean_up_tokenization_spaces": false,
            "model_max_length": positions,
        });
        format!("{config:#}\n")
    }

    /// `generation_config.json`.
    pub(super) fn generation_config(self) -> String {
        let config = json!({
            "bos_token_id": self.id("<|startoftext|>"),
            "eos_token_id": [self.eos(), self.id("<|role_end|>")],
            "pad_token_id": self.eos(),
        });
        format!("{config:#}\n")
    }
}

/// The characters that stand for the bytes in byte-level BPE, in the usual order of their ids: printable Latin-1 stands
/// for itself, every other byte for a character from U+0100 on.
fn byte_alphabet() -> impl Iterator<Item = char> {
    let itself = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let others = (0..=u8::MAX).filter(move |byte| !itself(byte)).count() as u32;
    (0..=u8::MAX).filter(itself).map(char::from).chain((0..others).filter_map(|index| char::from_u32(0x100 + index)))
}

/// Made-up word number `index`, with a space before it: syllables of a consonant and a vowel, at least two.
fn word(mut index: usize) -> String {
    const CONSONANTS: &[u8] = b"bdfghjklmnprstvz";
    const VOWELS: &[u8] = b"aeiou";
    let mut word = "\u{120}".to_owned();
    let mut syllables = 0;
    while syllables < 2 || index > 0 {
        word.push(char::from(CONSONANTS[index % CONSONANTS.len()]));
        word.push(char::from(VOWELS[index / CONSONANTS.len() % VOWELS.len()]));
        index /= CONSONANTS.len() * VOWELS.len();
        syllables += 1;
    }
    word
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::Preset;
    use super::*;

    #[test]
    fn special_tokens_lie_where_the_chat_format_says() {
        let contents: Vec<(u32, String)> = Preset::Mini.special_tokens().contents().collect();
        let id = |name: &str| contents.iter().find(|(_, content)| content == name).unwrap().0;
        assert_eq!((id("<|startoftext|>"), id("<|mask|>"), id("<|role_end|>")), (156_891, 156_895, 156_900));
        assert_eq!((id("<|tool_call_end|>"), id("<role>"), id("</role>")), (156_905, 157_151, 157_152));
        assert_eq!((id("<|reserved_token_35|>"), id("<|reserved_token_36|>")), (156_930, 156_931));
        assert_eq!(Preset::Tiny.special_tokens().contents().last(), Some((511, "</role>".to_owned())));
    }

    #[test]
    fn words_are_distinct_and_no_bytes() {
        let words: HashSet<String> = (0..156_635).map(word).chain(byte_alphabet().map(String::from)).collect();
        assert_eq!(words.len(), 156_635 + 256);
    }

    #[test]
    fn the_tokenizer_loads_and_round_trips() {
        for preset in [Preset::Tiny, Preset::Mini] {
            let special = preset.special_tokens();
            let tokenizer: tokenizers::Tokenizer = special.tokenizer().parse().unwrap();
            assert_eq!(tokenizer.get_vocab_size(true), special.base_tokens as usize + special.count);
            let text = "<role>user</role>Grüße, 你好!\n<|role_end|>";
            let ids = tokenizer.encode(text, false).unwrap();
            assert_eq!(ids.get_ids()[0], tokenizer.token_to_id("<role>").unwrap());
            assert_eq!(tokenizer.decode(ids.get_ids(), false).unwrap(), text);
            for id in [0, 255, 256, special.base_tokens - 1, special.eos()] {
                assert!(!tokenizer.decode(&[id], false).unwrap().is_empty(), "{id}");
            }
        }
    }
}
