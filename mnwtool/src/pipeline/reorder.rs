//! Results back into the order in which their units were numbered.

use std::collections::BTreeMap;

/// Holds what came early. The pipeline's credits bound how much that can be.
#[derive(Debug)]
pub(crate) struct Reorder<T> {
    next: u64,
    early: BTreeMap<u64, T>,
}

impl<T> Default for Reorder<T> {
    fn default() -> Self {
        Self { next: 0, early: BTreeMap::new() }
    }
}

impl<T> Reorder<T> {
    /// Takes the result of unit `sequence`. Each number comes once, counting from 0, in any order.
    pub(crate) fn push(&mut self, sequence: u64, result: T) {
        let before = self.early.insert(sequence, result);
        debug_assert!(before.is_none() && sequence >= self.next, "unit {sequence} came twice");
    }

    /// The next result in order, if it has come.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let result = self.early.remove(&self.next)?;
        self.next += 1;
        Some(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_order_in_gives_counting_order_out() {
        for first in 0..6u64 {
            let mut reorder = Reorder::default();
            let mut out = Vec::new();
            for step in 0..6 {
                let sequence = (first + 5 * step) % 6;
                reorder.push(sequence, sequence);
                out.extend(std::iter::from_fn(|| reorder.pop()));
            }
            assert_eq!(out, [0, 1, 2, 3, 4, 5]);
        }
    }
}
