//! Feed-forward parts: one for all tokens, or a few of many for each.

use super::{linear, swiglu};

/// The three matrices of a feed-forward part in f32: `gate`, `up`: `[inner, hidden]`, `down`: `[hidden, inner]`.
#[derive(Clone, Debug)]
pub struct PlainExpert {
    /// `[inner, hidden]`
    pub gate: Vec<f32>,
    /// `[inner, hidden]`
    pub up: Vec<f32>,
    /// `[hidden, inner]`
    pub down: Vec<f32>,
}

/// `out = down(silu(gate(x)) * up(x))` for each row; `x`, `out`: `[rows, hidden]`.
pub fn feed_forward(out: &mut [f32], x: &[f32], expert: &PlainExpert, hidden: usize) {
    let inner = expert.gate.len() / hidden;
    let len = x.len() / hidden * inner;
    let (mut gate, mut up, mut gated) = (vec![0.0; len], vec![0.0; len], vec![0.0; len]);
    linear(&mut gate, x, &expert.gate, hidden);
    linear(&mut up, x, &expert.up, hidden);
    swiglu(&mut gated, &gate, &up);
    linear(out, &gated, &expert.down, inner);
}

/// `out[r] = sum over slots of weights[r, slot] * feed_forward(x[r], experts[ids[r, slot]])`, added in slot order.
/// `x`, `out`: `[rows, hidden]`; `ids`, `weights`: `[rows, slots]`.
pub fn experts(out: &mut [f32], x: &[f32], ids: &[u32], weights: &[f32], experts: &[PlainExpert], hidden: usize) {
    let slots = ids.len() * hidden / x.len();
    let mut y = vec![0.0; hidden];
    for (row, (out, x)) in out.chunks_exact_mut(hidden).zip(x.chunks_exact(hidden)).enumerate() {
        out.fill(0.0);
        for slot in row * slots..(row + 1) * slots {
            feed_forward(&mut y, x, &experts[ids[slot] as usize], hidden);
            for (out, y) in out.iter_mut().zip(&y) {
                *out += weights[slot] * y;
            }
        }
    }
}
