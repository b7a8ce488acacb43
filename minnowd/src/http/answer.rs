//! What an answer says, in every dialect: text and calls put together from deltas, why it ended, and the numbers about it.
//!
//! Plain answers and streams share everything here, so that a joined stream equals the plain answer.

use std::ops::Range;
use std::time::Duration;

use minnow_common::BLOCK;
use serde_json::{Value, json};

use super::error::ApiError;
use super::ids;
use super::running::{Running, report};
use crate::engine::{BlockStats, BlockView, Cell, Event, Finish, FinishReason, JobStats};
use crate::text::{Delta, Token, Tokenizer};

/// What is known of an answer before the first forward.
#[derive(Clone, Debug)]
pub(crate) struct Heading {
    /// Unix seconds.
    pub created: u64,
    /// The request's.
    pub request_id: String,
    /// The model's name.
    pub model: String,
    /// Hash of build and weights.
    pub fingerprint: String,
    /// Effective generation settings, those of the first choice.
    pub settings: Value,
    /// The first choice's seed; each further one has the next.
    pub seed: u64,
    /// Fields of the request that had no effect.
    pub ignored_fields: Vec<String>,
    /// Tools whose schemas could not be enforced.
    pub unenforced: Vec<String>,
    /// What each choice begins with because the request demanded it: the head of a call.
    pub opened: Vec<Delta>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Number of choices.
    pub choices: usize,
}

impl Heading {
    /// The seed of a choice.
    pub(crate) fn seed_of(&self, choice: usize) -> u64 {
        self.seed.wrapping_add(choice as u64)
    }

    /// The `minnow` object of a finished choice.
    pub(crate) fn minnow(&self, choice: usize, finish: &Finish) -> Value {
        let mut minnow = self.statistics(&finish.stats);
        minnow["generation_settings"]["seed"] = json!(self.seed_of(choice));
        minnow["batches"] = finish.stats.blocks.iter().map(batch).collect();
        if let Some(error) = &finish.tool_parse_error {
            minnow["tool_parse_error"] = json!(error);
        }
        minnow
    }

    /// The `minnow` object of a whole answer: sums, and what each choice is told apart by if there are several.
    pub(crate) fn minnow_of_all(&self, finishes: &[&Finish]) -> Value {
        if let [only] = finishes {
            return self.minnow(0, only);
        }
        let mut minnow = self.statistics(&JobStats::total(finishes.iter().map(|finish| &finish.stats)));
        let choices = finishes.iter().enumerate().map(|(index, finish)| {
            let mut choice = json!({
                "index": index,
                "seed": self.seed_of(index),
                "completion_tokens": finish.stats.completion_tokens,
                "denoise_forwards": finish.stats.denoise_forwards,
                "tokens_per_forward": finish.stats.tokens_per_forward(),
                "queue_seconds": finish.stats.queued.as_secs_f64(),
            });
            if let Some(error) = &finish.tool_parse_error {
                choice["tool_parse_error"] = json!(error);
            }
            choice
        });
        minnow["choices"] = choices.collect();
        let batches = finishes.iter().enumerate().flat_map(|(index, finish)| {
            finish.stats.blocks.iter().map(move |block| {
                let mut batch = batch(block);
                batch["choice"] = json!(index);
                batch
            })
        });
        minnow["batches"] = batches.collect();
        minnow
    }

    fn statistics(&self, stats: &JobStats) -> Value {
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
            "repeated_tokens": stats.repeated_tokens,
            "token_edits": stats.token_edits,
            "deletes": stats.deletes,
            "splits": stats.splits,
            "tokens_per_second": rate(stats.completion_tokens, stats.prefill + stats.decode),
            "ignored_fields": self.ignored_fields,
        });
        if !self.unenforced.is_empty() {
            minnow["unenforced_schemas"] = json!(self.unenforced);
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

/// What a stream has told about reading the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    total: usize,
    /// Tokens told so far, cached ones included; `None`: nothing more to tell, since it was not wanted, or all is cached,
    /// or all was told.
    told: Option<usize>,
}

impl Progress {
    /// The beginning, if it is wanted. Clients divide by what is not cached.
    pub(crate) fn new(is_wanted: bool, cached: usize, total: usize) -> Self {
        Self { total, told: (is_wanted && cached < total).then_some(cached) }
    }

