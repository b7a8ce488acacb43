//! Who is let in: API keys, TLS, and clients that only hold connections.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use minnow_tests::daemon::{Daemon, ask, ask_over, request, wait_until};
use minnow_tests::program::Reply;
use rustix::process::Signal;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};

use super::http::{CHAT, assert_error, story};

const KEY: &str = "a-key-for-the-first-tenant";
const OTHER: &str = "a-key-for-the-second-tenant";

fn get(address: SocketAddr, path: &str, headers: &[&str]) -> Reply {
    ask(address, &request("GET", path, headers, ""))
}

fn bearer(key: &str) -> String {
    format!("Authorization: Bearer {key}")
}

fn write_secret(path: &Path, text: &str) {
    use std::os::unix::fs::OpenOptionsExt;
    let mut file = std::fs::OpenOptions::new();
    let mut file = file.write(true).create(true).truncate(true).mode(0o600).open(path).unwrap();
    file.write_all(text.as_bytes()).unwrap();
}

#[test]
fn without_the_key_there_are_only_probes_and_the_page() {
    let daemon = Daemon::start(&["--api-key", KEY]);
    let address = daemon.address();
    // Before the model is there, too: a probe learns that it loads, a stranger nothing.
    let early = get(address, "/props", &[]);
    assert_error(&early, 401, "invalid_api_key", None);
    let address = daemon.ready();
    for (method, path) in [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/x"),
        ("GET", "/props"),
        ("GET", "/slots"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("GET", "/v1/stream?conv_id=x"),
        ("DELETE", "/v1/stream?conv_id=x"),
        ("POST", "/v1/streams/lookup"),
        ("POST", CHAT),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions/input_tokens"),
        ("POST", "/tokenize"),
        ("POST", "/embeddings"),
        ("POST", "/nowhere"),
        ("PUT", "/health"),
        ("PATCH", "/v1/models"),
    ] {
        let reply = ask(address, &request(method, path, &[], if method == "POST" { "{" } else { "" }));
        assert_error(&reply, 401, "invalid_api_key", None);
        assert_eq!(reply.header("www-authenticate"), Some("Bearer"), "{method} {path}");
    }
    for path in ["/health", "/v1/health", "/livez", "/", "/index.html", "/sw.js"] {
        assert_eq!(get(address, path, &[]).status, 200, "{path}");
    }
    assert_eq!(get(address, "/nothing.js", &[]).status, 404, "files of a page need no key, and this is none");
    let preflight = ["Origin: http://localhost:3000", "Access-Control-Request-Method: POST"];
    assert_eq!(ask(address, &request("OPTIONS", CHAT, &preflight, "")).status, 204);

    for right in [bearer(KEY), format!("authorization: bearer {KEY}"), format!("x-api-key: {KEY}")] {
        assert_eq!(get(address, "/v1/models", &[&right]).status, 200, "{right}");
    }
    for wrong in ["Bearer wrong", "Bearer", "", &format!("Basic {KEY}"), KEY, &format!("Bearer {KEY}x")] {
        assert_error(&get(address, "/v1/models", &[&format!("Authorization: {wrong}")]), 401, "invalid_api_key", None);
    }
    let both = [&*bearer(KEY), "x-api-key: another"];
    assert_error(&get(address, "/v1/models", &both), 401, "invalid_api_key", None);
    assert_error(&get(address, &format!("/v1/models?api_key={KEY}"), &[]), 401, "invalid_api_key", None);
    // The size of a body is told to strangers, since nothing of it is read; the rest only after the key.
    let large = request("POST", CHAT, &["Content-Length: 99999999"], "");
    assert_error(&ask(address, &large), 413, "request_too_large", None);

    let answer = ask(address, &request("POST", CHAT, &[&bearer(KEY)], &story(json!({"max_tokens": 4})).to_string()));
    assert_eq!(answer.status, 200, "{}", answer.text());
    // The query is not logged, so a key that was put there by mistake is not either.
    assert!(daemon.log().contains("/v1/models") && !daemon.log().contains(KEY), "{}", daemon.log());
    drop(daemon);

    let public = Daemon::start(&["--api-key", KEY, "--metrics-public"]);
    let address = public.ready();
    assert_eq!(get(address, "/metrics", &[]).status, 200);
    assert_eq!(get(address, "/slots", &[]).status, 401);
}

#[test]
fn keys_of_a_file_change_on_sighup_and_a_bad_file_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    write_secret(&path, &format!("# tenants\n{KEY}\n"));
    let daemon = Daemon::start(&["--api-key-file", path.to_str().unwrap()]);
    let address = daemon.ready();
    let status = |key: &str| get(address, "/v1/models", &[&bearer(key)]).status;
    assert_eq!((status(KEY), status(OTHER)), (200, 401));
    write_secret(&path, &format!("{OTHER}\n"));
    assert_eq!((status(KEY), status(OTHER)), (200, 401), "not before it is told");
    daemon.signal(Signal::HUP);
    wait_until("the new key", || (status(OTHER) == 200).then_some(()));
    assert_eq!(status(KEY), 401);
    for (bad, words) in [("", "no key in it"), ("short\n", "can be guessed")] {
        write_secret(&path, bad);
        daemon.signal(Signal::HUP);
        daemon.wait_for(words);
        assert_eq!((status(KEY), status(OTHER)), (401, 200), "{words}");
    }
    assert!(!daemon.log().contains(OTHER));
}

