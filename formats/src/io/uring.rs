//! `io_uring`: many direct reads in flight from one thread. All unsafe code of this crate but the map is in this file.
//!
//! **Who owns the memory.** A buffer that was submitted lies in a [`ReadInFlight`] in its slot, and nothing looks into it
//! or moves it out until the completion that carries the slot's number has been taken from the ring. Dropping the queue
//! waits for what is in flight; what does not end within [`CLOSING_MAX`] is leaked, together with its file.
//!
//! Buffers that the queue made itself ([`ReadQueue::buffer`]) are registered with the kernel where the limit on locked
//! memory allows, and files are registered when they first come. Either only saves time: without, the same reads are
//! made by address and descriptor.
//!
//! A read covers the aligned window around the wanted bytes. It may come back short: the rest is then submitted again,
//! from an aligned position. A read that gets no further, where the file is no longer either, has met its end.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode, squeue};
use minnow_common::FileOffset;
use rustix::io::Errno;

use super::aligned::{AlignedBuffer, Pool};
use super::disk::Disk;
use super::error::IoError;
use super::file::{check_range, cut_short, goes_on};
use super::queue::{ReadCompletion, ReadQueue, ReadRequest};
use super::{ReadAt, RingFile};

/// The most reads in flight. More than this no device asks for, and each has a buffer.
const CAPACITY_MAX: usize = 256;
/// Files that a ring keeps registered, and open, until it is dropped. Others are read by descriptor.
const FILES_MAX: usize = 64;
/// The longest single read. The kernel reads at most 2 GiB at once; the rest follows like that of any short read.
const READ_BYTES_MAX: usize = 1 << 30;
/// How often a read is submitted again because of EINTR, EAGAIN or no progress before that is its result.
const RETRIES_MAX: u32 = 100;
/// How long dropping a queue waits for reads in flight.
const CLOSING_MAX: Duration = Duration::from_secs(1);

/// A ring and the reads that are in it.
pub(super) struct UringQueue {
    /// Dropped before the pool, whose memory it has registered.
    ring: IoUring,
    /// One for each read that may be in flight. The index is the operation's number in the ring.
    slots: Vec<Option<ReadInFlight>>,
    free: Vec<usize>,
    /// Reads that ended and were not asked for yet.
    ended: VecDeque<ReadCompletion>,
    /// Reads of files that no ring can read, such as static memory: made when they are asked for.
    plain: VecDeque<ReadRequest>,
    /// The registered files; empty where the kernel registers none.
    files: Vec<Arc<dyn ReadAt>>,
    files_max: usize,
    pool: Arc<Pool>,
    buffers_are_registered: bool,
    is_closing: bool,
}

/// A read that the kernel may still be writing into.
struct ReadInFlight {
    file: Arc<dyn ReadAt>,
    /// Given back, or leaked, by hand: it must not be freed while the kernel has it.
    buffer: ManuallyDrop<AlignedBuffer>,
    tag: u64,
    offset: FileOffset,
    bytes: usize,
    /// What file offsets and lengths are multiples of.
    alignment: usize,
    /// Where in the file the buffer starts: `offset`, aligned down.
    window_start: u64,
    /// Bytes from `window_start` to the aligned end of the wanted bytes; the buffer holds as many.
    window_bytes: usize,
    /// Bytes of the window that have been read.
    filled: usize,
    /// The part of the window that was submitted last.
    asked_from: usize,
    asked_bytes: usize,
    retries: u32,
}

