//! Sockets, connections, and their end.
//!
//! Every listener has a task that accepts, every connection a task that serves it. Accepting goes on while the server
//! drains, so that late clients get a 503 instead of a refused connection; it stops in [`Shutdown::wait`].

use std::convert::Infallible;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tracing::{debug, info, warn};

use super::App;
use super::connection::{Connection, Patience, Phase};
use super::tls::Tls;
use crate::config::ListenAddress;
use crate::supervisor::StreamSocket;

/// A connection without a request.
const IDLE_MAX: Duration = Duration::from_secs(75);
/// Bytes and headers of a request head.
const HEAD_BYTES_MAX: usize = 32 << 10;
const HEADERS_MAX: usize = 100;
/// A pause after accepting failed, for example because there are no file descriptors left.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// A bound socket, and how it is spoken to.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    tls: Option<Tls>,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    /// With the file to remove in the end, if it is ours.
    Unix {
        listener: UnixListener,
        _file: Option<SocketFile>,
    },
}

/// A socket's file, removed on drop.
#[derive(Debug)]
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Listener {
    /// Binds an address. A Unix socket's file that nobody listens on any more is replaced; the new one gets `mode`.
    ///
    /// # Errors
    /// If the address cannot be bound, or is that of a socket to be handed over.
    pub async fn bind(address: &ListenAddress, mode: u32) -> io::Result<Self> {
        let socket = match address {
            ListenAddress::Tcp(address) => Socket::Tcp(TcpListener::bind(address).await?),
            ListenAddress::Unix(path) => {
                remove_stale_socket(path).await?;
                let listener = UnixListener::bind(path)?;
                let file = SocketFile(path.clone());
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
                Socket::Unix { listener, _file: Some(file) }
            }
            ListenAddress::Systemd(_) => {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not for us to bind"));
            }
        };
        Ok(Self { socket, tls: None })
    }

    /// A socket that was handed over. Its file, if it has one, stays.
    ///
    /// # Errors
    /// If it cannot be waited for.
    pub fn inherited(socket: StreamSocket) -> io::Result<Self> {
        let socket = match socket {
            StreamSocket::Tcp(listener) => Socket::Tcp(TcpListener::from_std(listener)?),
            StreamSocket::Unix(listener) => Socket::Unix { listener: UnixListener::from_std(listener)?, _file: None },
        };
        Ok(Self { socket, tls: None })
    }

    /// Speaks TLS if this is a TCP port; a Unix socket needs none.
    #[must_use]
    pub fn with_tls(mut self, tls: Option<Tls>) -> Self {
        self.tls = tls.filter(|_| matches!(self.socket, Socket::Tcp(_)));
        self
    }

    /// Where it listens, with the port that was chosen.
    ///
    /// # Errors
    /// If the system does not say.
    pub fn address(&self) -> io::Result<ListenAddress> {
        match &self.socket {
            Socket::Tcp(listener) => Ok(ListenAddress::Tcp(listener.local_addr()?)),
            Socket::Unix { listener, .. } => {
                let address = listener.local_addr()?;
                Ok(ListenAddress::Unix(address.as_pathname().unwrap_or(Path::new("")).to_owned()))
            }
        }
    }
}

async fn remove_stale_socket(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => {}
        // Nothing there, or something that is not ours to remove: binding says so.
        _ => return Ok(()),
    }
    match UnixStream::connect(path).await {
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens on this socket")),
        Err(_) => std::fs::remove_file(path),
    }
}

/// What a request's connection came in through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Via {
    /// A TCP address that only this machine reaches: the `Host` header is checked.
    Loopback,
    /// Another TCP address.
    Network,
    /// A Unix socket.
    UnixSocket,
}

/// The end of serving. While the server drains it goes on accepting, see the module.
#[derive(Clone, Debug)]
pub struct Shutdown {
    closing: watch::Sender<bool>,
    /// Each connection and each listener holds a clone of the sender; when all are gone, receiving ends.
    open: Arc<std::sync::Mutex<Option<mpsc::Sender<Infallible>>>>,
    ended: Arc<tokio::sync::Mutex<mpsc::Receiver<Infallible>>>,
}

impl Default for Shutdown {
    fn default() -> Self {
        let (open, ended) = mpsc::channel(1);
        Self {
            closing: watch::Sender::new(false),
            open: Arc::new(std::sync::Mutex::new(Some(open))),
            ended: Arc::new(tokio::sync::Mutex::new(ended)),
        }
    }
}

impl Shutdown {
    /// Stops accepting, closes idle connections, and waits up to `grace` for the answers that are still being written
    /// and for the files of Unix sockets to be removed.
    pub async fn wait(&self, grace: Duration) {
        self.closing.send_replace(true);
        self.open_connections().take();
        let ended = async { self.ended.lock().await.recv().await };
        if tokio::time::timeout(grace, ended).await.is_err() {
            warn!("some connections did not end in time");
        }
    }

