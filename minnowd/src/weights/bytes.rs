//! Bytes of a tensor region: part of a mapped or built-in file, or memory of their own.

use std::ops::{Deref, Range};
use std::sync::Arc;

use minnow_formats::checkpoint::Span;
use minnow_formats::io::{ReadAt, Region};

/// Immutable bytes, cheap to clone. Borrowed ones keep their file open. By default there are none.
#[derive(Clone, Debug, Default)]
pub struct Bytes(Home);

#[derive(Clone, Debug, Default)]
enum Home {
    #[default]
    Nowhere,
    /// `range` lies within the slice that `file` gives.
    File { file: Arc<dyn ReadAt>, range: Range<usize> },
    /// `range` lies within `memory`.
    Region { memory: Arc<Region>, range: Range<usize> },
}

impl Bytes {
    /// The bytes of `span`, without a copy. `None` if the file is not in memory as a whole, or ends before the span.
    #[must_use]
    pub fn borrowed(file: &Arc<dyn ReadAt>, span: Span) -> Option<Self> {
        let start = usize::try_from(span.offset.0).ok()?;
        let range = start..start.checked_add(usize::try_from(span.bytes).ok()?)?;
        file.as_slice()?.get(range.clone())?;
        Some(Self(Home::File { file: Arc::clone(file), range }))
    }

    /// Part of memory that this process has for itself.
    ///
    /// # Panics
    /// If `range` ends behind it.
    #[must_use]
    pub(super) fn in_region(memory: &Arc<Region>, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= memory.len(), "{range:?} of {} bytes", memory.len());
        Self(Home::Region { memory: Arc::clone(memory), range })
    }

    /// Whether the bytes belong to a file in memory.
    #[must_use]
    pub fn is_borrowed(&self) -> bool {
        matches!(self.0, Home::File { .. })
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Home::File { file, range } => {
                &file.as_slice().expect("a file in memory stays there while it is open")[range.clone()]
            }
            Home::Region { memory, range } => &memory[range.clone()],
            Home::Nowhere => &[],
        }
    }
}
