//! The kernels against golden data, against the oracle, and against themselves in other company.

mod codec;
mod conformance;
mod invariance;
mod routing;
