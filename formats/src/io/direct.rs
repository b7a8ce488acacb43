//! `O_DIRECT`: reads past the page cache, so that loading a model does not push everything else out of memory.
//!
//! The kernel wants offset, length and memory aligned. Callers need not care: what is aligned is read straight into
//! their memory, the rest through an aligned bounce buffer. The flag is set on the descriptor that was checked, and one
//! block is read before the file counts as usable, since some file systems accept the flag and fail the first read.

use std::fs::File;
use std::io;
use std::sync::Mutex;

use minnow_common::FileOffset;
use rustix::fs::{AtFlags, StatxFlags};
use rustix::io::Errno;

use super::aligned::AlignedBuffer;
use super::error::IoError;
use super::file::{RegularFile, goes_on};
use super::{ReadAt, RingFile};

/// Size of a bounce buffer: large enough that a device works at full speed with one read in flight for each thread.
const BOUNCE_BYTES: usize = 4 << 20;
/// Bounce buffers kept for reuse; more threads than this allocate their own.
const BOUNCE_BUFFERS_KEPT_MAX: usize = 4;
/// Reads in a row that may bring nothing before that counts as the end of the file.
const SHORT_READS_MAX: usize = 100;
/// The alignment assumed where the kernel (before 6.1) does not tell.
const ALIGNMENT_DEFAULT: usize = 4096;

/// A file read with `O_DIRECT`.
#[derive(Debug)]
pub(super) struct Direct {
    pub(super) file: RegularFile,
    /// What offsets and lengths must be multiples of; a power of two, at most [`AlignedBuffer::ALIGNMENT`].
    offset_alignment: usize,
    /// What addresses must be multiples of.
    memory_alignment: usize,
    bounce_buffers: Mutex<Vec<AlignedBuffer>>,
    /// `direct`, or `uring` where a queue may read the file through a ring.
    pub(super) backend: &'static str,
    /// Why `auto` came to `direct`.
    pub(super) fallback: Option<String>,
}

/// A file that cannot be read directly, and why.
#[derive(Debug)]
pub(super) struct Refusal {
    file: RegularFile,
    error: io::Error,
}

impl Direct {
    /// Switches `file` to direct reads and tries one.
    pub(super) fn new(file: RegularFile) -> Result<Self, Refusal> {
        let (memory_alignment, offset_alignment) = match alignments(&file.file) {
            Ok(alignments) => alignments,
            Err(error) => return Err(Refusal { file, error }),
        };
        if let Err(error) = file.disk.set_direct(&file.file, true) {
            return Err(Refusal { file, error });
        }
        let bounce_buffers = Mutex::default();
        let direct =
            Self { file, offset_alignment, memory_alignment, bounce_buffers, backend: "direct", fallback: None };
        let mut first = [0];
        let probe = if direct.file.bytes == 0 { Ok(0) } else { direct.read_bounced(0, &mut first) };
        match probe {
            Ok(_) => Ok(direct),
            Err(IoError::Read { error, .. }) => Err(Refusal { file: direct.file, error }),
            Err(other) => Err(Refusal { file: direct.file, error: io::Error::other(other.to_string()) }),
        }
    }

    /// Reads the aligned window around `position` into a bounce buffer and copies from it: at least one byte.
    fn read_bounced(&self, position: u64, out: &mut [u8]) -> Result<usize, IoError> {
        let mut bounce = self.kept_buffers().pop().unwrap_or_else(|| AlignedBuffer::new(BOUNCE_BYTES));
        let skipped = (position % self.offset_alignment as u64) as usize;
        let wanted = (skipped + out.len().min(BOUNCE_BYTES)).next_multiple_of(self.offset_alignment).min(BOUNCE_BYTES);
        let mut copied = Ok(0);
        // A read of less than a page may end before what is wanted, although the file does not.
        for _ in 0..SHORT_READS_MAX {
            let read = self.file.read_some(position - skipped as u64, &mut bounce[..wanted]);
            copied = read.map(|read| read.saturating_sub(skipped).min(out.len()));
            if !matches!(copied, Ok(0)) || !goes_on(&self.file.file, position) {
                break;
            }
        }
        let copied = copied.and_then(|count| match count {
            0 => Err(self.file.cut_short(position)),
            count => {
                out[..count].copy_from_slice(&bounce[skipped..skipped + count]);
                Ok(count)
            }
        });
        let mut kept = self.kept_buffers();
        if kept.len() < BOUNCE_BUFFERS_KEPT_MAX {
            kept.push(bounce);
        }
        copied
    }

