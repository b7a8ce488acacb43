//! Tool calls in a model's output, in both dialects, as text and markers come.
//!
//! What is malformed becomes content, without its markers, and the first such thing is noted. What has been given out is
//! never taken back: a call is announced once its header is complete and names a declared function; arguments follow
//! exactly as they were written, valid JSON or not (if not, that is noted too).
//!
//! LLaDA2.2: `<section> ( <call> functions.NAME:K <arguments> JSON <end> )* </section>`, all markers being tokens. Ling:
//! `<tool_call>` `{"name": NAME, "arguments": JSON}` `</tool_call>`; the line break before a call and white space after
//! one belong to the call.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use serde_json::value::RawValue;
use std::collections::HashMap;

use crate::text::template::Dialect;

/// A marker in the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marker {
    SectionBegin,
    SectionEnd,
    CallBegin,
    ArgumentsBegin,
    CallEnd,
    TagOpen,
    TagClose,
}

impl Marker {
    /// In the order of [`Dialect::SECTION_MARKERS`].
    pub(super) const SECTIONS: [Self; 5] =
        [Self::SectionBegin, Self::SectionEnd, Self::CallBegin, Self::ArgumentsBegin, Self::CallEnd];
    /// In the order of [`Dialect::TAGS`].
    pub(super) const TAGS: [Self; 2] = [Self::TagOpen, Self::TagClose];

    fn name(self) -> &'static str {
        match self {
            Self::SectionBegin => Dialect::SECTION_MARKERS[0],
            Self::SectionEnd => Dialect::SECTION_MARKERS[1],
            Self::CallBegin => Dialect::SECTION_MARKERS[2],
            Self::ArgumentsBegin => Dialect::SECTION_MARKERS[3],
            Self::CallEnd => Dialect::SECTION_MARKERS[4],
            Self::TagOpen => Dialect::TAGS[0],
            Self::TagClose => Dialect::TAGS[1],
        }
    }
}

/// A piece of what was parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Content(String),
    Begin { index: usize, name: String },
    Arguments { index: usize, fragment: String },
    End { index: usize },
}

/// The parser's state.
#[derive(Clone, Debug)]
pub(super) struct Calls {
    /// `None` is any.
    declared: Option<Vec<String>>,
    state: State,
    begun: usize,
    complete: usize,
    error: Option<String>,
    /// Whether line breaks before a call are held back: in the Ling dialect.
    is_tagged: bool,
}

#[derive(Clone, Debug)]
enum State {
    /// Outside of calls. `held` is white space that belongs to a call if one follows; `after_call` if one came before.
    Content { held: String, after_call: bool },
    /// In a section, between calls, with the white space seen there.
    Section { blank: String },
    /// In a call's header.
    Header { text: String },
    /// In a call's arguments, which so far are `text`.
    Arguments { index: usize, name: String, text: String },
    /// In a call that was refused; its text is content. `in_section` says where its end leads to.
    Refused { in_section: bool },
    /// Between tags: all text so far.
    Tagged { text: String, stage: Stage },
}

/// How far the JSON between tags is understood.
#[derive(Clone, Debug)]
enum Stage {
    /// Not far enough to announce the call.
    Head,
    /// Announced; arguments are given out up to byte `given` of the text.
    Arguments { index: usize, name: String, start: usize, given: usize, json: JsonExtent },
    /// The arguments are complete.
    Tail { index: usize, from: usize },
    /// Not in the usual order; understood when it is complete.
    Unusual,
}

impl Default for Calls {
    fn default() -> Self {
        Self::new(Dialect::Sections, None)
    }
}

impl Calls {
    pub(super) fn new(dialect: Dialect, declared: Option<Vec<String>>) -> Self {
        let state = State::Content { held: String::new(), after_call: false };
        let is_tagged = dialect == Dialect::Tagged;
        Self { declared, state, begun: 0, complete: 0, error: None, is_tagged }
    }

    pub(super) fn complete(&self) -> usize {
        self.complete
    }

    pub(super) fn is_closed(&self) -> bool {
        matches!(self.state, State::Content { .. })
    }

