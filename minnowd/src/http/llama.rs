//! What llama-server offers besides the OpenAI API, as far as its web UI and other clients read it.

use std::collections::HashMap;

use axum::Json;
use axum::extract::{Query, Request, State};
use axum::response::IntoResponse;
use axum::response::Response;
use serde_json::{Value, json};

use super::App;
use super::error::{ApiError, Code};
use super::fields::{as_list, wrong_value};
use super::openai::tools::Naming;
use super::openai::{self, Conversation, Tools};
use super::request::{self, prepare};
use crate::session::Session;
use crate::text::ChatInput;

/// `GET /props`
pub(crate) async fn props(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    let session = app.session()?;
    let piece = |id: Option<u32>| id.map_or_else(String::new, |id| session.tokenizer.decode_with_specials(&[id]));
    let has_ui = app.options().ui_folder.is_some();
    Ok(Json(json!({
        "default_generation_settings": { "n_ctx": session.context, "params": default_params(session) },
        "total_slots": session.parallel,
        "model_alias": session.model_id,
        "model_path": app.options().model_path.as_deref().unwrap_or(&session.model_id),
        "model_ftype": session.file_type,
        "modalities": { "vision": false, "audio": false, "video": false },
        "chat_template": session.template.source(),
        "chat_template_caps": {
            "supports_tools": true,
            "supports_tool_calls": true,
            "supports_parallel_tool_calls": true,
            "supports_system_role": true,
            "supports_preserve_reasoning": false,
            "supports_typed_content": false,
        },
        "bos_token": piece(session.config.ids.bos),
        "eos_token": piece(session.special.stop.first().copied()),
        "build_info": format!("minnowd {}", crate::VERSION),
        "is_sleeping": false,
        "media_marker": "",
        "endpoint_slots": app.options().slots,
        "endpoint_props": false,
        "endpoint_metrics": app.options().metrics,
        "cors_proxy_enabled": false,
        "ui": has_ui,
        "webui": has_ui,
        "ui_settings": {},
        "webui_settings": {},
        "minnow": own_props(&app, session),
    })))
}

/// Defaults in llama-server's words. Samplers that do not exist here have their neutral values.
fn default_params(session: &Session) -> Value {
    let mut params = openai::describe(&session.default_options, session.default_seed, session.default_max_tokens);
    let neutral = json!({
        "n_predict": session.default_max_tokens.map_or(json!(-1), |tokens| json!(tokens)),
        "min_p": 0.0, "typ_p": 1.0, "typical_p": 1.0, "top_n_sigma": -1.0,
        "xtc_probability": 0.0, "xtc_threshold": 0.1,
        "repeat_last_n": 64, "repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "dynatemp_range": 0.0, "dynatemp_exponent": 1.0,
        "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
        "dry_sequence_breakers": ["\n", ":", "\"", "*"],
        "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
        "stop": [], "stream": true, "n_probs": 0, "samplers": ["top_k", "top_p", "temperature"], "grammar": "",
        "chat_format": "minnow", "reasoning_format": "none", "generation_prompt": "",
        "timings_per_token": false, "backend_sampling": false, "lora": [],
    });
    if let (Value::Object(params), Value::Object(neutral)) = (&mut params, neutral) {
        params.extend(neutral);
    }
    params
}

fn own_props(app: &App, session: &Session) -> Value {
    json!({
        "version": crate::VERSION,
        "block_size": session.config.block_size,
        "limits": limits(app, session),
        "capabilities": {
            "logprobs": false, "n": request::choices_max(session), "response_format": "constrained", "resumable_streams": true,
            "strict_tools": true, "grammars": ["regex", "lark"],
        },
        "cache": { "slots": session.parallel, "budget_bytes": session.cache_bytes, "reuse_threshold": minnow_common::BLOCK },
        "parallel": session.parallel,
        "queue_capacity": session.queue_capacity,
        "generation_defaults":
            openai::describe(&session.default_options, session.default_seed, session.default_max_tokens),
        "model_family": "llada2",
        "backend": session.backend,
    })
}

/// Every limit of `docs/api.md` that is a number.
fn limits(app: &App, session: &Session) -> Value {
    let streams = app.options().streams;
    json!({
        "max_body_bytes": app.options().max_body_bytes,
        "max_context": session.context,
        "parallel": session.parallel,
        "queue_capacity": session.queue_capacity,
        "stream_max_bytes": streams.bytes_max,
        "stream_total_bytes": streams.all_bytes_max,
        "stream_max_sessions": streams.sessions_max,
        "stream_keep_seconds": streams.kept.as_secs(),
    })
}

