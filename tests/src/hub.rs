//! A hub on this machine that behaves like Hugging Face: repositories with commits, a content server on a port of its
//! own that large files are redirected to, LFS uploads whole and in parts. And, where a test says so, badly.
//!
//! It speaks plain HTTP/1.1 over sockets rather than through a framework, because its main use is to break connections
//! at exact bytes. What it knows of Hugging Face is what `huggingface_hub` and `hf-hub` send and read.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// Files in a page of a listing: few, so that listings have several.
const PAGE_FILES: usize = 2;
/// From this length on a file is uploaded in parts of this length.
const PART_BYTES: u64 = 4 << 20;
/// The part of every address of the content server that must never be shown.
pub const SIGNATURE: &str = "X-Amz-Signature=5e6df3";

/// A request as a fault sees it.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Counts requests of both servers from 0 on.
    pub index: u64,
    /// `GET`, `HEAD`, `POST` or `PUT`.
    pub method: String,
    /// The path with its query.
    pub target: String,
    /// Whether it is for the content server.
    pub is_content: bool,
    /// Header names in lower case, with their values.
    pub headers: BTreeMap<String, String>,
}

/// What goes wrong with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An answer with this status, perhaps with `Retry-After`, instead of the real one.
    Status(u16, Option<u64>),
    /// The connection breaks after so many bytes of the body: of the answer's, or of the request's where it has one.
    Cut(u64),
    /// The answer never comes: the connection breaks after everything was done.
    Mute,
    /// A content server that has a file of another length.
    Longer,
    /// One bit of the answer's body is another one.
    Flip,
    /// A refusal that repeats who asked.
    Echo,
}

type Faults = Box<dyn Fn(&Seen) -> Option<Fault> + Send>;

/// A file of a commit.
#[derive(Clone, Debug)]
struct Entry {
    is_large: bool,
    sha256: String,
    git: String,
    bytes: u64,
}

type Tree = BTreeMap<String, Entry>;

#[derive(Debug, Default)]
struct Repo {
    /// Ids and contents, the newest last.
    commits: Vec<(String, Tree)>,
    is_private: bool,
}

struct State {
    objects: PathBuf,
    addresses: [SocketAddr; 2],
    repos: BTreeMap<String, Repo>,
    renamed: BTreeMap<String, String>,
    token: Option<String>,
    faults: Faults,
    seen: Vec<Seen>,
}

/// The hub. It ends with the process.
pub struct FakeHub {
    state: Arc<Mutex<State>>,
    folder: tempfile::TempDir,
    endpoint: String,
}

impl Default for FakeHub {
    fn default() -> Self {
        Self::new()
    }
}

