//! What systemd, or whoever speaks its protocols, gives a process and wants to know of it: listening sockets, a place to
//! report to, a watchdog. Without any of them everything here does nothing.
//!
//! The protocols are `sd_listen_fds(3)` and `sd_notify(3)`: variables of the environment and datagrams. libsystemd is not
//! needed for them.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{AddressFamily, SocketType, sockopt};
use thiserror::Error;
use tracing::warn;

/// The first descriptor that is handed over.
const FIRST_FD: RawFd = 3;
/// More are not taken for real.
const FDS_MAX: RawFd = 256;
/// The variables of both protocols.
const VARIABLES: [&str; 6] =
    ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"];

/// Why sockets that were handed over cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum SocketError {
    /// A count that is none.
    #[error("LISTEN_FDS is {0:?}, expected a number from 1 to {FDS_MAX}")]
    Count(OsString),
    /// A descriptor that is not open.
    #[error("LISTEN_FDS promises descriptor {0}, which is not open")]
    Closed(RawFd),
    /// Something that cannot be accepted from.
    #[error("descriptor {0} is no listening TCP or Unix stream socket")]
    NotListening(RawFd),
}

/// A listening stream socket that was handed over.
#[derive(Debug)]
pub struct InheritedSocket {
    /// Its name in `FileDescriptorName=`; without one, that of the unit, or `unknown`.
    pub name: String,
    /// What it listens on.
    pub socket: StreamSocket,
}

/// A listening socket, by its kind.
#[derive(Debug)]
pub enum StreamSocket {
    /// A TCP port.
    Tcp(std::net::TcpListener),
    /// A Unix socket, whose file belongs to whoever made it.
    Unix(std::os::unix::net::UnixListener),
}

/// What the environment said.
#[derive(Debug)]
pub struct Supervisor {
    /// Sockets to listen on.
    pub sockets: Result<Vec<InheritedSocket>, SocketError>,
    /// Where to report.
    pub notify: Notify,
    /// Without a sign of life for so long, the process is killed.
    pub watchdog: Option<Duration>,
}

impl Default for Supervisor {
    /// Nobody.
    fn default() -> Self {
        Self { sockets: Ok(Vec::new()), notify: Notify::default(), watchdog: None }
    }
}

/// The variables, as far as they are meant for this process.
#[derive(Debug, Default, PartialEq, Eq)]
struct Variables {
    fds: Option<OsString>,
    names: Vec<String>,
    notify: Option<OsString>,
    watchdog: Option<Duration>,
}

impl Variables {
    fn read(variable: impl Fn(&str) -> Option<OsString>, process: u32) -> Self {
        let number = |name: &str| variable(name)?.to_str()?.parse::<u64>().ok();
        let is_ours = |name: &str| variable(name).is_none() || number(name) == Some(process.into());
        let has_fds = number("LISTEN_PID") == Some(process.into());
        let names = variable("LISTEN_FDNAMES").unwrap_or_default();
        Self {
            fds: variable("LISTEN_FDS").filter(|_| has_fds),
            names: names.to_string_lossy().split(':').map(str::to_owned).collect(),
            notify: variable("NOTIFY_SOCKET"),
            watchdog: number("WATCHDOG_USEC")
                .filter(|&usec| usec > 0 && is_ours("WATCHDOG_PID"))
                .map(Duration::from_micros),
        }
    }
}

impl Supervisor {
    /// Takes what was handed over, and removes it from the environment.
    ///
    /// # Safety
    /// No other thread runs, and nothing was opened in this process yet: it must be the first thing that `main` does.
    #[must_use]
    pub unsafe fn from_environment() -> Self {
        let variables = Variables::read(|name| std::env::var_os(name), std::process::id());
        for name in VARIABLES {
            // SAFETY: the caller says that no other thread runs that could read the environment.
            unsafe { std::env::remove_var(name) };
        }
        // SAFETY: `LISTEN_PID` was this process, so these descriptors were opened for it; the caller says that nothing
        // else was.
        let sockets = unsafe { take_sockets(variables.fds, &variables.names) };
        Self { sockets, notify: Notify::to(variables.notify), watchdog: variables.watchdog }
    }
}

