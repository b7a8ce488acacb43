//! `mnwtool repair`: a damaged `.mnw` file made whole with as few bytes of the one at a hub as its digests allow.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use minnow_common::units::HumanBytes;
use minnow_formats::hub::{self, Address, RepairError, Repaired};
use minnow_formats::io;
use serde_json::json;

use super::remote::{Access, Onlooker};
use crate::failure::Failure;
use crate::terminal;

/// Regions that the list for people shows.
const REGIONS_SHOWN_MAX: usize = 20;

/// What to repair, and from where.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) access: Access,
    pub(crate) file: PathBuf,
    pub(crate) from: Address,
    pub(crate) dry_run: bool,
    pub(crate) workers: usize,
    pub(crate) json: bool,
    pub(crate) progress: bool,
}

/// Repairs in place.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let started = Instant::now();
    let remote = Arc::new(options.access.file(&options.from)?);
    let bytes = remote.info().bytes;
    let watch = Onlooker::new(bytes, options.progress && !options.json)?;
    let looked = |bytes| watch.progress().advance(bytes, "");
    let disk = io::system_disk();
    let repaired = hub::repair(&options.file, &remote, &disk, options.workers, options.dry_run, &looked, &watch)
        .map_err(|error| match error {
            RepairError::Hub(error) => watch.failure(error),
            error => Failure::of(error),
        })?;
    drop(watch);
    let seconds = started.elapsed().as_secs_f64();
    if options.json {
        let regions: Vec<_> = repaired
            .damage
            .regions
            .iter()
            .map(|(tensor, part, region)| {
                json!({"tensor": tensor, "region": part, "offset": region.offset.0, "bytes": region.bytes})
            })
            .collect();
        return terminal::print_json(&json!({
            "path": options.file.to_string_lossy(),
            "dry_run": options.dry_run,
            "sound": repaired.is_nothing(),
            "regions": regions,
            "gaps": repaired.damage.gaps.len(),
            "bad_head": repaired.has_bad_head,
            "wrong_bytes": repaired.wrong_bytes,
            "damaged_bytes": repaired.damage.region_bytes(),
            "fetched_bytes": repaired.fetched_bytes,
            "seconds": seconds,
        }));
    }
    terminal::print(&text(options, &repaired, seconds))
}

fn text(options: &Options, repaired: &Repaired, seconds: f64) -> String {
    let path = options.file.display();
    if repaired.is_nothing() {
        return format!("{path}: sound, nothing to repair\n");
    }
    let mut text = String::new();
    let Repaired { damage, has_bad_head, wrong_bytes, fetched_bytes } = repaired;
    // Writing to a string cannot fail.
    for (tensor, part, region) in damage.regions.iter().take(REGIONS_SHOWN_MAX) {
        let _ = writeln!(text, "damaged  {part} of {tensor}, {} at {}", HumanBytes(region.bytes), region.offset);
    }
    if damage.regions.len() > REGIONS_SHOWN_MAX {
        let _ =
            writeln!(text, "damaged  and {} regions more; --json lists all", damage.regions.len() - REGIONS_SHOWN_MAX);
    }
    for (start, _) in &damage.gaps {
        let _ = writeln!(text, "damaged  padding at {start:#x}");
    }
    if *has_bad_head {
        let _ = writeln!(text, "damaged  header or manifest");
    }
    if let Some(bytes) = wrong_bytes {
        let _ = writeln!(text, "length   {bytes} bytes");
    }
    let (damaged, fetched) = (HumanBytes(damage.region_bytes()), HumanBytes(*fetched_bytes));
    let _ = match options.dry_run {
        true => writeln!(text, "{path}: {damaged} in damaged regions; nothing was changed"),
        false => writeln!(
            text,
            "{path}: repaired, {damaged} in damaged regions, {fetched} fetched, {seconds:.2} s; the whole file is what the hub states"
        ),
    };
    text
}
