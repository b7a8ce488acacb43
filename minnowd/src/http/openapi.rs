//! `GET /openapi.json`: this API in OpenAPI 3.1, as far as it is served. Routes that only say that they do not exist here
//! (501, 403) are left out: a checker takes any 5xx for a fault. So is `/props`, which answers 501 to one of its methods, and
//! checkers try them all.
//!
//! Request fields come from the list that the parser reads ([`table`](super::openai::table)). Answers are described here;
//! a test holds real answers of every route against it.

use axum::Json;
use axum::extract::State;
use serde_json::{Map, Value, json};

use super::openai::table::On;
use super::{App, anthropic};

/// `GET /openapi.json`
pub(crate) async fn show(State(app): State<App>) -> Json<Value> {
    Json(document(app.options().metrics, app.options().slots, &app.options().prefix))
}

/// What may be switched off is left out when it is.
fn document(metrics: bool, slots: bool, prefix: &str) -> Value {
    let mut paths = Map::new();
    let mut add = |path: &str, item: Value| {
        paths.insert(path.to_owned(), item);
    };
    for path in ["/health", "/v1/health"] {
        let mut health = get("The server's state", reference("Health"), &[]);
        // The same body with the state in it, whatever it is.
        health["get"]["responses"]["503"] = answer("Not ready", reference("Health"));
        add(path, health);
    }
    add("/livez", get("Whether the process serves", reference("Alive"), &[]));
    for path in ["/v1/models", "/models"] {
        add(path, get("The served model", reference("ModelList"), &[]));
    }
    let mut one = get("One model", reference("Model"), &["404"]);
    one["get"]["parameters"] = json!([parameter("id", "path", json!({ "type": "string", "minLength": 1 }))]);
    add("/v1/models/{id}", one);
    let example = json!({ "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 8 });
    for path in ["/v1/chat/completions", "/chat/completions"] {
        add(path, generating("Answer a conversation", "ChatRequest", "ChatCompletion", &example));
    }
    for path in ["/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"] {
        add(path, post("Count the tokens of a prompt", reference("ChatRequest"), &example, reference("Count")));
    }
    let example = json!({ "prompt": "Hello", "max_tokens": 8 });
    for path in ["/v1/completions", "/completions"] {
        add(path, generating("Continue a text", "TextRequest", "TextCompletion", &example));
    }
    let example = json!({ "input": "Hello", "max_output_tokens": 8 });
    for path in ["/v1/responses", "/responses"] {
        add(path, generating("Answer a conversation", "ResponsesRequest", "Response", &example));
    }
    for path in ["/v1/responses/input_tokens", "/responses/input_tokens"] {
        add(path, post("Count the tokens of a prompt", reference("ResponsesRequest"), &example, reference("Count")));
    }
    let example = json!({ "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 8 });
    let message = generating("Answer a conversation", "MessagesRequest", "AnthropicMessage", &example);
    add(anthropic::MESSAGES, refused_as("AnthropicError", message));
    let count_answer = whole(&[("input_tokens", count())]);
    let counted = post("Count the tokens of a prompt", reference("MessagesRequest"), &example, count_answer);
    add(anthropic::COUNT_TOKENS, refused_as("AnthropicError", counted));
    let control = object(&[("id", text()), ("action", json!({ "const": "reasoning_end" }))], &["id", "action"]);
    let done = object(&[("success", boolean()), ("message", text())], &["success", "message"]);
    let example = json!({ "id": "chatcmpl-1", "action": "reasoning_end" });
    add("/v1/chat/completions/control", post("End a block of reasoning", control, &example, done));
    let ids = list(json!({ "type": "integer", "minimum": 0 }));
    let request = object(
        &[
            ("content", text()),
            ("with_pieces", maybe("boolean")),
            ("add_special", maybe("boolean")),
            ("parse_special", maybe("boolean")),
        ],
        &["content"],
    );
    let tokens = object(&[("tokens", list(json!({ "type": ["integer", "object"] })))], &["tokens"]);
    add("/tokenize", post("Text to tokens", request, &json!({ "content": "Hello" }), tokens));
    let request = object(&[("tokens", ids)], &["tokens"]);
    add(
        "/detokenize",
        post("Tokens to text", request, &json!({ "tokens": [5, 6] }), object(&[("content", text())], &["content"])),
    );
    let request = object(
        &[
            ("messages", list(reference("Message"))),
            ("tools", json!({ "type": ["array", "null"] })),
            ("chat_template_kwargs", maybe("object")),
            ("add_generation_prompt", maybe("boolean")),
        ],
        &["messages"],
    );
    let example = json!({ "messages": [{ "role": "user", "content": "Hello" }] });
    add(
        "/apply-template",
        post("Render a conversation", request, &example, object(&[("prompt", text())], &["prompt"])),
    );
    if slots {
        let mut item = get("What runs", list(reference("Slot")), &[]);
        item["get"]["parameters"] = json!([optional_query("fail_on_no_slot", json!({ "enum": ["0", "1"] }))]);
        add("/slots", item);
    }
    if metrics {
        let mut item = get("Prometheus metrics", json!({}), &[]);
        item["get"]["responses"]["200"] =
            json!({ "description": "Text of version 0.0.4", "content": { "text/plain": { "schema": text() } } });
        add("/metrics", item);
    }
    let conversation = parameter("conv_id", "query", json!({ "type": "string", "minLength": 1 }));
    let mut stream = get("A stream's bytes, kept and live", json!({}), &["404"]);
    stream["get"]["parameters"] =
        json!([conversation, optional_query("from", json!({ "type": "integer", "minimum": 0 }))]);
    stream["get"]["responses"]["200"] = event_stream();
    let mut stopped = errors(&[]);
    stopped["204"] = json!({ "description": "Stopped, or not there" });
    stream["delete"] =
        json!({ "summary": "Stop a stream and forget it", "parameters": [conversation], "responses": stopped });
    add("/v1/stream", stream);
    let request = object(&[("conversation_ids", list(text()))], &["conversation_ids"]);
    let example = json!({ "conversation_ids": ["a"] });
    add("/v1/streams/lookup", post("Streams of some conversations", request, &example, list(reference("Stream"))));
    let itself = get("This document", json!({ "type": "object" }), &[]);
    add("/openapi.json", itself);
    json!({
        "openapi": "3.1.0",
        "info": { "title": "minnowd", "version": crate::VERSION, "summary": "LLaDA2.x block-diffusion models over an OpenAI-compatible API" },
        "servers": [{ "url": if prefix.is_empty() { "/" } else { prefix } }],
        "paths": paths,
        "components": { "schemas": schemas() },
    })
}

fn text() -> Value {
    json!({ "type": "string" })
}

fn boolean() -> Value {
    json!({ "type": "boolean" })
}

fn count() -> Value {
    json!({ "type": "integer", "minimum": 0 })
}

fn amount() -> Value {
    json!({ "type": "number", "minimum": 0 })
}

fn maybe(kind: &str) -> Value {
    json!({ "type": [kind, "null"] })
}

fn list(items: Value) -> Value {
    json!({ "type": "array", "items": items })
}

fn object(members: &[(&str, Value)], required: &[&str]) -> Value {
    let properties: Map<String, Value> =
        members.iter().map(|(name, schema)| ((*name).to_owned(), schema.clone())).collect();
    json!({ "type": "object", "properties": properties, "required": required })
}

/// An object all of whose members are always there.
fn whole(members: &[(&str, Value)]) -> Value {
    let names: Vec<&str> = members.iter().map(|(name, _)| *name).collect();
    object(members, &names)
}

fn reference(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

fn parameter(name: &str, place: &str, schema: Value) -> Value {
    json!({ "name": name, "in": place, "required": true, "schema": schema })
}

fn optional_query(name: &str, schema: Value) -> Value {
    json!({ "name": name, "in": "query", "schema": schema })
}

fn answer(description: &str, schema: Value) -> Value {
    json!({ "description": description, "content": { "application/json": { "schema": schema } } })
}

fn event_stream() -> Value {
    json!({ "description": "Events", "content": { "text/event-stream": { "schema": event() } } })
}

/// One event of a stream, as checkers see it: its data is one JSON chunk, or `[DONE]`. A comment has none.
fn event() -> Value {
    object(&[("data", text())], &[])
}

/// What every route may answer besides its own, and `more`.
fn errors(more: &[&str]) -> Value {
    let common = ["400", "401", "403", "405", "408", "413", "415", "431", "500", "503"];
    let all = common.iter().chain(more).map(|status| ((*status).to_owned(), answer("Refused", reference("Error"))));
    Value::Object(all.collect())
}

fn get(summary: &str, schema: Value, more: &[&str]) -> Value {
    let mut responses = errors(more);
    responses["200"] = answer("Fine", schema);
    json!({ "get": { "summary": summary, "responses": responses } })
}

fn post(summary: &str, request: Value, example: &Value, schema: Value) -> Value {
    let mut responses = errors(&["404"]);
    responses["200"] = answer("Fine", schema);
    let content = json!({ "application/json": { "schema": request, "example": example } });
    json!({ "post": { "summary": summary, "requestBody": { "required": true, "content": content }, "responses": responses } })
}

fn generating(summary: &str, request: &str, schema: &str, example: &Value) -> Value {
    let mut item = post(summary, reference(request), example, reference(schema));
    let responses = &mut item["post"]["responses"];
    responses["200"]["content"]["text/event-stream"] = json!({ "schema": event() });
    for status in ["422", "429"] {
        responses[status] = answer("Refused", reference("Error"));
    }
    item["post"]["parameters"] = json!([{ "name": "x-conversation-id", "in": "header", "schema": { "type": "string", "pattern": "^[!-~]{1,64}$" } }]);
    item
}

/// A route whose refusals have another form.
fn refused_as(error: &str, mut item: Value) -> Value {
    if let Some(responses) = item["post"]["responses"].as_object_mut() {
        for (_, response) in responses.iter_mut().filter(|(status, _)| *status != "200") {
            *response = answer("Refused", reference(error));
        }
    }
    item
}

/// A request's schema, from the list that its parser reads. `prompt` is what must be there, and its schema.
fn request(kind: On, prompt: (&str, Value)) -> Value {
    let fields = kind.fields();
    let mut properties: Map<String, Value> = fields.map(|field| (field.name.to_owned(), field.schema())).collect();
    let (required, schema) = prompt;
    properties.insert(required.to_owned(), schema);
    json!({ "type": "object", "properties": properties, "required": [required] })
}

/// A list that is not empty.
fn some(items: Value) -> Value {
    json!({ "type": "array", "items": items, "minItems": 1 })
}

/// A message, in the form that clients use most; calls and their results are items too.
fn responses_item() -> Value {
    let kinds = ["input_text", "output_text"];
    let part = object(&[("type", json!({ "enum": kinds })), ("text", text())], &["type", "text"]);
    let content = json!({ "anyOf": [text(), list(part)] });
    let role = json!({ "enum": ["system", "developer", "user", "assistant"] });
    let message =
        object(&[("type", json!({ "const": "message" })), ("role", role), ("content", content)], &["role", "content"]);
    let call = whole(&[
        ("type", json!({ "const": "function_call" })),
        ("call_id", text()),
        ("name", text()),
        ("arguments", text()),
    ]);
    let result =
        whole(&[("type", json!({ "const": "function_call_output" })), ("call_id", text()), ("output", text())]);
    json!({ "anyOf": [message, call, result] })
}

fn response() -> Value {
    let status = json!({ "enum": ["completed", "incomplete"] });
    let part = whole(&[
        ("type", json!({ "const": "output_text" })),
        ("text", text()),
        ("annotations", json!({ "type": "array", "maxItems": 0 })),
        ("logprobs", json!({ "type": "array", "maxItems": 0 })),
    ]);
    let message = whole(&[
        ("id", text()),
        ("type", json!({ "const": "message" })),
        ("role", json!({ "const": "assistant" })),
        ("status", status.clone()),
        ("content", list(part)),
    ]);
    let call = whole(&[
        ("id", text()),
        ("type", json!({ "const": "function_call" })),
        ("call_id", text()),
        ("name", text()),
        ("arguments", text()),
        ("status", status.clone()),
    ]);
    let usage = whole(&[
        ("input_tokens", count()),
        ("input_tokens_details", whole(&[("cached_tokens", count())])),
        ("output_tokens", count()),
        ("output_tokens_details", whole(&[("reasoning_tokens", count())])),
        ("total_tokens", count()),
    ]);
    let details = whole(&[("reason", json!({ "const": "max_output_tokens" }))]);
    whole(&[
        ("id", text()),
        ("object", json!({ "const": "response" })),
        ("created_at", count()),
        ("completed_at", maybe("integer")),
        ("status", status),
        ("error", json!({ "type": "null" })),
        ("incomplete_details", json!({ "anyOf": [details, { "type": "null" }] })),
        ("instructions", maybe("string")),
        ("max_output_tokens", maybe("integer")),
        ("model", text()),
        ("output", list(json!({ "anyOf": [message, call] }))),
        ("parallel_tool_calls", boolean()),
        ("previous_response_id", json!({ "type": "null" })),
        ("reasoning", json!({ "type": "object" })),
        ("store", json!({ "const": false })),
        ("temperature", amount()),
        ("text", whole(&[("format", json!({ "type": "object" }))])),
        ("tool_choice", json!({ "type": ["string", "object"] })),
        ("tools", list(json!({ "type": "object" }))),
        ("top_p", amount()),
        ("truncation", json!({ "const": "disabled" })),
        ("background", json!({ "const": false })),
        ("service_tier", text()),
        ("user", maybe("string")),
        ("metadata", json!({ "type": "object" })),
        ("usage", usage),
        ("timings", reference("Timings")),
        ("minnow", reference("Statistics")),
    ])
}

/// A message, in the form that clients use most; calls and their results are blocks too.
fn anthropic_turn() -> Value {
    let block = whole(&[("type", json!({ "const": "text" })), ("text", text())]);
    let content = json!({ "anyOf": [text(), list(block)] });
    object(&[("role", json!({ "enum": ["user", "assistant"] })), ("content", content)], &["role", "content"])
}

fn anthropic_message() -> Value {
    let said = whole(&[("type", json!({ "const": "text" })), ("text", text())]);
    let call = whole(&[
        ("type", json!({ "const": "tool_use" })),
        ("id", text()),
        ("name", text()),
        ("input", json!({ "type": "object" })),
    ]);
    let usage = whole(&[
        ("input_tokens", count()),
        ("cache_read_input_tokens", count()),
        ("cache_creation_input_tokens", count()),
        ("output_tokens", count()),
    ]);
    whole(&[
        ("id", text()),
        ("type", json!({ "const": "message" })),
        ("role", json!({ "const": "assistant" })),
        ("model", text()),
        ("content", list(json!({ "anyOf": [said, call] }))),
        ("stop_reason", json!({ "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"] })),
        ("stop_sequence", maybe("string")),
        ("usage", usage),
        ("minnow", reference("Statistics")),
    ])
}

fn anthropic_error() -> Value {
    let words = json!({ "type": "string", "minLength": 1 });
    let error = whole(&[("type", words.clone()), ("message", words)]);
    whole(&[("type", json!({ "const": "error" })), ("error", error), ("request_id", text())])
}

fn schemas() -> Value {
    let error = object(
        &[
            ("message", json!({ "type": "string", "minLength": 1 })),
            ("type", json!({ "type": "string", "minLength": 1 })),
            ("param", maybe("string")),
            ("code", maybe("string")),
        ],
        &["message", "type", "param", "code"],
    );
    let reasons = json!({ "enum": ["stop", "length", "tool_calls"] });
    let function = whole(&[("name", text()), ("arguments", text())]);
    let call = whole(&[("id", text()), ("type", json!({ "const": "function" })), ("function", function)]);
    let message = object(
        &[("role", json!({ "const": "assistant" })), ("content", maybe("string")), ("tool_calls", list(call))],
        &["role", "content"],
    );
    let chat_choice = whole(&[
        ("index", count()),
        ("message", message),
        ("logprobs", json!({ "type": "null" })),
        ("finish_reason", reasons.clone()),
    ]);
    let text_choice = whole(&[
        ("index", count()),
        ("text", text()),
        ("logprobs", json!({ "type": "null" })),
        ("finish_reason", reasons),
    ]);
    let completion = |object: &str, choice: Value| {
        whole(&[
            ("id", text()),
            ("object", json!({ "const": object })),
            ("created", count()),
            ("model", text()),
            ("system_fingerprint", text()),
            ("choices", list(choice)),
            ("usage", reference("Usage")),
            ("timings", reference("Timings")),
            ("minnow", reference("Statistics")),
        ])
    };
    let batch = whole(&[
        ("index", count()),
        ("offset", count()),
        ("tokens", count()),
        ("refinement_steps", count()),
        ("evaluated_tokens", count()),
        ("elapsed_seconds", amount()),
    ]);
    let one_of_several = object(
        &[
            ("index", count()),
            ("seed", count()),
            ("completion_tokens", count()),
            ("denoise_forwards", count()),
            ("tokens_per_forward", amount()),
            ("queue_seconds", amount()),
            ("tool_parse_error", text()),
        ],
        &["index", "seed", "completion_tokens", "denoise_forwards", "tokens_per_forward", "queue_seconds"],
    );
    let settings = whole(&[
        ("seed", json!({ "type": "integer" })),
        ("temperature", amount()),
        ("top_k", count()),
        ("top_p", amount()),
        ("max_tokens", json!({ "type": "integer" })),
        ("algorithm", text()),
        ("threshold", amount()),
        ("editing_threshold", amount()),
        ("max_post_steps", count()),
        ("steps", count()),
        ("max_steps_per_block", count()),
    ]);
    let mut statistics =
        vec![("generation_settings", settings), ("batches", list(batch)), ("ignored_fields", list(text()))];
    for name in [
        "cached_tokens",
        "cache_copied_tokens",
        "text_tokens",
        "evaluated_tokens",
        "denoise_forwards",
        "processed_tokens",
        "commit_forwards",
        "reused_commits",
        "constrained_forwards",
        "determined_tokens",
        "token_edits",
        "forced_blocks",
        "repeated_tokens",
        "deletes",
        "splits",
    ] {
        statistics.push((name, count()));
    }
    for name in [
        "cache_seconds",
        "queue_seconds",
        "text_tokens_per_second",
        "total_tokens_per_second",
        "refinement_steps_per_block",
        "tokens_per_forward",
        "tokens_per_second",
    ] {
        statistics.push((name, amount()));
    }
    let required: Vec<&str> = statistics.iter().map(|(name, _)| *name).collect();
    let mut members = statistics.clone();
    members.extend([
        ("cache_slot", maybe("integer")),
        ("tool_parse_error", text()),
        ("unenforced_schemas", list(text())),
        ("choices", list(one_of_several)),
    ]);
    let usage = whole(&[
        ("prompt_tokens", count()),
        ("completion_tokens", count()),
        ("total_tokens", count()),
        ("prompt_tokens_details", whole(&[("cached_tokens", count())])),
        ("completion_tokens_details", whole(&[("reasoning_tokens", count())])),
    ]);
    let timings = whole(&[
        ("cache_n", count()),
        ("prompt_n", count()),
        ("prompt_ms", amount()),
        ("prompt_per_token_ms", amount()),
        ("prompt_per_second", amount()),
        ("predicted_n", count()),
        ("predicted_ms", amount()),
        ("predicted_per_token_ms", amount()),
        ("predicted_per_second", amount()),
    ]);
    let meta = whole(&[
        ("n_ctx", count()),
        ("n_ctx_train", count()),
        ("n_vocab", count()),
        ("vocab_type", count()),
        ("n_embd", count()),
        ("n_params", count()),
        ("size", count()),
        ("ftype", text()),
    ]);
    let model = object(
        &[
            ("id", text()),
            ("object", json!({ "const": "model" })),
            ("created", count()),
            ("owned_by", text()),
            ("aliases", list(text())),
            ("tags", list(text())),
            ("meta", meta),
        ],
        &["id", "object", "created", "owned_by", "meta"],
    );
    let details = object(&[("name", text()), ("model", text())], &["name", "model"]);
    let part = json!({ "type": "object", "properties": { "type": { "enum": ["text", "input_text", "output_text"] }, "text": text() }, "required": ["type", "text"] });
    let said = json!({ "anyOf": [{ "type": ["string", "null"] }, list(part)] });
    let health = object(
        &[
            ("status", json!({ "enum": ["ok", "loading", "draining", "failed"] })),
            ("model", maybe("string")),
            ("version", text()),
            ("uptime_seconds", amount()),
            ("active_requests", count()),
            ("queued_requests", count()),
            ("n_ctx", maybe("integer")),
            ("batching", json!({ "type": "object" })),
            ("error", error.clone()),
        ],
        &["status", "model", "version", "uptime_seconds", "active_requests", "queued_requests", "n_ctx", "batching"],
    );
    let slot = object(
        &[
            ("id", count()),
            ("id_task", json!({ "type": "integer", "minimum": -1 })),
            ("n_ctx", count()),
            ("speculative", boolean()),
            ("is_processing", boolean()),
        ],
        &["id", "id_task", "n_ctx", "speculative", "is_processing"],
    );
    let stream = whole(&[
        ("conversation_id", text()),
        ("is_done", boolean()),
        ("total_bytes", count()),
        ("started_at", count()),
        ("completed_at", count()),
    ]);
    json!({
        "Error": whole(&[("error", error)]),
        "Message": object(&[("role", json!({ "enum": ["system", "developer", "user", "assistant", "tool"] })), ("content", said)], &["role", "content"]),
        "ChatRequest": request(On::Chat, ("messages", some(reference("Message")))),
        "TextRequest": request(On::Text, ("prompt", json!({ "anyOf": [{ "type": "string", "minLength": 1 }, some(count())] }))),
        "ResponsesRequest": request(On::Responses, ("input", json!({ "anyOf": [text(), some(reference("ResponsesItem"))] }))),
        "ResponsesItem": responses_item(),
        "Response": response(),
        "MessagesRequest": request(On::Messages, ("messages", some(reference("AnthropicTurn")))),
        "AnthropicTurn": anthropic_turn(),
        "AnthropicMessage": anthropic_message(),
        "AnthropicError": anthropic_error(),
        "ChatCompletion": completion("chat.completion", chat_choice),
        "TextCompletion": completion("text_completion", text_choice),
        "Usage": usage,
        "Timings": timings,
        "Statistics": object(&members, &required),
        "Count": whole(&[("object", json!({ "const": "response.input_tokens" })), ("input_tokens", count())]),
        "Model": model,
        "ModelList": whole(&[("object", json!({ "const": "list" })), ("data", list(reference("Model"))), ("models", list(details))]),
        "Alive": whole(&[("status", text())]),
        "Health": health,
        "Slot": slot,
        "Stream": stream,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(members) => {
                for (name, value) in members {
                    match value {
                        Value::String(target) if name == "$ref" => found.push(target.clone()),
                        _ => references(value, found),
                    }
                }
            }
            Value::Array(items) => items.iter().for_each(|item| references(item, found)),
            _ => {}
        }
    }

    #[test]
    fn every_reference_leads_somewhere_and_switched_off_routes_are_left_out() {
        let all = document(true, true, "");
        let mut found = Vec::new();
        references(&all, &mut found);
        assert!(found.len() > 40);
        for target in found {
            assert!(all.pointer(target.trim_start_matches('#')).is_some(), "{target}");
        }
        let fewer = document(false, false, "/x");
        assert!(fewer["paths"].get("/slots").is_none() && fewer["paths"].get("/metrics").is_none());
        assert_eq!(fewer["servers"][0]["url"], "/x");
    }
}
