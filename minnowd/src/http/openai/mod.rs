//! The two generating routes of the OpenAI API: what each reads, and the way from there to an answer.
//!
//! Checks come in this order: JSON, fields, model name, template, tokens and context; then the queue. All are done before
//! the first byte of an answer, so a bad streaming request gets a plain error. Reading and tokenizing run on blocking
//! threads: a long prompt must not hold up other connections.

pub(crate) mod chat;
pub(crate) mod completions;
mod format;
mod messages;
mod settings;
pub(crate) mod table;
mod tools;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use tracing::error;

use super::answer::{self, Heading, Shape};
use super::attempts::Attempts;
use super::error::{ApiError, Code};
use super::fields::Fields;
use super::gate::RequestId;
use super::{App, body, ids, models, sessions, stream};
use crate::engine::runner::Task;
use crate::session::Session;
use crate::text::{Delta, OutputText};

pub(crate) use self::format::Format;
pub(crate) use self::messages::Conversation;
pub(crate) use self::settings::{Extras, Limit, Settings, describe};
pub(crate) use self::tools::Tools;

/// A checked request, ready to be submitted.
pub(crate) struct Prepared {
    /// What the engine is to do.
    pub order: Order,
    /// What the answer begins with.
    pub heading: Heading,
    /// For a stream, what it shows besides text.
    pub stream: Option<Extras>,
    /// The form that the whole text must have.
    pub format: Option<Format>,
}

/// What the engine is to do.
#[derive(Clone)]
pub(crate) struct Order {
    /// What to generate.
    pub task: Task,
    /// Turns ids into text and calls.
    pub text: OutputText,
    /// Whether refinement events are wanted.
    pub wants_progress: bool,
    /// Whether what each step does is shown.
    pub is_watched: bool,
    /// The settings, as `/slots` shows them.
    pub settings: serde_json::Value,
    /// For the log.
    pub request_id: String,
}

/// What a route found out about its request, before limits and seeds are settled.
struct Draft {
    shape: Shape,
    prompt: Vec<u32>,
    text: OutputText,
    /// What `text` has given out already: the beginning of a demanded call.
    opened: Vec<Delta>,
    settings: Settings,
    ignored: Vec<String>,
    must_call: bool,
    format: Option<Format>,
}

/// Entries of `minnow.ignored_fields` at most.
const IGNORED_MAX: usize = 100;

impl Draft {
    /// Settles limit and seed.
    fn settle(self, app: &App, session: &Session, request_id: String) -> Result<Prepared, ApiError> {
        let Self { shape, prompt, text, opened, settings, mut ignored, must_call, format } = self;
        check_prompt(session, shape, &prompt)?;
        let room = room_after(session, prompt.len())?;
        if let (true, Some(Limit::Tokens(tokens))) = (app.options().strict_limits, settings.limit)
            && tokens > room
        {
            return Err(too_long(session, prompt.len(), &format!("and {tokens} more were asked for")));
        }
        let max_new = match (settings.limit, session.default_max_tokens) {
            (Some(Limit::Tokens(tokens)), _) | (None, Some(tokens)) => tokens.min(room),
            (Some(Limit::Room), _) | (None, None) => room,
        };
        let seed = settings.seed.or(session.default_seed).unwrap_or_else(ids::fresh_seed);
        let described = describe(&settings.options, Some(seed), Some(max_new));
        ignored.truncate(IGNORED_MAX);
        let heading = Heading {
            shape,
            id: ids::random(match shape {
                Shape::Chat => "chatcmpl-",
                Shape::Text => "cmpl-",
            }),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            model: session.model_id.clone(),
            fingerprint: session.fingerprint.clone(),
            settings: described.clone(),
            ignored_fields: ignored,
            must_call,
            opened,
            prompt_tokens: prompt.len(),
        };
        let (options, stop_ids, cache) = (settings.options, session.stop_ids(), settings.cache);
        let order = Order {
            task: Task { prompt, max_new, options, seed, stop_ids, cache, language: None },
            text,
            wants_progress: settings.wants_progress(),
            is_watched: settings.is_watched(),
            settings: described,
            request_id,
        };
        Ok(Prepared { order, heading, stream: settings.stream.then_some(settings.extras), format })
    }
}

