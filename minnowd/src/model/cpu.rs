//! `--device cpu`: the model over `kernels::cpu`, with weights used as they are stored.
//!
//! All segments of a batch go through a layer together, so that each weight is read and decoded once for all of them;
//! only attention looks at one segment at a time, and the router at one block at a time. That the result for a row is
//! the same bits whatever is beside it is a promise of the kernels ("Batch invariance" in `kernels::ops`). Keys and
//! values are kept as the instruction set's attention reads them, and a page's memory is taken when it is first written.

use std::ops::Range;

use minnow_common::{BLOCK, ModelConfig};
use minnow_kernels::cpu::{self, Expert, HeadNorm, Isa, KvBlock, KvRows};
use minnow_kernels::ops::{self, Heads, RouterRules};
use minnow_kernels::{codec, oracle};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::verify::{TOLERANCE_BF16, TOLERANCE_F32, TOLERANCE_FP4};
use super::{
    Backend, Batch, Ceilings, ExpertActivations, Logits, ModelError, Need, Output, PageId, Point, Probe, Recorder,
    Segment, check_fp4_experts,
};
use crate::decoder::{Candidate, Candidates};
use crate::weights::{Experts, FeedForward, Gated, HeadNorms, Layer, Stored, Weights};

/// The model on this machine's cores.
pub struct Cpu {
    weights: Weights,
    isa: Isa,
    expert_activations: ExpertActivations,
    threads: ThreadPool,
    /// Rotary frequencies, `[rotary_dim / 2]`.
    frequencies: Vec<f32>,
    workspace: Workspace,
    /// K and V of blocks; `None` until first written.
    pages: Vec<Option<KvBlock>>,
}

/// A segment's share of the arrays of a forward.
struct Part<'a> {
    segment: &'a Segment<'a>,
    rows: Range<usize>,
}

/// Cosines and sines of the positions of all rows of a forward, `[rows, rotary_dim / 2]` each.
struct Angles {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Cpu {
    /// A backend with room for the K/V of `page_count` blocks. `threads`: one for each physical core by default.
    /// `isa`: the best this machine has by default, and never better than what it has.
    pub fn new(
        weights: Weights,
        page_count: usize,
        threads: Option<usize>,
        isa: Option<Isa>,
    ) -> Result<Self, ModelError> {
        let threads = threads.unwrap_or_else(physical_cores);
        let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(|index| format!("cpu-{index}")).build();
        Ok(Self {
            isa: Isa::detect_up_to(isa),
            expert_activations: ExpertActivations::Plain,
            threads: pool.map_err(|error| ModelError::Threads { threads, message: error.to_string() })?,
            frequencies: oracle::inv_freq(weights.config.rope_theta, weights.config.rotary_dim),
            workspace: Workspace::default(),
            pages: vec![None; page_count],
            weights,
        })
    }
}

impl Cpu {
    /// The same backend with these activations. Refused where the experts are not stored for them.
    pub fn with_expert_activations(self, activations: ExpertActivations) -> Result<Self, ModelError> {
        match activations {
            ExpertActivations::Plain => {}
            ExpertActivations::Int8 => {
                let fits = |matrix: &&Stored| cpu::has_int8_experts(&matrix.view());
                if let Some(matrix) = self.weights.routed_experts().find(|matrix| !fits(matrix)) {
                    return Err(ModelError::Int8Experts { tensor: matrix.name.clone() });
                }
            }
            ExpertActivations::Fp4 => check_fp4_experts(&self.weights)?,
        }
        Ok(Self { expert_activations: activations, ..self })
    }

    /// Bytes of K and V of a block on the instruction set that a backend would choose.
    #[must_use]
    pub fn bytes_a_page(config: &ModelConfig, isa: Option<Isa>) -> usize {
        KvBlock::bytes(Isa::detect_up_to(isa), heads(config), config.num_hidden_layers)
    }

    /// Refuses a buffer that is not as long as a page.
    fn check_page(&self, found: usize) -> Result<(), ModelError> {
        let expected = self.page_bytes();
        if found == expected { Ok(()) } else { Err(ModelError::PageSize { found, expected }) }
    }
}

impl Backend for Cpu {
    fn config(&self) -> &ModelConfig {
        &self.weights.config
    }

    fn page_count(&self) -> usize {
        self.pages.len()
    }

    fn describe(&self) -> String {
        let threads = self.threads.current_num_threads();
        let plural = if threads == 1 { "" } else { "s" };
        format!("cpu ({}, {threads} thread{plural}{})", self.isa, self.expert_activations.suffix())
    }

