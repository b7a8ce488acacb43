//! Encodings of a tensor and their block geometry: how many bytes, which shapes, where scales lie.
//!
//! The table is section 5 of `docs/format-mnw.md`. The arithmetic that fills these bytes is in `kernels::codec`; the
//! container that stores them is in `formats::mnw`.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::dtype::FloatType;
use crate::shape::Shape;

/// How the elements of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Encoding {
    /// Floating elements, row-major, as in the source.
    Float(FloatType),
    /// 8-bit integers, row-major, one FP16 scale a group.
    I8Sym,
    /// 8-bit integers in 8 x 16 tensor-core tiles, one FP16 scale a group.
    I8Mma,
    /// 4-bit integers, row-major, one FP16 scale a group.
    I4Sym,
    /// 4-bit integers in 8 x 16 tensor-core tiles, one FP16 scale a group.
    I4Mma,
    /// E2M1 values in 8 x 64 tiles, one E4M3 scale for 16 values, one f32 scale for the matrix.
    Nvfp4,
}

/// Consecutive elements of a row that share one scale: 16, 32, 64 or 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupSize(u32);

/// A group size outside the four that exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("group size {0} is not one of 16, 32, 64, 128")]
pub struct GroupSizeError(pub u64);

impl GroupSize {
    /// The default for integer encodings.
    pub const DEFAULT: Self = Self(128);
    /// The only one NVFP4 has.
    pub const NVFP4: Self = Self(16);

    /// Accepts 16, 32, 64 and 128.
    pub fn new(elements: u64) -> Result<Self, GroupSizeError> {
        match elements {
            16 | 32 | 64 | 128 => Ok(Self(elements as u32)),
            other => Err(GroupSizeError(other)),
        }
    }

    /// Elements in a group.
    #[must_use]
    pub fn get(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for GroupSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The shape multiples an encoding needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Rows (output features) of a tile; the row count must be a multiple.
    pub rows: u64,
    /// Columns (input features) of a tile; the column count must be a multiple.
    pub cols: u64,
}

impl Encoding {
    /// Every encoding of `.mnw` v1.
    pub const ALL: [Self; 8] = [
        Self::Float(FloatType::Bf16),
        Self::Float(FloatType::F16),
        Self::Float(FloatType::F32),
        Self::I8Sym,
        Self::I8Mma,
        Self::I4Sym,
        Self::I4Mma,
        Self::Nvfp4,
    ];

    /// The name in a `.mnw` manifest.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Float(FloatType::Bf16) => "bf16",
            Self::Float(FloatType::F16) => "f16",
            Self::Float(FloatType::F32) => "f32",
            Self::I8Sym => "i8_sym",
            Self::I8Mma => "i8_mma",
            Self::I4Sym => "i4_sym",
            Self::I4Mma => "i4_mma",
            Self::Nvfp4 => "nvfp4",
        }
    }

    /// True for everything but plain floating elements.
    #[must_use]
    pub fn is_quantized(self) -> bool {
        !matches!(self, Self::Float(_))
    }

    /// Whether both store the same codes and scales, so that one can be permuted into the other.
    #[must_use]
    pub fn same_code_book(self, other: Self) -> bool {
        self.row_major() == other.row_major()
    }

    /// The row-major encoding with the same codes (`i8_mma` -> `i8_sym`); itself where there is none.
    #[must_use]
    pub fn row_major(self) -> Self {
        match self {
            Self::I8Mma => Self::I8Sym,
            Self::I4Mma => Self::I4Sym,
            other => other,
        }
    }

    /// Bytes of the data region for `elements` elements, or `None` on overflow.
    #[must_use]
    pub fn data_bytes(self, elements: u64) -> Option<u64> {
        match self {
            Self::Float(float) => elements.checked_mul(float.bytes() as u64),
            Self::I8Sym | Self::I8Mma => Some(elements),
            Self::I4Sym | Self::I4Mma | Self::Nvfp4 => Some(elements.div_ceil(2)),
        }
    }

    /// Bytes of the scales region for `elements` elements in groups of `group`; 0 for floating encodings.
    #[must_use]
    pub fn scales_bytes(self, elements: u64, group: GroupSize) -> u64 {
        let groups = elements / group.get() as u64;
        match self {
            Self::Float(_) => 0,
            Self::Nvfp4 => groups,
            // At least 16 elements a group, so twice the count cannot overflow.
            _ => groups * 2,
        }
    }

    /// The tile a packed layout is made of; `None` for row-major encodings, which take any shape.
    #[must_use]
    pub fn tile(self) -> Option<Tile> {
        match self {
            Self::I8Mma | Self::I4Mma => Some(Tile { rows: 8, cols: 16 }),
            Self::Nvfp4 => Some(Tile { rows: 8, cols: 64 }),
            Self::Float(_) | Self::I8Sym | Self::I4Sym => None,
        }
    }

    /// Whether `shape` is two-dimensional and tileable where the encoding needs that.
    #[must_use]
    pub fn fits(self, shape: &Shape) -> bool {
        self.tile().is_none_or(|tile| {
            shape
                .as_matrix()
                .is_some_and(|(rows, cols)| rows.is_multiple_of(tile.rows) && cols.is_multiple_of(tile.cols))
        })
    }

    /// Bits of one stored code or element, scales not counted.
    #[must_use]
    pub fn code_bits(self) -> u32 {
        match self {
            Self::Float(float) => float.bytes() as u32 * 8,
            Self::I8Sym | Self::I8Mma => 8,
            Self::I4Sym | Self::I4Mma | Self::Nvfp4 => 4,
        }
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that no encoding of `.mnw` v1 has.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("unknown encoding {0:?}")]
pub struct UnknownEncoding(pub String);

impl FromStr for Encoding {
    type Err = UnknownEncoding;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|encoding| encoding.name() == name).ok_or_else(|| UnknownEncoding(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_old_ones_are_unknown() {
        for encoding in Encoding::ALL {
            assert_eq!(encoding.name().parse(), Ok(encoding));
        }
        for name in ["fp4_e2m1", "fp4_mma", "BF16", "I8_MMA", ""] {
            assert!(name.parse::<Encoding>().is_err(), "{name}");
        }
    }

    #[test]
    fn sizes_follow_the_table() {
        let group = GroupSize::DEFAULT;
        assert_eq!(Encoding::I4Mma.data_bytes(1_048_576), Some(524_288));
        assert_eq!(Encoding::I4Mma.scales_bytes(1_048_576, group), 16_384);
        assert_eq!(Encoding::I8Sym.data_bytes(1_048_576), Some(1_048_576));
        assert_eq!(Encoding::Nvfp4.scales_bytes(1_048_576, GroupSize::NVFP4), 65_536);
        assert_eq!(Encoding::Float(FloatType::F32).data_bytes(u64::MAX / 2), None);
        assert!(Encoding::Nvfp4.fits(&Shape::matrix(8, 64)));
        assert!(!Encoding::Nvfp4.fits(&Shape::matrix(8, 32)));
        assert!(!Encoding::I8Mma.fits(&Shape::vector(128)));
        assert!(GroupSize::new(48).is_err() && GroupSize::new(256).is_err());
    }
}
