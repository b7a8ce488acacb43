//! Float <-> quantized blocks, bit-exact: a scalar codec, which is the oracle, and a quick one.
//!
//! The arithmetic is section 7 of `docs/format-mnw.md` and the layouts are its section 8; `docs/quant-schemes.md` tells
//! them in short. A matrix is encoded row by row: the arithmetic of a scheme (`int`, `nvfp4`) turns values into one
//! code a byte and row-major scales, and `layout` puts both where the encoding stores them. Decoding goes the other
//! way. Results depend on the values alone: no threads, no fused multiply-add, no table made at run time.
//!
//! Converters use [`Encoder`] and [`decode_into`], which give the bits of [`encode`] and [`decode`] from vector
//! instructions. [`Quality::Search`] is another choice of scales for the same format.

mod encoder;
mod int;
mod layout;
mod nvfp4;
mod search;

use minnow_common::{Encoding, GroupSize, Shape, ShapeError, TensorSpec, TensorSpecError};
use thiserror::Error;

use crate::cpu::{self, Isa};
use crate::matrix::WeightMatrix;

pub use encoder::{Encoder, FloatMatrix};
pub use nvfp4::{E2M1, e4m3};
pub(crate) use nvfp4::{e2m1_nearest, group_scale};
pub use search::{Quality, UnknownQuality};

/// The regions of an encoded matrix, as they lie on disk.
#[derive(Clone, Debug, PartialEq)]
pub struct Encoded {
    /// Codes, in the order of the encoding.
    pub data: Vec<u8>,
    /// Scales, in the order of the encoding.
    pub scales: Vec<u8>,
    /// The matrix-wide scale; NVFP4 only.
    pub global_scale: Option<f32>,
}

/// Why a matrix cannot be encoded, decoded or repacked.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum CodecError {
    /// Quantized weights are finite.
    #[error("the value in row {row}, column {col} is {value}, which cannot be quantized")]
    NonFinite {
        /// Row of the first such value.
        row: usize,
        /// Its column.
        col: usize,
        /// NaN or an infinity.
        value: f32,
    },
    /// The scale of a group is beyond FP16.
    #[error("row {row}, group {group}: the largest magnitude {max_abs} needs a scale that FP16 cannot represent")]
    ScaleOverflow {
        /// Row of the first such group.
        row: usize,
        /// Its number within the row.
        group: usize,
        /// Largest magnitude in the group.
        max_abs: f32,
    },
    /// A stored scale is zero, negative or not finite.
    #[error("scale {index} is stored as {bits:#x}, which is not an allowed {encoding} scale")]
    BadScale {
        /// Its position in the scales region, counted in scales.
        index: usize,
        /// Its bits.
        bits: u16,
        /// The encoding it belongs to.
        encoding: Encoding,
    },
    /// Floating elements are stored verbatim; there is nothing to encode or repack.
    #[error("{0} is not a quantized encoding")]
    NotQuantized(Encoding),
    /// Codes of one encoding mean something else in the other.
    #[error("codes stored as {from} cannot be repacked as {to}")]
    CodeBook {
        /// Encoding of the source.
        from: Encoding,
        /// Encoding asked for.
        to: Encoding,
    },
    /// Shape, encoding and group do not go together.
    #[error(transparent)]
    Spec(#[from] TensorSpecError),
    /// Not a matrix at all: zero or too many elements.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A region or a list of values has the wrong size.
    #[error("{region} has {found} entries where the shape asks for {expected}")]
    Length {
        /// Which one: `values`, or `source`, `data` or `scales` in bytes.
        region: &'static str,
        /// The size the shape asks for.
        expected: u64,
        /// The size found.
        found: u64,
    },
}

/// Rows that the packed layouts store together. A strip of eight rows, starting at a multiple of eight, is one
/// contiguous run of `data` and one of `scales` in *every* encoding.
pub const STRIP: usize = 8;

