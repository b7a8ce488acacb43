//! A checkpoint's tensors, checked and arranged by layer, as every backend starts from them.
//!
//! Matrices stay as they are stored: BF16 stays BF16, quantized experts stay packed. Where the checkpoint is mapped or
//! built in, their bytes are borrowed from it, and nothing is copied; elsewhere each is read once. Only what is small
//! and always used in f32 is widened here: norms and the router's bias. Widening is exact.
//!
//! After [`Weights::load`] every tensor the model needs is there with its exact shape, only routed experts are
//! quantized, and no scale is unusable.

mod bytes;
mod regions;

use std::borrow::Cow;
use std::collections::HashMap;
use std::{fmt, io};

use minnow_common::inventory::{self, EMBEDDING, FINAL_NORM, HEAD, PROJECTIONS};
use minnow_common::units::HumanBytes;
use minnow_common::{BLOCK, ModelConfig, TensorSpec};
use minnow_formats::checkpoint::{Checkpoint, ModelError, ReadError, StoredTensor, TensorBytes};
use minnow_formats::io::HugePages;
use minnow_kernels::codec::{self, CodecError};
use minnow_kernels::matrix::WeightMatrix;
use thiserror::Error;

pub use bytes::Bytes;
use regions::Parts;

/// Payloads up to this size are verified by default: a second of hashing at most, against a silent wrong answer.
pub const VERIFY_AUTO_BYTES_MAX: u64 = 1 << 30;

/// All tensors of a model. A clone shares the matrices.
#[derive(Clone, Debug)]
pub struct Weights {
    /// The model they belong to.
    pub config: ModelConfig,
    /// `[vocab, hidden]`, a row a token.
    pub embedding: Stored,
    /// One entry for each layer.
    pub layers: Vec<Layer>,
    /// Weight of the norm before the head, `[hidden]`.
    pub final_norm: Vec<f32>,
    /// `[vocab, hidden]`.
    pub head: Stored,
    resident: Resident,
}

/// The tensors of one layer.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Weight of the norm before attention, `[hidden]`.
    pub input_norm: Vec<f32>,
    /// Fused projection `[(heads + 2 * kv_heads) * head_dim, hidden]`: query heads, key heads, value heads.
    pub qkv: Stored,
    /// Weights of the norms of each query and key head; `None` if the model has none.
    pub head_norms: Option<HeadNorms>,
    /// Output projection of attention, `[hidden, heads * head_dim]`.
    pub dense: Stored,
    /// Weight of the norm before the feed-forward part, `[hidden]`.
    pub post_norm: Vec<f32>,
    /// The feed-forward part.
    pub feed_forward: FeedForward,
}

/// Weights of the norms of each head, `[head_dim]` each.
#[derive(Clone, Debug)]
pub struct HeadNorms {
    /// For queries.
    pub query: Vec<f32>,
    /// For keys.
    pub key: Vec<f32>,
}

/// The part of a layer after attention.
#[derive(Clone, Debug)]
pub enum FeedForward {
    /// One gated unit for every token.
    Dense(Box<Gated>),
    /// Experts, of which each token uses a few.
    Experts(Box<Experts>),
}

/// A gated unit: `down(silu(gate(x)) * up(x))`.
#[derive(Clone, Debug)]
pub struct Gated {
    /// `[width, hidden]`
    pub gate: Stored,
    /// `[width, hidden]`
    pub up: Stored,
    /// `[hidden, width]`
    pub down: Stored,
}

/// The experts of a layer and how they are chosen.
#[derive(Clone, Debug)]
pub struct Experts {
    /// `[experts, hidden]`, always floating. Its products are f32 in every backend.
    pub router: Stored,
    /// Added to the scores for choosing, never for weighing: `[experts]`.
    pub bias: Vec<f32>,
    /// The routed experts.
    pub routed: Vec<Gated>,
    /// The expert that every token uses, if there is one.
    pub shared: Option<Gated>,
}

/// A matrix as the checkpoint stores it.
#[derive(Clone, Debug)]
pub struct Stored {
    /// Its name in the checkpoint.
    pub name: String,
    /// Shape, encoding and quantization parameters.
    pub spec: TensorSpec,
    /// The data region, `spec.data_bytes()` long.
    pub data: Bytes,
    /// The scales region, `spec.scales_bytes()` long: empty for floating matrices.
    pub scales: Bytes,
}

/// Memory that loaded weights take, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// In memory of this process.
    pub owned: u64,
    /// Borrowed from a mapped file or from the program itself; the kernel may drop and read these pages again.
    pub borrowed: u64,
}

/// What loading checks beyond names, shapes and scales, and where tensors go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Whether every payload is compared with its digest.
    pub verify_payload: VerifyPayload,
    /// What pages back tensors that are read into memory. Mapped files have the page cache's.
    pub huge_pages: HugePages,
}

