//! `/v1/messages`, the Messages API of Anthropic: events, fields, tools, refusals; and that its prompt is chat's.

use std::collections::BTreeSet;
use std::io::Write;

use minnow_tests::program::{Reply, Server};
use serde_json::{Value, json};

use super::http::{CHAT, FREE_MAX, content, head, server};
use super::http_responses::{documented, promised};

pub(crate) const MESSAGES: &str = "/v1/messages";
pub(crate) const COUNT_TOKENS: &str = "/v1/messages/count_tokens";
const STORY: &str = "Tell me a story about a brave fox named Anna.";

fn asked(content: impl Into<Value>, more: Value) -> Value {
    let content: Value = content.into();
    let messages = json!([{"role": "user", "content": content}]);
    let mut body =
        json!({"model": "claude-sonnet-4-5", "messages": messages, "temperature": 0, "seed": 7, "max_tokens": 96});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// A plain answer that must be a success.
fn plain(server: &Server, body: &Value) -> Value {
    let reply = server.post(MESSAGES, body);
    assert_eq!(reply.status, 200, "{body}: {}", reply.text());
    reply.json()
}

/// Events of a streamed request, and the message that they add up to. One block is open at a time.
fn streamed(server: &Server, body: &Value) -> (Vec<Value>, Value) {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let reply = server.post(MESSAGES, &body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let events = reply.named_events();
    let mut message = events[0]["message"].clone();
    assert_eq!((&events[0]["type"], &message["content"]), (&json!("message_start"), &json!([])));
    assert_eq!((&message["stop_reason"], &message["usage"]["output_tokens"]), (&Value::Null, &json!(0)));
    let mut open = None;
    for event in &events[1..] {
        let blocks = message["content"].as_array_mut().unwrap();
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!((open, event["index"].as_u64()), (None, Some(blocks.len() as u64)));
                open = event["index"].as_u64();
                blocks.push(event["content_block"].clone());
            }
            "content_block_delta" => {
                assert_eq!(event["index"].as_u64(), open);
                let block = blocks.last_mut().unwrap();
                if event["delta"]["type"] == "input_json_delta" {
                    assert_eq!(block["input"], json!({}));
                    block["input"] = serde_json::from_str(event["delta"]["partial_json"].as_str().unwrap()).unwrap();
                } else {
                    assert_eq!(event["delta"]["type"], "text_delta");
                    block["text"] =
                        json!([&block["text"], &event["delta"]["text"]].map(|text| text.as_str().unwrap()).concat());
                }
            }
            "content_block_stop" => assert_eq!(event["index"].as_u64(), open.take()),
            "message_delta" => {
                for name in ["stop_reason", "stop_sequence"] {
                    message[name] = event["delta"][name].clone();
                }
                message["usage"]["output_tokens"] = event["usage"]["output_tokens"].clone();
                message["minnow"] = event["minnow"].clone();
            }
            other => assert!(["message_stop", "ping"].contains(&other), "{other}"),
        }
    }
    let kinds: Vec<&Value> = events.iter().rev().take(2).map(|event| &event["type"]).collect();
    assert_eq!((kinds, open), (vec![&json!("message_stop"), &json!("message_delta")], None));
    (events, message)
}

/// What does not depend on which of two requests it was: no ids, no times, nothing about the cache.
fn essence(message: &Value) -> Value {
    let mut message = message.clone();
    for block in message["content"].as_array_mut().unwrap() {
        block["id"] = json!(null);
    }
    message["usage"] = message["usage"]["output_tokens"].clone();
    for name in ["id", "minnow"] {
        message[name] = json!(null);
    }
    message
}

/// A refusal in the form of this API; gives its message.
#[track_caller]
fn refusal(reply: &Reply, status: u16, kind: &str) -> String {
    assert_eq!(reply.status, status, "{}", reply.text());
    assert_eq!(reply.header("content-type"), Some("application/json"));
    let body = reply.json();
    assert_eq!((&body["type"], &body["error"]["type"]), (&json!("error"), &json!(kind)), "{body}");
    assert_eq!(body["request_id"].as_str(), reply.header("x-request-id"));
    let names: Vec<&String> = body.as_object().unwrap().keys().collect();
    assert_eq!(names, ["type", "error", "request_id"]);
    body["error"]["message"].as_str().expect("a message").to_owned()
}

