//! Cases of the expert feed-forward.

use minnow_common::random::mix64;
use minnow_common::{Encoding, FloatType};

use super::{Arithmetic, BF16_ROUNDING, ROUNDING, StoredMatrix, Tolerance, random};
use crate::cpu::{self, Expert, Isa, has_int8_experts};
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

    /// `feed_forward` of rows, by the oracle: `x: [rows, hidden]`.
    fn expected_in(&self, x: &[f32], arithmetic: Arithmetic) -> Vec<f32> {
        let (hidden, inner) = (self.gate.view().cols(), self.gate.view().rows());
        let rows = x.len() / hidden;
        let entering = arithmetic.entering(x, self.gate.view().encoding());
        let (mut gate, mut up) = (vec![0.0; rows * inner], vec![0.0; rows * inner]);
        oracle::linear(&mut gate, &entering, &self.gate.values(), hidden);
        oracle::linear(&mut up, &entering, &self.up.values(), hidden);
        let mut gated = vec![0.0; gate.len()];
        oracle::swiglu(&mut gated, &gate, &up);
        let entering = arithmetic.entering(&gated, self.down.view().encoding());
        let mut out = vec![0.0; x.len()];
        oracle::linear(&mut out, &entering, &self.down.values(), inner);
        out
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
            (70, 4, 5, 256, 128, Encoding::I8Mma, 128),
            (9, 2, 3, 384, 256, Encoding::I8Mma, 128),
            (50, 3, 4, 96, 64, bf16, 0),
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

    /// [`Self::expected`] for products in an arithmetic.
    #[must_use]
    pub fn expected_in(&self, arithmetic: Arithmetic) -> Vec<f32> {
        let by_expert: Vec<Vec<f32>> =
            self.experts.iter().map(|expert| expert.expected_in(&self.x, arithmetic)).collect();
        self.weighted(&by_expert)
    }

    /// Three products one after the other, each as in [`super::LinearCase::tolerance`], summed over the slots.
    #[must_use]
    pub fn tolerance(&self) -> Tolerance {
        let additions = (self.hidden * self.slots()) as f32;
        Tolerance { relative: 4.0 * ROUNDING, absolute: 24.0 * ROUNDING * additions.sqrt() }
    }

    /// [`Self::tolerance`] against [`Self::expected_in`]. A value between the products that is near the middle of two
    /// BF16 may be rounded the other way: one part in 256 of one term of about a tenth, a few times.
    #[must_use]
    pub fn tolerance_in(&self, arithmetic: Arithmetic) -> Tolerance {
        let of_rounding = if arithmetic == Arithmetic::Bf16 { BF16_ROUNDING } else { 0.0 };
        let of_weights = arithmetic.of_weights(self.experts[0].gate.view().encoding());
        self.tolerance().and_absolute(of_rounding + (self.slots() as f32).sqrt() * of_weights)
    }

    /// [`Self::expected`] with activations of eight bits; `None` where the experts are not stored for that. To the bit: `silu`
    /// and the sum over experts are those of `isa`, and all else is the oracle's.
    #[must_use]
    pub fn expected_int8(&self, isa: Isa) -> Option<Vec<f32>> {
        let StoredExpert { gate, up, down } = &self.experts[0];
        if ![gate, up, down].into_iter().all(|matrix| has_int8_experts(&matrix.view())) {
            return None;
        }
        let linear = |out: &mut Vec<f32>, x: &[f32], w: &StoredMatrix| {
            let view = w.view();
            out.resize(x.len() / view.cols() * view.rows(), 0.0);
            oracle::linear_int8(out, x, &w.codes(), &w.group_scales(), view.cols(), view.group());
        };
        let of_expert = |expert: &StoredExpert| {
            let (mut gate, mut up, mut out) = (Vec::new(), Vec::new(), Vec::new());
            linear(&mut gate, &self.x, &expert.gate);
            linear(&mut up, &self.x, &expert.up);
            cpu::swiglu(isa, &mut gate, &up);
            linear(&mut out, &gate, &expert.down);
            out
        };
        let by_expert: Vec<Vec<f32>> = self.experts.iter().map(of_expert).collect();
        let slots = self.slots();
        let mut out = vec![0.0; self.x.len()];
        for (row, out) in out.chunks_exact_mut(self.hidden).enumerate() {
            let mut ascending: Vec<usize> = (row * slots..(row + 1) * slots).collect();
            ascending.sort_by_key(|&slot| self.ids[slot]);
            for slot in ascending {
                let y = &by_expert[self.ids[slot] as usize][row * self.hidden..][..self.hidden];
                out.iter_mut().zip(y).for_each(|(out, y)| *out = self.weights[slot].mul_add(*y, *out));
            }
        }
        Some(out)
    }

    /// [`Self::expected`] with activations of four bits; `None` where the experts are not NVFP4.
    #[must_use]
    pub fn expected_fp4(&self) -> Option<Vec<f32>> {
        if self.experts[0].gate.view().encoding() != Encoding::Nvfp4 {
            return None;
        }
        let inner = self.experts[0].gate.view().rows();
        let mut x = self.x.clone();
        oracle::round_to_fp4(&mut x, self.hidden);
        let rows = x.len() / self.hidden;
        let of_expert = |expert: &StoredExpert| {
            let (mut gate, mut up) = (vec![0.0; rows * inner], vec![0.0; rows * inner]);
            oracle::linear(&mut gate, &x, &expert.gate.values(), self.hidden);
            oracle::linear(&mut up, &x, &expert.up.values(), self.hidden);
            let (mut gated, mut out) = (vec![0.0; gate.len()], vec![0.0; x.len()]);
            oracle::swiglu(&mut gated, &gate, &up);
            oracle::round_to_fp4(&mut gated, inner);
            oracle::linear(&mut out, &gated, &expert.down.values(), inner);
            out
        };
        let by_expert: Vec<Vec<f32>> = self.experts.iter().map(of_expert).collect();
        Some(self.weighted(&by_expert))
    }

    /// The weighted sums of what each expert makes of every row.
    fn weighted(&self, by_expert: &[Vec<f32>]) -> Vec<f32> {
        let slots = self.slots();
        let mut out = vec![0.0; self.x.len()];
        for (row, out) in out.chunks_exact_mut(self.hidden).enumerate() {
            for slot in row * slots..(row + 1) * slots {
                let y = &by_expert[self.ids[slot] as usize][row * self.hidden..][..self.hidden];
                out.iter_mut().zip(y).for_each(|(out, y)| *out += self.weights[slot] * y);
            }
        }
        out
    }

    fn slots(&self) -> usize {
        self.ids.len() * self.hidden / self.x.len()
    }
}
