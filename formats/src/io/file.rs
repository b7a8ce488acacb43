//! A regular file that was opened once: its descriptor, its length then, and its name for messages.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use minnow_common::FileOffset;
use rustix::fs::OFlags;

use super::error::IoError;

/// An open regular file.
#[derive(Debug)]
pub(super) struct RegularFile {
    pub(super) file: File,
    pub(super) label: String,
    pub(super) bytes: u64,
}

impl RegularFile {
    /// Opens `path`. Never blocks, not even on a FIFO without a writer.
    pub(super) fn open(path: &Path) -> Result<Self, IoError> {
        let label = path.display().to_string();
        let open_error = |error| IoError::Open { path: label.clone(), error };
        // Opening without O_NONBLOCK waits for the other end of a FIFO; on a regular file the flag has no effect.
        let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
        let file =
            OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path).map_err(open_error)?;
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
        Ok(Self { file, label, bytes: metadata.len() })
    }

    /// Checks that `bytes` bytes at `offset` lay inside the file when it was opened.
    pub(super) fn check_range(&self, offset: FileOffset, bytes: usize) -> Result<(), IoError> {
        check_range(&self.label, self.bytes, offset, bytes)
    }

    /// One read at `position`, which must be before the end: at least one byte, perhaps fewer than asked for.
    pub(super) fn read_some(&self, position: u64, out: &mut [u8]) -> Result<usize, IoError> {
        loop {
            match self.file.read_at(out, position) {
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

    /// The error for a file that now ends at `found`.
    pub(super) fn cut_short(&self, found: u64) -> IoError {
        IoError::CutShort { path: self.label.clone(), expected: self.bytes, found }
    }

    /// The type of file system the file lies on, by name where it is a usual one.
    pub(super) fn file_system(&self) -> String {
        let Ok(info) = rustix::fs::fstatfs(&self.file) else { return "an unknown file system".to_owned() };
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
}

/// Checks that `bytes` bytes at `offset` lie inside `file_bytes`.
pub(super) fn check_range(label: &str, file_bytes: u64, offset: FileOffset, bytes: usize) -> Result<(), IoError> {
    match offset.checked_add(bytes as u64) {
        Some(end) if end.0 <= file_bytes => Ok(()),
        _ => Err(IoError::OutsideFile { path: label.to_owned(), offset, bytes: bytes as u64, file_bytes }),
    }
}
