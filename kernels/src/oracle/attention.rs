//! Block-causal attention with grouped query heads.

use minnow_common::BLOCK;

use crate::ops::{Heads, Page};

/// Attention of the last `rows / 32` blocks of a sequence, whose keys and values lie in `pages`, one page a block.
///
/// `q`, `out`: `[rows, query heads, dim]` with `rows` whole blocks. The queries are those of the *last* pages, so block
/// `b` of them sees pages `0..=pages.len() - rows / 32 + b`, entirely: bidirectional inside a block, causal between
/// blocks. `out = softmax(q . k / sqrt(dim)) v`, with the maximum taken out before `exp`.
pub fn attention(out: &mut [f32], q: &[f32], pages: &[Page<'_>], heads: Heads) {
    let row_len = heads.query * heads.dim;
    let rows = q.len() / row_len;
    assert!(rows.is_multiple_of(BLOCK) && q.len() == rows * row_len && out.len() == q.len());
    let earlier_pages = pages.len() - rows / BLOCK;
    let scale = 1.0 / (heads.dim as f64).sqrt();
    for row in 0..rows {
        let seen = &pages[..=earlier_pages + row / BLOCK];
        for head in 0..heads.query {
            let at = row * row_len + head * heads.dim;
            let (q, out) = (&q[at..at + heads.dim], &mut out[at..at + heads.dim]);
            let kv_start = head / (heads.query / heads.kv) * BLOCK * heads.dim;
            let of_head = |all| rows_of_head(all, kv_start, heads.dim);

            let scores: Vec<f64> =
                seen.iter().flat_map(|page| of_head(page.keys)).map(|key| dot(q, key) * scale).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let total: f64 = weights.iter().sum();

            let mut sums = vec![0.0f64; heads.dim];
            for (value, weight) in seen.iter().flat_map(|page| of_head(page.values)).zip(&weights) {
                for (sum, value) in sums.iter_mut().zip(value) {
                    *sum += weight * f64::from(*value);
                }
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = (sum / total) as f32;
            }
        }
    }
}

/// The 32 rows of one head in the keys or values of a page.
fn rows_of_head(all: &[f32], start: usize, dim: usize) -> impl Iterator<Item = &[f32]> {
    all[start..start + BLOCK * dim].chunks_exact(dim)
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}
