//! The clients: who asks when, and what each saw.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use minnow_common::random::{keyed, unit_interval};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::prompts::{Prompts, Question};
use super::wire::Connection;
use crate::cache::Access;
use crate::engine::runner::Task;
use crate::engine::{Cancel, EngineHandle, Event, Job};
use crate::session::Session;
use crate::text::OutputText;

/// Clients of an open loop: as many requests can be on their way.
pub(super) const OPEN_CLIENTS: usize = 128;
/// Events that wait for a client, as in the server.
const EVENTS_MAX: usize = 64;
/// How long the sender of long prompts rests between two: about as long as reading one takes, so that there are as many
/// quiet waits as others.
const LONG_PAUSE: Duration = Duration::from_millis(700);

/// Who asks how often.
#[derive(Clone, Copy)]
pub(super) struct Load {
    pub streams: usize,
    pub rate: Option<f64>,
    pub max_tokens: usize,
    pub long_prompt: Option<usize>,
}

/// One request, as its client saw it.
pub(super) struct Asked {
    /// When it was to be sent.
    pub due: Instant,
    /// When each block's text came.
    pub blocks: Vec<Instant>,
    pub ended: Instant,
    pub ending: Ending,
}

/// How a request ended.
pub(super) enum Ending {
    Done(Numbers),
    /// The queue was full.
    Refused,
    Failed,
}

/// What an answer says about itself.
#[derive(Clone, Copy, Default)]
pub(super) struct Numbers {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub text_tokens: usize,
    pub forwards: usize,
}

/// When a long prompt was being read.
#[derive(Clone, Copy)]
pub(super) struct LongRead {
    pub begin: Instant,
    pub end: Instant,
}

impl LongRead {
    pub(super) fn overlaps(&self, begin: Instant, end: Instant) -> bool {
        self.begin < end && begin < self.end
    }
}

/// The way to the engine.
#[derive(Clone)]
pub(super) struct Asker {
    session: Arc<Session>,
    way: Way,
}

#[derive(Clone)]
enum Way {
    Engine(EngineHandle),
    Http(SocketAddr),
}

/// One client's end of it.
struct Client {
    session: Arc<Session>,
    end: ClientEnd,
}

enum ClientEnd {
    Engine(EngineHandle),
    Http(Connection),
}

/// Clients that ask until they are stopped.
pub(super) struct Running {
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<Vec<Asked>>>,
    long: Option<JoinHandle<Vec<LongRead>>>,
}

impl Load {
    /// Begins asking.
    pub(super) fn start(self, asker: &Asker, prompts: &Arc<Prompts>) -> Running {
        let stop = Arc::new(AtomicBool::new(false));
        let arrivals = self.rate.map(|rate| Arc::new(Arrivals::new(rate)));
        let count = if arrivals.is_some() { OPEN_CLIENTS } else { self.streams };
        let clients = (0..count as u64).map(|number| {
            let (stop, prompts, arrivals) = (Arc::clone(&stop), Arc::clone(prompts), arrivals.clone());
            let mut client = asker.client();
            std::thread::spawn(move || {
                let mut asked = Vec::new();
                for question in 0.. {
                    let due = arrivals.as_ref().map_or_else(Instant::now, |arrivals| arrivals.next());
                    while Instant::now() < due && !stop.load(Ordering::Relaxed) {
                        std::thread::sleep((due - Instant::now()).min(Duration::from_millis(50)));
                    }
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    asked.push(client.ask(due, prompts.question(number, question), self.max_tokens, Access::Shared));
                }
                asked
            })
        });
        let clients = clients.collect();
        let long = self.long_prompt.map(|tokens| {
            let (stop, prompts, mut client) = (Arc::clone(&stop), Arc::clone(prompts), asker.client());
            std::thread::spawn(move || {
                let mut reads = Vec::new();
                for number in 0.. {
                    std::thread::sleep(LONG_PAUSE);
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let begin = Instant::now();
                    let asked = client.ask(begin, &prompts.unseen(number, tokens), 1, Access::Private);
                    reads.push(LongRead { begin, end: asked.ended });
                }
                reads
            })
        });
        Running { stop, clients, long }
    }
}

impl Running {
    /// Lets no client ask anything more.
    pub(super) fn ask_no_more(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Waits until every client has the end of what it asked, and collects what they saw.
    pub(super) fn join(self) -> (Vec<Asked>, Vec<LongRead>) {
        let asked = self.clients.into_iter().flat_map(|client| client.join().unwrap_or_default()).collect();
        let long = self.long.map(|long| long.join().unwrap_or_default()).unwrap_or_default();
        (asked, long)
    }
}

/// Arrival times at random, on average `rate` a second.
struct Arrivals {
    rate: f64,
    last: Mutex<Instant>,
    count: AtomicU64,
}

impl Arrivals {
    fn new(rate: f64) -> Self {
        Self { rate, last: Mutex::new(Instant::now()), count: AtomicU64::new(0) }
    }

