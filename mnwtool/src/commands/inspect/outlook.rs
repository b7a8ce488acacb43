//! What can be made of a checkpoint: the file that each `--experts` would give, and the memory that running it takes.

use minnow_common::units::HumanBytes;
use minnow_common::{Encoding, ModelConfig};
use minnow_formats::checkpoint::Checkpoint;
use minnow_formats::mnw;
use serde_json::{Value, json};

use crate::commands::known_assets;
use crate::plan::{self, Choice};

/// Tokens that the memory for keys and values is told for.
const TOKENS: usize = 1024;

/// The values of `--experts`, and what they mean.
const CHOICES: [(&str, Option<Encoding>); 4] = [
    ("original", None),
    ("int8", Some(Encoding::I8Mma)),
    ("int4", Some(Encoding::I4Mma)),
    ("nvfp4", Some(Encoding::Nvfp4)),
];

/// One conversion: the value of `--experts`, and the exact length of the file or why there can be none.
pub(super) struct Prospect {
    experts: &'static str,
    file_bytes: Result<u64, String>,
}

/// Every conversion with default options.
pub(super) fn prospects(checkpoint: &Checkpoint) -> Vec<Prospect> {
    let prospect = |(name, experts): &(&'static str, Option<Encoding>)| {
        let specs = checkpoint.tensors().iter().map(|(name, tensor)| (name.as_str(), &tensor.spec));
        let choice = Choice { experts: *experts, group: 0 };
        let file_bytes = plan::convert(checkpoint.config(), specs, choice, &[])
            .map_err(|error| error.to_string())
            .and_then(|conversion| {
                let tensors = conversion.tensors.into_iter().map(|tensor| (tensor.name, tensor.target)).collect();
                let plan = mnw::Plan { model_id: checkpoint.path_id(), assets: known_assets(checkpoint), tensors };
                plan.file_bytes().map_err(|error| error.to_string())
            });
        Prospect { experts: name, file_bytes }
    };
    CHOICES.iter().map(prospect).collect()
}

impl Prospect {
    pub(super) fn text(&self) -> String {
        let experts = self.experts;
        match &self.file_bytes {
            Ok(bytes) => format!("  --experts {experts:<8} {:>10}  {bytes} bytes\n", HumanBytes(*bytes).to_string()),
            Err(why) => format!("  --experts {experts:<8} not possible: {why}\n"),
        }
    }

    pub(super) fn json(&self) -> Value {
        match &self.file_bytes {
            Ok(bytes) => json!({"experts": self.experts, "possible": true, "file_bytes": bytes}),
            Err(why) => json!({"experts": self.experts, "possible": false, "problem": why}),
        }
    }
}

/// What running a model takes.
pub(crate) struct Memory {
    /// Weights, used as they are stored.
    weight_bytes: u64,
    /// Keys and values of [`TOKENS`] tokens in f32, as the CPU keeps them.
    kv_bytes: u64,
}

impl Memory {
    pub(crate) fn of(weight_bytes: u64, config: &ModelConfig) -> Self {
        let page_elements = 2 * config.num_hidden_layers * config.kv_elements_per_page();
        Self { weight_bytes, kv_bytes: (TOKENS / config.block_size * page_elements * size_of::<f32>()) as u64 }
    }

    /// Bytes of the weights.
    pub(crate) fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Bytes of keys and values of 1024 tokens, in f32.
    pub(crate) fn kv_bytes_per_1024(&self) -> u64 {
        self.kv_bytes
    }

    pub(super) fn text(&self) -> String {
        format!(
            "{} of weights, used as stored, and for each {TOKENS} tokens in the cache {} of keys and values in f32 \
             (half of that in bf16); activations come on top",
            HumanBytes(self.weight_bytes),
            HumanBytes(self.kv_bytes)
        )
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "weight_bytes": self.weight_bytes,
            "kv_bytes_per_1024_tokens_f32": self.kv_bytes,
            "kv_bytes_per_1024_tokens_bf16": self.kv_bytes / 2,
            "note": "weights are used as stored; activations come on top",
        })
    }
}
