//! Streams that outlive their client's connection: `X-Conversation-Id`, `GET` and `DELETE /v1/stream`,
//! `POST /v1/streams/lookup`.
//!
//! A task of its own pulls the answer's bytes into the session's log, and every reader, the first client included, reads
//! them from there. So what is replayed is what was sent, and a reader that goes away stops nothing. A session ends when
//! its stream does, by `DELETE`, or when a new stream takes its id; it is forgotten some time after its end.
//!
//! Always holds: logs and sessions stay within their [`StreamLimits`]. Finished ones make room, oldest first; after that
//! a running one loses its oldest bytes.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Query, Request, State as Shared};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use futures_util::stream::unfold;
use futures_util::{Stream, StreamExt};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::auth::Owner;
use super::error::{ApiError, Code};
use super::fields::{as_list, as_text};
use super::{App, request, stream};
use crate::config::StreamLimits;

/// Bytes that a reader takes at once.
const READ_BYTES_MAX: usize = 64 << 10;
/// Bytes of a conversation's id.
const ID_BYTES_MAX: usize = 512;
/// Ids in one lookup.
const LOOKUP_IDS_MAX: usize = 10_000;
/// The header that asks for a session.
const CONVERSATION_ID: &str = "x-conversation-id";

/// Names a session: the same id of two owners is two conversations, and neither learns of the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Conversation {
    owner: Owner,
    id: String,
}

/// All sessions. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Sessions(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    limits: StreamLimits,
    /// By number, which is their order of arrival.
    sessions: BTreeMap<u64, Session>,
    begun: u64,
    /// Sum over all logs.
    bytes: usize,
}

#[derive(Debug)]
struct Session {
    conversation: Conversation,
    log: VecDeque<u8>,
    /// Bytes that were dropped from the front.
    dropped: u64,
    started_at: u64,
    /// Unix seconds, and the moment itself.
    ended: Option<(u64, Instant)>,
    /// Tells readers that there is something new. Dropped with the session, which ends them.
    changed: watch::Sender<()>,
    /// Dropped with the session, which ends the task that writes.
    _alive: watch::Sender<()>,
}

impl Session {
    fn end(&self) -> u64 {
        self.dropped + self.log.len() as u64
    }
}

/// What a reader finds at its position.
enum Piece {
    Bytes(Bytes),
    /// Nothing yet.
    Wait(watch::Receiver<()>),
    /// The stream is complete, or its session was ended.
    End,
    /// The position was dropped.
    Lost,
}

impl Sessions {
    /// No session yet.
    pub(crate) fn new(limits: StreamLimits) -> Self {
        Self(Arc::new(Mutex::new(State::new(limits))))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of sessions and bytes in them.
    pub(crate) fn extent(&self) -> (usize, usize) {
        let mut state = self.lock();
        state.forget_old();
        (state.sessions.len(), state.bytes)
    }

    /// Cancels what still runs in this conversation: its client has begun something new.
    pub(crate) fn cancel_running(&self, conversation: &Conversation) {
        let mut state = self.lock();
        let running = state.find(conversation).filter(|number| state.sessions[number].ended.is_none());
        if let Some(number) = running {
            state.remove(number);
        }
    }

    /// Begins a session for `bytes`, in place of an older one of this conversation, and gives a body that reads it from the
    /// start. Without room for another session the body is `bytes` itself.
    pub(crate) fn record(&self, conversation: Conversation, bytes: impl Stream<Item = Bytes> + Send + 'static) -> Body {
        let Some((number, alive)) = self.lock().open(conversation) else {
            return Body::from_stream(bytes.map(Ok::<_, Infallible>));
        };
        tokio::spawn(self.clone().write(number, alive, bytes));
        self.reader(number, 0)
    }

    async fn write(self, number: u64, mut alive: watch::Receiver<()>, bytes: impl Stream<Item = Bytes> + Send) {
        let mut bytes = std::pin::pin!(bytes);
        loop {
            tokio::select! {
                piece = bytes.next() => match piece {
                    Some(piece) => self.lock().append(number, &piece),
                    None => break,
                },
                // Nothing is ever sent, so this is the session's end.
                _ = alive.changed() => return,
            }
        }
        self.lock().finish(number);
    }

    /// The bytes of a session from a position on, until its end.
    fn reader(&self, number: u64, from: u64) -> Body {
        let state = Some((self.clone(), from));
        Body::from_stream(unfold(state, move |state| async move {
            let (sessions, at) = state?;
            loop {
                let piece = sessions.lock().piece(number, at);
                match piece {
                    Piece::Bytes(bytes) => {
                        let next = at + bytes.len() as u64;
                        return Some((Ok(bytes), Some((sessions, next))));
                    }
                    // An error means that the session is gone, and the next look finds that.
                    Piece::Wait(mut changed) => drop(changed.changed().await),
                    Piece::End => return None,
                    Piece::Lost => return Some((Err(io::Error::other("the reader was too slow")), None)),
                }
            }
        }))
    }
}

impl State {
    fn new(limits: StreamLimits) -> Self {
        Self { limits, sessions: BTreeMap::new(), begun: 0, bytes: 0 }
    }

