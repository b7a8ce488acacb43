//! `--device cuda`: the model on an NVIDIA GPU, over `kernels::cuda`.
//!
//! Weights, pages and workspace are planned against the free memory before anything is read, and allocated once. A
//! forward copies its input to the device, queues its kernels (as a graph, where the same shape comes again and again),
//! and waits once. A batch that the workspace has no room for goes through in several passes, cut between blocks; the
//! kernels' batch invariance makes that the same bits. Keys, values and activations are BF16.

mod load;
mod pass;
mod weights;
mod workspace;

use std::collections::BTreeMap;

use half::bf16;
use minnow_common::units::HumanBytes;
use minnow_common::{BLOCK, ModelConfig};
use minnow_formats::checkpoint::Checkpoint;
use minnow_kernels::cuda::{CudaError, Device, Fp4Experts, Graph};
use minnow_kernels::ops::CANDIDATES;
use minnow_kernels::{cuda, oracle};
use thiserror::Error;
use tracing::info;

use self::pass::{Blind, Kernels, Look, Memory, PassShape, Seen};
use self::weights::{DeviceWeights, FeedForward, Layout};
use self::workspace::{BatchLimits, Workspace};
use super::verify::{TOLERANCE_BF16, TOLERANCE_FP4};
use super::{
    Backend, Batch, Ceilings, ExpertActivations, KernelTime, Logits, ModelError, Need, Output, PageId, Point,
    PrefillBlocks, Probe,
};
use crate::decoder::{Candidate, Candidates};

pub use self::weights::LoadError;

/// Blocks of a prompt that go through the GPU together: enough rows that weights are read for many tokens at once.
const PREFILL_BLOCKS: usize = 128;
/// Blocks of a prompt beside streams that refine.
const PREFILL_BLOCKS_MIXED: usize = 32;
/// Device memory left to the driver: contexts, graphs, code.
const RESERVE_BYTES: u64 = 640 << 20;
/// Forwards that are not wholly refinement are recorded up to this many blocks.
const GRAPH_BLOCKS_MIXED: usize = 4;

/// What the backend is made for.
#[derive(Clone, Copy, Debug)]
pub struct CudaOptions {
    /// Which GPU.
    pub ordinal: usize,
    /// Requests that refine together.
    pub running_max: usize,
    /// Positions of one request.
    pub context: usize,
    /// Bytes for keys and values; `None`: what `running_max` requests of the full context need, or what is left.
    pub cache_max_bytes: Option<u64>,
    /// Whether payloads are compared with their digests.
    pub verifies: bool,
    /// What enters the routed experts.
    pub expert_activations: ExpertActivations,
}

/// Why a model does not run on a GPU.
#[derive(Debug, Error)]
pub enum StartError {
    /// The GPU is not there, or refused.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The weights cannot be used.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Not everything fits.
    #[error(
        "the model does not fit {device}: weights {}, workspace {} and keys and values of one request of {context} positions {} \
         are {}, but {} of GPU memory are usable; {hint}",
        HumanBytes(*weights), HumanBytes(*workspace), HumanBytes(*cache),
        HumanBytes(weights + workspace + cache), HumanBytes(*usable)
    )]
    Memory {
        /// The GPU.
        device: String,
        /// Bytes of weights.
        weights: u64,
        /// Bytes of the workspace.
        workspace: u64,
        /// Bytes of keys and values that one request needs.
        cache: u64,
        /// Positions of one request.
        context: usize,
        /// Free bytes less a reserve.
        usable: u64,
        /// What would help.
        hint: &'static str,
    },
    /// The memory allowed for keys and values does not hold one request.
    #[error("{} for keys and values do not hold one request of {context} positions, which needs {}", HumanBytes(*allowed), HumanBytes(*needed))]
    Cache {
        /// Bytes allowed.
        allowed: u64,
        /// Bytes one request needs.
        needed: u64,
        /// Positions of one request.
        context: usize,
    },
}

