//! Which pages of other origins may read answers: none, unless `--cors-origin` names them. Credentials are never allowed.
//!
//! A preflight is answered for every path, since it asks about the origin and not about the route. An origin that is not
//! allowed gets the same answer without permissions, which is what browsers take for a refusal.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::Response;

use crate::config::CorsOrigin;

/// The allowed origin of a request, as it is to be echoed.
pub(crate) fn allowed_origin(headers: &HeaderMap, allowed: &[CorsOrigin]) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    let text = origin.to_str().ok()?;
    allowed.iter().any(|allowed| allowed.covers(text)).then(|| origin.clone())
}

/// The answer to a preflight; `None` if the request is none. [`permit`] adds the origin to it as to all others.
pub(crate) fn preflight(method: &Method, headers: &HeaderMap, origin: Option<&HeaderValue>) -> Option<Response> {
    let is_preflight = method == Method::OPTIONS
        && headers.contains_key(header::ORIGIN)
        && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    if !is_preflight {
        return None;
    }
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    if origin.is_some() {
        let answer = response.headers_mut();
        let methods = HeaderValue::from_static("GET, POST, DELETE, OPTIONS");
        answer.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
        answer.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
        // A literal `*` would not cover `authorization`, so the names are given back.
        let names: Vec<HeaderName> = headers
            .get_all(header::ACCESS_CONTROL_REQUEST_HEADERS)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .filter_map(|name| name.trim().parse().ok())
            .collect();
        let names = names.iter().map(HeaderName::as_str).collect::<Vec<_>>().join(", ");
        if let Ok(names) = HeaderValue::from_str(&names) {
            answer.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names);
        }
    }
    Some(response)
}

/// Lets the page of `origin` read an answer.
pub(crate) fn permit(answer: &mut HeaderMap, origin: HeaderValue) {
    answer.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    answer.append(header::VARY, HeaderValue::from_static("Origin"));
    let exposed = HeaderValue::from_static("x-request-id, retry-after");
    answer.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asking(origin: &'static str) -> HeaderMap {
        HeaderMap::from_iter([
            (header::ORIGIN, HeaderValue::from_static(origin)),
            (header::ACCESS_CONTROL_REQUEST_METHOD, HeaderValue::from_static("POST")),
            (header::ACCESS_CONTROL_REQUEST_HEADERS, HeaderValue::from_static("authorization,x-stainless-os, b d,")),
        ])
    }

    #[test]
    fn headers_that_may_be_sent_are_those_asked_for_and_well_formed() {
        let headers = asking("https://a.example");
        let origin = allowed_origin(&headers, &[CorsOrigin::Exact("https://a.example".to_owned())]);
        let answer = preflight(&Method::OPTIONS, &headers, origin.as_ref()).unwrap();
        assert_eq!(answer.headers()[header::ACCESS_CONTROL_ALLOW_HEADERS], "authorization, x-stainless-os");
        assert!(!answer.headers().contains_key(header::ACCESS_CONTROL_ALLOW_CREDENTIALS));
    }

    #[test]
    fn an_origin_that_is_not_allowed_gets_no_permission() {
        let headers = asking("https://evil.example");
        let origin = allowed_origin(&headers, &[CorsOrigin::Localhost]);
        assert_eq!(origin, None);
        let answer = preflight(&Method::OPTIONS, &headers, None).unwrap();
        assert_eq!((answer.status(), answer.headers().len()), (StatusCode::NO_CONTENT, 0));
        assert!(preflight(&Method::POST, &headers, None).is_none());
        assert!(preflight(&Method::OPTIONS, &HeaderMap::new(), None).is_none());
    }
}