fn text_of(message: &Value) -> &str {
    message["content"][0]["text"].as_str().expect("a text")
}

fn weather() -> Value {
    json!({"name": "get_weather", "description": "Get the current weather for a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}})
}

#[test]
fn a_message_has_every_member_whatever_model_was_asked_for() {
    let server = server();
    let answer = plain(&server, &asked("Goodbye!", json!({})));
    let names: Vec<&str> = answer.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(names, ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage", "minnow"]);
    assert!(answer["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!(answer["model"], server.get("/v1/models").json()["data"][0]["id"]);
    assert_eq!(answer["content"], json!([{"type": "text", "text": "Goodbye! Have a nice day."}]));
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("end_turn"), &Value::Null));
    let usage: BTreeSet<&str> = answer["usage"].as_object().unwrap().keys().map(String::as_str).collect();
    let expected = ["input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens"];
    assert_eq!(usage, BTreeSet::from(expected));
    let cut = plain(&server, &asked(STORY, json!({"max_tokens": 3})));
    assert_eq!((&cut["stop_reason"], &cut["usage"]["output_tokens"]), (&json!("max_tokens"), &json!(3)));
}

#[test]
fn the_same_turns_get_the_answer_that_chat_gives() {
    let server = server();
    let result = "{\"city\": \"Mumbai\", \"condition\": \"rain\"}";
    let turns = json!([
        {"role": "user", "content": [{"type": "text", "text": "Is it raining "}, {"type": "text", "text": "in Mumbai?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "text", "text": "Looking."},
            {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Mumbai"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": result}]},
            {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
        ]},
    ]);
    let messages = json!([
        {"role": "system", "content": "Be brief. Be kind."},
        {"role": "user", "content": "Is it raining in Mumbai?"},
        {"role": "assistant", "content": "Looking.", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": "{\"city\": \"Mumbai\"}"}}]},
        {"role": "tool", "tool_call_id": "a", "content": result},
        {"role": "user", "content": "And now?"},
    ]);
    let system = json!([{"type": "text", "text": "Be brief. "}, {"type": "text", "text": "Be kind."}]);
    let body = asked("", json!({"messages": turns, "system": system, "tools": [weather()], "cache_prompt": false}));
    let function = json!({"name": "get_weather", "description": weather()["description"], "parameters": weather()["input_schema"]});
    let tools = json!([{"type": "function", "function": function}]);
    let chat = server
        .post(CHAT, &json!({"messages": messages, "tools": tools, "temperature": 0, "seed": 7, "max_tokens": 96}));
    let (answer, chat) = (plain(&server, &body), chat.json());
    assert_eq!(text_of(&answer), content(&chat));
    assert_eq!(answer["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
    assert_eq!(answer["minnow"]["ignored_fields"], json!([]));
    let counted = server.post(COUNT_TOKENS, &body);
    assert_eq!(counted.json(), json!({"input_tokens": chat["usage"]["prompt_tokens"]}));
}

#[test]
fn cached_tokens_are_not_counted_twice() {
    let server = server();
    let body = asked("The sea is wide and deep and blue. ".repeat(12), json!({"max_tokens": 2}));
    let whole = server.post(COUNT_TOKENS, &body).json()["input_tokens"].as_u64().unwrap();
    plain(&server, &body);
    let usage = plain(&server, &body)["usage"].clone();
    let cached = usage["cache_read_input_tokens"].as_u64().unwrap();
    assert!(cached > 0 && cached + usage["input_tokens"].as_u64().unwrap() == whole, "{usage} of {whole}");
}

#[test]
fn a_streamed_message_adds_up_to_the_plain_one() {
    let server = server();
    let tools = json!({"tools": [weather()]});
    for body in [
        asked(STORY, json!({})),
        asked(STORY, json!({"max_tokens": 33})),
        asked("Goodbye!", json!({})),
        asked(STORY, json!({"stop_sequences": ["fox"]})),
        asked("Is it raining in Mumbai?", tools),
        asked("Is it raining in Mumbai?", json!({"tools": [weather()], "tool_choice": {"type": "any"}})),
        asked("Is it raining in Mumbai?", json!({"tools": [weather()], "max_tokens": 12})),
        asked("Hi", json!({"max_tokens": 0})),
    ] {
        let (answer, (_, message)) = (plain(&server, &body), streamed(&server, &body));
        assert_eq!(essence(&message), essence(&answer), "{body}");
        assert_eq!(message["minnow"]["generation_settings"], answer["minnow"]["generation_settings"]);
    }
}

#[test]
fn a_stop_sequence_is_named() {
    let server = server();
    let answer = plain(&server, &asked(STORY, json!({"stop_sequences": ["\u{2603}", "fox"]})));
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("stop_sequence"), &json!("fox")));
    assert!(!text_of(&answer).contains("fox"));
}

#[test]
fn a_tool_is_used_and_its_result_read() {
    let server = server();
    for choice in [
        json!({"type": "auto"}),
        json!({"type": "any", "disable_parallel_tool_use": true}),
        json!({"type": "tool", "name": "get_weather"}),
    ] {
        let body = asked("Is it raining in Mumbai?", json!({"tools": [weather()], "tool_choice": choice}));
        let (answer, (events, _)) = (plain(&server, &body), streamed(&server, &body));
        let [block] = answer["content"].as_array().unwrap().as_slice() else { panic!("{answer}") };
        assert_eq!((&block["type"], &block["name"]), (&json!("tool_use"), &json!("get_weather")));
        assert_eq!((&block["input"], &answer["stop_reason"]), (&json!({"city": "Mumbai"}), &json!("tool_use")));
        assert_eq!(events.iter().filter(|event| event["delta"]["type"] == "input_json_delta").count(), 1);
        let result = json!({"type": "tool_result", "tool_use_id": block["id"], "content": "{\"condition\": \"rain\"}"});
        let turns = json!([
            {"role": "user", "content": "Is it raining in Mumbai?"},
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [result]},
        ]);
        let next = plain(&server, &asked("", json!({"messages": turns, "tools": [weather()]})));
        assert_eq!((&next["content"][0]["type"], &next["stop_reason"]), (&json!("text"), &json!("end_turn")));
    }
    let none = asked("Is it raining in Mumbai?", json!({"tools": [weather()], "tool_choice": {"type": "none"}}));
    assert_eq!(plain(&server, &none)["content"][0]["type"], "text");
}