    pub(super) fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// Takes text.
    pub(super) fn text(&mut self, new: &str, parts: &mut Vec<Part>) {
        match &mut self.state {
            State::Content { held, after_call } => {
                held.push_str(new);
                let keep = match (self.is_tagged, *after_call) {
                    (false, _) => 0,
                    (true, true) if held.chars().all(char::is_whitespace) => held.len(),
                    (true, _) => usize::from(held.ends_with('\n')),
                };
                let text: String = held.drain(..held.len() - keep).collect();
                if !text.is_empty() {
                    *after_call = false;
                    parts.push(Part::Content(text));
                }
            }
            State::Section { blank } => {
                blank.push_str(new);
                if !blank.trim().is_empty() {
                    parts.push(Part::Content(std::mem::take(blank)));
                    self.note("text between the calls of a tool-call section".to_owned());
                }
            }
            State::Header { text } => text.push_str(new),
            State::Arguments { index, text, .. } => {
                text.push_str(new);
                parts.push(Part::Arguments { index: *index, fragment: new.to_owned() });
            }
            State::Refused { .. } => parts.push(Part::Content(new.to_owned())),
            State::Tagged { text, .. } => {
                text.push_str(new);
                self.advance_tagged(parts);
            }
        }
    }

    /// Takes a marker. What is open and cannot be with it is closed first, and noted.
    pub(super) fn marker(&mut self, marker: Marker, parts: &mut Vec<Part>) {
        let outside = || State::Content { held: String::new(), after_call: true };
        let between = || State::Section { blank: String::new() };
        let state = std::mem::replace(&mut self.state, outside());
        self.state = match (state, marker) {
            (State::Content { held, .. }, Marker::SectionBegin) => {
                content(held, parts);
                between()
            }
            (State::Section { .. }, Marker::SectionEnd) => outside(),
            (State::Section { .. }, Marker::CallBegin) => State::Header { text: String::new() },
            (State::Header { text }, Marker::ArgumentsBegin) => self.begin(text, parts),
            (State::Arguments { index, name, text }, Marker::CallEnd) => {
                self.check_arguments(&name, &text);
                self.end(index, parts);
                between()
            }
            (State::Refused { in_section: true }, Marker::CallEnd) => between(),
            (State::Refused { in_section: true }, Marker::ArgumentsBegin) => State::Refused { in_section: true },

            (State::Content { .. }, Marker::TagOpen) => State::Tagged { text: String::new(), stage: Stage::Head },
            (State::Tagged { text, stage }, Marker::TagClose) => {
                self.close_tagged(text, stage, parts);
                outside()
            }
            (State::Refused { in_section: false }, Marker::TagClose) => outside(),

            (state, marker) => {
                self.note(format!("unexpected {}", marker.name()));
                self.recover(state, marker, parts)
            }
        };
    }

    /// Nothing follows. `is_stopped`: the model ended its turn; otherwise it was cut off, and what was open is cut.
    pub(super) fn finish(&mut self, is_stopped: bool, parts: &mut Vec<Part>) {
        match &mut self.state {
            State::Content { held, after_call } => {
                let held = std::mem::take(held);
                if !*after_call {
                    content(held, parts);
                }
            }
            _ if !is_stopped => {}
            State::Section { .. } | State::Refused { in_section: true } => {
                self.note("the tool-call section was not closed".to_owned());
            }
            State::Arguments { .. } | State::Refused { .. } => self.note("a tool call was not closed".to_owned()),
            State::Header { text } => {
                content(std::mem::take(text), parts);
                self.note("a tool call has no arguments".to_owned());
            }
            State::Tagged { text, stage } => {
                if matches!(stage, Stage::Head | Stage::Unusual) {
                    content(std::mem::take(text), parts);
                }
                self.note("a tool call was not closed".to_owned());
            }
        }
    }

