//! Tests of this area; see the modules.

mod clients;
mod decoder;
mod exam;
mod http;
mod model;
mod text;
