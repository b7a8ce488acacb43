//! Many requests on one backend, step by step: carries out what their decoders ask for, as the scheduler arranges it.
//!
//! No thread, no channel, no text: the engine's thread, `minnowd generate`, `minnowd eval` and tests drive requests with
//! it. A request's result depends on its [`Task`] only: neither on what else runs, nor on when it was submitted, how its
//! prompt was cut, what the cache held, or whether it had to give way for a while.
//!
//! K/V of an active block are staged in the page that the block will keep; a commit that can reuse them is only
//! bookkeeping, a refresh is one more forward into the same page.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use minnow_common::BLOCK;

use super::job::{BlockStats, JobError, JobStats};
use super::repetition::repeated_tail;
use super::view::BlockView;
use crate::cache::{Access, BlockTokens, CacheStats, Found, PageId, PrefixCache, Sequence};
use crate::decoder::{
    Action, CommitKind, FinishReason, Generation, GenerationError, Language, Options, SpecialIds, StepError, StepView,
};
use crate::model::{Backend, Batch, ModelError, Need, Output, Segment};
use crate::persist::{LoadReport, Loader};
pub use crate::scheduler::{Limits, RequestId};
use crate::scheduler::{Phase, Plan, Scheduler};

/// A backend, the cache of its pages, and the requests that share both.
pub struct Runner {
    backend: Box<dyn Backend>,
    cache: PrefixCache,
    scheduler: Scheduler,
    special: SpecialIds,
    requests: BTreeMap<RequestId, Request>,
    arrivals: u64,
    counters: Counters,
    /// How long every forward waits before it begins.
    step_delay: Duration,
    forwards_max: u64,
    /// Blocks of an earlier process that are still to be read.
    restoring: Option<Loader>,
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
    /// Whether blocks of others may be reused, and these be offered to others.
    pub cache: Access,
    /// What the output must stay in, at its beginning; `None` is anything.
    pub language: Option<Box<dyn Language>>,
}

/// Something that happened to a request.
#[derive(Clone, Debug)]
pub struct Report {
    /// Which one.
    pub id: RequestId,
    /// What.
    pub progress: Progress,
}

/// What happened: `Started`, any `Prefilled`, any `Refined`, `Step` and `Block`, then `Finished` or `Failed`.
#[derive(Clone, Debug)]
pub enum Progress {
    /// The request left the queue.
    Started {
        /// Prompt tokens found in the cache.
        cached_tokens: usize,
    },
    /// Part of the prompt has been read.
    Prefilled {
        /// Prompt tokens read so far, cached ones included.
        processed: usize,
        /// Prompt tokens in all.
        total: usize,
    },
    /// What the `Step` or `Block` that follows did. Only of watched requests.
    Refined(Box<BlockView>),
    /// The active block was refined once more.
    Step {
        /// The block so far.
        block: BlockStats,
    },
    /// A block became final. A caller whose text ends in it calls [`Runner::stop`] before the next step.
    Block {
        /// The tokens it added to the output.
        tokens: Vec<u32>,
        /// How it was made.
        block: BlockStats,
    },
    /// The output is complete.
    Finished(Outcome),
    /// The request cannot be finished; others can.
    Failed(JobError),
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

/// Sequences in a forward that [`Counters::batch_sizes`] tells apart.
pub const BATCH_SIZE_BOUNDS: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

/// What the runner has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Forwards.
    pub forwards: u64,
    /// Sequences in those forwards.
    pub sequence_forwards: u64,
    /// Most sequences in one forward.
    pub batch_max: usize,
    /// Forwards by the number of sequences in them: those above the bound before and up to this one of
    /// [`BATCH_SIZE_BOUNDS`], then those above all bounds. They add up to `forwards`.
    pub batch_sizes: [u64; BATCH_SIZE_BOUNDS.len() + 1],
    /// Requests that had to give way because pages ran out.
    pub preemptions: u64,
}

