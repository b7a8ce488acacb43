//! The command line: turns what was typed into what is meant. Nothing below this module knows `clap`.
//!
//! Options of `serve` can also stand in a file ([`file`]) and in the environment; precedence is command line,
//! environment, file, default.

mod file;
mod manual;

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::error::ErrorKind;
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use minnow_common::BLOCK;
use minnow_formats::hub::{Address, AddressError, Settings as HubSettings};
use minnow_formats::io::{HugePages, IoBackend};
use minnow_kernels::cpu::Isa;

use crate::commands;
use crate::commands::bench::{Measure, Subject};
use crate::config::{
    CorsOrigin, DecodingDefaults, Device, Exposure, HttpOptions, KeptPrefixes, ListenAddress, ModelSource, RemoteModel,
    ServeConfig, StreamLimits, TlsFiles, Unsupported, UsageError, VerifyPayload,
};
use crate::decoder::{Algorithm, Preset};
use crate::engine::QueueLimits;
use crate::keys::{KeyDigest, KeySources};
use crate::model::{ExpertActivations, Need};
use crate::supervisor::Supervisor;

/// Serves LLaDA2.x block-diffusion language models over an OpenAI-compatible API.
#[derive(Debug, Parser)]
#[command(name = "minnowd", version = crate::VERSION, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the model over HTTP
    Serve(Box<ServeArgs>),
    /// Answer one prompt
    Generate(GenerateArgs),
    /// Take an exam: exact match per task, tokens per forward
    Eval(EvalArgs),
    /// Compare this backend with the reference, layer by layer
    Verify(VerifyArgs),
    /// Measure how fast a model runs here, beside what this machine can do at best
    Bench(BenchArgs),
    /// Print a script that completes this command line: bash, zsh, fish, elvish or powershell
    Completions {
        /// For which shell
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Write the manual pages
    Manual {
        /// Into which folder
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

/// Which model, on what.
#[derive(Debug, Args)]
struct ModelArgs {
    /// A .mnw file, a safetensors folder or file, or hf:OWNER/NAME/FILE.mnw, which is fetched from Hugging Face into its
    /// cache first; without it, the embedded demo model is used
    #[arg(long, value_name = "PATH", env = "MINNOWD_MODEL")]
    model: Option<PathBuf>,
    /// What computes: auto (a GPU if there is one), cpu, cuda, cuda:N or reference
    #[arg(long, value_name = "DEVICE", default_value = "auto", env = "MINNOWD_DEVICE")]
    device: Device,
    /// How the checkpoint is read: auto, direct, buffered or mmap
    #[arg(long, value_name = "BACKEND", default_value = "mmap", env = "MINNOWD_IO")]
    io: IoBackend,
    /// Threads that compute; default: one for each physical core
    #[arg(long, value_name = "N", env = "MINNOWD_THREADS")]
    threads: Option<usize>,
    /// The best instruction set the CPU engine may use: scalar, avx2, avx512, avx512bf16 or amx
    #[arg(long, value_name = "ISA", env = "MINNOW_ISA")]
    isa: Option<Isa>,
    /// Quantize what enters the experts to eight bits, on CPU or GPU: other results, a little worse
    #[arg(long, env = "MINNOWD_INT8_EXPERT_ACTIVATIONS")]
    int8_expert_activations: bool,
    /// Quantize what enters NVFP4 experts to four bits, on CPU or GPU: other results, worse; multiplied as four-bit numbers
    /// where the GPU can (compute capability 12.x)
    #[arg(long, env = "MINNOWD_FP4_EXPERT_ACTIVATIONS")]
    fp4_expert_activations: bool,
    /// Compare the digests of all tensors with the manifest while loading; auto does so for files below 1 GiB
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = PayloadArg::Auto, env = "MINNOWD_VERIFY_PAYLOAD")]
    verify_payload: PayloadArg,
    /// Whether weights that are read into memory, so without --io mmap, ask for huge pages: auto or never
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = HugePagesArg::Auto, env = "MINNOWD_HUGEPAGES")]
    hugepages: HugePagesArg,
    /// Positions a request may use, prompt and output together; default: what the model was made for, at most 32768
    #[arg(long, value_name = "TOKENS", env = "MINNOWD_MAX_CONTEXT")]
    max_context: Option<usize>,
    /// Memory for keys and values of running and finished requests; default: room for every running request's context,
    /// at most a quarter of the machine's memory
    #[arg(long, value_name = "MIB", env = "MINNOWD_CACHE_MAX_MIB")]
    cache_max_mib: Option<u64>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PayloadArg {
    Auto,
    Always,
    Never,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum HugePagesArg {
    Auto,
    Never,
}

/// How blocks are refined where a request does not say.
#[derive(Debug, Args)]
struct DecodingArgs {
    /// Refinement algorithm: 2.0, 2.1 or 2.2; default: the checkpoint's own
    #[arg(long, value_name = "VERSION", env = "MINNOWD_ALGORITHM")]
    algorithm: Option<Algorithm>,
    /// Thresholds by name: quality makes fewer mistakes, speed fewer forwards; default: the algorithm's own
    #[arg(long, value_name = "NAME", env = "MINNOWD_PRESET")]
    preset: Option<Preset>,
    /// Confidence above which a masked position is filled (0 to 1)
    #[arg(long, value_name = "P", env = "MINNOWD_THRESHOLD", allow_negative_numbers = true)]
    threshold: Option<f32>,
    /// Confidence above which a filled position is rewritten (0 to 1)
    #[arg(long, value_name = "P", env = "MINNOWD_EDITING_THRESHOLD", allow_negative_numbers = true)]
    editing_threshold: Option<f32>,
    /// Steps over which the masks of a block are scheduled
    #[arg(long, value_name = "N", env = "MINNOWD_STEPS")]
    steps: Option<usize>,
    /// Forwards after the last mask of a block is filled
    #[arg(long, value_name = "N", env = "MINNOWD_MAX_POST_STEPS")]
    max_post_steps: Option<usize>,
    /// Forwards after which a block is forced to an end
    #[arg(long, value_name = "N", env = "MINNOWD_MAX_STEPS_PER_BLOCK")]
    max_steps_per_block: Option<usize>,
    /// Sampling temperature; 0 is greedy
    #[arg(long, value_name = "T", env = "MINNOWD_TEMPERATURE", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Sample among the K best tokens; 0 is all
    #[arg(long, value_name = "K", env = "MINNOWD_TOP_K")]
    top_k: Option<usize>,
    /// Sample among the fewest tokens that hold this share of probability
    #[arg(long, value_name = "P", env = "MINNOWD_TOP_P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Seed of sampling; default: a fresh one for each request
    #[arg(long, value_name = "N", env = "MINNOWD_SEED")]
    seed: Option<u64>,
}

/// Requests that may run at once; each takes rows of every forward.
const PARALLEL_MAX: usize = 256;

#[derive(Debug, Args)]
struct ServeArgs {
    /// Options in TOML, named as here; the command line and the environment win over it
    #[arg(long, value_name = "FILE", env = "MINNOWD_CONFIG")]
    config: Option<PathBuf>,
    /// Print the options in effect as such a file, each with where it comes from, and end
    #[arg(long)]
    print_config: bool,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    decoding: DecodingArgs,
    /// Where to listen: HOST:PORT (port 0 chooses one), unix:/path.sock, or systemd[:NAME] for sockets that systemd hands
    /// over; may be given several times
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8080", env = "MINNOWD_LISTEN", value_delimiter = ',')]
    listen: Vec<ListenAddress>,
    /// Mode of the files of Unix sockets, octal
    #[arg(long, value_name = "MODE", default_value = "0660", env = "MINNOWD_SOCKET_MODE", value_parser = octal)]
    socket_mode: u32,
    /// Serve everything below this path, for example /minnow
    #[arg(long, value_name = "PATH", default_value = "", env = "MINNOWD_API_PREFIX", value_parser = prefix)]
    api_prefix: String,
    /// The folder of a built llama-server web UI, to be served instead of the own page
    #[arg(long, value_name = "DIR", env = "MINNOWD_UI_DIR")]
    ui_dir: Option<PathBuf>,
    /// The model's name in the API; default: its file or folder name
    #[arg(long, value_name = "NAME", env = "MINNOWD_ALIAS")]
    alias: Option<String>,
    /// Serve requests for any model name
    #[arg(long, env = "MINNOWD_ANY_MODEL")]
    any_model: bool,
    /// Refuse request fields that this server does not know
    #[arg(long, env = "MINNOWD_STRICT_REQUESTS")]
    strict_requests: bool,
    /// Refuse output limits that do not fit the context, instead of cutting them
    #[arg(long, env = "MINNOWD_STRICT_LIMITS")]
    strict_limits: bool,
    /// Settings of other servers that do not exist here: refuse them, or ignore and name them
    #[arg(long, value_name = "HOW", value_enum, default_value_t = UnsupportedArg::Refuse, env = "MINNOWD_UNSUPPORTED")]
    unsupported: UnsupportedArg,
    /// Default output limit of a request; default: what the context leaves
    #[arg(long, value_name = "TOKENS", env = "MINNOWD_MAX_TOKENS")]
    max_tokens: Option<usize>,
    /// Requests that run at once
    #[arg(long, value_name = "N", default_value_t = 4, env = "MINNOWD_PARALLEL")]
    parallel: usize,
    /// Seconds that a request may wait; 0 is as long as its client does
    #[arg(long, value_name = "SECONDS", default_value_t = 0, env = "MINNOWD_QUEUE_TIMEOUT")]
    queue_timeout: u64,
    /// Folder that keeps the warmest known prefixes over restarts; needs a .mnw model
    #[arg(long, value_name = "DIR", env = "MINNOWD_CACHE_DIR")]
    cache_dir: Option<PathBuf>,
    /// Largest file in --cache-dir
    #[arg(long, value_name = "MIB", default_value_t = 1024, env = "MINNOWD_CACHE_PERSIST_MAX_MIB")]
    cache_persist_max_mib: u64,
    /// Requests that may wait
    #[arg(long, value_name = "N", default_value_t = 8, env = "MINNOWD_QUEUE_CAPACITY")]
    queue_capacity: usize,
    /// Largest request body
    #[arg(long, value_name = "BYTES", default_value_t = 8 << 20, env = "MINNOWD_MAX_BODY_BYTES")]
    max_body_bytes: usize,
    /// A further Host name that loopback listeners accept
    #[arg(long, value_name = "NAME", env = "MINNOWD_ALLOW_HOST", value_delimiter = ',')]
    allow_host: Vec<String>,
    /// An origin whose pages may read answers: * is any, localhost any port of this machine; may be given several times
    #[arg(long, value_name = "ORIGIN", env = "MINNOWD_CORS_ORIGIN", value_delimiter = ',')]
    cors_origin: Vec<CorsOrigin>,
    /// Log what X-Forwarded-For says
    #[arg(long, env = "MINNOWD_TRUST_PROXY")]
    trust_proxy: bool,
    /// Open connections; further ones wait
    #[arg(long, value_name = "N", default_value_t = 1024, env = "MINNOWD_MAX_CONNECTIONS")]
    max_connections: usize,
    /// Bytes kept of a resumable stream
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20, env = "MINNOWD_STREAM_MAX_BYTES")]
    stream_max_bytes: usize,
    /// Bytes kept of all resumable streams
    #[arg(long, value_name = "BYTES", default_value_t = 128 << 20, env = "MINNOWD_STREAM_TOTAL_BYTES")]
    stream_total_bytes: usize,
    /// Resumable streams kept
    #[arg(long, value_name = "N", default_value_t = 256, env = "MINNOWD_STREAM_MAX_SESSIONS")]
    stream_max_sessions: usize,
    /// Seconds that a resumable stream is kept after its end
    #[arg(long, value_name = "SECONDS", default_value_t = 300, env = "MINNOWD_STREAM_KEEP")]
    stream_keep: u64,
    /// Show the model's whole path in /props
    #[arg(long, env = "MINNOWD_SHOW_PATHS")]
    show_paths: bool,
    /// Answer /slots with 501
    #[arg(long, env = "MINNOWD_NO_SLOTS")]
    no_slots: bool,
    /// Answer /metrics with 501
    #[arg(long, env = "MINNOWD_NO_METRICS")]
    no_metrics: bool,
    /// Seconds that running requests may take after the first signal
    #[arg(long, value_name = "SECONDS", default_value_t = 30, env = "MINNOWD_DRAIN_TIMEOUT")]
    drain_timeout: u64,
    /// Milliseconds that every forward waits, so that a fast model shows what a slow one would; for tests
    #[arg(long, value_name = "MS", default_value_t = 0, env = "MINNOWD_STEP_DELAY_MS")]
    step_delay_ms: u64,
    /// Fail after so many forwards, as a broken device would; for tests
    #[arg(long, value_name = "N", env = "MINNOWD_FAIL_AFTER_FORWARDS")]
    fail_after_forwards: Option<u64>,
    /// A key that requests must have; may be given several times. Others see it in the process list: a file is better
    #[arg(long, value_name = "KEY", env = "MINNOWD_API_KEY", hide_env_values = true)]
    api_key: Vec<String>,
    /// Keys that requests must have, one a line, # begins a comment; read again on SIGHUP
    #[arg(long, value_name = "FILE", env = "MINNOWD_API_KEY_FILE")]
    api_key_file: Option<PathBuf>,
    /// Allow keys of fewer than 16 bytes
    #[arg(long, env = "MINNOWD_ALLOW_WEAK_KEYS")]
    allow_weak_keys: bool,
    /// Serve /metrics without a key
    #[arg(long, env = "MINNOWD_METRICS_PUBLIC")]
    metrics_public: bool,
    /// Certificate chain of TCP listeners, PEM: they speak HTTPS; read again on SIGHUP
    #[arg(long, value_name = "FILE", env = "MINNOWD_TLS_CERT")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate, PEM
    #[arg(long, value_name = "FILE", env = "MINNOWD_TLS_KEY")]
    tls_key: Option<PathBuf>,
    /// Allow plain HTTP on addresses that are not loopback
    #[arg(long, env = "MINNOWD_INSECURE_PLAINTEXT")]
    insecure_plaintext: bool,
    /// Allow requests without a key on addresses that are not loopback
    #[arg(long, env = "MINNOWD_INSECURE_NO_AUTH")]
    insecure_no_auth: bool,
    /// Form of the log on stderr
    #[arg(long, value_name = "FORM", value_enum, default_value_t = LogFormat::Text, env = "MINNOWD_LOG_FORMAT")]
    log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum UnsupportedArg {
    Refuse,
    Ignore,
}

