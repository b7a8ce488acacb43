//! What the algorithms share: candidates of a step, drawing a token, and choosing the most confident positions.

use super::candidates::{Ranking, Scored};
use super::language::TokenSet;
use super::{Block, Draw, Options, Purpose, StepError, StepView, Uniforms};

/// A drawn token with both notions of confidence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drawn {
    /// The id.
    pub token: u32,
    /// Its softmax probability at temperature 1 among all tokens that are not banned: what LLaDA2.2 compares.
    pub confidence: f64,
    /// Its probability after temperature, top-k and top-p: what LLaDA2.0 and 2.1 compare.
    pub filtered_confidence: f64,
}

/// Draws a token from `row: [vocab]` of finite logits by one uniform number `u` in [0, 1).
///
/// In this order: `banned` ids are left out; logits are divided by the temperature; top-k keeps every logit at least
/// as large as the k-th largest; top-p keeps the shortest prefix, by descending probability, whose share exceeds
/// `top_p`. The draw walks the kept tokens by descending probability, ties by ascending id, and takes the first at
/// which the summed probability exceeds `u` of the whole. Temperature 0 takes the best token and ignores the filters.
#[must_use]
pub fn draw(row: &[f32], options: &Options, banned: &[u32], u: f64) -> Drawn {
    draw_among(row, options, u, |id| !banned.contains(&id))
}

/// [`draw`], with everything left out that is not `allowed`.
fn draw_among(row: &[f32], options: &Options, u: f64, allowed: impl Fn(u32) -> bool) -> Drawn {
    #[expect(clippy::cast_possible_truncation, reason = "token ids are u32")]
    let ids: Vec<u32> = (0..row.len() as u32).filter(|&id| allowed(id)).collect();
    let top = ids.iter().fold(f32::NEG_INFINITY, |top, &id| top.max(row[id as usize]));
    let offset = |id: u32| f64::from(row[id as usize]) - f64::from(top);
    let plain_total: f64 = ids.iter().map(|&id| offset(id).exp()).sum();
    let mut ranked = Ranked { row, ids, sorted: 0 };
    if options.temperature == 0.0 {
        let token = ranked.get(0).unwrap_or_default();
        let confidence = 1.0 / plain_total;
        return Drawn { token, confidence, filtered_confidence: confidence };
    }

    if options.top_k > 0 {
        ranked.keep_top(options.top_k);
    }
    let temperature = f64::from(options.temperature);
    let weight = |id: u32| (offset(id) / temperature).exp();
    let total: f64 = ranked.ids.iter().map(|&id| weight(id)).sum();
    let (mut kept, mut kept_total) = (ranked.ids.len(), total);
    if options.top_p < 1.0 {
        let mut sum = 0.0;
        for index in 0..ranked.ids.len() {
            sum += ranked.get(index).map_or(0.0, weight);
            if sum / total > f64::from(options.top_p) {
                (kept, kept_total) = (index + 1, sum);
                break;
            }
        }
    }
    let mut token = 0;
    let mut sum = 0.0;
    for id in (0..kept).map_while(|index| ranked.get(index)) {
        token = id;
        sum += weight(id);
        if sum > u * kept_total {
            break;
        }
    }
    Drawn { token, confidence: offset(token).exp() / plain_total, filtered_confidence: weight(token) / kept_total }
}

/// Token ids by descending logit, ties by ascending id, sorted only as far as someone looks.
struct Ranked<'a> {
    row: &'a [f32],
    ids: Vec<u32>,
    sorted: usize,
}

impl Ranked<'_> {
    fn get(&mut self, index: usize) -> Option<u32> {
        while index >= self.sorted && self.sorted < self.ids.len() {
            let row = self.row;
            let rest = &mut self.ids[self.sorted..];
            let chunk = rest.len().min(64.max(3 * self.sorted));
            if chunk < rest.len() {
                rest.select_nth_unstable_by(chunk - 1, |&a, &b| descending(row, a, b));
            }
            rest[..chunk].sort_unstable_by(|&a, &b| descending(row, a, b));
            self.sorted += chunk;
        }
        self.ids.get(index).copied()
    }

    /// Keeps every id whose logit is at least the `k`-th largest, `k` > 0. Only before anything was looked at.
    fn keep_top(&mut self, k: usize) {
        if k < self.ids.len() {
            let row = self.row;
            let (_, &mut kth, _) = self.ids.select_nth_unstable_by(k - 1, |&a, &b| descending(row, a, b));
            self.ids.retain(|&id| row[id as usize] >= row[kth as usize]);
        }
    }
}