#[test]
fn a_conversation_belongs_to_the_key_that_began_it() {
    let daemon = Daemon::start(&["--api-key", KEY, "--api-key", OTHER]);
    let address = daemon.ready();
    let begin = |key: &str, seed: u64| {
        let body = story(json!({"stream": true, "max_tokens": 40, "temperature": 1, "seed": seed})).to_string();
        let headers = [&*bearer(key), "X-Conversation-Id: chat-1"];
        let reply = ask(address, &request("POST", CHAT, &headers, &body));
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.body
    };
    let replay = |key: &str| get(address, "/v1/stream?conv_id=chat-1", &[&bearer(key)]);
    let lookup = |key: &str| -> Value {
        let body = json!({"conversation_ids": ["chat-1"]}).to_string();
        ask(address, &request("POST", "/v1/streams/lookup", &[&bearer(key)], &body)).json()
    };
    let forget = |key: &str| ask(address, &request("DELETE", "/v1/stream?conv_id=chat-1", &[&bearer(key)], "")).status;

    let first = begin(KEY, 1);
    assert_error(&replay(OTHER), 404, "stream_not_found", Some("conv_id"));
    assert_eq!((lookup(OTHER), lookup(KEY).as_array().unwrap().len()), (json!([]), 1));
    assert_eq!(forget(OTHER), 204, "as for any unknown id");
    assert_eq!(replay(KEY).body, first);
    // The same id is another conversation, and neither replaces the other.
    let second = begin(OTHER, 2);
    assert_ne!(first, second);
    assert_eq!((replay(KEY).body, replay(OTHER).body), (first, second));
    assert_eq!(forget(KEY), 204);
    assert_eq!((replay(KEY).status, replay(OTHER).status), (404, 200));
}

/// A certificate for localhost and its key, written where a server reads them.
fn certify(folder: &Path) -> CertificateDer<'static> {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    std::fs::write(folder.join("cert.pem"), made.cert.pem()).unwrap();
    write_secret(&folder.join("key.pem"), &made.signing_key.serialize_pem());
    made.cert.der().clone()
}

/// A connection that trusts one certificate.
fn trusting(
    address: SocketAddr,
    certificate: &CertificateDer<'static>,
) -> std::io::Result<rustls::StreamOwned<rustls::ClientConnection, TcpStream>> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certificate.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let mut session = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = TcpStream::connect(address)?;
    while session.is_handshaking() {
        session.complete_io(&mut stream)?;
    }
    Ok(rustls::StreamOwned::new(session, stream))
}

#[test]
fn with_a_certificate_it_speaks_https_only_and_changes_it_on_sighup() {
    let folder = tempfile::tempdir().unwrap();
    let old = certify(folder.path());
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let socket = folder.path().join("minnowd.sock");
    let unix = format!("unix:{}", socket.display());
    // TLS and a key are what it takes to listen on every address.
    let options =
        ["--listen", "0.0.0.0:0", "--listen", &unix, "--tls-cert", &file("cert.pem"), "--tls-key", &file("key.pem")];
    let mut command = std::process::Command::new(minnow_tests::program::path("minnowd"));
    command.arg("serve").args(options).env("MINNOWD_API_KEY", KEY);
    let daemon = Daemon::spawn(command);
    let port = daemon.ready().port();
    assert!(daemon.log().contains("listening on https://0.0.0.0:"), "{}", daemon.log());
    let address = SocketAddr::from(([127, 0, 0, 1], port));

    let body = story(json!({"stream": true, "max_tokens": 40})).to_string();
    let chat = request("POST", CHAT, &[&bearer(KEY)], &body);
    let mut open = trusting(address, &old).unwrap();
    let reply = ask_over(&mut open, &chat);
    assert_eq!(reply.events().pop().as_deref(), Some("[DONE]"));
    assert_eq!(ask_over(&mut open, &request("GET", "/v1/models", &[], "")).status, 401, "on the same connection");
    // Plain HTTP is not answered as if it were fine.
    let mut plain = TcpStream::connect(address).unwrap();
    plain.write_all(&request("GET", "/health", &[], "")).unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP/"), "{}", String::from_utf8_lossy(&answer));
    // Within the machine there is no need for it.
    let local = std::os::unix::net::UnixStream::connect(&socket).unwrap();
    assert_eq!(ask_over(local, &request("GET", "/health", &[], "")).status, 200);

    let new = certify(folder.path());
    assert!(trusting(address, &new).is_err(), "not before it is told");
    daemon.signal(Signal::HUP);
    daemon.wait_for("the certificate was read again");
    assert_eq!(ask_over(trusting(address, &new).unwrap(), &request("GET", "/health", &[], "")).status, 200);
    assert!(trusting(address, &old).is_err());
    assert_eq!(ask_over(&mut open, &request("GET", "/health", &[], "")).status, 200, "what is open stays open");
    // Half a change: the new certificate with a key that is not its own.
    let kept = std::fs::read(file("key.pem")).unwrap();
    certify(folder.path());
    std::fs::write(file("key.pem"), kept).unwrap();
    daemon.signal(Signal::HUP);
    daemon.wait_for("the certificate stays as it was");
    assert_eq!(ask_over(trusting(address, &new).unwrap(), &request("GET", "/health", &[], "")).status, 200);
}

