//! The one thread that owns the model, its cache and its scheduler, and the bounded queue in front of it.
//!
//! HTTP submits [`Job`]s and gets [`Event`]s back; both are plain structs. Jobs run side by side, as many as the
//! [`Limits`] of the runner say. A job ends at the next forward after its [`Cancel`] is set or its receiver is dropped,
//! wherever it is: waiting, reading its prompt, refining.
//!
//! A client never holds the engine. Its events go into a bounded channel; while that is full, progress is dropped,
//! text waits in front of it, and the request is left out of steps. A client that has taken nothing for
//! [`BLOCKED_CLIENT_MAX`] counts as gone.
//!
//! A panic in the thread or an error of the model fails all jobs and is reported by [`EngineHandle::health`]; the
//! process should then end.

mod client;
mod job;
pub mod runner;

use std::collections::{BTreeMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tracing::{error, info};

use client::Client;
use runner::{Counters, Pages, Report, RequestId, Runner};

use crate::cache::CacheStats;
pub use crate::decoder::FinishReason;
pub use job::{BlockStats, Cancel, Event, Finish, Job, JobError, JobStats, SubmitError};

/// How long a client may take nothing before it counts as gone.
pub const BLOCKED_CLIENT_MAX: Duration = Duration::from_secs(60);
/// How often full channels are looked at when there is nothing else to do.
const HELD_POLL: Duration = Duration::from_millis(2);

/// Saved blocks read between two steps: a few hundred microseconds.
const RESTORED_BLOCKS_A_STEP: usize = 4;

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
    /// What it has done so far.
    pub counters: Counters,
    /// Pages of keys and values.
    pub pages: Pages,
    /// What the prefix cache has done so far.
    pub cache: CacheStats,
    /// When the thread last made progress; being idle counts as progress.
    pub heartbeat: Instant,
}

/// How many jobs may be there, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Jobs that run at once.
    pub running_max: usize,
    /// Jobs that may wait.
    pub waiting_max: usize,
    /// How long a job may wait; `None` is as long as its client does.
    pub wait_max: Option<Duration>,
}

/// The way in for HTTP: cheap to clone, never blocks.
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
}

struct Shared {
    inner: Mutex<Inner>,
    changed: Condvar,
    limits: QueueLimits,
}

struct Inner {
    state: State,
    /// Jobs that the thread has not seen yet.
    inbox: VecDeque<Arrived>,
    /// Jobs that the thread has taken over: running and waiting ones.
    active: usize,
    queued: usize,
    counters: Counters,
    pages: Pages,
    cache: CacheStats,
    heartbeat: Instant,
    is_idle: bool,
}

/// The answers to one prompt that a client asked for, at least one.
struct Arrived {
    choices: Vec<Job>,
    since: Instant,
}

impl Arrived {
    /// Forgets jobs that nobody waits for; false if none is left.
    fn keep_wanted(&mut self) -> bool {
        self.choices.retain(|job| !job.is_abandoned());
        !self.choices.is_empty()
    }
}

impl Inner {
    /// Jobs in the inbox that someone waits for.
    fn arrived(&self) -> usize {
        self.inbox.iter().flat_map(|arrived| &arrived.choices).filter(|job| !job.is_abandoned()).count()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // The engine's panics are caught outside of the lock, and every update is complete when it is released.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EngineHandle {
    /// A handle whose engine is still to come; [`start`] makes it ready.
    #[must_use]
    pub fn loading(limits: QueueLimits) -> Self {
        let inner = Inner {
            state: State::Loading,
            inbox: VecDeque::new(),
            active: 0,
            queued: 0,
            counters: Counters::default(),
            pages: Pages::default(),
            cache: CacheStats::default(),
            heartbeat: Instant::now(),
            is_idle: true,
        };
        Self { shared: Arc::new(Shared { inner: Mutex::new(inner), changed: Condvar::new(), limits }) }
    }

    /// Puts a job into the queue, or says why not.
    pub fn submit(&self, job: Job) -> Result<(), SubmitError> {
        self.submit_choices(vec![job])
    }

    /// Puts several answers to one prompt into the queue, all or none: jobs with the same prompt and other seeds, each
    /// with a client of its own. The prompt is read once, and they share its pages.
    pub fn submit_choices(&self, choices: Vec<Job>) -> Result<(), SubmitError> {
        let mut inner = self.shared.lock();
        match inner.state {
            State::Ready => {}
            State::Loading => return Err(SubmitError::Loading),
            State::Draining => return Err(SubmitError::Draining),
            State::Failed => return Err(SubmitError::WorkerFailed),
        }
        inner.inbox.retain_mut(Arrived::keep_wanted);
        let present = inner.active + inner.queued + inner.arrived();
        let QueueLimits { running_max, waiting_max, .. } = self.shared.limits;
        if present + choices.len() > running_max + waiting_max {
            return Err(SubmitError::QueueFull { queued: present - inner.active, capacity: waiting_max });
        }
        inner.inbox.push_back(Arrived { choices, since: Instant::now() });
        drop(inner);
        self.shared.changed.notify_all();
        Ok(())
    }

    /// The engine's state and counters.
    #[must_use]
    pub fn health(&self) -> Health {
        let inner = self.shared.lock();
        Health {
            state: inner.state,
            active: inner.active,
            queued: inner.queued + inner.arrived(),
            counters: inner.counters,
            pages: inner.pages,
            cache: inner.cache,
            heartbeat: if inner.is_idle { Instant::now() } else { inner.heartbeat },
        }
    }

    /// Refuses new jobs and fails the waiting ones; running ones may end.
    pub fn drain(&self) {
        let mut inner = self.shared.lock();
        if inner.state != State::Failed {
            inner.state = State::Draining;
        }
        let inbox = std::mem::take(&mut inner.inbox);
        drop(inner);
        self.shared.changed.notify_all();
        for job in inbox.into_iter().flat_map(|arrived| arrived.choices) {
            let _ = job.events.try_send(Event::Failed(JobError::Draining));
        }
    }
}

/// Starts the engine's thread on a loaded model and makes `handle` ready. The thread gives the runner back when it has
/// drained, and nothing if it failed.
///
/// # Errors
/// If the thread cannot be started.
pub fn start(handle: &EngineHandle, runner: Runner) -> std::io::Result<JoinHandle<Option<Runner>>> {
    let shared = Arc::clone(&handle.shared);
    std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
        {
            let mut inner = shared.lock();
            if inner.state == State::Loading {
                inner.state = State::Ready;
            }
        }
        let mut engine = Engine { shared, runner, clients: BTreeMap::new() };
        let failure = match std::panic::catch_unwind(AssertUnwindSafe(|| engine.serve())) {
            Ok(Ok(())) => return Some(engine.runner),
            Ok(Err(message)) => message,
            Err(_) => "the inference thread panicked".to_owned(),
        };
        error!("{failure}");
        engine.fail(&failure);
        None
    })
}

