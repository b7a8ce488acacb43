//! Bounded reads in flight.
//!
//! A buffer that was submitted belongs to the operation until its completion hands it back; dropping a queue may leak
//! buffers of unfinished reads, never free memory that the kernel still writes to. [`SyncQueue`] is the plain
//! implementation that works on every file, [`ThreadQueue`] the same reads in a few threads, and `io_uring` a third
//! implementation of [`ReadQueue`]. [`super::read_queue`] chooses.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use minnow_common::FileOffset;

use super::{AlignedBuffer, IoError, ReadAt};

/// Threads of a [`ThreadQueue`]: with this many reads of a megabyte in flight, disks are at their full speed.
const THREADS_MAX: usize = 4;

/// A read to be done, with the memory for it.
#[derive(Debug)]
pub struct ReadRequest {
    /// The file.
    pub file: Arc<dyn ReadAt>,
    /// Where the wanted bytes start; need not be aligned.
    pub offset: FileOffset,
    /// How many bytes are wanted.
    pub bytes: usize,
    /// Memory for them: at least [`ReadRequest::buffer_bytes`], so that an engine may read the aligned window around.
    pub buffer: AlignedBuffer,
    /// Comes back with the completion.
    pub tag: u64,
}

impl ReadRequest {
    /// Size of a buffer that takes `bytes` bytes from any offset.
    #[must_use]
    pub const fn buffer_bytes(bytes: usize) -> usize {
        bytes.next_multiple_of(AlignedBuffer::ALIGNMENT) + AlignedBuffer::ALIGNMENT
    }

    /// Reads in this thread.
    pub(super) fn read_now(self) -> ReadCompletion {
        let Self { file, offset, bytes, mut buffer, tag } = self;
        let capacity = buffer.len() as u64;
        let result = match buffer.get_mut(..bytes) {
            Some(out) => file.read_exact_at(offset, out).map(|()| 0..bytes),
            None => {
                let path = file.label().to_owned();
                Err(IoError::BufferTooSmall { path, offset, bytes: bytes as u64, capacity })
            }
        };
        ReadCompletion { tag, buffer, result }
    }
}

/// A read that is done: its buffer again, and where in it the wanted bytes are.
#[derive(Debug)]
pub struct ReadCompletion {
    /// The request's tag.
    pub tag: u64,
    /// The request's buffer.
    pub buffer: AlignedBuffer,
    /// Where in `buffer` the wanted bytes lie, or why they do not.
    pub result: Result<Range<usize>, IoError>,
}

impl ReadCompletion {
    /// The bytes that were asked for.
    pub fn bytes(&self) -> Result<&[u8], &IoError> {
        self.result.as_ref().map(|range| &self.buffer[range.clone()])
    }
}

/// Up to [`ReadQueue::capacity`] reads at a time. Completions may come in any order; tags tell them apart.
pub trait ReadQueue: Send {
    /// Reads that may be in flight together.
    fn capacity(&self) -> usize;

    /// Reads submitted and not yet completed.
    fn in_flight(&self) -> usize;

    /// Memory for a read of up to `bytes` bytes. A ring knows the memory that it gave out itself, which saves time with
    /// each read; it has one such buffer for each read in flight, as large as the queue was made for.
    fn buffer(&mut self, bytes: usize) -> AlignedBuffer {
        AlignedBuffer::new(ReadRequest::buffer_bytes(bytes))
    }

    /// Starts a read, or hands the request back if [`ReadQueue::capacity`] reads are in flight.
    fn submit(&mut self, request: ReadRequest) -> Result<(), ReadRequest>;

    /// Waits for a read to end. `None` if none is in flight.
    fn complete(&mut self) -> Option<ReadCompletion>;
}

/// Reads one after the other, each when its completion is asked for, in the order of submission.
#[derive(Debug)]
pub struct SyncQueue {
    waiting: VecDeque<ReadRequest>,
    capacity: usize,
}

impl SyncQueue {
    /// A queue that holds up to `capacity` requests, at least one.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { waiting: VecDeque::new(), capacity: capacity.max(1) }
    }
}

