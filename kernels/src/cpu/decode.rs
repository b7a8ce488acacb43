//! Stored weights to f32, sixteen columns at a time: the quick twin of [`crate::codec::decode_rows`], with its bits.

use minnow_common::{Encoding, FloatType};

use super::Isa;
use super::isa::Kernel;
use super::lanes::{LANES, Lanes};
use super::products::Step;
use crate::codec::{STRIP, e4m3};
use crate::matrix::WeightMatrix;

/// Decodes the rows that `out: [count, cols]` has room for, starting at `first_row`: whole strips of eight rows, or up
/// to the end of the matrix. (For single rows there is [`crate::codec::decode_rows`].)
///
/// # Panics
/// If the rows are not whole strips of the matrix: a fault of the caller.
pub fn decode(isa: Isa, matrix: &WeightMatrix<'_>, first_row: usize, out: &mut [f32]) {
    for (strip, out) in out.chunks_mut(STRIP * matrix.cols()).enumerate() {
        isa.run(DecodeStrip { matrix, first_row: first_row + strip * STRIP, out });
    }
}

struct DecodeStrip<'a> {
    matrix: &'a WeightMatrix<'a>,
    first_row: usize,
    out: &'a mut [f32],
}

impl Kernel for DecodeStrip<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        decode_strip(lanes, self.matrix, self.first_row, RowMajor { values: self.out, cols: self.matrix.cols() });
    }
}

/// Where the values of a strip go.
pub(super) trait Place {
    /// Keeps sixteen columns of a row, or as many as there are.
    fn keep<L: Lanes>(&mut self, lanes: L, values: L::Vector, row: usize, vector: usize);
}

/// `[rows, cols]`
struct RowMajor<'a> {
    values: &'a mut [f32],
    cols: usize,
}

impl Place for RowMajor<'_> {
    #[inline(always)]
    fn keep<L: Lanes>(&mut self, lanes: L, values: L::Vector, row: usize, vector: usize) {
        let first = vector * LANES;
        lanes.store_part(values, &mut self.values[row * self.cols..][first..self.cols.min(first + LANES)]);
    }
}

/// As products read them.
impl Place for &mut [Step] {
    #[inline(always)]
    fn keep<L: Lanes>(&mut self, lanes: L, values: L::Vector, row: usize, vector: usize) {
        lanes.store(values, &mut self[vector].0[row]);
    }
}

/// Decodes the strip that starts at `first_row`, a multiple of eight: eight rows, or what is left of the matrix.
#[inline(always)]
pub(super) fn decode_strip<L: Lanes>(lanes: L, matrix: &WeightMatrix<'_>, first_row: usize, out: impl Place) {
    let cols = matrix.cols();
    assert!(first_row.is_multiple_of(STRIP) && first_row < matrix.rows(), "no strip starts at row {first_row}");
    let rows = STRIP.min(matrix.rows() - first_row);
    let strip = Strip {
        rows,
        cols,
        group: matrix.group(),
        data: run_of(matrix.data(), matrix.rows(), first_row, rows),
        scales: run_of(matrix.scales(), matrix.rows(), first_row, rows),
    };
    match matrix.encoding() {
        Encoding::Float(float) => floats(lanes, &strip, float, out),
        Encoding::I8Sym => row_major::<L, I8, 16>(lanes, &strip, out),
        Encoding::I4Sym => row_major::<L, I4, 8>(lanes, &strip, out),
        Encoding::I8Mma => mma::<L, I8, 16>(lanes, &strip, out),
        Encoding::I4Mma => mma::<L, I4, 8>(lanes, &strip, out),
        Encoding::Nvfp4 => nvfp4(lanes, &strip, matrix.global_scale(), out),
    }
}

/// Rows that are one run of `data` and one of `scales`, see [`STRIP`].
struct Strip<'a> {
    rows: usize,
    cols: usize,
    group: usize,
    data: &'a [u8],
    scales: &'a [u8],
}

/// The part of a region that belongs to `count` rows of `all_rows`.
fn run_of(region: &[u8], all_rows: usize, first_row: usize, count: usize) -> &[u8] {
    let bytes_a_row = region.len() / all_rows;
    &region[first_row * bytes_a_row..][..count * bytes_a_row]
}

#[inline(always)]
fn floats<L: Lanes>(lanes: L, strip: &Strip<'_>, float: FloatType, mut out: impl Place) {
    let vectors = strip.cols / LANES;
    for (row, bytes) in strip.data.chunks_exact(strip.cols * float.bytes()).enumerate() {
        match float {
            FloatType::Bf16 => {
                for (vector, bytes) in bytes.as_chunks::<{ 2 * LANES }>().0.iter().enumerate() {
                    out.keep(lanes, lanes.bf16(bytes), row, vector);
                }
            }
            FloatType::F16 => {
                for (vector, bytes) in bytes.as_chunks::<{ 2 * LANES }>().0.iter().enumerate() {
                    out.keep(lanes, lanes.f16(bytes), row, vector);
                }
            }
            FloatType::F32 => {
                for (vector, bytes) in bytes.as_chunks::<{ 4 * LANES }>().0.iter().enumerate() {
                    let mut values = [0.0; LANES];
                    float.widen(bytes, &mut values);
                    out.keep(lanes, lanes.load(&values), row, vector);
                }
            }
        }
        let rest = strip.cols - vectors * LANES;
        if rest > 0 {
            let mut values = [0.0; LANES];
            float.widen(&bytes[vectors * LANES * float.bytes()..], &mut values[..rest]);
            out.keep(lanes, lanes.load(&values), row, vectors);
        }
    }
}

