//! Cases of the best tokens of a row of logits.

use super::{ROUNDING, Tolerance, random};
use crate::ops::{CANDIDATES, Candidate};
use crate::oracle;

/// One row of logits.
#[derive(Clone, Debug)]
pub struct CandidatesCase {
    /// What is special about it.
    pub name: String,
    /// `[vocabulary]`
    pub row: Vec<f32>,
    /// By the oracle.
    pub expected: [Candidate; CANDIDATES],
}

impl CandidatesCase {
    /// Vocabularies below four, across the borders of pieces, ties near and far, and rows with NaN and infinities.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let mut cases: Vec<Self> = [1, 3, 4, 17, 512, 513, 1500]
            .into_iter()
            .map(|len| Self::new(format!("{len} logits"), random("logits", len).iter().map(|x| 12.0 * x).collect()))
            .collect();
        let changed = |name: &str, change: &dyn Fn(&mut [f32])| {
            let mut row = random("special logits", 1100);
            change(&mut row);
            Self::new(name.to_owned(), row)
        };
        cases.extend([
            changed("ties, across pieces too", &|row| [1050, 7, 600, 601, 3].iter().for_each(|&at| row[at] = 5.0)),
            changed("the two zeros tie", &|row| {
                row.fill(-1.0);
                [(9, -0.0), (10, 0.0), (8, 0.0)].iter().for_each(|&(at, logit)| row[at] = logit);
            }),
            changed("a piece of minus infinity", &|row| row[..512].fill(f32::NEG_INFINITY)),
            changed("all minus infinity", &|row| row.fill(f32::NEG_INFINITY)),
            changed("one NaN", &|row| row[700] = f32::NAN),
            changed("all NaN", &|row| row.fill(f32::NAN)),
            changed("one infinity", &|row| row[700] = f32::INFINITY),
            changed("one certain token", &|row| row[700] = 1e4),
        ]);
        cases
    }

    fn new(name: String, row: Vec<f32>) -> Self {
        let expected = oracle::candidates(&row);
        Self { name, row, expected }
    }

    /// Of confidences; tokens and logits are the same. `exp` is within four roundings, and the sum of positive terms
    /// adds few: at most 32 terms follow each other in a partial sum before they are joined in f64.
    #[must_use]
    pub fn tolerance(&self) -> Tolerance {
        Tolerance { relative: 24.0 * ROUNDING, absolute: 1e-30 }
    }
}