#[test]
fn silence_is_broken_by_pings() {
    let server = Server::start(&["--step-delay-ms", "1300"]);
    let (events, _) = streamed(&server, &asked("Goodbye!", json!({"max_tokens": 8, "sse_ping_interval": 1})));
    assert!(events.iter().any(|event| *event == json!({"type": "ping"})));
    let reply =
        server.post(MESSAGES, &asked("Goodbye!", json!({"max_tokens": 8, "sse_ping_interval": 1, "stream": true})));
    assert!(!reply.text().contains("\n:"), "no comments");
}

#[test]
fn refusals_on_these_routes_have_their_own_form() {
    let key = "a-key-of-more-than-sixteen-bytes";
    let server = Server::start(&["--api-key", key, "--max-body-bytes", "100000"]);
    let send = |method: &str, path: &str, header: &str, body: &str| {
        let header = if header.is_empty() { String::new() } else { format!("{header}\r\n") };
        let length = body.len();
        let request =
            format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\n{header}Content-Length: {length}\r\n\r\n{body}");
        server.raw(request.as_bytes())
    };
    let own = format!("x-api-key: {key}");
    let body = asked("Goodbye!", json!({"max_tokens": 2})).to_string();
    for path in [MESSAGES, COUNT_TOKENS] {
        for header in ["", "x-api-key: wrong", "Authorization: Bearer wrong"] {
            let reply = send("POST", path, header, &body);
            refusal(&reply, 401, "authentication_error");
            assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
        }
        assert_eq!(send("POST", path, &own, &body).status, 200);
        assert_eq!(send("POST", path, &format!("Authorization: Bearer {key}"), &body).status, 200);
        let used = format!("{own}\r\nanthropic-version: 2023-06-01\r\nanthropic-beta: a,b");
        assert_eq!(send("POST", path, &used, &body).status, 200);
        let reply = send("GET", path, &own, "");
        refusal(&reply, 405, "invalid_request_error");
        assert_eq!(reply.header("allow"), Some("POST"));
        refusal(&send("POST", path, &own, "{"), 400, "invalid_request_error");
        refusal(&send("POST", path, &own, &"x".repeat(100_001)), 413, "request_too_large");
        let origin = format!("{own}\r\nOrigin: https://a.example");
        refusal(&send("POST", path, &origin, &body), 415, "invalid_request_error");
        let long = asked("a b ".repeat(20_000), json!({})).to_string();
        let message = refusal(&send("POST", path, &own, &long), 400, "invalid_request_error");
        assert!(message.starts_with("This model's maximum context length is "), "{message}");
    }
}

