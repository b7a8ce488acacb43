//! `POST /v1/messages`: the Messages API of Anthropic.
//!
//! A request becomes the same [`ChatRequest`](super::openai::chat::ChatRequest) as one to the completions API ([`read`]);
//! what a stream or a plain answer looks like is in [`telling`]. Refusals on these routes have their own form, whoever
//! makes them: [`in_its_form`] is the last to see an answer.

mod read;
mod telling;

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use super::App;
use super::error::ApiError;
use super::fields::Fields;
use super::gate::RequestId;
use super::request::{self, Settled, check_known, respond};
use crate::session::Session;

/// Answers a conversation.
pub(crate) const MESSAGES: &str = "/v1/messages";
/// Counts the tokens of a conversation's prompt.
pub(crate) const COUNT_TOKENS: &str = "/v1/messages/count_tokens";

/// `POST /v1/messages`
pub(crate) async fn create(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    let read = |app: &App, session: &Session, fields, request_id| {
        Ok(settle(app, session, fields, request_id)?.told_by(telling::teller))
    };
    respond(&app, request, read).await
}

/// `POST /v1/messages/count_tokens`: the same body and the same checks, but nothing is run.
pub(crate) async fn count(State(app): State<App>, request: Request) -> Result<Json<Value>, ApiError> {
    let settled = request::prepare(&app, request, settle).await?;
    Ok(Json(json!({ "input_tokens": settled.heading.prompt_tokens })))
}

/// Any model's name is taken: tools for this API insist on those they know.
fn settle(app: &App, session: &Session, fields: Fields, request_id: String) -> Result<Settled, ApiError> {
    let request = read::read(fields, session, app.options().unsupported)?;
    check_known(app, &request.ignored)?;
    request.draft(session)?.settle(app, session, request_id)
}

/// Whether a route of the router is one of this API.
pub(crate) fn has_route(route: &str) -> bool {
    [MESSAGES, COUNT_TOKENS].contains(&route)
}

/// A refusal in the form of this API, with its status and headers; other answers as they are.
pub(crate) fn in_its_form(mut response: Response, id: &RequestId) -> Response {
    match response.extensions_mut().remove::<ApiError>() {
        Some(error) => response.map(|_| Body::from(error_body(&error, id.as_str()).to_string())),
        None => response,
    }
}

/// `{"type":"error","error":{"type","message"},"request_id"}`. The message names the field at fault, which has no member of
/// its own here.
fn error_body(error: &ApiError, request_id: &str) -> Value {
    let kind = match error.status() {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::INTERNAL_SERVER_ERROR => "api_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        _ => "invalid_request_error",
    };
    let message = match error.param() {
        Some(param) if !error.message().contains(param) => format!("{param}: {}", error.message()),
        _ => error.message().to_owned(),
    };
    json!({ "type": "error", "error": { "type": kind, "message": message }, "request_id": request_id })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::error::Code;

    #[test]
    fn refusals_have_this_apis_words_and_name_the_field() {
        for (error, kind, message) in [
            (ApiError::new(Code::InvalidValue, "a is 5").at("a"), "invalid_request_error", "a is 5"),
            (ApiError::new(Code::InvalidValue, "no").at("messages[1]"), "invalid_request_error", "messages[1]: no"),
            (ApiError::new(Code::ContextLength, "long"), "invalid_request_error", "long"),
            (ApiError::new(Code::InvalidApiKey, "key"), "authentication_error", "key"),
            (ApiError::new(Code::TooLarge, "big"), "request_too_large", "big"),
            (ApiError::new(Code::QueueFull, "full"), "rate_limit_error", "full"),
            (ApiError::new(Code::Draining, "end"), "overloaded_error", "end"),
        ] {
            let expected = json!({"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"});
            assert_eq!(error_body(&error, "req_1"), expected);
        }
    }
}
