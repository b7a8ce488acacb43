//! The blocks of one request, one after another: read the prompt, refine a block, commit it, go on or end.
//!
//! [`Generation`] never computes: [`Generation::action`] says what to do next, the caller does it and reports back. The
//! complete blocks of the prompt are only read. A partial last block of the prompt is refined together with the first
//! generated tokens, since its K/V depend on them. Only tokens of finished blocks are shown. K/V of a block are
//! committed if they were computed from exactly its final tokens; if the last forward saw others, one more is asked for.

use std::ops::Range;

use minnow_common::BLOCK;
use thiserror::Error;

use super::{
    BlockDecoder, BlockError, KeyedUniforms, Language, Next, OptionError, Options, SpecialIds, StepError, StepRecord,
    StepView, Uniforms,
};

/// The state of one request, from its prompt to its last token.
#[derive(Clone, Debug)]
pub struct Generation {
    /// Final tokens: the prompt, then those of finished blocks, overshoot included until the end.
    sequence: Vec<u32>,
    prompt_len: usize,
    /// Positions whose K/V are in place; whole blocks.
    committed: usize,
    /// Positions whose K/V have to be there before a block is refined: the prompt's, and more after a rewind.
    prefill_end: usize,
    /// End of the output: prompt and budget, or less once a stop id was found.
    requested: usize,
    stop_ids: Vec<u32>,
    options: Options,
    special: SpecialIds,
    /// What the output must stay in, at the end of the finished blocks.
    language: Option<Box<dyn Language>>,
    phase: Phase,
    /// What the last forward of the last refined block saw.
    staged: Vec<u32>,
}

#[derive(Clone, Debug)]
enum Phase {
    Prefill,
    Refine(Box<BlockDecoder>, RefinedBlock),
    Commit,
    Finished(FinishReason),
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action<'a> {
    /// Compute K/V of `tokens`, all complete prompt blocks not read yet, in pieces of whole blocks as it suits; report
    /// each by [`Generation::prefilled`].
    Prefill {
        /// Absolute position of the first token.
        start: usize,
        /// The tokens.
        tokens: &'a [u32],
    },
    /// Evaluate the active block, then call [`Generation::refined`].
    Refine {
        /// Absolute position of the block.
        start: usize,
        /// Its current tokens.
        tokens: &'a [u32],
        /// Whether logits are needed, not only candidates.
        needs_logits: bool,
    },
    /// Keep the K/V of a finished block, then call [`Generation::committed`].
    Commit {
        /// Absolute position of the block.
        start: usize,
        /// Its final tokens.
        tokens: &'a [u32],
        /// Whether the K/V at hand describe these tokens or must be computed again.
        kind: CommitKind,
    },
    /// Nothing.
    Finished(FinishReason),
}

/// Where the K/V of a finished block come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitKind {
    /// The last forward saw exactly the final tokens.
    Reuse,
    /// One more forward, which needs no logits.
    Refresh,
}

/// Why the output ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop id, or the caller's own reason ([`Generation::stop`]).
    Stop,
    /// The budget is used up.
    Length,
}

impl FinishReason {
    /// The word for it in the API.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// What one forward of the active block led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refinement {
    /// What the step did.
    pub record: StepRecord,
    /// The block so far.
    pub block: RefinedBlock,
    /// Set if the block is final.
    pub finished: Option<FinishedBlock>,
}

/// How a block was refined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RefinedBlock {
    /// Absolute position of the block.
    pub start: usize,
    /// Forwards so far.
    pub forwards: usize,
    /// Tokens rewritten after they were written first, DELETE and SPLIT included.
    pub token_edits: usize,
    /// DELETE edits applied.
    pub deletes: usize,
    /// SPLIT edits applied.
    pub splits: usize,
    /// Tries to leave a loop.
    pub escapes: usize,
    /// Whether the step limit ended it before it had settled.
    pub is_forced: bool,
    /// Tokens that a language left no choice about.
    pub determined: usize,
}

/// A block that became final.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FinishedBlock {
    /// Positions in [`Generation::completion`] that it added: cut at the budget and after the first stop id.
    pub added: Range<usize>,
    /// Set if it was the last one.
    pub end: Option<FinishReason>,
}

