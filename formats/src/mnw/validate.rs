//! Opening a file, and the two deeper levels of checking (`docs/format-mnw.md` section 11).
//!
//! `open` reads the header and the manifest and nothing else. `validate` reads every payload byte once, in pieces of
//! bounded size and on as many threads as asked for, each reading ahead of its own hashing; which fault is reported does
//! not depend on their number. `validate_all` makes the same checks and goes on after a fault.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use minnow_common::{Encoding, FileOffset, ModelConfig};
use serde::Serialize;
use thiserror::Error;

use super::error::{MnwError, RegionPart};
use super::faults::{Fault, Faults, PROBLEMS_MAX, Problem};
use super::header::{ALIGNMENT, HEADER_BYTES, Header};
use super::layout::Layout;
use super::manifest::{Manifest, Region};
use super::scales::check_scales;
use crate::digest::Digest;
use crate::io::ReadAt;
use crate::io::read_ahead::{Piece, ReadAhead};
use crate::names;

/// Payload bytes of one read. With several in flight, disks are at their full speed.
const PIECE_BYTES: usize = 1 << 20;
/// Reads in flight for each thread, and how many threads may have as many; with more, memory counts.
const DEPTH: usize = 4;
const DEEP_WORKERS_MAX: usize = 16;

/// How much of a file is checked. Each level includes the ones before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Structure: what every reader checks, always.
    Open,
    /// Digests of the manifest and of every region, and the values of scales.
    #[default]
    Validate,
    /// The canonical form: exactly the bytes that a writer makes.
    Strict,
}

/// A `.mnw` file that passed [`Level::Open`].
#[derive(Clone, Debug)]
pub struct Container {
    /// The open file.
    pub file: Arc<dyn ReadAt>,
    /// Its header.
    pub header: Header,
    /// Its manifest.
    pub manifest: Manifest,
    /// Its `config.json`.
    pub config: ModelConfig,
}

/// What was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// The level that the file passed.
    pub level: Level,
    /// Tensors in the file.
    pub tensors: usize,
    /// Bytes of all regions.
    pub weight_bytes: u64,
    /// Length of the file.
    pub file_bytes: u64,
}

/// Everything that is wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Findings {
    /// The level that was asked for.
    pub level: Level,
    /// Tensors whose entries are sound, so that their bytes were looked at.
    pub tensors: usize,
    /// Bytes of their regions.
    pub weight_bytes: u64,
    /// Length of the file.
    pub file_bytes: u64,
    /// What is wrong, in the order of the checks; empty if the file is valid. The first is what [`validate`] reports.
    pub problems: Vec<Problem>,
    /// Whether there may be more problems than the first [`PROBLEMS_MAX`].
    pub is_cut_off: bool,
}

impl Findings {
    /// Whether the file passed the level.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.problems.is_empty()
    }
}

/// Reads header and manifest and checks them: level open. At most 128 MiB are allocated for the manifest, and only
/// once its length is known to agree with the file.
pub fn open(file: Arc<dyn ReadAt>) -> Result<Container, MnwError> {
    let (header, bytes) = read_head(&*file)?;
    parsed(file, header, &bytes)
}

/// [`open`], and the manifest's digest: for a file that came over a network.
pub fn open_verified(file: Arc<dyn ReadAt>) -> Result<Container, MnwError> {
    let (header, bytes) = read_head(&*file)?;
    let (expected, found) = (header.manifest_digest, Digest::of(&bytes));
    if found != expected {
        return Err(MnwError::ManifestDigest { expected, found });
    }
    parsed(file, header, &bytes)
}

/// The container of which this is the manifest.
fn parsed(file: Arc<dyn ReadAt>, header: Header, manifest: &[u8]) -> Result<Container, MnwError> {
    let mut faults = Faults::up_to(1);
    let parsed = Manifest::parse(manifest, header.manifest_offset, &mut faults);
    match (faults.into_first(), parsed) {
        (None, Some((manifest, Some(config)))) => Ok(Container { file, header, manifest, config }),
        (Some(fault), _) => Err(fault),
        (None, _) => unreachable!("a manifest without fault is complete"),
    }
}

/// Where the bytes of a file are not those that a manifest says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Damage {
    /// Regions without their digest, in the order of the file, each with the tensor it is of.
    pub regions: Vec<(String, RegionPart, Region)>,
    /// Start and end of gaps that are not zero.
    pub gaps: Vec<(u64, u64)>,
}

