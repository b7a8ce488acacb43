//! Products by tiles: in BF16, and of codes with codes.
//!
//! **In BF16**: activations rounded to BF16, weights as exact BF16, sums in f32.
//!
//! What [`Isa::Avx512Bf16`] and [`Isa::Amx`] do with weights that are stored as BF16 or quantized. The unit is a
//! [`Tile`]: sixteen features (rows of the matrix) by sixteen rows of `x`, summed over steps of 32 columns. Weights come
//! as lines of 32 columns of one feature, `x` as [`panels`]: pairs of columns of sixteen rows. An [`Engine`] multiplies;
//! everything around it is the same for both: [`avx512`] and [`wide`] pack, decode and scale.
//!
//! **What is rounded.** `x` to BF16, once, to nearest even. BF16 weights are exact. Codes of `i4_mma` and `i8_mma` in
//! groups of 128 are exact too: a group's sum of products with the codes is multiplied by its scale in f32, and added to
//! the sum of the groups before it. NVFP4 weights without the matrix-wide scale have six significant bits and are exact;
//! that scale is applied to the sum. Other quantized layouts are decoded to f32 and rounded to BF16. Results are f32 and
//! not rounded. The order of a sum depends on the width of the matrix alone: pairs of columns in the order of [`Order`],
//! one after the other, so a row's result does not depend on the rows beside it.
//!
//! **Codes with codes**, for experts with activations of eight bits ([`codes`]): the same tiles and panels, with lines of 64
//! columns and fours instead of pairs. A [`CodeEngine`] multiplies, and a group's product is an exact integer.

mod amx;
mod attention;
mod avx512;
mod codes;
mod experts;
mod linear;
mod panels;
mod product;
mod reuse;
mod vnni;
mod wide;

use minnow_common::{Encoding, FloatType};

pub(super) use amx::Amx;
pub(super) use attention::{PackedShape, attend, pack_layer};
pub(super) use avx512::Avx512Bf16;
use codes::CodeWork;
pub(super) use experts::{experts, experts_int8};
pub(super) use linear::{HeadInput, linear, linear_pair};

use vnni::Avx512Vnni;
use wide::{Avx512Bw, CodeBytes};

use super::Isa;
use crate::matrix::WeightMatrix;

/// Features, and rows of `x`, of a tile.
const EDGE: usize = 16;
/// Columns that are multiplied in one step.
const STEP: usize = 32;
/// Columns of codes that are multiplied in one step.
const CODE_STEP: usize = 64;
/// Steps of a group of columns, where codes are multiplied.
const CODE_STEPS: usize = Order::SPAN / CODE_STEP;
/// Feature tiles that are multiplied together: with two panels they are all the sums that an engine can keep.
const FEW_TILES: usize = 2;
/// Features that are multiplied together where a matrix is decoded as a whole. A task of `down` computes a multiple.
const BLOCK_FEATURES: usize = 64;

/// 32 BF16 that are loaded together, columns of one feature or one pair of columns of sixteen rows; or 64 codes, columns of
/// one feature or four columns of sixteen rows.
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

/// Sums of products of codes: `[feature][row of x]`.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Dots([[i32; EDGE]; EDGE]);

impl Dots {
    const ZERO: Self = Self([[0; EDGE]; EDGE]);
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
    /// `between` is called once for each step, in ascending order, with work that is independent of the products and may
    /// hide their latency. It does not multiply.
    fn product(
        session: &Self::Session,
        c: &mut [Tile],
        weights: &Weights<'_>,
        panels: &[&[Line]],
        job: Job,
        between: impl FnMut(usize),
    );

    /// Multiplies and adds registers only, `rounds` times, and returns how many operations that were.
    fn multiply_only(self, rounds: usize) -> usize;
}

/// What multiplies codes. An implementation is also the proof that its instructions, and those of [`wide`], may run.
trait CodeEngine: Copy + Send + Sync {
    /// How it wants codes of weights; those of rows are always signed.
    const FORM: CodeBytes;

    /// Whatever lasts for a piece of work of one thread.
    type Session;

    /// The proof for everything around the products.
    fn wide(self) -> Avx512Bw;

    /// Begins a piece of work on this thread. [`Self::add_group`] may be called while the session lives.
    fn begin_codes(self) -> Self::Session;

    /// `sums[panel][tile][f][r] += float(product of row r with feature f) * (row scale * scale)`, each operation rounded,
    /// over a group of columns. There are one or two panels; `dots` has as many tiles as `sums`, for what lies between.
    /// `between` as in [`Engine::product`], for [`CODE_STEPS`] steps.
    fn add_group(
        session: &Self::Session,
        sums: &mut [Tile],
        weights: &Codes<'_>,
        rows: &[RowCodes<'_>],
        dots: &mut [Dots],
        between: impl FnMut(usize),
    );
}

/// Codes of a group of columns: of some feature tiles.
struct Codes<'a> {
    /// `[CODE_STEPS][tiles][16 features]`, of at most [`FEW_TILES`] tiles.
    lines: &'a [Line],
    /// What [`CodeBytes::Unsigned`] adds to each code of these.
    offset: i32,
    /// `[tiles]`
    scales: &'a [[f32; EDGE]],
}