/// Why a prompt cannot be continued.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum PromptError {
    /// The options do not make sense.
    #[error(transparent)]
    Options(#[from] OptionError),
    /// The prompt contains a token that only the decoder may use.
    #[error("prompt token {index} is {token}, the {name} token, which may not be given")]
    Reserved {
        /// Index in the prompt.
        index: usize,
        /// The id.
        token: u32,
        /// Which one: mask, delete or split.
        name: &'static str,
    },
    /// Prompt and budget together are beyond what can be counted.
    #[error("a prompt of {prompt} tokens and an output of {output} are too long")]
    TooLong {
        /// Prompt tokens.
        prompt: usize,
        /// Tokens to generate.
        output: usize,
    },
}

/// Why a request cannot go on.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum GenerationError {
    /// No block is being refined.
    #[error("no block is being refined")]
    NotRefining,
    /// The step was refused.
    #[error("block at position {start}: {source}")]
    Step {
        /// Absolute position of the block.
        start: usize,
        /// Why.
        source: StepError,
    },
    /// The block did not settle, and the options say that this is an error.
    #[error("block at position {start} has {masks} masks after {steps} steps")]
    NotConverged {
        /// Absolute position of the block.
        start: usize,
        /// Masks left.
        masks: usize,
        /// Steps done.
        steps: usize,
    },
    /// A settled block holds a token that may not be published: only with the reference's unrestricted candidates.
    #[error("block at position {start} settled with the {name} token at index {index}")]
    Unpublishable {
        /// Absolute position of the block.
        start: usize,
        /// Index in the block.
        index: usize,
        /// Which one: mask, delete or split.
        name: &'static str,
    },
    /// The block could not be started.
    #[error("block at position {start}: {source}")]
    Block {
        /// Absolute position of the block.
        start: usize,
        /// Why.
        source: BlockError,
    },
}

impl Generation {
    /// Starts a request: `max_new` tokens at most after `prompt`; the output ends with the first of `stop_ids`, itself
    /// included. `max_new` of 0 only reads the complete blocks of the prompt.
    pub fn new(
        prompt: &[u32],
        max_new: usize,
        stop_ids: &[u32],
        options: Options,
        special: SpecialIds,
    ) -> Result<Self, PromptError> {
        options.check()?;
        if let Some((index, token, name)) = first_reserved(prompt, &special) {
            return Err(PromptError::Reserved { index, token, name });
        }
        let too_long = PromptError::TooLong { prompt: prompt.len(), output: max_new };
        let requested = prompt.len().checked_add(max_new).filter(|end| *end <= usize::MAX - BLOCK).ok_or(too_long)?;
        let mut generation = Self {
            sequence: prompt.to_vec(),
            prompt_len: prompt.len(),
            committed: 0,
            prefill_end: prompt.len() / BLOCK * BLOCK,
            requested,
            stop_ids: stop_ids.to_vec(),
            options,
            special,
            language: None,
            phase: Phase::Prefill,
            staged: Vec::new(),
        };
        generation.leave_prefill();
        Ok(generation)
    }

    /// The same request, with an output in `language`, which stands at its beginning. Only before the first forward.
    #[must_use]
    pub fn within(mut self, language: Box<dyn Language>) -> Self {
        self.language = Some(language);
        if matches!(self.phase, Phase::Refine(..)) {
            let started = self.start_block();
            debug_assert_eq!(started, Ok(()));
        }
        self
    }

