//! LLaDA2.2: unmasking, token editing, DELETE and SPLIT in one step, until nothing changes.
//!
//! Three rules bound it. A schedule fills the masks of the entry within `steps` steps. Once these are filled, a budget
//! of `max_post_steps` ends in a final round that fills everything and forbids structural edits. A block that was
//! there before is not written again if one of five changes avoids it.

use std::collections::HashSet;

use super::sampling::{ConfidenceKind, Scores, confident, share};
use super::{AntiLoop, Block, Draw, OnLimit, Purpose, SpecialIds, Status, StepRecord, Uniforms};

/// Changes tried in one step to avoid a block that was there before.
const ESCAPES_MAX: u8 = 5;

#[derive(Clone, Debug)]
pub(super) struct Joint {
    /// Whether a slot was masked at entry. Travels with the slot; counts only while it is masked.
    is_original: Vec<bool>,
    /// Masks at entry: what the schedule spreads.
    entry_masks: usize,
    /// Every block written so far, before structural edits.
    seen: HashSet<Vec<u32>>,
    /// Loop heads since an original mask was last there.
    post: usize,
    /// Masked positions, as of the last head.
    masks: Vec<usize>,
    /// How many of them are original.
    original_masks: usize,
    is_settled: bool,
}

impl Joint {
    pub(super) fn new(block: &Block) -> Self {
        let is_original: Vec<bool> = block.given.iter().map(|given| !given).collect();
        let entry_masks = is_original.iter().filter(|&&original| original).count();
        Self {
            is_original,
            entry_masks,
            seen: HashSet::new(),
            post: 0,
            masks: Vec::new(),
            original_masks: 0,
            is_settled: entry_masks == 0,
        }
    }

    pub(super) fn is_settled(&self) -> bool {
        self.is_settled
    }

    pub(super) fn head(&mut self, block: &Block) -> Status {
        if self.is_settled {
            return Status::Done;
        }
        self.masks = block.masks();
        self.original_masks = self.masks.iter().filter(|&&i| self.is_original[i]).count();
        self.post = if self.original_masks == 0 { self.post + 1 } else { 0 };
        if self.masks.is_empty() && self.post > block.options.max_post_steps {
            Status::Done
        } else if block.steps >= block.options.max_steps_per_block {
            Status::NotConverged { masks: self.masks.len() }
        } else {
            Status::Running
        }
    }

    pub(super) fn step(&mut self, block: &mut Block, scores: &Scores<'_>, uniforms: &mut dyn Uniforms) -> StepRecord {
        let (options, special) = (block.options, block.special);
        let input = block.tokens.clone();
        let is_mask = |position| self.masks.binary_search(&position).is_ok();
        let candidates = scores.proposals(is_mask, &[], ConfidenceKind::Plain, uniforms);

        let mut m2t = if block.steps < options.steps {
            let new_masks = self.masks.len() - self.original_masks;
            let floor = share(self.entry_masks, options.steps, block.steps) + new_masks;
            confident(&self.masks, &candidates, options.threshold, floor)
        } else {
            self.masks.clone()
        };
        let t2t: Vec<usize> = (0..input.len())
            .filter(|&i| !is_mask(i) && !block.given[i])
            .filter(|&i| scores.greedy(i).token != input[i])
            .filter(|&i| scores.greedy(i).confidence > f64::from(options.editing_threshold))
            .collect();

        let is_forced = options.on_limit == OnLimit::Force && block.steps + 1 == options.max_steps_per_block;
        let is_final = is_forced
            || if options.max_post_steps > 0 {
                self.post >= options.max_post_steps
            } else {
                let fills = |position: &usize| !self.is_original[*position] || m2t.binary_search(position).is_ok();
                self.original_masks > 0 && self.masks.iter().all(fills)
            };
        if is_final {
            m2t.clone_from(&self.masks);
        }
        for &position in &m2t {
            block.tokens[position] = candidates[position].token;
        }
        for &position in &t2t {
            block.tokens[position] = scores.greedy(position).token;
        }
        let mut escapes = Vec::new();
        if is_final {
            replace_banned(block, &m2t, &t2t, scores, uniforms);
        } else if !(m2t.is_empty() && t2t.is_empty()) {
            escapes = self.escape(block, &input, &m2t, scores, uniforms);
        }

        let written = block.tokens.clone();
        self.seen.insert(written.clone());
        let at = |token: Option<u32>| (0..written.len()).filter(|&i| Some(written[i]) == token).collect();
        let (deletes, splits) = (at(special.delete), at(special.split));
        block.tokens = self.apply_edits(&written, &input, &special);
        let output = block.tokens.clone();
        let is_stable = output == input && !output.contains(&special.mask);
        self.is_settled = is_forced || is_stable;
        let is_forced = is_forced && !is_stable;
        StepRecord { input, m2t, t2t, is_final, is_forced, escapes, written, deletes, splits, determined: 0, output }
    }

