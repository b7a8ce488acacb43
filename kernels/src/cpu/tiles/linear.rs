//! Products of all rows with one matrix.

use rayon::prelude::*;

use super::panels::{Panels, PanelsView};
use super::product::{Features, PANELS_IN_PLACE, Scratch, products_in_parts};
use super::{BLOCK_FEATURES, EDGE, Engine, Order, Plan, Tile, Work, on_engine};
use crate::cpu::Isa;
use crate::cpu::columns::{ColumnBlock, column_blocks};
use crate::cpu::kept::with_kept;
use crate::matrix::WeightMatrix;

/// Tiles of sums that are known before they are written: they stay in the second cache.
const TILES_TOGETHER: usize = 128;
/// Bytes of lines of BF16 that many rows pass: they stay in the second cache too, and the more features there are, the less
/// often rows are read.
const PASSED_BYTES: usize = 1 << 20;
/// Features that many rows pass at most.
const PASSED_FEATURES: usize = 256;

/// Features that a task computes.
fn features_a_task(w: &WeightMatrix<'_>, panels: usize) -> usize {
    let together = Features::together(w);
    if Plan::of(w) != Plan::Bf16 || panels <= PANELS_IN_PLACE {
        return together;
    }
    let fitting = PASSED_FEATURES.min(PASSED_BYTES / (2 * w.cols())).min(w.rows() / rayon::current_num_threads());
    (fitting / BLOCK_FEATURES).max(1) * BLOCK_FEATURES
}

/// As [`crate::cpu::linear`].
pub(in crate::cpu) fn linear(isa: Isa, out: &mut [f32], x: &[f32], w: &WeightMatrix<'_>) {
    on_engine(isa, Linear { outs: [out], x, w: [w] });
}

/// [`linear`] with two matrices of the same width, for which `x` is rounded once.
pub(in crate::cpu) fn linear_pair(isa: Isa, outs: [&mut [f32]; 2], x: &[f32], w: [&WeightMatrix<'_>; 2]) {
    on_engine(isa, Linear { outs, x, w });
}

struct Linear<'a, const MATRICES: usize> {
    outs: [&'a mut [f32]; MATRICES],
    x: &'a [f32],
    w: [&'a WeightMatrix<'a>; MATRICES],
}

impl<const MATRICES: usize> Work for Linear<'_, MATRICES> {
    type Output = ();

    fn run<E: Engine>(self, engine: E) {
        let Self { outs, x, w: matrices } = self;
        let mut packed: Option<(Order, Panels)> = None;
        for (out, w) in outs.into_iter().zip(matrices) {
            let order = Plan::of(w).order();
            let of_order = packed.take().filter(|(packed, _)| *packed == order);
            let (_, panels) =
                packed.insert(of_order.unwrap_or_else(|| (order, Panels::of(engine.vectors(), x, w.cols(), order))));
            let view = panels.view();
            let count = features_a_task(w, view.count());
            let blocks = column_blocks(out, w.rows(), count);
            blocks.into_par_iter().enumerate().for_each(|(block, mut columns)| {
                let session = engine.begin();
                let features = Features::up_to(w, block * count, count);
                let compute = |scratch: &mut LinearScratch| {
                    block_rows(engine, &session, &mut columns, features, view, scratch);
                };
                with_kept!(LinearScratch, compute);
            });
        }
    }
}

#[derive(Default)]
struct LinearScratch {
    sums: Vec<Tile>,
    products: Scratch,
}

/// Writes products of some features, row-major, into as many columns.
fn block_rows<E: Engine>(
    engine: E,
    session: &E::Session,
    columns: &mut ColumnBlock<'_>,
    features: Features<'_>,
    x: PanelsView<'_>,
    scratch: &mut LinearScratch,
) {
    let tiles = features.tiles();
    // Neighbours go to one thread, one after the other.
    let features = features.before(features.following());
    let LinearScratch { sums, products: scratch } = scratch;
    let panels = (TILES_TOGETHER / tiles).next_multiple_of(2);
    products_in_parts(engine, session, sums, features, x, scratch, panels, |first_panel, sums| {
        for (index, tile) in sums.iter().enumerate() {
            let (panel, tile_of_block) = (first_panel + index / tiles, index % tiles);
            let by_row = engine.vectors().transposed(tile);
            for (row, values) in by_row.0.iter().enumerate().take(x.rows_of(panel)) {
                let out = &mut columns.row_mut(panel * EDGE + row)[tile_of_block * EDGE..];
                let width = out.len().min(EDGE);
                out[..width].copy_from_slice(&values[..width]);
            }
        }
    });
}

