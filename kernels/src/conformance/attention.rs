//! Cases of attention.

use minnow_common::{BLOCK, Encoding, FloatType};

use super::{Arithmetic, BF16_ROUNDING, ROUNDING, Tolerance, random};
use crate::cpu::{Isa, KvBlock, KvRows};
use crate::ops::{Heads, Page};
use crate::oracle;

/// Attention of the last blocks of a sequence.
#[derive(Clone, Debug)]
pub struct AttentionCase {
    /// What is special about it.
    pub name: String,
    /// Shape.
    pub heads: Heads,
    /// `[rows, query heads, dim]`
    pub q: Vec<f32>,
    /// Keys and values of each page.
    pub pages: Vec<(Vec<f32>, Vec<f32>)>,
    /// `[rows, query heads, dim]`, by the oracle.
    pub expected: Vec<f32>,
}

impl AttentionCase {
    /// A lone block, blocks with and without earlier pages, heads that are no whole number of vectors, one and eight
    /// query heads for a key head, more keys than a kernel takes at once, scores so far apart that early pages lose all
    /// weight, and a NaN that only later blocks see.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let sizes = [
            (Heads { query: 1, kv: 1, dim: 16 }, 1, 1),
            (Heads { query: 4, kv: 2, dim: 24 }, 2, 5),
            (Heads { query: 2, kv: 2, dim: 5 }, 3, 3),
            (Heads { query: 16, kv: 4, dim: 128 }, 1, 9),
            (Heads { query: 2, kv: 2, dim: 128 }, 2, 6),
            (Heads { query: 8, kv: 1, dim: 128 }, 1, 3),
            (Heads { query: 2, kv: 1, dim: 128 }, 1, 140),
        ];
        let mut cases: Vec<Self> =
            sizes.into_iter().map(|(heads, blocks, pages)| Self::random(heads, blocks, pages, 1.0, |_| {})).collect();
        let heads = Heads { query: 2, kv: 1, dim: 32 };
        cases.push(Self::random(heads, 4, 6, 20.0, |_| {}).named("far apart scores"));
        let poisoned = |pages: &mut [(Vec<f32>, Vec<f32>)]| pages[4].0[7] = f32::NAN;
        cases.push(Self::random(heads, 4, 6, 1.0, poisoned).named("NaN in page 4"));
        let heads = Heads { query: 4, kv: 2, dim: 128 };
        cases.push(Self::random(heads, 4, 6, 20.0, |_| {}).named("far apart scores"));
        cases.push(Self::random(heads, 4, 6, 1.0, poisoned).named("NaN in page 4"));
        cases
    }

    fn random(
        heads: Heads,
        blocks: usize,
        page_count: usize,
        gain: f32,
        change: impl FnOnce(&mut [(Vec<f32>, Vec<f32>)]),
    ) -> Self {
        let name = format!("attention of {blocks} blocks over {page_count} pages, {heads:?}");
        let q: Vec<f32> =
            random("q", blocks * BLOCK * heads.query * heads.dim).iter().map(|value| gain * value).collect();
        let len = heads.kv * BLOCK * heads.dim;
        let mut pages: Vec<_> = (0..page_count)
            .map(|page| (random(&format!("keys {page}"), len), random(&format!("values {page}"), len)))
            .collect();
        change(&mut pages);
        let mut case = Self { name, heads, q, pages, expected: Vec::new() };
        let mut expected = vec![0.0; case.q.len()];
        oracle::attention(&mut expected, &case.q, &case.pages(), heads);
        case.expected = expected;
        case
    }

    fn named(mut self, special: &str) -> Self {
        self.name = format!("{}, {special}", self.name);
        self
    }

    /// The pages as backends see them.
    #[must_use]
    pub fn pages(&self) -> Vec<Page<'_>> {
        self.pages.iter().map(|(keys, values)| Page { keys, values }).collect()
    }

    /// Scores here reach 20 sqrt(dim), and an error in a score is a relative error of its weight; the weighted mean of
    /// values up to one carries it over.
    #[must_use]
    pub fn tolerance(&self) -> Tolerance {
        let score_max = self.q.iter().fold(1.0f32, |max, value| max.max(value.abs())) * (self.heads.dim as f32).sqrt();
        Tolerance { relative: 0.0, absolute: 16.0 * ROUNDING * score_max }
    }

    /// The pages as the CPU backend keeps them, as layer 1 of two.
    #[must_use]
    pub fn blocks(&self, isa: Isa) -> Vec<KvBlock> {
        let Heads { kv, dim, .. } = self.heads;
        let stride = 2 * kv * dim + 3;
        let block = |(keys, values): &(Vec<f32>, Vec<f32>)| {
            // Rows as a projection gives them: something else first, then keys of all heads, then values.
            let mut rows = vec![f32::NAN; BLOCK * stride];
            for (row, out) in rows.chunks_exact_mut(stride).enumerate() {
                for head in 0..kv {
                    let place = (head * BLOCK + row) * dim;
                    out[3 + head * dim..][..dim].copy_from_slice(&keys[place..][..dim]);
                    out[3 + (kv + head) * dim..][..dim].copy_from_slice(&values[place..][..dim]);
                }
            }
            let mut block = KvBlock::new(isa, self.heads, 2);
            block.write(isa, 1, KvRows { rows: &rows, stride, keys_at: 3, values_at: 3 + kv * dim });
            block
        };
        self.pages.iter().map(block).collect()
    }

    /// [`Self::expected`] for an arithmetic.
    #[must_use]
    pub fn expected_in(&self, arithmetic: Arithmetic) -> Vec<f32> {
        let entering = |values: &[f32]| arithmetic.entering(values, Encoding::Float(FloatType::Bf16));
        let pages = self.pages.iter().map(|(keys, values)| (entering(keys), entering(values))).collect();
        let rounded = Self { q: entering(&self.q), pages, ..self.clone() };
        let mut expected = vec![0.0; self.q.len()];
        oracle::attention(&mut expected, &rounded.q, &rounded.pages(), self.heads);
        expected
    }

    /// [`Self::tolerance`] against [`Self::expected_in`]. In BF16 each weight errs by up to a rounding of itself, and
    /// weights add up to one.
    #[must_use]
    pub fn tolerance_in(&self, arithmetic: Arithmetic) -> Tolerance {
        self.tolerance().and_absolute(if arithmetic == Arithmetic::Bf16 { BF16_ROUNDING } else { 0.0 })
    }
}
