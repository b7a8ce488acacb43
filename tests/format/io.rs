//! File access: every backend gives the same bytes, and says what is wrong with a file that it cannot read.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use minnow_common::FileOffset;
use minnow_common::random::mix64;
use minnow_formats::io::{
    self, AlignedBuffer, Disk, IoBackend, IoError, ReadAt, ReadCompletion, ReadQueue, ReadRequest, SyncQueue,
    ThreadQueue,
};
use minnow_formats::mnw::{self, Level};

use crate::synthetic;

/// Lengths around blocks, pages and the size of a bounce buffer.
const FILE_BYTES: [usize; 6] = [0, 1, 511, 4096, 70_001, (9 << 20) + 13];

/// Folders on different file systems, as far as this machine has them.
fn folders() -> Vec<tempfile::TempDir> {
    let mut folders = vec![tempfile::tempdir().unwrap(), tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap()];
    match tempfile::tempdir_in("/dev/shm") {
        Ok(folder) => folders.push(folder),
        Err(error) => eprintln!("skipped: /dev/shm is not writable: {error}"),
    }
    folders
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|index| mix64(index / 8).to_le_bytes()[(index % 8) as usize]).collect()
}

fn file(folder: &Path, bytes: usize) -> (PathBuf, Vec<u8>) {
    let path = folder.join(format!("{bytes}.bin"));
    let content = pattern(bytes);
    fs::write(&path, &content).unwrap();
    (path, content)
}

/// The backends that work for this file; `auto` always does. Direct reads may be refused by the file system.
fn open_all(path: &Path) -> Vec<Arc<dyn ReadAt>> {
    let mut files = Vec::new();
    for backend in IoBackend::ALL {
        match io::open(path, backend) {
            Ok(file) => files.push(file),
            Err(error @ (IoError::DirectRefused { .. } | IoError::UringRefused { .. })) => {
                eprintln!("skipped: {error}")
            }
            Err(error) => panic!("{error}"),
        }
    }
    files
}

#[test]
fn every_backend_reads_the_same_bytes_at_any_offset_and_length() {
    for folder in folders() {
        for bytes in FILE_BYTES {
            let (path, content) = file(folder.path(), bytes);
            for opened in open_all(&path) {
                assert_eq!(opened.len(), bytes as u64);
                if let Some(whole) = opened.as_slice() {
                    assert_eq!(whole, content);
                }
                let mut spans = vec![(0, bytes), (bytes, 0), (bytes / 2, bytes - bytes / 2)];
                spans.extend((0..40).map(|i| {
                    let start = mix64(i) as usize % (bytes + 1);
                    (start, mix64(i + 100) as usize % (bytes - start + 1))
                }));
                // Into memory at an odd address, and at a page boundary.
                let mut odd = vec![0; bytes + 1];
                let mut aligned = AlignedBuffer::new(bytes);
                for (start, length) in spans {
                    for out in [&mut odd[1..=length], &mut aligned[..length]] {
                        out.fill(0xee);
                        opened.read_exact_at(FileOffset(start as u64), out).unwrap();
                        assert!(*out == content[start..start + length], "{opened:?} {start}+{length}");
                    }
                }
            }
        }
    }
}

#[test]
fn reads_may_run_in_several_threads() {
    let folder = tempfile::tempdir().unwrap();
    let (path, content) = file(folder.path(), (9 << 20) + 13);
    for opened in open_all(&path) {
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (opened, content) = (&opened, &content);
                scope.spawn(move || {
                    let start = 1000 * thread + 1;
                    let mut out = vec![0; 8 << 20];
                    opened.read_exact_at(FileOffset(start as u64), &mut out).unwrap();
                    assert!(out == content[start..start + out.len()], "{opened:?}");
                });
            }
        });
    }
}

