//! `minnowd serve`: binds the sockets, loads the model, serves until a signal, drains.
//!
//! Sockets are bound first and answer 503 while the model loads, so that a supervisor's probe sees a process that is
//! on its way. SIGINT and SIGTERM drain: running requests may finish for a while; a second signal ends at once.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info, warn};

use crate::config::{DecodingDefaults, KeptPrefixes, ModelSource, ServeConfig};
use crate::engine::runner::Runner;
use crate::engine::{self, EngineHandle, State};
use crate::http::{App, Listener};
use crate::persist::{self, CacheKey, Identity};
use crate::session::{Loaded, ServeDefaults, Session};

/// The worker failed: a supervisor should start the process again (`EX_SOFTWARE`).
const EXIT_WORKER_FAILED: u8 = 70;
/// How often the worker's state is looked at.
const WATCH_PERIOD: Duration = Duration::from_millis(200);
/// How long answers about a failed worker may still take to be written.
const FAILURE_GRACE: Duration = Duration::from_millis(500);

/// Serves until a signal or a failure.
pub fn run(config: ServeConfig) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("http").build()?;
    let code = runtime.block_on(serve(config));
    // Connections that are still open belong to clients that the drain already gave up on.
    runtime.shutdown_background();
    code
}

async fn serve(config: ServeConfig) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::new()?;
    let mut listeners = Vec::new();
    for address in &config.listen {
        listeners
            .push(Listener::bind(address, config.socket_mode).await.with_context(|| format!("--listen {address}"))?);
    }
    let engine = EngineHandle::loading(config.queue);
    let app = App::new(engine.clone(), config.http.clone());
    let shutdown = app.shutdown();
    let server = tokio::spawn(crate::http::serve(listeners, app.clone(), config.connections_max));

    let loading = {
        let (source, decoding, defaults) = (config.source.clone(), config.decoding.clone(), serve_defaults(&config));
        tokio::task::spawn_blocking(move || load(&source, &decoding, defaults))
    };
    let loaded = tokio::select! {
        loaded = loading => loaded.context("loading the model")??,
        // Loading holds nothing that must be cleaned up.
        code = signals.next() => return Ok(ExitCode::from(code)),
    };
    let Loaded { session, mut runner } = loaded;
    runner.delay_steps(config.step_delay);
    let session = Arc::new(session);
    let kept = config.kept_prefixes.as_ref().map(|kept| Kept::open(kept, &session, &mut runner)).transpose()?;
    info!(model = session.model_id, backend = session.backend, context = session.context, "ready");
    app.ready(Arc::clone(&session));
    let worker = engine::start(&engine, runner).context("the inference thread")?;

    let signal_code = tokio::select! {
        code = signals.next() => code,
        () = worker_failure(&engine) => {
            error!("the inference worker has failed; ending so that a supervisor can start anew");
            tokio::time::sleep(FAILURE_GRACE).await;
            return Ok(ExitCode::from(EXIT_WORKER_FAILED));
        }
        ended = server => {
            ended.context("the HTTP server")??;
            anyhow::bail!("the HTTP server ended by itself");
        }
    };
    info!(signal = signal_code - 128, seconds = config.drain_timeout.as_secs(), "draining");
    engine.drain();
    tokio::select! {
        () = drained(&engine) => {}
        () = tokio::time::sleep(config.drain_timeout) => {
            warn!("running requests did not finish in time and are cancelled");
            app.cancel_all();
        }
        code = signals.next() => return Ok(ExitCode::from(code)),
    }
    shutdown.wait(FAILURE_GRACE).await;
    if drained_now(&engine)
        && let Ok(Ok(Some(runner))) = tokio::task::spawn_blocking(move || worker.join()).await
        && let Some(kept) = kept
    {
        kept.save(&runner);
    }
    info!("done");
    Ok(ExitCode::SUCCESS)
}

/// Known prefixes that outlive the process.
struct Kept {
    key: CacheKey,
    config: KeptPrefixes,
}

impl Kept {
    /// Binds the folder to this model and build, and hands what it holds to the runner.
    fn open(config: &KeptPrefixes, session: &Session, runner: &mut Runner) -> anyhow::Result<Self> {
        let checkpoint = session.content.as_deref().context(
            "--cache-dir needs a .mnw model: its digests say whose keys and values a file holds; safetensors have none",
        )?;
        let arithmetic = runner.backend().arithmetic();
        let identity = Identity { checkpoint, arithmetic: &arithmetic, program: crate::VERSION };
        let key = CacheKey::new(&identity, runner.backend().page_bytes());
        match persist::open(&config.folder, &key) {
            Ok(Some(loader)) => runner.restore(loader),
            Ok(None) => {}
            Err(ignored) => warn!("{ignored}"),
        }
        Ok(Self { key, config: config.clone() })
    }

    fn save(&self, runner: &Runner) {
        match persist::save(&self.config.folder, &self.key, self.config.bytes_max, runner.cache(), runner.backend()) {
            Ok(saved) => info!(blocks = saved.blocks, left_out = saved.left_out, "prefix cache saved"),
            Err(error) => warn!("prefix cache: {error}"),
        }
    }
}

fn load(source: &ModelSource, decoding: &DecodingDefaults, defaults: ServeDefaults) -> anyhow::Result<Loaded> {
    let mut loaded = Loaded::open(source, decoding, defaults.queue.running_max)?;
    loaded.session.apply(defaults);
    Ok(loaded)
}

fn serve_defaults(config: &ServeConfig) -> ServeDefaults {
    ServeDefaults { alias: config.alias.clone(), max_tokens: config.max_tokens, queue: config.queue }
}

async fn worker_failure(engine: &EngineHandle) {
    while engine.health().state != State::Failed {
        tokio::time::sleep(WATCH_PERIOD).await;
    }
}

fn drained_now(engine: &EngineHandle) -> bool {
    let health = engine.health();
    health.active + health.queued == 0
}

async fn drained(engine: &EngineHandle) {
    while !drained_now(engine) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The signals that end the program.
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// The exit code of the next signal: 128 and its number.
    async fn next(&mut self) -> u8 {
        tokio::select! {
            _ = self.interrupt.recv() => 130,
            _ = self.terminate.recv() => 143,
        }
    }
}
