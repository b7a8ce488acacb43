//! `GET /metrics`: what the server has done, as Prometheus text of version 0.0.4.
//!
//! Numbers come from three places: the engine's counters ([`Health`]), what ended jobs and answers left behind in
//! [`Metrics`], and `/proc` for the process. A job counts when it ends; one that was cancelled counts only as cancelled.
//!
//! Always holds: label values come from fixed sets (routes are patterns of the router, everything else is `other`), so
//! that no client can make the page grow; `# HELP` and `# TYPE` stand once before the samples of a name.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, header};
use minnow_common::BLOCK;

use super::App;
use super::error::{ApiError, Code};
use crate::engine::runner::BATCH_SIZE_BOUNDS;
use crate::engine::{Health, JobStats};
use crate::session::Session;

/// Upper bounds of the time histograms, in seconds: from a cached one-block answer to a long one.
const SECONDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0];
/// Label of requests that no route took.
const OTHER: &str = "other";
/// The unit of CPU times in `/proc`; Linux shows 100 a second on every architecture.
const TICKS_PER_SECOND: f64 = 100.0;

/// How far a job was when its client went away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It had not started.
    Queued,
    /// Its prompt or its first block was being computed.
    Prefill,
    /// At least one block was final.
    Decode,
}

/// Counts and sums since the start.
#[derive(Debug)]
pub(crate) struct Metrics {
    numbers: Mutex<Numbers>,
    /// Unix seconds.
    process_started: f64,
}

#[derive(Debug, Default)]
struct Numbers {
    /// By route and status.
    requests: BTreeMap<(String, u16), u64>,
    /// By route.
    request_seconds: BTreeMap<String, Histogram>,
    queue: Histogram,
    first_block: Histogram,
    jobs: JobSums,
    tokens_max: usize,
    /// By [`Phase`].
    cancelled: [u64; 3],
    capacity_rejections: u64,
    /// What the last scrape saw, for rates.
    scraped: JobSums,
}

/// Sums over finished jobs.
#[derive(Clone, Copy, Debug, Default)]
struct JobSums {
    prompt_tokens: usize,
    cached_tokens: usize,
    prompt_time: Duration,
    predicted_tokens: usize,
    predicted_time: Duration,
    refinement_forwards: usize,
    commit_forwards: usize,
    blocks: usize,
    /// Outputs that ended in a loop.
    loops: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Histogram {
    /// Observations up to each bound of [`SECONDS`], not cumulative; larger ones are in `count` only.
    buckets: [u64; SECONDS.len()],
    count: u64,
    sum: f64,
}

impl Histogram {
    fn observe(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        if let Some(bucket) = SECONDS.iter().position(|&bound| seconds <= bound) {
            self.buckets[bucket] += 1;
        }
        self.count += 1;
        self.sum += seconds;
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { numbers: Mutex::default(), process_started: now.as_secs_f64() }
    }
}

impl Metrics {
    fn lock(&self) -> MutexGuard<'_, Numbers> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A job left the queue.
    pub(crate) fn admitted(&self, queued: Duration) {
        self.lock().queue.observe(queued);
    }

    /// A job's first block is final, this long after it was submitted.
    pub(crate) fn first_block(&self, after: Duration) {
        self.lock().first_block.observe(after);
    }

    /// A job is complete.
    pub(crate) fn finished(&self, stats: &JobStats) {
        let mut numbers = self.lock();
        let sums = &mut numbers.jobs;
        sums.prompt_tokens += stats.prompt_tokens.saturating_sub(stats.cached_tokens);
        sums.cached_tokens += stats.cached_tokens;
        sums.prompt_time += stats.prefill;
        sums.predicted_tokens += stats.text_tokens;
        sums.predicted_time += stats.decode;
        sums.refinement_forwards += stats.denoise_forwards;
        sums.commit_forwards += stats.commit_forwards;
        sums.blocks += stats.blocks.len();
        sums.loops += usize::from(stats.repeated_tokens > 0);
        numbers.tokens_max = numbers.tokens_max.max(stats.prompt_tokens + stats.completion_tokens);
    }

    /// A job's client went away.
    pub(crate) fn cancelled(&self, phase: Phase) {
        self.lock().cancelled[phase as usize] += 1;
    }

