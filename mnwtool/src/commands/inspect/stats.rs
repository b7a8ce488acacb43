//! Range, size and zeros of a tensor's values, as they are after dequantization, and what they say about experts. Damaged
//! scales show as values that are not finite, so that a broken file can still be looked at.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use minnow_common::tensor::{expert_family, is_expert};
use minnow_formats::checkpoint::{Checkpoint, StoredTensor};
use minnow_formats::names::shortlist;
use serde_json::{Value, json};

use crate::progress::Progress;
use crate::scan::{self, ScanError, Values};

/// An expert's matrix stands out if its root mean square is more than this many times the median of its projection in
/// its layer, or less than that part of it.
const OUTLIER_FACTOR: f64 = 4.0;
/// [`OUTLIER_FACTOR`] in words, for whoever reads the result.
pub(super) const OUTLIER_RULE: &str = "an expert stands out if its root mean square is above 4 times or below a quarter of the median of its projection in its layer";

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
    nonfinite: u64,
    count: u64,
}

/// The statistics of every tensor, in name order.
pub(super) fn all(checkpoint: &Checkpoint, workers: usize, progress: bool) -> Result<Vec<Stats>, ScanError> {
    let tensors: Vec<(&String, &StoredTensor)> = checkpoint.tensors().iter().collect();
    let pieces: Vec<(usize, Range<u64>)> = tensors
        .iter()
        .enumerate()
        .flat_map(|(index, (_, tensor))| scan::pieces(&[&tensor.spec]).map(move |range| (index, range)))
        .collect();
    let progress = Progress::new(pieces.iter().map(|(_, range)| range.end - range.start).sum(), progress);
    let look = |values: &mut Values, index: usize| {
        let (tensor, range) = &pieces[index];
        let (name, tensor) = tensors[*tensor];
        let stats = Stats::of(values.read(checkpoint, name, &tensor.spec, range)?);
        progress.advance(range.end - range.start, name);
        Ok::<_, ScanError>(stats)
    };
    let parts = scan::each(pieces.len(), workers, look)?;
    let mut whole = vec![Stats::default(); tensors.len()];
    for ((tensor, _), part) in pieces.iter().zip(&parts) {
        whole[*tensor].add(part);
    }
    Ok(whole)
}

/// Tensors that a trained model does not have, a line for each kind: experts of zeros, values that are no numbers,
/// experts far from all others.
pub(super) fn suspects<'a>(tensors: impl Iterator<Item = (&'a str, &'a Stats)> + Clone) -> Vec<String> {
    let list = |what: &str, names: Vec<&str>| {
        (!names.is_empty()).then(|| format!("{what} ({}): {}", names.len(), shortlist(&names)))
    };
    let such = |wanted: &dyn Fn(&str, &Stats) -> bool| {
        tensors.clone().filter(|(name, stats)| wanted(name, stats)).map(|(name, _)| name).collect()
    };
    [
        list("experts whose weights are all zero", such(&|name, stats| is_expert(name) && stats.is_all_zero())),
        list("tensors with values that are not finite", such(&|_, stats| stats.nonfinite > 0)),
        list("experts far larger or smaller than the others of their layer", outliers(tensors.clone())),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn outliers<'a>(tensors: impl Iterator<Item = (&'a str, &'a Stats)>) -> Vec<&'a str> {
    let mut families: BTreeMap<(&str, &str), Vec<(&str, f64)>> = BTreeMap::new();
    for (name, stats) in tensors.filter(|(name, stats)| is_expert(name) && !stats.is_all_zero()) {
        if let Some(family) = expert_family(name) {
            families.entry(family).or_default().push((name, stats.rms()));
        }
    }
    let mut found = Vec::new();
    for members in families.values_mut() {
        members.sort_by(|(_, a), (_, b)| a.total_cmp(b));
        let median = members[members.len() / 2].1;
        let stands_out = |rms: f64| rms > OUTLIER_FACTOR * median || rms < median / OUTLIER_FACTOR;
        found.extend(members.iter().filter(|(_, rms)| stands_out(*rms)).map(|(name, _)| *name));
    }
    found.sort_unstable();
    found
}

impl Default for Stats {
    fn default() -> Self {
        Self { min: f32::INFINITY, max: f32::NEG_INFINITY, square_sum: 0.0, zeros: 0, nonfinite: 0, count: 0 }
    }
}

impl Stats {
    fn of(values: &[f32]) -> Self {
        let mut stats = Self { count: values.len() as u64, ..Self::default() };
        for &value in values {
            if !value.is_finite() {
                stats.nonfinite += 1;
                continue;
            }
            stats.min = stats.min.min(value);
            stats.max = stats.max.max(value);
            stats.square_sum += f64::from(value) * f64::from(value);
            stats.zeros += u64::from(value == 0.0);
        }
        stats
    }

    /// Takes the values of another part of the tensor in.
    fn add(&mut self, other: &Self) {
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        self.square_sum += other.square_sum;
        self.zeros += other.zeros;
        self.nonfinite += other.nonfinite;
        self.count += other.count;
    }

    /// Whether there is no value but zero.
    fn is_all_zero(&self) -> bool {
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
        let mut stats = Stats::of(&[3.0, -4.0, 0.0]);
        stats.add(&Stats::of(&[-0.0, f32::NAN, f32::INFINITY]));
        assert_eq!((stats.min, stats.max, stats.zeros, stats.nonfinite), (-4.0, 3.0, 2, 2));
        assert!((stats.rms() - 2.5).abs() < 1e-12);
        assert!(!stats.is_all_zero() && Stats::of(&[0.0]).is_all_zero());
        assert_eq!(Stats::default().json()["min"], Value::Null);
    }

    #[test]
    fn an_expert_is_compared_with_the_others_of_its_projection_and_layer() {
        let name = |layer: usize, expert: usize| format!("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight");
        let of = |rms: f32| Stats::of(&[rms]);
        let mut tensors: Vec<(String, Stats)> = (0..8).map(|expert| (name(1, expert), of(0.1))).collect();
        tensors.extend((0..8).map(|expert| (name(2, expert), of(10.0))));
        tensors.push(("lm_head.weight".to_owned(), of(1e6)));
        let found = |tensors: &[(String, Stats)]| suspects(tensors.iter().map(|(name, stats)| (name.as_str(), stats)));
        assert_eq!(found(&tensors), [""; 0]);
        tensors[3].1 = of(0.41);
        tensors[12].1 = of(2.4);
        tensors[5].1 = of(0.0);
        let lines = found(&tensors);
        assert_eq!(lines.len(), 2);
        assert!(lines[0].contains("all zero (1)") && lines[0].contains(&name(1, 5)), "{}", lines[0]);
        assert!(lines[1].contains("(2)") && lines[1].contains(&name(1, 3)) && lines[1].contains(&name(2, 4)));
    }
}
