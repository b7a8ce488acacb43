//! How the Responses API tells an answer: as a response object, or as events that build one.
//!
//! The order of a stream: created, in progress; for each item added, its parts and deltas, done; then completed,
//! incomplete or failed with the whole object, and no `[DONE]`. Events are numbered without gaps, and an item has one id
//! everywhere. A text between calls is a message of its own, in a stream as in a plain answer.

use serde_json::{Map, Value, json};

use crate::engine::{Event, Finish, JobStats};
use crate::http::answer::{Call, Done, Ending, Heading, Item, Output, Progress, Timings};
use crate::http::error::ApiError;
use crate::http::ids;
use crate::http::openai::Extras;
use crate::http::request::unix_seconds;
use crate::http::row::{Change, Row};
use crate::http::stream::{Frames, Teller};
use crate::text::Delta;

/// What an answer repeats of its request.
#[derive(Debug)]
pub(super) struct Echo {
    /// `instructions`
    pub instructions: Option<String>,
    /// `max_output_tokens`, if it is a number of tokens.
    pub limit: Option<usize>,
    /// `parallel_tool_calls`
    pub parallel: bool,
    /// `text.format`
    pub format: Value,
    /// `tool_choice`
    pub tool_choice: Value,
    /// `tools`
    pub tools: Value,
    /// `user`
    pub user: Option<String>,
    /// `metadata`
    pub metadata: Map<String, Value>,
}

/// Makes who tells the answer to a request.
pub(super) fn teller(echo: Echo) -> impl FnOnce(Heading, Extras) -> Box<dyn Teller> {
    move |heading, extras| Box::new(Response::new(heading, extras, echo))
}

/// An answer in the form of the Responses API.
struct Response {
    id: String,
    heading: Heading,
    extras: Extras,
    echo: Echo,
    row: Row,
    /// Ids of the items that have begun.
    item_ids: Vec<String>,
    timings: Timings,
    progress: Progress,
    /// The number of the next event.
    sequence_number: u64,
    finish: Option<Finish>,
}

/// Where a response stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

impl Status {
    fn of(ending: Ending) -> Self {
        if ending == Ending::Length { Self::Incomplete } else { Self::Completed }
    }

    fn name(self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Incomplete => "incomplete",
            Self::Failed => "failed",
        }
    }

    fn event(self) -> &'static str {
        match self {
            Self::InProgress => "response.in_progress",
            Self::Completed => "response.completed",
            Self::Incomplete => "response.incomplete",
            Self::Failed => "response.failed",
        }
    }
}

impl Response {
    fn new(heading: Heading, extras: Extras, echo: Echo) -> Self {
        Self {
            id: ids::random("resp_"),
            heading,
            extras,
            echo,
            row: Row::default(),
            item_ids: Vec::new(),
            timings: Timings::default(),
            progress: Progress::default(),
            sequence_number: 0,
            finish: None,
        }
    }

    /// The response object.
    fn object(&self, status: Status, output: Vec<Value>, finish: Option<&Finish>) -> Value {
        let Echo { instructions, limit, parallel, format, tool_choice, tools, user, metadata } = &self.echo;
        let is_incomplete = status == Status::Incomplete;
        json!({
            "id": self.id,
            "object": "response",
            "created_at": self.heading.created,
            "completed_at": (status == Status::Completed).then(unix_seconds),
            "status": status.name(),
            "error": null,
            "incomplete_details": is_incomplete.then(|| json!({ "reason": "max_output_tokens" })),
            "instructions": instructions,
            "max_output_tokens": limit,
            "model": self.heading.model,
            "output": output,
            "parallel_tool_calls": parallel,
            "previous_response_id": null,
            "reasoning": { "effort": null, "summary": null },
            "store": false,
            "temperature": self.heading.settings["temperature"],
            "text": { "format": format },
            "tool_choice": tool_choice,
            "tools": tools,
            "top_p": self.heading.settings["top_p"],
            "truncation": "disabled",
            "background": false,
            "service_tier": "default",
            "user": user,
            "metadata": metadata,
            "usage": finish.map(|finish| usage(&finish.stats)),
            "timings": finish.map(|finish| Timings::of(&finish.stats).object()),
            "minnow": finish.map(|finish| self.heading.minnow(0, finish)),
        })
    }

