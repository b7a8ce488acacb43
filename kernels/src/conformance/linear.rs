//! Cases of `linear`.

use minnow_common::{Encoding, FloatType};

use super::{Arithmetic, ROUNDING, StoredMatrix, Tolerance, random};
use crate::oracle;

/// One product.
#[derive(Clone, Debug)]
pub struct LinearCase {
    /// What is special about it.
    pub name: String,
    /// `[rows, w.cols]`
    pub x: Vec<f32>,
    /// The matrix.
    pub w: StoredMatrix,
    /// `[rows, w.rows]`, by the oracle.
    pub expected: Vec<f32>,
}

impl LinearCase {
    /// Every encoding, with sizes that leave rests everywhere.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let (bf16, f16, f32) =
            (Encoding::Float(FloatType::Bf16), Encoding::Float(FloatType::F16), Encoding::Float(FloatType::F32));
        // rows of x, columns, rows of w, encoding, group
        let sizes = [
            (1, 1, 1, f32, 0),
            (3, 5, 7, bf16, 0),
            (2, 17, 9, f16, 0),
            (4, 15, 8, f32, 0),
            (33, 100, 33, bf16, 0),
            (31, 2048, 12, bf16, 0),
            (48, 544, 160, bf16, 0),
            (17, 256, 80, bf16, 0),
            (1, 48, 3, Encoding::I8Sym, 16),
            (7, 96, 9, Encoding::I4Sym, 32),
            (6, 192, 13, Encoding::I4Sym, 64),
            (5, 256, 17, Encoding::I8Sym, 128),
            (1, 128, 8, Encoding::I8Mma, 128),
            (32, 256, 40, Encoding::I8Mma, 64),
            (9, 48, 16, Encoding::I4Mma, 16),
            (32, 2048, 24, Encoding::I4Mma, 128),
            (40, 384, 72, Encoding::I4Mma, 128),
            (7, 640, 144, Encoding::I8Mma, 128),
            (2, 64, 8, Encoding::Nvfp4, 16),
            (35, 320, 24, Encoding::Nvfp4, 16),
        ];
        let mut cases: Vec<Self> = sizes
            .into_iter()
            .map(|(rows, cols, n, encoding, group)| {
                let name = format!("linear {rows} x {cols} x {n} {encoding}/{group}");
                let x = random(&name, rows * cols);
                Self::new(name, x, StoredMatrix::random("w", n, cols, encoding, group))
            })
            .collect();
        for (special, value) in [("NaN", f32::NAN), ("infinity", f32::INFINITY)] {
            let mut x = random(special, 6 * 64);
            x[2 * 64 + 33] = value;
            cases.push(Self::new(format!("linear, {special} in row 2"), x, StoredMatrix::random("w", 20, 64, bf16, 0)));
        }
        cases
    }

    fn new(name: String, x: Vec<f32>, w: StoredMatrix) -> Self {
        let cols = w.view().cols();
        let mut expected = vec![0.0; x.len() / cols * w.view().rows()];
        oracle::linear(&mut expected, &x, &w.values(), cols);
        Self { name, x, w, expected }
    }

    /// [`Self::expected`] for products in an arithmetic.
    #[must_use]
    pub fn expected_in(&self, arithmetic: Arithmetic) -> Vec<f32> {
        let w = self.w.view();
        let mut expected = vec![0.0; self.expected.len()];
        oracle::linear(&mut expected, &arithmetic.entering(&self.x, w.encoding()), &self.w.values(), w.cols());
        expected
    }

    /// Each of the `k` additions to partial sums of about one adds an error of up to a rounding, with either sign, so
    /// the errors grow like a random walk, with the square root of their number. The factor covers larger partial sums
    /// and unlucky walks.
    #[must_use]
    pub fn tolerance(&self) -> Tolerance {
        let additions = self.w.view().cols() as f32;
        Tolerance { relative: ROUNDING, absolute: 8.0 * ROUNDING * additions.sqrt().max(1.0) }
    }

    /// [`Self::tolerance`] against [`Self::expected_in`]: what is rounded on both sides is no error.
    #[must_use]
    pub fn tolerance_in(&self, arithmetic: Arithmetic) -> Tolerance {
        self.tolerance().and_absolute(arithmetic.of_weights(self.w.view().encoding()))
    }
}