impl UringQueue {
    /// A ring for up to `capacity` reads, with as many buffers of `buffer_bytes` bytes.
    ///
    /// # Errors
    /// The kernel's refusal: ENOSYS without `io_uring`, EPERM where it is forbidden, ENOMEM where too little memory may
    /// be locked, EOPNOTSUPP if it is too old for plain reads.
    pub(super) fn new(disk: &Arc<dyn Disk>, capacity: usize, buffer_bytes: usize) -> io::Result<Self> {
        let capacity = capacity.clamp(1, CAPACITY_MAX);
        disk.ring()?;
        let ring = IoUring::builder().setup_clamp().build(capacity.next_power_of_two() as u32)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) || !probe.is_supported(opcode::ReadFixed::CODE) {
            return Err(Errno::OPNOTSUPP.into());
        }
        let pool = Pool::new(capacity as u16, buffer_bytes);
        let files_max = match ring.submitter().register_files(&[-1; FILES_MAX]) {
            Ok(()) => FILES_MAX,
            Err(_) => 0,
        };
        Ok(Self {
            buffers_are_registered: buffer_bytes > 0 && register(&ring, &pool).is_ok(),
            ring,
            slots: (0..capacity).map(|_| None).collect(),
            free: (0..capacity).rev().collect(),
            ended: VecDeque::new(),
            plain: VecDeque::new(),
            files: Vec::new(),
            files_max,
            pool,
            is_closing: false,
        })
    }

    /// Whether the kernel keeps the queue's own buffers locked.
    #[cfg(test)]
    pub(super) fn buffers_are_registered(&self) -> bool {
        self.buffers_are_registered
    }

    fn in_ring(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Checks a request and turns it into a read of its window, or ends it where there is nothing to read.
    fn window(request: ReadRequest, alignment: usize) -> Result<ReadInFlight, Box<ReadCompletion>> {
        let ReadRequest { file, offset, bytes, buffer, tag } = request;
        let ended = |buffer, result| Err(Box::new(ReadCompletion { tag, buffer, result }));
        if let Err(error) = check_range(file.label(), file.len(), offset, bytes) {
            return ended(buffer, Err(error));
        }
        if bytes == 0 {
            return ended(buffer, Ok(0..0));
        }
        // The range was checked, so the end of the wanted bytes is at most the length of a file; aligning it up adds
        // less than a page to what the buffer must hold.
        let window_start = offset.0 - offset.0 % alignment as u64;
        let skipped = (offset.0 - window_start) as usize;
        let window_bytes = skipped.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(alignment));
        let Some(window_bytes) = window_bytes.filter(|&window_bytes| window_bytes <= buffer.len()) else {
            let (path, capacity) = (file.label().to_owned(), buffer.len() as u64);
            let error = IoError::BufferTooSmall { path, offset, bytes: bytes as u64, capacity };
            return ended(buffer, Err(error));
        };
        Ok(ReadInFlight {
            buffer: ManuallyDrop::new(buffer),
            file,
            tag,
            offset,
            bytes,
            alignment,
            window_start,
            window_bytes,
            filled: 0,
            asked_from: 0,
            asked_bytes: 0,
            retries: 0,
        })
    }

    /// Gives the rest of the read in `slot` to the kernel.
    fn start(&mut self, slot: usize) {
        let Some(read) = &mut self.slots[slot] else { return };
        let file = Arc::clone(&read.file);
        let Some(RingFile { file, .. }) = file.ring_file() else {
            // It could be read by a ring when it came, and is not in the ring now.
            self.plain.extend(self.slots[slot].take().map(ReadInFlight::into_request));
            self.free.push(slot);
            return;
        };
        read.asked_from = read.filled - read.filled % read.alignment;
        read.asked_bytes = (read.window_bytes - read.asked_from).min(READ_BYTES_MAX);
        let target = Target {
            // Inside the buffer, since the window is.
            address: read.buffer[read.asked_from..][..read.asked_bytes].as_mut_ptr(),
            bytes: read.asked_bytes as u32,
            position: read.window_start + read.asked_from as u64,
            buffer_index: read.buffer.index_in(&self.pool).filter(|_| self.buffers_are_registered),
        };
        let registered = self.files.iter().position(|known| Arc::ptr_eq(known, &read.file));
        let entry = target.entry(file, registered).user_data(slot as u64);
        // SAFETY: the entry's address and length are a part of the buffer in this slot. That memory is neither freed
        // nor looked at before the completion with this slot's number was taken from the ring: only `settle` takes a
        // buffer out, and is only called with such a completion; `abandon` and `drop` leak what has none. A buffer is
        // `ManuallyDrop` here, so forgetting this queue frees nothing either. The descriptor is that of `read.file`,
        // which stays open as long as the slot holds it, or of a registered file, which `self.files` keeps open.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "the ring has an entry for each slot, and each slot has at most one in it");
    }

    /// Registers a file that has not come before, if there is room.
    fn register_file(&mut self, file: &Arc<dyn ReadAt>, opened: &File) {
        let index = self.files.len();
        if index < self.files_max && !self.files.iter().any(|known| Arc::ptr_eq(known, file)) {
            match self.ring.submitter().register_files_update(index as u32, &[opened.as_raw_fd()]) {
                Ok(_) => self.files.push(Arc::clone(file)),
                Err(_) => self.files_max = index,
            }
        }
    }

    /// Takes every completion that is there. True if there was one.
    fn reap(&mut self) -> bool {
        let completions: Vec<(u64, i32)> =
            self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        for &(slot, result) in &completions {
            self.settle(slot as usize, result);
        }
        !completions.is_empty()
    }

    /// Deals with the completion of the read in `slot`: it has ended, or goes on.
    fn settle(&mut self, slot: usize, result: i32) {
        let Some(read) = self.slots.get_mut(slot).and_then(Option::as_mut) else { return };
        let position = read.window_start + read.asked_from as u64;
        let actual = match usize::try_from(result) {
            Ok(count) => Ok(count.min(read.asked_bytes)),
            Err(_) => Err(io::Error::from_raw_os_error(-result)),
        };
        let most = *actual.as_ref().unwrap_or(&0);
        let retried = |error: &io::Error| {
            [Errno::INTR, Errno::AGAIN].iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
        };
        let skipped = (read.offset.0 - read.window_start) as usize;
        let result = match read.file.ring_file() {
            Some(ring) => ring.disk.ring_read(position, actual),
            None => actual,
        };
        let result = match result.map(|count| count.min(most)) {
            Ok(count) => {
                let got_further = read.asked_from + count > read.filled;
                read.filled = read.filled.max(read.asked_from + count);
                let reached = read.window_start + read.filled as u64;
                let opened = read.file.ring_file().map(|ring| ring.file);
                if read.filled >= skipped + read.bytes {
                    Some(Ok(skipped..skipped + read.bytes))
                } else if got_further {
                    None
                } else if read.retries < RETRIES_MAX && opened.is_some_and(|opened| goes_on(opened, reached)) {
                    read.retries += 1;
                    None
                } else {
                    let (path, expected) = (read.file.label(), read.file.len());
                    Some(Err(opened.map_or_else(
                        || IoError::CutShort { path: path.to_owned(), expected, found: reached },
                        |opened| cut_short(opened, path, expected, reached),
                    )))
                }
            }
            Err(error) if retried(&error) && read.retries < RETRIES_MAX => {
                read.retries += 1;
                None
            }
            Err(error) => {
                let (path, bytes) = (read.file.label().to_owned(), read.asked_bytes as u64);
                Some(Err(IoError::Read { path, offset: FileOffset(position), bytes, error }))
            }
        };
        match result {
            None if !self.is_closing => self.start(slot),
            result => {
                let Some(read) = self.slots[slot].take() else { return };
                self.free.push(slot);
                // The kernel has completed the read and will not start another for this slot: the buffer is ours again.
                let buffer = ManuallyDrop::into_inner(read.buffer);
                let result = result.unwrap_or(Ok(0..0));
                self.ended.push_back(ReadCompletion { tag: read.tag, buffer, result });
            }
        }
    }

    /// Ends every read in the ring with `error`, which says that the ring itself no longer works. The kernel may still
    /// write to their buffers, so those are leaked and empty ones given back in their place.
    fn abandon(&mut self, error: &io::Error) {
        for slot in 0..self.slots.len() {
            let Some(read) = self.slots[slot].take() else { continue };
            let copy = error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error);
            let (path, bytes) = (read.file.label().to_owned(), read.bytes as u64);
            let result = Err(IoError::Read { path, offset: read.offset, bytes, error: copy });
            self.ended.push_back(ReadCompletion { tag: read.tag, buffer: AlignedBuffer::new(0), result });
            // The descriptor may still be read from, too.
            std::mem::forget(read);
            // The slot is not used again: a late completion would be taken for another read's.
        }
        self.slots.clear();
        self.free.clear();
    }
}

