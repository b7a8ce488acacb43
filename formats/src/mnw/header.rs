//! The header of a `.mnw` file: its first 64 bytes, and nothing else.
//!
//! Bytes in, value out: this module opens no file. The table is section 1.1 of `docs/format-mnw.md`. Every integer is
//! little-endian.

use minnow_common::FileOffset;

use super::error::MnwError;
use crate::digest::Digest;

/// The first eight bytes: name and version.
pub const MAGIC: [u8; 8] = *b"MINNOW01";
/// Bytes of the header.
pub const HEADER_BYTES: usize = 64;
/// Every region and the manifest start at a multiple of this; the first region starts exactly here.
pub const ALIGNMENT: u64 = 4096;
/// The longest manifest.
pub const MANIFEST_BYTES_MAX: u64 = 128 << 20;

/// Where the manifest lies. It ends where the file ends, checked in [`Header::parse`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Start of the manifest: a multiple of [`ALIGNMENT`], and the end of the payload.
    pub manifest_offset: FileOffset,
    /// 1 to [`MANIFEST_BYTES_MAX`].
    pub manifest_bytes: u64,
    /// BLAKE3 of the manifest, as the header claims it.
    pub manifest_digest: Digest,
}

impl Header {
    /// Reads the header of a file of `file_bytes` bytes.
    pub fn parse(bytes: &[u8; HEADER_BYTES], file_bytes: u64) -> Result<Self, MnwError> {
        let word = |at: usize| {
            let mut raw = [0; 8];
            raw.copy_from_slice(&bytes[at..at + 8]);
            raw
        };
        if word(0) != MAGIC {
            return Err(MnwError::Magic { found: word(0) });
        }
        let [offset, length, declared] = [8, 16, 24].map(|at| u64::from_le_bytes(word(at)));
        if declared != file_bytes {
            return Err(MnwError::FileLength { declared, found: file_bytes });
        }
        let in_bounds = (1..=MANIFEST_BYTES_MAX).contains(&length)
            && offset >= ALIGNMENT
            && offset.is_multiple_of(ALIGNMENT)
            && offset.checked_add(length) == Some(file_bytes);
        if !in_bounds {
            return Err(MnwError::ManifestBounds { offset, bytes: length, file_bytes });
        }
        let mut digest = [0; 32];
        digest.copy_from_slice(&bytes[32..]);
        Ok(Self { manifest_offset: FileOffset(offset), manifest_bytes: length, manifest_digest: Digest(digest) })
    }

    /// The 64 bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[..8].copy_from_slice(&MAGIC);
        out[8..16].copy_from_slice(&self.manifest_offset.0.to_le_bytes());
        out[16..24].copy_from_slice(&self.manifest_bytes.to_le_bytes());
        out[24..32].copy_from_slice(&self.file_bytes().to_le_bytes());
        out[32..].copy_from_slice(&self.manifest_digest.0);
        out
    }

    /// Length of the whole file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.manifest_offset.0 + self.manifest_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worked_example_of_the_format_round_trips() {
        let header = Header {
            manifest_offset: FileOffset(0x1f000),
            manifest_bytes: 0x14f7,
            manifest_digest: Digest::of(b"manifest"),
        };
        let bytes = header.encode();
        assert_eq!(bytes[..16], *b"MINNOW01\x00\xf0\x01\x00\x00\x00\x00\x00");
        assert_eq!(bytes[16..32], [0xf7, 0x14, 0, 0, 0, 0, 0, 0, 0xf7, 0x04, 0x02, 0, 0, 0, 0, 0]);
        assert_eq!(Header::parse(&bytes, 0x204f7).unwrap(), header);
        assert!(matches!(Header::parse(&bytes, 0x204f6), Err(MnwError::FileLength { .. })));
    }
}
