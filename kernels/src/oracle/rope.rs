//! Rotary position embedding on the leading dimensions of a head.
//!
//! The angle is an f32 product of f32 factors: its rounding at long positions is part of the model.

/// Frequencies of the `rotary_dim / 2` pairs: `theta^(2i / rotary_dim)` in f64, rounded to f32, and an f32 reciprocal.
#[must_use]
pub fn inv_freq(theta: f64, rotary_dim: usize) -> Vec<f32> {
    let power = |pair: usize| theta.powf((2 * pair) as f64 / rotary_dim as f64) as f32;
    (0..rotary_dim / 2).map(|pair| 1.0 / power(pair)).collect()
}

/// Cosines and sines, `[rows, pairs]`, of the angles of the positions from `first_position` on; `inv_freq: [pairs]`.
/// Both are computed in f64 from the f32 angle. `cos` and `sin` have room for the same whole number of rows.
pub fn rope_tables(cos: &mut [f32], sin: &mut [f32], inv_freq: &[f32], first_position: usize) {
    assert_eq!(cos.len(), sin.len());
    let pairs = inv_freq.len();
    for (row, (cos, sin)) in cos.chunks_exact_mut(pairs).zip(sin.chunks_exact_mut(pairs)).enumerate() {
        for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(inv_freq) {
            let angle = (first_position + row) as f32 * frequency;
            let (sine, cosine) = f64::from(angle).sin_cos();
            (*cos, *sin) = (cosine as f32, sine as f32);
        }
    }
}

/// Rotates one head in place by the angles of its position. `cos`, `sin`: `[pairs]`. Dimension `i < pairs` goes with
/// `i + pairs` (half rotation, as in GPT-NeoX); dimensions from `2 pairs` on stay.
pub fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let pairs = cos.len();
    let (low, high) = head[..2 * pairs].split_at_mut(pairs);
    for (((a, b), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_zero_changes_nothing_and_the_tail_never_moves() {
        let inv = inv_freq(10_000.0, 4);
        let (mut cos, mut sin) = ([0.0; 4], [0.0; 4]);
        rope_tables(&mut cos, &mut sin, &inv, 0);
        let mut head = [1.0, 2.0, 3.0, 4.0, 5.0];
        rotate(&mut head, &cos[..2], &sin[..2]);
        assert_eq!(head, [1.0, 2.0, 3.0, 4.0, 5.0]);
        rotate(&mut head, &cos[2..], &sin[2..]);
        // Pair 0 has frequency 1: dimensions 0 and 2 turn by one radian.
        assert!((head[0] - (1f32.cos() - 3.0 * 1f32.sin())).abs() < 1e-6);
        assert!((head[2] - (3.0 * 1f32.cos() + 1f32.sin())).abs() < 1e-6);
        assert_eq!(head[4], 5.0);
    }
}
