//! Arithmetic of minnow: quantization codecs, plain oracles of every operation, the CPU kernels, and under feature
//! `cuda` those for NVIDIA GPUs.
//!
//! This crate knows no file and no request. [`ops`] is the list of operations with their names in each backend,
//! [`matrix::WeightMatrix`] is how stored weights reach them, and [`conformance`] holds the cases that every backend
//! is run through against [`oracle`].

pub mod codec;
pub mod conformance;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod matrix;
pub mod ops;
pub mod oracle;
