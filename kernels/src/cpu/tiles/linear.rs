//! Products of all rows with one matrix.

use rayon::prelude::*;

use super::panels::{Narrowed, Panels, PanelsView};
use super::product::{Scratch, products, tiles_of};
use super::{BLOCK_FEATURES, EDGE, Engine, Plan, Tile, Work, on_engine};
use crate::cpu::Isa;
use crate::cpu::columns::{ColumnBlock, column_blocks};
use crate::cpu::kept::with_kept;
use crate::matrix::WeightMatrix;

/// Panels that are multiplied with a block of features before the next block: their sums stay in the second cache.
const PANELS_TOGETHER: usize = 64;

/// As [`crate::cpu::linear`].
pub(in crate::cpu) fn linear(isa: Isa, out: &mut [f32], x: &[f32], w: &WeightMatrix<'_>) {
    on_engine(isa, Linear { out, x, w });
}

struct Linear<'a> {
    out: &'a mut [f32],
    x: &'a [f32],
    w: &'a WeightMatrix<'a>,
}

impl Work for Linear<'_> {
    type Output = ();

    fn run<E: Engine>(self, engine: E) {
        let Self { out, x, w } = self;
        let narrowed = Narrowed::new(engine.vectors(), x, w.cols(), Plan::of(w).order());
        let panels = Panels::all(*engine.vectors(), &narrowed);
        let blocks = column_blocks(out, w.rows(), BLOCK_FEATURES);
        let view = panels.view();
        blocks.into_par_iter().enumerate().for_each(|(block, mut columns)| {
            let session = engine.begin();
            with_kept!(LinearScratch, |scratch| {
                block_rows(engine, &session, &mut columns, w, block * BLOCK_FEATURES, view, scratch);
            });
        });
    }
}

#[derive(Default)]
struct LinearScratch {
    sums: Vec<Tile>,
    products: Scratch,
}

/// Writes products of the block of features that starts at `first`, row-major, into as many columns.
fn block_rows<E: Engine>(
    engine: E,
    session: &E::Session,
    columns: &mut ColumnBlock<'_>,
    w: &WeightMatrix<'_>,
    first: usize,
    x: PanelsView<'_>,
    scratch: &mut LinearScratch,
) {
    let tiles = tiles_of(w, first);
    for first_panel in (0..x.count()).step_by(PANELS_TOGETHER) {
        let part = x.part(first_panel, PANELS_TOGETHER);
        scratch.sums.resize(part.count() * tiles, Tile::ZERO);
        products(engine, session, &mut scratch.sums, w, first, part, &mut scratch.products);
        for (index, tile) in scratch.sums.iter().enumerate() {
            let (panel, tile_of_block) = (index / tiles, index % tiles);
            let by_row = engine.vectors().transposed(tile);
            for (row, values) in by_row.0.iter().enumerate().take(part.rows_of(panel)) {
                let out = columns.row_mut((first_panel + panel) * EDGE + row);
                let out = &mut out[tile_of_block * EDGE..];
                let width = out.len().min(EDGE);
                out[..width].copy_from_slice(&values[..width]);
            }
        }
    }
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
                let narrowed = Narrowed::new(engine.vectors(), self.0, self.1.cols(), Plan::of(self.1).order());
                Panels::all(*engine.vectors(), &narrowed)
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
                let blocks = column_blocks(self.out, self.tokens, BLOCK_FEATURES);
                with_kept!(LinearScratch, |scratch| {
                    for (block, mut columns) in blocks.into_iter().enumerate() {
                        let first = self.first_token + block * BLOCK_FEATURES;
                        block_rows(engine, &session, &mut columns, self.head, first, self.x, scratch);
                    }
                });
            }
        }
        on_engine(self.isa, Piece { out, tokens, head, first_token, x: self.panels.view() });
    }
}