    /// What to do next.
    #[must_use]
    pub fn action(&self) -> Action<'_> {
        match &self.phase {
            Phase::Prefill => {
                Action::Prefill { start: self.committed, tokens: &self.sequence[self.committed..self.prefill_end] }
            }
            Phase::Refine(decoder, block) => {
                let (tokens, needs_logits) = (decoder.tokens(), decoder.needs_logits());
                Action::Refine { start: block.start, tokens, needs_logits }
            }
            Phase::Commit => {
                let tokens = &self.sequence[self.committed..];
                let kind = if self.staged == tokens { CommitKind::Reuse } else { CommitKind::Refresh };
                Action::Commit { start: self.committed, tokens, kind }
            }
            Phase::Finished(reason) => Action::Finished(*reason),
        }
    }

    /// The tokens that are still to be read before a block can be refined: whole blocks, those of [`Action::Prefill`].
    #[must_use]
    pub fn prefill(&self) -> &[u32] {
        match self.action() {
            Action::Prefill { tokens, .. } => tokens,
            _ => &[],
        }
    }

    /// Reports that `positions` more of the prompt (whole blocks) have their K/V in place, computed or found in a cache.
    ///
    /// # Panics
    /// If no prompt is being read, or these are not whole blocks of what was asked for.
    pub fn prefilled(&mut self, positions: usize) {
        assert!(matches!(self.phase, Phase::Prefill), "no prompt is being read");
        assert!(positions.is_multiple_of(BLOCK), "{positions} positions are not whole blocks");
        assert!(positions <= self.prefill_end - self.committed, "more was read than asked for");
        self.committed += positions;
        self.leave_prefill();
    }

    /// Takes what the model said about the tokens of [`Action::Refine`].
    pub fn refined(&mut self, view: &StepView<'_>, uniforms: &mut dyn Uniforms) -> Result<Refinement, GenerationError> {
        let Phase::Refine(decoder, block) = &mut self.phase else { return Err(GenerationError::NotRefining) };
        let start = block.start;
        let record = decoder.step(view, uniforms).map_err(|source| GenerationError::Step { start, source })?;
        block.forwards += 1;
        block.token_edits += record.t2t.len();
        block.deletes += record.deletes.len();
        block.splits += record.splits.len();
        block.escapes += record.escapes.len();
        block.is_forced |= record.is_forced;
        block.determined += record.determined;
        let block = *block;
        let finished = match decoder.next() {
            Next::Forward { .. } => None,
            Next::NotConverged { masks, steps } => {
                return Err(GenerationError::NotConverged { start, masks, steps });
            }
            Next::Done => {
                let tokens = decoder.tokens().to_vec();
                if let Some((index, _, name)) = first_reserved(&tokens, &self.special) {
                    return Err(GenerationError::Unpublishable { start, index, name });
                }
                self.staged.clone_from(&record.input);
                if let Phase::Refine(decoder, _) = std::mem::replace(&mut self.phase, Phase::Commit) {
                    self.language = decoder.into_language();
                }
                Some(self.finish_block(start, &tokens))
            }
        };
        Ok(Refinement { record, block, finished })
    }

    /// Reports that [`Action::Commit`] was carried out.
    ///
    /// # Panics
    /// If no commit was asked for.
    pub fn committed(&mut self) -> Result<(), GenerationError> {
        assert!(matches!(self.phase, Phase::Commit), "no commit was asked for");
        self.committed = self.sequence.len();
        self.start_block()
    }

    /// Says that all K/V are lost. What is final stays final and is read again like a prompt; the active block begins
    /// anew and, with the same seed, ends the same.
    pub fn rewind(&mut self) {
        match self.phase {
            Phase::Finished(_) => return,
            Phase::Prefill => {}
            // The finished block is read with the others.
            Phase::Commit => self.prefill_end = self.sequence.len(),
            Phase::Refine(..) => self.prefill_end = self.committed,
        }
        self.committed = 0;
        self.phase = Phase::Prefill;
        self.leave_prefill();
    }

    /// The last block of a finished output, if it can be kept: all of it was generated and shown, and the last forward
    /// saw exactly its tokens.
    #[must_use]
    pub fn kept_block(&self) -> Option<&[u32]> {
        let block = &self.sequence[self.committed..];
        let is_whole = matches!(self.phase, Phase::Finished(_)) && self.requested == self.sequence.len();
        (is_whole && block.len() == BLOCK && self.staged == block).then_some(block)
    }

    /// Ends the output after the blocks finished so far: a stop string was found in their text.
    pub fn stop(&mut self) {
        // The client does not see all of the last block.
        self.staged.clear();
        self.requested = self.requested.min(self.sequence.len());
        self.phase = Phase::Finished(FinishReason::Stop);
    }

    /// Generated tokens of finished blocks, cut at the budget and after the first stop id.
    #[must_use]
    pub fn completion(&self) -> &[u32] {
        &self.sequence[self.prompt_len..self.requested.min(self.sequence.len()).max(self.prompt_len)]
    }

    /// Prompt and finished blocks as far as their K/V are committed; whole blocks that others may share.
    #[must_use]
    pub fn committed_tokens(&self) -> &[u32] {
        &self.sequence[..self.committed]
    }

    /// Absolute position after the last block that can be needed: what a cache should have room for.
    #[must_use]
    pub fn end_max(&self) -> usize {
        self.requested.next_multiple_of(BLOCK)
    }

    /// Random numbers of the active block for a request's seed; `choice` counts several answers to one request.
    #[must_use]
    pub fn uniforms(&self, seed: u64, choice: u64) -> KeyedUniforms {
        KeyedUniforms { seed, choice, block: (self.committed / BLOCK) as u64 }
    }

    fn leave_prefill(&mut self) {
        if self.committed < self.prefill_end {
            return;
        }
        if self.requested == self.prompt_len {
            self.phase = Phase::Finished(FinishReason::Length);
        } else {
            // The prompt was checked, so the first block cannot be refused.
            let started = self.start_block();
            debug_assert_eq!(started, Ok(()));
        }
    }

    /// Makes the block after the committed ones active.
    fn start_block(&mut self) -> Result<(), GenerationError> {
        let start = self.committed;
        let mut tokens = self.sequence[start..].to_vec();
        tokens.resize(BLOCK, self.special.mask);
        let decoder = match &self.language {
            None => BlockDecoder::new(tokens, self.options, self.special),
            Some(language) => {
                BlockDecoder::within(tokens, self.options, self.special, language.clone(), &self.stop_ids)
            }
        };
        let decoder = decoder.map_err(|source| GenerationError::Block { start, source })?;
        self.phase = Phase::Refine(Box::new(decoder), RefinedBlock { start, ..RefinedBlock::default() });
        Ok(())
    }

    /// Takes the final `tokens` of the block at `start` and decides whether it was the last.
    fn finish_block(&mut self, start: usize, tokens: &[u32]) -> FinishedBlock {
        let first = self.prompt_len.max(start);
        self.sequence.truncate(start);
        self.sequence.extend_from_slice(tokens);
        let last = self.requested.min(self.sequence.len());
        let stop = (first..last).find(|&position| self.stop_ids.contains(&self.sequence[position]));
        let end = match stop {
            Some(position) => {
                self.requested = position + 1;
                Some(FinishReason::Stop)
            }
            None => (self.sequence.len() >= self.requested).then_some(FinishReason::Length),
        };
        self.phase = end.map_or(Phase::Commit, Phase::Finished);
        let added = first - self.prompt_len..self.requested.min(last) - self.prompt_len;
        FinishedBlock { added, end }
    }
}

