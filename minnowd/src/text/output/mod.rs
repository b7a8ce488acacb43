//! Text and tool calls from committed token ids, as they come.
//!
//! Ids become bytes, bytes become characters, and these, with the markers between them, content and calls. Whatever the
//! cut into [`OutputText::push`]es, the pieces joined are the same; a plain answer is the joined stream. Control tokens
//! never appear as text. Stop strings are looked for in content only, not in a call's arguments, and not across calls.

mod calls;
mod literals;
mod utf8;

use std::sync::Arc;

use super::template::Dialect;
use super::tokenizer::{Token, Tokenizer};
use calls::{Calls, Marker, Part};
use literals::{Found, Literals};
use utf8::Utf8Stream;

/// A piece of an answer. Pieces of one call are not mixed with others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// More content.
    Content(String),
    /// A call of a function begins.
    CallBegin {
        /// Number of the call in this answer, from 0.
        index: usize,
        /// Name of the function, one of the declared ones.
        name: String,
    },
    /// More of a call's arguments, exactly as the model wrote them.
    CallArguments {
        /// Number of the call.
        index: usize,
        /// Text to append.
        fragment: String,
    },
    /// A call is complete. A call without it was cut off.
    CallEnd {
        /// Number of the call.
        index: usize,
    },
}

/// What ended an output from within.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// A token that ends the turn.
    StopToken,
    /// A stop string, which is not part of the content.
    StopString,
    /// As many calls as were allowed.
    Calls,
}

/// How tool calls in an output are understood.
#[derive(Clone, Debug)]
pub struct ToolParsing {
    /// How the model writes them.
    pub dialect: Dialect,
    /// Functions that may be called; `None` is any. What calls another is content, and noted as an error.
    pub declared: Option<Vec<String>>,
    /// Calls after which the output ends; `None` is no limit.
    pub calls_max: Option<usize>,
}

/// An output that is being received.
#[derive(Clone, Debug)]
pub struct OutputText {
    tokenizer: Arc<Tokenizer>,
    stop_ids: Arc<[u32]>,
    /// Ids of tool-call markers.
    markers: Vec<(u32, Marker)>,
    /// Markers that are not tokens.
    tags: Option<Literals>,
    keeps_specials: bool,
    utf8: Utf8Stream,
    calls: Calls,
    calls_max: Option<usize>,
    stops: Literals,
    /// Index of the stop string that ended the output.
    stopped_by: Option<usize>,
    end: Option<End>,
    is_finished: bool,
    text_tokens: usize,
}

impl OutputText {
    /// An output without tool calls that ends at one of `stops`.
    #[must_use]
    pub fn plain(tokenizer: &Arc<Tokenizer>, stops: &[String]) -> Self {
        Self {
            tokenizer: Arc::clone(tokenizer),
            stop_ids: Arc::from([]),
            markers: Vec::new(),
            tags: None,
            keeps_specials: false,
            utf8: Utf8Stream::default(),
            calls: Calls::default(),
            calls_max: None,
            stops: Literals::new(stops.iter().cloned()),
            stopped_by: None,
            end: None,
            is_finished: false,
            text_tokens: 0,
        }
    }

    /// Ends the output at one of these ids, which is not part of the text. Without it, whoever cuts the output decides;
    /// but a call left open is then taken for cut off, not for malformed.
    #[must_use]
    pub fn ending_at(mut self, stop_ids: &Arc<[u32]>) -> Self {
        self.stop_ids = Arc::clone(stop_ids);
        self
    }

    /// Finds tool calls.
    #[must_use]
    pub fn with_tools(mut self, parsing: ToolParsing) -> Self {
        let id = |text: &&str| self.tokenizer.id(text);
        match parsing.dialect {
            Dialect::Sections => {
                let ids = Dialect::SECTION_MARKERS.iter().map(id);
                self.markers = ids.zip(Marker::SECTIONS).filter_map(|(id, marker)| Some((id?, marker))).collect();
            }
            // In this dialect the tags are ordinary text, so without tools they stay what they are.
            Dialect::Tagged if parsing.declared.as_ref().is_some_and(Vec::is_empty) => {}
            Dialect::Tagged => {
                let ids: Option<Vec<u32>> = Dialect::TAGS.iter().map(id).collect();
                match ids {
                    Some(ids) => self.markers = ids.into_iter().zip(Marker::TAGS).collect(),
                    None => self.tags = Some(Literals::new(Dialect::TAGS)),
                }
            }
        }
        self.calls = Calls::new(parsing.dialect, parsing.declared);
        self.calls_max = parsing.calls_max;
        self
    }

    /// Takes ids that were part of the prompt but belong to the output: the opening of a demanded call. They are not
    /// counted.
    pub fn begin_with(&mut self, ids: &[u32]) -> Vec<Delta> {
        let deltas = self.push(ids);
        self.text_tokens = 0;
        deltas
    }

    /// Keeps control tokens as text, the ones that end the output excepted: for comparing with raw expectations.
    #[must_use]
    pub fn keeping_specials(mut self) -> Self {
        self.keeps_specials = true;
        self
    }

    /// Takes committed ids. After an end from within, the rest is ignored.
    pub fn push(&mut self, ids: &[u32]) -> Vec<Delta> {
        let mut deltas = Vec::new();
        for &id in ids {
            if self.end.is_some() || self.is_finished {
                break;
            }
            if self.stop_ids.contains(&id) {
                self.end = Some(End::StopToken);
                break;
            }
            self.take(id, &mut deltas);
        }
        deltas
    }

