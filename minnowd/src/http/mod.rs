//! The HTTP side: routes, request parsing, answers and event streams. Tokio stops here.
//!
//! A request is read once, strictly, into plain structs ([`openai`], [`responses`], [`anthropic`], then [`request`]), becomes
//! jobs for the engine ([`running`]), and their events become one JSON object ([`answer`]) or an event stream ([`stream`]), as
//! the dialect tells it. `docs/api.md` lists routes,
//! fields and errors.
//!
//! Always holds: every answer has an `x-request-id`; every refusal is a JSON error object; a client that goes away
//! cancels its job, because whatever waits for a job sets its `Cancel` when dropped. A stream that belongs to a
//! conversation is waited for by its session instead ([`sessions`]).
//!
//! `/` is a page for people ([`ui`]): our own, or a folder's.

mod answer;
mod anthropic;
mod auth;
mod body;
mod connection;
mod cors;
mod error;
mod fields;
mod gate;
mod ids;
mod llama;
mod metrics;
mod models;
mod openai;
mod openapi;
mod request;
mod responses;
mod row;
mod running;
mod serve;
mod sessions;
mod slots;
mod stream;
mod tls;
mod ui;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::Request;
use axum::http::{Method, Uri};
use axum::middleware;
use axum::routing::{any, get, post};
use tokio::sync::watch;

use self::error::{ApiError, Code};
use self::metrics::Metrics;
use self::sessions::Sessions;
use self::slots::Slots;
use crate::config::HttpOptions;
use crate::engine::EngineHandle;
use crate::keys::Keys;
use crate::session::Session;

pub use self::serve::{Listener, Shutdown, serve};
pub use self::tls::{Tls, TlsError};

/// What every handler sees. Cheap to clone.
#[derive(Clone)]
pub struct App {
    shared: Arc<Shared>,
}

struct Shared {
    engine: EngineHandle,
    options: HttpOptions,
    keys: Keys,
    session: OnceLock<Arc<Session>>,
    slots: Slots,
    metrics: Arc<Metrics>,
    sessions: Sessions,
    started: Instant,
    shutdown: Shutdown,
    cancelled: watch::Sender<bool>,
}

impl App {
    /// An application whose model is still to come: until [`ready`](Self::ready) it answers 503. Without `keys` it
    /// answers everyone.
    #[must_use]
    pub fn new(engine: EngineHandle, options: HttpOptions, keys: Keys) -> Self {
        let shared = Shared {
            engine,
            sessions: Sessions::new(options.streams),
            options,
            keys,
            session: OnceLock::new(),
            slots: Slots::default(),
            metrics: Arc::default(),
            started: Instant::now(),
            shutdown: Shutdown::default(),
            cancelled: watch::Sender::new(false),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Hands the loaded model over. Only the first call counts.
    pub fn ready(&self, session: Arc<Session>) {
        let _ = self.shared.session.set(session);
    }

    /// The end of serving.
    #[must_use]
    pub fn shutdown(&self) -> Shutdown {
        self.shared.shutdown.clone()
    }

    /// Cancels every running job; its client gets the error `draining`.
    pub fn cancel_all(&self) {
        self.shared.cancelled.send_replace(true);
    }

    fn engine(&self) -> &EngineHandle {
        &self.shared.engine
    }

    fn options(&self) -> &HttpOptions {
        &self.shared.options
    }

    fn keys(&self) -> &Keys {
        &self.shared.keys
    }

    fn slots(&self) -> &Slots {
        &self.shared.slots
    }

    fn metrics(&self) -> &Arc<Metrics> {
        &self.shared.metrics
    }

    fn sessions(&self) -> &Sessions {
        &self.shared.sessions
    }

    fn session(&self) -> Result<&Arc<Session>, ApiError> {
        self.shared.session.get().ok_or_else(|| ApiError::new(Code::ModelLoading, "Loading model"))
    }

    fn uptime(&self) -> Duration {
        self.shared.started.elapsed()
    }

    fn cancelled(&self) -> watch::Receiver<bool> {
        self.shared.cancelled.subscribe()
    }
}

/// Every route. `HEAD` works where `GET` does.
fn router(app: App) -> Router {
    let mut router = Router::new()
        .route("/health", get(models::health))
        .route("/v1/health", get(models::health))
        .route("/livez", get(models::livez))
        .route("/v1/models", get(models::list))
        .route("/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/v1/chat/completions", post(openai::chat::complete))
        .route("/chat/completions", post(openai::chat::complete))
        .route("/v1/chat/completions/input_tokens", post(openai::chat::count))
        .route("/chat/completions/input_tokens", post(openai::chat::count))
        .route("/v1/chat/completions/control", post(llama::control))
        .route("/v1/completions", post(openai::completions::complete))
        .route("/completions", post(openai::completions::complete))
        .route("/v1/responses", post(responses::create))
        .route("/responses", post(responses::create))
        .route("/v1/responses/input_tokens", post(responses::count))
        .route("/responses/input_tokens", post(responses::count))
        .route("/v1/responses/{id}", get(responses::find).delete(responses::find))
        .route(anthropic::MESSAGES, post(anthropic::create))
        .route(anthropic::COUNT_TOKENS, post(anthropic::count))
        .route("/tokenize", post(llama::tokenize))
        .route("/detokenize", post(llama::detokenize))
        .route("/apply-template", post(llama::apply_template))
        .route("/props", get(llama::props).post(not_supported))
        .route("/slots", get(llama::slots))
        .route("/metrics", get(metrics::show))
        .route("/v1/stream", get(sessions::replay).delete(sessions::stop))
        .route("/v1/streams/lookup", post(sessions::lookup))
        .route("/slots/{id}", any(not_supported))
        .route("/openapi.json", get(openapi::show))
        .route("/tools", get(disabled).post(disabled))
        .route("/cors-proxy", get(disabled).post(disabled));
    for path in NOT_SUPPORTED {
        router = router.route(path, any(not_supported));
    }
    router
        .method_not_allowed_fallback(method_not_allowed)
        .route("/", get(ui::index))
        .route("/index.html", get(ui::index))
        .route("/sw.js", get(ui::service_worker))
        .fallback(ui::file)
        .layer(middleware::from_fn_with_state(app.clone(), gate::pass))
        .with_state(app)
}

/// Routes of other servers for which this one has no model: 501, whatever the method.
const NOT_SUPPORTED: [&str; 12] = [
    "/completion",
    "/infill",
    "/embeddings",
    "/embedding",
    "/v1/embeddings",
    "/rerank",
    "/reranking",
    "/v1/rerank",
    "/v1/reranking",
    "/v1/audio/{*rest}",
    "/lora-adapters",
    "/v1/systemone",
];

async fn not_supported(request: Request) -> ApiError {
    let path = request.uri().path();
    ApiError::new(Code::NotSupported, format!("{} {path} is not supported by this server", request.method()))
}

async fn disabled() -> ApiError {
    ApiError::new(Code::FeatureDisabled, "this feature is not offered: the server runs no tools and fetches no pages")
}

async fn method_not_allowed(request: Request) -> ApiError {
    let path = request.uri().path();
    ApiError::new(Code::MethodNotAllowed, format!("{} is not allowed for {path}", request.method()))
}

/// The answer to a path that no route and no file has.
fn not_found(method: &Method, uri: &Uri) -> ApiError {
    ApiError::new(Code::NotFound, format!("there is no route {method} {}", uri.path()))
}
