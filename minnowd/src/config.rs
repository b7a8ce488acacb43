//! Settings: plain structs, complete and checked before the first thread starts.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use minnow_formats::hub::{Address, Settings};
use minnow_formats::io::{HugePages, IoBackend};
use minnow_kernels::cpu::Isa;
use thiserror::Error;

use crate::decoder::{Algorithm, OptionError, Options, Preset};
use crate::engine::QueueLimits;
use crate::keys::KeySources;
use crate::model::ExpertActivations;

/// What was typed does not make sense; exit code 2.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// A model at a hub, and how the hub is reached.
#[derive(Clone, Debug)]
pub struct RemoteModel {
    /// The file.
    pub address: Address,
    /// Which hub, as whom, and the cache.
    pub settings: Settings,
}

/// Which checkpoint, and what computes with it.
#[derive(Clone, Debug)]
pub struct ModelSource {
    /// A `.mnw` file, a safetensors folder or file; `None` is the embedded demo model.
    pub path: Option<PathBuf>,
    /// A `.mnw` file at a hub instead; it is fetched into the cache of Hugging Face's tools first.
    pub remote: Option<RemoteModel>,
    /// What computes.
    pub device: Device,
    /// How the checkpoint is read.
    pub io: IoBackend,
    /// Threads that compute; `None` is one for each physical core.
    pub threads: Option<usize>,
    /// The best instruction set the CPU engine may use.
    pub isa: Option<Isa>,
    /// What enters the experts: quantized only where the device and the experts are made for it.
    pub expert_activations: ExpertActivations,
    /// Whether payload digests are compared while loading.
    pub verify_payload: VerifyPayload,
    /// What pages back weights that are read into memory.
    pub huge_pages: HugePages,
    /// Positions a request may use; `None` is the model's limit, at most [`DEFAULT_CONTEXT_MAX`].
    pub max_context: Option<usize>,
    /// Memory for keys and values; `None` is room for every running request's context, at most a quarter of the
    /// machine's memory.
    pub cache_max_bytes: Option<u64>,
}

/// The context served by default is the model's, but never above this: K and V of 131,072 positions would take 5 GiB.
pub const DEFAULT_CONTEXT_MAX: usize = 32_768;

/// Whether payload digests are compared while loading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerifyPayload {
    /// For files small enough that it costs less than a second.
    Auto,
    /// In any case.
    Always,
    /// Never.
    Never,
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The first GPU if this build, the machine and the model allow it, else the CPU engine.
    Auto,
    /// The CPU engine: weights as stored.
    Cpu,
    /// The NVIDIA GPU of that number.
    Cuda(usize),
    /// The plain model in candle: f32, slow, the oracle of the others.
    Reference,
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "reference" => Ok(Self::Reference),
            "cuda" => Ok(Self::Cuda(0)),
            _ => match text.strip_prefix("cuda:").map(str::parse) {
                Some(Ok(ordinal)) => Ok(Self::Cuda(ordinal)),
                _ => Err("expected auto, cpu, cuda, cuda:N or reference".to_owned()),
            },
        }
    }
}

/// Decoding options that hold where a request does not say; `None` is the algorithm's own default.
#[derive(Clone, Debug, Default)]
pub struct DecodingDefaults {
    /// `None` is the checkpoint's own algorithm.
    pub algorithm: Option<Algorithm>,
    /// Thresholds by name; those given by number come first.
    pub preset: Option<Preset>,
    /// Confidence above which a masked position is filled.
    pub threshold: Option<f32>,
    /// Confidence above which a filled position is rewritten.
    pub editing_threshold: Option<f32>,
    /// Steps over which the masks of a block are scheduled.
    pub steps: Option<usize>,
    /// Forwards after the last mask of a block is filled.
    pub max_post_steps: Option<usize>,
    /// Forwards after which a block is forced to an end.
    pub max_steps_per_block: Option<usize>,
    /// Sampling temperature.
    pub temperature: Option<f32>,
    /// Sample among this many best tokens; 0 is all.
    pub top_k: Option<usize>,
    /// Sample among the fewest tokens that hold this share of probability.
    pub top_p: Option<f32>,
    /// Seed of sampling; `None` is a fresh one for each request.
    pub seed: Option<u64>,
}

