//! The configurations that synthetic checkpoints imitate: section 1 of the model description, for LLaDA2.2.

use serde_json::{Value, json};

use super::tokenizer::SpecialTokens;

/// A configuration by its name on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Preset {
    /// Three small layers, for tests.
    Tiny,
    /// LLaDA2.2-mini, 16 B parameters.
    Mini,
    /// LLaDA2.2-flash, 103 B parameters.
    Flash,
}

impl Preset {
    /// The name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::Mini => "mini",
            Self::Flash => "flash",
        }
    }

    /// Transformer layers of the whole model.
    pub(crate) fn layers(self) -> usize {
        match self {
            Self::Tiny => 3,
            Self::Mini => 20,
            Self::Flash => 32,
        }
    }

    /// Where the special tokens of the vocabulary lie.
    pub(super) fn special_tokens(self) -> SpecialTokens {
        match self {
            Self::Tiny => SpecialTokens { base_tokens: 480, count: 32, delete: 505, split: 506 },
            Self::Mini | Self::Flash => {
                SpecialTokens { base_tokens: 156_891, count: 262, delete: 156_930, split: 156_931 }
            }
        }
    }

    /// `config.json` of the first `layers` layers.
    pub(super) fn config_json(self, layers: usize) -> String {
        let mut config = json!({
            "architectures": ["LLaDA2MoeModelLM"],
            "model_type": "llada2_moe",
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "moe_router_enable_expert_bias": true,
            "norm_head": false,
            "norm_topk_prob": true,
            "num_shared_experts": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-6,
            "rope_scaling": null,
            "rope_theta": 3_000_000,
            "rotary_dim": 64,
            "routed_scaling_factor": 2.5,
            "router_dtype": "fp32",
            "score_function": "sigmoid",
            "tie_word_embeddings": false,
            "torch_dtype": "bfloat16",
            "use_bias": false,
            "use_qk_norm": true,
            "use_qkv_bias": false,
            "use_sliding_window": false,
            "block_size": minnow_common::BLOCK,
            "num_hidden_layers": layers,
        });
        let special = self.special_tokens();
        let mut set = |pairs: &[(&str, usize)]| {
            for (key, value) in pairs {
                config[*key] = Value::from(*value);
            }
        };
        set(&[
            ("pad_token_id", special.eos() as usize),
            ("delete_token_id", special.delete as usize),
            ("split_token_id", special.split as usize),
        ]);
        if self != Self::Tiny {
            set(&[
                ("vocab_size", 157_184),
                ("max_position_embeddings", 131_072),
                ("num_experts", 256),
                ("num_experts_per_tok", 8),
                ("expert_capacity", 48),
                ("n_group", 8),
                ("topk_group", 4),
                ("num_key_value_heads", 4),
            ]);
        }
        match self {
            Self::Tiny => set(&[
                ("vocab_size", 512),
                ("max_position_embeddings", 1024),
                ("num_experts", 16),
                ("num_experts_per_tok", 2),
                ("expert_capacity", 6),
                ("n_group", 4),
                ("topk_group", 2),
                ("num_attention_heads", 2),
                ("num_key_value_heads", 1),
                ("hidden_size", 256),
                ("intermediate_size", 512),
                ("moe_intermediate_size", 128),
            ]),
            Self::Mini => set(&[
                ("num_attention_heads", 16),
                ("hidden_size", 2048),
                ("intermediate_size", 5120),
                ("moe_intermediate_size", 512),
            ]),
            Self::Flash => set(&[
                ("num_attention_heads", 32),
                ("hidden_size", 4096),
                ("intermediate_size", 9216),
                ("moe_intermediate_size", 1024),
            ]),
        }
        format!("{config:#}\n")
    }
}
