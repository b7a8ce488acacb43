//! `/v1/responses`, the Responses API of OpenAI: events, fields, tools, formats; and that its prompt is chat's.

use std::collections::BTreeSet;
use std::io::{BufRead, Write};

use minnow_tests::program::{Reply, Server};
use serde_json::{Value, json};

use super::http::{CHAT, FREE_MAX, asking, assert_error, content, head, server, story};

pub(crate) const RESPONSES: &str = "/v1/responses";
const STORY: &str = "Tell me a story about a brave fox named Anna.";

fn asked(input: impl Into<Value>, more: Value) -> Value {
    let input: Value = input.into();
    let mut body = json!({"input": input, "temperature": 0, "seed": 7, "max_output_tokens": 96});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// A plain answer that must be a success.
fn plain(server: &Server, body: &Value) -> Value {
    let reply = server.post(RESPONSES, body);
    assert_eq!(reply.status, 200, "{body}: {}", reply.text());
    reply.json()
}

/// Events of a streamed request, numbers and order of the frame checked.
fn streamed(server: &Server, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let reply = server.post(RESPONSES, &body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let events = reply.named_events();
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    assert_eq!([&events[0]["type"], &events[1]["type"]], ["response.created", "response.in_progress"]);
    assert_eq!((&events[0]["response"]["output"], &events[0]["response"]["usage"]), (&json!([]), &Value::Null));
    events
}

fn of<'a>(events: &'a [Value], kind: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["type"] == format!("response.{kind}")).collect()
}

/// What does not depend on which of two requests it was: no ids, no times.
fn essence(response: &Value) -> Value {
    let mut response = response.clone();
    for item in response["output"].as_array_mut().unwrap() {
        (item["id"], item["call_id"]) = (json!(null), json!(null));
    }
    for name in ["id", "created_at", "completed_at", "timings", "minnow", "usage"] {
        response[name] = json!(null);
    }
    response
}

fn text_of(response: &Value) -> &str {
    response["output"][0]["content"][0]["text"].as_str().expect("a text")
}