    /// An event about `members`.
    fn event(&mut self, name: &str, members: Value, frames: &mut Frames) {
        let mut event = Map::from_iter([
            ("type".to_owned(), json!(name)),
            ("sequence_number".to_owned(), json!(self.sequence_number)),
        ]);
        if let Value::Object(members) = members {
            event.extend(members);
        }
        self.sequence_number += 1;
        frames.named(name, &Value::Object(event));
    }

    fn tell(&mut self, deltas: Vec<Delta>, frames: &mut Frames) {
        for delta in deltas {
            for change in self.row.push(delta) {
                self.change(change, None, frames);
            }
        }
    }

    /// `ending` is known once nothing follows.
    fn change(&mut self, change: Change, ending: Option<Ending>, frames: &mut Frames) {
        match change {
            Change::Begin(index) => self.begin_item(index, frames),
            Change::Text(index, text) => {
                let more = json!({ "content_index": 0, "delta": text, "logprobs": [] });
                self.event("response.output_text.delta", self.about(index, more), frames);
            }
            Change::Arguments(index, fragment) => {
                let event = self.about(index, json!({ "delta": fragment }));
                self.event("response.function_call_arguments.delta", event, frames);
            }
            Change::End(index) => self.end_item(index, ending, frames),
        }
    }

    /// Members that name an item, and more.
    fn about(&self, index: usize, more: Value) -> Value {
        let mut members = json!({ "item_id": self.item_ids[index], "output_index": index });
        if let (Value::Object(members), Value::Object(more)) = (&mut members, more) {
            members.extend(more);
        }
        members
    }

    fn begin_item(&mut self, index: usize, frames: &mut Frames) {
        let item = self.row.output().items().nth(index);
        let is_text = !matches!(item, Some(Item::Call(_)));
        let id = item_id(item);
        let added = match item {
            Some(Item::Call(call)) => function_call(&id, call, "", "in_progress"),
            Some(Item::Text(_)) | None => message(&id, None, "in_progress"),
        };
        self.item_ids.push(id);
        self.event("response.output_item.added", json!({ "output_index": index, "item": added }), frames);
        if is_text {
            let event = self.about(index, json!({ "content_index": 0, "part": part("") }));
            self.event("response.content_part.added", event, frames);
        }
    }

    fn end_item(&mut self, index: usize, ending: Option<Ending>, frames: &mut Frames) {
        let output = self.row.output();
        let done = shown(output, index, &self.item_ids[index], ending);
        let item = output.items().nth(index);
        match item {
            Some(Item::Call(call)) => {
                let more = json!({ "name": call.name, "arguments": call.arguments });
                self.event("response.function_call_arguments.done", self.about(index, more), frames);
            }
            item => {
                let text = text_of(item).to_owned();
                let more = json!({ "content_index": 0, "text": text, "logprobs": [] });
                self.event("response.output_text.done", self.about(index, more), frames);
                let more = json!({ "content_index": 0, "part": part(&text) });
                self.event("response.content_part.done", self.about(index, more), frames);
            }
        }
        self.event("response.output_item.done", json!({ "output_index": index, "item": done }), frames);
    }

    /// The items that have begun.
    fn items(&self, ending: Option<Ending>) -> Vec<Value> {
        let output = self.row.output();
        self.item_ids.iter().enumerate().map(|(index, id)| shown(output, index, id, ending)).collect()
    }

    fn tell_progress(&mut self, processed: usize, frames: &mut Frames) {
        let progress = self.progress.object(&self.timings, processed);
        let response = self.object(Status::InProgress, Vec::new(), None);
        let event = json!({ "response": response, "prompt_progress": progress });
        self.event("response.in_progress", event, frames);
    }

    /// The prompt has been read.
    fn end_progress(&mut self, frames: &mut Frames) {
        if let Some(processed) = self.progress.end() {
            self.tell_progress(processed, frames);
        }
    }
}

