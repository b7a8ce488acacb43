//! Who holds which page, and which pages are free. What the pages mean is left to [`super::prefix`].
//!
//! A page is free, or held by one or more holders. A reserved page is being written by its only holder; once
//! [`PagePool::commit`] says that its K/V were computed from exactly the final tokens of a complete block, others may
//! share it. Free pages and held pages always add up to the pool.

use minnow_common::ModelConfig;
use minnow_common::units::HumanBytes;
use thiserror::Error;

/// A page's place in its pool and in every backend's storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(pub u32);

/// A fixed number of pages and their holders.
#[derive(Clone, Debug)]
pub struct PagePool {
    pages: Vec<PageState>,
    /// Free pages; the last one is given out next, so recently used memory is used again.
    free: Vec<PageId>,
}

#[derive(Clone, Copy, Debug, Default)]
struct PageState {
    holders: u32,
    is_committed: bool,
}

/// Why the pool refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PoolError {
    /// Fewer pages are free than asked for; nothing was taken.
    #[error("{wanted} pages are needed, but {free} of {count} are free")]
    Exhausted {
        /// Pages asked for.
        wanted: usize,
        /// Pages free.
        free: usize,
        /// Pages in the pool.
        count: usize,
    },
    /// Nobody holds this page, or it does not exist.
    #[error("page {page} is not held; the pool has {count} pages")]
    NotHeld {
        /// The page.
        page: u32,
        /// Pages in the pool.
        count: usize,
    },
    /// A page that is still being written cannot be shared.
    #[error("page {page} is not committed, so it cannot be shared")]
    NotCommitted {
        /// The page.
        page: u32,
    },
    /// A final page cannot be final once more.
    #[error("page {page} is committed already")]
    Committed {
        /// The page.
        page: u32,
    },
    /// A page has as many holders as can be counted.
    #[error("page {page} has {} holders, the most there can be", u32::MAX)]
    Holders {
        /// The page.
        page: u32,
    },
    /// The budget is smaller than one page.
    #[error("a cache of {} holds no page of {}", HumanBytes(*budget_bytes), HumanBytes(*page_bytes))]
    Budget {
        /// Bytes allowed.
        budget_bytes: u64,
        /// Bytes of one page.
        page_bytes: u64,
    },
}

impl PagePool {
    /// A pool of `count` free pages, `PageId(0)` to `PageId(count - 1)`; page 0 is given out first. A count beyond
    /// 2^32 is cut there, since no page has a larger number.
    #[must_use]
    pub fn new(count: usize) -> Self {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        Self { pages: vec![PageState::default(); count as usize], free: (0..count).rev().map(PageId).collect() }
    }

    /// Pages in the pool.
    #[must_use]
    pub fn count(&self) -> usize {
        self.pages.len()
    }

    /// Pages that nobody holds.
    #[must_use]
    pub fn free_count(&self) -> usize {
        self.free.len()
    }

    /// Takes `wanted` free pages for one holder, or none at all.
    pub fn reserve(&mut self, wanted: usize) -> Result<Vec<PageId>, PoolError> {
        if wanted > self.free.len() {
            return Err(PoolError::Exhausted { wanted, free: self.free.len(), count: self.pages.len() });
        }
        let taken: Vec<PageId> = self.free.drain(self.free.len() - wanted..).rev().collect();
        for page in &taken {
            self.pages[page.0 as usize] = PageState { holders: 1, is_committed: false };
        }
        Ok(taken)
    }

    /// Says that the K/V of `page` are final: computed from exactly the final tokens of a complete block.
    pub fn commit(&mut self, page: PageId) -> Result<(), PoolError> {
        let state = self.held(page)?;
        if state.is_committed {
            return Err(PoolError::Committed { page: page.0 });
        }
        state.is_committed = true;
        Ok(())
    }

    /// Adds a holder to a committed page.
    pub fn share(&mut self, page: PageId) -> Result<(), PoolError> {
        let state = self.held(page)?;
        if !state.is_committed {
            return Err(PoolError::NotCommitted { page: page.0 });
        }
        state.holders = state.holders.checked_add(1).ok_or(PoolError::Holders { page: page.0 })?;
        Ok(())
    }