/// The decoder's own tokens cannot be part of a prompt.
fn check_prompt(session: &Session, shape: Shape, prompt: &[u32]) -> Result<(), ApiError> {
    let special = session.special.decoder_ids();
    let param = match shape {
        Shape::Chat => "messages",
        Shape::Text => "prompt",
    };
    match prompt.iter().enumerate().find_map(|(index, &id)| Some((index, id, special.name(id)?))) {
        None => Ok(()),
        Some((index, id, name)) => {
            let message = format!("token {index} of the prompt is {id}, the decoder's own {name} token");
            Err(ApiError::new(Code::InvalidValue, message).at(param))
        }
    }
}

/// Tokens that may follow a prompt of this length: at least one.
fn room_after(session: &Session, prompt_tokens: usize) -> Result<usize, ApiError> {
    let context = session.context;
    match context.checked_sub(prompt_tokens) {
        Some(room) if room > 0 => Ok(room),
        _ => Err(too_long(session, prompt_tokens, "which leaves no room for an answer")),
    }
}

/// Clients look for the beginning of this message, and for the two numbers.
fn too_long(session: &Session, prompt_tokens: usize, why: &str) -> ApiError {
    let context = session.context;
    let message = format!(
        "This model's maximum context length is {context} tokens. However, your prompt has {prompt_tokens} tokens, {why}."
    );
    let error = ApiError::new(Code::ContextLength, message);
    error.with("n_prompt_tokens", prompt_tokens).with("n_ctx", context)
}

/// Reads a request's body and prepares it on a blocking thread.
pub(crate) async fn prepare<T: Send + 'static>(
    app: &App,
    request: Request,
    prepare: impl FnOnce(&App, &Session, Fields, String) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let (parts, body) = request.into_parts();
    let fields = body::read_object(&parts.headers, body, app.options().max_body_bytes).await?;
    let request_id = parts.extensions.get::<RequestId>().map_or_else(String::new, |id| id.as_str().to_owned());
    let app = app.clone();
    let prepared = tokio::task::spawn_blocking(move || {
        let session = Arc::clone(app.session()?);
        prepare(&app, &session, fields, request_id)
    });
    prepared.await.unwrap_or_else(|failure| {
        error!(%failure, "preparing a request panicked");
        Err(ApiError::internal())
    })
}

/// Reads, runs and answers a generating request.
async fn respond(
    app: &App,
    request: Request,
    read: impl FnOnce(&App, &Session, Fields, String) -> Result<Prepared, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let conversation = sessions::conversation(&request);
    let Prepared { order, mut heading, stream, format } = prepare(app, request, read).await?;
    let Some(extras) = stream else {
        let attempts = Attempts::start(app, order, format).await?;
        return Ok(Json(answer::plain(attempts, &mut heading).await?).into_response());
    };
    let conversation = conversation?;
    if let Some(conversation) = &conversation {
        app.sessions().cancel_running(conversation);
    }
    let tokenizer = Arc::clone(&app.session()?.tokenizer);
    let bytes = stream::bytes(Attempts::start(app, order, format).await?, heading, extras, tokenizer);
    Ok(stream::events(match conversation {
        Some(conversation) => app.sessions().record(conversation, bytes),
        None => Body::from_stream(bytes.map(Ok::<_, Infallible>)),
    }))
}

/// The checks after all fields were read: nothing unknown if that is refused, and the right model.
fn check_rest(app: &App, session: &Session, ignored: &[String], model: Option<&str>) -> Result<(), ApiError> {
    if let (true, Some(path)) = (app.options().strict_requests, ignored.first()) {
        return Err(ApiError::new(Code::UnknownParameter, format!("{path} is not known")).at(path));
    }
    models::check_name(app, session, model)
}
