//! Which experts a token uses: the quick twin of [`crate::oracle::route`], with its choices and its bits.

use minnow_common::{BLOCK, Routing};
use rayon::prelude::*;

use super::Isa;
use super::isa::Kernel;
use super::lanes::{LANES, Lanes};
use crate::ops::RouterRules;

/// Values a task should have at least.
const VALUES_A_TASK: usize = 1 << 13;

/// `1 / (1 + exp(-x))` in place: the scores of router logits.
pub fn sigmoid(isa: Isa, values: &mut [f32]) {
    values.par_chunks_mut(VALUES_A_TASK).for_each(|values| isa.run(Sigmoid { values }));
}

struct Sigmoid<'a> {
    values: &'a mut [f32],
}

impl Kernel for Sigmoid<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let one = lanes.splat(1.0);
        for values in self.values.chunks_mut(LANES) {
            let exp = lanes.exp(lanes.mul(lanes.load_part(values), lanes.splat(-1.0)));
            lanes.store_part(lanes.div(one, lanes.add(one, exp)), values);
        }
    }
}

/// As [`crate::oracle::route`]. Parallel over blocks of rows.
pub fn route(ids: &mut [u32], weights: &mut [f32], scores: &[f32], bias: &[f32], rules: &RouterRules) {
    let (experts, k) = (bias.len(), rules.experts_per_token);
    let rows = scores.len() / experts;
    assert!(scores.len() == rows * experts && ids.len() == rows * k && weights.len() == rows * k);
    assert!(rows.is_multiple_of(BLOCK) || matches!(rules.routing, Routing::Groups { .. }), "{rows} rows are no blocks");
    let blocks = ids.par_chunks_mut(BLOCK * k).zip(weights.par_chunks_mut(BLOCK * k));
    blocks.zip(scores.par_chunks(BLOCK * experts)).for_each_init(
        Chooser::default,
        |chooser, ((ids, weights), scores)| {
            chooser.biased.clear();
            chooser
                .biased
                .extend(scores.chunks_exact(experts).flat_map(|row| row.iter().zip(bias).map(|(s, b)| s + b)));
            if let Routing::Block { capacity } = rules.routing {
                chooser.pool_of_block(experts, capacity);
            }
            for (row, scores) in scores.chunks_exact(experts).enumerate() {
                if let Routing::Groups { groups, kept } = rules.routing {
                    chooser.pool_of_row(row * experts..(row + 1) * experts, groups, kept);
                }
                let Chooser { biased, pool, best } = chooser;
                let biased = &biased[row * experts..][..experts];
                best.choose(k, pool.iter().map(|&expert| (biased[expert], expert)));
                let (ids, weights) = (&mut ids[row * k..][..k], &mut weights[row * k..][..k]);
                for ((id, weight), (_, expert)) in ids.iter_mut().zip(weights.iter_mut()).zip(&best.0) {
                    (*id, *weight) = (*expert as u32, scores[*expert]);
                }
                let total: f32 = weights.iter().sum();
                for weight in weights {
                    *weight = if k == 1 { *weight } else { *weight / (total + 1e-20) } * rules.scale;
                }
            }
        },
    );
}

/// Memory for the choices of a block.
#[derive(Default)]
struct Chooser {
    /// Scores with bias, `[rows, experts]`.
    biased: Vec<f32>,
    /// Experts to choose from, ascending.
    pool: Vec<usize>,
    best: Best,
}

impl Chooser {
    fn pool_of_block(&mut self, experts: usize, capacity: usize) {
        let mut peak = vec![f32::NEG_INFINITY; experts];
        for row in self.biased.chunks_exact(experts) {
            for (peak, value) in peak.iter_mut().zip(row) {
                *peak = peak.max(*value);
            }
        }
        self.best.choose(capacity, peak.into_iter().zip(0..));
        self.pool.clear();
        self.pool.extend(self.best.0.iter().map(|(_, expert)| *expert));
        self.pool.sort_unstable();
    }

    fn pool_of_row(&mut self, row: std::ops::Range<usize>, groups: usize, kept: usize) {
        let size = row.len() / groups;
        let mut two = Best::default();
        let of_groups: Vec<f32> = self.biased[row]
            .chunks_exact(size)
            .map(|group| {
                two.choose(2, group.iter().copied().zip(0..));
                two.0.iter().map(|(_, index)| group[*index]).sum()
            })
            .collect();
        self.best.choose(kept, of_groups.into_iter().zip(0..));
        let mut chosen: Vec<usize> = self.best.0.iter().map(|(_, group)| *group).collect();
        chosen.sort_unstable();
        self.pool.clear();
        self.pool.extend(chosen.into_iter().flat_map(|group| group * size..(group + 1) * size));
    }
}

/// The largest values with where they came from, best first, the earlier first among equals; NaN as minus infinity.
#[derive(Default)]
struct Best(Vec<(f32, usize)>);

impl Best {
    fn choose(&mut self, count: usize, values: impl Iterator<Item = (f32, usize)>) {
        self.0.clear();
        for (value, index) in values {
            let value = if value.is_nan() { f32::NEG_INFINITY } else { value };
            if self.0.len() == count {
                match self.0.last() {
                    Some(last) if last.0 < value => self.0.pop(),
                    _ => continue,
                };
            }
            let place = self.0.partition_point(|(better, _)| *better >= value);
            self.0.insert(place, (value, index));
        }
    }
}
