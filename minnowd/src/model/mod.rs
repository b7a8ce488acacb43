//! One forward pass over a batch of blocks, behind one trait: [`reference`] (candle, plain), [`cpu`], and under feature
//! `cuda` NVIDIA GPUs.
//!
//! No loop over steps and no text: tokens and page tables in, what each segment needs out. Three things always hold.
//! A batch is checked ([`Batch::check`]) before anything is computed. Segments never mix, and neither do the blocks of
//! a segment except through K/V of earlier blocks, so every result depends only on the tokens of its own sequence, bit
//! for bit, whatever else is in the batch and however a prefill was cut. A forward writes the pages of its own blocks
//! and no others; who may read them later is decided in [`crate::cache`].

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod reference;
pub mod trace;
pub mod verify;

use std::collections::HashMap;

use minnow_common::{BLOCK, Encoding, ModelConfig};
use serde::Serialize;
use thiserror::Error;

pub use crate::cache::PageId;
use crate::decoder::Candidates;
use crate::weights::{Stored, Weights};

/// A model on a device, with room for the K/V of [`page_count`](Self::page_count) blocks.
pub trait Backend: Send {
    /// What the model looks like.
    fn config(&self) -> &ModelConfig;

    /// Pages that segments may name: `PageId(0)` to `PageId(page_count - 1)`.
    fn page_count(&self) -> usize;

    /// The device in words, as logs and `/v1/models` show it: `cpu (avx512, 2 threads)`.
    fn describe(&self) -> String;

    /// What decides the bits of its results besides weights and program, in words: `cpu avx512`. Threads do not.
    fn arithmetic(&self) -> String;

    /// Bytes of one page as [`export_page`](Self::export_page) writes it.
    fn page_bytes(&self) -> usize;

    /// How much of a prompt a step should hold.
    fn prefill_blocks(&self) -> PrefillBlocks {
        PrefillBlocks::default()
    }

    /// Copies the K/V of a page that a forward or an import has written into `out: [page_bytes]`. Type and order of the
    /// numbers are the backend's own; all are little-endian.
    fn export_page(&self, page: PageId, out: &mut [u8]) -> Result<(), ModelError>;

    /// Makes `page` what [`export_page`](Self::export_page) gave as `bytes: [page_bytes]`, bit for bit, if they come
    /// from a backend of the same [`arithmetic`](Self::arithmetic) with the same weights. After an error the page
    /// holds anything.
    fn import_page(&mut self, page: PageId, bytes: &[u8]) -> Result<(), ModelError>;

    /// The relative distance from the exact model that this backend's rounding explains, as long as all experts are the
    /// same: see [`verify`].
    fn tolerance(&self) -> f64 {
        verify::TOLERANCE_F32
    }

    /// What the machine under this backend can do at best, measured now. `None` where nobody measures it.
    fn ceilings(&self) -> Option<Ceilings> {
        None
    }

    /// Evaluates a batch like [`forward`](Self::forward) and says how long each kernel took on its device, in order.
    /// `None` where nobody measures it.
    fn profile(&mut self, _batch: &Batch<'_>) -> Result<Option<Vec<KernelTime>>, ModelError> {
        Ok(None)
    }

    /// Evaluates every segment and writes the K/V of its blocks into its last pages. One output for each segment, in
    /// order. After an error the pages that the batch writes hold anything.
    fn forward(&mut self, batch: &Batch<'_>, probe: Option<&mut dyn Probe>) -> Result<Vec<Output>, ModelError>;
}

/// What a machine can do at best.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ceilings {
    /// Bytes of memory read in a second.
    pub read_bytes_per_second: f64,
    /// Floating-point operations in a second, of the products that weights go through.
    pub flops_per_second: f64,
}

/// What enters the projections of routed experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertActivations {
    /// What the model computes.
    #[default]
    Plain,
    /// That, quantized to eight bits in the groups of the weights (`kernels::oracle::linear_int8`).
    Int8,
    /// That, quantized to four bits row by row (`kernels::oracle::round_to_fp4`).
    Fp4,
}