    /// A job was refused because keys and values have no room for it.
    pub(crate) fn capacity_rejected(&self) {
        self.lock().capacity_rejections += 1;
    }

    fn answered(&self, route: &str, status: u16, time: Duration) {
        let mut numbers = self.lock();
        *numbers.requests.entry((route.to_owned(), status)).or_default() += 1;
        numbers.request_seconds.entry(route.to_owned()).or_default().observe(time);
    }
}

/// One request on its way through the server. Counts on drop, so that it counts once, however it ends.
#[derive(Debug)]
pub(crate) struct Tally {
    metrics: Arc<Metrics>,
    route: String,
    started: Instant,
    status: u16,
}

impl Tally {
    /// A request for a pattern of the router; until [`Tally::complete`] it counts as left by its client.
    pub(crate) fn new(metrics: &Arc<Metrics>, route: Option<&str>) -> Self {
        let route = route.unwrap_or(OTHER).to_owned();
        Self { metrics: Arc::clone(metrics), route, started: Instant::now(), status: 499 }
    }

    /// The whole answer was given out.
    pub(crate) fn complete(&mut self, status: u16) {
        self.status = status;
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        self.metrics.answered(&self.route, self.status, self.started.elapsed());
    }
}

/// `GET /metrics`
pub(crate) async fn show(State(app): State<App>) -> Result<([(HeaderName, HeaderValue); 1], String), ApiError> {
    if !app.options().metrics {
        return Err(ApiError::new(Code::NotSupported, "metrics are switched off"));
    }
    let session = app.session()?;
    let mut page = Page::default();
    engine_part(&mut page, &app, session);
    http_part(&mut page, &mut app.metrics().lock());
    process_part(&mut page, app.metrics().process_started);
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    Ok(([(header::CONTENT_TYPE, kind)], page.text))
}

fn engine_part(page: &mut Page, app: &App, session: &Session) {
    let Health { active, queued, counters, pages, cache, .. } = app.engine().health();
    let info = [("version", crate::VERSION), ("model", &session.model_id), ("backend", &session.backend)];
    page.name("minnow_build_info", "gauge", "What is served.");
    page.sample("minnow_build_info", &info, 1);
    let (sessions, bytes) = app.sessions().extent();
    page.single("minnow_stream_sessions", "gauge", "Resumable streams kept.", sessions);
    page.single("minnow_stream_session_bytes", "gauge", "Bytes of resumable streams kept.", bytes);
    page.single("minnow_ready", "gauge", "Whether requests are served.", u8::from(app.check_state().is_ok()));
    page.single("llamacpp:n_decode_total", "counter", "Forward batches.", counters.forwards);
    page.single("llamacpp:requests_processing", "gauge", "Requests running.", active);
    page.single("llamacpp:requests_deferred", "gauge", "Requests waiting.", queued);
    page.single("minnow_active_requests", "gauge", "Requests running.", active);
    page.single("minnow_queue_depth", "gauge", "Requests waiting.", queued);
    let busy = if counters.forwards == 0 { 0.0 } else { counters.sequence_forwards as f64 / counters.forwards as f64 };
    page.single("llamacpp:n_busy_slots_per_decode", "gauge", "Sequences in a forward batch, on average.", busy);
    page.name("minnow_batch_size", "histogram", "Sequences in a forward batch.");
    let mut up_to = 0;
    for (bound, count) in BATCH_SIZE_BOUNDS.iter().zip(counters.batch_sizes) {
        up_to += count;
        page.sample("minnow_batch_size_bucket", &[("le", &bound.to_string())], up_to);
    }
    page.sample("minnow_batch_size_bucket", &[("le", "+Inf")], counters.forwards);
    page.sample("minnow_batch_size_sum", &[], counters.sequence_forwards);
    page.sample("minnow_batch_size_count", &[], counters.forwards);
    let page_bytes = session.cache_bytes / (pages.total.max(1) as u64);
    page.name("minnow_kv_bytes", "gauge", "Keys and values: held by requests, by anyone, and at most.");
    for (state, bytes) in [
        ("reserved", pages.running as u64 * page_bytes),
        ("used", (pages.running + pages.idle) as u64 * page_bytes),
        ("budget", session.cache_bytes),
    ] {
        page.sample("minnow_kv_bytes", &[("state", state)], bytes);
    }
    page.single("minnow_cache_hits_total", "counter", "Requests that found part of their prompt.", cache.hits);
    page.single("minnow_cache_evictions_total", "counter", "Cached blocks that made room for others.", cache.evicted);
    page.single("minnow_kv_preemptions_total", "counter", "Requests that gave way for room.", counters.preemptions);
}

fn http_part(page: &mut Page, numbers: &mut Numbers) {
    let sums = numbers.jobs;
    let before = std::mem::replace(&mut numbers.scraped, sums);
    let (prompt, cached) = (sums.prompt_tokens, sums.cached_tokens);
    page.single("llamacpp:prompt_tokens_total", "counter", "Prompt tokens computed.", prompt);
    page.single("llamacpp:prompt_tokens_cached_total", "counter", "Prompt tokens found in the cache.", cached);
    let seconds = sums.prompt_time.as_secs_f64();
    page.single("llamacpp:prompt_seconds_total", "counter", "Time spent on prompts.", seconds);
    page.single("llamacpp:tokens_predicted_total", "counter", "Tokens generated.", sums.predicted_tokens);
    let seconds = sums.predicted_time.as_secs_f64();
    page.single("llamacpp:tokens_predicted_seconds_total", "counter", "Time spent on generating.", seconds);
    page.single("llamacpp:n_tokens_max", "counter", "Most tokens of a request, prompt and output.", numbers.tokens_max);
    let rate = |tokens: usize, time: Duration| if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() };
    let prompt_rate = rate(prompt - before.prompt_tokens, sums.prompt_time - before.prompt_time);
    let help = "Prompt tokens per second of work since the last scrape.";
    page.single("llamacpp:prompt_tokens_seconds", "gauge", help, prompt_rate);
    let tokens = sums.predicted_tokens - before.predicted_tokens;
    let help = "Generated tokens per second of work since the last scrape.";
    let predicted_rate = rate(tokens, sums.predicted_time - before.predicted_time);
    page.single("llamacpp:predicted_tokens_seconds", "gauge", help, predicted_rate);
    let forwards = sums.refinement_forwards;
    page.single("minnow_refinement_forwards_total", "counter", "Forwards that refined a block.", forwards);
    let help = "Forwards that only recomputed the keys and values of a final block.";
    page.single("minnow_commit_forwards_total", "counter", help, sums.commit_forwards);
    let help = "Positions that refinement forwards evaluated.";
    page.single("minnow_evaluated_tokens_total", "counter", help, BLOCK * forwards);
    page.single("minnow_blocks_total", "counter", "Blocks generated.", sums.blocks);
    let help = "Requests with an output that ended in the same few tokens over and over.";
    page.single("minnow_repetition_loops_total", "counter", help, sums.loops);
    let help = "Requests refused because keys and values have no room.";
    page.single("minnow_kv_pressure_rejections_total", "counter", help, numbers.capacity_rejections);
    page.name("minnow_cancelled_total", "counter", "Jobs whose client went away.");
    for (phase, count) in ["queued", "prefill", "decode"].into_iter().zip(numbers.cancelled) {
        page.sample("minnow_cancelled_total", &[("phase", phase)], count);
    }
    page.name("minnow_requests_total", "counter", "Requests answered; 499 is a client that went away.");
    for ((route, status), count) in &numbers.requests {
        page.sample("minnow_requests_total", &[("route", route), ("status", &status.to_string())], count);
    }
    page.name("minnow_request_seconds", "histogram", "From a request's head to the end of its answer.");
    for (route, histogram) in &numbers.request_seconds {
        page.histogram("minnow_request_seconds", &[("route", route)], histogram);
    }
    page.name("minnow_queue_seconds", "histogram", "Time that requests waited.");
    page.histogram("minnow_queue_seconds", &[], &numbers.queue);
    page.name("minnow_time_to_first_block_seconds", "histogram", "From submission to the first final block.");
    page.histogram("minnow_time_to_first_block_seconds", &[], &numbers.first_block);
}

