//! `POST /v1/chat/completions`, and what every dialect of chat becomes: a [`ChatRequest`], then a prompt.

use axum::Json;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::form::Form;
use super::table::On;
use super::telling::teller;
use super::tools::Naming;
use super::{Conversation, Format, Settings, Shape, Tools};
use crate::config::Unsupported;
use crate::http::App;
use crate::http::error::{ApiError, Code};
use crate::http::fields::Fields;
use crate::http::request::{self, Draft, Settled, check_rest, respond};
use crate::session::Session;
use crate::text::{ChatInput, EncodeError, OutputText, Rendered, TemplateError, ToolParsing};

/// Answers a conversation.
pub(crate) async fn complete(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    let read = |app: &App, session: &Session, fields, request_id| {
        let settled = settle(app, session, fields, request_id)?;
        Ok(settled.told_by(teller(Shape::Chat, session)))
    };
    respond(&app, request, read).await
}

/// Counts the tokens of a conversation's prompt; the same body and the same checks, but nothing is run.
pub(crate) async fn count(State(app): State<App>, request: Request) -> Result<Json<Value>, ApiError> {
    let settled = request::prepare(&app, request, settle).await?;
    Ok(Json(input_tokens(&settled)))
}

/// What a route that counts tokens answers.
pub(crate) fn input_tokens(settled: &Settled) -> Value {
    json!({ "object": "response.input_tokens", "input_tokens": settled.heading.prompt_tokens })
}

fn settle(app: &App, session: &Session, fields: Fields, request_id: String) -> Result<Settled, ApiError> {
    let (request, model) = ChatRequest::read(fields, session, app.options().unsupported)?;
    check_rest(app, session, &request.ignored, model.as_deref())?;
    request.draft(session)?.settle(app, session, request_id)
}

/// A chat request of any dialect, fields checked.
#[derive(Debug)]
pub(crate) struct ChatRequest {
    /// What was said.
    pub conversation: Conversation,
    /// The field that it came in.
    pub prompt_field: &'static str,
    /// What may be called.
    pub tools: Tools,
    /// What the client tells the template.
    pub template_arguments: Map<String, Value>,
    /// The form of the text.
    pub format: Option<Format>,
    /// How to generate.
    pub settings: Settings,
    /// Fields without effect.
    pub ignored: Vec<String>,
}

impl ChatRequest {
    /// The request, and the model it asks for.
    fn read(
        mut fields: Fields,
        session: &Session,
        unsupported: Unsupported,
    ) -> Result<(Self, Option<String>), ApiError> {
        let model = fields.text("model")?;
        let mut conversation = Conversation::read(&mut fields)?;
        let tools = Tools::read(&mut fields, Naming::Nested)?;
        let template_arguments = fields.map("chat_template_kwargs")?.unwrap_or_default();
        let format = Format::read(&mut fields)?;
        let mut settings = Settings::read(&mut fields, On::Chat, &session.default_options, unsupported)?;
        let mut ignored = fields.rest();
        ignored.append(&mut settings.ignored);
        ignored.append(&mut conversation.ignored);
        let prompt_field = "messages";
        Ok((Self { conversation, prompt_field, tools, template_arguments, format, settings, ignored }, model))
    }

    /// Renders and tokenizes the prompt.
    pub(crate) fn draft(self, session: &Session) -> Result<Draft, ApiError> {
        let Self { mut conversation, prompt_field, tools, template_arguments, format, mut settings, ignored } = self;
        let opening = call_opening(session, &tools, conversation.calls)?;
        let dialect = session.template.dialect();
        let mut text = OutputText::plain(&session.tokenizer, &settings.stops).ending_at(&session.stop_ids());
        if let Some(dialect) = dialect {
            text = text.with_tools(ToolParsing {
                dialect,
                declared: Some(tools.names().map(str::to_owned).collect()),
                calls_max: tools.calls_max(),
            });
        }
        let form = Form::of_chat(session, &tools, dialect, format.as_ref(), settings.form.take())?;
        // A form holds for text, and a demanded call leaves none.
        if let Some(format) = format.filter(|_| !tools.must_call()) {
            conversation.instruct(format.instruction());
        }
        let input = ChatInput {
            messages: conversation.messages,
            tools: tools.definitions,
            kwargs: template_arguments,
            add_generation_prompt: true,
        };
        let cannot_encode = |error: EncodeError| ApiError::new(Code::InvalidValue, error.to_string()).at(prompt_field);
        let mut rendered = render(session, input, prompt_field)?;
        let mut opened = Vec::new();
        if let Some(opening) = opening {
            rendered.push_control(&opening);
            // The model goes on after the opening; whoever reads its output must have seen it.
            opened = text.begin_with(&session.tokenizer.encode(&opening).map_err(cannot_encode)?);
        }
        let prompt = session.tokenizer.encode_pieces(&rendered).map_err(cannot_encode)?;
        Ok(Draft { prompt, prompt_field, text, opened, settings, ignored, form })
    }
}

/// What a demanded call begins with, in the model's own form: as much as is certain. `calls_before` is the number of
/// calls in the conversation, which LLaDA2.2 counts on.
fn call_opening(session: &Session, tools: &Tools, calls_before: usize) -> Result<Option<String>, ApiError> {
    let Some(dialect) = session.template.dialect() else {
        if tools.definitions.is_empty() {
            return Ok(None);
        }
        let message = "tools are not supported: this model's chat template knows none";
        return Err(ApiError::new(Code::UnsupportedParameter, message).at("tools"));
    };
    if !tools.must_call() {
        return Ok(None);
    }
    Ok(Some(dialect.call_opening(tools.only(), calls_before)))
}

/// Renders a conversation, which came in `field`, with the checkpoint's template.
pub(crate) fn render(session: &Session, input: ChatInput, field: &str) -> Result<Rendered, ApiError> {
    let refused = |error: TemplateError| ApiError::new(Code::InvalidValue, error.to_string()).at(field);
    session.template.render(&input).map_err(refused)
}
