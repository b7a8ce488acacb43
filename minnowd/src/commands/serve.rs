//! `minnowd serve`: binds the sockets, loads the model, serves until a signal, drains.
//!
//! Sockets are bound first and answer 503 while the model loads, so that a supervisor's probe sees a process that is
//! on its way. SIGINT and SIGTERM drain: running requests may finish for a while; a second signal ends at once. SIGHUP
//! reads keys and certificates again. A supervisor is told of each phase, and that there is life in it.

use std::convert::Infallible;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info, warn};

use crate::config::{DecodingDefaults, KeptPrefixes, ListenAddress, ModelSource, ServeConfig};
use crate::engine::runner::Runner;
use crate::engine::{self, EngineHandle, State};
use crate::http::{App, Listener, Tls};
use crate::keys::{KeySources, Keys};
use crate::persist::{self, CacheKey, Identity};
use crate::session::{Loaded, ServeDefaults, Session};
use crate::supervisor::{Notify, Supervisor};

/// The worker failed: a supervisor should start the process again (`EX_SOFTWARE`).
const EXIT_WORKER_FAILED: u8 = 70;
/// How often the worker's state is looked at.
const WATCH_PERIOD: Duration = Duration::from_millis(200);
/// How long answers about a failed worker may still take to be written.
const FAILURE_GRACE: Duration = Duration::from_millis(500);
/// How often a supervisor is asked for patience, and for how much.
const PATIENCE_PERIOD: Duration = Duration::from_secs(10);
const PATIENCE: Duration = Duration::from_secs(30);
/// Signs of life in the time after which a supervisor would kill the process.
const SIGNS_OF_LIFE: u32 = 3;

/// Serves until a signal or a failure.
pub fn run(config: ServeConfig, supervisor: Supervisor) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("http").build()?;
    let code = runtime.block_on(serve(config, supervisor));
    // Connections that are still open belong to clients that the drain already gave up on.
    runtime.shutdown_background();
    code
}

async fn serve(config: ServeConfig, mut supervisor: Supervisor) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::new()?;
    let hangup = signal(SignalKind::hangup())?;
    let keys = Keys::new(config.keys.read()?);
    let tls = config.tls.clone().map(Tls::read).transpose()?;
    let listeners = listen(&config, &mut supervisor, tls.as_ref()).await?;
    let notify = supervisor.notify;
    let engine = EngineHandle::loading(config.queue);
    let serving = Arc::new(OnceLock::new());
    let reloading = Reloading {
        sources: config.keys.clone(),
        keys: keys.clone(),
        tls,
        notify: notify.clone(),
        serving: Arc::clone(&serving),
    };
    tokio::spawn(reloading.at_each(hangup));
    if let Some(period) = supervisor.watchdog {
        tokio::spawn(show_life(notify.clone(), engine.clone(), period / SIGNS_OF_LIFE));
    }
    let app = App::new(engine.clone(), config.http.clone(), keys);
    let shutdown = app.shutdown();
    let server = tokio::spawn(crate::http::serve(listeners, app.clone(), config.connections_max));

    let loading = {
        let (source, decoding, defaults) = (config.source.clone(), config.decoding.clone(), serve_defaults(&config));
        tokio::task::spawn_blocking(move || load(&source, &decoding, defaults))
    };
    notify.status("loading the model");
    let loaded = tokio::select! {
        never = ask_for_patience(&notify) => match never {},
        loaded = loading => loaded.context("loading the model")??,
        // Loading holds nothing that must be cleaned up.
        code = signals.next() => return Ok(ExitCode::from(code)),
    };
    let Loaded { session, mut runner } = loaded;
    runner.delay_steps(config.step_delay);
    if let Some(forwards) = config.fail_after_forwards {
        runner.fail_after(forwards);
    }
    let session = Arc::new(session);
    let kept = config.kept_prefixes.as_ref().map(|kept| Kept::open(kept, &session, &mut runner)).transpose()?;
    app.ready(Arc::clone(&session));
    let worker = engine::start(&engine, runner).context("the inference thread")?;
    // Not earlier: whoever reads this line may ask at once.
    info!(model = session.model_id, backend = session.backend, context = session.context, "ready");
    notify.ready(serving.get_or_init(|| format!("serving {}", session.model_id)));

    let signal_code = tokio::select! {
        code = signals.next() => code,
        () = worker_failure(&engine) => {
            error!("the inference worker has failed; ending so that a supervisor can start anew");
            notify.stopping("the inference worker has failed");
            tokio::time::sleep(FAILURE_GRACE).await;
            return Ok(ExitCode::from(EXIT_WORKER_FAILED));
        }
        ended = server => {
            ended.context("the HTTP server")??;
            anyhow::bail!("the HTTP server ended by itself");
        }
    };
    info!(signal = signal_code - 128, seconds = config.drain_timeout.as_secs(), "draining");
    let health = engine.health();
    notify.stopping(&format!("draining, {} requests run", health.active));
    engine.drain();
    tokio::select! {
        never = ask_for_patience(&notify) => match never {},
        () = drained(&engine) => {}
        () = tokio::time::sleep(config.drain_timeout) => {
            warn!("running requests did not finish in time and are cancelled");
            app.cancel_all();
        }
        code = signals.next() => return Ok(ExitCode::from(code)),
    }
    let close = async {
        shutdown.wait(FAILURE_GRACE).await;
        if drained_now(&engine) {
            let saving = tokio::task::spawn_blocking(move || {
                if let (Ok(Some(runner)), Some(kept)) = (worker.join(), kept) {
                    kept.save(&runner);
                }
            });
            let _ = saving.await;
        }
    };
    tokio::select! {
        never = ask_for_patience(&notify) => match never {},
        () = close => {}
        code = signals.next() => return Ok(ExitCode::from(code)),
    }
    info!("done");
    Ok(ExitCode::SUCCESS)
}

