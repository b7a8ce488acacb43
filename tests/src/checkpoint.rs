//! The seeded tiny checkpoints `t16`, `t64` and `t16g` of `golden/model/README.md`, as safetensors folders.

use std::collections::BTreeMap;
use std::path::Path;

use minnow_common::inventory::{self, Role};
use minnow_common::random::Symmetric;
use minnow_common::{FloatType, ModelConfig};
use serde_json::{Value, json};

/// The `config.json` of a preset.
///
/// # Panics
/// For an unknown preset.
#[must_use]
pub fn config(preset: &str) -> Value {
    let mut config = json!({
        "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "vocab_size": 512, "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 1024,
        "first_k_dense_replace": 1, "num_experts": 16, "num_experts_per_tok": 2, "num_shared_experts": 1,
        "moe_intermediate_size": 128, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
        "score_function": "sigmoid", "norm_topk_prob": true, "moe_router_enable_expert_bias": true,
        "router_dtype": "fp32", "use_qk_norm": true, "use_qkv_bias": false, "use_bias": false, "norm_head": false,
        "tie_word_embeddings": false, "use_sliding_window": false, "partial_rotary_factor": 0.5, "rotary_dim": 64,
        "rope_theta": 3_000_000, "rope_scaling": null, "block_size": 32, "expert_capacity": 6, "pad_token_id": 481,
        "delete_token_id": 505, "split_token_id": 506, "dtype": "bfloat16",
    });
    let set = |config: &mut Value, pairs: &[(&str, u64)]| {
        for (key, value) in pairs {
            config[*key] = json!(value);
        }
    };
    match preset {
        "t16" => {}
        "t64" => set(
            &mut config,
            &[
                ("num_experts", 64),
                ("num_experts_per_tok", 4),
                ("expert_capacity", 12),
                ("num_attention_heads", 4),
                ("num_key_value_heads", 2),
                ("n_group", 8),
                ("topk_group", 4),
            ],
        ),
        "t16g" => {
            set(&mut config, &[("rope_theta", 600_000)]);
            for key in ["expert_capacity", "block_size", "delete_token_id", "split_token_id"] {
                config.as_object_mut().expect("an object").remove(key);
            }
        }
        other => panic!("unknown preset {other}"),
    }
    config
}

/// The stored bytes of every tensor of a preset (`seed` 1 in the golden files), by name, with type and shape.
#[must_use]
pub fn tensors(config: &ModelConfig, seed: u64) -> BTreeMap<String, (FloatType, Vec<usize>, Vec<u8>)> {
    inventory::needed(config).into_iter().map(|needed| (needed.name.clone(), stored(&needed, seed))).collect()
}

fn stored(needed: &inventory::Needed, seed: u64) -> (FloatType, Vec<usize>, Vec<u8>) {
    let shape: Vec<usize> = needed.shape.dims().iter().map(|&dim| dim as usize).collect();
    let fan = (3.0 / needed.shape.last() as f64).sqrt() as f32;
    let scale = match needed.role {
        Role::Embedding => 1.0,
        Role::Norm => 0.3,
        Role::Linear | Role::Expert => fan,
        Role::Router => fan * 1.5,
        Role::RouterBias => 0.1,
        Role::Head => fan * 5.0,
    };
    let sequence = Symmetric::new(&needed.name, seed);
    let mut bytes = Vec::new();
    for index in 0..needed.shape.elements() {
        let mut value = sequence.at(index) * scale;
        match needed.role {
            Role::Norm => value += 1.0,
            Role::RouterBias => {
                bytes.extend(value.to_le_bytes());
                continue;
            }
            // Make structural edits and stops reachable, masks rare.
            Role::Head => match index / needed.shape.last() {
                505 | 506 | 481 => value *= 1.25,
                484 => value *= 0.25,
                _ => {}
            },
            _ => {}
        }
        bytes.extend(half::bf16::from_f32(value).to_le_bytes());
    }
    let float = if needed.role == Role::RouterBias { FloatType::F32 } else { FloatType::Bf16 };
    (float, shape, bytes)
}

/// Writes a preset as a Hugging Face folder: `config.json`, tokenizer, template and one `model.safetensors`.
///
/// # Panics
/// If `folder` cannot be written.
pub fn write(preset: &str, seed: u64, folder: &Path) {
    let config_json = config(preset).to_string();
    let parsed = ModelConfig::from_json(&config_json).expect("a valid preset");
    let tensors = tensors(&parsed, seed);
    let views = tensors.iter().map(|(name, (float, shape, bytes))| {
        let dtype = match float {
            FloatType::Bf16 => safetensors::Dtype::BF16,
            FloatType::F16 => safetensors::Dtype::F16,
            FloatType::F32 => safetensors::Dtype::F32,
        };
        (name.as_str(), safetensors::tensor::TensorView::new(dtype, shape.clone(), bytes).expect("matching sizes"))
    });
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).expect("a writable folder");
    std::fs::write(folder.join("config.json"), config_json).expect("a writable folder");
    let generation = json!({"eos_token_id": [481, 489], "pad_token_id": 481}).to_string();
    std::fs::write(folder.join("generation_config.json"), generation).expect("a writable folder");
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        let _ = crate::golden::unpack_into(&format!("golden/model/tokenizer/{name}"), folder);
    }
}
