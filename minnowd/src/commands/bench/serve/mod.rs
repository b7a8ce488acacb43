//! `minnowd bench serve`: many requests at once, without a load generator beside it.
//!
//! Clients are threads of this process. They hand jobs to the engine, or speak HTTP to a server that this command starts
//! on a loopback port. In a *closed* loop each client asks again when it has its answer, so there are always as many
//! requests as clients; in an *open* one requests arrive at random times at a given rate, whatever is still running, and
//! times count from the arrival that was due. A row is one number of streams: the load begins, warms up, and then goes on
//! through the measured windows. Text counts when its request ends.
//!
//! Between two blocks of a request its client has to wait; that time is what a reader feels. With `--long-prompt` one
//! more client sends prompts that nobody has seen, with pauses, and the row tells waits beside one from quiet ones.

mod clients;
mod prompts;
mod wire;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::Serialize;

use crate::config::{DecodingDefaults, HttpOptions, ListenAddress, ModelSource};
use crate::engine::{self, EngineHandle, Health, QueueLimits};
use crate::http::{App, Listener};
use crate::keys::Keys;
use crate::session::{Loaded, Session};
use clients::{Asked, Asker, Ending, Load, LongRead};
use prompts::Prompts;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Requests at once, a row each; at least one number, and not more than one in an open loop.
    pub streams: Vec<usize>,
    /// Requests a second in an open loop; `None` is a closed one.
    pub rate: Option<f64>,
    /// Through HTTP, instead of straight to the engine.
    pub over_http: bool,
    /// Time before the first window.
    pub warm_up: Duration,
    /// Length of a window.
    pub window: Duration,
    /// Windows of each row.
    pub windows: usize,
    /// Output limit of each request.
    pub max_tokens: usize,
    /// Questions to ask, one JSON object a line as for `minnowd eval`; `None` is a built-in set.
    pub data: Option<std::path::PathBuf>,
    /// Tokens of the prompts that one more client sends.
    pub long_prompt: Option<usize>,
    /// Print one JSON object instead of a table.
    pub json: bool,
}

/// Median, and the values that 5 and 95 of 100 windows do not exceed.
#[derive(Clone, Copy, Debug, Serialize)]
struct Spread {
    median: f64,
    p5: f64,
    p95: f64,
}

/// Values that 50, 95 and 99 of 100 waits do not exceed, in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
struct Waits {
    count: usize,
    p50_ms: f64,
    p95_ms: f64,
    p99_ms: f64,
}

/// One line of the report.
#[derive(Clone, Debug, Serialize)]
struct Row {
    streams: usize,
    /// Requests that ended in the windows.
    requests: usize,
    refused: usize,
    failed: usize,
    text_tokens_per_second: Spread,
    forwards_per_second: Spread,
    sequences_per_forward: f64,
    tokens_per_forward: f64,
    to_first_block: Option<Waits>,
    between_blocks: Option<Waits>,
    /// Waits during which a long prompt was being read, and how many were read in the windows.
    #[serde(skip_serializing_if = "Option::is_none")]
    beside_long_prompts: Option<Beside>,
    /// Prompt tokens found in the cache, of those of the requests that ended.
    cache_hit_share: f64,
    /// Text of this row over that of the first, a second.
    speed_up: f64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Beside {
    long_prompts: usize,
    read_seconds_median: f64,
    between_blocks: Option<Waits>,
    /// The 99th percentile beside long prompts over the quiet one.
    p99_ratio: Option<f64>,
}

#[derive(Serialize)]
struct Report<'a> {
    command: &'static str,
    version: &'static str,
    model: &'a str,
    encodings: &'a str,
    backend: &'a str,
    over: &'static str,
    rate: Option<f64>,
    max_tokens: usize,
    long_prompt: Option<usize>,
    window_seconds: f64,
    windows: usize,
    rows: Vec<Row>,
}