/// Adding zero makes the two zeros equal; NaN does not get here.
fn descending(row: &[f32], a: u32, b: u32) -> std::cmp::Ordering {
    (row[b as usize] + 0.0).total_cmp(&(row[a as usize] + 0.0)).then(a.cmp(&b))
}

/// What the model said about the positions of a block that may change.
pub(super) struct Scores<'a> {
    /// One entry for each position; meaningless at given positions.
    rankings: Vec<Ranking>,
    logits: Option<(&'a [f32], usize)>,
    options: Options,
    steps: usize,
}

/// Which probability counts as the confidence of a drawn candidate.
#[derive(Clone, Copy, Debug)]
pub(super) enum ConfidenceKind {
    /// Before temperature and filters.
    Plain,
    /// After them.
    Filtered,
}

impl<'a> Scores<'a> {
    pub(super) fn new(view: &StepView<'a>, block: &Block) -> Result<Self, StepError> {
        let expected = block.tokens.len();
        let positions = |found| if found == expected { Ok(()) } else { Err(StepError::Positions { expected, found }) };
        let (rankings, logits) = match *view {
            StepView::Candidates(candidates) => {
                positions(candidates.len())?;
                (candidates.iter().copied().map(Ranking::from).collect::<Vec<_>>(), None)
            }
            StepView::Logits { values, vocab } => {
                let rows = values.chunks_exact(vocab.max(1));
                positions(rows.len())?;
                let of_row = |(row, &given)| if given { Ranking::default() } else { Ranking::from_logits(row) };
                (rows.zip(&block.given).map(of_row).collect(), Some((values, vocab)))
            }
        };
        for (position, (ranking, given)) in rankings.iter().zip(&block.given).enumerate() {
            if !given && !ranking.greedy().confidence.is_finite() {
                return Err(StepError::NotFinite { position });
            }
        }
        Ok(Self { rankings, logits, options: block.options, steps: block.steps })
    }

    /// The greedy choice at a position.
    pub(super) fn greedy(&self, position: usize) -> Scored {
        self.rankings[position].greedy()
    }

    /// The best token at a position that is not banned; at most three are.
    pub(super) fn best_except(&self, position: usize, banned: &[u32]) -> u32 {
        self.proposal(position, banned).token
    }

    /// The candidate at a position that stands there if nobody objects: the best token that is not banned.
    pub(super) fn proposal(&self, position: usize, banned: &[u32]) -> Scored {
        self.rankings[position].best_except(banned)
    }

    /// A token at a position among `allowed`, drawn by the request's temperature and filters, the best one at
    /// temperature 0; its confidence is its probability among all tokens. `None` if nothing is allowed, or without
    /// logits.
    pub(super) fn choose(
        &self,
        position: usize,
        allowed: &TokenSet,
        banned: &[u32],
        uniforms: &mut dyn Uniforms,
    ) -> Option<Scored> {
        let (values, vocab) = self.logits?;
        let row = &values[position * vocab..][..vocab];
        let best = self.proposal(position, banned);
        let token = if self.options.temperature > 0.0 {
            let u = uniforms.uniform(Draw { purpose: Purpose::Sample, step: self.steps, position });
            draw_among(row, &self.options, u, |id| allowed.contains(id)).token
        } else if allowed.contains(best.token) {
            best.token
        } else {
            #[expect(clippy::cast_possible_truncation, reason = "token ids are u32")]
            let ids = (0..vocab as u32).filter(|&id| allowed.contains(id));
            ids.min_by(|&a, &b| descending(row, a, b))?
        };
        let offset = f64::from(row[token as usize]) - f64::from(row[self.greedy(position).token as usize]);
        let confidence = self.greedy(position).confidence * offset.exp();
        allowed.contains(token).then_some(Scored { token, confidence })
    }

    /// A token at a position, drawn by the request's temperature and filters with `banned` left out; the best one at
    /// temperature 0, when no random number is used up.
    pub(super) fn redraw(&self, position: usize, banned: &[u32], purpose: Purpose, uniforms: &mut dyn Uniforms) -> u32 {
        match self.row(position) {
            Some(row) => {
                let u = uniforms.uniform(Draw { purpose, step: self.steps, position });
                draw(row, &self.options, banned, u).token
            }
            None => self.best_except(position, banned),
        }
    }

