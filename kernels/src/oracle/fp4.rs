//! Activations of four bits: what is left of a row that is quantized as NVFP4 weights are, by itself.
//!
//! A row `x` of BF16 values (others are rounded to BF16 first) has a scale of its own, a power of two, and an E4M3 scale
//! for each block of 16 columns:
//!
//! ```text
//! M = max |x| over the row
//! r = 1 if M is zero or not finite, else the smallest power of two with M <= 2688 r, but at least 2^-126
//! block of 16: b = max |x|
//!   c = 0x38 if b == 0, else max(1, E4M3_RNE((b / 6) / r));  0x7f, which is NaN, if b is not finite
//!   d = E4M3(c) * r
//!   code = E2M1_RNE(x / d);  0 in a block of scale NaN
//! value = BF16_RNE(E2M1(code) * d)
//! ```
//!
//! with the roundings of `docs/format-mnw.md` section 7.2, every operation in f32. The scale is the row's, not the
//! tensor's, so that a row's codes do not depend on what is beside it; and it is a power of two, so that `d` and `code * d`
//! are exact: E2M1 times E4M3 has six significant bits and its lowest bit is worth at least 2^-10, so BF16 holds
//! `E2M1 * E4M3 * r` wherever `r >= 2^-123`. Below that, in rows whose largest magnitude is at most 2688 * 2^-124 (1.3e-34),
//! values can be subnormal BF16 numbers and the last rounding can do something; and a magnitude above 2^127 may be rounded
//! up to infinity.
//!
//! The projection of such rows is the ordinary one of NVFP4 weights ([`super::linear`]): a device without products of
//! four-bit numbers takes the values, and one that has them the codes.

use half::bf16;

use crate::codec::{E2M1, e2m1_nearest, e4m3, group_scale};

/// Columns that share an E4M3 scale.
const BLOCK: usize = 16;
/// The code of a scale that is NaN.
const NAN_CODE: u8 = 0x7f;

/// A row of codes with its scales.
#[derive(Clone, Debug, PartialEq)]
pub struct Fp4Row {
    /// E2M1, one of a column: bits 0 to 3.
    pub codes: Vec<u8>,
    /// E4M3, one for 16 columns.
    pub scales: Vec<u8>,
    /// The row's own, a power of two.
    pub scale: f32,
}

impl Fp4Row {
    /// Quantizes a row, whole blocks of 16; it is rounded to BF16 first.
    #[must_use]
    pub fn new(row: &[f32]) -> Self {
        let row: Vec<f32> = row.iter().map(|&value| bf16::from_f32(value).to_f32()).collect();
        let scale = scale_of_row(max_of(&row));
        let (mut codes, mut scales) = (Vec::with_capacity(row.len()), Vec::with_capacity(row.len() / BLOCK));
        for block in row.chunks_exact(BLOCK) {
            let max = max_of(block);
            if !max.is_finite() {
                scales.push(NAN_CODE);
                codes.extend([0; BLOCK]);
                continue;
            }
            let code = group_scale(max, scale);
            scales.push(code);
            codes.extend(block.iter().map(|value| e2m1_nearest(value / (e4m3(code) * scale))));
        }
        Self { codes, scales, scale }
    }

    /// Its values, which are BF16.
    #[must_use]
    pub fn values(&self) -> Vec<f32> {
        let blocks = self.codes.chunks_exact(BLOCK).zip(&self.scales);
        let value = |code: &u8, d: f32| bf16::from_f32(E2M1[usize::from(*code)] * d).to_f32();
        blocks.flat_map(|(codes, &scale)| codes.iter().map(move |code| value(code, e4m3(scale) * self.scale))).collect()
    }
}

/// Replaces each row of `x: [rows, cols]` by what four bits leave of it.
pub fn round_to_fp4(x: &mut [f32], cols: usize) {
    for row in x.chunks_exact_mut(cols) {
        row.copy_from_slice(&Fp4Row::new(row).values());
    }
}

/// The scale of a row whose largest magnitude is `max`.
#[must_use]
#[inline(always)]
pub fn scale_of_row(max: f32) -> f32 {
    /// 2688 is 1.3125 * 2^11.
    const EXPONENT: u32 = 11;
    const MANTISSA: u32 = 0x0028_0000;
    if max == 0.0 || !max.is_finite() {
        return 1.0;
    }
    let (exponent, mantissa) = (max.to_bits() >> 23, max.to_bits() & 0x007f_ffff);
    let exponent = (exponent + u32::from(mantissa > MANTISSA)).saturating_sub(EXPONENT);
    f32::from_bits(exponent.max(1) << 23)
}

