//! Disks that fail: whatever the operation, the error names the file and the cause, comes at once, and leaves nothing.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use minnow_common::FileOffset;
use minnow_common::random::mix64;
use minnow_formats::Checkpoint;
use minnow_formats::io::{Disk, IoBackend, IoError, ReadRequest, open, open_on, read_queue_on};
use minnow_formats::mnw::{self, Level, WriteError, WriteOptions, Writer, Written};
use minnow_tests::golden;
use rustix::io::Errno;

use crate::synthetic;

/// How long an error may take to be reported.
const LATENCY_MAX: Duration = Duration::from_secs(1);

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Nothing,
    Write(u64, Errno),
    /// A write of whole pages, as those of the output are.
    Block(u64, Errno),
    Read(u64, Errno),
    ShortWrites,
    ShortReads,
    Direct(Errno),
    Allocate(Errno),
    SetLen,
    SyncData,
    SyncAll,
    SyncFolder,
    Create,
    Link,
    Publish,
    Remove,
    Ring(Errno),
    RingReads(Errno),
}

/// The real disk with one fault. Counts writes and reads, from 0 on.
#[derive(Debug)]
struct FaultyDisk {
    fault: Fault,
    writes: AtomicU64,
    blocks: AtomicU64,
    reads: AtomicU64,
    links: AtomicU64,
}

impl FaultyDisk {
    fn new(fault: Fault) -> Self {
        let zero = || AtomicU64::new(0);
        Self { fault, writes: zero(), blocks: zero(), reads: zero(), links: zero() }
    }

    fn with(fault: Fault) -> Arc<dyn Disk> {
        Arc::new(Self::new(fault))
    }

    fn fails(&self, fault: Fault) -> io::Result<()> {
        if self.fault == fault { Err(Errno::IO.into()) } else { Ok(()) }
    }
}

/// Part of `bytes`, at least one, of odd lengths and round ones.
fn short(bytes: usize, seed: u64) -> usize {
    let random = mix64(seed ^ 0x5e) as usize;
    match random % 3 {
        0 => bytes,
        1 => random / 3 % bytes.max(1) + 1,
        _ => (random / 3 % bytes.max(1) / 4096 * 4096).max(1),
    }
    .min(bytes)
}

impl Disk for FaultyDisk {
    fn create(&self, path: &Path) -> io::Result<File> {
        self.fails(Fault::Create)?;
        minnow_formats::io::SystemDisk.create(path)
    }

    fn read_at(&self, file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
        let index = self.reads.fetch_add(1, Ordering::Relaxed);
        match self.fault {
            Fault::Read(at, errno) if at == index => Err(errno.into()),
            Fault::ShortReads if !out.is_empty() => {
                let count = short(out.len(), index);
                // Direct reads want whole pages of memory; what is too much is not told.
                file.read_at(out, offset).map(|actual| actual.min(count))
            }
            _ => file.read_at(out, offset),
        }
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let index = self.writes.fetch_add(1, Ordering::Relaxed);
        match self.fault {
            Fault::Write(at, errno) if at == index => Err(errno.into()),
            Fault::Block(at, errno)
                if bytes.len().is_multiple_of(4096) && self.blocks.fetch_add(1, Ordering::Relaxed) == at =>
            {
                Err(errno.into())
            }
            Fault::ShortWrites => file.write_at(bytes, offset).map(|actual| actual.min(short(bytes.len(), index))),
            _ => file.write_at(bytes, offset),
        }
    }

    fn set_direct(&self, file: &File, on: bool) -> io::Result<()> {
        match self.fault {
            Fault::Direct(errno) if on => Err(errno.into()),
            _ => minnow_formats::io::SystemDisk.set_direct(file, on),
        }
    }

    fn allocate(&self, file: &File, bytes: u64) -> io::Result<()> {
        match self.fault {
            Fault::Allocate(errno) => Err(errno.into()),
            _ => minnow_formats::io::SystemDisk.allocate(file, bytes),
        }
    }

    fn set_len(&self, file: &File, bytes: u64) -> io::Result<()> {
        self.fails(Fault::SetLen)?;
        file.set_len(bytes)
    }

    fn sync_data(&self, file: &File) -> io::Result<()> {
        self.fails(Fault::SyncData)?;
        file.sync_data()
    }

    fn sync_all(&self, file: &File) -> io::Result<()> {
        self.fails(Fault::SyncAll)?;
        file.sync_all()
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.fails(Fault::SyncFolder)?;
        File::open(path)?.sync_all()
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.fails(Fault::Link)?;
        // The first link is the probe, the second one the publication.
        if self.links.fetch_add(1, Ordering::Relaxed) == 1 {
            self.fails(Fault::Publish)?;
        }
        fs::hard_link(from, to)
    }

