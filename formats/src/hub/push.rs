//! Files to a repository at a hub, in one commit.
//!
//! 1. The repository is listed. What it has already is not sent; what differs is refused unless it is to be replaced.
//! 2. The hub says which files are large. Their bytes go to its content server, in parts where it wants parts, several
//!    at a time; what the server has already is not sent again, which is also how an interrupted push goes on.
//! 3. One commit names all files. It is made on the commit that was listed: if someone else was faster, it fails.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use minnow_common::FileOffset;
use serde::Deserialize;
use serde_json::{Value, json};
use thiserror::Error;

use super::Watch;
use super::address::{RepoPath, Repository, Revision};
use super::client::{Ask, Content, Fault, Hub, Redirects};
use super::error::HubError;
use super::listing::{FileInfo, Identity, header};
use super::pull::{CONNECTIONS_MAX, git_object_id};
use crate::io::{IoError, ReadAt};

/// The beginning of a file, from which the hub guesses what it is.
const SAMPLE_BYTES: u64 = 512;
/// What is read from disk at once.
const BUFFER_BYTES: usize = 256 << 10;
/// The longest file that is sent inside the commit, whatever the hub says.
const INLINE_BYTES_MAX: u64 = 16 << 20;
/// The parts of one upload, at most: what the content servers allow.
const PARTS_MAX: usize = 10_000;

const LFS: &[(&str, &str)] =
    &[("accept", "application/vnd.git-lfs+json"), ("content-type", "application/vnd.git-lfs+json")];
const JSON: &[(&str, &str)] = &[("content-type", "application/json")];

/// A file to be sent.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// Its name in the repository.
    pub path: RepoPath,
    /// Its bytes.
    pub file: Arc<dyn ReadAt>,
    /// The SHA-256 of them.
    pub sha256: String,
}

/// What to push, and how.
#[derive(Clone, Debug)]
pub struct Push<'a> {
    /// Where to.
    pub repository: &'a Repository,
    /// The branch.
    pub revision: &'a Revision,
    /// The files.
    pub files: &'a [Outgoing],
    /// Whether files that the repository has with other bytes are replaced.
    pub replace: bool,
    /// Make the repository if there is none: private, or not.
    pub create: Option<Private>,
    /// Only find out what would be sent.
    pub dry_run: bool,
    /// Uploads at a time.
    pub connections: usize,
    /// The commit's first line.
    pub message: &'a str,
}

/// Whether only its owner sees a repository.
pub type Private = bool;

/// What becomes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sending {
    /// The repository has it, with the same bytes.
    Same,
    /// The repository has no file of that name.
    New,
    /// The repository has another one.
    Replaced,
}

/// What was pushed, or would be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pushed {
    /// Each file's fate, in the order given.
    pub files: Vec<Sending>,
    /// The commit; `None` if there was nothing to send, or nothing was to be sent.
    pub commit: Option<String>,
    /// Bytes that were sent to the content server.
    pub sent_bytes: u64,
}

/// Why nothing was pushed.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say what each field is")]
pub enum PushError {
    #[error(transparent)]
    Hub(#[from] HubError),
    #[error(transparent)]
    Io(#[from] IoError),
    #[error("hf:{repository}: has other files named {}; --replace replaces them", .names.join(", "))]
    Different { repository: Repository, names: Vec<String> },
    #[error(
        "hf:{repository}: there is no such repository, or the token may not see it; --create private or --create public makes it"
    )]
    NoRepository { repository: Repository },
    #[error("{path}: is {bytes} bytes long, too much for a file that the hub wants in the commit itself")]
    TooLong { path: RepoPath, bytes: u64 },
    #[error("{path}: the content server wants {parts} parts of {part_bytes} bytes, which do not make {bytes}")]
    Parts { path: RepoPath, parts: usize, part_bytes: u64, bytes: u64 },
}

