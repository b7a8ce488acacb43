//! What options of `minnowd serve` change for clients, and the pages and documents it serves beside the API.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use minnow_tests::program::{Reply, Server};
use serde_json::{Value, json};

use super::http::{Answers, CHAT, asking, assert_error, content, head, joined, scrape, server, story};
use super::http_messages::{COUNT_TOKENS, MESSAGES};
use super::http_responses::RESPONSES;

fn raw(server: &Server, method: &str, target: &str, headers: &[&str]) -> Reply {
    let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    server.raw(format!("{method} {target} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n").as_bytes())
}

#[test]
fn refinements_show_every_position_after_every_step_and_only_when_asked_for() {
    let server = server();
    for more in [json!({}), json!({"temperature": 0.8})] {
        let mut body = story(more);
        let silent = server.stream(CHAT, &body);
        assert!(silent.iter().all(|chunk| chunk["minnow"].get("refinement").is_none()));
        body["return_refinements"] = json!(true);
        let chunks = server.stream(CHAT, &body);
        assert_eq!(joined(&chunks), joined(&silent), "watching changes nothing");
        let steps: Vec<&Value> =
            chunks.iter().map(|chunk| &chunk["minnow"]["refinement"]).filter(|r| r.is_object()).collect();
        let last = chunks.last().unwrap();
        // Chunks are left out for slow readers only, and this one is not slow.
        assert_eq!(json!(steps.len()), last["minnow"]["denoise_forwards"]);
        let mut before = (0, 0);
        let mut shown = String::new();
        for step in &steps {
            let cells = step["cells"].as_array().unwrap();
            assert_eq!(cells.len(), 32);
            let (block, number) = (step["block"].as_u64().unwrap(), step["step"].as_u64().unwrap());
            assert!((block, number) == (before.0, before.1 + 1) || (block, number) == (before.0 + 1, 1));
            before = (block, number);
            for cell in cells {
                let change = cell["change"].as_str().unwrap();
                assert!(["given", "kept", "filled", "edited", "opened"].contains(&change), "{cell}");
                assert_eq!(cell["token"].is_null(), cell.get("id").is_none(), "{cell}");
                let confidence = cell.get("confidence").and_then(Value::as_f64);
                assert!(confidence.is_none_or(|confidence| (0.0..=1.0).contains(&confidence)), "{cell}");
            }
            if step["final"] == true {
                assert!(cells.iter().all(|cell| cell["token"].is_string()), "a settled block has no masks");
                let own = cells.iter().filter(|cell| cell["change"] != "given");
                shown.extend(own.map_while(|cell| cell["token"].as_str().filter(|_| cell.get("special").is_none())));
            }
        }
        assert!(shown.starts_with(&joined(&chunks)), "final cells are the text:\n{shown}\n{}", joined(&chunks));
        let mut plain = body.clone();
        plain["stream"] = json!(false);
        assert!(server.chat(&plain)["minnow"].get("refinement").is_none());
    }
}

#[test]
fn the_own_page_is_one_file_that_may_load_nothing_else() {
    let server = server();
    let page = server.get("/");
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    assert_eq!(page.header("cache-control"), Some("no-cache"));
    assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
    assert!(page.header("content-security-policy").unwrap().starts_with("default-src 'none';"));
    assert!(
        !page.text().contains("http://") || page.text().matches("http://").all(|_| page.text().contains("www.w3.org"))
    );
    assert_eq!(server.get("/index.html").body, page.body);
    let tag = format!("If-None-Match: {}", page.header("etag").unwrap());
    let again = raw(&server, "GET", "/", &[&tag]);
    assert_eq!((again.status, again.body.len()), (304, 0));
    let worker = server.get("/sw.js");
    assert_eq!(worker.header("content-type"), Some("text/javascript; charset=utf-8"));
    assert!(worker.text().contains("unregister"));
    assert_eq!(server.get("/props").json()["ui"], false);
}

