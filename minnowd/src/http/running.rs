//! A submitted request and whoever waits for it.
//!
//! [`Running`] owns the cancellation of its jobs, one for each choice: dropping it, because the answer is complete or
//! because the client's connection is gone and its future was dropped, cancels them all. So plain answers and streams are
//! treated alike.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::sync::{mpsc, watch};
use tracing::{error, info};

use super::App;
use super::error::{ApiError, Code};
use super::metrics::{Metrics, Phase};
use super::request::Order;
use super::slots::{Slot, Slots};
use crate::engine::{Cancel, Event, Job, JobError};
use crate::text::Delta;

/// Events of a job that may wait for a slow reader; refinement events are dropped when it is full, blocks wait.
const EVENTS_MAX: usize = 64;

/// A request of which at least the first job has left the queue.
#[derive(Debug)]
pub(crate) struct Running {
    /// Prompt tokens that the first job found in the cache.
    pub cached_tokens: usize,
    choices: Vec<Choice>,
    /// The choice whose events are looked at first, so that none waits for the others.
    turn: usize,
    cancelled: watch::Receiver<bool>,
    slots: Slots,
    facts: Facts,
    guard: Guard,
}

/// One job.
#[derive(Debug)]
struct Choice {
    events: mpsc::Receiver<Event>,
    /// Where it runs; `None` before and after.
    slot: Option<Slot>,
    is_ended: bool,
}

/// What slots show of a job.
#[derive(Debug)]
struct Facts {
    settings: Value,
    prompt_tokens: usize,
    max_new: usize,
}

impl Running {
    /// Submits a request's jobs and waits until the first leaves the queue.
    pub(crate) async fn start(app: &App, order: Order) -> Result<Self, ApiError> {
        let Order { task, text, choices, wants_progress, is_watched, settings, request_id } = order;
        let cancel = Cancel::default();
        let facts = Facts { settings, prompt_tokens: task.prompt.len(), max_new: task.max_new };
        let (jobs, choices): (Vec<Job>, Vec<Choice>) = (0..choices as u64)
            .map(|index| {
                let (sender, events) = mpsc::channel(EVENTS_MAX);
                let mut task = task.clone();
                task.seed = task.seed.wrapping_add(index);
                let (text, cancel) = (text.clone(), cancel.clone());
                let job = Job { task, text, wants_progress, is_watched, events: sender, cancel };
                (job, Choice { events, slot: None, is_ended: false })
            })
            .unzip();
        app.engine().submit_choices(jobs)?;
        let mut running = Self {
            cached_tokens: 0,
            choices,
            turn: 0,
            cancelled: app.cancelled(),
            slots: app.slots().clone(),
            facts,
            guard: Guard::new(cancel, request_id, app.metrics()),
        };
        match running.next().await {
            (_, Event::Admitted { cached_tokens, queued }) => {
                running.cached_tokens = cached_tokens;
                running.guard.admitted(queued);
                Ok(running)
            }
            (_, Event::Failed(error)) => {
                if matches!(error, JobError::Capacity { .. }) {
                    app.metrics().capacity_rejected();
                }
                Err(report(error))
            }
            other => {
                error!(event = ?other, "the engine's first event is not an admission");
                Err(ApiError::internal())
            }
        }
    }

    /// Number of choices.
    pub(crate) fn count(&self) -> usize {
        self.choices.len()
    }

    /// The next event, and the choice that it belongs to. After each has `Finished`, or one `Failed`, there is none, and
    /// asking again gives `Failed`.
    pub(crate) async fn next(&mut self) -> (usize, Event) {
        let (choices, turn, cancelled) = (&mut self.choices, &mut self.turn, &mut self.cancelled);
        let (index, event) = tokio::select! {
            biased;
            next = poll_fn(|cx| {
                for offset in 0..choices.len() {
                    let index = (*turn + offset) % choices.len();
                    if choices[index].is_ended {
                        continue;
                    }
                    if let Poll::Ready(event) = choices[index].events.poll_recv(cx) {
                        *turn = index + 1;
                        let missing = || Event::Failed(JobError::Model("no more events".to_owned()));
                        return Poll::Ready((index, event.unwrap_or_else(missing)));
                    }
                }
                Poll::Pending
            }) => next,
            _ = cancelled.wait_for(|cancelled| *cancelled) => (0, Event::Failed(JobError::Draining)),
        };
        self.note(index, &event);
        (index, event)
    }

    /// Keeps slots, metrics and the log up to date.
    fn note(&mut self, index: usize, event: &Event) {
        let choice = &mut self.choices[index];
        match event {
            Event::Admitted { .. } => {
                let Facts { settings, prompt_tokens, max_new } = &self.facts;
                choice.slot = Some(self.slots.take(settings.clone(), *prompt_tokens, *max_new));
            }
            Event::Block { deltas, completion_tokens, .. } => {
                let has_line_break =
                    deltas.iter().any(|delta| matches!(delta, Delta::Content(text) if text.contains('\n')));
                if let Some(slot) = &choice.slot {
                    slot.update(*completion_tokens, has_line_break);
                }
                self.guard.block();
            }
            Event::Finished(finish) => {
                (choice.slot, choice.is_ended) = (None, true);
                let mut stats = finish.stats.clone();
                if index > 0 {
                    stats.forget_prompt();
                }
                self.guard.metrics.finished(&stats);
                self.guard.completion_tokens += finish.stats.completion_tokens;
                if self.choices.iter().all(|choice| choice.is_ended) {
                    self.guard.done("finished", self.facts.prompt_tokens);
                }
            }
            Event::Failed(_) => self.guard.done("failed", self.facts.prompt_tokens),
            _ => {}
        }
    }
}

/// What the client is told about a failed job; the log gets the rest.
pub(crate) fn report(error: JobError) -> ApiError {
    match &error {
        JobError::Model(message) => error!(message, "a request failed with the model"),
        JobError::Invalid(message) => error!(message, "a job was made that cannot be run"),
        _ => {}
    }
    match error {
        JobError::Cancelled => ApiError::new(Code::Draining, "the request was cancelled"),
        error => error.into(),
    }
}

/// Cancels on drop and logs how the request ended.
#[derive(Debug)]
struct Guard {
    cancel: Cancel,
    request_id: String,
    started: Instant,
    metrics: Arc<Metrics>,
    phase: Phase,
    completion_tokens: usize,
    is_done: bool,
}

impl Guard {
    fn new(cancel: Cancel, request_id: String, metrics: &Arc<Metrics>) -> Self {
        Self {
            cancel,
            request_id,
            started: Instant::now(),
            metrics: Arc::clone(metrics),
            phase: Phase::Queued,
            completion_tokens: 0,
            is_done: false,
        }
    }

    fn admitted(&mut self, queued: Duration) {
        self.phase = Phase::Prefill;
        self.metrics.admitted(queued);
    }

    fn block(&mut self) {
        if self.phase != Phase::Decode {
            self.phase = Phase::Decode;
            self.metrics.first_block(self.started.elapsed());
        }
    }

    fn done(&mut self, outcome: &str, prompt_tokens: usize) {
        self.is_done = true;
        let (completion_tokens, ms) = (self.completion_tokens, milliseconds(self.started.elapsed()));
        info!(id = self.request_id, outcome, prompt_tokens, completion_tokens, ms, "request ended");
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.cancel.cancel();
        if !self.is_done {
            let ms = milliseconds(self.started.elapsed());
            self.metrics.cancelled(self.phase);
            info!(id = self.request_id, status = 499, ms, "the client went away");
        }
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
