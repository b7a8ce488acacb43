//! The gate of a feed-forward part.

/// `out = silu(gate) * up`, element by element, with `silu(g) = g / (1 + exp(-g))`; all three of the same length.
pub fn swiglu(out: &mut [f32], gate: &[f32], up: &[f32]) {
    assert!(out.len() == gate.len() && out.len() == up.len());
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (1.0 + (-gate).exp()) * up;
    }
}