    fn rename_exclusively(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.fails(Fault::Link)?;
        minnow_formats::io::SystemDisk.rename_exclusively(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        if path.extension().is_some_and(|extension| extension == "resume") && path.exists() {
            self.fails(Fault::Remove)?;
        }
        fs::remove_file(path)
    }

    fn ring(&self) -> io::Result<()> {
        match self.fault {
            Fault::Ring(errno) => Err(errno.into()),
            _ => Ok(()),
        }
    }

    fn ring_read(&self, _: u64, result: io::Result<usize>) -> io::Result<usize> {
        let index = self.reads.fetch_add(1, Ordering::Relaxed);
        match self.fault {
            Fault::RingReads(errno) => Err(errno.into()),
            Fault::Read(at, errno) if at == index => Err(errno.into()),
            // Some answers are to ask again, others are too little.
            Fault::ShortReads if mix64(index).is_multiple_of(4) => {
                Err([Errno::AGAIN, Errno::INTR][index as usize % 2].into())
            }
            Fault::ShortReads => result.map(|count| short(count, index)),
            _ => result,
        }
    }
}

/// Writes the synthetic container onto `disk`, with a journal and all checks.
fn write(target: &Path, disk: &Arc<dyn Disk>) -> Result<Written, WriteError> {
    let fingerprint = Some(&b"faults"[..]);
    let options = WriteOptions { fingerprint, sha256: true, record_bytes: 4 << 20, disk: disk.clone(), force: false };
    let (mut writer, done) = Writer::open(target, synthetic::plan(), &options)?;
    assert_eq!(done, 0);
    synthetic::give(&mut writer, 0, |_| ())?;
    writer.finish()
}

/// A folder on a real file system and what a faultless disk makes of the container.
fn clean() -> (tempfile::TempDir, PathBuf, Vec<u8>) {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let target = folder.path().join("out.mnw");
    synthetic::write(&target);
    let bytes = fs::read(&target).unwrap();
    fs::remove_file(&target).unwrap();
    (folder, target, bytes)
}

#[track_caller]
fn assert_fails(target: &Path, fault: Fault, cause: &str) {
    let started = Instant::now();
    let error = write(target, &FaultyDisk::with(fault)).unwrap_err().to_string();
    // Writing all of it takes part of that time; the error takes none.
    assert!(started.elapsed() < LATENCY_MAX + Duration::from_secs(4), "{fault:?}: {:?}", started.elapsed());
    assert!(error.contains("out.mnw") || error.starts_with(target.parent().unwrap().to_str().unwrap()), "{error}");
    assert!(error.contains(cause), "{fault:?}: {error}");
    let left = synthetic::names_in(target.parent().unwrap());
    assert!(left.is_empty(), "{fault:?} left {left:?}");
}

#[test]
fn a_failed_write_leaves_nothing_whichever_write_it_is() {
    let (_folder, target, bytes) = clean();
    let counting = Arc::new(FaultyDisk::new(Fault::Nothing));
    let disk: Arc<dyn Disk> = counting.clone();
    write(&target, &disk).unwrap();
    assert!(fs::read(&target).unwrap() == bytes);
    fs::remove_file(&target).unwrap();
    let writes = counting.writes.load(Ordering::Relaxed);
    assert!(writes > 8, "{writes} writes: journal, blocks and header");
    for index in 0..writes {
        assert_fails(&target, Fault::Write(index, Errno::NOSPC), "ENOSPC, no space left on device");
    }
    for index in [0, 1, writes / 2, writes - 1] {
        assert_fails(&target, Fault::Write(index, Errno::IO), "EIO, input/output error");
    }
}

#[test]
fn whatever_else_fails_while_writing_leaves_nothing() {
    let (_folder, target, _) = clean();
    for fault in [
        Fault::SetLen,
        Fault::SyncData,
        Fault::SyncAll,
        Fault::Create,
        Fault::Link,
        Fault::Publish,
        Fault::Direct(Errno::IO),
    ] {
        assert_fails(&target, fault, "EIO");
    }
    assert_fails(&target, Fault::Allocate(Errno::NOSPC), "ENOSPC");
    // A read that fails while the finished file is read back.
    assert_fails(&target, Fault::Read(0, Errno::IO), "EIO");
    assert_fails(&target, Fault::Read(5, Errno::IO), "EIO");

    // When these fail, the file is there already; the error says what is not known or not tidy.
    for (fault, left) in [(Fault::SyncFolder, vec!["out.mnw"]), (Fault::Remove, vec![".out.mnw.resume", "out.mnw"])] {
        let error = write(&target, &FaultyDisk::with(fault)).unwrap_err().to_string();
        assert!(error.contains("out.mnw") && error.contains("EIO"), "{error}");
        assert_eq!(synthetic::names_in(target.parent().unwrap()), left);
        fs::remove_file(&target).unwrap();
        let _ = fs::remove_file(target.with_file_name(".out.mnw.resume"));
    }
}

#[test]
fn short_writes_and_refused_modes_give_the_same_file() {
    let (_folder, target, bytes) = clean();
    for fault in [
        Fault::Nothing,
        Fault::ShortWrites,
        Fault::ShortReads,
        Fault::Allocate(Errno::OPNOTSUPP),
        Fault::Direct(Errno::INVAL),
        Fault::Write(3, Errno::INTR),
        Fault::Block(0, Errno::INVAL),
        Fault::Block(3, Errno::INVAL),
        Fault::Ring(Errno::NOSYS),
    ] {
        let written = write(&target, &FaultyDisk::with(fault)).unwrap_or_else(|error| panic!("{fault:?}: {error}"));
        assert!(fs::read(&target).unwrap() == bytes, "{fault:?}");
        let is_buffered = matches!(fault, Fault::Direct(_) | Fault::Block(..));
        if is_buffered {
            assert_eq!(written.backend, "buffered", "{fault:?}");
            let note = written.fallback.unwrap();
            assert!(note.contains("out.mnw") && note.contains("EINVAL") && note.contains("page cache"), "{note}");
        }
        assert_eq!(synthetic::names_in(target.parent().unwrap()), ["out.mnw"]);
        fs::remove_file(&target).unwrap();
    }
}

#[test]
fn a_folder_that_disappears_is_noticed_within_a_second() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let inner = folder.path().join("inner");
    for when in [0, 1, 12, 23] {
        fs::create_dir(&inner).unwrap();
        let options = WriteOptions { fingerprint: Some(b"x"), record_bytes: 4 << 20, ..WriteOptions::default() };
        let (mut writer, _) = Writer::open(&inner.join("out.mnw"), synthetic::plan(), &options).unwrap();
        let mut gone = Instant::now();
        let error = synthetic::give(&mut writer, 0, |index| {
            if index == when {
                fs::remove_dir_all(&inner).unwrap();
                gone = Instant::now();
            }
        })
        .and_then(|()| writer.finish())
        .unwrap_err()
        .to_string();
        assert!(error.contains("out.mnw") && error.contains("ENOENT"), "{error}");
        assert!(gone.elapsed() < LATENCY_MAX, "{:?}", gone.elapsed());
        assert!(synthetic::names_in(folder.path()).is_empty());
    }
}

