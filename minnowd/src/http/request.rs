//! From a generating request to its answer, whatever the dialect.
//!
//! A dialect reads its body into a [`Draft`]; settling it gives a [`Settled`] request, and with a [`Teller`] of the dialect
//! a [`Prepared`] one. Checks come in this order: JSON, fields, model name, template, tokens and context; then the queue.
//! All are done before the first byte of an answer, so a bad streaming request gets a plain error. Reading and tokenizing
//! run on blocking threads: a long prompt must not hold up other connections.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use serde_json::Value;
use tracing::error;

use super::answer::{self, Heading};
use super::error::{ApiError, Code};
use super::fields::Fields;
use super::gate::RequestId;
use super::openai::form::{self, Form};
use super::openai::table::CHOICES_MAX;
use super::openai::{Extras, Limit, Settings, describe};
use super::running::Running;
use super::stream::Teller;
use super::{App, body, ids, models, sessions, stream};
use crate::engine::runner::Task;
use crate::session::Session;
use crate::text::{Delta, OutputText};

/// Entries of `minnow.ignored_fields` at most.
const IGNORED_MAX: usize = 100;

/// What the engine is to do.
pub(crate) struct Order {
    /// What to generate; further choices have the seeds after its own.
    pub task: Task,
    /// Turns ids into text and calls.
    pub text: OutputText,
    /// How many answers.
    pub choices: usize,
    /// Whether refinement events are wanted.
    pub wants_progress: bool,
    /// Whether what each step does is shown.
    pub is_watched: bool,
    /// The settings, as `/slots` shows them.
    pub settings: Value,
    /// For the log.
    pub request_id: String,
}

/// What a dialect found out about its request, before limits and seeds are settled.
pub(crate) struct Draft {
    /// The prompt, and the field it came from.
    pub prompt: Vec<u32>,
    /// The field to blame if the prompt cannot be used.
    pub prompt_field: &'static str,
    /// Turns ids into text and calls.
    pub text: OutputText,
    /// What `text` has given out already: the beginning of a demanded call.
    pub opened: Vec<Delta>,
    /// How to generate.
    pub settings: Settings,
    /// Fields without effect.
    pub ignored: Vec<String>,
    /// What the answer must look like.
    pub form: Option<Form>,
}

/// A checked request, which a dialect has yet to say how to answer.
pub(crate) struct Settled {
    /// What is known of the answer.
    pub heading: Heading,
    /// What a stream shows besides text.
    pub extras: Extras,
    order: Order,
    is_stream: bool,
}

/// A checked request, ready to be submitted.
pub(crate) struct Prepared {
    order: Order,
    teller: Box<dyn Teller>,
    opened: Vec<Delta>,
    is_stream: bool,
    ping: Option<Duration>,
}

impl Draft {
    /// Settles limit, seed and grammar.
    pub(crate) fn settle(self, app: &App, session: &Session, request_id: String) -> Result<Settled, ApiError> {
        let Self { prompt, prompt_field, text, opened, settings, mut ignored, form } = self;
        check_prompt(session, prompt_field, &prompt)?;
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
        check_choices(session, settings.choices)?;
        let unenforced = form.as_ref().map_or_else(Vec::new, |form| form.unenforced.clone());
        let language = form.map(|Form { grammar, path, .. }| {
            session.grammars.compile(&grammar).map_err(|error| form::refused(error, &path))
        });
        let language = language.transpose()?;
        let seed = settings.seed.or(session.default_seed).unwrap_or_else(ids::fresh_seed);
        let described = describe(&settings.options, Some(seed), Some(max_new));
        ignored.truncate(IGNORED_MAX);
        let heading = Heading {
            created: unix_seconds(),
            request_id: request_id.clone(),
            model: session.model_id.clone(),
            fingerprint: session.fingerprint.clone(),
            settings: described.clone(),
            seed,
            ignored_fields: ignored,
            unenforced,
            opened,
            prompt_tokens: prompt.len(),
            choices: settings.choices,
        };
        let (wants_progress, is_watched) = (settings.wants_progress(), settings.is_watched());
        let (options, stop_ids, cache) = (settings.options, session.stop_ids(), settings.cache);
        let order = Order {
            task: Task { prompt, max_new, options, seed, stop_ids, cache, language },
            text,
            choices: settings.choices,
            wants_progress,
            is_watched,
            settings: described,
            request_id,
        };
        Ok(Settled { heading, extras: settings.extras, order, is_stream: settings.stream })
    }
}

impl Settled {
    /// Completes the request with who tells its answer.
    pub(crate) fn told_by(self, teller: impl FnOnce(Heading, Extras) -> Box<dyn Teller>) -> Prepared {
        let Self { heading, extras, order, is_stream } = self;
        let opened = heading.opened.clone();
        Prepared { order, teller: teller(heading, extras), opened, is_stream, ping: extras.ping }
    }
}

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The decoder's own tokens cannot be part of a prompt.
fn check_prompt(session: &Session, field: &'static str, prompt: &[u32]) -> Result<(), ApiError> {
    let special = session.special.decoder_ids();
    match prompt.iter().enumerate().find_map(|(index, &id)| Some((index, id, special.name(id)?))) {
        None => Ok(()),
        Some((index, id, name)) => {
            let message = format!("token {index} of the prompt is {id}, the decoder's own {name} token");
            Err(ApiError::new(Code::InvalidValue, message).at(field))
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

/// Answers that a request may ask for: more than there may be requests could never be taken.
pub(crate) fn choices_max(session: &Session) -> usize {
    usize::try_from(CHOICES_MAX).unwrap_or(1).min(session.parallel + session.queue_capacity)
}

fn check_choices(session: &Session, choices: usize) -> Result<(), ApiError> {
    let most = choices_max(session);
    if choices <= most {
        return Ok(());
    }
    Err(ApiError::new(Code::UnsupportedValue, format!("n is {choices}, but this server gives at most {most}")).at("n"))
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
pub(crate) async fn respond(
    app: &App,
    request: Request,
    read: impl FnOnce(&App, &Session, Fields, String) -> Result<Prepared, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let conversation = sessions::conversation(&request);
    let Prepared { order, mut teller, opened, is_stream, ping } = prepare(app, request, read).await?;
    if !is_stream {
        let done = answer::collect(Running::start(app, order).await?, &opened).await?;
        return Ok(Json(teller.whole(done)).into_response());
    }
    let conversation = conversation?;
    if let Some(conversation) = &conversation {
        app.sessions().cancel_running(conversation);
    }
    let bytes = stream::bytes(Running::start(app, order).await?, teller, ping);
    Ok(stream::events(match conversation {
        Some(conversation) => app.sessions().record(conversation, bytes),
        None => Body::from_stream(bytes.map(Ok::<_, Infallible>)),
    }))
}

/// The checks after all fields were read: nothing unknown if that is refused, and the right model.
pub(crate) fn check_rest(
    app: &App,
    session: &Session,
    ignored: &[String],
    model: Option<&str>,
) -> Result<(), ApiError> {
    check_known(app, ignored)?;
    models::check_name(app, session, model)
}

/// Refuses fields that nobody knows, if that is wanted.
pub(crate) fn check_known(app: &App, ignored: &[String]) -> Result<(), ApiError> {
    match ignored.first() {
        Some(path) if app.options().strict_requests => {
            Err(ApiError::new(Code::UnknownParameter, format!("{path} is not known")).at(path))
        }
        _ => Ok(()),
    }
}
