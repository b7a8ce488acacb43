//! What an answer says: text and calls put together from deltas, why it ended, and the numbers about it.
//!
//! Plain answers and streams share everything here, so that a joined stream equals the plain answer.

use std::time::Duration;

use minnow_common::BLOCK;
use serde_json::{Map, Value, json};

use super::attempts::Attempts;
use super::error::{ApiError, Code};
use super::ids;
use super::running::report;
use crate::engine::{BlockStats, BlockView, Cell, Event, Finish, FinishReason, JobStats};
use crate::text::{Delta, Token, Tokenizer};

/// Bytes of output that an error shows at most.
pub(crate) const OUTPUT_SHOWN_MAX: usize = 16 << 10;

/// What all chunks of an answer have in common, known before the first forward.
#[derive(Clone, Debug)]
pub(crate) struct Heading {
    /// Chat or text.
    pub shape: Shape,
    /// `chatcmpl-...` or `cmpl-...`
    pub id: String,
    /// Unix seconds.
    pub created: u64,
    /// The model's name.
    pub(crate) model: String,
    /// Hash of build and weights.
    pub fingerprint: String,
    /// Effective generation settings.
    pub settings: Value,
    /// Fields of the request that had no effect.
    pub ignored_fields: Vec<String>,
    /// Whether the request demanded a tool call.
    pub must_call: bool,
    /// What the answer begins with because the request demanded it: the head of a call.
    pub opened: Vec<Delta>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
}

/// The two forms of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Text,
}

impl Heading {
    /// An object with the members that all answers and chunks begin with.
    pub(crate) fn object(&self, is_chunk: bool) -> Map<String, Value> {
        let object = match (self.shape, is_chunk) {
            (Shape::Chat, false) => "chat.completion",
            (Shape::Chat, true) => "chat.completion.chunk",
            (Shape::Text, _) => "text_completion",
        };
        Map::from_iter([
            ("id".to_owned(), json!(self.id)),
            ("object".to_owned(), json!(object)),
            ("created".to_owned(), json!(self.created)),
            ("model".to_owned(), json!(self.model)),
            ("system_fingerprint".to_owned(), json!(self.fingerprint)),
        ])
    }

    /// The `minnow` object of a finished answer.
    pub(crate) fn minnow(&self, finish: &Finish) -> Value {
        let stats = &finish.stats;
        let evaluated = BLOCK * stats.denoise_forwards;
        let mut minnow = json!({
            "generation_settings": self.settings,
            "cached_tokens": stats.cached_tokens,
            "cache_slot": null,
            "cache_copied_tokens": 0,
            "cache_seconds": stats.cache.as_secs_f64(),
            "queue_seconds": stats.queued.as_secs_f64(),
            "text_tokens": stats.text_tokens,
            "text_tokens_per_second": rate(stats.text_tokens, stats.decode),
            "evaluated_tokens": evaluated,
            "total_tokens_per_second": rate(evaluated, stats.decode),
            "denoise_forwards": stats.denoise_forwards,
            "refinement_steps_per_block": ratio(stats.denoise_forwards, stats.blocks.len()),
            "processed_tokens": stats.processed_tokens,
            "commit_forwards": stats.commit_forwards,
            "reused_commits": stats.reused_commits,
            "tokens_per_forward": stats.tokens_per_forward(),
            "constrained_forwards": stats.constrained_forwards,
            "determined_tokens": stats.determined_tokens,
            "forced_blocks": stats.forced_blocks,
            "token_edits": stats.token_edits,
            "deletes": stats.deletes,
            "splits": stats.splits,
            "tokens_per_second": rate(stats.completion_tokens, stats.prefill + stats.decode),
            "batches": stats.blocks.iter().map(batch).collect::<Vec<_>>(),
            "ignored_fields": self.ignored_fields,
        });
        if let Some(error) = &finish.tool_parse_error {
            minnow["tool_parse_error"] = json!(error);
        }
        minnow
    }
}

/// One block in the `minnow` object.
pub(crate) fn batch(block: &BlockStats) -> Value {
    json!({
        "index": block.index,
        "offset": block.offset,
        "tokens": block.tokens,
        "refinement_steps": block.forwards,
        "evaluated_tokens": BLOCK * block.forwards,
        "elapsed_seconds": block.elapsed.as_secs_f64(),
    })
}

/// `minnow.refinement`: every position of a block after a step. Control tokens are shown as templates write them.
pub(crate) fn refinement(view: &BlockView, tokenizer: &Tokenizer) -> Value {
    let cell = |cell: &Cell| {
        let Some(id) = cell.token else { return json!({ "token": null, "change": cell.change.name() }) };
        let mut shown = json!({ "token": tokenizer.decode_with_specials(&[id]), "id": id });
        if let Some(confidence) = cell.confidence {
            // Four digits are more than anyone can see.
            shown["confidence"] = json!((f64::from(confidence) * 1e4).round() / 1e4);
        }
        shown["change"] = json!(cell.change.name());
        if matches!(tokenizer.token(id), Some(Token::Special(_))) {
            shown["special"] = json!(true);
        }
        shown
    };
    json!({
        "block": view.block.index,
        "offset": view.block.offset,
        "step": view.block.forwards,
        "final": view.is_final,
        "cells": view.cells.iter().map(cell).collect::<Vec<_>>(),
        "deleted": view.deleted,
        "split": view.split,
    })
}

