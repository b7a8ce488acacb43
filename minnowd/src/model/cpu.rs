//! `--device cpu`: the model over `kernels::cpu`, with weights used as they are stored.
//!
//! All segments of a batch go through a layer together, so that each weight is read and decoded once for all of them;
//! only attention looks at one segment at a time, and the router at one block at a time. That the result for a row is
//! the same bits whatever is beside it is a promise of the kernels ("Batch invariance" in `kernels::ops`). Keys and
//! values are f32; a page's memory is taken when it is first written.

use std::ops::Range;

use minnow_common::{BLOCK, ModelConfig};
use minnow_kernels::cpu::{self, Expert, Isa};
use minnow_kernels::ops::{self, Heads, RouterRules};
use minnow_kernels::{codec, oracle};
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::{
    Backend, Batch, Logits, ModelError, Need, Output, PageId, Point, Probe, Recorder, Segment, check_page_size,
    read_values, write_values,
};
use crate::decoder::{Candidate, Candidates};
use crate::weights::{Experts, FeedForward, Gated, HeadNorms, Layer, Weights};

/// The model on this machine's cores.
pub struct Cpu {
    weights: Weights,
    isa: Isa,
    threads: ThreadPool,
    /// Rotary frequencies, `[rotary_dim / 2]`.
    frequencies: Vec<f32>,
    pages: Vec<PageStore>,
}

/// K and V of one block in every layer: `[layers, 2, kv_heads, 32, head_dim]`, K first; empty until first written.
#[derive(Clone, Default)]
struct PageStore(Vec<f32>);

/// A segment's share of the arrays of a forward.
struct Part<'a> {
    segment: &'a Segment<'a>,
    rows: Range<usize>,
    /// Cosines and sines of its positions, `[rows, rotary_dim / 2]` each.
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
            threads: pool.map_err(|error| ModelError::Threads { threads, message: error.to_string() })?,
            frequencies: oracle::inv_freq(weights.config.rope_theta, weights.config.rotary_dim),
            pages: vec![PageStore::default(); page_count],
            weights,
        })
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
        format!("cpu ({}, {threads} thread{})", self.isa, if threads == 1 { "" } else { "s" })
    }

    fn arithmetic(&self) -> String {
        format!("cpu {}", self.isa)
    }

    fn page_bytes(&self) -> usize {
        super::page_bytes(&self.weights.config)
    }

    fn export_page(&self, page: PageId, out: &mut [u8]) -> Result<(), ModelError> {
        check_page_size(&self.weights.config, out.len())?;
        let store = self.pages.get(page.0 as usize).filter(|store| !store.0.is_empty());
        let store = store.ok_or(ModelError::PageEmpty { page: page.0, count: self.pages.len() })?;
        write_values(out, &store.0);
        Ok(())
    }

    fn import_page(&mut self, page: PageId, bytes: &[u8]) -> Result<(), ModelError> {
        check_page_size(&self.weights.config, bytes.len())?;
        let count = self.pages.len();
        let store = self.pages.get_mut(page.0 as usize).ok_or(ModelError::PageEmpty { page: page.0, count })?;
        store.0.clear();
        store.0.extend(read_values(bytes));
        Ok(())
    }

    fn forward(&mut self, batch: &Batch<'_>, probe: Option<&mut dyn Probe>) -> Result<Vec<Output>, ModelError> {
        let Self { weights, isa, threads, frequencies, pages } = self;
        batch.check(&weights.config, pages.len())?;
        let config = &weights.config;
        for page in batch.segments.iter().flat_map(|segment| segment.pages) {
            pages[page.0 as usize].allocate(config);
        }
        let pass = Pass { config, isa: *isa, frequencies };
        Ok(threads.install(|| pass.run(weights, batch, pages, &mut Recorder(probe))))
    }
}

impl PageStore {
    fn allocate(&mut self, config: &ModelConfig) {
        if self.0.is_empty() {
            self.0 = vec![0.0; 2 * config.num_hidden_layers * config.kv_elements_per_page()];
        }
    }

    /// Keys and values of a layer, `[kv_heads, 32, head_dim]` each.
    fn layer(&self, index: usize, config: &ModelConfig) -> ops::Page<'_> {
        let elements = config.kv_elements_per_page();
        let (keys, values) = self.0[2 * index * elements..][..2 * elements].split_at(elements);
        ops::Page { keys, values }
    }

    /// [`layer`](Self::layer), to write.
    fn layer_mut(&mut self, index: usize, config: &ModelConfig) -> (&mut [f32], &mut [f32]) {
        let elements = config.kv_elements_per_page();
        self.0[2 * index * elements..][..2 * elements].split_at_mut(elements)
    }
}

/// What stays the same throughout one forward.
struct Pass<'a> {
    config: &'a ModelConfig,
    isa: Isa,
    frequencies: &'a [f32],
}

