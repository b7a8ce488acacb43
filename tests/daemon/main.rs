//! Tests of this area; see the modules.

mod bench_serve;
mod cache;
mod clients;
mod company;
mod decoder;
mod engine;
mod exam;
mod field_cases;
mod grammar;
mod http;
mod invariance;
mod model;
mod scripted;
mod soak;
mod text;
