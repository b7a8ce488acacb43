//! Products in BF16: activations rounded to BF16, weights as exact BF16, sums in f32.
//!
//! What [`Isa::Avx512Bf16`] and [`Isa::Amx`] do with weights that are stored as BF16 or quantized. The unit is a
//! [`Tile`]: sixteen features (rows of the matrix) by sixteen rows of `x`, summed over steps of 32 columns. Weights come
//! as lines of 32 columns of one feature, `x` as [`Panels`]: pairs of columns of sixteen rows. An [`Engine`] multiplies;
//! everything around it is the same for both: [`avx512`] packs, decodes and scales.
//!
//! **What is rounded.** `x` to BF16, once, to nearest even. BF16 weights are exact. Codes of `i4_mma` and `i8_mma` in
//! groups of 128 are exact too: a group's sum of products with the codes is multiplied by its scale in f32, and added to
//! the sum of the groups before it. NVFP4 weights without the matrix-wide scale have six significant bits and are exact;
//! that scale is applied to the sum. Other quantized layouts are decoded to f32 and rounded to BF16. Results are f32 and
//! not rounded. The order of a sum depends on the width of the matrix alone: pairs of columns in the order of [`Order`],
//! one after the other, so a row's result does not depend on the rows beside it.

mod amx;
mod attention;
mod avx512;
mod experts;
mod linear;
mod panels;
mod product;
mod reuse;

use minnow_common::{Encoding, FloatType};

pub(super) use amx::Amx;
pub(super) use attention::{PackedShape, attend, pack_layer};
pub(super) use avx512::Avx512Bf16;
pub(super) use experts::experts;
pub(super) use linear::{HeadInput, linear};

use super::Isa;
use crate::matrix::WeightMatrix;

/// Features, and rows of `x`, of a tile.
const EDGE: usize = 16;
/// Columns that are multiplied in one step.
const STEP: usize = 32;
/// Feature tiles of a block: what is decoded together, and multiplied while it is in the nearest cache.
const BLOCK_TILES: usize = 4;
/// Features of a block.
const BLOCK_FEATURES: usize = BLOCK_TILES * EDGE;

/// 32 BF16 that are loaded together: columns of one feature, or one pair of columns of sixteen rows.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Line([u16; STEP]);

impl Line {
    pub(super) const ZERO: Self = Self([0; STEP]);

    pub(super) fn values(&self) -> &[u16; STEP] {
        &self.0
    }

    pub(super) fn values_mut(&mut self) -> &mut [u16; STEP] {
        &mut self.0
    }
}

/// Sums: `[feature][row of x]`.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Tile([[f32; EDGE]; EDGE]);

impl Tile {
    const ZERO: Self = Self([[0.0; EDGE]; EDGE]);
}

/// What multiplies tiles. An implementation is also the proof that its instructions, and those of [`avx512`], may run.
trait Engine: Copy + Send + Sync {
    /// Whether weights can be read with any distance between features, at no cost.
    const READS_ROWS: bool;

    /// Whatever lasts for a piece of work of one thread.
    type Session;

    /// The proof for everything around the products.
    fn vectors(self) -> Avx512Bf16;

    /// Begins a piece of work on this thread. [`Self::product`] may be called while the session lives.
    fn begin(self) -> Self::Session;

    /// `c[panel][tile] += products of the weights' tile with the panel`, or `=` if `is_fresh`, over all steps.
    ///
    /// `c` has `panels.len() * tiles` tiles; there are one or two panels, of `steps` steps and `rows` used rows each.
    fn product(session: &Self::Session, c: &mut [Tile], weights: &Weights<'_>, panels: &[&[Line]], job: Job);

    /// Multiplies and adds registers only, `rounds` times, and returns how many operations that were.
    fn multiply_only(self, rounds: usize) -> usize;
}

/// The shape of a product.
#[derive(Clone, Copy)]
struct Job {
    tiles: usize,
    steps: usize,
    /// Rows of `x` that matter in each panel; results of others are anything.
    rows: usize,
    is_fresh: bool,
}

/// Weights of some feature tiles, over some steps.
enum Weights<'a> {
    /// `[steps][tiles][16 features]`
    Lines(&'a [Line]),
    /// The bytes of `16 tiles` features, from the first column of the first step on, `row_bytes` apart.
    Rows { bytes: &'a [u8], row_bytes: usize },
}

/// In which order columns lie in lines. Within 128 columns, whatever the encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Ascending.
    Ascending,
    /// As `i4_mma` gives them up: first all first nibbles of its 16-bit words, then all second ones, and so on.
    Nibbles,
    /// As `i8_mma` gives them up: the first halves of its 32-bit words, then the second halves.
    Bytes,
}

impl Order {
    /// Columns after which the order repeats.
    const SPAN: usize = 128;

