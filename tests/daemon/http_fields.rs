//! Every field of a generating request, by one table: what is accepted, what is refused and how, and what a value changes.
//! The table, the one of `docs/api.md` and the schema in `/openapi.json` name the same fields.

use std::collections::BTreeSet;

use minnow_tests::program::Server;
use serde_json::{Value, json};

use super::http::{CHAT, assert_error, server};

const TEXT: &str = "/v1/completions";

/// What happens to a field.
enum Fate {
    /// A value that is taken, and the setting that shows it in the answer.
    Setting(Value, &'static str, Value),
    /// A value that is taken, and an expression of what it changes.
    Effect(Value, fn(&Value) -> bool),
    /// Any value is taken, and the answer stays what it is.
    NoEffect(Value),
    /// Only this value is taken, and the answer stays what it is; whether others may be ignored.
    Neutral(Value, bool),
}
use Fate::{Effect, Neutral, NoEffect, Setting};

/// Where a field may stand.
#[derive(Clone, Copy, PartialEq)]
enum On {
    Both,
    Chat,
    Text,
}
use On::{Both, Chat, Text};

/// A field, and values that are refused with their code and the end of their path.
struct Row {
    field: &'static str,
    on: On,
    fate: Fate,
    refused: Vec<(Value, &'static str, &'static str)>,
}

fn row(field: &'static str, on: On, fate: Fate, refused: &[(Value, &'static str, &'static str)]) -> Row {
    Row { field, on, fate, refused: refused.to_vec() }
}

const TYPE: &str = "invalid_type";
const VALUE: &str = "invalid_value";

fn rows() -> Vec<Row> {
    let setting = |name, value: Value| Setting(value.clone(), name, value);
    let limit = |field| {
        row(
            field,
            Both,
            setting("max_tokens", json!(3)),
            &[(json!(-2), VALUE, ""), (json!("9"), TYPE, ""), (json!(1.5), TYPE, ""), (json!([]), TYPE, "")],
        )
    };
    let share = |field, more| {
        row(
            field,
            Both,
            setting(more, json!(0.25)),
            &[(json!(-0.1), VALUE, ""), (json!(1.1), VALUE, ""), (json!("x"), TYPE, "")],
        )
    };
    let steps = |field, least: i64| {
        row(
            field,
            Both,
            setting(field, json!(7)),
            &[(json!(least - 1), VALUE, ""), (json!(100_001), VALUE, ""), (json!(0.5), TYPE, "")],
        )
    };
    let is_ok = |answer: &Value| answer["choices"][0]["finish_reason"].is_string();
    let mut rows = vec![
        row("model", Both, Effect(json!(""), |answer| answer["model"] != ""), &[(json!(5), TYPE, "")]),
        row(
            "messages",
            Chat,
            Effect(json!([{"role": "user", "content": [{"type": "text", "text": "Goodbye!"}]}]), is_ok),
            &[
                (json!([]), VALUE, ""),
                (json!("x"), TYPE, ""),
                (json!([{"role": "wizard", "content": "x"}]), VALUE, "[0].role"),
                (json!([{"role": "user"}]), "missing_required_parameter", "[0].content"),
                (
                    json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
                    "unsupported_content",
                    "[0].content[0].type",
                ),
                (
                    json!([{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "no", "content": "x"}]),
                    "invalid_tool_history",
                    "[1].tool_call_id",
                ),
            ],
        ),
        row(
            "prompt",
            Text,
            Effect(json!([5, 6.0, 7]), |answer| answer["usage"]["prompt_tokens"] == 3),
            &[
                (json!(""), VALUE, ""),
                (json!([]), VALUE, ""),
                (json!(5), TYPE, ""),
                (json!(["a", "b"]), "unsupported_value", ""),
                (json!([5, -1]), VALUE, "[1]"),
                (json!([5, 1755]), VALUE, ""),
            ],
        ),
        limit("max_completion_tokens"),
        limit("max_tokens"),
        limit("n_predict"),
        row(
            "temperature",
            Both,
            setting("temperature", json!(0.7)),
            &[(json!(-1), VALUE, ""), (json!(2.1), VALUE, ""), (json!("hot"), TYPE, "")],
        ),
        share("top_p", "top_p"),
        row("top_k", Both, setting("top_k", json!(40)), &[(json!(-1), VALUE, ""), (json!(1.5), TYPE, "")]),
        row(
            "seed",
            Both,
            setting("seed", json!(i64::MAX)),
            &[(json!(-2), VALUE, ""), (json!(1u64 << 63), VALUE, ""), (json!("1"), TYPE, "")],
        ),
        row(
            "stop",
            Both,
            Effect(json!(["\u{2603}"]), is_ok),
            &[
                (json!(5), TYPE, ""),
                (json!(""), VALUE, ""),
                (json!(["a", 1]), TYPE, "[1]"),
                (json!(vec!["x"; 17]), VALUE, ""),
                (json!("x".repeat(1025)), VALUE, ""),
            ],
        ),
        row("stream", Both, Effect(json!(false), is_ok), &[(json!("yes"), TYPE, "")]),
        row(
            "stream_options",
            Both,
            Effect(json!({"include_usage": true}), is_ok),
            &[(json!(1), TYPE, ""), (json!({"include_usage": 1}), TYPE, ".include_usage")],
        ),
        row(
            "n",
            Both,
            Effect(json!(2.0), |answer| answer["choices"].as_array().is_some_and(|choices| choices.len() == 2)),
            &[(json!(0), VALUE, ""), (json!(9), "unsupported_value", ""), (json!("1"), TYPE, "")],
        ),
        row(
            "tools",
            Chat,
            Effect(json!([{"type": "function", "function": {"name": "get_time"}}]), |answer| {
                answer["usage"]["prompt_tokens"].as_u64() > Some(20)
            }),
            &[
                (json!("x"), TYPE, ""),
                (json!([{"type": "web"}]), VALUE, "[0].type"),
                (json!([{"type": "function", "function": {"name": "no name"}}]), VALUE, "[0].function.name"),
                (
                    json!([{"type": "function", "function": {"name": "a", "strict": true, "parameters": {"not": {}}}}]),
                    "unsupported_value",
                    "[0].function.parameters.not",
                ),
            ],
        ),
        row(
            "tool_choice",
            Chat,
            Effect(json!("none"), is_ok),
            &[(json!(5), TYPE, ""), (json!("required"), VALUE, ""), (json!("perhaps"), VALUE, "")],
        ),
        row("parallel_tool_calls", Chat, Effect(json!(false), is_ok), &[(json!("no"), TYPE, "")]),
        row(
            "response_format",
            Chat,
            Effect(json!({"type": "text"}), is_ok),
            &[
                (json!("json"), TYPE, ""),
                (json!({"type": "yaml"}), VALUE, ".type"),
                (json!({"type": "json_schema"}), "missing_required_parameter", ".json_schema"),
                (json!({"type": "json_object", "schema": {"not": {}}}), "unsupported_value", ".schema.not"),
            ],
        ),
        row("chat_template_kwargs", Chat, Effect(json!({"enable_thinking": false}), is_ok), &[(json!([]), TYPE, "")]),
        row(
            "cache_prompt",
            Both,
            Effect(json!(false), |answer| answer["minnow"]["cached_tokens"] == 0),
            &[(json!("no"), TYPE, "")],
        ),
        row("return_progress", Both, Effect(json!(true), is_ok), &[(json!(1), TYPE, "")]),
        row("timings_per_token", Both, Effect(json!(true), is_ok), &[(json!(1), TYPE, "")]),
        row("return_refinements", Both, Effect(json!(true), is_ok), &[(json!("x"), TYPE, "")]),
        row(
            "sse_ping_interval",
            Both,
            Effect(json!(-1), is_ok),
            &[(json!(-2), VALUE, ""), (json!(86_401), VALUE, ""), (json!(0.5), TYPE, "")],
        ),
        row(
            "preset",
            Both,
            Effect(json!("quality"), |answer| answer["minnow"]["generation_settings"]["threshold"] == 0.7),
            &[(json!("best"), VALUE, ""), (json!(1), TYPE, "")],
        ),
        share("threshold", "threshold"),
        share("editing_threshold", "editing_threshold"),
        steps("steps", 1),
        steps("max_steps_per_block", 1),
        steps("max_post_steps", 0),
        row(
            "minnow",
            Both,
            Setting(json!({"threshold": 0.75, "steps": 5}), "threshold", json!(0.75)),
            &[
                (json!(5), TYPE, ""),
                (json!({"blocks": 5}), "unknown_parameter", ".blocks"),
                (json!({"steps": 0}), VALUE, ".steps"),
                (json!({"regex": "("}), VALUE, ".regex"),
                (json!({"grammar": 1}), TYPE, ".grammar"),
            ],
        ),
    ];
    let unsupported = "unsupported_parameter";
    let mut neutral = |field, on, only: Value, others: &[Value], binds: bool| {
        let refused: Vec<_> = others.iter().map(|other| (other.clone(), unsupported, "")).collect();
        rows.push(row(field, on, Neutral(only, !binds), &refused));
    };
    neutral("logprobs", Both, json!(false), &[json!(true)], true);
    neutral("top_logprobs", Both, json!(0), &[json!(3), json!("0")], true);
    neutral("n_probs", Both, json!(0), &[json!(3)], true);
    neutral("continue_final_message", Chat, json!(false), &[json!(true)], true);
    neutral("add_generation_prompt", Chat, json!(true), &[json!(false)], true);
    neutral("modalities", Both, json!(["text"]), &[json!(["audio"]), json!("text")], true);
    for field in [
        "frequency_penalty",
        "presence_penalty",
        "min_p",
        "dynatemp_range",
        "xtc_probability",
        "dry_multiplier",
        "mirostat",
    ] {
        neutral(field, Both, json!(0.0), &[json!(0.5), json!("0")], false);
    }
    for field in ["repeat_penalty", "typ_p", "typical_p"] {
        neutral(field, Both, json!(1), &[json!(1.1), json!(0)], false);
    }
    neutral("top_n_sigma", Both, json!(-1), &[json!(1)], false);
    neutral("logit_bias", Both, json!({}), &[json!({"5": 10})], true);
    neutral("grammar", Both, json!(""), &[json!("root ::= x")], true);
    neutral("json_schema", Both, json!(null), &[json!({"type": "object"})], true);
    neutral("lora", Both, json!([]), &[json!([{"id": 0}])], false);
    for field in ["echo", "ignore_eos"] {
        neutral(field, Both, json!(false), &[json!(true)], false);
    }
    for field in ["functions", "function_call", "audio", "prediction", "web_search_options"] {
        neutral(field, Both, json!(null), &[json!([]), json!("x")], false);
    }
    neutral("suffix", Text, json!(""), &[json!("x")], true);
    neutral("best_of", Text, json!(1), &[json!(2)], true);
    for field in [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "verbosity",
        "reasoning_format",
        "reasoning_control",
        "thinking_budget_tokens",
        "reasoning_budget_tokens",
        "samplers",
        "backend_sampling",
        "repeat_last_n",
        "dynatemp_exponent",
        "xtc_threshold",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "mirostat_tau",
        "mirostat_eta",
        "min_keep",
        "n_keep",
        "id_slot",
    ] {
        rows.push(row(field, Both, NoEffect(json!({"any": ["thing", 1, null]})), &[]));
    }
    rows
}

/// A short greedy request of a kind with a field set.
fn body(path: &str, field: &str, value: &Value) -> Value {
    let mut body = json!({"temperature": 0, "seed": 1});
    if path == CHAT {
        body["messages"] = json!([{"role": "user", "content": "Goodbye!"}]);
    } else {
        body["prompt"] = json!("Good");
    }
    // Another limit given first would win.
    if !["max_completion_tokens", "n_predict"].contains(&field) {
        body["max_tokens"] = json!(4);
    }
    body[field] = value.clone();
    body
}

fn text_of(answer: &Value) -> &Value {
    let choice = &answer["choices"][0];
    choice.get("text").unwrap_or(&choice["message"]["content"])
}

#[test]
fn every_field_is_honoured_refused_or_listed_as_without_effect() {
    let server = server();
    let lenient = Server::start(&["--unsupported", "ignore"]);
    // All of them take minutes: without `MINNOW_LONG`, the first dozen.
    let asked = if std::env::var_os("MINNOW_LONG").is_some() { usize::MAX } else { 12 };
    for Row { field, on, fate, refused } in rows().into_iter().take(asked) {
        for path in [CHAT, TEXT] {
            let ask = |value: &Value| {
                let reply = server.post(path, &body(path, field, value));
                assert_eq!(reply.status, 200, "{path} {field} {value}: {}", reply.text());
                reply.json()
            };
            if (on == Chat && path == TEXT) || (on == Text && path == CHAT) {
                // Known elsewhere, unknown here: named, like all that is unknown.
                assert_eq!(ask(&json!("x"))["minnow"]["ignored_fields"], json!([field]), "{path}");
                continue;
            }
            let plain = server.post(path, &body(path, "user", &json!(null))).json();
            match &fate {
                Setting(value, name, expected) => {
                    let answer = ask(value);
                    assert_eq!(answer["minnow"]["generation_settings"][name], *expected, "{path} {field}");
                    assert_eq!(answer["minnow"]["ignored_fields"], json!([]), "{path} {field}");
                }
                Effect(value, is_there) => {
                    let answer = ask(value);
                    assert!(is_there(&answer), "{path} {field}: {answer}");
                    assert_eq!(answer["minnow"]["ignored_fields"], json!([]), "{path} {field}");
                }
                NoEffect(value) | Neutral(value, _) => {
                    let answer = ask(value);
                    assert_eq!(text_of(&answer), text_of(&plain), "{path} {field}");
                    let settings = "generation_settings";
                    assert_eq!(answer["minnow"][settings], plain["minnow"][settings], "{path} {field}");
                    assert_eq!(answer["minnow"]["ignored_fields"], json!([]), "{path} {field}");
                }
            }
            if !["messages", "prompt"].contains(&field) {
                assert_eq!(ask(&json!(null))["minnow"]["ignored_fields"], json!([]), "{field}: null is not given");
            }
            for (value, code, end) in &refused {
                let param = format!("{field}{end}");
                let body = body(path, field, value);
                assert_error(&server.post(path, &body), 400, code, Some(&param));
                if let Neutral(_, may_be_ignored) = fate {
                    let reply = lenient.post(path, &body);
                    assert_eq!(reply.status, if may_be_ignored { 200 } else { 400 }, "{path} {field} {value}");
                    if may_be_ignored {
                        assert_eq!(reply.json()["minnow"]["ignored_fields"], json!([field]));
                        assert_eq!(text_of(&reply.json()), text_of(&plain));
                    }
                }
            }
        }
    }
}

/// Names and kinds of the rows of the table in `docs/api.md`.
fn documented() -> BTreeSet<(String, String, String)> {
    let path = minnow_tests::golden::root().join("../docs/api.md");
    let text = std::fs::read_to_string(path).unwrap();
    let table =
        text.split("<!-- fields -->").nth(1).and_then(|rest| rest.split("<!-- end of fields -->").next()).unwrap();
    let mut found = BTreeSet::new();
    for line in table.lines().skip(3).filter(|line| line.starts_with('|')) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        for name in cells[1].split(", ") {
            let name = name.trim_matches('`').to_owned();
            assert!(found.insert((name, cells[2].to_owned(), cells[3].to_owned())), "{line}");
        }
    }
    found
}