impl Teller for Response {
    fn whole(&mut self, done: Vec<Done>) -> Value {
        let Some(Done { output, finish }) = done.into_iter().next() else { return Value::Null };
        let ending = output.ending(finish.reason);
        let count = output.items().len().max(1);
        let items = (0..count).map(|index| {
            let id = item_id(output.items().nth(index));
            shown(&output, index, &id, Some(ending))
        });
        self.object(Status::of(ending), items.collect(), Some(&finish))
    }

    fn begin(&mut self, cached_tokens: usize, frames: &mut Frames) {
        self.timings.cached = cached_tokens;
        self.progress = Progress::new(self.extras.progress, cached_tokens, self.heading.prompt_tokens);
        for name in ["response.created", "response.in_progress"] {
            let response = self.object(Status::InProgress, Vec::new(), None);
            self.event(name, json!({ "response": response }), frames);
        }
        self.tell(self.heading.opened.clone(), frames);
    }

    fn take(&mut self, _choice: usize, event: Event, frames: &mut Frames) {
        match event {
            Event::Prefilled { processed, elapsed, .. } => {
                self.timings.prompt_time = elapsed;
                if let Some(processed) = self.progress.at(processed) {
                    self.tell_progress(processed, frames);
                }
            }
            Event::Block { deltas, .. } => {
                self.end_progress(frames);
                self.tell(deltas, frames);
            }
            Event::Finished(mut finish) => {
                self.end_progress(frames);
                self.tell(std::mem::take(&mut finish.deltas), frames);
                self.finish = Some(*finish);
            }
            Event::Refined(_) | Event::Step { .. } => self.end_progress(frames),
            Event::Admitted { .. } | Event::Failed(_) => {}
        }
    }

    fn end(&mut self, frames: &mut Frames) {
        let Some(finish) = self.finish.take() else { return };
        let ending = self.row.output().ending(finish.reason);
        if let Some(change) = self.row.close() {
            self.change(change, Some(ending), frames);
        }
        if self.item_ids.is_empty() {
            // An empty answer is an empty message.
            self.begin_item(0, frames);
            self.end_item(0, Some(ending), frames);
        }
        let status = Status::of(ending);
        let response = self.object(status, self.items(Some(ending)), Some(&finish));
        self.event(status.event(), json!({ "response": response }), frames);
    }

    fn fail(&mut self, error: &ApiError, frames: &mut Frames) {
        let status = Status::Failed;
        // Nothing that was begun will be completed.
        let mut response = self.object(status, self.items(Some(Ending::Length)), None);
        let refusal = &error.body()["error"];
        response["error"] = json!({ "code": refusal["code"], "message": refusal["message"] });
        self.event(status.event(), json!({ "response": response }), frames);
    }
}

fn usage(stats: &JobStats) -> Value {
    json!({
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": { "cached_tokens": stats.cached_tokens },
        "output_tokens": stats.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": 0 },
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
    })
}

/// An id for an item; an output without items has an empty message.
fn item_id(item: Option<Item<'_>>) -> String {
    ids::random(match item {
        Some(Item::Call(_)) => "fc_",
        Some(Item::Text(_)) | None => "msg_",
    })
}

fn text_of(item: Option<Item<'_>>) -> &str {
    match item {
        Some(Item::Text(text)) => text,
        Some(Item::Call(_)) | None => "",
    }
}

/// An item that has ended. Without an ending something follows it.
fn shown(output: &Output, index: usize, id: &str, ending: Option<Ending>) -> Value {
    let item = output.items().nth(index);
    let is_last = index + 1 >= output.items().len();
    let is_whole = match item {
        Some(Item::Call(call)) => call.is_closed,
        Some(Item::Text(_)) | None => !is_last || ending != Some(Ending::Length),
    };
    let status = if is_whole { "completed" } else { "incomplete" };
    match item {
        Some(Item::Call(call)) => function_call(id, call, &call.arguments, status),
        item => message(id, Some(text_of(item)), status),
    }
}