fn weather() -> Value {
    json!({"type": "function", "name": "get_weather", "description": "Get the current weather for a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}})
}

#[test]
fn a_response_has_every_member_and_repeats_its_request() {
    let server = server();
    let more = json!({
        "instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u", "tools": [weather()], "tool_choice": "none",
        "parallel_tool_calls": false, "max_output_tokens": 4, "store": true, "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low"}, "truncation": "disabled", "service_tier": "flex", "top_logprobs": 0,
        "stream_options": {"include_obfuscation": false}, "prompt_cache_key": "k", "safety_identifier": "s",
    });
    let answer = plain(&server, &asked(STORY, more));
    let names: BTreeSet<&str> = answer.as_object().unwrap().keys().map(String::as_str).collect();
    let expected = "background completed_at created_at error id incomplete_details instructions max_output_tokens metadata \
        minnow model object output parallel_tool_calls previous_response_id reasoning service_tier status store temperature \
        text timings tool_choice tools top_p truncation usage user";
    assert_eq!(names, expected.split_whitespace().collect());
    for (name, value) in [
        ("object", json!("response")),
        ("instructions", json!("Be brief.")),
        ("metadata", json!({"a": "b"})),
        ("user", json!("u")),
        ("tool_choice", json!("none")),
        ("parallel_tool_calls", json!(false)),
        ("max_output_tokens", json!(4)),
        ("store", json!(false)),
        ("service_tier", json!("default")),
        ("reasoning", json!({"effort": null, "summary": null})),
        ("temperature", json!(0.0)),
        ("truncation", json!("disabled")),
        ("background", json!(false)),
        ("text", json!({"format": {"type": "text"}})),
        ("status", json!("incomplete")),
        ("incomplete_details", json!({"reason": "max_output_tokens"})),
        ("error", Value::Null),
        ("previous_response_id", Value::Null),
    ] {
        assert_eq!(answer[name], value, "{name}");
    }
    assert_eq!((&answer["tools"][0]["name"], &answer["tools"][0]["strict"]), (&json!("get_weather"), &json!(false)));
    assert!(answer["id"].as_str().unwrap().starts_with("resp_"));
    assert!(answer["output"][0]["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!((&answer["output"][0]["status"], &answer["usage"]["output_tokens"]), (&json!("incomplete"), &json!(4)));
    assert_eq!(answer["minnow"]["ignored_fields"], json!([]));
    assert_eq!(plain(&server, &asked("Goodbye!", json!({})))["status"], "completed");
}

#[test]
fn the_same_turns_get_the_answer_that_chat_gives() {
    let server = server();
    let tool = weather();
    let mut function = tool.clone();
    function.as_object_mut().unwrap().shift_remove("type");
    let arguments = "{\"city\": \"Mumbai\"}";
    let input = json!([
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "Is it raining "}, {"type": "input_text", "text": "in Mumbai?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "get_weather", "arguments": arguments, "status": "completed"},
        {"type": "function_call_output", "call_id": "a", "output": "{\"city\": \"Mumbai\", \"condition\": \"rain\"}"},
    ]);
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Is it raining in Mumbai?"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": "a", "content": "{\"city\": \"Mumbai\", \"condition\": \"rain\"}"},
    ]);
    let response = asked(input, json!({"instructions": "Be brief.", "tools": [tool]}));
    let chat = json!({"messages": messages, "tools": [{"type": "function", "function": function}],
        "temperature": 0, "seed": 7, "max_tokens": 96});
    let (response, counted) = (plain(&server, &response), server.post("/responses/input_tokens", &response));
    let chat = server.post(CHAT, &chat).json();
    assert_eq!(text_of(&response), content(&chat));
    assert_eq!(response["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
    assert_eq!(
        counted.json(),
        json!({"object": "response.input_tokens", "input_tokens": chat["usage"]["prompt_tokens"]})
    );
}

#[test]
fn a_streamed_response_is_told_event_for_event_and_equals_the_plain_one() {
    let server = server();
    for (input, limit) in [(STORY, 96), (STORY, 33), ("Goodbye!", 96), ("Goodbye!", 0)] {
        let body = asked(input, json!({ "max_output_tokens": limit }));
        let (events, answer) = (streamed(&server, &body), plain(&server, &body));
        let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        let without_deltas: Vec<&str> = kinds.iter().copied().filter(|kind| !kind.ends_with(".delta")).collect();
        let last = format!("response.{}", answer["status"].as_str().unwrap());
        assert_eq!(
            without_deltas,
            [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added",
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                &last
            ]
        );
        let joined: String =
            of(&events, "output_text.delta").iter().map(|event| event["delta"].as_str().unwrap()).collect();
        let end = &events.last().unwrap()["response"];
        assert_eq!((joined.as_str(), text_of(end)), (text_of(&answer), text_of(&answer)));
        assert_eq!(essence(end), essence(&answer));
        assert_eq!(end["usage"]["output_tokens"], answer["usage"]["output_tokens"]);
        let id = &end["output"][0]["id"];
        assert!(events[3..events.len() - 2].iter().all(|event| event["item_id"] == *id));
        assert_eq!(of(&events, "output_item.added")[0]["item"]["id"], *id);
    }
}

#[test]
fn calls_of_a_response_are_items_of_their_own() {
    let server = server();
    let body = asked("Is it raining in Mumbai?", json!({"tools": [weather()]}));
    for choice in [json!("auto"), json!("required"), json!({"type": "function", "name": "get_weather"})] {
        let mut body = body.clone();
        body["tool_choice"] = choice.clone();
        let (answer, events) = (plain(&server, &body), streamed(&server, &body));
        assert_eq!(answer["tool_choice"], choice);
        let [call] = answer["output"].as_array().unwrap().as_slice() else { panic!("{answer}") };
        assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("get_weather")));
        assert!(call["arguments"].as_str().unwrap().contains("Mumbai"), "{call}");
        assert_eq!((&answer["status"], &call["status"]), (&json!("completed"), &json!("completed")));
        assert_eq!(essence(&events.last().unwrap()["response"]), essence(&answer));
        let deltas = of(&events, "function_call_arguments.delta");
        let joined: String = deltas.iter().map(|event| event["delta"].as_str().unwrap()).collect();
        let done = of(&events, "function_call_arguments.done");
        assert_eq!((joined.as_str(), &done[0]["name"]), (call["arguments"].as_str().unwrap(), &json!("get_weather")));
        assert_eq!(done[0]["arguments"], joined);
        assert_eq!(of(&events, "output_item.done")[0]["item"]["id"], done[0]["item_id"]);
        assert!(!json!(events).to_string().contains("<|"), "no marker is text");
        // The output can be sent back as it is.
        let mut items = json!([{"role": "user", "content": "Is it raining in Mumbai?"}, call]);
        let result =
            json!({"type": "function_call_output", "call_id": call["call_id"], "output": "{\"condition\": \"rain\"}"});
        items.as_array_mut().unwrap().push(result);
        let next = plain(&server, &asked(items, json!({"tools": [weather()]})));
        assert_eq!(next["output"][0]["type"], "message");
    }
}