impl ReadQueue for SyncQueue {
    fn capacity(&self) -> usize {
        self.capacity
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn submit(&mut self, request: ReadRequest) -> Result<(), ReadRequest> {
        if self.waiting.len() == self.capacity {
            return Err(request);
        }
        self.waiting.push_back(request);
        Ok(())
    }

    fn complete(&mut self) -> Option<ReadCompletion> {
        self.waiting.pop_front().map(ReadRequest::read_now)
    }
}

/// Reads in a few threads, so that they overlap with each other and with the owner's work.
#[derive(Debug)]
pub struct ThreadQueue {
    /// `None` only while the queue is being dropped.
    requests: Option<SyncSender<ReadRequest>>,
    completions: Receiver<ReadCompletion>,
    threads: Vec<JoinHandle<()>>,
    capacity: usize,
    in_flight: usize,
}

impl ThreadQueue {
    /// A queue that holds up to `capacity` requests, at least one, and reads up to four of them at a time.
    ///
    /// # Errors
    /// If not even one thread can be started.
    pub fn new(capacity: usize) -> std::io::Result<Self> {
        let capacity = capacity.max(1);
        let (requests, incoming) = sync_channel::<ReadRequest>(capacity);
        let (outgoing, completions) = sync_channel(capacity);
        let incoming = Arc::new(Mutex::new(incoming));
        let mut threads = Vec::new();
        for _ in 0..capacity.min(THREADS_MAX) {
            let (incoming, outgoing) = (Arc::clone(&incoming), outgoing.clone());
            let work = move || {
                // The lock is free again at the end of the first statement, before the read.
                loop {
                    let request = incoming.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(request) = request else { return };
                    if outgoing.send(request.read_now()).is_err() {
                        return;
                    }
                }
            };
            match std::thread::Builder::new().name("read".to_owned()).spawn(work) {
                Ok(thread) => threads.push(thread),
                Err(error) if threads.is_empty() => return Err(error),
                Err(_) => break,
            }
        }
        Ok(Self { requests: Some(requests), completions, threads, capacity, in_flight: 0 })
    }
}

impl ReadQueue for ThreadQueue {
    fn capacity(&self) -> usize {
        self.capacity
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn submit(&mut self, request: ReadRequest) -> Result<(), ReadRequest> {
        if self.in_flight == self.capacity {
            return Err(request);
        }
        let Some(requests) = &self.requests else { return Err(request) };
        // The channel has room for as many as may be in flight, so this does not wait.
        requests.send(request).map_err(|refused| refused.0)?;
        self.in_flight += 1;
        Ok(())
    }

    fn complete(&mut self) -> Option<ReadCompletion> {
        if self.in_flight == 0 {
            return None;
        }
        let completion = self.completions.recv().ok();
        self.in_flight -= 1;
        completion
    }
}

impl Drop for ThreadQueue {
    fn drop(&mut self) {
        self.requests = None;
        for thread in self.threads.drain(..) {
            // Each ends with the read it is in; a panic in there has been reported already.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::from_static;

    #[test]
    fn requests_beyond_the_capacity_are_handed_back() {
        let file = from_static("memory", b"0123456789");
        let request = |tag: u64, bytes: usize| ReadRequest {
            file: file.clone(),
            offset: FileOffset(tag),
            bytes,
            buffer: AlignedBuffer::new(ReadRequest::buffer_bytes(bytes)),
            tag,
        };
        let mut queue = SyncQueue::new(2);
        queue.submit(request(1, 3)).unwrap();
        queue.submit(request(2, 100)).unwrap();
        assert_eq!(queue.submit(request(3, 1)).unwrap_err().tag, 3);
        let first = queue.complete().unwrap();
        assert_eq!((first.tag, first.bytes().unwrap()), (1, &b"123"[..]));
        assert!(matches!(queue.complete().unwrap().bytes(), Err(IoError::OutsideFile { bytes: 100, .. })));
        assert!(queue.complete().is_none() && queue.in_flight() == 0);
        let small = ReadRequest { buffer: AlignedBuffer::new(2), ..request(4, 3) };
        queue.submit(small).unwrap();
        assert!(matches!(queue.complete().unwrap().result, Err(IoError::BufferTooSmall { .. })));
    }
}
