//! A submitted job and whoever waits for it.
//!
//! [`Running`] owns the job's cancellation: dropping it, because the answer is complete or because the client's
//! connection is gone and its future was dropped, cancels the job. So plain answers and streams are treated alike.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tracing::{error, info};

use super::App;
use super::error::{ApiError, Code};
use super::metrics::{Metrics, Phase};
use super::openai::Order;
use super::slots::Slot;
use crate::engine::{Cancel, Event, Job, JobError};
use crate::text::Delta;

/// Events that may wait for a slow reader; refinement events are dropped when it is full, blocks wait.
const EVENTS_MAX: usize = 64;

/// A job that has left the queue.
#[derive(Debug)]
pub(crate) struct Running {
    /// Prompt tokens found in the cache.
    pub cached_tokens: usize,
    events: mpsc::Receiver<Event>,
    cancelled: watch::Receiver<bool>,
    slot: Slot,
    guard: Guard,
}

impl Running {
    /// Submits a job and waits until it leaves the queue.
    pub(crate) async fn start(app: &App, order: Order) -> Result<Self, ApiError> {
        let (sender, mut events) = mpsc::channel(EVENTS_MAX);
        let cancel = Cancel::default();
        let (prompt_tokens, max_new) = (order.task.prompt.len(), order.task.max_new);
        app.engine().submit(Job {
            task: order.task,
            text: order.text,
            wants_progress: order.wants_progress,
            is_watched: order.is_watched,
            events: sender,
            cancel: cancel.clone(),
        })?;
        let mut guard = Guard::new(cancel, order.request_id, app.metrics());
        let mut cancelled = app.cancelled();
        let cached_tokens = match next(&mut events, &mut cancelled).await {
            Event::Admitted { cached_tokens, queued } => {
                guard.admitted(queued);
                cached_tokens
            }
            Event::Failed(error) => {
                if matches!(error, JobError::Capacity { .. }) {
                    app.metrics().capacity_rejected();
                }
                guard.done("refused", prompt_tokens, 0);
                return Err(report(error));
            }
            other => {
                error!(event = ?other, "the engine's first event is not an admission");
                return Err(ApiError::internal());
            }
        };
        let slot = app.slots().take(order.settings, prompt_tokens, max_new);
        Ok(Self { cached_tokens, events, cancelled, slot, guard })
    }

    /// The next event. After `Finished` or `Failed` there is none, and asking again gives `Failed`.
    pub(crate) async fn next(&mut self) -> Event {
        let event = next(&mut self.events, &mut self.cancelled).await;
        match &event {
            Event::Block { deltas, completion_tokens, .. } => {
                let has_line_break =
                    deltas.iter().any(|delta| matches!(delta, Delta::Content(text) if text.contains('\n')));
                self.slot.update(*completion_tokens, has_line_break);
                self.guard.block();
            }
            Event::Finished(finish) => {
                self.guard.metrics.finished(&finish.stats);
                self.guard.done("finished", finish.stats.prompt_tokens, finish.stats.completion_tokens);
            }
            Event::Failed(_) => self.guard.done("failed", 0, 0),
            _ => {}
        }
        event
    }
}

async fn next(events: &mut mpsc::Receiver<Event>, cancelled: &mut watch::Receiver<bool>) -> Event {
    tokio::select! {
        biased;
        event = events.recv() => event.unwrap_or_else(|| Event::Failed(JobError::Model("no more events".to_owned()))),
        _ = cancelled.wait_for(|cancelled| *cancelled) => Event::Failed(JobError::Draining),
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

/// Cancels on drop and logs how the job ended.
#[derive(Debug)]
struct Guard {
    cancel: Cancel,
    request_id: String,
    started: Instant,
    metrics: Arc<Metrics>,
    phase: Phase,
    is_done: bool,
}

impl Guard {
    fn new(cancel: Cancel, request_id: String, metrics: &Arc<Metrics>) -> Self {
        let metrics = Arc::clone(metrics);
        Self { cancel, request_id, started: Instant::now(), metrics, phase: Phase::Queued, is_done: false }
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

    fn done(&mut self, outcome: &str, prompt_tokens: usize, completion_tokens: usize) {
        self.is_done = true;
        let ms = milliseconds(self.started.elapsed());
        info!(id = self.request_id, outcome, prompt_tokens, completion_tokens, ms, "job ended");
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
