//! `mnwtool pull`: files of a repository to disk, or some tensors of a file.
//!
//! All names are looked at before the first byte is fetched. What is there already with the right bytes is not fetched
//! again; what is there with others is replaced only with `--force`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use minnow_common::FloatType;
use minnow_common::units::HumanBytes;
use minnow_formats::checkpoint::Checkpoint;
use minnow_formats::digest;
use minnow_formats::hub::{self, Address, FileInfo, Hub, Identity, Pull, RepoPath, Repository, Revision};
use minnow_formats::io::{self, IoBackend, ReadAt};
use minnow_formats::mnw;
use serde_json::{Value, json};

use super::extract;
use super::remote::{Access, Onlooker, Speaking, check_container, is_container};
use crate::failure::Failure;
use crate::process;
use crate::terminal;

/// The hub's own file, of no use outside of a repository.
const HUBS_OWN: &str = ".gitattributes";

/// What to pull, and where to.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) access: Access,
    pub(crate) repository: Repository,
    pub(crate) revision: Revision,
    /// One file; all of them if absent.
    pub(crate) path: Option<RepoPath>,
    /// Where to; the current folder for one file, one named after the repository for all.
    pub(crate) folder: Option<PathBuf>,
    /// Only tensors whose names start so, as a safetensors folder.
    pub(crate) tensors: Option<(String, FloatType)>,
    pub(crate) workers: usize,
    pub(crate) force: bool,
    pub(crate) json: bool,
    pub(crate) progress: bool,
}

/// Pulls.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    match (&options.tensors, &options.path) {
        (Some((prefix, float)), Some(path)) => pull_tensors(options, path, prefix, *float),
        _ => pull_files(options),
    }
}

/// What became of a file.
struct Outcome {
    target: PathBuf,
    info: FileInfo,
    fetched_bytes: u64,
    resumed_bytes: u64,
}

fn pull_files(options: &Options) -> Result<(), Failure> {
    let started = Instant::now();
    let hub = options.access.hub()?;
    let folder = match (&options.folder, &options.path) {
        (Some(folder), _) => folder.clone(),
        (None, Some(_)) => PathBuf::from("."),
        (None, None) => PathBuf::from(options.repository.name()),
    };
    let files = files(&hub, options)?;
    let mut wanted = Vec::new();
    let mut outcomes = Vec::new();
    for info in files {
        let target = folder.join(local_name(options, &info));
        if is_there(&target, &info)? {
            outcomes.push(Outcome { target, info, fetched_bytes: 0, resumed_bytes: 0 });
        } else if fs::symlink_metadata(&target).is_ok() && !options.force {
            return Err(Failure::at(&target, "already exists and is another file; --force replaces it"));
        } else {
            wanted.push((target, info));
        }
    }
    let watch = Onlooker::new(wanted.iter().map(|(_, info)| info.bytes).sum(), options.progress && !options.json)?;
    for (target, info) in wanted {
        let parent = target.parent().unwrap_or(&folder);
        fs::create_dir_all(parent).map_err(|error| Failure::at(parent, error))?;
        let pull = Pull {
            file: &info,
            target: &target,
            force: options.force,
            connections: options.access.connections,
            disk: io::system_disk(),
        };
        let check = |path: &Path| match is_container(info.path.as_str()) {
            true => check_container(path, options.workers, &|_| ()),
            false => Ok(()),
        };
        let pulled = hub::pull(&hub, &pull, &watch, &check).map_err(|error| watch.failure(error))?;
        let hub::Pulled { fetched_bytes, resumed_bytes } = pulled;
        outcomes.push(Outcome { target, info, fetched_bytes, resumed_bytes });
    }
    drop(watch);
    outcomes.sort_by(|a, b| a.info.path.cmp(&b.info.path));
    report(options, &outcomes, started.elapsed().as_secs_f64())
}

/// The files that are wanted.
fn files(hub: &Hub, options: &Options) -> Result<Vec<FileInfo>, Failure> {
    let Options { repository, revision, path, .. } = options;
    let watch = &Speaking;
    if let Some(path) = path {
        return Ok(vec![hub.file_info(repository, revision, path, watch).map_err(Failure::of)?]);
    }
    let listed = hub.list(repository, revision, watch).map_err(Failure::of)?;
    let files: Vec<FileInfo> = listed.files.into_iter().filter(|info| info.path.as_str() != HUBS_OWN).collect();
    if files.is_empty() { Err(Failure::of(format!("hf:{repository}: holds no files"))) } else { Ok(files) }
}

