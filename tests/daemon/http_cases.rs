//! What went wrong in other servers, as users reported it, and must not here: the cases S of `docs/field-cases.md` that
//! need a test of their own.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use minnow_tests::program::{self, Reply};
use serde_json::{Value, json};

use super::http::{Answers, CHAT, asking, assert_error, content, joined, scrape, server};

fn weather() -> Value {
    json!({"type": "function", "function": {"name": "get_weather", "description": "Get the current weather for a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}})
}

fn call(id: &str, arguments: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}})
}

/// Tokens of the prompt that messages become.
fn tokens_of(messages: &Value) -> u64 {
    let reply = server().post("/v1/chat/completions/input_tokens", &json!({"messages": messages}));
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()["input_tokens"].as_u64().unwrap()
}

#[test]
fn a_call_in_history_may_stand_without_content_in_any_form() {
    let server = server();
    let ask = |assistant: Value| {
        let messages = json!([
            {"role": "user", "content": "Is it raining in Mumbai?"},
            assistant,
            {"role": "tool", "tool_call_id": "a", "content": "{\"city\": \"Mumbai\", \"condition\": \"rain\"}"},
        ]);
        server.post(CHAT, &json!({"messages": messages, "tools": [weather()], "temperature": 0, "max_tokens": 32}))
    };
    let calls = json!([call("a", "{\"city\": \"Mumbai\"}")]);
    let answers: Vec<Reply> = [
        json!({"role": "assistant", "tool_calls": calls}),
        json!({"role": "assistant", "content": null, "tool_calls": calls}),
        json!({"role": "assistant", "content": "", "tool_calls": calls}),
    ]
    .into_iter()
    .map(ask)
    .collect();
    for answer in &answers {
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.json()["choices"], answers[0].json()["choices"]);
    }
}

#[test]
fn an_answer_that_only_calls_has_null_content_and_no_marker_anywhere() {
    let server = server();
    let body = asking("Is it raining in Mumbai?", json!({"tools": [weather()], "max_tokens": 64}));
    let answer = server.chat(&body);
    let message = &answer["choices"][0]["message"];
    assert_eq!((&message["content"], message["tool_calls"].as_array().map(Vec::len)), (&Value::Null, Some(1)));
    let chunks = server.stream(CHAT, &body);
    for text in [answer.to_string(), json!(chunks).to_string()] {
        assert!(!text.contains("<|") && !text.contains("functions."), "{text}");
    }
}

