//! What a worker does with one unit: read it, and turn it into the bytes of the output. Decides nothing.

use std::ops::Range;

use half::{bf16, f16};
use minnow_common::{Encoding, FloatType};
use minnow_formats::Digest;
use minnow_formats::io::IoError;
use minnow_kernels::codec::{self, CodecError, Encoded};
use thiserror::Error;

use super::budget::SLICE_BYTES;
use super::source::{self, Part, Piece, Source, Strips, Unit};
use crate::plan::{Planned, Work};

/// The result of a unit.
#[derive(Debug)]
pub(crate) enum Content {
    /// The next bytes of the tensor's data region.
    Data(Vec<u8>),
    /// The next bytes of its scales region.
    Scales(Vec<u8>),
    /// Both regions.
    Tensor(Encoded),
}

/// Why a unit failed.
#[derive(Debug, Error)]
pub(crate) enum UnitError {
    /// It could not be read.
    #[error(transparent)]
    Read(#[from] IoError),
    /// Its values cannot be represented, or its scales are damaged.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// It is not what the source's manifest says.
    #[error("{0} differs from its digest in the source's manifest; the file is damaged")]
    Digest(Part),
    /// A decoded value does not fit the floating type asked for.
    #[error("the value in row {row}, column {col} is {value}, which {} cannot represent", .float)]
    Float { row: u64, col: u64, value: f32, float: FloatType },
}

/// Reads and transforms one unit of `tensor`.
pub(crate) fn transform(tensor: &Planned, unit: &Unit, source: &dyn Source) -> Result<Content, UnitError> {
    match &unit.piece {
        Piece::Bytes { part, range } => {
            let bytes = read(source, &tensor.name, *part, range.clone())?;
            Ok(match part {
                Part::Data => Content::Data(bytes),
                Part::Scales => Content::Scales(bytes),
            })
        }
        Piece::Tensor => transformed(tensor, source).map(Content::Tensor),
        Piece::Rows(rows) => decoded(tensor, rows.clone(), source).map(Content::Data),
    }
}

fn read(source: &dyn Source, name: &str, part: Part, range: Range<u64>) -> Result<Vec<u8>, IoError> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    source.read_part(name, part, range.start, &mut bytes)?;
    Ok(bytes)
}

/// A whole matrix, encoded or repacked.
fn transformed(tensor: &Planned, source: &dyn Source) -> Result<Encoded, UnitError> {
    let spec = &tensor.source;
    let data = read(source, &tensor.name, Part::Data, 0..spec.data_bytes())?;
    let scales = match spec.scales_bytes() {
        0 => Vec::new(),
        bytes => read(source, &tensor.name, Part::Scales, 0..bytes)?,
    };
    check_digests(tensor, source, &data, &scales)?;
    let encoding = tensor.target.encoding();
    let Encoding::Float(float) = spec.encoding() else {
        codec::check_scales(&scales, spec.encoding())?;
        let (data, scales) = codec::repack(&data, &scales, spec, encoding)?;
        return Ok(Encoded { data, scales, global_scale: spec.global_scale() });
    };
    debug_assert_eq!(tensor.work, Work::Encode);
    let values = float.widened(&data);
    drop(data);
    let cols = spec.shape().last() as usize;
    let group = tensor.target.group().ok_or(CodecError::NotQuantized(encoding))?;
    Ok(codec::encode(&values, values.len() / cols, cols, encoding, group)?)
}

fn check_digests(tensor: &Planned, source: &dyn Source, data: &[u8], scales: &[u8]) -> Result<(), UnitError> {
    let Some(expected) = source.digests(&tensor.name) else { return Ok(()) };
    if Digest::of(data) != expected.data {
        return Err(UnitError::Digest(Part::Data));
    }
    match expected.scales {
        Some(expected) if Digest::of(scales) != expected => Err(UnitError::Digest(Part::Scales)),
        _ => Ok(()),
    }
}

/// Some rows of a quantized tensor as floating elements.
fn decoded(tensor: &Planned, rows: Range<u64>, source: &dyn Source) -> Result<Vec<u8>, UnitError> {
    let spec = &tensor.source;
    let (strips, cols) = (Strips::of(spec), spec.shape().last());
    let data = read(source, &tensor.name, Part::Data, strips.data(&rows))?;
    let scales = read(source, &tensor.name, Part::Scales, strips.scales(&rows))?;
    if rows == (0..strips.rows) {
        check_digests(tensor, source, &data, &scales)?;
    } else if rows.start == 0 {
        check_digests_by_slice(tensor, source)?;
    }
    codec::check_scales(&scales, spec.encoding())?;
    let values = codec::decode(&data, &scales, &strips.spec(&rows).map_err(CodecError::from)?)?;
    let Encoding::Float(float) = tensor.target.encoding() else {
        return Err(CodecError::NotQuantized(spec.encoding()).into());
    };
    let fits: fn(f32) -> bool = match float {
        FloatType::Bf16 => |value| bf16::from_f32(value).is_finite(),
        FloatType::F16 => |value| f16::from_f32(value).is_finite(),
        FloatType::F32 => f32::is_finite,
    };
    if let Some(index) = values.iter().position(|&value| !fits(value)) {
        let (row, col) = (rows.start + index as u64 / cols, index as u64 % cols);
        return Err(UnitError::Float { row, col, value: values[index], float });
    }
    Ok(match float {
        FloatType::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
        FloatType::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        FloatType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    })
}

/// [`check_digests`] for a tensor that is not in memory as a whole.
fn check_digests_by_slice(tensor: &Planned, source: &dyn Source) -> Result<(), UnitError> {
    let Some(expected) = source.digests(&tensor.name) else { return Ok(()) };
    let regions = [
        (Part::Data, tensor.source.data_bytes(), Some(expected.data)),
        (Part::Scales, tensor.source.scales_bytes(), expected.scales),
    ];
    for (part, bytes, expected) in regions {
        let mut hasher = blake3::Hasher::new();
        for range in source::cuts(bytes, SLICE_BYTES) {
            hasher.update(&read(source, &tensor.name, part, range)?);
        }
        let found = Digest(*hasher.finalize().as_bytes());
        if expected.is_some_and(|expected| expected != found) {
            return Err(UnitError::Digest(part));
        }
    }
    Ok(())
}