/// What `shared/conformance` tries, and more.
const OUTSIDE: [&str; 12] = [
    "/../secret",
    "/%2e%2e/secret",
    "/..%2fsecret",
    "/_app/../../secret",
    "/_app/%2e%2e/%2e%2e/secret",
    "//etc/passwd",
    "/%00",
    "/index.html%00.png",
    "/link",
    "/linked/secret",
    "/..%5csecret",
    "/_app/",
];

#[test]
fn files_of_a_web_ui_are_served_and_nothing_outside_its_folder() {
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("secret"), "root: secret").unwrap();
    let folder = outside.path().join("ui");
    std::fs::create_dir_all(folder.join("_app/immutable")).unwrap();
    for (name, text) in [
        ("index.html", "<script src=\"_app/immutable/bundle.x.js\"></script>"),
        ("_app/immutable/bundle.x.js", "plain"),
        ("_app/immutable/bundle.x.js.gz", "packed"),
        ("_app/version.json", "{}"),
        ("sw.js", "self"),
        ("manifest.webmanifest", "{}"),
        ("favicon.svg", "<svg/>"),
        ("favicon.ico", "i"),
        ("health", "a file must not stand before a route"),
    ] {
        std::fs::write(folder.join(name), text).unwrap();
    }
    std::os::unix::fs::symlink(outside.path().join("secret"), folder.join("link")).unwrap();
    std::os::unix::fs::symlink(outside.path(), folder.join("linked")).unwrap();
    let server = Server::start(&["--ui-dir", folder.to_str().unwrap()]);
    let index = server.get("/");
    assert!(index.text().contains("bundle"));
    assert_eq!(index.header("cross-origin-opener-policy"), Some("same-origin"));
    assert_eq!(index.header("cross-origin-embedder-policy"), Some("require-corp"));
    assert_eq!(index.header("cache-control"), Some("no-cache"));
    let bundle = raw(&server, "GET", "/_app/immutable/bundle.x.js", &[]);
    assert_eq!((bundle.text(), bundle.header("content-encoding")), ("plain", None));
    assert_eq!(bundle.header("cache-control"), Some("public, max-age=31536000, immutable"));
    let packed = raw(&server, "GET", "/_app/immutable/bundle.x.js", &["Accept-Encoding: br, gzip"]);
    assert_eq!((packed.text(), packed.header("content-encoding")), ("packed", Some("gzip")));
    assert_eq!(
        (packed.header("vary"), packed.header("content-type")),
        (Some("Accept-Encoding"), Some("text/javascript; charset=utf-8"))
    );
    for (path, kind) in [
        ("/_app/version.json", "application/json"),
        ("/sw.js", "text/javascript; charset=utf-8"),
        ("/manifest.webmanifest", "application/manifest+json"),
        ("/favicon.svg", "image/svg+xml"),
        ("/favicon.ico", "image/x-icon"),
    ] {
        let file = server.get(path);
        assert_eq!((file.status, file.header("content-type")), (200, Some(kind)), "{path}");
        assert_eq!(file.header("cache-control"), Some("no-cache"), "{path}");
        let tag = format!("If-None-Match: {}", file.header("etag").unwrap());
        assert_eq!(raw(&server, "GET", path, &[&tag]).status, 304, "{path}");
    }
    assert_eq!(server.get("/health").json()["status"], "ok");
    for path in OUTSIDE {
        let reply = raw(&server, "GET", path, &[]);
        assert!(matches!(reply.status, 400 | 404), "{path}: {}", reply.status);
        assert!(!String::from_utf8_lossy(&reply.body).contains("root:"), "{path}");
    }
    assert_error(&raw(&server, "POST", "/favicon.svg", &[]), 404, "not_found", None);
    assert_eq!(server.get("/props").json()["ui"], true);
}