/// Sends files and commits them.
pub fn push(hub: &Hub, push: &Push<'_>, watch: &dyn Watch) -> Result<Pushed, PushError> {
    let listed = match hub.list(push.repository, push.revision, watch) {
        Ok(listed) => Some(listed),
        // A repository without any commit has no revision either.
        Err(HubError::NotFound { .. } | HubError::Unauthorized { had_token: true, .. }) => match push.create {
            None => return Err(PushError::NoRepository { repository: push.repository.clone() }),
            Some(_) => None,
        },
        Err(error) => return Err(error.into()),
    };
    let remote: BTreeMap<&RepoPath, &FileInfo> =
        listed.iter().flat_map(|listed| &listed.files).map(|file| (&file.path, file)).collect();
    let mut files = Vec::new();
    for file in push.files {
        files.push(match remote.get(&file.path) {
            None => Sending::New,
            Some(remote) if is_same(file, remote)? => Sending::Same,
            Some(_) => Sending::Replaced,
        });
    }
    let with =
        |fate: Sending| push.files.iter().zip(&files).filter(move |(_, found)| **found == fate).map(|(file, _)| file);
    let names: Vec<String> = with(Sending::Replaced).map(|file| file.path.to_string()).collect();
    if !names.is_empty() && !push.replace && !push.dry_run {
        return Err(PushError::Different { repository: push.repository.clone(), names });
    }
    let outgoing: Vec<&Outgoing> = with(Sending::New).chain(with(Sending::Replaced)).collect();
    if push.dry_run || outgoing.is_empty() {
        return Ok(Pushed { files, commit: None, sent_bytes: 0 });
    }
    if let (None, Some(private)) = (&listed, push.create) {
        create(hub, push.repository, private, watch)?;
    }
    let parent = listed.map(|listed| listed.commit);
    let is_large = upload_modes(hub, push, &outgoing, watch)?;
    let large: Vec<&Outgoing> = outgoing.iter().copied().filter(|file| is_large(file)).collect();
    let sent_bytes = upload(hub, push, &large, watch)?;
    let commit = commit(hub, push, &outgoing, &is_large, parent.as_ref(), watch)?;
    Ok(Pushed { files, commit: Some(commit), sent_bytes })
}

/// Whether the repository's file has the same bytes.
fn is_same(file: &Outgoing, remote: &FileInfo) -> Result<bool, PushError> {
    if file.file.len() != remote.bytes {
        return Ok(false);
    }
    match &remote.identity {
        Identity::Sha256(digits) => Ok(*digits == file.sha256),
        Identity::Git(digits) => Ok(git_object_id(&file.file)? == *digits),
    }
}

