//! Pages for people: our own at `/`, or with `--ui-dir` the files of a built llama-server web UI.
//!
//! Files are read at request time. A path is taken apart before it meets the file system: what is not a plain name below
//! the folder is refused, and what a link leads out of the folder is not there. API routes win over files, and there is
//! no fallback to `index.html`, since that UI routes by `#`.

use std::io;
use std::path::{Path, PathBuf};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::Response;
use tracing::warn;

use super::error::{ApiError, Code};
use super::{App, not_found};
use crate::web;

/// Our own page needs itself, the API, and nothing else. Its script and style are in it.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; \
                           connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const INDEX: &str = "index.html";
const WORKER: &str = "sw.js";
/// Files whose names change with their content.
const IMMUTABLE: &str = "_app/immutable/";
const HTML: &str = "text/html; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

type Answer = Result<Response, ApiError>;

/// `GET /`
pub(crate) async fn index(State(app): State<App>, method: Method, uri: Uri, headers: HeaderMap) -> Answer {
    if app.options().ui_folder.is_some() {
        return from_folder(&app, &method, &uri, &headers, INDEX.to_owned()).await;
    }
    let page = Content { bytes: Bytes::from_static(web::PAGE.as_bytes()), kind: HTML, coding: None };
    let mut response = page.respond(&headers, "no-cache");
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(PAGE_POLICY));
    Ok(response)
}

/// `GET /sw.js`: the UI's worker, or one that removes a worker left behind.
pub(crate) async fn service_worker(State(app): State<App>, method: Method, uri: Uri, headers: HeaderMap) -> Answer {
    if app.options().ui_folder.is_some() {
        return from_folder(&app, &method, &uri, &headers, WORKER.to_owned()).await;
    }
    let worker = Content { bytes: Bytes::from_static(web::SERVICE_WORKER.as_bytes()), kind: JAVASCRIPT, coding: None };
    Ok(worker.respond(&headers, "no-cache"))
}

/// What no route has: a file of the UI, or nothing.
pub(crate) async fn file(State(app): State<App>, method: Method, uri: Uri, headers: HeaderMap) -> Answer {
    let is_read = matches!(method, Method::GET | Method::HEAD);
    if !is_read || app.options().ui_folder.is_none() {
        return Err(not_found(&method, &uri));
    }
    match plain_path(uri.path()) {
        Some(path) => from_folder(&app, &method, &uri, &headers, path).await,
        None => Err(ApiError::new(Code::InvalidValue, "this is not the path of a file")),
    }
}

async fn from_folder(app: &App, method: &Method, uri: &Uri, headers: &HeaderMap, path: String) -> Answer {
    let Some(folder) = app.options().ui_folder.clone() else { return Err(not_found(method, uri)) };
    let codings = accepted_codings(headers);
    let name = path.clone();
    let read = tokio::task::spawn_blocking(move || read(&folder, &name, &codings));
    let content = match read.await {
        Ok(Ok(Some(content))) => content,
        Ok(Ok(None)) => return Err(not_found(method, uri)),
        Ok(Err(error)) => {
            warn!(%error, path, "a file of the web UI could not be read");
            return Err(not_found(method, uri));
        }
        Err(_) => return Err(ApiError::internal()),
    };
    let caching = if path.starts_with(IMMUTABLE) { "public, max-age=31536000, immutable" } else { "no-cache" };
    let mut response = content.respond(headers, caching);
    let headers = response.headers_mut();
    headers.insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    if path == INDEX {
        // The UI runs code of the model in a sandbox that needs an isolated page.
        headers.insert("cross-origin-opener-policy", HeaderValue::from_static("same-origin"));
        headers.insert("cross-origin-embedder-policy", HeaderValue::from_static("require-corp"));
    }
    Ok(response)
}

/// The path of a request below the folder, decoded; `None` if it has parts that are no plain names.
fn plain_path(path: &str) -> Option<String> {
    let decoded = percent_decoded(path.strip_prefix('/')?)?;
    let is_plain = |part: &str| {
        !part.is_empty() && !matches!(part, "." | "..") && !part.contains(|c: char| c == '\\' || c.is_control())
    };
    decoded.split('/').all(is_plain).then_some(decoded)
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = std::str::from_utf8(after.get(..2)?).ok()?;
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &after[2..];
    }
    String::from_utf8(bytes).ok()
}

/// A file to send.
struct Content {
    bytes: Bytes,
    kind: &'static str,
    coding: Option<&'static str>,
}

