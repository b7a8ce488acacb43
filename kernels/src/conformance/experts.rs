//! Cases of the expert feed-forward.

use minnow_common::random::mix64;
use minnow_common::{Encoding, FloatType};

use super::{ROUNDING, StoredMatrix, Tolerance, random};
use crate::cpu::Expert;
use crate::oracle::{self, PlainExpert};

/// The matrices of an expert.
#[derive(Clone, Debug)]
pub struct StoredExpert {
    /// `[inner, hidden]`
    pub gate: StoredMatrix,
    /// `[inner, hidden]`
    pub up: StoredMatrix,
    /// `[hidden, inner]`
    pub down: StoredMatrix,
}

impl StoredExpert {
    /// Expert number `index`, of random matrices.
    #[must_use]
    pub fn random(index: usize, hidden: usize, inner: usize, encoding: Encoding, group: u64) -> Self {
        let matrix = |name: &str, rows, cols| {
            StoredMatrix::random(&format!("expert {index} {name}"), rows, cols, encoding, group)
        };
        Self {
            gate: matrix("gate", inner, hidden),
            up: matrix("up", inner, hidden),
            down: matrix("down", hidden, inner),
        }
    }

    /// The expert as backends see it.
    #[must_use]
    pub fn view(&self) -> Expert<'_> {
        Expert { gate: self.gate.view(), up: self.up.view(), down: self.down.view() }
    }

    fn plain(&self) -> PlainExpert {
        PlainExpert { gate: self.gate.values(), up: self.up.values(), down: self.down.values() }
    }
}

/// Rows with their experts.
#[derive(Clone, Debug)]
pub struct ExpertsCase {
    /// What is special about it.
    pub name: String,
    /// Width of a row.
    pub hidden: usize,
    /// `[rows, hidden]`
    pub x: Vec<f32>,
    /// `[rows, slots]`
    pub ids: Vec<u32>,
    /// `[rows, slots]`
    pub weights: Vec<f32>,
    /// By id.
    pub experts: Vec<StoredExpert>,
    /// `[rows, hidden]`, by the oracle.
    pub expected: Vec<f32>,
}

impl ExpertsCase {
    /// One row and many, experts that nobody uses, an expert in two slots of a row, a row of NaN, each layout.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let bf16 = Encoding::Float(FloatType::Bf16);
        // rows, slots, experts, hidden, inner, encoding, group
        [
            (1, 1, 3, 20, 12, bf16, 0),
            (5, 2, 2, 33, 17, bf16, 0),
            (32, 4, 12, 64, 48, Encoding::I8Sym, 16),
            (33, 3, 7, 128, 64, Encoding::I4Mma, 64),
            (32, 8, 16, 256, 128, Encoding::I4Mma, 128),
            (13, 4, 40, 128, 64, Encoding::Nvfp4, 16),
            (64, 2, 6, 64, 32, Encoding::I8Mma, 32),
        ]
        .into_iter()
        .map(|(rows, slots, experts, hidden, inner, encoding, group)| {
            let name = format!("{rows} rows of {hidden}, {slots} of {experts} experts of {inner} {encoding}/{group}");
            let mut x = random(&name, rows * hidden);
            if rows > 4 {
                x[4 * hidden..5 * hidden].fill(f32::NAN);
            }
            let ids: Vec<u32> = (0..(rows * slots) as u64).map(|slot| (mix64(slot) % experts) as u32).collect();
            let weights: Vec<f32> = random("routing", rows * slots).iter().map(|value| value.abs()).collect();
            let experts: Vec<_> = (0..experts as usize)
                .map(|index| StoredExpert::random(index, hidden, inner, encoding, group))
                .collect();
            let plain: Vec<_> = experts.iter().map(StoredExpert::plain).collect();
            let mut expected = vec![0.0; x.len()];
            oracle::experts(&mut expected, &x, &ids, &weights, &plain, hidden);
            Self { name, hidden, x, ids, weights, experts, expected }
        })
        .collect()
    }

    /// Three products one after the other, each as in [`super::LinearCase::tolerance`], summed over the slots.
    #[must_use]
    pub fn tolerance(&self) -> Tolerance {
        let additions = (self.hidden * self.ids.len() * self.hidden / self.x.len()) as f32;
        Tolerance { relative: 4.0 * ROUNDING, absolute: 24.0 * ROUNDING * additions.sqrt() }
    }
}
