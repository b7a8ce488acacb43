//! `mnwtool` and `minnowd` as processes.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The path of a program of this workspace, built first if cargo has not built it for this run.
///
/// # Panics
/// If it does not build.
#[must_use]
pub fn path(name: &str) -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let folder = BUILT.get_or_init(|| {
        // Test executables lie in TARGET/PROFILE/deps, programs in TARGET/PROFILE.
        let exe = std::env::current_exe().expect("the path of this test");
        let folder = exe.parent().and_then(|deps| deps.parent()).expect("a target folder").to_owned();
        let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        build.current_dir(crate::golden::root()).args(["build", "--quiet", "-p", "mnwtool", "-p", "minnowd", "--bins"]);
        if folder.file_name().is_some_and(|profile| profile == "release") {
            build.arg("--release");
        }
        assert!(build.status().expect("cargo runs").success(), "the programs do not build");
        folder
    });
    folder.join(name)
}

/// Runs `mnwtool` with `args` and waits.
#[must_use]
pub fn mnwtool(args: &[&str]) -> Output {
    Command::new(path("mnwtool")).args(args).output().expect("mnwtool starts")
}

/// Runs `minnowd` with `args` and waits.
#[must_use]
pub fn minnowd(args: &[&str]) -> Output {
    Command::new(path("minnowd")).args(args).output().expect("minnowd starts")
}

/// Standard output as text.
#[must_use]
pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Standard error as text.
#[must_use]
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A running `minnowd serve` on a port of its own, killed on drop.
pub struct Server {
    child: std::process::Child,
    address: std::net::SocketAddr,
    agent: ureq::Agent,
}

/// What a server answered.
#[derive(Clone, Debug)]
pub struct Reply {
    /// The status code.
    pub status: u16,
    /// Header names in lower case, with their values.
    pub headers: Vec<(String, String)>,
    /// The body, chunks joined.
    pub body: Vec<u8>,
}

impl Server {
    /// How long loading may take.
    const READY_MAX: Duration = Duration::from_secs(120);

