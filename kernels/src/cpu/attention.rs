//! Block-causal attention over pages, one page after the other.
//!
//! For each block of 32 queries and each head, the running maximum, total and weighted sum of values are carried from
//! page to page, always from the first page on. So a query's result does not depend on how a sequence was cut into
//! forward passes, and no row of scores longer than a page is ever kept.

use minnow_common::BLOCK;
use rayon::prelude::*;

use super::Isa;
use super::isa::Kernel;
use super::kept::with_kept;
use super::kv::KvBlock;
use super::lanes::{LANES, Lanes};
use super::products::{Packed, products};
#[cfg(target_arch = "x86_64")]
use super::tiles;
use crate::codec::STRIP;
use crate::ops::{Heads, Page};

/// Attention of the last `rows / 32` blocks of a sequence, whose keys and values lie in `pages`, one page a block.
///
/// `q`, `out`: `[rows, query heads, dim]` with `rows` whole blocks. The queries are those of the *last* pages, so block
/// `b` of them sees pages `0..=pages.len() - rows / 32 + b`, entirely. Parallel over blocks and heads.
pub fn attention(isa: Isa, out: &mut [f32], q: &[f32], pages: &[Page<'_>], heads: Heads) {
    attention_of_rows(isa, out, q, heads.query * heads.dim, pages, heads);
}

/// [`attention`] over layer `layer` of `blocks`, which stand for the pages. Queries are the first `query heads * dim` of
/// each row of `q: [rows, q_stride]`; `q_stride` is a multiple of `dim`. Where `isa` rounds to BF16, queries, keys, values
/// and the weights of values are rounded to it; scores and sums are f32 everywhere.
///
/// # Panics
/// If a block was made for another arithmetic than `isa` has.
pub fn attend(isa: Isa, out: &mut [f32], q: &[f32], q_stride: usize, blocks: &[&KvBlock], layer: usize, heads: Heads) {
    const OTHER: &str = "blocks are kept as this instruction set reads them";
    #[cfg(target_arch = "x86_64")]
    if isa.rounds_to_bf16() {
        let rows = out.len() / (heads.query * heads.dim);
        assert!(out.len() == rows * heads.query * heads.dim && rows.is_multiple_of(BLOCK));
        assert!(q.len() == rows * q_stride && rows / BLOCK <= blocks.len());
        let layers: Vec<_> = blocks.iter().map(|block| block.packed(layer).expect(OTHER)).collect();
        return tiles::attend(isa, out, q, q_stride, &layers, heads);
    }
    let pages: Vec<_> = blocks.iter().map(|block| block.page(layer).expect(OTHER)).collect();
    attention_of_rows(isa, out, q, q_stride, &pages, heads);
}

fn attention_of_rows(isa: Isa, out: &mut [f32], q: &[f32], q_stride: usize, pages: &[Page<'_>], heads: Heads) {
    let row_len = heads.query * heads.dim;
    let blocks = out.len() / (row_len * BLOCK);
    assert!(out.len() == blocks * BLOCK * row_len && blocks <= pages.len());
    assert!(q.len() == blocks * BLOCK * q_stride && q_stride.is_multiple_of(heads.dim));
    let earlier_pages = pages.len() - blocks;
    // [blocks, query heads, 32, dim]
    let mut by_head = vec![0.0; out.len()];
    by_head.par_chunks_mut(BLOCK * heads.dim).enumerate().for_each(|(task, out)| {
        let (block, head) = (task / heads.query, task % heads.query);
        let q = &q[block * BLOCK * q_stride..][..BLOCK * q_stride];
        with_kept!(Scratch, |scratch| {
            let (pages, kv_head) = (&pages[..=earlier_pages + block], head / (heads.query / heads.kv));
            isa.run(HeadOfBlock { out, q, q_stride, head, dim: heads.dim, pages, kv_head, scratch });
        });
    });
    for (block, out) in out.chunks_exact_mut(BLOCK * row_len).enumerate() {
        for (index, out) in out.chunks_exact_mut(heads.dim).enumerate() {
            let (row, head) = (index / heads.query, index % heads.query);
            out.copy_from_slice(&by_head[((block * heads.query + head) * BLOCK + row) * heads.dim..][..heads.dim]);
        }
    }
}

/// Vectors that hold one number for each query of a block.
const QUERY_VECTORS: usize = BLOCK / LANES;
const _: () = assert!(BLOCK.is_multiple_of(LANES));

#[derive(Default)]
struct Scratch {
    q: Packed,
    /// Of one page.
    keys: Packed,
    /// Of all keys with all queries.
    scores: Vec<[f32; BLOCK]>,
}

/// One head of one block of queries: `out: [32, dim]`, `q: [32, q_stride]`.
struct HeadOfBlock<'a> {
    out: &'a mut [f32],
    q: &'a [f32],
    q_stride: usize,
    head: usize,
    dim: usize,
    pages: &'a [Page<'a>],
    kv_head: usize,
    scratch: &'a mut Scratch,
}