/// Codes of a group of columns: of sixteen rows.
#[derive(Clone, Copy)]
struct RowCodes<'a> {
    /// `[CODE_STEPS][16 fours]`
    lines: &'a [Line],
    scales: &'a [f32; EDGE],
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
    /// `[pairs of tiles][steps][tiles of the pair][16 features]`, see [`LinePlace`].
    Lines(&'a [Line]),
    /// The bytes of `16 tiles` features, from the first column of the first step on, `row_bytes` apart.
    Rows { bytes: &'a [u8], row_bytes: usize },
}

/// Where the lines of a feature tile lie among those of all tiles: two tiles at a time are multiplied, so two follow each other
/// over all steps, and the last may be alone.
#[derive(Clone, Copy)]
struct LinePlace {
    first: usize,
    /// From one step to the next.
    step_lines: usize,
}

impl LinePlace {
    fn of(tile: usize, tiles: usize, steps: usize) -> Self {
        assert!(tile < tiles);
        let pair = tile / FEW_TILES * FEW_TILES;
        let step_lines = FEW_TILES.min(tiles - pair) * EDGE;
        Self { first: pair * steps * EDGE + tile % FEW_TILES * EDGE, step_lines }
    }

    fn of_step(self, step: usize) -> usize {
        self.first + step * self.step_lines
    }
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
    /// As `i4_mma` gives up bytes: first the low halves of its bytes, then the high ones.
    NibbleCodes,
    /// As the bytes of `i8_mma` lie.
    ByteCodes,
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
                // Byte `j` of a row is of tile j / 8, and of the four codes of lane j % 8 / 2 the first or second two.
                Self::NibbleCodes => {
                    let (half, byte) = (place / 64, place % 64);
                    16 * (byte / 8) + 2 * (byte % 8 / 2) + [0, 1, 8, 9][2 * (byte % 2) + half]
                }
                // Byte `j` of a row is of tile j / 16 and lane j % 16 / 4.
                Self::ByteCodes => 16 * (place / 16) + 2 * (place % 16 / 4) + [0, 1, 8, 9][place % 4],
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

    /// In which order codes lie in lines; `None` where there are no codes in groups.
    fn code_order(self) -> Option<Order> {
        match self {
            Self::Groups(Order::Nibbles) => Some(Order::NibbleCodes),
            Self::Groups(_) => Some(Order::ByteCodes),
            Self::Bf16 | Self::Decoded => None,
        }
    }
}

/// Whether products with `matrix` on `isa` are done here: not where BF16 could not hold what is stored.
pub(super) fn takes(isa: Isa, matrix: &WeightMatrix<'_>) -> bool {
    isa.rounds_to_bf16() && !matches!(matrix.encoding(), Encoding::Float(FloatType::F16 | FloatType::F32))
}

/// Whether there is an engine for codes on `isa`. Others multiply them in `super::experts_int8`.
pub(super) fn multiplies_codes(isa: Isa) -> bool {
    isa >= Isa::Avx512 && Avx512Vnni::detect().is_some() || isa == Isa::Amx && Amx::detect().is_some()
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

/// Runs `work` on the engine for codes of `isa`.
///
/// # Panics
/// If this CPU has none, see [`multiplies_codes`].
fn on_code_engine<W: CodeWork>(isa: Isa, work: W) -> W::Output {
    if isa == Isa::Amx
        && let Some(amx) = Amx::detect()
    {
        return work.run(amx);
    }
    work.run(Avx512Vnni::detect().expect("products of codes are only asked for where the CPU has them"))
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
    fn every_line_of_every_tile_has_a_place_of_its_own() {
        for (tiles, steps) in [(1, 3), (2, 4), (3, 2), (4, 1), (5, 7)] {
            let lines_of = |tile: usize| {
                let place = LinePlace::of(tile, tiles, steps);
                (0..steps).flat_map(move |step| (0..EDGE).map(move |feature| place.of_step(step) + feature))
            };
            let mut lines: Vec<usize> = (0..tiles).flat_map(lines_of).collect();
            lines.sort_unstable();
            assert!(lines.into_iter().eq(0..tiles * steps * EDGE), "{tiles} tiles, {steps} steps");
        }
    }

    #[test]
    fn every_order_has_each_column_once() {
        for order in [Order::Ascending, Order::Nibbles, Order::Bytes, Order::NibbleCodes, Order::ByteCodes] {
            let mut columns = order.columns();
            columns.sort_unstable();
            assert_eq!(columns, std::array::from_fn(|column| column as u8), "{order:?}");
        }
    }
}
