//! What becomes of each tensor: decided here, on plain data, before a byte is read or written.
//!
//! The choice and its checks are sections 10.2 to 10.4 of `docs/format-mnw.md`. The pipeline carries a plan out and
//! decides nothing.

use std::collections::{BTreeMap, HashSet};

use minnow_common::inventory;
use minnow_common::tensor::{expert_family, is_expert};
use minnow_common::{Encoding, FloatType, GroupSize, ModelConfig, TensorSpec, TensorSpecError};
use minnow_formats::names::shortlist;
use thiserror::Error;

use crate::rules::Rule;

/// Elements of the largest matrix that may be quantized.
const QUANTIZED_ELEMENTS_MAX: u64 = 1 << 24;
/// Stands in for the matrix-wide scale of NVFP4 until the matrix has been encoded; no size depends on it.
const UNKNOWN_GLOBAL_SCALE: f32 = 1.0;

/// What `--experts` and `--group-size` ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Choice {
    /// The encoding of routed experts; `None` keeps the source's.
    pub(crate) experts: Option<Encoding>,
    /// Elements a group; 0 for the default.
    pub(crate) group: u64,
}

/// What is done to a tensor's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// They are written as they are, in slices.
    Copy,
    /// Floating elements are quantized.
    Encode,
    /// Codes and scales are put into another order.
    Repack,
    /// Quantized elements become floating ones.
    Decode,
}

/// One tensor of the output.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    /// Its name, in source and target.
    pub(crate) name: String,
    /// How the source stores it.
    pub(crate) source: TensorSpec,
    /// How the target stores it. A global scale that is yet to be computed is 1.
    pub(crate) target: TensorSpec,
    /// The way from one to the other.
    pub(crate) work: Work,
}

impl Planned {
    /// Bytes that are read for this tensor.
    pub(crate) fn source_bytes(&self) -> u64 {
        self.source.data_bytes() + self.source.scales_bytes()
    }

    /// Bytes that are written for this tensor, without padding.
    pub(crate) fn target_bytes(&self) -> u64 {
        self.target.data_bytes() + self.target.scales_bytes()
    }
}

/// Every tensor of the output in bytewise name order, and what the user should know about it.
#[derive(Debug)]
pub(crate) struct Conversion {
    /// The tensors.
    pub(crate) tensors: Vec<Planned>,
    /// One line each.
    pub(crate) warnings: Vec<String>,
}

/// Why there is no plan.
#[derive(Debug, PartialEq, Error)]
pub(crate) enum PlanError {
    /// A rule matched no tensor.
    #[error("rule {number}: no tensor name starts with {prefix:?}")]
    UnusedRule { number: usize, prefix: String },
    /// A tensor that is no routed expert would be quantized.
    #[error("{name}: cannot become {encoding}: only routed experts can be quantized")]
    NotAnExpert { name: String, encoding: Encoding },
    /// The target is a floating type other than the source's.
    #[error("{name}: is {from} and cannot become {to}: a conversion keeps floating types and never dequantizes")]
    FloatConversion { name: String, from: Encoding, to: Encoding },
    /// The source is quantized, with other codes or groups.
    #[error(
        "{name}: is {from} with group size {from_group} and cannot become {to} with group size {to_group}: \
             quantized tensors are only copied or repacked; convert the original instead"
    )]
    Requantized { name: String, from: Encoding, from_group: GroupSize, to: Encoding, to_group: u64 },
    /// Not a matrix.
    #[error("{name}: cannot become {encoding}: only matrices can be quantized, and this one has shape {shape}")]
    NotAMatrix { name: String, encoding: Encoding, shape: minnow_common::Shape },
    /// Too many elements for one matrix.
    #[error("{name}: cannot become {encoding}: it has {elements} elements, and the most is {QUANTIZED_ELEMENTS_MAX}")]
    TooLarge { name: String, encoding: Encoding, elements: u64 },
    /// Shape, encoding and group do not go together.
    #[error("{name}: {error}")]
    Spec { name: String, error: TensorSpecError },
    /// The name looks like an expert's but has no projection.
    #[error("{name}: an expert's name continues with a projection after its number")]
    ExpertName { name: String },
    /// Experts of one projection would differ.
    #[error("{prefix}.experts.*.{projection} would mix {} and {}: all experts of a projection share encoding and group size",
            described(.first), described(.second))]
    MixedFamily { prefix: String, projection: String, first: (Encoding, u64), second: (Encoding, u64) },
    /// The model needs tensors that the source lacks.
    #[error("tensors that config.json calls for are missing ({}): {}", .names.len(), shortlist(.names))]
    Missing { names: Vec<String> },
    /// A tensor has another shape than the configuration says.
    #[error("{name}: shape is {found}, but config.json calls for {expected}")]
    Shape { name: String, found: minnow_common::Shape, expected: minnow_common::Shape },
}

