//! Event streams: frames as a dialect writes them, a sign of life when silent.
//!
//! A [`Teller`] turns engine events into frames and is pure; [`bytes`] pulls events and gives what it says. Hyper asks for
//! the next bytes only when the client has taken the last ones, so a slow client slows its own sequences down. When the
//! client is gone the body is dropped, and with it the jobs.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_util::Stream;
use futures_util::stream::unfold;
use serde_json::Value;

use super::answer::Done;
use super::error::ApiError;
use super::running::{Running, report};
use crate::engine::Event;

/// How a dialect of the API tells an answer: as a whole, or as a stream that begins, takes events, and ends or fails.
pub(crate) trait Teller: Send {
    /// The whole answer.
    fn whole(&mut self, done: Vec<Done>) -> Value;

    /// The request has left the queue; this many tokens of its prompt were in the cache.
    fn begin(&mut self, cached_tokens: usize, frames: &mut Frames);

    /// Something happened to a choice, anything but a failure.
    fn take(&mut self, choice: usize, event: Event, frames: &mut Frames);

    /// Every choice has finished.
    fn end(&mut self, frames: &mut Frames);

    /// Nothing more will come.
    fn fail(&mut self, error: &ApiError, frames: &mut Frames);

    /// What silence is broken with: a comment, unless the dialect has something of its own.
    fn ping(&self, frames: &mut Frames) {
        frames.comment();
    }
}

/// Events on the wire.
#[derive(Debug, Default)]
pub(crate) struct Frames(Vec<u8>);

impl Frames {
    /// One event without a name.
    pub(crate) fn data(&mut self, data: &Value) {
        // JSON text has no raw line breaks, so one line is one event.
        self.0.extend_from_slice(format!("data: {data}\n\n").as_bytes());
    }

    /// One event with a name, which is its data's `type` too.
    pub(crate) fn named(&mut self, name: &str, data: &Value) {
        self.0.extend_from_slice(format!("event: {name}\ndata: {data}\n\n").as_bytes());
    }

    /// What streams of the completions API end with.
    pub(crate) fn done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn comment(&mut self) {
        self.0.extend_from_slice(b":\n\n");
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// An answer on its way, and how far it is.
struct Telling {
    running: Running,
    teller: Box<dyn Teller>,
    ping: Option<Duration>,
    /// Choices that have not finished.
    open: usize,
    has_begun: bool,
}

/// The bytes of an answer whose request has left the queue. `ping`: silence after which there is a sign of life.
pub(crate) fn bytes(
    running: Running,
    teller: Box<dyn Teller>,
    ping: Option<Duration>,
) -> impl Stream<Item = Bytes> + Send {
    let open = running.count();
    let telling = Telling { running, teller, ping, open, has_begun: false };
    unfold(Some(telling), |telling| async move {
        let mut telling = telling?;
        let mut frames = Frames::default();
        let is_over = telling.go_on(&mut frames).await;
        Some((Bytes::from(frames.0), (!is_over).then_some(telling)))
    })
}

impl Telling {
    /// Waits until there is something to say. True if it was the last.
    async fn go_on(&mut self, frames: &mut Frames) -> bool {
        if !std::mem::replace(&mut self.has_begun, true) {
            self.teller.begin(self.running.cached_tokens, frames);
        }
        while frames.is_empty() {
            let next = self.running.next();
            let next = match self.ping {
                None => Ok(next.await),
                Some(interval) => tokio::time::timeout(interval, next).await,
            };
            match next {
                Err(_) => self.teller.ping(frames),
                Ok((_, Event::Failed(error))) => {
                    self.teller.fail(&report(error), frames);
                    return true;
                }
                Ok((choice, event)) => {
                    self.open -= usize::from(matches!(event, Event::Finished(_)));
                    self.teller.take(choice, event, frames);
                    if self.open == 0 {
                        self.teller.end(frames);
                        return true;
                    }
                }
            }
        }
        false
    }
}

/// The answer whose body is an event stream.
pub(crate) fn events(body: Body) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, body).into_response()
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::json;

    use super::*;

    impl Frames {
        /// The data of every event, `[DONE]` as a string.
        pub(crate) fn events(&self) -> Vec<Value> {
            let text = std::str::from_utf8(&self.0).unwrap();
            let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
            data.map(|data| serde_json::from_str(data).unwrap_or_else(|_| json!(data))).collect()
        }
    }

    #[test]
    fn an_event_is_one_data_line() {
        let mut frames = Frames::default();
        frames.data(&json!({"a": "x\ny\u{2028}"}));
        frames.done();
        assert_eq!(std::str::from_utf8(&frames.0).unwrap(), "data: {\"a\":\"x\\ny\u{2028}\"}\n\ndata: [DONE]\n\n");
    }
}
