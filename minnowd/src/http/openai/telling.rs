//! How chat and text completions are told: one object, or chunks.
//!
//! The order of a stream: for each choice its role; progress (if wanted); refinement steps and their cells (if wanted) and
//! text or calls; finish; then usage (if wanted) and `[DONE]`. A chunk has one choice. The last one before `[DONE]` always
//! has `timings`.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::{Extras, Shape};
use crate::engine::{BlockStats, Event, Finish, JobStats};
use crate::http::answer::{self, Done, Ending, Heading, News, Output, Progress, Timings};
use crate::http::error::ApiError;
use crate::http::ids;
use crate::http::stream::{Frames, Teller};
use crate::session::Session;
use crate::text::{Delta, Tokenizer};

/// An answer in the form of the completions API.
struct Completion {
    shape: Shape,
    id: String,
    heading: Heading,
    extras: Extras,
    choices: Vec<Choice>,
    /// The first choice reads the prompt for all.
    progress: Progress,
    /// Turns ids of unfinished blocks into text, if these are shown.
    shows_cells_with: Option<Arc<Tokenizer>>,
}

/// A choice of a stream.
#[derive(Default)]
struct Choice {
    output: Output,
    timings: Timings,
    /// Time spent on final blocks.
    blocks_time: Duration,
    finish: Option<Finish>,
}

/// Makes who tells an answer of this shape.
pub(super) fn teller(shape: Shape, session: &Session) -> impl FnOnce(Heading, Extras) -> Box<dyn Teller> {
    move |heading, extras| {
        let mut completion = Completion::new(shape, heading, extras);
        completion.shows_cells_with = extras.refinements.then(|| Arc::clone(&session.tokenizer));
        Box::new(completion)
    }
}

impl Completion {
    fn new(shape: Shape, heading: Heading, extras: Extras) -> Self {
        let id = ids::random(match shape {
            Shape::Chat => "chatcmpl-",
            Shape::Text => "cmpl-",
        });
        let progress = Progress::default();
        Self { shape, id, heading, extras, choices: Vec::new(), progress, shows_cells_with: None }
    }

    /// An object with the members that all answers and chunks begin with.
    fn object(&self, is_chunk: bool) -> Map<String, Value> {
        let object = match (self.shape, is_chunk) {
            (Shape::Chat, false) => "chat.completion",
            (Shape::Chat, true) => "chat.completion.chunk",
            (Shape::Text, _) => "text_completion",
        };
        Map::from_iter([
            ("id".to_owned(), json!(self.id)),
            ("object".to_owned(), json!(object)),
            ("created".to_owned(), json!(self.heading.created)),
            ("model".to_owned(), json!(self.heading.model)),
            ("system_fingerprint".to_owned(), json!(self.heading.fingerprint)),
        ])
    }

    /// A choice of a plain answer.
    fn choice(&self, index: usize, done: &Done) -> Value {
        let mut choice = Map::from_iter([("index".to_owned(), json!(index))]);
        match self.shape {
            Shape::Chat => choice.insert("message".to_owned(), message(&done.output)),
            Shape::Text => choice.insert("text".to_owned(), json!(done.output.content)),
        };
        choice.insert("logprobs".to_owned(), Value::Null);
        choice.insert("finish_reason".to_owned(), json!(reason(done.output.ending(done.finish.reason))));
        Value::Object(choice)
    }

    fn tell(&mut self, choice: usize, deltas: Vec<Delta>, frames: &mut Frames) {
        for delta in deltas {
            let told = &mut self.choices[choice];
            let shown = match told.output.push(delta) {
                None | Some(News::CallEnd(_)) => continue,
                Some(News::Text(text)) => json!({ "content": text }),
                Some(News::Call(index)) => {
                    let call = &told.output.calls[index];
                    let function = json!({ "name": call.name, "arguments": "" });
                    json!({ "tool_calls": [{ "index": index, "id": call.id, "type": "function", "function": function }] })
                }
                Some(News::Arguments(index, fragment)) => {
                    json!({ "tool_calls": [{ "index": index, "function": { "arguments": fragment } }] })
                }
            };
            let timings = self.extras.timings.then(|| told.timings.object());
            let mut chunk = self.chunk(choice, shown, Value::Null);
            if let Some(timings) = timings {
                chunk["timings"] = timings;
            }
            frames.data(&chunk);
        }
    }

    fn prefilled(&mut self, choice: usize, processed: usize, elapsed: Duration, frames: &mut Frames) {
        let timings = &mut self.choices[choice].timings;
        timings.prompt = processed.saturating_sub(timings.cached);
        timings.prompt_time = elapsed;
        if choice == 0
            && let Some(processed) = self.progress.at(processed)
        {
            self.tell_progress(processed, frames);
        }
    }

