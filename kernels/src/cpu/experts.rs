//! Feed-forward parts: one for all tokens, or a few of many for each.

use std::ops::Range;

use rayon::prelude::*;

use super::Isa;
use super::columns::{ColumnBlock, column_blocks};
use super::elementwise::{swiglu, swiglu_in_place};
use super::isa::Kernel;
use super::kept::{with_kept, with_taken};
use super::lanes::Lanes;
use super::linear::{BlockProducts, BlockScratch, FEATURES, linear, linear_pair};
use super::products::{Packed, Step};
#[cfg(target_arch = "x86_64")]
use super::tiles;
use crate::matrix::WeightMatrix;

/// The three matrices of a feed-forward part.
#[derive(Clone, Copy, Debug)]
pub struct Expert<'a> {
    /// `[inner, hidden]`
    pub gate: WeightMatrix<'a>,
    /// `[inner, hidden]`
    pub up: WeightMatrix<'a>,
    /// `[hidden, inner]`
    pub down: WeightMatrix<'a>,
}

/// Memory of [`feed_forward`], used again and again: two values of width `inner` for each row.
#[derive(Clone, Debug, Default)]
pub struct GatedScratch {
    gate: Vec<f32>,
    up: Vec<f32>,
}

/// `out = down(silu(gate(x)) * up(x))` for each row; `x`, `out`: `[rows, hidden]`.
pub fn feed_forward(isa: Isa, out: &mut [f32], x: &[f32], expert: &Expert<'_>, scratch: &mut GatedScratch) {
    linear(isa, out, scratch.gated(isa, x, expert), &expert.down);
}

impl GatedScratch {
    /// `silu(gate(x)) * up(x)` for each row: `[rows, inner]`.
    pub(super) fn gated(&mut self, isa: Isa, x: &[f32], expert: &Expert<'_>) -> &mut [f32] {
        let len = x.len() / expert.gate.cols() * expert.gate.rows();
        let Self { gate, up } = self;
        gate.resize(len, 0.0);
        up.resize(len, 0.0);
        linear_pair(isa, [gate, up], x, [&expert.gate, &expert.up]);
        swiglu(isa, gate, up);
        gate
    }
}

/// `out[r] = sum over slots of weights[r, slot] * feed_forward(x[r], expert(ids[r, slot]))`, added in slot order, or, in
/// BF16, in ascending order of experts.
///
/// `x`, `out`: `[rows, hidden]`; `ids`, `weights`: `[rows, slots]`. `expert` gives the matrices of an id, all of the
/// same shape, and is asked once for each id in use. Each block of features of a used expert's matrices is decoded once,
/// for all rows that use it. Scratch: two values of width `inner` for each row and slot, and, for each thread, a block of
/// weights and its products with all of them.
pub fn experts<'a>(
    isa: Isa,
    out: &mut [f32],
    x: &[f32],
    ids: &[u32],
    weights: &[f32],
    hidden: usize,
    expert: impl Fn(u32) -> Expert<'a>,
) {
    let Some(uses) = Uses::new(out, x, ids, weights, hidden, expert) else { return };
    #[cfg(target_arch = "x86_64")]
    if uses.experts.iter().all(|Used { expert, .. }| {
        [&expert.gate, &expert.up, &expert.down].into_iter().all(|matrix| tiles::takes(isa, matrix))
    }) {
        return tiles::experts(isa, out, x, weights, hidden, &uses.experts);
    }
    with_taken!(Between, |Between { gated, packed }: &mut Between| {
        gated.resize(ids.len() * uses.inner, 0.0);
        write_gated(isa, gated, x, &uses);
        packed.resize_with(uses.experts.len(), Packed::default);
        packed.par_iter_mut().zip(&uses.experts).for_each(|(packed, used)| {
            packed.set_all(isa, &gated[used.places(uses.inner)], uses.inner);
        });
        column_blocks(out, hidden, FEATURES).into_par_iter().enumerate().for_each(|(block, out)| {
            with_kept!(BlockScratch, |scratch| {
                DownTask { out, uses: &uses, x: packed, weights, first: block * FEATURES, scratch }.run(isa);
            });
        });
    });
}