#[test]
fn pages_of_other_origins_may_read_only_if_they_are_named() {
    let closed = server();
    let asks = ["Origin: https://evil.example", "Access-Control-Request-Method: POST"];
    let reply = raw(&closed, "OPTIONS", CHAT, &asks);
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (204, None));
    assert_eq!(raw(&closed, "GET", "/v1/models", &asks[..1]).header("access-control-allow-origin"), None);

    let open = Server::start(&["--cors-origin", "https://chat.example", "--cors-origin", "localhost"]);
    for origin in ["https://chat.example", "http://localhost:3000"] {
        let origin_header = format!("Origin: {origin}");
        let asks = [
            origin_header.as_str(),
            "Access-Control-Request-Method: DELETE",
            "Access-Control-Request-Headers: authorization,x-conversation-id",
        ];
        let reply = raw(&open, "OPTIONS", "/v1/stream?conv_id=x", &asks);
        assert_eq!((reply.status, reply.header("access-control-allow-origin")), (204, Some(origin)));
        assert_eq!(reply.header("access-control-allow-headers"), Some("authorization, x-conversation-id"));
        assert!(reply.header("access-control-allow-methods").unwrap().contains("DELETE"));
        for (method, path) in [("GET", "/v1/models"), ("GET", "/v1/nope")] {
            let reply = raw(&open, method, path, &[&origin_header]);
            assert_eq!(reply.header("access-control-allow-origin"), Some(origin));
            assert_eq!(reply.header("access-control-allow-credentials"), None);
            assert_eq!(reply.header("vary"), Some("Origin"));
            assert_eq!(reply.header("access-control-expose-headers"), Some("x-request-id, retry-after"));
        }
    }
    assert_eq!(
        raw(&open, "GET", "/health", &["Origin: https://evil.example"]).header("access-control-allow-origin"),
        None
    );
}

#[test]
fn everything_lies_below_the_prefix() {
    let server = Server::start(&["--api-prefix", "/minnow", "--no-slots", "--socket-mode", "600"]);
    let below = |path: &str| raw(&server, "GET", &format!("/minnow{path}"), &[]);
    assert_eq!(below("/health?x=1").status, 200);
    assert_eq!(below("/v1/models").json()["object"], "list");
    assert_eq!(below("/").header("content-type"), Some("text/html; charset=utf-8"));
    assert_eq!(below("/openapi.json").json()["servers"][0]["url"], "/minnow");
    assert_error(&below("/slots"), 501, "not_supported", None);
    assert_eq!(below("/props").json()["endpoint_slots"], false);
    for path in ["/v1/models", "/", "/minnowx/health", "/minnow"] {
        assert_error(&raw(&server, "GET", path, &[]), 404, "not_found", None);
    }
    assert_eq!(server.post("/minnow/tokenize", &json!({"content": "a"})).status, 200);
}

#[test]
fn sockets_and_connections_are_bounded_as_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("minnowd.sock");
    let listen = format!("unix:{}", path.display());
    let _server = Server::start(&["--listen", &listen, "--socket-mode", "0600", "--max-connections", "3"]);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    // One more is the harness's own.
    let mut two: Vec<BufReader<UnixStream>> =
        (0..2).map(|_| BufReader::new(UnixStream::connect(&path).unwrap())).collect();
    let ask = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut third = BufReader::new(UnixStream::connect(&path).unwrap());
    third.get_mut().write_all(ask).unwrap();
    third.get_mut().set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert!(third.fill_buf().is_err(), "a third connection waits");
    two.clear();
    third.get_mut().set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    assert_eq!(Reply::read(&mut third).status, 200);
}

#[test]
fn resumable_streams_stay_within_the_limits_that_props_tell() {
    let limits = [
        "--stream-max-bytes",
        "3000",
        "--stream-max-sessions",
        "2",
        "--stream-total-bytes",
        "9000",
        "--stream-keep",
        "1",
    ];
    let server = Server::start(&limits);
    let told = server.get("/props").json()["minnow"]["limits"].clone();
    assert_eq!((&told["stream_max_bytes"], &told["stream_max_sessions"]), (&json!(3000), &json!(2)));
    assert_eq!((&told["stream_total_bytes"], &told["stream_keep_seconds"]), (&json!(9000), &json!(1)));
    for id in ["a", "b", "c"] {
        // Many small events, so that their reader keeps up with what is dropped behind it.
        let body = asking("Goodbye!", json!({"stream": true, "timings_per_token": true, "threshold": 1})).to_string();
        let more = format!("X-Conversation-Id: {id}\r\nContent-Length: {}", body.len());
        let sent = server.raw(&[head(CHAT, &more), body.into_bytes()].concat());
        assert!(sent.body.len() > 3000);
    }
    let found = server.post("/v1/streams/lookup", &json!({"conversation_ids": ["a", "b", "c"]})).json();
    let ids: Vec<&str> =
        found.as_array().unwrap().iter().filter_map(|found| found["conversation_id"].as_str()).collect();
    assert_eq!(ids, ["b", "c"], "the oldest made room");
    assert_error(&server.get("/v1/stream?conv_id=c&from=0"), 400, "stream_offset_lost", Some("from"));
    let samples = scrape(&server);
    assert!(samples["minnow_stream_session_bytes"] <= 9000.0 && samples["minnow_stream_sessions"] == 2.0);
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(server.post("/v1/streams/lookup", &json!({"conversation_ids": ["b", "c"]})).json(), json!([]));
}