    /// The prompt has been read.
    fn end_progress(&mut self, choice: usize, frames: &mut Frames) {
        let timings = &mut self.choices[choice].timings;
        timings.prompt = self.heading.prompt_tokens.saturating_sub(timings.cached);
        if let Some(processed) = self.progress.end() {
            self.tell_progress(processed, frames);
        }
    }

    fn tell_progress(&mut self, processed: usize, frames: &mut Frames) {
        let timings = self.choices[0].timings;
        let mut chunk = self.chunk(0, json!({}), Value::Null);
        chunk["prompt_progress"] = self.progress.object(&timings, processed);
        chunk["timings"] = timings.object();
        frames.data(&chunk);
        if processed >= self.heading.prompt_tokens {
            // Without a chunk of another kind the web UI would stay at "preparing" until the first block.
            let mut chunk = self.chunk(0, json!({}), Value::Null);
            chunk["timings"] = timings.object();
            frames.data(&chunk);
        }
    }

    fn step(&self, choice: usize, block: &BlockStats) -> Value {
        let told = &self.choices[choice];
        let mut timings = told.timings;
        timings.predicted_time = told.blocks_time + block.elapsed;
        let mut chunk = self.chunk(choice, json!({}), Value::Null);
        chunk["timings"] = timings.object();
        chunk["minnow"] = json!({ "batch": answer::batch(block) });
        chunk
    }

    /// The one finish chunk of a choice.
    fn finish(&mut self, choice: usize, finish: Finish, frames: &mut Frames) {
        let ending = self.choices[choice].output.ending(finish.reason);
        let mut last = self.chunk(choice, json!({}), json!(reason(ending)));
        last["timings"] = Timings::of(&finish.stats).object();
        last["minnow"] = self.heading.minnow(choice, &finish);
        frames.data(&last);
        self.choices[choice].finish = Some(finish);
    }

    /// A chunk with one choice. In text completions a delta's content is the choice's text.
    fn chunk(&self, index: usize, delta: Value, finish_reason: Value) -> Value {
        let mut choice = Map::new();
        choice.insert("index".to_owned(), json!(index));
        match self.shape {
            Shape::Chat => choice.insert("delta".to_owned(), delta),
            Shape::Text => choice.insert("text".to_owned(), json!(delta["content"].as_str().unwrap_or(""))),
        };
        choice.insert("logprobs".to_owned(), Value::Null);
        choice.insert("finish_reason".to_owned(), finish_reason);
        let mut chunk = self.object(true);
        chunk.insert("choices".to_owned(), json!([choice]));
        if self.extras.usage {
            chunk.insert("usage".to_owned(), Value::Null);
        }
        Value::Object(chunk)
    }

    /// Adds what is said of all choices together.
    fn summarize(&self, finishes: &[&Finish], object: &mut Map<String, Value>) {
        let total = JobStats::total(finishes.iter().map(|finish| &finish.stats));
        object.insert("usage".to_owned(), answer::usage(&total));
        object.insert("timings".to_owned(), Timings::of(&total).object());
        object.insert("minnow".to_owned(), self.heading.minnow_of_all(finishes));
    }
}

impl Teller for Completion {
    fn whole(&mut self, done: Vec<Done>) -> Value {
        let mut object = self.object(false);
        let choices = done.iter().enumerate().map(|(index, done)| self.choice(index, done));
        object.insert("choices".to_owned(), choices.collect());
        self.summarize(&done.iter().map(|done| &done.finish).collect::<Vec<_>>(), &mut object);
        Value::Object(object)
    }

    /// The role chunk and what the request demanded. Text completions have no roles.
    fn begin(&mut self, cached_tokens: usize, frames: &mut Frames) {
        self.choices.resize_with(self.heading.choices, Choice::default);
        self.progress = Progress::new(self.extras.progress, cached_tokens, self.heading.prompt_tokens);
        self.choices[0].timings.cached = cached_tokens;
        for choice in 0..self.heading.choices {
            if self.shape == Shape::Chat {
                frames.data(&self.chunk(choice, json!({"role": "assistant", "content": ""}), Value::Null));
            }
            self.tell(choice, self.heading.opened.clone(), frames);
        }
    }

