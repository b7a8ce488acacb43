//! A loaded model and everything that turns requests into token ids: what HTTP and the offline commands share.

use std::cell::OnceCell;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use minnow_common::{BLOCK, ModelConfig, Routing};
use minnow_formats::checkpoint::Checkpoint;
use serde_json::Value;
use tracing::{info, warn};

use crate::cache;
use crate::config::{DEFAULT_CONTEXT_MAX, DecodingDefaults, Device, ModelSource, UsageError};
use crate::decoder::{Algorithm, Options};
use crate::demo;
use crate::engine::QueueLimits;
use crate::engine::runner::{Limits, Runner};
use crate::fetch;
use crate::grammar::Grammars;
use crate::model::cpu::Cpu;
#[cfg(feature = "cuda")]
use crate::model::cuda::{Cuda, CudaOptions};
use crate::model::reference::Reference;
use crate::model::{Backend, ExpertActivations, PrefillBlocks};
use crate::text::{ChatInput, SpecialTokens, Template, Tokenizer};
use crate::weights::{LoadOptions, VerifyPayload, Weights};

/// Keys and values take at most this share of the machine's memory where the user names no limit.
const CACHE_SHARE_OF_MEMORY: u64 = 4;
/// The reference backend keeps keys and values in f32.
const KV_ELEMENT_BYTES: usize = 4;

/// What is known of the served model, without the model itself.
#[derive(Debug)]
pub struct Session {
    /// Its name in the API.
    pub model_id: String,
    /// Its configuration.
    pub config: ModelConfig,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template.
    pub template: Arc<Template>,
    /// Its tokens with a meaning.
    pub special: SpecialTokens,
    /// Makes the languages that outputs can be held to.
    pub grammars: Grammars,
    /// Positions a request may use, prompt and output together.
    pub context: usize,
    /// Decoding options where a request does not say.
    pub default_options: Options,
    /// Output limit where a request does not say; `None` is what the context leaves.
    pub default_max_tokens: Option<usize>,
    /// Seed where a request does not say; `None` is a fresh one.
    pub default_seed: Option<u64>,
    /// `fp_` and a hash of the program's version and the weights' identity.
    pub fingerprint: String,
    /// Identifies every weight and the configuration: the digest of a container's manifest. Safetensors have none.
    pub content: Option<String>,
    /// When the model was loaded, in seconds since 1970.
    pub created: u64,
    /// Number of weights.
    pub parameters: u64,
    /// Bytes of the checkpoint.
    pub file_bytes: u64,
    /// How weights are stored: `bf16`, or `i4_mma experts, bf16`.
    pub file_type: String,
    /// The backend in words.
    pub backend: String,
    /// Memory for keys and values.
    pub cache_bytes: u64,
    /// Requests that run at once.
    pub parallel: usize,
    /// Requests that may wait.
    pub queue_capacity: usize,
}

/// What `serve` adds to a session.
#[derive(Clone, Debug)]
pub struct ServeDefaults {
    /// The model's name in the API, instead of its file's.
    pub alias: Option<String>,
    /// Output limit where a request does not say.
    pub max_tokens: Option<usize>,
    /// How many requests may run and wait.
    pub queue: QueueLimits,
}

/// A model, ready to run.
pub struct Loaded {
    /// What is known of it.
    pub session: Session,
    /// What runs it.
    pub runner: Runner,
}

impl Loaded {
    /// Opens a checkpoint and builds the backend that was asked for.
    /// At most `running_max` requests will run at once.
    pub fn open(source: &ModelSource, decoding: &DecodingDefaults, running_max: usize) -> anyhow::Result<Self> {
        let opened = Opened::new(source)?;
        let backend = opened.backend(source, source.device, running_max)?;
        let session = opened.session(source, decoding, &*backend)?;
        let PrefillBlocks { alone, mixed } = backend.prefill_blocks();
        let limits = Limits { running_max, prefill_blocks_alone: alone, prefill_blocks_mixed: mixed };
        let runner = Runner::new(backend, session.special.decoder_ids(), limits);
        Ok(Self { session, runner })
    }
}

/// An open checkpoint, before a backend is built on it.
pub struct Opened {
    checkpoint: Checkpoint,
    name: String,
    load: LoadOptions,
    /// Its tensors in this process's memory, for backends that compute there; loaded when the first one asks.
    weights: OnceCell<Weights>,
}

