//! `minnowd bench`: how fast this machine runs a model, beside what it could do at best.
//!
//! One command measures one kind of work; a report has a row for each variant. Bytes and FLOPs are those that the
//! work *needs*, counted from shapes and from the experts that were really chosen, so that a share of a ceiling below
//! one is room for a better program. The ceilings are measured in the same run, with the same threads.

mod forward;
mod prefill;
pub mod serve;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::bail;
use minnow_common::random::mix64;
use minnow_common::{BLOCK, ModelConfig};
use serde::Serialize;

use crate::config::ModelSource;
use crate::model::trace::Trace;
use crate::model::{Backend, Batch, Ceilings, KernelTime, Need, PageId, Point, Segment};
use crate::session::Opened;
use crate::weights::{FeedForward, Gated, Stored, Weights};

/// What to measure.
#[derive(Clone, Debug)]
pub enum Subject {
    /// One forward of one block for each of some sequences.
    Forward {
        /// Positions that each sequence already has.
        prefix: usize,
        /// Numbers of sequences, a row each.
        batches: Vec<usize>,
        /// What the sequences want back.
        need: Need,
    },
    /// Reading prompts.
    Prefill {
        /// Lengths of the prompts, a row each.
        tokens: Vec<usize>,
        /// Positions read in one forward.
        chunk: usize,
    },
}

/// How to measure and to report.
#[derive(Clone, Copy, Debug)]
pub struct Measure {
    /// Timed runs of each row, after one that is not counted.
    pub repetitions: usize,
    /// Time kernels by themselves too, as often again.
    pub profiles: bool,
    /// Print one JSON object instead of a table.
    pub json: bool,
}

/// What a row needs, at least.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Work {
    /// Positions that go through the model.
    pub positions: usize,
    /// Bytes of weights, keys and values that have to be read.
    pub bytes: u64,
    /// Floating-point operations: an addition and a product are two.
    pub flops: u64,
}

/// One line of the report.
#[derive(Clone, Debug, Serialize)]
struct Row {
    name: String,
    repetitions: usize,
    median_ms: f64,
    p5_ms: f64,
    p95_ms: f64,
    tokens_per_second: f64,
    #[serde(flatten)]
    work: Work,
    gigabytes_per_second: f64,
    gigaflops_per_second: f64,
    /// The time that the slower of both ceilings allows.
    floor_ms: Option<f64>,
    /// That time over the median.
    share_of_ceiling: Option<f64>,
    /// The kernels of a run, by the time they take in all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    kernels: Vec<KernelRow>,
}

/// What all launches of one kernel take, timed one by one: so without overlap, and each with some time of its own.
#[derive(Clone, Debug, Serialize)]
struct KernelRow {
    kernel: String,
    /// In one run.
    launches: usize,
    /// Of one run, the mean over all.
    microseconds: f64,
}

#[derive(Serialize)]
struct Report {
    command: &'static str,
    version: &'static str,
    model: String,
    encodings: String,
    layers: usize,
    backend: String,
    ceilings: Option<Ceilings>,
    load_seconds: f64,
    resident_bytes: Option<u64>,
    rows: Vec<Row>,
}

/// Measures and prints.
pub fn run(source: &ModelSource, subject: &Subject, measure: Measure) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    let opened = Opened::new(source)?;
    let config = opened.config();
    let (command, blocks, sequences) = match subject {
        Subject::Forward { prefix, batches, .. } => {
            ("forward", prefix / BLOCK, batches.iter().copied().max().unwrap_or(1))
        }
        Subject::Prefill { tokens, .. } => ("prefill", tokens.iter().copied().max().unwrap_or(0) / BLOCK, 0),
    };
    let pages = blocks + sequences;
    let context = ((blocks + 1) * BLOCK).min(config.max_position_embeddings);
    let room = ModelSource { max_context: Some(context), ..source.clone() };
    let mut backend = opened.backend(&room, source.device, pages.div_ceil(context / BLOCK))?;
    let load_seconds = started.elapsed().as_secs_f64();
    if backend.page_count() < pages {
        bail!("{pages} pages of keys and values are needed, but memory allows {}", backend.page_count());
    }
    let ceilings = backend.ceilings();
    let mut bench = Bench { weights: opened.weights()?, backend: &mut *backend, measure, ceilings, rows: Vec::new() };
    match subject {
        Subject::Forward { prefix, batches, need } => forward::measure(&mut bench, prefix / BLOCK, batches, *need)?,
        Subject::Prefill { tokens, chunk } => prefill::measure(&mut bench, tokens, *chunk)?,
    }
    let rows = bench.rows;
    let report = Report {
        command,
        version: crate::VERSION,
        model: opened.name().to_owned(),
        encodings: opened.file_type(),
        layers: config.num_hidden_layers,
        backend: backend.describe(),
        ceilings,
        load_seconds,
        resident_bytes: resident_bytes(),
        rows,
    };
    if measure.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        report.print();
    }
    Ok(ExitCode::SUCCESS)
}