/// Index, id and name of the first token that only the decoder may use.
fn first_reserved(tokens: &[u32], special: &SpecialIds) -> Option<(usize, u32, &'static str)> {
    tokens.iter().enumerate().find_map(|(index, &token)| special.name(token).map(|name| (index, token, name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::{Algorithm, Candidates};
    use minnow_common::random::{keyed, unit_interval};

    const SPECIAL: SpecialIds = SpecialIds { mask: 31, delete: Some(29), split: Some(28) };
    const EOS: u32 = 30;

    /// A model as a pure function of everything before and in the block.
    fn views(before: &[u32], tokens: &[u32]) -> Vec<Candidates> {
        let all: Vec<u64> = before.iter().chain(tokens).map(|&token| u64::from(token)).collect();
        let state = keyed(5, &all);
        let row = |i: usize| -> Vec<f32> {
            (0..32).map(|v| (unit_interval(keyed(state, &[i as u64, v])) * 12.0) as f32).collect()
        };
        (0..tokens.len()).map(|i| Candidates::from_logits(&row(i))).collect()
    }

    /// Runs a request, prefilling in pieces of `piece` blocks; everything that happened, in words.
    fn run(prompt: &[u32], max_new: usize, piece: usize) -> (Vec<u32>, FinishReason, Vec<String>) {
        let mut options = Options::serving(Algorithm::V22);
        options.max_post_steps = 2;
        options.threshold = 0.3;
        let mut generation = Generation::new(prompt, max_new, &[EOS], options, SPECIAL).unwrap();
        let mut log = Vec::new();
        loop {
            match generation.action() {
                Action::Prefill { start, tokens } => {
                    assert_eq!(tokens, &prompt[start..prompt.len() / BLOCK * BLOCK]);
                    let positions = tokens.len().min(piece * BLOCK);
                    generation.prefilled(positions);
                }
                Action::Refine { start, tokens, needs_logits } => {
                    assert!(!needs_logits);
                    assert_eq!(start, generation.committed_tokens().len());
                    let rows = views(generation.committed_tokens(), tokens);
                    let mut uniforms = generation.uniforms(1, 0);
                    assert_eq!(uniforms.block, (start / BLOCK) as u64);
                    let refinement = generation.refined(&StepView::Candidates(&rows), &mut uniforms).unwrap();
                    if let Some(finished) = refinement.finished {
                        assert_eq!(finished.added.end, generation.completion().len());
                        log.push(format!("block {start}: {:?} {:?}", finished.added, finished.end));
                    }
                }
                Action::Commit { start, tokens, kind } => {
                    assert_eq!((start % BLOCK, tokens.len()), (0, BLOCK));
                    log.push(format!("{kind:?}"));
                    generation.committed().unwrap();
                }
                Action::Finished(reason) => return (generation.completion().to_vec(), reason, log),
            }
        }
    }

    #[test]
    fn the_output_does_not_depend_on_how_the_prompt_was_cut_and_respects_budget_and_stops() {
        let mut stopped = 0;
        for len in [0, 1, 31, 32, 33, 70, 96, 100] {
            let prompt: Vec<u32> = (0..len).map(|i| i % 28).collect();
            for max_new in [1, 5, 31, 32, 64, 100] {
                let whole = run(&prompt, max_new, 100);
                assert_eq!(whole, run(&prompt, max_new, 1));
                let (tokens, reason, _) = whole;
                assert!(tokens.iter().all(|&token| SPECIAL.name(token).is_none()));
                let stop = tokens.iter().position(|&token| token == EOS);
                match reason {
                    FinishReason::Stop => assert_eq!(stop, Some(tokens.len() - 1)),
                    FinishReason::Length => assert_eq!((stop, tokens.len()), (None, max_new)),
                }
                stopped += usize::from(reason == FinishReason::Stop);
            }
        }
        assert!(stopped > 5, "the model of this test must stop now and then");
    }

    #[test]
    fn no_budget_reads_the_prompt_only() {
        let prompt = vec![1; 70];
        let options = Options::serving(Algorithm::V22);
        let mut generation = Generation::new(&prompt, 0, &[], options, SPECIAL).unwrap();
        assert_eq!(generation.action(), Action::Prefill { start: 0, tokens: &prompt[..64] });
        generation.prefilled(32);
        generation.prefilled(32);
        assert_eq!(generation.action(), Action::Finished(FinishReason::Length));
        assert_eq!((generation.completion(), generation.committed_tokens().len()), (&[][..], 64));
    }

    #[test]
    fn prompts_with_reserved_tokens_are_refused_by_index_and_id() {
        let options = Options::serving(Algorithm::V22);
        for (token, name) in [(31, "mask"), (29, "delete"), (28, "split")] {
            let refused = Generation::new(&[1, 2, token], 8, &[], options, SPECIAL).unwrap_err();
            assert_eq!(refused, PromptError::Reserved { index: 2, token, name });
            let message = format!("prompt token 2 is {token}, the {name} token, which may not be given");
            assert_eq!(refused.to_string(), message);
        }
        assert!(matches!(Generation::new(&[1], usize::MAX, &[], options, SPECIAL), Err(PromptError::TooLong { .. })));
    }

    #[test]
    fn a_stop_from_outside_ends_after_the_finished_block() {
        let options = Options::serving(Algorithm::V22);
        let mut generation = Generation::new(&[1], 500, &[], options, SPECIAL).unwrap();
        loop {
            let Action::Refine { tokens, .. } = generation.action() else { panic!("one block only") };
            let rows = views(&[], tokens);
            let mut uniforms = generation.uniforms(0, 0);
            if generation.refined(&StepView::Candidates(&rows), &mut uniforms).unwrap().finished.is_some() {
                break;
            }
        }
        assert!(matches!(generation.action(), Action::Commit { start: 0, .. }));
        generation.stop();
        assert_eq!(generation.action(), Action::Finished(FinishReason::Stop));
        assert_eq!(generation.completion().len(), 31);
    }
}
