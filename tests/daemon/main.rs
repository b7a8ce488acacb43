//! Tests of this area; see the modules.

mod decoder;
mod http;
mod model;
mod text;