#[test]
fn a_silent_stream_is_kept_alive_by_comments() {
    let server = Server::start(&["--step-delay-ms", "1300"]);
    let pings = |interval: i64| {
        let body =
            asking("Goodbye!", json!({"stream": true, "sse_ping_interval": interval, "max_tokens": 8})).to_string();
        let reply = server.raw(&[head(CHAT, &format!("Content-Length: {}", body.len())), body.into_bytes()].concat());
        assert_eq!(reply.events().last().map(String::as_str), Some("[DONE]"));
        reply.text().split("\n\n").filter(|event| *event == ":").count()
    };
    assert!(pings(1) >= 1);
    assert_eq!(pings(-1), 0);
}

#[test]
fn headers_of_a_stream_come_before_its_prompt_is_read() {
    let server = Server::start(&["--step-delay-ms", "700"]);
    let body = asking(&"The sea is wide. ".repeat(60), json!({"stream": true, "max_tokens": 1})).to_string();
    let mut connection = server.connect();
    let started = Instant::now();
    connection
        .get_mut()
        .write_all(&[head(CHAT, &format!("Content-Length: {}", body.len())), body.into_bytes()].concat())
        .unwrap();
    let mut line = String::new();
    connection.read_line(&mut line).unwrap();
    let waited = started.elapsed();
    assert!(line.starts_with("HTTP/1.1 200"), "{line}");
    let mut rest = Vec::new();
    let mut piece = [0; 4096];
    while !String::from_utf8_lossy(&rest).contains("[DONE]") {
        let read = connection.read(&mut piece).unwrap();
        assert!(read > 0);
        rest.extend_from_slice(&piece[..read]);
    }
    assert!(waited < started.elapsed() / 2, "headers after {waited:?} of {:?}", started.elapsed());
}

#[test]
fn the_sizes_of_batches_are_counted() {
    let server = Server::start(&[]);
    server.chat(&story(json!({})));
    let samples = scrape(&server);
    assert_eq!(samples["minnow_batch_size_bucket{le=\"1\"}"], samples["minnow_batch_size_count"]);
    assert_eq!(samples["minnow_batch_size_bucket{le=\"256\"}"], samples["minnow_batch_size_sum"]);
}