/// Reads `path`, or its neighbour in a coding that the client takes. `None` if there is no such file in the folder.
fn read(folder: &Path, path: &str, codings: &[&'static str]) -> io::Result<Option<Content>> {
    let folder = folder.canonicalize()?;
    let neighbours = codings.iter().map(|coding| {
        let suffix = if *coding == "br" { "br" } else { "gz" };
        (format!("{path}.{suffix}"), Some(*coding))
    });
    for (name, coding) in neighbours.chain([(path.to_owned(), None)]) {
        // Resolves links, so that what is read is what was checked.
        let file: PathBuf = match folder.join(name).canonicalize() {
            Ok(file) => file,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => continue,
            Err(error) => return Err(error),
        };
        if file.starts_with(&folder) && file.is_file() {
            return Ok(Some(Content { bytes: std::fs::read(file)?.into(), kind: kind_of(path), coding }));
        }
    }
    Ok(None)
}

/// The media type of a file, by its name.
fn kind_of(path: &str) -> &'static str {
    let extension = path.rsplit('/').next().and_then(|name| name.rsplit_once('.')).map_or("", |(_, end)| end);
    match extension.to_ascii_lowercase().as_str() {
        "html" => HTML,
        "js" | "mjs" => JAVASCRIPT,
        "css" => "text/css; charset=utf-8",
        "json" | "map" => "application/json",
        "webmanifest" => "application/manifest+json",
        "svg" => "image/svg+xml",
        "ico" => "image/x-icon",
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "webp" => "image/webp",
        "woff2" => "font/woff2",
        "woff" => "font/woff",
        "ttf" => "font/ttf",
        "wasm" => "application/wasm",
        "txt" => "text/plain; charset=utf-8",
        _ => "application/octet-stream",
    }
}

/// Codings of neighbour files that the client takes, the better one first.
fn accepted_codings(headers: &HeaderMap) -> Vec<&'static str> {
    let values = headers.get_all(header::ACCEPT_ENCODING);
    let accepted: Vec<&str> =
        values.iter().filter_map(|value| value.to_str().ok()).flat_map(|v| v.split(',')).collect();
    let takes = |coding: &&'static str| {
        accepted.iter().any(|entry| {
            let mut parts = entry.split(';').map(str::trim);
            let is_named = parts.next().is_some_and(|name| name.eq_ignore_ascii_case(coding));
            let is_refused = |part: &str| {
                part.strip_prefix("q=")
                    .and_then(|weight| weight.parse::<f32>().ok())
                    .is_some_and(|weight| weight <= 0.0)
            };
            is_named && !parts.any(is_refused)
        })
    };
    ["br", "gzip"].into_iter().filter(takes).collect()
}

impl Content {
    /// The whole file, or 304 if the client has it already.
    fn respond(self, request: &HeaderMap, caching: &'static str) -> Response {
        let tag = format!("\"{}\"", &blake3::hash(&self.bytes).to_hex()[..24]);
        let known = request.get_all(header::IF_NONE_MATCH);
        let mut tags = known.iter().filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
        let is_known =
            tags.any(|known| matches!(known.trim(), known if known == "*" || known.trim_start_matches("W/") == tag));
        let mut response = Response::new(if is_known { Body::empty() } else { Body::from(self.bytes) });
        if is_known {
            *response.status_mut() = StatusCode::NOT_MODIFIED;
        }
        let headers = response.headers_mut();
        if !is_known {
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(self.kind));
            if let Some(coding) = self.coding {
                headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static(coding));
            }
        }
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(caching));
        headers.insert(header::ETAG, HeaderValue::from_str(&tag).expect("hexadecimal digits in quotes"));
        headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_could_leave_the_folder_are_not_plain() {
        for (path, plain) in [("/a.js", "a.js"), ("/_app/immutable/b.css", "_app/immutable/b.css"), ("/a%20b", "a b")] {
            assert_eq!(plain_path(path).as_deref(), Some(plain));
        }
        for path in [
            "/",
            "//etc/passwd",
            "/../x",
            "/%2e%2e/x",
            "/..%2f..%2fetc",
            "/a/../b",
            "/a//b",
            "/a/",
            "/./a",
            "/%00",
            "/a%00.png",
            "/a%5c..%5cb",
            "/%",
            "/%4",
            "/%zz",
            "/%+1",
            "/%ff",
            "a",
            "",
        ] {
            assert_eq!(plain_path(path), None, "{path}");
        }
    }

    #[test]
    fn links_out_of_the_folder_lead_nowhere() {
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("secret"), "s").unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.js"), "plain").unwrap();
        std::fs::write(folder.path().join("a.js.gz"), "packed").unwrap();
        std::fs::create_dir(folder.path().join("inner")).unwrap();
        std::os::unix::fs::symlink(outside.path().join("secret"), folder.path().join("link")).unwrap();
        std::os::unix::fs::symlink(outside.path(), folder.path().join("linked")).unwrap();
        std::os::unix::fs::symlink("a.js", folder.path().join("alias.js")).unwrap();
        let bytes = |path: &str, codings: &[&'static str]| {
            read(folder.path(), path, codings).unwrap().map(|content| (content.bytes.to_vec(), content.coding))
        };
        assert_eq!(bytes("a.js", &[]), Some((b"plain".to_vec(), None)));
        assert_eq!(bytes("a.js", &["br", "gzip"]), Some((b"packed".to_vec(), Some("gzip"))));
        assert_eq!(bytes("alias.js", &[]), Some((b"plain".to_vec(), None)));
        for path in ["link", "linked/secret", "inner", "no", "a.js/b"] {
            assert_eq!(bytes(path, &["gzip"]), None, "{path}");
        }
    }

    #[test]
    fn codings_are_those_the_client_takes() {
        let accepted = |value: &'static str| {
            accepted_codings(&HeaderMap::from_iter([(header::ACCEPT_ENCODING, HeaderValue::from_static(value))]))
        };
        assert_eq!(accepted("gzip, deflate, br;q=0.5"), ["br", "gzip"]);
        assert_eq!(accepted("GZIP;q=1.0, br;q=0"), ["gzip"]);
        assert_eq!(accepted("identity"), [""; 0]);
    }
}
