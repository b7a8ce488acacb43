//! NVFP4: E2M1 values, an E4M3 scale for sixteen of them, and one f32 scale for the matrix.
//! `docs/format-mnw.md` section 7.2.

/// Values of the sixteen E2M1 codes; bit 3 is the sign, and code 8 is negative zero.
pub const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Code of the largest E4M3 value, 448. Above are NaN and the negative numbers, which no scale may be.
pub(super) const E4M3_MAX_CODE: u8 = 126;
/// Code of one.
const E4M3_ONE: u8 = 0x38;
/// Largest E2M1 value.
pub(super) const E2M1_MAX: f32 = 6.0;
/// The largest magnitude of a matrix divided by its global scale: both largest values multiplied.
const GLOBAL_DIVISOR: f32 = 2688.0;
/// Values that share an E4M3 scale.
const GROUP: usize = 16;

/// The scale of a whole matrix of finite `values`; one for a matrix of zeros.
pub(super) fn global_scale(values: &[f32]) -> f32 {
    global_scale_of(values.iter().fold(0.0f32, |max, value| max.max(value.abs())))
}

/// The scale of a matrix of largest magnitude `max_abs`.
pub(super) fn global_scale_of(max_abs: f32) -> f32 {
    if max_abs == 0.0 { 1.0 } else { (max_abs / GLOBAL_DIVISOR).max(f32::MIN_POSITIVE) }
}

/// Codes and E4M3 scales of one row of finite `values`. `codes` is as long as `values`, `scales` a sixteenth of it.
pub(super) fn encode_row(values: &[f32], global_scale: f32, codes: &mut [u8], scales: &mut [u8]) {
    for ((values, codes), scale) in values.chunks_exact(GROUP).zip(codes.chunks_exact_mut(GROUP)).zip(scales) {
        let max_abs = values.iter().fold(0.0f32, |max, value| max.max(value.abs()));
        *scale = group_scale(max_abs, global_scale);
        let divisor = e4m3(*scale) * global_scale;
        for (value, code) in values.iter().zip(codes) {
            *code = e2m1_nearest(*value / divisor);
        }
    }
}

/// The scale code of a group. Zeros get one; anything else at least the smallest positive scale.
pub(crate) fn group_scale(max_abs: f32, global_scale: f32) -> u8 {
    if max_abs == 0.0 { E4M3_ONE } else { e4m3_nearest((max_abs / E2M1_MAX) / global_scale).max(1) }
}

/// Value of an E4M3 code from 0 to 126. NaN for 127 and for every code with the sign bit, which no scale has.
#[must_use]
pub fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (u32::from(code >> 3), u32::from(code & 7));
    match code {
        0..8 => f32::from(code) / 512.0,
        8..=E4M3_MAX_CODE => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
        _ => f32::NAN,
    }
}

/// Code of the E4M3 value nearest to `value >= 0`; ties to the even code, at most 448.
fn e4m3_nearest(value: f32) -> u8 {
    const MAX: f32 = 448.0;
    const MIN_NORMAL: f32 = 1.0 / 64.0;
    if value >= MAX {
        return E4M3_MAX_CODE;
    }
    if value < MIN_NORMAL {
        // Subnormal: multiples of 2^-9. Rounding up to eight of them is code 8, the smallest normal.
        return (value * 512.0).round_ties_even() as u8;
    }
    // Round away the lower 20 bits of the mantissa; a carry into the exponent is the next code.
    let bits = value.to_bits();
    let rounded = (bits + 0x7_ffff + (bits >> 20 & 1)) >> 20;
    (rounded - (120 << 3)) as u8
}

/// Code of the E2M1 value nearest to `value`; ties to the even code, at most 6. The sign is kept, also of zero.
pub(crate) fn e2m1_nearest(value: f32) -> u8 {
    let magnitude = value.abs();
    let code = u8::from(magnitude > 0.25)
        + u8::from(magnitude >= 0.75)
        + u8::from(magnitude > 1.25)
        + u8::from(magnitude >= 1.75)
        + u8::from(magnitude > 2.5)
        + u8::from(magnitude >= 3.5)
        + u8::from(magnitude > 5.0);
    code | u8::from(value.is_sign_negative()) << 3
}

/// Multiplies each group of E2M1 values in `row` by its E4M3 scale, then by the global one; both products in f32.
pub(super) fn scale_row(row: &mut [f32], scales: impl Iterator<Item = f32>, global_scale: f32) {
    for (values, scale) in row.chunks_exact_mut(GROUP).zip(scales) {
        for value in values {
            *value = *value * scale * global_scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_codes_round_trip_and_ties_go_to_the_even_code() {
        for code in 0..=E4M3_MAX_CODE {
            assert_eq!(e4m3_nearest(e4m3(code)), code);
        }
        for code in 0..E4M3_MAX_CODE {
            let middle = f32::midpoint(e4m3(code), e4m3(code + 1));
            assert_eq!(e4m3_nearest(middle), code + (code & 1), "between {code} and the next");
            assert_eq!(e4m3_nearest(middle.next_down()), code);
            assert_eq!(e4m3_nearest(middle.next_up()), code + 1);
        }
        assert_eq!(e4m3_nearest(1e30), E4M3_MAX_CODE);
        assert!(e4m3(127).is_nan() && e4m3(0x80).is_nan());
    }

    #[test]
    fn e2m1_codes_round_trip_and_ties_go_to_the_even_code() {
        for code in 0..16 {
            assert_eq!(e2m1_nearest(E2M1[usize::from(code)]), code);
        }
        for code in 0..7u8 {
            let middle = f32::midpoint(E2M1[usize::from(code)], E2M1[usize::from(code) + 1]);
            assert_eq!(e2m1_nearest(middle), code + (code & 1));
            assert_eq!(e2m1_nearest(-middle), 8 + code + (code & 1));
        }
        assert_eq!(e2m1_nearest(-1e-30), 8);
        assert_eq!(e2m1_nearest(100.0), 7);
    }
}