impl Counters {
    fn forwarded(&mut self, sequences: usize) {
        self.forwards += 1;
        self.sequence_forwards += sequences as u64;
        self.batch_max = self.batch_max.max(sequences);
        self.batch_sizes[BATCH_SIZE_BOUNDS.partition_point(|bound| *bound < sequences)] += 1;
    }
}

/// A request, waiting or running.
struct Request {
    task: Task,
    /// The first of the requests that answer one prompt; itself where there is one answer.
    first: RequestId,
    generation: Generation,
    /// Its pages; `None` while it waits.
    sequence: Option<Sequence>,
    stats: JobStats,
    is_held: bool,
    /// Whether what each step did is reported.
    is_watched: bool,
    /// Whether it was started before: it may have had to give way.
    is_started: bool,
    /// Prompt tokens last reported as read.
    processed: usize,
    /// When it started, and when its first block began.
    started: Instant,
    refining_since: Option<Instant>,
    block_since: Instant,
}

/// A request's part of a forward.
struct Share {
    id: RequestId,
    tokens: Vec<u32>,
    pages: Vec<PageId>,
    need: Need,
}

impl Runner {
    /// A runner with all pages of `backend` free.
    #[must_use]
    pub fn new(backend: Box<dyn Backend>, special: SpecialIds, limits: Limits) -> Self {
        Self {
            cache: PrefixCache::new(backend.page_count()),
            backend,
            scheduler: Scheduler::new(limits),
            special,
            requests: BTreeMap::new(),
            arrivals: 0,
            counters: Counters::default(),
            step_delay: Duration::ZERO,
            forwards_max: u64::MAX,
            restoring: None,
        }
    }

    /// The backend.
    #[must_use]
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// The cache of its pages.
    #[must_use]
    pub fn cache(&self) -> &PrefixCache {
        &self.cache
    }

    /// Makes every forward wait before it begins, so that a fast model shows what a slow one would.
    pub fn delay_steps(&mut self, delay: Duration) {
        self.step_delay = delay;
    }

    /// Panics in the forward after so many, so that tests see what happens then.
    pub fn fail_after(&mut self, forwards: u64) {
        self.forwards_max = forwards;
    }

    /// Takes over the blocks that an earlier process saved: a few between steps, more when there is nothing to do.
    pub fn restore(&mut self, loader: Loader) {
        self.restoring = Some(loader);
    }

    /// Reads up to `blocks` saved blocks. Gives the report once all are read, or no page is left for them.
    pub fn restore_some(&mut self, blocks: usize) -> Option<LoadReport> {
        let loader = self.restoring.as_mut()?;
        loader.load(blocks, &mut self.cache, &mut *self.backend).end.as_ref()?;
        self.restoring.take().map(Loader::into_report)
    }

    /// Whether saved blocks are still to be read.
    #[must_use]
    pub fn is_restoring(&self) -> bool {
        self.restoring.is_some()
    }

    /// What has been done so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// What the cache has done so far.
    #[must_use]
    pub fn cache_stats(&self) -> CacheStats {
        self.cache.stats()
    }

    /// Pages in use by requests, known to the cache only, and in all.
    #[must_use]
    pub fn pages(&self) -> Pages {
        let idle = self.cache.idle_count();
        Pages { running: self.cache.used_count(), idle, total: self.cache.page_count() }
    }

