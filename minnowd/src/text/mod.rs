//! Text at both ends of the model: conversations become token ids, token ids become text and tool calls.
//!
//! [`Template`] renders a conversation with the checkpoint's own chat template, [`Tokenizer`] encodes it so that what a
//! client wrote never becomes a control token, [`SpecialTokens`] finds the ids that mean something, and [`OutputText`]
//! turns committed ids into text as they come. Strings in and out; no files, no model.

mod json;
mod output;
mod special;
mod template;
mod tokenizer;

pub(crate) use json::as_trained;
pub use output::{Delta, End, OutputText, ToolParsing};
pub use special::{SpecialTokens, SpecialTokensError};
pub use template::{ChatInput, Dialect, Rendered, Template, TemplateError};
pub use tokenizer::{EncodeError, Token, Tokenizer, TokenizerError};
