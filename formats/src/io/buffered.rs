//! `pread` through the page cache: works everywhere.

use minnow_common::FileOffset;

use super::ReadAt;
use super::error::IoError;
use super::file::RegularFile;

/// A file read through the page cache.
#[derive(Debug)]
pub(super) struct Buffered {
    file: RegularFile,
    fallback: Option<String>,
}

impl Buffered {
    /// `fallback` says why another backend is not used.
    pub(super) fn new(file: RegularFile, fallback: Option<String>) -> Self {
        Self { file, fallback }
    }
}

impl ReadAt for Buffered {
    fn len(&self) -> u64 {
        self.file.bytes
    }

    fn read_exact_at(&self, offset: FileOffset, out: &mut [u8]) -> Result<(), IoError> {
        self.file.check_range(offset, out.len())?;
        let mut filled = 0;
        while filled < out.len() {
            filled += self.file.read_some(offset.0 + filled as u64, &mut out[filled..])?;
        }
        Ok(())
    }

    fn label(&self) -> &str {
        &self.file.label
    }

    fn backend(&self) -> &'static str {
        "buffered"
    }

    fn fallback(&self) -> Option<&str> {
        self.fallback.as_deref()
    }

    fn modified(&self) -> Option<(i64, i64)> {
        Some(self.file.modified)
    }

    fn check_unchanged(&self) -> Result<(), IoError> {
        self.file.check_unchanged()
    }
}
