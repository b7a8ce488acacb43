//! Which experts a token uses, and how much. Always FP32.
//!
//! Ties in every selection: the larger value first, the lower index first among equals. NaN ranks as minus infinity.

use std::cmp::Ordering;

use minnow_common::{BLOCK, Routing};

use crate::ops::RouterRules;

/// `1 / (1 + exp(-x))` in place: the scores of router logits.
pub fn sigmoid(values: &mut [f32]) {
    for value in values {
        *value = 1.0 / (1.0 + (-*value).exp());
    }
}

/// Chooses experts for each row of `scores: [rows, experts]`. `bias: [experts]` takes part in the choice only.
///
/// `ids`, `weights`: `[rows, experts per token]`, in descending order of `score + bias`. A weight is
/// `score / (sum of the chosen scores + 1e-20) * scale`, without the division if there is only one, summed in the order
/// of `ids`.
///
/// [`Routing::Block`] mixes the rows of a block: `rows` are whole blocks of 32 rows, each of *one* sequence, and a
/// block chooses from the `capacity` experts whose best `score + bias` in the block is largest. [`Routing::Groups`]
/// takes rows one by one: each chooses from the `kept` groups of consecutive experts whose two best add up to most.
pub fn route(ids: &mut [u32], weights: &mut [f32], scores: &[f32], bias: &[f32], rules: &RouterRules) {
    let (experts, k) = (bias.len(), rules.experts_per_token);
    let rows = scores.len() / experts;
    assert!(scores.len() == rows * experts && ids.len() == rows * k && weights.len() == rows * k);
    let biased: Vec<f32> =
        scores.chunks_exact(experts).flat_map(|row| row.iter().zip(bias).map(|(s, b)| s + b)).collect();
    let biased_row = |row: usize| &biased[row * experts..][..experts];
    let mut choose = |row: usize, pool: &[usize]| {
        let (ids, weights) = (&mut ids[row * k..][..k], &mut weights[row * k..][..k]);
        let chosen = best(biased_row(row), pool.iter().copied(), k);
        for ((id, weight), expert) in ids.iter_mut().zip(weights.iter_mut()).zip(chosen) {
            (*id, *weight) = (expert as u32, scores[row * experts + expert]);
        }
        let total: f32 = weights.iter().sum();
        for weight in weights {
            *weight = if k == 1 { *weight } else { *weight / (total + 1e-20) } * rules.scale;
        }
    };
    match rules.routing {
        Routing::Block { capacity } => {
            assert!(rows.is_multiple_of(BLOCK), "{rows} rows are not whole blocks");
            for first in (0..rows).step_by(BLOCK) {
                let block = first..first + BLOCK;
                let peak: Vec<f32> = (0..experts)
                    .map(|expert| block.clone().map(|row| biased_row(row)[expert]).fold(f32::NEG_INFINITY, f32::max))
                    .collect();
                let mut pool = best(&peak, 0..experts, capacity);
                // In ascending order, so that equal values of a row are met lower index first.
                pool.sort_unstable();
                block.for_each(|row| choose(row, &pool));
            }
        }
        Routing::Groups { groups, kept } => {
            let size = experts / groups;
            for row in 0..rows {
                let group_scores: Vec<f32> = biased_row(row).chunks_exact(size).map(two_best).collect();
                let mut pool: Vec<usize> = best(&group_scores, 0..groups, kept)
                    .into_iter()
                    .flat_map(|group| group * size..(group + 1) * size)
                    .collect();
                pool.sort_unstable();
                choose(row, &pool);
            }
        }
    }
}

/// The `count` members of `pool` with the largest values, best first. `pool` ascends, and the sort is stable.
fn best(values: &[f32], pool: impl Iterator<Item = usize>, count: usize) -> Vec<usize> {
    let rank = |index: usize| if values[index].is_nan() { f32::NEG_INFINITY } else { values[index] };
    let mut order: Vec<usize> = pool.collect();
    order.sort_by(|&a, &b| rank(b).partial_cmp(&rank(a)).unwrap_or(Ordering::Equal));
    order.truncate(count);
    order
}

/// The sum of the two largest values; of the only one in a group of one.
fn two_best(group: &[f32]) -> f32 {
    best(group, 0..group.len(), 2).into_iter().map(|index| group[index]).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_experts_are_taken_lower_index_first() {
        let rules = RouterRules { routing: Routing::Groups { groups: 2, kept: 1 }, experts_per_token: 2, scale: 2.5 };
        let (mut ids, mut weights) = ([0; 2], [0.0; 2]);
        route(&mut ids, &mut weights, &[0.5; 8], &[0.0; 8], &rules);
        assert_eq!((ids, weights), ([0, 1], [1.25, 1.25]));
    }

    #[test]
    fn a_block_shares_its_pool_and_bias_only_selects() {
        let rules = RouterRules { routing: Routing::Block { capacity: 2 }, experts_per_token: 1, scale: 2.0 };
        let (mut ids, mut weights) = ([0; BLOCK], [0.0; BLOCK]);
        // Every row prefers expert 2 by score alone; the bias and one row's peak make the pool 0 and 3.
        let mut scores = [0.1, 0.2, 0.3, 0.2].repeat(BLOCK);
        scores[4 * 7 + 3] = 0.9;
        route(&mut ids, &mut weights, &scores, &[0.5, 0.0, 0.0, 0.0], &rules);
        assert!(ids.iter().enumerate().all(|(row, &id)| id == if row == 7 { 3 } else { 0 }));
        assert_eq!((weights[0], weights[7]), (0.2, 1.8));
    }
}
