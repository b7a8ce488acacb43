//! What happens to queries and keys between their projection and attention, in place.

use rayon::prelude::*;

use super::Isa;
use super::isa::Kernel;
use super::lanes::{LANES, Lanes};
use crate::ops::Heads;

/// Norm weights of query and key heads, `[dim]` each, and what is added to the mean square.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm<'a> {
    /// For queries.
    pub query: &'a [f32],
    /// For keys.
    pub key: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
}

/// Normalises each query and key head and rotates it by the angles of its row: RMS norm, then half rotation, as
/// [`crate::oracle::rms_norm`] and [`crate::oracle::rotate`].
///
/// `rows: [count, stride]` starts with the query heads, then the key heads, `dim` each; what follows stays. `cos`, `sin`:
/// `[count, pairs]`. Parallel over rows.
pub fn prepare_heads(
    isa: Isa,
    rows: &mut [f32],
    stride: usize,
    heads: Heads,
    norm: Option<HeadNorm<'_>>,
    cos: &[f32],
    sin: &[f32],
) {
    /// Rows whose work is worth a task.
    const ROWS_A_TASK: usize = 4;
    let count = rows.len() / stride;
    let pairs = cos.len() / count;
    assert!(rows.len() == count * stride && cos.len() == count * pairs && sin.len() == cos.len());
    assert!((heads.query + heads.kv) * heads.dim <= stride && 2 * pairs <= heads.dim);
    let tables = cos.par_chunks_exact(pairs).zip(sin.par_chunks_exact(pairs));
    rows.par_chunks_exact_mut(stride).zip(tables).with_min_len(ROWS_A_TASK).for_each(|(row, (cos, sin))| {
        let (queries, rest) = row.split_at_mut(heads.query * heads.dim);
        let keys = &mut rest[..heads.kv * heads.dim];
        let weights = norm.map_or((None, None), |norm| (Some(norm.query), Some(norm.key)));
        let eps = norm.map_or(0.0, |norm| norm.eps);
        isa.run(PrepareHeads { heads: queries, dim: heads.dim, weight: weights.0, eps, cos, sin });
        isa.run(PrepareHeads { heads: keys, dim: heads.dim, weight: weights.1, eps, cos, sin });
    });
}

struct PrepareHeads<'a> {
    heads: &'a mut [f32],
    dim: usize,
    weight: Option<&'a [f32]>,
    eps: f32,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for PrepareHeads<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { heads, dim, weight, eps, cos, sin } = self;
        for head in heads.chunks_exact_mut(dim) {
            if let Some(weight) = weight {
                let mut squares = lanes.splat(0.0);
                for x in head.chunks(LANES) {
                    let x = lanes.load_part(x);
                    squares = lanes.mul_add(x, x, squares);
                }
                let mean = lanes.sum(squares) / dim as f32;
                let scale = lanes.splat(1.0 / (mean + eps).sqrt());
                for (x, weight) in head.chunks_mut(LANES).zip(weight.chunks(LANES)) {
                    let scaled = lanes.mul(lanes.load_part(x), scale);
                    lanes.store_part(lanes.mul(scaled, lanes.load_part(weight)), x);
                }
            }
            let (low, high) = head[..2 * cos.len()].split_at_mut(cos.len());
            let angles = cos.chunks(LANES).zip(sin.chunks(LANES));
            for ((low, high), (cos, sin)) in low.chunks_mut(LANES).zip(high.chunks_mut(LANES)).zip(angles) {
                let (a, b) = (lanes.load_part(low), lanes.load_part(high));
                let (cos, sin) = (lanes.load_part(cos), lanes.load_part(sin));
                let minus_sin = lanes.mul(sin, lanes.splat(-1.0));
                lanes.store_part(lanes.add(lanes.mul(a, cos), lanes.mul(b, minus_sin)), low);
                lanes.store_part(lanes.add(lanes.mul(b, cos), lanes.mul(a, sin)), high);
            }
        }
    }
}
