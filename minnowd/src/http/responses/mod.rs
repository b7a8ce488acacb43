//! `POST /v1/responses`: the Responses API of OpenAI, as far as it needs no memory. Nothing is stored, so every request
//! has the whole conversation, and looking for a response finds none.
//!
//! A request becomes the same [`ChatRequest`] as one to the completions API ([`read`]); what a stream or a plain answer
//! looks like is in [`telling`].

mod read;
mod telling;

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::response::Response;
use serde_json::Value;

use super::App;
use super::error::{ApiError, Code};
use super::fields::Fields;
use super::openai::chat;
use super::request::{self, Settled, check_rest, respond};
use crate::session::Session;
use telling::Echo;

/// Answers a conversation.
pub(crate) async fn create(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    let read = |app: &App, session: &Session, fields, request_id| {
        let (settled, echo) = settle(app, session, fields, request_id)?;
        Ok(settled.told_by(telling::teller(echo)))
    };
    respond(&app, request, read).await
}

/// Counts the tokens of a conversation's prompt; the same body and the same checks, but nothing is run.
pub(crate) async fn count(State(app): State<App>, request: Request) -> Result<Json<Value>, ApiError> {
    let (settled, _) = request::prepare(&app, request, settle).await?;
    Ok(Json(chat::input_tokens(&settled)))
}

/// `GET` and `DELETE /v1/responses/{id}`
pub(crate) async fn find(Path(_): Path<String>) -> ApiError {
    ApiError::new(Code::NotFound, "there is no such response: this server stores none")
}

fn settle(app: &App, session: &Session, fields: Fields, request_id: String) -> Result<(Settled, Echo), ApiError> {
    let (request, model, echo) = read::read(fields, session, app.options().unsupported)?;
    check_rest(app, session, &request.ignored, model.as_deref())?;
    Ok((request.draft(session)?.settle(app, session, request_id)?, echo))
}
