//! Sixteen f32 at a time: the vocabulary that all kernels are written in.
//!
//! An implementation is also the proof that its instructions may run, see [`crate::cpu::isa`]. AVX2 and AVX-512 give
//! the same bits for everything here; [`Scalar`] differs where a product is added to, as it rounds in between.

mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(super) use scalar::Scalar;
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

use super::products::Step;
use crate::codec::STRIP;

/// Number of lanes.
pub(crate) const LANES: usize = 16;

/// Pairs of columns of [`Lanes::dots`].
pub(super) const PAIRS: usize = 64;

/// Where each column lies in a row of an `mma` tile, counted in codes: a lane of four codes holds columns
/// `2 lane + {0, 1, 8, 9}`. Section 8.1 of `docs/format-mnw.md`.
pub(super) const PLACE_IN_TILE_ROW: [usize; LANES] = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15];

/// Arithmetic on vectors of sixteen f32.
pub(crate) trait Lanes: Copy + Send + Sync {
    /// Sixteen f32; lane 0 is the first element in memory.
    type Vector: Copy;

    /// The largest register tile of [`Self::add_products`].
    const TILE: Tile;

    fn splat(self, value: f32) -> Self::Vector;
    fn load(self, values: &[f32; LANES]) -> Self::Vector;
    fn store(self, vector: Self::Vector, out: &mut [f32; LANES]);

    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b + c`, with one rounding where the set has FMA.
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// The larger; `b` where either is NaN.
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// The smaller; `b` where either is NaN.
    fn min(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// The nearest whole number, ties to even.
    fn round(self, a: Self::Vector) -> Self::Vector;
    /// `a * 2^exponent`, rounded once; `exponent` holds whole numbers from -160 to 160.
    fn scale_by_power(self, a: Self::Vector, exponent: Self::Vector) -> Self::Vector;
    /// Adds up all lanes: lanes eight apart, then four, two, and one.
    fn sum(self, a: Self::Vector) -> f32;
    /// [`Self::sum`] of each.
    #[inline(always)]
    fn sum_each(self, a: [Self::Vector; 8]) -> [f32; 8] {
        let mut out = [0.0; 8];
        for (out, a) in out.iter_mut().zip(a) {
            *out = self.sum(a);
        }
        out
    }

    /// `all[row + r][feature + n] += x[row + r] * weights[feature + n]` lane by lane, for `R` rows and `N` features, step
    /// after step.
    #[inline(always)]
    fn add_products<const R: usize, const N: usize>(
        self,
        all: &mut [[Self::Vector; STRIP]; STRIP],
        (x, row): (&[Step], usize),
        (weights, feature): (&[Step], usize),
    ) {
        assert!(row + R <= STRIP && feature + N <= STRIP);
        let mut sums: [[_; N]; R] = std::array::from_fn(|r| std::array::from_fn(|n| all[row + r][feature + n]));
        for (x, weights) in x.iter().zip(weights) {
            let factors: [_; N] = std::array::from_fn(|n| self.load(&weights.0[feature + n]));
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = self.load(&x.0[row + r]);
                for (sum, factor) in sums.iter_mut().zip(factors) {
                    *sum = self.mul_add(x, factor, *sum);
                }
            }
        }
        for (all, sums) in all[row..].iter_mut().zip(sums) {
            all[feature..][..N].copy_from_slice(&sums);
        }
    }

    /// Products of codes, `[feature][row]`: `x` has pairs of columns of eight rows, `weights` those of eight features. A pair
    /// is two codes of sixteen bits, the first in the lower half. Exact as long as every sum is within 32 bits.
    #[inline(always)]
    fn dots(self, x: &[[i32; STRIP]; PAIRS], weights: &[[i32; PAIRS]; STRIP]) -> [[i32; STRIP]; STRIP] {
        let mut dots = [[0; STRIP]; STRIP];
        for (dots, weights) in dots.iter_mut().zip(weights) {
            for (x, w) in x.iter().zip(weights) {
                for (dot, x) in dots.iter_mut().zip(x) {
                    *dot += i32::from(*x as i16) * i32::from(*w as i16) + (x >> 16) * (w >> 16);
                }
            }
        }
        dots
    }

    /// Sixteen little-endian bfloat16.
    fn bf16(self, bytes: &[u8; 2 * LANES]) -> Self::Vector;
    /// Sixteen little-endian binary16.
    fn f16(self, bytes: &[u8; 2 * LANES]) -> Self::Vector;
    /// Sixteen two's complement bytes.
    fn i8(self, bytes: u128) -> Self::Vector;
    /// Sixteen two's complement nibbles, lowest first.
    fn i4(self, nibbles: u64) -> Self::Vector;
    /// [`Self::i8`] of a row of an `mma` tile, put into column order by [`PLACE_IN_TILE_ROW`].
    fn i8_of_tile(self, bytes: u128) -> Self::Vector;
    /// [`Self::i4`] of a row of an `mma` tile, put into column order by [`PLACE_IN_TILE_ROW`].
    fn i4_of_tile(self, nibbles: u64) -> Self::Vector;
    /// Sixteen E2M1 nibbles, lowest first.
    fn e2m1(self, nibbles: u64) -> Self::Vector;

    /// The larger of `max` and the magnitude of `a`, where `max` is not negative. NaN counts as larger than infinity,
    /// so that a maximum over many vectors is finite only if everything was.
    fn max_magnitude(self, max: Self::Vector, a: Self::Vector) -> Self::Vector;
    /// The largest lane of a result of [`Self::max_magnitude`], NaN above all.
    fn largest(self, max: Self::Vector) -> f32;
    /// The nearest integers, ties to even, as two's complement bytes: undoes [`Self::i8`]. `a` is in -128 to 127.
    fn to_i8(self, a: Self::Vector) -> u128;
    /// The nearest integers, ties to even, as nibbles, lowest first: undoes [`Self::i4`]. `a` is in -8 to 7.
    fn to_i4(self, a: Self::Vector) -> u64;
    /// Undoes [`Self::i8_of_tile`]; as [`Self::to_i8`].
    fn to_i8_of_tile(self, a: Self::Vector) -> u128;
    /// Undoes [`Self::i4_of_tile`]; as [`Self::to_i4`].
    fn to_i4_of_tile(self, a: Self::Vector) -> u64;
    /// Codes of the nearest E2M1 values, ties to the even code, at most 6, with the sign of zero: undoes
    /// [`Self::e2m1`]. No lane is NaN.
    fn to_e2m1(self, a: Self::Vector) -> u64;

    /// Up to sixteen values; the lanes beyond them are zero.
    #[inline(always)]
    fn load_part(self, values: &[f32]) -> Self::Vector {
        if let Ok(all) = values.try_into() {
            return self.load(all);
        }
        let mut padded = [0.0; LANES];
        padded[..values.len()].copy_from_slice(values);
        self.load(&padded)
    }

    /// As many lanes as `out` has room for, at most sixteen.
    #[inline(always)]
    fn store_part(self, vector: Self::Vector, out: &mut [f32]) {
        if let Ok(all) = out.try_into() {
            return self.store(vector, all);
        }
        let mut padded = [0.0; LANES];
        self.store(vector, &mut padded);
        out.copy_from_slice(&padded[..out.len()]);
    }

    /// `e^a`, within two units in the last place; NaN stays NaN.
    ///
    /// `a = n ln 2 + r` with whole `n` and `|r| <= ln 2 / 2`; a polynomial gives `e^r`, and `2^n` is exact. The first
    /// omitted term of the series, `r^8 / 8!`, is below 6e-9.
    #[inline(always)]
    fn exp(self, a: Self::Vector) -> Self::Vector {
        // Beyond these the result is zero or infinite in f32 anyway.
        let a = self.min(self.splat(90.0), self.max(self.splat(-105.0), a));
        let n = self.round(self.mul(a, self.splat(std::f32::consts::LOG2_E)));
        // ln 2 in two parts, the first with so few bits that n times it is exact.
        let r = self.mul_add(n, self.splat(-355.0 / 512.0), a);
        let r = self.mul_add(n, self.splat(2.121_944_4e-4), r);
        let mut sum = self.splat(1.0 / 5040.0);
        for factorial in [720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0] {
            sum = self.mul_add(sum, r, self.splat(1.0 / factorial));
        }
        self.scale_by_power(sum, n)
    }
}

/// The size of a register tile, in rows of `x` and rows of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tile {
    /// 4 x 4: sixteen sums, of 32 registers.
    Wide,
    /// 4 x 3: twelve sums, of sixteen registers.
    Narrow,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::E2M1;
    use crate::cpu::Isa;
    use crate::cpu::isa::Kernel;

    /// What each operation does to these inputs, one after the other.
    struct Everything;

    impl Kernel for Everything {
        type Output = Vec<f32>;

        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) -> Vec<f32> {
            let mut out = Vec::new();
            let a: [f32; LANES] = std::array::from_fn(|i| (i as f32 - 7.5) * 1.25);
            let b: [f32; LANES] = std::array::from_fn(|i| [1.0, -3.0, 0.5, f32::NAN][i % 4] * (i + 1) as f32);
            let (a, b) = (lanes.load(&a), lanes.load(&b));
            let halves: [u8; 32] = std::array::from_fn(|i| (i * 37 + 5) as u8);
            let nibbles = 0xfedc_ba98_7654_3210u64.rotate_left(20);
            // Small whole numbers: sums of their products are exact, rounded between or not.
            let value = |step, row, col| ((step * 7 + row * 5 + col * 3) % 17) as f32 - 8.0;
            let row_of = |step, row| std::array::from_fn(|col| value(step, row, col));
            let steps: [Step; 4] = std::array::from_fn(|step| Step(std::array::from_fn(|row| row_of(step, row))));
            let vectors = [
                lanes.splat(0.3),
                lanes.add(a, b),
                lanes.mul(a, b),
                lanes.div(a, b),
                lanes.max(a, b),
                lanes.min(a, b),
                lanes.max(b, a),
                lanes.min(b, a),
                lanes.round(a),
                lanes.bf16(&halves),
                lanes.f16(&halves),
                lanes.i8(0x807f_01ff_0203_fe80_1122_3344_5566_7788),
                lanes.i4(nibbles),
                lanes.e2m1(nibbles),
                lanes.i8_of_tile(0x807f_01ff_0203_fe80_1122_3344_5566_7788),
                lanes.i4_of_tile(nibbles),
                lanes.scale_by_power(a, lanes.splat(100.0)),
                lanes.scale_by_power(a, lanes.splat(-150.0)),
                lanes.load_part(&[1.0, 2.0, 3.0]),
                lanes.splat(lanes.sum(a)),
                lanes.splat(lanes.sum(b)),
            ];
            let each = std::array::from_fn(|i| lanes.mul(a, lanes.splat(i as f32 + 0.3)));
            assert_eq!(lanes.sum_each(each), each.map(|vector| lanes.sum(vector)));
            let mut tile = [[lanes.splat(0.5); STRIP]; STRIP];
            lanes.add_products::<4, 3>(&mut tile, (&steps, 3), (&steps[1..], 5));
            for vector in vectors.into_iter().chain(tile.into_iter().flatten()) {
                let mut values = [0.0; LANES];
                lanes.store(vector, &mut values);
                out.extend(values);
            }
            out
        }
    }

    #[test]
    fn every_instruction_set_does_the_same() {
        let expected: Vec<u32> = Isa::Scalar.run(Everything).iter().map(|value| canonical(*value)).collect();
        for isa in Isa::present() {
            let found: Vec<u32> = isa.run(Everything).iter().map(|value| canonical(*value)).collect();
            assert_eq!(found, expected, "{isa}");
        }
    }

    /// Bits of a value, with one NaN for all.
    fn canonical(value: f32) -> u32 {
        if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }
    }

    #[test]
    fn the_scalar_set_does_what_it_says() {
        let lanes = Scalar;
        assert_eq!(lanes.i4(0xfedc_ba98_7654_3210)[..9], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0]);
        assert_eq!(lanes.e2m1(0xfedc_ba98_7654_3210), E2M1);
        assert_eq!(lanes.i8(0x80ff)[..3], [-1.0, -128.0, 0.0]);
        // A row of a tile as section 8.1 of the specification shows it.
        let row = u128::from_le_bytes([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]);
        assert_eq!(lanes.i8_of_tile(row), std::array::from_fn(|col| col as f32));
        assert_eq!(lanes.i4_of_tile(0x7654_3210_7654_3210)[..4], [0.0, 1.0, 4.0, 5.0]);
        assert_eq!(lanes.sum(std::array::from_fn(|i| i as f32)), 120.0);
        assert!(lanes.max([1.0; 16], [f32::NAN; 16])[0].is_nan() && lanes.max([f32::NAN; 16], [1.0; 16])[0] == 1.0);
    }

    /// Sixteen values, and a number from -8 to 7 for each lane.
    struct ToCodes<'a>(&'a [f32; LANES], &'a [f32; LANES]);

    impl Kernel for ToCodes<'_> {
        type Output = (u64, [u64; 2], [u128; 2], u32);

        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) -> Self::Output {
            let (values, small) = (lanes.load(self.0), lanes.load(self.1));
            let max = lanes.max_magnitude(lanes.splat(0.25), values);
            let large = lanes.mul(small, lanes.splat(15.8));
            (
                lanes.to_e2m1(values),
                [lanes.to_i4(small), lanes.to_i4_of_tile(small)],
                [lanes.to_i8(large), lanes.to_i8_of_tile(large)],
                lanes.largest(max).to_bits(),
            )
        }
    }

    #[test]
    fn every_instruction_set_makes_the_same_codes() {
        let sequence = minnow_common::random::Symmetric::new("codes", 1);
        let ends = E2M1.into_iter().chain([f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1), f32::INFINITY]);
        let ties = (0..7).map(|code| f32::midpoint(E2M1[code], E2M1[code + 1]));
        let mut values: Vec<f32> =
            ends.chain(ties).flat_map(|x| [x, -x, x.next_up(), -x.next_up(), x.next_down()]).collect();
        values.retain(|value| !value.is_nan());
        values.extend((0..20_000).map(|index| sequence.at(index) * 8.0));
        for (step, values) in values.as_chunks::<LANES>().0.iter().enumerate() {
            // Quarters hit every tie.
            let small = std::array::from_fn(|lane| ((step * 7 + lane * 5) % 61) as f32 / 4.0 - 8.0);
            let expected = Isa::Scalar.run(ToCodes(values, &small));
            for (lane, value) in values.iter().enumerate() {
                assert_eq!((expected.0 >> (4 * lane) & 15) as u8, crate::codec::e2m1_nearest(*value));
            }
            for isa in Isa::present() {
                assert_eq!(isa.run(ToCodes(values, &small)), expected, "{isa}: {values:?}, {small:?}");
            }
        }
    }

    #[test]
    fn one_nan_anywhere_makes_the_largest_magnitude_nan() {
        for isa in Isa::present() {
            for lane in 0..LANES {
                for bad in [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001), f32::NEG_INFINITY] {
                    let mut values = [-3.0; LANES];
                    values[lane] = bad;
                    let largest = f32::from_bits(isa.run(ToCodes(&values, &[0.0; LANES])).3);
                    assert!(largest.is_nan() == bad.is_nan() && !largest.is_finite(), "{isa}, lane {lane}");
                }
            }
        }
    }

    struct Exp(f32);

    impl Kernel for Exp {
        type Output = f32;

        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) -> f32 {
            let mut out = [0.0; LANES];
            lanes.store(lanes.exp(lanes.splat(self.0)), &mut out);
            out[5]
        }
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for isa in Isa::present() {
            for step in -105_000..=89_000 {
                let x = step as f32 * 1e-3;
                let (found, expected) = (isa.run(Exp(x)), f64::from(x).exp() as f32);
                let ulps = found.to_bits().abs_diff(expected.to_bits());
                assert!(ulps <= 2, "{isa}: exp({x}) is {found}, expected {expected}, {ulps} ulp");
            }
            assert_eq!(isa.run(Exp(f32::NEG_INFINITY)), 0.0);
            assert_eq!(isa.run(Exp(f32::INFINITY)), f32::INFINITY);
            assert_eq!(isa.run(Exp(0.0)), 1.0);
            assert!(isa.run(Exp(f32::NAN)).is_nan());
        }
    }
}