impl ExpertActivations {
    /// What the description of a backend says of it, behind what it says of the device.
    fn suffix(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Int8 => ", int8 expert activations",
            Self::Fp4 => ", fp4 expert activations",
        }
    }
}

/// How long a kernel ran on a device.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// What it is called.
    pub kernel: String,
    /// From the end of what was in front of it to its own end.
    pub seconds: f64,
}

/// How many blocks of prompts go into one step. More make better use of weights that are read once for all; fewer let
/// cancellation, progress and running streams wait less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillBlocks {
    /// When nothing else runs.
    pub alone: usize,
    /// Beside streams that refine.
    pub mixed: usize,
}

impl Default for PrefillBlocks {
    /// What suits a processor.
    fn default() -> Self {
        Self { alone: 16, mixed: 2 }
    }
}

/// One sequence's share of a batch: whole blocks at the end of what it has so far.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// Token ids of one or more whole blocks.
    pub tokens: &'a [u32],
    /// The pages of all blocks of the sequence up to the last one here, in order. The last `tokens.len() / 32` are
    /// written by this forward, those before are read.
    pub pages: &'a [PageId],
    /// What the caller wants back.
    pub need: Need,
}

/// What a segment needs back from a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Only the K/V: prefill and refresh.
    Nothing,
    /// The best tokens of each position and their confidence: greedy refinement.
    Candidates,
    /// All logits of each position: sampling, logprobs, constraints.
    Logits,
}

/// What is evaluated together in one step.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// The segments; each of another sequence, or at least writing other pages.
    pub segments: &'a [Segment<'a>],
}

/// What a forward gives back for one segment.
#[derive(Clone, Debug)]
pub enum Output {
    /// For [`Need::Nothing`].
    Nothing,
    /// For [`Need::Candidates`]: one entry for each position of the segment.
    Candidates(Vec<Candidates>),
    /// For [`Need::Logits`]: one row for each position of the segment.
    Logits(Logits),
}

/// Logits of consecutive positions, `[positions, vocab]` row-major f32.
#[derive(Clone, Debug, PartialEq)]
pub struct Logits {
    vocab: usize,
    values: Vec<f32>,
}

/// Sees intermediate values of a forward. For verification and tests; a forward with a probe computes the same bits.
pub trait Probe: Send {
    /// Values of `shape: [rows, width]`, row-major, a row a position. Rows of one (segment, layer, point) may come in
    /// several calls, in ascending order. `layer` is `None` for embeddings, final norm and logits.
    fn record(&mut self, segment: usize, layer: Option<usize>, point: Point, shape: [usize; 2], values: &[f32]);
}

/// Where in the forward pass a value was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Point {
    /// Rows of the embedding, `[rows, hidden]`.
    Embeddings,
    /// Keys after norm and rotation, `[rows, kv_heads * head_dim]`.
    Key,
    /// Values, `[rows, kv_heads * head_dim]`.
    Value,
    /// The residual stream after attention, `[rows, hidden]`.
    Attention,
    /// Router logits, `[rows, experts]`.
    RouterLogits,
    /// Router scores with the selection bias, `[rows, experts]`: what experts are chosen by.
    RouterScores,
    /// Chosen experts by descending biased score, `[rows, experts per token]`; whole numbers.
    RouterIds,
    /// Weights of the chosen experts in the same order, scaled, `[rows, experts per token]`.
    RouterWeights,
    /// The residual stream after the layer, `[rows, hidden]`.
    Hidden,
    /// The final norm's output, `[rows, hidden]`; absent for segments that need nothing.
    Normalized,
    /// Logits, `[rows, vocab]`; absent for segments that need nothing.
    Logits,
}

