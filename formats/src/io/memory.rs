//! Bytes that are part of the program, read like a file.

use minnow_common::FileOffset;

use super::ReadAt;
use super::error::IoError;
use super::file::check_range;

/// Static bytes.
#[derive(Debug)]
pub(super) struct Memory {
    label: String,
    bytes: &'static [u8],
}

impl Memory {
    pub(super) fn new(label: &str, bytes: &'static [u8]) -> Self {
        Self { label: label.to_owned(), bytes }
    }
}

impl ReadAt for Memory {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_exact_at(&self, offset: FileOffset, out: &mut [u8]) -> Result<(), IoError> {
        check_range(&self.label, self.len(), offset, out.len())?;
        // The range was checked against the length of a slice, so the offset fits.
        let start = offset.0 as usize;
        out.copy_from_slice(&self.bytes[start..start + out.len()]);
        Ok(())
    }

    fn as_slice(&self) -> Option<&[u8]> {
        Some(self.bytes)
    }

    fn label(&self) -> &str {
        &self.label
    }

    fn backend(&self) -> &'static str {
        "memory"
    }
}