    fn find(&self, conversation: &Conversation) -> Option<u64> {
        self.sessions.iter().find(|(_, session)| session.conversation == *conversation).map(|(&number, _)| number)
    }

    fn remove(&mut self, number: u64) {
        if let Some(session) = self.sessions.remove(&number) {
            self.bytes -= session.log.len();
        }
    }

    fn forget_old(&mut self) {
        let kept = self.limits.kept;
        let is_old = |session: &Session| session.ended.is_some_and(|(_, ended)| ended.elapsed() > kept);
        let old: Vec<u64> =
            self.sessions.iter().filter(|(_, session)| is_old(session)).map(|(&number, _)| number).collect();
        old.into_iter().for_each(|number| self.remove(number));
    }

    /// Forgets the finished session that is oldest. False if all are running.
    fn make_room(&mut self) -> bool {
        let oldest = self.sessions.iter().find(|(_, session)| session.ended.is_some()).map(|(&number, _)| number);
        oldest.map(|number| self.remove(number)).is_some()
    }

    fn open(&mut self, conversation: Conversation) -> Option<(u64, watch::Receiver<()>)> {
        self.forget_old();
        if let Some(number) = self.find(&conversation) {
            self.remove(number);
        }
        if self.sessions.len() >= self.limits.sessions_max && !self.make_room() {
            return None;
        }
        let number = self.begun;
        self.begun += 1;
        let (alive, watched) = watch::channel(());
        let session = Session {
            conversation,
            log: VecDeque::new(),
            dropped: 0,
            started_at: request::unix_seconds(),
            ended: None,
            changed: watch::Sender::new(()),
            _alive: alive,
        };
        self.sessions.insert(number, session);
        Some((number, watched))
    }

    fn append(&mut self, number: u64, piece: &[u8]) {
        let StreamLimits { bytes_max, all_bytes_max, .. } = self.limits;
        while self.bytes + piece.len() > all_bytes_max && self.make_room() {}
        let free = all_bytes_max.saturating_sub(self.bytes);
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let before = session.log.len();
        let allowed = bytes_max.min(before + free);
        // What does not fit any more: first of what is there, then of the piece itself.
        let excess = (before + piece.len()).saturating_sub(allowed);
        let of_log = excess.min(before);
        session.log.drain(..of_log);
        session.log.extend(&piece[excess - of_log..]);
        session.dropped += excess as u64;
        self.bytes = self.bytes - before + session.log.len();
        session.changed.send_replace(());
    }

    fn finish(&mut self, number: u64) {
        if let Some(session) = self.sessions.get_mut(&number) {
            session.ended = Some((request::unix_seconds(), Instant::now()));
            session.changed.send_replace(());
        }
    }

    fn piece(&self, number: u64, at: u64) -> Piece {
        let Some(session) = self.sessions.get(&number) else { return Piece::End };
        let Some(skipped) = at.checked_sub(session.dropped) else { return Piece::Lost };
        // Positions above the end are refused before a reader is made, and a log never shrinks at its end.
        let start = usize::try_from(skipped).unwrap_or(usize::MAX).min(session.log.len());
        let end = session.log.len().min(start + READ_BYTES_MAX);
        if start < end {
            return Piece::Bytes(session.log.range(start..end).copied().collect());
        }
        if session.ended.is_some() { Piece::End } else { Piece::Wait(session.changed.subscribe()) }
    }
}

/// The conversation that a request's stream belongs to, if it names one.
pub(crate) fn conversation(request: &Request) -> Result<Option<Conversation>, ApiError> {
    let id = conversation_id(request.headers())?;
    Ok(id.map(|id| Conversation { owner: Owner::of(request), id }))
}

fn conversation_id(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get(CONVERSATION_ID) else { return Ok(None) };
    let bytes = value.as_bytes();
    if (1..=ID_BYTES_MAX).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic) {
        return Ok(Some(String::from_utf8_lossy(bytes).into_owned()));
    }
    let message = format!("{CONVERSATION_ID} must have 1 to {ID_BYTES_MAX} visible characters");
    Err(ApiError::new(Code::InvalidValue, message).at(CONVERSATION_ID))
}