/// Every kind of queue that there is here, for reads of up to `bytes` bytes.
fn queues(capacity: usize, bytes: usize) -> Vec<Box<dyn ReadQueue>> {
    let mut queues: Vec<Box<dyn ReadQueue>> =
        vec![Box::new(SyncQueue::new(capacity)), Box::new(ThreadQueue::new(capacity).unwrap())];
    for backend in IoBackend::ALL {
        match io::read_queue(backend, capacity, bytes) {
            Ok((queue, _)) => queues.push(queue),
            Err(error) => eprintln!("skipped: {error}"),
        }
    }
    queues
}

#[test]
fn every_queue_gives_every_read_of_every_file_back_with_its_tag() {
    for folder in folders() {
        let (path, content) = file(folder.path(), 70_001);
        for opened in open_all(&path) {
            for mut queue in queues(4, 999) {
                let mut buffers: Vec<AlignedBuffer> = (0..4).map(|_| queue.buffer(999)).collect();
                let (mut next, mut seen) = (0u64, [false; 71]);
                while !seen.iter().all(|&seen| seen) {
                    while next <= 70
                        && let Some(buffer) = buffers.pop()
                    {
                        // The last one ends where the file does.
                        let bytes = if next == 70 { 0 } else { 999 };
                        let offset = FileOffset(next * 1000 + 1);
                        queue.submit(ReadRequest { file: opened.clone(), offset, bytes, buffer, tag: next }).unwrap();
                        next += 1;
                    }
                    let completion = queue.complete().unwrap();
                    let start = completion.tag as usize * 1000 + 1;
                    let length = if completion.tag == 70 { 0 } else { 999 };
                    assert_eq!(completion.bytes().unwrap(), &content[start..start + length]);
                    assert!(!std::mem::replace(&mut seen[completion.tag as usize], true));
                    buffers.push(completion.buffer);
                }
                assert!(queue.complete().is_none() && queue.in_flight() == 0);
            }
        }
    }
}

#[test]
fn queued_reads_of_any_offset_and_length_are_right_up_to_the_last_byte() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let bytes = (9 << 20) + 13;
    let (path, content) = file(folder.path(), bytes);
    for opened in open_all(&path) {
        for mut queue in queues(8, 3 << 20) {
            let mut spans = vec![(bytes - 1, 1), (bytes - 4097, 4097), (0, 3 << 20), (4096, 8192), (511, 513)];
            spans.extend((0..40).map(|i| {
                let start = mix64(i) as usize % bytes;
                (start, mix64(i + 100) as usize % (bytes - start).min(3 << 20))
            }));
            let mut waiting = spans.iter().enumerate();
            let mut done = 0;
            while done < spans.len() {
                while queue.in_flight() < queue.capacity()
                    && let Some((index, &(start, length))) = waiting.next()
                {
                    let (offset, buffer) = (FileOffset(start as u64), queue.buffer(length));
                    let tag = index as u64;
                    queue.submit(ReadRequest { file: opened.clone(), offset, bytes: length, buffer, tag }).unwrap();
                }
                let completion = queue.complete().unwrap();
                let (start, length) = spans[completion.tag as usize];
                assert!(completion.bytes().unwrap() == &content[start..start + length], "{opened:?} {start}+{length}");
                done += 1;
            }
        }
    }
}

#[test]
fn a_queue_says_what_is_wrong_with_a_request_and_goes_on() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let (path, content) = file(folder.path(), 70_001);
    for opened in open_all(&path) {
        for mut queue in queues(2, 4096) {
            let request = |offset: u64, bytes, buffer| ReadRequest {
                file: opened.clone(),
                offset: FileOffset(offset),
                bytes,
                buffer: AlignedBuffer::new(buffer),
                tag: offset,
            };
            queue.submit(request(70_000, 2, 8192)).unwrap();
            queue.submit(request(0, 4097, 4096)).unwrap();
            assert_eq!(queue.submit(request(5, 1, 4096)).unwrap_err().tag, 5);
            for _ in 0..2 {
                let completion = queue.complete().unwrap();
                match (completion.tag, completion.result.unwrap_err()) {
                    (70_000, IoError::OutsideFile { file_bytes: 70_001, bytes: 2, .. }) => {}
                    (0, IoError::BufferTooSmall { capacity: 4096, bytes: 4097, .. }) => {}
                    (tag, error) => panic!("{tag}: {error}"),
                }
            }
            queue.submit(request(5, 1, 8192)).unwrap();
            assert_eq!(queue.complete().unwrap().bytes().unwrap(), &content[5..6]);
        }
    }
}