/// What `/proc` says; a number that it does not say is left out.
fn process_part(page: &mut Page, started: f64) {
    page.single("process_start_time_seconds", "gauge", "Start of the process, in Unix seconds.", started);
    let read = |name: &str| std::fs::read_to_string(format!("/proc/self/{name}")).unwrap_or_default();
    let status = read("status");
    let resident =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    if let Some(kib) = resident {
        page.single("process_resident_memory_bytes", "gauge", "Memory in use.", kib * 1024);
    }
    // The name in parentheses may hold blanks; user and system time are the 12th and 13th field after it.
    let stat = read("stat");
    let ticks = stat.rsplit_once(')').and_then(|(_, fields)| {
        let mut times = fields.split_whitespace().skip(11).map_while(|field| field.parse::<u64>().ok());
        Some(times.next()? + times.next()?)
    });
    if let Some(ticks) = ticks {
        let seconds = ticks as f64 / TICKS_PER_SECOND;
        page.single("process_cpu_seconds_total", "counter", "User and system time.", seconds);
    }
    if let Ok(files) = std::fs::read_dir("/proc/self/fd") {
        page.single("process_open_fds", "gauge", "Open file descriptors.", files.count());
    }
}

/// The text that is being put together.
#[derive(Debug, Default)]
struct Page {
    text: String,
}

