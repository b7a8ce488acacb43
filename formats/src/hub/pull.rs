//! A whole file from a hub to disk: in pieces on several connections, resumable, verified while it comes.
//!
//! Beside the target lie, until it is complete, `.NAME.part` with the bytes and `.NAME.ranges` with what is known of them:
//! a line that says which file at the hub they are of, then for each piece `1` if it is there and `0` if not. A piece is
//! marked after its bytes were written. Both survive a kill, and the next pull goes on from them; they vanish with the
//! last piece, and with a digest that does not fit, for then nobody knows which bytes are wrong.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use minnow_common::FileOffset;
use sha1::Sha1;
use sha2::{Digest as _, Sha256};

use super::Watch;
use super::client::Hub;
use super::error::HubError;
use super::listing::{FileInfo, Identity};
use crate::io::{Disk, IoError, ReadAt};

/// The most connections at a time.
pub const CONNECTIONS_MAX: usize = 16;
/// Bytes of a piece: what may have to be fetched again after a kill, for each connection.
const PIECE_BYTES: u64 = 8 << 20;
/// What is hashed at once.
const HASHED_BYTES: usize = 1 << 20;

/// A file to be pulled.
#[derive(Clone, Debug)]
pub struct Pull<'a> {
    /// The file at the hub.
    pub file: &'a FileInfo,
    /// Where it goes. The folder must exist.
    pub target: &'a Path,
    /// Whether what has that name already is replaced.
    pub force: bool,
    /// Connections at a time.
    pub connections: usize,
    /// The disk to write to.
    pub disk: Arc<dyn Disk>,
}

/// What was done for a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// Bytes that came this time.
    pub fetched_bytes: u64,
    /// Bytes that were there from an earlier time.
    pub resumed_bytes: u64,
}

/// Fetches a file. `check` sees it complete, with the digest that the hub states, before it gets its name; what it
/// complains about is an error, and no file.
pub fn pull(
    hub: &Hub,
    pull: &Pull<'_>,
    watch: &dyn Watch,
    check: &dyn Fn(&Path) -> Result<(), String>,
) -> Result<Pulled, HubError> {
    let shown = pull.target.display().to_string();
    if !pull.force && fs::symlink_metadata(pull.target).is_ok() {
        return Err(HubError::Exists { path: shown });
    }
    let part = Part::open(pull)?;
    let resumed_bytes = part.present_bytes();
    let digest = part.fetch(hub, pull, watch)?;
    let expected = pull.file.identity.digits();
    if digest != expected {
        part.discard();
        let (place, what) = (pull.file.label(), pull.file.identity.kind());
        return Err(HubError::Digest { place, what, found: digest, expected: expected.to_owned() });
    }
    if let Err(fault) = check(&part.path) {
        part.discard();
        return Err(HubError::Invalid { path: shown, fault });
    }
    part.publish(pull)?;
    Ok(Pulled { fetched_bytes: pull.file.bytes - resumed_bytes, resumed_bytes })
}

/// A file that is not complete, and what is known of it.
struct Part {
    disk: Arc<dyn Disk>,
    path: PathBuf,
    file: File,
    ranges_path: PathBuf,
    ranges: File,
    /// Where in the ranges file the marks start.
    marks_at: u64,
    marks: Mutex<Vec<bool>>,
    grown: Condvar,
    bytes: u64,
}