impl Pass<'_> {
    fn run(
        &self,
        weights: &Weights,
        batch: &Batch<'_>,
        pages: &mut [PageStore],
        probe: &mut Recorder<'_>,
    ) -> Vec<Output> {
        let config = self.config;
        let starts = batch.segments.iter().scan(0, |end, segment| {
            *end += segment.tokens.len();
            Some(*end - segment.tokens.len())
        });
        let parts: Vec<Part<'_>> =
            batch.segments.iter().zip(starts).map(|(segment, start)| self.part(segment, start)).collect();
        let mut x = self.embed(weights, &parts);
        self.record(probe, &parts, None, Point::Embeddings, &x);

        let only_pages = !probe.is_active() && parts.iter().all(|part| part.segment.need == Need::Nothing);
        let mut h = vec![0.0; x.len()];
        let mut y = vec![0.0; x.len()];
        for (index, layer) in weights.layers.iter().enumerate() {
            cpu::rms_norm(self.isa, &mut h, &x, &layer.input_norm, config.rms_norm_eps);
            let queries = self.keys_and_values(&h, layer, index, &parts, pages, probe);
            if only_pages && index + 1 == weights.layers.len() {
                // Nobody reads what comes after the last keys and values.
                break;
            }
            self.attention(&mut y, &queries, layer, index, &parts, pages);
            add(&mut x, &y);
            self.record(probe, &parts, Some(index), Point::Attention, &x);

            cpu::rms_norm(self.isa, &mut h, &x, &layer.post_norm, config.rms_norm_eps);
            match &layer.feed_forward {
                FeedForward::Dense(gated) => cpu::feed_forward(self.isa, &mut y, &h, &expert(gated)),
                FeedForward::Experts(experts) => self.experts(&mut y, &h, experts, index, &parts, probe),
            }
            add(&mut x, &y);
            self.record(probe, &parts, Some(index), Point::Hidden, &x);
        }
        parts.iter().enumerate().map(|(index, part)| self.output(weights, &x, index, part, probe)).collect()
    }

    fn part<'s>(&self, segment: &'s Segment<'s>, first_row: usize) -> Part<'s> {
        let mut cos = vec![0.0; segment.tokens.len() * self.frequencies.len()];
        let mut sin = cos.clone();
        oracle::rope_tables(&mut cos, &mut sin, self.frequencies, segment.first_position());
        Part { segment, rows: first_row..first_row + segment.tokens.len(), cos, sin }
    }

    /// Embedding rows of all tokens, `[rows, hidden]`.
    fn embed(&self, weights: &Weights, parts: &[Part<'_>]) -> Vec<f32> {
        let embedding = weights.embedding.view();
        let tokens = parts.iter().flat_map(|part| part.segment.tokens);
        let mut x = vec![0.0; tokens.clone().count() * self.config.hidden_size];
        for (row, &token) in x.chunks_exact_mut(self.config.hidden_size).zip(tokens) {
            codec::decode_rows(&embedding, token as usize, row);
        }
        x
    }

    /// Writes keys and values of all rows into the pages, and returns the queries, `[rows, heads * head_dim]`, ready
    /// for attention. `h: [rows, hidden]`, normalised.
    fn keys_and_values(
        &self,
        h: &[f32],
        layer: &Layer,
        index: usize,
        parts: &[Part<'_>],
        pages: &mut [PageStore],
        probe: &mut Recorder<'_>,
    ) -> Vec<f32> {
        let config = self.config;
        let (dim, kv_heads) = (config.head_dim, config.num_key_value_heads);
        let (query_width, kv_width) = (config.num_attention_heads * dim, kv_heads * dim);
        let rows = h.len() / config.hidden_size;
        let mut qkv = vec![0.0; rows * config.qkv_rows()];
        cpu::linear(self.isa, &mut qkv, h, &layer.qkv.view());

        let split = |from: usize, width: usize| -> Vec<f32> {
            qkv.chunks_exact(config.qkv_rows()).flat_map(|row| &row[from..from + width]).copied().collect()
        };
        let mut queries = split(0, query_width);
        let mut keys = split(query_width, kv_width);
        let values = split(query_width + kv_width, kv_width);
        if let Some(HeadNorms { query, key }) = &layer.head_norms {
            for (heads, weight) in [(&mut queries, query), (&mut keys, key)] {
                let mut normalised = vec![0.0; heads.len()];
                cpu::rms_norm(self.isa, &mut normalised, heads, weight, config.rms_norm_eps);
                *heads = normalised;
            }
        }
        for part in parts {
            let pairs = self.frequencies.len();
            let tables = || part.cos.chunks_exact(pairs).zip(part.sin.chunks_exact(pairs));
            for (heads, width) in [(&mut queries, query_width), (&mut keys, kv_width)] {
                let of_part = &mut heads[part.rows.start * width..part.rows.end * width];
                for (row, (cos, sin)) in of_part.chunks_exact_mut(width).zip(tables()) {
                    row.chunks_exact_mut(dim).for_each(|head| oracle::rotate(head, cos, sin));
                }
            }
            for (block, page) in part.written_pages() {
                let first_row = part.rows.start + block * BLOCK;
                let of_block = |all| by_head(all, first_row, kv_heads, dim);
                let (page_keys, page_values) = pages[page.0 as usize].layer_mut(index, config);
                of_block(&keys).zip(page_keys.chunks_exact_mut(dim)).for_each(|(from, to)| to.copy_from_slice(from));
                of_block(&values)
                    .zip(page_values.chunks_exact_mut(dim))
                    .for_each(|(from, to)| to.copy_from_slice(from));
            }
        }
        self.record(probe, parts, Some(index), Point::Key, &keys);
        self.record(probe, parts, Some(index), Point::Value, &values);
        queries
    }

    /// Attention of every segment over its own pages, projected into `out: [rows, hidden]`.
    fn attention(
        &self,
        out: &mut [f32],
        queries: &[f32],
        layer: &Layer,
        index: usize,
        parts: &[Part<'_>],
        pages: &[PageStore],
    ) {
        let config = self.config;
        let heads = Heads { query: config.num_attention_heads, kv: config.num_key_value_heads, dim: config.head_dim };
        let width = heads.query * heads.dim;
        let mut mixed = vec![0.0; queries.len()];
        for part in parts {
            let seen: Vec<ops::Page<'_>> =
                part.segment.pages.iter().map(|page| pages[page.0 as usize].layer(index, config)).collect();
            let values = part.rows.start * width..part.rows.end * width;
            cpu::attention(self.isa, &mut mixed[values.clone()], &queries[values], &seen, heads);
        }
        cpu::linear(self.isa, out, &mixed, &layer.dense.view());
    }

    /// Routed and shared experts of `h: [rows, hidden]`, into `out: [rows, hidden]`.
    fn experts(
        &self,
        out: &mut [f32],
        h: &[f32],
        experts: &Experts,
        index: usize,
        parts: &[Part<'_>],
        probe: &mut Recorder<'_>,
    ) {
        let config = self.config;
        let rows = h.len() / config.hidden_size;
        let mut scores = vec![0.0; rows * config.num_experts];
        cpu::linear(self.isa, &mut scores, h, &experts.router.view());
        self.record(probe, parts, Some(index), Point::RouterLogits, &scores);
        oracle::sigmoid(&mut scores);

        let mut ids = vec![0; rows * config.num_experts_per_tok];
        let mut weights = vec![0.0; ids.len()];
        let rules = RouterRules {
            routing: config.routing,
            experts_per_token: config.num_experts_per_tok,
            scale: config.routed_scaling_factor,
        };
        oracle::route(&mut ids, &mut weights, &scores, &experts.bias, &rules);
        if probe.is_active() {
            for row in scores.chunks_exact_mut(config.num_experts) {
                add(row, &experts.bias);
            }
            self.record(probe, parts, Some(index), Point::RouterScores, &scores);
            let whole: Vec<f32> = ids.iter().map(|&id| id as f32).collect();
            self.record(probe, parts, Some(index), Point::RouterIds, &whole);
            self.record(probe, parts, Some(index), Point::RouterWeights, &weights);
        }
        let routed = |id: u32| expert(&experts.routed[id as usize]);
        cpu::experts(self.isa, out, h, &ids, &weights, config.hidden_size, routed);
        if let Some(shared) = &experts.shared {
            let mut of_shared = vec![0.0; out.len()];
            cpu::feed_forward(self.isa, &mut of_shared, h, &expert(shared));
            add(out, &of_shared);
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
        if part.segment.need == Need::Candidates && !probe.is_active() {
            let mut best = vec![[ops::Candidate::default(); ops::CANDIDATES]; part.rows.len()];
            cpu::head_candidates(self.isa, &mut best, &normalised, &head);
            return Output::Candidates(best.into_iter().map(candidates).collect());
        }
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

/// Heads of the 32 rows from `first_row` on, in the order of a page: `rows: [any, heads, dim]` to `[heads, 32, dim]`.
fn by_head(rows: &[f32], first_row: usize, heads: usize, dim: usize) -> impl Iterator<Item = &[f32]> {
    (0..heads)
        .flat_map(move |head| (first_row..first_row + BLOCK).map(move |row| &rows[(row * heads + head) * dim..][..dim]))
}

fn candidates(best: [ops::Candidate; ops::CANDIDATES]) -> Candidates {
    Candidates(best.map(|ops::Candidate { token, confidence, .. }| Candidate { token, confidence }))
}

/// `x += y`, element by element.
fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
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
