//! Reading what was written: the SHA-256 of a finished file, and how much of an unfinished one is there.

use std::ops::Range;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::error::{MnwError, RegionPart};
use super::header::ALIGNMENT;
use super::manifest::{Region, Tensor};
use super::validate::Container;
use crate::digest::Digest;
use crate::io::ReadAt;
use crate::io::read_ahead::ReadAhead;

/// Bytes of a piece: large enough that giving it to a second thread costs nothing.
const PIECE_BYTES: usize = 4 << 20;
/// Pieces that are being read meanwhile.
const DEPTH: usize = 3;

/// The SHA-256 of the whole file, 64 lower-case digits. On the way every region is compared with its digest.
pub(super) fn sha256(container: &Container) -> Result<String, MnwError> {
    let whole = std::iter::once(((), 0..container.file.len()));
    let mut reader = ReadAhead::new(&container.file, whole, DEPTH, PIECE_BYTES);
    let mut sha256 = Sha256::new();
    let mut check = RegionCheck::new(container);
    while let Some(result) = reader.next(|piece| {
        let bytes = piece.bytes?;
        // The two hashes take about as long as each other, or as the disk.
        std::thread::scope(|scope| {
            let check = &mut check;
            let checked = std::thread::Builder::new().spawn_scoped(scope, move || check.update(piece.offset, bytes));
            sha256.update(bytes);
            match checked.map(|thread| thread.join()) {
                Ok(Ok(result)) => result,
                Ok(Err(panic)) => std::panic::resume_unwind(panic),
                Err(error) => Err(no_thread(container, error)),
            }
        })
    }) {
        result?;
    }
    Ok(sha256.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn no_thread(container: &Container, error: std::io::Error) -> MnwError {
    let path = container.file.label().to_owned();
    crate::io::IoError::Read { path, offset: minnow_common::FileOffset(0), bytes: container.file.len(), error }.into()
}

/// Compares the regions of a file with their digests while its bytes pass by in order.
struct RegionCheck<'a> {
    /// Those that have not ended, in order of their offsets.
    regions: std::iter::Peekable<std::vec::IntoIter<(&'a str, RegionPart, &'a Region)>>,
    hasher: blake3::Hasher,
}

impl<'a> RegionCheck<'a> {
    fn new(container: &'a Container) -> Self {
        let mut regions: Vec<_> = container.manifest.regions().collect();
        regions.sort_by_key(|(_, _, region)| region.offset);
        Self { regions: regions.into_iter().peekable(), hasher: blake3::Hasher::new() }
    }

    /// Takes the bytes from `offset` on.
    fn update(&mut self, offset: u64, bytes: &[u8]) -> Result<(), MnwError> {
        let end = offset + bytes.len() as u64;
        while let Some(&(tensor, part, region)) = self.regions.peek() {
            let (from, to) = (region.offset.0.max(offset), region.end().min(end));
            if from < to {
                self.hasher.update(&bytes[(from - offset) as usize..(to - offset) as usize]);
            }
            if region.end() > end {
                break;
            }
            self.regions.next();
            let found = Digest(*std::mem::take(&mut self.hasher).finalize().as_bytes());
            if found != region.digest {
                let (tensor, expected, offset) = (tensor.into(), region.digest, region.offset);
                return Err(MnwError::PayloadDigest { tensor, part, offset, expected, found });
            }
        }
        Ok(())
    }
}

/// How many of `tensors`, from the first on, are in `file` with their digests and with zeros after them. All of their
/// bytes are read.
pub(super) fn complete_tensors<'a>(file: &Arc<dyn ReadAt>, tensors: impl Iterator<Item = &'a Tensor>) -> usize {
    let regions: Vec<(usize, &Region)> = tensors
        .enumerate()
        .flat_map(|(index, tensor)| {
            std::iter::once(&tensor.data).chain(&tensor.scales).map(move |region| (index, region))
        })
        .collect();
    let tensor_count = regions.last().map_or(0, |(index, _)| index + 1);
    let padded = |region: &Region| -> Range<u64> { region.offset.0..region.end().next_multiple_of(ALIGNMENT) };
    let spans = regions.iter().enumerate().map(|(index, (_, region))| (index, padded(region)));
    let mut reader = ReadAhead::new(file, spans, DEPTH, PIECE_BYTES);
    let mut hasher = blake3::Hasher::new();
    let mut step = || {
        reader.next(|piece| {
            let (tensor, region) = regions[piece.key];
            let Ok(bytes) = piece.bytes else { return Err(tensor) };
            let payload = (region.end() - piece.offset).min(bytes.len() as u64) as usize;
            crate::digest::update(&mut hasher, &bytes[..payload]);
            if bytes[payload..].iter().any(|&byte| byte != 0) {
                return Err(tensor);
            }
            let mut is_right = || Digest(*std::mem::take(&mut hasher).finalize().as_bytes()) == region.digest;
            if piece.is_last && !is_right() { Err(tensor) } else { Ok(()) }
        })
    };
    loop {
        match step() {
            None => return tensor_count,
            Some(Ok(())) => {}
            Some(Err(tensor)) => return tensor,
        }
    }
}
