//! `POST /v1/chat/completions`

use axum::Json;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::table::On;
use super::{Conversation, Draft, Format, Prepared, Settings, Tools, check_rest, prepare, respond};
use crate::config::Unsupported;
use crate::http::App;
use crate::http::answer::Shape;
use crate::http::error::{ApiError, Code};
use crate::http::fields::Fields;
use crate::session::Session;
use crate::text::{ChatInput, EncodeError, OutputText, Rendered, TemplateError, ToolParsing};

/// Answers a conversation.
pub(crate) async fn complete(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    respond(&app, request, prepare_chat).await
}

/// Counts the tokens of a conversation's prompt; the same body and the same checks, but nothing is run.
pub(crate) async fn count(State(app): State<App>, request: Request) -> Result<Json<Value>, ApiError> {
    let prepared = prepare(&app, request, prepare_chat).await?;
    let tokens = prepared.heading.prompt_tokens;
    Ok(Json(json!({ "object": "response.input_tokens", "input_tokens": tokens })))
}

/// A chat request, fields checked.
#[derive(Debug)]
struct ChatRequest {
    model: Option<String>,
    conversation: Conversation,
    tools: Tools,
    template_arguments: Option<Map<String, Value>>,
    format: Option<Format>,
    settings: Settings,
    ignored: Vec<String>,
}

impl ChatRequest {
    fn read(mut fields: Fields, session: &Session, unsupported: Unsupported) -> Result<Self, ApiError> {
        let model = fields.text("model")?;
        let mut conversation = Conversation::read(&mut fields)?;
        let tools = Tools::read(&mut fields)?;
        let template_arguments = fields.map("chat_template_kwargs")?;
        let format = Format::read(&mut fields)?;
        let mut settings = Settings::read(&mut fields, On::Chat, &session.default_options, unsupported)?;
        let mut ignored = fields.rest();
        ignored.append(&mut settings.ignored);
        ignored.append(&mut conversation.ignored);
        Ok(Self { model, conversation, tools, template_arguments, format, settings, ignored })
    }
}

fn prepare_chat(app: &App, session: &Session, fields: Fields, request_id: String) -> Result<Prepared, ApiError> {
    let ChatRequest { model, mut conversation, tools, template_arguments, format, settings, ignored } =
        ChatRequest::read(fields, session, app.options().unsupported)?;
    check_rest(app, session, &ignored, model.as_deref())?;
    let opening = call_opening(session, &tools, conversation.calls)?;
    let mut text = OutputText::plain(&session.tokenizer, &settings.stops).ending_at(&session.stop_ids());
    if let Some(dialect) = session.template.dialect() {
        text = text.with_tools(ToolParsing {
            dialect,
            declared: Some(tools.names().map(str::to_owned).collect()),
            calls_max: tools.calls_max(),
        });
    }
    let must_call = tools.must_call();
    // A form holds for text, and a demanded call leaves none.
    let format = format.filter(|_| !must_call);
    if let Some(format) = &format {
        conversation.instruct(format.instruction());
    }
    let input = ChatInput {
        messages: conversation.messages,
        tools: tools.definitions,
        kwargs: template_arguments.unwrap_or_default(),
        add_generation_prompt: true,
    };
    let mut rendered = render(session, input)?;
    let mut opened = Vec::new();
    if let Some(opening) = opening {
        rendered.push_control(&opening);
        // The model goes on after the opening; whoever reads its output must have seen it.
        opened = text.begin_with(&session.tokenizer.encode(&opening).map_err(cannot_encode)?);
    }
    let prompt = session.tokenizer.encode_pieces(&rendered).map_err(cannot_encode)?;
    Draft { shape: Shape::Chat, prompt, text, opened, settings, ignored, must_call, format }
        .settle(app, session, request_id)
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

/// Renders a conversation with the checkpoint's template.
pub(crate) fn render(session: &Session, input: ChatInput) -> Result<Rendered, ApiError> {
    let refused = |error: TemplateError| ApiError::new(Code::InvalidValue, error.to_string()).at("messages");
    session.template.render(&input).map_err(refused)
}

fn cannot_encode(error: EncodeError) -> ApiError {
    ApiError::new(Code::InvalidValue, error.to_string()).at("messages")
}