/// Whether payloads are compared with the digests of a `.mnw` file. Safetensors files have none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VerifyPayload {
    /// If all payloads together have less than [`VERIFY_AUTO_BYTES_MAX`].
    #[default]
    Auto,
    /// In any case.
    Always,
    /// Never.
    Never,
}

/// Why weights cannot be used.
#[derive(Debug, Error)]
pub enum LoadError {
    /// Tensors are missing or do not fit the configuration.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model's block is not the one this program is built for.
    #[error("config.json: block_size is {0}, but only {BLOCK} is supported")]
    BlockSize(usize),
    /// A tensor cannot be read, or does not match its digest.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// There is no memory for tensors.
    #[error("{} for weights: {error}", HumanBytes(*.bytes as u64))]
    Memory {
        /// How much was asked for.
        bytes: usize,
        /// Why not.
        error: io::Error,
    },
    /// A scale is zero, negative or not finite, or a region has the wrong size.
    #[error("tensor {tensor} cannot be used: {source}")]
    Payload {
        /// Its name.
        tensor: String,
        /// Where and why.
        source: CodecError,
    },
}

impl Weights {
    /// Reads and checks everything the model needs.
    pub fn load(checkpoint: &Checkpoint, options: LoadOptions) -> Result<Self, LoadError> {
        checkpoint.check_model()?;
        let config = checkpoint.config().clone();
        if config.block_size != BLOCK {
            return Err(LoadError::BlockSize(config.block_size));
        }
        let needed = inventory::needed(&config);
        let names = needed.iter().map(|needed| needed.name.as_str());
        let loaded = regions::read(checkpoint, names, options.huge_pages)?;
        let source = Source { checkpoint, loaded, verifies: options.verify_payload.applies_to(checkpoint) };
        let embedding = source.stored(EMBEDDING)?;
        let layers = (0..config.num_hidden_layers).map(|index| source.layer(index)).collect::<Result<_, _>>()?;
        let final_norm = source.widened(FINAL_NORM)?;
        let head = source.stored(HEAD)?;
        let mut weights = Self { config, embedding, layers, final_norm, head, resident: Resident::default() };
        weights.resident = weights.count_bytes();
        Ok(weights)
    }

    /// Memory these weights take.
    #[must_use]
    pub fn resident(&self) -> Resident {
        self.resident
    }

    fn count_bytes(&self) -> Resident {
        let mut sum = Resident::default();
        let vector = |sum: &mut Resident, values: &[f32]| sum.owned += size_of_val(values) as u64;
        for layer in &self.layers {
            vector(&mut sum, &layer.input_norm);
            vector(&mut sum, &layer.post_norm);
            if let Some(norms) = &layer.head_norms {
                vector(&mut sum, &norms.query);
                vector(&mut sum, &norms.key);
            }
            if let FeedForward::Experts(experts) = &layer.feed_forward {
                vector(&mut sum, &experts.bias);
            }
        }
        vector(&mut sum, &self.final_norm);
        for bytes in self.matrices().flat_map(|matrix| [&matrix.data, &matrix.scales]) {
            let count = if bytes.is_borrowed() { &mut sum.borrowed } else { &mut sum.owned };
            *count += bytes.len() as u64;
        }
        sum
    }

    /// The matrices of all routed experts.
    pub fn routed_experts(&self) -> impl Iterator<Item = &Stored> {
        let of_layers = self.layers.iter().filter_map(|layer| match &layer.feed_forward {
            FeedForward::Dense(_) => None,
            FeedForward::Experts(experts) => Some(&experts.routed),
        });
        of_layers.flatten().flat_map(Gated::matrices)
    }

    /// Every matrix that is kept as stored.
    pub fn matrices(&self) -> impl Iterator<Item = &Stored> {
        [&self.embedding, &self.head].into_iter().chain(self.layers.iter().flat_map(Layer::matrices))
    }
}

impl Layer {
    /// Every matrix of this layer that is kept as stored.
    pub fn matrices(&self) -> impl Iterator<Item = &Stored> {
        let (router, gated): (_, Vec<&Gated>) = match &self.feed_forward {
            FeedForward::Dense(gated) => (None, vec![&**gated]),
            FeedForward::Experts(experts) => {
                (Some(&experts.router), experts.routed.iter().chain(&experts.shared).collect())
            }
        };
        [&self.qkv, &self.dense].into_iter().chain(router).chain(gated.into_iter().flat_map(Gated::matrices))
    }
}

impl Gated {
    /// Gate, up and down.
    #[must_use]
    pub fn matrices(&self) -> [&Stored; 3] {
        [&self.gate, &self.up, &self.down]
    }
}

impl Stored {
    /// The tensor as kernels take it.
    ///
    /// # Panics
    /// If the fields do not go together. Loading makes only those that do.
    #[must_use]
    pub fn view(&self) -> WeightMatrix<'_> {
        WeightMatrix::new(&self.spec, &self.data, &self.scales).expect("loading checked the sizes")
    }

    /// All elements in f32, row-major.
    ///
    /// # Panics
    /// As [`view`](Self::view).
    #[must_use]
    pub fn decoded(&self) -> Vec<f32> {
        let matrix = self.view();
        let mut out = vec![0.0; matrix.rows() * matrix.cols()];
        codec::decode_rows(&matrix, 0, &mut out);
        out
    }
}

