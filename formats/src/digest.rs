//! BLAKE3-256 digests as `.mnw` stores them: raw in the header, hexadecimal text in the manifest. And the SHA-256 of a
//! whole file, by which Hugging Face knows it.

use std::fmt;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use crate::io::read_ahead::ReadAhead;
use crate::io::{IoError, ReadAt};

/// From this length on it pays to hash in several threads.
const PARALLEL_BYTES_MIN: usize = 1 << 20;

/// Adds `bytes` to a hash, on all cores where there are many: for the one place that must hash everything in order.
pub(crate) fn update(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    if bytes.len() >= PARALLEL_BYTES_MIN {
        hasher.update_rayon(bytes);
    } else {
        hasher.update(bytes);
    }
}

/// The SHA-256 of all of `file`, 64 lower-case digits. `progress` is told of every piece that was read.
pub fn sha256(file: &Arc<dyn ReadAt>, progress: &dyn Fn(u64)) -> Result<String, IoError> {
    const PIECE_BYTES: usize = 4 << 20;
    const DEPTH: usize = 3;
    let mut hasher = Sha256::new();
    if !file.is_empty() {
        let mut reader = ReadAhead::new(file, std::iter::once(((), 0..file.len())), DEPTH, PIECE_BYTES);
        while let Some(read) = reader.next(|piece| {
            piece.bytes.map(|bytes| {
                hasher.update(bytes);
                progress(bytes.len() as u64);
            })
        }) {
            read?;
        }
    }
    Ok(hex(&hasher.finalize()))
}

/// The SHA-256 of bytes in memory, 64 lower-case digits.
#[must_use]
pub fn sha256_of(bytes: &[u8]) -> String {
    hex(&sha256_bytes(bytes))
}

/// The SHA-256 of bytes in memory.
#[must_use]
pub fn sha256_bytes(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

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
    fn the_sha256_of_a_file_is_that_of_its_bytes() {
        // FIPS 180-4, the example "abc", and the empty message.
        let of = |bytes: &'static [u8]| sha256(&crate::io::from_static("memory", bytes), &|_| ()).unwrap();
        assert_eq!(of(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(of(b""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }

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
