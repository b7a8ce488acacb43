//! Many clients at once against the real program, well-behaved and otherwise, in all dialects, with tools and schemas,
//! with SIGHUP now and then: at the end nothing is held, memory has not grown, and every answer that was completed is the
//! one its request gets alone.
//!
//! Twenty seconds by default, or longer on a machine that is slow to warm up; `MINNOW_SOAK_SECONDS` says how long.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use minnow_common::random::keyed;
use minnow_tests::program::{Reply, Server};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const CLIENTS: usize = 64;
/// Requests that clients send, and what each gets alone.
const QUESTIONS: u64 = 24;
/// Requests for the model after which every thread, buffer and arena of the allocator has been used under load. A count
/// and not a time, since a busy machine warms up slowly; refusals, which such a machine has many of, use none of that.
const WARM_UP: usize = 500;
/// Growth of resident memory, pages of the cache left out, after the warm-up or the first third, whichever is later:
/// what the allocator may keep.
const GROWTH_MAX: f64 = 0.10;

/// How often the server is told to read its keys and certificates again, at least.
const HANG_UP: Duration = Duration::from_secs(60);

/// Question `index`: greedy or sampled, short or long, some with a long beginning in common, some with tools, some held
/// to a schema.
fn question(index: u64) -> Value {
    let texts =
        ["Tell me a story about a brave fox named Anna.", "What is the capital of France?", "Compute 55 + 525."];
    let mut messages = vec![json!({"role": "user", "content": texts[index as usize % 3]})];
    if index.is_multiple_of(2) {
        let system = "You are a helpful assistant. Answer in full sentences, and never make anything up. ".repeat(2);
        messages.insert(0, json!({"role": "system", "content": system}));
    }
    let mut body = json!({"messages": messages, "max_tokens": 24 + 16 * (index % 4), "seed": index});
    body["temperature"] = json!(if index % 4 < 2 { 0.0 } else { 0.8 });
    if index.is_multiple_of(5) {
        let city = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
        body["tools"] = json!([{"type": "function", "function": {"name": "get_weather", "parameters": city}}]);
    } else if index.is_multiple_of(7) {
        let schema = json!({"type": "object", "properties": {"animal": {"enum": ["fox", "owl"]}, "age": {"type": "integer"}},
            "required": ["animal", "age"], "additionalProperties": false});
        body["response_format"] = json!({"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}});
    }
    body
}

/// Whether a question can be asked in the same words in every dialect: greedy, without tools and schemas.
fn is_plain(body: &Value) -> bool {
    body["temperature"] == 0.0 && body.get("tools").is_none() && body.get("response_format").is_none()
}

/// The question for `/v1/responses`.
fn as_responses(body: &Value) -> Value {
    json!({"input": body["messages"], "max_output_tokens": body["max_tokens"], "temperature": 0})
}

/// The question for `/v1/messages`.
fn as_messages(body: &Value) -> Value {
    let (system, messages): (Vec<_>, Vec<_>) =
        body["messages"].as_array().into_iter().flatten().partition(|message| message["role"] == "system");
    let mut asked = json!({"model": "any", "messages": messages, "max_tokens": body["max_tokens"], "temperature": 0});
    if let Some(system) = system.first() {
        asked["system"] = system["content"].clone();
    }
    asked
}

/// The text of an answer in another dialect; `None` if it is a stream whose end is missing.
fn text_in_dialect(reply: &Reply, is_stream: bool) -> Option<String> {
    let join = |texts: &mut dyn Iterator<Item = &Value>| texts.filter_map(Value::as_str).collect();
    if !is_stream {
        let answer = reply.json();
        let parts = answer.pointer("/output/0/content").or(answer.get("content"))?.as_array()?;
        return Some(join(&mut parts.iter().map(|part| &part["text"])));
    }
    let events = reply.named_events();
    let ends = ["response.completed", "response.incomplete", "message_stop"];
    ends.contains(&events.last()?["type"].as_str()?).then_some(())?;
    let deltas = events.iter().filter_map(|event| event.get("delta"));
    Some(join(&mut deltas.filter_map(|delta| if delta.is_string() { Some(delta) } else { delta.get("text") })))
}

/// What an answer says: content, names and arguments of calls, and why it ended.
type Said = (String, Vec<(String, String)>, String);

fn said(answer: &Value) -> Said {
    let choice = &answer["choices"][0];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let calls = choice["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
    let calls = calls.iter().map(|call| (text(&call["function"]["name"]), text(&call["function"]["arguments"])));
    (text(&choice["message"]["content"]), calls.collect(), text(&choice["finish_reason"]))
}

/// The same from a stream; `None` if it was not completed.
fn said_in_stream(events: &[String]) -> Option<Said> {
    let (done, chunks) = events.split_last()?;
    let (mut content, mut calls, mut reason) = (String::new(), Vec::<(String, String)>::new(), None);
    for chunk in chunks {
        let chunk: Value = serde_json::from_str(chunk).expect("a JSON chunk");
        let choice = &chunk["choices"][0];
        content.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            if let Some(name) = call["function"]["name"].as_str() {
                calls.push((name.to_owned(), String::new()));
            }
            if let (Some(last), Some(piece)) = (calls.last_mut(), call["function"]["arguments"].as_str()) {
                last.1.push_str(piece);
            }
        }
        reason = reason.or_else(|| choice["finish_reason"].as_str().map(str::to_owned));
    }
    (done == "[DONE]").then_some((content, calls, reason?))
}

fn request(body: &str) -> Vec<u8> {
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body.as_bytes()].concat()
}

/// What all clients have seen.
#[derive(Default)]
struct Seen {
    completed: AtomicUsize,
    refused: AtomicUsize,
    aborted: AtomicUsize,
    bad: AtomicUsize,
}

impl Seen {
    /// Completed, refused, aborted and bad requests so far.
    fn counts(&self) -> [usize; 4] {
        [&self.completed, &self.refused, &self.aborted, &self.bad].map(|count| count.load(Ordering::Relaxed))
    }

    /// Requests for the model that have ended, in whatever way.
    fn worked(&self) -> usize {
        let [completed, _, aborted, _] = self.counts();
        completed + aborted
    }
}

/// One client's life: each time at random one of the things that clients do.
fn client(server: &Server, number: u64, alone: &[Said], seen: &Seen, stop: &AtomicBool) {
    let count = |counter: &AtomicUsize| counter.fetch_add(1, Ordering::Relaxed);
    for turn in 0.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let roll = |what: u64, limit: u64| keyed(number, &[turn, what]) % limit;
        let index = roll(0, QUESTIONS);
        let mut body = question(index);
        let expected = &alone[index as usize];
        let check = |reply: &Reply, found: Option<Said>| match reply.status {
            200 => {
                assert_eq!(found.as_ref(), Some(expected), "client {number}, turn {turn}, question {index}");
                count(&seen.completed);
            }
            429 => {
                assert!(reply.header("retry-after").is_some(), "{}", reply.text());
                count(&seen.refused);
                std::thread::sleep(Duration::from_millis(20 + roll(9, 100)));
            }
            status => panic!("status {status}: {}", reply.text()),
        };
        match roll(1, 10) {
            kind @ (8 | 9) if is_plain(&body) => {
                let (path, mut body) = if kind == 8 {
                    ("/v1/responses", as_responses(&body))
                } else {
                    ("/v1/messages", as_messages(&body))
                };
                let is_stream = roll(8, 2) == 0;
                body["stream"] = json!(is_stream);
                let reply = server.post(path, &body);
                let text = (reply.status == 200).then(|| text_in_dialect(&reply, is_stream)).flatten();
                check(&reply, text.map(|text| (text, expected.1.clone(), expected.2.clone())));
            }
            2 | 3 => {
                body["stream"] = json!(true);
                let reply = server.post(CHAT, &body);
                let found = (reply.status == 200).then(|| said_in_stream(&reply.events())).flatten();
                check(&reply, found);
            }
            // A slow reader, who gets everything in the end.
            4 => {
                body["stream"] = json!(true);
                body["timings_per_token"] = json!(true);
                let mut connection = server.connect();
                connection.get_mut().write_all(&request(&body.to_string())).expect("a listening server");
                std::thread::sleep(Duration::from_millis(roll(2, 1500)));
                let reply = Reply::read(&mut connection);
                let found = (reply.status == 200).then(|| said_in_stream(&reply.events())).flatten();
                check(&reply, found);
            }
            // Gone at any point: before the head is read, in the queue, while reading, in the middle of a stream.
            5 | 6 => {
                body["stream"] = json!(roll(3, 2) == 0);
                body["max_tokens"] = json!(400);
                let mut connection = server.connect();
                let bytes = request(&body.to_string());
                let sent = if roll(4, 8) == 0 { bytes.len() / 2 } else { bytes.len() };
                connection.get_mut().write_all(&bytes[..sent]).expect("a listening server");
                std::thread::sleep(Duration::from_millis(roll(5, 400)));
                if roll(6, 2) == 0 && sent == bytes.len() {
                    let _ = connection.read(&mut [0; 64]);
                }
                count(&seen.aborted);
            }
            7 => {
                let bad = [
                    json!({"messages": "not a list"}),
                    json!({"messages": [], "max_tokens": -7}),
                    json!({"messages": [{"role": "user", "content": "x"}], "temperature": 9}),
                    json!({"messages": [{"role": "user", "content": "word ".repeat(4000)}]}),
                ];
                let reply = server.post(CHAT, &bad[roll(7, 4) as usize]);
                assert_eq!(reply.status, 400, "{}", reply.text());
                assert!(reply.json()["error"]["message"].is_string());
                count(&seen.bad);
            }
            _ => {
                let reply = server.post(CHAT, &body);
                let found = (reply.status == 200).then(|| said(&reply.json()));
                check(&reply, found);
            }
        }
    }
}

