//! Event streams: one `data:` line of JSON for each chunk, a comment when silent, `[DONE]` at the end.
//!
//! [`Chunks`] turns engine events into chunks and is pure; [`bytes`] pulls events and gives what it says. Hyper asks
//! for the next bytes only when the client has taken the last ones, so a slow client slows its own sequence down. When
//! the client is gone the body is dropped, and with it the job.
//!
//! The order: role; progress (if wanted); refinement steps and their cells (if wanted) and text or calls; finish; usage (if wanted);
//! `[DONE]`. The last chunk before `[DONE]` always has `timings`.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_util::Stream;
use futures_util::stream::unfold;
use serde_json::{Map, Value, json};

use super::answer::{self, Heading, Output, Shape, Timings};
use super::attempts::Attempts;
use super::openai::Extras;
use super::running::report;
use crate::engine::{BlockStats, Event, Finish};
use crate::text::Tokenizer;

/// A comment: what silence is broken with.
const PING: &[u8] = b":\n\n";

/// The bytes of an answer whose job has left the queue.
pub(crate) fn bytes(
    attempts: Attempts,
    heading: Heading,
    extras: Extras,
    tokenizer: Arc<Tokenizer>,
) -> impl Stream<Item = Bytes> + Send {
    let mut chunks = Chunks::new(heading, extras, attempts.cached_tokens());
    chunks.shows_cells_with = extras.refinements.then_some(tokenizer);
    let first = frames(chunks.begin());
    let state = Some((attempts, chunks, Some(first)));
    unfold(state, |state| async move {
        let (mut attempts, mut chunks, first) = state?;
        if let Some(first) = first {
            return Some((first, Some((attempts, chunks, None))));
        }
        loop {
            let event = match chunks.extras.ping {
                None => attempts.next().await,
                Some(interval) => match tokio::time::timeout(interval, attempts.next()).await {
                    Ok(event) => event,
                    Err(_) => return Some((Bytes::from_static(PING), Some((attempts, chunks, None)))),
                },
            };
            let (made, is_end) = match event {
                Ok(event) => {
                    chunks.heading.settings["seed"] = attempts.seed().into();
                    chunks.take(event)
                }
                Err(error) => (vec![error.body()], true),
            };
            let mut bytes = frames(made);
            if is_end {
                bytes = Bytes::from([&bytes[..], b"data: [DONE]\n\n"].concat());
                return Some((bytes, None));
            }
            if !bytes.is_empty() {
                return Some((bytes, Some((attempts, chunks, None))));
            }
        }
    })
}

/// The answer whose body is an event stream.
pub(crate) fn events(body: Body) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, body).into_response()
}

/// Chunks on the wire.
fn frames(chunks: Vec<Value>) -> Bytes {
    let mut bytes = Vec::new();
    for chunk in chunks {
        // JSON text has no raw line breaks, so one line is one chunk.
        bytes.extend_from_slice(format!("data: {chunk}\n\n").as_bytes());
    }
    bytes.into()
}

/// The chunks of one answer.
struct Chunks {
    heading: Heading,
    extras: Extras,
    output: Output,
    timings: Timings,
    progress: Progress,
    /// Time spent on final blocks.
    blocks_time: Duration,
    /// Turns ids of unfinished blocks into text, if these are shown.
    shows_cells_with: Option<Arc<Tokenizer>>,
}

/// What the client was told about reading the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// Nothing more to tell: not wanted, all cached, or all told.
    Done,
    /// This many tokens so far, cached ones included.
    At(usize),
}

impl Chunks {
    fn new(heading: Heading, extras: Extras, cached_tokens: usize) -> Self {
        let is_told = extras.progress && cached_tokens < heading.prompt_tokens;
        Self {
            output: Output::new(heading.must_call),
            timings: Timings { cached: cached_tokens, ..Timings::default() },
            progress: if is_told { Progress::At(cached_tokens) } else { Progress::Done },
            blocks_time: Duration::ZERO,
            shows_cells_with: None,
            heading,
            extras,
        }
    }

