//! Several answers to one prompt: each is the one that its seed gives alone, and the prompt is read once.

use std::io::{Read, Write};
use std::time::Duration;

use minnow_tests::program::Server;
use serde_json::{Value, json};

use super::http::{Answers, CHAT, FREE_MAX, assert_error, scrape, server, story};

const TEXT: &str = "/v1/completions";

/// A sampled request for a story with `n` choices from a seed on.
fn sampled(n: usize, seed: u64, more: Value) -> Value {
    let mut body = story(json!({"n": n, "seed": seed, "temperature": 0.9, "threshold": 0.4, "max_tokens": 80}));
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn text_of(choice: &Value) -> &str {
    choice.get("text").unwrap_or(&choice["message"]["content"]).as_str().expect("text")
}

/// The same request as text to be continued.
fn as_text(mut body: Value) -> Value {
    body["prompt"] = json!("Once there was a brave fox. One day the fox lost a key. The fox looked near the river.");
    body.as_object_mut().unwrap().remove("messages");
    body
}

#[test]
fn every_choice_is_what_its_seed_gives_alone() {
    let server = server();
    for path in [CHAT, TEXT] {
        for cache in [true, false] {
            let more = json!({"cache_prompt": cache});
            let make = |n, seed| {
                let body = sampled(n, seed, more.clone());
                if path == TEXT { as_text(body) } else { body }
            };
            let reply = server.post(path, &make(5, 40));
            assert_eq!(reply.status, 200, "{}", reply.text());
            let answer = reply.json();
            let choices = answer["choices"].as_array().unwrap();
            assert_eq!(choices.len(), 5);
            let (mut completion, mut forwards) = (0, 0);
            for (index, choice) in choices.iter().enumerate() {
                assert_eq!(choice["index"], index);
                let alone = server.post(path, &make(1, 40 + index as u64)).json();
                assert_eq!(text_of(choice), text_of(&alone["choices"][0]), "{path} choice {index}");
                assert_eq!(choice["finish_reason"], alone["choices"][0]["finish_reason"]);
                assert_eq!(answer["usage"]["prompt_tokens"], alone["usage"]["prompt_tokens"], "the prompt counts once");
                completion += alone["usage"]["completion_tokens"].as_u64().unwrap();
                forwards += alone["minnow"]["denoise_forwards"].as_u64().unwrap();
                assert_eq!(answer["minnow"]["choices"][index]["seed"], 40 + index);
                assert_eq!(answer["minnow"]["choices"][index]["denoise_forwards"], alone["minnow"]["denoise_forwards"]);
            }
            assert!(choices.iter().any(|choice| text_of(choice) != text_of(&choices[0])), "seeds matter");
            assert_eq!(answer["usage"]["completion_tokens"], completion);
            assert_eq!(answer["minnow"]["denoise_forwards"], forwards);
            assert_eq!(answer["minnow"]["generation_settings"]["seed"], 40);
        }
    }
}

#[test]
fn a_stream_tells_every_choice_like_the_plain_answer() {
    let server = server();
    for path in [CHAT, TEXT] {
        let more = json!({"stream_options": {"include_usage": true}, "return_progress": true, "cache_prompt": false});
        let body = sampled(3, 7, more);
        let body = if path == TEXT { as_text(body) } else { body };
        let plain = server.post(path, &body).json();
        let chunks = server.stream(path, &body);
        let (usage, chunks) = chunks.split_last().unwrap();
        assert_eq!((&usage["choices"], &usage["usage"]), (&json!([]), &plain["usage"]));
        assert_eq!(usage["minnow"]["denoise_forwards"], plain["minnow"]["denoise_forwards"]);
        for (index, choice) in plain["choices"].as_array().unwrap().iter().enumerate() {
            let of_it: Vec<&Value> = chunks
                .iter()
                .inspect(|chunk| assert_eq!(chunk["choices"].as_array().map(Vec::len), Some(1)))
                .map(|chunk| &chunk["choices"][0])
                .filter(|told| told["index"] == index)
                .collect();
            let text: String = of_it
                .iter()
                .filter_map(|told| told.get("text").unwrap_or(&told["delta"]["content"]).as_str())
                .collect();
            assert_eq!(text, text_of(choice), "{path} choice {index}");
            let reasons: Vec<&Value> =
                of_it.iter().map(|told| &told["finish_reason"]).filter(|reason| !reason.is_null()).collect();
            assert_eq!(reasons, [&choice["finish_reason"]], "one finish chunk");
            assert!(!of_it.last().unwrap()["finish_reason"].is_null(), "and nothing after it");
            if path == CHAT {
                assert_eq!(of_it[0]["delta"], json!({"role": "assistant", "content": ""}));
            }
        }
    }
}

#[test]
fn choices_share_the_prompt() {
    let server = Server::start(&[]);
    let long = "The sea is wide. ".repeat(60);
    let body = json!({"messages": [{"role": "user", "content": long}], "n": 4, "temperature": 0.8, "max_tokens": 4});
    let answer = server.chat(&body);
    let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(prompt > 200, "{prompt}");
    let processed = answer["minnow"]["processed_tokens"].as_u64().unwrap();
    let refined = answer["minnow"]["evaluated_tokens"].as_u64().unwrap();
    assert!(processed - refined <= prompt, "{processed} positions, {refined} of them refined, for {prompt} tokens");
    let counted = scrape(&server)["llamacpp:prompt_tokens_total"];
    assert_eq!(counted, prompt as f64);
    assert_eq!(scrape(&server)["minnow_queue_seconds_count"], 1.0, "one request");
}

#[test]
fn calls_and_formats_hold_in_every_choice() {
    let server = server();
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": schema}}]);
    let answer = server.chat(&sampled(3, 1, json!({"response_format": format})));
    for choice in answer["choices"].as_array().unwrap() {
        let value: Value = serde_json::from_str(text_of(choice)).unwrap();
        assert!(value["n"].as_u64().is_some_and(|n| n < 100), "{value}");
    }
    let answer =
        server.chat(&sampled(3, 1, json!({"tools": tools, "tool_choice": "required", "parallel_tool_calls": false})));
    let ids: std::collections::BTreeSet<&str> = answer["choices"]
        .as_array()
        .unwrap()
        .iter()
        .inspect(|choice| assert_eq!(choice["finish_reason"], "tool_calls"))
        .filter_map(|choice| choice["message"]["tool_calls"][0]["id"].as_str())
        .collect();
    assert_eq!(ids.len(), 3);
}

#[test]
fn a_client_that_goes_away_cancels_all_its_choices() {
    let server = Server::start(&["--queue-capacity", "8"]);
    let mut body = sampled(8, 3, json!({"max_tokens": 1000, "threshold": 1, "ignore_eos": false}));
    body["stream"] = json!(true);
    let body = body.to_string();
    let head = format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let mut connection = server.connect();
    connection.get_mut().write_all(head.as_bytes()).unwrap();
    connection.read_exact(&mut [0; 1]).unwrap();
    let health = server.get("/health").json();
    assert_eq!(health["active_requests"].as_u64().unwrap() + health["queued_requests"].as_u64().unwrap(), 8);
    drop(connection);
    server.wait_idle(FREE_MAX);
    assert!(server.get("/slots").json().as_array().unwrap().iter().all(|slot| slot["is_processing"] == false));
    assert_eq!(server.get("/health").json()["cache"]["running_pages"], 0);
}

#[test]
fn a_stream_of_several_choices_can_be_resumed() {
    let server = server();
    let mut body = sampled(2, 11, json!({}));
    body["stream"] = json!(true);
    let body = body.to_string();
    let request = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nX-Conversation-Id: two\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut connection = server.connect();
    connection.get_mut().write_all(request.as_bytes()).unwrap();
    connection.read_exact(&mut [0; 1]).unwrap();
    drop(connection);
    let replayed = server.get("/v1/stream?conv_id=two");
    assert_eq!(replayed.events().iter().filter(|event| event.contains("\"finish_reason\":\"")).count(), 2);
    assert_eq!(replayed.events().last().map(String::as_str), Some("[DONE]"));
    assert_eq!(server.get("/v1/stream?conv_id=two&from=0").body, replayed.body);
}

#[test]
fn more_choices_than_fit_are_refused_and_a_full_queue_takes_none() {
    let server = server();
    assert_error(&server.post(CHAT, &sampled(9, 0, json!({}))), 400, "unsupported_value", Some("n"));
    let small = Server::start(&["--parallel", "1", "--queue-capacity", "2"]);
    assert_eq!(small.get("/props").json()["minnow"]["capabilities"]["n"], 3);
    assert_error(&small.post(CHAT, &sampled(4, 0, json!({}))), 400, "unsupported_value", Some("n"));
    assert_eq!(small.chat(&sampled(3, 0, json!({"max_tokens": 8})))["choices"].as_array().unwrap().len(), 3);
    let mut long = sampled(1, 0, json!({"max_tokens": 1000, "threshold": 1}));
    long["stream"] = json!(true);
    let long = long.to_string();
    let mut connection = small.connect();
    let head = format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{long}", long.len());
    connection.get_mut().write_all(head.as_bytes()).unwrap();
    connection.read_exact(&mut [0; 1]).unwrap();
    assert_error(&small.post(CHAT, &sampled(3, 0, json!({}))), 429, "queue_full", None);
    std::thread::sleep(Duration::from_millis(20));
    let health = small.get("/health").json();
    assert_eq!(health["queued_requests"], 0, "all or none: {health}");
}
