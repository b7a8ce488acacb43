//! What a worker does with one unit: turn what was read into the bytes of the output. Decides nothing.

use std::ops::Range;

use half::{bf16, f16};
use minnow_common::{Encoding, FloatType};
use minnow_formats::Digest;
use minnow_formats::io::IoError;
use minnow_kernels::codec::{self, CodecError, Encoder, FloatMatrix, Quality};
use minnow_kernels::cpu::Isa;
use thiserror::Error;

use super::source::{Part, Piece, Source, Strips, Unit};
use super::tray::Tray;
use crate::plan::{Planned, Work};

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

/// One worker thread's share of the program: where bytes come from, how they are encoded, and memory of its own.
pub(super) struct Worker<'a> {
    source: &'a dyn Source,
    isa: Isa,
    encoder: Encoder,
    /// Decoded elements of the unit at hand.
    values: Vec<f32>,
}

impl<'a> Worker<'a> {
    /// A worker that encodes with `quality`.
    pub(super) fn new(source: &'a dyn Source, quality: Quality) -> Self {
        let isa = Isa::detect();
        Self { source, isa, encoder: Encoder::new(isa).with_quality(quality), values: Vec::new() }
    }

    /// Transforms one unit of `tensor`, from the inputs of `tray` into its results.
    pub(super) fn transform(&mut self, tensor: &Planned, unit: &Unit, tray: &mut Tray) -> Result<(), UnitError> {
        self.fetch(tensor, unit, tray)?;
        match &unit.piece {
            Piece::Bytes { .. } => Ok(()),
            Piece::Rows(rows) => self.decode(tensor, rows, tray),
            Piece::Tensor => {
                self.check_digests(tensor, tray)?;
                match tensor.work {
                    Work::Encode => self.encode(tensor, tray),
                    _ => repack(tensor, tray),
                }
            }
        }
    }

    /// Gets what no reader has brought.
    fn fetch(&self, tensor: &Planned, unit: &Unit, tray: &mut Tray) -> Result<(), IoError> {
        for part in Part::BOTH {
            let range = unit.piece.range_of(tensor, part);
            if !range.is_empty() && self.source.place(&tensor.name, part).is_none() {
                let bytes = (range.end - range.start) as usize;
                let mut buffer = tray.inputs.take(part, bytes);
                let result = self.source.read_part(&tensor.name, part, range.start, &mut buffer[..bytes]);
                tray.inputs.put(part, buffer, 0..bytes);
                result?;
            }
        }
        Ok(())
    }

    /// A whole matrix, which is in memory, against the digests of its container.
    fn check_digests(&self, tensor: &Planned, tray: &Tray) -> Result<(), UnitError> {
        let Some(expected) = self.source.digests(&tensor.name) else { return Ok(()) };
        for (part, expected) in [(Part::Data, Some(expected.data)), (Part::Scales, expected.scales)] {
            if expected.is_some_and(|expected| Digest::of(tray.inputs.bytes(part)) != expected) {
                return Err(UnitError::Digest(part));
            }
        }
        Ok(())
    }

    fn encode(&self, tensor: &Planned, tray: &mut Tray) -> Result<(), UnitError> {
        let (source, target) = (&tensor.source, &tensor.target);
        let Encoding::Float(float) = source.encoding() else {
            return Err(CodecError::CodeBook { from: source.encoding(), to: target.encoding() }.into());
        };
        let group = target.group().ok_or(CodecError::NotQuantized(target.encoding()))?;
        let cols = source.shape().last();
        let rows = source.shape().elements() / cols;
        let Tray { inputs, results } = tray;
        let matrix = FloatMatrix::new(inputs.bytes(Part::Data), float, rows as usize, cols as usize)?;
        let data = results.data.sized(target.data_bytes() as usize);
        let scales = results.scales.sized(target.scales_bytes() as usize);
        results.global_scale = self.encoder.encode_into(&matrix, target.encoding(), group, data, scales)?;
        Ok(())
    }

    /// Some rows of a quantized tensor as floating elements.
    fn decode(&mut self, tensor: &Planned, rows: &Range<u64>, tray: &mut Tray) -> Result<(), UnitError> {
        let (spec, cols) = (&tensor.source, tensor.source.shape().last());
        let Encoding::Float(float) = tensor.target.encoding() else {
            return Err(CodecError::NotQuantized(spec.encoding()).into());
        };
        let elements = ((rows.end - rows.start) * cols) as usize;
        if self.values.len() < elements {
            self.values.resize(elements, 0.0);
        }
        let values = &mut self.values[..elements];
        let (data, scales) = (tray.inputs.bytes(Part::Data), tray.inputs.bytes(Part::Scales));
        codec::check_scales(scales, spec.encoding())?;
        let strip = Strips::of(spec).spec(rows).map_err(CodecError::from)?;
        codec::decode_into(self.isa, data, scales, &strip, values)?;
        narrow(values, float, tray.results.data.sized(elements * float.bytes())).map_err(|index| {
            let (row, col) = (rows.start + index as u64 / cols, index as u64 % cols);
            UnitError::Float { row, col, value: values[index], float }
        })
    }
}

/// Codes and scales of a whole matrix in another order.
fn repack(tensor: &Planned, tray: &mut Tray) -> Result<(), UnitError> {
    let (data, scales, spec) = (tray.inputs.bytes(Part::Data), tray.inputs.bytes(Part::Scales), &tensor.source);
    codec::check_scales(scales, spec.encoding())?;
    let (data, scales) = codec::repack(data, scales, spec, tensor.target.encoding())?;
    tray.results.data.set(data);
    tray.results.scales.set(scales);
    tray.results.global_scale = spec.global_scale();
    Ok(())
}

/// Rounds `values` to `float` into `out`, little-endian. The index of the first value that does not fit is an error.
fn narrow(values: &[f32], float: FloatType, out: &mut [u8]) -> Result<(), usize> {
    fn each<const N: usize>(
        values: &[f32],
        out: &mut [u8],
        fits: impl Fn(f32) -> bool,
        stored: impl Fn(f32) -> [u8; N],
    ) -> Result<(), usize> {
        for (value, out) in values.iter().zip(out.as_chunks_mut::<N>().0) {
            *out = stored(*value);
        }
        match values.iter().position(|value| !fits(*value)) {
            None => Ok(()),
            Some(index) => Err(index),
        }
    }
    match float {
        FloatType::Bf16 => {
            each(values, out, |value| bf16::from_f32(value).is_finite(), |value| bf16::from_f32(value).to_le_bytes())
        }
        FloatType::F16 => {
            each(values, out, |value| f16::from_f32(value).is_finite(), |value| f16::from_f32(value).to_le_bytes())
        }
        FloatType::F32 => each(values, out, f32::is_finite, f32::to_le_bytes),
    }
}
