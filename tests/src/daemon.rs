//! `minnowd serve` as an operator runs it: with any environment and any descriptors, its log kept, over TCP, TLS or a
//! Unix socket.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::program::{Reply, path};

/// Longest wait for anything.
const WAIT_MAX: Duration = Duration::from_secs(120);

/// A running `minnowd serve`, killed on drop.
pub struct Daemon {
    child: Child,
    log: Arc<Mutex<String>>,
}

impl Daemon {
    /// Starts it with options on a port of its own.
    #[must_use]
    pub fn start(options: &[&str]) -> Self {
        let mut command = Command::new(path("minnowd"));
        command.args(["serve", "--listen", "127.0.0.1:0"]).args(options);
        Self::spawn(command)
    }

    /// Starts whatever `command` is, which in the end is `minnowd serve`.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn spawn(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("minnowd starts");
        let log = Arc::new(Mutex::new(String::new()));
        let lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let written = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let mut log = written.lock().unwrap_or_else(PoisonError::into_inner);
                log.push_str(&line);
                log.push('\n');
            }
        });
        Self { child, log }
    }

    /// What it has logged so far.
    #[must_use]
    pub fn log(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until the log has `words`, and gives the line with them.
    ///
    /// # Panics
    /// If they do not come.
    pub fn wait_for(&self, words: &str) -> String {
        wait_until(words, || self.log().lines().find(|line| line.contains(words)).map(str::to_owned))
    }

    /// Where it listens by TCP.
    ///
    /// # Panics
    /// If it does not.
    pub fn address(&self) -> SocketAddr {
        let line = self.wait_for("listening on http");
        let (_, address) = line.split_once("://").expect("an address");
        address.trim().parse().expect("an address")
    }

    /// Waits until it serves, and gives its address.
    pub fn ready(&self) -> SocketAddr {
        self.wait_for(" ready ");
        self.address()
    }

    /// Sends a signal.
    ///
    /// # Panics
    /// If the process is gone.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let id = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(id, signal).expect("a running process");
    }

    /// Waits for the end.
    ///
    /// # Panics
    /// If it does not come.
    pub fn end(&mut self) -> ExitStatus {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a process") {
                return status;
            }
            assert!(started.elapsed() < WAIT_MAX, "it does not end: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The process's number.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for something, `what` in the message if it does not come.
///
/// # Panics
/// If it does not come.
pub fn wait_until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < WAIT_MAX, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Bytes of a request: `headers` are whole lines without their ends.
#[must_use]
pub fn request(method: &str, target: &str, headers: &[&str], body: &str) -> Vec<u8> {
    let mut head = format!("{method} {target} HTTP/1.1\r\nhost: localhost\r\n");
    for header in headers {
        head.push_str(header);
        head.push_str("\r\n");
    }
    if !body.is_empty() {
        head.push_str(&format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len()));
    }
    format!("{head}\r\n{body}").into_bytes()
}

/// One request on a connection of its own.
///
/// # Panics
/// If nobody listens or no answer comes.
#[must_use]
pub fn ask(address: SocketAddr, request: &[u8]) -> Reply {
    let stream = TcpStream::connect(address).expect("a listening server");
    stream.set_read_timeout(Some(WAIT_MAX)).expect("a socket");
    ask_over(stream, request)
}

/// One request on `stream`.
///
/// # Panics
/// If no answer comes.
#[must_use]
pub fn ask_over(mut stream: impl Read + Write, request: &[u8]) -> Reply {
    stream.write_all(request).expect("a listening server");
    Reply::read(&mut BufReader::new(stream))
}

/// What a supervisor was told: datagrams in order.
pub struct Told {
    socket: UnixDatagram,
    seen: Vec<String>,
}

impl Told {
    /// Listens at a path, to be given to a process as `NOTIFY_SOCKET`.
    ///
    /// # Panics
    /// If it cannot.
    #[must_use]
    pub fn at(path: &std::path::Path) -> Self {
        let socket = UnixDatagram::bind(path).expect("a socket");
        socket.set_nonblocking(true).expect("a socket");
        Self { socket, seen: Vec::new() }
    }

    /// Everything so far.
    pub fn all(&mut self) -> &[String] {
        let mut bytes = [0; 4096];
        while let Ok(count) = self.socket.recv(&mut bytes) {
            self.seen.push(String::from_utf8_lossy(&bytes[..count]).into_owned());
        }
        &self.seen
    }

    /// Number of datagrams with a line that begins so.
    pub fn count(&mut self, line: &str) -> usize {
        self.all().iter().filter(|told| told.lines().any(|told| told.starts_with(line))).count()
    }
}
