//! A checkpoint's chat template: a conversation in, the prompt's text out.
//!
//! Templates are Jinja programs written for Hugging Face's settings (blocks trimmed, `tojson` as Python's
//! `json.dumps`, `raise_exception`). They run under a budget of instructions, and their output is bounded.
//!
//! What a client wrote must not become control tokens. Before rendering, every added token's text inside client strings
//! is broken by a mark, a character that occurs nowhere else in the input; the template runs as usual; the tokenizer
//! then takes as control tokens only what is unbroken, and drops the marks ([`Tokenizer::encode_pieces`]). The text
//! between control tokens is encoded in one piece, so prompts without such text come out as if nothing was done. In an
//! assistant's turn, added tokens that are ordinary text (thinking tags, `<tool_call>`) stay what they are: it is
//! the model's own output coming back, and templates look for these tags in it.

use std::collections::HashSet;

use minijinja::value::{Kwargs, Value as Object};
use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior};
use serde_json::{Map, Value, json};
use thiserror::Error;

use super::json::{Style, dumps};
use super::tokenizer::{AddedText, Tokenizer};

/// Instructions a template may execute. A conversation of 8,192 messages takes under a million; only the search of call
/// labels for tool results (each result looks through all calls) grows faster.
const FUEL: u64 = 30_000_000;
/// Bytes a template may write: twice the default limit of a request's body, for templates that repeat part of it.
const RENDERED_BYTES_MAX: usize = 16 << 20;

/// A chat template, compiled.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    source: String,
    /// Whether tool definitions are wanted as text.
    takes_tool_text: bool,
    dialect: Option<Dialect>,
    added: Added,
}

/// How a model writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// LLaDA2.2: control tokens around header and arguments.
    Sections,
    /// Ling 2.0, LLaDA2.0 and 2.1: JSON between `<tool_call>` and `</tool_call>`.
    Tagged,
}

/// What a template is given.
#[derive(Clone, Debug, Default)]
pub struct ChatInput {
    /// Messages as templates read them: objects with `role`, `content`, and what else the role has.
    pub messages: Vec<Value>,
    /// Tool definitions: whole OpenAI objects.
    pub tools: Vec<Value>,
    /// Further variables for the template (`chat_template_kwargs`). They do not replace the ones above.
    pub kwargs: Map<String, Value>,
    /// Whether the prompt ends with the opening of an assistant's turn.
    pub add_generation_prompt: bool,
}

/// A rendered prompt, with marks in what looks like a control token but is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    marked: String,
    mark: Option<char>,
}

/// Why a template cannot be used, or refused a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TemplateError {
    /// It does not compile.
    #[error("chat template: {0}")]
    Syntax(String),
    /// It called `raise_exception`: the conversation is at fault.
    #[error("the chat template refuses this conversation: {0}")]
    Refused(String),
    /// It failed on its own.
    #[error("the chat template failed: {0}")]
    Failed(String),
    /// It ran too long.
    #[error("the chat template did not end within {FUEL} instructions")]
    Endless,
    /// It wrote too much.
    #[error("the chat template wrote more than {RENDERED_BYTES_MAX} bytes")]
    TooLong,
    /// No character is left that could serve as a mark.
    #[error("the conversation uses every private character")]
    NoMark,
}

