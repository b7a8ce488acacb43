//! Who may ask: which requests need a key, and which key one has.
//!
//! A key is sent as `Authorization: Bearer KEY` or `x-api-key: KEY`, never in the address, which ends up in logs.

use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderMap, Method, header};

use super::App;
use super::error::{ApiError, Code};
use crate::keys::KeyDigest;

/// Routes that need no key: probes, and the page that asks for one.
const PUBLIC: [&str; 6] = ["/health", "/v1/health", "/livez", "/", "/index.html", "/sw.js"];

/// The key that a request came with, in its extensions; `None` on a server without keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Owner(Option<KeyDigest>);

impl Owner {
    /// Whose request this is.
    pub(crate) fn of(request: &Request) -> Self {
        request.extensions().get().copied().unwrap_or_default()
    }
}

/// Finds the request's key, or refuses it.
pub(crate) fn check(app: &App, request: &Request) -> Result<Owner, ApiError> {
    if !app.keys().are_needed() || is_public(app, request) {
        return Ok(Owner::default());
    }
    let refuse = |message| Err(ApiError::new(Code::InvalidApiKey, message));
    match sent(request.headers()) {
        Ok(Some(key)) => match app.keys().find(key) {
            Some(key) => Ok(Owner(Some(key))),
            None => refuse("the API key is wrong"),
        },
        Ok(None) => refuse("an API key is needed: send Authorization: Bearer KEY, or x-api-key: KEY"),
        Err(Ambiguous) => refuse("the request has several API keys, which differ"),
    }
}

fn is_public(app: &App, request: &Request) -> bool {
    let path = request.uri().path();
    // A path without a route is a file of the web UI, or nothing.
    let has_route = request.extensions().get::<MatchedPath>().is_some();
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    *request.method() == Method::OPTIONS
        || is_read && (!has_route || PUBLIC.contains(&path))
        || is_read && path == "/metrics" && app.options().metrics_public
}

/// Several keys that differ.
#[derive(Debug, PartialEq, Eq)]
struct Ambiguous;

/// What the headers have as a key.
fn sent(headers: &HeaderMap) -> Result<Option<&[u8]>, Ambiguous> {
    let bearers = headers.get_all(header::AUTHORIZATION).iter().map(|value| bearer(value.as_bytes()));
    let others = headers.get_all("x-api-key").iter().map(|value| value.as_bytes().trim_ascii());
    let mut keys = bearers.chain(others);
    let first = keys.next();
    if keys.all(|key| Some(key) == first) { Ok(first) } else { Err(Ambiguous) }
}

/// The key after `Bearer`, whatever its case; nothing, which is no key, after another scheme.
fn bearer(value: &[u8]) -> &[u8] {
    let (scheme, key) = value.split_at_checked(b"Bearer ".len()).unwrap_or((value, b""));
    if scheme.eq_ignore_ascii_case(b"Bearer ") { key.trim_ascii() } else { b"" }
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderName, HeaderValue};

    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn a_key_comes_in_either_header() {
        for (pairs, key) in [
            (&[][..], None),
            (&[("authorization", "Bearer abc")], Some("abc")),
            (&[("authorization", "bEARER   abc ")], Some("abc")),
            (&[("x-api-key", "abc")], Some("abc")),
            (&[("authorization", "Bearer abc"), ("x-api-key", "abc")], Some("abc")),
            (&[("authorization", "Basic abc")], Some("")),
            (&[("authorization", "Bearer")], Some("")),
            (&[("authorization", "abc")], Some("")),
        ] {
            assert_eq!(sent(&headers(pairs)), Ok(key.map(str::as_bytes)), "{pairs:?}");
        }
        assert_eq!(sent(&headers(&[("authorization", "Bearer abc"), ("x-api-key", "abd")])), Err(Ambiguous));
        let mut twice = headers(&[("x-api-key", "abc")]);
        twice.append("x-api-key", HeaderValue::from_static("abd"));
        assert_eq!(sent(&twice), Err(Ambiguous));
    }
}
