//! The one thread that owns the model and its cache, and the bounded queue in front of it.
//!
//! HTTP submits [`Job`]s and gets [`Event`]s back; both are plain structs. Jobs run one at a time, in the order they
//! came. A job ends at the next forward after its [`Cancel`] is set or its receiver is dropped. A panic in the thread
//! fails the running and the waiting jobs and is reported by [`EngineHandle::health`]; the process should then end.

mod job;
pub mod runner;

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::error::TrySendError;
use tracing::error;

pub use crate::decoder::FinishReason;
pub use job::{BlockStats, Cancel, Event, Finish, Job, JobError, JobStats, SubmitError};
use runner::{Progress, Runner, Stop, Task};

/// How long a full event channel may block the engine before its client counts as gone.
const BLOCKED_CLIENT_MAX: Duration = Duration::from_secs(60);
/// How often a full event channel is tried again.
const BLOCKED_CLIENT_POLL: Duration = Duration::from_millis(2);

/// What the engine is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The model is being loaded; no job is taken.
    Loading,
    /// Jobs are taken.
    Ready,
    /// Running jobs end, new ones are refused.
    Draining,
    /// The thread has failed and will not come back.
    Failed,
}

/// A look at the engine from outside.
#[derive(Clone, Copy, Debug)]
pub struct Health {
    /// What it is doing.
    pub state: State,
    /// Jobs running.
    pub active: usize,
    /// Jobs waiting.
    pub queued: usize,
    /// Forwards so far.
    pub forwards: u64,
    /// Sequences in those forwards.
    pub sequence_forwards: u64,
    /// Most sequences in one forward.
    pub max_batch: usize,
    /// When the thread last made progress; being idle counts as progress.
    pub heartbeat: Instant,
}

/// The way in for HTTP: cheap to clone, never blocks.
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
}

struct Shared {
    inner: Mutex<Inner>,
    changed: Condvar,
    capacity: usize,
}

struct Inner {
    state: State,
    waiting: VecDeque<Waiting>,
    active: usize,
    forwards: u64,
    heartbeat: Instant,
}

struct Waiting {
    job: Job,
    since: Instant,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // The engine's panics are caught outside of the lock, and every update is complete when it is released.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EngineHandle {
    /// A handle whose engine is still to come; [`start`] makes it ready. At most `capacity` jobs may wait.
    #[must_use]
    pub fn loading(capacity: usize) -> Self {
        let inner = Inner {
            state: State::Loading,
            waiting: VecDeque::new(),
            active: 0,
            forwards: 0,
            heartbeat: Instant::now(),
        };
        Self { shared: Arc::new(Shared { inner: Mutex::new(inner), changed: Condvar::new(), capacity }) }
    }

    /// Puts a job into the queue, or says why not.
    pub fn submit(&self, job: Job) -> Result<(), SubmitError> {
        let mut inner = self.shared.lock();
        match inner.state {
            State::Ready => {}
            State::Loading => return Err(SubmitError::Loading),
            State::Draining => return Err(SubmitError::Draining),
            State::Failed => return Err(SubmitError::WorkerFailed),
        }
        inner.forget_cancelled();
        let queued = inner.waiting.len();
        if inner.active + queued > self.shared.capacity {
            return Err(SubmitError::QueueFull { queued, capacity: self.shared.capacity });
        }
        inner.waiting.push_back(Waiting { job, since: Instant::now() });
        drop(inner);
        self.shared.changed.notify_all();
        Ok(())
    }

    /// The engine's state and counters.
    #[must_use]
    pub fn health(&self) -> Health {
        let mut inner = self.shared.lock();
        inner.forget_cancelled();
        Health {
            state: inner.state,
            active: inner.active,
            queued: inner.waiting.len(),
            forwards: inner.forwards,
            sequence_forwards: inner.forwards,
            max_batch: usize::from(inner.forwards > 0),
            heartbeat: if inner.active == 0 { Instant::now() } else { inner.heartbeat },
        }
    }

    /// Refuses new jobs and fails the waiting ones; the running one may end.
    pub fn drain(&self) {
        let mut inner = self.shared.lock();
        if inner.state != State::Failed {
            inner.state = State::Draining;
        }
        let waiting = std::mem::take(&mut inner.waiting);
        drop(inner);
        self.shared.changed.notify_all();
        for Waiting { job, .. } in waiting {
            let _ = job.events.try_send(Event::Failed(JobError::Draining));
        }
    }

    fn fail(&self, running: Option<&tokio::sync::mpsc::Sender<Event>>, message: &str) {
        let mut inner = self.shared.lock();
        inner.state = State::Failed;
        inner.active = 0;
        let waiting = std::mem::take(&mut inner.waiting);
        drop(inner);
        let failed = waiting.iter().map(|waiting| &waiting.job.events).chain(running);
        for events in failed {
            let _ = events.try_send(Event::Failed(JobError::Model(message.to_owned())));
        }
    }
}