    /// While the block as written was there before, changes one position of those that this step changed. Returns the
    /// tries.
    fn escape(
        &self,
        block: &mut Block,
        input: &[u32],
        m2t: &[usize],
        scores: &Scores<'_>,
        uniforms: &mut dyn Uniforms,
    ) -> Vec<(usize, u32)> {
        let mut escapes = Vec::new();
        for attempt in 0..ESCAPES_MAX {
            let changed: Vec<usize> = (0..input.len()).filter(|&i| block.tokens[i] != input[i]).collect();
            let Some(&first) = changed.first() else { break };
            if !self.seen.contains(&block.tokens) {
                break;
            }
            let position = match block.options.anti_loop {
                AntiLoop::Random => {
                    let key = Draw { purpose: Purpose::EscapeIndex, step: block.steps, position: usize::from(attempt) };
                    #[expect(
                        clippy::cast_possible_truncation,
                        clippy::cast_precision_loss,
                        clippy::cast_sign_loss,
                        reason = "u is in [0, 1), a block is short"
                    )]
                    let index = (uniforms.uniform(key) * changed.len() as f64) as usize;
                    changed[index.min(changed.len() - 1)]
                }
                AntiLoop::Lowest => {
                    let confidence = |&i: &usize| scores.greedy(i).confidence;
                    let order = |a: &usize, b: &usize| confidence(a).total_cmp(&confidence(b)).then(a.cmp(b));
                    changed.iter().copied().min_by(order).unwrap_or(first)
                }
            };
            let banned = [block.tokens[position]];
            let token = if m2t.contains(&position) {
                scores.redraw(position, &banned, Purpose::EscapeToken { attempt }, uniforms)
            } else {
                scores.best_except(position, &banned)
            };
            block.tokens[position] = token;
            escapes.push((position, token));
        }
        escapes
    }

    /// Left to right over what was written: DELETE emits nothing; SPLIT emits a new mask and then the token that was
    /// there before this step; anything else emits itself. Cut or filled up with new masks to the block's length.
    fn apply_edits(&mut self, written: &[u32], input: &[u32], special: &SpecialIds) -> Vec<u32> {
        let mut slots: Vec<(u32, bool)> = Vec::with_capacity(2 * written.len());
        for ((&token, &before), &original) in written.iter().zip(input).zip(&self.is_original) {
            if Some(token) == special.split {
                slots.extend([(special.mask, false), (before, original)]);
            } else if Some(token) != special.delete {
                slots.push((token, original));
            }
        }
        slots.resize(written.len(), (special.mask, false));
        let (tokens, is_original) = slots.into_iter().unzip();
        self.is_original = is_original;
        tokens
    }
}

/// In a final round, written tokens that may not stay are picked again: DELETE and SPLIT never may, MASK may only where
/// the block need not be published.
fn replace_banned(block: &mut Block, m2t: &[usize], t2t: &[usize], scores: &Scores<'_>, uniforms: &mut dyn Uniforms) {
    let mut banned: Vec<u32> = block.special.edits().collect();
    if block.options.on_limit == OnLimit::Force {
        banned.push(block.special.mask);
    }
    let mut written: Vec<usize> = [m2t, t2t].concat();
    written.sort_unstable();
    for position in written {
        if banned.contains(&block.tokens[position]) {
            block.tokens[position] = if m2t.contains(&position) {
                scores.redraw(position, &banned, Purpose::Repick, uniforms)
            } else {
                scores.best_except(position, &banned)
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structural_edits_follow_the_published_examples() {
        const M: u32 = 31;
        const DEL: u32 = 29;
        const SPL: u32 = 28;
        let special = SpecialIds { mask: M, delete: Some(DEL), split: Some(SPL) };
        let apply = |written: [u32; 4], input: [u32; 4], original: [bool; 4]| {
            let mut joint = Joint {
                is_original: original.to_vec(),
                entry_masks: 4,
                seen: HashSet::new(),
                post: 0,
                masks: Vec::new(),
                original_masks: 0,
                is_settled: false,
            };
            let tokens = joint.apply_edits(&written, &input, &special);
            (tokens, joint.is_original)
        };
        let filled = [1, 2, 3, 4];
        let original = [true; 4];
        assert_eq!(apply([1, DEL, 3, 4], filled, original), (vec![1, 3, 4, M], vec![true, true, true, false]));
        assert_eq!(apply([1, SPL, 3, 4], filled, original), (vec![1, M, 2, 3], vec![true, false, true, true]));
        assert_eq!(apply([1, 2, 3, SPL], filled, original), (vec![1, 2, 3, M], vec![true, true, true, false]));
        assert_eq!(apply([1, 2, 3, DEL], filled, original), (vec![1, 2, 3, M], vec![true, true, true, false]));
        assert_eq!(apply([1, SPL, M, M], [1, M, M, M], original).0, vec![1, M, M, M]);
        assert_eq!(apply([1, SPL, M, M], [1, M, M, M], original).1, vec![true, false, true, true]);
        assert_eq!(apply([DEL; 4], filled, original), (vec![M; 4], vec![false; 4]));
    }
}