#[test]
fn without_parallel_calls_there_is_one_at_most_and_with_them_each_has_its_index_and_id() {
    let server = server();
    let mut several = 0;
    for seed in 0..24 {
        let question = "Is it raining in Mumbai? Is it raining in Paris? Is it raining in Rome?";
        let more = json!({"tools": [weather()], "max_tokens": 160, "temperature": 1.0, "seed": seed, "tool_choice": "required"});
        let mut body = asking(question, more);
        let calls =
            |answer: &Value| answer["choices"][0]["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
        let found = calls(&server.chat(&body));
        let ids: std::collections::BTreeSet<&str> = found.iter().filter_map(|call| call["id"].as_str()).collect();
        assert_eq!(ids.len(), found.len());
        several += usize::from(found.len() > 1);
        body["parallel_tool_calls"] = json!(false);
        assert_eq!(calls(&server.chat(&body)).len(), 1);
    }
    eprintln!("{several} of 24 answers had several calls");
}

#[test]
fn no_choice_of_tools_needs_no_tools() {
    let server = server();
    assert_eq!(server.post(CHAT, &asking("Goodbye!", json!({"tool_choice": "none"}))).status, 200);
    assert_eq!(server.post(CHAT, &asking("Goodbye!", json!({"tool_choice": "auto", "tools": []}))).status, 200);
}

#[test]
fn roles_in_every_legal_order_are_answered_and_others_named() {
    let server = server();
    let roles = ["system", "developer", "user", "assistant"];
    for first in roles {
        for second in roles {
            for third in roles {
                let message = |role: &str| json!({"role": role, "content": format!("{role} says")});
                let messages = json!([message(first), message(second), message(third)]);
                let reply = server.post(CHAT, &json!({"messages": messages, "temperature": 0, "max_tokens": 1}));
                assert_eq!(reply.status, 200, "{messages}: {}", reply.text());
            }
        }
    }
    let orphan = json!([{"role": "user", "content": "x"}, {"role": "tool", "content": "x", "tool_call_id": "a"}]);
    let reply = server.post(CHAT, &json!({"messages": orphan}));
    assert_error(&reply, 400, "invalid_tool_history", Some("messages[1].tool_call_id"));
}

#[test]
fn what_a_developer_says_reaches_the_prompt_as_a_system_message() {
    let user = json!({"role": "user", "content": "Hi"});
    let with = |role: &str| tokens_of(&json!([{"role": role, "content": "Be brief."}, user]));
    assert!(with("developer") > tokens_of(&json!([user])));
    assert_eq!(with("developer"), with("system"));
    let messages = json!([{"role": "developer", "content": "Be brief."}, user]);
    let prompt = server().post("/apply-template", &json!({"messages": messages})).json()["prompt"].clone();
    assert!(prompt.as_str().is_some_and(|prompt| prompt.contains("Be brief.")), "{prompt}");
}

#[test]
fn a_schema_at_the_wrong_place_is_named() {
    let server = server();
    let schema = json!({"type": "object", "required": ["name"]});
    for (format, param) in [
        (json!({"type": "json_schema", "schema": schema}), "response_format.json_schema"),
        (json!({"type": "json_schema", "json_schema": schema}), "response_format.json_schema.name"),
        (json!({"type": "json_schema", "json_schema": {"name": "x"}}), "response_format.json_schema.schema"),
    ] {
        let reply = server.post(CHAT, &asking("Hi", json!({"response_format": format})));
        assert_error(&reply, 400, "missing_required_parameter", Some(param));
    }
    let reply = server.post(CHAT, &asking("Hi", json!({"json_schema": schema})));
    assert_error(&reply, 400, "unsupported_parameter", Some("json_schema"));
}

/// What current clients add to a request without being asked.
#[test]
fn the_usual_extras_of_common_clients_are_taken() {
    let server = server();
    for (client, extras) in [
        (
            "openai",
            json!({"stream_options": {"include_usage": true}, "store": false, "metadata": {"a": "b"}, "service_tier": "auto",
            "user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "verbosity": "low", "reasoning_effort": "low"}),
        ),
        (
            "langchain",
            json!({"n": 1, "temperature": 0.7, "presence_penalty": 0, "frequency_penalty": 0, "top_p": 1,
            "logprobs": false, "parallel_tool_calls": true, "stop": null, "logit_bias": {}, "tools": []}),
        ),
        ("litellm", json!({"max_completion_tokens": 8, "seed": 1, "response_format": {"type": "text"}, "user": ""})),
        (
            "vercel",
            json!({"max_tokens": 8, "tool_choice": "auto", "tools": [weather()], "temperature": 0,
            "response_format": {"type": "text"}, "reasoning_effort": null}),
        ),
        (
            "llama-server",
            json!({"cache_prompt": true, "samplers": ["top_k"], "dry_multiplier": 0.0, "xtc_probability": 0,
            "min_p": 0, "typical_p": 1.0, "repeat_penalty": 1.0, "id_slot": -1, "timings_per_token": true}),
        ),
    ] {
        for stream in [false, true] {
            let mut body = asking("Goodbye!", extras.clone());
            body["stream"] = json!(stream);
            if client == "openai" && !stream {
                body["stream_options"] = Value::Null;
            }
            let reply = server.post(CHAT, &body);
            assert_eq!(reply.status, 200, "{client}: {}", reply.text());
            if !stream {
                assert_eq!(reply.json()["minnow"]["ignored_fields"], json!([]), "{client}");
            }
        }
    }
}

#[test]
fn a_conversation_of_a_system_message_alone_harms_nobody() {
    let server = server();
    for _ in 0..3 {
        let alone =
            json!({"messages": [{"role": "system", "content": "Be brief."}], "temperature": 0, "max_tokens": 16});
        assert_eq!(server.post(CHAT, &alone).status, 200);
        assert_eq!(content(&server.chat(&asking("Goodbye!", json!({})))), "Goodbye! Have a nice day.");
    }
}

#[test]
fn arguments_that_are_no_json_do_not_poison_a_conversation() {
    let server = server();
    for arguments in ["{\"city\": \"Mum", "", "null", "[]", "Mumbai", "{\"a\": \"<|tool_call_end|>\"}"] {
        let messages = json!([
            {"role": "user", "content": "Is it raining in Mumbai?"},
            {"role": "assistant", "content": null, "tool_calls": [call("a", arguments)]},
            {"role": "tool", "tool_call_id": "a", "content": "that was no JSON"},
        ]);
        let reply = server.post(CHAT, &json!({"messages": messages, "temperature": 0, "max_tokens": 8}));
        assert_eq!(reply.status, 200, "{arguments}: {}", reply.text());
    }
}

/// Calls of an answer or a stream as name and arguments; ids are random.
fn calls_of(calls: &[Value]) -> Vec<(Value, Value)> {
    calls.iter().map(|call| (call["function"]["name"].clone(), call["function"]["arguments"].clone())).collect()
}

#[test]
fn random_outputs_are_the_same_streamed_and_not() {
    let server = server();
    let (mut with_calls, mut with_errors) = (0, 0);
    for seed in 0..60u64 {
        let question =
            ["Is it raining in Mumbai?", "Tell me a story about a brave fox named Anna.", "Compute 55 + 525."];
        let more = json!({
            "tools": [weather()], "temperature": 0.7 + 0.01 * seed as f64, "seed": seed, "max_tokens": 40 + seed % 40,
            "stop": ["fox"], "threshold": 0.3,
        });
        let body = asking(question[seed as usize % 3], more);
        let plain = server.chat(&body);
        let chunks = server.stream(CHAT, &body);
        let message = &plain["choices"][0]["message"];
        assert_eq!(joined(&chunks), message["content"].as_str().unwrap_or(""), "seed {seed}");
        let mut streamed: Vec<Value> = Vec::new();
        for delta in chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].as_array()).flatten() {
            let index = delta["index"].as_u64().unwrap() as usize;
            if index == streamed.len() {
                streamed.push(delta.clone());
            } else {
                let so_far = streamed[index]["function"]["arguments"].as_str().unwrap().to_owned();
                let more = delta["function"]["arguments"].as_str().unwrap();
                streamed[index]["function"]["arguments"] = json!(so_far + more);
            }
        }
        let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
        assert_eq!(calls_of(&streamed), calls_of(&calls), "seed {seed}");
        let last = chunks.last().unwrap();
        assert_eq!(last["choices"][0]["finish_reason"], plain["choices"][0]["finish_reason"], "seed {seed}");
        assert_eq!(last["minnow"]["tool_parse_error"], plain["minnow"]["tool_parse_error"], "seed {seed}");
        with_calls += usize::from(!calls.is_empty());
        with_errors += usize::from(plain["minnow"].get("tool_parse_error").is_some());
    }
    assert!(with_calls > 5, "this test must see calls: {with_calls}");
    eprintln!("{with_calls} of 60 outputs called, {with_errors} looked like a call and were none");
}

#[test]
fn metrics_parse_strictly() {
    let server = server();
    let _ = server.get("/v1/models/no\"such\\model");
    let reply = server.get("/metrics");
    let text = reply.text();
    assert!(text.ends_with('\n') && !text.contains('\r'));
    let mut typed = std::collections::BTreeMap::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            assert!(typed.insert(name, kind).is_none(), "{name} has two types");
        }
    }
    for (name, kind) in &typed {
        assert_eq!(text.matches(&format!("# HELP {name} ")).count(), 1, "{name}");
        // `llamacpp:` is what dashboards of llama-server look for; our own names have no colon.
        assert!(!name.contains(':') || name.starts_with("llamacpp:"), "{name}");
        assert!(*kind != "counter" || name.ends_with("_total") || name.starts_with("llamacpp:n_tokens_max"), "{name}");
    }
    let samples = scrape(&server);
    for (name, kind) in typed.iter().filter(|(_, kind)| **kind == "histogram") {
        let series: Vec<(&String, &f64)> =
            samples.iter().filter(|(key, _)| key.starts_with(&format!("{name}_bucket"))).collect();
        assert!(series.iter().any(|(key, _)| key.contains("le=\"+Inf\"")), "{name} {kind}");
    }
}

