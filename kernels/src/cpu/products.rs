//! The one inner loop: products of rows of `x` with a few rows of f32 weights.
//!
//! A register tile keeps one vector of sixteen partial sums for each of its products while it walks along the columns.
//! What a product comes to depends on its two rows only, never on the tile it is computed in.

use std::ops::Range;

use super::lanes::{LANES, Lanes, Tile};
use crate::codec::STRIP;

/// Rows of an `x: [_, width]` that take part, in order.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    /// `[_, width]`
    pub(super) x: &'a [f32],
    pub(super) width: usize,
    pub(super) ids: RowIds<'a>,
}

/// Which rows.
#[derive(Clone, Copy)]
pub(super) enum RowIds<'a> {
    /// `count` rows, `step` apart, from `first` on.
    Every { first: usize, step: usize, count: usize },
    /// These.
    Listed(&'a [u32]),
}

impl<'a> Rows<'a> {
    /// All rows of `x`.
    pub(super) fn all(x: &'a [f32], width: usize) -> Self {
        Self { x, width, ids: RowIds::Every { first: 0, step: 1, count: x.len() / width } }
    }

    pub(super) fn count(&self) -> usize {
        match self.ids {
            RowIds::Every { count, .. } => count,
            RowIds::Listed(ids) => ids.len(),
        }
    }

    #[inline(always)]
    fn row(&self, index: usize) -> &'a [f32] {
        let id = match self.ids {
            RowIds::Every { first, step, .. } => first + index * step,
            RowIds::Listed(ids) => ids[index] as usize,
        };
        &self.x[id * self.width..][..self.width]
    }
}

/// Columns that are taken together for all rows of a strip and a group: their rows of `x` and of weights stay in the
/// nearest cache while every tile walks over them.
const PANEL: usize = 512;
const _: () = assert!(PANEL.is_multiple_of(LANES));

/// Rows of `x` that share a panel.
const GROUP: usize = 8;

/// The partial sums of a strip of weights with a group of rows: `[weights' rows][x's rows]`.
type Sums<L> = [[<L as Lanes>::Vector; GROUP]; STRIP];

/// `out[n, r] = sum over k of x[r, k] * weights[n, k]`, for `weights: [_, width]` and `out: [weights' rows, x's rows]`.
#[inline(always)]
pub(super) fn products<L: Lanes>(lanes: L, out: &mut [f32], x: Rows<'_>, weights: &[f32]) {
    let (rows, width) = (x.count(), x.width);
    for (weights, out) in weights.chunks(STRIP * width).zip(out.chunks_mut(STRIP * rows)) {
        for first_row in (0..rows).step_by(GROUP) {
            let group = first_row..rows.min(first_row + GROUP);
            let mut sums: Sums<L> = [[lanes.splat(0.0); GROUP]; STRIP];
            for first_col in (0..width).step_by(PANEL) {
                let panel = Panel { x, weights, group: group.clone(), cols: first_col..width.min(first_col + PANEL) };
                match L::TILE {
                    Tile::FourByFour => panel.add::<L, 4, 4>(lanes, &mut sums),
                    Tile::TwoByTwo => panel.add::<L, 2, 2>(lanes, &mut sums),
                }
            }
            for (sums, out) in sums.iter().zip(out.chunks_exact_mut(rows)) {
                for (sum, out) in sums.iter().zip(&mut out[group.clone()]) {
                    *out = lanes.sum(*sum);
                }
            }
        }
    }
}

/// Some columns of a strip of weights and of a group of rows of `x`.
struct Panel<'a> {
    x: Rows<'a>,
    /// Up to eight rows.
    weights: &'a [f32],
    /// Up to eight rows.
    group: Range<usize>,
    cols: Range<usize>,
}

impl Panel<'_> {
    /// Adds its products to `sums`, in tiles of `R` rows of `x` and `N` of weights, and smaller ones for the rest.
    #[inline(always)]
    fn add<L: Lanes, const R: usize, const N: usize>(&self, lanes: L, sums: &mut Sums<L>) {
        let weight_rows = self.weights.len() / self.x.width;
        let mut n = 0;
        while n + N <= weight_rows {
            self.add_rows::<L, R, N>(lanes, sums, n);
            n += N;
        }
        while n < weight_rows {
            self.add_rows::<L, R, 1>(lanes, sums, n);
            n += 1;
        }
    }

    /// [`Self::add`] for `N` rows of weights from row `n` on.
    #[inline(always)]
    fn add_rows<L: Lanes, const R: usize, const N: usize>(&self, lanes: L, sums: &mut Sums<L>, n: usize) {
        let mut r = 0;
        while r + R <= self.group.len() {
            self.add_tile::<L, R, N>(lanes, sums, r, n);
            r += R;
        }
        if R > 2 && r + 2 <= self.group.len() {
            self.add_tile::<L, 2, N>(lanes, sums, r, n);
            r += 2;
        }
        if r < self.group.len() {
            self.add_tile::<L, 1, N>(lanes, sums, r, n);
        }
    }

    #[inline(always)]
    fn add_tile<L: Lanes, const R: usize, const N: usize>(
        &self,
        lanes: L,
        all_sums: &mut Sums<L>,
        first_r: usize,
        first_n: usize,
    ) {
        let whole = self.cols.len() / LANES;
        let mut x_rows = [(&[][..], &[][..]); R];
        for (r, chunks) in x_rows.iter_mut().enumerate() {
            let row = self.x.row(self.group.start + first_r + r);
            let (vectors, rest) = row[self.cols.clone()].as_chunks::<LANES>();
            *chunks = (&vectors[..whole], rest);
        }
        let mut weight_rows = [(&[][..], &[][..]); N];
        for (n, chunks) in weight_rows.iter_mut().enumerate() {
            let row = &self.weights[(first_n + n) * self.x.width..][..self.x.width];
            let (vectors, rest) = row[self.cols.clone()].as_chunks::<LANES>();
            *chunks = (&vectors[..whole], rest);
        }

        let mut sums = [[lanes.splat(0.0); R]; N];
        for n in 0..N {
            for r in 0..R {
                sums[n][r] = all_sums[first_n + n][first_r + r];
            }
        }
        for k in 0..whole {
            let mut x = [lanes.splat(0.0); R];
            for r in 0..R {
                x[r] = lanes.load(&x_rows[r].0[k]);
            }
            for n in 0..N {
                let weight = lanes.load(&weight_rows[n].0[k]);
                for r in 0..R {
                    sums[n][r] = lanes.mul_add(x[r], weight, sums[n][r]);
                }
            }
        }
        if !self.cols.len().is_multiple_of(LANES) {
            for n in 0..N {
                let weight = lanes.load_part(weight_rows[n].1);
                for r in 0..R {
                    sums[n][r] = lanes.mul_add(lanes.load_part(x_rows[r].1), weight, sums[n][r]);
                }
            }
        }
        for n in 0..N {
            for r in 0..R {
                all_sums[first_n + n][first_r + r] = sums[n][r];
            }
        }
    }
}
