//! `config.json` of a LLaDA2.x checkpoint, parsed once into values that go together.
//!
//! The rules are those of `docs/format-mnw.md` section 4.4 and of the model description (`docs/architecture.md` names
//! the sources). Everything later, sizes, loops, allocations, relies on them. A configuration without `expert_capacity`
//! is LLaDA2.0 or 2.1 and routes by groups; with it, LLaDA2.2, and routes by block. Model names are never looked at.

use serde_json::{Map, Value};
use thiserror::Error;

use crate::{ARCHITECTURE, BLOCK};

/// The class name that Hugging Face configurations of this architecture carry in `architectures`.
pub const MODEL_CLASS: &str = "LLaDA2MoeModelLM";

/// No single count or dimension may exceed this; real models stay below 2^18.
const COUNT_MAX: u64 = 1 << 24;
/// Layers times experts, so that the list of tensors stays small; LLaDA2.2-flash has 8,192.
const EXPERTS_IN_ALL_MAX: usize = 1 << 18;

/// Everything a forward pass needs to know about a model. Made by [`ModelConfig::from_json`].
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the dense feed-forward layers.
    pub intermediate_size: usize,
    /// Number of transformer layers.
    pub num_hidden_layers: usize,
    /// Query heads; a multiple of `num_key_value_heads`.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Leading dimensions of a head that are rotated: even, 2 to `head_dim`.
    pub rotary_dim: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f32,
    /// Positions the model was made for.
    pub max_position_embeddings: usize,
    /// Layers before this one have a dense feed-forward part instead of experts.
    pub first_k_dense_replace: usize,
    /// Routed experts of a layer.
    pub num_experts: usize,
    /// Experts a token uses.
    pub num_experts_per_tok: usize,
    /// Experts every token uses, stored as one of this many times `moe_intermediate_size`.
    pub num_shared_experts: usize,
    /// Width of one routed expert.
    pub moe_intermediate_size: usize,
    /// Factor on the normalised routing weights.
    pub routed_scaling_factor: f32,
    /// Positions refined together.
    pub block_size: usize,
    /// How experts are chosen.
    pub routing: Routing,
    /// Whether queries and keys are normalised per head before rotation.
    pub use_qk_norm: bool,
    /// Token ids the configuration names.
    pub ids: ConfiguredIds,
}

/// How experts are chosen; the one difference between the versions that a forward pass sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// LLaDA2.2: a block of positions may use at most `capacity` experts together.
    Block {
        /// `expert_capacity`: `num_experts_per_tok` to `num_experts`.
        capacity: usize,
    },
    /// LLaDA2.0 and 2.1: each token uses experts of its `kept` best groups of consecutive experts.
    Groups {
        /// `n_group`, a divisor of `num_experts`.
        groups: usize,
        /// `topk_group`, at most `groups`.
        kept: usize,
    },
}

/// Token ids found in `config.json`; those that are absent come from the tokenizer's special tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfiguredIds {
    /// `mask_token_id`
    pub mask: Option<u32>,
    /// `delete_token_id`
    pub delete: Option<u32>,
    /// `split_token_id`
    pub split: Option<u32>,
    /// `pad_token_id`
    pub pad: Option<u32>,
    /// `eos_token_id`, one or several.
    pub eos: Vec<u32>,
    /// `bos_token_id`
    pub bos: Option<u32>,
}

/// Why a `config.json` cannot be used.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ConfigError {
    /// Not JSON, or not an object.
    #[error("config.json is not a JSON object: {0}")]
    Json(String),
    /// A required field is absent or null.
    #[error("config.json: field {0} is missing")]
    Missing(&'static str),
    /// A field has a value outside what this architecture allows.
    #[error("config.json: {field} is {found}, expected {expected}")]
    Value {
        /// The field's name.
        field: &'static str,
        /// What stands there, as JSON.
        found: String,
        /// What may stand there.
        expected: String,
    },
}

impl ModelConfig {
    /// Parses and checks `config.json`.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let value: Value = serde_json::from_str(text).map_err(|error| ConfigError::Json(error.to_string()))?;
        let Value::Object(map) = value else {
            return Err(ConfigError::Json("the outermost value is not an object".to_owned()));
        };
        let fields = Fields(&map);
        fields.check_architecture()?;