    /// Requests waiting.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.scheduler.waiting()
    }

    /// Requests running.
    #[must_use]
    pub fn running(&self) -> usize {
        self.scheduler.running()
    }

    /// Puts a task into the queue. Refused are prompts that may not be continued and tasks that the whole cache could
    /// not hold.
    pub fn submit(&mut self, task: Task) -> Result<RequestId, JobError> {
        self.submit_beside(task, None)
    }

    /// Puts a further answer to the prompt of `first` into the queue. What one of them has read of the prompt, the others
    /// take over, also where [`Access::Private`] keeps it from everyone else. Otherwise they are requests like any other.
    ///
    /// # Panics
    /// If `first` has another prompt.
    pub fn submit_choice(&mut self, task: Task, first: RequestId) -> Result<RequestId, JobError> {
        self.submit_beside(task, Some(first))
    }

    fn submit_beside(&mut self, task: Task, first: Option<RequestId>) -> Result<RequestId, JobError> {
        if let Some(request) = first.and_then(|first| self.requests.get(&first)) {
            assert_eq!(request.task.prompt, task.prompt, "choices have one prompt");
        }
        let generation = Generation::new(&task.prompt, task.max_new, &task.stop_ids, task.options, self.special)
            .map_err(|error| JobError::Invalid(error.to_string()))?;
        let generation = match &task.language {
            Some(language) => generation.within(language.clone()),
            None => generation,
        };
        let needed = generation.end_max() / BLOCK;
        if needed > self.cache.page_count() {
            return Err(JobError::Capacity { needed, free: self.cache.page_count() });
        }
        let id = RequestId(self.arrivals);
        self.arrivals += 1;
        self.scheduler.enqueue(id);
        let now = Instant::now();
        let stats = JobStats { prompt_tokens: task.prompt.len(), ..JobStats::default() };
        let request = Request {
            first: first.unwrap_or(id),
            task,
            generation,
            sequence: None,
            stats,
            is_held: false,
            is_watched: false,
            is_started: false,
            processed: 0,
            started: now,
            refining_since: None,
            block_since: now,
        };
        self.requests.insert(id, request);
        Ok(id)
    }

    /// Ends a request's output after the blocks finished so far: its text ended. Blocks from index `visible` of the
    /// output on, not all of which the client has seen, are not offered to others.
    pub fn stop(&mut self, id: RequestId, visible: usize) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        request.generation.stop();
        if let Some(sequence) = &mut request.sequence {
            let visible = (request.task.prompt.len() / BLOCK + visible).min(sequence.committed());
            self.cache.withdraw(sequence, visible);
        }
    }

    /// Forgets a request; its pages are free, or the cache's.
    pub fn cancel(&mut self, id: RequestId) {
        self.scheduler.remove(id);
        if let Some(Request { sequence: Some(sequence), .. }) = self.requests.remove(&id) {
            self.cache.release(sequence);
        }
    }

    /// Reports what each step does to the request's blocks from now on.
    pub fn watch(&mut self, id: RequestId) {
        if let Some(request) = self.requests.get_mut(&id) {
            request.is_watched = true;
        }
    }

    /// Leaves a request out of steps, or takes it in again: its client is slow.
    pub fn hold(&mut self, id: RequestId, is_held: bool) {
        if let Some(request) = self.requests.get_mut(&id) {
            request.is_held = is_held;
        }
    }

    /// Does what is due: first whatever needs no forward, and if that has nothing to report, one forward of everyone
    /// whose turn it is. No report and no forward means that there is nothing to do.
    ///
    /// # Errors
    /// If the backend fails. No request can go on then.
    pub fn step(&mut self) -> Result<Step, ModelError> {
        let mut reports = Vec::new();
        self.settle(&mut reports);
        self.start_waiting(&mut reports);
        if !reports.is_empty() {
            return Ok(Step { reports, is_idle: false });
        }
        let plan = self.plan();
        if plan.is_empty() {
            return Ok(Step { reports, is_idle: true });
        }
        let since = Instant::now();
        self.forward(&plan, &mut reports)?;
        self.scheduler.measured(&plan, since.elapsed().as_secs_f64());
        Ok(Step { reports, is_idle: false })
    }

    /// Runs one task to its end, with nothing else beside it, or until `observe` breaks.
    pub fn run(
        &mut self,
        task: Task,
        observe: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<Outcome, JobError> {
        let id = self.submit(task)?;
        loop {
            let step = self.step()?;
            for Report { progress, .. } in step.reports {
                if observe(&progress).is_break() {
                    self.cancel(id);
                    return Err(JobError::Cancelled);
                }
                match progress {
                    Progress::Finished(outcome) => return Ok(outcome),
                    Progress::Failed(error) => return Err(error),
                    _ => {}
                }
            }
        }
    }

    /// Carries out everything that needs no forward, and tells the scheduler what is needed next.
    fn settle(&mut self, reports: &mut Vec<Report>) {
        let running: Vec<RequestId> =
            self.requests.iter().filter(|(_, request)| request.sequence.is_some()).map(|(id, _)| *id).collect();
        for id in running {
            match self.settle_one(id) {
                Ok(Some(phase)) => self.scheduler.set_phase(id, phase),
                Ok(None) => self.end(id, reports),
                Err(error) => {
                    self.cancel(id);
                    reports.push(Report { id, progress: Progress::Failed(error) });
                }
            }
        }
    }

    /// What a running request needs next; `None` if it is finished.
    fn settle_one(&mut self, id: RequestId) -> Result<Option<Phase>, JobError> {
        self.follow(id);
        let Some(request) = self.requests.get_mut(&id) else { return Ok(None) };
        loop {
            let Some(sequence) = &mut request.sequence else { return Ok(None) };
            let phase = match request.generation.action() {
                Action::Prefill { tokens, .. } => {
                    let since = Instant::now();
                    let found = self.cache.extend(sequence, tokens);
                    request.stats.cache += since.elapsed();
                    if found > 0 {
                        request.has_prefilled(found * BLOCK);
                        continue;
                    }
                    Phase::Prefill { blocks: tokens.len() / BLOCK }
                }
                Action::Refine { start, .. } | Action::Commit { start, kind: CommitKind::Refresh, .. } => {
                    Phase::Block { needs_page: sequence.pages().len() <= start / BLOCK }
                }
                Action::Commit { tokens, kind: CommitKind::Reuse, .. } => {
                    self.cache.commit(sequence, block(tokens)?);
                    request.stats.reused_commits += 1;
                    request.generation.committed()?;
                    request.block_since = Instant::now();
                    continue;
                }
                Action::Finished(_) => return Ok(None),
            };
            return Ok(Some(if request.is_held { Phase::Held } else { phase }));
        }
    }

    /// Takes over what another answer to the same private prompt has read of it.
    fn follow(&mut self, id: RequestId) {
        let Some(request) = self.requests.get(&id) else { return };
        if request.task.cache == Access::Shared || !matches!(request.generation.action(), Action::Prefill { .. }) {
            return;
        }
        let blocks = request.task.prompt.len() / BLOCK;
        let Some(mut sequence) = self.requests.get_mut(&id).and_then(|request| request.sequence.take()) else { return };
        let found = match Self::furthest_choice(&self.requests, id) {
            Some(other) => self.cache.follow(&mut sequence, other, blocks),
            None => 0,
        };
        let Some(request) = self.requests.get_mut(&id) else { return };
        request.sequence = Some(sequence);
        if found > 0 {
            request.has_prefilled(found * BLOCK);
        }
    }

    /// Of the other answers to the prompt of request `id`, the one that has read most of it.
    fn furthest_choice(requests: &BTreeMap<RequestId, Request>, id: RequestId) -> Option<&Sequence> {
        let first = requests.get(&id)?.first;
        let others = requests.iter().filter(|(other, request)| **other != id && request.first == first);
        others.filter_map(|(_, request)| request.sequence.as_ref()).max_by_key(|sequence| sequence.committed())
    }

    /// Ends a finished request.
    fn end(&mut self, id: RequestId, reports: &mut Vec<Report>) {
        self.scheduler.remove(id);
        let Some(mut request) = self.requests.remove(&id) else { return };
        if let Some(mut sequence) = request.sequence.take() {
            if let Some(Ok(tokens)) = request.generation.kept_block().map(block)
                && sequence.pages().len() > sequence.committed()
            {
                self.cache.commit(&mut sequence, tokens);
            }
            self.cache.release(sequence);
        }
        let Action::Finished(reason) = request.generation.action() else { return };
        let tokens = request.generation.completion().to_vec();
        request.stats.completion_tokens = tokens.len();
        let ended = tokens.last().is_some_and(|last| request.task.stop_ids.contains(last));
        request.stats.repeated_tokens = repeated_tail(&tokens[..tokens.len() - usize::from(ended)]);
        let outcome = Outcome { reason, tokens, stats: request.stats };
        reports.push(Report { id, progress: Progress::Finished(outcome) });
    }

    /// Starts waiting requests as long as there are slots and pages.
    fn start_waiting(&mut self, reports: &mut Vec<Report>) {
        while let Some(id) = self.scheduler.next_to_start() {
            let Some(request) = self.requests.get(&id) else {
                self.scheduler.remove(id);
                continue;
            };
            let prefill = request.generation.prefill();
            let found = match request.task.cache {
                Access::Shared => self.cache.find(prefill),
                Access::Private => {
                    let known = Self::furthest_choice(&self.requests, id).map_or(0, Sequence::committed);
                    Found { blocks: known.min(request.task.prompt.len() / BLOCK), idle: 0 }
                }
            };
            let wanted = prefill.len() / BLOCK - found.blocks + 1;
            if !self.scheduler.has_room(wanted, self.cache.available() - found.idle) {
                return;
            }
            let Some(request) = self.requests.get_mut(&id) else { return };
            let prefill = request.generation.prefill();
            let since = Instant::now();
            let sequence = self.cache.begin(prefill, request.task.cache);
            request.stats.cache += since.elapsed();
            let reused = sequence.committed() * BLOCK;
            if reused > 0 {
                request.generation.prefilled(reused);
            }
            request.sequence = Some(sequence);
            // What it needs is said when it is settled, before the next plan.
            let started = self.scheduler.start(Phase::Held);
            debug_assert_eq!(started, id);
            if !std::mem::replace(&mut request.is_started, true) {
                request.started = Instant::now();
                request.block_since = request.started;
                request.stats.cached_tokens = reused;
                request.processed = reused;
                reports.push(Report { id, progress: Progress::Started { cached_tokens: reused } });
            }
            if let Ok(Some(phase)) = self.settle_one(id) {
                self.scheduler.set_phase(id, phase);
            }
        }
    }

    /// Chooses the next step; whoever has to give way for it does.
    fn plan(&mut self) -> Plan {
        loop {
            let plan = self.scheduler.plan(self.cache.available());
            let Some(id) = plan.preempt else { return plan };
            self.scheduler.preempted(id);
            self.counters.preemptions += 1;
            if let Some(request) = self.requests.get_mut(&id) {
                request.generation.rewind();
                if let Some(sequence) = request.sequence.take() {
                    self.cache.release(sequence);
                }
            }
            if self.scheduler.running() == 0 {
                return Plan::default();
            }
        }
    }

    /// Evaluates everything in the plan together.
    fn forward(&mut self, plan: &Plan, reports: &mut Vec<Report>) -> Result<(), ModelError> {
        let mut shares = Vec::with_capacity(plan.blocks.len() + 1);
        let chunks = plan.blocks.iter().map(|id| (*id, 1)).chain(plan.prefill);
        for (id, blocks) in chunks {
            match self.share(id, blocks) {
                Ok(share) => shares.extend(share),
                Err(error) => {
                    self.cancel(id);
                    reports.push(Report { id, progress: Progress::Failed(error) });
                }
            }
        }
        let segments: Vec<Segment<'_>> = shares
            .iter()
            .map(|share| Segment { tokens: &share.tokens, pages: &share.pages, need: share.need })
            .collect();
        assert!(self.counters.forwards < self.forwards_max, "the number of forwards after which to fail was reached");
        if !self.step_delay.is_zero() {
            std::thread::sleep(self.step_delay);
        }
        let outputs = self.backend.forward(&Batch { segments: &segments }, None)?;
        self.counters.forwarded(shares.len());
        for (share, output) in shares.iter().zip(outputs) {
            if let Err(error) = self.take(share, output, reports) {
                self.cancel(share.id);
                reports.push(Report { id: share.id, progress: Progress::Failed(error) });
            }
        }
        Ok(())
    }

    /// What a request contributes to the forward: at most `blocks` blocks of prompt, or its active block.
    fn share(&mut self, id: RequestId, blocks: usize) -> Result<Option<Share>, JobError> {
        let Some(request) = self.requests.get_mut(&id) else { return Ok(None) };
        let Some(sequence) = &mut request.sequence else { return Ok(None) };
        let (start, tokens, need) = match request.generation.action() {
            Action::Prefill { start, tokens } => (start, &tokens[..tokens.len().min(blocks * BLOCK)], Need::Nothing),
            Action::Refine { start, tokens, needs_logits: false } => (start, tokens, Need::Candidates),
            Action::Refine { start, tokens, needs_logits: true } => (start, tokens, Need::Logits),
            Action::Commit { start, tokens, .. } => (start, tokens, Need::Nothing),
            Action::Finished(_) => return Ok(None),
        };
        let end = (start + tokens.len()) / BLOCK;
        let tokens = tokens.to_vec();
        self.cache
            .reserve_up_to(sequence, end)
            .map_err(|error| JobError::Capacity { needed: error.wanted, free: error.free + error.evictable })?;
        request.stats.processed_tokens += tokens.len();
        Ok(Some(Share { id, tokens, pages: sequence.pages()[..end].to_vec(), need }))
    }

    /// Takes what a forward said about a request's share.
    fn take(&mut self, share: &Share, output: Output, reports: &mut Vec<Report>) -> Result<(), JobError> {
        let id = share.id;
        let Some(request) = self.requests.get_mut(&id) else { return Ok(()) };
        let Some(sequence) = &mut request.sequence else { return Ok(()) };
        match request.generation.action() {
            Action::Prefill { .. } => {
                for tokens in share.tokens.chunks_exact(BLOCK) {
                    self.cache.commit(sequence, block(tokens)?);
                }
                let processed = (sequence.committed() * BLOCK).min(request.task.prompt.len());
                request.has_prefilled(share.tokens.len());
                request.read(id, processed, reports);
            }
            Action::Commit { tokens, .. } => {
                self.cache.commit(sequence, block(tokens)?);
                request.stats.commit_forwards += 1;
                request.generation.committed()?;
                request.stats.decode = request.refining_since.map_or_else(Default::default, |since| since.elapsed());
                request.block_since = Instant::now();
            }
            Action::Refine { .. } => request.refine(id, output, self.special, reports)?,
            Action::Finished(_) => {}
        }
        Ok(())
    }

    /// Checks that pages and holders add up; for tests.
    ///
    /// # Errors
    /// What does not.
    pub fn check(&self) -> Result<(), String> {
        self.cache.check(self.requests.values().filter_map(|request| request.sequence.as_ref()))
    }
}

