//! The only file access of this project: random reads behind [`ReadAt`], whatever the backend.
//!
//! | backend | how | when |
//! |---|---|---|
//! | `uring` | `O_DIRECT`, many reads in flight through a [`ReadQueue`] | `auto` tries it first |
//! | `direct` | `O_DIRECT`, past the page cache, through aligned memory | `auto` falls back to it without `io_uring` |
//! | `buffered` | `pread` through the page cache | `auto` falls back to it, and says why ([`ReadAt::fallback`]) |
//! | `mmap` | the file as memory | only when named: a file cut short under the map kills the process |
//!
//! A single [`ReadAt::read_exact_at`] of a `uring` file is a `pread` on its direct descriptor: a ring pays when reads
//! overlap, and that needs a queue. Everything here asks the system through a [`Disk`], which tests replace.
//!
//! Only regular files are opened; a FIFO reports length 0 and would block. Files are read through the one descriptor
//! they were checked on. A backend that is named is used or the call fails; only `auto` falls back.

mod aligned;
mod buffered;
mod direct;
pub mod disk;
mod error;
mod file;
mod memory;
mod mmap;
pub(crate) mod output;
pub mod queue;
pub(crate) mod read_ahead;
mod region;
mod uring;

use std::fmt;
use std::fs::File;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use minnow_common::FileOffset;
use thiserror::Error;

pub use aligned::AlignedBuffer;
pub use disk::{Disk, SystemDisk, system_disk};
pub use error::{IoError, OsCause};
pub use queue::{ReadCompletion, ReadQueue, ReadRequest, SyncQueue, ThreadQueue};
pub use region::{HugePages, Region, RegionMut};

/// Random access to one file, or to memory. Offsets count from the start; reads may run in several threads at once.
pub trait ReadAt: Send + Sync + fmt::Debug {
    /// Bytes of the file when it was opened.
    fn len(&self) -> u64;

    /// Whether the file had no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills all of `out` with the bytes from `offset` on, or fails. Any offset and length will do; `direct` reads
    /// straight into `out` where offset and memory are aligned.
    fn read_exact_at(&self, offset: FileOffset, out: &mut [u8]) -> Result<(), IoError>;

    /// The whole file, where it is mapped or static memory.
    fn as_slice(&self) -> Option<&[u8]> {
        None
    }

    /// The path, for messages.
    fn label(&self) -> &str;

    /// The backend in use: `uring`, `direct`, `buffered`, `mmap` or `memory`.
    fn backend(&self) -> &'static str;

    /// If `auto` could not use the backend it tried first: path, file system and cause, as one line to log once.
    fn fallback(&self) -> Option<&str> {
        None
    }

    /// When the file was last written before it was opened, in seconds and nanoseconds; `None` for memory.
    fn modified(&self) -> Option<(i64, i64)> {
        None
    }

    /// Checks that length and time of the last change are still those from when the file was opened.
    fn check_unchanged(&self) -> Result<(), IoError> {
        Ok(())
    }

    /// What a ring needs to read the file; `None` if it is to be read by [`ReadAt::read_exact_at`] only.
    fn ring_file(&self) -> Option<RingFile<'_>> {
        None
    }
}

/// An open file that `io_uring` may read directly.
#[derive(Clone, Copy, Debug)]
pub struct RingFile<'a> {
    file: &'a File,
    /// What offsets and lengths must be multiples of: a power of two, at most [`AlignedBuffer::ALIGNMENT`].
    alignment: usize,
    /// Sees what becomes of each read.
    disk: &'a Arc<dyn Disk>,
}

impl RingFile<'_> {
    /// The disk that the file was opened on.
    #[must_use]
    pub fn disk(&self) -> &Arc<dyn Disk> {
        self.disk
    }
}

/// How files are read; the value of `--io`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum IoBackend {
    /// `io_uring`, else direct, else buffered: the first that kernel and file system allow.
    #[default]
    Auto,
    /// `O_DIRECT` with many reads in flight through `io_uring`.
    Uring,
    /// `O_DIRECT`.
    Direct,
    /// Through the page cache.
    Buffered,
    /// Memory-mapped. The file must not be cut short or rewritten while it is in use.
    Mmap,
}

/// Opens a regular file for reading.
///
/// # Errors
/// If there is no such file, it is not regular, or a backend was named that cannot be used for it.
pub fn open(path: &Path, backend: IoBackend) -> Result<Arc<dyn ReadAt>, IoError> {
    open_on(&system_disk(), path, backend)
}