        let head_count = fields.count("num_attention_heads")?;
        let kv_head_count = fields.count("num_key_value_heads")?;
        let hidden_size = fields.count("hidden_size")?;
        let head_dim = match fields.optional_count("head_dim")? {
            Some(head_dim) => head_dim,
            None if hidden_size.is_multiple_of(head_count) => hidden_size / head_count,
            None => return Err(ConfigError::Missing("head_dim")),
        };
        if !head_count.is_multiple_of(kv_head_count) {
            return Err(fields.wrong("num_key_value_heads", format!("a divisor of num_attention_heads {head_count}")));
        }
        let (rope_theta, rotary_dim) = fields.rope(head_dim)?;

        let num_experts = fields.count("num_experts")?;
        let num_experts_per_tok = fields.count("num_experts_per_tok")?;
        if num_experts_per_tok > num_experts {
            return Err(fields.wrong("num_experts_per_tok", format!("at most num_experts {num_experts}")));
        }
        let routing = fields.routing(num_experts, num_experts_per_tok)?;
        let num_hidden_layers = fields.count("num_hidden_layers")?;
        if num_hidden_layers * num_experts > EXPERTS_IN_ALL_MAX {
            let expected = format!("at most {} layers of {num_experts} experts", EXPERTS_IN_ALL_MAX / num_experts);
            return Err(fields.wrong("num_hidden_layers", expected));
        }
        let max_position_embeddings = fields.count("max_position_embeddings")?;
        let block_size = fields.optional_count("block_size")?.unwrap_or(BLOCK);
        if block_size > max_position_embeddings {
            return Err(
                fields.wrong("block_size", format!("at most max_position_embeddings {max_position_embeddings}"))
            );
        }
        fields.check_fixed_choices()?;

        Ok(Self {
            vocab_size: fields.count("vocab_size")?,
            hidden_size,
            intermediate_size: fields.count("intermediate_size")?,
            num_hidden_layers,
            num_attention_heads: head_count,
            num_key_value_heads: kv_head_count,
            head_dim,
            rotary_dim,
            rope_theta,
            rms_norm_eps: fields.positive("rms_norm_eps")? as f32,
            max_position_embeddings,
            first_k_dense_replace: fields.optional_index("first_k_dense_replace")?.unwrap_or(0),
            num_experts,
            num_experts_per_tok,
            num_shared_experts: fields.optional_index("num_shared_experts")?.unwrap_or(0),
            moe_intermediate_size: fields.count("moe_intermediate_size")?,
            routed_scaling_factor: fields.positive("routed_scaling_factor")? as f32,
            block_size,
            routing,
            use_qk_norm: fields.flag("use_qk_norm")?.unwrap_or(true),
            ids: fields.ids()?,
        })
    }

    /// Rows of the fused query, key and value projection.
    #[must_use]
    pub fn qkv_rows(&self) -> usize {
        (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
    }

    /// Whether layer `layer` has a dense feed-forward part.
    #[must_use]
    pub fn is_dense(&self, layer: usize) -> bool {
        layer < self.first_k_dense_replace
    }

    /// Width of the shared expert; 0 if there is none.
    #[must_use]
    pub fn shared_intermediate_size(&self) -> usize {
        self.moe_intermediate_size * self.num_shared_experts
    }

    /// Elements of K (or of V) of one block in one layer: `[num_key_value_heads, block_size, head_dim]`.
    #[must_use]
    pub fn kv_elements_per_page(&self) -> usize {
        self.num_key_value_heads * self.block_size * self.head_dim
    }
}

