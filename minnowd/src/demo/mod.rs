//! The embedded demo checkpoint: used when no model is named, so that a newcomer has something to talk to.
//!
//! A trained model of 20 M parameters with experts in INT4, made by `mnwtool convert` (`docs/hacking.md` has the
//! command). Its training data includes the word list of WordNet 3.0, whose licence lies beside it.

/// Its name in the API.
pub const NAME: &str = "minnow-tiny";

/// Page-aligned, so that tensors in it are aligned as they would be in a mapped file.
#[repr(C, align(4096))]
struct Aligned<Bytes: ?Sized>(Bytes);

static CHECKPOINT: &Aligned<[u8]> = &Aligned(*include_bytes!("minnow-tiny-int4.mnw"));

/// The bytes of the `.mnw` file.
#[must_use]
pub fn checkpoint() -> &'static [u8] {
    &CHECKPOINT.0
}

/// The licence of the WordNet data the model was trained on.
pub const WORDNET_LICENSE: &str = include_str!("LICENSE-WordNet.txt");
