//! The harness under the end-to-end tests: golden data, seeded tiny checkpoints, and the two programs as processes.

pub mod checkpoint;
pub mod convert;
pub mod golden;
pub mod hub;
pub mod program;
