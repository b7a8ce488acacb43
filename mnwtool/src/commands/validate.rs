//! `mnwtool validate`: whether a `.mnw` file is what it must be.

use std::path::PathBuf;
use std::time::Instant;

use minnow_common::units::HumanBytes;
use minnow_formats::io::{self, IoBackend};
use minnow_formats::mnw::{self, Findings, Level, Problem};
use serde_json::{Value, json};

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

/// Checks the file and reports; a file that is not valid is a failure with the first reason in its message.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let started = Instant::now();
    let file = io::open(&options.file, IoBackend::Auto).map_err(Failure::of)?;
    let progress = Progress::new(file.len(), !options.json);
    let findings = mnw::validate_all(&file, options.level, options.workers, &|bytes| progress.advance(bytes, ""));
    drop(progress);
    let seconds = started.elapsed().as_secs_f64();

    if options.json {
        terminal::print_json(&json(options, &findings, seconds))?;
    } else if findings.is_valid() {
        let (path, level) = (options.file.display(), findings.level);
        let (tensors, bytes) = (findings.tensors, HumanBytes(findings.file_bytes));
        terminal::print(&format!("{path}: valid at level {level}: {tensors} tensors, {bytes}, {seconds:.2} s\n"))?;
    } else if findings.problems.len() > 1 {
        terminal::print(&list(&findings))?;
    }
    match &findings.problems[..] {
        [] => Ok(()),
        // The message of a failed read starts with the path.
        [Problem { reason: "io", message, .. }, ..] => Err(Failure::of(message)),
        [Problem { reason, message, .. }] => {
            Err(Failure::at(&options.file, format!("not valid ({reason}): {message}")))
        }
        all @ [Problem { reason, message, .. }, ..] => {
            let (count, more) = (all.len(), if findings.is_cut_off { " or more" } else { "" });
            Err(Failure::at(&options.file, format!("not valid ({reason}): {message}; {count}{more} problems in all")))
        }
    }
}

/// `reason` and `message` are those of the first problem.
fn json(options: &Options, findings: &Findings, seconds: f64) -> Value {
    let mut object = json!({
        "path": options.file.to_string_lossy(),
        "valid": findings.is_valid(),
        "level": findings.level,
        "tensors": findings.tensors,
        "weight_bytes": findings.weight_bytes,
        "file_bytes": findings.file_bytes,
        "seconds": seconds,
    });
    if let Some(Problem { reason, message, .. }) = findings.problems.first() {
        object["reason"] = (*reason).into();
        object["message"] = message.as_str().into();
    }
    object["problems"] = json!(findings.problems);
    object["problems_cut_off"] = findings.is_cut_off.into();
    object
}

/// One line a problem; messages say where.
fn list(findings: &Findings) -> String {
    findings.problems.iter().map(|Problem { reason, message, .. }| format!("{reason:<16}{message}\n")).collect()
}
