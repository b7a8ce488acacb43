//! A job's client as the engine sees it: the text state, the channel, and what waits in front of it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;

use super::runner::{Outcome, Progress, Task};
use super::{BLOCKED_CLIENT_MAX, Cancel, Event, Finish, Job, JobError};
use crate::text::{Delta, OutputText};

/// Everything about a job that is not its [`Task`].
pub(super) struct Client {
    text: OutputText,
    wants_progress: bool,
    events: Sender<Event>,
    cancel: Cancel,
    /// When the job arrived, and how long it waited once it was started.
    since: Instant,
    waited: Option<Duration>,
    completion_tokens: usize,
    /// Bytes of text up to the end of each block, and bytes shown.
    block_ends: Vec<usize>,
    shown: usize,
    /// Events that the channel had no room for, and since when.
    outbox: VecDeque<Event>,
    blocked_since: Option<Instant>,
    is_gone: bool,
    is_ended: bool,
}

impl Job {
    /// Whether nobody waits for this job any more.
    pub(super) fn is_abandoned(&self) -> bool {
        self.cancel.is_cancelled() || self.events.is_closed()
    }
}

impl Client {
    /// Splits a job into what the runner needs and the rest.
    pub(super) fn new(job: Job, since: Instant) -> (Task, Self) {
        let Job { task, text, wants_progress, events, cancel } = job;
        let client = Self {
            text,
            wants_progress,
            events,
            cancel,
            since,
            waited: None,
            completion_tokens: 0,
            block_ends: Vec::new(),
            shown: 0,
            outbox: VecDeque::new(),
            blocked_since: None,
            is_gone: false,
            is_ended: false,
        };
        (task, client)
    }

    /// Tells the client that its job was not taken.
    pub(super) fn refuse(mut self, error: JobError) {
        self.send(Event::Failed(error));
    }

    /// Whether the client went away, was cancelled, or has taken nothing for too long.
    pub(super) fn is_gone(&self) -> bool {
        self.is_gone || self.cancel.is_cancelled() || self.events.is_closed()
    }

    /// Whether the job ended and its client has everything.
    pub(super) fn is_served(&self) -> bool {
        self.is_ended && self.outbox.is_empty()
    }

    /// Whether the job has not started yet.
    pub(super) fn is_waiting(&self) -> bool {
        self.waited.is_none()
    }

    /// Time since the job arrived.
    pub(super) fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// Turns progress into events. If the text ended in it, gives the number of blocks that the client sees all of.
    pub(super) fn take(&mut self, progress: Progress) -> Option<usize> {
        match progress {
            Progress::Started { cached_tokens } => {
                let queued = self.age();
                self.waited = Some(queued);
                self.send(Event::Admitted { queued, cached_tokens });
            }
            Progress::Prefilled { processed, total } => {
                let elapsed = self.age().saturating_sub(self.waited.unwrap_or_default());
                self.send_progress(Event::Prefilled { processed, total, elapsed });
            }
            Progress::Step { block } => self.send_progress(Event::Step { block }),
            Progress::Block { tokens, block } => {
                self.completion_tokens += tokens.len();
                let received = self.block_ends.last().copied().unwrap_or(0) + self.text.text_bytes(&tokens);
                self.block_ends.push(received);
                let deltas = self.text.push(&tokens);
                self.shown += content_bytes(&deltas);
                let (completion_tokens, text_tokens) = (self.completion_tokens, self.text.text_tokens());
                self.send(Event::Block { deltas, block, completion_tokens, text_tokens });
                if self.text.is_stopped() {
                    return Some(self.block_ends.iter().take_while(|end| **end <= self.shown).count());
                }
            }
            Progress::Finished(outcome) => {
                let finish = self.finish(outcome);
                self.is_ended = true;
                self.send(Event::Finished(finish));
            }
            Progress::Failed(error) => {
                self.is_ended = true;
                self.send(Event::Failed(error));
            }
        }
        None
    }

    fn finish(&mut self, outcome: Outcome) -> Finish {
        let deltas = self.text.finish();
        let mut stats = outcome.stats;
        stats.queued = self.waited.unwrap_or_default();
        stats.text_tokens = self.text.text_tokens();
        let tool_parse_error = self.text.parse_error();
        Finish { reason: outcome.reason, deltas, tokens: outcome.tokens, tool_parse_error, stats }
    }

    /// Sends what must arrive, or keeps it until there is room.
    pub(super) fn send(&mut self, event: Event) {
        self.outbox.push_back(event);
        self.deliver();
    }

    /// Sends what may be lost.
    fn send_progress(&mut self, event: Event) {
        if self.wants_progress && self.outbox.is_empty() {
            let _ = self.events.try_send(event);
        }
    }

    /// Moves waiting events into the channel. True if none is left, so that the request may go on.
    pub(super) fn deliver(&mut self) -> bool {
        while let Some(event) = self.outbox.pop_front() {
            match self.events.try_send(event) {
                Ok(()) => self.blocked_since = None,
                Err(TrySendError::Closed(_)) => {
                    self.is_gone = true;
                    self.outbox.clear();
                }
                Err(TrySendError::Full(event)) => {
                    self.outbox.push_front(event);
                    let since = *self.blocked_since.get_or_insert_with(Instant::now);
                    self.is_gone |= since.elapsed() > BLOCKED_CLIENT_MAX;
                    return false;
                }
            }
        }
        true
    }
}

fn content_bytes(deltas: &[Delta]) -> usize {
    let bytes = |delta: &Delta| if let Delta::Content(text) = delta { text.len() } else { 0 };
    deltas.iter().map(bytes).sum()
}