#[test]
fn while_the_model_loads_the_socket_is_open_and_says_so() {
    // The reference expands every weight, which takes long enough to be asked in between.
    let mut child = Command::new(program::path("minnowd"))
        .args(["serve", "--listen", "127.0.0.1:0", "--device", "reference"])
        .stderr(Stdio::piped())
        .spawn()
        .expect("minnowd starts");
    let mut log = BufReader::new(child.stderr.take().expect("a pipe")).lines();
    let address = loop {
        let line = log.next().expect("a log line").expect("UTF-8");
        if let Some((_, address)) = line.split_once("listening on http://") {
            break address.trim().to_owned();
        }
    };
    std::thread::spawn(move || log.for_each(drop));
    let agent = ureq::Agent::config_builder().http_status_as_error(false).build().new_agent();
    let ask = |path: &str| {
        let mut answer = agent.get(format!("http://{address}{path}")).call().expect("an answer");
        let body: Value = serde_json::from_str(&answer.body_mut().read_to_string().unwrap()).unwrap_or_default();
        (answer.status().as_u16(), body)
    };
    let mut seen_loading = 0;
    loop {
        let (status, body) = ask("/health");
        if status == 200 {
            assert_eq!(body["status"], "ok");
            break;
        }
        assert_eq!((status, &body["status"]), (503, &json!("loading")));
        let (status, body) = ask("/v1/models");
        assert!(status == 200 || body["error"]["code"] == "model_loading", "{status} {body}");
        assert_eq!(ask("/livez").0, 200, "the process serves");
        seen_loading += 1;
    }
    eprintln!("asked {seen_loading} times while loading");
    assert_eq!(ask("/v1/models").0, 200);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn defaults_that_props_show_can_be_sent_back() {
    let server = server();
    let params = server.get("/props").json()["default_generation_settings"]["params"].clone();
    let mut body = asking("Goodbye!", json!({}));
    for name in [
        "seed",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typ_p",
        "typical_p",
        "top_n_sigma",
        "repeat_penalty",
        "presence_penalty",
        "frequency_penalty",
        "dynatemp_range",
        "dry_multiplier",
        "mirostat",
        "max_tokens",
        "n_predict",
        "n_probs",
        "samplers",
        "grammar",
        "lora",
        "threshold",
        "editing_threshold",
        "steps",
        "max_post_steps",
        "max_steps_per_block",
        "xtc_probability",
    ] {
        assert!(params.get(name).is_some(), "{name}");
        body[name] = params[name].clone();
    }
    let answer = server.chat(&body);
    assert_eq!(answer["minnow"]["ignored_fields"], json!([]));
}

#[test]
fn a_folder_without_a_page_is_refused_before_anything_is_loaded() {
    let output = program::minnowd(&["serve", "--listen", "127.0.0.1:0", "--ui-dir", "/nonexistent"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        program::stderr(&output).contains("--ui-dir /nonexistent has no index.html"),
        "{}",
        program::stderr(&output)
    );
}
