//! Products of activations with a stored matrix.

use rayon::prelude::*;

use super::Isa;
use super::decode::decode_strip;
use super::isa::Kernel;
use super::lanes::Lanes;
use super::products::{Rows, products};
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

/// [`linear`] in f32 on every instruction set: for routers.
pub fn linear_f32(isa: Isa, out: &mut [f32], x: &[f32], w: &WeightMatrix<'_>) {
    let rows = x.len() / w.cols();
    assert!(x.len() == rows * w.cols() && out.len() == rows * w.rows());
    if rows == 0 {
        return;
    }
    let mut transposed = vec![0.0; out.len()];
    linear_transposed(isa, &mut transposed, x, w);
    transpose(out, &transposed, w.rows());
}

/// [`linear`] into `out: [w.rows, rows]`. There is at least one row.
pub(super) fn linear_transposed(isa: Isa, out: &mut [f32], x: &[f32], w: &WeightMatrix<'_>) {
    let rows = out.len() / w.rows();
    out.par_chunks_mut(STRIP * rows).enumerate().for_each_init(
        || vec![0.0; STRIP * w.cols()],
        |buffer, (strip, out)| {
            isa.run(StripProducts { out, x: Rows::all(x, w.cols()), w, first_row: strip * STRIP, buffer });
        },
    );
}

/// Products of rows of `x` with a strip of `w`: `out: [strip's rows, rows of x]`. `buffer: [8, w.cols]` is scratch.
pub(super) struct StripProducts<'a> {
    pub(super) out: &'a mut [f32],
    pub(super) x: Rows<'a>,
    pub(super) w: &'a WeightMatrix<'a>,
    pub(super) first_row: usize,
    pub(super) buffer: &'a mut [f32],
}

impl Kernel for StripProducts<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let strip_rows = self.out.len() / self.x.count();
        let weights = &mut self.buffer[..strip_rows * self.w.cols()];
        decode_strip(lanes, self.w, self.first_row, weights);
        products(lanes, self.out, self.x, weights);
    }
}

/// Copies `source: [n, rows]` to `out: [rows, n]`.
pub(super) fn transpose(out: &mut [f32], source: &[f32], n: usize) {
    /// Square pieces of this edge stay in the nearest cache.
    const EDGE: usize = 32;
    let rows = source.len() / n;
    out.par_chunks_mut(EDGE * n).enumerate().for_each(|(piece, out)| {
        let first_row = piece * EDGE;
        for first_col in (0..n).step_by(EDGE) {
            for (row, out) in (first_row..).zip(out.chunks_exact_mut(n)) {
                for col in first_col..n.min(first_col + EDGE) {
                    out[col] = source[col * rows + row];
                }
            }
        }
    });
}