type Parameters = Query<HashMap<String, String>>;

fn named(parameters: &HashMap<String, String>, owner: Owner) -> Result<Conversation, ApiError> {
    let id = parameters.get("conv_id").filter(|id| !id.is_empty());
    let missing = || ApiError::new(Code::MissingParameter, "conv_id is required").at("conv_id");
    id.map(|id| Conversation { owner, id: id.clone() }).ok_or_else(missing)
}

/// `GET /v1/stream`: the bytes of a session from `from` on, and nothing else.
pub(crate) async fn replay(
    Shared(app): Shared<App>,
    Query(parameters): Parameters,
    request: Request,
) -> Result<Response, ApiError> {
    let conversation = named(&parameters, Owner::of(&request))?;
    let refuse = |code, message: String| ApiError::new(code, message).at("from");
    let from: u64 = match parameters.get("from") {
        None => 0,
        Some(text) => {
            text.parse().map_err(|_| refuse(Code::InvalidValue, "from must be a number of bytes".to_owned()))?
        }
    };
    let sessions = app.sessions();
    let mut state = sessions.lock();
    state.forget_old();
    let Some(number) = state.find(&conversation) else {
        return Err(ApiError::new(Code::StreamNotFound, "there is no stream of this conversation").at("conv_id"));
    };
    let (dropped, end) = (state.sessions[&number].dropped, state.sessions[&number].end());
    drop(state);
    if from < dropped {
        return Err(refuse(Code::StreamOffsetLost, format!("bytes before {dropped} are not kept any more")));
    }
    if from > end {
        return Err(refuse(Code::InvalidValue, format!("from is {from}, but the stream has {end} bytes")));
    }
    Ok(stream::events(sessions.reader(number, from)))
}