impl DecodingDefaults {
    /// Complete options for a checkpoint whose own algorithm is `native`.
    pub fn options(&self, native: Algorithm) -> Result<Options, OptionError> {
        let mut options = Options::serving(self.algorithm.unwrap_or(native));
        if let Some(preset) = self.preset {
            options = options.with_preset(preset);
        }
        macro_rules! take {
            ($($field:ident),*) => { $(if let Some(value) = self.$field { options.$field = value.into(); })* };
        }
        take!(threshold, editing_threshold, steps, max_post_steps, max_steps_per_block, temperature, top_k, top_p);
        options.check()?;
        Ok(options)
    }
}

/// Everything `minnowd serve` needs.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// Which model, on what.
    pub source: ModelSource,
    /// How blocks are refined by default.
    pub decoding: DecodingDefaults,
    /// Where to listen; at least one.
    pub listen: Vec<ListenAddress>,
    /// What may be listened on.
    pub exposure: Exposure,
    /// Who may ask.
    pub keys: KeySources,
    /// The certificate of TCP listeners; without one they speak plain HTTP.
    pub tls: Option<TlsFiles>,
    /// The model's name in the API.
    pub alias: Option<String>,
    /// Default output limit of a request.
    pub max_tokens: Option<usize>,
    /// How many requests may run and wait.
    pub queue: QueueLimits,
    /// Where known prefixes are kept over restarts.
    pub kept_prefixes: Option<KeptPrefixes>,
    /// How requests are treated.
    pub http: HttpOptions,
    /// Mode of the files of Unix sockets.
    pub socket_mode: u32,
    /// Open connections; further ones wait in the backlog.
    pub connections_max: usize,
    /// How long every forward waits before it begins; for tests.
    pub step_delay: Duration,
    /// After how many forwards the worker fails; for tests.
    pub fail_after_forwards: Option<u64>,
    /// How long running requests may take after the first signal.
    pub drain_timeout: Duration,
}

/// How the server treats requests.
#[derive(Clone, Debug)]
pub struct HttpOptions {
    /// Every route lies below this path: empty, or `/` and segments without a slash at the end.
    pub prefix: String,
    /// Largest request body.
    pub max_body_bytes: usize,
    /// Serve requests for any model name.
    pub any_model: bool,
    /// Refuse request fields that are not known.
    pub strict_requests: bool,
    /// Refuse output limits that prompt and context leave no room for, instead of cutting them.
    pub strict_limits: bool,
    /// What happens to settings of other servers that do not exist here.
    pub unsupported: Unsupported,
    /// Further `Host` names that loopback listeners accept.
    pub allow_hosts: Vec<String>,
    /// Pages of these origins may read answers.
    pub cors_origins: Vec<CorsOrigin>,
    /// Log what `X-Forwarded-For` says.
    pub trust_proxy: bool,
    /// Serve `/metrics`.
    pub metrics: bool,
    /// Serve `/metrics` to those who have no key, too.
    pub metrics_public: bool,
    /// Serve `/slots`.
    pub slots: bool,
    /// Bounds of resumable streams.
    pub streams: StreamLimits,
    /// A built web UI to serve instead of the own page.
    pub ui_folder: Option<PathBuf>,
    /// What `/props` shows as the model's path, instead of its name.
    pub model_path: Option<String>,
}

impl Default for HttpOptions {
    fn default() -> Self {
        Self {
            prefix: String::new(),
            max_body_bytes: 8 << 20,
            any_model: false,
            strict_requests: false,
            strict_limits: false,
            unsupported: Unsupported::Refuse,
            allow_hosts: Vec::new(),
            cors_origins: Vec::new(),
            trust_proxy: false,
            metrics: true,
            metrics_public: false,
            slots: true,
            streams: StreamLimits {
                bytes_max: 4 << 20,
                all_bytes_max: 128 << 20,
                sessions_max: 256,
                kept: Duration::from_secs(300),
            },
            ui_folder: None,
            model_path: None,
        }
    }
}

