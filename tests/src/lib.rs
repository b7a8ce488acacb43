//! The harness under the end-to-end tests: golden data, seeded tiny checkpoints, the two programs as processes, and a
//! browser.

pub mod browser;
pub mod checkpoint;
pub mod convert;
pub mod daemon;
#[cfg(feature = "cuda")]
pub mod emulation;
pub mod golden;
pub mod hub;
pub mod program;
