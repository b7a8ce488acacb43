//! A planned `.mnw` file: described, or written through the pipeline. Shared by `convert` and `synth`.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use minnow_common::units::HumanBytes;
use minnow_formats::mnw::{self, Writer};
use serde_json::json;

use super::{destination, encodings_json, encodings_table};
use crate::failure::Failure;
use crate::pipeline::sink::{MnwSink, SinkError};
use crate::pipeline::source::Source;
use crate::pipeline::{self, PipelineError, budget};
use crate::plan::{self, Planned, Share};
use crate::process;
use crate::progress::Progress;
use crate::signals::Signals;
use crate::terminal;

/// What is to be written, where it comes from, and where it goes.
pub(super) struct Container<'a> {
    pub(super) output: &'a Path,
    /// The folder that `output` lies in.
    pub(super) folder: &'a Path,
    pub(super) model_id: String,
    pub(super) assets: BTreeMap<String, String>,
    pub(super) tensors: Vec<Planned>,
    /// To be shown before work starts.
    pub(super) warnings: Vec<String>,
    pub(super) source: &'a dyn Source,
    /// The source's name, for messages.
    pub(super) source_path: &'a Path,
    /// How the source is read, for the report.
    pub(super) backend: &'static str,
}

/// How the work is done and shown; nothing in the output depends on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    pub(super) workers: usize,
    pub(super) progress: bool,
}

impl Container<'_> {
    /// Prints the plan after all checks, and writes nothing.
    pub(super) fn describe(&self, workers: usize, json: bool) -> Result<(), Failure> {
        let file_bytes = self.checked_file_bytes()?;
        let (shares, source_bytes) = (self.shares(), self.source_bytes());
        let memory_bytes_max = budget::memory_bytes_max(&self.tensors, workers);
        self.warn();
        let path = self.output.display();
        if json {
            return terminal::print_json(&json!({
                "path": path.to_string(),
                "dry_run": true,
                "file_bytes": file_bytes,
                "weight_bytes": weight_bytes(&self.tensors),
                "tensors": self.tensors.len(),
                "source_bytes": source_bytes,
                "memory_bytes_max": memory_bytes_max,
                "encodings": encodings_json(&shares),
                "warnings": self.warnings,
            }));
        }
        let (tensors, size, memory) = (self.tensors.len(), HumanBytes(file_bytes), HumanBytes(memory_bytes_max));
        let table = encodings_table(&shares);
        terminal::print(&format!(
            "{path}: would have {file_bytes} bytes ({size}), {tensors} tensors; at most about {memory} of memory with \
             {workers} workers\n{table}"
        ))
    }

    /// Writes the file and prints one line about it.
    pub(super) fn write(&self, pace: Pace, force: bool, json: bool) -> Result<(), Failure> {
        let started = Instant::now();
        self.checked_file_bytes()?;
        let signals = Signals::listen().map_err(|error| Failure::of(format!("signal handlers: {error}")))?;
        let writer = Writer::create(self.output, self.mnw_plan(), force)
            .map_err(|error| Failure::of(SinkError::mnw(self.output, &error)))?;
        self.warn();
        let mut sink = MnwSink::new(writer, self.output);
        let progress = Progress::new(self.source_bytes(), pace.progress);
        let written = pipeline::run(&self.tensors, self.source, &mut sink, pace.workers, &signals, &progress)
            .and_then(|()| sink.finish().map_err(PipelineError::Sink))
            .map_err(|error| Failure::in_pipeline(self.source_path, error))?;
        drop(progress);

        let (seconds, source_bytes) = (started.elapsed().as_secs_f64(), self.source_bytes());
        let (path, peak_rss_bytes) = (written.path.display(), process::peak_rss_bytes());
        if json {
            return terminal::print_json(&json!({
                "path": path.to_string(),
                "file_bytes": written.file_bytes,
                "weight_bytes": written.weight_bytes,
                "tensors": written.tensors,
                "seconds": seconds,
                "source_bytes": source_bytes,
                "peak_rss_bytes": peak_rss_bytes,
                "encodings": encodings_json(&self.shares()),
                "io": self.backend,
            }));
        }
        let (size, peak) = (HumanBytes(written.file_bytes), HumanBytes(peak_rss_bytes));
        let (tensors, backend) = (written.tensors, self.backend);
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        let speed = source_bytes as f64 / 1e9 / seconds;
        terminal::print(&format!(
            "{path}: {size}, {tensors} tensors, {seconds:.2} s, {speed:.2} GB/s of source ({backend}), peak memory {peak}\n"
        ))
    }

    /// The length of the file, if there is room for it.
    fn checked_file_bytes(&self) -> Result<u64, Failure> {
        let file_bytes =
            self.mnw_plan().file_bytes().map_err(|error| Failure::of(SinkError::mnw(self.output, &error)))?;
        destination::check_space(self.output, self.folder, file_bytes)?;
        Ok(file_bytes)
    }

    fn mnw_plan(&self) -> mnw::Plan {
        let tensors = self.tensors.iter().map(|tensor| (tensor.name.clone(), tensor.target.clone())).collect();
        mnw::Plan { model_id: self.model_id.clone(), assets: self.assets.clone(), tensors }
    }

    fn source_bytes(&self) -> u64 {
        self.tensors.iter().map(Planned::source_bytes).sum()
    }

    fn shares(&self) -> BTreeMap<&'static str, Share> {
        plan::shares(self.tensors.iter().map(|tensor| &tensor.target))
    }

    fn warn(&self) {
        for warning in &self.warnings {
            terminal::warn(self.source_path, warning);
        }
    }
}

fn weight_bytes(tensors: &[Planned]) -> u64 {
    tensors.iter().map(Planned::target_bytes).sum()
}