fn octal(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("expected an octal mode from 0 to 777".to_owned()),
    }
}

/// `/a/b` from `/a/b/`, `a/b` or `/a/b`; empty from `/`.
fn prefix(text: &str) -> Result<String, String> {
    let path = text.trim_matches('/');
    let is_plain = |segment: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
        !segment.is_empty() && segment.bytes().all(plain) && !matches!(segment, "." | "..")
    };
    if path.is_empty() {
        Ok(String::new())
    } else if path.split('/').all(is_plain) {
        Ok(format!("/{path}"))
    } else {
        Err("expected a path of letters, digits, '-', '.', '_' and '~', such as /minnow".to_owned())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

#[derive(Debug, Args)]
struct GenerateArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    decoding: DecodingArgs,
    /// What to answer; - reads standard input
    prompt: String,
    /// Output limit; default: what the context leaves
    #[arg(long, value_name = "TOKENS")]
    max_tokens: Option<usize>,
    /// Continue the text as it is, without the chat template
    #[arg(long)]
    raw: bool,
    /// A system message before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    #[command(flatten)]
    form: FormArgs,
    /// Print one JSON object with the text, the ids and the statistics
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[group(multiple = false)]
struct FormArgs {
    /// Answer with JSON that fits the schema in this file
    #[arg(long, value_name = "FILE")]
    json_schema: Option<PathBuf>,
    /// Answer with a match of this regular expression
    #[arg(long, value_name = "PATTERN")]
    regex: Option<String>,
    /// Answer within the Lark grammar in this file (llguidance's dialect)
    #[arg(long, value_name = "FILE")]
    grammar: Option<PathBuf>,
}

impl FormArgs {
    fn form(self) -> Option<commands::generate::Form> {
        let schema = self.json_schema.map(commands::generate::Form::JsonSchema);
        let regex = self.regex.map(commands::generate::Form::Regex);
        schema.or(regex).or(self.grammar.map(commands::generate::Form::Grammar))
    }
}

#[derive(Debug, Args)]
struct EvalArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    decoding: DecodingArgs,
    /// Questions, one JSON object a line: expected, and prompt_ids, prompt or messages
    #[arg(long, value_name = "FILE.jsonl")]
    data: PathBuf,
    /// Output limit of each answer
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    max_tokens: usize,
    /// Ask only every Nth question
    #[arg(long, value_name = "N", default_value_t = 1)]
    every: usize,
    /// Print one JSON object with every answer
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct VerifyArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// What to compare with
    #[arg(long, value_name = "DEVICE", default_value = "reference")]
    against: Device,
    /// Text to run through both; default: a built-in one
    #[arg(long, value_name = "TEXT")]
    text: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct BenchArgs {
    #[command(subcommand)]
    subject: BenchCommand,
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    #[command(flatten)]
    Forwards(BenchSubject),
    /// Many requests at once: text a second, waits, cache hits
    Serve(BenchServeArgs),
}

#[derive(Debug, Subcommand)]
enum BenchSubject {
    /// One forward of a block: a step of refinement
    Forward {
        #[command(flatten)]
        model: ModelArgs,
        #[command(flatten)]
        measure: MeasureArgs,
        /// Positions before the block, a multiple of 32
        #[arg(long, value_name = "TOKENS", default_value_t = 1024)]
        prefix: usize,
        /// Sequences that are refined together; several numbers give several rows
        #[arg(long, value_name = "N", default_value = "1", value_delimiter = ',')]
        batch: Vec<usize>,
        /// What is wanted back of each position
        #[arg(long, value_name = "WHAT", value_enum, default_value_t = NeedArg::Candidates)]
        need: NeedArg,
    },
    /// Reading a prompt
    Prefill {
        #[command(flatten)]
        model: ModelArgs,
        #[command(flatten)]
        measure: MeasureArgs,
        /// Length of the prompt, a multiple of 32; several lengths give several rows
        #[arg(long, value_name = "TOKENS", default_value = "512", value_delimiter = ',')]
        tokens: Vec<usize>,
        /// Positions read in one forward, a multiple of 32
        #[arg(long, value_name = "TOKENS", default_value_t = 512)]
        chunk: usize,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum NeedArg {
    Nothing,
    Candidates,
    Logits,
}

#[derive(Debug, Args)]
struct MeasureArgs {
    /// Timed runs of each row
    #[arg(long, value_name = "N", default_value_t = 10)]
    repetitions: usize,
    /// Also time each kernel by itself; a GPU's only
    #[arg(long)]
    profile: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct BenchServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    decoding: DecodingArgs,
    /// Requests at once; several numbers give several rows
    #[arg(long, value_name = "N", default_value = "1,2,4,8,16,32", value_delimiter = ',')]
    streams: Vec<usize>,
    /// Requests that arrive in a second, at random times: an open loop, with one number of --streams as the limit
    #[arg(long, value_name = "R")]
    rate: Option<f64>,
    /// What the requests go through: engine or http
    #[arg(long, value_name = "WAY", value_enum, default_value_t = WayArg::Engine)]
    over: WayArg,
    /// Length of a window
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    seconds: f64,
    /// Windows of each row
    #[arg(long, value_name = "N", default_value_t = 3)]
    windows: usize,
    /// Time before the first window
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    warm_up: f64,
    /// Output limit of each request
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    max_tokens: usize,
    /// Questions to ask, as for eval; default: a built-in set
    #[arg(long, value_name = "FILE.jsonl")]
    data: Option<PathBuf>,
    /// Send prompts of so many unseen tokens beside the streams, with pauses
    #[arg(long, value_name = "TOKENS")]
    long_prompt: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum WayArg {
    Engine,
    Http,
}

/// Runs the program with the process's arguments, and what its supervisor gave it.
#[must_use]
pub fn main(supervisor: Supervisor) -> ExitCode {
    let parsed = match parse(&std::env::args_os().collect::<Vec<_>>()) {
        Ok(parsed) => parsed,
        // Help and version go to stdout and are a success; everything else is wrong usage.
        Err(Refused::Typed(error)) if !error.use_stderr() => {
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        Err(Refused::Typed(error)) => {
            eprintln!("minnowd: {}", one_line(&error));
            return ExitCode::from(2);
        }
        Err(Refused::File(error)) => {
            eprintln!("minnowd: {error}");
            return ExitCode::from(2);
        }
    };
    let cli = parsed.cli;
    let json_log = matches!(&cli.command, Command::Serve(args) if args.log_format == LogFormat::Json);
    start_log(json_log);
    match run(cli.command, &parsed.settings, supervisor) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("minnowd: {error:#}");
            ExitCode::from(if error.is::<UsageError>() { 2 } else { 1 })
        }
    }
}

/// A command line, and the settings it was made from.
struct Parsed {
    cli: Cli,
    settings: Settings,
}

/// Where the values of options come from.
struct Settings {
    command: clap::Command,
    matches: ArgMatches,
    file: Option<file::Settings>,
}

enum Refused {
    Typed(clap::Error),
    File(UsageError),
}

fn parse(arguments: &[OsString]) -> Result<Parsed, Refused> {
    let mut command = Cli::command();
    let file = match file::named(&command, arguments) {
        Some(path) => Some(file::Settings::read(&path, &command).map_err(Refused::File)?),
        None => None,
    };
    if let Some(file) = &file {
        command = file.beneath(command);
    }
    let matches = command.try_get_matches_from_mut(arguments).map_err(Refused::Typed)?;
    let cli = Cli::from_arg_matches(&matches).map_err(Refused::Typed)?;
    Ok(Parsed { cli, settings: Settings { command, matches, file } })
}

/// What is wrong with the command line, without the usage that follows it.
fn one_line(error: &clap::Error) -> String {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return "no command given; see minnowd --help".to_owned();
    }
    let text = error.to_string();
    let message = text.split("\n\n").next().unwrap_or_default();
    message.trim_start_matches("error: ").lines().map(str::trim).collect::<Vec<_>>().join(" ")
}

fn run(command: Command, settings: &Settings, supervisor: Supervisor) -> anyhow::Result<ExitCode> {
    match command {
        Command::Serve(args) if args.print_config => {
            args.into_config()?;
            let Settings { command, matches, file } = settings;
            let matches = matches.subcommand_matches("serve").context("serve was typed")?;
            print(file::shown(command, matches, file.as_ref()).as_bytes())
        }
        Command::Completions { shell } => print(&manual::completions(Cli::command(), shell)),
        Command::Manual { folder } => {
            manual::write_pages(Cli::command(), &folder).with_context(|| folder.display().to_string())?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Serve(args) => commands::serve::run(args.into_config()?, supervisor),
        Command::Generate(args) => {
            let GenerateArgs { model, decoding, prompt, max_tokens, raw, system, form, json } = args;
            let form = form.form();
            let request = commands::generate::Request { prompt, system, raw, max_tokens, form, json };
            commands::generate::run(&model.into_source()?, &decoding.into_defaults()?, request)
        }
        Command::Eval(args) => {
            let EvalArgs { model, decoding, data, max_tokens, every, json } = args;
            if every == 0 {
                return Err(UsageError("--every must be at least 1, not 0".to_owned()).into());
            }
            let exam = commands::eval::Exam { data, max_tokens, every, json };
            commands::eval::run(&model.into_source()?, &decoding.into_defaults()?, &exam)
        }
        Command::Verify(args) => {
            let VerifyArgs { model, against, text, json } = args;
            commands::verify::run(&model.into_source()?, against, text, json)
        }
        Command::Bench(BenchArgs { subject: BenchCommand::Forwards(subject) }) => {
            let (model, measure, subject) = subject.into_meant()?;
            commands::bench::run(&model.into_source()?, &subject, measure)
        }
        Command::Bench(BenchArgs { subject: BenchCommand::Serve(args) }) => {
            let plan = args.plan()?;
            commands::bench::serve::run(&args.model.into_source()?, &args.decoding.into_defaults()?, &plan)
        }
    }
}

fn print(text: &[u8]) -> anyhow::Result<ExitCode> {
    std::io::stdout().write_all(text).context("standard output")?;
    Ok(ExitCode::SUCCESS)
}

fn start_log(json: bool) {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_env("MINNOWD_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    if json {
        builder.json().init();
    } else {
        builder.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).init();
    }
}

impl BenchSubject {
    fn into_meant(self) -> Result<(ModelArgs, Measure, Subject), UsageError> {
        let (model, measure, subject, lengths) = match self {
            Self::Forward { model, measure, prefix, batch, need } => {
                if let Some(sequences) = batch.iter().find(|sequences| !(1..=PARALLEL_MAX).contains(*sequences)) {
                    return Err(UsageError(format!("--batch must be 1 to {PARALLEL_MAX}, not {sequences}")));
                }
                let need = match need {
                    NeedArg::Nothing => Need::Nothing,
                    NeedArg::Candidates => Need::Candidates,
                    NeedArg::Logits => Need::Logits,
                };
                (model, measure, Subject::Forward { prefix, batches: batch, need }, vec![("--prefix", prefix)])
            }
            Self::Prefill { model, measure, tokens, chunk } => {
                let mut lengths = vec![("--chunk", chunk)];
                lengths.extend(tokens.iter().map(|&length| ("--tokens", length)));
                if let Some((option, _)) = lengths.iter().find(|(_, length)| *length == 0) {
                    return Err(UsageError(format!("{option} must be at least {BLOCK}, not 0")));
                }
                (model, measure, Subject::Prefill { tokens, chunk }, lengths)
            }
        };
        if let Some((option, length)) = lengths.iter().find(|(_, length)| !length.is_multiple_of(BLOCK)) {
            return Err(UsageError(format!("{option} must be a multiple of {BLOCK}, not {length}")));
        }
        if measure.repetitions == 0 {
            return Err(UsageError("--repetitions must be at least 1, not 0".to_owned()));
        }
        let MeasureArgs { repetitions, profile, json } = measure;
        Ok((model, Measure { repetitions, profiles: profile, json }, subject))
    }
}

impl BenchServeArgs {
    fn plan(&self) -> Result<commands::bench::serve::Plan, UsageError> {
        if let Some(streams) = self.streams.iter().find(|streams| !(1..PARALLEL_MAX).contains(*streams)) {
            return Err(UsageError(format!("--streams must be 1 to {}, not {streams}", PARALLEL_MAX - 1)));
        }
        let seconds = |option: &str, seconds: f64, least: f64| match Duration::try_from_secs_f64(seconds) {
            Ok(time) if (least..=3600.0).contains(&seconds) => Ok(time),
            _ => Err(UsageError(format!("{option} must be {least} to 3600, not {seconds}"))),
        };
        let (window, warm_up) = (seconds("--seconds", self.seconds, 0.1)?, seconds("--warm-up", self.warm_up, 0.0)?);
        if !(1..=1000).contains(&self.windows) {
            return Err(UsageError(format!("--windows must be 1 to 1000, not {}", self.windows)));
        }
        if let Some(rate) = self.rate {
            if !(0.001..=1e6).contains(&rate) {
                return Err(UsageError(format!("--rate must be 0.001 to 1000000, not {rate}")));
            }
            if self.streams.len() != 1 {
                return Err(UsageError("--rate needs one number of --streams, the limit of what runs".to_owned()));
            }
        }
        Ok(commands::bench::serve::Plan {
            streams: self.streams.clone(),
            rate: self.rate,
            over_http: self.over == WayArg::Http,
            warm_up,
            window,
            windows: self.windows,
            max_tokens: self.max_tokens,
            data: self.data.clone(),
            long_prompt: self.long_prompt,
            json: self.json,
        })
    }
}

impl ModelArgs {
    fn into_source(self) -> Result<ModelSource, UsageError> {
        if self.threads == Some(0) {
            return Err(UsageError("--threads must be at least 1, not 0".to_owned()));
        }
        let expert_activations = match (self.int8_expert_activations, self.fp4_expert_activations) {
            (false, false) => ExpertActivations::Plain,
            (true, false) => ExpertActivations::Int8,
            (false, true) => ExpertActivations::Fp4,
            (true, true) => {
                let message = "--int8-expert-activations and --fp4-expert-activations exclude each other";
                return Err(UsageError(message.to_owned()));
            }
        };
        // What HF_* say is looked up only where a hub is asked for.
        let remote = match self.model.as_ref().and_then(|path| path.to_str()) {
            Some(text) if text.starts_with(Address::PREFIX) => {
                let address = text.parse().map_err(|error: AddressError| UsageError(format!("--model: {error}")))?;
                let settings = HubSettings::from_environment(|name| std::env::var_os(name), None)
                    .map_err(|error| UsageError(error.to_string()))?;
                Some(RemoteModel { address, settings })
            }
            _ => None,
        };
        Ok(ModelSource {
            path: self.model.filter(|_| remote.is_none()),
            remote,
            device: self.device,
            io: self.io,
            threads: self.threads,
            isa: self.isa,
            expert_activations,
            verify_payload: match self.verify_payload {
                PayloadArg::Auto => VerifyPayload::Auto,
                PayloadArg::Always => VerifyPayload::Always,
                PayloadArg::Never => VerifyPayload::Never,
            },
            huge_pages: match self.hugepages {
                HugePagesArg::Auto => HugePages::Auto,
                HugePagesArg::Never => HugePages::Never,
            },
            max_context: self.max_context,
            cache_max_bytes: self.cache_max_mib.map(|mib| mib.saturating_mul(1 << 20)),
        })
    }
}

impl DecodingArgs {
    fn into_defaults(self) -> Result<DecodingDefaults, UsageError> {
        let defaults = DecodingDefaults {
            algorithm: self.algorithm,
            preset: self.preset,
            threshold: self.threshold,
            editing_threshold: self.editing_threshold,
            steps: self.steps,
            max_post_steps: self.max_post_steps,
            max_steps_per_block: self.max_steps_per_block,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            seed: self.seed,
        };
        // Checked here too, so that a wrong value ends the program before a model is loaded.
        defaults.options(self.algorithm.unwrap_or(Algorithm::V22)).map_err(|error| UsageError(error.to_string()))?;
        Ok(defaults)
    }
}

impl ServeArgs {
    fn into_config(self) -> Result<ServeConfig, UsageError> {
        let given = self.api_key.iter().map(|key| KeyDigest::new(key, self.allow_weak_keys, "--api-key"));
        let given = given.collect::<Result<_, _>>().map_err(|error| UsageError(error.to_string()))?;
        let keys = KeySources { given, file: self.api_key_file, allows_weak: self.allow_weak_keys };
        let tls = match (self.tls_cert, self.tls_key) {
            (Some(certificate), Some(key)) => Some(TlsFiles { certificate, key }),
            (None, None) => None,
            (Some(_), None) => return Err(UsageError("--tls-cert needs --tls-key".to_owned())),
            (None, Some(_)) => return Err(UsageError("--tls-key needs --tls-cert".to_owned())),
        };
        let exposure = Exposure {
            is_private: tls.is_some() || self.insecure_plaintext,
            is_guarded: keys.are_there() || self.insecure_no_auth,
        };
        for address in &self.listen {
            exposure.check(address)?;
        }
        if self.parallel == 0 || self.parallel > PARALLEL_MAX {
            return Err(UsageError(format!("--parallel must be 1 to {PARALLEL_MAX}, not {}", self.parallel)));
        }
        if self.max_connections == 0 {
            return Err(UsageError("--max-connections must be at least 1, not 0".to_owned()));
        }
        if let Some(folder) = self.ui_dir.as_ref().filter(|folder| !folder.join("index.html").is_file()) {
            return Err(UsageError(format!("--ui-dir {} has no index.html", folder.display())));
        }
        let source = self.model.into_source()?;
        let http = HttpOptions {
            prefix: self.api_prefix,
            max_body_bytes: self.max_body_bytes,
            any_model: self.any_model,
            strict_requests: self.strict_requests,
            strict_limits: self.strict_limits,
            unsupported: match self.unsupported {
                UnsupportedArg::Refuse => Unsupported::Refuse,
                UnsupportedArg::Ignore => Unsupported::Ignore,
            },
            allow_hosts: self.allow_host,
            cors_origins: self.cors_origin,
            trust_proxy: self.trust_proxy,
            metrics: !self.no_metrics,
            metrics_public: self.metrics_public,
            slots: !self.no_slots,
            streams: StreamLimits {
                bytes_max: self.stream_max_bytes,
                all_bytes_max: self.stream_total_bytes,
                sessions_max: self.stream_max_sessions,
                kept: Duration::from_secs(self.stream_keep),
            },
            ui_folder: self.ui_dir,
            model_path: source.path.as_ref().filter(|_| self.show_paths).map(|path| path.display().to_string()),
        };
        Ok(ServeConfig {
            source,
            decoding: self.decoding.into_defaults()?,
            listen: self.listen,
            exposure,
            keys,
            tls,
            alias: self.alias,
            max_tokens: self.max_tokens,
            kept_prefixes: self
                .cache_dir
                .map(|folder| KeptPrefixes { folder, bytes_max: self.cache_persist_max_mib.saturating_mul(1 << 20) }),
            queue: QueueLimits {
                running_max: self.parallel,
                waiting_max: self.queue_capacity,
                wait_max: (self.queue_timeout > 0).then(|| Duration::from_secs(self.queue_timeout)),
            },
            http,
            socket_mode: self.socket_mode,
            connections_max: self.max_connections,
            step_delay: Duration::from_millis(self.step_delay_ms),
            fail_after_forwards: self.fail_after_forwards,
            drain_timeout: Duration::from_secs(self.drain_timeout),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn prefixes_and_modes_are_normal_or_refused() {
        for (typed, meant) in [("", ""), ("/", ""), ("/a", "/a"), ("a/b/", "/a/b"), ("/a-1/_~.x", "/a-1/_~.x")] {
            assert_eq!(prefix(typed).as_deref(), Ok(meant));
        }
        for typed in ["/a//b", "/a/../b", "/a b", "/%2e", "/a?b", "/."] {
            assert!(prefix(typed).is_err(), "{typed}");
        }
        assert_eq!((octal("0660"), octal("600")), (Ok(0o660), Ok(0o600)));
        assert!(octal("8").is_err() && octal("7777").is_err());
    }

    #[test]
    fn listening_beyond_loopback_needs_tls_and_a_key_or_both_flags() {
        let config = |extra: &[&str]| {
            let args = ["minnowd", "serve", "--listen", "0.0.0.0:8080"].iter().chain(extra).copied();
            match Cli::try_parse_from(args).unwrap().command {
                Command::Serve(args) => args.into_config(),
                _ => unreachable!("serve was typed"),
            }
        };
        const KEY: [&str; 2] = ["--api-key", "0123456789abcdef"];
        const TLS: [&str; 4] = ["--tls-cert", "c.pem", "--tls-key", "k.pem"];
        assert!(config(&[]).unwrap_err().0.contains("add --tls-cert"));
        assert!(config(&["--insecure-plaintext"]).unwrap_err().0.contains("add --api-key-file"));
        assert!(config(&KEY).unwrap_err().0.contains("add --tls-cert"));
        assert!(config(&TLS).unwrap_err().0.contains("add --api-key-file"));
        assert!(config(&["--insecure-plaintext", "--insecure-no-auth"]).is_ok());
        assert!(config(&[&KEY[..], &TLS].concat()).is_ok());
        let message = config(&["--insecure-plaintext", "--api-key", "short"]).unwrap_err().0;
        assert!(message.contains("--allow-weak-keys") && !message.contains("short"), "{message}");
        assert_eq!(config(&["--tls-cert", "c.pem"]).unwrap_err().0, "--tls-cert needs --tls-key");
    }
}