/// `usage`
pub(crate) fn usage(stats: &JobStats) -> Value {
    json!({
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
        "prompt_tokens_details": { "cached_tokens": stats.cached_tokens },
        "completion_tokens_details": { "reasoning_tokens": 0 },
    })
}

/// Where an answer stands, in the words of llama-server.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Timings {
    /// Prompt tokens found in the cache.
    pub cached: usize,
    /// Prompt tokens computed.
    pub prompt: usize,
    /// Time that took.
    pub prompt_time: Duration,
    /// Committed tokens that are not special.
    pub predicted: usize,
    /// Time that took.
    pub predicted_time: Duration,
}

impl Timings {
    /// The numbers of a finished job.
    pub(crate) fn of(stats: &JobStats) -> Self {
        Self {
            cached: stats.cached_tokens,
            prompt: stats.prompt_tokens.saturating_sub(stats.cached_tokens),
            prompt_time: stats.prefill,
            predicted: stats.text_tokens,
            predicted_time: stats.decode,
        }
    }

    /// `timings`
    pub(crate) fn object(&self) -> Value {
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        let each = |time: Duration, count: usize| if count == 0 { 0.0 } else { milliseconds(time) / count as f64 };
        json!({
            "cache_n": self.cached,
            "prompt_n": self.prompt,
            "prompt_ms": milliseconds(self.prompt_time),
            "prompt_per_token_ms": each(self.prompt_time, self.prompt),
            "prompt_per_second": rate(self.prompt, self.prompt_time),
            "predicted_n": self.predicted,
            "predicted_ms": milliseconds(self.predicted_time),
            "predicted_per_token_ms": each(self.predicted_time, self.predicted),
            "predicted_per_second": rate(self.predicted, self.predicted_time),
        })
    }
}

/// Count per second; 0 where nothing was measured.
fn rate(count: usize, time: Duration) -> f64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

fn ratio(above: usize, below: usize) -> f64 {
    if below == 0 { 0.0 } else { above as f64 / below as f64 }
}

/// The whole answer, once it is finished.
pub(crate) async fn plain(mut attempts: Attempts, heading: &mut Heading) -> Result<Value, ApiError> {
    let mut output = Output::new(heading.must_call);
    output.extend(heading.opened.clone());
    loop {
        match attempts.next().await? {
            Event::Block { deltas, .. } => output.extend(deltas),
            Event::Finished(mut finish) => {
                output.extend(std::mem::take(&mut finish.deltas));
                heading.settings["seed"] = attempts.seed().into();
                return output.object(heading, &finish);
            }
            Event::Failed(error) => return Err(report(error)),
            Event::Admitted { .. } | Event::Prefilled { .. } | Event::Refined(_) | Event::Step { .. } => {}
        }
    }
}

/// Text and calls of an answer, put together as they are committed.
#[derive(Debug)]
pub(crate) struct Output {
    content: String,
    calls: Vec<Call>,
    must_call: bool,
}

#[derive(Debug)]
struct Call {
    id: String,
    name: String,
    arguments: String,
    is_closed: bool,
}

impl Output {
    /// Nothing yet.
    pub(crate) fn new(must_call: bool) -> Self {
        Self { content: String::new(), calls: Vec::new(), must_call }
    }

    /// Adds a delta and gives it in the form that chat chunks show; `None` if it shows nothing.
    pub(crate) fn push(&mut self, delta: Delta) -> Option<Value> {
        match delta {
            Delta::Content(text) => {
                self.content.push_str(&text);
                (!text.is_empty()).then(|| json!({ "content": text }))
            }
            Delta::CallBegin { index, name } => {
                let id = ids::random("call_");
                let function = json!({ "name": name, "arguments": "" });
                let call = json!({ "index": index, "id": id, "type": "function", "function": function });
                self.calls.push(Call { id, name, arguments: String::new(), is_closed: false });
                Some(json!({ "tool_calls": [call] }))
            }
            Delta::CallArguments { index, fragment } => {
                let piece = json!({ "index": index, "function": { "arguments": fragment } });
                self.calls.get_mut(index)?.arguments.push_str(&fragment);
                Some(json!({ "tool_calls": [piece] }))
            }
            Delta::CallEnd { index } => {
                self.calls.get_mut(index)?.is_closed = true;
                None
            }
        }
    }

    fn extend(&mut self, deltas: Vec<Delta>) {
        for delta in deltas {
            self.push(delta);
        }
    }