    fn take(&mut self, choice: usize, event: Event, frames: &mut Frames) {
        match event {
            Event::Admitted { cached_tokens, .. } => self.choices[choice].timings.cached = cached_tokens,
            Event::Prefilled { processed, total, elapsed } => {
                self.prefilled(choice, processed.min(total), elapsed, frames);
            }
            Event::Refined(view) => {
                self.end_progress(choice, frames);
                if let Some(tokenizer) = &self.shows_cells_with {
                    let mut chunk = self.chunk(choice, json!({}), Value::Null);
                    chunk["minnow"] = json!({ "refinement": answer::refinement(&view, tokenizer) });
                    frames.data(&chunk);
                }
            }
            Event::Step { block } => {
                self.end_progress(choice, frames);
                if self.extras.timings {
                    frames.data(&self.step(choice, &block));
                }
            }
            Event::Block { deltas, block, text_tokens, .. } => {
                self.end_progress(choice, frames);
                let told = &mut self.choices[choice];
                told.blocks_time += block.elapsed;
                told.timings.predicted = text_tokens;
                told.timings.predicted_time = told.blocks_time;
                self.tell(choice, deltas, frames);
            }
            Event::Finished(mut finish) => {
                self.end_progress(choice, frames);
                self.tell(choice, std::mem::take(&mut finish.deltas), frames);
                self.finish(choice, *finish, frames);
            }
            Event::Failed(_) => {}
        }
    }

    fn end(&mut self, frames: &mut Frames) {
        if self.extras.usage {
            let finishes: Vec<&Finish> = self.choices.iter().filter_map(|choice| choice.finish.as_ref()).collect();
            let mut chunk = self.object(true);
            chunk.insert("choices".to_owned(), json!([]));
            self.summarize(&finishes, &mut chunk);
            frames.data(&Value::Object(chunk));
        }
        frames.done();
    }

    fn fail(&mut self, error: &ApiError, frames: &mut Frames) {
        frames.data(&error.body());
        frames.done();
    }
}

fn reason(ending: Ending) -> &'static str {
    match ending {
        Ending::Stop => "stop",
        Ending::Length => "length",
        Ending::Calls => "tool_calls",
    }
}

