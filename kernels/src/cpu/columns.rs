//! A row-major matrix cut into blocks of columns, which threads may write at the same time.

use std::marker::PhantomData;

/// Some columns of every row of a matrix.
pub(super) struct ColumnBlock<'a> {
    first: *mut f32,
    rows: usize,
    /// Distance between rows.
    stride: usize,
    width: usize,
    matrix: PhantomData<&'a mut [f32]>,
}

// SAFETY: a block is the only one that reaches its columns, like a mutable slice of them, and f32 may change threads.
unsafe impl Send for ColumnBlock<'_> {}

/// Cuts `matrix: [rows, cols]` into blocks of `width` columns; the last may be narrower.
pub(super) fn column_blocks(matrix: &mut [f32], cols: usize, width: usize) -> Vec<ColumnBlock<'_>> {
    let rows = matrix.len() / cols;
    assert_eq!(matrix.len(), rows * cols);
    let base = matrix.as_mut_ptr();
    (0..cols)
        .step_by(width)
        .map(|first| ColumnBlock {
            // Into the first row; wrapping, for there may be no row at all.
            first: base.wrapping_add(first),
            rows,
            stride: cols,
            width: width.min(cols - first),
            matrix: PhantomData,
        })
        .collect()
}

impl ColumnBlock<'_> {
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// This block's part of a row.
    pub(super) fn row_mut(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows);
        // SAFETY: `row` exists, so these `width` elements lie within the matrix that `column_blocks` borrowed for as
        // long as this block lives. Blocks of one matrix have no column in common, and `&mut self` keeps two rows of
        // this one from being used at once.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(row * self.stride), self.width) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_the_matrix_once() {
        let mut matrix = vec![0.0; 3 * 7];
        let mut blocks = column_blocks(&mut matrix, 7, 3);
        assert_eq!(blocks.iter_mut().map(|block| block.row_mut(2).len()).collect::<Vec<_>>(), [3, 3, 1]);
        for (index, block) in blocks.iter_mut().enumerate() {
            for row in 0..3 {
                block.row_mut(row).iter_mut().for_each(|value| *value += (10 * row + index) as f32);
            }
        }
        assert_eq!(matrix[..7], [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0]);
        assert_eq!(matrix[14..], [20.0, 20.0, 20.0, 21.0, 21.0, 21.0, 22.0]);
    }
}
