//! Block diffusion decoding as plain data: tokens and confidences in, tokens out. No model, no clock, no I/O.
//!
//! [`BlockDecoder`] refines one block: it says which tokens to evaluate next and takes what the model thinks of them.
//! [`Generation`] drives the blocks of one request: prompt, refinement, commit, end. `docs/block-diffusion.md` explains
//! the three algorithms; the files `v20`, `v21` and `v22` each hold one, the pieces they share lie in `sampling`.
//! Everything here is a function of its arguments: the same prompt, options, seed and confidences give the same tokens.
//!
//! Thresholds are f32 like the confidences that backends give, so that 0.6 is the same number on both sides. What the
//! decoder computes itself from logits is f64.

mod candidates;
mod constrained;
mod generation;
mod language;
mod options;
mod sampling;
mod uniforms;
mod v20;
mod v21;
mod v22;

use thiserror::Error;

pub use candidates::{Candidate, Candidates};
pub use generation::{
    Action, CommitKind, FinishReason, FinishedBlock, Generation, GenerationError, PromptError, RefinedBlock, Refinement,
};
pub use language::{Language, LanguageError, TokenSet};
pub use options::{Algorithm, AntiLoop, OnLimit, OptionError, Options, Preset};
pub use sampling::{Drawn, draw};
pub use uniforms::{Draw, KeyedUniforms, Purpose, Uniforms};

use sampling::Scores;

/// Token ids with a meaning to the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpecialIds {
    /// Stands at positions that are not decided yet.
    pub mask: u32,
    /// Written over a token, removes its slot. `None` where the model has no such token.
    pub delete: Option<u32>,
    /// Written over a token, opens a masked slot before it. `None` where the model has no such token.
    pub split: Option<u32>,
}

impl SpecialIds {
    /// What the decoder calls `token`: `mask`, `delete` or `split`; `None` for every other token.
    #[must_use]
    pub fn name(&self, token: u32) -> Option<&'static str> {
        if token == self.mask {
            Some("mask")
        } else if Some(token) == self.delete {
            Some("delete")
        } else if Some(token) == self.split {
            Some("split")
        } else {
            None
        }
    }

    fn is_edit(&self, token: u32) -> bool {
        Some(token) == self.delete || Some(token) == self.split
    }

    /// DELETE and SPLIT, as far as they exist.
    fn edits(&self) -> impl Iterator<Item = u32> {
        self.delete.into_iter().chain(self.split)
    }
}

/// The refinement of one block, from its prompt tokens and masks to its final tokens.
#[derive(Clone, Debug)]
pub struct BlockDecoder {
    block: Block,
    machine: Machine,
    status: Status,
}

/// What every algorithm works on.
#[derive(Clone, Debug)]
struct Block {
    /// Current tokens.
    tokens: Vec<u32>,
    /// Positions that were given at entry; never written.
    given: Vec<bool>,
    options: Options,
    special: SpecialIds,
    /// Steps done.
    steps: usize,
}

#[derive(Clone, Debug)]
enum Machine {
    V20(v20::Scheduled),
    V21(v21::Edited),
    V22(v22::Joint),
    Constrained(constrained::Constrained),
}

/// Where a block stands between two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Running,
    Done,
    NotConverged { masks: usize },
}

/// What a block needs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next<'a> {
    /// A forward of these tokens, then [`BlockDecoder::step`].
    Forward {
        /// Current tokens of the block.
        tokens: &'a [u32],
        /// Whether whole rows of logits are needed, not only the best candidates.
        needs_logits: bool,
    },
    /// Nothing: [`BlockDecoder::tokens`] are final.
    Done,
    /// The step limit is reached and [`OnLimit::Error`] is set.
    NotConverged {
        /// Masks left.
        masks: usize,
        /// Steps done.
        steps: usize,
    },
}

/// What the model thinks of every position of the block that was last asked for.
#[derive(Clone, Copy, Debug)]
pub enum StepView<'a> {
    /// The best candidates of each position. Enough at temperature 0.
    Candidates(&'a [Candidates]),
    /// `[positions, vocab]` row-major logits.
    Logits {
        /// Whole rows.
        values: &'a [f32],
        /// Length of a row.
        vocab: usize,
    },
}

