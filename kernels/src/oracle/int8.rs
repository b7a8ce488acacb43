//! Activations of eight bits: how rows are quantized, and products of codes with codes.
//!
//! A row is quantized in the groups of the weights it meets: an f32 scale of the largest magnitude over 127, one for a
//! group of zeros and never below the smallest normal number; codes to the nearest even, -127 to 127. The product of a
//! group is an exact integer and contributes `float(product) * (row scale * weight scale)` to an f32 sum, groups in
//! ascending order; the sum is rounded to BF16.

/// The scale of a group whose largest magnitude is `max`. NaN and infinities stay what they are.
#[must_use]
#[inline(always)]
pub fn scale_of_group(max: f32) -> f32 {
    if max == 0.0 {
        1.0
    } else {
        let scale = max / 127.0;
        if scale < f32::MIN_POSITIVE { f32::MIN_POSITIVE } else { scale }
    }
}

/// The code of a value, a whole number; 0 where the quotient is NaN, for the scale then says so.
#[must_use]
#[inline(always)]
pub fn code_of(value: f32, scale: f32) -> f32 {
    let code = (value / scale).round_ties_even();
    if code.is_nan() { 0.0 } else { code.clamp(-127.0, 127.0) }
}

/// Quantizes one group of a row; returns its scale.
#[inline(always)]
pub fn quantize_row(values: &[f32], codes: &mut [f32]) -> f32 {
    // Magnitudes are ordered as their bits are, NaN above all.
    let max = values.iter().fold(0, |max: u32, value| max.max(value.abs().to_bits()));
    let scale = scale_of_group(f32::from_bits(max));
    for (code, value) in codes.iter_mut().zip(values) {
        *code = code_of(*value, scale);
    }
    scale
}

/// Products of rows, quantized as above, with codes: `x: [rows, k]`, `codes: [n, k]` whole numbers,
/// `scales: [n, k / group]`, `out: [rows, n]`.
pub fn linear_int8(out: &mut [f32], x: &[f32], codes: &[f32], scales: &[f32], k: usize, group: usize) {
    let n = codes.len() / k;
    let mut row_codes = vec![0.0; k];
    for (out, x) in out.chunks_exact_mut(n).zip(x.chunks_exact(k)) {
        let groups = x.chunks_exact(group).zip(row_codes.chunks_exact_mut(group));
        let row_scales: Vec<f32> = groups.map(|(x, codes)| quantize_row(x, codes)).collect();
        for ((out, codes), scales) in out.iter_mut().zip(codes.chunks_exact(k)).zip(scales.chunks_exact(k / group)) {
            let mut sum = 0.0f32;
            let groups = row_codes.chunks_exact(group).zip(codes.chunks_exact(group));
            for ((row_codes, codes), (row_scale, scale)) in groups.zip(row_scales.iter().zip(scales)) {
                let product: i32 = row_codes.iter().zip(codes).map(|(&a, &b)| a as i32 * b as i32).sum();
                sum += product as f32 * (row_scale * scale);
            }
            *out = half::bf16::from_f32(sum).to_f32();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_uses_the_whole_range_and_zeros_have_scale_one() {
        let mut codes = [0.0; 4];
        assert_eq!(quantize_row(&[0.0, -0.0, 0.0, 0.0], &mut codes), 1.0);
        assert_eq!(codes, [0.0; 4]);
        let scale = quantize_row(&[-254.0, 127.0, 3.0, 1.0], &mut codes);
        // 1.5 and 0.5 go to the even neighbour.
        assert_eq!((scale, codes), (2.0, [-127.0, 64.0, 2.0, 0.0]));
        assert_eq!(quantize_row(&[1e-45, 0.0, 0.0, 0.0], &mut codes), f32::MIN_POSITIVE);
        assert!(quantize_row(&[1.0, f32::NAN, 0.0, 0.0], &mut codes).is_nan());
        assert_eq!(quantize_row(&[1.0, f32::INFINITY, 0.0, 0.0], &mut codes), f32::INFINITY);
        assert_eq!(codes, [0.0; 4]);
    }
}