/// What lies between the projections.
#[derive(Default)]
struct Between {
    /// For each expert in use, `[its rows, inner]`.
    gated: Vec<f32>,
    /// The same, as products read it.
    packed: Vec<Packed>,
}

/// Some features of the second projection, of all rows, and their weighted sum.
struct DownTask<'a> {
    /// From `first` on.
    out: ColumnBlock<'a>,
    uses: &'a Uses<'a>,
    /// Of each expert in use.
    x: &'a [Packed],
    /// `[rows, slots]`
    weights: &'a [f32],
    first: usize,
    scratch: &'a mut BlockScratch,
}

impl DownTask<'_> {
    fn run(self, isa: Isa) {
        let Self { mut out, uses, x, weights, first, scratch: BlockScratch { weights: of_block, products } } = self;
        // For each expert in use, its rows.
        products.resize(weights.len(), [0.0; FEATURES]);
        for (used, x) in uses.experts.iter().zip(x) {
            let (out, w) = (&mut products[used.places(1)], &used.expert.down);
            isa.run(BlockProducts { out, x: x.view(), w, first, weights: of_block });
        }
        let rows = uses.places.chunks_exact(uses.slots).zip(weights.chunks_exact(uses.slots));
        for (row, (places, weights)) in rows.enumerate() {
            let mut sums = [0.0; FEATURES];
            for (place, weight) in places.iter().zip(weights) {
                let products = &products[uses.experts[place.used].rows_before + place.index];
                for (sum, product) in sums.iter_mut().zip(products) {
                    *sum += weight * product;
                }
            }
            let out = out.row_mut(row);
            out.copy_from_slice(&sums[..out.len()]);
        }
    }
}

/// Which rows use which experts.
pub(super) struct Uses<'a> {
    /// In ascending order of ids.
    pub(super) experts: Vec<Used<'a>>,
    /// Of each row and slot.
    pub(super) places: Vec<Place>,
    /// Of each row.
    pub(super) slots: usize,
    /// Width of the experts.
    pub(super) inner: usize,
}

/// An expert in use.
pub(super) struct Used<'a> {
    pub(super) expert: Expert<'a>,
    /// Rows of `x`, ascending; a row that names the expert in two slots is there twice.
    pub(super) rows: Vec<u32>,
    /// The slot that names the expert, for each of `rows`, counted over all rows.
    pub(super) slots: Vec<u32>,
    /// Rows of all experts before this one.
    rows_before: usize,
}

/// Where a slot of a row is computed: row `index` of expert in use `used`.
#[derive(Clone, Copy, Default)]
pub(super) struct Place {
    pub(super) used: usize,
    pub(super) index: usize,
}

impl<'a> Uses<'a> {
    /// Arguments as those of [`experts`], whose shapes are checked. `None` if nothing is used; then `out` is zeros.
    pub(super) fn new(
        out: &mut [f32],
        x: &[f32],
        ids: &[u32],
        weights: &[f32],
        hidden: usize,
        expert: impl Fn(u32) -> Expert<'a>,
    ) -> Option<Self> {
        let rows = x.len() / hidden;
        assert!(x.len() == rows * hidden && out.len() == x.len() && ids.len() == weights.len());
        if ids.is_empty() {
            out.fill(0.0);
            return None;
        }
        let slots = ids.len() / rows;
        assert_eq!(ids.len(), rows * slots);
        let mut order: Vec<usize> = (0..ids.len()).collect();
        order.sort_by_key(|&slot| ids[slot]);
        let mut experts: Vec<Used<'a>> = Vec::new();
        let mut places = vec![Place::default(); ids.len()];
        for (before, slots_of_one) in order.chunk_by(|&a, &b| ids[a] == ids[b]).scan(0, |before, slots_of_one| {
            *before += slots_of_one.len();
            Some((*before - slots_of_one.len(), slots_of_one))
        }) {
            for (index, &slot) in slots_of_one.iter().enumerate() {
                places[slot] = Place { used: experts.len(), index };
            }
            let rows = slots_of_one.iter().map(|&slot| (slot / slots) as u32).collect();
            let named_by = slots_of_one.iter().map(|&slot| slot as u32).collect();
            experts.push(Used { expert: expert(ids[slots_of_one[0]]), rows, slots: named_by, rows_before: before });
        }
        let inner = experts[0].expert.gate.rows();
        for Expert { gate, up, down } in experts.iter().map(|used| &used.expert) {
            let hidden = down.rows();
            assert!([gate, up].iter().all(|w| (w.rows(), w.cols()) == (inner, hidden)) && down.cols() == inner);
        }
        Some(Self { experts, places, slots, inner })
    }
}

