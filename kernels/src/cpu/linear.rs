//! Products of activations with a stored matrix.

use rayon::prelude::*;

use super::Isa;
use super::columns::column_blocks;
use super::decode::decode_strip;
use super::isa::Kernel;
use super::kept::{with_kept, with_taken};
use super::lanes::{LANES, Lanes};
use super::products::{GROUP, Packed, PackedView, Step, products};
#[cfg(target_arch = "x86_64")]
use super::tiles;
use crate::codec::STRIP;
use crate::matrix::WeightMatrix;

/// `out[r, n] = sum over k of x[r, k] * w[n, k]`; `x: [rows, w.cols]`, `out: [rows, w.rows]`, both row-major. With
/// `x` rounded to BF16 where `isa` does so, see [`Isa::rounds_to_bf16`].
///
/// Parallel over a few rows of `w`, each decoded once for all rows of `x`.
pub fn linear(isa: Isa, out: &mut [f32], x: &[f32], w: &WeightMatrix<'_>) {
    #[cfg(target_arch = "x86_64")]
    if tiles::takes(isa, w) {
        assert!(x.len().is_multiple_of(w.cols()) && out.len() == x.len() / w.cols() * w.rows());
        if !x.is_empty() {
            tiles::linear(isa, out, x, w);
        }
        return;
    }
    linear_f32(isa, out, x, w);
}

/// [`linear`] with two matrices of the same shape.
pub(super) fn linear_pair(isa: Isa, outs: [&mut [f32]; 2], x: &[f32], w: [&WeightMatrix<'_>; 2]) {
    #[cfg(target_arch = "x86_64")]
    if w.iter().all(|w| tiles::takes(isa, w)) {
        let rows = x.len() / w[0].cols();
        for (out, w) in outs.iter().zip(w) {
            assert!(x.len() == rows * w.cols() && out.len() == rows * w.rows());
        }
        if rows > 0 {
            tiles::linear_pair(isa, outs, x, w);
        }
        return;
    }
    for (out, w) in outs.into_iter().zip(w) {
        linear(isa, out, x, w);
    }
}

/// [`linear`] in f32 on every instruction set: for routers.
pub fn linear_f32(isa: Isa, out: &mut [f32], x: &[f32], w: &WeightMatrix<'_>) {
    let rows = x.len() / w.cols();
    assert!(x.len() == rows * w.cols() && out.len() == rows * w.rows());
    if rows == 0 {
        return;
    }
    with_taken!(Packed, |packed: &mut Packed| {
        packed.set_all(isa, x, w.cols());
        column_blocks(out, w.rows(), FEATURES).into_par_iter().enumerate().for_each(|(block, mut columns)| {
            with_kept!(BlockScratch, |scratch| {
                let products = scratch.products(isa, packed.view(), w, block * FEATURES);
                for (row, products) in products.iter().enumerate() {
                    let out = columns.row_mut(row);
                    out.copy_from_slice(&products[..out.len()]);
                }
            });
        });
    });
}

/// Features that a task decodes and multiplies: while they are in the second cache, rows of `x` pass through it once.
pub(super) const FEATURES: usize = 4 * STRIP;
/// Groups of rows that are multiplied with all these features before the next.
const GROUPS: usize = 4;

/// Memory for a block of weights and its products.
#[derive(Default)]
pub(super) struct BlockScratch {
    pub(super) weights: Vec<Step>,
    pub(super) products: Vec<[f32; FEATURES]>,
}

impl BlockScratch {
    /// [`BlockProducts`] for all rows of `x`.
    pub(super) fn products(
        &mut self,
        isa: Isa,
        x: PackedView<'_>,
        w: &WeightMatrix<'_>,
        first: usize,
    ) -> &[[f32; FEATURES]] {
        let Self { weights, products } = self;
        products.resize(x.rows(), [0.0; FEATURES]);
        isa.run(BlockProducts { out: products, x, w, first, weights });
        products
    }
}

/// Products of rows of `x` with the features of `w` from `first` on, which are decoded into `weights`: `out: [rows of x]`.
/// Where `w` has fewer features, the rest of `out` is anything.
pub(super) struct BlockProducts<'a> {
    pub(super) out: &'a mut [[f32; FEATURES]],
    pub(super) x: PackedView<'a>,
    pub(super) w: &'a WeightMatrix<'a>,
    pub(super) first: usize,
    pub(super) weights: &'a mut Vec<Step>,
}

impl Kernel for BlockProducts<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { out, x, w, first, weights } = self;
        let steps = w.cols().div_ceil(LANES);
        let strips = FEATURES.min(w.rows() - first).div_ceil(STRIP);
        weights.resize(strips * steps, Step::ZERO);
        for (strip, weights) in weights.chunks_exact_mut(steps).enumerate() {
            decode_strip(lanes, w, first + strip * STRIP, weights);
        }
        for (part, out) in out.chunks_mut(GROUPS * GROUP).enumerate() {
            for (strip, weights) in weights.chunks_exact(steps).enumerate() {
                products(lanes, out, strip * STRIP, x.part(part * GROUPS, GROUPS), weights);
            }
        }
    }
}
