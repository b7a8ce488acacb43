//! Everything a step writes besides pages: planned and allocated once, before the first request.

use half::bf16;
use minnow_common::{BLOCK, ModelConfig};
use minnow_kernels::cuda::{
    Attention, Buffer, Choices, CudaError, Device, Pinned, QuantizedRows, RowBest, TileBest, VOCABULARY_TILE, tiles_max,
};
use minnow_kernels::ops::{CANDIDATES, Heads, RouterRules};

use crate::model::ExpertActivations;

/// Rows whose candidates are found in one go: bounds what is kept of each tile of the vocabulary.
const HEAD_ROWS_MAX: usize = 2048;
/// No experts kernel takes fewer slots to a tile.
const TILE_ROWS_MIN: usize = 32;
/// Rows of logits that are in device memory at a time.
const LOGIT_ROWS_MAX: usize = BLOCK;

/// What a batch may be at most.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchLimits {
    /// Blocks of all segments.
    pub(super) blocks: usize,
    /// Entries of all page tables.
    pub(super) table_entries: usize,
    /// What enters the routed experts.
    pub(super) expert_activations: ExpertActivations,
}

/// Arrays of a step. `rows` is `32 * limits.blocks` throughout.
pub(super) struct Workspace {
    pub(super) limits: BatchLimits,
    /// Rows whose candidates are found in one go.
    pub(super) head_rows: usize,
    /// Rows of logits in device memory at a time.
    pub(super) logit_rows: usize,
    /// What the host hands over: `[blocks, 2]` block entries, `[rows]` tokens, then page tables.
    pub(super) input: Buffer<u32>,
    pub(super) host_input: Pinned<u32>,
    /// The residual stream, `[rows, hidden]`.
    pub(super) x: Buffer<bf16>,
    /// Its norm, `[rows, hidden]`.
    pub(super) h: Buffer<bf16>,
    /// What is added to it, `[rows, hidden]`.
    pub(super) y: Buffer<bf16>,
    /// `[rows, (heads + 2 kv_heads) * head_dim]`
    pub(super) qkv: Buffer<bf16>,
    /// `[rows, heads * head_dim]`
    pub(super) q: Buffer<bf16>,
    /// `[rows, heads * head_dim]`
    pub(super) mixed: Buffer<bf16>,
    /// Attention's partial sums and their weights.
    pub(super) attention: (Buffer<f32>, Buffer<f32>),
    /// Gated values: of the dense part `[rows, intermediate]`, of experts `[slots, inner]` and `[rows, shared inner]`.
    pub(super) gated: Buffer<bf16>,
    /// Quantized inputs of experts and their scales: of rows, then of slots. None where they are not quantized.
    quantized: (Buffer<u8>, Buffer<f32>),
    /// Outputs of experts, `[rows, stride, hidden]`.
    pub(super) parts: Buffer<bf16>,
    /// `[rows, experts]`
    pub(super) router_logits: Buffer<f32>,
    pub(super) ids: Buffer<u32>,
    pub(super) weights: Buffer<f32>,
    masks: Buffer<u32>,
    slot_rows: Buffer<u32>,
    slot_parts: Buffer<u32>,
    tiles: Buffer<[u32; 4]>,
    tile_count: Buffer<u32>,
    tile_tokens: Buffer<u32>,
    tile_logits: Buffer<f32>,
    tile_sums: Buffer<f32>,
    /// The best tokens of each row, `[rows, 4]` each.
    pub(super) best_tokens: Buffer<u32>,
    best_logits: Buffer<f32>,
    pub(super) best_confidences: Buffer<f32>,
    pub(super) host_tokens: Pinned<u32>,
    pub(super) host_confidences: Pinned<f32>,
    /// `[logit_rows, vocab]`
    pub(super) logits: Buffer<bf16>,
}

/// Lengths of the arrays, in elements.
struct Lengths {
    rows: usize,
    slots: usize,
    tiles: usize,
    head_rows: usize,
    logit_rows: usize,
    head_tiles: usize,
    gated: usize,
    parts: usize,
    attention: (usize, usize),
    quantized: usize,
}

/// Columns of the smallest group that has a scale.
const GROUP_MIN: usize = 32;

impl Lengths {
    fn new(config: &ModelConfig, limits: BatchLimits, attention: &Attention) -> Self {
        let rows = limits.blocks * BLOCK;
        let slots = rows * config.num_experts_per_tok;
        let of_experts = slots * config.moe_intermediate_size + rows * config.shared_intermediate_size();
        let stride = config.num_experts_per_tok + usize::from(config.num_shared_experts > 0);
        let widest = (rows * config.hidden_size).max(slots * config.moe_intermediate_size);
        Self {
            rows,
            slots,
            tiles: tiles_max(&rules(config), limits.blocks, config.num_experts, TILE_ROWS_MIN),
            head_rows: rows.min(HEAD_ROWS_MAX),
            logit_rows: rows.min(LOGIT_ROWS_MAX),
            head_tiles: config.vocab_size.div_ceil(VOCABULARY_TILE),
            gated: of_experts.max(rows * config.intermediate_size),
            parts: rows * stride * config.hidden_size,
            attention: attention.scratch_len(limits.blocks, heads(config)),
            quantized: match limits.expert_activations {
                ExpertActivations::Plain => 0,
                ExpertActivations::Int8 => widest,
                // Where a GPU does not multiply four-bit numbers, what they stand for is kept as BF16.
                ExpertActivations::Fp4 => size_of::<bf16>() * widest,
            },
        }
    }

