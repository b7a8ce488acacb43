//! Answers that must have a form, over HTTP: whatever the model says, what ends by itself has it. With random weights and
//! with the demo model.

use minnow_tests::program::{Reply, Server};
use minnow_tests::{checkpoint, golden};
use serde_json::{Value, json};

use super::grammar::schemas;
use super::http::{Answers, CHAT, asking, assert_error, content, joined, scrape, server};

/// A server whose model knows nothing: random weights.
fn random_server() -> (Server, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    checkpoint::write("t16", 1, folder.path());
    let model = folder.path().to_str().expect("a UTF-8 path").to_owned();
    (Server::start(&["--model", &model, "--max-context", "1024"]), folder)
}

fn fits(schema: &Value) -> Value {
    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}})
}

fn tool(name: &str, parameters: &Value, is_strict: bool) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": parameters, "strict": is_strict}})
}

fn calls(answer: &Value) -> &[Value] {
    answer["choices"][0]["message"]["tool_calls"].as_array().map_or(&[], Vec::as_slice)
}

fn arguments(call: &Value) -> Value {
    let text = call["function"]["arguments"].as_str().expect("a string");
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// How many of `all` are asked in a short run.
fn share(all: usize, step: usize) -> impl Iterator<Item = usize> {
    let step = if std::env::var_os("MINNOW_LONG").is_some() { 1 } else { step };
    (0..all).step_by(step)
}

#[test]
fn every_finished_answer_of_random_weights_fits_its_schema() {
    let (server, _folder) = random_server();
    let schemas = schemas();
    let (mut finished, mut asked) = (0, 0);
    for index in share(schemas.len(), 7) {
        // Schemas of the request must be objects.
        let Some(schema) = Some(&schemas[index]).filter(|schema| schema.is_object()) else { continue };
        let validator = jsonschema::options().should_validate_formats(true).build(schema).unwrap();
        let temperature = [0.0, 1.0][index % 2];
        let mut body = asking("x", fits(schema));
        (body["temperature"], body["max_tokens"], body["seed"]) = (json!(temperature), json!(96), json!(index));
        let answer = server.chat(&body);
        asked += 1;
        let forwards = &answer["minnow"];
        assert_eq!(forwards["constrained_forwards"], forwards["denoise_forwards"], "{forwards}");
        if answer["choices"][0]["finish_reason"] == "stop" {
            finished += 1;
            let text = content(&answer);
            let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{schema}: {error}: {text}"));
            assert!(validator.is_valid(&value), "{schema}: {value}");
        } else {
            assert_eq!(answer["choices"][0]["finish_reason"], "length");
        }
        if index % 3 == 0 {
            assert_eq!(joined(&server.stream(CHAT, &body)), content(&answer), "{schema}");
        }
    }
    assert!(finished * 2 > asked, "only {finished} of {asked} answers ended by themselves");
}

#[test]
fn calls_of_random_weights_are_well_formed() {
    let (server, _folder) = random_server();
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string", "maxLength": 5},
        "days": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["city", "days"], "additionalProperties": false});
    let validator = jsonschema::validator_for(&parameters).unwrap();
    let tools = json!([tool("get_weather", &parameters, false), tool("get-time", &parameters, true)]);
    let named = json!({"type": "function", "function": {"name": "get-time"}});
    let allowed = json!({"type": "allowed_tools", "allowed_tools": {"mode": "required",
        "tools": [{"type": "function", "function": {"name": "get_weather"}}]}});
    let mut complete = 0;
    for seed in share(24, 4) {
        for (choice, names) in [
            (json!("required"), &["get_weather", "get-time"][..]),
            (named.clone(), &["get-time"]),
            (allowed.clone(), &["get_weather"]),
            (json!("auto"), &["get_weather", "get-time"]),
        ] {
            let more = json!({"tools": tools, "tool_choice": choice, "seed": seed, "temperature": 0.8, "max_tokens": 160,
                "parallel_tool_calls": seed % 8 == 0});
            let answer = server.chat(&asking("x", more));
            assert!(answer["minnow"].get("tool_parse_error").is_none(), "{answer}");
            let is_cut = answer["choices"][0]["finish_reason"] == "length";
            let calls = calls(&answer);
            for call in &calls[..calls.len() - usize::from(is_cut && !calls.is_empty())] {
                assert!(names.contains(&call["function"]["name"].as_str().unwrap()), "{call}");
                assert!(validator.is_valid(&arguments(call)), "{call}");
                complete += 1;
            }
            assert!(is_cut || choice == "auto" || !calls.is_empty(), "a demanded call is made: {answer}");
        }
    }
    assert!(complete > 6, "this test must see calls: {complete}");
}

