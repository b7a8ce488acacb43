//! A planned `.mnw` file: described, or written through the pipeline. Shared by `convert` and `synth`.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use minnow_common::units::HumanBytes;
use minnow_formats::io::IoBackend;
use minnow_formats::mnw::{self, WriteOptions, Writer, Written};
use minnow_kernels::codec::Quality;
use serde_json::json;

use super::estimate::Estimate;
use super::{destination, encodings_json, encodings_table};
use crate::failure::Failure;
use crate::pipeline::budget::Budget;
use crate::pipeline::sink::{MnwSink, SinkError};
use crate::pipeline::source::Source;
use crate::pipeline::{self, Done, Job, PipelineError};
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
    /// How the source is read; `None` if it is in no file.
    pub(super) io: Option<IoBackend>,
    /// What that came to, for the report.
    pub(super) backend: &'static str,
    /// How codes are chosen.
    pub(super) quality: Quality,
    /// Whether, and how, this can be continued after a kill.
    pub(super) resumption: Resumption,
}

/// What ties a half-written file to the conversion that may continue it.
#[derive(Clone, Debug)]
pub(super) enum Resumption {
    /// Nothing is kept.
    Never,
    /// A journal is kept, and what an earlier run left behind is not touched.
    Prepare(Bond),
    /// A journal is kept, and what an earlier run left behind is continued.
    Continue(Bond),
}

/// The terms of [`Resumption`].
#[derive(Clone, Debug)]
pub(super) struct Bond {
    /// Everything besides the plan that determines the bytes.
    pub(super) fingerprint: Vec<u8>,
    /// Bytes of output between two entries of the journal.
    pub(super) record_bytes: u64,
}

/// How the work is done and shown; nothing in the output depends on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    pub(super) workers: usize,
    pub(super) progress: bool,
    /// Replace an existing output.
    pub(super) force: bool,
    /// Read the complete file once more, compare it with its digests, and report its SHA-256.
    pub(super) sha256: bool,
    /// Report as JSON.
    pub(super) json: bool,
}

