//! Requests that are wrong in ways nobody thought of: good ones, changed at random in their values or in their bytes.

use std::collections::BTreeMap;

use minnow_common::random::mix64;
use minnow_tests::program::Server;
use serde_json::{Value, json};

use super::http::{Answers, CHAT, asking, content, story};
use super::http_messages::MESSAGES;
use super::http_responses::RESPONSES;

/// Refusals to collect; `MINNOW_LONG` collects 2,000.
fn refusals() -> usize {
    if std::env::var_os("MINNOW_LONG").is_some() { 2000 } else { 200 }
}

/// A stream of random numbers.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 += 1;
        (mix64(self.0) >> 16) as usize % sides
    }
}

/// Good requests of every route that takes one.
fn good() -> Vec<(&'static str, Value)> {
    let chat = story(json!({
        "max_tokens": 1, "stop": ["x"], "n": 1, "minnow": {"threshold": 0.5}, "stream_options": {"include_usage": true},
        "top_p": 1, "top_k": 4, "tool_choice": "auto", "return_refinements": false, "logit_bias": {},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": null,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
    }));
    vec![
        (CHAT, chat.clone()),
        ("/v1/chat/completions/input_tokens", chat.clone()),
        ("/v1/completions", json!({"prompt": [5, 6], "max_tokens": 1, "seed": 3, "temperature": 0.5, "stop": "x"})),
        (
            "/apply-template",
            json!({"messages": chat["messages"], "tools": chat["tools"], "add_generation_prompt": true}),
        ),
        (
            RESPONSES,
            json!({
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "1"},
                ],
                "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": true}],
                "text": {"format": {"type": "json_object"}}, "max_output_tokens": 1, "instructions": "Be brief.",
                "tool_choice": "auto", "include": [], "metadata": {"a": "b"}, "truncation": "disabled",
            }),
        ),
        (
            MESSAGES,
            json!({
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]},
                ],
                "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
                "system": "Be brief.", "max_tokens": 1, "stop_sequences": ["x"], "temperature": 0.5, "top_k": 4,
            }),
        ),
        ("/tokenize", json!({"content": "a b", "with_pieces": true, "parse_special": false})),
        ("/detokenize", json!({"tokens": [5, 6, 7]})),
        ("/v1/streams/lookup", json!({"conversation_ids": ["a", "b"]})),
        ("/v1/chat/completions/control", json!({"id": "chatcmpl-1", "action": "reasoning_end"})),
    ]
}

/// Paths of all values within `value`.
fn pointers(value: &Value, at: String, found: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            for (name, inner) in members {
                pointers(inner, format!("{at}/{name}"), found);
            }
        }
        Value::Array(items) => {
            for (index, inner) in items.iter().enumerate() {
                pointers(inner, format!("{at}/{index}"), found);
            }
        }
        _ => {}
    }
    if !at.is_empty() {
        found.push(at);
    }
}

/// A value that belongs nowhere in particular.
fn odd(dice: &mut Dice) -> Value {
    match dice.roll(18) {
        0 => Value::Null,
        1 => json!(true),
        2 => json!(-1),
        3 => json!(1.5),
        4 => json!(u64::MAX),
        5 => json!(i64::MIN),
        6 => json!(-1e300),
        7 => json!(1e-300),
        8 => json!(""),
        9 => json!("\u{0}\u{ffff}\u{10ffff}"),
        10 => json!("x".repeat(5000)),
        11 => json!([]),
        12 => json!({}),
        13 => json!([[], {}, null, "a", 1]),
        14 => json!({"a": {"b": [1, {"c": null}]}, "": 1, "type": "function"}),
        15 => json!(vec![0; 2000]),
        16 => (0..60).fold(json!(1), |inner, _| json!([inner])),
        _ => (0..70).fold(json!(1), |inner, _| json!({ "a": inner })),
    }
}

