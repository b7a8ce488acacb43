//! The memory of one unit, from its reading to its writing. Trays are made once and go round: nothing is allocated for
//! a unit that fits into what an earlier one left.

use std::ops::Range;

use minnow_formats::io::{AlignedBuffer, ReadRequest};

use super::source::{Part, Piece, Unit};

/// What was read for a unit, and what became of it.
#[derive(Debug)]
pub(crate) struct Tray {
    /// What was read.
    pub(super) inputs: Inputs,
    /// What a transformation made; a unit that is copied is written from its input.
    pub(super) results: Results,
}

/// A buffer for each region.
#[derive(Debug)]
pub(super) struct Inputs([Input; 2]);

#[derive(Debug)]
struct Input {
    buffer: AlignedBuffer,
    /// Where the wanted bytes are.
    filled: Range<usize>,
}

/// The regions of a tensor, or of some of its rows.
#[derive(Debug, Default)]
pub(super) struct Results {
    /// Elements or codes.
    pub(super) data: Region,
    /// Scales of an encoded or repacked tensor.
    pub(super) scales: Region,
    /// The matrix-wide scale of an encoded or repacked tensor that has one.
    pub(super) global_scale: Option<f32>,
}

/// What is to be written for a unit.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Content<'a> {
    /// The next bytes of the tensor's data region.
    Data(&'a [u8]),
    /// The next bytes of its scales region.
    Scales(&'a [u8]),
    /// Both regions.
    Tensor { data: &'a [u8], scales: &'a [u8], global_scale: Option<f32> },
}

impl Tray {
    /// A tray whose data is read into `buffer`. The one for scales is made when it is needed.
    pub(super) fn new(buffer: AlignedBuffer) -> Self {
        let input = |buffer| Input { buffer, filled: 0..0 };
        Self { inputs: Inputs([input(buffer), input(AlignedBuffer::new(0))]), results: Results::default() }
    }

    /// The result of `unit`, whose tray this is.
    pub(super) fn content(&self, unit: &Unit) -> Content<'_> {
        let Self { inputs, results } = self;
        match unit.piece {
            Piece::Bytes { part: Part::Data, .. } => Content::Data(inputs.bytes(Part::Data)),
            Piece::Bytes { part: Part::Scales, .. } => Content::Scales(inputs.bytes(Part::Scales)),
            Piece::Rows(_) => Content::Data(results.data.bytes()),
            Piece::Tensor => {
                let (data, scales) = (results.data.bytes(), results.scales.bytes());
                Content::Tensor { data, scales, global_scale: results.global_scale }
            }
        }
    }
}

impl Inputs {
    /// What was read of `part`.
    pub(super) fn bytes(&self, part: Part) -> &[u8] {
        let Input { buffer, filled } = &self.0[part as usize];
        &buffer[filled.clone()]
    }

    /// Gives the buffer for `part` away, to be read into: it takes `bytes` bytes from any offset.
    pub(super) fn take(&mut self, part: Part, bytes: usize) -> AlignedBuffer {
        let input = &mut self.0[part as usize];
        input.filled = 0..0;
        let buffer = std::mem::replace(&mut input.buffer, AlignedBuffer::new(0));
        let needed = ReadRequest::buffer_bytes(bytes);
        if buffer.len() < needed { AlignedBuffer::new(needed) } else { buffer }
    }

    /// Takes the buffer back, with the wanted bytes at `filled`.
    pub(super) fn put(&mut self, part: Part, buffer: AlignedBuffer, filled: Range<usize>) {
        self.0[part as usize] = Input { buffer, filled };
    }
}

/// Bytes whose memory only grows.
#[derive(Debug, Default)]
pub(super) struct Region {
    memory: Vec<u8>,
    length: usize,
}

impl Region {
    /// Room for `length` bytes, to be overwritten.
    pub(super) fn sized(&mut self, length: usize) -> &mut [u8] {
        if self.memory.len() < length {
            self.memory.resize(length, 0);
        }
        self.length = length;
        &mut self.memory[..length]
    }

    /// Takes `bytes` for its contents.
    pub(super) fn set(&mut self, bytes: Vec<u8>) {
        self.length = bytes.len();
        self.memory = bytes;
    }

    /// Its contents.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory[..self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_kept_and_only_the_asked_length_is_shown() {
        let mut region = Region::default();
        region.sized(100).fill(7);
        let address = region.bytes().as_ptr();
        assert_eq!(region.sized(10).len(), 10);
        assert_eq!((region.bytes(), region.bytes().as_ptr()), (&[7; 10][..], address));
        assert_eq!(region.sized(100).as_ptr(), address);
    }

    #[test]
    fn a_buffer_comes_back_to_its_part() {
        let mut inputs = Tray::new(AlignedBuffer::new(ReadRequest::buffer_bytes(100))).inputs;
        let address = inputs.0[0].buffer.as_ptr();
        let mut buffer = inputs.take(Part::Data, 100);
        assert!(inputs.bytes(Part::Data).is_empty());
        buffer[3..5].copy_from_slice(b"ab");
        inputs.put(Part::Data, buffer, 3..5);
        assert_eq!((inputs.bytes(Part::Data), inputs.bytes(Part::Scales)), (&b"ab"[..], &b""[..]));
        assert_eq!(inputs.take(Part::Data, 50).as_ptr(), address);
        assert!(inputs.take(Part::Scales, 50).len() >= 50);
    }
}