/// Compares `file` with what `header` and `manifest` say it holds, on `workers` threads. Bytes that cannot be read are
/// damaged too. `progress` comes to [`Manifest::weight_bytes`] if all can be read.
#[must_use]
pub fn damage(
    file: &Arc<dyn ReadAt>,
    header: &Header,
    manifest: &Manifest,
    workers: usize,
    progress: &(dyn Fn(u64) + Sync),
) -> Damage {
    let check = Check { file, header, manifest };
    let mut faults = Faults::up_to(usize::MAX);
    // There is no last fault, so it never ends early.
    let _ = check.regions(workers, progress, &mut faults);
    let mut damage = Damage::default();
    let bad: std::collections::HashSet<(String, RegionPart)> = faults.into_places().collect();
    let mut regions: Vec<Located<'_>> = manifest.regions().collect();
    regions.sort_by_key(|(_, _, region)| region.offset);
    let mut end = HEADER_BYTES as u64;
    for (name, part, region) in regions {
        damage.note_gap(check, end, region.offset.0);
        end = region.end();
        if bad.contains(&(name.to_owned(), part)) {
            damage.regions.push((name.to_owned(), part, *region));
        }
    }
    damage.note_gap(check, end, header.manifest_offset.0);
    damage
}

impl Damage {
    /// Whether there is none.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.regions.is_empty() && self.gaps.is_empty()
    }

    /// Bytes of all damaged regions.
    #[must_use]
    pub fn region_bytes(&self) -> u64 {
        self.regions.iter().map(|(_, _, region)| region.bytes).sum()
    }

    /// Notes `start..end` unless it is zero. A canonical file has no gap of a page or more; another one may.
    fn note_gap(&mut self, check: Check<'_>, start: u64, end: u64) {
        let mut at = start;
        while at < end {
            let next = end.min(at + ALIGNMENT);
            let mut faults = Faults::up_to(1);
            if check.zeros(None, at, next, &mut faults).is_none() {
                self.gaps.push((at, next));
            }
            at = next;
        }
    }
}

/// Checks a container at `level`, on `workers` threads (at least one). `progress` is called, from any of them, with
/// the number of payload bytes just read; together they come to [`Manifest::weight_bytes`].
pub fn validate(
    container: &Container,
    level: Level,
    workers: usize,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Report, MnwError> {
    let Container { file, header, manifest, .. } = container;
    let mut faults = Faults::up_to(1);
    // What `None` says is in the faults.
    let _ = Check { file, header, manifest }.run(level, workers, progress, &mut faults);
    match faults.into_first() {
        Some(fault) => Err(fault),
        None => Ok(Report {
            level,
            tensors: manifest.tensors.len(),
            weight_bytes: manifest.weight_bytes(),
            file_bytes: header.file_bytes(),
        }),
    }
}

/// Checks a file at `level` as [`open`] and [`validate`] do, and lists everything that is wrong. Tensors whose entries
/// are sound are checked even if others are not; the canonical form only of a sound manifest. `progress` comes to
/// [`Findings::weight_bytes`], at most the length of the file.
#[must_use]
pub fn validate_all(file: &Arc<dyn ReadAt>, level: Level, workers: usize, progress: &(dyn Fn(u64) + Sync)) -> Findings {
    let mut faults = Faults::up_to(PROBLEMS_MAX);
    let mut found = (0, 0);
    match read_head(&**file) {
        Err(fault) => {
            let _ = faults.add(fault);
        }
        Ok((header, bytes)) => {
            if let Some((manifest, _)) = Manifest::parse(&bytes, header.manifest_offset, &mut faults) {
                found = (manifest.tensors.len(), manifest.weight_bytes());
                let is_sound = faults.is_empty();
                let level = if is_sound { level } else { level.min(Level::Validate) };
                let _ = Check { file, header: &header, manifest: &manifest }.run(level, workers, progress, &mut faults);
            }
        }
    }
    let is_cut_off = faults.is_full();
    let (tensors, weight_bytes) = found;
    Findings { level, tensors, weight_bytes, file_bytes: file.len(), problems: faults.into_problems(), is_cut_off }
}

/// The header, and the bytes of the manifest.
fn read_head(file: &dyn ReadAt) -> Result<(Header, Vec<u8>), MnwError> {
    let file_bytes = file.len();
    if file_bytes < HEADER_BYTES as u64 {
        return Err(MnwError::HeaderShort { file_bytes });
    }
    let mut raw = [0; HEADER_BYTES];
    file.read_exact_at(FileOffset(0), &mut raw)?;
    let header = Header::parse(&raw, file_bytes)?;
    let bytes = manifest_bytes(file, &header)?;
    Ok((header, bytes))
}

fn manifest_bytes(file: &dyn ReadAt, header: &Header) -> Result<Vec<u8>, MnwError> {
    // At most 128 MiB, and no more than the file has: both checked with the header.
    let mut bytes = vec![0; header.manifest_bytes as usize];
    file.read_exact_at(header.manifest_offset, &mut bytes)?;
    Ok(bytes)
}

/// What is checked beyond [`Level::Open`].
#[derive(Clone, Copy)]
struct Check<'a> {
    file: &'a Arc<dyn ReadAt>,
    header: &'a Header,
    manifest: &'a Manifest,
}