/// Rows for which pieces of logits are computed.
pub(in crate::cpu) struct HeadInput {
    isa: Isa,
    panels: Panels,
}

impl HeadInput {
    /// Rounds and arranges `x: [rows, head.cols]`; there is at least one row.
    pub(in crate::cpu) fn new(isa: Isa, x: &[f32], head: &WeightMatrix<'_>) -> Self {
        struct Prepare<'a>(&'a [f32], &'a WeightMatrix<'a>);
        impl Work for Prepare<'_> {
            type Output = Panels;

            fn run<E: Engine>(self, engine: E) -> Panels {
                Panels::of(engine.vectors(), self.0, self.1.cols(), Plan::of(self.1).order())
            }
        }
        Self { isa, panels: on_engine(isa, Prepare(x, head)) }
    }

    /// Logits of the tokens from `first_token`, a multiple of 64, on: `out: [rows, tokens]`. On this thread.
    pub(in crate::cpu) fn logits(&self, out: &mut [f32], tokens: usize, head: &WeightMatrix<'_>, first_token: usize) {
        struct Piece<'a> {
            out: &'a mut [f32],
            tokens: usize,
            head: &'a WeightMatrix<'a>,
            first_token: usize,
            x: PanelsView<'a>,
        }
        impl Work for Piece<'_> {
            type Output = ();

            fn run<E: Engine>(self, engine: E) {
                let session = engine.begin();
                let count = features_a_task(self.head, self.x.count());
                let blocks = column_blocks(self.out, self.tokens, count);
                with_kept!(LinearScratch, |scratch| {
                    for (block, mut columns) in blocks.into_iter().enumerate() {
                        let first = block * count;
                        let count = count.min(self.tokens - first);
                        let features = Features::up_to(self.head, self.first_token + first, count);
                        block_rows(engine, &session, &mut columns, features, self.x, scratch);
                    }
                });
            }
        }
        on_engine(self.isa, Piece { out, tokens, head, first_token, x: self.panels.view() });
    }
}

#[cfg(test)]
mod tests {
    use minnow_common::{Encoding, FloatType, Shape, TensorSpec};

    use super::*;
    use crate::conformance::random;

    /// Of one encoding, for which rows are rounded once, and of two that want columns in different orders.
    #[test]
    fn a_pair_of_matrices_has_the_bits_of_each_alone() {
        const ROWS: usize = 19;
        const COLS: usize = 256;
        const FEATURES: usize = 40;
        let encodings = [Encoding::Float(FloatType::Bf16), Encoding::I4Mma];
        let specs = encodings.map(|encoding| {
            let group = if encoding == Encoding::I4Mma { 128 } else { 0 };
            TensorSpec::new(Shape::matrix(FEATURES, COLS), encoding, group, None).expect("a spec")
        });
        // No byte above 0x3f, so that no BF16 and no scale is infinite or NaN.
        let bytes = |count: u64| -> Vec<u8> { (0..count).map(|index| (index * 37 % 64) as u8).collect() };
        let stored = specs.each_ref().map(|spec| (bytes(spec.data_bytes()), bytes(spec.scales_bytes())));
        let matrix = |index: usize| {
            let (data, scales) = &stored[index];
            WeightMatrix::new(&specs[index], data, scales).expect("a matrix")
        };
        let x = random("rows of a pair", ROWS * COLS);
        for isa in Isa::present().filter(|isa| isa.rounds_to_bf16()) {
            for pair in [[0, 0], [0, 1], [1, 0], [1, 1]] {
                let w = pair.map(matrix);
                let alone = w.each_ref().map(|w| {
                    let mut out = vec![f32::NAN; ROWS * FEATURES];
                    linear(isa, &mut out, &x, w);
                    out
                });
                let [mut first, mut second] = [(); 2].map(|()| vec![f32::NAN; ROWS * FEATURES]);
                linear_pair(isa, [&mut first, &mut second], &x, w.each_ref());
                assert_eq!([first, second], alone, "{isa}, {pair:?}");
            }
        }
    }
}
