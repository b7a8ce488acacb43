//! The folder that all Hugging Face tools share, as they lay it out:
//!
//! ```text
//! models--OWNER--NAME/blobs/DIGEST              the bytes
//! models--OWNER--NAME/snapshots/COMMIT/FILE     a link to them
//! models--OWNER--NAME/refs/REVISION             the commit that it meant last
//! ```

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Watch;
use super::address::{Address, Repository, Revision};
use super::client::Hub;
use super::error::HubError;
use super::listing::FileInfo;
use super::pull::{Pull, pull};
use crate::io::Disk;

/// A file in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cached {
    /// Where it is: the link of its snapshot.
    pub path: PathBuf,
    /// The commit it is of.
    pub commit: Revision,
    /// Bytes that had to be fetched.
    pub fetched_bytes: u64,
    /// Why it is not known to be the newest, if it is not: one line to log.
    pub stale: Option<String>,
}

/// Finds a file in `cache`, or fetches it into there. Without a network, what the revision meant last will do.
pub fn cached(
    hub: &Hub,
    cache: &Path,
    address: &Address,
    disk: &Arc<dyn Disk>,
    watch: &dyn Watch,
    check: &dyn Fn(&Path) -> Result<(), String>,
) -> Result<Cached, HubError> {
    let main = Revision::main();
    let revision = address.revision.as_ref().unwrap_or(&main);
    let folder = cache.join(folder_name(&address.repository));
    let info = match hub.file_info(&address.repository, revision, &address.path, watch) {
        Ok(info) => info,
        Err(error) if error.is_unreachable() => {
            return last_known(&folder, address, revision).ok_or(error).map(|(path, commit)| {
                let stale = Some(format!("{address}: the hub cannot be reached; using what it had at commit {commit}"));
                Cached { path, commit, fetched_bytes: 0, stale }
            });
        }
        Err(error) => return Err(error),
    };
    let path = folder.join("snapshots").join(info.commit.to_string()).join(info.path.as_str());
    let blobs = folder.join("blobs");
    let blob = blobs.join(info.identity.digits());
    let mut fetched_bytes = 0;
    if fs::metadata(&blob).is_ok_and(|found| found.len() == info.bytes) {
        watch.moved(0, info.path.as_str());
    } else {
        create_folder(&blobs)?;
        // An old blob of another length can only be what is left of a fault.
        let wanted = Pull { file: &info, target: &blob, force: true, connections: 8, disk: Arc::clone(disk) };
        fetched_bytes = pull(hub, &wanted, watch, check)?.fetched_bytes;
    }
    link(&path, &info)?;
    if !revision.is_commit() {
        remember(&folder, revision, &info.commit)?;
    }
    Ok(Cached { path, commit: info.commit, fetched_bytes, stale: None })
}

fn folder_name(repository: &Repository) -> String {
    format!("models--{}--{}", repository.owner(), repository.name())
}

/// What a revision meant last, if the file is there.
fn last_known(folder: &Path, address: &Address, revision: &Revision) -> Option<(PathBuf, Revision)> {
    let commit: Revision = if revision.is_commit() {
        revision.clone()
    } else {
        fs::read_to_string(folder.join("refs").join(revision.to_string())).ok()?.trim().parse().ok()?
    };
    let path = folder.join("snapshots").join(commit.to_string()).join(address.path.as_str());
    path.exists().then_some((path, commit))
}

/// Makes the snapshot's link to the blob.
fn link(path: &Path, info: &FileInfo) -> Result<(), HubError> {
    // From snapshots/COMMIT, and one further up for each folder in the repository.
    let up = "../".repeat(2 + info.path.as_str().matches('/').count());
    let blob = format!("{up}blobs/{}", info.identity.digits());
    create_folder(path.parent().unwrap_or(path))?;
    match std::os::unix::fs::symlink(blob, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(HubError::Disk { path: path.display().to_string(), action: "linking", error }),
        Ok(()) => Ok(()),
    }
}

fn remember(folder: &Path, revision: &Revision, commit: &Revision) -> Result<(), HubError> {
    let path = folder.join("refs").join(revision.to_string());
    create_folder(path.parent().unwrap_or(folder))?;
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    fs::write(&temporary, commit.to_string())
        .and_then(|()| fs::rename(&temporary, &path))
        .map_err(|error| HubError::Disk { path: path.display().to_string(), action: "writing", error })
}

fn create_folder(path: &Path) -> Result<(), HubError> {
    fs::create_dir_all(path).map_err(|error| HubError::Disk {
        path: path.display().to_string(),
        action: "creating",
        error,
    })
}