#[test]
fn allowed_tools_are_the_ones_the_model_sees() {
    let server = server();
    let tool = |name: &str| {
        json!({"type": "function", "function": {"name": name, "description": "Get the current weather for a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}})
    };
    let ask = |tools: Value, choice: Value| {
        let body = asking("Is it raining in Mumbai?", json!({"tools": tools, "tool_choice": choice, "max_tokens": 64}));
        server.post(CHAT, &body)
    };
    let both = json!([tool("get_weather"), tool("get_forecast")]);
    let allowed = |mode: &str, name: &str| {
        let tools = json!([{"type": "function", "function": {"name": name}}]);
        json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}})
    };
    let narrowed = ask(both.clone(), allowed("auto", "get_weather"));
    let alone = ask(json!([tool("get_weather")]), json!("auto"));
    assert_eq!(narrowed.json()["usage"]["prompt_tokens"], alone.json()["usage"]["prompt_tokens"]);
    let required = ask(both.clone(), allowed("required", "get_forecast")).json();
    assert_eq!(required["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "get_forecast");
    assert_error(&ask(both, allowed("auto", "other")), 400, "invalid_value", Some("tool_choice"));
}

#[test]
fn real_answers_have_the_form_that_openapi_json_promises() {
    let server = server();
    let document = server.get("/openapi.json").json();
    assert_eq!(document["openapi"], "3.1.0");
    let chat = asking("Goodbye!", json!({}));
    let tool = json!({"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}});
    let call = asking("Is it raining in Mumbai?", json!({"tools": [tool], "tool_choice": "required"}));
    let id = server.get("/v1/models").json()["data"][0]["id"].as_str().unwrap().to_owned();
    let posts = [
        (CHAT, CHAT, chat.clone()),
        (CHAT, CHAT, call),
        (CHAT, CHAT, asking("Goodbye!", json!({"n": 2}))),
        (CHAT, CHAT, asking("Goodbye!", json!({"minnow": {"regex": "("}}))),
        (CHAT, CHAT, json!({})),
        ("/v1/chat/completions/input_tokens", "/v1/chat/completions/input_tokens", chat.clone()),
        ("/v1/completions", "/v1/completions", json!({"prompt": "Good", "max_tokens": 4})),
        (RESPONSES, RESPONSES, json!({"input": "Goodbye!", "max_output_tokens": 4})),
        (RESPONSES, RESPONSES, json!({"input": 5})),
        ("/v1/responses/input_tokens", "/v1/responses/input_tokens", json!({"input": "Goodbye!"})),
        (MESSAGES, MESSAGES, chat.clone()),
        (MESSAGES, MESSAGES, json!({})),
        (COUNT_TOKENS, COUNT_TOKENS, chat.clone()),
        ("/tokenize", "/tokenize", json!({"content": "a b", "with_pieces": true})),
        ("/detokenize", "/detokenize", json!({"tokens": [5, 6]})),
        ("/apply-template", "/apply-template", chat),
        ("/v1/streams/lookup", "/v1/streams/lookup", json!({"conversation_ids": ["a"]})),
        ("/v1/chat/completions/control", "/v1/chat/completions/control", json!({"id": "a", "action": "reasoning_end"})),
    ];
    let gets = ["/health", "/v1/models", "/slots", "/livez"].map(|path| (path, path.to_owned()));
    let one = [("/v1/models/{id}", format!("/v1/models/{id}")), ("/v1/models/{id}", "/v1/models/no".to_owned())];
    let mut answers: Vec<(String, Reply)> =
        posts.iter().map(|(route, path, body)| (format!("{}/post", escaped(route)), server.post(path, body))).collect();
    answers.extend(
        gets.into_iter().chain(one).map(|(route, path)| (format!("{}/get", escaped(route)), server.get(&path))),
    );
    for (route, reply) in answers {
        let pointer = format!("/paths/{route}/responses/{}/content/application~1json/schema", reply.status);
        let schema =
            document.pointer(&pointer).unwrap_or_else(|| panic!("{pointer} is not promised: {}", reply.text()));
        let mut whole = schema.clone();
        whole["components"] = document["components"].clone();
        let validator = jsonschema::options().with_draft(jsonschema::Draft::Draft202012).build(&whole).unwrap();
        let answer = reply.json();
        let faults: Vec<String> =
            validator.iter_errors(&answer).map(|fault| format!("{}: {fault}", fault.instance_path())).collect();
        assert!(faults.is_empty(), "{route}: {faults:?} in {answer}");
    }
    // What is promised is served, and nothing that is only refused is promised.
    for (path, item) in document["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys() {
            let target = path.replace("{id}", &id);
            let reply = raw(&server, &method.to_uppercase(), &target, &["Content-Length: 0"]);
            assert!(!matches!(reply.status, 403 | 405 | 501), "{method} {path}: {}", reply.status);
            assert!(reply.status != 404 || path == "/v1/stream", "{method} {path}");
        }
    }
    assert_eq!(content(&server.chat(&asking("Goodbye!", json!({})))), "Goodbye! Have a nice day.");
}

/// A path as a part of a JSON pointer.
fn escaped(path: &str) -> String {
    path.replace('/', "~1")
}