#[test]
fn documents_and_schema_name_the_same_fields_as_this_table() {
    let tested: BTreeSet<(String, String, String)> = rows()
        .into_iter()
        .map(|row| {
            let on = match row.on {
                Both => "both",
                Chat => "chat",
                Text => "text",
            };
            let fate = match row.fate {
                Setting(..) | Effect(..) => "honoured",
                NoEffect(_) => "no effect",
                Neutral(..) => "neutral",
            };
            (row.field.to_owned(), on.to_owned(), fate.to_owned())
        })
        .collect();
    assert_eq!(documented(), tested);
    let schemas = server().get("/openapi.json").json()["components"]["schemas"].clone();
    for (schema, kind) in [("ChatRequest", "chat"), ("TextRequest", "text")] {
        let listed: BTreeSet<&str> =
            schemas[schema]["properties"].as_object().unwrap().keys().map(String::as_str).collect();
        let expected: BTreeSet<&str> =
            tested.iter().filter(|(_, on, _)| on == "both" || on == kind).map(|(name, _, _)| name.as_str()).collect();
        assert_eq!(listed, expected, "{schema}");
    }
}

#[test]
fn limits_are_cut_or_refused_as_the_server_was_told() {
    let strict = Server::start(&["--strict-limits"]);
    let room = strict.get("/health").json()["n_ctx"].as_u64().unwrap();
    let mut body = body(CHAT, "max_tokens", &json!(room));
    let refused = strict.post(CHAT, &body);
    assert_error(&refused, 400, "context_length_exceeded", None);
    assert_eq!(refused.json()["error"]["n_ctx"], room);
    body["max_tokens"] = json!(-1);
    assert_eq!(strict.post(CHAT, &body).status, 200);
}
