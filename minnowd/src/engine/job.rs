//! What crosses the channel between HTTP and the engine: plain structs, no handles to either side.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;

use super::runner::Task;
use super::view::BlockView;
use crate::decoder::FinishReason;
use crate::text::{Delta, OutputText};

/// One request, ready to run: everything was checked before it was made.
pub struct Job {
    /// What to generate: a prompt shorter than the context and free of mask and edit ids, with checked options.
    pub task: Task,
    /// Turns committed ids into text and tool calls, and says when a stop string ended the output.
    pub text: OutputText,
    /// Whether refinement steps and prompt progress are worth an event.
    pub wants_progress: bool,
    /// Whether what each step does to a block is worth an event.
    pub is_watched: bool,
    /// Where events go. A closed channel means the client went away: the job ends at the next forward.
    pub events: mpsc::Sender<Event>,
    /// Set by anyone who wants the job to end at the next forward.
    pub cancel: Cancel,
}

/// A flag shared by those who may cancel a job and the engine that runs it.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Asks the job to end at its next forward.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether someone asked.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// What happened to a job, in order: `Admitted`, any `Prefilled`, any `Refined`, `Step` and `Block`, then `Finished` or
/// `Failed`.
#[derive(Debug)]
pub enum Event {
    /// The job left the queue.
    Admitted {
        /// Time spent waiting.
        queued: Duration,
        /// Prompt tokens found in the cache.
        cached_tokens: usize,
    },
    /// Part of the prompt has been read. Only with `wants_progress`; dropped when the reader is slow.
    Prefilled {
        /// Prompt tokens read so far, cached ones included.
        processed: usize,
        /// Prompt tokens in all.
        total: usize,
        /// Time since admission.
        elapsed: Duration,
    },
    /// What the forward of the `Step` or `Block` that follows did to the block. Only of watched jobs; dropped when the
    /// reader is slow.
    Refined(Box<BlockView>),
    /// One refinement forward of the active block. Only with `wants_progress`; dropped when the reader is slow.
    Step {
        /// The block being refined.
        block: BlockStats,
    },
    /// A block became final.
    Block {
        /// Text and calls that can be shown now.
        deltas: Vec<Delta>,
        /// How it was made.
        block: BlockStats,
        /// Committed model tokens so far.
        completion_tokens: usize,
        /// Those of them that are not special tokens.
        text_tokens: usize,
    },
    /// The output is complete.
    Finished(Box<Finish>),
    /// The job could not be finished.
    Failed(JobError),
}

/// The end of a successful job.
#[derive(Debug)]
pub struct Finish {
    /// Why it ended.
    pub reason: FinishReason,
    /// Text that was held back until now.
    pub deltas: Vec<Delta>,
    /// Generated ids, cut at the limit and after the first stop id.
    pub tokens: Vec<u32>,
    /// The stop string that ended it, if one did.
    pub stop_string: Option<Box<str>>,
    /// What was malformed in a tool-call section, if anything; its raw text is in the content.
    pub tool_parse_error: Option<String>,
    /// Totals.
    pub stats: JobStats,
}

/// One block's refinement.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BlockStats {
    /// Number of the block among the generated ones, from 0.
    pub index: usize,
    /// Its first absolute position.
    pub offset: usize,
    /// Generated tokens it contributed; 0 until it is final.
    pub tokens: usize,
    /// Forwards that refined it.
    pub forwards: usize,
    /// Time they took.
    pub elapsed: Duration,
}

/// Sums over a job.
#[derive(Clone, Debug, Default)]
pub struct JobStats {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Prompt tokens found in the cache.
    pub cached_tokens: usize,
    /// Committed model tokens, up to and including the end token, never above the limit.
    pub completion_tokens: usize,
    /// Completion tokens that are not special tokens.
    pub text_tokens: usize,
    /// Time in the queue.
    pub queued: Duration,
    /// Time spent reading the prompt.
    pub prefill: Duration,
    /// Time spent refining and committing blocks.
    pub decode: Duration,
    /// Refinement forwards.
    pub denoise_forwards: usize,
    /// Extra forwards that recomputed K/V of a final block.
    pub commit_forwards: usize,
    /// Blocks whose staged K/V could be kept.
    pub reused_commits: usize,
    /// Transformer input positions in all.
    pub processed_tokens: usize,
    /// Refinement forwards of an output that had to stay in a language: all of them, or none.
    pub constrained_forwards: usize,
    /// Tokens that the language left no choice about.
    pub determined_tokens: usize,
    /// Blocks that the step limit ended before they had settled.
    pub forced_blocks: usize,
    /// Time spent looking for known blocks and taking them over.
    pub cache: Duration,
    /// Tokens rewritten after they were first written.
    pub token_edits: usize,
    /// DELETE edits applied.
    pub deletes: usize,
    /// SPLIT edits applied.
    pub splits: usize,
    /// Tokens at the end of the output that are one short unit over and over; 0 for an output without such a loop.
    pub repeated_tokens: usize,
    /// Per block, in order.
    pub blocks: Vec<BlockStats>,
}

