//! INT8 and INT4: symmetric integers with one FP16 scale a group. `docs/format-mnw.md` section 7.1.
//!
//! Codes are two's complement: a byte, or a nibble in the low half of a byte. They are computed from the scale as it is
//! stored, after its rounding to FP16. -128 and -8 are never made, but decode like any other code.

use std::ops::RangeInclusive;

use half::f16;
use minnow_common::Encoding;

use super::layout::{Order, Width};

/// The smallest positive FP16, 2^-24.
pub(super) const SCALE_MIN: f32 = f32::from_bits(0x3380_0000);

/// Bits of the scales that may be stored: positive and finite.
pub(super) const SCALE_BITS: RangeInclusive<u16> = 1..=0x7bff;

/// A group whose scale would be infinite in FP16.
pub(super) struct ScaleOverflow {
    pub(super) group: usize,
    pub(super) max_abs: f32,
}

/// The largest code: 127 or 7.
pub(super) fn limit(encoding: Encoding) -> f32 {
    if encoding.code_bits() == 8 { 127.0 } else { 7.0 }
}

/// Codes and little-endian FP16 scales of one row of finite `values`. `codes` is as long as `values`; `scales` has two
/// bytes for each group of `group` values.
pub(super) fn encode_row(
    values: &[f32],
    limit: f32,
    group: usize,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<(), ScaleOverflow> {
    let groups = values.chunks_exact(group).zip(codes.chunks_exact_mut(group)).zip(scales.chunks_exact_mut(2));
    for (index, ((values, codes), stored)) in groups.enumerate() {
        let max_abs = values.iter().fold(0.0f32, |max, value| max.max(value.abs()));
        let scale = group_scale(max_abs, limit);
        if scale.is_infinite() {
            return Err(ScaleOverflow { group: index, max_abs });
        }
        stored.copy_from_slice(&scale.to_le_bytes());
        let scale = scale.to_f32();
        for (value, code) in values.iter().zip(codes) {
            *code = quantize(*value / scale, limit);
        }
    }
    Ok(())
}

/// The scale of a group of largest magnitude `max_abs`. A group of zeros has scale one.
pub(super) fn group_scale(max_abs: f32, limit: f32) -> f16 {
    if max_abs == 0.0 { f16::ONE } else { f16::from_f32((max_abs / limit).max(SCALE_MIN)) }
}

/// `ratio` rounded half to even and clamped to `-limit..=limit`. A scale that was rounded down makes ratios beyond the
/// limit, so the clamp is no formality. Clamping first changes nothing, as the limits are whole numbers, and lets the
/// rounding be two additions: f32 holds no fractions from 2^23 to 2^24.
fn quantize(ratio: f32, limit: f32) -> u8 {
    const WHOLE: f32 = (3 << 22) as f32;
    let rounded = (ratio.clamp(-limit, limit) + WHOLE) - WHOLE;
    rounded as i8 as u8
}

/// The integer that `code` stands for.
pub(super) fn value(order: Order, code: u8) -> f32 {
    match order.width() {
        Width::Byte => f32::from(code as i8),
        Width::Nibble => f32::from(((code << 4) as i8) >> 4),
    }
}

/// Scale number `index` of a scales region.
pub(super) fn scale(scales: &[u8], index: usize) -> f32 {
    f16::from_le_bytes([scales[2 * index], scales[2 * index + 1]]).to_f32()
}

/// Multiplies each group of integers in `row` by its scale: one f32 multiplication an element.
pub(super) fn scale_row(row: &mut [f32], scales: impl Iterator<Item = f32>, group: usize) {
    for (values, scale) in row.chunks_exact_mut(group).zip(scales) {
        for value in values {
            *value *= scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(values: &[f32], limit: f32) -> (Vec<u8>, u16) {
        let (mut codes, mut scale) = (vec![0; 16], [0; 2]);
        let mut group = [0.0; 16];
        group[..values.len()].copy_from_slice(values);
        assert!(encode_row(&group, limit, 16, &mut codes, &mut scale).is_ok());
        (codes, u16::from_le_bytes(scale))
    }

    #[test]
    fn ties_go_to_the_even_code() {
        let values = [-7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.0];
        let (codes, scale) = encoded(&values, 7.0);
        assert_eq!(
            codes.iter().map(|&code| code as i8).collect::<Vec<_>>(),
            [-7, -6, -5, -4, -3, -2, -1, 0, 0, 2, 2, 4, 4, 6, 6, 7]
        );
        assert_eq!(scale, 0x3c00);
    }

    #[test]
    fn the_second_worked_example_of_the_specification_holds() {
        let values = [0.1, -0.25, 0.5, 1.0];
        let (codes, scale) = encoded(&values, 127.0);
        assert_eq!((&codes[..5], scale), (&[0x0d, 0xe0, 0x40, 0x7f, 0][..], 0x2008));
        let (codes, scale) = encoded(&values, 7.0);
        assert_eq!(codes[..4].iter().map(|&code| code as i8).collect::<Vec<_>>(), [1, -2, 4, 7]);
        assert_eq!(scale, 0x3092);
    }

    #[test]
    fn scales_stop_at_both_ends_of_fp16() {
        assert_eq!(group_scale(0.0, 127.0), f16::ONE);
        assert_eq!(group_scale(f32::from_bits(1), 7.0).to_bits(), 1);
        assert_eq!(group_scale(8_321_039.5, 127.0).to_bits(), 0x7bff);
        assert!(group_scale(8_321_040.0, 127.0).is_infinite());
        assert!(group_scale(458_640.0, 7.0).is_infinite());
    }

    #[test]
    fn ratios_beyond_the_limit_are_clamped() {
        assert_eq!(quantize(127.6, 127.0), 127);
        assert_eq!(quantize(-190.0, 127.0) as i8, -127);
        assert_eq!(quantize(-10.4, 7.0) as i8, -7);
        assert_eq!(quantize(-0.0, 7.0), 0);
    }
}
