//! `mnwtool` and a hub: what is fetched and sent, what happens when the hub or the way to it is bad, and who learns the
//! token.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use minnow_common::random::mix64;
use minnow_common::{Encoding, FloatType, ModelConfig, TensorSpec, inventory};
use minnow_formats::digest::Digest;
use minnow_formats::mnw;
use minnow_tests::hub::{FakeHub, Fault, SIGNATURE, Seen};
use minnow_tests::program::{self, stderr, stdout};
use minnow_tests::{checkpoint, golden};
use serde_json::Value;

use crate::mnwtool::{Scratch, done, on_small_disk, sha256};

const REPO: &str = "someone/tiny-mnw";
const TOKEN: &str = "hf_tokenThatNobodyMaySee";

/// The embedded demo model: 17.7 MiB, three pieces of a pull and five parts of a push.
fn demo() -> PathBuf {
    golden::root().join("../minnowd/src/demo/minnow-tiny-int4.mnw")
}

/// `mnwtool` as it runs with this hub and nobody's settings.
fn command(hub: &FakeHub, home: &Scratch, arguments: &[&str]) -> Command {
    let mut command = Command::new(program::path("mnwtool"));
    for name in ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "XDG_CACHE_HOME", "HTTP_PROXY", "http_proxy", "ALL_PROXY"]
    {
        command.env_remove(name);
    }
    command.env("HF_HOME", home.path("hf")).env("HF_ENDPOINT", hub.endpoint()).args(arguments);
    command
}

fn run(hub: &FakeHub, home: &Scratch, arguments: &[&str]) -> Output {
    command(hub, home, arguments).output().expect("mnwtool starts")
}