/// A sample of `/metrics`.
fn metric(server: &Server, name: &str) -> f64 {
    let page = server.get("/metrics");
    let line = page.text().lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name}"));
    line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
}

fn soak_time() -> Duration {
    let seconds = std::env::var("MINNOW_SOAK_SECONDS").ok().map(|text| text.parse().expect("MINNOW_SOAK_SECONDS"));
    Duration::from_secs(seconds.unwrap_or(20))
}

#[test]
fn clients_of_all_kinds_leave_the_server_as_they_found_it() {
    // Few pages for so many: requests give way and cached blocks make room.
    let options = ["--parallel", "12", "--queue-capacity", "40", "--max-context", "1024", "--cache-max-mib", "40"];
    let server = Server::start(&options);
    let alone: Vec<Said> = (0..QUESTIONS)
        .map(|index| {
            let mut body = question(index);
            body["cache_prompt"] = json!(false);
            let reply = server.post(CHAT, &body);
            assert_eq!(reply.status, 200, "{}", reply.text());
            said(&reply.json())
        })
        .collect();
    let (seen, stop) = (Seen::default(), AtomicBool::new(false));
    let started = Instant::now();
    let (mut resident, mut hung_up) = (Vec::new(), started);
    std::thread::scope(|scope| {
        for number in 0..CLIENTS as u64 {
            let (server, alone, seen, stop) = (&server, &alone, &seen, &stop);
            scope.spawn(move || client(server, number, alone, seen, stop));
        }
        while started.elapsed() < soak_time() || seen.worked() < 2 * WARM_UP {
            std::thread::sleep((soak_time() / 40).min(Duration::from_secs(5)));
            if hung_up.elapsed() >= HANG_UP.min(soak_time() / 4) {
                server.hang_up();
                hung_up = Instant::now();
            }
            // Pages of the cache become resident when they are first used, up to its budget; that is no growth.
            let pages = metric(&server, "minnow_kv_bytes{state=\"used\"}");
            let beside = metric(&server, "process_resident_memory_bytes") - pages;
            resident.push((seen.worked(), beside));
        }
        stop.store(true, Ordering::Relaxed);
    });
    server.wait_idle(Duration::from_secs(60));
    let counts = seen.counts();
    let settled = WARM_UP.max(seen.worked() / 3);
    let (_, early) = *resident.iter().find(|(worked, _)| *worked >= settled).expect("samples after the warm-up");
    let (_, late) = *resident.last().expect("samples");
    eprintln!(
        "{:?}: {} completed, {} refused, {} aborted, {} bad; resident beside pages {:.1} MiB once warm, {:.1} MiB at the end",
        started.elapsed(),
        counts[0],
        counts[1],
        counts[2],
        counts[3],
        early / 1048576.0,
        late / 1048576.0
    );
    assert!(counts[0] > 0 && counts[2] > 0 && counts[3] > 0, "all kinds of clients were there");
    assert_eq!(metric(&server, "minnow_kv_bytes{state=\"reserved\"}"), 0.0, "pages are in use and nothing runs");
    assert!(late <= early * (1.0 + GROWTH_MAX), "memory grew from {early} to {late} bytes");
    let last = server.post(CHAT, &question(1));
    assert_eq!(said(&last.json()), alone[1], "and it still answers");
}

#[test]
fn a_burst_beyond_the_queue_is_refused_at_once() {
    let server = Server::start(&["--parallel", "2", "--queue-capacity", "4"]);
    let (answered, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for number in 0..128u64 {
            let (server, answered, refused) = (&server, &answered, &refused);
            scope.spawn(move || {
                let reply = server.post(CHAT, &question(number % QUESTIONS));
                match reply.status {
                    200 => answered.fetch_add(1, Ordering::Relaxed),
                    429 | 503 => {
                        let seconds = reply.header("retry-after").and_then(|seconds| seconds.parse::<u32>().ok());
                        assert!(seconds.is_some_and(|seconds| seconds >= 1), "{}", reply.text());
                        refused.fetch_add(1, Ordering::Relaxed)
                    }
                    status => panic!("status {status}: {}", reply.text()),
                }
            });
        }
    });
    let (answered, refused) = (answered.load(Ordering::Relaxed), refused.load(Ordering::Relaxed));
    assert_eq!(answered + refused, 128);
    assert!(answered >= 6, "{answered} answered: as many as run and wait");
    server.wait_idle(Duration::from_secs(30));
}
