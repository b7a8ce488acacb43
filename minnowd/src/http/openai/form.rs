//! What an answer has to look like, as a grammar that it is written in: from `response_format`, from tools, or the
//! client's own.
//!
//! An answer is held to a grammar if its text has a form, if a call is demanded, or if one of the tools is `strict`. Then
//! arguments fit the schemas of their tools, those of tools that are not `strict` as well. Only there a schema that
//! cannot be enforced is taken for any object, and the answer says so; everywhere else it is refused.

use super::{Format, Tools};
use crate::grammar::{CallGrammar, CallStart, CallTool, Grammar, GrammarError};
use crate::http::error::{ApiError, Code};
use crate::session::Session;
use crate::text::Dialect;

/// The grammar of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Form {
    /// What it is.
    pub grammar: Grammar,
    /// The field that asked for it.
    pub path: String,
    /// Tools whose arguments are only known to be objects.
    pub unenforced: Vec<String>,
}

impl Form {
    /// A grammar that a field holds.
    pub(crate) fn of_field(grammar: Grammar, path: impl Into<String>) -> Self {
        Self { grammar, path: path.into(), unenforced: Vec::new() }
    }

    /// The form of a chat answer; `None` is free text and calls of any kind. `own` is the client's grammar, which leaves
    /// no place for others. Tools come with the dialect of the checkpoint's template.
    pub(crate) fn of_chat(
        session: &Session,
        tools: &Tools,
        dialect: Option<Dialect>,
        format: Option<&Format>,
        own: Option<Self>,
    ) -> Result<Option<Self>, ApiError> {
        let has_tools = !tools.definitions.is_empty();
        if let Some(own) = own {
            if has_tools || format.is_some() {
                let path = own.path;
                let message = format!("{path} is for answers without tools and without response_format");
                return Err(ApiError::new(Code::UnsupportedParameter, message).at(path));
            }
            return Ok(Some(own));
        }
        let Some(dialect) = dialect.filter(|_| has_tools) else {
            return Ok(format.map(|format| Self::of_field(Grammar::Json(format.as_schema()), format.path())));
        };
        let start = match format {
            _ if tools.must_call() => CallStart::Begun { has_name: tools.only().is_some() },
            Some(format) => CallStart::FreeJson(format.as_schema()),
            None if tools.has_strict() => CallStart::Free,
            None => return Ok(None),
        };
        let mut unenforced = Vec::new();
        let called = tools.called().map(|tool| {
            let mut parameters = tool.parameters.cloned();
            let can_be = |schema| session.grammars.compile(&Grammar::Json(schema)).is_ok();
            if !tool.is_strict && parameters.clone().is_some_and(|schema| !can_be(schema)) {
                unenforced.push(tool.name.to_owned());
                parameters = None;
            }
            CallTool { name: tool.name.to_owned(), parameters }
        });
        let tools_called = called.collect();
        let calls = CallGrammar { dialect, tools: tools_called, calls_max: tools.calls_max(), start };
        let path = match format {
            Some(format) if !tools.must_call() => format.path(),
            _ => "tools",
        };
        Ok(Some(Self { grammar: Grammar::Calls(calls), path: path.to_owned(), unenforced }))
    }
}

/// The refusal of a grammar that stands at `path`.
pub(crate) fn refused(error: GrammarError, path: &str) -> ApiError {
    match error {
        GrammarError::Keyword { path: inner } => {
            let path = format!("{path}.{inner}");
            let message = format!("{path} is not supported: answers cannot be held to it while they are written");
            ApiError::new(Code::UnsupportedValue, message).at(path)
        }
        GrammarError::Unusable(reason) => {
            ApiError::new(Code::InvalidValue, format!("{path} cannot be followed: {reason}")).at(path)
        }
    }
}
