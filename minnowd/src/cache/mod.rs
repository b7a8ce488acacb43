//! Pages of keys and values: who holds which, which tokens they belong to, what is left. Bookkeeping only; the numbers
//! lie in the backend, and files in [`crate::persist`].
//!
//! A page is the K and V of one 32-token block in every layer. [`PagePool`] counts its holders; [`PrefixCache`] knows
//! the tokens of every committed block and finds the longest known prefix of a request. No model, no clock, no I/O.

mod pool;
mod prefix;

pub use pool::{PageId, PagePool, PoolError, page_bytes, pages_within};
pub use prefix::{
    Access, BlockTokens, CacheStats, CachedBlock, Commit, Found, NoRoom, PrefixCache, Restored, Sequence,
};
