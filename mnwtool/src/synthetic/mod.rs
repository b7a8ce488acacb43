//! Checkpoints that exist only as a formula: random, finite weights of realistic scale in the shapes of released models.
//!
//! A value depends on the tensor's name, the seed and its index, so any slice can be made by any thread. Scales keep the
//! activations of a forward pass in the range of a trained model: projections by the root of their fan-in, norms around
//! one, a sharper router and head so that choices are not all ties.

mod preset;
mod tokenizer;

use std::collections::BTreeMap;
use std::sync::Arc;

use minnow_common::inventory::{self, Role};
use minnow_common::random::Symmetric;
use minnow_common::{ConfigError, Encoding, FileOffset, FloatType, ModelConfig, TensorSpec};
use minnow_formats::checkpoint::Digests;
use minnow_formats::io::{IoError, ReadAt};

pub(crate) use preset::Preset;

use crate::pipeline::source::{Part, Source};

/// The chat template of LLaDA2.2, written from its published description.
const CHAT_TEMPLATE: &str = include_str!("../assets/chat_template.jinja");

/// A checkpoint made of a preset, a seed and nothing else.
#[derive(Debug)]
pub(crate) struct Synthetic {
    config: ModelConfig,
    assets: BTreeMap<String, String>,
    tensors: BTreeMap<String, Tensor>,
}

#[derive(Debug)]
struct Tensor {
    spec: TensorSpec,
    sequence: Symmetric,
    /// Values are `offset + scale * u`, u uniform in [-1, 1).
    offset: f32,
    scale: f32,
    float: FloatType,
}

impl Synthetic {
    /// The first `layers` layers of `preset`, with weights from `seed`.
    pub(crate) fn new(preset: Preset, layers: usize, seed: u64) -> Result<Self, ConfigError> {
        let config_json = preset.config_json(layers);
        let config = ModelConfig::from_json(&config_json)?;
        let special = preset.special_tokens();
        let assets = [
            ("chat_template.jinja", CHAT_TEMPLATE.to_owned()),
            ("config.json", config_json),
            ("generation_config.json", special.generation_config()),
            ("tokenizer.json", special.tokenizer()),
            ("tokenizer_config.json", special.tokenizer_config(config.max_position_embeddings)),
        ];
        let assets = assets.into_iter().map(|(name, text)| (name.to_owned(), text)).collect();
        let tensors =
            inventory::needed(&config).into_iter().map(|needed| (needed.name.clone(), Tensor::new(&needed, seed)));
        Ok(Self { tensors: tensors.collect(), config, assets })
    }

    /// The configuration that the shapes follow.
    pub(crate) fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The text files of the checkpoint.
    pub(crate) fn assets(&self) -> &BTreeMap<String, String> {
        &self.assets
    }

    /// Every tensor in bytewise name order.
    pub(crate) fn specs(&self) -> impl Iterator<Item = (&str, &TensorSpec)> + Clone {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), &tensor.spec))
    }
}

impl Tensor {
    fn new(needed: &inventory::Needed, seed: u64) -> Self {
        let float = if needed.role == Role::RouterBias { FloatType::F32 } else { FloatType::Bf16 };
        // A uniform value in [-1, 1) has variance 1/3, so this keeps a projection's output at its input's variance.
        #[expect(clippy::cast_precision_loss, reason = "a fan-in is far below 2^24")]
        let fan_in = (3.0 / needed.shape.last() as f32).sqrt();
        let (offset, scale) = match needed.role {
            Role::Embedding => (0.0, 1.0),
            Role::Norm => (1.0, 0.3),
            Role::Linear | Role::Expert => (0.0, fan_in),
            Role::Router => (0.0, 1.5 * fan_in),
            Role::RouterBias => (0.0, 0.1),
            Role::Head => (0.0, 5.0 * fan_in),
        };
        let spec = TensorSpec::new(needed.shape.clone(), Encoding::Float(float), 0, None);
        let spec = spec.expect("a floating tensor of a shape that a configuration allows");
        Self { spec, sequence: Symmetric::new(&needed.name, seed), offset, scale, float }
    }

    fn fill<const N: usize>(&self, start: u64, out: &mut [u8], stored: impl Fn(f32) -> [u8; N]) {
        for (index, element) in (start / N as u64..).zip(out.chunks_exact_mut(N)) {
            element.copy_from_slice(&stored(self.offset + self.scale * self.sequence.at(index)));
        }
    }
}

impl Source for Synthetic {
    fn read_part(&self, name: &str, part: Part, start: u64, out: &mut [u8]) -> Result<(), IoError> {
        debug_assert_eq!(part, Part::Data, "{name} has no scales");
        let tensor = &self.tensors[name];
        match tensor.float {
            FloatType::F32 => tensor.fill(start, out, f32::to_le_bytes),
            FloatType::Bf16 | FloatType::F16 => tensor.fill(start, out, |value| bf16_bits(value).to_le_bytes()),
        }
        Ok(())
    }

    fn place(&self, _name: &str, _part: Part) -> Option<(&Arc<dyn ReadAt>, FileOffset)> {
        None
    }

    fn digests(&self, _name: &str) -> Option<Digests> {
        None
    }

    fn check_unchanged(&self) -> Result<(), IoError> {
        Ok(())
    }
}

/// Rounds a finite value to bfloat16, nearest, ties to even; without the care for NaN that keeps a loop from being
/// vectorised.
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_is_part_of_the_whole() {
        let model = Synthetic::new(Preset::Tiny, 3, 7).unwrap();
        let whole = |name: &str| {
            let mut bytes = vec![0; model.tensors[name].spec.data_bytes() as usize];
            model.read_part(name, Part::Data, 0, &mut bytes).unwrap();
            bytes
        };
        for name in ["lm_head.weight", "model.layers.1.mlp.gate.expert_bias"] {
            let mut slice = vec![0; 24];
            model.read_part(name, Part::Data, 32, &mut slice).unwrap();
            assert_eq!(slice, whole(name)[32..56], "{name}");
        }
        let other = Synthetic::new(Preset::Tiny, 3, 8).unwrap();
        let mut slice = vec![0; 64];
        other.read_part("lm_head.weight", Part::Data, 0, &mut slice).unwrap();
        assert_ne!(slice, whole("lm_head.weight")[..64]);
    }

    #[test]
    fn the_short_rounding_is_the_usual_one() {
        let values = (0..100_000).map(|index| Symmetric::new("x", 1).at(index) * 3.0);
        for value in values.chain([0.0, -0.0, f32::MAX / 2.0, f32::MIN_POSITIVE, 1.003_906_2, 1.011_718_8]) {
            assert_eq!(bf16_bits(value), half::bf16::from_f32(value).to_bits(), "{value}");
        }
    }

    #[test]
    fn every_preset_is_a_valid_model_of_its_published_size() {
        let parameters = |preset: Preset| {
            let model = Synthetic::new(preset, preset.layers(), 1).unwrap();
            model.specs().map(|(_, spec)| spec.shape().elements()).sum::<u64>()
        };
        assert_eq!(parameters(Preset::Mini), 16_255_643_392);
        assert_eq!(parameters(Preset::Flash), 102_889_705_216);
        assert!(parameters(Preset::Tiny) < 10_000_000);
    }
}