    /// Which column, within the span, lies at each place.
    fn columns(self) -> [u8; Self::SPAN] {
        std::array::from_fn(|place| {
            let column = match self {
                Self::Ascending => place,
                // Word `j` of a row holds, of tile j / 4, columns 2 (j % 4) + {0, 1, 8, 9}.
                Self::Nibbles => {
                    let (nibble, word) = (place / 32, place % 32);
                    16 * (word / 4) + 2 * (word % 4) + [0, 1, 8, 9][nibble]
                }
                // Each 64 columns: double word `i` holds, of tile i / 4, columns 2 (i % 4) + {0, 1, 8, 9}.
                Self::Bytes => {
                    let (half, double) = (place % 64 / 32, place % 32 / 2);
                    place / 64 * 64 + 16 * (double / 4) + 2 * (double % 4) + 8 * half + place % 2
                }
            };
            column as u8
        })
    }
}

/// How a matrix becomes lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    /// Stored as lines already: ascending BF16.
    Bf16,
    /// Codes of groups of 128, scaled group by group.
    Groups(Order),
    /// Decoded to f32 and rounded.
    Decoded,
}

impl Plan {
    fn of(matrix: &WeightMatrix<'_>) -> Self {
        match matrix.encoding() {
            Encoding::Float(_) => Self::Bf16,
            Encoding::I4Mma if matrix.group() == Order::SPAN => Self::Groups(Order::Nibbles),
            Encoding::I8Mma if matrix.group() == Order::SPAN => Self::Groups(Order::Bytes),
            _ => Self::Decoded,
        }
    }

    fn order(self) -> Order {
        match self {
            Self::Groups(order) => order,
            Self::Bf16 | Self::Decoded => Order::Ascending,
        }
    }
}

/// Whether products with `matrix` on `isa` are done here: not where BF16 could not hold what is stored.
pub(super) fn takes(isa: Isa, matrix: &WeightMatrix<'_>) -> bool {
    isa.rounds_to_bf16() && !matches!(matrix.encoding(), Encoding::Float(FloatType::F16 | FloatType::F32))
}

/// Whether products of `matrix` with codes of eight bits are done here.
pub(super) fn takes_int8(matrix: &WeightMatrix<'_>) -> bool {
    matches!(Plan::of(matrix), Plan::Groups(_))
}

/// What experts make of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Activations {
    /// BF16.
    Rounded,
    /// Codes of eight bits in the groups of the weights. They and the weights' codes are multiplied as BF16: a group's
    /// sum stays below 2^21, so it is exact, whatever the order.
    Int8,
}

/// A piece of work written over [`Engine`].
trait Work {
    type Output;

    fn run<E: Engine>(self, engine: E) -> Self::Output;
}

/// Runs `work` on the engine of `isa`.
///
/// # Panics
/// If this CPU has none. [`Isa::detect_up_to`] never gives such an `isa`.
fn on_engine<W: Work>(isa: Isa, work: W) -> W::Output {
    if isa == Isa::Amx
        && let Some(amx) = Amx::detect()
    {
        return work.run(amx);
    }
    work.run(Avx512Bf16::detect().expect("products in BF16 are only asked for where the CPU has them"))
}

/// What [`super::multiply_rate`] counts.
pub(super) fn multiply_only(isa: Isa, rounds: usize) -> usize {
    struct Rounds(usize);
    impl Work for Rounds {
        type Output = usize;

        fn run<E: Engine>(self, engine: E) -> usize {
            engine.multiply_only(self.0)
        }
    }
    on_engine(isa, Rounds(rounds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_has_each_column_once() {
        for order in [Order::Ascending, Order::Nibbles, Order::Bytes] {
            let mut columns = order.columns();
            columns.sort_unstable();
            assert_eq!(columns, std::array::from_fn(|column| column as u8), "{order:?}");
        }
    }
}