impl JobStats {
    /// Leaves out what was spent on the prompt: another answer to it has paid for that.
    pub fn forget_prompt(&mut self) {
        (self.prompt_tokens, self.cached_tokens, self.prefill) = (0, 0, Duration::ZERO);
    }

    /// The sums of several answers to one prompt, in their order. The prompt and its waiting count once; decoding is the
    /// time from the first answer's prefill to the end of the last.
    #[must_use]
    pub fn total<'a>(answers: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut answers = answers.into_iter();
        let mut total = answers.next().cloned().unwrap_or_default();
        let before = total.queued + total.prefill;
        for answer in answers {
            total.decode = total.decode.max((answer.queued + answer.prefill + answer.decode).saturating_sub(before));
            for (sum, part) in [
                (&mut total.completion_tokens, answer.completion_tokens),
                (&mut total.text_tokens, answer.text_tokens),
                (&mut total.denoise_forwards, answer.denoise_forwards),
                (&mut total.commit_forwards, answer.commit_forwards),
                (&mut total.reused_commits, answer.reused_commits),
                (&mut total.processed_tokens, answer.processed_tokens),
                (&mut total.constrained_forwards, answer.constrained_forwards),
                (&mut total.determined_tokens, answer.determined_tokens),
                (&mut total.forced_blocks, answer.forced_blocks),
                (&mut total.repeated_tokens, answer.repeated_tokens),
                (&mut total.token_edits, answer.token_edits),
                (&mut total.deletes, answer.deletes),
                (&mut total.splits, answer.splits),
            ] {
                *sum += part;
            }
            total.cache += answer.cache;
            total.blocks.extend_from_slice(&answer.blocks);
        }
        total
    }

    /// Completion tokens for each refinement forward.
    #[must_use]
    pub fn tokens_per_forward(&self) -> f64 {
        self.completion_tokens as f64 / self.denoise_forwards.max(1) as f64
    }
}

/// Why a job failed after it was accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    /// Someone set [`Cancel`], or the receiver is gone.
    #[error("the request was cancelled")]
    Cancelled,
    /// The prompt or the options cannot be used; whoever made the job should have checked them.
    #[error("{0}")]
    Invalid(String),
    /// A block did not settle within `max_steps_per_block` and `on_limit` is `error`.
    #[error("block at position {offset} has {masks} masks after {steps} steps")]
    NotConverged {
        /// First position of the block.
        offset: usize,
        /// Masks left.
        masks: usize,
        /// Steps taken.
        steps: usize,
    },
    /// The grammar that the output must stay in cannot be followed any further: it is too complex, or nothing that this
    /// vocabulary can write goes on in it.
    #[error("{0}")]
    Grammar(String),
    /// Prompt and output need more pages than the cache has.
    #[error("{needed} pages of 32 positions are needed, but the cache has {free}")]
    Capacity {
        /// Pages needed.
        needed: usize,
        /// Pages there are.
        free: usize,
    },
    /// The model could not run; the engine ends.
    #[error("the model failed: {0}")]
    Model(String),
    /// The job waited longer than jobs may.
    #[error("no slot became free within {:.1} s", waited.as_secs_f64())]
    QueueTimeout {
        /// How long it waited.
        waited: Duration,
    },
    /// The engine is shutting down.
    #[error("the server is shutting down")]
    Draining,
}

/// Why a job was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The queue is full.
    #[error("{queued} requests are already waiting, the limit is {capacity}")]
    QueueFull {
        /// Jobs waiting.
        queued: usize,
        /// The limit.
        capacity: usize,
    },
    /// The model is still being loaded.
    #[error("Loading model")]
    Loading,
    /// The engine is shutting down.
    #[error("the server is shutting down")]
    Draining,
    /// The engine has stopped after a failure.
    #[error("the inference worker has stopped")]
    WorkerFailed,
}
