//! How the Messages API tells an answer: as a message, or as events that build one.
//!
//! The order of a stream: the message starts; blocks with indexes from 0, one open at a time; the reason and the usage; the
//! message stops. Silence is broken by `ping` events. A call's arguments are sent as one piece when the call ends: only
//! then it is known whether they are an object, and what was sent cannot be taken back. If they are none, the input is
//! `{}` and what the model wrote follows as a text.

use serde_json::{Value, json};

use super::error_body;
use crate::engine::{Event, Finish, JobStats};
use crate::http::answer::{Call, Done, Ending, Heading, Item, Output};
use crate::http::error::ApiError;
use crate::http::ids;
use crate::http::openai::Extras;
use crate::http::row::{Change, Row};
use crate::http::stream::{Frames, Teller};
use crate::text::Delta;

/// Makes who tells an answer.
pub(super) fn teller(heading: Heading, _: Extras) -> Box<dyn Teller> {
    Box::new(Message::new(heading))
}

/// An answer in the form of the Messages API.
struct Message {
    id: String,
    heading: Heading,
    row: Row,
    /// Blocks that have stopped.
    blocks: usize,
    finish: Option<Finish>,
}

impl Message {
    fn new(heading: Heading) -> Self {
        Self { id: ids::random("msg_"), heading, row: Row::default(), blocks: 0, finish: None }
    }

    fn object(&self, content: Vec<Value>, usage: Value) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.heading.model,
            "content": content,
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage,
        })
    }

    fn tell(&mut self, deltas: Vec<Delta>, frames: &mut Frames) {
        for delta in deltas {
            for change in self.row.push(delta) {
                self.change(change, frames);
            }
        }
    }

    fn change(&mut self, change: Change, frames: &mut Frames) {
        match change {
            Change::Begin(index) => match self.row.output().items().nth(index) {
                Some(Item::Call(call)) => {
                    let block = json!({ "type": "tool_use", "id": call.id, "name": call.name, "input": {} });
                    self.start(&block, frames);
                }
                Some(Item::Text(_)) | None => self.start(&text(""), frames),
            },
            Change::Text(_, text) => self.delta(&json!({ "type": "text_delta", "text": text }), frames),
            // They come with the end.
            Change::Arguments(..) => {}
            Change::End(index) => {
                let mut raw = None;
                if let Some(Item::Call(call)) = self.row.output().items().nth(index) {
                    match input(call) {
                        Some(_) => {
                            let delta = json!({ "type": "input_json_delta", "partial_json": call.arguments });
                            self.delta(&delta, frames);
                        }
                        None => raw = raw_text(call).map(str::to_owned),
                    }
                }
                self.stop(frames);
                if let Some(raw) = raw {
                    self.start(&text(""), frames);
                    self.delta(&json!({ "type": "text_delta", "text": raw }), frames);
                    self.stop(frames);
                }
            }
        }
    }

    fn start(&self, block: &Value, frames: &mut Frames) {
        let name = "content_block_start";
        frames.named(name, &json!({ "type": name, "index": self.blocks, "content_block": block }));
    }

    fn delta(&self, delta: &Value, frames: &mut Frames) {
        let name = "content_block_delta";
        frames.named(name, &json!({ "type": name, "index": self.blocks, "delta": delta }));
    }

    fn stop(&mut self, frames: &mut Frames) {
        let name = "content_block_stop";
        frames.named(name, &json!({ "type": name, "index": self.blocks }));
        self.blocks += 1;
    }
}

impl Teller for Message {
    fn whole(&mut self, done: Vec<Done>) -> Value {
        let Some(Done { output, finish }) = done.into_iter().next() else { return Value::Null };
        let content = output.items().flat_map(blocks).collect();
        let mut message = self.object(content, usage(&finish.stats));
        (message["stop_reason"], message["stop_sequence"]) = reason(&output, &finish);
        message["minnow"] = self.heading.minnow(0, &finish);
        message
    }

    fn begin(&mut self, cached_tokens: usize, frames: &mut Frames) {
        let prompt_tokens = self.heading.prompt_tokens;
        let before = usage(&JobStats { prompt_tokens, cached_tokens, ..JobStats::default() });
        let name = "message_start";
        frames.named(name, &json!({ "type": name, "message": self.object(Vec::new(), before) }));
        self.tell(self.heading.opened.clone(), frames);
    }

    fn take(&mut self, _choice: usize, event: Event, frames: &mut Frames) {
        match event {
            Event::Block { deltas, .. } => self.tell(deltas, frames),
            Event::Finished(mut finish) => {
                self.tell(std::mem::take(&mut finish.deltas), frames);
                self.finish = Some(*finish);
            }
            Event::Admitted { .. }
            | Event::Prefilled { .. }
            | Event::Refined(_)
            | Event::Step { .. }
            | Event::Failed(_) => {}
        }
    }