fn run_done(hub: &FakeHub, home: &Scratch, arguments: &[&str]) -> Value {
    let output = run(hub, home, &[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", stdout(&output)))
}

/// Expects failure, and all of `words` in the last line on standard error.
fn run_refused(hub: &FakeHub, home: &Scratch, arguments: &[&str], words: &[&str]) -> String {
    let output = run(hub, home, arguments);
    let messages = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {messages}");
    let last = messages.lines().last().unwrap_or_default();
    for word in words {
        assert!(last.contains(word), "{arguments:?}: no {word:?} in {messages}");
    }
    messages
}

/// Names in a folder, hidden ones too.
fn names(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}

/// A hub with the demo model and a small file.
fn demo_hub() -> FakeHub {
    let hub = FakeHub::new();
    hub.put(REPO, "tiny.mnw", &demo());
    hub.put_text(REPO, "README.md", "# tiny\n");
    hub.put_text(REPO, ".gitattributes", "*.mnw filter=lfs\n");
    hub
}

/// So many bytes that are like no others.
fn noise(path: &Path, mib: u64) {
    let mut file = std::fs::File::create(path).expect("a writable folder");
    for block in 0..mib * 16 {
        let bytes: Vec<u8> = (0..8192).flat_map(|index| mix64(block * 8192 + index).to_le_bytes()).collect();
        file.write_all(&bytes).expect("a writable folder");
    }
}

fn is_content(seen: &Seen, method: &str) -> bool {
    seen.is_content && seen.method == method
}

#[test]
fn a_file_is_pulled_in_pieces_validated_and_found_again() {
    let (hub, scratch) = (demo_hub(), Scratch::new());
    let to = scratch.text("to");
    let report = run_done(&hub, &scratch, &["pull", REPO, "tiny.mnw", "--to", &to]);
    let target = scratch.path("to/tiny.mnw");
    assert_eq!(sha256(&target), sha256(&demo()));
    assert_eq!(report["files"][0]["sha256"], sha256(&demo()));
    assert_eq!(names(&scratch.path("to")), BTreeSet::from(["tiny.mnw".to_owned()]));
    let ranges: BTreeSet<String> =
        hub.seen().iter().filter(|seen| is_content(seen, "GET")).map(|seen| seen.headers["range"].clone()).collect();
    assert_eq!(ranges.len(), 3, "{ranges:?}");

    // Again: it is there, and nothing is fetched.
    hub.forget();
    let report = run_done(&hub, &scratch, &["pull", REPO, "tiny.mnw", "--to", &to]);
    assert_eq!((&report["fetched_bytes"], &report["files"][0]["fetched_bytes"]), (&0.into(), &0.into()));
    assert!(!hub.seen().iter().any(|seen| seen.is_content));

    // Another file of that name stays unless it is to be replaced.
    std::fs::write(&target, "mine").expect("a writable folder");
    run_refused(&hub, &scratch, &["pull", REPO, "tiny.mnw", "--to", &to], &["tiny.mnw", "already exists", "--force"]);
    assert_eq!(std::fs::read(&target).expect("a file"), b"mine");
    run_done(&hub, &scratch, &["pull", REPO, "tiny.mnw", "--to", &to, "--force"]);
    assert_eq!(sha256(&target), sha256(&demo()));
}

#[test]
fn a_whole_repository_is_pulled_with_all_pages_of_its_listing() {
    let (hub, scratch) = (demo_hub(), Scratch::new());
    hub.put_text(REPO, "folder/a b.txt", "spaces");
    hub.put_text(REPO, "empty.txt", "");
    let to = scratch.text("to");
    run_done(&hub, &scratch, &["pull", REPO, "--to", &to]);
    let expected = ["README.md", "empty.txt", "folder", "tiny.mnw"].map(str::to_owned);
    assert_eq!(names(&scratch.path("to")), BTreeSet::from(expected));
    assert_eq!(std::fs::read(scratch.path("to/folder/a b.txt")).expect("a file"), b"spaces");
    assert_eq!(std::fs::read(scratch.path("to/empty.txt")).expect("a file"), b"");

    // An old commit, and a name that the repository had before.
    hub.rename("old/name", REPO);
    let old = scratch.text("old");
    run_done(&hub, &scratch, &["pull", "old/name", "README.md", "--to", &old]);
    assert_eq!(std::fs::read(scratch.path("old/README.md")).expect("a file"), b"# tiny\n");
}

#[test]
fn paths_that_lead_out_of_the_folder_are_refused() {
    for path in ["../evil.txt", "/etc/evil.txt", "a/../../evil.txt", "a\u{1b}[2J"] {
        let (hub, scratch) = (FakeHub::new(), Scratch::new());
        hub.put_text(REPO, path, "evil");
        run_refused(&hub, &scratch, &["pull", REPO, "--to", &scratch.text("to")], &["is no path in a repository"]);
        assert_eq!(scratch.left_besides(&[]), [""; 0], "{path}");
    }
}

/// How much is moved in the tests with cuts: a gigabyte takes a while, and is done with `MINNOW_HUB_MIB=1024`.
fn mib() -> u64 {
    std::env::var("MINNOW_HUB_MIB").ok().and_then(|text| text.parse().ok()).unwrap_or(64)
}

/// Cuts fifty requests that move content, each after a random number of bytes, one in ten after everything was done. Of
/// those that send, which start anew each time, every second one, so that pauses do not grow.
fn cut_fifty(hub: &FakeHub, method: &'static str) -> Arc<AtomicU64> {
    let count = Arc::new(AtomicU64::new(0));
    let cuts = Arc::clone(&count);
    let requests = AtomicU64::new(0);
    hub.go_wrong(move |seen| {
        if !is_content(seen, method) || cuts.load(Ordering::Relaxed) >= 50 {
            return None;
        }
        if method == "PUT" && requests.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
            return None;
        }
        let number = cuts.fetch_add(1, Ordering::Relaxed);
        let random = mix64(number);
        Some(if random.is_multiple_of(10) { Fault::Mute } else { Fault::Cut(random % (1 << 20)) })
    });
    count
}

#[test]
fn fifty_cuts_change_no_byte_of_what_is_pulled() {
    let (hub, scratch) = (FakeHub::new(), Scratch::new());
    noise(&scratch.path("noise.safetensors"), mib());
    hub.put(REPO, "noise.safetensors", &scratch.path("noise.safetensors"));
    let cuts = cut_fifty(&hub, "GET");
    let report =
        run_done(&hub, &scratch, &["pull", REPO, "noise.safetensors", "--to", &scratch.text("to"), "--tries", "60"]);
    assert_eq!(cuts.load(Ordering::Relaxed), 50);
    assert_eq!(sha256(&scratch.path("to/noise.safetensors")), sha256(&scratch.path("noise.safetensors")));
    assert_eq!(names(&scratch.path("to")).len(), 1);
    let peak = report["peak_rss_bytes"].as_u64().expect("a count");
    println!("{} MiB with 50 cuts: {} s, peak memory {} MiB", mib(), report["seconds"], peak >> 20);
    assert!(peak < 200 << 20, "{peak} bytes");
}

#[test]
fn fifty_cuts_change_no_byte_of_what_is_pushed() {
    let (hub, scratch) = (FakeHub::new(), Scratch::new());
    hub.put_text(REPO, "README.md", "old");
    std::fs::create_dir(scratch.path("out")).expect("a writable folder");
    noise(&scratch.path("out/noise.safetensors"), mib());
    let cuts = cut_fifty(&hub, "PUT");
    let report = run_done(&hub, &scratch, &["push", &scratch.text("out"), REPO, "--tries", "60"]);
    // 64 MiB have parts for some fifteen of them; 1 GiB (`MINNOW_HUB_MIB=1024`) for all.
    let wanted = if mib() < 1024 { 12 } else { 50 };
    assert!((wanted..=50).contains(&cuts.load(Ordering::Relaxed)), "{cuts:?} of {wanted}");
    assert_eq!(sha256(&hub.bytes_of(REPO, "noise.safetensors")), sha256(&scratch.path("out/noise.safetensors")));
    assert_eq!(hub.commits(REPO), 2);
    let peak = report["peak_rss_bytes"].as_u64().expect("a count");
    println!("{} MiB with 50 cuts: {} s, peak memory {} MiB", mib(), report["seconds"], peak >> 20);
    assert!(peak < 200 << 20, "{peak} bytes");
}

/// The second piece of a file never comes.
fn cut_second_piece(hub: &FakeHub) {
    hub.go_wrong(|seen| {
        let is_second = seen.headers.get("range").is_some_and(|range| range.starts_with("bytes=8388608-"));
        (seen.is_content && is_second).then_some(Fault::Cut(1000))
    });
}

#[test]
fn what_an_interrupted_pull_has_is_not_fetched_again() {
    let (hub, scratch) = (demo_hub(), Scratch::new());
    let to = scratch.text("to");
    let arguments = ["pull", REPO, "tiny.mnw", "--to", &to, "--connections", "1", "--tries", "1"];
    cut_second_piece(&hub);
    run_refused(&hub, &scratch, &arguments, &["tiny.mnw", "the connection broke"]);
    assert_eq!(names(&scratch.path("to")), BTreeSet::from([".tiny.mnw.part", ".tiny.mnw.ranges"].map(str::to_owned)));

    // A signal while the hub is asked to be patient with: the pieces stay, and the exit code is the shell's.
    hub.go_wrong(|seen| seen.is_content.then_some(Fault::Status(503, Some(60))));
    hub.forget();
    let child = command(&hub, &scratch, &["pull", REPO, "tiny.mnw", "--to", &to])
        .stderr(Stdio::piped())
        .spawn()
        .expect("mnwtool starts");
    while !hub.seen().iter().any(|seen| seen.is_content) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("a running process");
    let sent = Instant::now();
    let output = child.wait_with_output().expect("an end");
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(sent.elapsed() < Duration::from_secs(5));

    hub.go_wrong(|_| None);
    hub.forget();
    let report = run_done(&hub, &scratch, &arguments);
    assert_eq!(report["files"][0]["resumed_bytes"], 8 << 20);
    assert!(
        !hub.seen().iter().any(|seen| seen.headers.get("range").is_some_and(|range| range.starts_with("bytes=0-")))
    );
    assert_eq!(sha256(&scratch.path("to/tiny.mnw")), sha256(&demo()));
    assert_eq!(names(&scratch.path("to")).len(), 1);
}

#[test]
fn a_pull_that_is_killed_again_and_again_ends_with_the_same_bytes() {
    let (hub, scratch) = (FakeHub::new(), Scratch::new());
    let source = scratch.path("noise.safetensors");
    noise(&source, mib());
    hub.put(REPO, "noise.safetensors", &source);
    hub.require_token(TOKEN);
    hub.hide(REPO);
    let to = scratch.text("to");
    let arguments = ["pull", REPO, "noise.safetensors", "--to", &to, "--connections", "1"];
    // Each run gets some pieces, and is killed while it waits for the next or, every second time, while that one comes.
    let rounds = 5;
    let pieces_a_round = mib() / 8 / (rounds + 1);
    for round in 0..rounds {
        let given = AtomicU64::new(0);
        let given_max = pieces_a_round + round % 2;
        hub.forget();
        hub.go_wrong(move |seen| {
            let is_late = is_content(seen, "GET") && given.fetch_add(1, Ordering::Relaxed) >= given_max;
            is_late.then_some(Fault::Status(503, Some(60)))
        });
        let mut child = command(&hub, &scratch, &arguments).env("HF_TOKEN", TOKEN).spawn().expect("mnwtool starts");
        let asked = || hub.seen().iter().filter(|seen| is_content(seen, "GET")).count() as u64;
        while asked() <= pieces_a_round {
            assert!(child.try_wait().expect("a process").is_none(), "it ended by itself");
            std::thread::sleep(Duration::from_micros(100));
        }
        // What everyone on this machine may see of a process.
        let title = std::fs::read_to_string(format!("/proc/{}/cmdline", child.id())).expect("a running process");
        assert!(title.contains(REPO) && !title.contains(TOKEN), "{title}");
        std::thread::sleep(Duration::from_millis(mix64(round) % 4));
        child.kill().expect("a running process");
        child.wait().expect("an end");
        assert!(!names(&scratch.path("to")).contains("noise.safetensors"), "round {round}");
    }
    hub.go_wrong(|_| None);
    let output = command(&hub, &scratch, &[&arguments[..], &["--json"]].concat()).env("HF_TOKEN", TOKEN).output();
    let output = output.expect("mnwtool starts");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", stderr(&output)));
    let resumed = report["files"][0]["resumed_bytes"].as_u64().expect("a count");
    println!("{} MiB, killed {rounds} times: {} MiB were there at the end", mib(), resumed >> 20);
    assert!(resumed >= (rounds * pieces_a_round) << 23, "{resumed} of {} MiB", mib());
    assert_eq!(sha256(&scratch.path("to/noise.safetensors")), sha256(&source));
    assert_eq!(names(&scratch.path("to")).len(), 1);
}

#[test]
fn pieces_of_another_file_are_not_used() {
    let (hub, scratch) = (demo_hub(), Scratch::new());
    let to = scratch.text("to");
    let arguments = ["pull", REPO, "tiny.mnw", "--to", &to, "--connections", "1", "--tries", "1"];
    cut_second_piece(&hub);
    run_refused(&hub, &scratch, &arguments, &["tiny.mnw"]);
    // The repository has another file by now.
    let other = scratch.text("other.mnw");
    done(&["synth", &other, "--preset", "tiny"]);
    hub.put(REPO, "tiny.mnw", Path::new(&other));
    hub.go_wrong(|_| None);
    let report = run_done(&hub, &scratch, &arguments);
    assert_eq!(report["files"][0]["resumed_bytes"], 0);
    assert_eq!(sha256(&scratch.path("to/tiny.mnw")), sha256(Path::new(&other)));
}

#[test]
fn bytes_that_are_not_what_the_hub_states_never_get_the_files_name() {
    for (fault, words) in [
        (Fault::Flip, &["SHA-256", "the hub states"][..]),
        (Fault::Longer, &["makes no sense", "were asked for"]),
        (Fault::Status(416, None), &["answers 416"]),
    ] {
        let (hub, scratch) = (demo_hub(), Scratch::new());
        let is_flip = fault == Fault::Flip;
        hub.go_wrong(move |seen| is_content(seen, "GET").then(|| fault.clone()));
        run_refused(&hub, &scratch, &["pull", REPO, "tiny.mnw", "--to", &scratch.text("to")], words);
        let left = names(&scratch.path("to"));
        assert!(!left.contains("tiny.mnw"), "{left:?}");
        // Nobody knows which of the bytes are wrong, so none are kept.
        assert!(!is_flip || left.is_empty(), "{left:?}");
    }
    // The hub's own digest is right, and the container is no good.
    let (hub, scratch) = (FakeHub::new(), Scratch::new());
    let mut bytes = std::fs::read(demo()).expect("the demo model");
    bytes[5000] ^= 1;
    std::fs::write(scratch.path("bad"), bytes).expect("a writable folder");
    hub.put(REPO, "bad.mnw", &scratch.path("bad"));
    let words = ["bad.mnw", "not valid", "payload-digest"];
    run_refused(&hub, &scratch, &["pull", REPO, "bad.mnw", "--to", &scratch.text("to")], &words);
    assert!(names(&scratch.path("to")).is_empty());
}

#[test]
fn a_refusal_says_what_to_do_about_it() {
    let (hub, scratch) = (demo_hub(), Scratch::new());
    let to = scratch.text("to");
    let pull = ["pull", REPO, "tiny.mnw", "--to", &to, "--tries", "2"];
    run_refused(&hub, &scratch, &["pull", REPO, "absent.mnw", "--to", &to], &["absent.mnw", "not found"]);
    run_refused(&hub, &scratch, &["pull", "no/body", "--to", &to], &["no/body", "not found"]);
    hub.go_wrong(|_| Some(Fault::Status(500, None)));
    run_refused(&hub, &scratch, &pull, &["answers 500", "after 2 tries"]);
    hub.go_wrong(|_| Some(Fault::Status(403, None)));
    run_refused(&hub, &scratch, &pull, &["access is refused"]);
    // A busy hub says for how long.
    let first = AtomicU64::new(0);
    hub.go_wrong(move |_| (first.fetch_add(1, Ordering::Relaxed) == 0).then_some(Fault::Status(429, Some(1))));
    let started = Instant::now();
    let output = run(&hub, &scratch, &pull);
    assert!(output.status.success() && started.elapsed() >= Duration::from_secs(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("429") && stderr(&output).contains("trying again in 1 s"), "{}", stderr(&output));

    hub.go_wrong(|_| None);
    hub.require_token(TOKEN);
    hub.hide(REPO);
    run_refused(&hub, &scratch, &["pull", REPO, "--to", &to], &["needs a token", "HF_TOKEN", "--token-file"]);
    let expired = command(&hub, &scratch, &["pull", REPO, "--to", &to]).env("HF_TOKEN", "hf_old").output();
    let expired = stderr(&expired.expect("mnwtool starts"));
    assert!(expired.contains("the token is refused") && !expired.contains("hf_old"), "{expired}");
    let file = scratch.text("token");
    std::fs::write(&file, format!("{TOKEN}\n")).expect("a writable folder");
    run_done(&hub, &scratch, &["pull", REPO, "README.md", "--to", &to, "--token-file", &file]);
}

#[test]
fn a_full_disk_is_told_before_the_first_byte_is_fetched() {
    let (hub, scratch) = (demo_hub(), Scratch::new());
    let mount = scratch.path("small");
    let to = mount.to_str().expect("UTF-8");
    let tried = on_small_disk(&mount, || run(&hub, &scratch, &["pull", REPO, "tiny.mnw", "--to", to]));
    let Some((output, _)) = tried else { return };
    let message = stderr(&output);
    assert!(output.status.code() == Some(1) && message.contains("ENOSPC") && message.contains("tiny.mnw"), "{message}");
    assert!(!hub.seen().iter().any(|seen| seen.is_content));
}

#[test]
fn the_token_is_told_to_the_hub_and_to_nobody_else() {
    let (hub, scratch) = (demo_hub(), Scratch::new());
    hub.require_token(TOKEN);
    hub.hide(REPO);
    let (to, out) = (scratch.text("to"), scratch.text("out"));
    std::fs::create_dir(&out).expect("a writable folder");
    std::fs::copy(demo(), scratch.path("out/other.mnw")).expect("a writable folder");
    noise(&scratch.path("out/noise.safetensors"), 9);
    let mut said = String::new();
    let mut ask = |arguments: &[&str]| {
        let output = command(&hub, &scratch, arguments).env("HF_TOKEN", TOKEN).output().expect("mnwtool starts");
        said += &format!("{}{}", stdout(&output), stderr(&output));
        output.status.code()
    };
    assert_eq!(ask(&["pull", REPO, "--to", &to]), Some(0));
    assert_eq!(ask(&["push", &out, REPO]), Some(0));
    assert_eq!(ask(&["inspect", &format!("hf:{REPO}/tiny.mnw")]), Some(0));
    // Whatever fails, and even if the server repeats what it was told.
    for fault in [Fault::Echo, Fault::Status(500, None), Fault::Cut(3), Fault::Flip, Fault::Longer] {
        for is_content in [false, true] {
            let fault = fault.clone();
            hub.go_wrong(move |seen| (seen.is_content == is_content).then(|| fault.clone()));
            let _ = std::fs::remove_dir_all(&to);
            ask(&["pull", REPO, "tiny.mnw", "--to", &to, "--tries", "2"]);
            noise(&scratch.path("out/noise.safetensors"), 5);
            ask(&["push", &out, REPO, "--replace", "--tries", "2"]);
        }
    }
    assert!(said.contains("go away, Bearer [token]"), "{said}");
    assert!(!said.contains(TOKEN), "{said}");
    assert!(!said.contains(SIGNATURE) && !said.contains("X-Amz"), "{said}");
    let seen = hub.seen();
    assert!(seen.iter().any(|seen| seen.is_content && seen.method == "PUT"));
    for seen in seen {
        let authorization = seen.headers.get("authorization");
        assert_eq!(authorization.is_some(), !seen.is_content, "{seen:?}");
    }
}

#[test]
fn a_hub_without_a_trusted_certificate_is_not_spoken_to() {
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).expect("a certificate");
    let key = rustls::pki_types::PrivateKeyDer::try_from(signing_key.serialize_der()).expect("a key");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("protocol versions")
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key)
        .expect("a certificate");
    let config = Arc::new(config);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let heard = Arc::new(AtomicU64::new(0));
    let bytes = Arc::clone(&heard);
    std::thread::spawn(move || {
        for mut stream in listener.incoming().filter_map(Result::ok) {
            let mut session = rustls::ServerConnection::new(Arc::clone(&config)).expect("a session");
            let mut plain = Vec::new();
            let _ = std::io::Read::read_to_end(&mut rustls::Stream::new(&mut session, &mut stream), &mut plain);
            bytes.fetch_add(plain.len() as u64, Ordering::Relaxed);
        }
    });
    let (hub, scratch) = (FakeHub::new(), Scratch::new());
    let output = command(&hub, &scratch, &["pull", REPO, "--to", &scratch.text("to")])
        .env("HF_ENDPOINT", format!("https://localhost:{port}"))
        .env("HF_TOKEN", TOKEN)
        .output()
        .expect("mnwtool starts");
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("no safe connection") && message.contains("certificate"), "{message}");
    assert_eq!(message.lines().count(), 1, "a bad certificate does not get better: {message}");
    assert_eq!(heard.load(Ordering::Relaxed), 0);

    // Nor is a token sent in plain to another machine.
    let mut plain = command(&hub, &scratch, &["pull", REPO]);
    plain.env("HF_ENDPOINT", "http://hub.example").env("HF_TOKEN", TOKEN);
    let message = stderr(&plain.output().expect("mnwtool starts"));
    assert!(message.contains("a token is not sent over http://"), "{message}");
}