#[test]
fn a_full_queue_and_a_drain_are_told_in_this_form() {
    let server = Server::start(&["--parallel", "1", "--queue-capacity", "0"]);
    let long = asked(STORY, json!({"stream": true, "max_tokens": 1500, "threshold": 1})).to_string();
    let mut connection = server.connect();
    let head = head(MESSAGES, &format!("Content-Length: {}", long.len()));
    connection.get_mut().write_all(&[head, long.into_bytes()].concat()).unwrap();
    while server.get("/health").json()["active_requests"] == 0 {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let reply = server.post(MESSAGES, &asked("Hi", json!({})));
    refusal(&reply, 429, "rate_limit_error");
    assert!(reply.header("retry-after").is_some());
    drop(connection);
    server.wait_idle(FREE_MAX);
    assert_eq!(server.post(MESSAGES, &asked("Goodbye!", json!({}))).status, 200, "who leaves frees the slot");
}

/// A field, a value that is taken, what it changes, and values that are refused with the path that is named.
type Row = (&'static str, Value, fn(&Value) -> bool, Vec<(Value, &'static str)>);

const ANY: fn(&Value) -> bool = |_| true;

fn setting(answer: &Value, name: &str) -> Value {
    answer["minnow"]["generation_settings"][name].clone()
}

fn row(field: &'static str, value: Value, is_there: fn(&Value) -> bool, refused: Vec<(Value, &'static str)>) -> Row {
    (field, value, is_there, refused)
}