    /// Starts the server with further options and waits until it is ready. Without `--model` it serves the embedded
    /// demo model.
    ///
    /// # Panics
    /// If it does not become ready.
    #[must_use]
    pub fn start(options: &[&str]) -> Self {
        let mut child = Command::new(path("minnowd"))
            .args(["serve", "--listen", "127.0.0.1:0"])
            .args(options)
            .stderr(Stdio::piped())
            .spawn()
            .expect("minnowd starts");
        let mut log = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let mut seen = String::new();
        let address = loop {
            let line = log.next().unwrap_or_else(|| panic!("minnowd ended early: {seen}")).expect("UTF-8 on stderr");
            if let Some((_, address)) = line.split_once("listening on http://") {
                break address.trim().parse().expect("an address");
            }
            seen.push_str(&line);
            seen.push('\n');
        };
        // The pipe must be emptied, or the server would block on its log.
        std::thread::spawn(move || log.for_each(drop));
        let agent = ureq::Agent::config_builder().http_status_as_error(false).build().new_agent();
        let server = Self { child, address, agent };
        let started = Instant::now();
        let prefix = options.iter().skip_while(|option| **option != "--api-prefix").nth(1).unwrap_or(&"");
        while server.get(&format!("{prefix}/health")).status != 200 {
            assert!(started.elapsed() < Self::READY_MAX, "minnowd does not become ready");
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> std::net::SocketAddr {
        self.address
    }

    /// The process.
    pub fn child(&mut self) -> &mut std::process::Child {
        &mut self.child
    }

    /// Sends SIGTERM.
    ///
    /// # Panics
    /// If the process is gone.
    pub fn terminate(&self) {
        self.signal(rustix::process::Signal::TERM);
    }

    /// Sends SIGHUP, upon which keys and certificates are read again.
    ///
    /// # Panics
    /// If the process is gone.
    pub fn hang_up(&self) {
        self.signal(rustix::process::Signal::HUP);
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let id = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(id, signal).expect("a running process");
    }

    /// `GET path`
    ///
    /// # Panics
    /// If no answer comes.
    #[must_use]
    pub fn get(&self, path: &str) -> Reply {
        let answer = self.agent.get(self.url(path)).call().expect("an answer");
        Reply::from_ureq(answer)
    }

    /// `POST path` with a JSON body.
    ///
    /// # Panics
    /// If no answer comes.
    #[must_use]
    pub fn post(&self, path: &str, body: &serde_json::Value) -> Reply {
        self.post_bytes(path, body.to_string().as_bytes())
    }

    /// `POST path` with any body, said to be JSON.
    ///
    /// # Panics
    /// If no answer comes.
    #[must_use]
    pub fn post_bytes(&self, path: &str, body: &[u8]) -> Reply {
        let request = self.agent.post(self.url(path)).header("content-type", "application/json");
        Reply::from_ureq(request.send(body).expect("an answer"))
    }

    /// Sends bytes on a new connection and reads one answer.
    ///
    /// # Panics
    /// If no answer comes.
    #[must_use]
    pub fn raw(&self, request: &[u8]) -> Reply {
        let mut connection = self.connect();
        connection.get_mut().write_all(request).expect("a listening server");
        Reply::read(&mut connection)
    }

    /// A new connection.
    ///
    /// # Panics
    /// If the server does not listen.
    #[must_use]
    pub fn connect(&self) -> BufReader<TcpStream> {
        let stream = TcpStream::connect(self.address).expect("a listening server");
        stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a socket");
        BufReader::new(stream)
    }

    /// Waits until no request runs or waits.
    ///
    /// # Panics
    /// If that takes longer than `limit`.
    pub fn wait_idle(&self, limit: Duration) {
        let started = Instant::now();
        loop {
            let health = self.get("/health").json();
            if health["active_requests"] == 0 && health["queued_requests"] == 0 {
                return;
            }
            assert!(started.elapsed() < limit, "still busy: {health}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Reply {
    /// Reads one answer: by its length, by its chunks, or to the end.
    ///
    /// # Panics
    /// If what comes is not HTTP.
    #[must_use]
    pub fn read(connection: &mut impl BufRead) -> Self {
        let line = |connection: &mut dyn BufRead| {
            let mut line = String::new();
            connection.read_line(&mut line).expect("an answer");
            line.trim_end().to_owned()
        };
        let status_line = line(connection);
        let status = status_line.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.unwrap_or_else(|| panic!("not a status line: {status_line:?}"));
        let mut headers = Vec::new();
        loop {
            let header = line(connection);
            let Some((name, value)) = header.split_once(':') else { break };
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        let mut reply = Self { status, headers, body: Vec::new() };
        if reply.header("transfer-encoding") == Some("chunked") {
            loop {
                let size = usize::from_str_radix(&line(connection), 16).expect("a chunk size");
                let start = reply.body.len();
                reply.body.resize(start + size, 0);
                connection.read_exact(&mut reply.body[start..]).expect("a whole chunk");
                line(connection);
                if size == 0 {
                    break;
                }
            }
        } else if let Some(length) = reply.header("content-length").and_then(|length| length.parse().ok()) {
            reply.body.resize(length, 0);
            connection.read_exact(&mut reply.body).expect("a whole body");
        }
        reply
    }

    fn from_ureq(mut answer: ureq::http::Response<ureq::Body>) -> Self {
        let headers = answer
            .headers()
            .iter()
            .map(|(name, value)| (name.as_str().to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned()));
        let headers = headers.collect();
        let body = answer.body_mut().with_config().limit(64 << 20).read_to_vec().expect("a whole body");
        Self { status: answer.status().as_u16(), headers, body }
    }

    /// The value of a header.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// The body as text.
    ///
    /// # Panics
    /// If it is not UTF-8.
    #[must_use]
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("UTF-8")
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// If it is not JSON.
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// The events of a stream in which each has a name, which is its data's `type` too; without comments.
    ///
    /// # Panics
    /// If the stream has another form.
    #[must_use]
    pub fn named_events(&self) -> Vec<serde_json::Value> {
        let named = self.frames().map(|event| {
            let (name, data) = event.split_once('\n').expect("two lines");
            let data = data.strip_prefix("data: ").expect("a data line");
            let data: serde_json::Value = serde_json::from_str(data).expect("JSON");
            assert_eq!(name.strip_prefix("event: "), data["type"].as_str(), "{event}");
            data
        });
        named.collect()
    }

    /// The `data:` lines of an event stream, without comments.
    ///
    /// # Panics
    /// If the stream has another form.
    #[must_use]
    pub fn events(&self) -> Vec<String> {
        self.frames().map(|event| event.strip_prefix("data: ").expect("a data line").to_owned()).collect()
    }

    /// What stands between the blank lines of an event stream, without comments.
    fn frames(&self) -> impl Iterator<Item = &str> {
        let text = self.text();
        assert!(text.ends_with("\n\n"), "the stream does not end with a blank line");
        text.split("\n\n").filter(|event| !event.is_empty() && !event.starts_with(':'))
    }
}