impl Opened {
    /// Opens the checkpoint, or the embedded one.
    pub fn new(source: &ModelSource) -> anyhow::Result<Self> {
        let fetched = source.remote.as_ref().map(fetch::fetch).transpose()?;
        let (checkpoint, name) = match fetched.as_ref().or(source.path.as_ref()) {
            Some(path) => {
                let checkpoint = Checkpoint::open(path, source.io)?;
                let name = if checkpoint.model_id().is_empty() {
                    checkpoint.path_id()
                } else {
                    checkpoint.model_id().to_owned()
                };
                (checkpoint, name)
            }
            None => {
                info!("no --model: using the embedded demo model {}, made for trying things out", demo::NAME);
                (Checkpoint::from_static(demo::NAME, demo::checkpoint())?, demo::NAME.to_owned())
            }
        };
        for warning in checkpoint.warnings() {
            warn!("{warning}");
        }
        for asset in checkpoint.dropped_assets() {
            warn!("{name}: {asset} is not readable text and is ignored");
        }
        if let Some(cause) = checkpoint.fallback() {
            warn!("{cause}");
        }
        if checkpoint.config().block_size != BLOCK {
            bail!("{name}: blocks of {} positions are not supported, only {BLOCK}", checkpoint.config().block_size);
        }
        let verify_payload = match source.verify_payload {
            crate::config::VerifyPayload::Auto => VerifyPayload::Auto,
            crate::config::VerifyPayload::Always => VerifyPayload::Always,
            crate::config::VerifyPayload::Never => VerifyPayload::Never,
        };
        checkpoint.check_model().with_context(|| name.clone())?;
        let load = LoadOptions { verify_payload, huge_pages: source.huge_pages };
        Ok(Self { checkpoint, name, load, weights: OnceCell::new() })
    }