impl Template {
    /// Compiles `chat_template.jinja` for a checkpoint with this tokenizer.
    pub fn new(source: &str, tokenizer: &Tokenizer) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", raise_exception);
        environment.set_fuel(Some(FUEL));
        environment
            .add_template_owned("chat_template", source.to_owned())
            .map_err(|error| TemplateError::Syntax(error.to_string()))?;
        let takes_tool_text = source.contains("tools_ts_str");
        let (source, added) = (source.to_owned(), Added::new(tokenizer.added()));
        let mut template = Self { environment, source, takes_tool_text, dialect: None, added };
        template.dialect = template.probe_dialect(tokenizer);
        Ok(template)
    }

    /// The template as the checkpoint has it.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// How the model writes tool calls; `None` if its template knows none.
    #[must_use]
    pub fn dialect(&self) -> Option<Dialect> {
        self.dialect
    }

    /// Renders a call and looks at what comes out. A template may know several ways; this is the one it takes.
    fn probe_dialect(&self, tokenizer: &Tokenizer) -> Option<Dialect> {
        let call = json!({"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}});
        let messages = vec![
            json!({"role": "user", "content": ""}),
            json!({"role": "assistant", "content": "", "tool_calls": [call]}),
        ];
        let text = self.render(&ChatInput { messages, ..ChatInput::default() }).ok()?.text();
        let is_written = |markers: &[&str]| markers.iter().all(|marker| text.contains(marker));
        let has_tokens = || Dialect::SECTION_MARKERS.iter().all(|marker| tokenizer.id(marker).is_some());
        if is_written(&Dialect::SECTION_MARKERS) && has_tokens() {
            Some(Dialect::Sections)
        } else {
            is_written(&Dialect::TAGS).then_some(Dialect::Tagged)
        }
    }

    /// Renders a conversation.
    pub fn render(&self, input: &ChatInput) -> Result<Rendered, TemplateError> {
        let guard = Guard::new(input, &self.added)?;
        let messages: Vec<Value> = input.messages.iter().map(|message| guard.message(message)).collect();
        let tools: Vec<Value> = input.tools.iter().map(|tool| guard.all(tool)).collect();
        let mut variables: Map<String, Value> =
            input.kwargs.iter().map(|(name, value)| (name.clone(), guard.all(value))).collect();
        if self.takes_tool_text && !tools.is_empty() && !variables.contains_key("tools_ts_str") {
            let lines: String = tools.iter().map(|tool| dumps(tool, &Style::default()) + "\n").collect();
            variables.insert("tools_ts_str".to_owned(), lines.into());
        }
        variables.insert("messages".to_owned(), messages.into());
        variables.insert("tools".to_owned(), if tools.is_empty() { Value::Null } else { tools.into() });
        variables.insert("add_generation_prompt".to_owned(), input.add_generation_prompt.into());

        let mut out = Bounded { bytes: Vec::new(), is_full: false };
        let template = self.environment.get_template("chat_template").map_err(|error| failure(&error))?;
        let result = template.render_captured_to(Object::from_serialize(&variables), &mut out);
        if out.is_full {
            return Err(TemplateError::TooLong);
        }
        drop(result.map_err(|error| failure(&error))?);
        let marked = String::from_utf8(out.bytes).map_err(|error| TemplateError::Failed(error.to_string()))?;
        let mark = guard.mark.filter(|&mark| marked.contains(mark));
        Ok(Rendered { marked, mark })
    }
}

impl Dialect {
    /// The control tokens of [`Dialect::Sections`].
    pub(crate) const SECTION_MARKERS: [&'static str; 5] = [
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ];
    /// The tags of [`Dialect::Tagged`], which a tokenizer may or may not know as a token each.
    pub(crate) const TAGS: [&'static str; 2] = ["<tool_call>", "</tool_call>"];

    /// How a model begins a call, to be put at the end of a prompt when it must make one: of the function `name`, or of
    /// any. `calls_before` counts the calls of the conversation so far, which LLaDA2.2 numbers.
    #[must_use]
    pub fn call_opening(self, name: Option<&str>, calls_before: usize) -> String {
        let [section, _, call, arguments, _] = Self::SECTION_MARKERS;
        match (self, name) {
            (Self::Sections, None) => format!("{section}{call}functions."),
            (Self::Sections, Some(name)) => format!("{section}{call}functions.{name}:{calls_before}{arguments}"),
            (Self::Tagged, None) => "<tool_call>\n{\"name\": \"".to_owned(),
            (Self::Tagged, Some(name)) => format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": "),
        }
    }
}

impl Rendered {
    /// The prompt as the template wrote it.
    #[must_use]
    pub fn text(&self) -> String {
        match self.mark {
            Some(mark) => self.marked.replace(mark, ""),
            None => self.marked.clone(),
        }
    }

    /// Adds text at the end, in which control tokens count: the opening of a forced tool call.
    pub fn push_control(&mut self, text: &str) {
        self.marked.push_str(text);
    }

    pub(super) fn marked(&self) -> &str {
        &self.marked
    }

    pub(super) fn mark(&self) -> Option<char> {
        self.mark
    }
}

/// The added tokens of a tokenizer, to be found in text.
#[derive(Debug)]
struct Added {
    tokens: Vec<AddedText>,
    /// The characters they begin with: few, so that most of a text needs no closer look.
    firsts: Vec<char>,
}

impl Added {
    fn new(tokens: &[AddedText]) -> Self {
        let mut firsts: Vec<char> = tokens.iter().filter_map(|token| token.text.chars().next()).collect();
        firsts.sort_unstable();
        firsts.dedup();
        Self { tokens: tokens.to_vec(), firsts }
    }

    /// Whether one of the tokens that count begins at `at`: wholly, or as far as `text` goes, since what follows in the
    /// prompt might complete it.
    fn begins(&self, text: &str, at: usize, counts: &dyn Fn(&AddedText) -> bool) -> bool {
        let rest = &text[at..];
        let is_here = |token: &AddedText| rest.starts_with(&token.text) || token.text.starts_with(rest);
        rest.starts_with(&self.firsts[..]) && self.tokens.iter().any(|token| is_here(token) && counts(token))
    }
}

/// Breaks added tokens in what a client wrote.
struct Guard<'a> {
    /// `None` if there is nothing to break.
    mark: Option<char>,
    added: &'a Added,
}

