//! The only file access of this project: random reads behind [`ReadAt`], whatever the backend.
//!
//! | backend | how | when |
//! |---|---|---|
//! | `direct` | `O_DIRECT`, past the page cache, through aligned memory | `auto` tries it first |
//! | `buffered` | `pread` through the page cache | `auto` falls back to it, and says why ([`ReadAt::fallback`]) |
//! | `mmap` | the file as memory | only when named: a file cut short under the map kills the process |
//! | `uring` | many reads in flight | not built into this version; [`queue::ReadQueue`] is where it will stand |
//!
//! Only regular files are opened; a FIFO reports length 0 and would block. Files are read through the one descriptor
//! they were checked on. A backend that is named is used or the call fails; only `auto` falls back.

mod aligned;
mod buffered;
mod direct;
mod error;
mod file;
mod memory;
mod mmap;
pub mod queue;

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use minnow_common::FileOffset;
use thiserror::Error;

pub use aligned::AlignedBuffer;
pub use error::{IoError, OsCause};
pub use queue::{ReadCompletion, ReadQueue, ReadRequest, SyncQueue};

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

    /// The backend in use: `direct`, `buffered`, `mmap` or `memory`.
    fn backend(&self) -> &'static str;

    /// If `auto` could not use the backend it tried first: path, file system and cause, as one line to log once.
    fn fallback(&self) -> Option<&str> {
        None
    }
}

/// How files are read; the value of `--io`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum IoBackend {
    /// Direct where the file system allows it, else buffered.
    #[default]
    Auto,
    /// `io_uring`.
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
    if backend == IoBackend::Uring {
        return Err(IoError::NotBuilt { path: path.display().to_string() });
    }
    let file = file::RegularFile::open(path)?;
    Ok(match backend {
        IoBackend::Uring | IoBackend::Buffered => Arc::new(buffered::Buffered::new(file, None)),
        IoBackend::Mmap => Arc::new(mmap::Mapped::new(file)?),
        IoBackend::Direct => match direct::Direct::new(file) {
            Ok(direct) => Arc::new(direct),
            Err(refusal) => return Err(refusal.into_error()),
        },
        IoBackend::Auto => match direct::Direct::new(file) {
            Ok(direct) => Arc::new(direct),
            Err(refusal) if refusal.is_lack_of_support() => {
                let note = refusal.note();
                Arc::new(buffered::Buffered::new(refusal.into_file(), Some(note)))
            }
            Err(refusal) => return Err(refusal.into_error()),
        },
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