#[test]
fn a_push_sends_what_is_new_in_one_commit_and_replaces_only_when_told() {
    let (hub, scratch) = (FakeHub::new(), Scratch::new());
    hub.require_token(TOKEN);
    let token = scratch.text("token");
    std::fs::write(&token, TOKEN).expect("a writable folder");
    let out = scratch.text("out");
    std::fs::create_dir(&out).expect("a writable folder");
    std::fs::copy(demo(), scratch.path("out/tiny.mnw")).expect("a writable folder");
    std::fs::write(scratch.path("out/README.md"), "# one").expect("a writable folder");
    std::fs::write(scratch.path("out/.hidden.tmp"), "unfinished").expect("a writable folder");
    let base = ["push", &out, REPO, "--token-file", &token];
    let push = |more: &[&'static str]| [&base[..], more].concat();
    run_refused(&hub, &scratch, &push(&[]), &[REPO, "no such repository", "--create"]);
    let dry = run_done(&hub, &scratch, &push(&["--create", "private", "--dry-run"]));
    assert_eq!((&dry["files"][0]["fate"], &dry["commit"]), (&"new".into(), &Value::Null));
    assert_eq!(hub.is_private(REPO), None);

    run_done(&hub, &scratch, &push(&["--create", "private"]));
    assert_eq!((hub.is_private(REPO), hub.commits(REPO)), (Some(true), 2));
    assert_eq!(hub.files(REPO), ["README.md", "tiny.mnw"]);
    assert_eq!(sha256(&hub.bytes_of(REPO, "tiny.mnw")), sha256(&demo()));
    assert_eq!(std::fs::read(hub.bytes_of(REPO, "README.md")).expect("a file"), b"# one");

    // Again: nothing to do, and no commit.
    let report = run_done(&hub, &scratch, &push(&[]));
    assert_eq!((&report["sent_bytes"], &report["commit"]), (&0.into(), &Value::Null));
    std::fs::write(scratch.path("out/README.md"), "# two").expect("a writable folder");
    run_refused(&hub, &scratch, &push(&[]), &["README.md", "--replace"]);
    assert_eq!(hub.commits(REPO), 2);
    let report = run_done(&hub, &scratch, &push(&["--replace"]));
    assert_eq!((&report["files"][0]["fate"], &report["files"][1]["fate"]), (&"replaced".into(), &"same".into()));
    assert_eq!((hub.commits(REPO), &report["sent_bytes"]), (3, &0.into()));
}

#[test]
fn a_commit_whose_answer_is_lost_is_made_once() {
    let (hub, scratch) = (demo_hub(), Scratch::new());
    std::fs::create_dir(scratch.path("out")).expect("a writable folder");
    std::fs::write(scratch.path("out/NEW.md"), "new").expect("a writable folder");
    let commits = hub.commits(REPO);
    let first = AtomicU64::new(0);
    hub.go_wrong(move |seen| {
        (seen.target.contains("/commit/") && first.fetch_add(1, Ordering::Relaxed) == 0).then_some(Fault::Mute)
    });
    let report = run_done(&hub, &scratch, &["push", &scratch.text("out"), REPO]);
    assert_eq!(hub.commits(REPO), commits + 1);
    assert!(report["commit"].is_string(), "{report}");
}

#[test]
fn nothing_is_pushed_that_is_not_what_it_should_be() {
    let (hub, scratch) = (demo_hub(), Scratch::new());
    let out = scratch.text("out");
    std::fs::create_dir(&out).expect("a writable folder");
    let mut bytes = std::fs::read(demo()).expect("the demo model");
    bytes[5000] ^= 1;
    std::fs::write(scratch.path("out/bad.mnw"), bytes).expect("a writable folder");
    run_refused(&hub, &scratch, &["push", &out, REPO], &["bad.mnw", "not valid", "not sent"]);
    std::fs::copy(demo(), scratch.path("out/bad.mnw")).expect("a writable folder");
    std::fs::write(scratch.path("out/SHA256SUMS"), format!("{}  bad.mnw\n", "0".repeat(64)))
        .expect("a writable folder");
    run_refused(&hub, &scratch, &["push", &out, REPO], &["SHA256SUMS", "bad.mnw", &sha256(&demo())]);
    std::fs::remove_file(scratch.path("out/bad.mnw")).expect("a writable folder");
    run_refused(&hub, &scratch, &["push", &out, REPO], &["SHA256SUMS", "bad.mnw", "not there"]);
    assert!(hub.seen().is_empty());
}

#[test]
fn inspecting_at_a_distance_reads_header_and_manifest_only() {
    let (hub, scratch) = (FakeHub::new(), Scratch::new());
    let large = scratch.path("large.mnw");
    let manifest_bytes = hollow(&large);
    hub.put_text(REPO, "large.mnw", "stands for it until its digest is known");
    // The fake hub would take a minute for the digest of 9 GiB of nothing, and nobody asks for it here.
    hub.swap(REPO, "large.mnw", &large);

    let address = format!("hf:{REPO}/large.mnw");
    let report = run_done(&hub, &scratch, &["inspect", &address]);
    assert_eq!(report["path"], address);
    assert_eq!((&report["layers"], &report["tensor_count"]), (&20.into(), &14_813.into()));
    assert!(report["file_bytes"].as_u64().is_some_and(|bytes| bytes > 9 << 30), "{}", report["file_bytes"]);
    let fetched: u64 = hub.seen().iter().filter(|seen| is_content(seen, "GET")).map(range_bytes).sum();
    println!("{fetched} bytes were fetched of {}", report["file_bytes"]);
    assert_eq!(fetched, manifest_bytes + 64);
    assert!(fetched < 10 << 20, "{fetched} bytes");
}

/// Writes header and manifest of a model in the shape of mini, INT4, with a hole where its weights would be. Returns the
/// length of the manifest.
fn hollow(path: &Path) -> u64 {
    let mut config = checkpoint::config("t64");
    for (key, value) in [
        ("vocab_size", 157_184),
        ("hidden_size", 2048),
        ("intermediate_size", 5120),
        ("num_hidden_layers", 20),
        ("num_attention_heads", 16),
        ("num_key_value_heads", 4),
        ("num_experts", 256),
        ("num_experts_per_tok", 8),
        ("moe_intermediate_size", 512),
        ("expert_capacity", 48),
    ] {
        config[key] = value.into();
    }
    let parsed = ModelConfig::from_json(&config.to_string()).expect("a configuration");
    let needed = inventory::needed(&parsed);
    let spec = |needed: &inventory::Needed| {
        let (encoding, group) = match needed.role {
            inventory::Role::Expert => (Encoding::I4Mma, 128),
            inventory::Role::RouterBias => (Encoding::Float(FloatType::F32), 0),
            _ => (Encoding::Float(FloatType::Bf16), 0),
        };
        (needed.name.clone(), TensorSpec::new(needed.shape.clone(), encoding, group, None).expect("a spec"))
    };
    let specs: std::collections::BTreeMap<String, TensorSpec> = needed.iter().map(spec).collect();
    let layout = mnw::Layout::of(specs.values()).expect("a layout");
    let digest = Digest::of(b"never looked at");
    let tensors = specs.into_iter().zip(&layout.places).map(|((name, spec), place)| {
        let region = |offset, bytes| mnw::Region { offset, bytes, digest };
        let scales = place.scales.map(|offset| region(offset, spec.scales_bytes()));
        (name, mnw::Tensor { data: region(place.data, spec.data_bytes()), scales, spec })
    });
    let tokenizer = golden::text("golden/model/tokenizer/tokenizer.json");
    let assets =
        [("config.json", config.to_string()), ("tokenizer.json", tokenizer), ("chat_template.jinja", String::new())];
    let manifest = mnw::Manifest {
        model_id: "hollow".to_owned(),
        assets: assets.map(|(name, text)| (name.to_owned(), text)).into(),
        tensors: tensors.collect(),
    };
    let encoded = manifest.encode();
    let manifest_bytes = encoded.len() as u64;
    let manifest_digest = Digest::of(&encoded);
    let header = mnw::Header { manifest_offset: layout.manifest_offset, manifest_bytes, manifest_digest };
    let file = std::fs::File::create(path).expect("a writable folder");
    file.write_all_at(&header.encode(), 0).expect("a writable folder");
    file.write_all_at(&encoded, header.manifest_offset.0).expect("a writable folder");
    manifest_bytes
}

/// Bytes that a request asks for.
fn range_bytes(seen: &Seen) -> u64 {
    let (start, end) =
        seen.headers["range"].strip_prefix("bytes=").and_then(|range| range.split_once('-')).expect("a range");
    end.parse::<u64>().expect("a number") + 1 - start.parse::<u64>().expect("a number")
}

#[test]
fn some_tensors_are_pulled_without_the_others() {
    let (hub, scratch) = (demo_hub(), Scratch::new());
    let (to, all) = (scratch.text("to"), scratch.text("all"));
    let prefix = "model.layers.2.mlp.experts.1";
    let pull = ["pull", REPO, "tiny.mnw", "--tensors", prefix, "--to", &to, "--dtype", "f32"];
    let output = run(&hub, &scratch, &pull);
    assert!(output.status.success(), "{}", stderr(&output));
    done(&["extract", demo().to_str().expect("UTF-8"), &all, "--dtype", "f32"]);
    let (some, all) = (crate::mnwtool::tensors(Path::new(&to)), crate::mnwtool::tensors(Path::new(&all)));
    // Experts 1 and 10 to 19, three matrices each.
    assert_eq!(some.len(), 33);
    assert!(some.iter().all(|(name, tensor)| all[name] == *tensor));
    let fetched: u64 = hub.seen().iter().filter(|seen| is_content(seen, "GET")).map(range_bytes).sum();
    assert!(fetched < 2 << 20, "{fetched} bytes");
    run_refused(&hub, &scratch, &["pull", REPO, "tiny.mnw", "--tensors", "x", "--to", &scratch.text("x")], &["\"x\""]);
}

#[test]
fn twenty_random_corruptions_are_repaired_by_fetching_hardly_more_than_them() {
    let (hub, scratch) = (demo_hub(), Scratch::new());
    let path = scratch.path("mine.mnw");
    let sound = std::fs::read(demo()).expect("the demo model");
    let from = format!("hf:{REPO}/tiny.mnw");
    let file = path.to_str().expect("UTF-8");
    for round in 0..3 {
        let mut bytes = sound.clone();
        // Anywhere between header and manifest, a few bytes each.
        for number in 0..20 {
            let random = mix64(round * 100 + number);
            let at = 4096 + random as usize % (17 << 20);
            bytes[at..at + 1 + random as usize % 50].fill(0xa5);
        }
        std::fs::write(&path, &bytes).expect("a writable folder");
        let listed = run_done(&hub, &scratch, &["repair", file, "--from", &from, "--dry-run"]);
        assert!(std::fs::read(&path).expect("a file") == bytes, "a dry run changed something");
        hub.forget();
        let report = run_done(&hub, &scratch, &["repair", file, "--from", &from]);
        assert_eq!(listed["regions"], report["regions"]);
        assert!(std::fs::read(&path).expect("a file") == sound, "round {round}");
        let damaged = report["damaged_bytes"].as_u64().expect("a count");
        let fetched: u64 = hub.seen().iter().filter(|seen| is_content(seen, "GET")).map(range_bytes).sum();
        assert!(damaged > 0 && fetched < 2 * damaged, "{fetched} bytes for {damaged}");
        println!(
            "{damaged} bytes in {} regions, {fetched} fetched",
            report["regions"].as_array().expect("a list").len()
        );
    }
    assert_eq!(run_done(&hub, &scratch, &["repair", file, "--from", &from])["sound"], true);
}

#[test]
fn header_manifest_padding_and_length_are_repaired_too() {
    let (hub, scratch) = (demo_hub(), Scratch::new());
    let path = scratch.path("mine.mnw");
    let sound = std::fs::read(demo()).expect("the demo model");
    let file = path.to_str().expect("UTF-8");
    let from = format!("hf:{REPO}/tiny.mnw");
    type Damage = fn(&mut Vec<u8>);
    let damages: [(&str, Damage); 5] = [
        ("the header", |bytes| bytes[8] ^= 0xff),
        ("the magic", |bytes| bytes[..8].fill(0)),
        ("the manifest", |bytes| {
            let end = bytes.len();
            bytes[end - 5000..end - 4000].fill(1);
        }),
        ("padding", |bytes| bytes[100] = 1),
        ("the end", |bytes| bytes.truncate(bytes.len() - 300_000)),
    ];
    for (what, damage) in damages {
        let mut bytes = sound.clone();
        damage(&mut bytes);
        std::fs::write(&path, &bytes).expect("a writable folder");
        run_done(&hub, &scratch, &["repair", file, "--from", &from]);
        assert!(std::fs::read(&path).expect("a file") == sound, "{what}");
    }
    // Another file is not turned into this one, sound or not.
    let other = scratch.text("other.mnw");
    done(&["synth", &other, "--preset", "tiny"]);
    let before = std::fs::read(&other).expect("a file");
    run_refused(&hub, &scratch, &["repair", &other, "--from", &from], &["other.mnw", "another file"]);
    let mut headless = before.clone();
    headless[8] ^= 0xff;
    std::fs::write(&other, &headless).expect("a writable folder");
    run_refused(&hub, &scratch, &["repair", &other, "--from", &from], &["other.mnw", "pull it anew"]);
    assert!(std::fs::read(&other).expect("a file") == headless);
}