impl<'a> Guard<'a> {
    fn new(input: &ChatInput, added: &'a Added) -> Result<Self, TemplateError> {
        let mut seen = Seen { added, needs_mark: false, characters: HashSet::new() };
        input.messages.iter().chain(&input.tools).chain(input.kwargs.values()).for_each(|value| seen.look(value));
        if !seen.needs_mark {
            return Ok(Self { mark: None, added });
        }
        let free = MARKS.into_iter().flatten().find(|mark| !seen.characters.contains(mark));
        Ok(Self { mark: Some(free.ok_or(TemplateError::NoMark)?), added })
    }

    /// A message, broken as its role asks for.
    fn message(&self, message: &Value) -> Value {
        let is_own = message["role"] == "assistant";
        self.value(message, &|token| !is_own || (token.is_special && !THINKING.contains(&token.text.as_str())))
    }

    /// A value with every added token broken.
    fn all(&self, value: &Value) -> Value {
        self.value(value, &|_| true)
    }

    fn value(&self, value: &Value, counts: &dyn Fn(&AddedText) -> bool) -> Value {
        let Some(mark) = self.mark else { return value.clone() };
        match value {
            Value::String(text) => Value::String(self.broken(text, mark, counts)),
            Value::Array(items) => items.iter().map(|item| self.value(item, counts)).collect(),
            Value::Object(members) => {
                let broken =
                    |(key, value): (&String, &Value)| (self.broken(key, mark, counts), self.value(value, counts));
                Value::Object(members.iter().map(broken).collect())
            }
            other => other.clone(),
        }
    }

    /// Puts the mark behind the first character of every added token.
    fn broken(&self, text: &str, mark: char, counts: &dyn Fn(&AddedText) -> bool) -> String {
        let mut out = String::with_capacity(text.len());
        for (at, character) in text.char_indices() {
            out.push(character);
            if self.added.begins(text, at, counts) {
                out.push(mark);
            }
        }
        out
    }
}

/// Noncharacters first, which text for interchange does not contain, then the private planes.
const MARKS: [std::ops::RangeInclusive<char>; 2] = ['\u{FDD0}'..='\u{FDEF}', '\u{F0000}'..='\u{10FFFD}'];

/// Tags that templates take out of an assistant's earlier turns.
const THINKING: [&str; 2] = ["<think>", "</think>"];

/// What a client's strings contain.
struct Seen<'a> {
    added: &'a Added,
    needs_mark: bool,
    /// Characters of the ranges that marks come from.
    characters: HashSet<char>,
}

impl Seen<'_> {
    fn look(&mut self, value: &Value) {
        match value {
            Value::String(text) => self.look_at(text),
            Value::Array(items) => items.iter().for_each(|item| self.look(item)),
            Value::Object(members) => members.iter().for_each(|(key, value)| {
                self.look_at(key);
                self.look(value);
            }),
            _ => {}
        }
    }

    fn look_at(&mut self, text: &str) {
        for (at, character) in text.char_indices() {
            self.needs_mark = self.needs_mark || self.added.begins(text, at, &|_| true);
            if MARKS.iter().any(|range| range.contains(&character)) {
                self.characters.insert(character);
            }
        }
    }
}

/// Keeps what a template writes, up to the limit.
struct Bounded {
    bytes: Vec<u8>,
    is_full: bool,
}

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + bytes.len() > RENDERED_BYTES_MAX {
            self.is_full = true;
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Marks an error as the template's own decision.
#[derive(Debug, Error)]
#[error("{0}")]
struct Refusal(String);

fn raise_exception(message: String) -> Result<String, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Refusal(message)))
}

/// `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, as Hugging Face defines it.
fn to_json(value: &Object, kwargs: Kwargs) -> Result<String, minijinja::Error> {
    let invalid = |message: String| minijinja::Error::new(ErrorKind::InvalidOperation, message);
    let style = Style {
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent: kwargs.get::<Option<usize>>("indent")?.map(|indent| indent.min(INDENT_MAX)),
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        separators: match kwargs.get::<Option<Vec<String>>>("separators")?.as_deref() {
            None => None,
            Some([item, key]) => Some((item.clone(), key.clone())),
            Some(_) => return Err(invalid("separators are not a pair".to_owned())),
        },
    };
    kwargs.assert_all_used()?;
    if value.is_undefined() {
        return Err(invalid("an undefined value has no JSON form".to_owned()));
    }
    let value = serde_json::to_value(value).map_err(|error| invalid(error.to_string()))?;
    Ok(dumps(&value, &style))
}

/// Spaces a level of JSON may be indented by.
const INDENT_MAX: usize = 16;

fn failure(error: &minijinja::Error) -> TemplateError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(inner) = source {
        if let Some(Refusal(message)) = inner.downcast_ref() {
            return TemplateError::Refused(message.clone());
        }
        if inner.downcast_ref::<minijinja::Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
            return TemplateError::Endless;
        }
        source = inner.source();
    }
    TemplateError::Failed(error.to_string())
}