    fn end(&mut self, frames: &mut Frames) {
        let Some(finish) = self.finish.take() else { return };
        if let Some(change) = self.row.close() {
            self.change(change, frames);
        }
        let (stop_reason, stop_sequence) = reason(self.row.output(), &finish);
        let name = "message_delta";
        let delta = json!({
            "type": name,
            "delta": { "stop_reason": stop_reason, "stop_sequence": stop_sequence },
            "usage": { "output_tokens": finish.stats.completion_tokens },
            "minnow": self.heading.minnow(0, &finish),
        });
        frames.named(name, &delta);
        frames.named("message_stop", &json!({ "type": "message_stop" }));
    }

    fn fail(&mut self, error: &ApiError, frames: &mut Frames) {
        frames.named("error", &error_body(error, &self.heading.request_id));
    }

    fn ping(&self, frames: &mut Frames) {
        frames.named("ping", &json!({ "type": "ping" }));
    }
}

fn usage(stats: &JobStats) -> Value {
    json!({
        "input_tokens": stats.prompt_tokens.saturating_sub(stats.cached_tokens),
        "cache_read_input_tokens": stats.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": stats.completion_tokens,
    })
}

/// `stop_reason` and `stop_sequence`
fn reason(output: &Output, finish: &Finish) -> (Value, Value) {
    let ending = output.ending(finish.reason);
    match (ending, &finish.stop_string) {
        (Ending::Calls, _) => (json!("tool_use"), Value::Null),
        (Ending::Stop | Ending::Length, Some(stop)) => (json!("stop_sequence"), json!(stop)),
        (Ending::Stop, None) => (json!("end_turn"), Value::Null),
        (Ending::Length, None) => (json!("max_tokens"), Value::Null),
    }
}

/// What an item is in a whole message.
fn blocks(item: Item<'_>) -> Vec<Value> {
    match item {
        Item::Text(said) => vec![text(said)],
        Item::Call(call) => {
            let parsed = input(call);
            let raw = if parsed.is_none() { raw_text(call) } else { None };
            let input = parsed.unwrap_or_else(|| json!({}));
            let block = json!({ "type": "tool_use", "id": call.id, "name": call.name, "input": input });
            [block].into_iter().chain(raw.map(text)).collect()
        }
    }
}

fn text(text: &str) -> Value {
    json!({ "type": "text", "text": text })
}

/// A call's arguments, if they are an object.
fn input(call: &Call) -> Option<Value> {
    serde_json::from_str(&call.arguments).ok().filter(Value::is_object)
}

