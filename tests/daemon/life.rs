//! The life of the process: what signals do, when it is ready, what a supervisor gives it and is told.

use std::io::{BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use minnow_tests::daemon::{Daemon, Told, ask, ask_over, request, wait_until};
use minnow_tests::program::{Reply, path};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::http::{CHAT, assert_error, story};

/// A story that takes long, on a connection of its own, running.
fn long_stream(daemon: &Daemon) -> BufReader<TcpStream> {
    let address = daemon.ready();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let body = story(json!({"stream": true, "max_tokens": 1900, "threshold": 1, "steps": 32})).to_string();
    stream.write_all(&request("POST", CHAT, &[], &body)).unwrap();
    wait_until("a running request", || {
        let health = ask(address, &request("GET", "/health", &[], "")).json();
        (health["active_requests"] == 1).then_some(())
    });
    BufReader::new(stream)
}

fn last_error(reply: &Reply) -> Value {
    let events = reply.events();
    let (done, events) = events.split_last().unwrap();
    assert_eq!(done, "[DONE]");
    serde_json::from_str::<Value>(events.last().unwrap()).unwrap()["error"].clone()
}

#[test]
fn the_second_signal_ends_at_once_with_its_code() {
    for (first, second, code) in
        [(Signal::INT, Signal::INT, 130), (Signal::TERM, Signal::TERM, 143), (Signal::INT, Signal::TERM, 143)]
    {
        let mut daemon = Daemon::start(&["--step-delay-ms", "50"]);
        let _stream = long_stream(&daemon);
        daemon.signal(first);
        daemon.wait_for("draining");
        let started = Instant::now();
        daemon.signal(second);
        assert_eq!(daemon.end().code(), Some(code));
        assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    }
}

#[test]
fn an_interrupt_drains_as_a_termination_does() {
    // Without the delay the story ends by itself after a second, and nothing is left to be cut off.
    let mut daemon = Daemon::start(&["--drain-timeout", "1", "--step-delay-ms", "50"]);
    let mut stream = long_stream(&daemon);
    daemon.signal(Signal::INT);
    let refused = wait_until("a refusal", || {
        let reply = ask(daemon.address(), &request("GET", "/health", &[], ""));
        (reply.status != 200).then_some(reply)
    });
    assert_error(&refused, 503, "draining", None);
    assert_eq!(last_error(&Reply::read(&mut stream))["code"], "draining");
    assert_eq!(daemon.end().code(), Some(0));
}

#[test]
fn a_drain_waits_for_running_requests_and_not_longer() {
    let mut daemon = Daemon::start(&["--drain-timeout", "100", "--step-delay-ms", "5"]);
    let address = daemon.ready();
    let mut stream = TcpStream::connect(address).unwrap();
    let body = story(json!({"max_tokens": 64, "threshold": 1, "steps": 32})).to_string();
    stream.write_all(&request("POST", CHAT, &[], &body)).unwrap();
    wait_until("a running request", || {
        (ask(address, &request("GET", "/health", &[], "")).json()["active_requests"] == 1).then_some(())
    });
    let started = Instant::now();
    daemon.signal(Signal::TERM);
    let answer = Reply::read(&mut BufReader::new(stream)).json();
    assert_eq!(answer["usage"]["completion_tokens"], 64, "{answer}");
    assert_eq!(daemon.end().code(), Some(0));
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
}

#[test]
fn a_signal_while_the_model_loads_ends_within_a_second() {
    for signal in [Signal::INT, Signal::TERM] {
        let mut daemon = Daemon::start(&["--device", "reference"]);
        daemon.address();
        // Nothing but a reload: there is no model yet to be ready with.
        daemon.signal(Signal::HUP);
        let started = Instant::now();
        daemon.signal(signal);
        let status = daemon.end();
        assert!(started.elapsed() < Duration::from_secs(1), "{:?}: {}", started.elapsed(), daemon.log());
        // A machine so fast that it was ready before drained instead.
        assert!(matches!(status.code(), Some(130 | 143 | 0)) && status.signal().is_none(), "{status}");
    }
}

#[test]
fn a_failed_worker_ends_streams_with_an_error_and_the_process_with_code_70() {
    let mut daemon = Daemon::start(&["--fail-after-forwards", "40"]);
    let mut stream = long_stream(&daemon);
    let address = daemon.address();
    let reply = Reply::read(&mut stream);
    assert!(reply.events().len() > 3, "it was in the midst of it");
    assert_eq!(last_error(&reply)["code"], "worker_failed");
    // Until it is gone it says what it is; its end is not far.
    if let Ok(stream) = TcpStream::connect(address) {
        let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
        let health = std::panic::catch_unwind(|| ask_over(stream, &request("GET", "/health", &[], "")));
        assert!(health.is_err() || health.is_ok_and(|reply| reply.status == 503));
    }
    assert_eq!(daemon.end().code(), Some(70));
}

#[test]
fn a_socket_file_is_replaced_only_if_nobody_listens() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("minnowd.sock");
    let listen = format!("unix:{}", socket.display());
    // What a killed process leaves behind.
    drop(UnixListener::bind(&socket).unwrap());
    assert!(socket.exists());
    let mut daemon = Daemon::start(&["--listen", &listen, "--socket-mode", "0600"]);
    daemon.ready();
    let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&socket).unwrap());
    assert_eq!(mode & 0o777, 0o600);
    let second = minnow_tests::program::minnowd(&["serve", "--listen", &listen]);
    let message = minnow_tests::program::stderr(&second);
    assert!(second.status.code() == Some(1) && message.contains("another process listens"), "{message}");
    assert_eq!(ask_over(UnixStream::connect(&socket).unwrap(), &request("GET", "/health", &[], "")).status, 200);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.end().code(), Some(0));
    assert!(!socket.exists());
    std::fs::write(&socket, "a file").unwrap();
    let refused = minnow_tests::program::minnowd(&["serve", "--listen", &listen]);
    assert_eq!(refused.status.code(), Some(1));
    assert_eq!(std::fs::read(&socket).unwrap(), b"a file", "what is no socket is not removed");
}

