//! What is asked of the operating system, one method each, so that a test can put another answer in its place.
//!
//! Every method does the real thing unless an implementation says otherwise; [`SystemDisk`] says nothing. Readers and
//! writers hold an `Arc<dyn Disk>` and go to no file except through it.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{CWD, FallocateFlags, FlockOperation, OFlags, RenameFlags};

/// Files and folders. Paths and offsets are the caller's; errors carry the system's code.
pub trait Disk: Send + Sync + fmt::Debug {
    /// Opens `path` for reading. Never blocks, not even on a FIFO without a writer.
    fn open(&self, path: &Path) -> io::Result<File> {
        // Opening without O_NONBLOCK waits for the other end of a FIFO; on a regular file the flag has no effect.
        let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
        OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)
    }

    /// Creates `path` for reading and writing, with mode 0644; fails if anything has that name.
    fn create(&self, path: &Path) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o644).open(path)
    }

    /// Opens `path`, which must exist and not be a symbolic link, for reading and writing.
    fn reopen(&self, path: &Path) -> io::Result<File> {
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        OpenOptions::new().read(true).write(true).custom_flags(flags.bits().cast_signed()).open(path)
    }

    /// One `pread`.
    fn read_at(&self, file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
        file.read_at(out, offset)
    }

    /// One `pwrite`.
    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
        file.write_at(bytes, offset)
    }

    /// Sets or clears `O_DIRECT`.
    fn set_direct(&self, file: &File, on: bool) -> io::Result<()> {
        let mut flags = rustix::fs::fcntl_getfl(file)?;
        flags.set(OFlags::DIRECT, on);
        Ok(rustix::fs::fcntl_setfl(file, flags)?)
    }

    /// Reserves room for the first `bytes` bytes, which read as zero until they are written.
    fn allocate(&self, file: &File, bytes: u64) -> io::Result<()> {
        Ok(rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes)?)
    }

    /// Cuts or extends the file.
    fn set_len(&self, file: &File, bytes: u64) -> io::Result<()> {
        file.set_len(bytes)
    }

    /// Waits until what was written is on the medium.
    fn sync_data(&self, file: &File) -> io::Result<()> {
        file.sync_data()
    }

    /// Waits until what was written, and the file's length, are on the medium.
    fn sync_all(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    /// How many names the file has; 0 once it was removed.
    fn links(&self, file: &File) -> io::Result<u64> {
        file.metadata().map(|found| found.nlink())
    }

    /// Takes the file's lock, which ends with its last descriptor, however the process ends.
    fn lock(&self, file: &File) -> io::Result<()> {
        Ok(rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive)?)
    }

    /// Gives the file at `from` a second name.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    /// Renames, over whatever has the name `to`.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    /// Renames, unless something has the name `to`.
    fn rename_exclusively(&self, from: &Path, to: &Path) -> io::Result<()> {
        Ok(rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
    }

    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    /// Waits until the names in a folder are on the medium.
    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    /// Asked before an `io_uring` is set up: an error stands for the kernel's refusal.
    fn ring(&self) -> io::Result<()> {
        Ok(())
    }

    /// Sees what became of a read by `io_uring` at `offset`, and may make less of it: an error, or fewer bytes.
    fn ring_read(&self, offset: u64, result: io::Result<usize>) -> io::Result<usize> {
        let _ = offset;
        result
    }
}

/// The operating system's own answers.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemDisk;

impl Disk for SystemDisk {}

/// The disk that everyone uses who is not told otherwise.
#[must_use]
pub fn system_disk() -> Arc<dyn Disk> {
    Arc::new(SystemDisk)
}
