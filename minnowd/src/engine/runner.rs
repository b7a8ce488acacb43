//! One request on one backend, step by step: carries out what the decoder's [`Generation`] asks for.
//!
//! No queue, no thread, no text: the engine's thread, `minnowd generate` and `minnowd eval` all drive requests with it.
//! The K/V of the active block are staged in the page that the block will keep; a commit that can reuse them is only
//! bookkeeping, a refresh is one more forward into the same page.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use minnow_common::BLOCK;

use super::job::{BlockStats, JobError, JobStats};
use crate::cache::{PageId, PagePool, PoolError};
use crate::decoder::{Action, CommitKind, FinishReason, Generation, GenerationError, Options, SpecialIds, StepView};
use crate::model::{Backend, Batch, ModelError, Need, Output, Segment};

/// Blocks of prompt evaluated together: cancellation and progress are looked at in between.
const PREFILL_BLOCKS_MAX: usize = 16;

/// A backend with its pages and the token ids its decoder treats specially.
pub struct Runner {
    backend: Box<dyn Backend>,
    pool: PagePool,
    special: SpecialIds,
}

/// What to generate.
#[derive(Clone, Debug)]
pub struct Task {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most.
    pub max_new: usize,
    /// Decoding options.
    pub options: Options,
    /// Seed of every random choice.
    pub seed: u64,
    /// Ids that end the output, the id itself included.
    pub stop_ids: Arc<[u32]>,
}

/// What has just happened.
#[derive(Clone, Copy, Debug)]
pub enum Progress<'a> {
    /// Some forward ended; said before anything else about it.
    Forward,
    /// Part of the prompt has been read.
    Prefilled {
        /// Prompt tokens read so far.
        processed: usize,
        /// Prompt tokens in all.
        total: usize,
    },
    /// The active block was refined once more.
    Step {
        /// The block so far.
        block: BlockStats,
    },
    /// A block became final.
    Block {
        /// The tokens it added to the output.
        tokens: &'a [u32],
        /// How it was made.
        block: BlockStats,
    },
}

/// Why the observer wants no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Nobody waits for the output.
    Cancelled,
    /// The text ended: finish with reason `stop`.
    Text,
}

/// Sees progress and says whether to go on.
pub type Observer<'a> = dyn FnMut(Progress<'_>) -> ControlFlow<Stop> + 'a;

/// An observer that always goes on.
pub fn proceed(_: Progress<'_>) -> ControlFlow<Stop> {
    ControlFlow::Continue(())
}

/// A finished task.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Why it ended.
    pub reason: FinishReason,
    /// Generated tokens, cut at the limit and after the first stop id.
    pub tokens: Vec<u32>,
    /// Sums; queue time and text tokens are left to the caller.
    pub stats: JobStats,
}

impl Runner {
    /// A runner with all pages of `backend` free.
    #[must_use]
    pub fn new(backend: Box<dyn Backend>, special: SpecialIds) -> Self {
        let pool = PagePool::new(backend.page_count());
        Self { backend, pool, special }
    }

    /// The backend.
    #[must_use]
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Runs a task to its end, or until `observe` breaks. All pages are free again afterwards.
    pub fn run(&mut self, task: &Task, observe: &mut Observer<'_>) -> Result<Outcome, JobError> {
        let stop_ids = &task.stop_ids;
        let generation = Generation::new(&task.prompt, task.max_new, stop_ids, task.options, self.special)
            .map_err(|error| JobError::Invalid(error.to_string()))?;
        let mut run = Run {
            backend: &mut *self.backend,
            pool: &mut self.pool,
            pages: Vec::new(),
            stats: JobStats { prompt_tokens: task.prompt.len(), ..JobStats::default() },
        };
        let outcome = run.generate(generation, task, observe);
        let Run { pages, .. } = run;
        for page in pages {
            // Every page of the list was reserved by this run.
            let released = self.pool.release(page);
            debug_assert!(released.is_ok());
        }
        outcome
    }
}

/// A task while it runs.
struct Run<'a> {
    backend: &'a mut dyn Backend,
    pool: &'a mut PagePool,
    /// Pages of the sequence's blocks so far, the active one included.
    pages: Vec<PageId>,
    stats: JobStats,
}