/// Why a batch cannot be evaluated.
#[derive(Debug, Error)]
pub enum ModelError {
    /// The model's block is not the one this program is built for.
    #[error("the model has blocks of {found} positions, but only {BLOCK} is supported")]
    BlockSize {
        /// `block_size` of the configuration.
        found: usize,
    },
    /// No tokens, or not whole blocks.
    #[error("segment {segment} has {tokens} tokens, expected a positive multiple of {BLOCK}")]
    PartialBlock {
        /// Index in the batch.
        segment: usize,
        /// Tokens given.
        tokens: usize,
    },
    /// Fewer pages than blocks.
    #[error("segment {segment} has {blocks} blocks of tokens, but only {pages} pages")]
    TooFewPages {
        /// Index in the batch.
        segment: usize,
        /// Blocks of tokens.
        blocks: usize,
        /// Pages given.
        pages: usize,
    },
    /// A page that does not exist.
    #[error("segment {segment} names page {page}, but there are {count} pages")]
    PageRange {
        /// Index in the batch.
        segment: usize,
        /// The page.
        page: u32,
        /// Pages of the backend.
        count: usize,
    },
    /// A page written by this batch appears a second time in it.
    #[error("page {page} is written by segment {writer} and also used by segment {other}")]
    PageConflict {
        /// The page.
        page: u32,
        /// Who writes it.
        writer: usize,
        /// Who else names it; the same segment if it names it twice.
        other: usize,
    },
    /// More positions than the model was made for.
    #[error("segment {segment} reaches position {positions}, but the model has {limit} positions")]
    TooLong {
        /// Index in the batch.
        segment: usize,
        /// Positions up to its end.
        positions: usize,
        /// `max_position_embeddings`.
        limit: usize,
    },
    /// A token id outside the vocabulary.
    #[error("segment {segment} has token {token} at index {index}, but the vocabulary has {vocab} entries")]
    Token {
        /// Index in the batch.
        segment: usize,
        /// Index in the segment.
        index: usize,
        /// The id.
        token: u32,
        /// Entries of the vocabulary.
        vocab: usize,
    },
    /// A page to be copied does not exist, or nothing was ever written to it.
    #[error("page {page} of {count} has no keys and values to copy")]
    PageEmpty {
        /// The page.
        page: u32,
        /// Pages of the backend.
        count: usize,
    },
    /// A buffer for a page that is not as long as a page.
    #[error("{found} bytes were given for a page of {expected}")]
    PageSize {
        /// Bytes given.
        found: usize,
        /// Bytes of a page.
        expected: usize,
    },
    /// Activations of eight bits were asked for where they are not to be had.
    #[error(
        "--int8-expert-activations on the CPU needs experts stored as i8_mma or i4_mma in groups of 128, and {tensor} is not"
    )]
    Int8Experts {
        /// The first expert matrix that is not stored so.
        tensor: String,
    },
    /// Activations of four bits were asked for where they are not to be had.
    #[error("--fp4-expert-activations needs experts stored as nvfp4, and {tensor} is stored as {encoding}")]
    Fp4Experts {
        /// The first expert matrix that is not stored so.
        tensor: String,
        /// How it is stored.
        encoding: String,
    },
    /// The GPU failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] minnow_kernels::cuda::CudaError),
    /// The reference backend's tensor library refused.
    #[error("the tensor library refused: {0}")]
    Candle(#[from] candle_core::Error),
    /// The threads of the backend could not be started.
    #[error("cannot start {threads} threads: {message}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// The system's reason.
        message: String,
    },
}

impl Segment<'_> {
    /// Blocks of tokens in this segment.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.tokens.len() / BLOCK
    }

    /// Absolute position of the first token, for a checked segment.
    #[must_use]
    pub fn first_position(&self) -> usize {
        (self.pages.len() - self.blocks()) * BLOCK
    }
}