impl FakeHub {
    /// An empty hub that lets everyone do everything.
    ///
    /// # Panics
    /// If there is no port.
    #[must_use]
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a port"));
        let addresses = [0, 1].map(|index: usize| listeners[index].local_addr().expect("an address"));
        let state = Arc::new(Mutex::new(State {
            objects: folder.path().to_owned(),
            addresses,
            repos: BTreeMap::new(),
            renamed: BTreeMap::new(),
            token: None,
            faults: Box::new(|_| None),
            seen: Vec::new(),
        }));
        for (listener, is_content) in listeners.into_iter().zip([false, true]) {
            let state = Arc::clone(&state);
            std::thread::spawn(move || {
                for stream in listener.incoming().filter_map(Result::ok) {
                    let state = Arc::clone(&state);
                    std::thread::spawn(move || serve(&state, stream, is_content));
                }
            });
        }
        Self { state, folder, endpoint: format!("http://{}", addresses[0]) }
    }

    /// The value of `HF_ENDPOINT`.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// From now on only who has this token may write, or see private repositories.
    pub fn require_token(&self, token: &str) {
        self.state().token = Some(token.to_owned());
    }

    /// From now on requests for which `faults` says so go wrong.
    pub fn go_wrong(&self, faults: impl Fn(&Seen) -> Option<Fault> + Send + 'static) {
        self.state().faults = Box::new(faults);
    }

    /// Every request so far.
    #[must_use]
    pub fn seen(&self) -> Vec<Seen> {
        self.state().seen.clone()
    }

    /// Forgets what was seen.
    pub fn forget(&self) {
        self.state().seen.clear();
    }

    /// Puts a file into a repository, with a commit of its own.
    ///
    /// # Panics
    /// If it cannot be read.
    pub fn put(&self, repo: &str, path: &str, file: &Path) {
        let mut state = self.state();
        let entry = state.keep(file, is_large(path));
        let repo = state.repos.entry(repo.to_owned()).or_default();
        let mut tree = repo.commits.last().map(|(_, tree)| tree.clone()).unwrap_or_default();
        tree.insert(path.to_owned(), entry);
        repo.add(tree);
    }

    /// Puts other bytes behind a file that is there, whose digest stays what it was.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn swap(&self, repo: &str, path: &str, file: &Path) {
        let object = self.bytes_of(repo, path);
        std::fs::remove_file(&object).expect("an object");
        std::os::unix::fs::symlink(file, object).expect("a writable folder");
        let bytes = std::fs::metadata(file).expect("a file").len();
        let mut state = self.state();
        let (_, tree) = state.repos.get_mut(repo).and_then(|repo| repo.commits.last_mut()).expect("a commit");
        tree.get_mut(path).expect("a file").bytes = bytes;
    }

    /// Puts a small file into a repository.
    ///
    /// # Panics
    /// If the disk is full.
    pub fn put_text(&self, repo: &str, path: &str, text: &str) {
        let file = self.folder.path().join("incoming");
        std::fs::write(&file, text).expect("a writable folder");
        self.put(repo, path, &file);
    }

    /// Makes `old` lead to `new`.
    pub fn rename(&self, old: &str, new: &str) {
        self.state().renamed.insert(old.to_owned(), new.to_owned());
    }

    /// Makes a repository private.
    ///
    /// # Panics
    /// If there is none.
    pub fn hide(&self, repo: &str) {
        self.state().repos.get_mut(repo).expect("a repository").is_private = true;
    }

    /// Whether a repository is private; `None` if there is none.
    #[must_use]
    pub fn is_private(&self, repo: &str) -> Option<bool> {
        self.state().repos.get(repo).map(|repo| repo.is_private)
    }

    /// Number of commits of a repository.
    #[must_use]
    pub fn commits(&self, repo: &str) -> usize {
        self.state().repos.get(repo).map_or(0, |repo| repo.commits.len())
    }

    /// Names of the files of a repository.
    #[must_use]
    pub fn files(&self, repo: &str) -> Vec<String> {
        let state = self.state();
        let tree = state.repos.get(repo).and_then(|repo| repo.commits.last());
        tree.map(|(_, tree)| tree.keys().cloned().collect()).unwrap_or_default()
    }

    /// Where the bytes of a file lie.
    ///
    /// # Panics
    /// If there is no such file.
    #[must_use]
    pub fn bytes_of(&self, repo: &str, path: &str) -> PathBuf {
        let state = self.state();
        let (_, tree) = state.repos[repo].commits.last().expect("a commit");
        state.objects.join(&tree[path].sha256)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // A panic of one connection is that connection's.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Repo {
    fn add(&mut self, tree: Tree) -> String {
        let id = hex(&Sha1::digest(format!("{} {tree:?}", self.commits.len())));
        self.commits.push((id.clone(), tree));
        id
    }

    fn at(&self, revision: &str) -> Option<&(String, Tree)> {
        match revision {
            "main" => self.commits.last(),
            id => self.commits.iter().find(|(commit, _)| commit == id),
        }
    }
}

impl State {
    /// Copies a file to where objects lie.
    fn keep(&self, file: &Path, is_large: bool) -> Entry {
        let bytes = std::fs::metadata(file).expect("a file").len();
        let (mut sha256, mut git) = (Sha256::new(), Sha1::new_with_prefix(format!("blob {bytes}\0")));
        let mut reader = BufReader::with_capacity(1 << 20, File::open(file).expect("a file"));
        loop {
            let part = reader.fill_buf().expect("a readable file");
            if part.is_empty() {
                break;
            }
            sha256.update(part);
            git.update(part);
            let count = part.len();
            reader.consume(count);
        }
        let (sha256, git) = (hex(&sha256.finalize()), hex(&git.finalize()));
        let object = self.objects.join(&sha256);
        if !object.exists() {
            // Sparse files stay sparse.
            let copied = std::process::Command::new("cp").arg("--sparse=auto").arg(file).arg(&object).status();
            assert!(copied.is_ok_and(|status| status.success()), "cp {}", file.display());
        }
        Entry { is_large, sha256, git, bytes }
    }
}