impl ReadQueue for UringQueue {
    fn capacity(&self) -> usize {
        // At least one, also when the ring has failed: then a request ends with an error.
        self.slots.len().max(1)
    }

    fn in_flight(&self) -> usize {
        self.in_ring() + self.ended.len() + self.plain.len()
    }

    fn buffer(&mut self, bytes: usize) -> AlignedBuffer {
        let needed = ReadRequest::buffer_bytes(bytes);
        self.pool.take().filter(|buffer| buffer.len() >= needed).unwrap_or_else(|| AlignedBuffer::new(needed))
    }

    fn submit(&mut self, request: ReadRequest) -> Result<(), ReadRequest> {
        if self.in_flight() >= self.capacity() {
            return Err(request);
        }
        let file = Arc::clone(&request.file);
        let Some(RingFile { file: opened, alignment, .. }) = file.ring_file() else {
            self.plain.push_back(request);
            return Ok(());
        };
        let read = match Self::window(request, alignment) {
            Ok(read) => read,
            Err(ended) => {
                self.ended.push_back(*ended);
                return Ok(());
            }
        };
        let Some(slot) = self.free.pop() else {
            // The ring has failed.
            self.plain.push_back(read.into_request());
            return Ok(());
        };
        self.register_file(&file, opened);
        self.slots[slot] = Some(read);
        self.start(slot);
        // If the kernel cannot take it now, waiting for a completion offers it again.
        let _ = self.ring.submit();
        Ok(())
    }

