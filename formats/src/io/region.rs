//! Memory for much that is read and then kept.

use std::io;
use std::ops::{Deref, DerefMut};

use memmap2::{Advice, Mmap, MmapMut};

/// A huge page of x86-64, and the usual one of AArch64.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// What pages back memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// Huge ones where the system has them: fewer of a core's reads wait for a translation of addresses.
    #[default]
    Auto,
    /// What the system does by itself.
    Never,
}

/// Zeroed bytes that begin a huge page, until they are [kept](Self::keep).
#[derive(Debug)]
pub struct RegionMut {
    /// Larger than needed by one huge page, so that its start lies inside.
    memory: MmapMut,
    start: usize,
    bytes: usize,
}

/// Bytes that nobody can change any more.
#[derive(Debug)]
pub struct Region {
    memory: Mmap,
    start: usize,
    bytes: usize,
}

impl RegionMut {
    /// `bytes` zero bytes; an error if the system has no memory for them.
    pub fn new(bytes: usize, huge_pages: HugePages) -> io::Result<Self> {
        let memory = MmapMut::map_anon(bytes.saturating_add(HUGE_PAGE_BYTES))?;
        if huge_pages == HugePages::Auto {
            // A system without huge pages refuses; then these are small ones.
            _ = memory.advise(Advice::HugePage);
        }
        let address = memory.as_ptr().addr();
        Ok(Self { start: address.next_multiple_of(HUGE_PAGE_BYTES) - address, bytes, memory })
    }

    /// The same bytes, read-only.
    pub fn keep(self) -> io::Result<Region> {
        Ok(Region { memory: self.memory.make_read_only()?, start: self.start, bytes: self.bytes })
    }
}

impl Deref for RegionMut {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.bytes]
    }
}

impl DerefMut for RegionMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.bytes]
    }
}

impl Deref for Region {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.bytes]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_begin_huge_pages_and_keep_what_was_written() {
        for (bytes, huge_pages) in [(0, HugePages::Auto), (4097, HugePages::Never), (5 << 20, HugePages::Auto)] {
            let mut region = RegionMut::new(bytes, huge_pages).unwrap();
            assert!(region.len() == bytes && region.iter().all(|&byte| byte == 0));
            assert_eq!(region.as_ptr().addr() % HUGE_PAGE_BYTES, 0);
            region.fill(7);
            let kept = region.keep().unwrap();
            assert!(kept.len() == bytes && kept.iter().all(|&byte| byte == 7));
        }
        assert!(RegionMut::new(usize::MAX / 2, HugePages::Auto).is_err());
    }
}
