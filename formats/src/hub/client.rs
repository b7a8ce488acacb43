//! One request to a hub: who asks, where redirects may lead, what a status means, and when to try again.

use std::io::Read;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use ureq::http::{HeaderMap, Request};
use ureq::{Agent, Body, SendBody};

use super::Watch;
use super::error::HubError;
use super::settings::{Settings, Token};

/// Redirects before a request is given up. The hub needs two: an old name, and the content server.
const REDIRECTS_MAX: usize = 5;
/// The longest answer that is read into memory: a page of a listing, with room to spare.
const ANSWER_BYTES_MAX: u64 = 32 << 20;
/// How much of an error's body is looked at.
const COMPLAINT_BYTES_MAX: u64 = 4096;
/// How much of a server's own words is shown.
const SAID_CHARS_MAX: usize = 300;
/// The longest wait that a server may ask for.
const AFTER_MAX: Duration = Duration::from_secs(600);
/// How often a wait looks whether to stop.
const GLANCE: Duration = Duration::from_millis(50);

const CONNECT_MAX: Duration = Duration::from_secs(15);
/// Between two pieces of an answer, or of what is sent.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// From the end of a request to the first byte of the answer. Completing a large upload takes the hub a while.
const ANSWER_MAX: Duration = Duration::from_secs(180);

/// How often, and after which pauses, something that may pass is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Tries without any progress, at least 1.
    pub tries: u32,
    /// The pause after the first; each further one is twice as long.
    pub pause: Duration,
    /// The longest pause.
    pub pause_max: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { tries: 6, pause: Duration::from_millis(500), pause_max: Duration::from_secs(30) }
    }
}

/// A hub, and who asks it.
#[derive(Debug)]
pub struct Hub {
    endpoint: String,
    origin: String,
    token: Option<Token>,
    patience: Patience,
    agent: Agent,
}

/// A request without its body.
#[derive(Clone, Debug)]
pub(super) struct Ask<'a> {
    pub(super) method: &'static str,
    pub(super) url: &'a str,
    pub(super) headers: &'a [(&'a str, &'a str)],
    pub(super) redirects: Redirects,
}

/// How far redirects are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Redirects {
    /// Wherever they lead, but from TLS only to TLS, and with the token to the hub's own host only.
    Followed,
    /// On the hub's own host. The answer that leads elsewhere is what was asked for.
    OnHost,
}

/// What is sent.
pub(super) enum Content<'a> {
    Nothing,
    Bytes(&'a [u8]),
    /// So many bytes of a reader.
    Reader(u64, &'a mut dyn Read),
}

/// An answer that is no refusal.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) headers: HeaderMap,
    pub(super) body: Body,
    /// Whom the answer is from, for messages.
    pub(super) place: String,
}

/// Why a request failed, and whether the next one may not.
#[derive(Debug)]
pub(super) enum Fault {
    /// It may pass; the server may have said when.
    Passing(HubError, Option<Duration>),
    /// It will not.
    Lasting(HubError),
}

