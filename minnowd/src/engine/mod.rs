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
mod mailbox;
mod repetition;
pub mod runner;
mod view;

/// What [`mailbox`] is built on; `tests/loom` gives it other primitives.
mod sync {
    pub(super) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
}

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tracing::{error, info};

use client::Client;
use mailbox::{Bounds, Item, Mailbox, Occupancy, View, Work};
use runner::{Counters, Pages, Report, RequestId, Runner};

use crate::cache::CacheStats;
pub use crate::decoder::FinishReason;
pub use job::{BlockStats, Cancel, Event, Finish, Job, JobError, JobStats, SubmitError};
pub use view::{BlockView, Cell, Change};

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
    mailbox: Arc<Mailbox<Arrived, Published>>,
    wait_max: Option<Duration>,
}

/// What the engine says of itself after each step.
#[derive(Clone, Copy, Debug)]
struct Published {
    counters: Counters,
    pages: Pages,
    cache: CacheStats,
    heartbeat: Instant,
}

/// The answers to one prompt that a client asked for, at least one.
struct Arrived {
    choices: Vec<Job>,
    since: Instant,
}

impl Item for Arrived {
    fn forget_abandoned(&mut self) {
        self.choices.retain(|job| !job.is_abandoned());
    }

    fn count(&self) -> usize {
        self.choices.iter().filter(|job| !job.is_abandoned()).count()
    }
}

impl Arrived {
    /// Tells everyone who waits that nothing will come.
    fn refuse(self, error: &JobError) {
        for job in self.choices {
            let _ = job.events.try_send(Event::Failed(error.clone()));
        }
    }
}

impl EngineHandle {
    /// A handle whose engine is still to come; [`start`] makes it ready.
    #[must_use]
    pub fn loading(limits: QueueLimits) -> Self {
        let QueueLimits { running_max, waiting_max, wait_max } = limits;
        let bounds = Bounds { present_max: running_max + waiting_max, waiting_max };
        let published = Published {
            counters: Counters::default(),
            pages: Pages::default(),
            cache: CacheStats::default(),
            heartbeat: Instant::now(),
        };
        Self { mailbox: Arc::new(Mailbox::new(bounds, published)), wait_max }
    }

    /// Puts a job into the queue, or says why not.
    pub fn submit(&self, job: Job) -> Result<(), SubmitError> {
        self.submit_choices(vec![job])
    }

    /// Puts several answers to one prompt into the queue, all or none: jobs with the same prompt and other seeds, each
    /// with a client of its own. The prompt is read once, and they share its pages.
    pub fn submit_choices(&self, choices: Vec<Job>) -> Result<(), SubmitError> {
        self.mailbox.submit(Arrived { choices, since: Instant::now() })
    }

    /// The engine's state and counters.
    #[must_use]
    pub fn health(&self) -> Health {
        let View { state, active, queued, is_waiting, published } = self.mailbox.view();
        let Published { counters, pages, cache, heartbeat } = published;
        // Waiting for something to do counts as progress.
        let heartbeat = if is_waiting { Instant::now() } else { heartbeat };
        Health { state, active, queued, counters, pages, cache, heartbeat }
    }

    /// Refuses new jobs and fails the waiting ones; running ones may end.
    pub fn drain(&self) {
        for arrived in self.mailbox.drain() {
            arrived.refuse(&JobError::Draining);
        }
    }
}

/// Starts the engine's thread on a loaded model and makes `handle` ready. The thread gives the runner back when it has
/// drained, and nothing if it failed.
///
/// # Errors
/// If the thread cannot be started.
pub fn start(handle: &EngineHandle, runner: Runner) -> std::io::Result<JoinHandle<Option<Runner>>> {
    let handle = handle.clone();
    // Here, not in the thread: once this returns, the caller tells everyone that requests are taken.
    handle.mailbox.open();
    std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
        let EngineHandle { mailbox, wait_max } = handle;
        let mut engine = Engine { mailbox, wait_max, runner, clients: BTreeMap::new() };
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
    mailbox: Arc<Mailbox<Arrived, Published>>,
    wait_max: Option<Duration>,
    runner: Runner,
    clients: BTreeMap<RequestId, Client>,
}

impl Engine {
    /// Serves until drained. Fails with a message if the model can run no more.
    fn serve(&mut self) -> Result<(), String> {
        loop {
            let work = match (self.clients.is_empty(), self.runner.is_restoring()) {
                (false, _) => Work::Requests,
                (true, true) => Work::Optional,
                (true, false) => Work::None,
            };
            let Some(arrived) = self.mailbox.take(work) else {
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

    fn admit(&mut self, mut arrived: Arrived) {
        arrived.forget_abandoned();
        let mut first = None;
        for job in arrived.choices {
            let is_watched = job.is_watched;
            let (task, client) = Client::new(job, arrived.since);
            let submitted = match first {
                None => self.runner.submit(task),
                Some(first) => self.runner.submit_choice(task, first),
            };
            match submitted {
                Ok(id) => {
                    first.get_or_insert(id);
                    if is_watched {
                        self.runner.watch(id);
                    }
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
        let is_draining = self.mailbox.is_draining();
        let wait_max = self.wait_max;
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
        let active = self.clients.values().filter(|client| !client.is_waiting()).count();
        let occupancy = Occupancy { active, queued: self.clients.len() - active };
        let published = Published {
            counters: self.runner.counters(),
            pages: self.runner.pages(),
            cache: self.runner.cache_stats(),
            heartbeat: Instant::now(),
        };
        self.mailbox.publish(occupancy, published);
    }

    fn fail(&mut self, message: &str) {
        let error = JobError::Model(message.to_owned());
        for arrived in self.mailbox.fail() {
            arrived.refuse(&error);
        }
        for client in self.clients.values_mut() {
            client.send(Event::Failed(error.clone()));
        }
    }
}