/// Encodes `values: [rows, cols]`, row-major, in groups of `group`.
///
/// Refuses floating encodings, shapes that the encoding does not tile, non-finite values, and groups whose scale
/// exceeds FP16. The first non-finite value is reported even if an earlier group's scale overflows.
pub fn encode(
    values: &[f32],
    rows: usize,
    cols: usize,
    encoding: Encoding,
    group: GroupSize,
) -> Result<Encoded, CodecError> {
    if !encoding.is_quantized() {
        return Err(CodecError::NotQuantized(encoding));
    }
    let spec = matrix_spec(rows, cols, encoding, group)?;
    if values.len() as u64 != spec.shape().elements() {
        let (expected, found) = (spec.shape().elements(), values.len() as u64);
        return Err(CodecError::Length { region: "values", expected, found });
    }
    if let Some(index) = values.iter().position(|value| !value.is_finite()) {
        return Err(CodecError::NonFinite { row: index / cols, col: index % cols, value: values[index] });
    }

    let order = layout::Order::of(encoding);
    let global_scale = (encoding == Encoding::Nvfp4).then(|| nvfp4::global_scale(values));
    let mut data = vec![0; spec.data_bytes() as usize];
    let mut scales = vec![0; spec.scales_bytes() as usize];
    let mut row_codes = vec![0; cols];
    let mut row_scales = vec![0; scales.len() / rows];
    for (row, values) in values.chunks_exact(cols).enumerate() {
        if let Some(global_scale) = global_scale {
            nvfp4::encode_row(values, global_scale, &mut row_codes, &mut row_scales);
        } else {
            int::encode_row(values, int::limit(encoding), group.get(), &mut row_codes, &mut row_scales).map_err(
                |overflow| CodecError::ScaleOverflow { row, group: overflow.group, max_abs: overflow.max_abs },
            )?;
        }
        order.store_codes(&mut data, row, &row_codes);
        order.store_scales(&mut scales, row, &row_scales);
    }
    Ok(Encoded { data, scales, global_scale })
}

/// Decodes a tensor in any encoding, floating ones included, to row-major f32: exactly the stored values, without the
/// rounding to BF16 that some consumers add. Scale values are not checked; a NaN scale gives NaN weights.
pub fn decode(data: &[u8], scales: &[u8], spec: &TensorSpec) -> Result<Vec<f32>, CodecError> {
    let matrix = WeightMatrix::new(spec, data, scales)?;
    let mut out = vec![0.0; matrix.rows() * matrix.cols()];
    decode_rows(&matrix, 0, &mut out);
    Ok(out)
}

/// [`decode`] by vector instructions, with the same bits, into `out: [rows, cols]`; `isa` is the best set to use.
/// Allocates nothing. For part of a tensor, give the bytes and the spec of that part: eight rows from a multiple of
/// eight on, see [`STRIP`], are a tensor of their own.
pub fn decode_into(isa: Isa, data: &[u8], scales: &[u8], spec: &TensorSpec, out: &mut [f32]) -> Result<(), CodecError> {
    let matrix = WeightMatrix::new(spec, data, scales)?;
    let (expected, found) = (spec.shape().elements(), out.len() as u64);
    if found != expected {
        return Err(CodecError::Length { region: "values", expected, found });
    }
    cpu::decode(isa, &matrix, 0, out);
    Ok(())
}