/// The model on a GPU.
pub struct Cuda {
    device: Device,
    kernels: Kernels,
    weights: DeviceWeights,
    workspace: Workspace,
    pages: cuda::Buffer<bf16>,
    page_count: usize,
    /// Which pages hold something.
    is_written: Vec<bool>,
    rotations: cuda::Buffer<bf16>,
    graphs: BTreeMap<PassShape, Graph>,
    /// Blocks up to which refinement is recorded.
    graph_blocks: usize,
    expert_activations: ExpertActivations,
}

/// Part of a segment in one pass.
#[derive(Clone, Copy, Debug)]
struct Piece {
    segment: usize,
    /// Index of its first block in the segment.
    first_block: usize,
    blocks: usize,
}

impl Cuda {
    /// Plans, loads and prepares everything.
    pub fn new(checkpoint: &Checkpoint, options: CudaOptions) -> Result<Self, StartError> {
        let config = checkpoint.config();
        let device = Device::open(options.ordinal)?;
        let has_fp4 = options.expert_activations == ExpertActivations::Fp4;
        let layout = Layout::new(checkpoint, has_fp4 && Fp4Experts::is_native_on(&device)?)?;
        let kernels = Kernels::new(&device, config, &layout.expert_formats(), options.expert_activations)?;
        let one_request = options.context.div_ceil(BLOCK);
        let blocks = PREFILL_BLOCKS.max(options.running_max + PREFILL_BLOCKS_MIXED);
        let limits =
            BatchLimits { blocks, table_entries: blocks * one_request, expert_activations: options.expert_activations };
        let workspace_bytes = Workspace::bytes(config, limits, &kernels.attention);
        let page_bytes = page_bytes(config) as u64;
        let needed = one_request as u64 * page_bytes;
        let usable = device.free_bytes()?.saturating_sub(RESERVE_BYTES);
        let fixed = layout.bytes() + workspace_bytes;
        if fixed + needed > usable {
            return Err(StartError::Memory {
                device: device.properties().name.clone(),
                weights: layout.bytes(),
                workspace: workspace_bytes,
                cache: needed,
                context: options.context,
                usable,
                hint: "lower --max-context or --parallel, or convert the experts to int8 or int4",
            });
        }
        let left = (usable - fixed) / page_bytes;
        let wanted = match options.cache_max_bytes {
            None => (one_request * options.running_max) as u64,
            Some(allowed) if allowed < needed => {
                return Err(StartError::Cache { allowed, needed, context: options.context });
            }
            Some(allowed) => allowed / page_bytes,
        };
        let page_count = wanted.min(left).min(u64::from(u32::MAX)) as usize;
        info!(
            "{}: {} of weights, {} of workspace for batches of {blocks} blocks, {} for keys and values of {page_count} blocks; {} stay free",
            device.properties().name,
            HumanBytes(layout.bytes()),
            HumanBytes(workspace_bytes),
            HumanBytes(page_count as u64 * page_bytes),
            HumanBytes(usable - fixed - page_count as u64 * page_bytes),
        );
        let pages = device.zeroed(page_count * page_bytes as usize / size_of::<bf16>())?;
        let workspace = Workspace::new(&device, config, limits, &kernels.attention)?;
        let positions = config.max_position_embeddings.min(page_count * BLOCK);
        let rotations = device.uploaded(&rotations(config, positions))?;
        let weights = DeviceWeights::load(&device, checkpoint, &layout, options.verifies)?;
        Ok(Self {
            device,
            kernels,
            weights,
            workspace,
            pages,
            page_count,
            is_written: vec![false; page_count],
            rotations,
            graphs: BTreeMap::new(),
            graph_blocks: options.running_max,
            expert_activations: options.expert_activations,
        })
    }

    /// The GPU.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What the description says behind the device: activations, and of four-bit ones also how they are multiplied, for that
    /// decides the bits.
    fn suffix(&self) -> String {
        let products = match self.kernels.multiplies_fp4() {
            None => "",
            Some(true) => " multiplied as fp4",
            Some(false) => " widened to bf16",
        };
        format!("{}{products}", self.expert_activations.suffix())
    }

