//! Which stored scales are usable (`docs/format-mnw.md` section 7.3): only looked at, never computed with.

use minnow_common::Encoding;
use thiserror::Error;

/// A stored scale that would poison every value of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("scale {index} is {bits:#06x}, not a positive finite value")]
pub struct BadScale {
    /// Which one, in stored order.
    pub index: u64,
    /// Its bits: FP16, or E4M3 in the lower byte.
    pub bits: u16,
}

/// Checks a scales region, or any whole number of scales from one. FP16 scales must be positive and finite; E4M3
/// scales below 127, which leaves out NaN and every negative value. Floating encodings have none to check.
pub fn check_scales(encoding: Encoding, bytes: &[u8]) -> Result<(), BadScale> {
    let first_bad = match encoding {
        Encoding::Float(_) => None,
        Encoding::Nvfp4 => bytes.iter().map(|&code| u16::from(code)).enumerate().find(|&(_, code)| code >= 127),
        Encoding::I8Sym | Encoding::I8Mma | Encoding::I4Sym | Encoding::I4Mma => bytes
            .chunks_exact(2)
            .map(|raw| u16::from_le_bytes([raw[0], raw[1]]))
            .enumerate()
            // 0x7c00 is infinity; NaN is above it, and the sign bit above that.
            .find(|&(_, bits)| bits == 0 || bits >= 0x7c00),
    };
    match first_bad {
        None => Ok(()),
        Some((index, bits)) => Err(BadScale { index: index as u64, bits }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_positive_finite_scales_pass() {
        for bits in 0..=u16::MAX {
            let sign = bits >> 15 == 1;
            let (exponent, fraction) = (bits >> 10 & 31, bits & 0x3ff);
            let usable = !sign && exponent != 31 && (exponent, fraction) != (0, 0);
            assert_eq!(check_scales(Encoding::I4Mma, &bits.to_le_bytes()).is_ok(), usable, "{bits:#x}");
        }
        for code in 0..=u8::MAX {
            assert_eq!(check_scales(Encoding::Nvfp4, &[code]).is_ok(), code < 127);
        }
        assert_eq!(check_scales(Encoding::I8Sym, &[0, 0x3c, 0, 0x80]), Err(BadScale { index: 1, bits: 0x8000 }));
    }
}
