//! Checkpoint containers, `.mnw` and safetensors, and the file access under them.
//!
//! [`io`] is the only place that touches files, and [`hub`] the only one that fetches or sends them. Parsers take bytes, meet every check before the arithmetic that could
//! overflow on them, and hand on types that cannot be wrong. [`checkpoint::Checkpoint`] is one view over both formats.
//! What bytes *mean* as numbers is not known here: that is `kernels::codec`.

pub mod checkpoint;
pub mod digest;
pub mod hub;
pub mod io;
pub mod mnw;
pub mod names;
pub mod safetensors;

pub use checkpoint::Checkpoint;
pub use digest::Digest;
