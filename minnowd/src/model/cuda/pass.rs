//! The kernels of one forward, in order, for whatever the host put into the workspace's input.
//!
//! [`Kernels::queue`] only queues: it allocates nothing and waits for nothing, so it can be recorded as a graph, and
//! what it queues depends on the [`PassShape`] alone.

use half::bf16;
use minnow_common::{BLOCK, ModelConfig};
use minnow_kernels::cuda::{
    Attention, BlockTables, Buffer, CudaError, Device, Experts, Format, Fp4Experts, HeadTransform, Int8Experts, Linear,
    Norm, NormShape, PagesOfLayer, Parts, Pointer, Router, Sampler, Slots, Strips, VOCABULARY_TILE, tiles_max,
};
use minnow_kernels::ops::{CANDIDATES, RouterRules};

use super::weights::{DeviceWeights, FeedForward, Gated, Layer};
use super::workspace::{Workspace, heads, rules};
use crate::model::{ExpertActivations, Point};

/// What decides which kernels a forward consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PassShape {
    /// Blocks of all segments. Those that need candidates come first, then those that need logits.
    pub(super) blocks: usize,
    /// Blocks that need candidates.
    pub(super) candidates: usize,
    /// Blocks that need logits.
    pub(super) logits: usize,
    /// Whether everything is computed though nobody needs it, because it is looked at.
    pub(super) is_whole: bool,
}