#[test]
fn a_supervisor_is_told_of_each_phase() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("notify");
    let mut told = Told::at(&place);
    let mut command = Command::new(path("minnowd"));
    command.args(["serve", "--listen", "127.0.0.1:0", "--device", "reference", "--drain-timeout", "1"]);
    command.env("NOTIFY_SOCKET", &place).env("WATCHDOG_USEC", "3000000");
    let mut daemon = Daemon::spawn(command);
    daemon.address();
    wait_until("a sign of life", || (told.count("WATCHDOG=1") > 0).then_some(()));
    if !daemon.log().contains(" ready ") {
        assert_eq!(told.count("READY=1"), 0, "the sockets are there, the model is not");
    }
    assert!(told.count("STATUS=loading") == 1 && told.count("EXTEND_TIMEOUT_USEC=") > 0, "{:?}", told.all());
    daemon.ready();
    wait_until("readiness", || (told.count("READY=1") == 1).then_some(()));
    assert_eq!(told.count("STATUS=serving "), 1);
    daemon.signal(Signal::HUP);
    wait_until("the end of a reload", || (told.count("READY=1") == 2).then_some(()));
    let reload = told.all().iter().find(|told| told.starts_with("RELOADING=1")).expect("its begin").clone();
    let monotonic = reload.lines().find_map(|line| line.strip_prefix("MONOTONIC_USEC=")).expect("a time");
    assert!(monotonic.parse::<u64>().is_ok_and(|time| time > 0), "{reload}");
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.end().code(), Some(0));
    assert_eq!(told.count("STOPPING=1"), 1);
    let order = |line: &str, told: &mut Told| told.all().iter().position(|told| told.contains(line)).expect("told");
    let [loading, ready, stopping] = ["STATUS=loading", "READY=1", "STOPPING=1"].map(|line| order(line, &mut told));
    assert!(loading < ready && ready < stopping, "{:?}", told.all());
}

#[test]
fn the_watchdog_is_fed_while_there_is_progress_and_not_while_a_forward_hangs() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("notify");
    let mut told = Told::at(&place);
    let mut command = Command::new(path("minnowd"));
    // One forward takes longer than the whole period of the watchdog.
    command.args(["serve", "--listen", "127.0.0.1:0", "--step-delay-ms", "2500"]);
    command.env("NOTIFY_SOCKET", &place).env("WATCHDOG_USEC", "900000");
    let daemon = Daemon::spawn(command);
    let address = daemon.ready();
    let (before, since) = (told.count("WATCHDOG=1"), Instant::now());
    std::thread::sleep(Duration::from_millis(1200));
    let idle = told.count("WATCHDOG=1") - before;
    // A loaded machine may be late, but not by much.
    assert!((2..=8).contains(&idle), "{idle} signs in {:?} without work", since.elapsed());
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(&request("POST", CHAT, &[], &story(json!({"max_tokens": 32})).to_string())).unwrap();
    daemon.wait_for("the inference worker makes no progress");
    let hanging = told.count("WATCHDOG=1");
    std::thread::sleep(Duration::from_millis(900));
    assert!(told.count("WATCHDOG=1") <= hanging + 1, "{:?}", told.all());
    assert_eq!(ask(address, &request("GET", "/livez", &[], "")).status, 200, "the other side is not what hangs");
}