/// The largest magnitude; NaN if there is one.
fn max_of(values: &[f32]) -> f32 {
    // Magnitudes are ordered as their bits are, NaN above all.
    f32::from_bits(values.iter().fold(0, |max, value| max.max(value.abs().to_bits())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(values: &[f32]) -> Vec<f32> {
        let mut row = values.to_vec();
        row.resize(values.len().next_multiple_of(BLOCK), 0.0);
        row
    }

    /// By hand: M = 12, so 12 <= 2688 r from r = 2^-7 on (21 against 10.5 at 2^-8). Block 0 has b = 6: 6 / 6 / r = 128,
    /// whose code is 0x70, so d = 1. Block 1 has b = 12 and d = 2. Ties go to the even code.
    #[test]
    fn a_row_by_hand() {
        let mut x = vec![0.0, -0.0, 0.1, 0.26, 0.3, -0.5, 0.75, 1.0, 1.25, 1.5, -1.75, 2.5, 3.0, 5.0, 5.125, 6.0];
        x.extend(row(&[12.0, -1.0, 0.5]));
        x.extend(row(&[0.0]));
        let quantized = Fp4Row::new(&x);
        assert_eq!(quantized.scale, 1.0 / 128.0);
        assert_eq!(quantized.scales, [0x70, 0x78, 0x38]);
        assert_eq!(quantized.codes[..16], [0, 8, 0, 1, 1, 9, 2, 2, 2, 3, 12, 4, 5, 6, 7, 7]);
        assert_eq!(quantized.codes[16..20], [7, 9, 0, 0]);
        let values = quantized.values();
        let expected = [0.0, -0.0, 0.0, 0.5, 0.5, -0.5, 1.0, 1.0, 1.0, 1.5, -2.0, 2.0, 3.0, 4.0, 6.0, 6.0];
        assert_eq!(values[..16], expected);
        assert!(values[1].is_sign_negative(), "the sign of zero stays");
        assert_eq!(values[16..19], [12.0, -1.0, 0.0]);
    }

    #[test]
    fn a_rows_scale_is_the_smallest_power_of_two_that_its_largest_value_fits() {
        // On the border, one BF16 above it, and one below.
        for exponent in [-100, -7, 0, 40] {
            let border = 2688.0 * 2f32.powi(exponent);
            assert_eq!(scale_of_row(border), 2f32.powi(exponent));
            assert_eq!(scale_of_row(border.next_down()), 2f32.powi(exponent));
            assert_eq!(scale_of_row(border.next_up()), 2f32.powi(exponent + 1));
            // The border is the largest code of the largest scale; nothing saturates below it.
            let quantized = Fp4Row::new(&row(&[border]));
            assert_eq!((quantized.scales[0], quantized.codes[0], quantized.values()[0]), (126, 7, border));
            let above = bf16::from_bits(bf16::from_f32(border).to_bits() + 1).to_f32();
            assert_eq!(Fp4Row::new(&row(&[above])).scale, 2f32.powi(exponent + 1));
        }
        assert_eq!((scale_of_row(0.0), scale_of_row(f32::NAN), scale_of_row(f32::INFINITY)), (1.0, 1.0, 1.0));
        assert_eq!(scale_of_row(f32::MIN_POSITIVE), f32::MIN_POSITIVE);
        assert_eq!(scale_of_row(1e-45), f32::MIN_POSITIVE);
        assert_eq!(scale_of_row(bf16::MAX.to_f32()), 2f32.powi(117));
        // 2^127 is 1024 r: its block has 176 for a scale (170.7 rounded), and 5.8 is rounded to 6.
        assert_eq!(Fp4Row::new(&row(&[2f32.powi(127)])).values()[0], 1056.0 * 2f32.powi(117));
    }

    #[test]
    fn subnormal_rows_keep_what_bf16_can_hold() {
        // The smallest subnormal BF16, 2^-133: r = 2^-126, c = 2^-7 / 6 in units of 2^-9 = 0.67, thus 1; d = 2^-135.
        let least = f32::from_bits(0x0001_0000);
        let quantized = Fp4Row::new(&row(&[least, -least]));
        assert_eq!((quantized.scale, quantized.scales[0]), (f32::MIN_POSITIVE, 1));
        assert_eq!(quantized.codes[..3], [6, 14, 0]);
        assert_eq!(quantized.values()[..3], [least, -least, 0.0]);
        // 1.5, 2 and 3 quarters of it: the middle one is a tie, and goes to zero.
        let three = Fp4Row { codes: [3, 4, 5].into_iter().chain([0; 13]).collect(), ..quantized };
        assert_eq!(three.values()[..3], [0.0, 0.0, least]);
    }

    #[test]
    fn a_value_that_is_not_finite_makes_its_block_nan_and_no_other() {
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let x = [row(&[1.0, wrong]), row(&[1.0])].concat();
            let quantized = Fp4Row::new(&x);
            assert_eq!((quantized.scale, quantized.scales[0]), (1.0, NAN_CODE));
            let values = quantized.values();
            assert!(values[..16].iter().all(|value| value.is_nan()));
            // 1 / 6 in E4M3 is 11 * 2^-6, so 1 is 5.8 of it: code 7.
            assert_eq!(values[16], 6.0 * 11.0 / 64.0);
        }
    }

    #[test]
    fn rows_do_not_depend_on_each_other_and_powers_of_two_scale_through() {
        let x: Vec<f32> = (0..64).map(|index| ((index * 37 % 64) as f32 - 31.0) / 16.0).collect();
        let mut both = [x.clone(), x.iter().map(|value| value * 1024.0).collect()].concat();
        round_to_fp4(&mut both, 64);
        let alone = Fp4Row::new(&x).values();
        assert_eq!(both[..64], alone);
        assert!(both[64..].iter().zip(&alone).all(|(large, small)| *large == small * 1024.0));
    }
}
