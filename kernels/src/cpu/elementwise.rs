//! Operations that look at one row, or one element, at a time.

use rayon::prelude::*;

use super::Isa;
use super::isa::Kernel;
use super::lanes::{LANES, Lanes};

/// Elements a task should have at least, so that starting it does not cost more than doing it.
const ELEMENTS_A_TASK: usize = 1 << 14;

/// Scales each row of `x: [rows, dim]` by the inverse root of its mean square plus `eps`, then by `weight: [dim]`, into
/// `out: [rows, dim]`.
pub fn rms_norm(isa: Isa, out: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    assert!(out.len() == x.len() && out.len().is_multiple_of(weight.len()));
    let piece = ELEMENTS_A_TASK.next_multiple_of(weight.len());
    out.par_chunks_mut(piece).zip(x.par_chunks(piece)).for_each(|(out, x)| {
        for (out, x) in out.chunks_exact_mut(weight.len()).zip(x.chunks_exact(weight.len())) {
            isa.run(RmsNormRow { out, x, weight, eps });
        }
    });
}

/// `x += y`, then [`rms_norm`] of `x` into `out`; all `[rows, dim]`.
pub fn add_and_norm(isa: Isa, out: &mut [f32], x: &mut [f32], y: &[f32], weight: &[f32], eps: f32) {
    assert!(out.len() == x.len() && y.len() == x.len() && out.len().is_multiple_of(weight.len()));
    let piece = ELEMENTS_A_TASK.next_multiple_of(weight.len());
    let pieces = out.par_chunks_mut(piece).zip(x.par_chunks_mut(piece)).zip(y.par_chunks(piece));
    pieces.for_each(|((out, x), y)| {
        isa.run(AddInPlace { x, y });
        for (out, x) in out.chunks_exact_mut(weight.len()).zip(x.chunks_exact(weight.len())) {
            isa.run(RmsNormRow { out, x, weight, eps });
        }
    });
}

/// `x += y`, element by element.
pub fn add(isa: Isa, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len());
    x.par_chunks_mut(ELEMENTS_A_TASK).zip(y.par_chunks(ELEMENTS_A_TASK)).for_each(|(x, y)| {
        isa.run(AddInPlace { x, y });
    });
}

struct AddInPlace<'a> {
    x: &'a mut [f32],
    y: &'a [f32],
}

impl Kernel for AddInPlace<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        for (x, y) in self.x.chunks_mut(LANES).zip(self.y.chunks(LANES)) {
            lanes.store_part(lanes.add(lanes.load_part(x), lanes.load_part(y)), x);
        }
    }
}

struct RmsNormRow<'a> {
    out: &'a mut [f32],
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Kernel for RmsNormRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let mut squares = lanes.splat(0.0);
        for x in self.x.chunks(LANES) {
            let x = lanes.load_part(x);
            squares = lanes.mul_add(x, x, squares);
        }
        let mean = lanes.sum(squares) / self.x.len() as f32;
        let scale = lanes.splat(1.0 / (mean + self.eps).sqrt());
        for ((out, x), weight) in self.out.chunks_mut(LANES).zip(self.x.chunks(LANES)).zip(self.weight.chunks(LANES)) {
            let scaled = lanes.mul(lanes.load_part(x), scale);
            lanes.store_part(lanes.mul(scaled, lanes.load_part(weight)), out);
        }
    }
}

/// `gate = silu(gate) * up`, element by element, with `silu(g) = g / (1 + exp(-g))`; both of the same length.
pub fn swiglu(isa: Isa, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len());
    let pieces = gate.par_chunks_mut(ELEMENTS_A_TASK).zip(up.par_chunks(ELEMENTS_A_TASK));
    pieces.for_each(|(gate, up)| isa.run(SwigluInPlace { gate, up }));
}

/// `gate = silu(gate) * up`; both of the same length.
pub(super) struct SwigluInPlace<'a> {
    pub(super) gate: &'a mut [f32],
    pub(super) up: &'a [f32],
}

impl Kernel for SwigluInPlace<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        swiglu_in_place(lanes, self.gate, self.up);
    }
}

/// `gate = silu(gate) * up`; both of the same length.
#[inline(always)]
pub(super) fn swiglu_in_place<L: Lanes>(lanes: L, gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.chunks_mut(LANES).zip(up.chunks(LANES)) {
        let g = lanes.load_part(gate);
        let exp = lanes.exp(lanes.mul(g, lanes.splat(-1.0)));
        let silu = lanes.div(g, lanes.add(lanes.splat(1.0), exp));
        lanes.store_part(lanes.mul(silu, lanes.load_part(up)), gate);
    }
}
