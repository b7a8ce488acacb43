//! A checkpoint as a tree: parts outside the layers, layers, and in each what its tensors are for. Layers that are alike
//! are one entry.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use minnow_common::inventory;
use minnow_common::units::HumanBytes;
use minnow_formats::checkpoint::Checkpoint;
use serde_json::{Value, json};

use crate::commands::encoding_words;

/// What tensors are for, in the order of a forward pass, and how the part of their names after the layer starts.
const ROLES: [(&str, &[&str]); 7] = [
    ("attention", &["attention.query_key_value.", "attention.dense."]),
    (
        "norms",
        &["input_layernorm.", "post_attention_layernorm.", "attention.query_layernorm.", "attention.key_layernorm."],
    ),
    ("feed-forward", &["mlp.gate_proj.", "mlp.up_proj.", "mlp.down_proj."]),
    ("router", &["mlp.gate."]),
    ("shared experts", &["mlp.shared_experts."]),
    ("experts", &["mlp.experts."]),
    ("other", &[""]),
];

/// The tree of a checkpoint.
pub(super) struct Tree {
    /// Entries that start at the layer with that number, and how many layers are like it.
    layers: Vec<(usize, usize, Vec<Branch>)>,
    outside: Vec<Branch>,
    total_bytes: u64,
}

/// Tensors with one purpose.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Branch {
    role: &'static str,
    tensors: u64,
    bytes: u64,
    /// Encodings with their group sizes, most bytes first.
    encodings: Vec<String>,
}

impl Tree {
    pub(super) fn of(checkpoint: &Checkpoint) -> Self {
        let mut parts: BTreeMap<Place, Encodings> = BTreeMap::new();
        let mut total_bytes = 0;
        for (name, tensor) in checkpoint.tensors() {
            let bytes = tensor.spec.data_bytes() + tensor.spec.scales_bytes();
            let part = parts.entry(place(name)).or_default().entry(encoding_words(tensor)).or_default();
            *part = (part.0 + 1, part.1 + bytes);
            total_bytes += bytes;
        }
        let mut layers: BTreeMap<Option<usize>, Vec<Branch>> = BTreeMap::new();
        for ((layer, role), encodings) in parts {
            let role = if layer.is_some() { ROLES[role].0 } else { OUTSIDE[role] };
            let (tensors, bytes) = encodings.values().fold((0, 0), |sum, part| (sum.0 + part.0, sum.1 + part.1));
            let mut encodings: Vec<_> = encodings.into_iter().collect();
            encodings.sort_by_key(|(_, (_, bytes))| std::cmp::Reverse(*bytes));
            let encodings = encodings.into_iter().map(|(words, _)| words).collect();
            layers.entry(layer).or_default().push(Branch { role, tensors, bytes, encodings });
        }
        let outside = layers.remove(&None).unwrap_or_default();
        let mut runs: Vec<(usize, usize, Vec<Branch>)> = Vec::new();
        for (layer, branches) in layers.into_iter().filter_map(|(layer, branches)| Some((layer?, branches))) {
            match runs.last_mut() {
                Some((first, count, alike)) if *first + *count == layer && *alike == branches => *count += 1,
                _ => runs.push((layer, 1, branches)),
            }
        }
        Self { layers: runs, outside, total_bytes }
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for branch in &self.outside {
            self.line(&mut text, 2, branch.role, branch, 1);
        }
        for (first, count, branches) in &self.layers {
            let title = match count {
                1 => format!("layer {first}"),
                _ => format!("layers {first} to {}, each", first + count - 1),
            };
            let (tensors, bytes) = branches.iter().fold((0, 0), |sum, part| (sum.0 + part.tensors, sum.1 + part.bytes));
            self.line(&mut text, 2, &title, &Branch { role: "", tensors, bytes, encodings: Vec::new() }, *count);
            for branch in branches {
                self.line(&mut text, 4, branch.role, branch, *count);
            }
        }
        text
    }

    /// `share` is that of all `count` layers.
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    fn line(&self, text: &mut String, indent: usize, title: &str, branch: &Branch, count: usize) {
        let share = 100.0 * (branch.bytes * count as u64) as f64 / self.total_bytes.max(1) as f64;
        let (tensors, bytes, width) = (branch.tensors, HumanBytes(branch.bytes).to_string(), 26 - indent);
        let encodings = branch.encodings.join(", ");
        // Writing to a string cannot fail.
        let line =
            format!("{:indent$}{title:<width$}{tensors:>6} tensors  {bytes:>10}  {share:>6.2} %  {encodings}", "");
        let _ = writeln!(text, "{}", line.trim_end());
    }

    pub(super) fn json(&self) -> Value {
        let branch = |branch: &Branch| {
            let Branch { role, tensors, bytes, encodings } = branch;
            json!({"role": role, "tensors": tensors, "bytes": bytes, "encodings": encodings})
        };
        let list = |branches: &[Branch]| branches.iter().map(branch).collect::<Vec<_>>();
        let layers = self
            .layers
            .iter()
            .map(|(first, count, branches)| json!({"first_layer": first, "layers": count, "roles": list(branches)}));
        json!({"outside": list(&self.outside), "layers": layers.collect::<Vec<_>>()})
    }
}

/// A layer (`None` is outside of all), and a role there: an index into [`ROLES`] or [`OUTSIDE`].
type Place = (Option<usize>, usize);
/// Tensors and bytes of each encoding.
type Encodings = BTreeMap<String, (u64, u64)>;

/// What lies outside the layers.
const OUTSIDE: [&str; 4] = ["embedding", "final norm", "head", "other"];

/// Where a tensor belongs.
fn place(name: &str) -> Place {
    let in_layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    if let Some((Ok(layer), rest)) = in_layer.map(|(number, rest)| (number.parse(), rest)) {
        let is_start = |starts: &[&str]| starts.iter().any(|start| rest.starts_with(start));
        return (Some(layer), ROLES.iter().position(|(_, starts)| is_start(starts)).unwrap_or(ROLES.len() - 1));
    }
    let known = [inventory::EMBEDDING, inventory::FINAL_NORM, inventory::HEAD];
    (None, known.iter().position(|known| *known == name).unwrap_or(OUTSIDE.len() - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_needed_tensor_has_a_role_of_its_own() {
        let text = r#"{"model_type":"llada2_moe","vocab_size":64,"hidden_size":128,"intermediate_size":128,
            "num_hidden_layers":2,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":32,
            "rms_norm_eps":1e-6,"max_position_embeddings":64,"first_k_dense_replace":1,"num_experts":2,
            "num_experts_per_tok":1,"num_shared_experts":1,"moe_intermediate_size":128,"routed_scaling_factor":2.5,
            "rope_theta":10000,"expert_capacity":2}"#;
        let config = minnow_common::ModelConfig::from_json(text).unwrap();
        for needed in inventory::needed(&config) {
            let (layer, role) = place(&needed.name);
            let role = if layer.is_some() { ROLES[role].0 } else { OUTSIDE[role] };
            assert_ne!(role, "other", "{}", needed.name);
        }
        assert_eq!(place("model.layers.x.mlp.gate.weight"), (None, 3));
        assert_eq!(place("model.layers.3.surplus"), (Some(3), 6));
    }
}
