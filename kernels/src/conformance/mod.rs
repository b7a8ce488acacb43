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
use thiserror::Error;

pub use attention::AttentionCase;
pub use candidates::CandidatesCase;
pub use experts::{ExpertsCase, StoredExpert};
pub use linear::LinearCase;
pub use rowwise::{RmsNormCase, SwigluCase};
pub use stored::StoredMatrix;

/// Half the distance from one to the next f32: the relative error of one rounding.
const ROUNDING: f32 = f32::EPSILON / 2.0;

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
