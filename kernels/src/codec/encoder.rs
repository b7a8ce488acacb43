//! Source bytes straight to quantized regions, sixteen values at a time: the quick twin of [`encode`](super::encode),
//! with its bits and its errors.
//!
//! BF16 and F16 are widened in registers, so nothing is allocated and no copy in f32 is made. Integer encodings read
//! the source once; NVFP4 reads it twice, as its scales depend on the largest magnitude of the matrix. Rows are read
//! one after the other, and a strip of eight rows is written while it is in the nearest cache.
//!
//! The kernels only notice *that* a matrix has to be refused. Which value or group is at fault is then found by
//! [`refusal`], slowly, in the order of the scalar codec.

use minnow_common::{Encoding, FloatType, GroupSize, Shape};

use super::search::{self, Quality};
use super::{CodecError, Encoded, STRIP, e4m3, int, matrix_spec, nvfp4};
use crate::cpu::{Isa, Kernel, LANES, Lanes};

/// A matrix `[rows, cols]` of floating elements as a checkpoint stores them: little-endian, row-major, at any address.
#[derive(Clone, Copy, Debug)]
pub struct FloatMatrix<'a> {
    bytes: &'a [u8],
    float: FloatType,
    rows: usize,
    cols: usize,
}

impl<'a> FloatMatrix<'a> {
    /// Views `bytes`, which must be exactly `rows * cols` elements and not none.
    pub fn new(bytes: &'a [u8], float: FloatType, rows: usize, cols: usize) -> Result<Self, CodecError> {
        let elements = Shape::new(vec![rows as u64, cols as u64])?.elements();
        // An overflow cannot be the size of a slice either.
        let expected = Encoding::Float(float).data_bytes(elements).unwrap_or(u64::MAX);
        if bytes.len() as u64 != expected {
            return Err(CodecError::Length { region: "source", expected, found: bytes.len() as u64 });
        }
        Ok(Self { bytes, float, rows, cols })
    }

    /// Stored elements, row after row.
    fn rows(&self) -> impl Iterator<Item = &'a [u8]> {
        self.bytes.chunks_exact(self.cols * self.float.bytes())
    }
}

/// Encodes matrices with the instruction set and the quality it was made with. Holds nothing else: share it freely.
#[derive(Clone, Copy, Debug)]
pub struct Encoder {
    isa: Isa,
    quality: Quality,
}

impl Encoder {
    /// An encoder of [`Quality::Rtn`], with `isa` or the best below it that is present. Results do not depend on it.
    #[must_use]
    pub fn new(isa: Isa) -> Self {
        Self { isa, quality: Quality::Rtn }
    }

    /// The same, with another way to choose scales.
    #[must_use]
    pub fn with_quality(self, quality: Quality) -> Self {
        Self { quality, ..self }
    }

    /// Encodes `source` in groups of `group` into `data` and `scales`, which have exactly the sizes of
    /// [`Encoding::data_bytes`] and [`Encoding::scales_bytes`]; every byte of both is written. Returns the matrix-wide
    /// scale that NVFP4 has.
    ///
    /// Refuses what [`encode`](super::encode) refuses, with the same errors. After an error the contents of `data` and
    /// `scales` mean nothing.
    pub fn encode_into(
        self,
        source: &FloatMatrix<'_>,
        encoding: Encoding,
        group: GroupSize,
        data: &mut [u8],
        scales: &mut [u8],
    ) -> Result<Option<f32>, CodecError> {
        if !encoding.is_quantized() {
            return Err(CodecError::NotQuantized(encoding));
        }
        let spec = matrix_spec(source.rows, source.cols, encoding, group)?;
        for (region, found, expected) in
            [("data", data.len(), spec.data_bytes()), ("scales", scales.len(), spec.scales_bytes())]
        {
            if found as u64 != expected {
                return Err(CodecError::Length { region, expected, found: found as u64 });
            }
        }
        let (group, quality) = (group.get(), self.quality);
        self.isa
            .run(Encode { source: *source, encoding, group, quality, data, scales })
            .map_err(|Refused| refusal(source, encoding, group))
    }

    /// [`Self::encode_into`] regions of its own.
    pub fn encode(self, source: &FloatMatrix<'_>, encoding: Encoding, group: GroupSize) -> Result<Encoded, CodecError> {
        if !encoding.is_quantized() {
            return Err(CodecError::NotQuantized(encoding));
        }
        let spec = matrix_spec(source.rows, source.cols, encoding, group)?;
        let mut data = vec![0; spec.data_bytes() as usize];
        let mut scales = vec![0; spec.scales_bytes() as usize];
        let global_scale = self.encode_into(source, encoding, group, &mut data, &mut scales)?;
        Ok(Encoded { data, scales, global_scale })
    }
}

/// Somewhere in the matrix is a value that is not finite, or a group whose scale FP16 cannot represent.
struct Refused;