/// What a step did.
#[derive(Clone, Debug)]
pub struct Step {
    /// What happened to whom.
    pub reports: Vec<Report>,
    /// Whether there was nothing to do: no request, or all are held.
    pub is_idle: bool,
}

/// Pages of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    /// Held by requests.
    pub running: usize,
    /// Held by the cache only.
    pub idle: usize,
    /// In all.
    pub total: usize,
}

impl Request {
    /// Takes note that further positions of the prompt have their K/V, wherever these come from.
    fn has_prefilled(&mut self, positions: usize) {
        self.generation.prefilled(positions);
        self.stats.prefill = self.started.elapsed();
        self.block_since = Instant::now();
    }

    /// Reports progress in reading the prompt; never backwards, and not at all if all of it was cached.
    fn read(&mut self, id: RequestId, processed: usize, reports: &mut Vec<Report>) {
        if processed > self.processed {
            self.processed = processed;
            let total = self.task.prompt.len();
            reports.push(Report { id, progress: Progress::Prefilled { processed, total } });
        }
    }

    /// Hands the model's opinion of the active block to the decoder.
    fn refine(
        &mut self,
        id: RequestId,
        output: Output,
        special: SpecialIds,
        reports: &mut Vec<Report>,
    ) -> Result<(), JobError> {
        let refining_since = *self.refining_since.get_or_insert(self.block_since);
        let mut uniforms = self.generation.uniforms(self.task.seed, 0);
        let refinement = match &output {
            Output::Candidates(rows) => self.generation.refined(&StepView::Candidates(rows), &mut uniforms),
            Output::Logits(logits) => {
                let view = StepView::Logits { values: logits.values(), vocab: logits.vocab() };
                self.generation.refined(&view, &mut uniforms)
            }
            Output::Nothing => return Err(JobError::Model("the backend gave no output".to_owned())),
        }?;
        self.stats.denoise_forwards += 1;
        self.stats.constrained_forwards += usize::from(self.task.language.is_some());
        self.stats.decode = refining_since.elapsed();
        // A partial last block of the prompt is read by the forward that first refines it.
        self.read(id, self.task.prompt.len(), reports);
        let mut block = BlockStats {
            index: self.stats.blocks.len(),
            offset: refinement.block.start,
            tokens: 0,
            forwards: refinement.block.forwards,
            elapsed: self.block_since.elapsed(),
        };
        if let Some(finished) = &refinement.finished {
            block.tokens = finished.added.len();
        }
        if self.is_watched {
            let given = self.task.prompt.len().saturating_sub(block.offset);
            let is_final = refinement.finished.is_some();
            let view = BlockView::new(block, &refinement.record, given, &output, special, is_final);
            reports.push(Report { id, progress: Progress::Refined(Box::new(view)) });
        }
        let Some(finished) = refinement.finished else {
            reports.push(Report { id, progress: Progress::Step { block } });
            return Ok(());
        };
        self.stats.token_edits += refinement.block.token_edits;
        self.stats.deletes += refinement.block.deletes;
        self.stats.splits += refinement.block.splits;
        self.stats.determined_tokens += refinement.block.determined;
        self.stats.forced_blocks += usize::from(refinement.block.is_forced);
        self.stats.blocks.push(block);
        let tokens = self.generation.completion()[finished.added].to_vec();
        reports.push(Report { id, progress: Progress::Block { tokens, block } });
        Ok(())
    }
}

/// A whole block as an array.
fn block(tokens: &[u32]) -> Result<&BlockTokens, JobError> {
    tokens.try_into().map_err(|_| JobError::Model(format!("a block of {} tokens", tokens.len())))
}

impl From<ModelError> for JobError {
    fn from(error: ModelError) -> Self {
        Self::Model(error.to_string())
    }
}

impl From<GenerationError> for JobError {
    fn from(error: GenerationError) -> Self {
        match error {
            GenerationError::NotConverged { start, masks, steps } => Self::NotConverged { offset: start, masks, steps },
            GenerationError::Step { source: StepError::Language(_) | StepError::NothingAllowed { .. }, .. } => {
                Self::Grammar(error.to_string())
            }
            other => Self::Model(other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwards_are_counted_by_their_size() {
        let mut counters = Counters::default();
        for sequences in [1, 1, 2, 3, 4, 5, 256, 257, 1000] {
            counters.forwarded(sequences);
        }
        assert_eq!(counters.batch_sizes, [2, 1, 2, 1, 0, 0, 0, 0, 1, 2]);
        assert_eq!(counters.batch_sizes.iter().sum::<u64>(), counters.forwards);
        assert_eq!((counters.sequence_forwards, counters.batch_max), (1529, 1000));
    }
}