/// Decodes the rows that `out: [count, cols]` has room for, starting at `first_row`. Allocates nothing.
///
/// # Panics
/// If `out` is not a whole number of rows or the rows are not in the matrix: faults of the caller.
pub fn decode_rows(matrix: &WeightMatrix<'_>, first_row: usize, out: &mut [f32]) {
    let cols = matrix.cols();
    assert!(out.len().is_multiple_of(cols), "{} values are not whole rows of {cols}", out.len());
    let count = out.len() / cols;
    assert!(first_row + count <= matrix.rows(), "rows {first_row} + {count} of a matrix of {}", matrix.rows());
    if let Encoding::Float(float) = matrix.encoding() {
        let bytes_a_row = cols * float.bytes();
        float.widen(&matrix.data()[first_row * bytes_a_row..][..count * bytes_a_row], out);
        return;
    }
    let order = layout::Order::of(matrix.encoding());
    for (row, out) in (first_row..).zip(out.chunks_exact_mut(cols)) {
        let groups = cols / matrix.group();
        if matrix.encoding() == Encoding::Nvfp4 {
            order.load_codes(matrix.data(), row, cols, |col, code| out[col] = E2M1[usize::from(code)]);
            let scales = (0..groups).map(|group| e4m3(matrix.scales()[order.scale_index(groups, row, group)]));
            nvfp4::scale_row(out, scales, matrix.global_scale());
        } else {
            order.load_codes(matrix.data(), row, cols, |col, code| out[col] = int::value(order, code));
            let scales = (0..groups).map(|group| int::scale(matrix.scales(), order.scale_index(groups, row, group)));
            int::scale_row(out, scales, matrix.group());
        }
    }
}

/// Moves the codes and scales of `from` to where `to` stores them. Only between encodings with the same code book
/// (`i8_sym` and `i8_mma`, `i4_sym` and `i4_mma`, or an encoding and itself); values do not change.
pub fn repack(data: &[u8], scales: &[u8], from: &TensorSpec, to: Encoding) -> Result<(Vec<u8>, Vec<u8>), CodecError> {
    let source = WeightMatrix::new(from, data, scales)?;
    let Some(group) = from.group() else { return Err(CodecError::NotQuantized(source.encoding())) };
    if !source.encoding().same_code_book(to) {
        return Err(CodecError::CodeBook { from: source.encoding(), to });
    }
    TensorSpec::new(from.shape().clone(), to, group.get() as u64, from.global_scale())?;

    let (rows, cols) = (source.rows(), source.cols());
    let (source_order, target_order) = (layout::Order::of(source.encoding()), layout::Order::of(to));
    let mut target_data = vec![0; data.len()];
    let mut target_scales = vec![0; scales.len()];
    let mut row_codes = vec![0; cols];
    let mut row_scales = vec![0; scales.len() / rows];
    for row in 0..rows {
        source_order.load_codes(data, row, cols, |col, code| row_codes[col] = code);
        source_order.load_scales(scales, row, &mut row_scales);
        target_order.store_codes(&mut target_data, row, &row_codes);
        target_order.store_scales(&mut target_scales, row, &row_scales);
    }
    Ok((target_data, target_scales))
}

/// Refuses FP16 scales that are zero, negative or not finite, and E4M3 scales from 127 up (NaN, negative). An E4M3 zero
/// is allowed. Floating encodings have no scales.
pub fn check_scales(scales: &[u8], encoding: Encoding) -> Result<(), CodecError> {
    let bad = match encoding {
        Encoding::Float(_) if scales.is_empty() => return Ok(()),
        Encoding::Float(_) => {
            return Err(CodecError::Length { region: "scales", expected: 0, found: scales.len() as u64 });
        }
        Encoding::Nvfp4 => {
            scales.iter().position(|&code| code > nvfp4::E4M3_MAX_CODE).map(|at| (at, u16::from(scales[at])))
        }
        _ => {
            let (pairs, rest) = scales.as_chunks::<2>();
            if !rest.is_empty() {
                let found = scales.len() as u64;
                return Err(CodecError::Length { region: "scales", expected: found + 1, found });
            }
            let bits = || pairs.iter().map(|&pair| u16::from_le_bytes(pair));
            bits().enumerate().find(|&(_, bits)| !int::SCALE_BITS.contains(&bits))
        }
    };
    match bad {
        None => Ok(()),
        Some((index, bits)) => Err(CodecError::BadScale { index, bits, encoding }),
    }
}

fn matrix_spec(rows: usize, cols: usize, encoding: Encoding, group: GroupSize) -> Result<TensorSpec, CodecError> {
    let shape = Shape::new(vec![rows as u64, cols as u64])?;
    let global_scale = (encoding == Encoding::Nvfp4).then_some(1.0);
    Ok(TensorSpec::new(shape, encoding, group.get() as u64, global_scale)?)
}