fn is_large(path: &str) -> bool {
    path.ends_with(".mnw") || path.ends_with(".safetensors")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An answer before faults.
struct Reply {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Payload,
}

enum Payload {
    Bytes(Vec<u8>),
    /// `start..end` of a file.
    File(PathBuf, u64, u64),
}

impl Reply {
    fn json(status: u16, body: &Value) -> Self {
        let headers = vec![("content-type", "application/json".to_owned())];
        Self { status, headers, body: Payload::Bytes(body.to_string().into_bytes()) }
    }

    fn error(status: u16, message: &str) -> Self {
        let mut reply = Self::json(status, &json!({ "error": message }));
        reply.headers.push(("x-error-message", message.to_owned()));
        reply
    }

    fn empty(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Payload::Bytes(Vec::new()) }
    }

    fn len(&self) -> u64 {
        match &self.body {
            Payload::Bytes(bytes) => bytes.len() as u64,
            Payload::File(_, start, end) => end - start,
        }
    }
}

/// Answers requests of one connection until it ends.
fn serve(state: &Mutex<State>, stream: TcpStream, is_content: bool) {
    let mut reader = BufReader::new(stream.try_clone().expect("a socket"));
    while let Some(mut seen) = read_head(&mut reader, is_content) {
        let fault = {
            let mut state = lock(state);
            seen.index = state.seen.len() as u64;
            state.seen.push(seen.clone());
            (state.faults)(&seen)
        };
        let body_bytes: u64 = seen.headers.get("content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
        let mut body = Vec::new();
        let upload = seen.method == "PUT";
        let place = lock(state).objects.join(format!("upload-{}", seen.index));
        let wanted = match fault {
            Some(Fault::Cut(at)) if body_bytes > 0 => at.min(body_bytes),
            _ => body_bytes,
        };
        let taken = if upload {
            File::create(&place).and_then(|mut file| std::io::copy(&mut (&mut reader).take(wanted), &mut file))
        } else {
            (&mut reader).take(wanted).read_to_end(&mut body).map(|count| count as u64)
        };
        if taken.ok() != Some(body_bytes) || wanted < body_bytes {
            let _ = stream.shutdown(Shutdown::Both);
            return;
        }
        let mut reply = match &fault {
            Some(Fault::Status(status, after)) => {
                let mut reply = Reply::error(*status, "something is wrong today");
                reply.headers.extend(after.map(|seconds| ("retry-after", seconds.to_string())));
                reply
            }
            Some(Fault::Echo) => {
                Reply::error(403, &format!("go away, {}", seen.headers.get("authorization").map_or("", String::as_str)))
            }
            _ if is_content => content(state, &seen, &body, &place),
            _ => answer(state, &seen, &body),
        };
        if fault == Some(Fault::Longer) {
            for (name, value) in &mut reply.headers {
                if *name == "content-range" {
                    value.push('0');
                }
            }
        }
        if fault == Some(Fault::Mute) || send(&stream, &seen, reply, fault.as_ref()).is_err() {
            let _ = stream.shutdown(Shutdown::Both);
            return;
        }
    }
}

fn read_head(reader: &mut BufReader<TcpStream>, is_content: bool) -> Option<Seen> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.insert(name.trim().to_lowercase(), value.trim().to_owned());
    }
    Some(Seen { index: 0, method, target, is_content, headers })
}

/// Sends a reply; an error is a connection to be closed.
fn send(mut stream: &TcpStream, seen: &Seen, reply: Reply, fault: Option<&Fault>) -> std::io::Result<()> {
    let mut head = format!("HTTP/1.1 {} X\r\n", reply.status);
    // A HEAD may state the length of what a GET would bring.
    if !reply.headers.iter().any(|(name, _)| *name == "content-length") {
        head += &format!("content-length: {}\r\n", reply.len());
    }
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    if seen.method == "HEAD" {
        return Ok(());
    }
    let limit = match fault {
        Some(Fault::Cut(at)) => *at,
        _ => u64::MAX,
    };
    let mut left = limit.min(reply.len());
    let is_cut = left < reply.len();
    let mut flip = fault == Some(&Fault::Flip);
    let mut write = |mut part: Vec<u8>| {
        part.truncate(left.min(part.len() as u64) as usize);
        left -= part.len() as u64;
        if let (true, Some(byte)) = (flip, part.first_mut()) {
            *byte ^= 1;
            flip = false;
        }
        stream.write_all(&part)
    };
    match reply.body {
        Payload::Bytes(bytes) => write(bytes)?,
        Payload::File(path, start, end) => {
            let file = File::open(path)?;
            let mut at = start;
            while at < end.min(start.saturating_add(limit)) {
                let mut part = vec![0; (end - at).min(1 << 18) as usize];
                file.read_exact_at(&mut part, at)?;
                at += part.len() as u64;
                write(part)?;
            }
        }
    }
    if is_cut { Err(std::io::ErrorKind::ConnectionAborted.into()) } else { Ok(()) }
}

