//! Tool calls as a grammar, in both dialects of [`crate::text`]: well-formed headers of declared tools, and arguments that
//! fit their schemas.

use std::fmt::Write;

use serde_json::{Value, json};

use super::{GrammarError, schema};
use crate::text::{Dialect, Token, Tokenizer};

/// What an answer that may hold tool calls looks like.
#[derive(Clone, Debug, PartialEq)]
pub struct CallGrammar {
    /// How calls are written.
    pub dialect: Dialect,
    /// Tools that may be called.
    pub tools: Vec<CallTool>,
    /// Calls at most; `None` is any number.
    pub calls_max: Option<usize>,
    /// Where the answer begins.
    pub start: CallStart,
}

/// Where the grammar begins.
#[derive(Clone, Debug, PartialEq)]
pub enum CallStart {
    /// At the beginning: text, calls, or text and then calls.
    Free,
    /// The same, but the text, if there is no call, fits a schema.
    FreeJson(Value),
    /// In the header of the first call, which was begun already: before the tool's name, or after all of the header.
    Begun {
        /// Whether the header is complete, so that the arguments of the only tool follow.
        has_name: bool,
    },
}

/// One tool of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct CallTool {
    /// Its name: letters, digits, `_` and `-`.
    pub name: String,
    /// What its arguments must fit; any object if `None`.
    pub parameters: Option<Value>,
}

impl CallGrammar {
    /// The grammar in llguidance's Lark. Control tokens are named by id.
    pub(super) fn lark(&self, tokenizer: &Tokenizer) -> Result<String, GrammarError> {
        let mut text = String::new();
        let mut rule = |name: &str, body: &str| {
            let _ = writeln!(text, "{name}: {body}");
        };
        let names: Vec<String> = (0..self.tools.len()).map(|index| format!("call_{index}")).collect();
        for (index, tool) in self.tools.iter().enumerate() {
            let parameters = match &tool.parameters {
                Some(parameters) => schema::enforceable(parameters)?,
                None => json!({"type": "object"}),
            };
            rule(&format!("arguments_{index}"), &format!("%json {parameters}"));
            rule(&names[index], &self.dialect.call(tokenizer, &tool.name, &format!("arguments_{index}")));
        }
        // What follows the opening of a first call, and what a whole further call is.
        rule("called", &names.join(" | "));
        let parts = self.dialect.parts(tokenizer);
        let more = match self.calls_max {
            None => format!("({} called)*", parts.separator),
            // The parser takes no repetition of nothing.
            Some(0 | 1) => String::new(),
            Some(max) => format!("({} called){{0,{}}}", parts.separator, max.saturating_sub(1)),
        };
        let closed = parts.close;
        let calls = format!("{} called {more} {closed}", parts.open);
        match &self.start {
            CallStart::Begun { has_name: false } => rule("start", &format!("called {more} {closed}")),
            CallStart::Begun { has_name: true } => {
                let rest = self.dialect.call_end(tokenizer);
                rule("start", &format!("arguments_0 {rest} {more} {closed}"));
            }
            CallStart::FreeJson(format) => {
                rule("answer", &format!("%json {}", schema::enforceable(format)?));
                rule("start", &format!("answer | {calls}"));
            }
            CallStart::Free => match parts.literal {
                None => {
                    rule("TEXT", r"/(?s:.+)/");
                    rule("start", &format!("TEXT? ({calls})?"));
                }
                // The opening is text like any other, so text ends where it first stands.
                Some(opening) => {
                    rule("TEXT", &format!(r"/(?s:.+)/ & ~/(?s:.*){opening}(?s:.*)/"));
                    rule("before[lazy]", &format!(r"/(?s:.*){opening}\n/"));
                    rule("start", &format!("TEXT? | before called {more} {closed}"));
                }
            },
        }
        Ok(text)
    }
}

/// The pieces around calls.
struct Parts {
    /// Before the first call's name.
    open: String,
    /// Between the end of a call and the name of the next.
    separator: String,
    /// After the last call.
    close: String,
    /// The opening where it is not a control token, as a regular expression.
    literal: Option<&'static str>,
}

impl Dialect {
    fn parts(self, tokenizer: &Tokenizer) -> Parts {
        let [section, section_end, call, ..] = Self::SECTION_MARKERS.map(|marker| spelled(tokenizer, marker));
        let tag = spelled(tokenizer, Self::TAGS[0]);
        match self {
            Self::Sections => Parts {
                open: format!("{section} {call} \"functions.\""),
                separator: format!("{call} \"functions.\""),
                close: section_end,
                literal: None,
            },
            Self::Tagged => Parts {
                open: format!(r#"{tag} "\n""#),
                separator: format!(r#""\n" {tag} "\n""#),
                close: String::new(),
                literal: tag.starts_with('"').then_some(Self::TAGS[0]),
            },
        }
    }

    /// From a call's name to its end.
    fn call(self, tokenizer: &Tokenizer, name: &str, arguments: &str) -> String {
        let end = self.call_end(tokenizer);
        match self {
            Self::Sections => {
                let begin = spelled(tokenizer, Self::SECTION_MARKERS[3]);
                format!("{} /[0-9]{{1,4}}/ {begin} {arguments} {end}", quoted(&format!("{name}:")))
            }
            Self::Tagged => {
                let header = quoted(&format!("{{\"name\": \"{name}\", \"arguments\": "));
                format!("{header} {arguments} {end}")
            }
        }
    }

    /// What follows a call's arguments.
    fn call_end(self, tokenizer: &Tokenizer) -> String {
        match self {
            Self::Sections => spelled(tokenizer, Self::SECTION_MARKERS[4]),
            Self::Tagged => format!(r#""}}\n" {}"#, spelled(tokenizer, Self::TAGS[1])),
        }
    }
}

/// A marker as the grammar names it: by id where it is a control token, else as text.
fn spelled(tokenizer: &Tokenizer, marker: &str) -> String {
    match tokenizer.id(marker).map(|id| (id, tokenizer.token(id))) {
        Some((id, Some(Token::Special(_)))) => format!("<[{id}]>"),
        _ => quoted(marker),
    }
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}