/// What one step did, in the terms of the algorithm. Positions are indices in the block, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepRecord {
    /// Tokens that were evaluated.
    pub input: Vec<u32>,
    /// Masked positions that were filled.
    pub m2t: Vec<usize>,
    /// Filled positions whose token was rewritten (with DELETE or SPLIT, too).
    pub t2t: Vec<usize>,
    /// Whether this was a final round: everything filled, no structural edits.
    pub is_final: bool,
    /// Whether the block had not settled and ends with this step because it is the last one allowed
    /// ([`OnLimit::Force`]).
    pub is_forced: bool,
    /// Tries to leave a loop: position, and the token that was put there.
    pub escapes: Vec<(usize, u32)>,
    /// The block as written, before structural edits.
    pub written: Vec<u32>,
    /// Positions where DELETE was written.
    pub deletes: Vec<usize>,
    /// Positions where SPLIT was written.
    pub splits: Vec<usize>,
    /// How many tokens a language left no choice about.
    pub determined: usize,
    /// The block after structural edits: the next step's input, or the result.
    pub output: Vec<u32>,
}

/// Why a block cannot be decoded.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum BlockError {
    /// The options do not make sense.
    #[error(transparent)]
    Options(#[from] OptionError),
    /// DELETE or SPLIT among the given tokens.
    #[error("token {token} at index {index} of the block is the {name} token, which may not be given")]
    Reserved {
        /// Index in the block.
        index: usize,
        /// The id.
        token: u32,
        /// Which one.
        name: &'static str,
    },
}

/// Why a step cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StepError {
    /// The block is done, or failed.
    #[error("the block takes no further steps")]
    Ended,
    /// As many views as positions are needed.
    #[error("the block has {expected} positions, but {found} were evaluated")]
    Positions {
        /// Positions of the block.
        expected: usize,
        /// Positions in the view.
        found: usize,
    },
    /// Sampling and languages need logits.
    #[error("logits are needed, but only candidates were given")]
    NeedsLogits,
    /// The language says nothing about how to go on.
    #[error("the output's grammar allows no token at position {position}")]
    NothingAllowed {
        /// Index in the block.
        position: usize,
    },
    /// The language could not be followed.
    #[error(transparent)]
    Language(#[from] LanguageError),
    /// The model produced NaN or infinities.
    #[error("position {position} has no finite confidence")]
    NotFinite {
        /// Index in the block.
        position: usize,
    },
}

impl BlockDecoder {
    /// Starts a block of `tokens`: MASK where something is wanted, given tokens elsewhere. `steps` of 0 is accepted
    /// here (no schedule at all), though [`Options::check`] refuses it.
    pub fn new(tokens: Vec<u32>, options: Options, special: SpecialIds) -> Result<Self, BlockError> {
        Self::started(tokens, options, special, |block| match options.algorithm {
            Algorithm::V20 => Machine::V20(v20::Scheduled),
            Algorithm::V21 => Machine::V21(v21::Edited::new(block)),
            Algorithm::V22 => Machine::V22(v22::Joint::new(block)),
        })
    }

    /// Starts a block whose wanted tokens go on in `language`, whatever the algorithm; it ends with any of `stop_ids`.
    /// Given tokens must come first, and are not of the language.
    pub fn within(
        tokens: Vec<u32>,
        options: Options,
        special: SpecialIds,
        language: Box<dyn Language>,
        stop_ids: &[u32],
    ) -> Result<Self, BlockError> {
        Self::started(tokens, options, special, |block| {
            Machine::Constrained(constrained::Constrained::new(block, language, stop_ids))
        })
    }

    fn started(
        tokens: Vec<u32>,
        options: Options,
        special: SpecialIds,
        machine: impl FnOnce(&Block) -> Machine,
    ) -> Result<Self, BlockError> {
        options.check_numbers()?;
        if let Some(index) = tokens.iter().position(|&token| special.is_edit(token)) {
            let token = tokens[index];
            return Err(BlockError::Reserved { index, token, name: special.name(token).unwrap_or_default() });
        }
        let given = tokens.iter().map(|&token| token != special.mask).collect();
        let block = Block { tokens, given, options, special, steps: 0 };
        let mut machine = machine(&block);
        let status = machine.head(&block);
        Ok(Self { block, machine, status })
    }