fn described((encoding, group): &(Encoding, u64)) -> String {
    if *group == 0 { encoding.to_string() } else { format!("{encoding} with group size {group}") }
}

/// Decides for every tensor of `source`, given in bytewise name order, and checks the outcome as a whole.
pub(crate) fn convert<'a>(
    config: &ModelConfig,
    source: impl Iterator<Item = (&'a str, &'a TensorSpec)> + Clone,
    choice: Choice,
    rules: &[Rule],
) -> Result<Conversion, PlanError> {
    let unneeded = check_against(config, source.clone())?;
    let mut seen = vec![RuleUse::default(); rules.len()];
    let mut families: BTreeMap<(&str, &str), (Encoding, u64)> = BTreeMap::new();
    let mut tensors = Vec::new();
    for (name, spec) in source {
        let (encoding, group) = choose(name, spec, choice, rules, &mut seen)?;
        let target = target_spec(name, spec, encoding, group)?;
        if name.contains(".experts.") {
            let family = expert_family(name).ok_or_else(|| PlanError::ExpertName { name: name.to_owned() })?;
            let first = *families.entry(family).or_insert((encoding, group));
            if first != (encoding, group) {
                let (prefix, projection) = (family.0.to_owned(), family.1.to_owned());
                return Err(PlanError::MixedFamily { prefix, projection, first, second: (encoding, group) });
            }
        }
        let work = match spec.encoding() {
            same if same == encoding => Work::Copy,
            Encoding::Float(_) => Work::Encode,
            _ => Work::Repack,
        };
        tensors.push(Planned { name: name.to_owned(), source: spec.clone(), target, work });
    }
    if let Some(number) = seen.iter().position(|rule| !rule.matches) {
        return Err(PlanError::UnusedRule { number: number + 1, prefix: rules[number].prefix.clone() });
    }
    let mut warnings = rule_warnings(rules, &seen, choice);
    if !unneeded.is_empty() {
        let (count, list) = (unneeded.len(), shortlist(&unneeded));
        warnings.push(format!("unknown tensors, copied although the model does not need them ({count}): {list}"));
    }
    if choice.group != 0 && !tensors.iter().any(|tensor| tensor.target.encoding().is_quantized()) {
        warnings.push(format!("--group-size {} has no effect: no tensor is quantized", choice.group));
    }
    Ok(Conversion { tensors, warnings })
}

/// The plan of an extraction: quantized tensors become `float`, the others stay as they are.
pub(crate) fn extract<'a>(
    source: impl Iterator<Item = (&'a str, &'a TensorSpec)>,
    float: FloatType,
) -> Result<Vec<Planned>, PlanError> {
    let planned = |(name, spec): (&str, &TensorSpec)| {
        let (target, work) = if spec.encoding().is_quantized() {
            let target = TensorSpec::new(spec.shape().clone(), Encoding::Float(float), 0, None);
            (target.map_err(|error| PlanError::Spec { name: name.to_owned(), error })?, Work::Decode)
        } else {
            (spec.clone(), Work::Copy)
        };
        Ok(Planned { name: name.to_owned(), source: spec.clone(), target, work })
    };
    source.map(planned).collect()
}

/// What a rule has done so far.
#[derive(Clone, Debug, Default)]
struct RuleUse {
    matches: bool,
    /// A name that goes on with a digit where the prefix ends with one: `layers.1` matching `layers.10`.
    longer_number: Option<String>,
    /// It decided a quantized tensor's group size without naming one.
    resets_group: bool,
}