    /// `stop`, `length` or `tool_calls`; refused if a demanded call was not made although the model had room for it.
    pub(crate) fn finish_reason(&self, reason: FinishReason) -> Result<&'static str, ApiError> {
        let has_call = self.calls.iter().any(|call| call.is_closed);
        match reason {
            FinishReason::Length => Ok("length"),
            FinishReason::Stop if has_call => Ok("tool_calls"),
            FinishReason::Stop if self.must_call => {
                let message = "a tool call was demanded, but the model ended its turn without a complete one";
                let output: String = self.content.chars().take(OUTPUT_SHOWN_MAX / 4).collect();
                Err(ApiError::new(Code::ToolChoiceUnsatisfied, message).at("tool_choice").with("output", output))
            }
            FinishReason::Stop => Ok("stop"),
        }
    }

    fn object(self, heading: &Heading, finish: &Finish) -> Result<Value, ApiError> {
        let reason = self.finish_reason(finish.reason)?;
        let mut choice = Map::from_iter([("index".to_owned(), json!(0))]);
        match heading.shape {
            Shape::Chat => choice.insert("message".to_owned(), self.message()),
            Shape::Text => choice.insert("text".to_owned(), json!(self.content)),
        };
        choice.insert("logprobs".to_owned(), Value::Null);
        choice.insert("finish_reason".to_owned(), json!(reason));
        let mut object = heading.object(false);
        object.insert("choices".to_owned(), json!([choice]));
        object.insert("usage".to_owned(), usage(&finish.stats));
        object.insert("timings".to_owned(), Timings::of(&finish.stats).object());
        object.insert("minnow".to_owned(), heading.minnow(finish));
        Ok(Value::Object(object))
    }

    fn message(self) -> Value {
        if self.calls.is_empty() {
            return json!({"role": "assistant", "content": self.content});
        }
        let calls = self.calls.into_iter().map(|call| {
            let function = json!({"name": call.name, "arguments": call.arguments});
            json!({"id": call.id, "type": "function", "function": function})
        });
        let content = if self.content.is_empty() { Value::Null } else { json!(self.content) };
        json!({"role": "assistant", "content": content, "tool_calls": calls.collect::<Vec<_>>()})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calling(deltas: Vec<Delta>, must_call: bool) -> (Output, Vec<Value>) {
        let mut output = Output::new(must_call);
        let shown = deltas.into_iter().filter_map(|delta| output.push(delta)).collect();
        (output, shown)
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
        let (output, shown) = calling([call(0), call(1)].concat(), false);
        let calls: Vec<&Value> = shown.iter().map(|delta| &delta["tool_calls"][0]).collect();
        let indexes: Vec<u64> = calls.iter().filter_map(|call| call["index"].as_u64()).collect();
        assert_eq!(indexes, [0, 0, 0, 1, 1, 1]);
        assert_eq!(calls[0]["function"], json!({"name": "f", "arguments": ""}));
        assert_eq!(calls[1], &json!({"index": 0, "function": {"arguments": "{\"a\":"}}));
        assert_eq!(output.finish_reason(FinishReason::Stop), Ok("tool_calls"));
        let message = output.message();
        assert_eq!(message["content"], Value::Null);
        assert_eq!(message["tool_calls"][1]["function"]["arguments"], "{\"a\":1}");
        assert_eq!(message["tool_calls"][0]["id"], calls[0]["id"]);
        assert_ne!(message["tool_calls"][0]["id"], message["tool_calls"][1]["id"]);
    }

    #[test]
    fn a_cut_call_is_shown_as_far_as_it_came() {
        let (output, _) = calling(call(0)[..2].to_vec(), true);
        assert_eq!(output.finish_reason(FinishReason::Length), Ok("length"));
        assert_eq!(output.message()["tool_calls"][0]["function"]["arguments"], "{\"a\":");
    }

    #[test]
    fn a_demanded_call_that_was_not_made_is_an_error_with_the_output() {
        let (output, _) = calling(vec![Delta::Content("No.".to_owned())], true);
        let error = output.finish_reason(FinishReason::Stop).unwrap_err();
        assert_eq!(error.code(), Code::ToolChoiceUnsatisfied);
        assert_eq!(error.body()["error"]["output"], "No.");
        assert_eq!(output.finish_reason(FinishReason::Length), Ok("length"));
        let (output, _) = calling(vec![Delta::Content("No.".to_owned())], false);
        assert_eq!(output.finish_reason(FinishReason::Stop), Ok("stop"));
        assert_eq!(output.message(), json!({"role": "assistant", "content": "No."}));
    }

    #[test]
    fn nothing_measured_is_zero_and_not_infinite() {
        let timings = Timings { predicted: 5, ..Timings::default() }.object();
        let members = timings.as_object().unwrap();
        assert_eq!(members.len(), 9);
        assert!(members.values().all(|value| value.as_f64().is_some_and(|number| number >= 0.0)));
    }
}