    /// What to do next.
    #[must_use]
    pub fn next(&self) -> Next<'_> {
        match self.status {
            Status::Running => Next::Forward { tokens: &self.block.tokens, needs_logits: self.needs_logits() },
            Status::Done => Next::Done,
            Status::NotConverged { masks } => Next::NotConverged { masks, steps: self.block.steps },
        }
    }

    /// Whether steps need logits rather than candidates.
    #[must_use]
    pub fn needs_logits(&self) -> bool {
        self.block.options.temperature > 0.0 || matches!(self.machine, Machine::Constrained(_))
    }

    /// The language at the end of the block, if it had to stay in one.
    pub(super) fn into_language(self) -> Option<Box<dyn Language>> {
        match self.machine {
            Machine::Constrained(machine) => Some(machine.into_language()),
            _ => None,
        }
    }

    /// Current tokens; final once [`next`](Self::next) says so.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.block.tokens
    }

    /// Steps done so far.
    #[must_use]
    pub fn steps(&self) -> usize {
        self.block.steps
    }

    /// Takes one step from what the model said about [`tokens`](Self::tokens). Random choices come from `uniforms`, in
    /// the order of `docs/block-diffusion.md`: at temperature above 0 one for each position in ascending order.
    pub fn step(&mut self, view: &StepView<'_>, uniforms: &mut dyn Uniforms) -> Result<StepRecord, StepError> {
        if self.status != Status::Running {
            return Err(StepError::Ended);
        }
        if self.needs_logits() && matches!(view, StepView::Candidates(_)) {
            return Err(StepError::NeedsLogits);
        }
        let scores = Scores::new(view, &self.block)?;
        let record = match &mut self.machine {
            Machine::V20(machine) => machine.step(&mut self.block, &scores, uniforms),
            Machine::V21(machine) => machine.step(&mut self.block, &scores, uniforms),
            Machine::V22(machine) => machine.step(&mut self.block, &scores, uniforms),
            Machine::Constrained(machine) => machine.step(&mut self.block, &scores, uniforms)?,
        };
        self.block.steps += 1;
        self.status = if self.machine.is_settled() { Status::Done } else { self.machine.head(&self.block) };
        Ok(record)
    }
}

impl Machine {
    /// Whether the last step ended the block.
    fn is_settled(&self) -> bool {
        match self {
            Self::V20(_) | Self::Constrained(_) => false,
            Self::V21(machine) => machine.is_settled(),
            Self::V22(machine) => machine.is_settled(),
        }
    }

    /// What an algorithm decides before a forward.
    fn head(&mut self, block: &Block) -> Status {
        match self {
            Self::V20(machine) => machine.head(block),
            Self::V21(machine) => machine.head(block),
            Self::V22(machine) => machine.head(block),
            Self::Constrained(machine) => machine.head(block),
        }
    }
}

impl Block {
    /// Positions that are masked and wanted.
    fn masks(&self) -> Vec<usize> {
        (0..self.tokens.len()).filter(|&i| self.tokens[i] == self.special.mask && !self.given[i]).collect()
    }

