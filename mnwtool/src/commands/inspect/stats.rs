//! Range, size and zeros of a tensor's values, as they are after dequantization. Damaged scales show as values that are
//! not finite, so that a broken file can still be looked at.

use std::fmt;
use std::ops::Range;

use minnow_common::{Encoding, TensorSpec};
use minnow_formats::checkpoint::Checkpoint;
use minnow_kernels::codec::{self, CodecError};
use serde_json::{Value, json};
use thiserror::Error;

use crate::pipeline::source::{self, Part, Source, Strips};

/// Elements looked at together.
const ELEMENTS_AT_ONCE: u64 = 1 << 20;

/// What the values of a tensor are like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Stats {
    /// The smallest finite value; infinite if there is none.
    min: f32,
    /// The largest finite value; minus infinity if there is none.
    max: f32,
    square_sum: f64,
    zeros: u64,
    /// Values that are NaN or infinite.
    pub(super) nonfinite: u64,
    count: u64,
}

/// Why a tensor has no statistics.
#[derive(Debug, Error)]
pub(super) enum StatsError {
    /// It could not be read.
    #[error(transparent)]
    Read(#[from] minnow_formats::io::IoError),
    /// It could not be decoded.
    #[error("{name}: {error}")]
    Codec { name: String, error: CodecError },
}

/// Reads all of a tensor, some of it at a time.
pub(super) fn of(checkpoint: &Checkpoint, name: &str, spec: &TensorSpec) -> Result<Stats, StatsError> {
    let mut stats = Stats::default();
    let read = |part, range: Range<u64>| {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        checkpoint.read_part(name, part, range.start, &mut bytes).map(|()| bytes)
    };
    if let Encoding::Float(float) = spec.encoding() {
        for range in source::cuts(spec.data_bytes(), ELEMENTS_AT_ONCE * float.bytes() as u64) {
            stats.add(&float.widened(&read(Part::Data, range)?));
        }
        return Ok(stats);
    }
    let codec_error = |error| StatsError::Codec { name: name.to_owned(), error };
    let strips = Strips::of(spec);
    for rows in strips.cuts(ELEMENTS_AT_ONCE) {
        let data = read(Part::Data, strips.data(&rows))?;
        let scales = read(Part::Scales, strips.scales(&rows))?;
        let strip = strips.spec(&rows).map_err(|error| codec_error(error.into()))?;
        stats.add(&codec::decode(&data, &scales, &strip).map_err(codec_error)?);
    }
    Ok(stats)
}

impl Default for Stats {
    fn default() -> Self {
        Self { min: f32::INFINITY, max: f32::NEG_INFINITY, square_sum: 0.0, zeros: 0, nonfinite: 0, count: 0 }
    }
}

impl Stats {
    fn add(&mut self, values: &[f32]) {
        self.count += values.len() as u64;
        for &value in values {
            if !value.is_finite() {
                self.nonfinite += 1;
                continue;
            }
            self.min = self.min.min(value);
            self.max = self.max.max(value);
            self.square_sum += f64::from(value) * f64::from(value);
            self.zeros += u64::from(value == 0.0);
        }
    }

    /// Whether there is no value but zero.
    pub(super) fn is_all_zero(&self) -> bool {
        self.zeros == self.count
    }

    /// Root mean square of the finite values.
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    fn rms(&self) -> f64 {
        (self.square_sum / (self.count - self.nonfinite).max(1) as f64).sqrt()
    }

    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    fn zero_share(&self) -> f64 {
        self.zeros as f64 / self.count.max(1) as f64
    }

    /// Without a finite value, `min` and `max` are null: JSON has no infinities.
    pub(super) fn json(&self) -> Value {
        json!({
            "min": self.min.is_finite().then_some(self.min),
            "max": self.max.is_finite().then_some(self.max),
            "rms": self.rms(),
            "zero_fraction": self.zero_share(),
            "nonfinite": self.nonfinite,
        })
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "min {:.4e}  max {:.4e}  rms {:.4e}  zeros {:.2} %",
            self.min,
            self.max,
            self.rms(),
            100.0 * self.zero_share()
        )?;
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
    fn values_that_are_not_finite_are_counted_and_left_out() {
        let mut stats = Stats::default();
        stats.add(&[3.0, -4.0, 0.0, -0.0, f32::NAN, f32::INFINITY]);
        assert_eq!((stats.min, stats.max, stats.zeros, stats.nonfinite), (-4.0, 3.0, 2, 2));
        assert!((stats.rms() - 2.5).abs() < 1e-12);
        assert!(!stats.is_all_zero());
        let mut zeros = Stats::default();
        zeros.add(&[0.0]);
        assert!(zeros.is_all_zero());
        assert_eq!(Stats::default().json()["min"], Value::Null);
    }
}
