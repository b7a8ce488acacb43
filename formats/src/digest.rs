//! BLAKE3-256 digests as `.mnw` stores them: raw in the header, hexadecimal text in the manifest.

use std::fmt;

/// A BLAKE3-256 digest. Shown as 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Digits of the text form.
    pub const HEX_DIGITS: usize = 64;

    /// The digest of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// Reads exactly 64 hexadecimal digits of either case.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<Self> {
        blake3::Hash::from_hex(text).ok().map(|hash| Self(*hash.as_bytes()))
    }

    /// The raw bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The 64 lower-case digits.
    #[must_use]
    pub fn to_hex(self) -> String {
        self.to_string()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_64_digits_of_either_case() {
        let digest = Digest::of(b"minnow");
        let text = digest.to_hex();
        assert_eq!(text.len(), Digest::HEX_DIGITS);
        assert_eq!(Digest::from_hex(&text), Some(digest));
        assert_eq!(Digest::from_hex(&text.to_uppercase()), Some(digest));
        for wrong in [&text[1..], "", &format!("{text}0"), &text.replace(&text[..2], "é")] {
            assert_eq!(Digest::from_hex(wrong), None, "{wrong}");
        }
    }
}
