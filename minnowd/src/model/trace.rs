//! A probe that keeps everything it sees, for `verify` and for tests.

use std::collections::BTreeMap;

use super::{Point, Probe};

/// Values of a forward by segment, layer and point. Rows that came in several calls are joined.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    seen: BTreeMap<(usize, Option<usize>, Point), Rows>,
}

/// A matrix `[rows, width]`, row-major.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    /// Columns.
    pub width: usize,
    /// The values, row after row.
    pub values: Vec<f32>,
}

impl Trace {
    /// What was seen at a point; `None` if nothing was.
    #[must_use]
    pub fn rows(&self, segment: usize, layer: Option<usize>, point: Point) -> Option<&Rows> {
        self.seen.get(&(segment, layer, point))
    }

    /// Everything that was seen, in the order of segment, layer (none first) and point.
    pub fn iter(&self) -> impl Iterator<Item = ((usize, Option<usize>, Point), &Rows)> {
        self.seen.iter().map(|(&key, rows)| (key, rows))
    }
}

impl Probe for Trace {
    fn record(&mut self, segment: usize, layer: Option<usize>, point: Point, shape: [usize; 2], values: &[f32]) {
        let rows = self.seen.entry((segment, layer, point)).or_default();
        debug_assert!(rows.width == 0 || rows.width == shape[1], "the width of a point never changes");
        rows.width = shape[1];
        rows.values.extend_from_slice(values);
    }
}