    fn complete(&mut self) -> Option<ReadCompletion> {
        let mut refusals = 0;
        loop {
            if let Some(ended) = self.ended.pop_front() {
                return Some(ended);
            }
            if let Some(request) = self.plain.pop_front() {
                return Some(request.read_now());
            }
            if self.in_ring() == 0 {
                return None;
            }
            if self.reap() {
                continue;
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => refusals = 0,
                Err(error) if is_passing(&error) && refusals < RETRIES_MAX => {
                    refusals += 1;
                    if error.kind() != io::ErrorKind::Interrupted {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                Err(error) => self.abandon(&error),
            }
        }
    }
}

impl Drop for UringQueue {
    fn drop(&mut self) {
        self.is_closing = true;
        let deadline = Instant::now() + CLOSING_MAX;
        let can_wait_for_a_time = self.ring.params().is_feature_ext_arg();
        while self.in_ring() > 0 && Instant::now() < deadline {
            if self.reap() {
                continue;
            }
            let tenth = Timespec::new().nsec(100_000_000);
            let waited = match can_wait_for_a_time {
                true => self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&tenth)),
                false => self.ring.submit(),
            };
            if waited.is_err() || !can_wait_for_a_time {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        // What is left keeps its buffer, which is `ManuallyDrop`, and its file.
        self.slots.drain(..).flatten().for_each(std::mem::forget);
    }
}

impl ReadInFlight {
    fn into_request(self) -> ReadRequest {
        let Self { file, offset, bytes, buffer, tag, .. } = self;
        ReadRequest { file, offset, bytes, buffer: ManuallyDrop::into_inner(buffer), tag }
    }
}

impl std::fmt::Debug for UringQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "UringQueue({} of {} in flight)", self.in_flight(), self.capacity())
    }
}

/// What a read reads, from whatever kind of file.
struct Target {
    address: *mut u8,
    bytes: u32,
    position: u64,
    /// Of a registered buffer that the address lies in.
    buffer_index: Option<u16>,
}

impl Target {
    /// The ring's entry for it; `registered` is the file's index where it has one.
    fn entry(&self, file: &File, registered: Option<usize>) -> squeue::Entry {
        let Self { address, bytes, position, buffer_index } = *self;
        let descriptor = Fd(file.as_raw_fd());
        match (registered.map(|index| Fixed(index as u32)), buffer_index) {
            (Some(file), Some(buffer)) => opcode::ReadFixed::new(file, address, bytes, buffer).offset(position).build(),
            (Some(file), None) => opcode::Read::new(file, address, bytes).offset(position).build(),
            (None, Some(buffer)) => opcode::ReadFixed::new(descriptor, address, bytes, buffer).offset(position).build(),
            (None, None) => opcode::Read::new(descriptor, address, bytes).offset(position).build(),
        }
    }
}