impl Part {
    /// What an earlier pull of the same file left, or nothing yet.
    fn open(pull: &Pull<'_>) -> Result<Self, HubError> {
        let Pull { file: info, disk, .. } = pull;
        let [path, ranges_path] = [".part", ".ranges"].map(|suffix| beside(pull.target, suffix));
        let failed = |path: &Path, action| {
            let path = path.display().to_string();
            move |error| HubError::Disk { path, action, error }
        };
        let open = |path: &Path| match disk.reopen(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => disk.create(path),
            opened => opened,
        };
        let file = open(&path).map_err(failed(&path, "opening"))?;
        match disk.lock(&file) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(HubError::Busy { path: pull.target.display().to_string() });
            }
            // A file system without locks is trusted to have no other.
            _ => {}
        }
        let ranges = open(&ranges_path).map_err(failed(&ranges_path, "opening"))?;

        let header = format!("minnow-pull 1 {} {} {PIECE_BYTES}\n", info.identity.digits(), info.bytes);
        let pieces = info.bytes.div_ceil(PIECE_BYTES) as usize;
        let mut found = vec![0; header.len() + pieces];
        let is_known = read_up_to(&**disk, &ranges, &mut found).map_err(failed(&ranges_path, "reading"))?
            == found.len()
            && found.starts_with(header.as_bytes())
            && file.metadata().is_ok_and(|now| now.len() == info.bytes);
        let marks: Vec<bool> = if is_known {
            found[header.len()..].iter().map(|mark| *mark == b'1').collect()
        } else {
            // Reserving all of it now tells now that a disk is too small.
            let text = [header.as_bytes(), &vec![b'0'; pieces]].concat();
            let emptied = disk
                .set_len(&file, 0)
                .and_then(|()| reserve(&**disk, &file, info.bytes))
                .map_err(failed(&path, "reserving its length"))
                .and_then(|()| {
                    disk.set_len(&ranges, 0)
                        .and_then(|()| write_all(&**disk, &ranges, &text, 0))
                        .map_err(failed(&ranges_path, "writing"))
                });
            if let Err(error) = emptied {
                // There is nothing in them that a later pull could use.
                let _ = disk.remove(&ranges_path);
                let _ = disk.remove(&path);
                return Err(error);
            }
            vec![false; pieces]
        };
        Ok(Self {
            disk: Arc::clone(disk),
            path,
            file,
            ranges_path,
            ranges,
            marks_at: header.len() as u64,
            marks: Mutex::new(marks),
            grown: Condvar::new(),
            bytes: info.bytes,
        })
    }

    fn piece(&self, index: usize) -> (u64, u64) {
        let start = index as u64 * PIECE_BYTES;
        (start, self.bytes.min(start + PIECE_BYTES))
    }

    fn marks(&self) -> std::sync::MutexGuard<'_, Vec<bool>> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn present_bytes(&self) -> u64 {
        let present = |(index, is_there): (usize, &bool)| {
            let (start, end) = self.piece(index);
            if *is_there { end - start } else { 0 }
        };
        self.marks().iter().enumerate().map(present).sum()
    }

    /// Fetches what is missing, and gives the digest of the whole file, which is made meanwhile.
    fn fetch(&self, hub: &Hub, pull: &Pull<'_>, watch: &dyn Watch) -> Result<String, HubError> {
        let missing: Vec<usize> =
            self.marks().iter().enumerate().filter(|(_, is_there)| !**is_there).map(|(index, _)| index).collect();
        let next = AtomicUsize::new(0);
        let ends = Ends { inner: watch, is_over: AtomicBool::new(false) };
        let first_error: Mutex<Option<HubError>> = Mutex::new(None);
        let fail = |error| {
            // Whoever stops because another failed has nothing to add.
            first_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            ends.is_over.store(true, Ordering::Relaxed);
            // Under the lock, so that the one who hashes cannot miss it between looking and waiting.
            let _marks = self.marks();
            self.grown.notify_all();
        };
        let work = || {
            while let Some(&index) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(error) = self.fetch_piece(hub, pull, index, &ends) {
                    return fail(error);
                }
            }
        };
        let digest = Mutex::new(String::new());
        let hash = || match self.digest(pull, &ends) {
            Ok(found) => *digest.lock().unwrap_or_else(PoisonError::into_inner) = found,
            Err(error) => fail(error),
        };
        std::thread::scope(|scope| {
            for _ in 1..pull.connections.clamp(1, CONNECTIONS_MAX).min(missing.len()) {
                // With fewer threads than asked for, those there are do all the work.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            let hashing = std::thread::Builder::new().spawn_scoped(scope, hash);
            work();
            if hashing.is_err() {
                hash();
            }
        });
        match first_error.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(digest.into_inner().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    fn fetch_piece(&self, hub: &Hub, pull: &Pull<'_>, index: usize, watch: &dyn Watch) -> Result<(), HubError> {
        let (start, end) = self.piece(index);
        let name = pull.file.path.as_str();
        hub.stream(pull.file, start, end, watch, &mut |at, bytes| {
            write_all(&*self.disk, &self.file, bytes, at).map_err(|error| self.failed("writing", error))?;
            watch.moved(bytes.len() as u64, name);
            Ok(())
        })?;
        write_all(&*self.disk, &self.ranges, b"1", self.marks_at + index as u64).map_err(|error| HubError::Disk {
            path: self.ranges_path.display().to_string(),
            action: "writing",
            error,
        })?;
        self.marks()[index] = true;
        self.grown.notify_all();
        Ok(())
    }

    /// The digest of the whole file. Follows the pieces as they come, which are in the page cache then.
    fn digest(&self, pull: &Pull<'_>, ends: &Ends<'_>) -> Result<String, HubError> {
        let mut hasher = Hasher::new(&pull.file.identity, self.bytes);
        let mut buffer = vec![0; HASHED_BYTES];
        let pieces = self.bytes.div_ceil(PIECE_BYTES) as usize;
        for index in 0..pieces {
            let mut marks = self.marks();
            while !marks[index] {
                if ends.is_stopped() {
                    return Err(HubError::Stopped);
                }
                // Whoever stops everything from outside does not wake anyone up.
                let patience = std::time::Duration::from_millis(100);
                marks = self.grown.wait_timeout(marks, patience).unwrap_or_else(PoisonError::into_inner).0;
            }
            drop(marks);
            let (mut at, end) = self.piece(index);
            while at < end {
                if ends.is_stopped() {
                    return Err(HubError::Stopped);
                }
                let wanted = buffer.len().min((end - at) as usize);
                let count = self.disk.read_at(&self.file, &mut buffer[..wanted], at);
                match count {
                    Ok(0) => {
                        let error = io::Error::new(io::ErrorKind::UnexpectedEof, "it became shorter");
                        return Err(self.failed("reading", error));
                    }
                    Ok(count) => {
                        hasher.update(&buffer[..count]);
                        at += count as u64;
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(self.failed("reading", error)),
                }
            }
        }
        Ok(hasher.finish())
    }

    /// Removes everything.
    fn discard(&self) {
        for path in [&self.ranges_path, &self.path] {
            // What cannot be removed is not taken for more than it is: its marks are gone first.
            let _ = self.disk.remove(path);
        }
    }

    /// Gives the complete file its name.
    fn publish(&self, pull: &Pull<'_>) -> Result<(), HubError> {
        let target = pull.target;
        self.disk.sync_all(&self.file).map_err(|error| self.failed("syncing", error))?;
        let renamed = if pull.force {
            self.disk.rename(&self.path, target)
        } else {
            match self.disk.rename_exclusively(&self.path, target) {
                // The file system has no such rename; a second name fails as surely if the first is taken.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS)) => {
                    self.disk.link(&self.path, target).and_then(|()| self.disk.remove(&self.path))
                }
                renamed => renamed,
            }
        };
        let shown = || target.display().to_string();
        renamed.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => HubError::Exists { path: shown() },
            _ => HubError::Disk { path: shown(), action: "publishing", error },
        })?;
        // The marks are of no file any more; a later pull would find that out by itself.
        let _ = self.disk.remove(&self.ranges_path);
        self.disk.sync_folder(&folder_of(target)).map_err(|error| HubError::Disk {
            path: shown(),
            action: "syncing its folder",
            error,
        })
    }

    fn failed(&self, action: &'static str, error: io::Error) -> HubError {
        HubError::Disk { path: self.path.display().to_string(), action, error }
    }
}