/// A model being measured.
struct Bench<'a> {
    weights: &'a Weights,
    backend: &'a mut dyn Backend,
    measure: Measure,
    ceilings: Option<Ceilings>,
    rows: Vec<Row>,
}

impl Bench<'_> {
    /// Runs `forwards`, one after the other, as often as asked, and adds a row.
    fn row(&mut self, name: String, forwards: &[Batch<'_>]) -> anyhow::Result<()> {
        let mut work = Work::default();
        for batch in forwards {
            // The run that is not counted also finds out which experts are used.
            let mut trace = Trace::default();
            self.backend.forward(batch, Some(&mut trace))?;
            work = work.and(Work::of(self.weights, batch, &trace));
            self.backend.forward(batch, None)?;
        }
        let mut milliseconds = Vec::with_capacity(self.measure.repetitions);
        for _ in 0..self.measure.repetitions {
            let started = Instant::now();
            for batch in forwards {
                self.backend.forward(batch, None)?;
            }
            milliseconds.push(started.elapsed().as_secs_f64() * 1e3);
        }
        let mut row = Row::new(name, milliseconds, work, self.ceilings);
        if self.measure.profiles {
            row.kernels = self.kernels(forwards)?;
        }
        self.rows.push(row);
        Ok(())
    }

    /// Runs `forwards` again and times their kernels.
    fn kernels(&mut self, forwards: &[Batch<'_>]) -> anyhow::Result<Vec<KernelRow>> {
        let mut times: BTreeMap<String, (usize, f64)> = BTreeMap::new();
        for _ in 0..self.measure.repetitions {
            for batch in forwards {
                let Some(kernels) = self.backend.profile(batch)? else {
                    bail!("--profile times the kernels of a GPU, but this runs on {}", self.backend.describe());
                };
                for KernelTime { kernel, seconds } in kernels {
                    let of_kernel = times.entry(kernel).or_default();
                    of_kernel.0 += 1;
                    of_kernel.1 += seconds;
                }
            }
        }
        let runs = self.measure.repetitions;
        let row = |(kernel, (launches, seconds)): (String, (usize, f64))| KernelRow {
            kernel,
            launches: launches / runs,
            microseconds: seconds * 1e6 / runs as f64,
        };
        let mut rows: Vec<KernelRow> = times.into_iter().map(row).collect();
        rows.sort_by(|a, b| b.microseconds.total_cmp(&a.microseconds));
        Ok(rows)
    }
}

impl Row {
    fn new(name: String, mut milliseconds: Vec<f64>, work: Work, ceilings: Option<Ceilings>) -> Self {
        milliseconds.sort_by(f64::total_cmp);
        let at = |share: f64| milliseconds[((milliseconds.len() - 1) as f64 * share).round() as usize];
        let seconds = at(0.5) / 1e3;
        let floor_ms = ceilings.map(|ceilings| {
            1e3 * f64::max(
                work.bytes as f64 / ceilings.read_bytes_per_second,
                work.flops as f64 / ceilings.flops_per_second,
            )
        });
        Self {
            name,
            repetitions: milliseconds.len(),
            median_ms: at(0.5),
            p5_ms: at(0.05),
            p95_ms: at(0.95),
            tokens_per_second: work.positions as f64 / seconds,
            work,
            gigabytes_per_second: work.bytes as f64 / seconds / 1e9,
            gigaflops_per_second: work.flops as f64 / seconds / 1e9,
            floor_ms,
            share_of_ceiling: floor_ms.map(|floor_ms| floor_ms / at(0.5)),
            kernels: Vec::new(),
        }
    }
}

impl Row {
    fn print_kernels(&self) {
        println!("\n{:<56} {:>9} {:>9} {:>9}", self.name, "launches", "us each", "us");
        for KernelRow { kernel, launches, microseconds } in &self.kernels {
            println!("{kernel:<56} {launches:>9} {:>9.2} {microseconds:>9.1}", microseconds / *launches as f64);
        }
        let launches: usize = self.kernels.iter().map(|row| row.launches).sum();
        let sum: f64 = self.kernels.iter().map(|row| row.microseconds).sum();
        println!("{:<56} {launches:>9} {:>9} {sum:>9.1}", "all, one by one", "");
    }
}

impl Report {
    fn print(&self) {
        println!("minnowd {} bench {}", self.version, self.command);
        println!("{} ({}), {} layers, on {}", self.model, self.encodings, self.layers, self.backend);
        if let Some(ceilings) = &self.ceilings {
            println!(
                "ceilings: {:.1} GB/s read, {:.0} GFLOP/s",
                ceilings.read_bytes_per_second / 1e9,
                ceilings.flops_per_second / 1e9
            );
        }
        let resident = self.resident_bytes.map_or(String::new(), |bytes| format!(", {} MiB resident", bytes >> 20));
        println!("loaded in {:.2} s{resident}\n", self.load_seconds);
        println!(
            "{:<34} {:>9} {:>9} {:>9} {:>8} {:>8} {:>9} {:>7} {:>8} {:>8} {:>6}",
            "", "median", "p5", "p95", "tok/s", "GB", "GFLOP", "GB/s", "GFLOP/s", "floor", "share"
        );
        for row in &self.rows {
            let floor = row.floor_ms.map_or(String::new(), |floor| format!("{floor:.1}"));
            let share = row.share_of_ceiling.map_or(String::new(), |share| format!("{:.0} %", 100.0 * share));
            println!(
                "{:<34} {:>9.2} {:>9.2} {:>9.2} {:>8.0} {:>8.3} {:>9.2} {:>7.2} {:>8.1} {floor:>8} {share:>6}",
                row.name,
                row.median_ms,
                row.p5_ms,
                row.p95_ms,
                row.tokens_per_second,
                row.work.bytes as f64 / 1e9,
                row.work.flops as f64 / 1e9,
                row.gigabytes_per_second,
                row.gigaflops_per_second,
            );
        }
        println!("\ntimes in ms; floor: what the slower of the two ceilings allows; share: floor over median");
        self.rows.iter().filter(|row| !row.kernels.is_empty()).for_each(Row::print_kernels);
    }
}

impl Work {
    fn and(self, other: Self) -> Self {
        Self {
            positions: self.positions + other.positions,
            bytes: self.bytes + other.bytes,
            flops: self.flops + other.flops,
        }
    }

    /// What one forward needs: each matrix in use is read once, and so are the keys and values of each segment.
    fn of(weights: &Weights, batch: &Batch<'_>, trace: &Trace) -> Self {
        let config = &weights.config;
        let rows: usize = batch.segments.iter().map(|segment| segment.tokens.len()).sum();
        let head_rows: usize =
            batch.segments.iter().filter(|one| one.need != Need::Nothing).map(|one| one.tokens.len()).sum();
        let mut work = Self { positions: rows, bytes: 0, flops: 0 };
        work.product(&weights.head, head_rows);
        for (index, layer) in weights.layers.iter().enumerate() {
            work.product(&layer.qkv, rows);
            for segment in batch.segments {
                work.attention(config, segment);
            }
            // Where nobody needs a result, the last layer ends with its keys and values.
            if head_rows == 0 && index + 1 == weights.layers.len() {
                break;
            }
            work.product(&layer.dense, rows);
            match &layer.feed_forward {
                FeedForward::Dense(gated) => work.gated(gated, rows),
                FeedForward::Experts(experts) => {
                    work.product(&experts.router, rows);
                    if let Some(gated) = &experts.shared {
                        work.gated(gated, rows);
                    }
                    let mut uses = vec![0; config.num_experts];
                    for segment in 0..batch.segments.len() {
                        let ids = trace.rows(segment, Some(index), Point::RouterIds);
                        ids.iter().flat_map(|rows| &rows.values).for_each(|&id| uses[id as usize] += 1);
                    }
                    for (gated, &uses) in experts.routed.iter().zip(&uses) {
                        work.gated(gated, uses);
                    }
                }
            }
        }
        work
    }

    fn gated(&mut self, gated: &Gated, rows: usize) {
        gated.matrices().into_iter().for_each(|matrix| self.product(matrix, rows));
    }

    fn product(&mut self, matrix: &Stored, rows: usize) {
        if rows > 0 {
            self.bytes += (matrix.data.len() + matrix.scales.len()) as u64;
            self.flops += 2 * rows as u64 * matrix.spec.shape().elements();
        }
    }

    /// Scores and weighted values of every query with every key it sees, and one reading of those keys and values at
    /// two bytes an element.
    fn attention(&mut self, config: &ModelConfig, segment: &Segment<'_>) {
        let width = (config.num_attention_heads * config.head_dim) as u64;
        let first = (segment.pages.len() - segment.blocks()) as u64;
        let seen = (first + 1..=segment.pages.len() as u64).sum::<u64>();
        self.flops += 4 * width * (BLOCK * BLOCK) as u64 * seen;
        self.bytes += 4 * (segment.pages.len() * config.kv_elements_per_page()) as u64;
    }
}

/// Tokens that depend on the sequence and the position only, as good as random: experts are chosen evenly.
fn tokens(config: &ModelConfig, sequence: u64, count: usize) -> Vec<u32> {
    let token = |position: u64| (mix64(sequence << 32 | position) % config.vocab_size as u64) as u32;
    (0..count as u64).map(token).collect()
}

/// Pages `first..first + count`.
fn pages(first: usize, count: usize) -> Vec<PageId> {
    (first..first + count).map(|page| PageId(page as u32)).collect()
}

/// Memory of this process that is in RAM, mapped files included; `None` where the system does not say.
fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}