/// Locks the memory of a new pool in the kernel.
fn register(ring: &IoUring, pool: &Pool) -> io::Result<()> {
    let ranges = pool.ranges();
    let ranges: Vec<libc::iovec> =
        ranges.into_iter().map(|(address, bytes)| libc::iovec { iov_base: address.cast(), iov_len: bytes }).collect();
    // SAFETY: the ranges are the memory of the pool's buffers, which stays allocated at its address until the pool is
    // dropped: buffers that are taken from it hold the pool and give their memory back to it. The queue drops its ring,
    // which ends the registration, before its pool, and every read by such an index goes to the same buffer's memory.
    unsafe { ring.submitter().register_buffers(&ranges) }
}

/// Whether the kernel may do later what it did not do now.
fn is_passing(error: &io::Error) -> bool {
    let passing = [Errno::INTR, Errno::AGAIN, Errno::BUSY];
    error.raw_os_error().is_some_and(|code| passing.iter().any(|errno| errno.raw_os_error() == code))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{IoBackend, open, system_disk};

    fn queue(capacity: usize) -> Option<UringQueue> {
        match UringQueue::new(&system_disk(), capacity, ReadRequest::buffer_bytes(1 << 20)) {
            Ok(queue) => Some(queue),
            Err(error) => {
                eprintln!("skipped: no io_uring here: {error}");
                None
            }
        }
    }

    fn file() -> (tempfile::NamedTempFile, Vec<u8>) {
        let named = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let content: Vec<u8> = (0..3_000_000u32).flat_map(u32::to_le_bytes).collect();
        std::fs::write(named.path(), &content).unwrap();
        (named, content)
    }

    #[test]
    fn buffers_of_the_queue_and_others_hold_the_same_bytes() {
        let Some(mut queue) = queue(4) else { return };
        let (named, content) = file();
        let Ok(opened) = open(named.path(), IoBackend::Uring) else { return };
        for own in [true, false] {
            let bytes = 1_000_001;
            let buffer = match own {
                true => queue.buffer(bytes),
                false => AlignedBuffer::new(ReadRequest::buffer_bytes(bytes)),
            };
            assert_eq!(buffer.index_in(&queue.pool).is_some(), own);
            let request = ReadRequest { file: opened.clone(), offset: FileOffset(4097), bytes, buffer, tag: 7 };
            queue.submit(request).unwrap();
            assert_eq!(queue.files.len(), queue.files_max.min(1));
            let completion = queue.complete().unwrap();
            assert!(completion.bytes().unwrap() == &content[4097..4097 + bytes], "own: {own}");
        }
        // Root may lock memory without limit, and so may whoever has a limit above four megabytes.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        assert!(queue.buffers_are_registered() || limit.is_some_and(|limit| limit < 8 << 20));
    }

    #[test]
    fn dropping_a_queue_waits_for_its_reads() {
        let (named, _) = file();
        let Ok(opened) = open(named.path(), IoBackend::Uring) else { return };
        for reads in 1..=8u64 {
            let Some(mut queue) = queue(8) else { return };
            for tag in 0..reads {
                let buffer = queue.buffer(1 << 20);
                let offset = FileOffset(tag << 20);
                queue.submit(ReadRequest { file: opened.clone(), offset, bytes: 1 << 20, buffer, tag }).unwrap();
            }
            let pool = Arc::downgrade(&queue.pool);
            drop(queue);
            assert!(pool.upgrade().is_none(), "every buffer came back");
        }
        assert_eq!(Arc::strong_count(&opened), 1);
    }

    #[test]
    fn a_ring_that_fails_gives_errors_and_then_plain_reads() {
        let Some(mut queue) = queue(2) else { return };
        let (named, content) = file();
        let Ok(opened) = open(named.path(), IoBackend::Uring) else { return };
        let request =
            |buffer, tag| ReadRequest { file: opened.clone(), offset: FileOffset(1), bytes: 999, buffer, tag };
        let buffer = queue.buffer(999);
        queue.submit(request(buffer, 1)).unwrap();
        queue.abandon(&Errno::BADF.into());
        let completion = queue.complete().unwrap();
        assert!(matches!(completion.result, Err(IoError::Read { .. })) && completion.buffer.is_empty());
        queue.submit(request(AlignedBuffer::new(8192), 2)).unwrap();
        assert_eq!(queue.complete().unwrap().bytes().unwrap(), &content[1..1000]);
        assert!(queue.complete().is_none());
    }
}
