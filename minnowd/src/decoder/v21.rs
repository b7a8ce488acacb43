//! LLaDA2.1: unmasking by threshold, and in every step rewriting of filled positions the model is sure about.
//!
//! Given positions are protected as a leading run. Once no mask is left, at most `max_post_steps` further steps edit; a
//! step that changes nothing ends the block. The reference does not forbid the candidate MASK, which may put a position
//! back and, if that repeats, never end: `max_steps_per_block` bounds it.

use super::sampling::{ConfidenceKind, Scores, confident};
use super::{Block, OnLimit, Status, StepRecord, Uniforms};

#[derive(Clone, Debug)]
pub(super) struct Edited {
    /// Length of the leading run of given positions.
    given_len: usize,
    /// Loop heads that found no mask.
    post: usize,
    is_settled: bool,
}

impl Edited {
    pub(super) fn new(block: &Block) -> Self {
        let given_len = block.given.iter().take_while(|&&given| given).count();
        Self { given_len, post: 0, is_settled: false }
    }

    pub(super) fn is_settled(&self) -> bool {
        self.is_settled
    }

    pub(super) fn head(&mut self, block: &Block) -> Status {
        let masks = block.masks();
        self.post += usize::from(masks.is_empty());
        if self.post > block.options.max_post_steps {
            Status::Done
        } else if block.steps < block.options.max_steps_per_block {
            Status::Running
        } else if masks.is_empty() && block.options.on_limit == OnLimit::Force {
            Status::Done
        } else {
            Status::NotConverged { masks: masks.len() }
        }
    }

    pub(super) fn step(&mut self, block: &mut Block, scores: &Scores<'_>, uniforms: &mut dyn Uniforms) -> StepRecord {
        let options = block.options;
        let input = block.tokens.clone();
        let masks = block.masks();
        let is_free = |position| position >= self.given_len;
        let candidates = scores.proposals(is_free, &block.banned(), ConfidenceKind::Filtered, uniforms);
        let is_forced = options.on_limit == OnLimit::Force && block.steps + 1 >= options.max_steps_per_block;
        let floor = if is_forced { masks.len() } else { options.num_to_transfer.min(masks.len()) };
        let m2t = confident(&masks, &candidates, options.threshold, floor);
        let t2t: Vec<usize> = (self.given_len..input.len())
            .filter(|position| masks.binary_search(position).is_err())
            .filter(|&i| candidates[i].token != input[i])
            .filter(|&i| candidates[i].confidence > f64::from(options.editing_threshold))
            .collect();
        for &position in m2t.iter().chain(&t2t) {
            block.tokens[position] = candidates[position].token;
        }
        self.is_settled = masks.is_empty() && t2t.is_empty();
        let output = block.tokens.clone();
        StepRecord {
            input,
            m2t,
            t2t,
            is_final: is_forced,
            is_forced: is_forced && !self.is_settled,
            written: output.clone(),
            output,
            ..StepRecord::default()
        }
    }
}
