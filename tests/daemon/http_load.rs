//! What the HTTP side costs: CPU time beside the engine's while many streams run, memory for connections that idle.
//!
//! Both print what they found: `cargo test -p minnow-tests --test daemon http_load -- --nocapture`.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use minnow_tests::program::{Reply, Server};
use serde_json::json;

use super::http::{CHAT, head, story};

/// CPU time of a process's threads, in ticks: those of the HTTP side, and all others.
fn cpu_ticks(process: u32) -> (u64, u64) {
    let (mut http, mut others) = (0, 0);
    for thread in std::fs::read_dir(format!("/proc/{process}/task")).expect("a running process").flatten() {
        let Ok(stat) = std::fs::read_to_string(thread.path().join("stat")) else { continue };
        let (name, fields) = stat.split_once('(').and_then(|(_, rest)| rest.rsplit_once(')')).expect("a name");
        let times: u64 = fields.split_whitespace().skip(11).take(2).filter_map(|time| time.parse::<u64>().ok()).sum();
        *(if name == "http" { &mut http } else { &mut others }) += times;
    }
    (http, others)
}

fn resident_kib(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("a running process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a number");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

#[test]
fn the_http_side_takes_a_small_share_of_the_time_while_thirty_two_streams_run() {
    let mut server = Server::start(&["--parallel", "32", "--queue-capacity", "64"]);
    let process = server.child().id();
    let before = cpu_ticks(process);
    let more =
        json!({"stream": true, "max_tokens": 96, "threshold": 0.9, "timings_per_token": true, "cache_prompt": false});
    let body = story(more).to_string();
    let request = [head(CHAT, &format!("Content-Length: {}", body.len())), body.into_bytes()].concat();
    std::thread::scope(|scope| {
        for _ in 0..32 {
            scope.spawn(|| {
                let mut connection = server.connect();
                connection.get_mut().write_all(&request).unwrap();
                let reply = Reply::read(&mut connection);
                assert_eq!(reply.events().last().map(String::as_str), Some("[DONE]"));
            });
        }
    });
    let after = cpu_ticks(process);
    let (http, engine) = (after.0 - before.0, after.1 - before.1);
    println!("CPU time: HTTP {http} ticks, engine {engine} ticks, {:.2} %", 100.0 * http as f64 / engine as f64);
    assert!(engine > 50, "the engine must have worked for this to say anything");
    assert!(http * 10 < engine, "HTTP {http} ticks, engine {engine} ticks");
}

#[test]
fn a_thousand_idle_connections_cost_little_memory() {
    let mut server = Server::start(&[]);
    let process = server.child().id();
    for _ in 0..20 {
        assert_eq!(server.get("/health").status, 200);
    }
    let before = resident_kib(process);
    let ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let connections: Vec<TcpStream> = (0..1000)
        .map(|_| {
            let mut stream = TcpStream::connect(server.address()).expect("a listening server");
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            stream.write_all(ask).unwrap();
            let mut piece = [0; 1024];
            assert!(stream.read(&mut piece).unwrap() > 0);
            stream
        })
        .collect();
    let after = resident_kib(process);
    println!("1,000 idle connections: {} KiB", after.saturating_sub(before));
    assert!(after.saturating_sub(before) < 50 << 10, "{before} KiB before, {after} KiB after");
    assert_eq!(server.get("/health").status, 200);
    drop(connections);
}