    /// When the next request is due.
    fn next(&self) -> Instant {
        let uniform = unit_interval(keyed(0x0be2, &[self.count.fetch_add(1, Ordering::Relaxed)]));
        let pause = Duration::from_secs_f64(-(1.0 - uniform).ln() / self.rate);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last += pause;
        *last
    }
}

impl Asker {
    pub(super) fn to_engine(engine: EngineHandle, session: &Arc<Session>) -> Self {
        Self { session: Arc::clone(session), way: Way::Engine(engine) }
    }

    pub(super) fn over_http(address: SocketAddr, session: &Arc<Session>) -> Self {
        Self { session: Arc::clone(session), way: Way::Http(address) }
    }

    fn client(&self) -> Client {
        let end = match &self.way {
            Way::Engine(engine) => ClientEnd::Engine(engine.clone()),
            Way::Http(address) => ClientEnd::Http(Connection::new(*address)),
        };
        Client { session: Arc::clone(&self.session), end }
    }
}

impl Client {
    fn ask(&mut self, due: Instant, question: &Question, max_tokens: usize, cache: Access) -> Asked {
        let mut blocks = Vec::new();
        let ending = match &mut self.end {
            ClientEnd::Engine(engine) => ask_engine(engine, &self.session, question, max_tokens, cache, &mut blocks),
            ClientEnd::Http(connection) => ask_http(connection, question, max_tokens, &mut blocks),
        };
        Asked { due, blocks, ended: Instant::now(), ending }
    }
}

fn ask_engine(
    engine: &EngineHandle,
    session: &Session,
    question: &Question,
    max_tokens: usize,
    cache: Access,
    blocks: &mut Vec<Instant>,
) -> Ending {
    let (events, mut incoming) = mpsc::channel(EVENTS_MAX);
    let Ok(room) = session.room_after(question.ids.len()) else { return Ending::Failed };
    let task = Task {
        prompt: question.ids.clone(),
        max_new: max_tokens.min(room),
        options: session.default_options,
        seed: session.default_seed.unwrap_or(0),
        stop_ids: session.stop_ids(),
        cache,
        language: None,
    };
    let text = OutputText::plain(&session.tokenizer, &[]).ending_at(&task.stop_ids);
    let job = Job { task, text, wants_progress: false, is_watched: false, events, cancel: Cancel::default() };
    if engine.submit(job).is_err() {
        return Ending::Refused;
    }
    while let Some(event) = incoming.blocking_recv() {
        match event {
            Event::Block { .. } => blocks.push(Instant::now()),
            Event::Finished(finish) => {
                let stats = finish.stats;
                return Ending::Done(Numbers {
                    prompt_tokens: stats.prompt_tokens,
                    completion_tokens: stats.completion_tokens,
                    text_tokens: stats.text_tokens,
                    forwards: stats.denoise_forwards,
                });
            }
            Event::Failed(_) => break,
            Event::Admitted { .. } | Event::Prefilled { .. } | Event::Refined(_) | Event::Step { .. } => {}
        }
    }
    Ending::Failed
}

fn ask_http(connection: &mut Connection, question: &Question, max_tokens: usize, blocks: &mut Vec<Instant>) -> Ending {
    let mut body = question.body.clone();
    body["stream"] = json!(true);
    body["max_tokens"] = json!(max_tokens);
    let mut numbers = None;
    let answered = connection.post(question.path, &body.to_string(), &mut |data| {
        let Ok(chunk) = serde_json::from_str::<Value>(data) else { return };
        let choice = &chunk["choices"][0];
        let text = choice["text"].as_str().or_else(|| choice["delta"]["content"].as_str());
        if text.is_some_and(|text| !text.is_empty()) || choice["delta"].get("tool_calls").is_some() {
            blocks.push(Instant::now());
        }
        if choice["finish_reason"].is_string() {
            let number = |value: &Value| value.as_u64().map_or(0, |number| number as usize);
            let (minnow, timings) = (&chunk["minnow"], &chunk["timings"]);
            numbers = Some(Numbers {
                prompt_tokens: number(&timings["prompt_n"]) + number(&timings["cache_n"]),
                completion_tokens: minnow["batches"]
                    .as_array()
                    .map_or(0, |all| all.iter().map(|block| number(&block["tokens"])).sum()),
                text_tokens: number(&minnow["text_tokens"]),
                forwards: number(&minnow["denoise_forwards"]),
            });
        }
    });
    match (answered, numbers) {
        (Ok(200), Some(numbers)) => Ending::Done(numbers),
        (Ok(429 | 503), _) => Ending::Refused,
        _ => Ending::Failed,
    }
}