/// Binds every address and takes what was handed over.
async fn listen(config: &ServeConfig, supervisor: &mut Supervisor, tls: Option<&Tls>) -> anyhow::Result<Vec<Listener>> {
    let mut handed = std::mem::replace(&mut supervisor.sockets, Ok(Vec::new()));
    let mut listeners = Vec::new();
    for address in &config.listen {
        let wanted = match address {
            ListenAddress::Systemd(name) => name,
            _ => {
                let bound = Listener::bind(address, config.socket_mode).await;
                listeners.push(bound.with_context(|| format!("--listen {address}"))?.with_tls(tls.cloned()));
                continue;
            }
        };
        let sockets = handed.with_context(|| format!("--listen {address}"))?;
        let names: Vec<String> = sockets.iter().map(|socket| socket.name.clone()).collect();
        let is_wanted = |name: &str| wanted.as_deref().is_none_or(|wanted| wanted == name);
        let (taken, left): (Vec<_>, Vec<_>) = sockets.into_iter().partition(|socket| is_wanted(&socket.name));
        if taken.is_empty() {
            let there = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            anyhow::bail!("--listen {address}: no such socket was handed over by a supervisor; there are: {there}");
        }
        for socket in taken {
            let listener = Listener::inherited(socket.socket).with_context(|| format!("--listen {address}"))?;
            config.exposure.check(&listener.address()?)?;
            listeners.push(listener.with_tls(tls.cloned()));
        }
        handed = Ok(left);
    }
    match handed {
        Ok(left) => left.iter().for_each(|socket| {
            warn!("the socket {} was handed over and is not listened on; --listen systemd does that", socket.name);
        }),
        Err(error) => warn!("{error}"),
    }
    Ok(listeners)
}

/// What SIGHUP reads again.
struct Reloading {
    sources: KeySources,
    keys: Keys,
    tls: Option<Tls>,
    notify: Notify,
    /// What the supervisor is told while requests are served; set when they are.
    serving: Arc<OnceLock<String>>,
}

impl Reloading {
    async fn at_each(self, mut hangup: tokio::signal::unix::Signal) {
        while hangup.recv().await.is_some() {
            // A process that is not ready yet would be taken for ready after it.
            let serving = self.serving.get();
            if serving.is_some() {
                self.notify.reloading();
            }
            self.reload();
            if let Some(serving) = serving {
                self.notify.ready(serving);
            }
        }
    }

    /// Takes over what can be used; of what cannot, the old stays.
    fn reload(&self) {
        match self.sources.read() {
            Ok(keys) => {
                info!(keys = keys.len(), "keys were read again");
                self.keys.replace(keys);
            }
            Err(error) => error!("keys stay as they were: {error}"),
        }
        match self.tls.as_ref().map(Tls::read_again) {
            Some(Ok(())) => info!("the certificate was read again"),
            Some(Err(error)) => error!("the certificate stays as it was: {error}"),
            None => {}
        }
    }
}

/// Keeps a supervisor from giving up, until it is dropped.
async fn ask_for_patience(notify: &Notify) -> Infallible {
    loop {
        notify.extend_timeout(PATIENCE);
        tokio::time::sleep(PATIENCE_PERIOD).await;
    }
}

/// Tells the watchdog, each `pause`, that there was progress. That this runs is the HTTP side's; the inference worker has
/// taken a step since the last time, or has nothing to do.
async fn show_life(notify: Notify, engine: EngineHandle, pause: Duration) {
    loop {
        let health = engine.health();
        let has_work = health.state != State::Loading && health.active + health.queued > 0;
        if has_work && health.heartbeat.elapsed() > pause {
            warn!(ms = health.heartbeat.elapsed().as_millis() as u64, "the inference worker makes no progress");
        } else {
            notify.send("WATCHDOG=1");
        }
        tokio::time::sleep(pause).await;
    }
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
