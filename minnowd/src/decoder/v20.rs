//! LLaDA2.0: scheduled unmasking. A filled position is never revised.
//!
//! Step `s` of `steps` fills every mask whose candidate is above the threshold, but at least its share of the block's
//! length (not of its masks), so a block is full after `steps` steps at the latest.

use super::sampling::{ConfidenceKind, Scores, confident, share};
use super::{Block, Status, StepRecord, Uniforms};

/// No state beyond the block.
#[derive(Clone, Debug)]
pub(super) struct Scheduled;

impl Scheduled {
    pub(super) fn head(&self, block: &Block) -> Status {
        if block.masks().is_empty() || block.steps >= block.options.steps { Status::Done } else { Status::Running }
    }

    pub(super) fn step(&self, block: &mut Block, scores: &Scores<'_>, uniforms: &mut dyn Uniforms) -> StepRecord {
        let input = block.tokens.clone();
        let masks = block.masks();
        let is_mask = |position| masks.binary_search(&position).is_ok();
        let candidates = scores.proposals(is_mask, &block.banned(), ConfidenceKind::Filtered, uniforms);
        let floor = share(block.tokens.len(), block.options.steps, block.steps);
        let m2t = confident(&masks, &candidates, block.options.threshold, floor);
        for &position in &m2t {
            block.tokens[position] = candidates[position].token;
        }
        let output = block.tokens.clone();
        StepRecord { input, m2t, written: output.clone(), output, ..StepRecord::default() }
    }
}