    /// The tokens to tell of, now that this many were read.
    pub(crate) fn at(&mut self, processed: usize) -> Option<usize> {
        let processed = processed.min(self.total);
        if self.told? >= processed {
            return None;
        }
        self.told = (processed < self.total).then_some(processed);
        Some(processed)
    }

    /// The prompt has been read: the last word on that, if it was not sent, because it was dropped or because the rest of
    /// the prompt shares a block with the answer.
    pub(crate) fn end(&mut self) -> Option<usize> {
        self.at(self.total)
    }

    /// `prompt_progress`
    pub(crate) fn object(&self, timings: &Timings, processed: usize) -> Value {
        json!({
            "total": self.total,
            "cache": timings.cached,
            "processed": processed,
            "time_ms": timings.prompt_time.as_secs_f64() * 1e3,
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

/// A finished choice.
#[derive(Debug)]
pub(crate) struct Done {
    /// Its text and calls.
    pub output: Output,
    /// How it ended.
    pub finish: Finish,
}

/// Waits for the whole answer: its choices, in their order.
pub(crate) async fn collect(mut running: Running, opened: &[Delta]) -> Result<Vec<Done>, ApiError> {
    let mut outputs: Vec<(Output, Option<Finish>)> = Vec::new();
    outputs.resize_with(running.count(), || (Output::begun(opened), None));
    let mut open = running.count();
    while open > 0 {
        let (choice, event) = running.next().await;
        let (output, finished) = &mut outputs[choice];
        match event {
            Event::Block { deltas, .. } => output.extend(deltas),
            Event::Finished(mut finish) => {
                output.extend(std::mem::take(&mut finish.deltas));
                *finished = Some(*finish);
                open -= 1;
            }
            Event::Failed(error) => return Err(report(error)),
            Event::Admitted { .. } | Event::Prefilled { .. } | Event::Refined(_) | Event::Step { .. } => {}
        }
    }
    let done = outputs.into_iter().filter_map(|(output, finish)| Some(Done { output, finish: finish? }));
    Ok(done.collect())
}

/// Text and calls of a choice, put together as they are committed.
#[derive(Debug, Default)]
pub(crate) struct Output {
    /// The text outside of calls.
    pub content: String,
    /// Calls, in their order.
    pub calls: Vec<Call>,
    /// Text and calls in the order in which they came; text between two calls is one piece.
    pieces: Vec<Piece>,
}

/// A part of an output, by where it lies in that.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(Range<usize>),
    Call(usize),
}

/// A part of an output.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Item<'a> {
    /// Text between calls.
    Text(&'a str),
    /// A call.
    Call(&'a Call),
}

/// A tool call.
#[derive(Debug)]
pub(crate) struct Call {
    /// `call_...`
    pub id: String,
    /// The function's name.
    pub name: String,
    /// What it is called with, as the model wrote it.
    pub arguments: String,
    /// Whether all of it is there.
    pub is_closed: bool,
}

/// What is new in an output.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum News {
    /// More text; never empty.
    Text(String),
    /// A call begins, the one with this index.
    Call(usize),
    /// More of a call's arguments.
    Arguments(usize, String),
    /// A call is complete.
    CallEnd(usize),
}

/// Why an output ended, as clients are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The turn ended, or a stop string came.
    Stop,
    /// The limit was reached.
    Length,
    /// The turn ended with calls.
    Calls,
}

impl Output {
    /// What was given before the first forward.
    pub(crate) fn begun(opened: &[Delta]) -> Self {
        let mut output = Self::default();
        output.extend(opened.to_vec());
        output
    }

    /// Adds a delta. Gives what is new, `None` if nothing is.
    pub(crate) fn push(&mut self, delta: Delta) -> Option<News> {
        match delta {
            Delta::Content(text) if text.is_empty() => None,
            Delta::Content(text) => {
                let start = self.content.len();
                self.content.push_str(&text);
                match self.pieces.last_mut() {
                    Some(Piece::Text(range)) => range.end = self.content.len(),
                    _ => self.pieces.push(Piece::Text(start..self.content.len())),
                }
                Some(News::Text(text))
            }
            Delta::CallBegin { index, name } => {
                let id = ids::random("call_");
                self.pieces.push(Piece::Call(self.calls.len()));
                self.calls.push(Call { id, name, arguments: String::new(), is_closed: false });
                Some(News::Call(index))
            }
            Delta::CallArguments { index, fragment } => {
                self.calls.get_mut(index)?.arguments.push_str(&fragment);
                Some(News::Arguments(index, fragment))
            }
            Delta::CallEnd { index } => {
                self.calls.get_mut(index)?.is_closed = true;
                Some(News::CallEnd(index))
            }
        }
    }

    fn extend(&mut self, deltas: Vec<Delta>) {
        for delta in deltas {
            self.push(delta);
        }
    }

    /// Text and calls in the order in which they came.
    pub(crate) fn items(&self) -> impl DoubleEndedIterator<Item = Item<'_>> + ExactSizeIterator {
        self.pieces.iter().map(|piece| match piece {
            Piece::Text(range) => Item::Text(&self.content[range.clone()]),
            Piece::Call(index) => Item::Call(&self.calls[*index]),
        })
    }

    /// Why it ended. A demanded call is always made where there was room for it.
    pub(crate) fn ending(&self, reason: FinishReason) -> Ending {
        match reason {
            FinishReason::Length => Ending::Length,
            FinishReason::Stop if self.calls.iter().any(|call| call.is_closed) => Ending::Calls,
            FinishReason::Stop => Ending::Stop,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Of a request for some choices whose prompt has 70 tokens.
    pub(crate) fn heading(choices: usize) -> Heading {
        Heading {
            created: 1,
            request_id: "req_1".to_owned(),
            model: "m".to_owned(),
            fingerprint: "fp_1".to_owned(),
            settings: json!({"seed": 1, "temperature": 0.0, "top_p": 1.0}),
            seed: 1,
            ignored_fields: Vec::new(),
            unenforced: Vec::new(),
            opened: Vec::new(),
            prompt_tokens: 70,
            choices,
        }
    }

    #[test]
    fn only_a_complete_call_is_why_an_answer_ended() {
        let begin = Delta::CallBegin { index: 0, name: "f".to_owned() };
        let mut output = Output::begun(&[begin]);
        assert_eq!(output.ending(FinishReason::Stop), Ending::Stop);
        let fragment = "{}".to_owned();
        let news = output.push(Delta::CallArguments { index: 0, fragment: fragment.clone() });
        assert_eq!(news, Some(News::Arguments(0, fragment)));
        assert_eq!(output.push(Delta::CallEnd { index: 0 }), Some(News::CallEnd(0)));
        assert_eq!(output.ending(FinishReason::Stop), Ending::Calls);
        assert_eq!(output.ending(FinishReason::Length), Ending::Length);
        assert_eq!(output.push(Delta::Content(String::new())), None);
    }

    #[test]
    fn an_output_is_a_row_of_texts_and_calls() {
        let content = |text: &str| Delta::Content(text.to_owned());
        let begin = |index| Delta::CallBegin { index, name: "f".to_owned() };
        let output = Output::begun(&[content("a"), content("b"), begin(0), begin(1), content("c"), content("")]);
        let items: Vec<&str> = output
            .items()
            .map(|item| match item {
                Item::Text(text) => text,
                Item::Call(call) => &call.name,
            })
            .collect();
        assert_eq!((items, output.content.as_str()), (vec!["ab", "f", "f", "c"], "abc"));
    }

    #[test]
    fn progress_never_goes_back_and_ends_with_the_total() {
        let mut progress = Progress::new(true, 32, 70);
        assert_eq!([32, 64, 64, 40].map(|processed| progress.at(processed)), [None, Some(64), None, None]);
        assert_eq!([progress.end(), progress.end(), progress.at(70)], [Some(70), None, None]);
        assert_eq!(Progress::new(true, 70, 70).end(), None);
        assert_eq!(Progress::new(false, 0, 70).end(), None);
    }

    #[test]
    fn nothing_measured_is_zero_and_not_infinite() {
        let timings = Timings { predicted: 5, ..Timings::default() }.object();
        let members = timings.as_object().unwrap();
        assert_eq!(members.len(), 9);
        assert!(members.values().all(|value| value.as_f64().is_some_and(|number| number >= 0.0)));
    }
}
