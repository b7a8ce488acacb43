//! The kernels against golden data, against the oracle, and against themselves in other company.

mod codec;
mod codec_encoder;
mod codec_search;
mod conformance;
mod invariance;
mod routing;
