//! Tensor shapes whose sizes can no longer overflow.

use std::fmt;

use thiserror::Error;

/// The most dimensions a tensor may have (`mnw-format.md` section 4.2).
pub const RANK_MAX: usize = 8;

/// The dimensions of a tensor, outermost first: rank 1 to [`RANK_MAX`], no zero, and an element count below 2^64.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shape {
    dims: Vec<u64>,
    elements: u64,
}

/// Why a list of dimensions is not a [`Shape`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ShapeError {
    /// Rank 0 or above [`RANK_MAX`].
    #[error("a tensor has 1 to {RANK_MAX} dimensions, not {0}")]
    Rank(usize),
    /// A dimension is zero.
    #[error("dimension {0} is zero")]
    Zero(usize),
    /// The element count does not fit 64 bits.
    #[error("the element count overflows 64 bits")]
    Overflow,
}

impl Shape {
    /// Checks rank, zeros and the element count.
    pub fn new(dims: Vec<u64>) -> Result<Self, ShapeError> {
        if dims.is_empty() || dims.len() > RANK_MAX {
            return Err(ShapeError::Rank(dims.len()));
        }
        if let Some(index) = dims.iter().position(|&dim| dim == 0) {
            return Err(ShapeError::Zero(index));
        }
        let elements =
            dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim)).ok_or(ShapeError::Overflow)?;
        Ok(Self { dims, elements })
    }

    /// A matrix of `rows` x `cols`, for shapes computed from a checked configuration.
    ///
    /// # Panics
    /// If either is zero or the product overflows: a fault of the caller.
    #[must_use]
    pub fn matrix(rows: usize, cols: usize) -> Self {
        Self::new(vec![rows as u64, cols as u64]).expect("a matrix from a checked configuration")
    }

    /// A vector of `len` elements, for shapes computed from a checked configuration.
    ///
    /// # Panics
    /// If `len` is zero: a fault of the caller.
    #[must_use]
    pub fn vector(len: usize) -> Self {
        Self::new(vec![len as u64]).expect("a vector from a checked configuration")
    }

    /// The dimensions, outermost first.
    #[must_use]
    pub fn dims(&self) -> &[u64] {
        &self.dims
    }

    /// Number of dimensions.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.dims.len()
    }

    /// Product of the dimensions.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.elements
    }

    /// The innermost dimension.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.dims[self.dims.len() - 1]
    }

    /// `(rows, cols)` of a two-dimensional shape.
    #[must_use]
    pub fn as_matrix(&self) -> Option<(u64, u64)> {
        match self.dims[..] {
            [rows, cols] => Some((rows, cols)),
            _ => None,
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (index, dim) in self.dims.iter().enumerate() {
            if index > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{dim}")?;
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_shapes_are_refused() {
        assert_eq!(Shape::new(vec![]), Err(ShapeError::Rank(0)));
        assert_eq!(Shape::new(vec![1; 9]), Err(ShapeError::Rank(9)));
        assert_eq!(Shape::new(vec![3, 0]), Err(ShapeError::Zero(1)));
        assert_eq!(Shape::new(vec![1 << 32, 1 << 32]), Err(ShapeError::Overflow));
        assert_eq!(Shape::new(vec![2, 3, 4]).unwrap().elements(), 24);
        assert_eq!(Shape::matrix(2, 3).to_string(), "[2, 3]");
    }
}