    fn memory(&self) -> Memory<'_> {
        Memory { weights: &self.weights, workspace: &self.workspace, pages: &self.pages, rotations: &self.rotations }
    }

    /// One pass over `pieces`, those that need candidates first, then those that need logits. What they need is added to
    /// `outputs`.
    fn pass(
        &mut self,
        batch: &Batch<'_>,
        pieces: &[Piece],
        probe: Option<&mut dyn Probe>,
        outputs: &mut [Output],
    ) -> Result<(), CudaError> {
        let blocks_of = |need: Need| -> usize {
            pieces.iter().filter(|piece| batch.segments[piece.segment].need == need).map(|piece| piece.blocks).sum()
        };
        let (candidates, logits) = (blocks_of(Need::Candidates), blocks_of(Need::Logits));
        let blocks = candidates + logits + blocks_of(Need::Nothing);
        let shape = PassShape { blocks, candidates, logits, is_whole: probe.is_some() };
        let input_len = self.fill_input(batch, pieces);
        // SAFETY: the pinned input stays as it is until `synchronize` below.
        unsafe { self.workspace.input.upload_async(0, &self.workspace.host_input, 0, input_len) }?;
        match probe {
            Some(probe) => {
                let mut look = Show { cuda: self, batch, pieces, rows: blocks * BLOCK, probe };
                // SAFETY: `Batch::check` saw that tokens, pages and positions exist, and `passes` that they fit.
                unsafe { self.kernels.queue(&self.memory(), shape, &mut look) }?;
                look.logits(shape)?;
            }
            None => self.launch(shape)?,
        }
        self.device.synchronize()?;
        self.take_candidates(batch, pieces, outputs);
        self.take_logits(batch, pieces, candidates * BLOCK, outputs)
    }

    /// Queues a pass, as a graph if its shape is worth one.
    fn launch(&mut self, shape: PassShape) -> Result<(), CudaError> {
        let is_refinement = shape.candidates == shape.blocks;
        let blocks_max = if is_refinement { self.graph_blocks } else { self.graph_blocks.min(GRAPH_BLOCKS_MIXED) };
        if shape.blocks > blocks_max || shape.logits > 0 {
            // SAFETY: as in `pass`.
            return unsafe { self.kernels.queue(&self.memory(), shape, &mut Blind) };
        }
        if !self.graphs.contains_key(&shape) {
            // SAFETY: as in `pass`, for the input of each launch.
            let graph = self.device.capture(|| unsafe { self.kernels.queue(&self.memory(), shape, &mut Blind) })?;
            self.graphs.insert(shape, graph);
        }
        // SAFETY: weights, workspace and pages live as long as the graphs.
        unsafe { self.graphs[&shape].launch() }
    }

    /// Writes block entries, tokens and page tables into the pinned input; how long it is.
    fn fill_input(&mut self, batch: &Batch<'_>, pieces: &[Piece]) -> usize {
        let (tokens_at, tables_at) = (self.workspace.tokens_at(), self.workspace.tables_at());
        let input = self.workspace.host_input.values_mut();
        let (mut block, mut table) = (0, 0);
        for piece in pieces {
            let segment = &batch.segments[piece.segment];
            let before = segment.pages.len() - segment.blocks() + piece.first_block;
            for index in 0..piece.blocks {
                input[2 * block] = table as u32;
                input[2 * block + 1] = (before + index + 1) as u32;
                let tokens = &segment.tokens[(piece.first_block + index) * BLOCK..][..BLOCK];
                input[tokens_at + block * BLOCK..][..BLOCK].copy_from_slice(tokens);
                self.is_written[segment.pages[before + index].0 as usize] = true;
                block += 1;
            }
            for page in &segment.pages[..before + piece.blocks] {
                input[tables_at + table] = page.0;
                table += 1;
            }
        }
        tables_at + table
    }

    fn take_candidates(&self, batch: &Batch<'_>, pieces: &[Piece], outputs: &mut [Output]) {
        let tokens = self.workspace.host_tokens.values().as_chunks::<CANDIDATES>().0;
        let confidences = self.workspace.host_confidences.values().as_chunks::<CANDIDATES>().0;
        let mut rows = tokens.iter().zip(confidences);
        for piece in pieces.iter().filter(|piece| batch.segments[piece.segment].need == Need::Candidates) {
            let Output::Candidates(list) = &mut outputs[piece.segment] else { continue };
            list.extend(rows.by_ref().take(piece.blocks * BLOCK).map(|(tokens, confidences)| {
                let entry = |place| Candidate { token: tokens[place], confidence: confidences[place] };
                Candidates(std::array::from_fn(entry))
            }));
        }
    }

    /// Computes and takes the logits of the rows from `first_row` on, part by part.
    fn take_logits(
        &self,
        batch: &Batch<'_>,
        pieces: &[Piece],
        first_row: usize,
        outputs: &mut [Output],
    ) -> Result<(), CudaError> {
        let mut row = first_row;
        for piece in pieces.iter().filter(|piece| batch.segments[piece.segment].need == Need::Logits) {
            let values = self.logits(row, piece.blocks * BLOCK)?;
            row += piece.blocks * BLOCK;
            if let Output::Logits(logits) = &mut outputs[piece.segment] {
                logits.append(values);
            }
        }
        Ok(())
    }

    /// Logits of rows whose norms are in `h`: `[rows, vocab]`.
    fn logits(&self, first_row: usize, rows: usize) -> Result<Vec<f32>, CudaError> {
        let (config, w) = (&self.kernels.config, &self.workspace);
        let mut values = Vec::with_capacity(rows * config.vocab_size);
        let mut part = vec![bf16::ZERO; w.logit_rows.min(rows) * config.vocab_size];
        for first in (0..rows).step_by(w.logit_rows) {
            let count = w.logit_rows.min(rows - first);
            let h = w.h.at((first_row + first) * config.hidden_size);
            // SAFETY: rows of `h` that the pass has written, and room for `logit_rows` rows of logits.
            unsafe { self.kernels.linear.bf16(w.logits.pointer(), h, &self.weights.head, count) }?;
            let part = &mut part[..count * config.vocab_size];
            w.logits.download(0, part)?;
            values.extend(part.iter().map(|value| value.to_f32()));
        }
        Ok(values)
    }

    /// Bytes of one layer's keys and values in a page, in elements.
    fn page_elements(&self) -> usize {
        page_bytes(&self.kernels.config) / size_of::<bf16>()
    }
}