/// Measures and prints.
pub fn run(source: &ModelSource, decoding: &DecodingDefaults, plan: &Plan) -> anyhow::Result<ExitCode> {
    let slots = plan.streams.iter().max().context("no number of streams was given")?;
    let running_max = slots + usize::from(plan.long_prompt.is_some());
    let Loaded { session, runner } = Loaded::open(source, decoding, running_max)?;
    let session = Arc::new(session);
    let prompts = Arc::new(Prompts::read(plan.data.as_deref(), &session)?);
    let engine = EngineHandle::loading(QueueLimits { running_max, waiting_max: clients::OPEN_CLIENTS, wait_max: None });
    let worker = engine::start(&engine, runner).context("the inference thread")?;
    let served = plan.over_http.then(|| Served::start(&engine, &session)).transpose()?;
    let asker = match &served {
        Some(served) => Asker::over_http(served.address, &session),
        None => Asker::to_engine(engine.clone(), &session),
    };
    let mut rows: Vec<Row> = Vec::new();
    for &streams in &plan.streams {
        let row = measure(plan, streams, &engine, &asker, &prompts, rows.first());
        rows.push(row);
    }
    engine.drain();
    drop(served);
    if !matches!(worker.join(), Ok(Some(_))) {
        bail!("the inference thread failed");
    }
    let report = Report {
        command: "serve",
        version: crate::VERSION,
        model: &session.model_id,
        encodings: &session.file_type,
        backend: &session.backend,
        over: if plan.over_http { "http" } else { "engine" },
        rate: plan.rate,
        max_tokens: plan.max_tokens,
        long_prompt: plan.long_prompt,
        window_seconds: plan.window.as_secs_f64(),
        windows: plan.windows,
        rows,
    };
    if plan.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        report.print();
    }
    Ok(ExitCode::SUCCESS)
}

/// Only this program's clients connect, and these are fewer.
const CONNECTIONS_MAX: usize = 4096;
/// For Unix sockets; none is bound here.
const SOCKET_MODE: u32 = 0o600;

/// A server on a loopback port; gone when dropped.
struct Served {
    address: std::net::SocketAddr,
    _runtime: tokio::runtime::Runtime,
}

impl Served {
    fn start(engine: &EngineHandle, session: &Arc<Session>) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("http").build()?;
        let options = HttpOptions { any_model: true, ..HttpOptions::default() };
        let app = App::new(engine.clone(), options, Keys::default());
        let any_port = ListenAddress::Tcp(std::net::SocketAddr::from(([127, 0, 0, 1], 0)));
        let listener = runtime.block_on(Listener::bind(&any_port, SOCKET_MODE))?;
        let ListenAddress::Tcp(address) = listener.address()? else {
            bail!("a TCP port was bound, but the listener has another address");
        };
        app.ready(Arc::clone(session));
        runtime.spawn(crate::http::serve(vec![listener], app, CONNECTIONS_MAX));
        Ok(Self { address, _runtime: runtime })
    }
}

/// What the engine had done at the end of a window.
#[derive(Clone, Copy)]
struct Mark {
    at: Instant,
    health: Health,
}

fn measure(
    plan: &Plan,
    streams: usize,
    engine: &EngineHandle,
    asker: &Asker,
    prompts: &Arc<Prompts>,
    first: Option<&Row>,
) -> Row {
    let load = Load { streams, rate: plan.rate, max_tokens: plan.max_tokens, long_prompt: plan.long_prompt };
    let running = load.start(asker, prompts);
    let mark = || Mark { at: Instant::now(), health: engine.health() };
    std::thread::sleep(plan.warm_up);
    let mut marks = vec![mark()];
    for _ in 0..plan.windows {
        std::thread::sleep(plan.window);
        marks.push(mark());
    }
    running.ask_no_more();
    if plan.rate.is_some() {
        // What has piled up in an open loop is of no use any more, and there is no other row.
        engine.drain();
    }
    let (asked, long_reads) = running.join();
    summarize(streams, &marks, &asked, &long_reads, first)
}

