//! A block between two steps, as a client that watches it is shown it: what stands at each position, how sure the model
//! was of it, and what the step did there.
//!
//! Only made for requests that are watched ([`Runner::watch`](super::runner::Runner::watch)). Others pay one look at a
//! flag for each step.

use super::job::BlockStats;
use crate::decoder::{SpecialIds, StepRecord};
use crate::model::Output;

/// A block after a step.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockView {
    /// The block's numbers so far.
    pub block: BlockStats,
    /// One entry for each position.
    pub cells: Vec<Cell>,
    /// Positions, before the step, whose token was deleted.
    pub deleted: Vec<usize>,
    /// Positions, before the step, in front of which a new mask was opened.
    pub split: Vec<usize>,
    /// Whether the block is final.
    pub is_final: bool,
}

/// What stands at a position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    /// The token; `None` is a mask.
    pub token: Option<u32>,
    /// The probability that the step's forward gave to this token at its place. `None` for masks and given tokens, and
    /// where the token is not among the few best that a greedy step knows.
    pub confidence: Option<f32>,
    /// What the step did there.
    pub change: Change,
}

/// What a step did to a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Part of the prompt, never changed.
    Given,
    /// Nothing.
    Kept,
    /// A mask was filled.
    Filled,
    /// A token was replaced.
    Edited,
    /// A mask was opened: before a split token, or at the end for a deleted one.
    Opened,
}

impl Change {
    /// The word for it in the API.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Given => "given",
            Self::Kept => "kept",
            Self::Filled => "filled",
            Self::Edited => "edited",
            Self::Opened => "opened",
        }
    }
}

impl BlockView {
    /// What `record` did to a block whose first `given` positions belong to the prompt; `output` is the forward it was
    /// decided on. The tokens of the cells are those of `record.output`.
    #[must_use]
    pub fn new(
        block: BlockStats,
        record: &StepRecord,
        given: usize,
        output: &Output,
        special: SpecialIds,
        is_final: bool,
    ) -> Self {
        let cell = |position: usize, token: u32, change: Change| {
            let is_mask = token == special.mask;
            let is_rated = !is_mask && change != Change::Given;
            Cell {
                token: (!is_mask).then_some(token),
                confidence: if is_rated { confidence(output, position, token) } else { None },
                change,
            }
        };
        let opened = Cell { token: None, confidence: None, change: Change::Opened };
        let mut cells = Vec::with_capacity(record.written.len() + record.splits.len());
        for (position, (&written, &before)) in record.written.iter().zip(&record.input).enumerate() {
            if Some(written) == special.split {
                cells.extend([opened, cell(position, before, Change::Kept)]);
            } else if Some(written) != special.delete {
                let change = if position < given {
                    Change::Given
                } else if record.m2t.binary_search(&position).is_ok() {
                    Change::Filled
                } else if record.t2t.binary_search(&position).is_ok() {
                    Change::Edited
                } else {
                    Change::Kept
                };
                cells.push(cell(position, written, change));
            }
        }
        cells.resize(record.written.len(), opened);
        Self { block, cells, deleted: record.deletes.clone(), split: record.splits.clone(), is_final }
    }
}

/// The probability of `token` at a position of the forward.
fn confidence(output: &Output, position: usize, token: u32) -> Option<f32> {
    match output {
        Output::Nothing => None,
        Output::Candidates(rows) => {
            let known = rows.get(position)?.0.iter().find(|candidate| candidate.token == token)?;
            Some(known.confidence)
        }
        Output::Logits(logits) => {
            let row = logits.values().chunks_exact(logits.vocab()).nth(position)?;
            let own = f64::from(*row.get(token as usize)?);
            let total: f64 = row.iter().map(|&logit| (f64::from(logit) - own).exp()).sum();
            Some((1.0 / total) as f32)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::{Algorithm, BlockDecoder, Candidate, Candidates, KeyedUniforms, Next, Options, StepView};
    use crate::model::Logits;
    use minnow_common::random::{keyed, unit_interval};

    const SPECIAL: SpecialIds = SpecialIds { mask: 31, delete: Some(29), split: Some(28) };

    #[test]
    fn cells_hold_the_block_after_each_step_whatever_was_edited() {
        let (mut deleted, mut split) = (0, 0);
        for seed in 0..200u64 {
            for algorithm in [Algorithm::V20, Algorithm::V21, Algorithm::V22] {
                let mut options = Options::serving(algorithm);
                options.temperature = if seed % 2 == 0 { 0.0 } else { 0.8 };
                let mut tokens = vec![SPECIAL.mask; 8];
                tokens[0] = 7;
                let mut decoder = BlockDecoder::new(tokens, options, SPECIAL).unwrap();
                let mut uniforms = KeyedUniforms { seed, choice: 0, block: 0 };
                while let Next::Forward { tokens, .. } = decoder.next() {
                    let state = keyed(seed, &tokens.iter().map(|&token| u64::from(token)).collect::<Vec<_>>());
                    let values: Vec<f32> =
                        (0..8 * 32).map(|i| (unit_interval(keyed(state, &[i])) * 8.0) as f32).collect();
                    let record = decoder.step(&StepView::Logits { values: &values, vocab: 32 }, &mut uniforms).unwrap();
                    let output = Output::Logits(Logits::new(32, values));
                    let view = BlockView::new(BlockStats::default(), &record, 1, &output, SPECIAL, false);
                    let shown: Vec<u32> = view.cells.iter().map(|cell| cell.token.unwrap_or(SPECIAL.mask)).collect();
                    assert_eq!(shown, record.output);
                    assert_eq!(view.cells[0], Cell { token: Some(7), confidence: None, change: Change::Given });
                    for cell in &view.cells[1..] {
                        assert_eq!(cell.confidence.is_some(), cell.token.is_some());
                        assert!(cell.confidence.is_none_or(|confidence| confidence > 0.0 && confidence <= 1.0));
                    }
                    deleted += view.deleted.len();
                    split += view.split.len();
                }
            }
        }
        assert!(deleted > 10 && split > 10, "this test must see edits: {deleted} deletes, {split} splits");
    }

    #[test]
    fn a_greedy_step_knows_the_confidence_of_its_candidates_only() {
        let best = |token| Candidate { token, confidence: 0.5 };
        let output = Output::Candidates(vec![Candidates([best(3), best(4), best(5), best(6)])]);
        assert_eq!(confidence(&output, 0, 5), Some(0.5));
        assert_eq!(confidence(&output, 0, 9), None);
        assert_eq!(confidence(&Output::Nothing, 0, 5), None);
    }
}