    fn arithmetic(&self) -> String {
        format!("cpu {}{}", self.isa, self.expert_activations.suffix())
    }

    fn tolerance(&self) -> f64 {
        match self.expert_activations {
            ExpertActivations::Fp4 => TOLERANCE_FP4,
            ExpertActivations::Int8 => TOLERANCE_BF16,
            ExpertActivations::Plain if self.isa.rounds_to_bf16() => TOLERANCE_BF16,
            ExpertActivations::Plain => TOLERANCE_F32,
        }
    }

    fn ceilings(&self) -> Option<Ceilings> {
        Some(self.threads.install(|| Ceilings {
            read_bytes_per_second: cpu::read_bandwidth(self.isa),
            flops_per_second: cpu::multiply_rate(self.isa),
        }))
    }

    fn page_bytes(&self) -> usize {
        Self::bytes_a_page(&self.weights.config, Some(self.isa))
    }

    fn export_page(&self, page: PageId, out: &mut [u8]) -> Result<(), ModelError> {
        self.check_page(out.len())?;
        let block = self.pages.get(page.0 as usize).and_then(Option::as_ref);
        block.ok_or(ModelError::PageEmpty { page: page.0, count: self.pages.len() })?.export(out);
        Ok(())
    }

    fn import_page(&mut self, page: PageId, bytes: &[u8]) -> Result<(), ModelError> {
        self.check_page(bytes.len())?;
        let count = self.pages.len();
        let block = self.pages.get_mut(page.0 as usize).ok_or(ModelError::PageEmpty { page: page.0, count })?;
        let config = &self.weights.config;
        block.get_or_insert_with(|| KvBlock::new(self.isa, heads(config), config.num_hidden_layers)).import(bytes);
        Ok(())
    }

    fn forward(&mut self, batch: &Batch<'_>, probe: Option<&mut dyn Probe>) -> Result<Vec<Output>, ModelError> {
        let Self { weights, isa, expert_activations, threads, frequencies, workspace, pages } = self;
        batch.check(&weights.config, pages.len())?;
        let config = &weights.config;
        for page in batch.segments.iter().flat_map(|segment| segment.pages) {
            let new = || KvBlock::new(*isa, heads(config), config.num_hidden_layers);
            pages[page.0 as usize].get_or_insert_with(new);
        }
        let pass = Pass { config, isa: *isa, expert_activations: *expert_activations, frequencies };
        Ok(threads.install(|| pass.run(weights, batch, pages, workspace, &mut Recorder(probe))))
    }
}

/// Arrays of a forward, as long as its rows ask for, kept for the next: fresh pages cost more than what most of them are
/// needed for. They hold anything at first.
#[derive(Default)]
struct Workspace {
    /// The residual stream, its normalised form, and what a part of a layer adds to it: `[rows, hidden]`.
    x: Vec<f32>,
    h: Vec<f32>,
    y: Vec<f32>,
    /// `[rows, qkv rows]`
    qkv: Vec<f32>,
    /// `[rows, heads * head_dim]`
    mixed: Vec<f32>,
    experts: ExpertsWorkspace,
}

/// The part of it that feed-forward parts use.
#[derive(Default)]
struct ExpertsWorkspace {
    /// `[rows, experts]`
    scores: Vec<f32>,
    /// `[rows, hidden]`
    shared: Vec<f32>,
    gated: cpu::GatedScratch,
}

impl Workspace {
    fn resize(&mut self, rows: usize, config: &ModelConfig) {
        for array in [&mut self.x, &mut self.h, &mut self.y] {
            array.resize(rows * config.hidden_size, 0.0);
        }
        self.qkv.resize(rows * config.qkv_rows(), 0.0);
        self.mixed.resize(rows * config.num_attention_heads * config.head_dim, 0.0);
    }
}

/// What stays the same throughout one forward.
struct Pass<'a> {
    config: &'a ModelConfig,
    isa: Isa,
    expert_activations: ExpertActivations,
    frequencies: &'a [f32],
}

