//! The names of an output: where it may lie, its temporary file, and how the finished file gets its name
//! (`docs/format-mnw.md` section 10.6).

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::write::WriteError;
use crate::io::{Disk, SystemDisk};

/// Temporary names tried before giving up; they are taken only by files a killed process with our id left behind.
const NAMES_TRIED_MAX: u32 = 100;
/// How long a lock must be held to count. A program that starts another holds for a moment, in the new process, even
/// locks of files that it has closed.
const LOCK_PATIENCE: Duration = Duration::from_millis(300);
/// The end of a temporary file's name.
const TEMPORARY_SUFFIX: &[u8] = b".tmp";
/// The end of a journal's name.
const JOURNAL_SUFFIX: &[u8] = b".resume";

/// Checks the destination and returns its folder.
pub(super) fn check_target(target: &Path, force: bool) -> Result<PathBuf, WriteError> {
    let path = || target.display().to_string();
    let Some(name) = target.file_name() else { return Err(WriteError::NoName { path: path() }) };
    let Some(folder) = folder_of(target) else { return Err(WriteError::NoName { path: path() }) };
    if !folder.is_dir() {
        let name = name.to_string_lossy().into_owned();
        return Err(WriteError::NoFolder { folder: folder.display().to_string(), name });
    }
    match fs::symlink_metadata(target) {
        Ok(_) if !force => Err(WriteError::Exists { path: path() }),
        Ok(found) if !found.is_file() && !found.is_symlink() => Err(WriteError::NotReplaceable { path: path() }),
        _ => Ok(folder),
    }
}

/// Checks that the whole file fits, of which `present` bytes are there already. An old file under the same name is kept
/// until the new one is complete.
pub(super) fn check_space(target: &Path, folder: &Path, needed: u64, present: u64) -> Result<(), WriteError> {
    // A file system that cannot say, or says that it has no blocks at all, is tried.
    let Ok(info) = rustix::fs::statvfs(folder) else { return Ok(()) };
    let free = info.f_bavail.saturating_mul(info.f_frsize);
    if info.f_blocks == 0 || free.saturating_add(present) >= needed {
        return Ok(());
    }
    Err(WriteError::NoSpace { path: target.display().to_string(), needed, free })
}

/// Files that conversions to `target` left behind when they were killed or interrupted: temporary files and journals of
/// no running process. Sorted by name; empty if the folder cannot be read.
#[must_use]
pub fn leftovers(target: &Path) -> Vec<PathBuf> {
    let (Some(name), Some(folder)) = (target.file_name(), folder_of(target)) else { return Vec::new() };
    let Ok(entries) = fs::read_dir(&folder) else { return Vec::new() };
    let is_ours =
        |found: &[u8]| is_temporary_name(name.as_bytes(), found) || *found == *journal_name(target).as_bytes();
    let found = entries.filter_map(Result::ok).filter(|entry| is_ours(entry.file_name().as_bytes()));
    let is_abandoned = |path: &PathBuf| match SystemDisk.open(path) {
        Ok(file) => !is_locked(&SystemDisk, &file),
        Err(_) => false,
    };
    let mut paths: Vec<PathBuf> = found.map(|entry| entry.path()).filter(is_abandoned).collect();
    paths.sort();
    paths
}

/// Where the journal of a conversion to `target` lies.
pub(super) fn journal_path(target: &Path, folder: &Path) -> PathBuf {
    folder.join(journal_name(target))
}

/// `.{name}.resume`
fn journal_name(target: &Path) -> OsString {
    let mut name = OsString::from(".");
    name.push(target.file_name().unwrap_or_default());
    name.push(".resume");
    debug_assert!(name.as_bytes().ends_with(JOURNAL_SUFFIX));
    name
}

/// Whether `found` is `.{name}.{pid}-{counter}.tmp`.
pub(super) fn is_temporary_name(name: &[u8], found: &[u8]) -> bool {
    let middle = found.strip_prefix(b".").and_then(|rest| rest.strip_prefix(name));
    let numbers = middle.and_then(|rest| rest.strip_prefix(b".")?.strip_suffix(TEMPORARY_SUFFIX));
    numbers.is_some_and(|numbers| {
        let mut halves = numbers.split(|&byte| byte == b'-');
        let is_number = |half: Option<&[u8]>| half.is_some_and(|half| half.iter().all(u8::is_ascii_digit));
        is_number(halves.next()) && is_number(halves.next()) && halves.next().is_none()
    })
}

/// Takes the lock of a file that is being written. False if another process has it; a file system without locks is
/// trusted to have no other.
pub(super) fn take_lock(disk: &dyn Disk, file: &File) -> bool {
    !is_locked(disk, file)
}

fn is_locked(disk: &dyn Disk, file: &File) -> bool {
    let deadline = Instant::now() + LOCK_PATIENCE;
    loop {
        match disk.lock(file) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            _ => return false,
        }
        if Instant::now() >= deadline {
            return true;
        }
        std::thread::sleep(LOCK_PATIENCE / 30);
    }
}

fn folder_of(target: &Path) -> Option<PathBuf> {
    target.parent().map(|parent| if parent.as_os_str().is_empty() { PathBuf::from(".") } else { parent.to_owned() })
}

