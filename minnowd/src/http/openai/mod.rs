//! The completions routes of the OpenAI API, and what other dialects share with them: conversations, tools, formats and
//! settings as plain structs ([`request`](super::request) does the rest).

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod form;
mod format;
pub(crate) mod messages;
mod settings;
pub(crate) mod table;
mod telling;
pub(crate) mod tools;

pub(crate) use self::format::Format;
pub(crate) use self::messages::Conversation;
pub(crate) use self::settings::{Extras, Limit, Settings, describe};
pub(crate) use self::tools::Tools;

/// The two forms of an answer of the completions API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Text,
}
