//! A damaged `.mnw` file on disk made whole from the one at a hub, of which only the damaged regions are fetched.
//!
//! What is damaged is told by the digests of the manifest, and the manifest by that of the header. Of the hub's file the
//! header is always read, and the manifest only if the local one is no good. Nothing is written before it is known that
//! both are one file, and every region has its digest before the next one is begun, so a repair that is interrupted has
//! repaired something and can be started again.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use minnow_common::FileOffset;
use thiserror::Error;

use super::Watch;
use super::error::HubError;
use super::listing::Identity;
use super::pull::write_all;
use super::remote::RemoteFile;
use crate::digest::{self, Digest};
use crate::io::{Disk, IoBackend, IoError, OsCause, ReadAt, open_on};
use crate::mnw::{self, Container, Damage, HEADER_BYTES, Header, MnwError};

/// What was wrong, and what it took.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repaired {
    /// Regions and gaps.
    pub damage: Damage,
    /// Whether the header was wrong, or the manifest.
    pub has_bad_head: bool,
    /// The length that the file had, if it was wrong.
    pub wrong_bytes: Option<u64>,
    /// Bytes that were fetched.
    pub fetched_bytes: u64,
}

/// Why a file is not repaired.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say what each field is")]
pub enum RepairError {
    #[error(transparent)]
    Hub(#[from] HubError),
    #[error(transparent)]
    Io(#[from] IoError),
    #[error("{label}: {error}")]
    Remote { label: String, error: MnwError },
    #[error("{path}: is sound, and another file than {label}: its manifest has BLAKE3 {found}, there it is {expected}")]
    Other { path: String, label: String, found: Digest, expected: Digest },
    #[error("{path}: too little of it is like {label}: {damaged} of {all} bytes differ; pull it anew")]
    TooDifferent { path: String, label: String, damaged: u64, all: u64 },
    #[error("{label}: tensor {tensor} has another digest than its manifest says; it is damaged at the hub")]
    DamagedThere { label: String, tensor: String },
    #[error("{path}: {action} failed: {}", OsCause(.error))]
    Disk { path: String, action: &'static str, error: io::Error },
    #[error("{path}: has SHA-256 {found} after the repair, but the hub states {expected}")]
    NotWhole { path: String, found: String, expected: String },
}

impl Repaired {
    /// Whether nothing was wrong.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.damage.is_none() && !self.has_bad_head && self.wrong_bytes.is_none()
    }
}

/// Finds out where `path` differs from `remote`, and unless it is a `dry_run` makes it the same. `looked` is told of bytes
/// that were read here, `watch` of bytes that came.
pub fn repair(
    path: &Path,
    remote: &Arc<RemoteFile>,
    disk: &Arc<dyn Disk>,
    workers: usize,
    dry_run: bool,
    looked: &(dyn Fn(u64) + Sync),
    watch: &dyn Watch,
) -> Result<Repaired, RepairError> {
    let local = open_on(disk, path, IoBackend::Buffered)?;
    let label = || remote.label().to_owned();
    let shown = || path.display().to_string();
    let of_remote = |error| RepairError::Remote { label: label(), error };

    let mut head = [0; HEADER_BYTES];
    if remote.len() < HEADER_BYTES as u64 {
        return Err(of_remote(MnwError::HeaderShort { file_bytes: remote.len() }));
    }
    remote.read_exact_at(FileOffset(0), &mut head)?;
    let header = Header::parse(&head, remote.len()).map_err(of_remote)?;
    let mut fetched_bytes = HEADER_BYTES as u64;

    // The local manifest, if it has the digest that its own header or the hub's claims.
    let own = mnw::open_verified(Arc::clone(&local)).ok();
    let (container, has_bad_head) = match own {
        Some(own) if own.header == header => (own, false),
        Some(own) => {
            let (found, expected) = (own.header.manifest_digest, header.manifest_digest);
            return Err(RepairError::Other { path: shown(), label: label(), found, expected });
        }
        None => {
            fetched_bytes += header.manifest_bytes;
            let file: Arc<dyn ReadAt> = Arc::clone(remote) as Arc<dyn ReadAt>;
            (mnw::open_verified(file).map_err(of_remote)?, true)
        }
    };
    let Container { manifest, .. } = &container;
    let damage = mnw::damage(&local, &header, manifest, workers, looked);
    let (damaged, all) = (damage.region_bytes(), manifest.weight_bytes());
    if has_bad_head && damaged > all / 2 {
        return Err(RepairError::TooDifferent { path: shown(), label: label(), damaged, all });
    }
    let wrong_bytes = (local.len() != remote.len()).then_some(local.len());
    let mut repaired = Repaired { damage, has_bad_head, wrong_bytes, fetched_bytes };
    if dry_run || repaired.is_nothing() {
        return Ok(repaired);
    }

    let failed = |action| move |error| RepairError::Disk { path: path.display().to_string(), action, error };
    // What is a link stays one; the file it leads to is repaired.
    let real = path.canonicalize().map_err(failed("resolving"))?;
    let file = disk.reopen(&real).map_err(failed("opening for writing"))?;
    disk.set_len(&file, remote.len()).map_err(failed("setting its length"))?;
    for (tensor, _, region) in &repaired.damage.regions {
        let mut hasher = blake3::Hasher::new();
        remote.copy(region.offset.0..region.end(), watch, &mut |at, bytes| {
            hasher.update(bytes);
            watch.moved(bytes.len() as u64, tensor);
            write(disk, &file, path, bytes, at)
        })?;
        repaired.fetched_bytes += region.bytes;
        if Digest(*hasher.finalize().as_bytes()) != region.digest {
            return Err(RepairError::DamagedThere { label: label(), tensor: tensor.clone() });
        }
    }
    for (start, end) in &repaired.damage.gaps {
        let zeros = vec![0; (end - start) as usize];
        write(disk, &file, path, &zeros, *start)?;
    }
    if has_bad_head {
        // The manifest was read once and its digest checked; its bytes may not be the canonical ones.
        let (start, end) = (header.manifest_offset.0, remote.len());
        remote.copy(start..end, watch, &mut |at, bytes| write(disk, &file, path, bytes, at))?;
        repaired.fetched_bytes += end - start;
        write(disk, &file, path, &head, 0)?;
    }
    disk.sync_all(&file).map_err(failed("syncing"))?;
    drop(file);

    if let Identity::Sha256(expected) = &remote.info().identity {
        let whole = open_on(disk, path, IoBackend::Buffered)?;
        let found = digest::sha256(&whole, looked)?;
        if found != *expected {
            return Err(RepairError::NotWhole { path: shown(), found, expected: expected.clone() });
        }
    }
    Ok(repaired)
}

fn write(disk: &Arc<dyn Disk>, file: &File, path: &Path, bytes: &[u8], at: u64) -> Result<(), HubError> {
    let path = || path.display().to_string();
    write_all(&**disk, file, bytes, at).map_err(|error| HubError::Disk { path: path(), action: "writing", error })
}