/// The error for a matrix that a kernel refused: the first value that is not finite, or else the first group whose
/// scale overflows.
#[cold]
fn refusal(source: &FloatMatrix<'_>, encoding: Encoding, group: usize) -> CodecError {
    let widened = || source.rows().map(|bytes| source.float.widened(bytes)).enumerate();
    for (row, values) in widened() {
        if let Some(col) = values.iter().position(|value| !value.is_finite()) {
            return CodecError::NonFinite { row, col, value: values[col] };
        }
    }
    let (mut codes, mut scales) = (vec![0; source.cols], vec![0; source.cols / group * 2]);
    for (row, values) in widened() {
        if let Err(overflow) = int::encode_row(&values, int::limit(encoding), group, &mut codes, &mut scales) {
            return CodecError::ScaleOverflow { row, group: overflow.group, max_abs: overflow.max_abs };
        }
    }
    unreachable!("a matrix is refused for a value or for a scale")
}

/// A checked call of [`Encoder::encode_into`].
struct Encode<'a> {
    source: FloatMatrix<'a>,
    encoding: Encoding,
    group: usize,
    quality: Quality,
    data: &'a mut [u8],
    scales: &'a mut [u8],
}

impl Kernel for Encode<'_> {
    type Output = Result<Option<f32>, Refused>;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> Self::Output {
        match self.encoding {
            Encoding::I8Sym => integers::<L, I8Rows, 16>(lanes, self),
            Encoding::I8Mma => integers::<L, I8Tiles, 16>(lanes, self),
            Encoding::I4Sym => integers::<L, I4Rows, 8>(lanes, self),
            Encoding::I4Mma => integers::<L, I4Tiles, 8>(lanes, self),
            Encoding::Nvfp4 => return e2m1_blocks(lanes, self).map(Some),
            Encoding::Float(_) => unreachable!("refused by the caller"),
        }?;
        Ok(None)
    }
}

/// Vectors of the largest group.
const VECTORS_MAX: usize = 128 / LANES;

/// Widens `bytes` into as many `values` as they are.
#[inline(always)]
fn widen<L: Lanes>(lanes: L, float: FloatType, bytes: &[u8], values: &mut [L::Vector]) {
    match float {
        FloatType::Bf16 => {
            for (bytes, value) in bytes.as_chunks::<{ 2 * LANES }>().0.iter().zip(values) {
                *value = lanes.bf16(bytes);
            }
        }
        FloatType::F16 => {
            for (bytes, value) in bytes.as_chunks::<{ 2 * LANES }>().0.iter().zip(values) {
                *value = lanes.f16(bytes);
            }
        }
        FloatType::F32 => {
            for (bytes, value) in bytes.as_chunks::<4>().0.as_chunks::<LANES>().0.iter().zip(values) {
                let mut elements = [0.0; LANES];
                for (element, bytes) in elements.iter_mut().zip(bytes) {
                    *element = f32::from_le_bytes(*bytes);
                }
                *value = lanes.load(&elements);
            }
        }
    }
}

/// The largest magnitude of `values`; NaN if there is one, infinite if there is an infinity.
#[inline(always)]
fn max_abs<L: Lanes>(lanes: L, values: &[L::Vector]) -> f32 {
    let mut max = lanes.splat(0.0);
    for value in values {
        max = lanes.max_magnitude(max, *value);
    }
    lanes.largest(max)
}

/// How sixteen integers become `BYTES` bytes of an encoding. A trait and no closure, for closures escape [`Kernel`]'s
/// inlining.
trait Codes<const BYTES: usize> {
    /// The largest code.
    const LIMIT: f32;
    /// Distance between the sixteen codes of a row and the next sixteen, and between scales, each in units of its
    /// own: one row after row, and eight in tiles of eight rows.
    const STEP: usize;

    /// `values` are whole or not, but in the range of the codes.
    fn of<L: Lanes>(lanes: L, values: L::Vector) -> [u8; BYTES];
}

struct I8Rows;
struct I8Tiles;
struct I4Rows;
struct I4Tiles;

impl Codes<16> for I8Rows {
    const LIMIT: f32 = 127.0;
    const STEP: usize = 1;

    #[inline(always)]
    fn of<L: Lanes>(lanes: L, values: L::Vector) -> [u8; 16] {
        lanes.to_i8(values).to_le_bytes()
    }
}

impl Codes<16> for I8Tiles {
    const LIMIT: f32 = 127.0;
    const STEP: usize = STRIP;

    #[inline(always)]
    fn of<L: Lanes>(lanes: L, values: L::Vector) -> [u8; 16] {
        lanes.to_i8_of_tile(values).to_le_bytes()
    }
}

impl Codes<8> for I4Rows {
    const LIMIT: f32 = 7.0;
    const STEP: usize = 1;

