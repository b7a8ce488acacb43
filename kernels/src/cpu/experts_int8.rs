//! Experts with activations of eight bits, with the bits of [`crate::oracle::linear_int8`].
//!
//! Where the CPU has an engine for codes, `tiles` does it. What is here runs everywhere, over [`Lanes`]: eight rows with
//! eight features at a time, in pairs of columns as `vpmaddwd` takes them. Products of a group are exact, and groups are
//! added in ascending order, so both ways agree to the bit and a row's result does not depend on the rows beside it.

use half::f16;
use minnow_common::Encoding;
use rayon::prelude::*;

use super::Isa;
use super::columns::{ColumnBlock, column_blocks};
use super::elementwise::swiglu;
use super::experts::{Expert, Used, Uses};
use super::experts_fp4::rounded_to_bf16;
use super::isa::Kernel;
use super::kept::with_kept;
use super::lanes::{Lanes, PAIRS};
#[cfg(target_arch = "x86_64")]
use super::tiles;
use crate::codec::STRIP;
use crate::matrix::WeightMatrix;
use crate::oracle::quantize_row;

/// Columns that share a scale.
const GROUP: usize = 2 * PAIRS;
/// Features of a task.
const FEATURES: usize = 8 * STRIP;

/// [`super::experts`] with activations of eight bits: what enters a projection is quantized, and what leaves it rounded to
/// BF16, with the bits of [`crate::oracle::linear_int8`]. Added in ascending order of experts, each rounded once. Instruction
/// sets differ only as [`super::swiglu`] does between the projections: `Isa::Scalar` from the others, which are alike.
///
/// # Panics
/// Unless [`has_int8_experts`] holds for every matrix.
pub fn experts_int8<'a>(
    isa: Isa,
    out: &mut [f32],
    x: &[f32],
    ids: &[u32],
    weights: &[f32],
    hidden: usize,
    expert: impl Fn(u32) -> Expert<'a>,
) {
    let Some(Uses { experts, .. }) = Uses::new(out, x, ids, weights, hidden, expert) else { return };
    for Used { expert: Expert { gate, up, down }, .. } in &experts {
        assert!([gate, up, down].into_iter().all(has_int8_experts));
    }
    #[cfg(target_arch = "x86_64")]
    if tiles::multiplies_codes(isa) {
        return tiles::experts_int8(isa, out, x, weights, hidden, &experts);
    }
    out.fill(0.0);
    let gated = experts.par_iter().map(|used| {
        let Expert { gate: gate_of, up: up_of, .. } = &used.expert;
        let x = quantized(isa, &used.gathered(x, hidden), hidden);
        let len = used.rows.len() * gate_of.rows();
        let (mut gate, mut up) = (vec![0.0; len], vec![0.0; len]);
        linear(isa, &mut gate, &x, gate_of);
        linear(isa, &mut up, &x, up_of);
        swiglu(isa, &mut gate, &up);
        quantized(isa, &gate, gate_of.rows())
    });
    let gated: Vec<Vec<RowGroup>> = gated.collect();
    let places = experts.iter().map(|Used { rows, slots, .. }| {
        rows.iter().zip(slots).map(|(&row, &slot)| (row as usize, weights[slot as usize])).collect()
    });
    let places: Vec<Vec<(usize, f32)>> = places.collect();
    column_blocks(out, hidden, FEATURES).into_par_iter().enumerate().for_each(|(block, mut out)| {
        for ((used, x), places) in experts.iter().zip(&gated).zip(&places) {
            let (out, w) = (&mut out, &used.expert.down);
            add_block(isa, Block { out, places, x, w, first: block * FEATURES });
        }
    });
}

/// Whether [`experts_int8`] takes such matrices: `i4_mma` and `i8_mma` in groups of 128.
#[must_use]
pub fn has_int8_experts(matrix: &WeightMatrix<'_>) -> bool {
    matches!(matrix.encoding(), Encoding::I4Mma | Encoding::I8Mma) && matrix.group() == GROUP
}

/// Products of rows with all features of `w`, rounded to BF16. `out: [rows, features]`, zeros.
pub(super) fn linear(isa: Isa, out: &mut [f32], x: &[RowGroup], w: &WeightMatrix<'_>) {
    let places: Vec<(usize, f32)> = (0..out.len() / w.rows()).map(|row| (row, 1.0)).collect();
    column_blocks(out, w.rows(), FEATURES).into_par_iter().enumerate().for_each(|(block, mut out)| {
        add_block(isa, Block { out: &mut out, places: &places, x, w, first: block * FEATURES });
    });
}

/// Eight rows, quantized, in one group of columns. Pairs are as [`Lanes::dots`] takes them, in the order in which an `mma`
/// tile stores them; rows that are not there are zeros.
#[derive(Clone)]
pub(super) struct RowGroup {
    pairs: [[i32; STRIP]; PAIRS],
    scales: [f32; STRIP],
}

/// Quantizes `x: [rows, cols]`: `[panels of eight rows][groups]`.
pub(super) fn quantized(isa: Isa, x: &[f32], cols: usize) -> Vec<RowGroup> {
    let groups = cols / GROUP;
    let zero = RowGroup { pairs: [[0; STRIP]; PAIRS], scales: [0.0; STRIP] };
    let mut out = vec![zero; x.len().div_ceil(STRIP * cols) * groups];
    let panels = out.par_chunks_exact_mut(groups).zip(x.par_chunks(STRIP * cols));
    panels.for_each(|(out, x)| isa.run(QuantizePanel { out, x, cols }));
    out
}

