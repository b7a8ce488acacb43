//! Tests of this area; see the modules.

mod cache;
mod clients;
mod decoder;
mod engine;
mod exam;
mod grammar;
mod http;
mod model;
mod text;
