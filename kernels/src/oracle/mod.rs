//! Each operation of the model in plain scalar f32: written to be read, never tuned.
//!
//! Contracts are on [`crate::ops`]; formulas are those of sections 3 and 4 of the model description, in its FP32 form
//! (no rounding to BF16 anywhere). Sums are kept in f64 and rounded once, so that a tolerance against the oracle is a
//! statement about the other backend alone.

mod attention;
mod candidates;
mod experts;
mod fp4;
mod int8;
mod linear;
mod norm;
mod rope;
mod router;
mod swiglu;

pub use attention::attention;
pub use candidates::candidates;
pub use experts::{PlainExpert, experts, feed_forward};
pub use fp4::{Fp4Row, round_to_fp4, scale_of_row};
pub use int8::{code_of, linear_int8, quantize_row, scale_of_group};
pub use linear::linear;
pub use norm::rms_norm;
pub use rope::{inv_freq, rope_tables, rotate};
pub use router::{route, sigmoid};
pub use swiglu::swiglu;