/// A file that disappears when this is dropped.
#[derive(Debug)]
pub(super) struct TemporaryFile {
    disk: Arc<dyn Disk>,
    pub(super) path: PathBuf,
    pub(super) is_there: bool,
}

impl TemporaryFile {
    /// Creates an empty file beside `target` that nobody else has, and locks it.
    pub(super) fn create(disk: &Arc<dyn Disk>, target: &Path, folder: &Path) -> Result<(File, Self), WriteError> {
        let mut tried = 0;
        loop {
            let path = temporary_name(target, folder);
            match disk.create(&path) {
                Ok(file) => {
                    // Nobody knows the new name, so nobody else can have the lock.
                    let _ = disk.lock(&file);
                    return Ok((file, Self::at(disk, path)));
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && tried < NAMES_TRIED_MAX => tried += 1,
                Err(error) => {
                    return Err(WriteError::NotWritable { folder: folder.display().to_string(), error });
                }
            }
        }
    }

    /// The file at `path`, which is there.
    pub(super) fn at(disk: &Arc<dyn Disk>, path: PathBuf) -> Self {
        Self { disk: Arc::clone(disk), path, is_there: true }
    }

    pub(super) fn remove(&mut self) -> io::Result<()> {
        self.is_there = false;
        self.disk.remove(&self.path)
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if self.is_there {
            // There is no one left to tell; the name says what the file is.
            let _ = self.remove();
        }
    }
}

/// `.{name}.{pid}-{counter}.tmp` in `folder`; another one at each call.
fn temporary_name(target: &Path, folder: &Path) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let counter = COUNTER.fetch_add(1, Ordering::Relaxed);
    let mut name = OsString::from(".");
    name.push(target.file_name().unwrap_or_default());
    name.push(format!(".{}-{counter}.tmp", std::process::id()));
    folder.join(name)
}

/// How the finished file gets its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Publication {
    /// A second hard link; fails if the name is taken.
    Link,
    /// A rename that fails if the name is taken, where there are no hard links.
    Rename,
    /// A rename over whatever has the name (`force`).
    Replace,
}

impl Publication {
    /// Finds out, with an empty temporary file, what the file system can do. May give that file another name.
    pub(super) fn probe(target: &Path, folder: &Path, temporary: &mut TemporaryFile) -> Result<Self, WriteError> {
        let probe = temporary_name(target, folder);
        let disk = &temporary.disk;
        let link = match disk.link(&temporary.path, &probe) {
            Ok(()) => {
                let path = probe.display().to_string();
                let error = |error| WriteError::Io { path, action: "removing a probe", error };
                return disk.remove(&probe).map(|()| Self::Link).map_err(error);
            }
            Err(error) => error,
        };
        match disk.rename_exclusively(&temporary.path, &probe) {
            Ok(()) => {
                temporary.path = probe;
                Ok(Self::Rename)
            }
            Err(rename) => Err(WriteError::NoPublication { folder: folder.display().to_string(), link, rename }),
        }
    }

    /// Gives the temporary file the name `target`.
    pub(super) fn publish(self, temporary: &mut TemporaryFile, target: &Path) -> Result<(), WriteError> {
        let failed = |action| move |error| WriteError::Io { path: target.display().to_string(), action, error };
        let disk = &temporary.disk;
        let published = match self {
            Self::Link => disk.link(&temporary.path, target),
            Self::Rename => disk.rename_exclusively(&temporary.path, target),
            Self::Replace => disk.rename(&temporary.path, target),
        };
        match published {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(WriteError::Exists { path: target.display().to_string() });
            }
            Err(error) => return Err(failed("publishing")(error)),
        }
        match self {
            Self::Link => temporary.remove().map_err(failed("removing the temporary name")),
            Self::Rename | Self::Replace => {
                temporary.is_there = false;
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_names_are_told_from_others() {
        for (found, is_temporary) in [
            (".x.mnw.12-0.tmp", true),
            (".x.mnw.12-34.tmp", true),
            (".x.mnw.12.tmp", false),
            (".x.mnw.12-a.tmp", false),
            (".x.mnw.1-2-3.tmp", false),
            ("x.mnw.12-0.tmp", false),
            (".y.mnw.12-0.tmp", false),
            (".x.mnw.old.12-0.tmp", false),
            (".x.mnw.resume", false),
        ] {
            assert_eq!(is_temporary_name(b"x.mnw", found.as_bytes()), is_temporary, "{found}");
        }
    }

    #[test]
    fn only_files_of_no_running_process_are_left_over() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("x.mnw");
        let disk = crate::io::system_disk();
        let (file, temporary) = TemporaryFile::create(&disk, &target, folder.path()).unwrap();
        let journal = journal_path(&target, folder.path());
        fs::write(&journal, "").unwrap();
        fs::write(folder.path().join(".y.mnw.1-2.tmp"), "").unwrap();
        assert_eq!(leftovers(&target), std::slice::from_ref(&journal));
        drop(file);
        assert_eq!(leftovers(&target), [temporary.path.clone(), journal]);
        assert!(leftovers(&folder.path().join("nowhere/x.mnw")).is_empty());
    }
}
