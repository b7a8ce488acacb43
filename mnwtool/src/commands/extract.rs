//! `mnwtool extract`: a `.mnw` file back into a safetensors folder.
//!
//! The folder is made under a temporary name beside its final one and renamed when it is complete and synced. Assets
//! are written by the six known names only, never by a name that the file chose.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use minnow_common::FloatType;
use minnow_common::units::HumanBytes;
use minnow_formats::checkpoint::{Checkpoint, SourceKind};
use minnow_formats::io::IoBackend;
use minnow_formats::names;
use minnow_kernels::codec::Quality;
use serde_json::json;

use super::destination::{self, TemporaryFolder};
use crate::failure::Failure;
use crate::pipeline::shards::{self, Shard, ShardSink};
use crate::pipeline::{self, Job, PipelineError};
use crate::plan::{self, Planned};
use crate::process;
use crate::progress::Progress;
use crate::signals::Signals;
use crate::terminal;

/// The name of the index beside several files.
const INDEX: &str = "model.safetensors.index.json";

/// What to extract, and where to.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) file: PathBuf,
    pub(crate) folder: PathBuf,
    /// Only tensors whose names start with this.
    pub(crate) prefix: String,
    pub(crate) float: FloatType,
    pub(crate) shard_bytes_max: u64,
    pub(crate) workers: usize,
    pub(crate) json: bool,
    pub(crate) progress: bool,
}

/// Extracts assets and tensors.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    // The destination is looked at before the source, and once more when it is written.
    destination::check_new_folder(&options.folder)?;
    let source = Checkpoint::open(&options.file, IoBackend::Auto).map_err(Failure::of)?;
    write(&source, options)
}

/// Extracts from a checkpoint that was opened from `options.file`, wherever that is.
pub(super) fn write(source: &Checkpoint, options: &Options) -> Result<(), Failure> {
    let started = Instant::now();
    let parent = destination::check_new_folder(&options.folder)?;
    if source.kind() != SourceKind::Mnw {
        return Err(Failure::at(&options.file, "is no .mnw file; a safetensors checkpoint needs no extraction"));
    }
    let wanted = source.tensors().iter().filter(|(name, _)| name.starts_with(&options.prefix));
    let specs = wanted.map(|(name, tensor)| (name.as_str(), &tensor.spec));
    let plan = plan::extract(specs, options.float).map_err(|error| Failure::at(&options.file, error))?;
    if plan.is_empty() {
        return Err(Failure::at(&options.file, format!("has no tensor whose name starts with {:?}", options.prefix)));
    }
    let shards = shards::shards(&plan, options.shard_bytes_max).map_err(|error| Failure::at(&options.file, error))?;
    let assets = source.assets().iter().filter(|(name, _)| names::is_known_asset(name));
    let assets: Vec<(&str, &str)> = assets.map(|(name, text)| (name.as_str(), text.as_str())).collect();
    let file_bytes: u64 = shards.iter().map(Shard::file_bytes).sum();
    destination::check_space(&options.folder, &parent, file_bytes)?;

    let signals = Signals::listen().map_err(|error| Failure::of(format!("signal handlers: {error}")))?;
    let folder = TemporaryFolder::create(&options.folder, &parent)?;
    for (name, text) in &assets {
        write_file(&folder.path().join(name), text)?;
    }
    if let Some(index) = shards::index_json(&plan, &shards) {
        write_file(&folder.path().join(INDEX), &index)?;
    }
    let mut sink = ShardSink::new(folder.path(), &shards);
    let progress = Progress::new(plan.iter().map(Planned::source_bytes).sum(), options.progress);
    let job = Job {
        plan: &plan,
        first: 0,
        source,
        io: Some(IoBackend::Auto),
        quality: Quality::Rtn,
        workers: options.workers,
    };
    pipeline::run(job, &mut sink, &signals, &progress)
        .and_then(|_| sink.finish().map_err(PipelineError::Sink))
        .map_err(|error| Failure::in_pipeline(&options.file, error))?;
    drop(progress);
    folder.publish(&options.folder, &parent)?;

    let (path, files, tensors) = (options.folder.display(), shards.len() + assets.len(), plan.len());
    let (seconds, peak_rss_bytes) = (started.elapsed().as_secs_f64(), process::peak_rss_bytes());
    if options.json {
        return terminal::print_json(&json!({
            "path": path.to_string(),
            "file_bytes": file_bytes,
            "tensors": tensors,
            "weight_files": shards.len(),
            "assets": assets.iter().map(|(name, _)| name).collect::<Vec<_>>(),
            "seconds": seconds,
            "peak_rss_bytes": peak_rss_bytes,
        }));
    }
    let (bytes, peak) = (HumanBytes(file_bytes), HumanBytes(peak_rss_bytes));
    terminal::print(&format!(
        "{path}: {tensors} tensors in {files} files, {bytes}, {seconds:.2} s, peak memory {peak}\n"
    ))
}

/// Writes a new text file, synced.
pub(super) fn write_file(path: &Path, text: &str) -> Result<(), Failure> {
    let written = File::create_new(path).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    written.map_err(|error| Failure::at(path, error))
}