/// A single file goes where it is asked for; of a whole repository folders are kept.
fn local_name<'a>(options: &Options, info: &'a FileInfo) -> &'a str {
    if options.path.is_some() { info.path.file_name() } else { info.path.as_str() }
}

/// Whether `target` has the bytes already.
fn is_there(target: &Path, info: &FileInfo) -> Result<bool, Failure> {
    let Ok(found) = fs::metadata(target) else { return Ok(false) };
    if !found.is_file() || found.len() != info.bytes {
        return Ok(false);
    }
    let file = io::open(target, IoBackend::Auto).map_err(Failure::of)?;
    let digits = match info.identity {
        Identity::Sha256(_) => digest::sha256(&file, &|_| ()).map_err(Failure::of)?,
        Identity::Git(_) => hub::git_object_id(&file).map_err(Failure::of)?,
    };
    Ok(digits == info.identity.digits())
}

fn report(options: &Options, outcomes: &[Outcome], seconds: f64) -> Result<(), Failure> {
    let fetched_bytes: u64 = outcomes.iter().map(|outcome| outcome.fetched_bytes).sum();
    let commit = outcomes.first().map(|outcome| outcome.info.commit.to_string());
    if options.json {
        let file = |outcome: &Outcome| {
            let Outcome { target, info, fetched_bytes, resumed_bytes } = outcome;
            let (kind, digits) = (
                if matches!(info.identity, Identity::Sha256(_)) { "sha256" } else { "git_oid" },
                info.identity.digits(),
            );
            json!({
                "path": target.to_string_lossy(), "bytes": info.bytes, kind: digits,
                "fetched_bytes": fetched_bytes, "resumed_bytes": resumed_bytes,
            })
        };
        return terminal::print_json(&json!({
            "repository": options.repository.to_string(),
            "commit": commit,
            "files": outcomes.iter().map(file).collect::<Vec<Value>>(),
            "fetched_bytes": fetched_bytes,
            "seconds": seconds,
            "peak_rss_bytes": process::peak_rss_bytes(),
        }));
    }
    let mut text = String::new();
    for Outcome { target, info, fetched_bytes, resumed_bytes } in outcomes {
        let how = match (fetched_bytes, resumed_bytes) {
            (0, 0) if info.bytes > 0 => "was there".to_owned(),
            (_, 0) => "fetched".to_owned(),
            (_, resumed) => format!("fetched, {} of it earlier", HumanBytes(*resumed)),
        };
        let (kind, digits) = (info.identity.kind(), info.identity.digits());
        text += &format!("{}: {how}, {}, {kind} {digits}\n", target.display(), HumanBytes(info.bytes));
    }
    let rate = fetched_bytes as f64 / seconds.max(1e-9) / 1e6;
    let (count, commit) = (outcomes.len(), commit.unwrap_or_default());
    text += &format!(
        "hf:{}: {count} {}, {} fetched in {seconds:.2} s ({rate:.1} MB/s), peak memory {}, commit {commit}\n",
        options.repository,
        if count == 1 { "file" } else { "files" },
        HumanBytes(fetched_bytes),
        HumanBytes(process::peak_rss_bytes()),
    );
    terminal::print(&text)
}

/// Fetches the tensors whose names start with `prefix`, and nothing else but header and manifest.
fn pull_tensors(options: &Options, path: &RepoPath, prefix: &str, float: FloatType) -> Result<(), Failure> {
    let Options { access, repository, revision, .. } = options;
    let address = Address { repository: repository.clone(), revision: Some(revision.clone()), path: path.clone() };
    let file: Arc<dyn ReadAt> = Arc::new(access.file(&address)?);
    let folder = options.folder.clone().unwrap_or_else(|| {
        let name = path.file_name();
        PathBuf::from(format!("{}-tensors", name.strip_suffix(".mnw").unwrap_or(name)))
    });
    let source = open_remote(file)?;
    extract::write(
        &source,
        &extract::Options {
            file: PathBuf::from(address.to_string()),
            folder,
            prefix: prefix.to_owned(),
            float,
            shard_bytes_max: 4 << 30,
            workers: options.workers.min(access.connections),
            json: options.json,
            progress: options.progress,
        },
    )
}

/// A checkpoint at a hub, of which the manifest was checked against its digest.
pub(super) fn open_remote(file: Arc<dyn ReadAt>) -> Result<Checkpoint, Failure> {
    let label = file.label().to_owned();
    let container = mnw::open_verified(file).map_err(|error| match error {
        mnw::MnwError::Io(error) => Failure::of(error),
        error => Failure::of(format!("{label}: {error}")),
    })?;
    Ok(Checkpoint::from_container(container))
}