/// A region to be read, and whose it is.
type Located<'a> = (&'a str, RegionPart, &'a Region);

impl Check<'_> {
    /// Makes the checks in order, until `faults` takes no more.
    fn run(self, level: Level, workers: usize, progress: &(dyn Fn(u64) + Sync), faults: &mut Faults) -> Option<()> {
        if level >= Level::Validate {
            self.manifest_digest(faults)?;
            self.regions(workers, progress, faults)?;
        }
        if level >= Level::Strict {
            self.canonical_form(faults)?;
        }
        Some(())
    }

    fn manifest_digest(self, faults: &mut Faults) -> Option<()> {
        let expected = self.header.manifest_digest;
        match manifest_bytes(&**self.file, self.header).map(|bytes| Digest::of(&bytes)) {
            Ok(found) if found == expected => Some(()),
            Ok(found) => faults.add(MnwError::ManifestDigest { expected, found }),
            Err(error) => faults.add(error),
        }
    }

    /// Digests and scale values of every region. Threads take regions in order; faults are noted in that order.
    fn regions(self, workers: usize, progress: &(dyn Fn(u64) + Sync), faults: &mut Faults) -> Option<()> {
        let regions: Vec<Located<'_>> = self.manifest.regions().collect();
        let workers = workers.clamp(1, regions.len().max(1));
        let next = AtomicUsize::new(0);
        // The first region with a fault. Indices only grow, so when it is known, every region before it has been taken
        // by someone, and nobody takes another if one fault is enough.
        let first_fault = AtomicUsize::new(usize::MAX);
        let found: Mutex<Vec<(usize, Fault)>> = Mutex::default();
        let only_first = faults.only_first();
        let work = || {
            let spans = std::iter::from_fn(|| {
                if only_first && first_fault.load(Ordering::Relaxed) != usize::MAX {
                    return None;
                }
                let index = next.fetch_add(1, Ordering::Relaxed);
                let (_, _, region) = regions.get(index)?;
                Some((index, region.offset.0..region.end()))
            });
            let depth = if workers <= DEEP_WORKERS_MAX { DEPTH } else { 1 };
            let mut reader = ReadAhead::new(self.file, spans, depth, PIECE_BYTES);
            let mut check = RegionCheck::default();
            loop {
                let step = reader.next(|piece| {
                    let index = piece.key;
                    if only_first && index > first_fault.load(Ordering::Relaxed) {
                        return None;
                    }
                    let encoding = self.manifest.tensors[regions[index].0].spec.encoding();
                    let new_faults = check.update(&regions[index], encoding, piece, progress);
                    if !new_faults.is_empty() {
                        first_fault.fetch_min(index, Ordering::Relaxed);
                        let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
                        found.extend(new_faults.into_iter().map(|fault| (index, fault)));
                    }
                    Some(())
                });
                if step.flatten().is_none() {
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..workers {
                // With fewer threads than asked for, those there are do all the work.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        // Stable: faults of one region stay in their order.
        found.sort_by_key(|(index, _)| *index);
        found.into_iter().try_for_each(|(_, fault)| faults.add(fault))
    }

    /// The file is exactly what a writer would make of its contents.
    fn canonical_form(self, faults: &mut Faults) -> Option<()> {
        let manifest = self.manifest;
        for name in manifest.assets.keys().filter(|name| !names::is_known_asset(name)) {
            faults.add(MnwError::AssetUnknown(name.clone()))?;
        }
        self.order(faults)?;

        match manifest_bytes(&**self.file, self.header) {
            Ok(found) => {
                let canonical = manifest.encode();
                if canonical != found {
                    let at = canonical.iter().zip(&found).take_while(|(a, b)| a == b).count() as u64;
                    faults.add(MnwError::Noncanonical { at })?;
                }
            }
            Err(error) => faults.add(error)?,
        }

        self.zeros(None, HEADER_BYTES as u64, ALIGNMENT, faults)?;
        for (name, part, region) in manifest.regions() {
            // The manifest starts at a boundary at or after this one, so the sum cannot overflow.
            self.zeros(Some((name, part)), region.end(), region.end().next_multiple_of(ALIGNMENT), faults)?;
        }
        Some(())
    }

    fn order(self, faults: &mut Faults) -> Option<()> {
        let tensors = &self.manifest.tensors;
        let layout = Layout::of(tensors.values().map(|tensor| &tensor.spec))
            .expect("regions start at boundaries, lie inside the file and do not overlap, so their padded sum fits");
        let mut check = |what: String, of: Option<(&str, RegionPart)>, found: FileOffset, expected: FileOffset| {
            if found == expected {
                return Some(());
            }
            faults.add(Fault::of(MnwError::Order { what, found, expected }, of))
        };
        for ((name, tensor), place) in tensors.iter().zip(&layout.places) {
            let data = Some((name.as_str(), RegionPart::Data));
            check(format!("tensor {name}: data"), data, tensor.data.offset, place.data)?;
            if let (Some(scales), Some(expected)) = (&tensor.scales, place.scales) {
                let of = Some((name.as_str(), RegionPart::Scales));
                check(format!("tensor {name}: scales"), of, scales.offset, expected)?;
            }
        }
        check("the manifest".to_owned(), None, self.header.manifest_offset, layout.manifest_offset)
    }

    /// Bytes `start..end`, fewer than a page, are zero. They follow the region `of`.
    fn zeros(self, of: Option<(&str, RegionPart)>, start: u64, end: u64, faults: &mut Faults) -> Option<()> {
        let mut page = [0; ALIGNMENT as usize];
        let gap = &mut page[..(end - start) as usize];
        if let Err(error) = self.file.read_exact_at(FileOffset(start), gap) {
            return faults.add(Fault::of(error.into(), of));
        }
        match gap.iter().position(|&byte| byte != 0) {
            None => Some(()),
            Some(at) => {
                let (offset, value) = (FileOffset(start + at as u64), gap[at]);
                faults.add(Fault::of(MnwError::Padding { offset, value }, of))
            }
        }
    }
}

/// The check of one region after the other, piece by piece.
#[derive(Default)]
struct RegionCheck {
    hasher: blake3::Hasher,
    bad_scale: Option<Fault>,
    /// A piece could not be read, so nothing can be said of the rest.
    is_unreadable: bool,
}

impl RegionCheck {
    /// Takes the next piece; with the last one of a region, says what is wrong with it.
    fn update(
        &mut self,
        &(name, part, region): &Located<'_>,
        encoding: Encoding,
        piece: Piece<'_, usize>,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Vec<Fault> {
        let mut faults = Vec::new();
        match piece.bytes {
            Ok(bytes) if !self.is_unreadable => {
                self.hasher.update(bytes);
                if part == RegionPart::Scales && self.bad_scale.is_none() {
                    self.bad_scale = bad_scale(name, region, encoding, piece.offset, bytes);
                }
                progress(bytes.len() as u64);
            }
            Ok(_) => {}
            Err(error) => {
                if !self.is_unreadable {
                    faults.push(Fault::of(error.into(), Some((name, part))));
                }
                self.is_unreadable = true;
            }
        }
        if piece.is_last {
            let Self { hasher, bad_scale, is_unreadable } = std::mem::take(self);
            let (found, expected) = (Digest(*hasher.finalize().as_bytes()), region.digest);
            if !is_unreadable && found != expected {
                let (tensor, offset) = (name.into(), region.offset);
                faults.push(MnwError::PayloadDigest { tensor, part, offset, expected, found }.into());
            }
            faults.extend(bad_scale);
        }
        faults
    }
}

/// The first scale that no reader accepts, in bytes of a scales region that start at `offset`.
fn bad_scale(name: &str, region: &Region, encoding: Encoding, offset: u64, bytes: &[u8]) -> Option<Fault> {
    let scale_bytes = if encoding == Encoding::Nvfp4 { 1 } else { 2 };
    let bad = check_scales(encoding, bytes).err()?;
    let index = (offset - region.offset.0) / scale_bytes + bad.index;
    let fault = MnwError::ScaleValue { tensor: name.to_owned(), encoding, index, bits: bad.bits };
    Some(Fault { offset: Some(FileOffset(region.offset.0 + index * scale_bytes)), ..fault.into() })
}

impl Level {
    /// The value on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Validate => "validate",
            Self::Strict => "strict",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A word that names no level.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("unknown level {0:?}, expected open, validate or strict")]
pub struct UnknownLevel(pub String);

impl FromStr for Level {
    type Err = UnknownLevel;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let all = [Self::Open, Self::Validate, Self::Strict];
        all.into_iter().find(|level| level.name() == name).ok_or_else(|| UnknownLevel(name.to_owned()))
    }
}