impl Run<'_> {
    fn generate(
        &mut self,
        mut generation: Generation,
        task: &Task,
        observe: &mut Observer<'_>,
    ) -> Result<Outcome, JobError> {
        let total = task.prompt.len();
        let mut phase_start = Instant::now();
        let mut block_start = phase_start;
        loop {
            match generation.action() {
                Action::Prefill { start, tokens } => {
                    let chunk = tokens.len().min(PREFILL_BLOCKS_MAX * BLOCK);
                    self.reserve_up_to((start + chunk) / BLOCK)?;
                    self.forward(&tokens[..chunk], Need::Nothing)?;
                    go_on(observe, Progress::Forward)?;
                    for block in start / BLOCK..(start + chunk) / BLOCK {
                        self.commit(block)?;
                    }
                    generation.prefilled(chunk);
                    self.stats.prefill = phase_start.elapsed();
                    go_on(observe, Progress::Prefilled { processed: start + chunk, total })?;
                    if !matches!(generation.action(), Action::Prefill { .. }) {
                        phase_start = Instant::now();
                        block_start = phase_start;
                    }
                }
                Action::Refine { start, tokens, needs_logits } => {
                    self.reserve_up_to(start / BLOCK + 1)?;
                    let need = if needs_logits { Need::Logits } else { Need::Candidates };
                    let output = self.forward(tokens, need)?;
                    self.stats.denoise_forwards += 1;
                    go_on(observe, Progress::Forward)?;
                    if self.stats.denoise_forwards == 1 && start < total {
                        // The prompt's partial block is read by the forwards that refine it.
                        go_on(observe, Progress::Prefilled { processed: total, total })?;
                    }
                    let mut uniforms = generation.uniforms(task.seed, 0);
                    let refinement = match &output {
                        Output::Candidates(rows) => generation.refined(&StepView::Candidates(rows), &mut uniforms),
                        Output::Logits(logits) => {
                            let view = StepView::Logits { values: logits.values(), vocab: logits.vocab() };
                            generation.refined(&view, &mut uniforms)
                        }
                        Output::Nothing => return Err(JobError::Model("the backend gave no output".to_owned())),
                    }?;
                    let mut block = BlockStats {
                        index: self.stats.blocks.len(),
                        offset: start,
                        tokens: 0,
                        forwards: refinement.block.forwards,
                        elapsed: block_start.elapsed(),
                    };
                    self.stats.decode = phase_start.elapsed();
                    let Some(finished) = refinement.finished else {
                        go_on(observe, Progress::Step { block })?;
                        continue;
                    };
                    block.tokens = finished.added.len();
                    self.stats.token_edits += refinement.block.token_edits;
                    self.stats.deletes += refinement.block.deletes;
                    self.stats.splits += refinement.block.splits;
                    self.stats.blocks.push(block);
                    let tokens = &generation.completion()[finished.added];
                    match observe(Progress::Block { tokens, block }) {
                        ControlFlow::Continue(()) => {}
                        ControlFlow::Break(Stop::Cancelled) => return Err(JobError::Cancelled),
                        ControlFlow::Break(Stop::Text) => generation.stop(),
                    }
                }
                Action::Commit { start, tokens, kind } => {
                    match kind {
                        CommitKind::Reuse => self.stats.reused_commits += 1,
                        CommitKind::Refresh => {
                            self.forward(tokens, Need::Nothing)?;
                            self.stats.commit_forwards += 1;
                            go_on(observe, Progress::Forward)?;
                        }
                    }
                    self.commit(start / BLOCK)?;
                    generation.committed()?;
                    self.stats.decode = phase_start.elapsed();
                    block_start = Instant::now();
                }
                Action::Finished(reason) => {
                    let tokens = generation.completion().to_vec();
                    let mut stats = std::mem::take(&mut self.stats);
                    stats.completion_tokens = tokens.len();
                    return Ok(Outcome { reason, tokens, stats });
                }
            }
        }
    }

    /// Makes sure that the sequence has pages for its first `blocks` blocks.
    fn reserve_up_to(&mut self, blocks: usize) -> Result<(), JobError> {
        let wanted = blocks.saturating_sub(self.pages.len());
        self.pages.extend(self.pool.reserve(wanted)?);
        Ok(())
    }

    fn commit(&mut self, block: usize) -> Result<(), JobError> {
        Ok(self.pool.commit(self.pages[block])?)
    }

    /// Evaluates the last blocks of the sequence so far.
    fn forward(&mut self, tokens: &[u32], need: Need) -> Result<Output, JobError> {
        self.stats.processed_tokens += tokens.len();
        let segments = [Segment { tokens, pages: &self.pages, need }];
        let outputs = self.backend.forward(&Batch { segments: &segments }, None)?;
        outputs.into_iter().next().ok_or_else(|| JobError::Model("the backend gave no output".to_owned()))
    }
}

fn go_on(observe: &mut Observer<'_>, progress: Progress<'_>) -> Result<(), JobError> {
    match observe(progress) {
        ControlFlow::Continue(()) => Ok(()),
        // Only a finished block can end the text.
        ControlFlow::Break(_) => Err(JobError::Cancelled),
    }
}

impl From<ModelError> for JobError {
    fn from(error: ModelError) -> Self {
        Self::Model(error.to_string())
    }
}

impl From<PoolError> for JobError {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Exhausted { wanted, free, .. } => Self::Capacity { needed: wanted, free },
            other => Self::Model(other.to_string()),
        }
    }
}

impl From<GenerationError> for JobError {
    fn from(error: GenerationError) -> Self {
        match error {
            GenerationError::NotConverged { start, masks, steps } => Self::NotConverged { offset: start, masks, steps },
            other => Self::Model(other.to_string()),
        }
    }
}