    #[inline(always)]
    fn of<L: Lanes>(lanes: L, values: L::Vector) -> [u8; 8] {
        lanes.to_i4(values).to_le_bytes()
    }
}

impl Codes<8> for I4Tiles {
    const LIMIT: f32 = 7.0;
    const STEP: usize = STRIP;

    #[inline(always)]
    fn of<L: Lanes>(lanes: L, values: L::Vector) -> [u8; 8] {
        lanes.to_i4_of_tile(values).to_le_bytes()
    }
}

#[inline(always)]
fn integers<L: Lanes, C: Codes<BYTES>, const BYTES: usize>(lanes: L, call: Encode<'_>) -> Result<(), Refused> {
    let Encode { source, group, quality, data, scales, .. } = call;
    let (codes, scales) = (data.as_chunks_mut::<BYTES>().0, scales.as_chunks_mut::<2>().0);
    let lowest = lanes.splat(match quality {
        Quality::Rtn => -C::LIMIT,
        Quality::Search => -C::LIMIT - 1.0,
    });
    let limit = lanes.splat(C::LIMIT);
    let mut values = [lanes.splat(0.0); VECTORS_MAX];
    let values = &mut values[..group / LANES];
    for (row, bytes) in source.rows().enumerate() {
        // Where row `row` starts, if a row is `count` of something.
        let start = |count: usize| (row - row % C::STEP) * count + row % C::STEP;
        let mut codes = codes[start(source.cols / LANES)..].iter_mut().step_by(C::STEP);
        let scales = scales[start(source.cols / group)..].iter_mut().step_by(C::STEP);
        for (bytes, stored) in bytes.chunks_exact(group * source.float.bytes()).zip(scales) {
            widen(lanes, source.float, bytes, values);
            let max_abs = max_abs(lanes, values);
            let scale = int::group_scale(max_abs, C::LIMIT);
            if !max_abs.is_finite() || scale.is_infinite() {
                return Err(Refused);
            }
            let scale = match quality {
                Quality::Rtn => scale,
                Quality::Search => search::int_scale(lanes, values, max_abs, C::LIMIT, scale),
            };
            *stored = scale.to_le_bytes();
            let scale = lanes.splat(scale.to_f32());
            for (value, code) in values.iter().zip(codes.by_ref()) {
                let ratio = lanes.div(*value, scale);
                *code = C::of(lanes, lanes.min(limit, lanes.max(lowest, ratio)));
            }
        }
    }
    Ok(())
}

/// Returns the global scale.
#[inline(always)]
fn e2m1_blocks<L: Lanes>(lanes: L, call: Encode<'_>) -> Result<f32, Refused> {
    const BLOCKS: usize = 64 / LANES;
    let Encode { source, quality, data, scales, .. } = call;
    let tile_row_bytes = 64 * source.float.bytes();

    let mut values = [lanes.splat(0.0); BLOCKS];
    let mut max = lanes.splat(0.0);
    for bytes in source.bytes.chunks_exact(tile_row_bytes) {
        widen(lanes, source.float, bytes, &mut values);
        for value in &values {
            max = lanes.max_magnitude(max, *value);
        }
    }
    let max_abs_of_all = lanes.largest(max);
    if !max_abs_of_all.is_finite() {
        return Err(Refused);
    }
    let global_scale = match quality {
        Quality::Rtn => nvfp4::global_scale_of(max_abs_of_all),
        Quality::Search => search::global_scale(max_abs_of_all),
    };

    // [tile][register][row][half]: sixteen codes, thus one block, in eight bytes.
    let tiles = data.as_chunks_mut::<8>().0.as_chunks_mut::<2>().0.as_chunks_mut::<STRIP>().0.as_chunks_mut::<2>().0;
    let scales = scales.as_chunks_mut::<BLOCKS>().0.as_chunks_mut::<STRIP>().0;
    let tiles_a_row = source.cols / 64;
    for (row, bytes) in source.rows().enumerate() {
        let first_tile = row / STRIP * tiles_a_row;
        let tiles = &mut tiles[first_tile..][..tiles_a_row];
        let scales = &mut scales[first_tile..][..tiles_a_row];
        for ((bytes, registers), scales) in bytes.chunks_exact(tile_row_bytes).zip(tiles).zip(scales) {
            widen(lanes, source.float, bytes, &mut values);
            for (block, value) in values.iter().enumerate() {
                let max_abs = max_abs(lanes, &[*value]);
                let scale = match quality {
                    Quality::Rtn => nvfp4::group_scale(max_abs, global_scale),
                    Quality::Search => search::block_scale(lanes, *value, max_abs, global_scale),
                };
                scales[row % STRIP][block] = scale;
                let codes = lanes.to_e2m1(lanes.div(*value, lanes.splat(e4m3(scale) * global_scale)));
                registers[block / 2][row % STRIP][block % 2] = codes.to_le_bytes();
            }
        }
    }
    Ok(global_scale)
}