/// The batch cut into passes of at most `blocks_max` blocks, each with candidates first, then logits, then nothing. A
/// segment that is cut comes in order.
fn passes(batch: &Batch<'_>, blocks_max: usize) -> Vec<Vec<Piece>> {
    let mut passes: Vec<Vec<Piece>> = Vec::new();
    let mut room = 0;
    for need in [Need::Candidates, Need::Logits, Need::Nothing] {
        for (segment, part) in batch.segments.iter().enumerate().filter(|(_, part)| part.need == need) {
            let mut first_block = 0;
            while first_block < part.blocks() {
                if room == 0 {
                    passes.push(Vec::new());
                    room = blocks_max;
                }
                let blocks = room.min(part.blocks() - first_block);
                if let Some(pass) = passes.last_mut() {
                    pass.push(Piece { segment, first_block, blocks });
                }
                first_block += blocks;
                room -= blocks;
            }
        }
    }
    passes
}

/// Bytes of one page: BF16, `[layers, 2, kv_heads, 32, head_dim]`.
fn page_bytes(config: &ModelConfig) -> usize {
    2 * config.num_hidden_layers * config.kv_elements_per_page() * size_of::<bf16>()
}

/// Cosines and sines of all positions, `[positions, pairs, 2]`, rounded to BF16 as the model does.
fn rotations(config: &ModelConfig, positions: usize) -> Vec<bf16> {
    let frequencies = oracle::inv_freq(config.rope_theta, config.rotary_dim);
    let (mut cos, mut sin) = (vec![0.0; positions * frequencies.len()], vec![0.0; positions * frequencies.len()]);
    oracle::rope_tables(&mut cos, &mut sin, &frequencies, 0);
    cos.iter().zip(&sin).flat_map(|(&cos, &sin)| [bf16::from_f32(cos), bf16::from_f32(sin)]).collect()
}

impl Backend for Cuda {
    fn config(&self) -> &ModelConfig {
        &self.kernels.config
    }

    fn page_count(&self) -> usize {
        self.page_count
    }

    fn describe(&self) -> String {
        let properties = self.device.properties();
        let (major, minor) = properties.capability;
        format!("cuda ({}, sm_{major}{minor}{})", properties.name, self.suffix())
    }

