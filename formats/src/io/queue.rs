//! Bounded reads in flight.
//!
//! A buffer that was submitted belongs to the operation until its completion hands it back; dropping a queue may leak
//! buffers of unfinished reads, never free memory that the kernel still writes to. [`SyncQueue`] is the plain
//! implementation that works on every file; an `io_uring` engine is another implementation of [`ReadQueue`].

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use minnow_common::FileOffset;

use super::{AlignedBuffer, IoError, ReadAt};

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
        let ReadRequest { file, offset, bytes, mut buffer, tag } = self.waiting.pop_front()?;
        let capacity = buffer.len() as u64;
        let result = match buffer.get_mut(..bytes) {
            Some(out) => file.read_exact_at(offset, out).map(|()| 0..bytes),
            None => {
                let path = file.label().to_owned();
                Err(IoError::BufferTooSmall { path, offset, bytes: bytes as u64, capacity })
            }
        };
        Some(ReadCompletion { tag, buffer, result })
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