#[test]
fn the_trained_model_answers_in_the_form_it_is_asked_for() {
    let server = server();
    let person = json!({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name"], "additionalProperties": {"type": "string"}});
    let object = json!({"response_format": {"type": "json_object"}});
    let asked = "Return JSON: name: Elena, job: waiter, city: Munich";
    for (question, format, name) in [
        (asked, object.clone(), Some("Elena")),
        (asked, fits(&person), Some("Elena")),
        (asked, json!({"response_format": {"type": "json_object", "schema": person}}), Some("Elena")),
        ("Compute 55 + 525.", object.clone(), None),
        (
            "Compute 55 + 525.",
            fits(&json!({"type": "object", "required": ["sum"], "additionalProperties": false,
            "properties": {"sum": {"type": "integer"}}})),
            None,
        ),
    ] {
        let mut body = asking(question, format);
        body["max_tokens"] = json!(256);
        let answer = server.chat(&body);
        let chunks = server.stream(CHAT, &body);
        assert_eq!(joined(&chunks), content(&answer));
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], answer["choices"][0]["finish_reason"]);
        if answer["choices"][0]["finish_reason"] == "stop" {
            let found: Value = serde_json::from_str(content(&answer)).unwrap();
            assert!(found.is_object());
            assert!(name.is_none_or(|name| found["name"] == name), "{found}");
        } else {
            assert!(name.is_none(), "{answer}");
        }
    }
    let free = server.chat(&asking(asked, json!({})));
    assert_eq!(free["minnow"]["constrained_forwards"], 0);
    let mut cut = asking("Compute 55 + 525.", object);
    cut["max_tokens"] = json!(3);
    let answer = server.chat(&cut);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(joined(&server.stream(CHAT, &cut)), content(&answer));
}

/// The questions of a task of the exam.
fn exam(task: &str) -> Vec<Value> {
    let all = golden::json_lines("golden/tiny/eval.jsonl");
    all.into_iter().filter(|question| question["task"] == task).collect()
}

#[test]
fn demanded_calls_of_the_exam_are_all_well_formed_and_right() {
    let server = server();
    for question in exam("tool_call") {
        let mut tools = question["tools"].as_array().unwrap().clone();
        tools.iter_mut().for_each(|tool| tool["function"]["strict"] = json!(true));
        let mut body = asking("", json!({"tools": tools, "tool_choice": "required", "max_tokens": 200}));
        body["messages"] = question["messages"].clone();
        let answer = server.chat(&body);
        assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls", "{question}: {answer}");
        for call in calls(&answer) {
            let tool = tools.iter().find(|tool| tool["function"]["name"] == call["function"]["name"]).unwrap();
            let validator = jsonschema::validator_for(&tool["function"]["parameters"]).unwrap();
            assert!(validator.is_valid(&arguments(call)), "{call}");
        }
        let expected = question["expected"].as_str().unwrap();
        let (name, rest) = expected.split_once("functions.").and_then(|(_, rest)| rest.split_once(':')).unwrap();
        let (_, rest) = rest.split_once("<|tool_call_argument_begin|>").unwrap();
        let wanted: Value = serde_json::from_str(rest.split_once("<|tool_call_end|>").unwrap().0).unwrap();
        assert_eq!(calls(&answer)[0]["function"]["name"], name, "{answer}");
        assert_eq!(arguments(&calls(&answer)[0]), wanted, "{answer}");
    }
}