impl Batch<'_> {
    /// Everything a backend relies on: whole blocks, existing tokens and pages, positions within the model's limit,
    /// and no page used twice if it is written.
    pub fn check(&self, config: &ModelConfig, page_count: usize) -> Result<(), ModelError> {
        if config.block_size != BLOCK {
            return Err(ModelError::BlockSize { found: config.block_size });
        }
        for (segment, part) in self.segments.iter().enumerate() {
            let (blocks, pages) = (part.blocks(), part.pages.len());
            if blocks == 0 || !part.tokens.len().is_multiple_of(BLOCK) {
                return Err(ModelError::PartialBlock { segment, tokens: part.tokens.len() });
            }
            if pages < blocks {
                return Err(ModelError::TooFewPages { segment, blocks, pages });
            }
            let (positions, limit) = (pages.saturating_mul(BLOCK), config.max_position_embeddings);
            if positions > limit {
                return Err(ModelError::TooLong { segment, positions, limit });
            }
            if let Some(page) = part.pages.iter().find(|page| page.0 as usize >= page_count) {
                return Err(ModelError::PageRange { segment, page: page.0, count: page_count });
            }
            let vocab = config.vocab_size;
            if let Some(index) = part.tokens.iter().position(|&token| token as usize >= vocab) {
                return Err(ModelError::Token { segment, index, token: part.tokens[index], vocab });
            }
        }
        self.check_pages()
    }

    fn check_pages(&self) -> Result<(), ModelError> {
        let mut writers = HashMap::new();
        for (segment, part) in self.segments.iter().enumerate() {
            for &page in &part.pages[part.pages.len() - part.blocks()..] {
                if let Some(writer) = writers.insert(page, segment) {
                    return Err(ModelError::PageConflict { page: page.0, writer, other: segment });
                }
            }
        }
        for (other, part) in self.segments.iter().enumerate() {
            for page in &part.pages[..part.pages.len() - part.blocks()] {
                if let Some(&writer) = writers.get(page) {
                    return Err(ModelError::PageConflict { page: page.0, writer, other });
                }
            }
        }
        Ok(())
    }
}

impl Logits {
    /// Wraps `values: [positions, vocab]`.
    ///
    /// # Panics
    /// If `values` is not whole rows.
    #[must_use]
    pub fn new(vocab: usize, values: Vec<f32>) -> Self {
        assert!(values.len().is_multiple_of(vocab), "logits are whole rows");
        Self { vocab, values }
    }

    /// Adds whole rows.
    #[cfg(feature = "cuda")]
    fn append(&mut self, values: Vec<f32>) {
        assert!(values.len().is_multiple_of(self.vocab), "logits are whole rows");
        if self.values.is_empty() { self.values = values } else { self.values.extend(values) }
    }

    /// Rows.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.values.len() / self.vocab
    }

    /// Length of a row.
    #[must_use]
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// All rows, one after another.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Logits of one position over the whole vocabulary.
    ///
    /// # Panics
    /// If there is no such position.
    #[must_use]
    pub fn row(&self, position: usize) -> &[f32] {
        &self.values[position * self.vocab..][..self.vocab]
    }

    /// All rows, in order.
    pub fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.values.chunks_exact(self.vocab)
    }
}

/// Bytes of one page of f32: K and V of one block in every layer.
fn page_bytes(config: &ModelConfig) -> usize {
    2 * config.num_hidden_layers * config.kv_elements_per_page() * size_of::<f32>()
}

/// Refuses a buffer that is not as long as a page.
fn check_page_size(config: &ModelConfig, found: usize) -> Result<(), ModelError> {
    let expected = page_bytes(config);
    if found == expected { Ok(()) } else { Err(ModelError::PageSize { found, expected }) }
}

/// Refuses experts that activations of four bits are not defined for.
fn check_fp4_experts(weights: &Weights) -> Result<(), ModelError> {
    match weights.routed_experts().find(|matrix| matrix.spec.encoding() != Encoding::Nvfp4) {
        None => Ok(()),
        Some(Stored { name, spec, .. }) => {
            Err(ModelError::Fp4Experts { tensor: name.clone(), encoding: spec.encoding().to_string() })
        }
    }
}