fn message(output: &Output) -> Value {
    if output.calls.is_empty() {
        return json!({"role": "assistant", "content": output.content});
    }
    let calls = output.calls.iter().map(|call| {
        let function = json!({"name": call.name, "arguments": call.arguments});
        json!({"id": call.id, "type": "function", "function": function})
    });
    let content = if output.content.is_empty() { Value::Null } else { json!(output.content) };
    json!({"role": "assistant", "content": content, "tool_calls": calls.collect::<Vec<_>>()})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::FinishReason;
    use crate::http::answer::tests::heading;

    /// A stream's events, driven as [`crate::http::stream`] does.
    fn told(shape: Shape, extras: Extras, cached: usize, events: Vec<Event>) -> Vec<Value> {
        told_by(Completion::new(shape, heading(1), extras), cached, events.into_iter().map(|event| (0, event)))
    }

    fn told_by(
        mut completion: Completion,
        cached: usize,
        events: impl IntoIterator<Item = (usize, Event)>,
    ) -> Vec<Value> {
        let mut frames = Frames::default();
        completion.begin(cached, &mut frames);
        let mut open = completion.heading.choices;
        for (choice, event) in events {
            open -= usize::from(matches!(event, Event::Finished(_)));
            completion.take(choice, event, &mut frames);
        }
        if open == 0 {
            completion.end(&mut frames);
            let mut events = frames.events();
            assert_eq!(events.pop(), Some(json!("[DONE]")));
            return events;
        }
        frames.events()
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
        Event::Finished(Box::new(Finish {
            reason,
            deltas,
            tokens: Vec::new(),
            stop_string: None,
            tool_parse_error: None,
            stats,
        }))
    }

    #[test]
    fn a_stream_begins_with_the_role_and_ends_with_the_reason() {
        let events = vec![block(text("a"), 4), block(Vec::new(), 4), finished(text("b"), FinishReason::Stop)];
        let made = told(Shape::Chat, Extras::default(), 0, events);
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
        let extras = Extras { usage: true, ..Extras::default() };
        let made = told(Shape::Text, extras, 0, vec![block(text("a"), 4), finished(Vec::new(), FinishReason::Length)]);
        let (last, others) = made.split_last().unwrap();
        assert_eq!(last["choices"], json!([]));
        assert_eq!(last["usage"]["total_tokens"], 79);
        assert!(last["timings"].is_object());
        assert!(others.iter().all(|chunk| chunk["usage"] == Value::Null && chunk.get("usage").is_some()));
        let texts: Vec<&Value> = others.iter().map(|chunk| &chunk["choices"][0]["text"]).collect();
        assert_eq!(texts, ["a", ""], "text completions have no role chunk");
    }

    #[test]
    fn each_choice_has_its_chunks_and_usage_is_the_sum() {
        let extras = Extras { usage: true, ..Extras::default() };
        let completion = Completion::new(Shape::Chat, heading(2), extras);
        let events = [
            (1, block(text("b"), 4)),
            (0, block(text("a"), 4)),
            (1, finished(Vec::new(), FinishReason::Stop)),
            (0, finished(Vec::new(), FinishReason::Length)),
        ];
        let made = told_by(completion, 0, events);
        let (last, others) = made.split_last().unwrap();
        let shown: Vec<(u64, &Value)> = others
            .iter()
            .map(|chunk| (chunk["choices"][0]["index"].as_u64().unwrap(), &chunk["choices"][0]["finish_reason"]))
            .collect();
        let (open, stop, length) = (Value::Null, json!("stop"), json!("length"));
        assert_eq!(shown, [(0, &open), (1, &open), (1, &open), (0, &open), (1, &stop), (0, &length)]);
        assert_eq!(others[4]["minnow"]["generation_settings"]["seed"], 2);
        assert_eq!(last["usage"]["prompt_tokens"], 70, "the prompt counts once");
        assert_eq!(last["usage"]["completion_tokens"], 18);
        assert_eq!(last["minnow"]["choices"][1]["seed"], 2);
    }

    fn call(index: usize) -> Vec<Delta> {
        let fragment = |text: &str| Delta::CallArguments { index, fragment: text.to_owned() };
        vec![
            Delta::CallBegin { index, name: "f".to_owned() },
            fragment("{\"a\":"),
            fragment("1}"),
            Delta::CallEnd { index },
        ]
    }

    #[test]
    fn streamed_calls_and_the_final_message_agree() {
        let deltas = [call(0), call(1)].concat();
        let made =
            told(Shape::Chat, Extras::default(), 0, vec![block(deltas, 9), finished(vec![], FinishReason::Stop)]);
        let calls: Vec<&Value> = made.iter().map(|chunk| &chunk["choices"][0]["delta"]["tool_calls"][0]).collect();
        let calls = &calls[1..7];
        let indexes: Vec<u64> = calls.iter().filter_map(|call| call["index"].as_u64()).collect();
        assert_eq!(indexes, [0, 0, 0, 1, 1, 1]);
        assert_eq!(calls[0]["function"], json!({"name": "f", "arguments": ""}));
        assert_eq!(calls[1], &json!({"index": 0, "function": {"arguments": "{\"a\":"}}));
        assert_eq!(made.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
        let message = message(&Output::begun(&[call(0), call(1)].concat()));
        assert_eq!(message["content"], Value::Null);
        assert_eq!(message["tool_calls"][1]["function"]["arguments"], "{\"a\":1}");
        assert_ne!(message["tool_calls"][0]["id"], message["tool_calls"][1]["id"]);
        let cut = super::message(&Output::begun(&call(0)[..2]));
        assert_eq!(cut["tool_calls"][0]["function"]["arguments"], "{\"a\":", "shown as far as it came");
    }

    fn prefilled(processed: usize) -> Event {
        Event::Prefilled { processed, total: 70, elapsed: Duration::from_millis(3) }
    }

    fn processed(made: &[Value]) -> Vec<u64> {
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
            let events = events.into_iter().chain([block(text("a"), 4), finished(Vec::new(), FinishReason::Stop)]);
            let made = told(Shape::Chat, extras, 0, events.collect());
            assert_eq!(processed(&made), expected);
            let last = made.iter().rposition(|chunk| chunk.get("prompt_progress").is_some()).unwrap();
            let next = &made[last + 1];
            assert!(next.get("timings").is_some() && next["choices"][0]["delta"] == json!({}));
        }
    }

    #[test]
    fn progress_is_silent_when_all_is_cached_or_nobody_asked() {
        let extras = Extras { progress: true, ..Extras::default() };
        for (extras, cached) in [(extras, 70), (Extras::default(), 0)] {
            let made = told(Shape::Chat, extras, cached, vec![prefilled(70), block(text("a"), 4)]);
            assert!(processed(&made).is_empty());
        }
    }

    #[test]
    fn steps_are_shown_only_with_timings() {
        let step = || Event::Step { block: BlockStats { forwards: 3, ..BlockStats::default() } };
        let extras = Extras { timings: true, ..Extras::default() };
        let made = told(Shape::Chat, extras, 0, vec![step(), block(text("a"), 4), step()]);
        assert_eq!(made[1]["minnow"]["batch"]["evaluated_tokens"], 96);
        let predicted: Vec<u64> = made.iter().filter_map(|chunk| chunk["timings"]["predicted_n"].as_u64()).collect();
        assert_eq!(predicted, [0, 4, 4]);
        let extras = Extras { progress: true, ..Extras::default() };
        assert_eq!(told(Shape::Chat, extras, 70, vec![step()]).len(), 1);
    }

    #[test]
    fn a_failure_is_one_event_at_the_end() {
        let mut completion = Completion::new(Shape::Chat, heading(1), Extras::default());
        let mut frames = Frames::default();
        let error: ApiError = crate::engine::JobError::Draining.into();
        completion.fail(&error, &mut frames);
        let events = frames.events();
        assert_eq!(events[0]["error"]["code"], "draining");
        assert_eq!(events[1..], [json!("[DONE]")]);
    }
}
