//! Opening a file, and the two deeper levels of checking (`docs/format-mnw.md` section 11).
//!
//! `open` reads the header and the manifest and nothing else. `validate` reads every payload byte once, in pieces of
//! bounded size and on as many threads as asked for; which fault is reported does not depend on their number.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use minnow_common::{Encoding, FileOffset, ModelConfig};
use thiserror::Error;

use super::error::{MnwError, RegionPart};
use super::header::{ALIGNMENT, HEADER_BYTES, Header};
use super::layout::Layout;
use super::manifest::{Manifest, Region, Tensor};
use super::scales::check_scales;
use crate::digest::Digest;
use crate::io::{AlignedBuffer, ReadAt};
use crate::names;

/// Payload bytes that a thread reads at a time.
const PIECE_BYTES: usize = 4 << 20;

/// How much of a file is checked. Each level includes the ones before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
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

/// Reads header and manifest and checks them: level open. At most 128 MiB are allocated for the manifest, and only
/// once its length is known to agree with the file.
pub fn open(file: Arc<dyn ReadAt>) -> Result<Container, MnwError> {
    let file_bytes = file.len();
    if file_bytes < HEADER_BYTES as u64 {
        return Err(MnwError::HeaderShort { file_bytes });
    }
    let mut raw = [0; HEADER_BYTES];
    file.read_exact_at(FileOffset(0), &mut raw)?;
    let header = Header::parse(&raw, file_bytes)?;
    let (manifest, config) = Manifest::parse(&manifest_bytes(&*file, &header)?, header.manifest_offset)?;
    Ok(Container { file, header, manifest, config })
}

