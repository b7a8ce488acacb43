//! Better scales in the same bytes: what `--quality search` does instead of rounding to nearest by the largest value.
//!
//! Given its scale, a value is best stored as the nearest code, so all there is to choose is scales. A group's is
//! chosen among candidates by the least sum of squared errors; ties go to the first. Decoders are unchanged: scales stay
//! positive and finite. INT4 and INT8 also use the codes -8 and -128, which rounding to nearest never makes.
//!
//! Results do not depend on the instruction set: every sum is sixteen partial ones added up by one tree, and no product
//! is fused with an addition. How near this comes to the best there is: `docs/quant-schemes.md`.

use std::fmt;
use std::str::FromStr;

use half::f16;
use thiserror::Error;

use super::e4m3;
use super::int::SCALE_MIN;
use super::nvfp4::{E2M1_MAX, E4M3_MAX_CODE, global_scale_of, group_scale};
use crate::cpu::Lanes;

/// How scales are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Quality {
    /// By the largest magnitude, as the specification says: "round to nearest". The default, and byte-exact.
    #[default]
    Rtn,
    /// By the least squared error among many candidates.
    Search,
}

impl fmt::Display for Quality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rtn => "rtn",
            Self::Search => "search",
        })
    }
}

/// A name that is no quality.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("unknown quality {0:?}, expected rtn or search")]
pub struct UnknownQuality(pub String);

impl FromStr for Quality {
    type Err = UnknownQuality;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        [Self::Rtn, Self::Search]
            .into_iter()
            .find(|quality| quality.to_string() == name)
            .ok_or_else(|| UnknownQuality(name.to_owned()))
    }
}

/// Candidates for the scale of a group of integers: `first + step * index` times the scale that just fits the largest
/// magnitude, for `index < count`.
struct Ratios {
    first: f32,
    step: f32,
    count: u16,
}

/// With 16 levels, cutting off the tails is worth a lot: 0.58 to 1.04.
const RATIOS_OF_4_BITS: Ratios = Ratios { first: 0.58, step: 0.02, count: 24 };
/// With 256 levels, hardly anything is cut off; what is won is that many values happen to lie near codes.
const RATIOS_OF_8_BITS: Ratios = Ratios { first: 0.97, step: 0.002, count: 18 };
/// Rounds of fitting the scale to the codes and the codes to the scale; nearly all end after two.
const FITS_MAX: usize = 4;

/// The scale of a group of `values` with codes from `-limit - 1` to `limit`. `max_abs` is their largest magnitude, and
/// `rtn` the scale that rounding to nearest gives, which is tried first.
#[inline(always)]
pub(super) fn int_scale<L: Lanes>(lanes: L, values: &[L::Vector], max_abs: f32, limit: f32, rtn: f16) -> f16 {
    let group = Group { lanes, values, lowest: lanes.splat(-limit - 1.0), limit: lanes.splat(limit) };
    let (mut best, mut best_error) = (rtn, group.error(rtn));
    if best_error == 0.0 {
        return best;
    }
    let ratios = if limit > 7.0 { RATIOS_OF_8_BITS } else { RATIOS_OF_4_BITS };
    for index in 0..ratios.count {
        let ratio = ratios.first + ratios.step * f32::from(index);
        if let Some(scale) = storable(max_abs * ratio / limit) {
            let error = group.error(scale);
            if error < best_error {
                (best, best_error) = (scale, error);
            }
        }
    }
    for _ in 0..FITS_MAX {
        let Some(scale) = group.least_squares_scale(best) else { break };
        let error = group.error(scale);
        if error >= best_error {
            break;
        }
        (best, best_error) = (scale, error);
    }
    best
}

/// The FP16 nearest to `scale`, if it may be stored.
fn storable(scale: f32) -> Option<f16> {
    let scale = f16::from_f32(scale.max(SCALE_MIN));
    scale.is_finite().then_some(scale)
}

/// Values that share a scale, and the range of their codes.
struct Group<'a, L: Lanes> {
    lanes: L,
    values: &'a [L::Vector],
    lowest: L::Vector,
    limit: L::Vector,
}

impl<L: Lanes> Group<'_, L> {
    /// The code of `value`, given the inverse of the scale. A product instead of a quotient: at worst a tie goes the
    /// other way, with the same error.
    #[inline(always)]
    fn code(&self, value: L::Vector, inverse: L::Vector) -> L::Vector {
        let ratio = self.lanes.mul(value, inverse);
        self.lanes.round(self.lanes.min(self.limit, self.lanes.max(self.lowest, ratio)))
    }

    /// Sum of squared differences of values and decoded codes.
    #[inline(always)]
    fn error(&self, scale: f16) -> f32 {
        let lanes = self.lanes;
        let step = scale.to_f32();
        let (inverse, minus_step) = (lanes.splat(1.0 / step), lanes.splat(-step));
        let mut sum = lanes.splat(0.0);
        for value in self.values {
            let error = lanes.add(*value, lanes.mul(self.code(*value, inverse), minus_step));
            sum = lanes.add(sum, lanes.mul(error, error));
        }
        lanes.sum(sum)
    }

    /// The storable scale with which the codes of `scale` have the least error.
    #[inline(always)]
    fn least_squares_scale(&self, scale: f16) -> Option<f16> {
        let lanes = self.lanes;
        let inverse = lanes.splat(1.0 / scale.to_f32());
        let [mut products, mut squares] = [lanes.splat(0.0); 2];
        for value in self.values {
            let code = self.code(*value, inverse);
            products = lanes.add(products, lanes.mul(*value, code));
            squares = lanes.add(squares, lanes.mul(code, code));
        }
        let (product, square) = (lanes.sum(products), lanes.sum(squares));
        if square > 0.0 { storable(product / square) } else { None }
    }
}

