//! Feed-forward parts: one for all tokens, or a few of many for each.

use std::ops::Range;

use rayon::prelude::*;

use super::Isa;
use super::elementwise::{swiglu, swiglu_in_place};
use super::isa::Kernel;
use super::lanes::Lanes;
use super::linear::{StripProducts, linear, transpose};
use super::products::{RowIds, Rows};
#[cfg(target_arch = "x86_64")]
use super::tiles::{self, Activations};
use crate::codec::STRIP;
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

/// `out = down(silu(gate(x)) * up(x))` for each row; `x`, `out`: `[rows, hidden]`.
pub fn feed_forward(isa: Isa, out: &mut [f32], x: &[f32], expert: &Expert<'_>) {
    let len = x.len() / expert.gate.cols() * expert.gate.rows();
    let (mut gate, mut up, mut gated) = (vec![0.0; len], vec![0.0; len], vec![0.0; len]);
    linear(isa, &mut gate, x, &expert.gate);
    linear(isa, &mut up, x, &expert.up);
    swiglu(isa, &mut gated, &gate, &up);
    linear(isa, out, &gated, &expert.down);
}

/// `out[r] = sum over slots of weights[r, slot] * feed_forward(x[r], expert(ids[r, slot]))`, added in slot order, or, in
/// BF16, in ascending order of experts.
///
/// `x`, `out`: `[rows, hidden]`; `ids`, `weights`: `[rows, slots]`. `expert` gives the matrices of an id, all of the
/// same shape, and is asked once for each id in use. Each strip of eight rows of a used expert's matrices is decoded
/// once, for all rows that use it. Scratch: two values of width `inner` and one strip for each row and slot.
pub fn experts<'a>(
    isa: Isa,
    out: &mut [f32],
    x: &[f32],
    ids: &[u32],
    weights: &[f32],
    hidden: usize,
    expert: impl Fn(u32) -> Expert<'a>,
) {
    let rows = x.len() / hidden;
    assert!(x.len() == rows * hidden && out.len() == x.len() && ids.len() == weights.len());
    if ids.is_empty() {
        return out.fill(0.0);
    }
    let slots = ids.len() / rows;
    assert_eq!(ids.len(), rows * slots);
    let uses = Uses::new(ids, slots, expert);
    #[cfg(target_arch = "x86_64")]
    if uses.experts.iter().all(|Used { expert, .. }| {
        [&expert.gate, &expert.up, &expert.down].into_iter().all(|matrix| tiles::takes(isa, matrix))
    }) {
        out.fill(0.0);
        return tiles::experts(isa, out, x, weights, hidden, &uses.experts, Activations::Rounded);
    }
    let gated = gated(isa, x, hidden, &uses);
    let mut transposed = vec![0.0; out.len()];
    transposed.par_chunks_mut(STRIP * rows).enumerate().for_each_init(
        || (vec![0.0; STRIP * uses.inner], vec![0.0; STRIP * ids.len()]),
        |(buffer, products), (strip, out)| {
            let strip_rows = out.len() / rows;
            // products: for each expert in use, [strip's rows, its rows of x]
            for used in &uses.experts {
                let x = Rows::all(&gated[used.places(uses.inner)], uses.inner);
                let products = &mut products[used.places(strip_rows)];
                let (w, first_row) = (&used.expert.down, strip * STRIP);
                isa.run(StripProducts { out: products, x, w, first_row, buffer });
            }
            for (index, out) in out.iter_mut().enumerate() {
                let (strip_row, row) = (index / rows, index % rows);
                *out = 0.0;
                let places = uses.places[row * slots..][..slots].iter();
                for (place, weight) in places.zip(&weights[row * slots..][..slots]) {
                    let used = &uses.experts[place.used];
                    let at = used.places(strip_rows).start + strip_row * used.rows.len() + place.index;
                    *out += weight * products[at];
                }
            }
        },
    );
    transpose(out, &transposed, hidden);
}