#[test]
fn arguments_four_levels_deep_fit_their_strict_schema() {
    let (server, _folder) = random_server();
    let mut schema = json!({"type": "string", "enum": ["a", "b"]});
    for (level, name) in ["w", "x", "y", "z"].iter().enumerate() {
        let list = json!({"type": "array", "items": {"type": "boolean"}, "maxItems": level});
        schema = json!({"type": "object", "properties": {"in": schema, *name: list}, "required": ["in", name],
            "additionalProperties": false});
    }
    let validator = jsonschema::validator_for(&schema).unwrap();
    let mut finished = 0;
    for seed in share(50, 10) {
        let more = json!({"tools": [tool("nest", &schema, true)], "tool_choice": "required", "seed": seed,
            "temperature": 1.0, "max_tokens": 256});
        let answer = server.chat(&asking("x", more));
        if answer["choices"][0]["finish_reason"] == "tool_calls" {
            finished += 1;
            assert!(calls(&answer).iter().all(|call| validator.is_valid(&arguments(call))), "{answer}");
        }
    }
    assert!(finished > 0);
}

#[test]
fn what_cannot_be_enforced_is_refused_by_its_path() {
    let server = server();
    let inner = json!({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}});
    let path = "properties.a.uniqueItems";
    let post = |more: Value| server.post(CHAT, &asking("x", more));
    let refused = |reply: &Reply, param: &str| assert_error(reply, 400, "unsupported_value", Some(param));
    refused(&post(fits(&inner)), &format!("response_format.json_schema.schema.{path}"));
    refused(
        &post(json!({"response_format": {"type": "json_object", "schema": inner}})),
        &format!("response_format.schema.{path}"),
    );
    let strict = json!({"tools": [tool("a", &json!({}), false), tool("b", &inner, true)]});
    refused(&post(strict), &format!("tools[1].function.parameters.{path}"));
    // A tool that is not strict is none the less called, with any object, and the answer says so.
    let lenient = json!({"tools": [tool("b", &inner, false)], "tool_choice": "required", "max_tokens": 200});
    let answer = server.chat(&asking("x", lenient));
    assert_eq!(answer["minnow"]["unenforced_schemas"], json!(["b"]));
    assert!(arguments(&calls(&answer)[0]).is_object());

    for (schema, code) in [
        (json!({"type": "nothing"}), "invalid_value"),
        (json!({"$ref": "http://127.0.0.1:1/x"}), "invalid_value"),
        (json!({"$ref": "file:///etc/passwd"}), "invalid_value"),
        (json!({"allOf": [{"type": "string"}, {"type": "integer"}]}), "invalid_value"),
        (json!({"pattern": "(", "type": "string"}), "invalid_value"),
    ] {
        let reply = post(fits(&schema));
        assert_error(&reply, 400, code, Some("response_format.json_schema.schema"));
        let mut streamed = asking("x", fits(&schema));
        streamed["stream"] = json!(true);
        assert_error(&server.post(CHAT, &streamed), 400, code, Some("response_format.json_schema.schema"));
    }
    // Schemas that refer to themselves end, one way or the other.
    for circular in [
        json!({"$ref": "#"}),
        json!({"allOf": [{"$ref": "#"}]}),
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
    ] {
        let mut body = asking("x", fits(&circular));
        body["max_tokens"] = json!(8);
        assert!(matches!(server.post(CHAT, &body).status, 200 | 400), "{circular}");
    }
}