/// [`open`], asking `disk`.
pub fn open_on(disk: &Arc<dyn Disk>, path: &Path, backend: IoBackend) -> Result<Arc<dyn ReadAt>, IoError> {
    let file = file::RegularFile::open(Arc::clone(disk), path)?;
    let direct = match backend {
        IoBackend::Buffered => return Ok(Arc::new(buffered::Buffered::new(file, None))),
        IoBackend::Mmap => return Ok(Arc::new(mmap::Mapped::new(file)?)),
        IoBackend::Auto | IoBackend::Uring | IoBackend::Direct => direct::Direct::new(file),
    };
    let mut direct = match (direct, backend) {
        (Ok(direct), _) => direct,
        (Err(refusal), IoBackend::Auto) if refusal.is_lack_of_support() => {
            let note = refusal.note();
            return Ok(Arc::new(buffered::Buffered::new(refusal.into_file(), Some(note))));
        }
        (Err(refusal), IoBackend::Uring) => return Err(refusal.into_uring_error()),
        (Err(refusal), _) => return Err(refusal.into_error()),
    };
    if matches!(backend, IoBackend::Auto | IoBackend::Uring) {
        // A ring of one entry, dropped at once: the queue that reads the file comes later.
        match uring::UringQueue::new(disk, 1, 0) {
            Ok(_) => direct.backend = "uring",
            Err(error) if backend == IoBackend::Auto && direct::is_lack_of_support(&error) => {
                direct.fallback = Some(format!(
                    "{}: io_uring is refused ({}), reading directly from {} without it",
                    direct.label(),
                    OsCause(&error),
                    direct.file.file_system()
                ));
            }
            Err(error) => {
                let (path, file_system) = (direct.label().to_owned(), direct.file.file_system());
                return Err(IoError::UringRefused { path, file_system, error });
            }
        }
    }
    Ok(Arc::new(direct))
}

/// A queue for up to `capacity` reads of up to `read_bytes_max` bytes each: a ring for `auto` and `uring`, else threads.
/// It reads files of every backend; only those that say `uring` are read through the ring. The second value says why
/// `auto` did not get one.
///
/// # Errors
/// If `uring` is named and the kernel refuses.
pub fn read_queue(
    backend: IoBackend,
    capacity: usize,
    read_bytes_max: usize,
) -> Result<(Box<dyn ReadQueue>, Option<String>), IoError> {
    read_queue_on(&system_disk(), backend, capacity, read_bytes_max)
}

/// [`read_queue`], asking `disk`.
pub fn read_queue_on(
    disk: &Arc<dyn Disk>,
    backend: IoBackend,
    capacity: usize,
    read_bytes_max: usize,
) -> Result<(Box<dyn ReadQueue>, Option<String>), IoError> {
    let mut note = None;
    if matches!(backend, IoBackend::Auto | IoBackend::Uring) {
        match uring::UringQueue::new(disk, capacity, ReadRequest::buffer_bytes(read_bytes_max)) {
            Ok(queue) => return Ok((Box::new(queue), None)),
            Err(error) if backend == IoBackend::Auto && direct::is_lack_of_support(&error) => {
                note = Some(format!("io_uring is refused ({}), reading in threads", OsCause(&error)));
            }
            Err(error) => return Err(IoError::NoRing { error }),
        }
    }
    Ok(match ThreadQueue::new(capacity) {
        Ok(queue) => (Box::new(queue), note),
        // No threads to be had: the reads are made one by one.
        Err(_) => (Box::new(SyncQueue::new(capacity)), note),
    })
}

/// Bytes that are part of the program, as a file called `label`.
#[must_use]
pub fn from_static(label: &str, bytes: &'static [u8]) -> Arc<dyn ReadAt> {
    Arc::new(memory::Memory::new(label, bytes))
}

impl IoBackend {
    /// Every backend, in the order of the command line's help.
    pub const ALL: [Self; 5] = [Self::Auto, Self::Uring, Self::Direct, Self::Buffered, Self::Mmap];

    /// The value on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Uring => "uring",
            Self::Direct => "direct",
            Self::Buffered => "buffered",
            Self::Mmap => "mmap",
        }
    }
}

impl fmt::Display for IoBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A word that names no backend.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("unknown I/O backend {0:?}, expected auto, uring, direct, buffered or mmap")]
pub struct UnknownBackend(pub String);

impl FromStr for IoBackend {
    type Err = UnknownBackend;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|backend| backend.name() == name).ok_or_else(|| UnknownBackend(name.to_owned()))
    }
}
