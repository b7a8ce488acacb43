//! UTF-8 from pieces of bytes: a character may be spread over tokens and blocks.

/// Decodes bytes as they come. What it gives out in all is [`String::from_utf8_lossy`] of all bytes together: one
/// U+FFFD for each maximal ill-formed part.
#[derive(Clone, Debug, Default)]
pub(super) struct Utf8Stream {
    /// The beginning of a character, at most three bytes.
    pending: Vec<u8>,
}

impl Utf8Stream {
    /// Appends the text that is certain after `bytes` to `out`.
    pub(super) fn push(&mut self, bytes: &[u8], out: &mut String) {
        self.pending.extend_from_slice(bytes);
        let mut rest = &self.pending[..];
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    self.pending.clear();
                    return;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    out.push_str(&String::from_utf8_lossy(valid));
                    match error.error_len() {
                        Some(len) => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            rest = &after[len..];
                        }
                        // The beginning of a character that may still be completed.
                        None => {
                            self.pending = after.to_vec();
                            return;
                        }
                    }
                }
            }
        }
    }

    /// Gives out what was held back: nothing follows.
    pub(super) fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use minnow_common::random::keyed;

    #[test]
    fn any_cut_gives_what_the_whole_gives() {
        let mut cases: Vec<Vec<u8>> =
            ["a\u{e9}\u{6771}\u{1F642}z", "", "\u{1F468}\u{200D}\u{1F469}"].map(Into::into).into();
        cases.push(vec![0xF0, 0x9F, 0x99, b'a', 0xFF, 0xE6, 0x9D, 0xC0, 0x80, 0xED, 0xA0, 0x80, 0xF0, 0x9F]);
        for seed in 0..300 {
            let byte =
                |i| [0xF0, 0x9F, 0x99, 0x82, b'a', 0xC3, 0xA9, 0xFF, 0xE2, 0x80][keyed(seed, &[i]) as usize % 10];
            cases.push((0..seed % 12).map(byte).collect());
        }
        for bytes in cases {
            let expected = String::from_utf8_lossy(&bytes);
            for first in 0..=bytes.len() {
                for second in first..=bytes.len() {
                    let mut stream = Utf8Stream::default();
                    let mut out = String::new();
                    for piece in [&bytes[..first], &bytes[first..second], &bytes[second..]] {
                        stream.push(piece, &mut out);
                        assert!(expected.starts_with(&out), "nothing is taken back");
                    }
                    stream.finish(&mut out);
                    assert_eq!(out, expected, "{bytes:x?} at {first} and {second}");
                }
            }
        }
    }
}
