//! Bytes of a tensor region: part of a mapped or built-in file, or memory of their own.

use std::ops::{Deref, Range};
use std::sync::Arc;

use minnow_formats::checkpoint::Span;
use minnow_formats::io::ReadAt;

/// Immutable bytes, cheap to clone. Borrowed ones keep their file open.
#[derive(Clone, Debug)]
pub struct Bytes(Home);

#[derive(Clone, Debug)]
enum Home {
    /// `range` lies within the slice that `file` gives.
    File {
        file: Arc<dyn ReadAt>,
        range: Range<usize>,
    },
    Memory(Arc<Vec<u8>>),
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

    /// Bytes of their own.
    #[must_use]
    pub fn owned(bytes: Vec<u8>) -> Self {
        Self(Home::Memory(Arc::new(bytes)))
    }

    /// Whether the bytes belong to a file in memory.
    #[must_use]
    pub fn is_borrowed(&self) -> bool {
        matches!(self.0, Home::File { .. })
    }
}

impl Default for Bytes {
    fn default() -> Self {
        Self::owned(Vec::new())
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Home::File { file, range } => {
                &file.as_slice().expect("a file in memory stays there while it is open")[range.clone()]
            }
            Home::Memory(bytes) => bytes,
        }
    }
}