#[test]
fn certificates_that_cannot_be_used_are_named_before_anything_is_served() {
    let folder = tempfile::tempdir().unwrap();
    certify(folder.path());
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(file("nothing.pem"), "not PEM\n").unwrap();
    let refused = |cert: &str, key: &str, words: &str| {
        let arguments = ["serve", "--listen", "127.0.0.1:0", "--tls-cert", &file(cert), "--tls-key", &file(key)];
        let output = minnow_tests::program::minnowd(&arguments);
        let message = minnow_tests::program::stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.lines().count() == 1 && message.contains(words), "{message}");
    };
    refused("absent.pem", "key.pem", "absent.pem: ");
    refused("nothing.pem", "key.pem", "nothing.pem: no certificate in it");
    refused("cert.pem", "nothing.pem", "nothing.pem: no private key in it");
    refused("key.pem", "key.pem", "key.pem: no certificate in it");
}

#[test]
fn connections_that_say_nothing_or_too_slowly_are_given_up_and_others_served_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    let certificate = certify(folder.path());
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let daemon =
        Daemon::start(&["--tls-cert", &file("cert.pem"), "--tls-key", &file("key.pem"), "--max-connections", "8"]);
    let address = daemon.ready();
    // Handshakes that never go on, and heads that come a byte at a time: as many as there may be connections.
    let started = Instant::now();
    let mut silent: Vec<TcpStream> = (0..4).map(|_| TcpStream::connect(address).unwrap()).collect();
    let mut slow: Vec<_> = (0..3).map(|_| trusting(address, &certificate).unwrap()).collect();
    let head = request("GET", "/health", &["X-Filler: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"], "");
    let dripping = std::thread::spawn(move || {
        for byte in &head {
            // The server hangs up in the midst of it.
            let sent = slow.iter_mut().map(|stream| stream.write_all(&[*byte]).and_then(|()| stream.flush()));
            if sent.collect::<Result<Vec<_>, _>>().is_err() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(500));
        }
        false
    });
    let reply = ask_over(trusting(address, &certificate).unwrap(), &request("GET", "/health", &[], ""));
    assert!(reply.status == 200 && started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    for stream in &mut silent {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
    assert!((9..30).contains(&started.elapsed().as_secs()), "{:?}", started.elapsed());
    assert!(dripping.join().unwrap(), "a slow head was waited for");
}

#[test]
fn two_readings_of_one_request_are_refused() {
    let daemon = Daemon::start(&[]);
    let address = daemon.ready();
    // Where a proxy and a server disagree about where a request ends, a second one can hide in the first.
    for headers in [
        &["Content-Length: 5", "Content-Length: 6"][..],
        &["Content-Length: 5, 6"],
        &["Content-Length: +5"],
        &["Content-Length: 5", "Transfer-Encoding: chunked, identity"],
        &["Transfer-Encoding: identity"],
        &["Transfer-Encoding : chunked"],
        &["Transfer-Encoding: xchunked"],
        &["X: y\r\n Content-Length: 5"],
    ] {
        let lines: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
        let text = format!(
            "POST /tokenize HTTP/1.1\r\nHost: localhost\r\n{lines}\r\nhelloGET /slots HTTP/1.1\r\nHost: localhost\r\n\r\n"
        );
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{headers:?}: {answer}");
        assert!(answer.starts_with("HTTP/1.1 400"), "{headers:?}: {answer}");
    }
}