fn summarize(streams: usize, marks: &[Mark], asked: &[Asked], long_reads: &[LongRead], first: Option<&Row>) -> Row {
    let (Some(begin), Some(end)) = (marks.first(), marks.last()) else { unreachable!("a row has windows") };
    let is_inside = |at: Instant| (begin.at..end.at).contains(&at);
    let ended: Vec<&Asked> = asked.iter().filter(|asked| is_inside(asked.ended)).collect();
    let done = || {
        ended.iter().filter_map(|asked| if let Ending::Done(numbers) = &asked.ending { Some(numbers) } else { None })
    };
    let mut text_rates = Vec::new();
    let mut forward_rates = Vec::new();
    for window in marks.windows(2) {
        let seconds = (window[1].at - window[0].at).as_secs_f64();
        let of_window = asked.iter().filter(|asked| (window[0].at..window[1].at).contains(&asked.ended));
        let text: usize = of_window
            .map(|asked| if let Ending::Done(numbers) = &asked.ending { numbers.text_tokens } else { 0 })
            .sum();
        text_rates.push(text as f64 / seconds);
        let forwards = window[1].health.counters.forwards - window[0].health.counters.forwards;
        forward_rates.push(forwards as f64 / seconds);
    }
    let (before, after) = (begin.health, end.health);
    let forwards = after.counters.forwards - before.counters.forwards;
    let sequences = after.counters.sequence_forwards - before.counters.sequence_forwards;
    let hit = after.cache.hit_tokens - before.cache.hit_tokens;
    let prompt_tokens: usize = done().map(|done| done.prompt_tokens).sum();
    let (tokens, refinements) =
        done().fold((0, 0), |(tokens, forwards), done| (tokens + done.completion_tokens, forwards + done.forwards));
    let mut firsts = Vec::new();
    let (mut quiet, mut beside) = (Vec::new(), Vec::new());
    for asked in asked {
        let mut before = None;
        for &at in asked.blocks.iter().filter(|at| is_inside(**at)) {
            match before.replace(at) {
                None if asked.blocks.first() == Some(&at) => firsts.push(at - asked.due),
                None => {}
                Some(before) if long_reads.iter().any(|read| read.overlaps(before, at)) => beside.push(at - before),
                Some(before) => quiet.push(at - before),
            }
        }
    }
    let reads: Vec<f64> = long_reads
        .iter()
        .filter(|read| is_inside(read.end))
        .map(|read| (read.end - read.begin).as_secs_f64())
        .collect();
    let text = Spread::of(text_rates);
    let count = |is: fn(&Ending) -> bool| ended.iter().filter(|asked| is(&asked.ending)).count();
    let (quiet, beside) = (Waits::of(&mut quiet), Waits::of(&mut beside));
    Row {
        streams,
        requests: done().count(),
        refused: count(|ending| matches!(ending, Ending::Refused)),
        failed: count(|ending| matches!(ending, Ending::Failed)),
        text_tokens_per_second: text,
        forwards_per_second: Spread::of(forward_rates),
        sequences_per_forward: ratio(sequences as f64, forwards as f64),
        tokens_per_forward: ratio(tokens as f64, refinements as f64),
        to_first_block: Waits::of(&mut firsts),
        between_blocks: quiet,
        beside_long_prompts: (!long_reads.is_empty()).then(|| Beside {
            long_prompts: reads.len(),
            read_seconds_median: if reads.is_empty() { 0.0 } else { Spread::of(reads).median },
            between_blocks: beside,
            p99_ratio: beside.zip(quiet).map(|(beside, quiet)| beside.p99_ms / quiet.p99_ms),
        }),
        cache_hit_share: ratio(hit as f64, prompt_tokens as f64),
        speed_up: first.map_or(1.0, |first| ratio(text.median, first.text_tokens_per_second.median)),
    }
}