    /// What an unexpected marker leads to: the text of an unfinished header becomes content, and the marker counts for
    /// what it opens or closes.
    fn recover(&mut self, state: State, marker: Marker, parts: &mut Vec<Part>) -> State {
        let between = State::Section { blank: String::new() };
        let outside = State::Content { held: String::new(), after_call: false };
        let is_inside = !matches!(state, State::Content { .. });
        match state {
            State::Header { text } => content(text, parts),
            State::Content { held, .. } => content(held, parts),
            State::Tagged { text, stage: Stage::Head | Stage::Unusual } => content(text, parts),
            State::Section { .. } | State::Arguments { .. } | State::Refused { .. } | State::Tagged { .. } => {}
        }
        match marker {
            Marker::SectionBegin => between,
            Marker::CallBegin if is_inside => State::Header { text: String::new() },
            // A call outside of a section: its markers are dropped, its text is content.
            Marker::CallBegin => outside,
            Marker::ArgumentsBegin if is_inside => State::Refused { in_section: true },
            Marker::CallEnd if is_inside => between,
            Marker::SectionEnd | Marker::ArgumentsBegin | Marker::CallEnd | Marker::TagClose => outside,
            Marker::TagOpen => State::Tagged { text: String::new(), stage: Stage::Head },
        }
    }

    /// Begins a call whose header is complete, or refuses it.
    fn begin(&mut self, header: String, parts: &mut Vec<Part>) -> State {
        match header_name(&header) {
            Some(name) if self.is_declared(name) => {
                let name = name.to_owned();
                let index = self.announce(&name, parts);
                State::Arguments { index, name, text: String::new() }
            }
            found => {
                self.note(match found {
                    Some(name) => format!("unknown function {:?}", shortened(name)),
                    None => format!("bad tool-call header {:?}", shortened(&header)),
                });
                content(header, parts);
                State::Refused { in_section: true }
            }
        }
    }

    /// Gives out as much of a tagged call as is certain.
    fn advance_tagged(&mut self, parts: &mut Vec<Part>) {
        let State::Tagged { text, stage } = &mut self.state else { return };
        if matches!(stage, Stage::Head) {
            match head(text) {
                Head::Incomplete => return,
                Head::Unusual => *stage = Stage::Unusual,
                Head::Complete { name, arguments } => {
                    if !is_declared(self.declared.as_deref(), &name) {
                        let text = std::mem::take(text);
                        self.note(format!("unknown function {:?}", shortened(&name)));
                        content(text, parts);
                        self.state = State::Refused { in_section: false };
                        return;
                    }
                    let index = self.begun;
                    self.begun += 1;
                    parts.push(Part::Begin { index, name: name.clone() });
                    let (start, given) = (arguments, arguments);
                    *stage = Stage::Arguments { index, name, start, given, json: JsonExtent::default() };
                }
            }
        }
        if let Stage::Arguments { index, name, start, given, json } = stage {
            let new = &text[*given..];
            let end = json.advance(new);
            let fragment = &new[..end.unwrap_or(new.len())];
            *given += fragment.len();
            if !fragment.is_empty() {
                parts.push(Part::Arguments { index: *index, fragment: fragment.to_owned() });
            }
            if end.is_some() {
                let (name, arguments) = (std::mem::take(name), text[*start..*given].to_owned());
                *stage = Stage::Tail { index: *index, from: *given };
                self.check_arguments(&name, &arguments);
            }
        }
    }

    /// A closing tag after `text`.
    fn close_tagged(&mut self, text: String, stage: Stage, parts: &mut Vec<Part>) {
        match stage {
            Stage::Arguments { index, name, .. } => {
                self.note(format!("arguments of {:?} are not a JSON object", shortened(&name)));
                self.end(index, parts);
            }
            Stage::Tail { index, from } => {
                if text[from..].trim() != "}" {
                    self.note(format!("text after a tool call's arguments: {:?}", shortened(&text[from..])));
                }
                self.end(index, parts);
            }
            Stage::Head | Stage::Unusual => match serde_json::from_str::<TaggedCall>(&text) {
                Ok(call) if self.is_declared(&call.name) => {
                    let index = self.announce(&call.name, parts);
                    let fragment = call.arguments();
                    self.check_arguments(&call.name, &fragment);
                    if !fragment.is_empty() {
                        parts.push(Part::Arguments { index, fragment });
                    }
                    self.end(index, parts);
                }
                parsed => {
                    self.note(match parsed {
                        Ok(call) => format!("unknown function {:?}", shortened(&call.name)),
                        Err(error) => format!("a tool call is not {{\"name\", \"arguments\"}}: {error}"),
                    });
                    content(text, parts);
                }
            },
        }
    }

    fn announce(&mut self, name: &str, parts: &mut Vec<Part>) -> usize {
        let index = self.begun;
        self.begun += 1;
        parts.push(Part::Begin { index, name: name.to_owned() });
        index
    }

