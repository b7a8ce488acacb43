//! Refinement inside a [`Language`], for checkpoints of every version.
//!
//! Positions are settled from the left, each by the best token that the language allows there (at temperature above 0
//! one drawn among those): at least one a step, and more as long as tokens are forced or the model is as sure of them as
//! the threshold asks. "Sure" is the probability among all tokens, allowed or not: where the model wants something else,
//! it gets to see what it must write first. What is settled stays: an edit might leave the language. To the right of it
//! the model's own proposals stand as context, by the thresholds of LLaDA2.1, and bind nobody. DELETE and SPLIT are not
//! used, for they would move settled tokens. A stop id ends the block; it is allowed only where the language may end.
//!
//! A block of `n` positions takes `n` steps at most. In the last one that `max_steps_per_block` allows, everything is
//! settled without asking for confidence.

use super::language::Language;
use super::sampling::Scores;
use super::{Block, Status, StepError, StepRecord, Uniforms};

#[derive(Clone, Debug)]
pub(super) struct Constrained {
    language: Box<dyn Language>,
    stop_ids: Vec<u32>,
    /// Positions before this one are given or settled.
    settled: usize,
}

impl Constrained {
    pub(super) fn new(block: &Block, language: Box<dyn Language>, stop_ids: &[u32]) -> Self {
        let settled = block.given.iter().take_while(|&&given| given).count();
        Self { language, stop_ids: stop_ids.to_vec(), settled }
    }

    /// The language at the end of what is settled.
    pub(super) fn into_language(self) -> Box<dyn Language> {
        self.language
    }

    pub(super) fn head(&self, block: &Block) -> Status {
        if self.settled == block.tokens.len() { Status::Done } else { Status::Running }
    }

    pub(super) fn step(
        &mut self,
        block: &mut Block,
        scores: &Scores<'_>,
        uniforms: &mut dyn Uniforms,
    ) -> Result<StepRecord, StepError> {
        let input = block.tokens.clone();
        let banned: Vec<u32> = block.special.edits().chain([block.special.mask]).collect();
        let is_last = block.steps + 1 >= block.options.max_steps_per_block;
        let first = self.settled;
        let (mut determined, mut is_forced) = (0, false);
        while self.settled < block.tokens.len() {
            let room = block.tokens.len() - self.settled;
            let forced = self.language.forced();
            if !forced.is_empty() {
                for &token in forced.iter().take(room) {
                    self.settle(block, token)?;
                    determined += 1;
                }
                continue;
            }
            let mut allowed = self.language.allowed()?;
            banned.iter().for_each(|&id| allowed.remove(id));
            let Some(choice) = scores.choose(self.settled, &allowed, &banned, uniforms) else {
                return Err(StepError::NothingAllowed { position: self.settled });
            };
            let is_sure = choice.confidence > f64::from(block.options.threshold);
            // What was forced in this step the model has not seen yet, so it is asked again before it says more.
            if self.settled > first && !(is_sure || is_last) {
                break;
            }
            is_forced |= !is_sure && self.settled > first;
            self.settle(block, choice.token)?;
        }
        for position in self.settled..block.tokens.len() {
            let proposal = scores.proposal(position, &banned);
            let is_mask = block.tokens[position] == block.special.mask;
            let wanted = if is_mask { block.options.threshold } else { block.options.editing_threshold };
            if proposal.confidence > f64::from(wanted) {
                block.tokens[position] = proposal.token;
            }
        }
        let output = block.tokens.clone();
        let (m2t, t2t) = (first..output.len())
            .filter(|&position| output[position] != input[position])
            .partition(|&position| input[position] == block.special.mask);
        let is_final = self.settled == output.len();
        Ok(StepRecord {
            input,
            m2t,
            t2t,
            determined,
            is_final,
            is_forced,
            written: output.clone(),
            output,
            ..StepRecord::default()
        })
    }

    /// Writes a token at the first open position. A stop id fills the rest of the block, which nobody will see.
    fn settle(&mut self, block: &mut Block, token: u32) -> Result<(), StepError> {
        self.language.accept(token)?;
        block.tokens[self.settled] = token;
        self.settled += 1;
        if self.stop_ids.contains(&token) {
            block.tokens[self.settled..].fill(token);
            self.settled = block.tokens.len();
        }
        Ok(())
    }
}