/// [`experts`] with activations of eight bits: what enters a projection is quantized, and what leaves it rounded to
/// BF16, as [`crate::oracle::linear_int8`] does. Added in ascending order of experts.
///
/// # Panics
/// Unless [`has_int8_experts`] holds for `isa` and every matrix.
pub fn experts_int8<'a>(
    isa: Isa,
    out: &mut [f32],
    x: &[f32],
    ids: &[u32],
    weights: &[f32],
    hidden: usize,
    expert: impl Fn(u32) -> Expert<'a>,
) {
    let rows = x.len() / hidden;
    assert!(x.len() == rows * hidden && out.len() == x.len() && ids.len() == weights.len());
    out.fill(0.0);
    if ids.is_empty() {
        return;
    }
    let slots = ids.len() / rows;
    assert_eq!(ids.len(), rows * slots);
    let uses = Uses::new(ids, slots, expert);
    for Used { expert: Expert { gate, up, down }, .. } in &uses.experts {
        assert!([gate, up, down].into_iter().all(|matrix| has_int8_experts(isa, matrix)));
    }
    #[cfg(target_arch = "x86_64")]
    tiles::experts(isa, out, x, weights, hidden, &uses.experts, Activations::Int8);
}

/// Whether [`experts_int8`] is there for such matrices on `isa`: `i4_mma` and `i8_mma` in groups of 128, where products
/// are done in BF16.
#[must_use]
pub fn has_int8_experts(isa: Isa, matrix: &WeightMatrix<'_>) -> bool {
    #[cfg(target_arch = "x86_64")]
    return isa.rounds_to_bf16() && tiles::takes_int8(matrix);
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Which rows use which experts.
pub(super) struct Uses<'a> {
    /// In ascending order of ids.
    pub(super) experts: Vec<Used<'a>>,
    /// Of each row and slot.
    pub(super) places: Vec<Place>,
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
    pub(super) fn new(ids: &[u32], slots: usize, expert: impl Fn(u32) -> Expert<'a>) -> Self {
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
        Self { experts, places, inner }
    }
}

impl Used<'_> {
    /// Where its rows lie in an array with `width` values for each row of each expert in use.
    pub(super) fn places(&self, width: usize) -> Range<usize> {
        self.rows_before * width..(self.rows_before + self.rows.len()) * width
    }
}

/// `silu(gate(x)) * up(x)` of every use: for each expert in use, `[its rows, inner]`.
fn gated(isa: Isa, x: &[f32], hidden: usize, uses: &Uses<'_>) -> Vec<f32> {
    let len = uses.places.len() * uses.inner;
    // For each expert in use, [inner, its rows], a task for each strip of eight rows of its matrices.
    let mut transposed = vec![0.0; len];
    let mut tasks = Vec::new();
    let mut rest = &mut transposed[..];
    for used in &uses.experts {
        let (of_expert, others) = rest.split_at_mut(used.places(uses.inner).len());
        rest = others;
        tasks.extend(of_expert.chunks_mut(STRIP * used.rows.len()).enumerate().map(|(strip, out)| (used, strip, out)));
    }
    tasks.into_par_iter().for_each_init(
        || (vec![0.0; STRIP * hidden], Vec::new()),
        |(buffer, up), (used, strip, gate)| {
            let x = Rows { x, width: hidden, ids: RowIds::Listed(&used.rows) };
            up.resize(gate.len(), 0.0);
            isa.run(GatedStrip { gate, up, x, expert: &used.expert, first_row: strip * STRIP, buffer });
        },
    );
    let mut gated = vec![0.0; len];
    for used in &uses.experts {
        let places = used.places(uses.inner);
        transpose(&mut gated[places.clone()], &transposed[places], uses.inner);
    }
    gated
}

/// A strip of both projections and their product, into `gate: [strip's rows, rows of x]`; `up`, `buffer` are scratch.
struct GatedStrip<'a> {
    gate: &'a mut [f32],
    up: &'a mut [f32],
    x: Rows<'a>,
    expert: &'a Expert<'a>,
    first_row: usize,
    buffer: &'a mut [f32],
}

impl Kernel for GatedStrip<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { gate, up, x, expert, first_row, buffer } = self;
        StripProducts { out: gate, x, w: &expert.gate, first_row, buffer }.run(lanes);
        StripProducts { out: up, x, w: &expert.up, first_row, buffer }.run(lanes);
        swiglu_in_place(lanes, gate, up);
    }
}
