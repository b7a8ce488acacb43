//! A file as memory. Used only when it is named (`--io mmap`): see the SAFETY comment for what that accepts.

use memmap2::Mmap;
use minnow_common::FileOffset;

use super::ReadAt;
use super::error::IoError;
use super::file::RegularFile;

/// A mapped file.
#[derive(Debug)]
pub(super) struct Mapped {
    file: RegularFile,
    map: Mmap,
}

impl Mapped {
    /// Maps all of `file`, read-only.
    pub(super) fn new(file: RegularFile) -> Result<Self, IoError> {
        let map_error = |error| IoError::Map { path: file.label.clone(), bytes: file.bytes, error };
        // SAFETY: the map is read-only, and is unmapped only with `self`, which every slice of it borrows. What remains
        // is the file changing underneath, which no process can rule out. It is never a choice of ours: only the
        // operator's `--io mmap` leads here, and the documentation of `IoBackend::Mmap` states the condition. A file
        // cut short ends the process with SIGBUS; one rewritten in place shows other bytes, and those are only ever
        // read as plain integers, of which every pattern is valid.
        let map = unsafe { Mmap::map(&file.file) }.map_err(map_error)?;
        if map.len() as u64 != file.bytes {
            return Err(file.cut_short(map.len() as u64));
        }
        Ok(Self { file, map })
    }
}

impl ReadAt for Mapped {
    fn len(&self) -> u64 {
        self.file.bytes
    }

    fn read_exact_at(&self, offset: FileOffset, out: &mut [u8]) -> Result<(), IoError> {
        self.file.check_range(offset, out.len())?;
        // The range was checked against the length of the map, so the offset fits.
        let start = offset.0 as usize;
        out.copy_from_slice(&self.map[start..start + out.len()]);
        Ok(())
    }

    fn as_slice(&self) -> Option<&[u8]> {
        Some(&self.map)
    }

    fn label(&self) -> &str {
        &self.file.label
    }

    fn backend(&self) -> &'static str {
        "mmap"
    }

    fn modified(&self) -> Option<(i64, i64)> {
        Some(self.file.modified)
    }

    fn check_unchanged(&self) -> Result<(), IoError> {
        self.file.check_unchanged()
    }
}
