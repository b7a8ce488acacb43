//! The floating element types a checkpoint may store, and their exact widening to f32.

use std::fmt;

/// A stored floating element type; all are little-endian on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FloatType {
    /// bfloat16: the upper half of an f32.
    Bf16,
    /// IEEE-754 binary16.
    F16,
    /// IEEE-754 binary32.
    F32,
}

impl FloatType {
    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// The name safetensors headers use: `BF16`, `F16`, `F32`.
    #[must_use]
    pub fn safetensors_name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
            Self::F32 => "F32",
        }
    }

    /// Widens stored little-endian elements to f32, exactly.
    ///
    /// # Panics
    /// If `bytes` does not hold exactly `out.len()` elements.
    pub fn widen(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(bytes.len(), out.len() * self.bytes(), "byte count does not fit the element count");
        match self {
            Self::Bf16 => {
                for (raw, value) in bytes.chunks_exact(2).zip(out) {
                    *value = f32::from_bits(u32::from(u16::from_le_bytes([raw[0], raw[1]])) << 16);
                }
            }
            Self::F16 => {
                for (raw, value) in bytes.chunks_exact(2).zip(out) {
                    *value = half::f16::from_le_bytes([raw[0], raw[1]]).to_f32();
                }
            }
            Self::F32 => {
                for (raw, value) in bytes.chunks_exact(4).zip(out) {
                    *value = f32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]);
                }
            }
        }
    }

    /// [`Self::widen`] into a new vector.
    ///
    /// # Panics
    /// If `bytes` is not a whole number of elements.
    #[must_use]
    pub fn widened(self, bytes: &[u8]) -> Vec<f32> {
        let mut out = vec![0.0; bytes.len() / self.bytes()];
        self.widen(bytes, &mut out);
        out
    }
}

impl fmt::Display for FloatType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.safetensors_name())
    }
}

/// Rounds to bfloat16 (nearest, ties to even) and widens again; NaN stays NaN.
#[must_use]
pub fn round_to_bf16(value: f32) -> f32 {
    half::bf16::from_f32(value).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widening_is_exact_for_every_16_bit_pattern() {
        for bits in 0..=u16::MAX {
            let bytes = bits.to_le_bytes();
            let bf16 = FloatType::Bf16.widened(&bytes)[0];
            assert_eq!(bf16.to_bits(), u32::from(bits) << 16);
            let f16 = FloatType::F16.widened(&bytes)[0];
            let expected = half::f16::from_bits(bits);
            assert!(f16 == expected.to_f32() || (f16.is_nan() && expected.is_nan()));
        }
    }
}