    /// The role chunk and what the request demanded. Text completions have no roles.
    fn begin(&mut self) -> Vec<Value> {
        let mut made = match self.heading.shape {
            Shape::Chat => vec![self.chunk(json!({"role": "assistant", "content": ""}), Value::Null)],
            Shape::Text => Vec::new(),
        };
        let opened = std::mem::take(&mut self.heading.opened);
        self.extend(opened, &mut made);
        made
    }

    /// The chunks of an event, and whether they are the last ones.
    fn take(&mut self, event: Event) -> (Vec<Value>, bool) {
        let mut made = Vec::new();
        match event {
            Event::Admitted { .. } => {}
            Event::Prefilled { processed, total, elapsed } => self.prefilled(processed.min(total), elapsed, &mut made),
            Event::Refined(view) => {
                self.end_progress(&mut made);
                if let Some(tokenizer) = &self.shows_cells_with {
                    let mut chunk = self.chunk(json!({}), Value::Null);
                    chunk["minnow"] = json!({ "refinement": answer::refinement(&view, tokenizer) });
                    made.push(chunk);
                }
            }
            Event::Step { block } => {
                self.end_progress(&mut made);
                if self.extras.timings {
                    made.push(self.step(&block));
                }
            }
            Event::Block { deltas, block, text_tokens, .. } => {
                self.end_progress(&mut made);
                self.blocks_time += block.elapsed;
                self.timings.predicted = text_tokens;
                self.timings.predicted_time = self.blocks_time;
                self.extend(deltas, &mut made);
            }
            Event::Finished(mut finish) => {
                self.end_progress(&mut made);
                self.extend(std::mem::take(&mut finish.deltas), &mut made);
                match self.output.finish_reason(finish.reason) {
                    Ok(reason) => self.finish(&finish, reason, &mut made),
                    Err(error) => made.push(error.body()),
                }
                return (made, true);
            }
            Event::Failed(error) => {
                made.push(report(error).body());
                return (made, true);
            }
        }
        (made, false)
    }

    fn extend(&mut self, deltas: Vec<crate::text::Delta>, made: &mut Vec<Value>) {
        for delta in deltas {
            let Some(delta) = self.output.push(delta) else { continue };
            let mut chunk = self.chunk(delta, Value::Null);
            if self.extras.timings {
                chunk["timings"] = self.timings.object();
            }
            made.push(chunk);
        }
    }

    /// Exactly one finish chunk, then usage if it was asked for.
    fn finish(&mut self, finish: &Finish, reason: &str, made: &mut Vec<Value>) {
        let timings = Timings::of(&finish.stats).object();
        let minnow = self.heading.minnow(finish);
        let mut last = self.chunk(json!({}), json!(reason));
        last["timings"] = timings.clone();
        last["minnow"] = minnow.clone();
        made.push(last);
        if self.extras.usage {
            let mut chunk = self.heading.object(true);
            chunk.insert("choices".to_owned(), json!([]));
            chunk.insert("usage".to_owned(), answer::usage(&finish.stats));
            chunk.insert("timings".to_owned(), timings);
            chunk.insert("minnow".to_owned(), minnow);
            made.push(Value::Object(chunk));
        }
    }

    fn prefilled(&mut self, processed: usize, elapsed: Duration, made: &mut Vec<Value>) {
        self.timings.prompt = processed.saturating_sub(self.timings.cached);
        self.timings.prompt_time = elapsed;
        let Progress::At(before) = self.progress else { return };
        if processed > before {
            self.tell_progress(processed, made);
        }
    }

    /// The prompt has been read. If the last word on that was not sent, because it was dropped or because the rest of
    /// the prompt shares a block with the answer, it is sent now.
    fn end_progress(&mut self, made: &mut Vec<Value>) {
        self.timings.prompt = self.heading.prompt_tokens.saturating_sub(self.timings.cached);
        if self.progress != Progress::Done {
            self.tell_progress(self.heading.prompt_tokens, made);
        }
    }