#[test]
fn a_format_holds_a_response() {
    let server = server();
    let schema = json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"],
        "additionalProperties": false});
    let format = json!({"type": "json_schema", "name": "person", "schema": schema, "strict": true});
    let answer = plain(&server, &asked("Who are you?", json!({"text": {"format": format}})));
    assert_eq!((&answer["text"]["format"], &answer["status"]), (&format, &json!("completed")));
    let value: Value = serde_json::from_str(text_of(&answer)).expect("JSON");
    assert!(value["name"].is_string() && value.as_object().unwrap().len() == 1, "{value}");
}

#[test]
fn progress_comes_only_when_it_is_asked_for() {
    let server = server();
    let body = |progress| {
        asked(
            "The sea is wide. ".repeat(40),
            json!({"return_progress": progress, "cache_prompt": false, "max_output_tokens": 2}),
        )
    };
    assert!(streamed(&server, &body(false)).iter().all(|event| event.get("prompt_progress").is_none()));
    let events = streamed(&server, &body(true));
    let told: Vec<&Value> = events.iter().filter_map(|event| event.get("prompt_progress")).collect();
    let last = told.last().expect("progress");
    assert_eq!(last["processed"], last["total"]);
    assert!(of(&events, "in_progress").len() > told.len());
}

#[test]
fn nothing_is_stored() {
    let server = server();
    let id = plain(&server, &asked("Goodbye!", json!({"store": true})))["id"].as_str().unwrap().to_owned();
    assert_error(&server.get(&format!("{RESPONSES}/{id}")), 404, "not_found", None);
    let delete = format!("DELETE {RESPONSES}/{id} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert_error(&server.raw(delete.as_bytes()), 404, "not_found", None);
    let next = asked("Hi", json!({ "previous_response_id": id }));
    assert_error(&server.post(RESPONSES, &next), 400, "unsupported_parameter", Some("previous_response_id"));
}

#[test]
fn a_client_of_a_response_that_goes_away_cancels_it_unless_it_is_in_a_conversation() {
    let server = Server::start(&[]);
    let body =
        |stream: bool| asked(STORY, json!({"stream": stream, "max_output_tokens": 1500, "threshold": 1})).to_string();
    let send = |more: &str, body: String| {
        let mut connection = server.connect();
        let head = head(RESPONSES, &format!("{more}Content-Length: {}", body.len()));
        connection.get_mut().write_all(&[head, body.into_bytes()].concat()).unwrap();
        connection
    };
    for is_stream in [true, false] {
        let connection = send("", body(is_stream));
        while server.get("/health").json()["active_requests"] == 0 {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        drop(connection);
        server.wait_idle(FREE_MAX);
    }
    let mut connection = send("X-Conversation-Id: r1\r\n", asked("Goodbye!", json!({"stream": true})).to_string());
    let mut line = String::new();
    connection.read_line(&mut line).unwrap();
    assert!(line.contains("200"), "{line}");
    drop(connection);
    let replayed = server.get("/v1/stream?conv_id=r1&from=0");
    let events = replayed.named_events();
    assert_eq!(events.last().unwrap()["type"], "response.completed");
    assert_eq!(text_of(&events.last().unwrap()["response"]), "Goodbye! Have a nice day.");
}

/// A field, a value that is taken, what it changes, and values that are refused with code and path.
type Row = (&'static str, Value, fn(&Value) -> bool, Vec<(Value, &'static str, &'static str)>);

const ANY: fn(&Value) -> bool = |_| true;

fn setting(answer: &Value, name: &str) -> Value {
    answer["minnow"]["generation_settings"][name].clone()
}

fn row(
    field: &'static str,
    value: Value,
    is_there: fn(&Value) -> bool,
    refused: Vec<(Value, &'static str, &'static str)>,
) -> Row {
    (field, value, is_there, refused)
}

fn rows() -> Vec<Row> {
    let (kind, value, unsupported) = ("invalid_type", "invalid_value", "unsupported_parameter");
    let missing = "missing_required_parameter";
    let flag = |field| row(field, json!(false), ANY, vec![(json!("x"), kind, field)]);
    let null =
        |field| row(field, Value::Null, ANY, vec![(json!("x"), unsupported, field), (json!({}), unsupported, field)]);
    let inert = |field| row(field, json!({"any": ["thing", 1, null]}), ANY, Vec::new());
    let item = |item: Value| json!([item]);
    vec![
        row(
            "model",
            json!(""),
            |answer| answer["model"] != "",
            vec![(json!(5), kind, "model"), (json!("no"), "model_not_found", "model")],
        ),
        row(
            "input",
            json!([{"role": "user", "content": "Hi"}]),
            |answer| answer["status"] == "completed" || answer["status"] == "incomplete",
            vec![
                (Value::Null, missing, "input"),
                (json!([]), value, "input"),
                (json!(5), kind, "input"),
                (item(json!({"type": "nonsense"})), value, "input[0].type"),
                (item(json!({"type": "item_reference", "id": "msg_1"})), "unsupported_value", "input[0].type"),
                (
                    item(json!({"role": "user", "content": [{"type": "input_image"}]})),
                    "unsupported_content",
                    "input[0].content[0].type",
                ),
                (
                    item(json!({"type": "function_call_output", "call_id": "a", "output": "x"})),
                    "invalid_tool_history",
                    "input[0].call_id",
                ),
            ],
        ),
        row(
            "instructions",
            json!("I"),
            |answer| answer["instructions"] == "I",
            vec![(json!([]), kind, "instructions")],
        ),
        row(
            "max_output_tokens",
            json!(3),
            |answer| answer["usage"]["output_tokens"] == 3,
            vec![(json!(-2), value, "max_output_tokens"), (json!("9"), kind, "max_output_tokens")],
        ),
        row("temperature", json!(0.5), |answer| answer["temperature"] == 0.5, vec![(json!(2.1), value, "temperature")]),
        row("top_p", json!(0.25), |answer| answer["top_p"] == 0.25, vec![(json!(1.5), value, "top_p")]),
        row("seed", json!(9), |answer| setting(answer, "seed") == 9, vec![(json!(-2), value, "seed")]),
        row("stop", json!(["\u{2603}"]), ANY, vec![(json!(""), value, "stop"), (json!(5), kind, "stop")]),
        flag("stream"),
        row(
            "tools",
            json!([weather()]),
            |answer| answer["tools"][0]["name"] == "get_weather",
            vec![
                (json!("x"), kind, "tools"),
                (json!([{"type": "web_search"}]), value, "tools[0].type"),
                (json!([{"type": "function", "name": "no name"}]), value, "tools[0].name"),
                (
                    json!([{"type": "function", "name": "a", "strict": true, "parameters": {"not": {}}}]),
                    "unsupported_value",
                    "tools[0].parameters.not",
                ),
            ],
        ),
        row(
            "tool_choice",
            json!("none"),
            |answer| answer["tool_choice"] == "none",
            vec![
                (json!("required"), value, "tool_choice"),
                (json!({"type": "function"}), missing, "tool_choice.name"),
                (json!({"type": "allowed_tools", "mode": "any"}), value, "tool_choice.mode"),
            ],
        ),
        flag("parallel_tool_calls"),
        row(
            "text",
            json!({"format": {"type": "text"}, "verbosity": "low"}),
            ANY,
            vec![
                (json!("x"), kind, "text"),
                (json!({"format": {"type": "yaml"}}), value, "text.format.type"),
                (json!({"format": {"type": "json_schema", "name": "a"}}), missing, "text.format.schema"),
                (
                    json!({"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}),
                    "unsupported_value",
                    "text.format.schema.not",
                ),
            ],
        ),
        row(
            "metadata",
            json!({"a": "b"}),
            |answer| answer["metadata"]["a"] == "b",
            vec![(json!("x"), kind, "metadata")],
        ),
        row("user", json!("u"), |answer| answer["user"] == "u", vec![(json!(5), kind, "user")]),
        row(
            "include",
            json!(["message.output_text.logprobs"]),
            ANY,
            vec![(json!(["everything"]), value, "include[0]"), (json!("x"), kind, "include")],
        ),
        flag("cache_prompt"),
        flag("return_progress"),
        row("sse_ping_interval", json!(5), ANY, vec![(json!(-2), value, "sse_ping_interval")]),
        row(
            "preset",
            json!("quality"),
            |answer| setting(answer, "threshold") == 0.7,
            vec![(json!("best"), value, "preset")],
        ),
        row(
            "threshold",
            json!(0.25),
            |answer| setting(answer, "threshold") == 0.25,
            vec![(json!(2), value, "threshold")],
        ),
        row(
            "editing_threshold",
            json!(0.25),
            |answer| setting(answer, "editing_threshold") == 0.25,
            vec![(json!(-1), value, "editing_threshold")],
        ),
        row("steps", json!(7), |answer| setting(answer, "steps") == 7, vec![(json!(0), value, "steps")]),
        row(
            "max_steps_per_block",
            json!(7),
            |answer| setting(answer, "max_steps_per_block") == 7,
            vec![(json!(0), value, "max_steps_per_block")],
        ),
        row(
            "max_post_steps",
            json!(7),
            |answer| setting(answer, "max_post_steps") == 7,
            vec![(json!(-1), value, "max_post_steps")],
        ),
        row(
            "minnow",
            json!({"steps": 5}),
            |answer| setting(answer, "steps") == 5,
            vec![(json!({"frob": 1}), "unknown_parameter", "minnow.frob")],
        ),
        row("top_logprobs", json!(0), ANY, vec![(json!(3), unsupported, "top_logprobs")]),
        row("background", json!(false), ANY, vec![(json!(true), unsupported, "background")]),
        row("truncation", json!("disabled"), ANY, vec![(json!("auto"), unsupported, "truncation")]),
        null("previous_response_id"),
        null("conversation"),
        null("prompt"),
        null("max_tool_calls"),
        inert("store"),
        inert("service_tier"),
        inert("safety_identifier"),
        inert("prompt_cache_key"),
        inert("prompt_cache_retention"),
        inert("reasoning"),
        inert("stream_options"),
    ]
}

#[test]
fn every_field_of_a_response_is_honoured_refused_or_without_effect() {
    let server = server();
    for (field, value, is_there, refused) in rows() {
        let body = |value: &Value| asked("Goodbye!", json!({"max_output_tokens": 3, field: value}));
        if field != "input" || !value.is_null() {
            let answer = plain(&server, &body(&value));
            assert!(is_there(&answer), "{field}: {answer}");
            assert_eq!(answer["minnow"]["ignored_fields"], json!([]), "{field}");
        }
        for (value, code, param) in refused {
            let status = if code == "model_not_found" { 404 } else { 400 };
            assert_error(&server.post(RESPONSES, &body(&value)), status, code, Some(param));
            // A stream is refused before it begins.
            let mut body = body(&value);
            if field != "stream" {
                body["stream"] = json!(true);
            }
            assert_error(&server.post(RESPONSES, &body), status, code, Some(param));
        }
    }
    let more = json!({"max_output_tokens": 1, "frobnicate": 1, "n": 2, "input": [{"role": "user", "content": "x", "frob": 1}]});
    let answer = plain(&server, &asked("x", more));
    assert_eq!(answer["minnow"]["ignored_fields"], json!(["frobnicate", "n", "input[0].frob"]));
}

/// Names and fates in a table of `docs/api.md`, without the fields that one is sent to from there.
pub(crate) fn documented(mark: &str) -> BTreeSet<String> {
    let path = minnow_tests::golden::root().join("../docs/api.md");
    let text = std::fs::read_to_string(path).unwrap();
    let table =
        text.split(&format!("<!-- {mark} -->")).nth(1).and_then(|rest| rest.split("<!-- end of").next()).unwrap();
    let rows = table.lines().skip(3).filter(|line| line.starts_with('|'));
    let names = rows.flat_map(|line| line.split('|').nth(1).unwrap().trim().split(", "));
    names.map(|name| name.trim_matches('`').to_owned()).collect()
}

/// Properties of a schema in `/openapi.json`.
pub(crate) fn promised(server: &Server, schema: &str) -> BTreeSet<String> {
    let document = server.get("/openapi.json").json();
    let properties = document["components"]["schemas"][schema]["properties"].as_object().unwrap().clone();
    properties.into_iter().map(|(name, _)| name).collect()
}

#[test]
fn documents_and_schema_name_the_fields_of_a_response() {
    let tested: BTreeSet<String> = rows().into_iter().map(|(field, ..)| field.to_owned()).collect();
    assert_eq!(documented("fields of responses"), tested);
    assert_eq!(promised(&server(), "ResponsesRequest"), tested);
}

/// D11: elsewhere a request for log probabilities took its neighbours down.
#[test]
fn a_request_for_log_probabilities_does_not_harm_the_one_beside_it() {
    let server = server();
    let alone = server.post(CHAT, &story(json!({}))).json();
    let beside: Vec<(Reply, Reply)> = std::thread::scope(|scope| {
        let pairs: Vec<_> = (0..4)
            .map(|_| {
                let plain = scope.spawn(|| server.post(CHAT, &story(json!({}))));
                let asking = scope.spawn(|| server.post(CHAT, &story(json!({"logprobs": true, "top_logprobs": 5}))));
                (plain, asking)
            })
            .collect();
        pairs.into_iter().map(|(plain, asking)| (plain.join().unwrap(), asking.join().unwrap())).collect()
    });
    for (plain, asking) in beside {
        assert_eq!(plain.json()["choices"], alone["choices"]);
        assert_error(&asking, 400, "unsupported_parameter", Some("logprobs"));
    }
    let reply = server.post(RESPONSES, &asked("x", json!({"top_logprobs": 5})));
    assert_error(&reply, 400, "unsupported_parameter", Some("top_logprobs"));
    assert_eq!(content(&server.post(CHAT, &asking("Goodbye!", json!({}))).json()), "Goodbye! Have a nice day.");
}
