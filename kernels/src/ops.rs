//! One page: every operation of the model, its contract, and its name in each backend.
//!
//! | operation | contract | oracle | cpu |
//! |---|---|---|---|
//! | encode | floats to stored weights, bit-exact | [`codec::encode`] | [`codec::Encoder`] |
//! | decode | stored weights to f32, bit-exact | [`codec::decode_rows`] | `cpu::decode` |
//! | RMS norm | `x / sqrt(mean(x^2) + eps) * weight`, row by row | [`oracle::rms_norm`] | [`cpu::rms_norm`] |
//! | rotary tables | cosines and sines of `f32(position) * inv_freq` | [`oracle::rope_tables`] | the oracle |
//! | rotation | half rotation of the leading dimensions of a head | [`oracle::rotate`] | with the head's norm: [`cpu::prepare_heads`] |
//! | linear | `out[r, n] = sum over k of x[r, k] w[n, k]` | [`oracle::linear`] | [`cpu::linear`] |
//! | attention | softmax over all keys up to the end of the query's block | [`oracle::attention`] | [`cpu::attention`], [`cpu::attend`] |
//! | SwiGLU | `silu(gate) * up` | [`oracle::swiglu`] | [`cpu::swiglu`] |
//! | feed-forward | `down(silu(gate(x)) * up(x))` | [`oracle::feed_forward`] | [`cpu::feed_forward`] |
//! | scores | `sigmoid` of router logits | [`oracle::sigmoid`] | [`cpu::sigmoid`] |
//! | router | expert ids and weights from scores | [`oracle::route`] | [`cpu::route`] |
//! | experts | weighted sum of the chosen experts' feed-forward | [`oracle::experts`] | [`cpu::experts`] |
//! | four-bit rows | what quantizing a row to NVFP4 leaves of it, bit-exact | [`oracle::round_to_fp4`] | [`cpu::round_to_fp4`], [`cpu::experts_fp4`] |
//! | candidates | the four best tokens of a row of logits | [`oracle::candidates`] | [`cpu::candidates`], fused with the head: [`cpu::head_candidates`] |
//!
//! Everything is f32 and row-major; outputs may not overlap inputs, which Rust's borrows see to. "Rows" are positions:
//! of one sequence or of several, an operation that mixes rows says so. Only attention and the block router do.
//! Slices of the wrong length are faults of the caller and panic.
//!
//! **Batch invariance.** In `cpu`, the result for a row is the same bits whatever rows are beside it and however many
//! threads run: each output element is summed in an order that depends on the width of the row only. Between
//! instruction sets results may differ within the tolerances of [`conformance`](crate::conformance).

use minnow_common::Routing;

#[expect(unused_imports, reason = "for the links above")]
use crate::{codec, cpu, oracle};

/// Shape of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads: a multiple of `kv`. Query head `j` reads key and value head `j / (query / kv)`.
    pub query: usize,
    /// Key and value heads.
    pub kv: usize,
    /// Width of a head.
    pub dim: usize,
}

/// Keys (after norm and rotation) and values of one block of 32 positions, in one layer.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    /// `[kv heads, 32, dim]`
    pub keys: &'a [f32],
    /// `[kv heads, 32, dim]`
    pub values: &'a [f32],
}

/// How a router chooses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterRules {
    /// The pool a token chooses from.
    pub routing: Routing,
    /// Experts a token gets.
    pub experts_per_token: usize,
    /// Factor on the normalised weights.
    pub scale: f32,
}

/// Candidates kept of a position: no more than three token ids are ever banned together, so one always remains.
pub const CANDIDATES: usize = 4;

/// A token that a row of logits favours.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Candidate {
    /// Its id.
    pub token: u32,
    /// Its logit.
    pub logit: f32,
    /// Its softmax probability at temperature 1 over the whole row.
    pub confidence: f32,
}
