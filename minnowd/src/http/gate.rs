//! What happens to every request, whatever its route: an id, the checks that need no route, a net under panics, a log
//! line.

use std::panic::AssertUnwindSafe;
use std::time::Instant;

use axum::body::HttpBody;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use tracing::{error, info};

use super::error::{ApiError, Code};
use super::metrics::Tally;
use super::serve::{OutsidePrefix, Via};
use super::{App, anthropic, auth, body, cors, ids, not_found, serve};
use crate::engine;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The longest request id taken over from a client.
const REQUEST_ID_MAX: usize = 128;
/// Routes that answer in any state of the server. So do paths without a route: files of a web UI.
const ALWAYS_OPEN: [&str; 8] =
    ["/health", "/v1/health", "/livez", "/metrics", "/openapi.json", "/", "/index.html", "/sw.js"];

/// The id of a request, in its extensions and in its answer's `x-request-id`.
#[derive(Clone, Debug)]
pub(crate) struct RequestId(pub HeaderValue);

impl RequestId {
    fn of(headers: &HeaderMap) -> Self {
        let own = headers.get(REQUEST_ID).filter(|value| {
            let bytes = value.as_bytes();
            (1..=REQUEST_ID_MAX).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic)
        });
        Self(
            own.cloned().unwrap_or_else(|| {
                HeaderValue::from_str(&ids::random("req_")).expect("letters, digits and an underscore")
            }),
        )
    }

    /// As text, for logs.
    pub(crate) fn as_str(&self) -> &str {
        self.0.to_str().unwrap_or("")
    }
}

/// The outermost layer of the router.
pub(crate) async fn pass(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let id = RequestId::of(request.headers());
    request.extensions_mut().insert(id.clone());
    let route = request.extensions().get::<MatchedPath>().map(|route| route.as_str().to_owned());
    let mut tally = Tally::new(app.metrics(), route.as_deref());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());

    let origin = cors::allowed_origin(request.headers(), &app.options().cors_origins);
    let forwarded = if app.options().trust_proxy { forwarded_for(request.headers()) } else { None };
    let checked = check(&app, &request).map(|owner| {
        request.extensions_mut().insert(owner);
        cors::preflight(&method, request.headers(), origin.as_ref())
    });
    let mut response = match checked {
        Ok(Some(preflight)) => preflight,
        Ok(None) => match AssertUnwindSafe(next.run(request)).catch_unwind().await {
            Ok(response) => response,
            Err(_) => {
                error!(id = id.as_str(), %method, path, "a handler panicked");
                ApiError::internal().into_response()
            }
        },
        Err(error) => error.into_response(),
    };
    if route.as_deref().is_some_and(anthropic::has_route) {
        response = anthropic::in_its_form(response, &id);
    }
    info!(
        id = id.as_str(),
        %method,
        path,
        status = response.status().as_u16(),
        ms = started.elapsed().as_millis() as u64,
        forwarded,
        "answered"
    );
    let headers = response.headers_mut();
    headers.insert(REQUEST_ID, id.0);
    if let Some(origin) = origin {
        cors::permit(headers, origin);
    }
    headers.insert(header::SERVER, HeaderValue::from_static("minnowd"));
    let status = response.status().as_u16();
    if response.body().size_hint().exact().is_some() {
        tally.complete(status);
        return response;
    }
    response.map(|body| serve::watched(body, tally, move |tally| tally.complete(status)))
}

fn check(app: &App, request: &Request) -> Result<auth::Owner, ApiError> {
    if request.extensions().get::<Via>() == Some(&Via::Loopback) {
        check_host(request.headers(), &app.options().allow_hosts)?;
    }
    body::check_announced(request.headers(), app.options().max_body_bytes)?;
    let owner = auth::check(app, request)?;
    if request.extensions().get::<OutsidePrefix>().is_some() {
        return Err(not_found(request.method(), request.uri()));
    }
    let has_route = request.extensions().get::<MatchedPath>().is_some();
    if !has_route || ALWAYS_OPEN.contains(&request.uri().path()) || request.method() == Method::OPTIONS {
        return Ok(owner);
    }
    app.check_state()?;
    Ok(owner)
}

/// What a proxy says about the client, shortened. For the log only: anyone can write this header.
fn forwarded_for(headers: &HeaderMap) -> Option<String> {
    const SHOWN_MAX: usize = 100;
    let value = headers.get("x-forwarded-for")?;
    Some(String::from_utf8_lossy(value.as_bytes()).chars().filter(|c| !c.is_control()).take(SHOWN_MAX).collect())
}

impl App {
    /// Refuses everything while the server cannot work.
    pub(crate) fn check_state(&self) -> Result<(), ApiError> {
        match self.engine().health().state {
            engine::State::Loading => Err(ApiError::new(Code::ModelLoading, "Loading model")),
            engine::State::Draining => Err(ApiError::new(Code::Draining, "the server is shutting down")),
            engine::State::Failed => Err(ApiError::new(Code::WorkerFailed, "the inference worker has stopped")),
            engine::State::Ready => Ok(()),
        }
    }
}

/// A page whose name was rebound to 127.0.0.1 still sends its own name: such requests are refused.
fn check_host(headers: &HeaderMap, allowed: &[String]) -> Result<(), ApiError> {
    let Some(host) = headers.get(header::HOST) else { return Ok(()) };
    let host = String::from_utf8_lossy(host.as_bytes());
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => &host,
    };
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    let is_local = matches!(name.as_str(), "localhost" | "127.0.0.1" | "[::1]") || name.ends_with(".localhost");
    if is_local || allowed.iter().any(|allowed| allowed.eq_ignore_ascii_case(&name)) {
        return Ok(());
    }
    Err(ApiError::new(Code::OriginNotAllowed, "this Host is not served here; --allow-host NAME allows another name"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_bytes(value.as_bytes()).unwrap())])
    }

    #[test]
    fn only_local_and_allowed_hosts_pass() {
        let allowed = ["box.lan".to_owned()];
        for host in ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]:8080", "[::1]", "a.localhost:80", "Box.Lan:9"]
        {
            assert!(check_host(&headers(header::HOST, host), &allowed).is_ok(), "{host}");
        }
        for host in ["x", "evil.example", "127.0.0.1.evil.example:80", "localhost.evil", "notlocalhost", "", "::1"] {
            let refused = check_host(&headers(header::HOST, host), &allowed);
            assert_eq!(refused.unwrap_err().code(), Code::OriginNotAllowed, "{host}");
        }
        assert!(check_host(&HeaderMap::new(), &[]).is_ok());
    }

    #[test]
    fn a_clients_request_id_is_taken_over_if_it_is_harmless() {
        assert_eq!(RequestId::of(&headers(REQUEST_ID, "abc-1")).as_str(), "abc-1");
        for other in ["", "two words", &"x".repeat(129), "ü"] {
            let id = RequestId::of(&headers(REQUEST_ID, other));
            assert!(id.as_str().starts_with("req_") && id.as_str().len() == 28, "{other}");
        }
    }
}