#[test]
fn a_queue_that_is_dropped_with_reads_in_flight_harms_no_one() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let (path, content) = file(folder.path(), (9 << 20) + 13);
    for opened in open_all(&path) {
        for mut queue in queues(8, 1 << 20) {
            for tag in 0..8 {
                let (offset, buffer) = (FileOffset(tag << 20), queue.buffer(1 << 20));
                queue.submit(ReadRequest { file: opened.clone(), offset, bytes: 1 << 20, buffer, tag }).unwrap();
            }
            drop(queue);
            let mut again = vec![0; content.len()];
            opened.read_exact_at(FileOffset(0), &mut again).unwrap();
            assert!(again == content);
        }
        assert_eq!(Arc::strong_count(&opened), 1, "no read holds the file any more");
    }
}

#[test]
fn a_file_cut_short_is_noticed_by_every_queue() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    for backend in [IoBackend::Auto, IoBackend::Direct, IoBackend::Buffered] {
        let (path, content) = file(folder.path(), 70_001);
        let Ok(opened) = io::open(&path, backend) else { continue };
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(5000).unwrap();
        for mut queue in queues(1, 70_000) {
            let buffer = queue.buffer(70_000);
            let request = ReadRequest { file: opened.clone(), offset: FileOffset(1), bytes: 70_000, buffer, tag: 0 };
            queue.submit(request).unwrap();
            let ReadCompletion { result, buffer, .. } = queue.complete().unwrap();
            let error = result.unwrap_err();
            assert!(matches!(error, IoError::CutShort { expected: 70_001, found: 5000, .. }), "{error}");
            let request = ReadRequest { file: opened.clone(), offset: FileOffset(1), bytes: 4999, buffer, tag: 0 };
            queue.submit(request).unwrap();
            assert!(queue.complete().unwrap().bytes().unwrap() == &content[1..5000]);
        }
    }
}

#[test]
fn a_file_that_changes_is_noticed_when_it_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let (path, content) = file(folder.path(), 70_001);
    for backend in [IoBackend::Auto, IoBackend::Buffered, IoBackend::Mmap] {
        fs::write(&path, &content).unwrap();
        let opened = io::open(&path, backend).unwrap();
        opened.check_unchanged().unwrap();
        let append = || fs::OpenOptions::new().append(true).open(&path).unwrap();
        std::io::Write::write_all(&mut append(), b"more").unwrap();
        let error = opened.check_unchanged().unwrap_err();
        assert!(matches!(error, IoError::Changed { expected: 70_001, found: 70_005, .. }), "{error}");
        append().set_len(70_000).unwrap();
        let error = opened.check_unchanged().unwrap_err();
        assert!(matches!(error, IoError::CutShort { expected: 70_001, found: 70_000, .. }), "{error}");
    }
}

#[test]
fn reads_past_the_end_name_file_offset_and_lengths() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = file(folder.path(), 4096);
    for opened in open_all(&path) {
        for (offset, bytes) in [(4090, 7), (4097, 0), (u64::MAX, 1), (u64::MAX - 3, 8)] {
            let error = opened.read_exact_at(FileOffset(offset), &mut vec![0; bytes]).unwrap_err();
            assert!(matches!(error, IoError::OutsideFile { file_bytes: 4096, .. }), "{error}");
            let message = error.to_string();
            assert!(message.contains("4096.bin") && message.contains(&format!("{offset:#x}")), "{message}");
        }
    }
}