impl VerifyPayload {
    /// Whether the payloads of this checkpoint are compared.
    pub(crate) fn applies_to(self, checkpoint: &Checkpoint) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Auto => {
                let sizes = checkpoint.tensors().values().map(|tensor| tensor.spec.data_bytes());
                sizes.fold(0, u64::saturating_add) < VERIFY_AUTO_BYTES_MAX
            }
        }
    }
}

impl fmt::Display for Resident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} owned, {} borrowed", HumanBytes(self.owned), HumanBytes(self.borrowed))
    }
}

/// Takes tensors out of a checkpoint, checking each.
struct Source<'a> {
    checkpoint: &'a Checkpoint,
    /// The tensors of files that are not in memory as a whole.
    loaded: HashMap<&'a str, Parts>,
    verifies: bool,
}

impl Source<'_> {
    fn layer(&self, index: usize) -> Result<Layer, LoadError> {
        let config = self.checkpoint.config();
        let named = |rest: &str| inventory::layer(index, rest);
        Ok(Layer {
            input_norm: self.widened(&named("input_layernorm.weight"))?,
            qkv: self.stored(&named("attention.query_key_value.weight"))?,
            head_norms: match config.use_qk_norm {
                false => None,
                true => Some(HeadNorms {
                    query: self.widened(&named("attention.query_layernorm.weight"))?,
                    key: self.widened(&named("attention.key_layernorm.weight"))?,
                }),
            },
            dense: self.stored(&named("attention.dense.weight"))?,
            post_norm: self.widened(&named("post_attention_layernorm.weight"))?,
            feed_forward: match config.is_dense(index) {
                true => FeedForward::Dense(Box::new(self.gated(&named("mlp"))?)),
                false => FeedForward::Experts(Box::new(self.experts(&named("mlp"))?)),
            },
        })
    }

    fn experts(&self, prefix: &str) -> Result<Experts, LoadError> {
        let config = self.checkpoint.config();
        Ok(Experts {
            router: self.stored(&format!("{prefix}.gate.weight"))?,
            bias: self.widened(&format!("{prefix}.gate.expert_bias"))?,
            routed: (0..config.num_experts)
                .map(|expert| self.gated(&format!("{prefix}.experts.{expert}")))
                .collect::<Result<_, _>>()?,
            shared: match config.num_shared_experts {
                0 => None,
                _ => Some(self.gated(&format!("{prefix}.shared_experts"))?),
            },
        })
    }

    fn gated(&self, prefix: &str) -> Result<Gated, LoadError> {
        let [gate, up, down] = PROJECTIONS.map(|projection| format!("{prefix}.{projection}.weight"));
        Ok(Gated { gate: self.stored(&gate)?, up: self.stored(&up)?, down: self.stored(&down)? })
    }

    /// A floating tensor, in f32.
    fn widened(&self, name: &str) -> Result<Vec<f32>, LoadError> {
        Ok(self.stored(name)?.decoded())
    }

    /// A tensor as it is stored.
    fn stored(&self, name: &str) -> Result<Stored, LoadError> {
        let (data, scales) = self.regions(name)?;
        if self.verifies {
            let scales = (!scales.is_empty()).then_some(Cow::Borrowed(&*scales));
            self.checkpoint.verify(name, &TensorBytes { data: Cow::Borrowed(&data), scales })?;
        }
        let spec = self.tensor(name)?.spec.clone();
        let unusable = |source| LoadError::Payload { tensor: name.to_owned(), source };
        codec::check_scales(&scales, spec.encoding()).map_err(unusable)?;
        WeightMatrix::new(&spec, &data, &scales).map_err(unusable)?;
        Ok(Stored { name: name.to_owned(), spec, data, scales })
    }

    /// Data and scales: borrowed where the file is in memory anyway, else what was read.
    fn regions(&self, name: &str) -> Result<(Bytes, Bytes), LoadError> {
        let tensor = self.tensor(name)?;
        let file = &self.checkpoint.files()[tensor.file];
        if let Some(data) = Bytes::borrowed(file, tensor.data) {
            let scales = tensor.scales.and_then(|span| Bytes::borrowed(file, span));
            return Ok((data, scales.unwrap_or_default()));
        }
        let [data, scales] = self.loaded.get(name).ok_or_else(|| ReadError::NoTensor(name.to_owned()))?.clone();
        Ok((data, scales))
    }

    fn tensor(&self, name: &str) -> Result<&StoredTensor, LoadError> {
        let tensor = self.checkpoint.tensors().get(name);
        Ok(tensor.ok_or_else(|| ReadError::NoTensor(name.to_owned()))?)
    }
}