    /// Bytes of device memory.
    fn bytes(&self, config: &ModelConfig, limits: BatchLimits) -> usize {
        let heads_width = config.num_attention_heads * config.head_dim;
        let of_row_bf16 = 3 * config.hidden_size + config.qkv_rows() + 2 * heads_width;
        let bf16s = self.rows * of_row_bf16 + self.gated + self.parts + self.logit_rows * config.vocab_size;
        let words = input_len(limits)
            + self.attention.0
            + self.attention.1
            + self.rows * config.num_experts
            + limits.blocks * config.num_experts
            + 4 * self.slots
            + 4 * self.tiles
            + self.quantized / GROUP_MIN
            + self.head_rows * self.head_tiles * (2 * CANDIDATES + 1)
            + 3 * self.rows * CANDIDATES;
        size_of::<bf16>() * bf16s + size_of::<u32>() * words + self.quantized
    }
}

/// The shape of attention.
pub(super) fn heads(config: &ModelConfig) -> Heads {
    Heads { query: config.num_attention_heads, kv: config.num_key_value_heads, dim: config.head_dim }
}

/// How experts are chosen.
pub(super) fn rules(config: &ModelConfig) -> RouterRules {
    RouterRules {
        routing: config.routing,
        experts_per_token: config.num_experts_per_tok,
        scale: config.routed_scaling_factor,
    }
}

fn input_len(limits: BatchLimits) -> usize {
    limits.blocks * (2 + BLOCK) + limits.table_entries
}

impl Workspace {
    /// Bytes of device memory that [`new`](Self::new) takes.
    pub(super) fn bytes(config: &ModelConfig, limits: BatchLimits, attention: &Attention) -> u64 {
        Lengths::new(config, limits, attention).bytes(config, limits) as u64
    }

    /// Allocates all arrays.
    pub(super) fn new(
        device: &Device,
        config: &ModelConfig,
        limits: BatchLimits,
        attention: &Attention,
    ) -> Result<Self, CudaError> {
        let len = Lengths::new(config, limits, attention);
        let heads_width = config.num_attention_heads * config.head_dim;
        Ok(Self {
            limits,
            head_rows: len.head_rows,
            logit_rows: len.logit_rows,
            input: device.zeroed(input_len(limits))?,
            host_input: device.pinned(input_len(limits))?,
            x: device.zeroed(len.rows * config.hidden_size)?,
            h: device.zeroed(len.rows * config.hidden_size)?,
            y: device.zeroed(len.rows * config.hidden_size)?,
            qkv: device.zeroed(len.rows * config.qkv_rows())?,
            q: device.zeroed(len.rows * heads_width)?,
            mixed: device.zeroed(len.rows * heads_width)?,
            attention: (device.zeroed(len.attention.0)?, device.zeroed(len.attention.1)?),
            gated: device.zeroed(len.gated)?,
            quantized: (device.zeroed(len.quantized)?, device.zeroed(len.quantized / GROUP_MIN)?),
            parts: device.zeroed(len.parts)?,
            router_logits: device.zeroed(len.rows * config.num_experts)?,
            ids: device.zeroed(len.slots)?,
            weights: device.zeroed(len.slots)?,
            masks: device.zeroed(limits.blocks * config.num_experts)?,
            slot_rows: device.zeroed(len.slots)?,
            slot_parts: device.zeroed(len.slots)?,
            tiles: device.zeroed(len.tiles)?,
            tile_count: device.zeroed(1)?,
            tile_tokens: device.zeroed(len.head_rows * len.head_tiles * CANDIDATES)?,
            tile_logits: device.zeroed(len.head_rows * len.head_tiles * CANDIDATES)?,
            tile_sums: device.zeroed(len.head_rows * len.head_tiles)?,
            best_tokens: device.zeroed(len.rows * CANDIDATES)?,
            best_logits: device.zeroed(len.rows * CANDIDATES)?,
            best_confidences: device.zeroed(len.rows * CANDIDATES)?,
            host_tokens: device.pinned(len.rows * CANDIDATES)?,
            host_confidences: device.pinned(len.rows * CANDIDATES)?,
            logits: device.zeroed(len.logit_rows * config.vocab_size)?,
        })
    }

    /// Where tokens begin in `input`.
    pub(super) fn tokens_at(&self) -> usize {
        2 * self.limits.blocks
    }

    /// Where page tables begin in `input`.
    pub(super) fn tables_at(&self) -> usize {
        self.limits.blocks * (2 + BLOCK)
    }

    /// Where quantized inputs of experts go; there is no room if they are not quantized.
    pub(super) fn quantized(&self) -> QuantizedRows {
        let (codes, scales) = &self.quantized;
        QuantizedRows { codes: codes.pointer(), scales: scales.pointer() }
    }

    /// Where the router's results go.
    pub(super) fn choices(&self) -> Choices {
        Choices {
            ids: self.ids.pointer(),
            weights: self.weights.pointer(),
            masks: self.masks.pointer(),
            slot_rows: self.slot_rows.pointer(),
            slot_parts: self.slot_parts.pointer(),
            tiles: self.tiles.pointer(),
            tile_count: self.tile_count.pointer(),
        }
    }

    /// Where the head keeps what it knows of each tile.
    pub(super) fn tile_best(&self) -> TileBest {
        TileBest {
            tokens: self.tile_tokens.pointer(),
            logits: self.tile_logits.pointer(),
            sums: self.tile_sums.pointer(),
        }
    }

    /// Where the candidates of the rows from `row` on go.
    pub(super) fn row_best(&self, row: usize) -> RowBest {
        RowBest {
            tokens: self.best_tokens.at(row * CANDIDATES),
            logits: self.best_logits.at(row * CANDIDATES),
            confidences: self.best_confidences.at(row * CANDIDATES),
        }
    }
}