/// Changes a value somewhere: another type, another name, one entry more or less.
fn bend(value: &mut Value, dice: &mut Dice) {
    let mut all = Vec::new();
    pointers(value, String::new(), &mut all);
    let Some(pointer) = all.get(dice.roll(all.len().max(1))) else { return };
    let (parent, name) = pointer.rsplit_once('/').unwrap_or_default();
    match dice.roll(4) {
        0 => {
            if let Some(Value::Object(members)) = value.pointer_mut(parent)
                && let Some(inner) = members.swap_remove(name)
            {
                members.insert(format!("{name}s"), inner);
            }
        }
        1 => match value.pointer_mut(parent) {
            Some(Value::Object(members)) => drop(members.swap_remove(name)),
            Some(Value::Array(items)) => {
                let copy = items[0].clone();
                items.push(copy);
            }
            _ => {}
        },
        _ => {
            if let Some(inner) = value.pointer_mut(pointer) {
                *inner = odd(dice);
            }
        }
    }
}

/// Changes the text: bytes cut, doubled, swapped for pieces of no JSON.
fn break_bytes(body: &mut Vec<u8>, dice: &mut Dice) {
    const PIECES: [&[u8]; 16] = [
        b"null",
        b"-1",
        b"1e999",
        b"-",
        b"01",
        b"\"",
        b"{",
        b"]",
        b"\\ud800",
        b"\\u12",
        b"\xff",
        b"\xc0\xaf",
        b"\xed\xa0\x80",
        b"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
        b"NaN",
        b",,",
    ];
    let at = dice.roll(body.len());
    match dice.roll(5) {
        0 => body.truncate(at),
        1 => body[at] = dice.roll(256) as u8,
        2 => drop(body.splice(at..=at, PIECES[dice.roll(PIECES.len())].iter().copied())),
        3 => drop(body.drain(at..(at + 1 + dice.roll(12)).min(body.len()))),
        _ => body.extend_from_slice(PIECES[dice.roll(PIECES.len())]),
    }
    if body.is_empty() {
        body.push(b'{');
    }
}

#[test]
fn malformed_requests_get_a_proper_refusal_each_and_the_server_goes_on() {
    // A limit that was changed away must not make an answer fill the whole context.
    let server = Server::start(&["--max-context", "320"]);
    let good = good();
    for (path, body) in &good {
        let reply = server.post(path, body);
        assert!(matches!(reply.status, 200 | 422), "{path} is good: {}", reply.text());
    }
    let mut dice = Dice(20_260_101);
    let (mut refused, mut sent) = (0, 0);
    let mut codes: BTreeMap<String, usize> = BTreeMap::new();
    while refused < refusals() {
        sent += 1;
        assert!(sent < 4 * refusals(), "too few changes do harm: {refused} of {sent}");
        let (path, good) = &good[dice.roll(good.len() + 3).saturating_sub(3)];
        let mut value = good.clone();
        for _ in 0..dice.roll(3) {
            bend(&mut value, &mut dice);
        }
        let mut body = value.to_string().into_bytes();
        if value == *good || dice.roll(3) == 0 {
            for _ in 0..1 + dice.roll(2) {
                break_bytes(&mut body, &mut dice);
            }
        }
        let reply = server.post_bytes(path, &body);
        let shown = || format!("{path}: {}", String::from_utf8_lossy(&body).chars().take(2000).collect::<String>());
        // The right request may get the wrong output.
        if reply.status == 200 || reply.status == 422 {
            continue;
        }
        refused += 1;
        assert!((400..500).contains(&reply.status), "{} for {}", reply.status, shown());
        assert_eq!(reply.header("content-type"), Some("application/json"), "{}", shown());
        let answer = reply.json();
        let error = &answer["error"];
        let message = error["message"].as_str().unwrap_or_default();
        let is_plain = !message.is_empty() && !message.contains(".rs:") && !message.contains("panicked");
        assert!(is_plain && message.len() < 1000, "{}: {error}", shown());
        if *path == MESSAGES {
            assert!(answer["type"] == "error" && error["type"].is_string() && answer["request_id"].is_string());
            continue;
        }
        assert!(error["type"].is_string() && error["code"].is_string() && error.get("param").is_some(), "{error}");
        *codes.entry(error["code"].as_str().unwrap_or_default().to_owned()).or_default() += 1;
    }
    assert!(codes.len() >= 6, "the changes are all of a kind: {codes:?}");
    assert_eq!(content(&server.chat(&asking("Goodbye!", json!({})))), "Goodbye! Have a nice day.");
}