/// Checks a container at `level`, on `workers` threads (at least one). `progress` is called, from any of them, with
/// the number of payload bytes just read; together they come to [`Manifest::weight_bytes`].
pub fn validate(
    container: &Container,
    level: Level,
    workers: usize,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Report, MnwError> {
    if level >= Level::Validate {
        container.check_manifest_digest()?;
        container.check_regions(workers, progress)?;
    }
    if level >= Level::Strict {
        container.check_canonical()?;
    }
    Ok(Report {
        level,
        tensors: container.manifest.tensors.len(),
        weight_bytes: container.manifest.weight_bytes(),
        file_bytes: container.header.file_bytes(),
    })
}

fn manifest_bytes(file: &dyn ReadAt, header: &Header) -> Result<Vec<u8>, MnwError> {
    // At most 128 MiB, and no more than the file has: both checked with the header.
    let mut bytes = vec![0; header.manifest_bytes as usize];
    file.read_exact_at(header.manifest_offset, &mut bytes)?;
    Ok(bytes)
}

impl Container {
    fn check_manifest_digest(&self) -> Result<(), MnwError> {
        let found = Digest::of(&manifest_bytes(&*self.file, &self.header)?);
        let expected = self.header.manifest_digest;
        if found == expected { Ok(()) } else { Err(MnwError::ManifestDigest { expected, found }) }
    }

    /// Digests and scale values. Tensors are taken in order; the first that fails, in that order, is reported.
    fn check_regions(&self, workers: usize, progress: &(dyn Fn(u64) + Sync)) -> Result<(), MnwError> {
        let tensors: Vec<(&String, &Tensor)> = self.manifest.tensors.iter().collect();
        let next = AtomicUsize::new(0);
        let first_fault: Mutex<Option<(usize, MnwError)>> = Mutex::new(None);
        let work = || {
            let mut buffer = AlignedBuffer::new(PIECE_BYTES);
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some((name, tensor)) = tensors.get(index) else { return };
                let result = self.check_tensor(name, tensor, &mut buffer, progress);
                let mut fault = first_fault.lock().unwrap_or_else(PoisonError::into_inner);
                if let Err(error) = result
                    && fault.as_ref().is_none_or(|(earlier, _)| index < *earlier)
                {
                    *fault = Some((index, error));
                }
                // Indices only grow, so every tensor before the first fault has been taken by someone.
                if fault.is_some() {
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..workers.clamp(1, tensors.len().max(1)) {
                scope.spawn(work);
            }
            work();
        });
        match first_fault.into_inner().unwrap_or_else(PoisonError::into_inner) {
            None => Ok(()),
            Some((_, error)) => Err(error),
        }
    }

    fn check_tensor(
        &self,
        name: &str,
        tensor: &Tensor,
        buffer: &mut [u8],
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), MnwError> {
        self.check_digest(name, RegionPart::Data, &tensor.data, buffer, progress, |_, _| ())?;
        let Some(scales) = &tensor.scales else { return Ok(()) };
        let encoding = tensor.spec.encoding();
        let scale_bytes = if encoding == Encoding::Nvfp4 { 1 } else { 2 };
        let mut fault = None;
        self.check_digest(name, RegionPart::Scales, scales, buffer, progress, |start, piece| {
            if fault.is_none()
                && let Err(bad) = check_scales(encoding, piece)
            {
                let index = start / scale_bytes + bad.index;
                fault = Some(MnwError::ScaleValue { tensor: name.to_owned(), encoding, index, bits: bad.bits });
            }
        })?;
        fault.map_or(Ok(()), Err)
    }

    /// Reads a region piece by piece, shows each to `look` with its offset in the region, and compares the digest.
    fn check_digest(
        &self,
        name: &str,
        part: RegionPart,
        region: &Region,
        buffer: &mut [u8],
        progress: &(dyn Fn(u64) + Sync),
        mut look: impl FnMut(u64, &[u8]),
    ) -> Result<(), MnwError> {
        let mut hasher = blake3::Hasher::new();
        let mut done = 0;
        while done < region.bytes {
            let piece = &mut buffer[..(region.bytes - done).min(PIECE_BYTES as u64) as usize];
            self.file.read_exact_at(FileOffset(region.offset.0 + done), piece)?;
            hasher.update(piece);
            look(done, piece);
            done += piece.len() as u64;
            progress(piece.len() as u64);
        }
        let found = Digest(*hasher.finalize().as_bytes());
        if found == region.digest {
            return Ok(());
        }
        Err(MnwError::PayloadDigest { tensor: name.to_owned(), part, expected: region.digest, found })
    }

    /// The file is exactly what a writer would make of its contents.
    fn check_canonical(&self) -> Result<(), MnwError> {
        let manifest = &self.manifest;
        if let Some(name) = manifest.assets.keys().find(|name| !names::is_known_asset(name)) {
            return Err(MnwError::AssetUnknown(name.clone()));
        }
        self.check_order()?;

        let canonical = manifest.encode();
        let found = manifest_bytes(&*self.file, &self.header)?;
        if canonical != found {
            let at = canonical.iter().zip(&found).take_while(|(a, b)| a == b).count() as u64;
            return Err(MnwError::Noncanonical { at });
        }

        self.check_zeros(HEADER_BYTES as u64, ALIGNMENT)?;
        for (_, _, region) in manifest.regions() {
            // The manifest starts at a boundary at or after this one, so the sum cannot overflow.
            self.check_zeros(region.end(), region.end().next_multiple_of(ALIGNMENT))?;
        }
        Ok(())
    }

    fn check_order(&self) -> Result<(), MnwError> {
        let tensors = &self.manifest.tensors;
        let layout = Layout::of(tensors.values().map(|tensor| &tensor.spec))
            .expect("regions start at boundaries, lie inside the file and do not overlap, so their padded sum fits");
        let check = |what: String, found: FileOffset, expected: FileOffset| match found == expected {
            true => Ok(()),
            false => Err(MnwError::Order { what, found, expected }),
        };
        for ((name, tensor), place) in tensors.iter().zip(&layout.places) {
            check(format!("tensor {name}: data"), tensor.data.offset, place.data)?;
            if let (Some(scales), Some(expected)) = (&tensor.scales, place.scales) {
                check(format!("tensor {name}: scales"), scales.offset, expected)?;
            }
        }
        check("the manifest".to_owned(), self.header.manifest_offset, layout.manifest_offset)
    }

    /// Bytes `start..end`, fewer than a page, are zero.
    fn check_zeros(&self, start: u64, end: u64) -> Result<(), MnwError> {
        let mut page = [0; ALIGNMENT as usize];
        let gap = &mut page[..(end - start) as usize];
        self.file.read_exact_at(FileOffset(start), gap)?;
        match gap.iter().position(|&byte| byte != 0) {
            None => Ok(()),
            Some(at) => Err(MnwError::Padding { offset: FileOffset(start + at as u64), value: gap[at] }),
        }
    }
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