impl Hub {
    /// A hub for `settings`. Nothing is sent yet.
    pub fn new(settings: &Settings, patience: Patience) -> Result<Self, HubError> {
        let Settings { endpoint, token, .. } = settings;
        if token.is_some() && endpoint.starts_with("http://") && !is_this_machine(endpoint) {
            return Err(HubError::Plain { endpoint: endpoint.clone() });
        }
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("minnow/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .timeout_connect(Some(CONNECT_MAX))
            .timeout_per_read(Some(SILENCE_MAX))
            .timeout_per_write(Some(SILENCE_MAX))
            .timeout_recv_response(Some(ANSWER_MAX))
            .build()
            .new_agent();
        let origin = origin(endpoint).to_lowercase();
        Ok(Self { endpoint: endpoint.clone(), origin, token: token.clone(), patience, agent })
    }

    /// Its address, without a slash at the end.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Sends one request and follows redirects. Every refusal is a fault; an answer is of the 200s, or with
    /// [`Redirects::OnHost`] of the 300s.
    pub(super) fn once(&self, ask: &Ask<'_>, content: Content<'_>) -> Result<Answer, Fault> {
        let mut url = ask.url.to_owned();
        let mut content = content;
        for _ in 0..=REDIRECTS_MAX {
            let place = shown(&url).to_owned();
            let answer = self.hop(ask, &url, &mut content, &place)?;
            let location = answer.headers.get("location").and_then(|value| value.to_str().ok());
            let (301..=303 | 307 | 308, Some(location)) = (answer.status, location) else {
                return self.judged(answer);
            };
            let redirect = |fault: String| Fault::Lasting(HubError::Redirect { place: place.clone(), fault });
            let next = joined(&url, location).ok_or_else(|| redirect("to what is no address".to_owned()))?;
            if ask.redirects == Redirects::OnHost && !self.is_own(&next) {
                return Ok(answer);
            }
            if url.starts_with("https://") && !next.starts_with("https://") {
                return Err(redirect(format!("to {}, which is not safe", shown(&next))));
            }
            // What was sent may have been read from somewhere; only what can be sent again is.
            if !matches!(content, Content::Nothing)
                && !matches!((answer.status, &content), (307 | 308, Content::Bytes(_)))
            {
                return Err(redirect(format!("to {} while something is sent", shown(&next))));
            }
            url = next;
        }
        let fault = format!("more than {REDIRECTS_MAX} times");
        Err(Fault::Lasting(HubError::Redirect { place: shown(ask.url).to_owned(), fault }))
    }

    /// One request to one place.
    fn hop(&self, ask: &Ask<'_>, url: &str, content: &mut Content<'_>, place: &str) -> Result<Answer, Fault> {
        let mut request = Request::builder().method(ask.method).uri(url);
        for (name, value) in ask.headers {
            request = request.header(*name, *value);
        }
        if let Some(token) = self.token.as_ref().filter(|_| self.is_own(url)) {
            request = request.header("authorization", token.bearer());
        }
        let nonsense = |error: ureq::http::Error| {
            Fault::Lasting(HubError::Nonsense { place: place.to_owned(), fault: format!("no such request: {error}") })
        };
        let sent = match content {
            Content::Nothing => self.agent.run(request.body(SendBody::none()).map_err(nonsense)?),
            Content::Bytes(bytes) => self.agent.run(request.body(*bytes).map_err(nonsense)?),
            Content::Reader(bytes, reader) => {
                let request = request.header("content-length", bytes.to_string());
                self.agent.run(request.body(SendBody::from_reader(*reader)).map_err(nonsense)?)
            }
        };
        let answer = sent.map_err(|error| transport_fault(place, &error))?;
        let (parts, body) = answer.into_parts();
        Ok(Answer { status: parts.status.as_u16(), headers: parts.headers, body, place: place.to_owned() })
    }

    /// The answer, or what its status means.
    fn judged(&self, mut answer: Answer) -> Result<Answer, Fault> {
        let status = answer.status;
        if (200..300).contains(&status) {
            return Ok(answer);
        }
        let place = answer.place.clone();
        let said = self.said(&mut answer);
        let had_token = self.token.is_some();
        let error = match status {
            401 => HubError::Unauthorized { place, had_token, said },
            403 => HubError::Forbidden { place, said },
            404 | 410 => HubError::NotFound { place, said },
            _ => HubError::Status { place, status, said, tries: 1 },
        };
        if !matches!(status, 408 | 425 | 429 | 500 | 502 | 503 | 504) {
            return Err(Fault::Lasting(error));
        }
        let after = answer.headers.get("retry-after").and_then(|value| value.to_str().ok()?.trim().parse().ok());
        Err(Fault::Passing(error, after.map(Duration::from_secs)))
    }

    /// What a refusal says in words: the hub's header, or the usual field of a body.
    fn said(&self, answer: &mut Answer) -> String {
        let header =
            answer.headers.get("x-error-message").map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
        let text = header.or_else(|| {
            let mut body = Vec::new();
            // What cannot be read is not said.
            let _ = answer.body.as_reader().take(COMPLAINT_BYTES_MAX).read_to_end(&mut body);
            let json: serde_json::Value = serde_json::from_slice(&body).ok()?;
            json.get("error").or_else(|| json.get("message"))?.as_str().map(str::to_owned)
        });
        let text: String = text.unwrap_or_default().chars().take(SAID_CHARS_MAX).collect();
        match &self.token {
            Some(token) => token.hidden_in(&text),
            None => text,
        }
    }

    /// Sends a request until it is answered or patience ends, and reads the answer's JSON.
    pub(super) fn json<T: DeserializeOwned>(
        &self,
        ask: &Ask<'_>,
        body: Option<&serde_json::Value>,
        watch: &dyn Watch,
    ) -> Result<(T, HeaderMap), HubError> {
        let body = body.map(|body| body.to_string().into_bytes());
        self.patiently(watch, |_| {
            let content = body.as_deref().map_or(Content::Nothing, Content::Bytes);
            let mut answer = self.once(ask, content)?;
            let mut text = Vec::new();
            let read = answer.body.as_reader().take(ANSWER_BYTES_MAX).read_to_end(&mut text);
            read.map_err(|error| Fault::cut(&answer.place, &error))?;
            let nonsense =
                |error: serde_json::Error| HubError::Nonsense { place: answer.place.clone(), fault: error.to_string() };
            serde_json::from_slice(&text)
                .map(|json| (json, answer.headers))
                .map_err(|error| Fault::Lasting(nonsense(error)))
        })
    }

    /// Does `work` until it succeeds, fails for good, or patience ends. `work` tells when it got further.
    pub(super) fn patiently<T>(
        &self,
        watch: &dyn Watch,
        mut work: impl FnMut(&mut Tries) -> Result<T, Fault>,
    ) -> Result<T, HubError> {
        let mut tries = Tries(0);
        loop {
            if watch.is_stopped() {
                return Err(HubError::Stopped);
            }
            tries.0 += 1;
            match work(&mut tries) {
                Ok(done) => return Ok(done),
                Err(Fault::Lasting(error)) => return Err(error),
                Err(Fault::Passing(error, after)) => {
                    let doubled = self.patience.pause.saturating_mul(1 << (tries.0.max(1) - 1).min(16));
                    let pause = after.unwrap_or(doubled.min(self.patience.pause_max));
                    if tries.0 >= self.patience.tries || pause > AFTER_MAX {
                        return Err(error.after(tries.0));
                    }
                    let shown = pause.as_secs_f64();
                    watch.note(&format!("{error}; trying again in {shown} s"));
                    wait(pause, watch)?;
                }
            }
        }
    }

    /// Whether `url` is on the hub's own host.
    fn is_own(&self, url: &str) -> bool {
        origin(url).to_lowercase() == self.origin
    }
}

/// Tries of one thing since it last got further.
pub(super) struct Tries(u32);

impl Tries {
    /// It got further, so patience starts anew.
    pub(super) fn got_further(&mut self) {
        self.0 = 0;
    }
}

impl Fault {
    /// An answer that ended early.
    pub(super) fn cut(place: &str, error: &std::io::Error) -> Self {
        let cause = format!("the connection broke: {error}");
        Self::Passing(HubError::Unreachable { place: place.to_owned(), cause, tries: 1 }, None)
    }
}

impl HubError {
    /// The same, with what it is about beside the place that may be another server's.
    pub(super) fn about(mut self, label: &str) -> Self {
        if let Self::Unreachable { place, .. }
        | Self::Tls { place, .. }
        | Self::Forbidden { place, .. }
        | Self::NotFound { place, .. }
        | Self::Status { place, .. } = &mut self
        {
            *place = format!("{label}, from {place}");
        }
        self
    }

