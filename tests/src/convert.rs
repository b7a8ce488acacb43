//! A small converter for tests: any checkpoint to a `.mnw` file with its routed experts in one encoding.
//!
//! One thread, everything in memory, no rules. The real one is `mnwtool convert`; it is not used here so that tests of
//! the daemon do not depend on it.

use std::collections::BTreeMap;
use std::path::Path;

use minnow_common::tensor::is_expert;
use minnow_common::{Encoding, FloatType, GroupSize, TensorSpec};
use minnow_formats::checkpoint::Checkpoint;
use minnow_formats::mnw::{Plan, Writer};
use minnow_kernels::codec::{self, Encoded};

/// Writes `source` to `target`, its routed experts decoded and stored as `experts`, everything else as it is. Floating
/// encodings round to nearest; the group size is 16 for NVFP4 and `group` for the integer encodings.
///
/// # Panics
/// If anything goes wrong.
pub fn write_mnw(source: &Checkpoint, target: &Path, experts: Encoding, group: GroupSize) {
    let group = match experts {
        Encoding::Float(_) => 0,
        Encoding::Nvfp4 => GroupSize::NVFP4.get() as u64,
        _ => group.get() as u64,
    };
    let placeholder = (experts == Encoding::Nvfp4).then_some(1.0);
    let spec_of = |name: &String, spec: &TensorSpec| match is_expert(name) {
        true => TensorSpec::new(spec.shape().clone(), experts, group, placeholder).expect("experts that fit"),
        false => spec.clone(),
    };
    let specs: BTreeMap<String, TensorSpec> =
        source.tensors().iter().map(|(name, tensor)| (name.clone(), spec_of(name, &tensor.spec))).collect();
    let plan = Plan { model_id: source.path_id(), assets: source.assets().clone(), tensors: specs.clone() };
    let mut writer = Writer::create(target, plan, false).expect("a writable target");
    for (name, tensor) in source.tensors() {
        let bytes = source.read(name).expect("a readable tensor");
        let scales = bytes.scales.as_deref();
        if !is_expert(name) {
            writer.tensor(name, &bytes.data, scales, None).expect("a writable tensor");
            continue;
        }
        let values = codec::decode(&bytes.data, scales.unwrap_or_default(), &tensor.spec).expect("a sound tensor");
        let Encoded { data, scales, global_scale } = encoded(&values, &specs[name]);
        let scales = (!scales.is_empty()).then_some(&scales[..]);
        writer.tensor(name, &data, scales, global_scale).expect("a writable tensor");
    }
    writer.finish().expect("a finished file");
}

fn encoded(values: &[f32], spec: &TensorSpec) -> Encoded {
    let data = match spec.encoding() {
        Encoding::Float(FloatType::Bf16) => {
            values.iter().flat_map(|&value| half::bf16::from_f32(value).to_le_bytes()).collect()
        }
        Encoding::Float(FloatType::F16) => {
            values.iter().flat_map(|&value| half::f16::from_f32(value).to_le_bytes()).collect()
        }
        Encoding::Float(FloatType::F32) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        encoding => {
            let (rows, cols) = spec.shape().as_matrix().expect("experts are matrices");
            let group = spec.group().expect("quantized tensors have groups");
            return codec::encode(values, rows as usize, cols as usize, encoding, group).expect("finite weights");
        }
    };
    Encoded { data, scales: Vec::new(), global_scale: None }
}
