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
        let Job { task, text, wants_progress, is_watched, events, cancel } = job;
        let client = Self {
            text,
            wants_progress: wants_progress || is_watched,
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
            Progress::Refined(view) => self.send_progress(Event::Refined(view)),
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
                self.send(Event::Finished(Box::new(finish)));
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
        let stop_string = self.text.stop_string().map(Into::into);
        Finish { reason: outcome.reason, deltas, tokens: outcome.tokens, stop_string, tool_parse_error, stats }
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use minnow_common::random::keyed;
    use minnow_formats::checkpoint::Checkpoint;
    use tokio::sync::mpsc::{self, Receiver};

    use super::super::runner::Task;
    use super::super::{BlockStats, JobStats};
    use super::*;
    use crate::cache::Access;
    use crate::decoder::{Algorithm, FinishReason, Options};
    use crate::demo;
    use crate::text::Tokenizer;

    fn client(tokenizer: &Arc<Tokenizer>, capacity: usize) -> (Client, Receiver<Event>) {
        let (events, incoming) = mpsc::channel(capacity);
        let task = Task {
            prompt: vec![1],
            max_new: 100,
            options: Options::serving(Algorithm::V22),
            seed: 0,
            stop_ids: Arc::from([]),
            cache: Access::Shared,
            language: None,
        };
        let text = OutputText::plain(tokenizer, &[]);
        let job = Job { task, text, wants_progress: true, is_watched: false, events, cancel: Cancel::default() };
        (Client::new(job, Instant::now()).1, incoming)
    }

    fn tokenizer() -> Arc<Tokenizer> {
        let checkpoint = Checkpoint::from_static(demo::NAME, demo::checkpoint()).unwrap();
        Arc::new(Tokenizer::from_json(&checkpoint.assets()["tokenizer.json"]).unwrap())
    }

    #[test]
    fn blocks_reach_a_reader_of_any_speed_complete_and_in_order_and_steps_may_be_lost() {
        let tokenizer = tokenizer();
        let mut lost = 0;
        for seed in 0..200 {
            let roll = |step: u64, limit: u64| keyed(seed, &[step]) % limit;
            let (mut client, mut incoming) = client(&tokenizer, 1 + roll(0, 4) as usize);
            let mut received = Vec::new();
            let (mut blocks, mut steps) = (0, 0);
            client.take(Progress::Started { cached_tokens: 0 });
            for step in 1..120 {
                match roll(step, 5) {
                    // The engine takes no step of a request whose client has not taken everything.
                    0 | 1 if client.deliver() => {
                        let block = BlockStats { index: blocks, ..BlockStats::default() };
                        client.take(Progress::Step { block });
                        steps += 1;
                    }
                    2 if client.deliver() => {
                        let block = BlockStats { index: blocks, tokens: 1, ..BlockStats::default() };
                        client.take(Progress::Block { tokens: vec![20 + blocks as u32], block });
                        blocks += 1;
                    }
                    _ => received.extend(incoming.try_recv().ok()),
                }
            }
            let stats = JobStats::default();
            client.take(Progress::Finished(Outcome { reason: FinishReason::Length, tokens: Vec::new(), stats }));
            while !client.is_served() {
                received.extend(incoming.try_recv().ok());
                client.deliver();
            }
            received.extend(std::iter::from_fn(|| incoming.try_recv().ok()));

            assert!(matches!(received[0], Event::Admitted { .. }));
            assert!(matches!(received[received.len() - 1], Event::Finished(_)));
            let (mut seen_blocks, mut seen_steps) = (0, 0);
            for event in &received[1..received.len() - 1] {
                match event {
                    Event::Block { block, completion_tokens, .. } => {
                        assert_eq!((block.index, *completion_tokens), (seen_blocks, seen_blocks + 1));
                        seen_blocks += 1;
                    }
                    Event::Step { block } => {
                        assert_eq!(block.index, seen_blocks, "a step of a block comes before the block");
                        seen_steps += 1;
                    }
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!(seen_blocks, blocks);
            lost += steps - seen_steps;
        }
        assert!(lost > 100, "channels were never full");
    }

    #[test]
    fn a_client_that_hung_up_or_was_cancelled_is_gone_and_keeps_nothing() {
        let tokenizer = tokenizer();
        let (mut hung_up, incoming) = client(&tokenizer, 1);
        assert!(!hung_up.is_gone());
        drop(incoming);
        assert!(hung_up.is_gone());
        hung_up.take(Progress::Started { cached_tokens: 0 });
        assert!(hung_up.deliver(), "nothing waits for somebody who is gone");
        let (cancelled, _incoming) = client(&tokenizer, 1);
        cancelled.cancel.cancel();
        assert!(cancelled.is_gone());
    }
}