struct QuantizePanel<'a> {
    out: &'a mut [RowGroup],
    /// At most eight rows.
    x: &'a [f32],
    cols: usize,
}

impl Kernel for QuantizePanel<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        for (row, x) in self.x.chunks_exact(self.cols).enumerate() {
            for (out, values) in self.out.iter_mut().zip(x.as_chunks::<GROUP>().0) {
                let mut codes = [0.0; GROUP];
                out.scales[row] = quantize_row(values, &mut codes);
                let columns = codes.as_chunks::<2>().0;
                for (place, pairs) in out.pairs.iter_mut().enumerate() {
                    // A lane of a tile holds columns 2 lane + {0, 1, 8, 9}.
                    let [low, high] = columns[place / 8 * 8 + place % 8 / 2 + place % 2 * 4];
                    pairs[row] = pair(low as i32, high as i32);
                }
            }
        }
    }
}

/// Two codes as [`Lanes::dots`] takes them.
#[inline(always)]
fn pair(low: i32, high: i32) -> i32 {
    low & 0xffff | high << 16
}

/// Sums: `[feature][row]`.
type Tile = [[f32; STRIP]; STRIP];

/// Up to [`FEATURES`] features of `w` from `first` on: `out[row] += weight * products`, products rounded to BF16.
struct Block<'a, 'b> {
    out: &'a mut ColumnBlock<'b>,
    /// For each row of `x`, the row of `out` and the weight.
    places: &'a [(usize, f32)],
    /// `[panels][groups]`
    x: &'a [RowGroup],
    w: &'a WeightMatrix<'a>,
    first: usize,
}

fn add_block(isa: Isa, block: Block<'_, '_>) {
    with_kept!(Vec<Tile>, |sums: &mut Vec<Tile>| isa.run(AddBlock { block, sums }));
}

struct AddBlock<'a, 'b, 'c> {
    block: Block<'a, 'b>,
    /// Of each panel.
    sums: &'c mut Vec<Tile>,
}

impl Kernel for AddBlock<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { block: Block { out, places, x, w, first }, sums } = self;
        let groups = w.cols() / GROUP;
        sums.resize(places.len().div_ceil(STRIP), [[0.0; STRIP]; STRIP]);
        assert_eq!(x.len(), sums.len() * groups);
        let scales = w.scales().as_chunks::<2>().0.as_chunks::<STRIP>().0;
        let group_bytes = w.data().len() / scales.len();
        for feature in (first..w.rows().min(first + FEATURES)).step_by(STRIP) {
            sums.fill([[0.0; STRIP]; STRIP]);
            for group in 0..groups {
                let index = feature / STRIP * groups + group;
                let weights = decoded(&w.data()[index * group_bytes..][..group_bytes]);
                let scales = scales[index].map(|scale| f16::from_le_bytes(scale).to_f32());
                for (sums, x) in sums.iter_mut().zip(x[group..].iter().step_by(groups)) {
                    let dots = lanes.dots(&x.pairs, &weights);
                    for ((sums, dots), scale) in sums.iter_mut().zip(&dots).zip(scales) {
                        // By value, so that the compiler sees that nothing overlaps.
                        let factors = x.scales.map(|row_scale| row_scale * scale);
                        for ((sum, dot), factor) in sums.iter_mut().zip(dots).zip(factors) {
                            *sum += *dot as f32 * factor;
                        }
                    }
                }
            }
            for (sums, places) in sums.iter().zip(places.chunks(STRIP)) {
                for (index, (row, weight)) in places.iter().enumerate() {
                    let out = &mut out.row_mut(*row)[feature - first..][..STRIP];
                    for (out, sums) in out.iter_mut().zip(sums) {
                        *out = weight.mul_add(rounded_to_bf16(sums[index]), *out);
                    }
                }
            }
        }
    }
}

/// Codes of eight features in one group of columns, stored as `i4_mma` or `i8_mma`, in the order they are stored in.
#[inline(always)]
fn decoded(codes: &[u8]) -> [[i32; PAIRS]; STRIP] {
    let mut weights = [[0; PAIRS]; STRIP];
    // Of a row, a tile has eight pairs: of nibbles in a byte each, or of bytes.
    if codes.len() == STRIP * PAIRS {
        for (tile, rows) in codes.as_chunks::<8>().0.as_chunks::<STRIP>().0.iter().enumerate() {
            for (weights, row) in weights.iter_mut().zip(rows) {
                let codes = row.map(i32::from);
                weights.as_chunks_mut::<8>().0[tile] = codes.map(|code| pair(code << 28 >> 28, code << 24 >> 28));
            }
        }
    } else {
        for (tile, rows) in codes.as_chunks::<2>().0.as_chunks::<8>().0.as_chunks::<STRIP>().0.iter().enumerate() {
            for (weights, row) in weights.iter_mut().zip(rows) {
                let codes = row.map(|codes| i32::from(u16::from_le_bytes(codes)));
                weights.as_chunks_mut::<8>().0[tile] = codes.map(|code| pair(code << 24 >> 24, code << 16 >> 24));
            }
        }
    }
    weights
}