/// # Safety
/// Descriptors from [`FIRST_FD`] on, as many as `count` says, belong to the caller if they are open.
unsafe fn take_sockets(count: Option<OsString>, names: &[String]) -> Result<Vec<InheritedSocket>, SocketError> {
    let Some(count) = count else { return Ok(Vec::new()) };
    let number = count.to_str().and_then(|count| count.parse().ok()).filter(|count| (1..=FDS_MAX).contains(count));
    let number: RawFd = number.ok_or_else(|| SocketError::Count(count.clone()))?;
    let mut sockets = Vec::new();
    for fd in FIRST_FD..FIRST_FD + number {
        // SAFETY: the number is not -1, and the borrow ends with this statement, in which the kernel says whether it is
        // open. Nothing else closes it meanwhile.
        let is_open = fcntl_setfd(unsafe { BorrowedFd::borrow_raw(fd) }, FdFlags::CLOEXEC).is_ok();
        if !is_open {
            return Err(SocketError::Closed(fd));
        }
        // SAFETY: it is open, and the caller says that it is ours; each number is taken once.
        let owned = unsafe { OwnedFd::from_raw_fd(fd) };
        let name = names.get(sockets.len()).filter(|name| !name.is_empty());
        let name = name.map_or_else(|| "unknown".to_owned(), Clone::clone);
        let socket = StreamSocket::new(owned).ok_or(SocketError::NotListening(fd))?;
        sockets.push(InheritedSocket { name, socket });
    }
    Ok(sockets)
}

impl StreamSocket {
    /// `None` if connections cannot be accepted from it, by way of TCP or a Unix socket.
    fn new(fd: OwnedFd) -> Option<Self> {
        let is_listening = sockopt::socket_acceptconn(&fd) == Ok(true);
        if !is_listening || sockopt::socket_type(&fd) != Ok(SocketType::STREAM) {
            return None;
        }
        rustix::io::ioctl_fionbio(fd.as_fd(), true).ok()?;
        match sockopt::socket_domain(&fd).ok()? {
            AddressFamily::INET | AddressFamily::INET6 => Some(Self::Tcp(fd.into())),
            AddressFamily::UNIX => Some(Self::Unix(fd.into())),
            _ => None,
        }
    }
}

/// Where to report. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Notify(Option<Arc<(UnixDatagram, SocketAddr)>>);

impl Notify {
    /// Reports to the socket of that path, or of that abstract name after `@`.
    fn to(place: Option<OsString>) -> Self {
        let Some(place) = place.filter(|place| !place.is_empty()) else { return Self::default() };
        let bound = || -> io::Result<(UnixDatagram, SocketAddr)> {
            let address = match place.as_bytes() {
                [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
                [b'/', ..] => SocketAddr::from_pathname(&place)?,
                _ => return Err(io::Error::new(io::ErrorKind::Unsupported, "neither a path nor an abstract name")),
            };
            let socket = UnixDatagram::unbound()?;
            socket.set_nonblocking(true)?;
            Ok((socket, address))
        };
        match bound() {
            Ok(bound) => Self(Some(Arc::new(bound))),
            Err(error) => {
                // The log has not begun yet.
                eprintln!("minnowd: NOTIFY_SOCKET {}: {error}; nothing is reported", place.display());
                Self::default()
            }
        }
    }

    /// Whether anyone listens.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.0.is_some()
    }

    /// Sends `NAME=value` lines. What cannot be sent is lost: nobody is waited for.
    pub fn send(&self, lines: &str) {
        if let Some(bound) = &self.0
            && let Err(error) = bound.0.send_to_addr(lines.as_bytes(), &bound.1)
        {
            warn!(%error, "the supervisor could not be told: {lines}");
        }
    }