    fn end(&mut self, index: usize, parts: &mut Vec<Part>) {
        self.complete += 1;
        parts.push(Part::End { index });
    }

    fn is_declared(&self, name: &str) -> bool {
        is_declared(self.declared.as_deref(), name)
    }

    fn check_arguments(&mut self, name: &str, arguments: &str) {
        if serde_json::from_str::<HashMap<String, IgnoredAny>>(arguments).is_err() {
            self.note(format!("arguments of {:?} are not a JSON object", shortened(name)));
        }
    }

    /// Keeps the first error.
    fn note(&mut self, error: String) {
        self.error.get_or_insert(error);
    }
}

fn is_declared(declared: Option<&[String]>, name: &str) -> bool {
    declared.is_none_or(|declared| declared.iter().any(|known| known == name))
}

fn content(text: String, parts: &mut Vec<Part>) {
    if !text.is_empty() {
        parts.push(Part::Content(text));
    }
}

/// The beginning of a text, for messages.
fn shortened(text: &str) -> &str {
    text.char_indices().nth(80).map_or(text, |(end, _)| &text[..end])
}

/// NAME of `functions.NAME:K`, up to the last colon; K is digits.
fn header_name(header: &str) -> Option<&str> {
    let (name, number) = header.trim().strip_prefix("functions.")?.rsplit_once(':')?;
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    (is_number && !name.is_empty() && !name.contains('\n')).then_some(name)
}

/// A whole call between tags.
#[derive(Deserialize)]
struct TaggedCall<'a> {
    name: String,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
}

impl TaggedCall<'_> {
    /// The arguments as they were written; the content of a string, which some models wrap them in.
    fn arguments(&self) -> String {
        let raw = self.arguments.map_or("", RawValue::get);
        match serde_json::from_str(raw) {
            Ok(Value::String(text)) => text,
            _ => raw.to_owned(),
        }
    }
}

/// What the beginning of a call between tags tells.
enum Head {
    /// Nothing yet.
    Incomplete,
    /// It does not begin with a name and arguments that are an object.
    Unusual,
    /// The name, and where the arguments begin.
    Complete { name: String, arguments: usize },
}

/// Reads `{"name": NAME, "arguments": {`.
fn head(text: &str) -> Head {
    let mut rest = text;
    /// Moves past white space and `expected`.
    fn eat(rest: &mut &str, expected: &str) -> Result<(), Head> {
        let trimmed = rest.trim_start();
        match trimmed.strip_prefix(expected) {
            Some(after) => {
                *rest = after;
                Ok(())
            }
            None if expected.starts_with(trimmed) => Err(Head::Incomplete),
            None => Err(Head::Unusual),
        }
    }
    let mut read = || {
        for expected in ["{", "\"name\"", ":"] {
            eat(&mut rest, expected)?;
        }
        let start = rest.trim_start();
        eat(&mut rest, "\"")?;
        let mut is_escaped = false;
        let end = rest.find(|c| {
            let is_end = c == '"' && !is_escaped;
            is_escaped = c == '\\' && !is_escaped;
            is_end
        });
        let end = end.ok_or(Head::Incomplete)?;
        let name = serde_json::from_str(&start[..end + 2]).map_err(|_| Head::Unusual)?;
        rest = &rest[end + 1..];
        for expected in [",", "\"arguments\"", ":"] {
            eat(&mut rest, expected)?;
        }
        let before = rest.trim_start();
        eat(&mut rest, "{")?;
        Ok(Head::Complete { name, arguments: text.len() - before.len() })
    };
    read().unwrap_or_else(|head| head)
}

/// Finds where a JSON object ends, in text that comes in pieces.
#[derive(Clone, Debug, Default)]
struct JsonExtent {
    depth: usize,
    in_string: bool,
    is_escaped: bool,
}

impl JsonExtent {
    /// Goes on with `text`; the length up to the end of the object if it ends here.
    fn advance(&mut self, text: &str) -> Option<usize> {
        for (at, byte) in text.bytes().enumerate() {
            if self.in_string {
                match byte {
                    _ if self.is_escaped => self.is_escaped = false,
                    b'\\' => self.is_escaped = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(at + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }
}
