//! Which model is served, and whether it can be used.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::App;
use super::error::{ApiError, Code};
use crate::engine;
use crate::session::Session;

/// `GET /health`: 200 if requests are served, 503 otherwise.
pub(crate) async fn health(State(app): State<App>) -> Response {
    let health = app.engine().health();
    let status = match health.state {
        engine::State::Loading => "loading",
        engine::State::Ready => "ok",
        engine::State::Draining => "draining",
        engine::State::Failed => "failed",
    };
    let session = app.session().ok();
    let mut body = json!({
        "status": status,
        "model": session.map(|session| session.model_id.as_str()),
        "version": crate::VERSION,
        "uptime_seconds": app.uptime().as_secs_f64(),
        "active_requests": health.active,
        "queued_requests": health.queued,
        "n_ctx": session.map(|session| session.context),
        "batching": {
            "forward_batches": health.counters.forwards,
            "sequence_forwards": health.counters.sequence_forwards,
            "max_batch_size": health.counters.batch_max,
            "kv_growths": 0,
            // Nothing is rejected for want of pages: the youngest request gives way and is computed again.
            "kv_pressure_rejections": 0,
            "kv_preemptions": health.counters.preemptions,
        },
        "cache": {
            "pages": health.pages.total,
            "running_pages": health.pages.running,
            "idle_pages": health.pages.idle,
            "hit_tokens": health.cache.hit_tokens,
            "evicted_blocks": health.cache.evicted,
        },
    });
    match app.check_state() {
        Ok(()) => Json(body).into_response(),
        Err(error) => {
            body["error"] = error.body()["error"].take();
            (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
        }
    }
}

/// `GET /livez`: 200 as long as the process serves.
pub(crate) async fn livez() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

/// `GET /v1/models`
pub(crate) async fn list(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    let session = app.session()?;
    let details = json!({
        "name": session.model_id,
        "model": session.model_id,
        "capabilities": ["completion"],
        "description": "",
        "tags": [""],
        "details": {
            "parent_model": "", "format": "mnw", "family": "llada2", "families": ["llada2"],
            "parameter_size": "", "quantization_level": session.file_type,
        },
    });
    Ok(Json(json!({ "object": "list", "data": [entry(session)], "models": [details] })))
}

/// `GET /v1/models/{id}`
pub(crate) async fn one(
    State(app): State<App>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let session = app.session()?;
    let Ok(Path(id)) = id else { return Err(ApiError::new(Code::NotFound, "the path is not UTF-8")) };
    if id == session.model_id { Ok(Json(entry(session))) } else { Err(unknown(&id, session)) }
}

/// Refuses a request for a model that is not served. `None` and the empty name mean the one that is.
pub(crate) fn check_name(app: &App, session: &Session, name: Option<&str>) -> Result<(), ApiError> {
    match name {
        Some(name) if !name.is_empty() && name != session.model_id && !app.options().any_model => {
            Err(unknown(name, session))
        }
        _ => Ok(()),
    }
}

fn unknown(name: &str, session: &Session) -> ApiError {
    let name: String = name.chars().take(100).collect();
    let message = format!("the model \"{name}\" is not served here, only \"{}\"", session.model_id);
    ApiError::new(Code::ModelNotFound, message).at("model")
}

fn entry(session: &Session) -> Value {
    json!({
        "id": session.model_id,
        "object": "model",
        "created": session.created,
        "owned_by": "minnowd",
        "aliases": [],
        "tags": [],
        "architecture": { "input_modalities": ["text"], "output_modalities": ["text"] },
        "meta": {
            "n_ctx": session.context,
            "n_ctx_train": session.config.max_position_embeddings,
            "n_vocab": session.config.vocab_size,
            "vocab_type": 2,
            "n_embd": session.config.hidden_size,
            "n_params": session.parameters,
            "size": session.file_bytes,
            "ftype": session.file_type,
        },
    })
}
