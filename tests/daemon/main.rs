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
mod http_cases;
mod http_choices;
mod http_fields;
mod http_forms;
mod http_load;
mod http_malformed;
mod http_options;
mod http_page;
mod invariance;
mod keys;
mod life;
mod model;
mod proxy;
mod scripted;
mod soak;
mod text;