/// Encoding and group (0 for floating tensors) of one tensor.
fn choose(
    name: &str,
    source: &TensorSpec,
    choice: Choice,
    rules: &[Rule],
    seen: &mut [RuleUse],
) -> Result<(Encoding, u64), PlanError> {
    let owned = || name.to_owned();
    let expert = is_expert(name);
    let mut encoding = choice.experts.filter(|_| expert).unwrap_or(source.encoding());
    let mut group = choice.group;
    let mut decisive = None;
    for (index, (rule, seen)) in rules.iter().zip(seen.iter_mut()).enumerate() {
        let Some(rest) = name.strip_prefix(&rule.prefix) else { continue };
        encoding = rule.encoding.unwrap_or(source.encoding());
        group = rule.group.unwrap_or(0);
        decisive = Some(index);
        seen.matches = true;
        let in_digits = |text: Option<char>| text.is_some_and(|symbol| symbol.is_ascii_digit());
        if in_digits(rule.prefix.chars().next_back()) && in_digits(rest.chars().next()) && seen.longer_number.is_none()
        {
            seen.longer_number = Some(owned());
        }
    }
    if !encoding.is_quantized() {
        return match encoding == source.encoding() {
            true => Ok((encoding, 0)),
            false => Err(PlanError::FloatConversion { name: owned(), from: source.encoding(), to: encoding }),
        };
    }
    if !expert {
        return Err(PlanError::NotAnExpert { name: owned(), encoding });
    }
    if let Some(index) = decisive {
        seen[index].resets_group |= rules[index].group.is_none();
    }
    if group == 0 {
        let default = if encoding == Encoding::Nvfp4 { GroupSize::NVFP4 } else { GroupSize::DEFAULT };
        group = source.group().unwrap_or(default).get() as u64;
    }
    if let Some(from_group) = source.group() {
        let from = source.encoding();
        if !from.same_code_book(encoding) || from_group.get() as u64 != group {
            return Err(PlanError::Requantized { name: owned(), from, from_group, to: encoding, to_group: group });
        }
    }
    Ok((encoding, group))
}

fn target_spec(name: &str, source: &TensorSpec, encoding: Encoding, group: u64) -> Result<TensorSpec, PlanError> {
    if encoding == source.encoding() {
        return Ok(source.clone());
    }
    let shape = source.shape();
    if shape.rank() != 2 {
        return Err(PlanError::NotAMatrix { name: name.to_owned(), encoding, shape: shape.clone() });
    }
    if shape.elements() > QUANTIZED_ELEMENTS_MAX {
        return Err(PlanError::TooLarge { name: name.to_owned(), encoding, elements: shape.elements() });
    }
    let global_scale = (encoding == Encoding::Nvfp4).then_some(UNKNOWN_GLOBAL_SCALE);
    TensorSpec::new(shape.clone(), encoding, group, global_scale)
        .map_err(|error| PlanError::Spec { name: name.to_owned(), error })
}

/// Checks that the source holds what the model needs, and names what it does not.
fn check_against<'a>(
    config: &ModelConfig,
    source: impl Iterator<Item = (&'a str, &'a TensorSpec)>,
) -> Result<Vec<String>, PlanError> {
    let source: BTreeMap<&str, &TensorSpec> = source.collect();
    let needed = inventory::needed(config);
    let missing = needed.iter().filter(|tensor| !source.contains_key(tensor.name.as_str()));
    let names: Vec<String> = missing.map(|tensor| tensor.name.clone()).collect();
    if !names.is_empty() {
        return Err(PlanError::Missing { names });
    }
    if let Some(tensor) = needed.iter().find(|tensor| source[tensor.name.as_str()].shape() != &tensor.shape) {
        let found = source[tensor.name.as_str()].shape().clone();
        return Err(PlanError::Shape { name: tensor.name.clone(), found, expected: tensor.shape.clone() });
    }
    let needed: HashSet<&str> = needed.iter().map(|tensor| tensor.name.as_str()).collect();
    Ok(source.keys().filter(|name| !needed.contains(*name)).map(|name| (*name).to_owned()).collect())
}

fn rule_warnings(rules: &[Rule], seen: &[RuleUse], choice: Choice) -> Vec<String> {
    let mut warnings = Vec::new();
    for (number, (rule, seen)) in (1..).zip(rules.iter().zip(seen)) {
        if let Some(name) = &seen.longer_number {
            let prefix = &rule.prefix;
            warnings.push(format!(
                "rule {number}: prefix {prefix:?} also matches {name}; end it with a dot if that is not meant"
            ));
        }
        if seen.resets_group && choice.group != 0 {
            let group = choice.group;
            warnings.push(format!(
                "rule {number} has no group_size, so its tensors use the default and not --group-size {group}"
            ));
        }
    }
    warnings
}