fn ratio(above: f64, below: f64) -> f64 {
    if below > 0.0 { above / below } else { 0.0 }
}

/// The value that `share` of `sorted` does not exceed; there is at least one.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}

impl Spread {
    /// Of at least one value.
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self { median: quantile(&values, 0.5), p5: quantile(&values, 0.05), p95: quantile(&values, 0.95) }
    }
}

impl Waits {
    fn of(times: &mut [Duration]) -> Option<Self> {
        times.sort_unstable();
        let milliseconds: Vec<f64> = times.iter().map(|time| time.as_secs_f64() * 1e3).collect();
        (!milliseconds.is_empty()).then(|| Self {
            count: milliseconds.len(),
            p50_ms: quantile(&milliseconds, 0.5),
            p95_ms: quantile(&milliseconds, 0.95),
            p99_ms: quantile(&milliseconds, 0.99),
        })
    }
}

impl Report<'_> {
    fn print(&self) {
        println!("minnowd {} bench serve", self.version);
        println!("{} ({}), on {}", self.model, self.encodings, self.backend);
        let load = self.rate.map_or("closed loop".to_owned(), |rate| format!("open loop, {rate} requests/s"));
        let (windows, seconds) = (self.windows, self.window_seconds);
        println!(
            "over {}, {load}, at most {} tokens a request, {windows} windows of {seconds} s\n",
            self.over, self.max_tokens
        );
        println!(
            "{:>7} {:>8} {:>22} {:>6} {:>16} {:>7} {:>7} {:>19} {:>19} {:>6}",
            "streams",
            "requests",
            "text tok/s (p5-p95)",
            "x",
            "forwards/s",
            "seq/fwd",
            "tok/fwd",
            "first block ms",
            "between blocks ms",
            "cached"
        );
        for row in &self.rows {
            let spread = |spread: &Spread| format!("{:.0} ({:.0}-{:.0})", spread.median, spread.p5, spread.p95);
            let waits = |waits: &Option<Waits>| {
                waits.map_or("-".to_owned(), |waits| {
                    format!("{:.0} / {:.0} / {:.0}", waits.p50_ms, waits.p95_ms, waits.p99_ms)
                })
            };
            println!(
                "{:>7} {:>8} {:>22} {:>6.2} {:>16} {:>7.2} {:>7.2} {:>19} {:>19} {:>5.0}%",
                row.streams,
                row.requests,
                spread(&row.text_tokens_per_second),
                row.speed_up,
                spread(&row.forwards_per_second),
                row.sequences_per_forward,
                row.tokens_per_forward,
                waits(&row.to_first_block),
                waits(&row.between_blocks),
                100.0 * row.cache_hit_share,
            );
            if row.refused + row.failed > 0 {
                println!("{:>7} refused, {} failed", row.refused, row.failed);
            }
            if let Some(beside) = &row.beside_long_prompts {
                println!(
                    "{:>7} long prompts, {:.2} s each; between blocks beside them {} ms, p99 {} of the quiet one",
                    beside.long_prompts,
                    beside.read_seconds_median,
                    waits(&beside.between_blocks),
                    beside.p99_ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}")),
                );
            }
        }
        println!("\nwaits are p50 / p95 / p99; x: text of this row over the first row's");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_measured() {
        let spread = Spread::of(vec![3.0, 1.0, 2.0]);
        assert_eq!((spread.p5, spread.median, spread.p95), (1.0, 2.0, 3.0));
        let mut times: Vec<Duration> = (1..=100).rev().map(Duration::from_millis).collect();
        let waits = Waits::of(&mut times).unwrap();
        assert_eq!((waits.count, waits.p50_ms, waits.p95_ms, waits.p99_ms), (100, 51.0, 95.0, 99.0));
        assert!(Waits::of(&mut []).is_none());
    }
}
