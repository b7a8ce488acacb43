//! Tensors of files that are not in memory: each is read once, into a few large regions that huge pages can back.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use minnow_formats::checkpoint::{Checkpoint, ReadError, Span};
use minnow_formats::io::{HugePages, Region, RegionMut};
use rayon::prelude::*;

use super::LoadError;
use super::bytes::Bytes;

/// Bytes of a region, unless a tensor alone has more.
const REGION_BYTES: usize = 1 << 30;
/// Every tensor begins at a multiple of this, as in a `.mnw` file: direct reads need no copy then.
const ALIGNMENT: usize = 4096;

/// Data and scales of a tensor; no bytes where it has none.
pub(super) type Parts = [Bytes; 2];

/// A part of a tensor, on its way.
struct Reading<'a> {
    name: &'a str,
    /// Its place in [`Parts`].
    part: usize,
    file: usize,
    span: Span,
    bytes: usize,
}

/// Reads those of the tensors `names` whose files are not in memory, in the order of the files, by all threads.
pub(super) fn read<'a>(
    checkpoint: &Checkpoint,
    names: impl Iterator<Item = &'a str>,
    huge_pages: HugePages,
) -> Result<HashMap<&'a str, Parts>, LoadError> {
    let mut readings = Vec::new();
    for name in names {
        let tensor = checkpoint.tensors().get(name).ok_or_else(|| ReadError::NoTensor(name.to_owned()))?;
        if checkpoint.files()[tensor.file].as_slice().is_some() {
            continue;
        }
        for (part, span) in [Some(tensor.data), tensor.scales].into_iter().enumerate() {
            let Some(span) = span else { continue };
            let too_large = |_| ReadError::TooLarge { tensor: name.to_owned(), bytes: span.bytes };
            let bytes = usize::try_from(span.bytes).map_err(too_large)?;
            readings.push(Reading { name, part, file: tensor.file, span, bytes });
        }
    }
    readings.sort_by_key(|reading| (reading.file, reading.span.offset.0));

    let mut loaded: HashMap<&str, Parts> = HashMap::new();
    let mut rest = &readings[..];
    while !rest.is_empty() {
        let (count, bytes) = first_region(rest);
        let (region, others) = rest.split_at(count);
        rest = others;
        let (memory, ranges) = read_region(checkpoint, region, bytes, huge_pages)?;
        for (reading, range) in region.iter().zip(ranges) {
            loaded.entry(reading.name).or_default()[reading.part] = Bytes::in_region(&memory, range);
        }
    }
    Ok(loaded)
}

/// How many parts share the next region, and the bytes they take there.
fn first_region(readings: &[Reading<'_>]) -> (usize, usize) {
    let mut total = 0_usize;
    for (count, reading) in readings.iter().enumerate() {
        let with = total.saturating_add(reading.bytes.next_multiple_of(ALIGNMENT));
        if count > 0 && with > REGION_BYTES {
            return (count, total);
        }
        total = with;
    }
    (readings.len(), total)
}

/// Memory with all of `readings`, and where in it each is. `bytes`: what they take.
fn read_region(
    checkpoint: &Checkpoint,
    readings: &[Reading<'_>],
    bytes: usize,
    huge_pages: HugePages,
) -> Result<(Arc<Region>, Vec<Range<usize>>), LoadError> {
    let failed = |error| LoadError::Memory { bytes, error };
    let mut memory = RegionMut::new(bytes, huge_pages).map_err(failed)?;
    let mut ranges = Vec::with_capacity(readings.len());
    let (mut start, mut free) = (0, &mut memory[..]);
    let mut slices = Vec::with_capacity(readings.len());
    for reading in readings {
        let taken = reading.bytes.next_multiple_of(ALIGNMENT);
        let (slice, others) = free.split_at_mut(taken);
        free = others;
        slices.push(&mut slice[..reading.bytes]);
        ranges.push(start..start + reading.bytes);
        start += taken;
    }
    slices.into_par_iter().zip(readings).with_max_len(1).try_for_each(|(out, reading)| {
        checkpoint.files()[reading.file].read_exact_at(reading.span.offset, out).map_err(ReadError::from)
    })?;
    Ok((Arc::new(memory.keep().map_err(failed)?), ranges))
}

#[cfg(test)]
mod tests {
    use minnow_common::FileOffset;

    use super::*;

    #[test]
    fn regions_are_full_but_a_tensor_is_in_one() {
        let regions = |sizes: &[usize]| {
            let readings: Vec<Reading<'_>> = sizes
                .iter()
                .map(|&bytes| {
                    let span = Span { offset: FileOffset(0), bytes: bytes as u64 };
                    Reading { name: "", part: 0, file: 0, span, bytes }
                })
                .collect();
            let (mut rest, mut found) = (&readings[..], Vec::new());
            while !rest.is_empty() {
                let (count, bytes) = first_region(rest);
                found.push((count, bytes));
                rest = &rest[count..];
            }
            found
        };
        assert_eq!(regions(&[]), []);
        assert_eq!(regions(&[1, 4096, 4097]), [(3, 4 * 4096)]);
        assert_eq!(regions(&[REGION_BYTES - 4096, 4096, 1]), [(2, REGION_BYTES), (1, 4096)]);
        assert_eq!(regions(&[1, REGION_BYTES + 1, 1]), [(1, 4096), (1, REGION_BYTES + 4096), (1, 4096)]);
    }
}