/// What the thread owns.
struct Engine {
    shared: Arc<Shared>,
    runner: Runner,
    clients: BTreeMap<RequestId, Client>,
}

impl Engine {
    /// Serves until drained. Fails with a message if the model can run no more.
    fn serve(&mut self) -> Result<(), String> {
        loop {
            let Some(arrived) = self.intake() else {
                // What was saved before and not read yet would be lost when the cache is saved again.
                self.restore(usize::MAX);
                return Ok(());
            };
            self.restore(RESTORED_BLOCKS_A_STEP);
            for arrived in arrived {
                self.admit(arrived);
            }
            self.drop_abandoned();
            for (id, client) in &mut self.clients {
                self.runner.hold(*id, !client.deliver());
            }
            self.clients.retain(|_, client| !client.is_served());
            let step = self.runner.step().map_err(|error| error.to_string())?;
            for report in step.reports {
                self.route(report);
            }
            self.publish();
            if step.is_idle && !self.clients.is_empty() {
                // Everyone is held by a slow client.
                std::thread::sleep(HELD_POLL);
            }
        }
    }

    /// Takes new jobs; waits for them if there is nothing else to do. `None` once drained.
    fn intake(&self) -> Option<VecDeque<Arrived>> {
        let mut inner = self.shared.lock();
        loop {
            inner.heartbeat = Instant::now();
            inner.is_idle = self.clients.is_empty();
            let is_restoring = self.runner.is_restoring() && inner.state != State::Draining;
            if !inner.inbox.is_empty() || !self.clients.is_empty() || is_restoring {
                return Some(std::mem::take(&mut inner.inbox));
            }
            if inner.state == State::Draining {
                return None;
            }
            inner = self.shared.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn admit(&mut self, mut arrived: Arrived) {
        arrived.keep_wanted();
        let mut first = None;
        for job in arrived.choices {
            let (task, client) = Client::new(job, arrived.since);
            let submitted = match first {
                None => self.runner.submit(task),
                Some(first) => self.runner.submit_choice(task, first),
            };
            match submitted {
                Ok(id) => {
                    first.get_or_insert(id);
                    self.clients.insert(id, client);
                }
                Err(error) => client.refuse(error),
            }
        }
    }

    /// Reads some of what an earlier process saved.
    fn restore(&mut self, blocks: usize) {
        if let Some(report) = self.runner.restore_some(blocks) {
            info!("prefix cache: {report}");
        }
    }

    /// Ends jobs that nobody waits for, that waited too long, or that may not start any more.
    fn drop_abandoned(&mut self) {
        let is_draining = self.shared.lock().state == State::Draining;
        let wait_max = self.shared.limits.wait_max;
        let runner = &mut self.runner;
        self.clients.retain(|id, client| {
            let refusal = if client.is_gone() {
                None
            } else if client.is_waiting() && is_draining {
                Some(JobError::Draining)
            } else if client.is_waiting() && wait_max.is_some_and(|limit| client.age() > limit) {
                Some(JobError::QueueTimeout { waited: client.age() })
            } else {
                return true;
            };
            runner.cancel(*id);
            if let Some(error) = refusal {
                client.send(Event::Failed(error));
            }
            false
        });
    }

    /// Turns a report into the client's event.
    fn route(&mut self, Report { id, progress }: Report) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        if let Some(visible) = client.take(progress) {
            self.runner.stop(id, visible);
        }
        if client.is_served() {
            self.clients.remove(&id);
        }
    }

    fn publish(&self) {
        let mut inner = self.shared.lock();
        inner.active = self.clients.values().filter(|client| !client.is_waiting()).count();
        inner.queued = self.clients.len() - inner.active;
        inner.counters = self.runner.counters();
        inner.pages = self.runner.pages();
        inner.cache = self.runner.cache_stats();
        inner.heartbeat = Instant::now();
    }

    fn fail(&mut self, message: &str) {
        let mut inner = self.shared.lock();
        inner.state = State::Failed;
        (inner.active, inner.queued) = (0, 0);
        let inbox = std::mem::take(&mut inner.inbox);
        drop(inner);
        for job in inbox.into_iter().flat_map(|arrived| arrived.choices) {
            let _ = job.events.try_send(Event::Failed(JobError::Model(message.to_owned())));
        }
        for client in self.clients.values_mut() {
            client.send(Event::Failed(JobError::Model(message.to_owned())));
        }
    }
}