/// Arguments that are no object, unless there are none.
fn raw_text(call: &Call) -> Option<&str> {
    Some(call.arguments.as_str()).filter(|arguments| !arguments.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{BlockStats, FinishReason};
    use crate::http::answer::tests::heading;

    fn call(arguments: &str, is_closed: bool) -> Vec<Delta> {
        let mut deltas = vec![
            Delta::CallBegin { index: 0, name: "f".to_owned() },
            Delta::CallArguments { index: 0, fragment: arguments.to_owned() },
        ];
        deltas.extend(is_closed.then_some(Delta::CallEnd { index: 0 }));
        deltas
    }

    fn content(text: &str) -> Vec<Delta> {
        vec![Delta::Content(text.to_owned())]
    }

    fn finish(reason: FinishReason, stop: Option<&str>) -> Finish {
        let stats = JobStats { prompt_tokens: 70, cached_tokens: 64, completion_tokens: 9, ..JobStats::default() };
        let stop_string = stop.map(Into::into);
        Finish { reason, deltas: Vec::new(), tokens: Vec::new(), stop_string, tool_parse_error: None, stats }
    }

    /// The events of a stream, and the message that they add up to.
    fn told(deltas: &[Delta], finish: Finish) -> (Vec<Value>, Value) {
        let mut teller = Message::new(heading(1));
        let mut frames = Frames::default();
        teller.begin(64, &mut frames);
        for delta in deltas {
            let block = BlockStats::default();
            let deltas = vec![delta.clone()];
            teller.take(0, Event::Block { deltas, block, completion_tokens: 1, text_tokens: 1 }, &mut frames);
        }
        teller.take(0, Event::Finished(Box::new(finish)), &mut frames);
        teller.end(&mut frames);
        let events = frames.events();
        let mut message = events[0]["message"].clone();
        let mut open = None;
        for event in &events[1..] {
            match event["type"].as_str().unwrap() {
                "content_block_start" => {
                    assert_eq!((open, event["index"].as_u64()), (None, Some(count(&message))));
                    open = event["index"].as_u64();
                    message["content"].as_array_mut().unwrap().push(event["content_block"].clone());
                }
                "content_block_delta" => {
                    assert_eq!(event["index"].as_u64(), open);
                    let block = message["content"].as_array_mut().unwrap().last_mut().unwrap();
                    match event["delta"]["partial_json"].as_str() {
                        Some(json) => block["input"] = serde_json::from_str(json).unwrap(),
                        None => {
                            let text = [&block["text"], &event["delta"]["text"]].map(|text| text.as_str().unwrap());
                            block["text"] = json!(text.concat());
                        }
                    }
                }
                "content_block_stop" => assert_eq!(event["index"].as_u64(), open.take()),
                "message_delta" => {
                    for name in ["stop_reason", "stop_sequence"] {
                        message[name] = event["delta"][name].clone();
                    }
                    message["usage"]["output_tokens"] = event["usage"]["output_tokens"].clone();
                }
                other => assert_eq!(other, "message_stop"),
            }
        }
        assert_eq!((open, &events.last().unwrap()["type"]), (None, &json!("message_stop")));
        (events, message)
    }

    fn count(message: &Value) -> u64 {
        message["content"].as_array().unwrap().len() as u64
    }

    #[test]
    fn a_stream_adds_up_to_the_plain_message() {
        for (deltas, reason, stop) in [
            (content("a"), FinishReason::Stop, None),
            (content("a"), FinishReason::Stop, Some("END")),
            ([content("a"), content("b")].concat(), FinishReason::Length, None),
            ([content("a"), call(r#"{"x": [1]}"#, true), content("b")].concat(), FinishReason::Stop, None),
            (call("[1]", true), FinishReason::Stop, None),
            ([call(r#"{"x": "#, false), content("b")].concat(), FinishReason::Stop, None),
            (call(r#"{"x": "#, false), FinishReason::Length, None),
            (call("", true), FinishReason::Stop, None),
            (Vec::new(), FinishReason::Length, None),
        ] {
            let (_, mut streamed) = told(&deltas, finish(reason, stop));
            let done = Done { output: Output::begun(&deltas), finish: finish(reason, stop) };
            let mut plain = Message::new(heading(1)).whole(vec![done]);
            plain.as_object_mut().unwrap().swap_remove("minnow");
            for message in [&mut streamed, &mut plain] {
                message["id"] = json!(null);
                for block in message["content"].as_array_mut().unwrap() {
                    assert!(block["id"].is_null() || block["id"].as_str().unwrap().starts_with("call_"));
                    block["id"] = json!(null);
                }
            }
            assert_eq!(streamed, plain, "{deltas:?}");
        }
    }

    #[test]
    fn the_reason_is_told_in_this_apis_words() {
        let reason = |deltas: &[Delta], finish| {
            let (_, message) = told(deltas, finish);
            (message["stop_reason"].clone(), message["stop_sequence"].clone())
        };
        let none = Value::Null;
        let (stop, length) = (FinishReason::Stop, FinishReason::Length);
        assert_eq!(reason(&content("a"), finish(stop, None)), (json!("end_turn"), none.clone()));
        assert_eq!(reason(&content("a"), finish(stop, Some("x"))), (json!("stop_sequence"), json!("x")));
        assert_eq!(reason(&content("a"), finish(length, None)), (json!("max_tokens"), none.clone()));
        assert_eq!(reason(&call("{}", true), finish(stop, None)), (json!("tool_use"), none.clone()));
        assert_eq!(reason(&call("{}", false), finish(length, None)), (json!("max_tokens"), none));
    }

    #[test]
    fn arguments_that_are_no_object_follow_as_a_text() {
        let (events, message) = told(&call("[1", true), finish(FinishReason::Stop, None));
        assert_eq!(message["content"][0]["input"], json!({}));
        assert_eq!(message["content"][1], json!({"type": "text", "text": "[1"}));
        assert!(!json!(events).to_string().contains("input_json_delta"));
        assert_eq!(message["usage"]["input_tokens"], 6);
        assert_eq!(message["usage"]["cache_read_input_tokens"], 64);
    }

    #[test]
    fn a_failure_is_an_error_event_and_silence_a_ping() {
        let mut teller = Message::new(heading(1));
        let mut frames = Frames::default();
        teller.ping(&mut frames);
        teller.fail(&crate::engine::JobError::Draining.into(), &mut frames);
        let events = frames.events();
        assert_eq!(events[0], json!({"type": "ping"}));
        assert_eq!((&events[1]["type"], &events[1]["error"]["type"]), (&json!("error"), &json!("overloaded_error")));
        assert_eq!(events[1]["request_id"], "req_1");
    }
}
