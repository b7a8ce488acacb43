//! A weight matrix as it is stored: a view of its bytes whose sizes have been checked against its encoding.
//!
//! Bytes may lie at any address, mapped or embedded, so every access goes through byte loads. Nothing here decodes;
//! that is [`crate::codec::decode_rows`], the plain way, and [`crate::cpu`], the quick one.

use minnow_common::{Encoding, TensorSpec};

use crate::codec::CodecError;

/// A matrix `[rows, cols]` in any encoding, borrowed from wherever its bytes are.
///
/// Holds after [`WeightMatrix::new`]: `data` and `scales` have exactly the sizes that shape, encoding and group ask
/// for, and a packed encoding tiles the shape. Scale *values* are not looked at: [`crate::codec::check_scales`].
#[derive(Clone, Copy, Debug)]
pub struct WeightMatrix<'a> {
    rows: usize,
    cols: usize,
    encoding: Encoding,
    /// Columns that share a scale; 0 for floating encodings.
    group: usize,
    /// The matrix-wide scale; 1 where the encoding has none.
    global_scale: f32,
    data: &'a [u8],
    scales: &'a [u8],
}

impl<'a> WeightMatrix<'a> {
    /// Views `data` and `scales` as the tensor `spec` describes. `cols` is the innermost dimension, `rows` the product
    /// of all others. `scales` is empty for floating encodings.
    pub fn new(spec: &TensorSpec, data: &'a [u8], scales: &'a [u8]) -> Result<Self, CodecError> {
        for (region, found, expected) in
            [("data", data.len(), spec.data_bytes()), ("scales", scales.len(), spec.scales_bytes())]
        {
            if found as u64 != expected {
                return Err(CodecError::Length { region, expected, found: found as u64 });
            }
        }
        // Both fit a usize, for the bytes of at least half of all elements are in memory.
        let cols = spec.shape().last() as usize;
        let rows = (spec.shape().elements() / spec.shape().last()) as usize;
        let group = spec.group().map_or(0, |group| group.get());
        let global_scale = spec.global_scale().unwrap_or(1.0);
        Ok(Self { rows, cols, encoding: spec.encoding(), group, global_scale, data, scales })
    }

    /// Output features: the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features: the length of a row.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// How the elements are stored.
    #[must_use]
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Columns that share a scale; 0 for floating encodings.
    #[must_use]
    pub fn group(&self) -> usize {
        self.group
    }

    /// The matrix-wide scale of NVFP4; 1 elsewhere.
    #[must_use]
    pub fn global_scale(&self) -> f32 {
        self.global_scale
    }

    /// The same codes and scales without the matrix-wide scale.
    #[must_use]
    pub fn without_global_scale(&self) -> Self {
        Self { global_scale: 1.0, ..*self }
    }

    /// The stored elements or codes.
    #[must_use]
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// The stored scales; empty for floating encodings.
    #[must_use]
    pub fn scales(&self) -> &'a [u8] {
        self.scales
    }

    /// Bytes that one pass over the matrix reads.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.data.len() + self.scales.len()
    }
}