    /// The candidate of every position for which `is_wanted`, and something at the others. Sampling uses one random
    /// number for every position of the block, in ascending order, so that recorded sequences can be replayed.
    pub(super) fn proposals(
        &self,
        is_wanted: impl Fn(usize) -> bool,
        banned: &[u32],
        kind: ConfidenceKind,
        uniforms: &mut dyn Uniforms,
    ) -> Vec<Scored> {
        let propose = |position| {
            let Some(row) = self.row(position) else { return self.proposal(position, banned) };
            let u = uniforms.uniform(Draw { purpose: Purpose::Sample, step: self.steps, position });
            if !is_wanted(position) {
                return self.greedy(position);
            }
            let drawn = draw(row, &self.options, banned, u);
            let confidence = match kind {
                ConfidenceKind::Plain => drawn.confidence,
                ConfidenceKind::Filtered => drawn.filtered_confidence,
            };
            Scored { token: drawn.token, confidence }
        };
        (0..self.rankings.len()).map(propose).collect()
    }

    /// The logits to draw from; `None` at temperature 0.
    fn row(&self, position: usize) -> Option<&'a [f32]> {
        let (values, vocab) = self.logits?;
        (self.options.temperature > 0.0).then(|| &values[position * vocab..][..vocab])
    }
}

/// The positions of `masks` (ascending) whose candidate is above the threshold; if these are fewer than `floor`, the
/// `floor` most confident ones instead, ties by lower position. Ascending.
pub(super) fn confident(masks: &[usize], candidates: &[Scored], threshold: f32, floor: usize) -> Vec<usize> {
    let is_above = |&i: &usize| candidates[i].confidence > f64::from(threshold);
    let mut chosen: Vec<usize> = masks.iter().copied().filter(is_above).collect();
    if chosen.len() < floor {
        chosen = masks.to_vec();
        chosen.sort_by(|&a, &b| candidates[b].confidence.total_cmp(&candidates[a].confidence).then(a.cmp(&b)));
        chosen.truncate(floor);
        chosen.sort_unstable();
    }
    chosen
}

/// Spreads `total` over `steps`: the share of step `index`, earlier ones first to get the remainder; 0 past the end.
pub(super) fn share(total: usize, steps: usize, index: usize) -> usize {
    if index < steps { total / steps + usize::from(index < total % steps) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::Algorithm;
    use minnow_common::random::{keyed, unit_interval};

    #[test]
    fn shares_add_up() {
        for (total, steps) in [(8, 3), (32, 32), (5, 8), (0, 4), (33, 2)] {
            assert_eq!((0..steps + 2).map(|index| share(total, steps, index)).sum::<usize>(), total);
        }
        assert_eq!(share(8, 0, 0), 0);
    }

    #[test]
    fn lazy_ranking_is_the_sorted_order() {
        let row: Vec<f32> = (0..5000).map(|i| (unit_interval(keyed(3, &[i])) * 50.0).floor() as f32 - 25.0).collect();
        let mut expected: Vec<u32> = (0..5000).collect();
        expected.sort_by(|&a, &b| row[b as usize].partial_cmp(&row[a as usize]).unwrap());
        let mut ranked = Ranked { row: &row, ids: (0..5000).collect(), sorted: 0 };
        let found: Vec<u32> = (0..).map_while(|index| ranked.get(index)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn frequencies_follow_the_filtered_distribution() {
        let row = [0.0, 1.0, 2.0, 3.0, -2.0, 3.0];
        let options = Options { temperature: 2.0, top_k: 4, top_p: 0.85, ..Options::serving(Algorithm::V22) };
        let mut counts = [0u32; 6];
        let draws = 20_000;
        for i in 0..draws {
            counts[draw(&row, &options, &[5], (f64::from(i) + 0.5) / f64::from(draws)).token as usize] += 1;
        }
        // Token 5 is banned, 4 falls to top-k; 3, 2 and 1 hold 90 % of the rest, 3 and 2 only 73 %.
        assert_eq!((counts[0], counts[4], counts[5]), (0, 0, 0));
        let weights = [0.0, (1.0f64 / 2.0).exp(), 1.0f64.exp(), (3.0f64 / 2.0).exp()];
        let total: f64 = weights.iter().sum();
        for token in 1..4 {
            let expected = weights[token] / total * f64::from(draws);
            assert!((f64::from(counts[token]) - expected).abs() < 2.0, "{token}: {counts:?}");
        }
    }
}