    fn open_connections(&self) -> std::sync::MutexGuard<'_, Option<mpsc::Sender<Infallible>>> {
        self.open.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Marks a request whose path does not lie below the prefix that all routes have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutsidePrefix;

/// Serves `app` on every listener until [`Shutdown::wait`], with at most `connections_max` connections open.
///
/// # Errors
/// If a listener does not know its address.
pub async fn serve(listeners: Vec<Listener>, app: App, connections_max: usize) -> io::Result<()> {
    let router = super::router(app.clone());
    let prefix: Arc<str> = app.options().prefix.as_str().into();
    // A listener that waits for a connection holds a permit. With one for each further listener, every one of them can
    // have as many connections as are allowed.
    let permits = Arc::new(Semaphore::new(connections_max + listeners.len().saturating_sub(1)));
    let mut tasks = tokio::task::JoinSet::new();
    for listener in listeners {
        let address = listener.address()?;
        match &address {
            ListenAddress::Tcp(address) if listener.tls.is_some() => info!("listening on https://{address}"),
            ListenAddress::Tcp(address) => info!("listening on http://{address}"),
            ListenAddress::Unix(_) | ListenAddress::Systemd(_) => info!("listening on {address}"),
        }
        let via = match &address {
            ListenAddress::Unix(_) | ListenAddress::Systemd(_) => Via::UnixSocket,
            tcp if tcp.is_private() => Via::Loopback,
            ListenAddress::Tcp(_) => Via::Network,
        };
        let acceptor = Acceptor {
            router: router.clone(),
            prefix: Arc::clone(&prefix),
            permits: Arc::clone(&permits),
            shutdown: app.shutdown(),
            via,
        };
        let open = acceptor.shutdown.open_connections().clone();
        tasks.spawn(async move {
            accept(&listener, acceptor).await;
            // In this order: nobody waits for us any more once `open` is gone.
            drop(listener);
            drop(open);
        });
    }
    while tasks.join_next().await.is_some() {}
    Ok(())
}

/// What a listener's task needs.
struct Acceptor {
    router: Router,
    prefix: Arc<str>,
    permits: Arc<Semaphore>,
    shutdown: Shutdown,
    via: Via,
}

async fn accept(listener: &Listener, acceptor: Acceptor) {
    let mut closing = acceptor.shutdown.closing.subscribe();
    loop {
        let Ok(permit) = Arc::clone(&acceptor.permits).acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = next(listener) => accepted,
            () = closed(&mut closing) => return,
        };
        let stream = match accepted {
            Ok(stream) => stream,
            Err(error) => {
                warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let Some(open) = acceptor.shutdown.open_connections().clone() else { return };
        let service =
            Service { router: acceptor.router.clone(), prefix: Arc::clone(&acceptor.prefix), via: acceptor.via };
        let (tls, closing) = (listener.tls.clone(), closing.clone());
        tokio::spawn(async move {
            match secured(stream, tls).await {
                Ok(stream) => serve_connection(stream, service, closing).await,
                Err(error) => debug!(%error, "a TLS handshake failed"),
            }
            drop((permit, open));
        });
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

async fn secured(stream: Box<dyn Stream>, tls: Option<Tls>) -> io::Result<Box<dyn Stream>> {
    Ok(match tls {
        Some(tls) => Box::new(tls.accept(stream).await?),
        None => stream,
    })
}

async fn next(listener: &Listener) -> io::Result<Box<dyn Stream>> {
    Ok(match &listener.socket {
        Socket::Tcp(listener) => {
            let (stream, _) = listener.accept().await?;
            // Events are small and must not wait for each other.
            stream.set_nodelay(true)?;
            Box::new(stream)
        }
        Socket::Unix { listener, .. } => Box::new(listener.accept().await?.0),
    })
}

/// What answers the requests of a connection.
struct Service {
    router: Router,
    prefix: Arc<str>,
    via: Via,
}

impl Service {
    /// Routes know nothing of the prefix: it is taken off here.
    fn strip_prefix(&self, request: &mut Request) {
        if self.prefix.is_empty() {
            return;
        }
        let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
        let inner = target.strip_prefix(&*self.prefix).filter(|rest| rest.starts_with('/'));
        match inner.and_then(|inner| inner.parse().ok()) {
            Some(uri) => *request.uri_mut() = uri,
            None => {
                request.extensions_mut().insert(OutsidePrefix);
            }
        }
    }
}

async fn serve_connection(stream: Box<dyn Stream>, own: Service, mut closing: watch::Receiver<bool>) {
    let phase = Phase::default();
    let io = TokioIo::new(Connection::new(stream, phase.clone(), Patience::default()));
    let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let busy = phase.busy();
        let mut request: Request = request.map(Body::new);
        request.extensions_mut().insert(own.via);
        own.strip_prefix(&mut request);
        let answer = hyper::service::Service::call(&TowerToHyperService::new(own.router.clone()), request);
        async move {
            let answer = answer.await?;
            Ok::<_, Infallible>(answer.map(|body| with_guard(body, busy)))
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_MAX)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(io, service);
    let mut connection = std::pin::pin!(connection);
    let outcome = tokio::select! {
        outcome = connection.as_mut() => outcome,
        () = closed(&mut closing) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = outcome {
        debug!(%error, "a connection broke off");
    }
}

async fn closed(closing: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, which is an end as well.
    let _ = closing.wait_for(|closing| *closing).await;
}

/// `body`, holding `guard` until it has been sent or dropped. Bodies of known length stay so.
fn with_guard<G: Send + Unpin + 'static>(body: Body, guard: G) -> Body {
    watched(body, guard, |_| {})
}

/// `body`, holding `guard` until it has been sent or dropped, and telling it when the last byte was given out.
pub(crate) fn watched<G: Send + Unpin + 'static>(
    body: Body,
    guard: G,
    at_end: impl Fn(&mut G) + Send + Unpin + 'static,
) -> Body {
    Body::new(Watched { body, guard, at_end })
}

struct Watched<G, F> {
    body: Body,
    guard: G,
    at_end: F,
}

impl<G: Send + Unpin + 'static, F: Fn(&mut G) + Send + Unpin + 'static> axum::body::HttpBody for Watched<G, F> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        let frame = std::pin::Pin::new(&mut this.body).poll_frame(cx);
        if matches!(frame, std::task::Poll::Ready(None)) {
            (this.at_end)(&mut this.guard);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}