    /// The same, having been tried so often.
    fn after(self, count: u32) -> Self {
        match self {
            Self::Unreachable { place, cause, .. } => Self::Unreachable { place, cause, tries: count },
            Self::Status { place, status, said, .. } => Self::Status { place, status, said, tries: count },
            other => other,
        }
    }
}

fn transport_fault(place: &str, error: &ureq::Error) -> Fault {
    let place = place.to_owned();
    match error {
        ureq::Error::Tls(_) | ureq::Error::Rustls(_) | ureq::Error::Pem(_) => {
            Fault::Lasting(HubError::Tls { place, cause: error.to_string() })
        }
        // How rustls says through a stream that a certificate is no good.
        ureq::Error::Io(inner) if inner.kind() == std::io::ErrorKind::InvalidData => {
            Fault::Lasting(HubError::Tls { place, cause: inner.to_string() })
        }
        ureq::Error::BadUri(_) | ureq::Error::Http(_) => {
            Fault::Lasting(HubError::Nonsense { place, fault: error.to_string() })
        }
        _ => Fault::Passing(HubError::Unreachable { place, cause: error.to_string(), tries: 1 }, None),
    }
}

fn wait(pause: Duration, watch: &dyn Watch) -> Result<(), HubError> {
    let until = Instant::now() + pause;
    loop {
        if watch.is_stopped() {
            return Err(HubError::Stopped);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(GLANCE));
    }
}

/// Scheme, host and port of an address.
fn origin(url: &str) -> &str {
    let start = url.find("://").map_or(0, |at| at + 3);
    let end = url[start..].find(['/', '?', '#']).map_or(url.len(), |at| start + at);
    let origin = &url[..end];
    match origin.strip_prefix("https://") {
        Some(_) => origin.strip_suffix(":443").unwrap_or(origin),
        None => origin.strip_suffix(":80").unwrap_or(origin),
    }
}

/// An address without its query, which may hold a signature.
fn shown(url: &str) -> &str {
    url.split(['?', '#']).next().unwrap_or_default()
}

/// Where `location`, found at `url`, leads to.
fn joined(url: &str, location: &str) -> Option<String> {
    if location.starts_with("http://") || location.starts_with("https://") {
        // A password in an address would go to whoever the address names.
        return (!origin(location).contains('@')).then(|| location.to_owned());
    }
    if location.starts_with("//") {
        let scheme = url.split("//").next()?;
        return Some(format!("{scheme}{location}"));
    }
    location.starts_with('/').then(|| format!("{}{location}", origin(url)))
}

fn is_this_machine(endpoint: &str) -> bool {
    let host = origin(endpoint).split("://").nth(1).unwrap_or_default();
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_and_redirects_are_told_apart() {
        assert_eq!(origin("https://huggingface.co/a?b"), "https://huggingface.co");
        assert_eq!(origin("https://huggingface.co:443"), "https://huggingface.co");
        assert_eq!(origin("http://127.0.0.1:8080/x"), "http://127.0.0.1:8080");
        assert_eq!(joined("https://a/b?c", "/d?e").as_deref(), Some("https://a/d?e"));
        assert_eq!(joined("https://a/b", "//c/d").as_deref(), Some("https://c/d"));
        assert_eq!(joined("https://a/b", "https://c/d").as_deref(), Some("https://c/d"));
        assert_eq!(joined("https://a/b", "https://a@c/d"), None);
        assert_eq!(joined("https://a/b", "file:///etc/passwd"), None);
        assert_eq!(shown("https://a/b?X-Amz-Signature=1"), "https://a/b");
    }

    #[test]
    fn a_token_is_not_sent_in_plain_to_another_machine() {
        let settings = |endpoint: &str| Settings {
            endpoint: endpoint.to_owned(),
            token: Token::parse("hf_x").ok(),
            cache: std::path::PathBuf::new(),
        };
        for endpoint in ["https://hub.example", "http://127.0.0.1:80", "http://localhost:80", "http://[::1]:80"] {
            assert!(Hub::new(&settings(endpoint), Patience::default()).is_ok(), "{endpoint}");
        }
        for endpoint in
            ["http://hub.example", "http://10.0.0.1", "http://localhost.example", "http://127.0.0.1.example"]
        {
            let refused = Hub::new(&settings(endpoint), Patience::default());
            assert!(matches!(refused, Err(HubError::Plain { .. })), "{endpoint}");
        }
    }
}
