//! Memory that direct I/O accepts, alone or from a pool that a ring knows.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Zeroed bytes that start at a multiple of [`AlignedBuffer::ALIGNMENT`]. The address never changes, also not when
/// the buffer moves, so an operation may keep it for as long as it owns the buffer.
pub struct AlignedBuffer {
    memory: Memory,
    /// The pool that takes the memory back when the buffer is dropped, and which of its buffers this is.
    place: Option<(Arc<Pool>, u16)>,
}

/// The memory of a buffer.
#[derive(Default)]
struct Memory {
    /// Larger than needed by one alignment, so that an aligned start lies inside. Never resized.
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

/// Buffers whose memory stays where it is until the pool and all of them are gone.
pub(super) struct Pool {
    spare: Mutex<Vec<(u16, Memory)>>,
}

impl AlignedBuffer {
    /// Alignment of the first byte: a page, which satisfies every device.
    pub const ALIGNMENT: usize = 4096;

    /// A buffer of `bytes` zero bytes.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self { memory: Memory::new(bytes), place: None }
    }

    /// Which buffer of `pool` this is, if it is one.
    pub(super) fn index_in(&self, pool: &Arc<Pool>) -> Option<u16> {
        self.place.as_ref().filter(|(home, _)| Arc::ptr_eq(home, pool)).map(|(_, index)| *index)
    }
}

impl Memory {
    fn new(length: usize) -> Self {
        let bytes = vec![0; length + AlignedBuffer::ALIGNMENT];
        let address = bytes.as_ptr().addr();
        Self { start: address.next_multiple_of(AlignedBuffer::ALIGNMENT) - address, length, bytes }
    }

    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.length]
    }
}

impl Pool {
    /// `count` buffers of `bytes` bytes.
    pub(super) fn new(count: u16, bytes: usize) -> Arc<Self> {
        Arc::new(Self { spare: Mutex::new((0..count).map(|index| (index, Memory::new(bytes))).collect()) })
    }

    /// A buffer that nobody has; `None` if all are out.
    pub(super) fn take(self: &Arc<Self>) -> Option<AlignedBuffer> {
        let (index, memory) = self.spare().pop()?;
        Some(AlignedBuffer { memory, place: Some((Arc::clone(self), index)) })
    }

    /// Address and length of every buffer, by index. None may be out.
    pub(super) fn ranges(&self) -> Vec<(*mut u8, usize)> {
        let mut spare = self.spare();
        spare.sort_by_key(|(index, _)| *index);
        spare.iter_mut().map(|(_, memory)| (memory.as_mut().as_mut_ptr(), memory.length)).collect()
    }

    fn spare(&self) -> MutexGuard<'_, Vec<(u16, Memory)>> {
        // Nothing panics while the lock is held, and spare memory has no state to spoil.
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        if let Some((pool, index)) = self.place.take() {
            pool.spare().push((index, std::mem::take(&mut self.memory)));
        }
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory.bytes[self.memory.start..self.memory.start + self.memory.length]
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut()
    }
}

impl fmt::Debug for AlignedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuffer({} bytes)", self.len())
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} spare)", self.spare().len())
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

    #[test]
    fn the_memory_of_a_pool_stays_where_it_is() {
        let (pool, other) = (Pool::new(2, 4096), Pool::new(1, 4096));
        let ranges = pool.ranges();
        for _ in 0..3 {
            let buffers = [pool.take().unwrap(), pool.take().unwrap()];
            assert!(pool.take().is_none());
            for buffer in &buffers {
                let index = buffer.index_in(&pool).unwrap();
                assert_eq!((buffer.as_ptr(), buffer.len()), (ranges[index as usize].0.cast_const(), 4096));
                assert_eq!(buffer.index_in(&other), None);
            }
        }
        let last = pool.take().unwrap();
        drop(pool);
        assert!(last.iter().all(|&byte| byte == 0));
    }
}