/// Writes `values: [n]` into `bytes: [4 n]`, little-endian.
fn write_values(bytes: &mut [u8], values: &[f32]) {
    for (bytes, value) in bytes.chunks_exact_mut(size_of::<f32>()).zip(values) {
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

/// The f32 of `bytes`, little-endian.
fn read_values(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes))
}

/// A probe that may be absent, for backends: asks before anything is copied.
struct Recorder<'a>(Option<&'a mut dyn Probe>);

impl Recorder<'_> {
    fn is_active(&self) -> bool {
        self.0.is_some()
    }

    /// Passes `values: [rows, width]` on.
    fn record(&mut self, segment: usize, layer: Option<usize>, point: Point, width: usize, values: &[f32]) {
        if let Some(probe) = &mut self.0 {
            probe.record(segment, layer, point, [values.len() / width, width], values);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> ModelConfig {
        let text = r#"{"model_type":"llada2_moe","vocab_size":64,"hidden_size":64,"intermediate_size":64,
            "num_hidden_layers":1,"num_attention_heads":1,"num_key_value_heads":1,"head_dim":64,"rms_norm_eps":1e-6,
            "max_position_embeddings":128,"num_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":64,
            "routed_scaling_factor":1,"rope_theta":10000,"expert_capacity":2}"#;
        ModelConfig::from_json(text).unwrap()
    }

    /// Tokens and page numbers of segments.
    type Parts<'a> = &'a [(&'a [u32], &'a [u32])];

    /// What [`Batch::check`] says of segments with these tokens and pages, on a backend of eight pages.
    fn verdict(parts: Parts<'_>) -> String {
        let pages: Vec<Vec<PageId>> = parts.iter().map(|(_, ids)| ids.iter().copied().map(PageId).collect()).collect();
        let segments: Vec<Segment<'_>> = parts
            .iter()
            .zip(&pages)
            .map(|((tokens, _), pages)| Segment { tokens, pages, need: Need::Nothing })
            .collect();
        let checked = Batch { segments: &segments }.check(&config(), 8);
        checked.map_or_else(|error| error.to_string(), |()| "accepted".to_owned())
    }

    #[test]
    fn a_batch_that_would_read_or_write_elsewhere_is_refused_with_its_numbers() {
        let block = &[0; 32][..];
        let two = &[0; 64][..];
        let mut unknown = [0; 32];
        unknown[5] = 64;
        let cases: [(Parts<'_>, &str); 12] = [
            (&[], "accepted"),
            (&[(block, &[0, 7])], "accepted"),
            (&[(block, &[0, 1]), (two, &[0, 2, 3])], "accepted"),
            (&[(&[], &[0])], "segment 0 has 0 tokens, expected a positive multiple of 32"),
            (&[(&block[1..], &[0])], "segment 0 has 31 tokens, expected a positive multiple of 32"),
            (&[(two, &[0])], "segment 0 has 2 blocks of tokens, but only 1 pages"),
            (&[(block, &[0, 8])], "segment 0 names page 8, but there are 8 pages"),
            (&[(block, &[0, 1, 0])], "page 0 is written by segment 0 and also used by segment 0"),
            (&[(two, &[1, 1])], "page 1 is written by segment 0 and also used by segment 0"),
            (&[(block, &[0, 1]), (block, &[1, 2])], "page 1 is written by segment 0 and also used by segment 1"),
            (&[(block, &[0, 1, 2, 3, 4])], "segment 0 reaches position 160, but the model has 128 positions"),
            (&[(&unknown, &[0])], "segment 0 has token 64 at index 5, but the vocabulary has 64 entries"),
        ];
        for (parts, expected) in cases {
            assert_eq!(verdict(parts), expected);
        }
    }
}