/// Tensors and bytes (data and scales, without padding) of one encoding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Share {
    /// Number of tensors.
    pub(crate) tensors: u64,
    /// Bytes of data and scales.
    pub(crate) bytes: u64,
    /// Elements.
    pub(crate) elements: u64,
}

impl Share {
    /// Stored bits of a weight, scales counted.
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub(crate) fn bits(&self) -> f64 {
        8.0 * self.bytes as f64 / (self.elements.max(1)) as f64
    }
}

/// What each encoding takes, by name.
pub(crate) fn shares<'a>(specs: impl Iterator<Item = &'a TensorSpec>) -> BTreeMap<&'static str, Share> {
    let mut shares: BTreeMap<&'static str, Share> = BTreeMap::new();
    for spec in specs {
        let share = shares.entry(spec.encoding().name()).or_default();
        share.tensors += 1;
        share.bytes += spec.data_bytes() + spec.scales_bytes();
        share.elements += spec.shape().elements();
    }
    shares
}

#[cfg(test)]
mod tests {
    use minnow_common::Shape;

    use super::*;

    const BF16: Encoding = Encoding::Float(FloatType::Bf16);

    fn config(layers: usize) -> ModelConfig {
        let text = format!(
            r#"{{"model_type":"llada2_moe","vocab_size":64,"hidden_size":128,"intermediate_size":128,
            "num_hidden_layers":{layers},"num_attention_heads":2,"num_key_value_heads":1,"head_dim":32,
            "rms_norm_eps":1e-6,"max_position_embeddings":64,"first_k_dense_replace":0,"num_experts":2,
            "num_experts_per_tok":1,"num_shared_experts":1,"moe_intermediate_size":128,"routed_scaling_factor":2.5,
            "rope_theta":10000,"expert_capacity":2}}"#
        );
        ModelConfig::from_json(&text).unwrap()
    }

    fn source(layers: usize) -> BTreeMap<String, TensorSpec> {
        let spec = |shape: &Shape| TensorSpec::new(shape.clone(), BF16, 0, None).unwrap();
        inventory::needed(&config(layers)).into_iter().map(|tensor| (tensor.name, spec(&tensor.shape))).collect()
    }

    fn planned(
        source: &BTreeMap<String, TensorSpec>,
        layers: usize,
        choice: Choice,
        rules: &[Rule],
    ) -> Result<Conversion, PlanError> {
        convert(&config(layers), source.iter().map(|(name, spec)| (name.as_str(), spec)), choice, rules)
    }

    fn rule(prefix: &str, encoding: Option<Encoding>, group: Option<u64>) -> Rule {
        Rule { prefix: prefix.to_owned(), encoding, group }
    }

    const INT4: Choice = Choice { experts: Some(Encoding::I4Mma), group: 0 };

    #[test]
    fn only_experts_follow_the_experts_option() {
        let plan = planned(&source(1), 1, INT4, &[]).unwrap();
        for tensor in &plan.tensors {
            let expected = if is_expert(&tensor.name) { (Encoding::I4Mma, Work::Encode) } else { (BF16, Work::Copy) };
            assert_eq!((tensor.target.encoding(), tensor.work), expected, "{}", tensor.name);
        }
        assert_eq!(plan.warnings, [""; 0]);
        assert_eq!(shares(plan.tensors.iter().map(|tensor| &tensor.target))["i4_mma"].tensors, 6);
    }

    #[test]
    fn the_last_matching_rule_wins_and_resets_the_group() {
        let choice = Choice { experts: Some(Encoding::I8Mma), group: 64 };
        let layer = "model.layers.0.mlp.experts.";
        let rules = [rule(layer, Some(Encoding::Nvfp4), None), rule(layer, Some(Encoding::I4Sym), None)];
        let plan = planned(&source(1), 1, choice, &rules).unwrap();
        let expert = plan.tensors.iter().find(|tensor| is_expert(&tensor.name)).unwrap();
        assert_eq!((expert.target.encoding(), expert.target.group()), (Encoding::I4Sym, Some(GroupSize::DEFAULT)));
        assert_eq!(plan.warnings.len(), 1);
        assert!(plan.warnings[0].contains("rule 2 has no group_size") && plan.warnings[0].contains("--group-size 64"));
        let kept = planned(&source(1), 1, choice, &[rule(layer, None, None)]).unwrap();
        assert!(kept.tensors.iter().all(|tensor| tensor.work == Work::Copy));
    }

    #[test]
    fn a_prefix_that_ends_in_a_digit_warns_when_it_matches_a_longer_number() {
        let source = source(11);
        let encoding = Some(Encoding::I8Sym);
        let plan = planned(&source, 11, Choice::default(), &[rule("model.layers.1.mlp.experts.", encoding, Some(32))])
            .unwrap();
        assert_eq!(plan.warnings, [""; 0]);
        let plan = planned(&source, 11, Choice::default(), &[rule("model.layers.1", None, None)]).unwrap();
        assert!(plan.warnings[0].contains("model.layers.10."), "{}", plan.warnings[0]);
    }

    #[test]
    fn what_the_format_forbids_is_refused_with_names_and_values() {
        let layer = "model.layers.0.mlp.experts.";
        let i8 = Some(Encoding::I8Mma);
        let f16 = Some(Encoding::Float(FloatType::F16));
        for (choice, rule, words) in [
            (INT4, rule("nothing.", i8, None), &["rule 1", "nothing."][..]),
            (INT4, rule("lm_head", i8, Some(32)), &["lm_head.weight", "i8_mma", "only routed experts"]),
            (INT4, rule("lm_head", f16, None), &["lm_head.weight", "bf16", "f16"]),
            (
                INT4,
                rule("model.layers.0.mlp.experts.0.", i8, Some(32)),
                &["down_proj", "i8_mma with group size 32", "i4_mma"],
            ),
            (INT4, rule(layer, i8, Some(48)), &["down_proj", "48", "i8_mma"]),
            (INT4, rule(layer, Some(Encoding::Nvfp4), Some(32)), &["nvfp4", "32"]),
        ] {
            let message = planned(&source(1), 1, choice, &[rule]).unwrap_err().to_string();
            for word in words {
                assert!(message.contains(word), "{message}");
            }
        }
    }

    #[test]
    fn quantized_sources_are_only_copied_or_repacked() {
        let quantized = |encoding, group| {
            let global = (encoding == Encoding::Nvfp4).then_some(0.5);
            let mut source = source(1);
            for (name, spec) in &mut source {
                if is_expert(name) {
                    *spec = TensorSpec::new(spec.shape().clone(), encoding, group, global).unwrap();
                }
            }
            source
        };
        let to = |encoding, group| Choice { experts: Some(encoding), group };
        let work = |source: &BTreeMap<String, TensorSpec>, choice| {
            let plan = planned(source, 1, choice, &[])?;
            Ok::<_, PlanError>(plan.tensors.iter().find(|tensor| is_expert(&tensor.name)).unwrap().work)
        };
        let int8 = quantized(Encoding::I8Sym, 32);
        assert_eq!(work(&int8, Choice::default()), Ok(Work::Copy));
        assert_eq!(work(&int8, to(Encoding::I8Mma, 0)), Ok(Work::Repack));
        assert_eq!(work(&int8, to(Encoding::I8Mma, 32)), Ok(Work::Repack));
        for choice in [to(Encoding::I8Mma, 16), to(Encoding::I4Mma, 32), to(Encoding::Nvfp4, 0)] {
            assert!(matches!(work(&int8, choice), Err(PlanError::Requantized { .. })), "{choice:?}");
        }
        assert_eq!(work(&quantized(Encoding::Nvfp4, 16), to(Encoding::Nvfp4, 0)), Ok(Work::Copy));
    }

    #[test]
    fn missing_tensors_are_counted_and_unknown_ones_named() {
        let mut lacking = source(1);
        lacking.retain(|name, _| !is_expert(name));
        let message = planned(&lacking, 1, INT4, &[]).unwrap_err().to_string();
        assert!(message.contains("missing (6)") && message.ends_with("and 1 more"), "{message}");
        let mut surplus = source(1);
        let extra = surplus["lm_head.weight"].clone();
        surplus.insert("model.extra.weight".to_owned(), extra);
        let plan = planned(&surplus, 1, INT4, &[]).unwrap();
        assert!(plan.warnings[0].contains("model.extra.weight"), "{:?}", plan.warnings);
        assert!(plan.tensors.iter().any(|tensor| tensor.name == "model.extra.weight"));
        let wrong = surplus["model.norm.weight"].clone();
        surplus.insert("lm_head.weight".to_owned(), wrong);
        assert!(matches!(planned(&surplus, 1, INT4, &[]), Err(PlanError::Shape { .. })));
    }
}