/// What happens to a field that is accepted only when it asks for nothing, and asks for something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsupported {
    /// 400.
    Refuse,
    /// It is named in `minnow.ignored_fields`.
    Ignore,
}

/// Bounds of resumable streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamLimits {
    /// Bytes kept of one stream.
    pub bytes_max: usize,
    /// Bytes kept of all streams.
    pub all_bytes_max: usize,
    /// Streams kept.
    pub sessions_max: usize,
    /// How long a stream is kept after its end.
    pub kept: Duration,
}

/// Pages that may read answers although they came from elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CorsOrigin {
    /// Any page.
    Any,
    /// Pages of this machine, whatever the port.
    Localhost,
    /// Pages of one origin: scheme, host and port, as browsers write it.
    Exact(String),
}

impl CorsOrigin {
    /// Whether a page of `origin` is meant.
    #[must_use]
    pub fn covers(&self, origin: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Exact(exact) => exact == origin,
            Self::Localhost => {
                let Some((scheme, rest)) = origin.split_once("://") else { return false };
                let host = match rest.rsplit_once(':') {
                    Some((host, port)) if !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => host,
                    _ => rest,
                };
                matches!(scheme, "http" | "https") && matches!(host, "localhost" | "127.0.0.1" | "[::1]")
            }
        }
    }
}

impl FromStr for CorsOrigin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "*" => Ok(Self::Any),
            "localhost" => Ok(Self::Localhost),
            _ => match text.split_once("://") {
                Some((scheme, host)) if !scheme.is_empty() && !host.is_empty() && !host.contains('/') => {
                    Ok(Self::Exact(text.to_owned()))
                }
                _ => Err("expected *, localhost, or an origin such as https://chat.example".to_owned()),
            },
        }
    }
}

/// Where known prefixes are kept over restarts.
#[derive(Clone, Debug)]
pub struct KeptPrefixes {
    /// The folder; made if it is not there.
    pub folder: PathBuf,
    /// Largest file in it.
    pub bytes_max: u64,
}

/// A certificate and its key, as PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, followed by those that lead to an authority.
    pub certificate: PathBuf,
    /// The private key.
    pub key: PathBuf,
}

/// What the operator took care of, or took responsibility for, before other machines are let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exposure {
    /// Whether nobody can listen in: TLS, or the operator says that plain HTTP is fine.
    pub is_private: bool,
    /// Whether not everybody is served: keys, or the operator says that everybody may.
    pub is_guarded: bool,
}

impl Exposure {
    /// Whether `address` may be listened on.
    pub fn check(self, address: &ListenAddress) -> Result<(), UsageError> {
        const PRIVATE: &str = "--tls-cert and --tls-key (or --insecure-plaintext)";
        const GUARDED: &str = "--api-key-file (or --insecure-no-auth)";
        let missing = match (self.is_private, self.is_guarded) {
            _ if address.is_private() => return Ok(()),
            (true, true) => return Ok(()),
            (false, true) => PRIVATE.to_owned(),
            (true, false) => GUARDED.to_owned(),
            (false, false) => format!("{PRIVATE} and {GUARDED}"),
        };
        Err(UsageError(format!(
            "--listen {address} can be reached from other machines: add {missing}, or listen on 127.0.0.1 or a unix \
             socket behind a proxy"
        )))
    }
}

/// An address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// A TCP address.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
    /// Sockets that the supervisor hands over: those of a name, or all.
    Systemd(Option<String>),
}

