//! Request bodies: bounded bytes, then one JSON object.
//!
//! The size limit is checked before the first byte where `Content-Length` tells it, and while reading otherwise. The
//! depth limit is checked before the parser runs, in one pass without recursion.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, header};
use futures_util::StreamExt;
use serde_json::Value;

use super::error::{ApiError, Code};
use super::fields::Fields;

/// Longest wait for the next bytes of a body.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// Lists and objects within each other.
const DEPTH_MAX: usize = 64;
/// Values in one document; each takes at least 32 bytes once parsed, so this bounds what a body may grow to.
const VALUES_MAX: usize = 1 << 20;

/// Reads a request's JSON object.
pub(crate) async fn read_object(headers: &HeaderMap, body: Body, bytes_max: usize) -> Result<Fields, ApiError> {
    check_content_type(headers)?;
    parse_object(&read(headers, body, bytes_max).await?)
}

/// The length that the headers announce, refused if it is above `bytes_max`.
pub(crate) fn check_announced(headers: &HeaderMap, bytes_max: usize) -> Result<(), ApiError> {
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    match announced {
        Some(bytes) if bytes > bytes_max as u64 => Err(too_large(bytes_max)),
        _ => Ok(()),
    }
}

/// A page may send anything but JSON without asking first, so such requests may not start work.
fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    if !headers.contains_key(header::ORIGIN) {
        return Ok(());
    }
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    let essence = given.split(';').next().unwrap_or("").trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(ApiError::new(Code::UnsupportedMediaType, "requests with an Origin header must be application/json"))
}

async fn read(headers: &HeaderMap, body: Body, bytes_max: usize) -> Result<Vec<u8>, ApiError> {
    check_announced(headers, bytes_max)?;
    let mut chunks = body.into_data_stream();
    let mut bytes = Vec::new();
    loop {
        let chunk = tokio::time::timeout(SILENCE_MAX, chunks.next()).await.map_err(|_| {
            let seconds = SILENCE_MAX.as_secs();
            ApiError::new(Code::RequestTimeout, format!("no byte of the request body came for {seconds} seconds"))
        })?;
        let chunk: Bytes = match chunk {
            None => return Ok(bytes),
            Some(Ok(chunk)) => chunk,
            Some(Err(_)) => return Err(ApiError::new(Code::InvalidJson, "the request body broke off")),
        };
        if bytes.len() + chunk.len() > bytes_max {
            return Err(too_large(bytes_max));
        }
        bytes.extend_from_slice(&chunk);
    }
}

fn too_large(bytes_max: usize) -> ApiError {
    ApiError::new(Code::TooLarge, format!("the request body is larger than {bytes_max} bytes"))
}

fn parse_object(bytes: &[u8]) -> Result<Fields, ApiError> {
    let invalid = |message: String| ApiError::new(Code::InvalidJson, message);
    check_extent(bytes).map_err(invalid)?;
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(members)) => Ok(Fields::new(members)),
        Ok(_) => Err(invalid("the request body must be a JSON object".to_owned())),
        Err(_) if bytes.is_empty() => Err(invalid("the request body is empty; it must be a JSON object".to_owned())),
        Err(error) => Err(invalid(format!("the request body is not valid JSON: {error}"))),
    }
}

/// Depth and number of values, seen from the punctuation outside strings. Says nothing about validity.
fn check_extent(bytes: &[u8]) -> Result<(), String> {
    let (mut depth, mut values) = (0usize, 1usize);
    let (mut in_string, mut escaped) = (false, false);
    for &byte in bytes {
        match (in_string, byte) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (_, b'"') => in_string = !in_string,
            (false, b'[' | b'{') => {
                depth += 1;
                values += 1;
            }
            (false, b']' | b'}') => depth = depth.saturating_sub(1),
            (false, b',') => values += 1,
            _ => {}
        }
        if depth > DEPTH_MAX {
            return Err(format!("the request body is nested deeper than {DEPTH_MAX} levels"));
        }
        if values > VALUES_MAX {
            return Err(format!("the request body has more than {VALUES_MAX} values"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(bytes: &[u8]) -> Result<Fields, ApiError> {
        parse_object(bytes)
    }

    #[test]
    fn only_one_json_object_is_taken() {
        let surrogate = br#"{"a":"\ud800"}"#;
        for bad in
            [&b""[..], b"{", b"[]", b"5", b"null", b"{} {}", b"\xff\xfe", br#"{"a":NaN}"#, br#"{"a":1e999}"#, surrogate]
        {
            assert_eq!(parse(bad).unwrap_err().code(), Code::InvalidJson, "{}", String::from_utf8_lossy(bad));
        }
        assert!(parse(" {\"a\":\"ü🙂\\ud83d\\ude42\"}\n".as_bytes()).is_ok());
    }

    #[test]
    fn depth_is_limited_outside_strings_only() {
        let nested = |levels: usize| format!("{{\"a\":{}1{}}}", "[".repeat(levels - 1), "]".repeat(levels - 1));
        assert!(parse(nested(DEPTH_MAX).as_bytes()).is_ok());
        assert!(parse(nested(DEPTH_MAX + 1).as_bytes()).is_err());
        assert!(parse("{\"a\":".repeat(100_000).as_bytes()).is_err());
        assert!(parse(format!("{{\"a\":\"{}\\\"[[\"}}", "[".repeat(500)).as_bytes()).is_ok());
    }

    #[test]
    fn the_number_of_values_is_limited() {
        let list = |count: usize| format!("{{\"a\":[{}0]}}", "0,".repeat(count - 1));
        assert!(parse(list(1000).as_bytes()).is_ok());
        assert!(parse(list(VALUES_MAX).as_bytes()).is_err());
    }

    #[test]
    fn a_page_must_send_json() {
        let headers = |pairs: &[(header::HeaderName, &'static str)]| {
            pairs
                .iter()
                .map(|(name, value)| (name.clone(), header::HeaderValue::from_static(value)))
                .collect::<HeaderMap>()
        };
        let origin = (header::ORIGIN, "https://evil.example");
        for (given, is_fine) in [
            (headers(&[]), true),
            (headers(&[(header::CONTENT_TYPE, "text/plain")]), true),
            (headers(std::slice::from_ref(&origin)), false),
            (headers(&[origin.clone(), (header::CONTENT_TYPE, "text/plain")]), false),
            (headers(&[origin, (header::CONTENT_TYPE, "Application/JSON; charset=utf-8")]), true),
        ] {
            assert_eq!(check_content_type(&given).is_ok(), is_fine, "{given:?}");
        }
    }
}