/// `GET /slots`, with `fail_on_no_slot=1` 503 if none is idle.
pub(crate) async fn slots(
    State(app): State<App>,
    Query(query): Query<HashMap<String, String>>,
) -> Result<Json<Value>, ApiError> {
    if !app.options().slots {
        return Err(ApiError::new(Code::NotSupported, "slots are switched off"));
    }
    let session = app.session()?;
    let slots = app.slots().describe(session.parallel, app.engine().health().active, session.context);
    let is_required = query.get("fail_on_no_slot").is_some_and(|value| value != "0");
    if is_required && slots.iter().all(|slot| slot["is_processing"] == true) {
        return Err(ApiError::new(Code::Capacity, "no slot is idle"));
    }
    Ok(Json(Value::Array(slots)))
}

/// `POST /tokenize`
pub(crate) async fn tokenize(State(app): State<App>, request: Request) -> Result<Json<Value>, ApiError> {
    let tokens = prepare(&app, request, |_, session, mut fields, _| {
        let content = fields.required_text("content")?;
        let with_pieces = fields.boolean("with_pieces")?.unwrap_or(false);
        // No token is ever added by itself, so there is nothing for this field to do.
        fields.boolean("add_special")?;
        let parse_special = fields.boolean("parse_special")?.unwrap_or(true);
        let tokenizer = &session.tokenizer;
        let ids = if parse_special { tokenizer.encode(&content) } else { tokenizer.encode_plain(&content) };
        let ids = ids.map_err(|error| ApiError::new(Code::InvalidValue, error.to_string()).at("content"))?;
        if !with_pieces {
            return Ok(json!(ids));
        }
        let bytes = |id| tokenizer.token(id).map_or_else(Vec::new, |token| token.bytes().to_vec());
        let pieces = ids.iter().map(|&id| json!({ "id": id, "piece": piece(bytes(id)) }));
        Ok(pieces.collect())
    });
    Ok(Json(json!({ "tokens": tokens.await? })))
}

/// A token's bytes as a string, or as a list of numbers if they are not UTF-8 on their own.
fn piece(bytes: Vec<u8>) -> Value {
    match String::from_utf8(bytes) {
        Ok(text) => json!(text),
        Err(error) => json!(error.into_bytes()),
    }
}

/// `POST /detokenize`
pub(crate) async fn detokenize(State(app): State<App>, request: Request) -> Result<Json<Value>, ApiError> {
    let content = prepare(&app, request, |_, session, mut fields, _| {
        let items = as_list("tokens", fields.required("tokens")?)?;
        let tokens = openai::completions::read_tokens("tokens", &items, session.config.vocab_size)?;
        Ok(session.tokenizer.decode_with_specials(&tokens))
    });
    Ok(Json(json!({ "content": content.await? })))
}

/// `POST /apply-template`
pub(crate) async fn apply_template(State(app): State<App>, request: Request) -> Result<Json<Value>, ApiError> {
    let prompt = prepare(&app, request, |_, session, mut fields, _| {
        let messages = Conversation::read(&mut fields)?.messages;
        let tools = Tools::read(&mut fields, Naming::Nested)?.definitions;
        let kwargs = fields.map("chat_template_kwargs")?.unwrap_or_default();
        let add_generation_prompt = fields.boolean("add_generation_prompt")?.unwrap_or(true);
        openai::chat::render(session, ChatInput { messages, tools, kwargs, add_generation_prompt }, "messages")
            .map(|pieces| pieces.text())
    });
    Ok(Json(json!({ "prompt": prompt.await? })))
}

/// `POST /v1/chat/completions/control`: there is no reasoning block that could be ended.
pub(crate) async fn control(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    prepare(&app, request, |_, _, mut fields, _| {
        fields.required_text("id")?;
        let action = fields.required("action")?;
        if action != "reasoning_end" {
            return Err(wrong_value("action", &action, "must be \"reasoning_end\""));
        }
        Ok(())
    })
    .await?;
    let message = "this model does not reason in a block of its own, so there is none to end";
    Ok(Json(json!({ "success": false, "message": message })).into_response())
}