    /// `processed` is above what was told before, so that clients may divide by `total - cache`.
    fn tell_progress(&mut self, processed: usize, made: &mut Vec<Value>) {
        let total = self.heading.prompt_tokens;
        let mut chunk = self.chunk(json!({}), Value::Null);
        chunk["prompt_progress"] = json!({
            "total": total,
            "cache": self.timings.cached,
            "processed": processed,
            "time_ms": self.timings.prompt_time.as_secs_f64() * 1e3,
        });
        chunk["timings"] = self.timings.object();
        made.push(chunk);
        self.progress = Progress::At(processed);
        if processed >= total {
            // Without a chunk of another kind the web UI would stay at "preparing" until the first block.
            let mut chunk = self.chunk(json!({}), Value::Null);
            chunk["timings"] = self.timings.object();
            made.push(chunk);
            self.progress = Progress::Done;
        }
    }

    fn step(&self, block: &BlockStats) -> Value {
        let mut timings = self.timings;
        timings.predicted_time = self.blocks_time + block.elapsed;
        let mut chunk = self.chunk(json!({}), Value::Null);
        chunk["timings"] = timings.object();
        chunk["minnow"] = json!({ "batch": answer::batch(block) });
        chunk
    }

    /// A chunk with one choice. In text completions a delta's content is the choice's text.
    fn chunk(&self, delta: Value, finish_reason: Value) -> Value {
        let mut choice = Map::new();
        choice.insert("index".to_owned(), json!(0));
        match self.heading.shape {
            Shape::Chat => choice.insert("delta".to_owned(), delta),
            Shape::Text => choice.insert("text".to_owned(), json!(delta["content"].as_str().unwrap_or(""))),
        };
        choice.insert("logprobs".to_owned(), Value::Null);
        choice.insert("finish_reason".to_owned(), finish_reason);
        let mut chunk = self.heading.object(true);
        chunk.insert("choices".to_owned(), json!([choice]));
        if self.extras.usage {
            chunk.insert("usage".to_owned(), Value::Null);
        }
        Value::Object(chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{FinishReason, JobError, JobStats};
    use crate::text::Delta;

    fn heading(shape: Shape) -> Heading {
        Heading {
            shape,
            id: "chatcmpl-1".to_owned(),
            created: 1,
            model: "m".to_owned(),
            fingerprint: "fp_1".to_owned(),
            settings: json!({"seed": 1}),
            ignored_fields: Vec::new(),
            must_call: false,
            opened: Vec::new(),
            prompt_tokens: 70,
        }
    }

    fn text(text: &str) -> Vec<Delta> {
        vec![Delta::Content(text.to_owned())]
    }

    fn block(deltas: Vec<Delta>, text_tokens: usize) -> Event {
        let block = BlockStats { elapsed: Duration::from_millis(5), ..BlockStats::default() };
        Event::Block { deltas, block, completion_tokens: text_tokens, text_tokens }
    }

    fn finished(deltas: Vec<Delta>, reason: FinishReason) -> Event {
        let stats = JobStats { prompt_tokens: 70, completion_tokens: 9, text_tokens: 8, ..JobStats::default() };
        Event::Finished(Finish { reason, deltas, tokens: Vec::new(), tool_parse_error: None, stats })
    }

    fn all(chunks: &mut Chunks, events: Vec<Event>) -> Vec<Value> {
        let mut made = chunks.begin();
        for event in events {
            made.extend(chunks.take(event).0);
        }
        made
    }

    #[test]
    fn a_stream_begins_with_the_role_and_ends_with_the_reason() {
        let mut chunks = Chunks::new(heading(Shape::Chat), Extras::default(), 0);
        let events = vec![block(text("a"), 4), block(Vec::new(), 4), finished(text("b"), FinishReason::Stop)];
        let made = all(&mut chunks, events);
        let deltas: Vec<&Value> = made.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
        assert_eq!(
            deltas,
            [
                &json!({"role": "assistant", "content": ""}),
                &json!({"content": "a"}),
                &json!({"content": "b"}),
                &json!({})
            ]
        );
        let last = made.last().unwrap();
        assert_eq!(last["choices"][0]["finish_reason"], "stop");
        assert_eq!(last["timings"]["predicted_n"], 8);
        assert!(made.iter().all(|chunk| chunk.get("usage").is_none()));
        assert_eq!(made.iter().filter(|chunk| chunk.get("timings").is_some()).count(), 1);
    }

    #[test]
    fn usage_is_a_chunk_of_its_own() {
        let mut chunks = Chunks::new(heading(Shape::Text), Extras { usage: true, ..Extras::default() }, 0);
        let made = all(&mut chunks, vec![block(text("a"), 4), finished(Vec::new(), FinishReason::Length)]);
        let (last, others) = made.split_last().unwrap();
        assert_eq!(last["choices"], json!([]));
        assert_eq!(last["usage"]["total_tokens"], 79);
        assert!(last["timings"].is_object());
        assert!(others.iter().all(|chunk| chunk["usage"] == Value::Null && chunk.get("usage").is_some()));
        let texts: Vec<&Value> = others.iter().map(|chunk| &chunk["choices"][0]["text"]).collect();
        assert_eq!(texts, ["a", ""], "text completions have no role chunk");
    }

    fn prefilled(processed: usize) -> Event {
        Event::Prefilled { processed, total: 70, elapsed: Duration::from_millis(3) }
    }

    fn told(made: &[Value]) -> Vec<u64> {
        made.iter().filter_map(|chunk| chunk["prompt_progress"]["processed"].as_u64()).collect()
    }

    #[test]
    fn progress_ends_with_the_total_whatever_was_dropped() {
        let extras = Extras { progress: true, ..Extras::default() };
        for (events, expected) in [
            (vec![prefilled(32), prefilled(64)], vec![32, 64, 70]),
            (vec![prefilled(70)], vec![70]),
            (vec![], vec![70]),
        ] {
            let mut chunks = Chunks::new(heading(Shape::Chat), extras, 0);
            let events = events.into_iter().chain([block(text("a"), 4), finished(Vec::new(), FinishReason::Stop)]);
            let made = all(&mut chunks, events.collect());
            assert_eq!(told(&made), expected);
            let last = made.iter().rposition(|chunk| chunk.get("prompt_progress").is_some()).unwrap();
            let next = &made[last + 1];
            assert!(next.get("timings").is_some() && next["choices"][0]["delta"] == json!({}));
        }
    }

    #[test]
    fn progress_is_silent_when_all_is_cached_or_nobody_asked() {
        let extras = Extras { progress: true, ..Extras::default() };
        for (extras, cached) in [(extras, 70), (Extras::default(), 0)] {
            let mut chunks = Chunks::new(heading(Shape::Chat), extras, cached);
            assert!(told(&all(&mut chunks, vec![prefilled(70), block(text("a"), 4)])).is_empty());
        }
    }

    #[test]
    fn steps_are_shown_only_with_timings() {
        let step = || Event::Step { block: BlockStats { forwards: 3, ..BlockStats::default() } };
        let mut chunks = Chunks::new(heading(Shape::Chat), Extras { timings: true, ..Extras::default() }, 0);
        let made = all(&mut chunks, vec![step(), block(text("a"), 4), step()]);
        assert_eq!(made[1]["minnow"]["batch"]["evaluated_tokens"], 96);
        let predicted: Vec<u64> = made.iter().filter_map(|chunk| chunk["timings"]["predicted_n"].as_u64()).collect();
        assert_eq!(predicted, [0, 4, 4]);
        let mut chunks = Chunks::new(heading(Shape::Chat), Extras { progress: true, ..Extras::default() }, 70);
        assert_eq!(all(&mut chunks, vec![step()]).len(), 1);
    }

    #[test]
    fn a_failure_is_one_event_at_the_end() {
        let mut chunks = Chunks::new(heading(Shape::Chat), Extras::default(), 0);
        let (made, is_end) = chunks.take(Event::Failed(JobError::Draining));
        assert!(is_end);
        assert_eq!(made[0]["error"]["code"], "draining");
    }

    #[test]
    fn a_chunk_is_one_data_line() {
        let bytes = frames(vec![json!({"a": "x\ny\u{2028}"}), json!(1)]);
        assert_eq!(std::str::from_utf8(&bytes).unwrap(), "data: {\"a\":\"x\\ny\u{2028}\"}\n\ndata: 1\n\n");
    }
}
