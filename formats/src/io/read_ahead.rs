//! Ranges of a file, piece after piece in order, while the next pieces are being read.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use minnow_common::FileOffset;

use super::{AlignedBuffer, IoBackend, IoError, ReadAt, ReadCompletion, ReadQueue, ReadRequest, SyncQueue};
use super::{read_queue_on, system_disk};

/// Reads the ranges that `spans` yields, each with a key that comes back with its pieces. Ranges are asked for only when
/// there is room to read them, so several readers may share one source of ranges.
pub(crate) struct ReadAhead<K, I> {
    file: Arc<dyn ReadAt>,
    spans: I,
    /// What of the last range has not been asked for.
    rest: Option<(K, Range<u64>)>,
    piece_bytes: usize,
    queue: Box<dyn ReadQueue>,
    buffers: Vec<AlignedBuffer>,
    /// Pieces that were asked for, in order; the first has the tag `first_tag`.
    asked: VecDeque<Asked<K>>,
    first_tag: u64,
    /// Reads that ended before their turn, by tag.
    early: BTreeMap<u64, ReadCompletion>,
}

struct Asked<K> {
    key: K,
    offset: u64,
    bytes: usize,
    is_last: bool,
}

/// Part of a range.
pub(crate) struct Piece<'a, K> {
    /// The key of its range.
    pub(crate) key: K,
    /// Where in the file it starts.
    pub(crate) offset: u64,
    /// Its bytes, or why they cannot be read.
    pub(crate) bytes: Result<&'a [u8], IoError>,
    /// Whether the range ends with it.
    pub(crate) is_last: bool,
}

impl<K: Copy, I: Iterator<Item = (K, Range<u64>)>> ReadAhead<K, I> {
    /// Reads pieces of `piece_bytes` bytes, up to `depth` of them at a time: through a ring where the file is read by
    /// one, else in threads; with depth 1 in this thread. No range is empty.
    pub(crate) fn new(file: &Arc<dyn ReadAt>, spans: I, depth: usize, piece_bytes: usize) -> Self {
        let plain = || Box::new(SyncQueue::new(depth));
        // Whatever is in the way of a ring or of threads, the file can still be read piece by piece.
        let overlapped = |disk: &_, backend| match read_queue_on(disk, backend, depth, piece_bytes) {
            Ok((queue, _)) => queue,
            Err(_) => plain(),
        };
        let queue: Box<dyn ReadQueue> = match file.ring_file() {
            Some(ring) => overlapped(ring.disk, IoBackend::Auto),
            None if depth > 1 && file.as_slice().is_none() => overlapped(&system_disk(), IoBackend::Buffered),
            None => plain(),
        };
        Self {
            file: Arc::clone(file),
            spans,
            rest: None,
            piece_bytes,
            queue,
            buffers: Vec::new(),
            asked: VecDeque::new(),
            first_tag: 0,
            early: BTreeMap::new(),
        }
    }

    /// Shows the next piece to `look`. `None` after the last piece of the last range.
    pub(crate) fn next<R>(&mut self, look: impl FnOnce(Piece<'_, K>) -> R) -> Option<R> {
        if self.file.as_slice().is_some() {
            return self.next_in_memory(look);
        }
        while self.queue.in_flight() + self.early.len() < self.queue.capacity() {
            let Some(asked) = self.next_asked() else { break };
            let buffer = self.buffers.pop().filter(|buffer| !buffer.is_empty());
            let request = ReadRequest {
                file: Arc::clone(&self.file),
                offset: FileOffset(asked.offset),
                bytes: asked.bytes,
                buffer: buffer.unwrap_or_else(|| self.queue.buffer(self.piece_bytes)),
                tag: self.first_tag + self.asked.len() as u64,
            };
            self.asked.push_back(asked);
            if let Err(refused) = self.queue.submit(request) {
                // There was room, so the queue no longer works.
                self.early.insert(refused.tag, refused.read_now());
            }
        }
        let Asked { key, offset, bytes, is_last } = self.asked.pop_front()?;
        let tag = self.first_tag;
        self.first_tag += 1;
        let completion = loop {
            if let Some(completion) = self.early.remove(&tag) {
                break completion;
            }
            match self.queue.complete() {
                Some(completion) => drop(self.early.insert(completion.tag, completion)),
                None => {
                    // The queue has lost it; no piece may be missing from what is checked.
                    let (file, offset) = (Arc::clone(&self.file), FileOffset(offset));
                    let buffer = AlignedBuffer::new(ReadRequest::buffer_bytes(bytes));
                    break ReadRequest { file, offset, bytes, buffer, tag }.read_now();
                }
            }
        };
        let ReadCompletion { buffer, result, .. } = completion;
        let seen = look(Piece { key, offset, bytes: result.map(|range| &buffer[range]), is_last });
        self.buffers.push(buffer);
        Some(seen)
    }

    fn next_in_memory<R>(&mut self, look: impl FnOnce(Piece<'_, K>) -> R) -> Option<R> {
        let Asked { key, offset, bytes: count, is_last } = self.next_asked()?;
        let whole = self.file.as_slice().unwrap_or_default();
        let bytes = usize::try_from(offset).ok().and_then(|start| whole.get(start..)?.get(..count));
        let outside = || IoError::OutsideFile {
            path: self.file.label().to_owned(),
            offset: FileOffset(offset),
            bytes: count as u64,
            file_bytes: whole.len() as u64,
        };
        Some(look(Piece { key, offset, bytes: bytes.ok_or_else(outside), is_last }))
    }

    /// The next piece to be read. All but the last of a range are of full length.
    fn next_asked(&mut self) -> Option<Asked<K>> {
        let (key, span) = match self.rest.take() {
            Some(rest) => rest,
            None => self.spans.next()?,
        };
        let bytes = (span.end - span.start).min(self.piece_bytes as u64);
        let next = span.start + bytes;
        let is_last = next == span.end;
        if !is_last {
            self.rest = Some((key, next..span.end));
        }
        // At most `piece_bytes`, which is a `usize`.
        Some(Asked { key, offset: span.start, bytes: bytes as usize, is_last })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{IoBackend, from_static, open};

    #[test]
    fn pieces_come_in_order_from_every_backend() {
        let content: Vec<u8> = (0..50_000u32).flat_map(|value| value.to_le_bytes()).collect();
        let named = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        std::fs::write(named.path(), &content).unwrap();
        let mut files = vec![from_static("memory", content.clone().leak())];
        let backends = [IoBackend::Auto, IoBackend::Direct, IoBackend::Buffered, IoBackend::Mmap];
        files.extend(backends.iter().filter_map(|&backend| open(named.path(), backend).ok()));
        let spans = [(7, 0..1), (8, 4096..150_001), (9, 150_001..200_000), (1, 3..70_000)];
        for file in &files {
            for (depth, piece_bytes) in [(1, 4096), (3, 4096), (8, 1000), (4, 1 << 20)] {
                let mut reader = ReadAhead::new(file, spans.iter().cloned(), depth, piece_bytes);
                for (key, span) in &spans {
                    let (mut at, mut is_last) = (span.start, false);
                    while !is_last {
                        is_last = reader
                            .next(|piece| {
                                let bytes = piece.bytes.unwrap();
                                assert_eq!((piece.key, piece.offset), (*key, at));
                                assert!(bytes == &content[at as usize..][..bytes.len()], "{file:?}");
                                at += bytes.len() as u64;
                                piece.is_last
                            })
                            .unwrap();
                    }
                    assert_eq!(at, span.end);
                }
                assert!(reader.next(|_| ()).is_none());
            }
        }
    }
}
