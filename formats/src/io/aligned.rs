//! Memory that direct I/O accepts.

use std::fmt;
use std::ops::{Deref, DerefMut};

/// Zeroed bytes that start at a multiple of [`AlignedBuffer::ALIGNMENT`]. The address never changes, also not when
/// the buffer moves, so an operation may keep it for as long as it owns the buffer.
pub struct AlignedBuffer {
    /// Larger than needed by one alignment, so that an aligned start lies inside. Never resized.
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl AlignedBuffer {
    /// Alignment of the first byte: a page, which satisfies every device.
    pub const ALIGNMENT: usize = 4096;

    /// A buffer of `bytes` zero bytes.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        let memory = vec![0; bytes + Self::ALIGNMENT];
        let address = memory.as_ptr().addr();
        Self { start: address.next_multiple_of(Self::ALIGNMENT) - address, bytes, memory }
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.bytes]
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.bytes]
    }
}

impl fmt::Debug for AlignedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuffer({} bytes)", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_zero() {
        for bytes in [0, 1, 4095, 4096, 1 << 20] {
            let buffer = AlignedBuffer::new(bytes);
            assert_eq!(buffer.len(), bytes);
            assert_eq!(buffer.as_ptr().addr() % AlignedBuffer::ALIGNMENT, 0);
            assert!(buffer.iter().all(|&byte| byte == 0));
        }
    }
}