    fn arithmetic(&self) -> String {
        let (major, minor) = self.device.properties().capability;
        format!("cuda sm_{major}{minor}{}", self.suffix())
    }

    fn tolerance(&self) -> f64 {
        if self.expert_activations == ExpertActivations::Fp4 { TOLERANCE_FP4 } else { TOLERANCE_BF16 }
    }

    fn ceilings(&self) -> Option<Ceilings> {
        let read_bytes_per_second = cuda::memory_ceilings(&self.device).ok()?.read;
        Some(Ceilings { read_bytes_per_second, flops_per_second: cuda::product_ceiling(&self.device).ok()? })
    }

    /// Kernels do not overlap meanwhile, and no graph is used.
    fn profile(&mut self, batch: &Batch<'_>) -> Result<Option<Vec<KernelTime>>, ModelError> {
        let (device, graph_blocks) = (self.device.clone(), std::mem::take(&mut self.graph_blocks));
        let times = device.profile(|| self.forward(batch, None).map(drop));
        self.graph_blocks = graph_blocks;
        let times = times?.into_iter();
        Ok(Some(times.map(|time| KernelTime { kernel: time.kernel.to_string(), seconds: time.seconds }).collect()))
    }

    fn page_bytes(&self) -> usize {
        page_bytes(&self.kernels.config)
    }

    fn prefill_blocks(&self) -> PrefillBlocks {
        PrefillBlocks { alone: PREFILL_BLOCKS, mixed: PREFILL_BLOCKS_MIXED }
    }

    fn export_page(&self, page: PageId, out: &mut [u8]) -> Result<(), ModelError> {
        self.check_page_size(out.len())?;
        let is_written = self.is_written.get(page.0 as usize).is_some_and(|&is_written| is_written);
        if !is_written {
            return Err(ModelError::PageEmpty { page: page.0, count: self.page_count });
        }
        let mut values = vec![bf16::ZERO; self.page_elements()];
        self.pages.download(page.0 as usize * values.len(), &mut values)?;
        for (bytes, value) in out.chunks_exact_mut(size_of::<bf16>()).zip(values) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
        Ok(())
    }

    fn import_page(&mut self, page: PageId, bytes: &[u8]) -> Result<(), ModelError> {
        self.check_page_size(bytes.len())?;
        let count = self.page_count;
        let is_written =
            self.is_written.get_mut(page.0 as usize).ok_or(ModelError::PageEmpty { page: page.0, count })?;
        *is_written = true;
        let values: Vec<bf16> = bytes.as_chunks().0.iter().map(|&raw| bf16::from_le_bytes(raw)).collect();
        self.pages.upload(page.0 as usize * values.len(), &values)?;
        Ok(())
    }

    fn forward(&mut self, batch: &Batch<'_>, mut probe: Option<&mut dyn Probe>) -> Result<Vec<Output>, ModelError> {
        batch.check(&self.kernels.config, self.page_count)?;
        let vocab = self.kernels.config.vocab_size;
        let empty = |need| match need {
            Need::Nothing => Output::Nothing,
            Need::Candidates => Output::Candidates(Vec::new()),
            Need::Logits => Output::Logits(Logits::new(vocab, Vec::new())),
        };
        let mut outputs: Vec<Output> = batch.segments.iter().map(|segment| empty(segment.need)).collect();
        for pieces in passes(batch, self.workspace.limits.blocks) {
            let probe = probe.as_mut().map(|probe| &mut **probe as &mut dyn Probe);
            self.pass(batch, &pieces, probe, &mut outputs)?;
        }
        Ok(outputs)
    }
}

impl Cuda {
    fn check_page_size(&self, found: usize) -> Result<(), ModelError> {
        let expected = self.page_bytes();
        if found == expected { Ok(()) } else { Err(ModelError::PageSize { found, expected }) }
    }
}

/// Shows values to a probe while a forward is queued, each after waiting for it.
struct Show<'a> {
    cuda: &'a Cuda,
    batch: &'a Batch<'a>,
    pieces: &'a [Piece],
    rows: usize,
    probe: &'a mut dyn Probe,
}

