//! The commands: one file, one verb.

pub(crate) mod compare;
pub(crate) mod convert;
pub(crate) mod extract;
pub(crate) mod inspect;
pub(crate) mod manual;
pub(crate) mod publish;
pub(crate) mod pull;
pub(crate) mod push;
pub(crate) mod remote;
pub(crate) mod repair;
pub(crate) mod synth;
pub(crate) mod validate;

mod container;
mod destination;
mod estimate;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use minnow_common::units::HumanBytes;
use minnow_formats::checkpoint::{Checkpoint, StoredTensor};
use minnow_formats::names;
use serde_json::{Value, json};

use crate::plan::Share;

/// The table of encodings, one line each: name, tensors, bytes, bits a weight with scales counted.
fn encodings_table(shares: &BTreeMap<&'static str, Share>) -> String {
    let mut table = String::new();
    for (name, share) in shares {
        let bytes = HumanBytes(share.bytes).to_string();
        // Writing to a string cannot fail.
        let _ = writeln!(
            table,
            "  {name:<8} {:>8} tensors  {bytes:>10}  {:>6.3} bits per weight",
            share.tensors,
            share.bits()
        );
    }
    table
}

/// The same as JSON: name -> {tensors, bytes, bits_per_weight}.
fn encodings_json(shares: &BTreeMap<&'static str, Share>) -> Value {
    let entry =
        |share: &Share| json!({"tensors": share.tensors, "bytes": share.bytes, "bits_per_weight": share.bits()});
    shares.iter().map(|(name, share)| ((*name).to_owned(), entry(share))).collect::<serde_json::Map<_, _>>().into()
}

/// Encoding and group size, as in `i4_mma/128`.
fn encoding_words(tensor: &StoredTensor) -> String {
    match tensor.spec.group() {
        Some(group) => format!("{}/{group}", tensor.spec.encoding()),
        None => tensor.spec.encoding().to_string(),
    }
}

/// The assets that a writer may store; a container may hold more, which are left out.
fn known_assets(checkpoint: &Checkpoint) -> BTreeMap<String, String> {
    let known = checkpoint.assets().iter().filter(|(name, _)| names::is_known_asset(name));
    known.map(|(name, text)| (name.clone(), text.clone())).collect()
}