impl Container<'_> {
    /// Prints the plan after all checks, and writes nothing.
    pub(super) fn describe(&self, workers: usize, json: bool) -> Result<(), Failure> {
        let file_bytes = self.checked_file_bytes()?;
        let (shares, source_bytes) = (self.shares(), self.source_bytes());
        let memory_bytes_max = Budget::of(&self.tensors, workers).memory_bytes_max;
        let job = self.job(0, workers);
        let estimate = Estimate::of(&job).map_err(|error| Failure::in_pipeline(self.source_path, error))?;
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
                "quality": self.quality.to_string(),
                "estimate": estimate.json(),
                "warnings": self.warnings,
            }));
        }
        let (tensors, size, memory) = (self.tensors.len(), HumanBytes(file_bytes), HumanBytes(memory_bytes_max));
        let table = encodings_table(&shares);
        terminal::print(&format!(
            "{path}: would have {file_bytes} bytes ({size}), {tensors} tensors; at most about {memory} of memory with \
             {workers} workers\n{table}  {estimate}\n"
        ))
    }

    /// Writes the file and prints one line about it.
    pub(super) fn write(&self, pace: Pace) -> Result<(), Failure> {
        let started = Instant::now();
        self.mnw_plan().file_bytes().map_err(|error| self.write_failure(&error))?;
        let leftovers = mnw::leftovers(self.output);
        let bond = match &self.resumption {
            Resumption::Continue(bond) => Some(bond),
            // A journal of an earlier run is worth more than one of this: it is kept until somebody decides.
            Resumption::Prepare(bond) if leftovers.is_empty() => Some(bond),
            Resumption::Prepare(_) | Resumption::Never => None,
        };
        let continues = matches!(self.resumption, Resumption::Continue(_));
        // What is there already needs no room, which only the writer can tell.
        if !continues {
            self.checked_file_bytes()?;
        }
        let signals = Signals::listen().map_err(|error| Failure::of(format!("signal handlers: {error}")))?;
        let mut options = WriteOptions { force: pace.force, sha256: pace.sha256, ..WriteOptions::default() };
        if let Some(bond) = bond {
            options.fingerprint = Some(&bond.fingerprint);
            options.record_bytes = bond.record_bytes;
        }
        let (writer, first) =
            Writer::open(self.output, self.mnw_plan(), &options).map_err(|error| self.write_failure(&error))?;
        self.warn();
        if !continues && !leftovers.is_empty() {
            self.warn_of_leftovers(&leftovers);
        }

        let resumed_bytes: u64 = self.tensors[..first].iter().map(Planned::source_bytes).sum();
        let mut sink = MnwSink::new(writer, self.output);
        let progress = Progress::new(self.source_bytes(), pace.progress);
        progress.start_at(resumed_bytes);
        let done = match pipeline::run(self.job(first, pace.workers), &mut sink, &signals, &progress) {
            Ok(done) => done,
            Err(PipelineError::Interrupted(interrupt)) if continues => {
                drop(progress);
                let tensors = sink.suspend().map_err(Failure::of)?;
                let (output, total) = (self.output, self.tensors.len());
                terminal::warn(output, &format!("interrupted; --resume continues after {tensors} of {total} tensors"));
                return Err(Failure::Interrupted(interrupt));
            }
            Err(error) => return Err(Failure::in_pipeline(self.source_path, error)),
        };
        drop(progress);
        let written = sink.finish().map_err(Failure::of)?;
        if let Some(fallback) = &written.fallback {
            terminal::say(fallback);
        }
        let seconds = started.elapsed().as_secs_f64();
        self.report(pace, &written, &done, first, resumed_bytes, seconds)
    }

    fn report(
        &self,
        pace: Pace,
        written: &Written,
        done: &Done,
        resumed_tensors: usize,
        resumed_bytes: u64,
        seconds: f64,
    ) -> Result<(), Failure> {
        let (path, peak_rss_bytes) = (written.path.display(), process::peak_rss_bytes());
        let source_bytes = self.source_bytes();
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        let speed = (source_bytes - resumed_bytes) as f64 / 1e9 / seconds;
        if pace.json {
            return terminal::print_json(&json!({
                "path": path.to_string(),
                "file_bytes": written.file_bytes,
                "weight_bytes": written.weight_bytes,
                "tensors": written.tensors,
                "seconds": seconds,
                "gb_per_second": speed,
                "source_bytes": source_bytes,
                "bytes_read": done.bytes_read,
                "resumed_tensors": resumed_tensors,
                "peak_rss_bytes": peak_rss_bytes,
                "sha256": written.sha256,
                "encodings": encodings_json(&self.shares()),
                "quality": self.quality.to_string(),
                "workers": pace.workers,
                "io": self.backend,
                "io_write": written.backend,
            }));
        }
        let (size, peak) = (HumanBytes(written.file_bytes), HumanBytes(peak_rss_bytes));
        let (tensors, backend, write_backend) = (written.tensors, self.backend, written.backend);
        let resumed = match resumed_tensors {
            0 => String::new(),
            count => format!(" ({count} resumed, {} read)", HumanBytes(done.bytes_read)),
        };
        let sha256 = written.sha256.as_ref().map_or_else(String::new, |digits| format!(", sha256 {digits}"));
        terminal::print(&format!(
            "{path}: {size}, {tensors} tensors{resumed}, {seconds:.2} s, {speed:.2} GB/s of source ({backend} in, \
             {write_backend} out), peak memory {peak}{sha256}\n"
        ))
    }

    fn job(&self, first: usize, workers: usize) -> Job<'_> {
        Job { plan: &self.tensors, first, source: self.source, io: self.io, quality: self.quality, workers }
    }

    fn warn_of_leftovers(&self, leftovers: &[std::path::PathBuf]) {
        let names: Vec<String> =
            leftovers.iter().filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned())).collect();
        let names = names.join(", ");
        let advice = match self.resumption {
            Resumption::Never => "remove them if they are of no use",
            _ => "--resume continues them; this run leaves them alone, and cannot be resumed itself",
        };
        terminal::warn(self.output, &format!("an earlier run was killed and left {names}: {advice}"));
    }

    /// The length of the file, if there is room for it.
    fn checked_file_bytes(&self) -> Result<u64, Failure> {
        let file_bytes = self.mnw_plan().file_bytes().map_err(|error| self.write_failure(&error))?;
        destination::check_space(self.output, self.folder, file_bytes)?;
        Ok(file_bytes)
    }

    fn write_failure(&self, error: &mnw::WriteError) -> Failure {
        Failure::of(SinkError::mnw(self.output, error))
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