    /// What `systemctl status` shows.
    pub fn status(&self, text: &str) {
        self.send(&format!("STATUS={text}"));
    }

    /// Work that takes longer than units may usually take goes on, at least for `time`.
    pub fn extend_timeout(&self, time: Duration) {
        self.send(&format!("EXTEND_TIMEOUT_USEC={}", time.as_micros()));
    }

    /// Settings are about to be read again; [`ready`](Self::ready) ends that.
    pub fn reloading(&self) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let microseconds = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1000;
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={microseconds}"));
    }

    /// Requests are served.
    pub fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={status}"));
    }

    /// The process is about to end.
    pub fn stopping(&self, status: &str) {
        self.send(&format!("STOPPING=1\nSTATUS={status}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Variables {
        let find = |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
        Variables::read(find, 42)
    }

    #[test]
    fn variables_for_another_process_are_none() {
        let ours = read(&[("LISTEN_PID", "42"), ("LISTEN_FDS", "2"), ("LISTEN_FDNAMES", "a:b")]);
        assert_eq!((ours.fds, ours.names), (Some("2".into()), vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(read(&[("LISTEN_PID", "41"), ("LISTEN_FDS", "2")]).fds, None);
        assert_eq!(read(&[("LISTEN_FDS", "2")]).fds, None, "without a process they are nobody's");
        let second = Some(Duration::from_secs(1));
        for (pid, watchdog) in [(None, second), (Some("42"), second), (Some("41"), None), (Some("x"), None)] {
            let mut pairs = vec![("WATCHDOG_USEC", "1000000")];
            pairs.extend(pid.map(|pid| ("WATCHDOG_PID", pid)));
            assert_eq!(read(&pairs).watchdog, watchdog, "{pid:?}");
        }
        assert_eq!(read(&[("WATCHDOG_USEC", "0")]).watchdog, None);
    }

    #[test]
    fn counts_that_make_no_sense_are_refused() {
        for count in ["", "x", "0", "-1", "257", "99999999999999999999"] {
            // SAFETY: such counts are refused before any descriptor is looked at.
            let refused = unsafe { take_sockets(Some(count.into()), &[]) };
            assert_eq!(refused.unwrap_err(), SocketError::Count(count.into()));
        }
    }

    #[test]
    fn reports_arrive_at_paths_and_abstract_names() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let name = format!("minnowd-test-{}", std::process::id());
        for (place, receiver) in [
            (path.clone().into_os_string(), UnixDatagram::bind(&path).unwrap()),
            (
                format!("@{name}").into(),
                UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name.as_bytes()).unwrap()).unwrap(),
            ),
        ] {
            let notify = Notify::to(Some(place));
            assert!(notify.is_there());
            notify.ready("serving");
            let mut bytes = [0; 100];
            let count = receiver.recv(&mut bytes).unwrap();
            assert_eq!(&bytes[..count], b"READY=1\nSTATUS=serving");
        }
        assert!(!Notify::to(None).is_there() && !Notify::to(Some("vsock:2:1".into())).is_there());
    }

    #[test]
    fn only_listening_stream_sockets_are_taken() {
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let connected = std::net::TcpStream::connect(tcp.local_addr().unwrap()).unwrap();
        assert!(matches!(StreamSocket::new(tcp.into()), Some(StreamSocket::Tcp(_))));
        assert!(StreamSocket::new(connected.into()).is_none());
        let folder = tempfile::tempdir().unwrap();
        let unix = std::os::unix::net::UnixListener::bind(folder.path().join("s")).unwrap();
        assert!(matches!(StreamSocket::new(unix.into()), Some(StreamSocket::Unix(_))));
        let datagram = UnixDatagram::unbound().unwrap();
        assert!(StreamSocket::new(datagram.into()).is_none());
        assert!(StreamSocket::new(std::fs::File::open("/dev/null").unwrap().into()).is_none());
    }
}