/// Ends when someone outside says so, or when one of several failed.
struct Ends<'a> {
    inner: &'a dyn Watch,
    is_over: AtomicBool,
}

impl Watch for Ends<'_> {
    fn moved(&self, bytes: u64, file: &str) {
        self.inner.moved(bytes, file);
    }

    fn is_stopped(&self) -> bool {
        self.is_over.load(Ordering::Relaxed) || self.inner.is_stopped()
    }

    fn note(&self, line: &str) {
        self.inner.note(line);
    }
}

/// What makes the digits of an [`Identity`] from bytes.
pub(super) enum Hasher {
    Sha256(Sha256),
    Git(Sha1),
}

impl Hasher {
    /// For a file of `bytes` bytes that is to be compared with `identity`.
    pub(super) fn new(identity: &Identity, bytes: u64) -> Self {
        match identity {
            Identity::Sha256(_) => Self::Sha256(Sha256::new()),
            Identity::Git(_) => Self::Git(Sha1::new_with_prefix(format!("blob {bytes}\0"))),
        }
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::Git(hasher) => hasher.update(bytes),
        }
    }

    pub(super) fn finish(self) -> String {
        let hex = |digest: &[u8]| digest.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            Self::Sha256(hasher) => hex(&hasher.finalize()),
            Self::Git(hasher) => hex(&hasher.finalize()),
        }
    }
}

/// The id by which git knows the bytes of a file.
pub fn git_object_id(file: &Arc<dyn ReadAt>) -> Result<String, IoError> {
    let mut hasher = Hasher::new(&Identity::Git(String::new()), file.len());
    let mut buffer = vec![0; HASHED_BYTES];
    let mut at = 0;
    while at < file.len() {
        let count = buffer.len().min((file.len() - at) as usize);
        file.read_exact_at(FileOffset(at), &mut buffer[..count])?;
        hasher.update(&buffer[..count]);
        at += count as u64;
    }
    Ok(hasher.finish())
}

/// `.NAME` and a suffix, in the folder of `target`.
fn beside(target: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(target.file_name().unwrap_or_default());
    name.push(suffix);
    folder_of(target).join(name)
}

fn folder_of(target: &Path) -> PathBuf {
    match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Room for `bytes` bytes, where the file system can promise that, and that length in any case.
fn reserve(disk: &dyn Disk, file: &File, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    match disk.allocate(file, bytes) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS)) => {
            disk.set_len(file, bytes)
        }
        allocated => allocated,
    }
}

/// Writes all of `bytes` from `offset` on.
pub(super) fn write_all(disk: &dyn Disk, file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match disk.write_at(file, bytes, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                bytes = &bytes[count..];
                offset += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads from the start until `out` is full or the file ends.
fn read_up_to(disk: &dyn Disk, file: &File, out: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < out.len() {
        match disk.read_at(file, &mut out[filled..], filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_git_object_id_is_that_of_git() {
        // git hash-object of "hello\n"
        let mut hasher = Hasher::new(&Identity::Git(String::new()), 6);
        hasher.update(b"hello\n");
        assert_eq!(hasher.finish(), "ce013625030ba8dba906f756967f9e9ca394464a");
    }
}