impl Page {
    /// What must stand once before a name's samples.
    fn name(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.text.push_str(name);
        for (index, (label, content)) in labels.iter().enumerate() {
            let content = content.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.text, "{}{label}=\"{content}\"", if index == 0 { '{' } else { ',' });
        }
        let _ = writeln!(self.text, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }

    /// A name with one sample and no label.
    fn single(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.name(name, kind, help);
        self.sample(name, &[], value);
    }

    fn histogram(&mut self, name: &str, labels: &[(&str, &str)], histogram: &Histogram) {
        let mut total = 0;
        let bounds = SECONDS.iter().map(ToString::to_string).zip(histogram.buckets);
        for (bound, count) in bounds.chain([("+Inf".to_owned(), 0)]) {
            total = if bound == "+Inf" { histogram.count } else { total + count };
            self.sample(&format!("{name}_bucket"), &[labels, &[("le", &bound)]].concat(), total);
        }
        self.sample(&format!("{name}_sum"), labels, histogram.sum);
        self.sample(&format!("{name}_count"), labels, histogram.count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped() {
        let mut page = Page::default();
        page.sample("a", &[("x", "q\"\\\n"), ("y", "")], 1.5);
        page.sample("b", &[], 0);
        assert_eq!(page.text, "a{x=\"q\\\"\\\\\\n\",y=\"\"} 1.5\nb 0\n");
    }

    #[test]
    fn buckets_are_cumulative() {
        let mut histogram = Histogram::default();
        for milliseconds in [1, 5, 30, 100_000] {
            histogram.observe(Duration::from_millis(milliseconds));
        }
        let mut page = Page::default();
        page.histogram("h", &[("route", "/")], &histogram);
        let expected =
            ["le=\"0.005\"} 2\n", "le=\"0.025\"} 2\n", "le=\"0.05\"} 3\n", "le=\"60\"} 3\n", "le=\"+Inf\"} 4\n"];
        for line in expected {
            assert!(page.text.contains(line), "{line} in {}", page.text);
        }
        assert!(page.text.ends_with("h_sum{route=\"/\"} 100.036\nh_count{route=\"/\"} 4\n"), "{}", page.text);
    }

    #[test]
    fn a_request_counts_once_however_it_ends() {
        let metrics = Arc::new(Metrics::default());
        drop(Tally::new(&metrics, None));
        let mut tally = Tally::new(&metrics, Some("/health"));
        tally.complete(200);
        drop(tally);
        let expected = [(("/health".to_owned(), 200), 1), (("other".to_owned(), 499), 1)];
        assert_eq!(metrics.lock().requests, BTreeMap::from(expected));
    }

    #[test]
    fn rates_cover_the_time_since_the_last_scrape() {
        let metrics = Metrics::default();
        let stats = JobStats { text_tokens: 30, decode: Duration::from_secs(2), ..JobStats::default() };
        metrics.finished(&stats);
        let scrape = || {
            let mut page = Page::default();
            http_part(&mut page, &mut metrics.lock());
            page.text
        };
        assert!(scrape().contains("\nllamacpp:predicted_tokens_seconds 15\n"));
        assert!(scrape().contains("\nllamacpp:predicted_tokens_seconds 0\n"));
    }
}