    /// What the model looks like.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        self.checkpoint.config()
    }

    /// Its tensors, loaded now if they were not yet.
    pub fn weights(&self) -> anyhow::Result<&Weights> {
        if let Some(weights) = self.weights.get() {
            return Ok(weights);
        }
        let weights = Weights::load(&self.checkpoint, self.load).with_context(|| self.name.clone())?;
        Ok(self.weights.get_or_init(|| weights))
    }

    /// Builds a backend with pages for `running_max` requests of the full context, or as many as the memory allowed
    /// for keys and values holds; at least one request must fit.
    pub fn backend(
        &self,
        source: &ModelSource,
        device: Device,
        running_max: usize,
    ) -> anyhow::Result<Box<dyn Backend>> {
        let is_int8 = source.expert_activations == ExpertActivations::Int8;
        if is_int8 && device == Device::Reference && source.device == Device::Reference {
            return Err(UsageError("--int8-expert-activations is not for --device reference".to_owned()).into());
        }
        match device {
            Device::Cuda(ordinal) => return self.cuda(source, ordinal, running_max),
            Device::Auto if cfg!(feature = "cuda") => match self.cuda(source, 0, running_max) {
                Ok(backend) => return Ok(backend),
                Err(cause) => info!("computing on the CPU: {cause:#}"),
            },
            Device::Auto | Device::Cpu | Device::Reference => {}
        }
        let pages = self.page_count(source, device, running_max)?;
        let weights = self.weights()?;
        Ok(match device {
            // `verify` compares what was asked for with the plain model, but FP4 with its own definition: it is too coarse
            // for an error to be seen beside what it leaves out.
            Device::Reference => {
                let reference = Reference::new(weights, pages)?;
                Box::new(match source.expert_activations {
                    ExpertActivations::Fp4 => reference.with_fp4_expert_activations(weights)?,
                    ExpertActivations::Plain | ExpertActivations::Int8 => reference,
                })
            }
            Device::Auto | Device::Cpu | Device::Cuda(_) => {
                let cpu = Cpu::new(weights.clone(), pages, source.threads, source.isa)?;
                Box::new(cpu.with_expert_activations(source.expert_activations)?)
            }
        })
    }

    /// The backend on GPU number `ordinal`.
    #[cfg(feature = "cuda")]
    fn cuda(&self, source: &ModelSource, ordinal: usize, running_max: usize) -> anyhow::Result<Box<dyn Backend>> {
        let options = CudaOptions {
            ordinal,
            running_max,
            context: self.context(source)?,
            cache_max_bytes: source.cache_max_bytes,
            verifies: self.load.verify_payload.applies_to(&self.checkpoint),
            expert_activations: source.expert_activations,
        };
        let backend = Cuda::new(&self.checkpoint, options).with_context(|| format!("--device cuda:{ordinal}"))?;
        Ok(Box::new(backend))
    }

    #[cfg(not(feature = "cuda"))]
    #[expect(clippy::unused_self, reason = "as with the feature")]
    fn cuda(&self, _: &ModelSource, _: usize, _: usize) -> anyhow::Result<Box<dyn Backend>> {
        let message = "--device cuda: this build has no CUDA backend (cargo feature cuda); use cpu or auto";
        Err(UsageError(message.to_owned()).into())
    }

    fn page_count(&self, source: &ModelSource, device: Device, running_max: usize) -> anyhow::Result<usize> {
        let config = self.checkpoint.config();
        let page_bytes = match device {
            Device::Reference => cache::page_bytes(config, KV_ELEMENT_BYTES),
            Device::Auto | Device::Cpu | Device::Cuda(_) => Cpu::bytes_a_page(config, source.isa) as u64,
        };
        let one_request = self.context(source)?.div_ceil(BLOCK);
        let wanted = one_request.saturating_mul(running_max);
        let Some(budget) = source.cache_max_bytes else {
            let budget = memory_bytes() / CACHE_SHARE_OF_MEMORY;
            let affordable = usize::try_from(budget / page_bytes).unwrap_or(usize::MAX);
            return Ok(wanted.min(affordable).max(one_request));
        };
        let pages = cache::pages_within(budget, page_bytes)?;
        if pages < one_request {
            let needed = (one_request as u64 * page_bytes).div_ceil(1 << 20);
            return Err(UsageError(format!(
                "--cache-max-mib is {}, but one request of {} positions needs {needed}; raise it or lower --max-context",
                budget >> 20,
                self.context(source)?
            ))
            .into());
        }
        Ok(pages)
    }

    /// Positions a request may use.
    fn context(&self, source: &ModelSource) -> anyhow::Result<usize> {
        let limit = self.checkpoint.config().max_position_embeddings;
        match source.max_context {
            None => Ok(limit.min(DEFAULT_CONTEXT_MAX)),
            Some(context) if (BLOCK..=limit).contains(&context) => Ok(context),
            Some(context) => Err(UsageError(format!(
                "--max-context is {context}, expected {BLOCK} to {limit}, the positions of {}",
                self.name
            ))
            .into()),
        }
    }

    /// Everything about the model but the model.
    pub fn session(
        &self,
        source: &ModelSource,
        decoding: &DecodingDefaults,
        backend: &dyn Backend,
    ) -> anyhow::Result<Session> {
        let config = self.checkpoint.config();
        let asset = |name: &str| self.checkpoint.assets().get(name);
        let required = |name: &str| asset(name).with_context(|| format!("{}: {name} is missing", self.name));
        let tokenizer = Tokenizer::from_json(required("tokenizer.json")?).with_context(|| self.name.clone())?;
        let generation_config = asset("generation_config.json").map(String::as_str);
        let special =
            SpecialTokens::resolve(config, generation_config, &tokenizer).with_context(|| self.name.clone())?;
        let template =
            Template::new(required("chat_template.jinja")?, &tokenizer).with_context(|| self.name.clone())?;
        let tokenizer = Arc::new(tokenizer);
        let grammars = Grammars::new(Arc::clone(&tokenizer), config.vocab_size, special.clone());
        let native = native_algorithm(config, &special);
        if decoding.algorithm == Some(Algorithm::V22) && native != Algorithm::V22 {
            return Err(UsageError(format!(
                "--algorithm 2.2 needs a model that chooses experts by block and has delete and split tokens, and {} is \
                 none; without --algorithm it is decoded by {native}",
                self.name
            ))
            .into());
        }
        let default_options = decoding.options(native)?;
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Session {
            model_id: self.name.clone(),
            config: config.clone(),
            tokenizer,
            template: Arc::new(template),
            special,
            grammars,
            context: self.context(source)?,
            default_options,
            default_max_tokens: None,
            default_seed: decoding.seed,
            fingerprint: self.fingerprint(),
            content: self.checkpoint.container().map(|container| container.header.manifest_digest.to_hex()),
            created: since_1970.as_secs(),
            parameters: self.checkpoint.tensors().values().map(|tensor| tensor.spec.shape().elements()).sum(),
            file_bytes: self.checkpoint.files().iter().map(|file| file.len()).sum(),
            file_type: self.file_type(),
            backend: backend.describe(),
            cache_bytes: backend.page_count() as u64 * backend.page_bytes() as u64,
            parallel: 1,
            queue_capacity: 0,
        })
    }

    /// A hash of the program's version and of every tensor's identity: its digest, or else its place and shape.
    fn fingerprint(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(crate::VERSION.as_bytes());
        for (name, tensor) in self.checkpoint.tensors() {
            hasher.update(name.as_bytes());
            match &tensor.digests {
                Some(digests) => hasher.update(digests.data.as_bytes()),
                None => hasher.update(format!("{} {}", tensor.spec.shape(), tensor.data.offset).as_bytes()),
            };
        }
        format!("fp_{}", &hasher.finalize().to_hex()[..16])
    }

    /// The model's name: its container's, or its file's.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// `bf16`, or the experts' encodings and those of the rest.
    #[must_use]
    pub fn file_type(&self) -> String {
        let encodings = |experts: bool| {
            let mut list: Vec<&str> = self
                .checkpoint
                .tensors()
                .iter()
                .filter(|(name, _)| minnow_common::tensor::is_expert(name) == experts && !name.ends_with("expert_bias"))
                .map(|(_, tensor)| tensor.spec.encoding().name())
                .collect();
            list.sort_unstable();
            list.dedup();
            list.join("+")
        };
        let (experts, rest) = (encodings(true), encodings(false));
        if experts == rest { rest } else { format!("{experts} experts, {rest}") }
    }
}