/// A message; without text its one part has yet to come.
fn message(id: &str, text: Option<&str>, status: &str) -> Value {
    let content: Vec<Value> = text.into_iter().map(part).collect();
    json!({ "id": id, "type": "message", "role": "assistant", "status": status, "content": content })
}

fn part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

fn function_call(id: &str, call: &Call, arguments: &str, status: &str) -> Value {
    json!({
        "id": id,
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": arguments,
        "status": status,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::engine::{BlockStats, FinishReason};
    use crate::http::answer::tests::heading;

    fn echo() -> Echo {
        Echo {
            instructions: None,
            limit: Some(9),
            parallel: true,
            format: json!({"type": "text"}),
            tool_choice: json!("auto"),
            tools: json!([]),
            user: None,
            metadata: Map::new(),
        }
    }

    fn content(text: &str) -> Delta {
        Delta::Content(text.to_owned())
    }

    fn call(index: usize, is_closed: bool) -> Vec<Delta> {
        let fragment = |text: &str| Delta::CallArguments { index, fragment: text.to_owned() };
        let mut deltas = vec![Delta::CallBegin { index, name: "f".to_owned() }, fragment("{\"a\":"), fragment("1}")];
        deltas.extend(is_closed.then_some(Delta::CallEnd { index }));
        deltas
    }

    fn finish(reason: FinishReason) -> Finish {
        let stats = JobStats { prompt_tokens: 70, completion_tokens: 9, ..JobStats::default() };
        Finish { reason, deltas: Vec::new(), tokens: Vec::new(), stop_string: None, tool_parse_error: None, stats }
    }

    fn block(deltas: Vec<Delta>) -> Event {
        Event::Block { deltas, block: BlockStats::default(), completion_tokens: 1, text_tokens: 1 }
    }

    fn told(extras: Extras, events: Vec<Event>) -> Vec<Value> {
        let mut teller = Response::new(heading(1), extras, echo());
        let mut frames = Frames::default();
        teller.begin(0, &mut frames);
        for event in events {
            teller.take(0, event, &mut frames);
        }
        teller.end(&mut frames);
        let events = frames.events();
        let numbers: Vec<u64> = events.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
        assert!(numbers.iter().copied().eq(0..events.len() as u64), "{numbers:?}");
        events
    }

    fn kinds(events: &[Value]) -> Vec<&str> {
        let kinds = events.iter().map(|event| event["type"].as_str().unwrap().trim_start_matches("response."));
        kinds.collect()
    }

    #[test]
    fn a_text_is_told_event_for_event() {
        let events = told(
            Extras::default(),
            vec![
                block(vec![content("a")]),
                block(vec![content("b")]),
                Event::Finished(Box::new(finish(FinishReason::Stop))),
            ],
        );
        assert_eq!(
            kinds(&events),
            [
                "created",
                "in_progress",
                "output_item.added",
                "content_part.added",
                "output_text.delta",
                "output_text.delta",
                "output_text.done",
                "content_part.done",
                "output_item.done",
                "completed"
            ]
        );
        let id = &events[2]["item"]["id"];
        assert!(events[3..8].iter().all(|event| event["item_id"] == *id && event["output_index"] == 0));
        assert_eq!((&events[6]["text"], &events[8]["item"]["id"]), (&json!("ab"), id));
        let last = &events[9]["response"];
        assert_eq!(last["output"], json!([events[8]["item"]]));
        assert_eq!((&last["status"], &last["usage"]["total_tokens"]), (&json!("completed"), &json!(79)));
        assert_eq!((&events[0]["response"]["output"], &events[0]["response"]["usage"]), (&json!([]), &Value::Null));
        assert!(last["timings"].is_object() && last["minnow"].is_object() && last["completed_at"].is_u64());
    }

    #[test]
    fn a_stream_ends_with_the_plain_answer() {
        for (deltas, reason) in [
            (vec![content("a")], FinishReason::Stop),
            (vec![content("a")], FinishReason::Length),
            (Vec::new(), FinishReason::Stop),
            (Vec::new(), FinishReason::Length),
            ([call(0, true), call(1, true)].concat(), FinishReason::Stop),
            ([vec![content("a")], call(0, true), vec![content("b")]].concat(), FinishReason::Length),
            ([vec![content("a")], call(0, false)].concat(), FinishReason::Length),
        ] {
            let done = Done { output: Output::begun(&deltas), finish: finish(reason) };
            let mut plain = Response::new(heading(1), Extras::default(), echo()).whole(vec![done]);
            let events =
                told(Extras::default(), vec![block(deltas.clone()), Event::Finished(Box::new(finish(reason)))]);
            let mut last = events.last().unwrap()["response"].clone();
            let items: Vec<&Value> = events
                .iter()
                .filter(|event| event["type"] == "response.output_item.done")
                .map(|e| &e["item"])
                .collect();
            assert_eq!(json!(items), last["output"], "{deltas:?}");
            for response in [&mut plain, &mut last] {
                assert_eq!(response["completed_at"].is_null(), reason == FinishReason::Length);
                (response["id"], response["completed_at"]) = (json!(null), json!(null));
                for item in response["output"].as_array_mut().unwrap() {
                    for name in ["id", "call_id"] {
                        item[name] = json!(null);
                    }
                }
            }
            assert_eq!(plain, last, "{deltas:?}");
        }
    }

    #[test]
    fn calls_have_their_arguments_in_pieces_and_whole() {
        let deltas = [vec![content("a")], call(0, true), call(1, false)].concat();
        let events =
            told(Extras::default(), vec![block(deltas), Event::Finished(Box::new(finish(FinishReason::Length)))]);
        let of = |kind: &str| {
            let kind = format!("response.{kind}");
            events.iter().filter(move |event| event["type"] == *kind).collect::<Vec<_>>()
        };
        let added = of("output_item.added");
        assert_eq!(added.iter().map(|event| &event["output_index"]).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!((&added[1]["item"]["arguments"], &added[1]["item"]["status"]), (&json!(""), &json!("in_progress")));
        assert_eq!(of("function_call_arguments.delta").len(), 4);
        let done = of("function_call_arguments.done");
        assert_eq!((&done[0]["arguments"], &done[0]["name"]), (&json!("{\"a\":1}"), &json!("f")));
        let items = &events.last().unwrap()["response"]["output"];
        let statuses: Vec<&Value> = items.as_array().unwrap().iter().map(|item| &item["status"]).collect();
        assert_eq!(statuses, ["completed", "completed", "incomplete"]);
        assert_eq!(items[1]["id"], added[1]["item"]["id"]);
        assert_eq!(events.last().unwrap()["response"]["incomplete_details"], json!({"reason": "max_output_tokens"}));
    }

    #[test]
    fn progress_is_told_only_when_it_is_asked_for() {
        let events = |progress| {
            let elapsed = Duration::from_millis(3);
            let events = vec![
                Event::Prefilled { processed: 32, total: 70, elapsed },
                block(vec![content("a")]),
                Event::Finished(Box::new(finish(FinishReason::Stop))),
            ];
            told(Extras { progress, ..Extras::default() }, events)
        };
        let processed = |events: &[Value]| {
            let all = events.iter().filter_map(|event| event["prompt_progress"]["processed"].as_u64());
            all.collect::<Vec<_>>()
        };
        assert_eq!(processed(&events(true)), [32, 70]);
        assert_eq!(kinds(&events(true))[..4], ["created", "in_progress", "in_progress", "in_progress"]);
        assert_eq!((processed(&events(false)).len(), events(false).len()), (0, 9));
    }

    #[test]
    fn a_failure_is_the_last_event() {
        let mut teller = Response::new(heading(1), Extras::default(), echo());
        let mut frames = Frames::default();
        teller.begin(0, &mut frames);
        teller.take(0, block(vec![content("a")]), &mut frames);
        teller.fail(&crate::engine::JobError::Draining.into(), &mut frames);
        let events = frames.events();
        let last = events.last().unwrap();
        assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
        assert_eq!(last["response"]["error"]["code"], "draining");
        assert_eq!(last["response"]["output"][0]["status"], "incomplete");
    }
}