#[test]
fn a_file_cut_short_after_it_was_opened_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = file(folder.path(), 70_001);
    for backend in [IoBackend::Auto, IoBackend::Buffered] {
        fs::write(&path, pattern(70_001)).unwrap();
        let opened = io::open(&path, backend).unwrap();
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(5000).unwrap();
        let error = opened.read_exact_at(FileOffset(1), &mut [0; 70_000]).unwrap_err();
        assert!(matches!(error, IoError::CutShort { expected: 70_001, found: 5000, .. }), "{error}");
    }
}

#[test]
fn only_regular_files_are_opened_and_a_fifo_blocks_no_one() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    for backend in IoBackend::ALL {
        for (path, kind) in [(folder.path(), "directory"), (&fifo, "FIFO"), (Path::new("/dev/zero"), "device")] {
            let error = io::open(path, backend).unwrap_err();
            assert!(matches!(error, IoError::NotRegular { kind: found, .. } if found == kind), "{error}");
        }
        let error = io::open(&folder.path().join("absent"), backend).unwrap_err().to_string();
        assert!(error.ends_with("absent: cannot be opened: ENOENT, no such file or directory"), "{error}");
    }
}

#[test]
fn auto_falls_back_with_cause_and_a_named_backend_fails() {
    // Files of the process file system are regular, and have no direct reads on any kernel.
    let path = Path::new("/proc/self/status");
    let auto = io::open(path, IoBackend::Auto).unwrap();
    assert_eq!(auto.backend(), "buffered");
    let note = auto.fallback().unwrap();
    for part in ["/proc/self/status", "proc (", "EINVAL", "page cache"] {
        assert!(note.contains(part), "{note}");
    }
    let error = io::open(path, IoBackend::Direct).unwrap_err();
    assert!(matches!(&error, IoError::DirectRefused { file_system, .. } if file_system == "proc"), "{error}");

    let error = io::open(path, IoBackend::Uring).unwrap_err();
    assert!(matches!(&error, IoError::UringRefused { file_system, .. } if file_system == "proc"), "{error}");
    let buffered = io::open(path, IoBackend::Buffered).unwrap();
    assert_eq!((buffered.backend(), buffered.fallback()), ("buffered", None));
}

#[test]
fn backend_names_round_trip() {
    for backend in IoBackend::ALL {
        assert_eq!(backend.to_string().parse(), Ok(backend));
    }
    assert!("Direct".parse::<IoBackend>().is_err());
}

/// A disk that answers each read after a while, and counts how many wait at once.
#[derive(Debug, Default)]
struct SlowDisk {
    waiting: AtomicUsize,
    waiting_max: AtomicUsize,
}

impl Disk for SlowDisk {
    fn read_at(&self, file: &fs::File, out: &mut [u8], offset: u64) -> std::io::Result<usize> {
        let waiting = self.waiting.fetch_add(1, Ordering::SeqCst) + 1;
        self.waiting_max.fetch_max(waiting, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(2));
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        file.read_at(out, offset)
    }
}

/// C27: how near to the disk's own rate that comes is measured in `docs/measurements/io.md`.
#[test]
fn reads_overlap_so_that_the_disks_latency_does_not_bound_the_rate() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("a.mnw");
    synthetic::write(&target);
    for (workers, at_once) in [(1, 4), (4, 8)] {
        let slow = Arc::new(SlowDisk::default());
        let disk: Arc<dyn Disk> = slow.clone();
        let opened = io::open_on(&disk, &target, IoBackend::Buffered).unwrap();
        assert!(mnw::validate_all(&opened, Level::Validate, workers, &|_| ()).is_valid());
        let waiting_max = slow.waiting_max.load(Ordering::SeqCst);
        assert!(waiting_max >= at_once, "{workers} workers had {waiting_max} reads in flight");
    }
}