impl Show<'_> {
    /// Passes each piece's part of `values: [rows, width]` on.
    fn record(&mut self, layer: Option<usize>, point: Point, width: usize, values: &[f32]) {
        let mut row = 0;
        for piece in self.pieces {
            let rows = piece.blocks * BLOCK;
            let is_wanted = self.batch.segments[piece.segment].need != Need::Nothing
                || !matches!(point, Point::Normalized | Point::Logits);
            if is_wanted {
                self.probe.record(piece.segment, layer, point, [rows, width], &values[row * width..][..rows * width]);
            }
            row += rows;
        }
    }

    /// Keys and values of a layer, a row a position.
    fn pages(&mut self, layer: usize) -> Result<(), CudaError> {
        let config = &self.cuda.kernels.config;
        let (heads, dim, elements) = (config.num_key_value_heads, config.head_dim, config.kv_elements_per_page());
        let width = heads * dim;
        let (mut keys, mut values) = (Vec::with_capacity(self.rows * width), Vec::with_capacity(self.rows * width));
        let mut page_values = vec![bf16::ZERO; 2 * elements];
        for piece in self.pieces {
            let segment = &self.batch.segments[piece.segment];
            let first = segment.pages.len() - segment.blocks() + piece.first_block;
            for page in &segment.pages[first..first + piece.blocks] {
                let start = page.0 as usize * self.cuda.page_elements() + layer * 2 * elements;
                self.cuda.pages.download(start, &mut page_values)?;
                for (rows, of_page) in [&mut keys, &mut values].into_iter().zip(page_values.chunks_exact(elements)) {
                    for row in 0..BLOCK {
                        let head = |head| of_page[(head * BLOCK + row) * dim..][..dim].iter();
                        rows.extend((0..heads).flat_map(head).map(|value| value.to_f32()));
                    }
                }
            }
        }
        self.record(Some(layer), Point::Key, width, &keys);
        self.record(Some(layer), Point::Value, width, &values);
        Ok(())
    }

    /// The final norm, and logits of all rows that need candidates or logits.
    fn logits(&mut self, shape: PassShape) -> Result<(), CudaError> {
        let config = &self.cuda.kernels.config;
        let width = config.hidden_size;
        let mut h = vec![bf16::ZERO; self.rows * width];
        self.cuda.workspace.h.download(0, &mut h)?;
        let h: Vec<f32> = h.iter().map(|value| value.to_f32()).collect();
        self.record(None, Point::Normalized, width, &h);
        let mut logits = self.cuda.logits(0, (shape.candidates + shape.logits) * BLOCK)?;
        logits.resize(self.rows * config.vocab_size, 0.0);
        self.record(None, Point::Logits, config.vocab_size, &logits);
        Ok(())
    }
}

impl Look for Show<'_> {
    fn look(&mut self, layer: Option<usize>, point: Point, value: Seen<'_>) -> Result<(), CudaError> {
        let rows = self.rows;
        let (width, values): (usize, Vec<f32>) = match value {
            Seen::Pages => return self.pages(layer.unwrap_or_default()),
            Seen::Bf16(buffer, width) => {
                let mut values = vec![bf16::ZERO; rows * width];
                buffer.download(0, &mut values)?;
                (width, values.iter().map(|value| value.to_f32()).collect())
            }
            Seen::F32(buffer, width) => {
                let mut values = vec![0.0; rows * width];
                buffer.download(0, &mut values)?;
                (width, values)
            }
            Seen::U32(buffer, width) => {
                let mut values = vec![0; rows * width];
                buffer.download(0, &mut values)?;
                (width, values.iter().map(|&value| value as f32).collect())
            }
        };
        self.record(layer, point, width, &values);
        if let (Point::RouterLogits, Some(index)) = (point, layer)
            && let FeedForward::Experts { host_bias, .. } = &self.cuda.weights.layers[index].feed_forward
        {
            let mut scores = values;
            oracle::sigmoid(&mut scores);
            for row in scores.chunks_exact_mut(width) {
                row.iter_mut().zip(host_bias).for_each(|(score, bias)| *score += bias);
            }
            self.record(layer, Point::RouterScores, width, &scores);
        }
        Ok(())
    }
}