    /// Gives out what was held back: the output is complete.
    pub fn finish(&mut self) -> Vec<Delta> {
        let mut deltas = Vec::new();
        if std::mem::replace(&mut self.is_finished, true) || self.is_stopped() {
            return deltas;
        }
        self.flush_bytes(&mut deltas);
        self.flush_tags(&mut deltas);
        let mut parts = Vec::new();
        self.calls.finish(self.end == Some(End::StopToken), &mut parts);
        self.parts(parts, &mut deltas);
        self.flush_stops(&mut deltas);
        deltas
    }

    /// Whether the text itself asks to compute no further block: a stop string, or the last call that is allowed.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        matches!(self.end, Some(End::StopString | End::Calls))
    }

    /// What ended the output from within, if anything has.
    #[must_use]
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// The stop string that ended the output, if one has.
    #[must_use]
    pub fn stop_string(&self) -> Option<&str> {
        self.stops.literal(self.stopped_by?)
    }

    /// Ids taken so far that are not control tokens.
    #[must_use]
    pub fn text_tokens(&self) -> usize {
        self.text_tokens
    }

    /// Bytes of text that these ids stand for, control tokens left out.
    #[must_use]
    pub fn text_bytes(&self, ids: &[u32]) -> usize {
        let bytes = |id: &u32| match self.tokenizer.token(*id) {
            Some(Token::Text(bytes)) => bytes.len(),
            Some(Token::Special(_)) | None => 0,
        };
        ids.iter().map(bytes).sum()
    }

    /// Calls that are complete.
    #[must_use]
    pub fn complete_calls(&self) -> usize {
        self.calls.complete()
    }

    /// Whether no section or call is left open.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.calls.is_closed()
    }

    /// The first thing that was wrong with tool calls; its raw text is in the content.
    #[must_use]
    pub fn parse_error(&self) -> Option<String> {
        self.calls.error().map(str::to_owned)
    }

    fn take(&mut self, id: u32, deltas: &mut Vec<Delta>) {
        let tokenizer = Arc::clone(&self.tokenizer);
        let token = tokenizer.token(id);
        if let Some(&(_, marker)) = self.markers.iter().find(|entry| entry.0 == id) {
            self.flush_bytes(deltas);
            self.marker(marker, deltas);
            return;
        }
        match token {
            Some(Token::Text(bytes)) => {
                self.text_tokens += 1;
                self.bytes(bytes, deltas);
            }
            Some(Token::Special(bytes)) if self.keeps_specials => self.bytes(bytes, deltas),
            Some(Token::Special(_)) | None => {}
        }
    }

    fn bytes(&mut self, bytes: &[u8], deltas: &mut Vec<Delta>) {
        let mut text = String::new();
        self.utf8.push(bytes, &mut text);
        self.text(&text, deltas);
    }

    fn flush_bytes(&mut self, deltas: &mut Vec<Delta>) {
        let mut text = String::new();
        self.utf8.finish(&mut text);
        self.text(&text, deltas);
    }

    /// Text in which tags may still hide.
    fn text(&mut self, text: &str, deltas: &mut Vec<Delta>) {
        let Some(tags) = &mut self.tags else { return self.plain_text(text, deltas) };
        let mut found = tags.push(text);
        loop {
            self.plain_text(&found.before, deltas);
            let Some(tag) = found.literal else { return };
            self.marker(Marker::TAGS[tag], deltas);
            let Some(tags) = &mut self.tags else { return };
            found = tags.push("");
        }
    }

    fn flush_tags(&mut self, deltas: &mut Vec<Delta>) {
        if let Some(tags) = &mut self.tags {
            let rest = tags.finish().before;
            self.plain_text(&rest, deltas);
        }
    }

    fn plain_text(&mut self, text: &str, deltas: &mut Vec<Delta>) {
        if !text.is_empty() {
            let mut parts = Vec::new();
            self.calls.text(text, &mut parts);
            self.parts(parts, deltas);
        }
    }

    fn marker(&mut self, marker: Marker, deltas: &mut Vec<Delta>) {
        let mut parts = Vec::new();
        self.calls.marker(marker, &mut parts);
        self.parts(parts, deltas);
    }

    fn parts(&mut self, parts: Vec<Part>, deltas: &mut Vec<Delta>) {
        for part in parts {
            if self.is_stopped() {
                return;
            }
            match part {
                Part::Content(text) => {
                    let found = self.stops.push(&text);
                    self.shown(found, deltas);
                }
                Part::Begin { index, name } => {
                    self.flush_stops(deltas);
                    if !self.is_stopped() {
                        deltas.push(Delta::CallBegin { index, name });
                    }
                }
                Part::Arguments { index, fragment } => match deltas.last_mut() {
                    Some(Delta::CallArguments { index: last, fragment: before }) if *last == index => {
                        before.push_str(&fragment);
                    }
                    _ => deltas.push(Delta::CallArguments { index, fragment }),
                },
                Part::End { index } => {
                    deltas.push(Delta::CallEnd { index });
                    if self.calls_max.is_some_and(|max| index + 1 >= max) {
                        self.end = Some(End::Calls);
                    }
                }
            }
        }
    }

    /// No content follows that could belong to a stop string begun here.
    fn flush_stops(&mut self, deltas: &mut Vec<Delta>) {
        let found = self.stops.finish();
        self.shown(found, deltas);
    }

    fn shown(&mut self, found: Found, deltas: &mut Vec<Delta>) {
        add_content(found.before, deltas);
        if found.literal.is_some() {
            self.stopped_by = found.literal;
            self.end = Some(End::StopString);
        }
    }
}

fn add_content(text: String, deltas: &mut Vec<Delta>) {
    match deltas.last_mut() {
        _ if text.is_empty() => {}
        Some(Delta::Content(before)) => before.push_str(&text),
        _ => deltas.push(Delta::Content(text)),
    }
}
