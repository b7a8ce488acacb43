//! The vocabulary of minnow: what a tensor, an encoding, a shape and a model configuration are.
//!
//! No I/O, no threads, no device. Every other crate speaks in these types, so the two that must agree on bytes
//! without knowing each other (`formats` and `kernels`) agree here.

pub mod config;
pub mod dtype;
pub mod inventory;
pub mod quant;
pub mod random;
pub mod shape;
pub mod tensor;
pub mod units;

pub use config::{ConfigError, ModelConfig, Routing};
pub use dtype::FloatType;
pub use quant::{Encoding, GroupSize};
pub use shape::{Shape, ShapeError};
pub use tensor::{TensorSpec, TensorSpecError};
pub use units::FileOffset;

/// Positions that are refined together: the unit of attention, of routing, of the cache and of streaming.
pub const BLOCK: usize = 32;

/// The only `model_type` this project reads.
pub const ARCHITECTURE: &str = "llada2_moe";
