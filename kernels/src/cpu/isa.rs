//! Which instruction set runs, and the one door to it.
//!
//! [`Isa`] is a name, free to construct, parse and print. What may *execute* is decided by proof: [`Avx512`] and
//! [`Avx2`] can only be had from their `detect`, so [`Isa::run`] asks for one, and falls back to the next lower set on
//! a CPU without it. A kernel is written once, over [`Lanes`], and compiled for each set by being inlined into a
//! function with those features enabled.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512};
use super::lanes::{Lanes, Scalar};
#[cfg(target_arch = "x86_64")]
use super::tiles::{Amx, Avx512Bf16};

/// An instruction set, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Whatever the compiler's baseline is; products are rounded before they are added.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2Fma,
    /// AVX-512F.
    Avx512,
    /// AVX-512 with BF16: products of stored weights take activations rounded to BF16; all else is as for `Avx512`.
    Avx512Bf16,
    /// AMX: as `Avx512Bf16`, with products by tiles.
    Amx,
}

impl Isa {
    /// All there are, in ascending order.
    pub const ALL: [Self; 5] = [Self::Scalar, Self::Avx2Fma, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// The best this CPU has.
    #[must_use]
    pub fn detect() -> Self {
        Self::detect_up_to(None)
    }

    /// The best this CPU has, but no better than `cap`.
    #[must_use]
    pub fn detect_up_to(cap: Option<Self>) -> Self {
        let best = cap.unwrap_or(Self::Amx);
        Self::ALL.into_iter().rev().find(|isa| *isa <= best && isa.is_present()).unwrap_or(Self::Scalar)
    }

    /// All that this CPU has, in ascending order.
    pub fn present() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_present())
    }

    /// Whether this CPU has it.
    #[must_use]
    pub fn is_present(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Fma => Avx2::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Avx512::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => Avx512Bf16::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Amx => Amx::detect().is_some(),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2Fma | Self::Avx512 | Self::Avx512Bf16 | Self::Amx => false,
        }
    }

    /// Whether activations are rounded to BF16 where they meet weights that are stored as BF16 or quantized. Otherwise
    /// everything is f32.
    #[must_use]
    pub fn rounds_to_bf16(self) -> bool {
        self >= Self::Avx512Bf16
    }

    /// Runs `kernel` with the best instruction set that is both present and not above this one.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[cfg(target_arch = "x86_64")]
        {
            if self >= Self::Avx512
                && let Some(proof) = Avx512::detect()
            {
                return proof.run(kernel);
            }
            if self >= Self::Avx2Fma
                && let Some(proof) = Avx2::detect()
            {
                return proof.run(kernel);
            }
        }
        kernel.run(Scalar)
    }
}

/// A piece of work written over [`Lanes`]. Implementations of `run`, and what they call with `lanes`, are
/// `#[inline(always)]`: only what is inlined is compiled for the instruction set.
pub(crate) trait Kernel {
    type Output;

    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scalar => "scalar",
            Self::Avx2Fma => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Amx => "amx",
        })
    }
}

/// A name that is no instruction set.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("unknown instruction set {0:?}, expected scalar, avx2, avx512, avx512bf16 or amx")]
pub struct UnknownIsa(pub String);

impl FromStr for Isa {
    type Err = UnknownIsa;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|isa| isa.to_string() == name).ok_or_else(|| UnknownIsa(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_a_cap_is_kept() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse(), Ok(isa));
            assert!(Isa::detect_up_to(Some(isa)) <= isa);
        }
        assert_eq!("AVX".parse::<Isa>(), Err(UnknownIsa("AVX".to_owned())));
        assert_eq!(Isa::detect_up_to(Some(Isa::Scalar)), Isa::Scalar);
        assert_eq!(Isa::present().max(), Some(Isa::detect()));
    }
}