/// A file, or the range of it that was asked for.
fn ranged(seen: &Seen, path: PathBuf, bytes: u64, headers: Vec<(&'static str, String)>) -> Reply {
    let range = seen.headers.get("range").and_then(|range| {
        let (start, end) = range.strip_prefix("bytes=")?.split_once('-')?;
        Some((start.parse().ok()?, end.parse::<u64>().ok()? + 1))
    });
    let mut reply = Reply { status: 200, headers, body: Payload::File(path.clone(), 0, bytes) };
    if let Some((start, end)) = range {
        if end > bytes || start >= end {
            return Reply::error(416, "no such range");
        }
        reply.status = 206;
        reply.headers.push(("content-range", format!("bytes {start}-{}/{bytes}", end - 1)));
        reply.body = Payload::File(path, start, end);
    }
    reply
}

/// The content server.
fn content(state: &Mutex<State>, seen: &Seen, body: &[u8], upload: &Path) -> Reply {
    let state = lock(state);
    let (path, query) = seen.target.split_once('?').unwrap_or((&seen.target, ""));
    if query != SIGNATURE {
        return Reply::error(403, "the signature is missing");
    }
    let words: Vec<&str> = path.trim_matches('/').split('/').collect();
    match (seen.method.as_str(), &words[..]) {
        ("GET", ["object", sha256]) => {
            let object = state.objects.join(sha256);
            let Ok(found) = std::fs::metadata(&object) else { return Reply::error(404, "no such object") };
            ranged(seen, object, found.len(), Vec::new())
        }
        ("PUT", ["upload", sha256]) => {
            let entry = state.keep(upload, true);
            let _ = std::fs::remove_file(upload);
            if entry.sha256 == *sha256 { Reply::empty(200) } else { Reply::error(400, "another digest") }
        }
        ("PUT", ["upload", sha256, number]) => {
            std::fs::rename(upload, state.objects.join(format!("{sha256}.{number}"))).expect("a writable folder");
            let mut reply = Reply::empty(200);
            reply.headers.push(("etag", format!("\"tag-{number}\"")));
            reply
        }
        ("POST", ["complete", sha256]) => {
            let list: Value = serde_json::from_slice(body).expect("JSON");
            let whole = state.objects.join(format!("{sha256}.whole"));
            let mut out = File::create(&whole).expect("a writable folder");
            for (part, number) in list["parts"].as_array().expect("parts").iter().zip(1..) {
                if part["partNumber"] != number || part["etag"] != format!("\"tag-{number}\"") {
                    return Reply::error(400, "another part");
                }
                let part = state.objects.join(format!("{sha256}.{number}"));
                // A repeated request finds its parts gone, and the object there.
                let Ok(mut part) = File::open(part) else { return Reply::empty(200) };
                std::io::copy(&mut part, &mut out).expect("a writable folder");
            }
            drop(out);
            let entry = state.keep(&whole, true);
            let _ = std::fs::remove_file(&whole);
            if entry.sha256 == *sha256 { Reply::json(200, &json!({})) } else { Reply::error(400, "another digest") }
        }
        _ => Reply::error(404, "no such place"),
    }
}

/// The hub itself.
fn answer(state: &Mutex<State>, seen: &Seen, body: &[u8]) -> Reply {
    let mut state = lock(state);
    let (path, query) = seen.target.split_once('?').unwrap_or((&seen.target, ""));
    let words: Vec<String> = path.trim_matches('/').split('/').map(decoded).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let authorization = state.token.as_ref().map(|token| format!("Bearer {token}"));
    let given = seen.headers.get("authorization");
    let is_known = authorization.is_none() || given == authorization.as_ref();
    if given.is_some() && !is_known {
        return Reply::error(401, "Invalid credentials in Authorization header");
    }
    if seen.method == "POST" && !is_known {
        return Reply::error(401, "Invalid username or password.");
    }
    match (seen.method.as_str(), &words[..]) {
        ("POST", ["api", "repos", "create"]) => {
            let wanted: Value = serde_json::from_slice(body).expect("JSON");
            let name = format!("{}/{}", wanted["organization"].as_str().unwrap(), wanted["name"].as_str().unwrap());
            if state.repos.contains_key(&name) {
                return Reply::error(409, "You already created this model repo");
            }
            let mut repo = Repo { is_private: wanted["private"] == true, ..Repo::default() };
            repo.add(Tree::new());
            state.repos.insert(name.clone(), repo);
            Reply::json(200, &json!({"url": format!("http://hub/{name}")}))
        }
        ("POST", ["verify", sha256]) => {
            if state.objects.join(sha256).exists() {
                Reply::json(200, &json!({}))
            } else {
                Reply::error(404, "absent")
            }
        }
        ("GET" | "HEAD" | "POST", ["api", "models", owner, name, verb, revision]) => {
            let name = format!("{owner}/{name}");
            let Some(repo) = state.repos.get(&name).filter(|repo| is_known || !repo.is_private) else {
                return Reply::error(if is_known { 404 } else { 401 }, "Repository not found");
            };
            let Some((commit, tree)) = repo.at(revision).cloned() else {
                return Reply::error(404, "Invalid rev id");
            };
            match *verb {
                "revision" => Reply::json(200, &json!({"id": name, "sha": commit})),
                "tree" => page(&state, &name, &commit, &tree, query),
                "preupload" => preupload(body),
                "commit" => commit_files(&mut state, &name, &commit, tree, body),
                _ => Reply::error(404, "no such thing"),
            }
        }
        ("POST", [_, _, "info", "lfs", "objects", "batch"]) => batch(&state, body),
        ("GET" | "HEAD", [owner, name, "resolve", revision, path @ ..]) => {
            let name = format!("{owner}/{name}");
            if let Some(new) = state.renamed.get(&name) {
                let mut reply = Reply::empty(307);
                reply.headers.push(("location", format!("/{new}/resolve/{revision}/{}", path.join("/"))));
                return reply;
            }
            let Some(repo) = state.repos.get(&name).filter(|repo| is_known || !repo.is_private) else {
                return Reply::error(if is_known { 404 } else { 401 }, "Repository not found");
            };
            let Some((commit, tree)) = repo.at(revision) else { return Reply::error(404, "Invalid rev id") };
            let Some(entry) = tree.get(&path.join("/")) else { return Reply::error(404, "Entry not found") };
            let mut headers = vec![("x-repo-commit", commit.clone())];
            if !entry.is_large {
                headers.push(("etag", format!("\"{}\"", entry.git)));
                return ranged(seen, state.objects.join(&entry.sha256), entry.bytes, headers);
            }
            headers.push(("x-linked-etag", format!("\"{}\"", entry.sha256)));
            headers.push(("x-linked-size", entry.bytes.to_string()));
            headers.push(("location", format!("http://{}/object/{}?{SIGNATURE}", state.addresses[1], entry.sha256)));
            Reply { status: 302, headers, body: Payload::Bytes(b"Found. Redirecting".to_vec()) }
        }
        _ => Reply::error(404, "no such place"),
    }
}

fn page(state: &State, name: &str, commit: &str, tree: &Tree, query: &str) -> Reply {
    let start: usize = query.split('&').find_map(|pair| pair.strip_prefix("cursor=")?.parse().ok()).unwrap_or(0);
    let entry = |(path, entry): (&String, &Entry)| {
        let mut json = json!({"type": "file", "path": path, "size": entry.bytes, "oid": entry.git});
        if entry.is_large {
            // What git has of it is a pointer.
            json["lfs"] = json!({"oid": entry.sha256, "size": entry.bytes, "pointerSize": 134});
            json["oid"] = "0".repeat(40).into();
        }
        json
    };
    let mut list: Vec<Value> = tree.iter().skip(start).take(PAGE_FILES).map(entry).collect();
    list.push(json!({"type": "directory", "path": "folder", "oid": "0".repeat(40), "size": 0}));
    let mut reply = Reply::json(200, &list.into());
    let next = start + PAGE_FILES;
    if next < tree.len() {
        let link = format!(
            "<http://{}/api/models/{name}/tree/{commit}?recursive=true&cursor={next}>; rel=\"next\"",
            state.addresses[0]
        );
        reply.headers.push(("link", link));
    }
    reply
}

fn preupload(body: &[u8]) -> Reply {
    let wanted: Value = serde_json::from_slice(body).expect("JSON");
    let files = wanted["files"].as_array().expect("files").iter().map(|file| {
        let path = file["path"].as_str().expect("a path");
        json!({"path": path, "uploadMode": if is_large(path) { "lfs" } else { "regular" }, "shouldIgnore": false})
    });
    Reply::json(200, &json!({"files": files.collect::<Vec<_>>()}))
}

fn batch(state: &State, body: &[u8]) -> Reply {
    let wanted: Value = serde_json::from_slice(body).expect("JSON");
    let [hub, content] = state.addresses;
    let objects = wanted["objects"].as_array().expect("objects").iter().map(|object| {
        let (oid, bytes) = (object["oid"].as_str().expect("an oid"), object["size"].as_u64().expect("a size"));
        if state.objects.join(oid).exists() {
            return json!({"oid": oid, "size": bytes});
        }
        let mut upload = json!({"href": format!("http://{content}/upload/{oid}?{SIGNATURE}"), "header": {}});
        if bytes > PART_BYTES {
            upload["href"] = format!("http://{content}/complete/{oid}?{SIGNATURE}").into();
            upload["header"]["chunk_size"] = PART_BYTES.to_string().into();
            for number in 1..=bytes.div_ceil(PART_BYTES) {
                upload["header"][format!("{number:05}")] =
                    format!("http://{content}/upload/{oid}/{number}?{SIGNATURE}").into();
            }
        }
        let verify = json!({"href": format!("http://{hub}/verify/{oid}"), "header": {}});
        json!({"oid": oid, "size": bytes, "actions": {"upload": upload, "verify": verify}})
    });
    Reply::json(200, &json!({"transfer": "basic", "objects": objects.collect::<Vec<_>>()}))
}

fn commit_files(state: &mut State, name: &str, head: &str, mut tree: Tree, body: &[u8]) -> Reply {
    for line in body.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let line: Value = serde_json::from_slice(line).expect("JSON");
        let value = &line["value"];
        let path = value["path"].as_str().unwrap_or_default().to_owned();
        match line["key"].as_str() {
            Some("header") => {
                if value["parentCommit"].as_str().is_some_and(|parent| parent != head) {
                    return Reply::error(412, "A commit has happened since. Please refresh and try again.");
                }
            }
            Some("file") => {
                let content = unbase64(value["content"].as_str().expect("content"));
                let file = state.objects.join("small");
                std::fs::write(&file, content).expect("a writable folder");
                let entry = state.keep(&file, false);
                tree.insert(path, entry);
            }
            Some("lfsFile") => {
                let (oid, bytes) = (value["oid"].as_str().expect("an oid"), value["size"].as_u64());
                let object = state.objects.join(oid);
                if std::fs::metadata(&object).ok().map(|found| found.len()) != bytes {
                    return Reply::error(400, "the object was not uploaded");
                }
                let entry = state.keep(&object, true);
                tree.insert(path, entry);
            }
            other => return Reply::error(400, &format!("unknown key {other:?}")),
        }
    }
    let id = state.repos.get_mut(name).expect("a repository").add(tree);
    Reply::json(200, &json!({"success": true, "commitOid": id, "commitUrl": format!("http://hub/{name}/commit/{id}")}))
}

fn decoded(word: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = word.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digits = [rest.next().unwrap_or(b'0'), rest.next().unwrap_or(b'0')];
            let digits = std::str::from_utf8(&digits).unwrap_or("00");
            bytes.push(u8::from_str_radix(digits, 16).unwrap_or(0));
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn unbase64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut out, mut bits, mut count) = (Vec::new(), 0u32, 0);
    for digit in text.bytes().filter_map(|byte| DIGITS.iter().position(|digit| *digit == byte)) {
        bits = bits << 6 | digit as u32;
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
        }
    }
    out
}
