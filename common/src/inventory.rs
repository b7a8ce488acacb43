//! The tensors a model consists of: names, shapes and roles, in checkpoint order.
//!
//! Source: section 6 of `docs/format-mnw.md` and section 2 of the model description. One list serves everyone who
//! must know it: the converter's plan, the loader, and the generator of synthetic checkpoints.

use crate::config::ModelConfig;
use crate::shape::Shape;

/// What a tensor is for; decides how synthetic values are scaled and which data types are usual.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Token embedding, `[vocab, hidden]`.
    Embedding,
    /// A norm's weight vector.
    Norm,
    /// A dense or shared projection, `[out, in]`.
    Linear,
    /// A routed expert's projection, `[out, in]`: the only tensors that may be quantized.
    Expert,
    /// The router, `[experts, hidden]`.
    Router,
    /// The router's selection bias, `[experts]`.
    RouterBias,
    /// The output head, `[vocab, hidden]`.
    Head,
}

/// One tensor that the model needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Needed {
    /// Its full name.
    pub name: String,
    /// Its exact shape.
    pub shape: Shape,
    /// What it is for.
    pub role: Role,
}

/// The three projections of a feed-forward part, in the order they are applied.
pub const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Name of a tensor of layer `layer`, e.g. `layer(3, "mlp.gate.weight")`.
#[must_use]
pub fn layer(layer: usize, rest: &str) -> String {
    format!("model.layers.{layer}.{rest}")
}

/// Name of a projection of a routed expert.
#[must_use]
pub fn expert(layer: usize, expert: usize, projection: &str) -> String {
    format!("model.layers.{layer}.mlp.experts.{expert}.{projection}.weight")
}

/// The embedding's name.
pub const EMBEDDING: &str = "model.word_embeddings.weight";
/// The final norm's name.
pub const FINAL_NORM: &str = "model.norm.weight";
/// The head's name.
pub const HEAD: &str = "lm_head.weight";

/// Every tensor of a model with this configuration, in the order released checkpoints list them.
#[must_use]
pub fn needed(config: &ModelConfig) -> Vec<Needed> {
    let hidden = config.hidden_size;
    let mut list = Vec::new();
    let mut push = |name: String, shape: Shape, role: Role| list.push(Needed { name, shape, role });
    push(EMBEDDING.to_owned(), Shape::matrix(config.vocab_size, hidden), Role::Embedding);
    for index in 0..config.num_hidden_layers {
        let named = |rest: &str| layer(index, rest);
        let attention_width = config.num_attention_heads * config.head_dim;
        push(named("input_layernorm.weight"), Shape::vector(hidden), Role::Norm);
        push(named("attention.query_key_value.weight"), Shape::matrix(config.qkv_rows(), hidden), Role::Linear);
        if config.use_qk_norm {
            push(named("attention.query_layernorm.weight"), Shape::vector(config.head_dim), Role::Norm);
            push(named("attention.key_layernorm.weight"), Shape::vector(config.head_dim), Role::Norm);
        }
        push(named("attention.dense.weight"), Shape::matrix(hidden, attention_width), Role::Linear);
        push(named("post_attention_layernorm.weight"), Shape::vector(hidden), Role::Norm);
        let mut feed_forward = |prefix: &str, width: usize, role: Role| {
            for projection in PROJECTIONS {
                let shape = match projection {
                    "down_proj" => Shape::matrix(hidden, width),
                    _ => Shape::matrix(width, hidden),
                };
                push(format!("{prefix}.{projection}.weight"), shape, role);
            }
        };
        if config.is_dense(index) {
            feed_forward(&named("mlp"), config.intermediate_size, Role::Linear);
            continue;
        }
        for expert in 0..config.num_experts {
            feed_forward(&named(&format!("mlp.experts.{expert}")), config.moe_intermediate_size, Role::Expert);
        }
        if config.num_shared_experts > 0 {
            feed_forward(&named("mlp.shared_experts"), config.shared_intermediate_size(), Role::Linear);
        }
        push(named("mlp.gate.weight"), Shape::matrix(config.num_experts, hidden), Role::Router);
        push(named("mlp.gate.expert_bias"), Shape::vector(config.num_experts), Role::RouterBias);
    }
    push(FINAL_NORM.to_owned(), Shape::vector(hidden), Role::Norm);
    push(HEAD.to_owned(), Shape::matrix(config.vocab_size, hidden), Role::Head);
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mini() -> ModelConfig {
        let text = r#"{"model_type":"llada2_moe","vocab_size":157184,"hidden_size":2048,"intermediate_size":5120,
            "num_hidden_layers":20,"num_attention_heads":16,"num_key_value_heads":4,"head_dim":128,"rms_norm_eps":1e-6,
            "max_position_embeddings":131072,"first_k_dense_replace":1,"num_experts":256,"num_experts_per_tok":8,
            "num_shared_experts":1,"moe_intermediate_size":512,"routed_scaling_factor":2.5,
            "partial_rotary_factor":0.5,"rope_theta":3000000,"block_size":32,"expert_capacity":48}"#;
        ModelConfig::from_json(text).unwrap()
    }

    #[test]
    fn mini_has_the_published_number_of_tensors_and_parameters() {
        let list = needed(&mini());
        assert_eq!(list.len(), 14_813);
        assert_eq!(list.iter().map(|tensor| tensor.shape.elements()).sum::<u64>(), 16_255_643_392);
        let experts = list.iter().filter(|tensor| tensor.role == Role::Expert).count();
        assert_eq!(experts, 14_592);
        assert!(list.iter().all(|tensor| (tensor.role == Role::Expert) == crate::tensor::is_expert(&tensor.name)));
    }
}