/// `DELETE /v1/stream`: cancels the stream, ends its readers, forgets it.
pub(crate) async fn stop(
    Shared(app): Shared<App>,
    Query(parameters): Parameters,
    request: Request,
) -> Result<StatusCode, ApiError> {
    let conversation = named(&parameters, Owner::of(&request))?;
    let mut state = app.sessions().lock();
    if let Some(number) = state.find(&conversation) {
        state.remove(number);
    }
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /v1/streams/lookup`: the sessions whose id is one of those given, or begins with one and `::`.
pub(crate) async fn lookup(Shared(app): Shared<App>, request: Request) -> Result<Json<Value>, ApiError> {
    const NAME: &str = "conversation_ids";
    let owner = Owner::of(&request);
    let wanted = request::prepare(&app, request, |_, _, mut fields, _| {
        let ids = as_list(NAME, fields.required(NAME)?)?;
        if ids.len() > LOOKUP_IDS_MAX {
            let message = format!("{NAME} has {} entries, at most {LOOKUP_IDS_MAX} are allowed", ids.len());
            return Err(ApiError::new(Code::InvalidValue, message).at(NAME));
        }
        let ids = ids.into_iter().enumerate().map(|(index, id)| as_text(&format!("{NAME}[{index}]"), id));
        ids.collect::<Result<HashSet<String>, ApiError>>()
    })
    .await?;
    let mut state = app.sessions().lock();
    state.forget_old();
    let is_wanted = |id: &str| wanted.contains(id) || id.match_indices("::").any(|(at, _)| wanted.contains(&id[..at]));
    let is_found = |Conversation { owner: of, id }: &Conversation| *of == owner && is_wanted(id);
    let found = state.sessions.values().filter(|session| is_found(&session.conversation)).map(|session| {
        json!({
            "conversation_id": session.conversation.id,
            "is_done": session.ended.is_some(),
            "total_bytes": session.end(),
            "started_at": session.started_at,
            "completed_at": session.ended.map_or(0, |(at, _)| at),
        })
    });
    Ok(Json(found.collect()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LIMITS: StreamLimits = StreamLimits {
        bytes_max: 4 << 20,
        all_bytes_max: 128 << 20,
        sessions_max: 256,
        kept: Duration::from_secs(300),
    };

    fn named(id: impl Into<String>) -> Conversation {
        Conversation { owner: Owner::default(), id: id.into() }
    }

    fn read(state: &State, number: u64, at: u64) -> Vec<u8> {
        match state.piece(number, at) {
            Piece::Bytes(bytes) => bytes.to_vec(),
            _ => Vec::new(),
        }
    }

    #[test]
    fn a_log_gives_bytes_from_any_position() {
        let mut state = State::new(LIMITS);
        let (number, _alive) = state.open(named("a")).unwrap();
        assert!(matches!(state.piece(number, 0), Piece::Wait(_)));
        state.append(number, b"hello ");
        state.append(number, b"world");
        assert_eq!(read(&state, number, 0), b"hello world");
        assert_eq!(read(&state, number, 6), b"world");
        assert!(matches!(state.piece(number, 11), Piece::Wait(_)));
        state.finish(number);
        assert!(matches!(state.piece(number, 11), Piece::End));
        state.remove(number);
        assert!(matches!(state.piece(number, 0), Piece::End));
        assert_eq!(state.bytes, 0);
    }

    #[test]
    fn a_long_log_loses_its_oldest_bytes() {
        let mut state = State::new(LIMITS);
        let (number, _alive) = state.open(named("a")).unwrap();
        for _ in 0..5 {
            state.append(number, &[7; 1 << 20]);
        }
        state.append(number, b"end");
        let session = &state.sessions[&number];
        assert_eq!((session.log.len(), session.end()), (LIMITS.bytes_max, (5 << 20) + 3));
        assert_eq!(state.bytes, LIMITS.bytes_max);
        assert!(matches!(state.piece(number, 5), Piece::Lost));
        assert_eq!(read(&state, number, 5 << 20), b"end");
        state.append(number, &vec![1; LIMITS.bytes_max + 9]);
        assert_eq!(state.sessions[&number].end(), (5 << 20) + 3 + LIMITS.bytes_max as u64 + 9);
        assert_eq!(state.bytes, LIMITS.bytes_max);
    }

    #[test]
    fn finished_sessions_make_room_for_new_ones() {
        let mut state = State::new(LIMITS);
        let opened: Vec<_> =
            (0..LIMITS.sessions_max).map(|index| state.open(named(index.to_string())).unwrap()).collect();
        assert!(state.open(named("one more")).is_none(), "a running one is never forgotten");
        state.finish(opened[3].0);
        assert!(state.open(named("one more")).is_some());
        assert!(state.find(&named("3")).is_none() && state.find(&named("0")).is_some());
    }

    #[test]
    fn all_logs_together_are_bounded() {
        let mut state = State::new(LIMITS);
        let opened: Vec<_> = (0..40).map(|index| state.open(named(index.to_string())).unwrap().0).collect();
        for &number in &opened {
            state.append(number, &[7; LIMITS.bytes_max]);
            assert!(state.bytes <= LIMITS.all_bytes_max);
        }
        state.finish(opened[0]);
        state.append(opened[39], b"x");
        assert!(state.find(&named("0")).is_none(), "the finished one made room");
        assert_eq!(state.bytes, state.sessions.values().map(|session| session.log.len()).sum::<usize>());
    }

    #[test]
    fn a_conversation_id_is_visible_text() {
        let id = |value: &'static [u8]| {
            let value = axum::http::HeaderValue::from_bytes(value).unwrap();
            conversation_id(&HeaderMap::from_iter([(axum::http::HeaderName::from_static(CONVERSATION_ID), value)]))
        };
        assert_eq!(id(b"u-1::org/model").unwrap().as_deref(), Some("u-1::org/model"));
        assert!(id(b"").is_err() && id(b"a b").is_err() && id(&[b'x'; ID_BYTES_MAX + 1]).is_err());
        assert_eq!(conversation_id(&HeaderMap::new()), Ok(None));
    }
}