/// The scale of a matrix of largest magnitude `max_abs`: twice the usual. The E4M3 values times twice as much are the
/// same scales, down to a factor of 2^14 below the largest, and groups with the largest magnitudes may now have scales
/// above the one that just fits, as all others always may.
pub(super) fn global_scale(max_abs: f32) -> f32 {
    if max_abs == 0.0 { 1.0 } else { 2.0 * global_scale_of(max_abs) }
}

/// The E4M3 code for sixteen finite `values` of largest magnitude `max_abs`: the best of all 126, though few are tried.
///
/// - Upwards from the usual code, which fits the largest magnitude to within rounding, it ends after eight: every
///   further scale is twice another one that fits, and twice a scale only takes E2M1 values away that are in reach.
///   (Odd codes below 16 have no half; their groups are 2^-13 of the largest and not worth the trouble.)
/// - Downwards it ends where the error of the largest magnitude alone exceeds the best sum.
#[inline(always)]
pub(super) fn block_scale<L: Lanes>(lanes: L, values: L::Vector, max_abs: f32, global_scale: f32) -> u8 {
    let rtn = group_scale(max_abs, global_scale);
    if max_abs == 0.0 {
        return rtn;
    }
    // In units of the global scale, where no square can overflow or vanish.
    let values = lanes.div(lanes.max_magnitude(lanes.splat(0.0), values), lanes.splat(global_scale));
    let max_abs = max_abs / global_scale;
    let (mut best, mut best_error) = (rtn, block_error(lanes, values, rtn));
    for code in rtn + 1..=E4M3_MAX_CODE.min(rtn + 8) {
        let error = block_error(lanes, values, code);
        if error < best_error {
            (best, best_error) = (code, error);
        }
    }
    for code in (1..rtn).rev() {
        let excess = max_abs - E2M1_MAX * e4m3(code);
        if excess > 0.0 && excess * excess > best_error {
            break;
        }
        let error = block_error(lanes, values, code);
        if error < best_error {
            (best, best_error) = (code, error);
        }
    }
    best
}

/// Sum of squared errors of sixteen `magnitudes` stored as E2M1 with scale `code`.
///
/// The E2M1 values are halves up to 2, whole numbers up to 4, and even numbers up to 6. Each of these three grids has
/// only E2M1 values, and together they have all, so the distance to the nearest is the least of three.
#[inline(always)]
fn block_error<L: Lanes>(lanes: L, magnitudes: L::Vector, code: u8) -> f32 {
    let scale = e4m3(code);
    let magnitudes = lanes.mul(magnitudes, lanes.splat(1.0 / scale));
    let mut least = lanes.splat(f32::INFINITY);
    for (step, count) in [(0.5, 4.0), (1.0, 4.0), (2.0, 3.0)] {
        let code = lanes.min(lanes.splat(count), lanes.round(lanes.mul(magnitudes, lanes.splat(1.0 / step))));
        let error = lanes.add(magnitudes, lanes.mul(code, lanes.splat(-step)));
        least = lanes.min(least, lanes.mul(error, error));
    }
    lanes.sum(least) * (scale * scale)
}

#[cfg(test)]
mod tests {
    use minnow_common::random::Symmetric;

    use super::*;
    use crate::codec::E2M1;
    use crate::codec::nvfp4::e2m1_nearest;
    use crate::cpu::{Isa, Kernel, LANES};

    struct BlockScale<'a>(&'a [f32; LANES], f32);

    impl Kernel for BlockScale<'_> {
        type Output = u8;

        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) -> u8 {
            let max_abs = self.0.iter().fold(0.0f32, |max, value| max.max(value.abs()));
            block_scale(lanes, lanes.load(self.0), max_abs, self.1)
        }
    }

    /// In f64, by the nearest code as encoders choose it.
    fn error(values: &[f32; LANES], code: u8) -> f64 {
        let scale = e4m3(code);
        values
            .iter()
            .map(|value| f64::from(E2M1[usize::from(e2m1_nearest(value / scale))] * scale - value).powi(2))
            .sum()
    }

    #[test]
    fn the_block_scale_is_the_best_of_all_codes() {
        for seed in 0..2000 {
            let sequence = Symmetric::new("block", seed);
            // Cubes have longer tails than uniform numbers.
            let mut values: [f32; LANES] = std::array::from_fn(|index| sequence.at(index as u64).powi(3) * 300.0);
            if seed % 5 == 0 {
                values = values.map(|value| value.signum());
            }
            let best = (1..=E4M3_MAX_CODE).map(|code| error(&values, code)).fold(f64::INFINITY, f64::min);
            let found: Vec<u8> = Isa::present().map(|isa| isa.run(BlockScale(&values, 1.0))).collect();
            assert!(found.iter().all(|code| *code == found[0]), "{found:?}");
            let found = error(&values, found[0]);
            assert!(found <= best * 1.000_01 + 1e-9, "seed {seed}: {found}, the best is {best}");
        }
    }

    #[test]
    fn names_round_trip() {
        for quality in [Quality::Rtn, Quality::Search] {
            assert_eq!(quality.to_string().parse(), Ok(quality));
        }
        assert_eq!("best".parse::<Quality>(), Err(UnknownQuality("best".to_owned())));
    }
}
