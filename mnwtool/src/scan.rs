//! Reading every tensor once to look at its values: in parallel, a bounded piece at a time, results in a fixed order.
//!
//! For commands that write no file (`compare`, `inspect --stats`). Which thread looks at a piece does not show in a
//! result, as each piece is looked at alone and results are put together in the order of the pieces.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use minnow_common::{Encoding, TensorSpec};
use minnow_formats::checkpoint::Checkpoint;
use minnow_formats::io::{AlignedBuffer, IoError};
use minnow_kernels::codec::{self, CodecError};
use minnow_kernels::cpu::Isa;
use thiserror::Error;

use crate::pipeline::source::{self, Part, Source, Strips};

/// Elements looked at together: 4 MiB in f32.
const ELEMENTS_AT_ONCE: u64 = 1 << 20;

/// Why a tensor's values cannot be had.
#[derive(Debug, Error)]
pub(crate) enum ScanError {
    /// They could not be read.
    #[error(transparent)]
    Read(#[from] IoError),
    /// They could not be decoded.
    #[error("{file}: {name}: {error}")]
    Codec { file: String, name: String, error: CodecError },
}

/// How a tensor is cut so that it can be read piece by piece in each of `specs`, which have one shape: ranges of its
/// row-major elements.
pub(crate) fn pieces<'a>(specs: &[&'a TensorSpec]) -> Box<dyn Iterator<Item = Range<u64>> + 'a> {
    match specs.iter().find(|spec| spec.encoding().is_quantized()).or(specs.first()) {
        None => Box::new(std::iter::empty()),
        Some(spec) if !spec.encoding().is_quantized() => {
            Box::new(source::cuts(spec.shape().elements(), ELEMENTS_AT_ONCE))
        }
        Some(spec) => {
            let cols = spec.shape().last();
            Box::new(Strips::of(spec).cuts(ELEMENTS_AT_ONCE).map(move |rows| rows.start * cols..rows.end * cols))
        }
    }
}

/// Calls `look` for each of `0..count` on `workers` threads, with memory that each thread keeps to itself. Results come
/// in order; of several errors the first in that order is returned.
pub(crate) fn each<M: Default, T: Send, E: Send>(
    count: usize,
    workers: usize,
    look: impl Fn(&mut M, usize) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let next = AtomicUsize::new(0);
    let found: Mutex<Vec<(usize, Result<T, E>)>> = Mutex::new(Vec::new());
    let work = || {
        let mut memory = M::default();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return;
            }
            let result = look(&mut memory, index);
            if result.is_err() {
                // Nobody starts anything that comes later; all that comes earlier is under way.
                next.store(count, Ordering::Relaxed);
            }
            found.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((index, result));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..workers.clamp(1, count.max(1)) {
            scope.spawn(work);
        }
        work();
    });
    let mut found = found.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    found.sort_unstable_by_key(|(index, _)| *index);
    found.into_iter().map(|(_, result)| result).collect()
}

/// Values of a piece of a tensor, and the memory to read it.
#[derive(Debug)]
pub(crate) struct Values {
    isa: Isa,
    data: AlignedBuffer,
    scales: AlignedBuffer,
    values: Vec<f32>,
}

impl Default for Values {
    fn default() -> Self {
        let empty = || AlignedBuffer::new(0);
        Self { isa: Isa::detect(), data: empty(), scales: empty(), values: Vec::new() }
    }
}

impl Values {
    /// The elements `range`, one of [`pieces`], of tensor `name`, dequantized.
    pub(crate) fn read(
        &mut self,
        checkpoint: &Checkpoint,
        name: &str,
        spec: &TensorSpec,
        range: &Range<u64>,
    ) -> Result<&[f32], ScanError> {
        let file = &checkpoint.files()[checkpoint.tensors()[name].file];
        let codec_error = |error| ScanError::Codec { file: file.label().to_owned(), name: name.to_owned(), error };
        let count = (range.end - range.start) as usize;
        if self.values.len() < count {
            self.values.resize(count, 0.0);
        }
        let values = &mut self.values[..count];
        if let Encoding::Float(float) = spec.encoding() {
            let width = float.bytes() as u64;
            let data = read(&mut self.data, checkpoint, name, Part::Data, range.start * width..range.end * width)?;
            float.widen(data, values);
            return Ok(values);
        }
        let (strips, cols) = (Strips::of(spec), spec.shape().last());
        let rows = range.start / cols..range.end / cols;
        let data = read(&mut self.data, checkpoint, name, Part::Data, strips.data(&rows))?;
        let scales = read(&mut self.scales, checkpoint, name, Part::Scales, strips.scales(&rows))?;
        let strip = strips.spec(&rows).map_err(|error| codec_error(error.into()))?;
        codec::decode_into(self.isa, data, scales, &strip, values).map_err(codec_error)?;
        Ok(values)
    }
}

fn read<'a>(
    buffer: &'a mut AlignedBuffer,
    checkpoint: &Checkpoint,
    name: &str,
    part: Part,
    range: Range<u64>,
) -> Result<&'a [u8], IoError> {
    let bytes = (range.end - range.start) as usize;
    if buffer.len() < bytes {
        *buffer = AlignedBuffer::new(bytes);
    }
    checkpoint.read_part(name, part, range.start, &mut buffer[..bytes])?;
    Ok(&buffer[..bytes])
}

#[cfg(test)]
mod tests {
    use minnow_common::{FloatType, Shape};

    use super::*;

    #[test]
    fn results_come_in_order_and_the_first_error_wins() {
        for workers in [1, 2, 3, 8, 64] {
            let doubled = each(1000, workers, |_: &mut (), index| Ok::<_, usize>(2 * index));
            assert_eq!(doubled, Ok((0..1000).map(|index| 2 * index).collect()));
            let failing = each(1000, workers, |_: &mut (), index| if index % 300 == 299 { Err(index) } else { Ok(()) });
            assert_eq!(failing, Err(299), "{workers} workers");
            assert_eq!(each(0, workers, |_: &mut (), _| Ok::<_, ()>(())), Ok(vec![]));
        }
    }

    #[test]
    fn pieces_fit_every_spec_of_a_tensor() {
        let shape = Shape::matrix(1000, 4096);
        let float = TensorSpec::new(shape.clone(), Encoding::Float(FloatType::F32), 0, None).unwrap();
        let int4 = TensorSpec::new(shape, Encoding::I4Mma, 128, None).unwrap();
        assert_eq!(pieces(&[&float]).count(), 4);
        let ranges: Vec<_> = pieces(&[&float, &int4]).collect();
        assert_eq!(ranges, pieces(&[&int4]).collect::<Vec<_>>());
        assert!(ranges.iter().all(|range| range.start % (8 * 4096) == 0));
        assert_eq!((ranges.first().unwrap().start, ranges.last().unwrap().end), (0, 4_096_000));
    }
}
