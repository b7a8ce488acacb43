//! A regular file that was opened once: its descriptor, its length then, and its name for messages.

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use minnow_common::FileOffset;

use super::disk::Disk;
use super::error::IoError;

/// An open regular file.
#[derive(Debug)]
pub(super) struct RegularFile {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) file: File,
    pub(super) label: String,
    pub(super) bytes: u64,
    /// When it was last written, in seconds and nanoseconds.
    pub(super) modified: (i64, i64),
}

impl RegularFile {
    /// Opens `path`. Never blocks, not even on a FIFO without a writer.
    pub(super) fn open(disk: Arc<dyn Disk>, path: &Path) -> Result<Self, IoError> {
        let label = path.display().to_string();
        let open_error = |error| IoError::Open { path: label.clone(), error };
        let file = disk.open(path).map_err(open_error)?;
        let metadata = file.metadata().map_err(open_error)?;
        if !metadata.is_file() {
            let kind = metadata.file_type();
            let kind = match () {
                () if kind.is_dir() => "directory",
                () if kind.is_fifo() => "FIFO",
                () if kind.is_socket() => "socket",
                () => "device",
            };
            return Err(IoError::NotRegular { path: label, kind });
        }
        let modified = (metadata.mtime(), metadata.mtime_nsec());
        Ok(Self { disk, file, label, bytes: metadata.len(), modified })
    }

    /// Whether length and time of the last change are what they were.
    pub(super) fn check_unchanged(&self) -> Result<(), IoError> {
        let path = || self.label.clone();
        let now = self.file.metadata().map_err(|error| IoError::Open { path: path(), error })?;
        if now.len() < self.bytes {
            return Err(self.cut_short(now.len()));
        }
        if (now.len(), now.mtime(), now.mtime_nsec()) != (self.bytes, self.modified.0, self.modified.1) {
            return Err(IoError::Changed { path: path(), expected: self.bytes, found: now.len() });
        }
        Ok(())
    }

    /// Checks that `bytes` bytes at `offset` lay inside the file when it was opened.
    pub(super) fn check_range(&self, offset: FileOffset, bytes: usize) -> Result<(), IoError> {
        check_range(&self.label, self.bytes, offset, bytes)
    }

    /// One read at `position`, which must be before the end: at least one byte, perhaps fewer than asked for.
    pub(super) fn read_some(&self, position: u64, out: &mut [u8]) -> Result<usize, IoError> {
        loop {
            match self.disk.read_at(&self.file, out, position) {
                Ok(0) => return Err(self.cut_short(position)),
                Ok(count) => return Ok(count),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(IoError::Read {
                        path: self.label.clone(),
                        offset: FileOffset(position),
                        bytes: out.len() as u64,
                        error,
                    });
                }
            }
        }
    }

    /// The error for a file that ends at `position` or before.
    pub(super) fn cut_short(&self, position: u64) -> IoError {
        cut_short(&self.file, &self.label, self.bytes, position)
    }

    /// The type of file system the file lies on, by name where it is a usual one.
    pub(super) fn file_system(&self) -> String {
        file_system(&self.file)
    }
}

/// The type of file system that `file` lies on, by name where it is a usual one.
pub(super) fn file_system(file: &File) -> String {
    let Ok(info) = rustix::fs::fstatfs(file) else { return "an unknown file system".to_owned() };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "magic numbers have 32 bits")]
    let magic = info.f_type as u32;
    // linux/magic.h, and the manual page statfs(2).
    let name = match magic {
        0xEF53 => "ext4",
        0x5846_5342 => "xfs",
        0x9123_683E => "btrfs",
        0x0102_1994 => "tmpfs",
        0x8584_58F6 => "ramfs",
        0x794C_7630 => "overlayfs",
        0x7371_7368 => "squashfs",
        0x2FC1_2FC1 => "zfs",
        0x9FA0 => "proc",
        0xF2F5_2010 => "f2fs",
        0xCA45_1A4E => "bcachefs",
        0x6969 => "nfs",
        0x6573_5546 => "fuse",
        0x0102_1997 => "9p",
        0xFF53_4D42 | 0xFE53_4D42 => "cifs",
        0x4D44 => "vfat",
        0x2011_BAB0 => "exfat",
        0x5346_544E => "ntfs",
        0x0BD0_0BD0 => "lustre",
        0x00C3_6400 => "ceph",
        other => return format!("file system {other:#x}"),
    };
    name.to_owned()
}

/// The error for a file of `expected` bytes that ends at `position` or before.
pub(super) fn cut_short(file: &File, label: &str, expected: u64, position: u64) -> IoError {
    let found = file.metadata().map_or(position, |now| now.len().min(position));
    IoError::CutShort { path: label.to_owned(), expected, found }
}

/// Whether a read that came to `position` and no further has to be made again, because the file goes on there.
pub(super) fn goes_on(file: &File, position: u64) -> bool {
    file.metadata().is_ok_and(|now| now.len() > position)
}

/// Checks that `bytes` bytes at `offset` lie inside `file_bytes`.
pub(super) fn check_range(label: &str, file_bytes: u64, offset: FileOffset, bytes: usize) -> Result<(), IoError> {
    match offset.checked_add(bytes as u64) {
        Some(end) if end.0 <= file_bytes => Ok(()),
        _ => Err(IoError::OutsideFile { path: label.to_owned(), offset, bytes: bytes as u64, file_bytes }),
    }
}