/// How sixteen integers lie in `BYTES` bytes. A trait and no closure, for closures escape [`Kernel`]'s inlining.
trait Codes<const BYTES: usize> {
    /// In column order.
    fn row_major<L: Lanes>(lanes: L, bytes: &[u8; BYTES]) -> L::Vector;
    /// In the order of a row of an `mma` tile.
    fn mma<L: Lanes>(lanes: L, bytes: &[u8; BYTES]) -> L::Vector;
}

struct I8;

impl Codes<16> for I8 {
    #[inline(always)]
    fn row_major<L: Lanes>(lanes: L, bytes: &[u8; 16]) -> L::Vector {
        lanes.i8(u128::from_le_bytes(*bytes))
    }

    #[inline(always)]
    fn mma<L: Lanes>(lanes: L, bytes: &[u8; 16]) -> L::Vector {
        lanes.i8_of_tile(u128::from_le_bytes(*bytes))
    }
}

struct I4;

impl Codes<8> for I4 {
    #[inline(always)]
    fn row_major<L: Lanes>(lanes: L, bytes: &[u8; 8]) -> L::Vector {
        lanes.i4(u64::from_le_bytes(*bytes))
    }

    #[inline(always)]
    fn mma<L: Lanes>(lanes: L, bytes: &[u8; 8]) -> L::Vector {
        lanes.i4_of_tile(u64::from_le_bytes(*bytes))
    }
}

/// Sixteen codes are `BYTES` neighbours, row after row.
#[inline(always)]
fn row_major<L: Lanes, C: Codes<BYTES>, const BYTES: usize>(lanes: L, strip: &Strip<'_>, mut out: impl Place) {
    let vectors_a_group = strip.group / LANES;
    let groups_a_row = strip.cols / strip.group;
    let mut groups =
        strip.data.as_chunks::<BYTES>().0.chunks_exact(vectors_a_group).zip(strip.scales.as_chunks::<2>().0);
    for row in 0..strip.rows {
        for (group, (data, scale)) in groups.by_ref().take(groups_a_row).enumerate() {
            let scale = lanes.splat(half::f16::from_le_bytes(*scale).to_f32());
            for (data, vector) in data.iter().zip(group * vectors_a_group..) {
                out.keep(lanes, lanes.mul(C::row_major(lanes, data), scale), row, vector);
            }
        }
    }
}

/// Tiles of eight rows and sixteen columns; a row of a tile is `BYTES` neighbours, its columns shuffled.
#[inline(always)]
fn mma<L: Lanes, C: Codes<BYTES>, const BYTES: usize>(lanes: L, strip: &Strip<'_>, mut out: impl Place) {
    let tiles_a_group = strip.group / LANES;
    let tiles = strip.data.as_chunks::<BYTES>().0.as_chunks::<STRIP>().0;
    let scales = strip.scales.as_chunks::<2>().0.as_chunks::<STRIP>().0;
    for (group, (tiles, scales)) in tiles.chunks_exact(tiles_a_group).zip(scales).enumerate() {
        for row in 0..STRIP {
            let scale = lanes.splat(half::f16::from_le_bytes(scales[row]).to_f32());
            for (tile, vector) in tiles.iter().zip(group * tiles_a_group..) {
                out.keep(lanes, lanes.mul(C::mma(lanes, &tile[row]), scale), row, vector);
            }
        }
    }
}

/// Tiles of eight rows and 64 columns: two registers, each with 32 columns of each row in order.
#[inline(always)]
fn nvfp4<L: Lanes>(lanes: L, strip: &Strip<'_>, global_scale: f32, mut out: impl Place) {
    const VECTORS_A_TILE: usize = 64 / LANES;
    let global_scale = lanes.splat(global_scale);
    // [tile][register][row][half]: sixteen codes, thus one scale, in eight bytes.
    let tiles = strip.data.as_chunks::<8>().0.as_chunks::<2>().0.as_chunks::<STRIP>().0.as_chunks::<2>().0;
    let scales = strip.scales.as_chunks::<VECTORS_A_TILE>().0.as_chunks::<STRIP>().0;
    for (tile, (registers, scales)) in tiles.iter().zip(scales).enumerate() {
        for row in 0..STRIP {
            for vector in 0..VECTORS_A_TILE {
                let codes = lanes.e2m1(u64::from_le_bytes(registers[vector / 2][row][vector % 2]));
                let scale = lanes.splat(e4m3(scales[row][vector]));
                let values = lanes.mul(lanes.mul(codes, scale), global_scale);
                out.keep(lanes, values, row, tile * VECTORS_A_TILE + vector);
            }
        }
    }
}