impl ListenAddress {
    /// Whether only this machine can reach it. What is handed over is asked again when its address is known.
    #[must_use]
    pub fn is_private(&self) -> bool {
        match self {
            Self::Tcp(address) => match address.ip() {
                IpAddr::V4(ip) => ip.is_loopback(),
                IpAddr::V6(ip) => ip.is_loopback() || ip.to_ipv4_mapped().is_some_and(|ip| ip.is_loopback()),
            },
            Self::Unix(_) | Self::Systemd(_) => true,
        }
    }
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() { Err("unix: needs a path".to_owned()) } else { Ok(Self::Unix(path.into())) };
        }
        if text == "systemd" {
            return Ok(Self::Systemd(None));
        }
        if let Some(name) = text.strip_prefix("systemd:") {
            return if name.is_empty() {
                Err("systemd: needs a name".to_owned())
            } else {
                Ok(Self::Systemd(Some(name.into())))
            };
        }
        let mut addresses = text
            .to_socket_addrs()
            .map_err(|error| format!("expected HOST:PORT, unix:PATH or systemd[:NAME]: {error}"))?;
        addresses.next().map(Self::Tcp).ok_or_else(|| "the host has no address".to_owned())
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Systemd(None) => f.write_str("systemd"),
            Self::Systemd(Some(name)) => write!(f, "systemd:{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse_and_show() {
        for text in
            ["127.0.0.1:8080", "[::1]:0", "unix:/run/minnowd.sock", "0.0.0.0:80", "systemd", "systemd:web.socket"]
        {
            let address: ListenAddress = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
            assert_eq!(address.is_private(), text != "0.0.0.0:80");
        }
        for text in ["", "8080", "unix:", "127.0.0.1:70000", "systemd:", "systemd "] {
            assert!(text.parse::<ListenAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn other_machines_are_let_in_only_with_tls_and_keys_or_when_told() {
        let check = |address: &str, is_private, is_guarded| {
            let address: ListenAddress = address.parse().unwrap();
            Exposure { is_private, is_guarded }.check(&address).map_err(|UsageError(message)| message)
        };
        for address in ["127.0.0.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1", "unix:/s"] {
            assert_eq!(check(address, false, false), Ok(()), "{address}");
        }
        for address in ["0.0.0.0:1", "[::]:1", "192.0.2.1:1", "[::ffff:192.0.2.1]:1"] {
            assert_eq!(check(address, true, true), Ok(()), "{address}");
            let missing = check(address, false, false).unwrap_err();
            assert!(missing.contains("--tls-cert") && missing.contains("--api-key-file"), "{missing}");
            let missing = check(address, true, false).unwrap_err();
            assert!(!missing.contains("--tls-cert") && missing.contains("--insecure-no-auth"), "{missing}");
            let missing = check(address, false, true).unwrap_err();
            assert!(missing.contains("--insecure-plaintext") && !missing.contains("--api-key-file"), "{missing}");
        }
    }

    #[test]
    fn origins_are_exact_local_or_any() {
        let covers = |allowed: &str, origin| allowed.parse::<CorsOrigin>().unwrap().covers(origin);
        assert!(covers("*", "https://evil.example"));
        assert!(covers("https://a.example:8443", "https://a.example:8443"));
        for other in ["https://a.example", "http://a.example:8443", "https://a.example:8443.evil", "null"] {
            assert!(!covers("https://a.example:8443", other), "{other}");
        }
        for local in ["http://localhost", "http://localhost:3000", "https://127.0.0.1:1", "http://[::1]:8080"] {
            assert!(covers("localhost", local), "{local}");
        }
        for other in ["http://localhost.evil", "http://evil#localhost", "file://localhost", "null", "http://[::2]"] {
            assert!(!covers("localhost", other), "{other}");
        }
        for bad in ["", "a.example", "https://", "https://a.example/", "://a"] {
            assert!(bad.parse::<CorsOrigin>().is_err(), "{bad}");
        }
    }

    #[test]
    fn devices_parse() {
        assert!("gpu".parse::<Device>().is_err());
        assert_eq!("reference".parse(), Ok(Device::Reference));
        assert_eq!("cuda".parse(), Ok(Device::Cuda(0)));
        assert_eq!("cuda:3".parse(), Ok(Device::Cuda(3)));
        assert!("cuda:x".parse::<Device>().is_err());
    }
}