impl Used<'_> {
    /// Where its rows lie in an array with `width` values for each row of each expert in use.
    pub(super) fn places(&self, width: usize) -> Range<usize> {
        self.rows_before * width..(self.rows_before + self.rows.len()) * width
    }

    /// Its rows of `x: [any, width]`, one after the other.
    pub(super) fn gathered(&self, x: &[f32], width: usize) -> Vec<f32> {
        self.rows.iter().map(|&row| &x[row as usize * width..][..width]).collect::<Vec<_>>().concat()
    }
}

/// Features of gate and up that a task computes: enough that packing its rows costs little beside it.
const GATE_FEATURES: usize = 64;
const _: () = assert!(GATE_FEATURES.is_multiple_of(FEATURES));

/// `silu(gate(x)) * up(x)` of every use, into `gated`: for each expert in use, `[its rows, inner]`.
fn write_gated(isa: Isa, gated: &mut [f32], x: &[f32], uses: &Uses<'_>) {
    let mut tasks = Vec::new();
    let mut rest = gated;
    for used in &uses.experts {
        let (of_expert, others) = rest.split_at_mut(used.places(uses.inner).len());
        rest = others;
        let blocks = column_blocks(of_expert, uses.inner, GATE_FEATURES).into_iter().enumerate();
        tasks.extend(blocks.map(|(block, out)| (used, block * GATE_FEATURES, out)));
    }
    tasks.into_par_iter().for_each(|(used, first, out)| {
        with_kept!(GateScratch, |scratch| isa.run(GateTask { out, x, used, first, scratch }));
    });
}

#[derive(Default)]
struct GateScratch {
    x: Packed,
    weights: Vec<Step>,
    gate: Vec<[f32; FEATURES]>,
    up: Vec<[f32; FEATURES]>,
}

/// Some features of both projections and their product, of all rows of an expert.
struct GateTask<'a> {
    /// From `first` on.
    out: ColumnBlock<'a>,
    x: &'a [f32],
    used: &'a Used<'a>,
    first: usize,
    scratch: &'a mut GateScratch,
}

impl Kernel for GateTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { mut out, x, used, first, scratch: GateScratch { x: packed, weights, gate, up } } = self;
        let Expert { gate: gate_of, up: up_of, .. } = &used.expert;
        let hidden = gate_of.cols();
        packed.set(lanes, used.rows.iter().map(|&row| &x[row as usize * hidden..][..hidden]), hidden);
        let x = packed.view();
        gate.resize(x.rows(), [0.0; FEATURES]);
        up.resize(x.rows(), [0.0; FEATURES]);
        for feature in (first..gate_of.rows().min(first + GATE_FEATURES)).step_by(FEATURES) {
            BlockProducts { out: gate, x, w: gate_of, first: feature, weights }.run(lanes);
            BlockProducts { out: up, x, w: up_of, first: feature, weights }.run(lanes);
            swiglu_in_place(lanes, gate.as_flattened_mut(), up.as_flattened());
            for (row, gated) in gate.iter().enumerate() {
                let out = &mut out.row_mut(row)[feature - first..];
                let width = out.len().min(FEATURES);
                out[..width].copy_from_slice(&gated[..width]);
            }
        }
    }
}