/// `minnowd serve` with two sockets from its supervisor: a shell moves them to where they belong.
fn handed(first: OwnedFd, second: OwnedFd, listen: &[&str]) -> Command {
    let script = "exec 3<&0 4<&1 </dev/null >/dev/null; export LISTEN_PID=$$; exec \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh"]).arg(path("minnowd")).arg("serve").args(listen);
    command.env("LISTEN_FDS", "2").env("LISTEN_FDNAMES", "web:local");
    command.stdin(Stdio::from(first)).stdout(Stdio::from(second));
    command
}

#[test]
fn sockets_of_a_supervisor_are_served_by_name_and_stay_when_the_process_ends() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("handed.sock");
    let (tcp, unix) = (TcpListener::bind("127.0.0.1:0").unwrap(), UnixListener::bind(&socket).unwrap());
    let address = tcp.local_addr().unwrap();
    let sockets = || (tcp.try_clone().unwrap().into(), unix.try_clone().unwrap().into());

    let (web, local) = sockets();
    let mut daemon = Daemon::spawn(handed(web, local, &["--listen", "systemd"]));
    daemon.wait_for(" ready ");
    assert_eq!(ask(address, &request("GET", "/health", &[], "")).status, 200);
    assert_eq!(ask_over(UnixStream::connect(&socket).unwrap(), &request("GET", "/health", &[], "")).status, 200);
    let environment = std::fs::read(format!("/proc/{}/environ", daemon.id())).unwrap();
    assert!(environment.windows(10).any(|part| part == b"LISTEN_FDS"), "the shell did hand them over");
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.end().code(), Some(0));
    assert!(socket.exists(), "the file is the supervisor's");

    let (web, local) = sockets();
    let daemon = Daemon::spawn(handed(web, local, &["--listen", "systemd:local"]));
    daemon.wait_for(" ready ");
    daemon.wait_for("the socket web was handed over and is not listened on");
    assert_eq!(ask_over(UnixStream::connect(&socket).unwrap(), &request("GET", "/health", &[], "")).status, 200);
    drop(daemon);

    let (web, local) = sockets();
    let mut wrong = Daemon::spawn(handed(web, local, &["--listen", "systemd:other"]));
    assert_eq!(wrong.end().code(), Some(1));
    wrong.wait_for("--listen systemd:other: no such socket was handed over by a supervisor; there are: web, local");
    let alone = minnow_tests::program::minnowd(&["serve", "--listen", "systemd"]);
    let message = minnow_tests::program::stderr(&alone);
    assert!(alone.status.code() == Some(1) && message.contains("there are: none"), "{message}");
}

#[test]
fn a_handed_socket_that_others_reach_needs_what_any_such_address_needs() {
    let open = TcpListener::bind("0.0.0.0:0").unwrap();
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut daemon = Daemon::spawn(handed(open.into(), other.into(), &["--listen", "systemd:web"]));
    assert_eq!(daemon.end().code(), Some(2));
    daemon.wait_for("can be reached from other machines: add --tls-cert");
}

#[test]
fn dashboards_and_alerts_name_metrics_that_are_there() {
    let daemon = Daemon::start(&[]);
    let address = daemon.ready();
    let answer = ask(address, &request("POST", CHAT, &[], &story(json!({"max_tokens": 4})).to_string()));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let page = ask(address, &request("GET", "/metrics", &[], "")).text().to_owned();
    let names: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    let read = |name: &str| {
        std::fs::read_to_string(minnow_tests::golden::root().join("../docs/operating").join(name)).unwrap()
    };
    let dashboard: Value = serde_json::from_str(&read("grafana.json")).unwrap();
    assert!(dashboard["panels"].as_array().is_some_and(|panels| panels.len() > 10));
    let text = dashboard["panels"].to_string() + &read("alerts.yml");
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words = text
        .split(|c| !is_part(c))
        .filter(|word| word.starts_with("minnow_") || word.starts_with("llamacpp:") || word.starts_with("process_"));
    let mut seen = 0;
    for word in words {
        let name = word.strip_suffix("_bucket").unwrap_or(word);
        assert!(names.contains(&name), "{word} is no metric");
        seen += 1;
    }
    assert!(seen > 25, "{seen}");
}
