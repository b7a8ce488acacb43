//! Two instances behind a real HAProxy with the configuration of `docs/operating/haproxy.cfg`: what affinity keeps of the
//! prefix cache, and what clients notice of an instance that dies.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use minnow_tests::daemon::{Daemon, ask, request, wait_until};
use minnow_tests::golden;
use minnow_tests::program::Reply;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::http::{CHAT, content};

const CONVERSATIONS: usize = 8;
const TURNS: usize = 4;

/// HAProxy, ended on drop. Its log is shown if the test fails: only there it says why it refused.
struct Proxy {
    child: Child,
    log: PathBuf,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(&self.log).unwrap_or_default());
        }
    }
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The conversations, turn after turn. Gives the prompt tokens that were cached, all prompt tokens, and the texts.
fn talk(address: SocketAddr, salt: &str) -> (u64, u64, Vec<String>) {
    let (mut cached, mut all, mut texts) = (0, 0, Vec::new());
    let system = "You answer in one short sentence. ".repeat(6);
    let mut histories: Vec<Vec<Value>> =
        (0..CONVERSATIONS).map(|_| vec![json!({"role": "system", "content": system})]).collect();
    for turn in 0..TURNS {
        for (number, history) in histories.iter_mut().enumerate() {
            let question = format!("{salt} {number}: {} What is {turn} plus {number}?", "The sea is wide. ".repeat(12));
            history.push(json!({"role": "user", "content": question}));
            let body = json!({"messages": history, "temperature": 0, "max_tokens": 16}).to_string();
            let affinity = format!("X-Session-Affinity: {salt}-{number}");
            let reply = ask(address, &request("POST", CHAT, &[&affinity], &body));
            assert_eq!(reply.status, 200, "{}", reply.text());
            let answer = reply.json();
            cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
            all += answer["usage"]["prompt_tokens"].as_u64().unwrap();
            texts.push(content(&answer).to_owned());
            history.push(json!({"role": "assistant", "content": content(&answer)}));
        }
    }
    (cached, all, texts)
}

/// A request whose answer is a stream of seconds from an instance with `--step-delay-ms 10`.
fn long_stream(affinity: &str) -> Vec<u8> {
    let body = json!({"messages": [{"role": "user", "content": "Go on."}], "stream": true, "max_tokens": 2000,
        "minnow": {"regex": "[a-z ]{1500}"}});
    request("POST", CHAT, &[&format!("X-Session-Affinity: {affinity}")], &body.to_string())
}

/// A [`long_stream`] by the proxy at `address` that this instance has begun. Others are given up.
fn stream_of(instance: &Daemon, address: SocketAddr) -> BufReader<TcpStream> {
    let metrics = request("GET", "/metrics", &[], "");
    for number in 0..64 {
        let mut stream = TcpStream::connect(address).expect("the proxy");
        stream.write_all(&long_stream(&format!("stream-{number}"))).expect("the proxy");
        let mut stream = BufReader::new(stream);
        assert!(!stream.fill_buf().expect("an answer").is_empty(), "no answer");
        if ask(instance.address(), &metrics).text().contains("minnow_active_requests 1") {
            return stream;
        }
    }
    panic!("all streams went to the other one");
}

/// Asserts that a stream has its end.
fn assert_whole(reply: &Reply) {
    let events = reply.events();
    let [.., last, done] = events.as_slice() else { panic!("{events:?}") };
    assert!(last.contains(r#""finish_reason":"stop""#) && done == "[DONE]", "{last} {done}");
}

#[test]
fn affinity_keeps_the_prefix_cache_and_no_new_request_fails_when_an_instance_dies() {
    if Command::new("haproxy").arg("-v").stdout(Stdio::null()).status().is_err() {
        assert!(std::env::var_os("CI").is_none(), "HAProxy is needed here: apt-get install haproxy");
        eprintln!("skipped: there is no haproxy");
        return;
    }
    let alone = Daemon::start(&[]);
    let (single, all, expected) = talk(alone.ready(), "a");
    drop(alone);

    // The first is slow enough for an answer to outlast what the proxy needs to see that it drains.
    let instances = [Daemon::start(&["--step-delay-ms", "10", "--drain-timeout", "300"]), Daemon::start(&[])];
    let [one, two] = [0, 1].map(|index: usize| instances[index].ready().to_string());
    let port = free_port();
    let config = std::fs::read_to_string(golden::root().join("../docs/operating/haproxy.cfg")).unwrap();
    let config = config.replace("127.0.0.1:8000", &format!("127.0.0.1:{port}"));
    let config = config.replace("127.0.0.1:8081", &one).replace("127.0.0.1:8082", &two);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("haproxy.cfg");
    std::fs::write(&path, config).unwrap();
    let log = folder.path().join("log");
    let out = File::create(&log).unwrap();
    let err = out.try_clone().unwrap();
    let child = Command::new("haproxy").args(["-db", "-f"]).arg(&path).stdout(out).stderr(err).spawn().unwrap();
    let _proxy = Proxy { child, log };
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    wait_until("the proxy", || TcpStream::connect(address).ok());

    let (shared, _, texts) = talk(address, "a");
    println!("cached of {all} prompt tokens: {single} by one instance, {shared} by two behind the proxy");
    assert_eq!(texts, expected, "which instance answers changes nothing");
    assert!(shared * 10 >= single * 9, "{shared} of {single}");
    let answered = |daemon: &Daemon| daemon.log().matches(CHAT).count();
    let shares = instances.each_ref().map(answered);
    assert!(shares.iter().all(|&share| share >= TURNS), "one of them did nothing: {shares:?}");

    // A stream runs on the one that stays: HAProxy counts that as its whole share.
    let [survivor, mut dying] = instances;
    let mut staying = stream_of(&survivor, address);

    // One dies without a word. Whoever asks from now on is answered, from the first request on. (Until it is gone it accepts
    // connections that nobody will read.)
    dying.signal(Signal::KILL);
    dying.end();
    let (_, _, texts) = talk(address, "b");
    assert_eq!(texts.len(), CONVERSATIONS * TURNS);
    drop(dying);
    assert_whole(&Reply::read(&mut staying));

    // Nor does anyone notice one that drains and another that takes its place, not even who is being answered.
    let running = std::thread::spawn(move || ask(address, &long_stream("long")));
    let port: u16 = two.rsplit_once(':').unwrap().1.parse().unwrap();
    let mut command = Command::new(minnow_tests::program::path("minnowd"));
    command.args(["serve", "--listen", &format!("127.0.0.1:{port}")]);
    let replacement = Daemon::spawn(command);
    replacement.ready();
    // While it loads it answers these with 503, which do not count.
    let seen = |line: &&str| line.contains("/health") && line.contains("status=200");
    wait_until("the proxy to see it", || (replacement.log().lines().filter(seen).count() >= 2).then_some(()));
    survivor.signal(Signal::TERM);
    let (_, _, texts) = talk(address, "c");
    assert_eq!(texts.len(), CONVERSATIONS * TURNS);
    assert_whole(&running.join().expect("an answer"));
}