fn rows() -> Vec<Row> {
    let flag = |field| row(field, json!(false), ANY, vec![(json!("x"), field)]);
    let inert = |field| row(field, json!({"any": ["thing", 1, null]}), ANY, Vec::new());
    let turn = |role: &str, block: Value| json!([{"role": role, "content": [block]}]);
    vec![
        row("model", json!("any-model"), ANY, vec![(json!(5), "model")]),
        row(
            "messages",
            json!([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]),
            ANY,
            vec![
                (Value::Null, "messages"),
                (json!([]), "messages"),
                (json!("x"), "messages"),
                (json!([{"role": "system", "content": "x"}]), "messages[0].role"),
                (json!([{"role": "user"}]), "messages[0].content"),
                (turn("user", json!({"type": "image", "source": {}})), "messages[0].content[0].type"),
                (turn("user", json!({"type": "document"})), "messages[0].content[0].type"),
                (
                    turn("user", json!({"type": "tool_result", "tool_use_id": "a"})),
                    "messages[0].content[0].tool_use_id",
                ),
                (
                    turn("assistant", json!({"type": "tool_use", "id": "a", "name": "f"})),
                    "messages[0].content[0].input",
                ),
            ],
        ),
        row(
            "system",
            json!("Be brief. ".repeat(20)),
            |answer| answer["usage"]["input_tokens"].as_u64() > Some(40),
            vec![(json!(5), "system"), (json!([{"type": "image"}]), "system[0].type")],
        ),
        row(
            "max_tokens",
            json!(2),
            |answer| answer["usage"]["output_tokens"] == 2,
            vec![(json!(-1), "max_tokens"), (json!("9"), "max_tokens")],
        ),
        row(
            "temperature",
            json!(0.5),
            |answer| setting(answer, "temperature") == 0.5,
            vec![(json!(1.1), "temperature")],
        ),
        row("top_p", json!(0.25), |answer| setting(answer, "top_p") == 0.25, vec![(json!(1.5), "top_p")]),
        row(
            "top_k",
            json!(40),
            |answer| setting(answer, "top_k") == 40,
            vec![(json!(-1), "top_k"), (json!(1.5), "top_k")],
        ),
        row("seed", json!(9), |answer| setting(answer, "seed") == 9, vec![(json!(-2), "seed")]),
        row(
            "stop_sequences",
            json!(["bye"]),
            |answer| answer["stop_reason"] == "stop_sequence",
            vec![
                (json!("x"), "stop_sequences"),
                (json!([""]), "stop_sequences[0]"),
                (json!(vec!["x"; 17]), "stop_sequences"),
            ],
        ),
        flag("stream"),
        row(
            "tools",
            json!([weather()]),
            |answer| answer["usage"]["input_tokens"].as_u64() > Some(30),
            vec![
                (json!("x"), "tools"),
                (json!([{"type": "web_search_20250305", "name": "web_search"}]), "tools[0].type"),
                (json!([{"name": "f"}]), "tools[0].input_schema"),
                (json!([{"name": "f", "input_schema": {"not": {}}, "strict": true}]), "tools[0].input_schema.not"),
            ],
        ),
        row(
            "tool_choice",
            json!({"type": "none"}),
            ANY,
            vec![
                (json!("auto"), "tool_choice"),
                (json!({"type": "any"}), "tool_choice"),
                (json!({"type": "required"}), "tool_choice.type"),
                (json!({"type": "tool"}), "tool_choice.name"),
                (json!({"type": "auto", "disable_parallel_tool_use": 1}), "tool_choice.disable_parallel_tool_use"),
            ],
        ),
        flag("cache_prompt"),
        row("sse_ping_interval", json!(5), ANY, vec![(json!(-2), "sse_ping_interval")]),
        row("preset", json!("quality"), |answer| setting(answer, "threshold") == 0.7, vec![(json!("best"), "preset")]),
        row("threshold", json!(0.25), |answer| setting(answer, "threshold") == 0.25, vec![(json!(2), "threshold")]),
        row(
            "editing_threshold",
            json!(0.25),
            |answer| setting(answer, "editing_threshold") == 0.25,
            vec![(json!(-1), "editing_threshold")],
        ),
        row("steps", json!(7), |answer| setting(answer, "steps") == 7, vec![(json!(0), "steps")]),
        row(
            "max_steps_per_block",
            json!(7),
            |answer| setting(answer, "max_steps_per_block") == 7,
            vec![(json!(0), "max_steps_per_block")],
        ),
        row(
            "max_post_steps",
            json!(7),
            |answer| setting(answer, "max_post_steps") == 7,
            vec![(json!(-1), "max_post_steps")],
        ),
        row(
            "minnow",
            json!({"steps": 5}),
            |answer| setting(answer, "steps") == 5,
            vec![(json!({"frob": 1}), "minnow.frob")],
        ),
        row("mcp_servers", json!([]), ANY, vec![(json!([{"url": "x"}]), "mcp_servers")]),
        row("container", Value::Null, ANY, vec![(json!("x"), "container")]),
        row("output_format", Value::Null, ANY, vec![(json!({"type": "json_schema"}), "output_format")]),
        row("output_config", json!({"effort": "low"}), ANY, vec![(json!({"format": {}}), "output_config.format")]),
        inert("metadata"),
        inert("thinking"),
        inert("cache_control"),
    ]
}

#[test]
fn every_field_of_a_message_is_honoured_refused_or_without_effect() {
    let server = server();
    for (field, value, is_there, refused) in rows() {
        let body = |value: &Value| asked("Goodbye!", json!({"max_tokens": 4, "cache_prompt": false, field: value}));
        let answer = plain(&server, &body(&value));
        assert!(is_there(&answer), "{field}: {answer}");
        assert_eq!(answer["minnow"]["ignored_fields"], json!([]), "{field}");
        for (value, param) in refused {
            for path in [MESSAGES, COUNT_TOKENS] {
                let message = refusal(&server.post(path, &body(&value)), 400, "invalid_request_error");
                assert!(message.contains(param), "{field} {value}: {message}");
            }
        }
    }
    let more = json!({"max_tokens": 1, "frobnicate": 1, "n": 2, "service_tier": "auto"});
    let answer = plain(&server, &asked("x", more));
    assert_eq!(answer["minnow"]["ignored_fields"], json!(["frobnicate", "n", "service_tier"]));
    let strict = Server::start(&["--strict-requests"]);
    let message = refusal(&strict.post(MESSAGES, &asked("x", json!({"frobnicate": 1}))), 400, "invalid_request_error");
    assert!(message.contains("frobnicate"), "{message}");
}

#[test]
fn documents_and_schema_name_the_fields_of_a_message() {
    let tested: BTreeSet<String> = rows().into_iter().map(|(field, ..)| field.to_owned()).collect();
    assert_eq!(documented("fields of messages"), tested);
    assert_eq!(promised(&server(), "MessagesRequest"), tested);
}