fn create(hub: &Hub, repository: &Repository, private: Private, watch: &dyn Watch) -> Result<(), PushError> {
    let url = format!("{}/api/repos/create", hub.endpoint());
    let ask = Ask { method: "POST", url: &url, headers: JSON, redirects: Redirects::Followed };
    // Without an organisation it would be the token's user, who may be another one.
    let body = json!({
        "type": "model", "name": repository.name(), "organization": repository.owner(), "private": private,
    });
    let made: Result<(Value, _), HubError> = hub.json(&ask, Some(&body), watch);
    match made {
        // It was made meanwhile, perhaps by a first try whose answer got lost.
        Err(HubError::Status { status: 409, .. }) | Ok(_) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Which files the hub wants on its content server.
fn upload_modes(
    hub: &Hub,
    push: &Push<'_>,
    files: &[&Outgoing],
    watch: &dyn Watch,
) -> Result<impl Fn(&Outgoing) -> bool + use<>, PushError> {
    #[derive(Deserialize)]
    struct Answer {
        files: Vec<Mode>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Mode {
        path: String,
        upload_mode: String,
    }
    let mut list = Vec::new();
    for file in files {
        let mut sample = vec![0; file.file.len().min(SAMPLE_BYTES) as usize];
        file.file.read_exact_at(FileOffset(0), &mut sample)?;
        list.push(json!({"path": file.path.as_str(), "size": file.file.len(), "sample": STANDARD.encode(sample)}));
    }
    let url = format!("{}/api/models/{}/preupload/{}", hub.endpoint(), push.repository, push.revision.encoded());
    let ask = Ask { method: "POST", url: &url, headers: JSON, redirects: Redirects::Followed };
    let (answer, _): (Answer, _) = hub.json(&ask, Some(&json!({ "files": list })), watch)?;
    let large: Vec<String> =
        answer.files.into_iter().filter(|file| file.upload_mode == "lfs").map(|file| file.path).collect();
    // The content server takes no empty files.
    Ok(move |file: &Outgoing| !file.file.is_empty() && large.iter().any(|path| path == file.path.as_str()))
}

/// What the hub answers for each large file.
#[derive(Deserialize)]
struct Batch {
    objects: Vec<Object>,
}

#[derive(Deserialize)]
struct Object {
    oid: String,
    error: Option<ObjectError>,
    actions: Option<Actions>,
}

#[derive(Deserialize)]
struct ObjectError {
    message: String,
}

#[derive(Deserialize)]
struct Actions {
    upload: Option<Action>,
    verify: Option<Action>,
}

#[derive(Deserialize)]
struct Action {
    href: String,
    #[serde(default)]
    header: BTreeMap<String, Value>,
}

impl Action {
    /// Its headers that are text and are to be sent along.
    fn headers(&self) -> Vec<(&str, &str)> {
        self.header.iter().filter_map(|(name, value)| Some((name.as_str(), value.as_str()?))).collect()
    }

    /// Bytes of a part and the address of each, if the server wants parts.
    fn parts(&self) -> Option<(u64, Vec<&str>)> {
        let number = |value: &Value| value.as_u64().or_else(|| value.as_str()?.parse().ok());
        let part_bytes = number(self.header.get("chunk_size")?)?;
        let mut parts: Vec<(u64, &str)> =
            self.header.iter().filter_map(|(name, value)| Some((name.parse().ok()?, value.as_str()?))).collect();
        parts.sort_unstable();
        Some((part_bytes, parts.into_iter().map(|(_, url)| url).collect()))
    }
}

/// Sends large files to the content server and returns the bytes that it did not have.
fn upload(hub: &Hub, push: &Push<'_>, files: &[&Outgoing], watch: &dyn Watch) -> Result<u64, PushError> {
    if files.is_empty() {
        return Ok(0);
    }
    let objects: Vec<Value> = files.iter().map(|file| json!({"oid": file.sha256, "size": file.file.len()})).collect();
    let body = json!({
        "operation": "upload", "transfers": ["basic", "multipart"], "objects": objects, "hash_algo": "sha256",
        "ref": {"name": push.revision.to_string()},
    });
    let url = format!("{}/{}.git/info/lfs/objects/batch", hub.endpoint(), push.repository);
    let ask = Ask { method: "POST", url: &url, headers: LFS, redirects: Redirects::Followed };
    let (batch, _): (Batch, _) = hub.json(&ask, Some(&body), watch)?;
    let mut sent_bytes = 0;
    for file in files {
        let nonsense =
            |fault: String| HubError::Nonsense { place: format!("hf:{}/{}", push.repository, file.path), fault };
        let object = batch.objects.iter().find(|object| object.oid == file.sha256);
        let object = object.ok_or_else(|| nonsense("it does not say where the file goes".to_owned()))?;
        if let Some(error) = &object.error {
            return Err(nonsense(format!("it refuses the file: {}", error.message)).into());
        }
        let Some(actions) = &object.actions else {
            // It has these bytes, from this repository or another one.
            watch.moved(file.file.len(), file.path.as_str());
            continue;
        };
        if let Some(action) = &actions.upload {
            match action.parts() {
                Some((part_bytes, parts)) => upload_parts(hub, push, file, action, part_bytes, &parts, watch)?,
                None => {
                    put(hub, file, 0, file.file.len(), &action.href, &action.headers(), watch)?;
                }
            }
            sent_bytes += file.file.len();
        }
        if let Some(action) = &actions.verify {
            let headers = [LFS, &action.headers()].concat();
            let ask = Ask { method: "POST", url: &action.href, headers: &headers, redirects: Redirects::Followed };
            let body = json!({"oid": file.sha256, "size": file.file.len()}).to_string();
            hub.patiently(watch, |_| hub.once(&ask, Content::Bytes(body.as_bytes())).map(drop))?;
        }
    }
    Ok(sent_bytes)
}

/// Sends a file in parts, several at a time, and has them put together.
fn upload_parts(
    hub: &Hub,
    push: &Push<'_>,
    file: &Outgoing,
    action: &Action,
    part_bytes: u64,
    parts: &[&str],
    watch: &dyn Watch,
) -> Result<(), PushError> {
    let bytes = file.file.len();
    if part_bytes == 0 || parts.len() > PARTS_MAX || bytes.div_ceil(part_bytes) != parts.len() as u64 {
        return Err(PushError::Parts { path: file.path.clone(), parts: parts.len(), part_bytes, bytes });
    }
    let next = AtomicUsize::new(0);
    let is_over = AtomicBool::new(false);
    let tags: Mutex<Vec<String>> = Mutex::new(vec![String::new(); parts.len()]);
    let first_error: Mutex<Option<PushError>> = Mutex::new(None);
    let work = || {
        while !is_over.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(url) = parts.get(index) else { return };
            let start = index as u64 * part_bytes;
            match put(hub, file, start, bytes.min(start + part_bytes), url, &[], watch) {
                Ok(tag) => tags.lock().unwrap_or_else(PoisonError::into_inner)[index] = tag,
                Err(error) => {
                    first_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    is_over.store(true, Ordering::Relaxed);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..push.connections.clamp(1, CONNECTIONS_MAX).min(parts.len()) {
            // With fewer threads than asked for, those there are do all the work.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    if let Some(error) = first_error.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    let tags = tags.into_inner().unwrap_or_else(PoisonError::into_inner);
    let list: Vec<Value> =
        tags.iter().zip(1..).map(|(tag, number)| json!({"partNumber": number, "etag": tag})).collect();
    let body = json!({"oid": file.sha256, "parts": list}).to_string();
    let ask = Ask { method: "POST", url: &action.href, headers: LFS, redirects: Redirects::Followed };
    Ok(hub.patiently(watch, |_| hub.once(&ask, Content::Bytes(body.as_bytes())).map(drop))?)
}

/// Sends `start..end` of a file to an address, from the beginning at each try. Returns the entity tag it got.
fn put(
    hub: &Hub,
    file: &Outgoing,
    start: u64,
    end: u64,
    url: &str,
    headers: &[(&str, &str)],
    watch: &dyn Watch,
) -> Result<String, PushError> {
    let ask = Ask { method: "PUT", url, headers, redirects: Redirects::Followed };
    // What goes wrong on this side is kept here, since a request can only say that its body failed.
    let mut own_fault = None;
    let sent = hub.patiently(watch, |_| {
        let mut part = FilePart::new(file, start, end);
        let mut body = Watched { part: &mut part, watch, moved: 0, fault: None };
        let answer = hub.once(&ask, Content::Reader(end - start, &mut body));
        let Watched { moved, fault, .. } = body;
        match (fault, answer) {
            (Some(fault), _) => {
                own_fault = Some(fault);
                Err(Fault::Lasting(HubError::Stopped))
            }
            (None, Ok(answer)) => Ok(header(&answer, "etag").unwrap_or_default()),
            (None, Err(error)) => {
                watch.lost(moved);
                Err(error)
            }
        }
    });
    match own_fault {
        Some(error) => Err(error),
        None => Ok(sent?),
    }
}

/// Part of a file, read from its start on.
struct FilePart<'a> {
    file: &'a Outgoing,
    at: u64,
    end: u64,
}

impl<'a> FilePart<'a> {
    fn new(file: &'a Outgoing, start: u64, end: u64) -> Self {
        Self { file, at: start, end }
    }

    /// Fills the start of `out`; `None` at the end.
    fn next(&mut self, out: &mut [u8]) -> Result<Option<usize>, IoError> {
        let count = out.len().min(BUFFER_BYTES).min((self.end - self.at) as usize);
        if count == 0 {
            return Ok(None);
        }
        self.file.file.read_exact_at(FileOffset(self.at), &mut out[..count])?;
        self.at += count as u64;
        Ok(Some(count))
    }
}

/// A part of a file as the body of a request, which can be stopped.
struct Watched<'a, 'b> {
    part: &'a mut FilePart<'b>,
    watch: &'a dyn Watch,
    moved: u64,
    fault: Option<PushError>,
}

impl Read for Watched<'_, '_> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let mut fail = |fault: PushError| {
            let error = std::io::Error::other(fault.to_string());
            self.fault = Some(fault);
            Err(error)
        };
        if self.watch.is_stopped() {
            return fail(HubError::Stopped.into());
        }
        match self.part.next(out) {
            Ok(count) => {
                let count = count.unwrap_or(0);
                self.moved += count as u64;
                self.watch.moved(count as u64, self.part.file.path.as_str());
                Ok(count)
            }
            Err(error) => fail(error.into()),
        }
    }
}

/// Makes the commit and returns its id.
fn commit(
    hub: &Hub,
    push: &Push<'_>,
    files: &[&Outgoing],
    is_large: &dyn Fn(&Outgoing) -> bool,
    parent: Option<&Revision>,
    watch: &dyn Watch,
) -> Result<String, PushError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Answer {
        commit_oid: String,
    }
    let mut head = json!({"summary": push.message, "description": ""});
    if let Some(parent) = parent {
        head["parentCommit"] = parent.to_string().into();
    }
    let mut lines = vec![json!({"key": "header", "value": head})];
    for file in files {
        let (path, bytes) = (file.path.as_str(), file.file.len());
        lines.push(if is_large(file) {
            json!({"key": "lfsFile", "value": {"path": path, "algo": "sha256", "oid": file.sha256, "size": bytes}})
        } else if bytes <= INLINE_BYTES_MAX {
            let mut content = vec![0; bytes as usize];
            file.file.read_exact_at(FileOffset(0), &mut content)?;
            json!({"key": "file", "value": {"path": path, "encoding": "base64", "content": STANDARD.encode(content)}})
        } else {
            return Err(PushError::TooLong { path: file.path.clone(), bytes });
        });
    }
    let body: String = lines.iter().map(|line| format!("{line}\n")).collect();
    let url = format!("{}/api/models/{}/commit/{}", hub.endpoint(), push.repository, push.revision.encoded());
    let headers = &[("content-type", "application/x-ndjson")];
    let ask = Ask { method: "POST", url: &url, headers, redirects: Redirects::Followed };
    let answer = hub.patiently(watch, |_| {
        let mut answer = hub.once(&ask, Content::Bytes(body.as_bytes()))?;
        let read = answer.body.read_json::<Answer>();
        read.map_err(|error| Fault::cut(&answer.place, &std::io::Error::other(error.to_string())))
    });
    match answer {
        Ok(Answer { commit_oid }) => Ok(commit_oid),
        // The branch has moved on: to the commit of a first try whose answer got lost, or to someone else's.
        Err(error @ HubError::Status { status: 409 | 412, .. }) => {
            let listed = hub.list(push.repository, push.revision, watch)?;
            for file in files {
                match listed.files.iter().find(|found| found.path == file.path) {
                    Some(found) if is_same(file, found)? => {}
                    _ => return Err(error.into()),
                }
            }
            Ok(listed.commit.to_string())
        }
        Err(error) => Err(error.into()),
    }
}