/// A value of a forward that may be looked at: where it is, and how many columns it has.
#[derive(Clone, Copy)]
pub(super) enum Seen<'a> {
    /// `[rows, width]`
    Bf16(&'a Buffer<bf16>, usize),
    /// `[rows, width]`
    F32(&'a Buffer<f32>, usize),
    /// `[rows, width]`
    U32(&'a Buffer<u32>, usize),
    /// Keys and values, in the pages.
    Pages,
}

/// Looks at values while a forward is queued.
pub(super) trait Look {
    /// Called behind the kernel that makes the value.
    fn look(&mut self, layer: Option<usize>, point: Point, value: Seen<'_>) -> Result<(), CudaError>;
}

/// Looks at nothing.
pub(super) struct Blind;

impl Look for Blind {
    fn look(&mut self, _: Option<usize>, _: Point, _: Seen<'_>) -> Result<(), CudaError> {
        Ok(())
    }
}

/// Those of the experts, by what enters them.
enum ExpertKernels {
    Plain(Experts),
    Int8(Int8Experts),
    Fp4(Fp4Experts),
}

/// The kernels with the model they belong to.
pub(super) struct Kernels {
    pub(super) config: ModelConfig,
    pub(super) attention: Attention,
    pub(super) linear: Linear,
    norm: Norm,
    router: Router,
    experts: ExpertKernels,
    sampler: Sampler,
    rules: RouterRules,
}

/// Device memory that a forward reads and writes.
pub(super) struct Memory<'a> {
    pub(super) weights: &'a DeviceWeights,
    pub(super) workspace: &'a Workspace,
    /// `[pages, layers, 2, kv_heads, 32, head_dim]`
    pub(super) pages: &'a Buffer<bf16>,
    /// Cosine and sine, `[positions, 32, 2]`.
    pub(super) rotations: &'a Buffer<bf16>,
}

impl Kernels {
    /// Loads all kernels, those of experts for `expert_formats`, and refuses a model that they cannot compute.
    pub(super) fn new(
        device: &Device,
        config: &ModelConfig,
        expert_formats: &[Format],
        activations: ExpertActivations,
    ) -> Result<Self, CudaError> {
        let rules = rules(config);
        Norm::check(config.hidden_size)?;
        Attention::check(heads(config), config.rotary_dim)?;
        Router::check(config.num_experts, &rules)?;
        if config.num_shared_experts > 1 {
            let what = format!("{} shared experts, only one", config.num_shared_experts);
            return Err(CudaError::Unsupported { operation: "the feed-forward part", what });
        }
        if config.vocab_size < CANDIDATES {
            let what = format!("{} tokens, only {CANDIDATES} or more", config.vocab_size);
            return Err(CudaError::Unsupported { operation: "the head", what });
        }
        Ok(Self {
            config: config.clone(),
            attention: Attention::new(device)?,
            linear: Linear::new(device)?,
            norm: Norm::new(device)?,
            router: Router::new(device)?,
            experts: match activations {
                ExpertActivations::Plain => ExpertKernels::Plain(Experts::new(device, expert_formats)?),
                ExpertActivations::Int8 => ExpertKernels::Int8(Int8Experts::new(device, expert_formats)?),
                ExpertActivations::Fp4 => ExpertKernels::Fp4(Fp4Experts::new(device, expert_formats)?),
            },
            sampler: Sampler::new(device)?,
            rules,
        })
    }

    /// Whether four-bit numbers are multiplied as such; `None` where there are none.
    pub(super) fn multiplies_fp4(&self) -> Option<bool> {
        match &self.experts {
            ExpertKernels::Fp4(experts) => Some(experts.is_native()),
            ExpertKernels::Plain(_) | ExpertKernels::Int8(_) => None,
        }
    }

    /// Queues a forward of the blocks in the workspace's input. Afterwards the normalised residual stream of all rows is
    /// in `h`, and the candidates of the first rows in `best_tokens` and `best_confidences`.
    ///
    /// # Safety
    /// The input names tokens of the vocabulary, pages of the pool and positions of the tables, for `shape.blocks`
    /// blocks that the workspace has room for.
    pub(super) unsafe fn queue(
        &self,
        memory: &Memory<'_>,
        shape: PassShape,
        look: &mut dyn Look,
    ) -> Result<(), CudaError> {
        let Memory { weights, workspace: w, .. } = *memory;
        let hidden = self.config.hidden_size;
        let rows = shape.blocks * BLOCK;
        let norm_shape = NormShape { rows, dim: hidden, eps: self.config.rms_norm_eps };
        let only_pages = !shape.is_whole && shape.candidates + shape.logits == 0;
        let last = weights.layers.len() - 1;
        // SAFETY: pointers into weights and workspace, whose lengths were planned for rows of this model, and into
        // input, pages and tables, whose contents the caller vouches for. This holds for every launch below.
        unsafe {
            self.attention.embed(w.x.pointer(), w.input.at(w.tokens_at()), weights.embedding, rows, hidden)?;
            look.look(None, Point::Embeddings, Seen::Bf16(&w.x, hidden))?;
            let first = weights.layers[0].input_norm;
            self.norm.residual_norm(w.x.pointer(), Pointer::null(), first, w.h.pointer(), norm_shape)?;
            for (index, layer) in weights.layers.iter().enumerate() {
                let is_end = only_pages && index == last;
                self.attend(memory, layer, index, shape, is_end, look)?;
                if is_end {
                    // Nobody reads what comes after the last keys and values.
                    return Ok(());
                }
                self.linear.bf16(w.y.pointer(), w.mixed.pointer(), &layer.dense, rows)?;
                self.norm.residual_norm(w.x.pointer(), w.y.pointer(), layer.post_norm, w.h.pointer(), norm_shape)?;
                look.look(Some(index), Point::Attention, Seen::Bf16(&w.x, hidden))?;
                let next = weights.layers.get(index + 1).map_or(weights.final_norm, |next| next.input_norm);
                match &layer.feed_forward {
                    FeedForward::Dense(Gated { gate_up, down }) => {
                        self.linear.gate_up(w.gated.pointer(), w.h.pointer(), gate_up, rows)?;
                        self.linear.bf16(w.y.pointer(), w.gated.pointer(), down, rows)?;
                        self.norm.residual_norm(w.x.pointer(), w.y.pointer(), next, w.h.pointer(), norm_shape)?;
                    }
                    FeedForward::Experts { router, bias, routed, shared, .. } => {
                        let experts = (router, *bias, routed, shared.as_ref());
                        let parts = self.experts(memory, experts, index, rows, look)?;
                        self.norm.combine_norm(w.x.pointer(), &parts, next, w.h.pointer(), norm_shape)?;
                    }
                }
                look.look(Some(index), Point::Hidden, Seen::Bf16(&w.x, hidden))?;
            }
            let tiles = self.config.vocab_size.div_ceil(VOCABULARY_TILE);
            let candidate_rows = shape.candidates * BLOCK;
            for first in (0..candidate_rows).step_by(w.head_rows) {
                let count = w.head_rows.min(candidate_rows - first);
                let best = w.tile_best();
                self.linear.head_best(&best, w.h.at(first * hidden), &weights.head, count)?;
                self.sampler.best_tokens(&w.row_best(first), &best, count, tiles)?;
            }
            if candidate_rows > 0 {
                let len = candidate_rows * CANDIDATES;
                w.best_tokens.download_async(0, &w.host_tokens, 0, len)?;
                w.best_confidences.download_async(0, &w.host_confidences, 0, len)?;
            }
        }
        Ok(())
    }

    /// Keys and values into the pages, and unless that is all, attention into `mixed`.
    ///
    /// # Safety
    /// As [`queue`](Self::queue).
    unsafe fn attend(
        &self,
        memory: &Memory<'_>,
        layer: &Layer,
        index: usize,
        shape: PassShape,
        only_pages: bool,
        look: &mut dyn Look,
    ) -> Result<(), CudaError> {
        let (w, heads, blocks) = (memory.workspace, heads(&self.config), shape.blocks);
        let of_layer = 2 * self.config.kv_elements_per_page();
        let pages = PagesOfLayer {
            first: memory.pages.at(index * of_layer),
            page_stride: (of_layer * self.config.num_hidden_layers) as u64,
        };
        let tables = BlockTables { blocks: w.input.pointer(), page_tables: w.input.at(w.tables_at()) };
        let transform = HeadTransform {
            query_norm: layer.query_norm,
            key_norm: layer.key_norm,
            rotations: memory.rotations.pointer(),
            eps: self.config.rms_norm_eps,
        };
        let (q, qkv, mixed) = (w.q.pointer(), w.qkv.pointer(), w.mixed.pointer());
        let scratch = (w.attention.0.pointer(), w.attention.1.pointer());
        // SAFETY: as in `queue`.
        unsafe {
            self.linear.bf16(qkv, w.h.pointer(), &layer.qkv, blocks * BLOCK)?;
            // Looked at are the kernels that do one thing each; this one gives the same bits.
            if !shape.is_whole && !only_pages && self.attention.takes_one(blocks) {
                return self.attention.attend_one(mixed, pages, qkv, &transform, tables, heads);
            }
            self.attention.norm_and_rope(q, pages, qkv, &transform, tables, blocks, heads)?;
            look.look(Some(index), Point::Key, Seen::Pages)?;
            if !only_pages {
                self.attention.attend(mixed, q, pages, tables, scratch, blocks, heads)?;
            }
        }
        Ok(())
    }

    /// Routes and runs the experts of a layer; their outputs are still to be summed.
    ///
    /// # Safety
    /// As [`queue`](Self::queue).
    unsafe fn experts(
        &self,
        memory: &Memory<'_>,
        (router, bias, routed, shared): (&Strips, Pointer<f32>, &Gated, Option<&Gated>),
        index: usize,
        rows: usize,
        look: &mut dyn Look,
    ) -> Result<Parts, CudaError> {
        let w = memory.workspace;
        let (experts, k) = (self.config.num_experts, self.config.num_experts_per_tok);
        let (slots, stride) = (rows * k, k + usize::from(shared.is_some()));
        let tile_rows = match &self.experts {
            ExpertKernels::Plain(kernels) => kernels.tile_rows(slots, experts),
            ExpertKernels::Int8(_) => Int8Experts::TILE_ROWS,
            ExpertKernels::Fp4(kernels) => kernels.tile_rows(slots, experts),
        };
        let choices = w.choices();
        let slots = Slots {
            choices: &choices,
            tiles_max: tiles_max(&self.rules, rows / BLOCK, experts, tile_rows),
            tile_rows,
            rows,
            experts_per_token: k,
        };
        let (h, gated) = (w.h.pointer(), w.gated.pointer());
        // SAFETY: as in `queue`.
        unsafe {
            self.linear.f32(w.router_logits.pointer(), h, router, rows)?;
            look.look(Some(index), Point::RouterLogits, Seen::F32(&w.router_logits, experts))?;
            let logits = w.router_logits.pointer();
            self.router.route(&choices, logits, bias, &self.rules, rows, experts, stride, tile_rows)?;
            look.look(Some(index), Point::RouterIds, Seen::U32(&w.ids, k))?;
            look.look(Some(index), Point::RouterWeights, Seen::F32(&w.weights, k))?;
            let (gate_up, down) = (shared.map(|gated| &gated.gate_up), shared.map(|gated| &gated.down));
            let parts = w.parts.pointer();
            match &self.experts {
                ExpertKernels::Plain(experts) => {
                    experts.gate_up(gated, h, &routed.gate_up, gate_up, &slots)?;
                    experts.down(parts, gated, &routed.down, down, &slots, stride)?;
                }
                ExpertKernels::Int8(experts) => {
                    let quantized = w.quantized();
                    experts.gate_up(gated, h, &routed.gate_up, gate_up, &slots, quantized)?;
                    experts.down(parts, gated, &routed.down, down, &slots, stride, quantized)?;
                }
                ExpertKernels::Fp4(experts) => {
                    let quantized = w.quantized();
                    experts.gate_up(gated, h, &routed.gate_up, gate_up, &slots, quantized)?;
                    experts.down(parts, gated, &routed.down, down, &slots, stride, quantized)?;
                }
            }
        }
        Ok(Parts { parts: w.parts.pointer(), weights: w.weights.pointer(), slots: k, stride })
    }
}
