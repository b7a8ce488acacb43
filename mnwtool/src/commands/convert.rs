//! `mnwtool convert`: a checkpoint in, a `.mnw` file out.
//!
//! Every check that can be made before the first byte of output is made before it.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use minnow_formats::checkpoint::Checkpoint;
use minnow_formats::io::IoBackend;
use minnow_formats::names;
use minnow_kernels::codec::Quality;

use super::container::{Bond, Container, Pace, Resumption};
use super::{destination, known_assets};
use crate::failure::Failure;
use crate::plan::{self, Choice, Conversion};
use crate::rules::{self, Rule};

/// What to convert, and how.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) source: PathBuf,
    pub(crate) output: PathBuf,
    pub(crate) choice: Choice,
    pub(crate) rules_file: Option<PathBuf>,
    pub(crate) quality: Quality,
    pub(crate) workers: usize,
    pub(crate) io: IoBackend,
    pub(crate) model_id: Option<String>,
    pub(crate) dry_run: bool,
    /// Continue what a killed run left behind.
    pub(crate) resume: bool,
    /// Bytes of output between two entries of the journal.
    pub(crate) journal_bytes: u64,
    /// Report the SHA-256 of the output.
    pub(crate) sha256: bool,
    pub(crate) force: bool,
    pub(crate) json: bool,
    pub(crate) progress: bool,
}

/// Converts, or with `dry_run` only says what would be done.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let folder = destination::check_file(&options.output, options.force)?;
    let rules = match &options.rules_file {
        Some(path) => read_rules(path)?,
        None => Vec::new(),
    };
    let source = Checkpoint::open(&options.source, options.io).map_err(Failure::of)?;
    destination::check_not_among(&options.output, source_files(&source, &options.source).iter().map(PathBuf::as_path))?;
    let specs = source.tensors().iter().map(|(name, tensor)| (name.as_str(), &tensor.spec));
    let Conversion { tensors, warnings } = plan::convert(source.config(), specs, options.choice, &rules)
        .map_err(|error| Failure::at(&options.source, error))?;

    let container = Container {
        output: &options.output,
        folder: &folder,
        model_id: options.model_id.clone().unwrap_or_else(|| source.path_id()),
        assets: known_assets(&source),
        tensors,
        warnings: source_warnings(&source).into_iter().chain(warnings).collect(),
        source: &source,
        source_path: &options.source,
        io: Some(options.io),
        backend: source.backend(),
        quality: options.quality,
        resumption: {
            let fingerprint = fingerprint(&source, options.quality);
            let bond = Bond { fingerprint, record_bytes: options.journal_bytes };
            if options.resume { Resumption::Continue(bond) } else { Resumption::Prepare(bond) }
        },
    };
    if options.dry_run {
        return container.describe(options.workers, options.json);
    }
    container.write(Pace {
        workers: options.workers,
        progress: options.progress,
        force: options.force,
        sha256: options.sha256,
        json: options.json,
    })
}

/// What determines the bytes of the output besides its plan: the files of the source, as far as that can be known
/// without reading them, and how codes are chosen by this version of the program.
fn fingerprint(source: &Checkpoint, quality: Quality) -> Vec<u8> {
    let mut text = format!("mnwtool {} {quality}\n", env!("CARGO_PKG_VERSION"));
    for file in source.files() {
        let name = Path::new(file.label()).file_name().unwrap_or_default().to_string_lossy();
        let (seconds, nanoseconds) = file.modified().unwrap_or_default();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name} {} {seconds} {nanoseconds}", file.len());
    }
    for (name, tensor) in source.tensors() {
        let _ = writeln!(text, "{name} {} {} {:?}", tensor.file, tensor.data.offset, tensor.digests);
    }
    text.into_bytes()
}

fn read_rules(path: &Path) -> Result<Vec<Rule>, Failure> {
    let text = std::fs::read_to_string(path).map_err(|error| Failure::at(path, error))?;
    rules::parse(&text).map_err(|error| Failure::at(path, error))
}

/// Every file that the source consists of.
fn source_files(source: &Checkpoint, path: &Path) -> Vec<PathBuf> {
    let weights = source.files().iter().map(|file| PathBuf::from(file.label()));
    let assets = source.assets().keys().map(|name| path.join(name));
    weights.chain(assets).collect()
}

fn source_warnings(source: &Checkpoint) -> Vec<String> {
    let mut warnings: Vec<String> =
        source.fallback().into_iter().chain(source.warnings().iter().map(String::as_str)).map(str::to_owned).collect();
    for name in source.dropped_assets() {
        warnings.push(format!("{name} is not readable UTF-8 text and is left out"));
    }
    let unknown: Vec<&String> = source.assets().keys().filter(|name| !names::is_known_asset(name)).collect();
    if !unknown.is_empty() {
        warnings.push(format!("assets outside the six known ones are left out: {}", names::shortlist(&unknown)));
    }
    warnings
}
