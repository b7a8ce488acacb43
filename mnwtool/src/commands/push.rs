//! `mnwtool push`: the files of a folder to a repository, in one commit.
//!
//! Containers are validated and `SHA256SUMS` is compared before anything is sent.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use minnow_common::units::HumanBytes;
use minnow_formats::digest;
use minnow_formats::hub::{self, Outgoing, Private, Push, PushError, Pushed, Repository, Revision, Sending};
use minnow_formats::io::{self, IoBackend};
use serde_json::json;

use super::publish::sums;
use super::remote::{Access, Onlooker, check_container, is_container};
use crate::failure::Failure;
use crate::process;
use crate::progress::Progress;
use crate::terminal;

/// What to push, and where to.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) access: Access,
    pub(crate) folder: PathBuf,
    pub(crate) repository: Repository,
    pub(crate) revision: Revision,
    pub(crate) message: String,
    pub(crate) create: Option<Private>,
    pub(crate) replace: bool,
    pub(crate) dry_run: bool,
    pub(crate) workers: usize,
    pub(crate) json: bool,
    pub(crate) progress: bool,
}

/// Pushes.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let started = Instant::now();
    let hub = options.access.hub()?;
    let files = outgoing(options)?;
    let total_bytes = files.iter().map(|file| file.file.len()).sum();
    let watch = Onlooker::new(total_bytes, options.progress && !options.json)?;
    let push = Push {
        repository: &options.repository,
        revision: &options.revision,
        files: &files,
        replace: options.replace,
        create: options.create,
        dry_run: options.dry_run,
        connections: options.access.connections,
        message: &options.message,
    };
    let pushed = hub::push(&hub, &push, &watch).map_err(|error| match error {
        PushError::Hub(error) => watch.failure(error),
        error => Failure::of(error),
    })?;
    drop(watch);
    report(options, &files, &pushed, started.elapsed().as_secs_f64())
}

/// Every file of the folder, checked, with its digest.
fn outgoing(options: &Options) -> Result<Vec<Outgoing>, Failure> {
    let folder = &options.folder;
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| Failure::at(folder, error))? {
        let path = entry.map_err(|error| Failure::at(folder, error))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // Hidden files are unfinished ones, and other tools' own.
        if name.starts_with('.') {
            continue;
        }
        if !path.is_file() {
            return Err(Failure::at(&path, "is no file; a folder to push holds files only"));
        }
        paths.push((name, path));
    }
    if paths.is_empty() {
        return Err(Failure::at(folder, "holds no files"));
    }
    paths.sort();
    let bytes: u64 = paths.iter().filter_map(|(_, path)| fs::metadata(path).ok()).map(|found| found.len()).sum();
    let progress = Progress::new(2 * bytes, options.progress && !options.json);
    let mut files = Vec::new();
    for (name, path) in &paths {
        let file = io::open(path, IoBackend::Auto).map_err(Failure::of)?;
        if is_container(name) {
            check_container(path, options.workers, &|bytes| progress.advance(bytes, name))
                .map_err(|fault| Failure::at(path, format!("not valid, and not sent ({fault})")))?;
        }
        let sha256 = digest::sha256(&file, &|bytes| progress.advance(bytes, name)).map_err(Failure::of)?;
        let path = name.parse().map_err(|error| Failure::at(path, error))?;
        files.push(Outgoing { path, file, sha256 });
    }
    drop(progress);
    check_sums(folder, &files)?;
    Ok(files)
}

/// Compares digests with `SHA256SUMS`, if the folder has one.
fn check_sums(folder: &Path, files: &[Outgoing]) -> Result<(), Failure> {
    let path = folder.join(sums::NAME);
    let Ok(text) = fs::read_to_string(&path) else { return Ok(()) };
    for (expected, name) in sums::parse(&text).map_err(|error| Failure::at(&path, error))? {
        match files.iter().find(|file| file.path.as_str() == name) {
            None => return Err(Failure::at(&path, format!("names {name}, which is not there"))),
            Some(file) if file.sha256 != expected => {
                let found = &file.sha256;
                return Err(Failure::at(&path, format!("{name} has SHA-256 {found}, but {expected} is listed")));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

fn report(options: &Options, files: &[Outgoing], pushed: &Pushed, seconds: f64) -> Result<(), Failure> {
    let word = |fate: Sending| match fate {
        Sending::Same => "same",
        Sending::New => "new",
        Sending::Replaced => "replaced",
    };
    let fates = files.iter().zip(&pushed.files);
    if options.json {
        let list: Vec<_> = fates
            .map(|(file, fate)| {
                json!({
                    "path": file.path.as_str(), "bytes": file.file.len(), "sha256": file.sha256, "fate": word(*fate),
                })
            })
            .collect();
        return terminal::print_json(&json!({
            "repository": options.repository.to_string(),
            "dry_run": options.dry_run,
            "files": list,
            "commit": pushed.commit,
            "sent_bytes": pushed.sent_bytes,
            "seconds": seconds,
            "peak_rss_bytes": process::peak_rss_bytes(),
        }));
    }
    let mut text = String::new();
    for (file, fate) in fates {
        text += &format!("{:<9} {:>10}  {}\n", word(*fate), HumanBytes(file.file.len()).to_string(), file.path);
    }
    let repository = &options.repository;
    text += &match (&pushed.commit, options.dry_run) {
        (Some(commit), _) => format!(
            "hf:{repository}: commit {commit}, {} sent in {seconds:.2} s, peak memory {}\n",
            HumanBytes(pushed.sent_bytes),
            HumanBytes(process::peak_rss_bytes())
        ),
        (None, true) => format!("hf:{repository}: nothing was sent\n"),
        (None, false) => format!("hf:{repository}: has all of it already\n"),
    };
    terminal::print(&text)
}