/// The raw object, with accessors that turn a wrong value into an error naming it.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    /// The value of a field; null counts as absent.
    fn value(&self, field: &str) -> Option<&Value> {
        self.0.get(field).filter(|value| !value.is_null())
    }

    fn wrong(&self, field: &'static str, expected: impl Into<String>) -> ConfigError {
        let found = self.0.get(field).map_or_else(|| "absent".to_owned(), shortened);
        ConfigError::Value { field, found, expected: expected.into() }
    }

    fn optional_index(&self, field: &'static str) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match value.as_u64() {
            Some(count) if count <= COUNT_MAX => Ok(Some(count as usize)),
            _ => Err(self.wrong(field, format!("an integer from 0 to {COUNT_MAX}"))),
        }
    }

    fn optional_count(&self, field: &'static str) -> Result<Option<usize>, ConfigError> {
        match self.optional_index(field) {
            Ok(Some(0)) | Err(_) => Err(self.wrong(field, format!("an integer from 1 to {COUNT_MAX}"))),
            other => other,
        }
    }

    fn count(&self, field: &'static str) -> Result<usize, ConfigError> {
        self.optional_count(field)?.ok_or(ConfigError::Missing(field))
    }

    fn positive(&self, field: &'static str) -> Result<f64, ConfigError> {
        let value = self.value(field).ok_or(ConfigError::Missing(field))?;
        match value.as_f64() {
            Some(number) if number > 0.0 && (number as f32).is_normal() => Ok(number),
            _ => Err(self.wrong(field, "a positive finite number")),
        }
    }

    fn flag(&self, field: &'static str) -> Result<Option<bool>, ConfigError> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.wrong(field, "true or false")),
        }
    }

    fn token(&self, field: &'static str) -> Result<Option<u32>, ConfigError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) => Ok(Some(id)),
            None => Err(self.wrong(field, "a token id")),
        }
    }

    fn ids(&self) -> Result<ConfiguredIds, ConfigError> {
        let eos = match self.value("eos_token_id") {
            Some(Value::Array(list)) => list
                .iter()
                .map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()))
                .collect::<Option<Vec<u32>>>()
                .ok_or_else(|| self.wrong("eos_token_id", "a token id or a list of them"))?,
            _ => self.token("eos_token_id")?.into_iter().collect(),
        };
        Ok(ConfiguredIds {
            mask: self.token("mask_token_id")?,
            delete: self.token("delete_token_id")?,
            split: self.token("split_token_id")?,
            pad: self.token("pad_token_id")?,
            eos,
            bos: self.token("bos_token_id")?,
        })
    }

    fn check_architecture(&self) -> Result<(), ConfigError> {
        match self.value("model_type") {
            None => return Err(ConfigError::Missing("model_type")),
            Some(Value::String(name)) if name == ARCHITECTURE => {}
            Some(_) => {
                return Err(self.wrong("model_type", format!("\"{ARCHITECTURE}\", the only architecture supported")));
            }
        }
        match self.value("architectures") {
            None => Ok(()),
            Some(Value::Array(names)) if names.iter().any(|name| name == MODEL_CLASS) => Ok(()),
            Some(_) => {
                Err(self.wrong("architectures", format!("a list with \"{MODEL_CLASS}\", the only class supported")))
            }
        }
    }

    /// `(theta, rotary_dim)`. `rope_parameters`, written by transformers 5, wins over the flat fields.
    fn rope(&self, head_dim: usize) -> Result<(f64, usize), ConfigError> {
        let nested = match self.value("rope_parameters") {
            None => None,
            Some(Value::Object(map)) => {
                let nested = Fields(map);
                if nested.value("rope_type").is_some_and(|kind| kind != "default") {
                    return Err(nested.wrong("rope_type", "\"default\""));
                }
                Some(nested)
            }
            Some(_) => return Err(self.wrong("rope_parameters", "an object")),
        };
        let with = |field: &'static str| nested.as_ref().filter(|nested| nested.value(field).is_some()).unwrap_or(self);
        let theta = with("rope_theta").positive("rope_theta")?;
        let factor = with("partial_rotary_factor");
        let rotary_dim = if factor.value("partial_rotary_factor").is_some() {
            let share = factor.positive("partial_rotary_factor")?;
            if share > 1.0 {
                return Err(factor.wrong("partial_rotary_factor", "a number above 0 and up to 1"));
            }
            (share * head_dim as f64) as usize
        } else {
            self.optional_count("rotary_dim")?.unwrap_or(head_dim)
        };
        if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) || rotary_dim > head_dim {
            let expected = format!("a share of head_dim {head_dim} that is even and positive, not {rotary_dim}");
            return Err(factor.wrong("partial_rotary_factor", expected));
        }
        if self.optional_count("rotary_dim")?.is_some_and(|flat| flat != rotary_dim) {
            return Err(self.wrong("rotary_dim", format!("{rotary_dim}, as partial_rotary_factor says")));
        }
        Ok((theta, rotary_dim))
    }

    fn routing(&self, experts: usize, per_token: usize) -> Result<Routing, ConfigError> {
        if let Some(capacity) = self.optional_index("expert_capacity")?.filter(|&capacity| capacity > 0) {
            if capacity < per_token || capacity > experts {
                let expected = format!("num_experts_per_tok {per_token} to num_experts {experts}");
                return Err(self.wrong("expert_capacity", expected));
            }
            return Ok(Routing::Block { capacity });
        }
        let groups = self.count("n_group")?;
        let kept = self.count("topk_group")?;
        if !experts.is_multiple_of(groups) || experts / groups < 2 && groups > 1 {
            return Err(self.wrong("n_group", format!("a divisor of num_experts {experts} with two experts a group")));
        }
        if kept > groups || kept * (experts / groups) < per_token {
            let expected = format!("at most n_group {groups}, with room for {per_token} experts a token");
            return Err(self.wrong("topk_group", expected));
        }
        Ok(Routing::Groups { groups, kept })
    }

    /// Choices the architecture fixes; a checkpoint that made another one would run and be wrong.
    fn check_fixed_choices(&self) -> Result<(), ConfigError> {
        for field in ["use_qkv_bias", "use_bias", "norm_head", "tie_word_embeddings", "use_sliding_window"] {
            if self.flag(field)? == Some(true) {
                return Err(self.wrong(field, "false"));
            }
        }
        for field in ["norm_topk_prob", "moe_router_enable_expert_bias"] {
            if self.flag(field)? == Some(false) {
                return Err(self.wrong(field, "true"));
            }
        }
        for (field, only) in [("hidden_act", "silu"), ("score_function", "sigmoid")] {
            if self.value(field).is_some_and(|value| value != only) {
                return Err(self.wrong(field, format!("\"{only}\"")));
            }
        }
        match self.value("rope_scaling") {
            None => Ok(()),
            Some(_) => Err(self.wrong("rope_scaling", "null")),
        }
    }
}

fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> Map<String, Value> {
        let text = r#"{"model_type":"llada2_moe","vocab_size":512,"hidden_size":256,"intermediate_size":512,
            "num_hidden_layers":3,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":128,"rms_norm_eps":1e-6,
            "max_position_embeddings":1024,"first_k_dense_replace":1,"num_experts":16,"num_experts_per_tok":2,
            "num_shared_experts":1,"moe_intermediate_size":128,"n_group":4,"topk_group":2,"routed_scaling_factor":2.5,
            "partial_rotary_factor":0.5,"rotary_dim":64,"rope_theta":3000000,"rope_scaling":null,"block_size":32,
            "expert_capacity":6}"#;
        serde_json::from_str(text).unwrap()
    }

    fn parse(map: &Map<String, Value>) -> Result<ModelConfig, ConfigError> {
        ModelConfig::from_json(&serde_json::to_string(map).unwrap())
    }

    #[test]
    fn capacity_chooses_block_routing_and_its_absence_groups() {
        let mut map = base();
        assert_eq!(parse(&map).unwrap().routing, Routing::Block { capacity: 6 });
        map.remove("expert_capacity");
        map.remove("block_size");
        let config = parse(&map).unwrap();
        assert_eq!(config.routing, Routing::Groups { groups: 4, kept: 2 });
        assert_eq!(config.block_size, BLOCK);
    }

    #[test]
    fn rope_parameters_win_over_flat_fields() {
        let mut map = base();
        map.insert("rope_parameters".into(), serde_json::json!({"rope_type": "default", "rope_theta": 1e4}));
        assert_eq!(parse(&map).unwrap().rope_theta, 1e4);
        map.insert("rope_parameters".into(), serde_json::json!({"rope_type": "yarn", "rope_theta": 1e4}));
        assert!(parse(&map).is_err());
    }

    #[test]
    fn each_broken_rule_names_its_field_and_value() {
        let cases: &[(&str, Value)] = &[
            ("model_type", "llama".into()),
            ("architectures", serde_json::json!(["LlamaForCausalLM"])),
            ("num_key_value_heads", 3.into()),
            ("num_experts_per_tok", 17.into()),
            ("expert_capacity", 17.into()),
            ("expert_capacity", 1.into()),
            ("vocab_size", 0.into()),
            ("vocab_size", (-4).into()),
            ("vocab_size", "many".into()),
            ("hidden_size", Value::from(1u64 << 40)),
            ("num_hidden_layers", (1 << 20).into()),
            ("partial_rotary_factor", 1.5.into()),
            ("rotary_dim", 32.into()),
            ("rope_theta", 0.into()),
            ("rms_norm_eps", 0.into()),
            ("block_size", 2048.into()),
            ("hidden_act", "gelu".into()),
            ("use_bias", true.into()),
            ("tie_word_embeddings", true.into()),
            ("use_sliding_window", true.into()),
            ("rope_scaling", serde_json::json!({"type": "linear"})),
            ("norm_topk_prob", false.into()),
            ("mask_token_id", (-1).into()),
        ];
        for (field, value) in cases {
            let mut map = base();
            map.insert((*field).to_owned(), value.clone());
            let error = parse(&map).expect_err(field).to_string();
            assert!(error.contains(field), "{field}: {error}");
        }
        for text in ["", "[]", "{", "{\"model_type\":\"llada2_moe\"}"] {
            assert!(ModelConfig::from_json(text).is_err(), "{text}");
        }
    }
}
