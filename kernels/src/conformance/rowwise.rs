//! Cases of the operations that look at one row, or one element, at a time.

use super::{ROUNDING, Tolerance, random};
use crate::oracle;

/// One RMS norm.
#[derive(Clone, Debug)]
pub struct RmsNormCase {
    /// What is special about it.
    pub name: String,
    /// `[rows, weight.len()]`
    pub x: Vec<f32>,
    /// `[dim]`
    pub weight: Vec<f32>,
    /// Added to the mean square.
    pub eps: f32,
    /// `[rows, dim]`, by the oracle.
    pub expected: Vec<f32>,
}

impl RmsNormCase {
    /// Rows of zeros, of large values, with NaN and with an infinity beside ordinary ones, at several widths.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let mut cases = Vec::new();
        for dim in [1, 5, 16, 31, 128, 2048] {
            let weight: Vec<f32> = random("norm weight", dim).iter().map(|value| 1.0 + 0.3 * value).collect();
            let mut x = random("norm", 7 * dim);
            x[dim..2 * dim].fill(0.0);
            x[2 * dim..3 * dim].iter_mut().for_each(|value| *value *= 3e4);
            x[3 * dim + dim / 2] = f32::NAN;
            x[5 * dim + dim / 2] = f32::INFINITY;
            let mut expected = vec![0.0; x.len()];
            oracle::rms_norm(&mut expected, &x, &weight, 1e-6);
            cases.push(Self { name: format!("norm of 7 rows of {dim}"), x, weight, eps: 1e-6, expected });
        }
        cases
    }

    /// The terms of the mean are positive, so its error stays near a rounding for each level of the sum; the root
    /// halves it; two products follow.
    #[must_use]
    pub fn tolerance(&self) -> Tolerance {
        Tolerance { relative: 16.0 * ROUNDING, absolute: 0.0 }
    }
}

/// One SwiGLU.
#[derive(Clone, Debug)]
pub struct SwigluCase {
    /// What is special about it.
    pub name: String,
    /// Any length.
    pub gate: Vec<f32>,
    /// As long.
    pub up: Vec<f32>,
    /// By the oracle.
    pub expected: Vec<f32>,
}

impl SwigluCase {
    /// Several lengths, and gates at both ends of the range of `exp`.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let mut cases: Vec<Self> = [0, 1, 15, 16, 17, 1000]
            .into_iter()
            .map(|len| {
                let gate = random("swiglu gate", len).iter().map(|value| 8.0 * value).collect();
                Self::new(format!("swiglu of {len}"), gate, random("swiglu up", len))
            })
            .collect();
        let special =
            [0.0, -0.0, 1e-30, 30.0, -30.0, 80.0, 100.0, 1e30, f32::INFINITY, f32::NEG_INFINITY, f32::NAN].to_vec();
        let ones = vec![1.0; special.len()];
        cases.push(Self::new("swiglu of special gates".to_owned(), special.clone(), ones.clone()));
        cases.push(Self::new("swiglu of special ups".to_owned(), ones, special));
        cases
    }

    fn new(name: String, gate: Vec<f32>, up: Vec<f32>) -> Self {
        let mut expected = vec![0.0; gate.len()];
        oracle::swiglu(&mut expected, &gate, &up);
        Self { name, gate, up, expected }
    }

    /// `exp` is within two units in the last place, that is four roundings, on either side; an addition, a division
    /// and a product follow.
    #[must_use]
    pub fn tolerance(&self) -> Tolerance {
        Tolerance { relative: 12.0 * ROUNDING, absolute: 0.0 }
    }
}