    /// Ids that may not be candidates at all. The reference forbids none; a server, which must end with a block it can
    /// publish, forbids all three. (LLaDA2.2 forbids them in final rounds only and has its own rule.)
    fn banned(&self) -> Vec<u32> {
        match self.options.on_limit {
            OnLimit::Error => Vec::new(),
            OnLimit::Force => self.special.edits().chain([self.special.mask]).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use minnow_common::random::{keyed, unit_interval};

    const SPECIAL: SpecialIds = SpecialIds { mask: 31, delete: Some(29), split: Some(28) };

    /// Seeded logits that depend on the tokens, with likely masks and edits.
    fn logits(tokens: &[u32], seed: u64) -> Vec<f32> {
        let state = keyed(seed, &tokens.iter().map(|&token| u64::from(token)).collect::<Vec<_>>());
        let entry = |i: usize, v: usize| (unit_interval(keyed(state, &[i as u64, v as u64])) * 8.0) as f32;
        let boost = |v: usize| if v >= 28 { 1.0 } else { 0.0 };
        (0..tokens.len()).flat_map(|i| (0..32).map(move |v| entry(i, v) + boost(v))).collect()
    }

    fn run(options: Options, tokens: &[u32], seed: u64) -> (Vec<u32>, usize) {
        let mut decoder = BlockDecoder::new(tokens.to_vec(), options, SPECIAL).unwrap();
        let mut uniforms = KeyedUniforms { seed, choice: 0, block: 0 };
        while let Next::Forward { tokens, .. } = decoder.next() {
            let values = logits(tokens, seed);
            decoder.step(&StepView::Logits { values: &values, vocab: 32 }, &mut uniforms).unwrap();
        }
        assert_eq!(decoder.next(), Next::Done);
        (decoder.tokens().to_vec(), decoder.steps())
    }

    #[test]
    fn a_forced_block_always_ends_in_time_without_control_tokens_and_the_same_way_twice() {
        for seed in 0..300 {
            for algorithm in [Algorithm::V20, Algorithm::V21, Algorithm::V22] {
                let mut options = Options::serving(algorithm);
                options.steps = 1 + (seed % 9) as usize;
                options.max_post_steps = (seed % 5) as usize;
                options.max_steps_per_block = if algorithm == Algorithm::V20 { 1000 } else { 12 };
                options.temperature = if seed % 2 == 0 { 0.0 } else { 0.9 };
                options.top_k = (seed % 7) as usize;
                options.anti_loop = if seed % 3 == 0 { AntiLoop::Random } else { AntiLoop::Lowest };
                let given = (seed % 4) as usize;
                let mut tokens = vec![31; 8];
                tokens[..given].copy_from_slice(&[1, 2, 3][..given]);
                let (result, steps) = run(options, &tokens, seed);
                assert!(result.iter().all(|&token| SPECIAL.name(token).is_none()), "{algorithm} {seed}: {result:?}");
                assert_eq!(result[..given], tokens[..given], "given tokens stay");
                assert!(steps <= options.max_steps_per_block, "{algorithm} {seed}: {steps}");
                assert_eq!((result, steps), run(options, &tokens, seed));
            }
        }
    }

    #[test]
    fn a_block_counts_as_forced_only_if_the_limit_ended_it() {
        for algorithm in [Algorithm::V21, Algorithm::V22] {
            let mut forced = [0; 2];
            for seed in 0..40 {
                for (count, steps) in forced.iter_mut().zip([3, 1000]) {
                    let options = Options { max_steps_per_block: steps, ..Options::serving(algorithm) };
                    let mut decoder = BlockDecoder::new(vec![31; 8], options, SPECIAL).unwrap();
                    let mut uniforms = KeyedUniforms { seed, choice: 0, block: 0 };
                    while let Next::Forward { tokens, .. } = decoder.next() {
                        let values = logits(tokens, seed);
                        let view = StepView::Logits { values: &values, vocab: 32 };
                        let record = decoder.step(&view, &mut uniforms).unwrap();
                        assert!(!record.is_forced || decoder.next() == Next::Done);
                        *count += usize::from(record.is_forced);
                    }
                }
            }
            assert!(forced[0] > 20 && forced[1] == 0, "{algorithm}: {forced:?}");
        }
    }

    #[test]
    fn candidates_are_enough_at_temperature_0() {
        for seed in 0..100 {
            for algorithm in [Algorithm::V20, Algorithm::V21, Algorithm::V22] {
                let mut options = Options::serving(algorithm);
                options.max_post_steps = 4;
                let expected = run(options, &[31; 8], seed);
                let mut decoder = BlockDecoder::new(vec![31; 8], options, SPECIAL).unwrap();
                let mut uniforms = KeyedUniforms { seed, choice: 0, block: 0 };
                while let Next::Forward { tokens, needs_logits } = decoder.next() {
                    assert!(!needs_logits);
                    let rows: Vec<_> = logits(tokens, seed).chunks(32).map(Candidates::from_logits).collect();
                    decoder.step(&StepView::Candidates(&rows), &mut uniforms).unwrap();
                }
                assert_eq!((decoder.tokens().to_vec(), decoder.steps()), expected);
            }
        }
    }

    #[test]
    fn what_cannot_be_decoded_is_refused() {
        let options = Options::serving(Algorithm::V22);
        let refused = BlockDecoder::new(vec![1, 29, 31], options, SPECIAL).unwrap_err();
        assert_eq!(refused.to_string(), "token 29 at index 1 of the block is the delete token, which may not be given");

        let mut uniforms = KeyedUniforms { seed: 0, choice: 0, block: 0 };
        let mut decoder = BlockDecoder::new(vec![31; 2], options, SPECIAL).unwrap();
        let row = [0.0; 32];
        let short = decoder.step(&StepView::Logits { values: &row, vocab: 32 }, &mut uniforms);
        assert_eq!(short, Err(StepError::Positions { expected: 2, found: 1 }));
        let nan = [f32::NAN; 64];
        let broken = decoder.step(&StepView::Logits { values: &nan, vocab: 32 }, &mut uniforms);
        assert_eq!(broken, Err(StepError::NotFinite { position: 0 }));
        let sampled = Options { temperature: 1.0, ..options };
        let mut decoder = BlockDecoder::new(vec![31], sampled, SPECIAL).unwrap();
        let rows = [Candidates::from_logits(&row)];
        assert_eq!(decoder.step(&StepView::Candidates(&rows), &mut uniforms), Err(StepError::NeedsLogits));
        let mut decoder = BlockDecoder::new(vec![1], options, SPECIAL).unwrap();
        assert_eq!(decoder.step(&StepView::Candidates(&rows), &mut uniforms), Err(StepError::Ended));
    }
}
