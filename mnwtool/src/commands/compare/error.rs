//! The distance of two lists of numbers: sums that can be added up, and the four figures made from them.
//!
//! With reference values r and found values f: relative RMS error = sqrt(sum (f-r)^2 / sum r^2), SNR = 10 log10 of the
//! inverse of its square, maximum |f-r|, and the cosine of the angle between both. Pairs of which one is not finite are
//! counted and left out of the sums. Sums are f64, of sixteen partial ones in a fixed order.

use std::fmt;

use serde_json::{Value, json};

/// The column heads of [`Difference`]'s line.
pub(super) const HEADING: &str = "relative RMS   SNR dB  max error     cosine";

/// Numbers added up side by side.
const LANES: usize = 16;

/// Sums over pairs of values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Difference {
    expected_square: f64,
    found_square: f64,
    product: f64,
    error_square: f64,
    error_max: f32,
    /// Pairs that are not two finite numbers.
    nonfinite: u64,
    /// Pairs of which the bits differ, and not only by the sign of a zero.
    unequal: u64,
}

impl Difference {
    /// The distance of `found` from `expected`, which have one length.
    pub(super) fn of(expected: &[f32], found: &[f32]) -> Self {
        debug_assert_eq!(expected.len(), found.len());
        let mut sums = [[0.0f64; LANES]; 4];
        let mut total = Self::default();
        let mut pairs = |expected: &[f32], found: &[f32]| {
            for (lane, (&expected, &found)) in expected.iter().zip(found).enumerate() {
                let error = found - expected;
                if !(expected.is_finite() && found.is_finite()) {
                    total.nonfinite += 1;
                    total.unequal += u64::from(expected.to_bits() != found.to_bits());
                    continue;
                }
                total.unequal += u64::from(expected != found);
                total.error_max = total.error_max.max(error.abs());
                let (expected, found) = (f64::from(expected), f64::from(found));
                let error = found - expected;
                for (sum, term) in
                    sums.iter_mut().zip([expected * expected, found * found, expected * found, error * error])
                {
                    sum[lane] += term;
                }
            }
        };
        let (expected, expected_rest) = expected.as_chunks::<LANES>();
        let (found, found_rest) = found.as_chunks::<LANES>();
        for (expected, found) in expected.iter().zip(found) {
            pairs(expected, found);
        }
        pairs(expected_rest, found_rest);
        let [expected_square, found_square, product, error_square] = sums.map(|lanes| lanes.iter().sum());
        Self { expected_square, found_square, product, error_square, ..total }
    }

    /// Takes the pairs of `other` in.
    pub(super) fn add(&mut self, other: &Self) {
        self.expected_square += other.expected_square;
        self.found_square += other.found_square;
        self.product += other.product;
        self.error_square += other.error_square;
        self.error_max = self.error_max.max(other.error_max);
        self.nonfinite += other.nonfinite;
        self.unequal += other.unequal;
    }

    /// Whether every value is what it should be.
    pub(super) fn is_none(&self) -> bool {
        self.unequal == 0
    }

    /// Root of the error's share of the reference's energy; infinite if the reference is zero and the other is not, or
    /// if values are not finite where they should be.
    pub(super) fn relative_rms(&self) -> f64 {
        match self.error_square {
            _ if self.nonfinite > 0 && self.unequal > 0 => f64::INFINITY,
            0.0 => 0.0,
            error => (error / self.expected_square).sqrt(),
        }
    }

    /// In decibels; infinite without an error.
    fn snr(&self) -> f64 {
        -20.0 * self.relative_rms().log10()
    }

    /// 1 if both are zero everywhere, 0 if one is.
    fn cosine(&self) -> f64 {
        let lengths = self.expected_square.sqrt() * self.found_square.sqrt();
        match lengths {
            0.0 if self.expected_square == self.found_square => 1.0,
            0.0 => 0.0,
            lengths => (self.product / lengths).clamp(-1.0, 1.0),
        }
    }

    /// JSON has no infinities: what is infinite is null.
    pub(super) fn json(&self) -> Value {
        json!({
            "relative_rms": self.relative_rms(),
            "snr_db": self.snr(),
            "max_abs_error": self.error_max,
            "cosine": self.cosine(),
            "nonfinite": self.nonfinite,
            "identical": self.is_none(),
        })
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let snr = self.snr();
        let snr = if snr.is_finite() {
            format!("{snr:.2}")
        } else if snr > 0.0 {
            "exact".to_owned()
        } else {
            "none".to_owned()
        };
        let rms = self.relative_rms();
        let rms = if rms.is_finite() { format!("{:.4} %", 100.0 * rms) } else { "infinite".to_owned() };
        write!(f, "{rms:>12}  {snr:>7}  {:>9.3e}  {:>9.6}", self.error_max, self.cosine())?;
        if self.nonfinite > 0 {
            write!(f, "  not finite: {}", self.nonfinite)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_the_definition() {
        let expected: Vec<f32> = (0..40).map(|index| index as f32 - 20.0).collect();
        let found: Vec<f32> = expected.iter().map(|value| value * 0.5).collect();
        let difference = Difference::of(&expected, &found);
        assert!((difference.relative_rms() - 0.5).abs() < 1e-12);
        assert!((difference.snr() - 6.020_599_913).abs() < 1e-6);
        assert!((difference.cosine() - 1.0).abs() < 1e-12);
        assert_eq!(difference.error_max, 10.0);
        let mut parts = Difference::of(&expected[..16], &found[..16]);
        parts.add(&Difference::of(&expected[16..], &found[16..]));
        assert!((parts.relative_rms() - 0.5).abs() < 1e-12);
    }

    #[test]
    fn zeros_and_what_is_not_finite_have_an_answer() {
        assert!(Difference::of(&[0.0, 1.0], &[-0.0, 1.0]).is_none());
        let zeros = Difference::of(&[0.0; 3], &[0.0; 3]);
        assert_eq!((zeros.relative_rms(), zeros.cosine(), zeros.snr()), (0.0, 1.0, f64::INFINITY));
        let lost = Difference::of(&[0.0; 3], &[1.0, 0.0, 0.0]);
        assert_eq!(
            (lost.relative_rms(), lost.cosine(), lost.json()["relative_rms"].clone()),
            (f64::INFINITY, 0.0, Value::Null)
        );
        let broken = Difference::of(&[1.0, 2.0], &[f32::NAN, 2.0]);
        assert_eq!((broken.nonfinite, broken.relative_rms()), (1, f64::INFINITY));
        assert!(Difference::of(&[f32::NAN], &[f32::NAN]).is_none());
    }
}