    fn kept_buffers(&self) -> std::sync::MutexGuard<'_, Vec<AlignedBuffer>> {
        // Nothing panics while the lock is held, and spare buffers have no state to spoil.
        self.bounce_buffers.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl ReadAt for Direct {
    fn len(&self) -> u64 {
        self.file.bytes
    }

    fn read_exact_at(&self, offset: FileOffset, out: &mut [u8]) -> Result<(), IoError> {
        self.file.check_range(offset, out.len())?;
        let mut filled = 0;
        while filled < out.len() {
            let position = offset.0 + filled as u64;
            let rest = &mut out[filled..];
            let whole = rest.len() - rest.len() % self.offset_alignment;
            let aligned = position.is_multiple_of(self.offset_alignment as u64)
                && rest.as_ptr().addr().is_multiple_of(self.memory_alignment);
            filled += if aligned && whole > 0 {
                self.file.read_some(position, &mut rest[..whole])?
            } else {
                self.read_bounced(position, rest)?
            };
        }
        Ok(())
    }

    fn label(&self) -> &str {
        &self.file.label
    }

    fn backend(&self) -> &'static str {
        self.backend
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

    fn ring_file(&self) -> Option<RingFile<'_>> {
        let is_for_rings = self.backend == "uring";
        let RegularFile { file, disk, .. } = &self.file;
        is_for_rings.then_some(RingFile { file, alignment: self.offset_alignment, disk })
    }
}

impl Refusal {
    /// Whether the file system or kernel simply has no direct I/O here, as opposed to a failing disk.
    pub(super) fn is_lack_of_support(&self) -> bool {
        is_lack_of_support(&self.error)
    }

    /// The line to log when the file is read through the page cache instead.
    pub(super) fn note(&self) -> String {
        format!(
            "{}: direct I/O is refused by {} ({}), reading through the page cache",
            self.file.label,
            self.file.file_system(),
            super::OsCause(&self.error)
        )
    }

    /// The file, back in ordinary mode.
    pub(super) fn into_file(self) -> RegularFile {
        // A descriptor on which the flag could not be set has nothing to clear.
        let _ = self.file.disk.set_direct(&self.file.file, false);
        self.file
    }

    /// The error where `uring` was asked for by name, which needs direct reads.
    pub(super) fn into_uring_error(self) -> IoError {
        IoError::UringRefused { file_system: self.file.file_system(), path: self.file.label, error: self.error }
    }

    /// The error where direct reads were asked for by name.
    pub(super) fn into_error(self) -> IoError {
        IoError::DirectRefused { file_system: self.file.file_system(), path: self.file.label, error: self.error }
    }
}

/// Whether an error means that something is not offered here, as opposed to failing.
pub(super) fn is_lack_of_support(error: &io::Error) -> bool {
    let lacks = [Errno::INVAL, Errno::PERM, Errno::NOSYS, Errno::OPNOTSUPP, Errno::NOMEM];
    error.raw_os_error().is_some_and(|code| lacks.iter().any(|errno| errno.raw_os_error() == code))
}

/// `(memory, offset)` alignment of direct reads of `file`.
pub(super) fn alignments(file: &File) -> Result<(usize, usize), io::Error> {
    let Ok(info) = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
        return Ok((ALIGNMENT_DEFAULT, ALIGNMENT_DEFAULT));
    };
    if info.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Ok((ALIGNMENT_DEFAULT, ALIGNMENT_DEFAULT));
    }
    let alignments = (info.stx_dio_mem_align as usize, info.stx_dio_offset_align as usize);
    let usable = |alignment: usize| alignment.is_power_of_two() && alignment <= AlignedBuffer::ALIGNMENT;
    if usable(alignments.0) && usable(alignments.1) {
        Ok(alignments)
    } else {
        // The kernel says 0 where this file has no direct I/O.
        Err(Errno::OPNOTSUPP.into())
    }
}
