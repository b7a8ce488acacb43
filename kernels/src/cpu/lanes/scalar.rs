//! Lanes as an array: the meaning of each operation, for CPUs without anything better.

use half::f16;

use super::{LANES, Lanes, PLACE_IN_TILE_ROW, Tile};
use crate::codec::{E2M1, e2m1_nearest};

/// No special instructions: needs no proof.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Scalar;

type Vector = [f32; LANES];

/// `f` of each lane number. A loop and no `array::from_fn`, which is not reliably inlined.
#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> Vector {
    let mut out = [0.0; LANES];
    for (lane, out) in out.iter_mut().enumerate() {
        *out = f(lane);
    }
    out
}

impl Lanes for Scalar {
    type Vector = Vector;

    const TILE: Tile = Tile::Narrow;

    #[inline(always)]
    fn splat(self, value: f32) -> Vector {
        [value; LANES]
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> Vector {
        *values
    }

    #[inline(always)]
    fn store(self, vector: Vector, out: &mut [f32; LANES]) {
        *out = vector;
    }

    #[inline(always)]
    fn add(self, a: Vector, b: Vector) -> Vector {
        each(|lane| a[lane] + b[lane])
    }

    #[inline(always)]
    fn mul(self, a: Vector, b: Vector) -> Vector {
        each(|lane| a[lane] * b[lane])
    }

    #[inline(always)]
    fn div(self, a: Vector, b: Vector) -> Vector {
        each(|lane| a[lane] / b[lane])
    }

    #[inline(always)]
    fn mul_add(self, a: Vector, b: Vector, c: Vector) -> Vector {
        each(|lane| a[lane] * b[lane] + c[lane])
    }

    #[inline(always)]
    fn max(self, a: Vector, b: Vector) -> Vector {
        each(|lane| if a[lane] > b[lane] { a[lane] } else { b[lane] })
    }

    #[inline(always)]
    fn min(self, a: Vector, b: Vector) -> Vector {
        each(|lane| if a[lane] < b[lane] { a[lane] } else { b[lane] })
    }

    #[inline(always)]
    fn round(self, a: Vector) -> Vector {
        each(|lane| a[lane].round_ties_even())
    }

    #[inline(always)]
    fn scale_by_power(self, a: Vector, exponent: Vector) -> Vector {
        each(|lane| {
            // In two steps, for 2^n itself may be out of range; the first step is exact for any sum an `exp` scales.
            let n = exponent[lane] as i32;
            let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
            a[lane] * power(n >> 1) * power(n - (n >> 1))
        })
    }

    #[inline(always)]
    fn sum(self, a: Vector) -> f32 {
        let eight: [f32; 8] = std::array::from_fn(|lane| a[lane] + a[lane + 8]);
        let four: [f32; 4] = std::array::from_fn(|lane| eight[lane] + eight[lane + 4]);
        (four[0] + four[2]) + (four[1] + four[3])
    }

    #[inline(always)]
    fn bf16(self, bytes: &[u8; 2 * LANES]) -> Vector {
        each(|lane| f32::from_bits(u32::from(u16::from_le_bytes([bytes[2 * lane], bytes[2 * lane + 1]])) << 16))
    }

    #[inline(always)]
    fn f16(self, bytes: &[u8; 2 * LANES]) -> Vector {
        each(|lane| f16::from_le_bytes([bytes[2 * lane], bytes[2 * lane + 1]]).to_f32())
    }

    #[inline(always)]
    fn i8(self, bytes: u128) -> Vector {
        let bytes = bytes.to_le_bytes();
        each(|lane| f32::from(bytes[lane] as i8))
    }

    #[inline(always)]
    fn i4(self, nibbles: u64) -> Vector {
        // Each nibble to the top of a byte, and back with its sign.
        each(|lane| f32::from(((nibbles >> (4 * lane)) << 4) as i8 >> 4))
    }

    #[inline(always)]
    fn i8_of_tile(self, bytes: u128) -> Vector {
        let stored = self.i8(bytes);
        each(|lane| stored[PLACE_IN_TILE_ROW[lane]])
    }

    #[inline(always)]
    fn i4_of_tile(self, nibbles: u64) -> Vector {
        let stored = self.i4(nibbles);
        each(|lane| stored[PLACE_IN_TILE_ROW[lane]])
    }

    #[inline(always)]
    fn e2m1(self, nibbles: u64) -> Vector {
        each(|lane| E2M1[(nibbles >> (4 * lane) & 15) as usize])
    }

    #[inline(always)]
    fn max_magnitude(self, max: Vector, a: Vector) -> Vector {
        each(|lane| f32::from_bits(max[lane].to_bits().max(a[lane].abs().to_bits())))
    }

    #[inline(always)]
    fn largest(self, max: Vector) -> f32 {
        f32::from_bits(max.iter().fold(0, |largest, lane| largest.max(lane.to_bits())))
    }

    #[inline(always)]
    fn to_i8(self, a: Vector) -> u128 {
        u128::from_le_bytes(a.map(|value| value.round_ties_even() as i8 as u8))
    }

    #[inline(always)]
    fn to_i4(self, a: Vector) -> u64 {
        nibbles(a.map(|value| value.round_ties_even() as i8 as u8))
    }

    #[inline(always)]
    fn to_i8_of_tile(self, a: Vector) -> u128 {
        self.to_i8(tile_row(a))
    }

    #[inline(always)]
    fn to_i4_of_tile(self, a: Vector) -> u64 {
        self.to_i4(tile_row(a))
    }

    #[inline(always)]
    fn to_e2m1(self, a: Vector) -> u64 {
        nibbles(a.map(e2m1_nearest))
    }
}

/// Columns in order, as they lie in a row of an `mma` tile.
#[inline(always)]
fn tile_row(columns: Vector) -> Vector {
    let mut out = [0.0; LANES];
    for (place, value) in PLACE_IN_TILE_ROW.into_iter().zip(columns) {
        out[place] = value;
    }
    out
}

/// The low halves of sixteen codes, lowest first.
#[inline(always)]
fn nibbles(codes: [u8; LANES]) -> u64 {
    codes.iter().rev().fold(0, |nibbles, code| nibbles << 4 | u64::from(code & 15))
}
