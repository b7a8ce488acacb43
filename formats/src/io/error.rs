//! What can go wrong with a file, with the numbers and the name in the message.

use std::fmt;
use std::io;

use minnow_common::FileOffset;
use thiserror::Error;

use crate::hub::HubError;

/// Why a file could not be opened or read. Every message starts with the path, where there is one.
#[derive(Debug, Error)]
pub enum IoError {
    /// The file cannot be opened.
    #[error("{path}: cannot be opened: {}", OsCause(.error))]
    Open {
        /// The file.
        path: String,
        /// The system's answer.
        error: io::Error,
    },
    /// A directory, FIFO, socket or device.
    #[error("{path}: is a {kind}, not a regular file")]
    NotRegular {
        /// What was to be opened.
        path: String,
        /// What it is.
        kind: &'static str,
    },
    /// `direct` was named, and this file cannot be read that way.
    #[error("{path}: direct I/O is refused by {file_system}: {}", OsCause(.error))]
    DirectRefused {
        /// The file.
        path: String,
        /// The type of file system it lies on.
        file_system: String,
        /// The system's answer.
        error: io::Error,
    },
    /// `mmap` was named, and this file cannot be mapped.
    #[error("{path}: {bytes} bytes cannot be mapped: {}", OsCause(.error))]
    Map {
        /// The file.
        path: String,
        /// Its length.
        bytes: u64,
        /// The system's answer.
        error: io::Error,
    },
    /// `uring` was named, and the kernel or this file does not take part.
    #[error("{path}: io_uring cannot be used on {file_system}: {}", OsCause(.error))]
    UringRefused {
        /// The file.
        path: String,
        /// The type of file system it lies on.
        file_system: String,
        /// The system's answer.
        error: io::Error,
    },
    /// `uring` was named for a queue, and the kernel has no ring for us.
    #[error("io_uring cannot be set up: {}", OsCause(.error))]
    NoRing {
        /// The system's answer.
        error: io::Error,
    },
    /// The file was written to after it was opened.
    #[error("{path}: was changed while it was read: it had {expected} bytes and has {found} now, or other contents")]
    Changed {
        /// The file.
        path: String,
        /// Its length when opened.
        expected: u64,
        /// Its length now.
        found: u64,
    },
    /// A read would pass the end of the file.
    #[error("{path}: {bytes} bytes at {offset} are outside the file, which has {file_bytes} bytes")]
    OutsideFile {
        /// The file.
        path: String,
        /// Where the read starts.
        offset: FileOffset,
        /// How much was to be read.
        bytes: u64,
        /// The file's length.
        file_bytes: u64,
    },
    /// The file became shorter after it was opened.
    #[error("{path}: had {expected} bytes when it was opened and ends at byte {found} now")]
    CutShort {
        /// The file.
        path: String,
        /// Its length when opened.
        expected: u64,
        /// Where it ends now.
        found: u64,
    },
    /// The system failed to read.
    #[error("{path}: reading {bytes} bytes at {offset} failed: {}", OsCause(.error))]
    Read {
        /// The file.
        path: String,
        /// Where the read starts.
        offset: FileOffset,
        /// How much was to be read.
        bytes: u64,
        /// The system's answer.
        error: io::Error,
    },
    /// A file at a hub could not be read.
    #[error("{path}: {bytes} bytes at {offset} cannot be fetched: {error}")]
    Hub {
        /// The file.
        path: String,
        /// Where the read starts.
        offset: FileOffset,
        /// How much was to be read.
        bytes: u64,
        /// What the hub, or the way to it, says.
        error: Box<HubError>,
    },
    /// A buffer in a [`super::ReadRequest`] is too small for its read.
    #[error("{path}: a buffer of {capacity} bytes cannot take the {bytes} bytes at {offset}")]
    BufferTooSmall {
        /// The file.
        path: String,
        /// Where the read starts.
        offset: FileOffset,
        /// How much was to be read.
        bytes: u64,
        /// What the buffer holds.
        capacity: u64,
    },
}

/// Shows an error of the system with its symbolic name where it has a usual one: `ENOSPC, no space left on device`.
pub struct OsCause<'a>(pub &'a io::Error);

impl fmt::Display for OsCause<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use rustix::io::Errno;
        let known = self.0.raw_os_error().and_then(|code| {
            let names: [(Errno, &str); 17] = [
                (Errno::NOSPC, "ENOSPC, no space left on device"),
                (Errno::DQUOT, "EDQUOT, disk quota exceeded"),
                (Errno::FBIG, "EFBIG, file too large"),
                (Errno::ROFS, "EROFS, read-only file system"),
                (Errno::ACCESS, "EACCES, permission denied"),
                (Errno::PERM, "EPERM, operation not permitted"),
                (Errno::NOENT, "ENOENT, no such file or directory"),
                (Errno::NOTDIR, "ENOTDIR, not a directory"),
                (Errno::EXIST, "EEXIST, file exists"),
                (Errno::INVAL, "EINVAL, invalid argument"),
                (Errno::NOSYS, "ENOSYS, function not implemented"),
                (Errno::OPNOTSUPP, "EOPNOTSUPP, operation not supported"),
                (Errno::IO, "EIO, input/output error"),
                (Errno::MFILE, "EMFILE, too many open files"),
                (Errno::NOMEM, "ENOMEM, out of memory or of the memory that may be locked"),
                (Errno::AGAIN, "EAGAIN, resource temporarily unavailable"),
                (Errno::STALE, "ESTALE, stale file handle"),
            ];
            names.into_iter().find(|(errno, _)| errno.raw_os_error() == code).map(|(_, name)| name)
        });
        match known {
            Some(name) => f.write_str(name),
            None => fmt::Display::fmt(self.0, f),
        }
    }
}