impl Inner {
    /// Drops waiting jobs that nobody waits for any more.
    fn forget_cancelled(&mut self) {
        self.waiting.retain(|waiting| !waiting.job.cancel.is_cancelled() && !waiting.job.events.is_closed());
    }
}

/// Starts the engine's thread on a loaded model and makes `handle` ready.
///
/// # Errors
/// If the thread cannot be started.
pub fn start(handle: &EngineHandle, mut runner: Runner) -> std::io::Result<JoinHandle<()>> {
    let handle = handle.clone();
    std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
        {
            let mut inner = handle.shared.lock();
            if inner.state == State::Loading {
                inner.state = State::Ready;
            }
        }
        while let Some(Waiting { job, since }) = handle.next() {
            let events = job.events.clone();
            let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| run(&handle, &mut runner, job, since)));
            match outcome {
                Ok(ControlFlow::Continue(())) => handle.shared.lock().active = 0,
                Ok(ControlFlow::Break(message)) => return handle.fail(Some(&events), &message),
                Err(_) => {
                    error!("the inference thread panicked");
                    return handle.fail(Some(&events), "the inference thread panicked");
                }
            }
        }
    })
}

impl EngineHandle {
    /// Waits for a job; `None` when the engine is to end.
    fn next(&self) -> Option<Waiting> {
        let mut inner = self.shared.lock();
        loop {
            inner.forget_cancelled();
            inner.heartbeat = Instant::now();
            if let Some(waiting) = inner.waiting.pop_front() {
                inner.active = 1;
                return Some(waiting);
            }
            if inner.state == State::Draining {
                return None;
            }
            inner = self.shared.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn count_forward(&self) {
        let mut inner = self.shared.lock();
        inner.forwards += 1;
        inner.heartbeat = Instant::now();
    }
}

/// Runs one job to its end. Breaks with a message if the model can run no more.
fn run(handle: &EngineHandle, runner: &mut Runner, job: Job, since: Instant) -> ControlFlow<String> {
    let Job { prompt, max_new, options, seed, stop_ids, mut text, wants_progress, events, cancel } = job;
    let task = Task { prompt, max_new, options, seed, stop_ids };
    let queued = since.elapsed();
    let admitted = Instant::now();
    if send(&events, Event::Admitted { queued, cached_tokens: 0 }).is_break() {
        return ControlFlow::Continue(());
    }
    let mut completion_tokens = 0;
    let outcome = runner.run(&task, &mut |progress| {
        if cancel.is_cancelled() || events.is_closed() {
            return ControlFlow::Break(Stop::Cancelled);
        }
        match progress {
            Progress::Forward => handle.count_forward(),
            Progress::Prefilled { processed, total } if wants_progress => {
                let _ = events.try_send(Event::Prefilled { processed, total, elapsed: admitted.elapsed() });
            }
            Progress::Step { block } if wants_progress => {
                let _ = events.try_send(Event::Step { block });
            }
            Progress::Prefilled { .. } | Progress::Step { .. } => {}
            Progress::Block { tokens, block } => {
                completion_tokens += tokens.len();
                let deltas = text.push(tokens);
                if send(&events, Event::Block { deltas, block, completion_tokens, text_tokens: text.text_tokens() }).is_break() {
                    return ControlFlow::Break(Stop::Cancelled);
                }
                if text.is_stopped() {
                    return ControlFlow::Break(Stop::Text);
                }
            }
        }
        ControlFlow::Continue(())
    });
    let event = match outcome {
        Ok(outcome) => {
            let deltas = text.finish();
            let mut stats = outcome.stats;
            stats.queued = queued;
            stats.text_tokens = text.text_tokens();
            Event::Finished(Finish {
                reason: outcome.reason,
                deltas,
                tokens: outcome.tokens,
                tool_parse_error: text.parse_error(),
                stats,
            })
        }
        Err(JobError::Model(message)) => return ControlFlow::Break(message),
        Err(error) => Event::Failed(error),
    };
    let _ = send(&events, event);
    ControlFlow::Continue(())
}

/// Delivers an event, waiting for a slow reader up to [`BLOCKED_CLIENT_MAX`]. Breaks if the client is gone.
fn send(events: &tokio::sync::mpsc::Sender<Event>, mut event: Event) -> ControlFlow<()> {
    let deadline = Instant::now() + BLOCKED_CLIENT_MAX;
    loop {
        match events.try_send(event) {
            Ok(()) => return ControlFlow::Continue(()),
            Err(TrySendError::Closed(_)) => return ControlFlow::Break(()),
            Err(TrySendError::Full(_)) if Instant::now() >= deadline => return ControlFlow::Break(()),
            Err(TrySendError::Full(back)) => {
                event = back;
                std::thread::sleep(BLOCKED_CLIENT_POLL);
            }
        }
    }
}
