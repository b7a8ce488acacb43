//! RMS norm.

/// Scales each row of `x: [rows, dim]` by the inverse root of its mean square plus `eps`, then by `weight: [dim]`, into
/// `out: [rows, dim]`. The mean is taken in f64; both products are f32.
pub fn rms_norm(out: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    assert_eq!(out.len(), x.len());
    let dim = weight.len();
    for (out, x) in out.chunks_exact_mut(dim).zip(x.chunks_exact(dim)) {
        let squares: f64 = x.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
        let scale = (1.0 / (squares / dim as f64 + f64::from(eps)).sqrt()) as f32;
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = x * scale * weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_gets_mean_square_one_and_rows_do_not_mix() {
        let mut out = [0.0; 4];
        rms_norm(&mut out, &[3.0, -4.0, 0.0, 0.0], &[1.0, 2.0], 0.0);
        let rms = 12.5f32.sqrt();
        assert!((out[0] - 3.0 / rms).abs() < 1e-6 && (out[1] + 8.0 / rms).abs() < 1e-6);
        assert!(out[2].is_nan(), "0 / 0 without eps");
        rms_norm(&mut out, &[0.0; 4], &[1.0, 2.0], 1e-6);
        assert_eq!(out, [0.0; 4]);
    }
}