/// The algorithm a checkpoint was trained for. 2.0 and 2.1 have the same configuration; 2.1 checkpoints also decode
/// with 2.0's algorithm, but not the other way round, so the better one is the default and the user can say otherwise.
fn native_algorithm(config: &ModelConfig, special: &SpecialTokens) -> Algorithm {
    match config.routing {
        Routing::Block { .. } if special.decoder_ids().delete.is_some() => Algorithm::V22,
        _ => Algorithm::V21,
    }
}

impl Session {
    /// Takes over what only serving knows.
    pub fn apply(&mut self, defaults: ServeDefaults) {
        if let Some(alias) = defaults.alias {
            self.model_id = alias;
        }
        self.default_max_tokens = defaults.max_tokens;
        self.parallel = defaults.queue.running_max;
        self.queue_capacity = defaults.queue.waiting_max;
    }

    /// Ids that end an output.
    #[must_use]
    pub fn stop_ids(&self) -> Arc<[u32]> {
        Arc::clone(&self.special.stop)
    }

    /// Tokens that fit after a prompt of `prompt` tokens.
    pub fn room_after(&self, prompt: usize) -> anyhow::Result<usize> {
        if prompt == 0 {
            bail!("the prompt is empty");
        }
        match self.context.checked_sub(prompt) {
            Some(room) if room > 0 => Ok(room),
            _ => bail!("the prompt has {prompt} tokens, but the context has {}", self.context),
        }
    }

    /// Encodes text as it is; control tokens in it become their ids.
    pub fn encode_raw(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        Ok(self.tokenizer.encode(text)?)
    }

    /// Renders messages with the chat template and encodes them; text of messages never becomes control tokens.
    pub fn encode_chat(
        &self,
        messages: Vec<Value>,
        tools: Option<Vec<Value>>,
        kwargs: Option<serde_json::Map<String, Value>>,
    ) -> anyhow::Result<Vec<u32>> {
        let input = ChatInput {
            messages,
            tools: tools.unwrap_or_default(),
            kwargs: kwargs.unwrap_or_default(),
            add_generation_prompt: true,
        };
        Ok(self.tokenizer.encode_pieces(&self.template.render(&input)?)?)
    }
}

/// Memory of this machine; without `/proc/meminfo`, nothing is known and 4 GiB are assumed.
fn memory_bytes() -> u64 {
    const ASSUMED: u64 = 4 << 30;
    let Ok(text) = std::fs::read_to_string("/proc/meminfo") else { return ASSUMED };
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map_or(ASSUMED, |kib| kib * 1024)
}