impl Pass<'_> {
    fn run(
        &self,
        weights: &Weights,
        batch: &Batch<'_>,
        pages: &mut [Option<KvBlock>],
        workspace: &mut Workspace,
        probe: &mut Recorder<'_>,
    ) -> Vec<Output> {
        let config = self.config;
        let starts = batch.segments.iter().scan(0, |end, segment| {
            *end += segment.tokens.len();
            Some(*end - segment.tokens.len())
        });
        let part = |(segment, start)| Part { segment, rows: start..start + segment.tokens.len() };
        let parts: Vec<Part<'_>> = batch.segments.iter().zip(starts).map(part).collect();
        let angles = self.angles(&parts);
        workspace.resize(batch.segments.iter().map(|segment| segment.tokens.len()).sum(), config);
        let Workspace { x, h, y, qkv, mixed, experts: of_experts } = workspace;
        self.embed(x, weights, &parts);
        self.record(probe, &parts, None, Point::Embeddings, x);

        let only_pages = !probe.is_active() && parts.iter().all(|part| part.segment.need == Need::Nothing);
        for (index, layer) in weights.layers.iter().enumerate() {
            if index == 0 {
                cpu::rms_norm(self.isa, h, x, &layer.input_norm, config.rms_norm_eps);
            } else {
                cpu::add_and_norm(self.isa, h, x, y, &layer.input_norm, config.rms_norm_eps);
                self.record(probe, &parts, Some(index - 1), Point::Hidden, x);
            }
            self.keys_and_values(qkv, h, layer, index, &parts, &angles, pages, probe);
            if only_pages && index + 1 == weights.layers.len() {
                // Nobody reads what comes after the last keys and values.
                y.fill(0.0);
                break;
            }
            self.attention(y, mixed, qkv, layer, index, &parts, pages);
            cpu::add_and_norm(self.isa, h, x, y, &layer.post_norm, config.rms_norm_eps);
            self.record(probe, &parts, Some(index), Point::Attention, x);

            match &layer.feed_forward {
                FeedForward::Dense(gated) => cpu::feed_forward(self.isa, y, h, &expert(gated), &mut of_experts.gated),
                FeedForward::Experts(experts) => self.experts(y, h, experts, index, &parts, of_experts, probe),
            }
        }
        cpu::add(self.isa, x, y);
        if let Some(last) = weights.layers.len().checked_sub(1) {
            self.record(probe, &parts, Some(last), Point::Hidden, x);
        }
        let mut best = self.candidates(weights, x, &parts, probe).into_iter();
        let output = |(index, part): (usize, &Part<'_>)| {
            if part.segment.need == Need::Candidates && !probe.is_active() {
                return Output::Candidates(best.by_ref().take(part.rows.len()).collect());
            }
            self.output(weights, x, index, part, probe)
        };
        parts.iter().enumerate().map(output).collect()
    }

    /// Candidates of all rows that want them, in order, so that the head is read once. None with a probe, which sees
    /// whole logits instead.
    fn candidates(&self, weights: &Weights, x: &[f32], parts: &[Part<'_>], probe: &Recorder<'_>) -> Vec<Candidates> {
        let hidden = self.config.hidden_size;
        let wanting = parts.iter().filter(|part| part.segment.need == Need::Candidates && !probe.is_active());
        let x: Vec<f32> =
            wanting.flat_map(|part| &x[part.rows.start * hidden..part.rows.end * hidden]).copied().collect();
        let mut normalised = vec![0.0; x.len()];
        cpu::rms_norm(self.isa, &mut normalised, &x, &weights.final_norm, self.config.rms_norm_eps);
        let mut best = vec![[ops::Candidate::default(); ops::CANDIDATES]; x.len() / hidden];
        cpu::head_candidates(self.isa, &mut best, &normalised, &weights.head.view());
        best.into_iter().map(candidates).collect()
    }

    /// Angles by which the heads of each row are rotated.
    fn angles(&self, parts: &[Part<'_>]) -> Angles {
        let width = self.frequencies.len();
        let first_of_blocks = |part: &Part<'_>| {
            let first = part.segment.first_position();
            (first..first + part.rows.len()).step_by(BLOCK)
        };
        let firsts: Vec<usize> = parts.iter().flat_map(first_of_blocks).collect();
        let block = BLOCK * width;
        let (mut cos, mut sin) = (vec![0.0; firsts.len() * block], vec![0.0; firsts.len() * block]);
        let tables = cos.par_chunks_exact_mut(block).zip(sin.par_chunks_exact_mut(block));
        tables.zip(firsts).for_each(|((cos, sin), first)| oracle::rope_tables(cos, sin, self.frequencies, first));
        Angles { cos, sin }
    }

    /// Embedding rows of all tokens, into `x: [rows, hidden]`.
    fn embed(&self, x: &mut [f32], weights: &Weights, parts: &[Part<'_>]) {
        let embedding = weights.embedding.view();
        let tokens = parts.iter().flat_map(|part| part.segment.tokens);
        for (row, &token) in x.chunks_exact_mut(self.config.hidden_size).zip(tokens) {
            codec::decode_rows(&embedding, token as usize, row);
        }
    }

    /// Projects `h: [rows, hidden]`, normalised, into `qkv: [rows, qkv rows]`, prepares queries and keys for attention,
    /// and writes keys and values into the pages.
    #[expect(clippy::too_many_arguments, reason = "one step of a forward, called in one place")]
    fn keys_and_values(
        &self,
        qkv: &mut [f32],
        h: &[f32],
        layer: &Layer,
        index: usize,
        parts: &[Part<'_>],
        angles: &Angles,
        pages: &mut [Option<KvBlock>],
        probe: &mut Recorder<'_>,
    ) {
        let (config, heads) = (self.config, heads(self.config));
        let stride = config.qkv_rows();
        cpu::linear(self.isa, qkv, h, &layer.qkv.view());
        let norm =
            layer.head_norms.as_ref().map(|HeadNorms { query, key }| HeadNorm { query, key, eps: config.rms_norm_eps });
        cpu::prepare_heads(self.isa, qkv, stride, heads, norm, &angles.cos, &angles.sin);
        let keys_at = heads.query * heads.dim;
        let values_at = keys_at + heads.kv * heads.dim;
        let mut written: Vec<(PageId, KvRows<'_>)> = Vec::new();
        for part in parts {
            for (block, page) in part.written_pages() {
                let rows = &qkv[(part.rows.start + block * BLOCK) * stride..][..BLOCK * stride];
                written.push((page, KvRows { rows, stride, keys_at, values_at }));
            }
        }
        written.sort_unstable_by_key(|(page, _)| *page);
        let (mut rest, mut first) = (pages, 0);
        let mut tasks = Vec::with_capacity(written.len());
        for (id, rows) in written {
            let (page, others) = rest[id.0 as usize - first..].split_first_mut().expect("pages are checked");
            (rest, first) = (others, id.0 as usize + 1);
            tasks.push((page.as_mut().expect("pages are made before the first layer"), rows));
        }
        tasks.into_par_iter().for_each(|(page, rows)| page.write(self.isa, index, rows));
        if probe.is_active() {
            let columns = |from: usize| -> Vec<f32> {
                qkv.chunks_exact(stride).flat_map(|row| &row[from..from + heads.kv * heads.dim]).copied().collect()
            };
            self.record(probe, parts, Some(index), Point::Key, &columns(keys_at));
            self.record(probe, parts, Some(index), Point::Value, &columns(values_at));
        }
    }

    /// Attention of every segment over its own pages, into `mixed: [rows, heads * head_dim]`, projected into
    /// `out: [rows, hidden]`.
    #[expect(clippy::too_many_arguments, reason = "one step of a forward, called in one place")]
    fn attention(
        &self,
        out: &mut [f32],
        mixed: &mut [f32],
        qkv: &[f32],
        layer: &Layer,
        index: usize,
        parts: &[Part<'_>],
        pages: &[Option<KvBlock>],
    ) {
        let (heads, stride) = (heads(self.config), self.config.qkv_rows());
        let width = heads.query * heads.dim;
        let mut rest = &mut *mixed;
        let mut tasks = Vec::with_capacity(parts.len());
        for part in parts {
            let (of_part, others) = rest.split_at_mut(part.rows.len() * width);
            rest = others;
            tasks.push((part, of_part));
        }
        tasks.into_par_iter().for_each(|(part, mixed)| {
            let seen = part
                .segment
                .pages
                .iter()
                .map(|page| pages[page.0 as usize].as_ref().expect("pages are made before the first layer"));
            let seen: Vec<&KvBlock> = seen.collect();
            let q = &qkv[part.rows.start * stride..part.rows.end * stride];
            cpu::attend(self.isa, mixed, q, stride, &seen, index, heads);
        });
        cpu::linear(self.isa, out, mixed, &layer.dense.view());
    }

    /// Routed and shared experts of `h: [rows, hidden]`, into `out: [rows, hidden]`.
    #[expect(clippy::too_many_arguments, reason = "one step of a forward, called in one place")]
    fn experts(
        &self,
        out: &mut [f32],
        h: &[f32],
        experts: &Experts,
        index: usize,
        parts: &[Part<'_>],
        workspace: &mut ExpertsWorkspace,
        probe: &mut Recorder<'_>,
    ) {
        let config = self.config;
        let rows = h.len() / config.hidden_size;
        let ExpertsWorkspace { scores, shared: of_shared, gated } = workspace;
        scores.resize(rows * config.num_experts, 0.0);
        cpu::linear_f32(self.isa, scores, h, &experts.router.view());
        self.record(probe, parts, Some(index), Point::RouterLogits, scores);
        cpu::sigmoid(self.isa, scores);

        let mut ids = vec![0; rows * config.num_experts_per_tok];
        let mut weights = vec![0.0; ids.len()];
        let rules = RouterRules {
            routing: config.routing,
            experts_per_token: config.num_experts_per_tok,
            scale: config.routed_scaling_factor,
        };
        cpu::route(&mut ids, &mut weights, scores, &experts.bias, &rules);
        if probe.is_active() {
            for row in scores.chunks_exact_mut(config.num_experts) {
                row.iter_mut().zip(&experts.bias).for_each(|(score, bias)| *score += bias);
            }
            self.record(probe, parts, Some(index), Point::RouterScores, scores);
            let whole: Vec<f32> = ids.iter().map(|&id| id as f32).collect();
            self.record(probe, parts, Some(index), Point::RouterIds, &whole);
            self.record(probe, parts, Some(index), Point::RouterWeights, &weights);
        }
        let routed = |id: u32| expert(&experts.routed[id as usize]);
        let (isa, hidden) = (self.isa, config.hidden_size);
        match self.expert_activations {
            ExpertActivations::Plain => cpu::experts(isa, out, h, &ids, &weights, hidden, routed),
            ExpertActivations::Int8 => cpu::experts_int8(isa, out, h, &ids, &weights, hidden, routed),
            ExpertActivations::Fp4 => cpu::experts_fp4(isa, out, h, &ids, &weights, hidden, routed),
        }
        if let Some(shared) = &experts.shared {
            of_shared.resize(out.len(), 0.0);
            cpu::feed_forward(self.isa, of_shared, h, &expert(shared), gated);
            cpu::add(self.isa, out, of_shared);
        }
    }

    /// What one segment asked for, from `x: [rows, hidden]` after all layers.
    fn output(&self, weights: &Weights, x: &[f32], index: usize, part: &Part<'_>, probe: &mut Recorder<'_>) -> Output {
        let config = self.config;
        if part.segment.need == Need::Nothing {
            return Output::Nothing;
        }
        let x = &x[part.rows.start * config.hidden_size..part.rows.end * config.hidden_size];
        let mut normalised = vec![0.0; x.len()];
        cpu::rms_norm(self.isa, &mut normalised, x, &weights.final_norm, config.rms_norm_eps);
        probe.record(index, None, Point::Normalized, config.hidden_size, &normalised);
        let head = weights.head.view();
        let mut logits = vec![0.0; part.rows.len() * config.vocab_size];
        cpu::linear(self.isa, &mut logits, &normalised, &head);
        probe.record(index, None, Point::Logits, config.vocab_size, &logits);
        let logits = Logits::new(config.vocab_size, logits);
        match part.segment.need {
            Need::Candidates => {
                Output::Candidates(logits.rows().map(|row| candidates(cpu::candidates(self.isa, row))).collect())
            }
            _ => Output::Logits(logits),
        }
    }

    /// Passes each segment's part of `values: [rows, any width]` to the probe.
    fn record(&self, probe: &mut Recorder<'_>, parts: &[Part<'_>], layer: Option<usize>, point: Point, values: &[f32]) {
        let Some(last) = parts.last().filter(|_| probe.is_active()) else { return };
        let width = values.len() / last.rows.end;
        for (segment, part) in parts.iter().enumerate() {
            let of_part = &values[part.rows.start * width..part.rows.end * width];
            probe.record(segment, layer, point, width, of_part);
        }
    }
}

impl Part<'_> {
    /// The pages this segment writes, with the index of their block in the segment.
    fn written_pages(&self) -> impl Iterator<Item = (usize, PageId)> {
        let Segment { pages, .. } = self.segment;
        pages[pages.len() - self.segment.blocks()..].iter().copied().enumerate()
    }
}

fn expert(gated: &Gated) -> Expert<'_> {
    Expert { gate: gated.gate.view(), up: gated.up.view(), down: gated.down.view() }
}

/// Shape of attention.
fn heads(config: &ModelConfig) -> Heads {
    Heads { query: config.num_attention_heads, kv: config.num_key_value_heads, dim: config.head_dim }
}

fn candidates(best: [ops::Candidate; ops::CANDIDATES]) -> Candidates {
    Candidates(best.map(|ops::Candidate { token, confidence, .. }| Candidate { token, confidence }))
}

/// Cores this process may use, hyper-threads of one core counted once: two threads of a core share its vector units.
fn physical_cores() -> usize {
    let available = std::thread::available_parallelism().map_or(1, usize::from);
    let siblings = |cpu: usize| {
        std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")).ok()
    };
    let cores: std::collections::HashSet<String> = (0..).map_while(siblings).collect();
    // Where the kernel does not tell, or tells of more than we may use.
    if cores.is_empty() { available } else { available.min(cores.len()) }
}