impl Kernel for HeadOfBlock<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { out, q, q_stride, head, dim, pages, kv_head, scratch } = self;
        let Scratch { q: packed, keys, scores } = scratch;
        packed.set(lanes, q.chunks_exact(q_stride).map(|row| &row[head * dim..][..dim]), dim);
        scores.resize(BLOCK, [0.0; BLOCK]);
        let page_rows = kv_head * BLOCK * dim..(kv_head + 1) * BLOCK * dim;
        let scale = lanes.splat((1.0 / (dim as f64).sqrt()) as f32);
        // Of the 32 queries, by lane: the largest score so far, and the sum of exp(score - largest).
        let mut max = [lanes.splat(f32::NEG_INFINITY); QUERY_VECTORS];
        let mut total = [lanes.splat(0.0); QUERY_VECTORS];
        out.fill(0.0);
        for page in pages {
            keys.set(lanes, page.keys[page_rows.clone()].chunks_exact(dim), dim);
            for (strip, queries) in packed.view().groups().enumerate() {
                products(lanes, scores, strip * STRIP, keys.view(), queries);
            }
            let scores = scores.as_flattened_mut();
            let mut shrink = [0.0; BLOCK];
            let (shrink_vectors, _) = shrink.as_chunks_mut::<LANES>();
            for vector in 0..QUERY_VECTORS {
                let rows = || scores_of(vector);
                let mut new_max = max[vector];
                for at in rows() {
                    let score = lanes.mul(lanes.load_part(&scores[at..at + LANES]), scale);
                    lanes.store_part(score, &mut scores[at..at + LANES]);
                    new_max = lanes.max(score, new_max);
                }
                let minus_max = lanes.mul(new_max, lanes.splat(-1.0));
                let shrink = lanes.exp(lanes.add(max[vector], minus_max));
                let mut sum = lanes.mul(total[vector], shrink);
                for at in rows() {
                    let weight = lanes.exp(lanes.add(lanes.load_part(&scores[at..at + LANES]), minus_max));
                    lanes.store_part(weight, &mut scores[at..at + LANES]);
                    sum = lanes.add(sum, weight);
                }
                (max[vector], total[vector]) = (new_max, sum);
                lanes.store(shrink, &mut shrink_vectors[vector]);
            }
            add_values(lanes, out, scores, &shrink, &page.values[page_rows.clone()], dim);
        }
        let mut totals = [0.0; BLOCK];
        for (total, out) in total.iter().zip(totals.as_chunks_mut::<LANES>().0) {
            lanes.store(*total, out);
        }
        for (out, total) in out.chunks_exact_mut(dim).zip(totals) {
            for out in out {
                *out /= total;
            }
        }
    }
}

/// Where the scores of vector `vector` of the queries start, for each key.
fn scores_of(vector: usize) -> impl Iterator<Item = usize> {
    (0..BLOCK).map(move |key| key * BLOCK + vector * LANES)
}

/// `out[q] = out[q] * shrink[q] + sum over keys of weights[key, q] * values[key]`, keys in order.
/// `out`, `values`: `[32, dim]`; `weights: [32 keys, 32 queries]`.
#[inline(always)]
fn add_values<L: Lanes>(lanes: L, out: &mut [f32], weights: &[f32], shrink: &[f32; BLOCK], values: &[f32], dim: usize) {
    /// Queries that share a load of values.
    const QUERIES: usize = 4;
    for first_col in (0..dim).step_by(LANES) {
        let cols = first_col..dim.min(first_col + LANES);
        for first_query in (0..BLOCK).step_by(QUERIES) {
            let mut sums = [lanes.splat(0.0); QUERIES];
            for (query, sum) in (first_query..).zip(&mut sums) {
                let old = lanes.load_part(&out[query * dim..][cols.clone()]);
                *sum = lanes.mul(old, lanes.splat(shrink[query]));
            }
            for key in 0..BLOCK {
                let value = lanes.load_part(&values[key * dim..][cols.clone()]);
                for (query, sum) in (first_query..).zip(&mut sums) {
                    *sum = lanes.mul_add(lanes.splat(weights[key * BLOCK + query]), value, *sum);
                }
            }
            for (query, sum) in (first_query..).zip(sums) {
                lanes.store_part(sum, &mut out[query * dim..][cols.clone()]);
            }
        }
    }
}
