//! One accepted connection, with the clocks that `hyper` does not keep.
//!
//! - A request head must be complete some time after its first byte. (`hyper`'s own timer also runs between requests,
//!   where clients may idle for longer.)
//! - A write that is stuck for too long ends the connection: its reader counts as gone.
//! - Closing reads on for a moment. Bytes that were never read would make the kernel reset the connection, and the
//!   client would lose the answer that says why its body was refused.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// How long a client may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// From the first byte of a request to the end of its head.
    pub head: Duration,
    /// A write that makes no progress.
    pub write: Duration,
    /// Reading on after the last answer.
    pub linger: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { head: Duration::from_secs(10), write: Duration::from_secs(60), linger: Duration::from_secs(1) }
    }
}

/// Where a connection stands between requests. Shared by the stream and the service on top of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Phase(Arc<AtomicU8>);

impl Phase {
    const IDLE: u8 = 0;
    const HEAD: u8 = 1;
    const BUSY: u8 = 2;

    /// A request's head is complete; the guard lives as long as its answer.
    pub(crate) fn busy(&self) -> Busy {
        self.0.store(Self::BUSY, Ordering::Relaxed);
        Busy(self.clone())
    }

    fn is(&self, phase: u8) -> bool {
        self.0.load(Ordering::Relaxed) == phase
    }
}

/// A request that is being answered.
#[derive(Debug)]
pub(crate) struct Busy(Phase);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.0.store(Phase::IDLE, Ordering::Relaxed);
    }
}

/// A byte stream with clocks.
#[derive(Debug)]
pub(crate) struct Connection<S> {
    stream: S,
    phase: Phase,
    patience: Patience,
    head: Option<Pin<Box<Sleep>>>,
    write: Option<Pin<Box<Sleep>>>,
    linger: Option<Pin<Box<Sleep>>>,
    is_shut: bool,
}

impl<S> Connection<S> {
    /// Watches `stream`; `phase` is told by the service when heads and answers are complete.
    pub(crate) fn new(stream: S, phase: Phase, patience: Patience) -> Self {
        Self { stream, phase, patience, head: None, write: None, linger: None, is_shut: false }
    }

    /// Passes a write's outcome on, unless it has been pending for too long.
    fn watch_write<T>(&mut self, cx: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.write = None;
            return outcome;
        }
        let limit = self.patience.write;
        let clock = self.write.get_or_insert_with(|| Box::pin(sleep(limit)));
        ready!(clock.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut this.stream).poll_read(cx, buffer);
        if outcome.is_ready() {
            let is_first = buffer.filled().len() > before && this.phase.is(Phase::IDLE);
            if is_first {
                this.phase.0.store(Phase::HEAD, Ordering::Relaxed);
                this.head = Some(Box::pin(sleep(this.patience.head)));
            }
            return outcome;
        }
        match &mut this.head {
            Some(clock) if this.phase.is(Phase::HEAD) => {
                ready!(clock.as_mut().poll(cx));
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
            _ => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.watch_write(cx, outcome)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_write_vectored(cx, slices);
        this.watch_write(cx, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_flush(cx);
        this.watch_write(cx, outcome)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.is_shut {
            ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
            this.is_shut = true;
        }
        let limit = this.patience.linger;
        let clock = this.linger.get_or_insert_with(|| Box::pin(sleep(limit)));
        let mut scrap = [0u8; 4096];
        loop {
            if clock.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            let mut buffer = ReadBuf::new(&mut scrap);
            match ready!(Pin::new(&mut this.stream).poll_read(cx, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {}
                _ => return Poll::Ready(Ok(())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::net::UnixStream;

    use super::*;

    fn short() -> Patience {
        let moment = Duration::from_millis(100);
        Patience { head: moment, write: moment, linger: moment }
    }

    async fn read(connection: &mut Connection<UnixStream>) -> io::Result<usize> {
        let mut bytes = [0; 64];
        let mut buffer = ReadBuf::new(&mut bytes);
        poll_fn(|cx| Pin::new(&mut *connection).poll_read(cx, &mut buffer)).await?;
        Ok(buffer.filled().len())
    }

    /// Writes until nothing more is taken; gives what was written before that.
    async fn write_until_stuck(connection: &mut Connection<UnixStream>) -> (usize, io::Error) {
        let mut written = 0;
        loop {
            match poll_fn(|cx| Pin::new(&mut *connection).poll_write(cx, &[7; 4096])).await {
                Ok(count) => written += count,
                Err(error) => return (written, error),
            }
        }
    }

    #[tokio::test]
    async fn a_reader_that_takes_nothing_is_given_up_and_a_slow_one_is_not() {
        let (near, far) = UnixStream::pair().unwrap();
        let mut connection = Connection::new(near, Phase::default(), short());
        let slow = tokio::spawn(async move {
            let mut piece = vec![0; 1 << 20];
            for _ in 0..5 {
                sleep(short().write / 2).await;
                far.readable().await.unwrap();
                let _ = far.try_read(&mut piece);
            }
            far
        });
        let (written, error) = write_until_stuck(&mut connection).await;
        let _far = slow.await.unwrap();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(written > 5 << 12, "the slow reader was waited for: {written}");
    }

    #[tokio::test]
    async fn a_head_has_its_time_and_an_idle_connection_any() {
        let (near, far) = UnixStream::pair().unwrap();
        let mut connection = Connection::new(near, Phase::default(), short());
        let idle = tokio::time::timeout(short().head * 3, read(&mut connection)).await;
        assert!(idle.is_err(), "nothing has begun, so nothing ends");
        far.writable().await.unwrap();
        far.try_write(b"GET ").unwrap();
        assert_eq!(read(&mut connection).await.unwrap(), 4);
        assert_eq!(read(&mut connection).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
