//! The daemon as a library: everything but the command line's `main`, so that tests and benches drive it directly.
//!
//! Data flows downwards: `http` turns requests into jobs, the `engine` runs them on a `model` backend with a `decoder`
//! per block, and `text` turns committed tokens back into text.

pub mod arenas;
pub mod cache;
pub mod cli;
pub mod commands;
pub mod config;
pub mod decoder;
pub mod demo;
pub mod engine;
mod fetch;
pub mod grammar;
pub mod http;
pub mod keys;
pub mod model;
pub mod persist;
pub mod scheduler;
pub mod session;
pub mod supervisor;
pub mod text;
pub mod web;
pub mod weights;

/// The program's version, as `--version`, `/health` and benchmarks show it.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