#[test]
fn a_failed_read_names_file_place_and_cause_whichever_read_it_is() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let path = golden::unpack_into("golden/mnw/tiny/i8_mma.mnw", folder.path());
    for backend in [IoBackend::Auto, IoBackend::Uring, IoBackend::Direct, IoBackend::Buffered] {
        if let Err(error @ (IoError::UringRefused { .. } | IoError::DirectRefused { .. })) = open(&path, backend) {
            eprintln!("skipped: {error}");
            continue;
        }
        let mut failures = 0;
        for index in 0..400 {
            let disk = FaultyDisk::with(Fault::Read(index, Errno::IO));
            let error = match Checkpoint::open_on(&disk, &path, backend) {
                Err(error) => error.to_string(),
                Ok(checkpoint) => {
                    let names: Vec<String> = checkpoint.tensors().keys().cloned().collect();
                    match names.iter().try_for_each(|name| checkpoint.read(name).map(|_| ())) {
                        Err(error) => error.to_string(),
                        Ok(()) => break,
                    }
                }
            };
            assert!(error.contains("i8_mma.mnw") && error.contains("EIO, input/output error"), "{backend}: {error}");
            failures += 1;
        }
        assert!(failures > 3, "{backend}: {failures}");
    }
}

#[test]
fn short_reads_give_the_same_bytes() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let path = golden::unpack_into("golden/mnw/tiny/i8_mma.mnw", folder.path());
    let whole = fs::read(&path).unwrap();
    for backend in [IoBackend::Auto, IoBackend::Direct, IoBackend::Buffered] {
        let disk = FaultyDisk::with(Fault::ShortReads);
        let opened = open_on(&disk, &path, backend).unwrap();
        let mut bytes = vec![0; whole.len()];
        opened.read_exact_at(FileOffset(0), &mut bytes).unwrap();
        assert!(bytes == whole, "{backend}");
        let findings = mnw::validate_all(&opened, Level::Strict, 2, &|_| ());
        assert!(findings.is_valid(), "{backend}: {:?}", findings.problems);
    }
}

