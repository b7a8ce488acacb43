//! The CPU engine's operations: weights used as they are stored, values between operations in f32.
//!
//! Weights are decoded a few rows at a time into a small buffer of the thread that needs them; no expanded copy of a
//! matrix ever exists. Work is spread with rayon over pieces, and wherever their borders are, every output element is
//! summed in a fixed order over its row (see "Batch invariance" on [`crate::ops`]). There are two arithmetics, and
//! [`Isa`] says which ([`Isa::rounds_to_bf16`]):
//!
//! - f32 throughout: sixteen partial sums, each over every sixteenth column, added up by one fixed tree
//!   (`lanes::Lanes::sum`).
//! - Products of BF16 (`tiles`): what enters a product with stored weights is rounded to BF16 once, sums are f32, and
//!   nothing else is rounded. The router's products and weights stored as F16 or F32 keep to f32.
//!
//! Experts can have a third, [`experts_int8`]: activations of eight bits, and exact integers as products.
//!
//! Operations take the [`Isa`] to use as their first argument; `isa` says how that becomes machine code.

mod attention;
mod candidates;
mod ceilings;
mod columns;
mod decode;
mod elementwise;
mod experts;
mod experts_fp4;
mod experts_int8;
mod heads;
mod isa;
mod kept;
mod kv;
mod lanes;
mod linear;
mod products;
mod router;
#[cfg(target_arch = "x86_64")]
mod tiles;

pub use attention::{attend, attention};
pub use candidates::{candidates, head_candidates};
pub use ceilings::{multiply_rate, read_bandwidth};
pub use decode::decode;
pub use elementwise::{add, add_and_norm, rms_norm, swiglu};
pub use experts::{Expert, GatedScratch, experts, feed_forward};
pub use experts_fp4::{experts_fp4, round_to_fp4};
pub use experts_int8::{experts_int8, has_int8_experts};
pub use heads::{HeadNorm, prepare_heads};
pub(crate) use isa::Kernel;
pub use isa::{Isa, UnknownIsa};
pub use kv::{KvBlock, KvRows};
pub(crate) use lanes::{LANES, Lanes};
pub use linear::{linear, linear_f32};
pub use router::{route, sigmoid};