    /// Takes away a holder, and says whether that freed the page.
    pub fn release(&mut self, page: PageId) -> Result<bool, PoolError> {
        let state = self.held(page)?;
        state.holders -= 1;
        if state.holders > 0 {
            return Ok(false);
        }
        *state = PageState::default();
        self.free.push(page);
        Ok(true)
    }

    /// Holders of a page; 0 if it is free or does not exist.
    #[must_use]
    pub fn holders(&self, page: PageId) -> u32 {
        self.pages.get(page.0 as usize).map_or(0, |state| state.holders)
    }

    /// Whether a page is held and its K/V are final.
    #[must_use]
    pub fn is_committed(&self, page: PageId) -> bool {
        self.pages.get(page.0 as usize).is_some_and(|state| state.is_committed)
    }

    fn held(&mut self, page: PageId) -> Result<&mut PageState, PoolError> {
        let count = self.pages.len();
        self.pages
            .get_mut(page.0 as usize)
            .filter(|state| state.holders > 0)
            .ok_or(PoolError::NotHeld { page: page.0, count })
    }
}

/// Bytes of one page of this model: K and V of one block in every layer, `element_bytes` for each number.
#[must_use]
pub fn page_bytes(config: &ModelConfig, element_bytes: usize) -> u64 {
    let elements = 2 * config.num_hidden_layers as u64 * config.kv_elements_per_page() as u64;
    elements * element_bytes as u64
}

/// How many pages of `page_bytes` fit `budget_bytes`: at least one, or an error with both numbers.
pub fn pages_within(budget_bytes: u64, page_bytes: u64) -> Result<usize, PoolError> {
    match budget_bytes.checked_div(page_bytes) {
        None | Some(0) => Err(PoolError::Budget { budget_bytes, page_bytes }),
        Some(pages) => Ok(pages.min(u64::from(u32::MAX)) as usize),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_is_whole_or_nothing() {
        let mut pool = PagePool::new(3);
        assert_eq!(pool.reserve(2), Ok(vec![PageId(0), PageId(1)]));
        assert_eq!(pool.reserve(2), Err(PoolError::Exhausted { wanted: 2, free: 1, count: 3 }));
        assert_eq!(pool.free_count(), 1);
        assert_eq!(pool.reserve(0), Ok(vec![]));
    }

    #[test]
    fn a_page_is_free_again_after_its_last_holder() {
        let mut pool = PagePool::new(2);
        let page = pool.reserve(1).unwrap()[0];
        assert_eq!(pool.share(page), Err(PoolError::NotCommitted { page: 0 }));
        pool.commit(page).unwrap();
        assert_eq!(pool.commit(page), Err(PoolError::Committed { page: 0 }));
        pool.share(page).unwrap();
        assert_eq!(pool.holders(page), 2);
        assert_eq!(pool.release(page), Ok(false));
        assert_eq!(pool.release(page), Ok(true));
        assert_eq!(pool.free_count(), 2);
        assert!(!pool.is_committed(page));
    }

    #[test]
    fn what_nobody_holds_cannot_be_touched() {
        let mut pool = PagePool::new(1);
        for page in [PageId(0), PageId(7)] {
            let refused = PoolError::NotHeld { page: page.0, count: 1 };
            assert_eq!(pool.release(page), Err(refused.clone()));
            assert_eq!(pool.share(page), Err(refused.clone()));
            assert_eq!(pool.commit(page), Err(refused));
            assert_eq!(pool.holders(page), 0);
        }
    }

    #[test]
    fn a_budget_below_one_page_is_refused_with_its_numbers() {
        assert_eq!(pages_within(4096, 1024), Ok(4));
        assert_eq!(pages_within(5000, 1024), Ok(4));
        let error = pages_within(1023, 1024).unwrap_err();
        assert_eq!(error.to_string(), "a cache of 1023 B holds no page of 1.00 KiB");
    }
}