#[test]
fn a_ring_reports_the_errors_of_its_reads() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let path = golden::unpack_into("golden/mnw/tiny/i8_mma.mnw", folder.path());
    // EAGAIN that never ends is an error in the end, too.
    for (errno, cause) in [(Errno::IO, "EIO"), (Errno::AGAIN, "EAGAIN")] {
        let disk = FaultyDisk::with(Fault::RingReads(errno));
        let opened = open_on(&disk, &path, IoBackend::Auto).unwrap();
        if opened.backend() != "uring" {
            eprintln!("skipped: {}", opened.fallback().unwrap_or_default());
            return;
        }
        let (mut queue, note) = read_queue_on(&disk, IoBackend::Uring, 2, 100).unwrap();
        assert_eq!(note, None);
        let buffer = queue.buffer(100);
        queue.submit(ReadRequest { file: opened, offset: FileOffset(8192), bytes: 100, buffer, tag: 1 }).unwrap();
        let error = queue.complete().unwrap().result.unwrap_err().to_string();
        assert!(error.contains("i8_mma.mnw") && error.contains(cause) && error.contains("0x2000"), "{error}");
    }
}

#[test]
fn auto_goes_on_without_io_uring_and_says_so_and_a_named_ring_fails() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let path = golden::unpack_into("golden/mnw/tiny/i8_mma.mnw", folder.path());
    for (errno, name) in [
        (Errno::PERM, "EPERM"),
        (Errno::NOSYS, "ENOSYS"),
        (Errno::INVAL, "EINVAL"),
        (Errno::NOMEM, "ENOMEM"),
        (Errno::OPNOTSUPP, "EOPNOTSUPP"),
    ] {
        let disk = FaultyDisk::with(Fault::Ring(errno));
        let auto = open_on(&disk, &path, IoBackend::Auto).unwrap();
        if auto.backend() == "direct" {
            let note = auto.fallback().unwrap();
            for part in [path.to_str().unwrap(), "io_uring", name, "directly from"] {
                assert!(note.contains(part), "{note}");
            }
            assert_eq!(note.lines().count(), 1);
        }
        let error = open_on(&disk, &path, IoBackend::Uring).unwrap_err();
        assert!(matches!(error, IoError::UringRefused { .. }) && error.to_string().contains(name), "{error}");

        let (mut queue, note) = read_queue_on(&disk, IoBackend::Auto, 2, 100).unwrap();
        assert!(note.unwrap().contains(name));
        let buffer = queue.buffer(8);
        queue.submit(ReadRequest { file: auto, offset: FileOffset(0), bytes: 8, buffer, tag: 1 }).unwrap();
        assert_eq!(queue.complete().unwrap().bytes().unwrap(), b"MINNOW01");
        let error = read_queue_on(&disk, IoBackend::Uring, 2, 100).map(|_| ()).unwrap_err();
        assert!(matches!(error, IoError::NoRing { .. }) && error.to_string().contains(name), "{error}");
    }
    // Another failure is none of support, and hides behind no fallback.
    let disk = FaultyDisk::with(Fault::Ring(Errno::MFILE));
    let error = open_on(&disk, &path, IoBackend::Auto).unwrap_err().to_string();
    assert!(error.contains("EMFILE"), "{error}");
}

#[test]
fn a_source_that_changes_meanwhile_is_noticed() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let path = golden::unpack_into("golden/mnw/tiny/i8_mma.mnw", folder.path());
    let checkpoint = Checkpoint::open(&path, IoBackend::Auto).unwrap();
    let fingerprint = checkpoint.fingerprint();
    checkpoint.check_unchanged().unwrap();
    assert_eq!(Checkpoint::open(&path, IoBackend::Buffered).unwrap().fingerprint(), fingerprint);

    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_modified(std::time::SystemTime::now() + Duration::from_secs(5)).unwrap();
    let error = checkpoint.check_unchanged().unwrap_err().to_string();
    assert!(error.contains("i8_mma.mnw") && error.contains("was changed while it was read"), "{error}");
    assert_ne!(Checkpoint::open(&path, IoBackend::Auto).unwrap().fingerprint(), fingerprint);

    file.set_len(5000).unwrap();
    let error = checkpoint.check_unchanged().unwrap_err().to_string();
    assert!(error.contains("ends at byte 5000 now"), "{error}");
    let name = checkpoint.tensors().keys().next_back().unwrap();
    let error = checkpoint.read(name).unwrap_err().to_string();
    assert!(error.contains("i8_mma.mnw: had") && error.contains("ends at byte 5000"), "{error}");
}
