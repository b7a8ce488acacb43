//! The cases and tolerances that every backend is run through against [`crate::oracle`].
//!
//! A case is plain input made from a seed and a description, with what the oracle makes of it. Sizes are odd on
//! purpose: one row, less than a vector, one more than a vector, several tiles and a rest. Stored weights lie at odd
//! addresses. Some rows hold NaN or infinities, which must come out where the oracle has them and nowhere else.
//! `tests/kernels` runs the table; a new backend joins there.

mod attention;
mod candidates;
mod experts;
mod linear;
mod rowwise;
mod stored;

use minnow_common::random::Symmetric;
use minnow_common::{Encoding, FloatType};
use thiserror::Error;

use crate::cpu::Isa;

pub use attention::AttentionCase;
pub use candidates::CandidatesCase;
pub use experts::{ExpertsCase, StoredExpert};
pub use linear::LinearCase;
pub use rowwise::{RmsNormCase, SwigluCase};
pub use stored::StoredMatrix;

/// Half the distance from one to the next f32: the relative error of one rounding.
const ROUNDING: f32 = f32::EPSILON / 2.0;

/// The relative error of one rounding to BF16.
const BF16_ROUNDING: f32 = 1.0 / 512.0;

/// What a backend's products do to what enters them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// Nothing.
    F32,
    /// Where weights are stored as BF16 or quantized, what meets them is rounded to BF16. Quantized weights may be rounded
    /// too, after they were scaled.
    Bf16,
}

impl Arithmetic {
    /// What `isa` does.
    #[must_use]
    pub fn of(isa: Isa) -> Self {
        if isa.rounds_to_bf16() { Self::Bf16 } else { Self::F32 }
    }

    /// `values` as they enter a product with weights stored in `encoding`.
    fn entering(self, values: &[f32], encoding: Encoding) -> Vec<f32> {
        let is_rounded = self == Self::Bf16 && !matches!(encoding, Encoding::Float(FloatType::F16 | FloatType::F32));
        let rounded = |&value: &f32| if is_rounded { half::bf16::from_f32(value).to_f32() } else { value };
        values.iter().map(rounded).collect()
    }

    /// The absolute error that rounded weights add to a sum of products of about one: each product errs by up to a
    /// rounding, with either sign, so the sum errs by about as much; the factor covers unlucky sums.
    fn of_weights(self, encoding: Encoding) -> f32 {
        if self == Self::Bf16 && encoding.is_quantized() { 6.0 * BF16_ROUNDING } else { 0.0 }
    }
}

/// How far a result may be from the oracle's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// In units of the expected value.
    pub relative: f32,
    /// In absolute terms.
    pub absolute: f32,
}

/// The first value that is too far off.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[error("value {index} is {found}, the oracle has {expected}, and {tolerance} is allowed between them")]
pub struct Mismatch {
    /// Its position.
    pub index: usize,
    /// The backend's value.
    pub found: f32,
    /// The oracle's value.
    pub expected: f32,
    /// The allowed difference.
    pub tolerance: f32,
}

impl Tolerance {
    fn and_absolute(self, more: f32) -> Self {
        Self { absolute: self.absolute + more, ..self }
    }

    /// Compares value by value. NaN must be NaN, and an infinity the same infinity.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn check(self, found: &[f32], expected: &[f32]) -> Result<(), Mismatch> {
        assert_eq!(found.len(), expected.len());
        for (index, (&found, &expected)) in found.iter().zip(expected).enumerate() {
            let tolerance = self.absolute + self.relative * expected.abs();
            let same = found == expected || found.is_nan() && expected.is_nan();
            // Written so that a NaN on one side only is not close.
            let close = expected.is_finite() && (found - expected).abs() <= tolerance;
            if !same && !close {
                return Err(Mismatch { index, found, expected, tolerance });
            }
        }
        Ok(())
    }
}

/// `len` values, uniform in [-1, 1), that depend on `name` and the index only.
#[must_use]
pub fn random(name: &str, len: usize) -> Vec<f32> {
    const SEED: u64 = 20_260;
    let sequence = Symmetric::new(name, SEED);
    (0..len as u64).map(|index| sequence.at(index)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_close_values_are_close() {
        let tolerance = Tolerance { relative: 0.1, absolute: 0.5 };
        let check = |found: f32, expected: f32| tolerance.check(&[found], &[expected]).is_ok();
        assert!(check(11.4, 10.0) && check(0.5, 0.0) && check(f32::NAN, f32::NAN));
        assert!(check(f32::INFINITY, f32::INFINITY));
        assert!(!check(11.6, 10.0) && !check(f32::NAN, 1.0) && !check(1.0, f32::NAN));
        assert!(!check(f32::INFINITY, f32::NEG_INFINITY) && !check(1.0, f32::INFINITY) && !check(f32::INFINITY, 1.0));
    }
}
