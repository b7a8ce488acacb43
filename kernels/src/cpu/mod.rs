//! The CPU engine's operations: f32 activations, weights used as they are stored.
//!
//! Weights are decoded a strip of eight rows at a time into a small buffer of the thread that needs them; no expanded
//! copy of a matrix ever exists. Work is spread with rayon over pieces whose borders depend on shapes alone, and every
//! output element is summed in a fixed order over its row (see "Batch invariance" on [`crate::ops`]): sixteen partial
//! sums, each over every sixteenth column, added up by one fixed tree (`lanes::Lanes::sum`).
//!
//! Operations take the [`Isa`] to use as their first argument; `isa` says how that becomes machine code.

mod attention;
mod candidates;
mod decode;
mod elementwise;
mod experts;
mod isa;
mod lanes;
mod linear;
mod products;

pub use attention::attention;
pub use candidates::{candidates, head_candidates};
pub use decode::decode;
pub use elementwise::{rms_norm, swiglu};
pub use experts::{Expert, experts, feed_forward};
pub(crate) use isa::Kernel;
pub use isa::{Isa, UnknownIsa};
pub(crate) use lanes::{LANES, Lanes};
pub use linear::linear;
