//! `mnwtool validate`: whether a `.mnw` file is what it must be.

use std::path::PathBuf;
use std::time::Instant;

use minnow_common::units::HumanBytes;
use minnow_formats::io::{self, IoBackend};
use minnow_formats::mnw::{self, Level, MnwError, Report};
use serde_json::json;

use crate::failure::Failure;
use crate::progress::Progress;
use crate::terminal;

/// What to check.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) file: PathBuf,
    pub(crate) level: Level,
    pub(crate) workers: usize,
    pub(crate) json: bool,
}

/// Checks the file and reports; a file that is not valid is a failure with the reason in its message.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let started = Instant::now();
    match check(options) {
        Ok(report) => print(options, &report, started.elapsed().as_secs_f64()),
        Err(Fault::Unreadable(message)) => Err(Failure::Failed(message)),
        Err(Fault::Invalid { reason, message }) => {
            if options.json {
                terminal::print_json(&json!({
                    "path": options.file.to_string_lossy(),
                    "valid": false,
                    "level": options.level.name(),
                    "reason": reason,
                    "message": message,
                }))?;
            }
            Err(Failure::at(&options.file, format!("not valid ({reason}): {message}")))
        }
    }
}

/// Why a file is not known to be valid.
enum Fault {
    /// It cannot be read; the message starts with its path.
    Unreadable(String),
    /// It was read and breaks a rule.
    Invalid { reason: &'static str, message: String },
}

impl From<MnwError> for Fault {
    fn from(error: MnwError) -> Self {
        match error {
            MnwError::Io(error) => Self::Unreadable(error.to_string()),
            error => Self::Invalid { reason: error.reason(), message: error.to_string() },
        }
    }
}

fn check(options: &Options) -> Result<Report, Fault> {
    let file = io::open(&options.file, IoBackend::Auto).map_err(|error| Fault::Unreadable(error.to_string()))?;
    let container = mnw::open(file)?;
    let progress = Progress::new(container.manifest.weight_bytes(), !options.json);
    Ok(mnw::validate(&container, options.level, options.workers, &|bytes| progress.advance(bytes))?)
}

fn print(options: &Options, report: &Report, seconds: f64) -> Result<(), Failure> {
    let path = options.file.display();
    let level = report.level.name();
    if options.json {
        return terminal::print_json(&json!({
            "path": path.to_string(),
            "valid": true,
            "level": level,
            "tensors": report.tensors,
            "weight_bytes": report.weight_bytes,
            "file_bytes": report.file_bytes,
            "seconds": seconds,
        }));
    }
    let (tensors, bytes) = (report.tensors, HumanBytes(report.file_bytes));
    terminal::print(&format!("{path}: valid at level {level}: {tensors} tensors, {bytes}, {seconds:.2} s\n"))
}