#[test]
fn a_loop_at_the_end_of_an_answer_is_told_and_counted() {
    let server = Server::start(&[]);
    let repeated = |answer: &Value| answer["minnow"]["repeated_tokens"].as_u64().unwrap_or_else(|| panic!("{answer}"));
    assert_eq!(repeated(&server.chat(&asking("Hello", json!({"max_tokens": 64})))), 0);
    let looping = json!({"minnow": {"regex": "go:( la){90}"}, "max_tokens": 300});
    let answer = server.chat(&asking("Hello", looping));
    assert_eq!(content(&answer), format!("go:{}", " la".repeat(90)));
    assert!((80..300).contains(&repeated(&answer)), "{answer}");
    assert_eq!(scrape(&server)["minnow_repetition_loops_total"], 1.0);
}

#[test]
fn a_clients_own_grammar_is_followed() {
    let server = server();
    let regex = json!({"minnow": {"regex": "[a-f]{3}-[0-9]{2}"}, "max_tokens": 64});
    let is_code = |text: &str| {
        let (letters, digits) = text.split_once('-').unwrap_or_else(|| panic!("{text}"));
        letters.len() == 3 && letters.bytes().all(|byte| (b'a'..=b'f').contains(&byte)) && digits.len() == 2
    };
    let answer = server.chat(&asking("Hello", regex.clone()));
    assert!(is_code(content(&answer)), "{answer}");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let mut body = regex;
    body["prompt"] = json!("Once upon a time");
    let reply = server.post("/v1/completions", &body);
    assert!(is_code(reply.json()["choices"][0]["text"].as_str().unwrap()), "{}", reply.text());

    let lark = json!({"minnow": {"grammar": "start: \"yes\" | \"no\" \" because \" /[a-z]{1,9}/", "threshold": 0.9}});
    let answer = server.chat(&asking("Is it raining?", lark));
    let text = content(&answer);
    assert!(text == "yes" || text.starts_with("no because "), "{text}");

    for (more, code, param) in [
        (json!({"minnow": {"regex": "("}}), "invalid_value", "minnow.regex"),
        (json!({"minnow": {"regex": 5}}), "invalid_type", "minnow.regex"),
        (json!({"minnow": {"grammar": "start: nowhere"}}), "invalid_value", "minnow.grammar"),
        (json!({"minnow": {"grammar": ""}}), "invalid_value", "minnow.grammar"),
        (json!({"minnow": {"grammar": "start: \"a\"", "regex": "a"}}), "unsupported_parameter", "minnow.grammar"),
        (
            json!({"minnow": {"regex": "a"}, "response_format": {"type": "json_object"}}),
            "unsupported_parameter",
            "minnow.regex",
        ),
        (
            json!({"minnow": {"regex": "a"}, "tools": [tool("a", &json!({}), false)]}),
            "unsupported_parameter",
            "minnow.regex",
        ),
    ] {
        assert_error(&server.post(CHAT, &asking("x", more)), 400, code, Some(param));
    }
    assert_eq!(server.post(CHAT, &asking("Hi", json!({"minnow": {"regex": "ok"}}))).status, 200, "it goes on");
}

#[test]
fn a_format_holds_where_no_call_is_made() {
    let server = server();
    let weather = json!({"type": "function", "function": {"name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}});
    for question in ["Is it raining in Mumbai?", "Compute 55 + 525."] {
        let more = json!({"tools": [weather], "response_format": {"type": "json_object"}, "max_tokens": 200});
        let answer = server.chat(&asking(question, more));
        match answer["choices"][0]["finish_reason"].as_str().unwrap() {
            "tool_calls" => assert!(arguments(&calls(&answer)[0])["city"].is_string(), "{answer}"),
            "stop" => assert!(serde_json::from_str::<Value>(content(&answer)).unwrap().is_object(), "{answer}"),
            reason => assert_eq!(reason, "length"),
        }
    }
}

#[test]
fn props_say_that_answers_are_constrained() {
    let capabilities = server().get("/props").json()["minnow"]["capabilities"].clone();
    assert_eq!(capabilities["response_format"], "constrained");
    assert_eq!(capabilities["strict_tools"], true);
    assert_eq!(capabilities["grammars"], json!(["regex", "lark"]));
}
