//! A container of a few megabytes with seeded contents, in several blocks of the writer.

use std::collections::BTreeMap;
use std::path::Path;

use minnow_common::random::mix64;
use minnow_common::{Encoding, FloatType, Shape, TensorSpec};
use minnow_formats::Checkpoint;
use minnow_formats::io::IoBackend;
use minnow_formats::mnw::{Plan, RegionPart, WriteError, Writer};
use minnow_tests::golden;

/// Tensors of odd sizes around the writer's blocks of 4 MiB, quantized ones between floating ones.
pub(crate) fn plan() -> Plan {
    let tiny = golden::root().join("golden/mnw/tiny/nvfp4.mnw");
    let tiny = Checkpoint::open(&tiny, IoBackend::Buffered).unwrap();
    let float = |elements| TensorSpec::new(Shape::vector(elements), Encoding::Float(FloatType::Bf16), 0, None).unwrap();
    let quantized =
        |rows, encoding, group, scale| TensorSpec::new(Shape::matrix(rows, 1024), encoding, group, scale).unwrap();
    let mut tensors = BTreeMap::from([
        ("a.first".to_owned(), float(3_000_001)),
        ("b.int8".to_owned(), quantized(1024, Encoding::I8Sym, 64, None)),
        ("c.nvfp4".to_owned(), quantized(2048, Encoding::Nvfp4, 16, Some(1.0))),
        ("z.last".to_owned(), float(5)),
    ]);
    tensors.extend((0..20).map(|index| (format!("m.{index:02}"), float(300_000 + index))));
    Plan { model_id: "synthetic".to_owned(), assets: tiny.assets().clone(), tensors }
}

/// Data, scales and global scale of tensor `name`.
pub(crate) fn payload(name: &str, spec: &TensorSpec) -> (Vec<u8>, Vec<u8>, Option<f32>) {
    let seed = name.bytes().fold(7, |seed, byte| mix64(seed ^ u64::from(byte)));
    let words = (0..spec.data_bytes().div_ceil(8)).flat_map(|index| mix64(seed + index).to_le_bytes());
    let scales = match spec.encoding() {
        Encoding::Nvfp4 => (0..spec.scales_bytes()).map(|index| (mix64(index) % 127) as u8).collect(),
        _ => {
            (0..spec.scales_bytes() / 2).flat_map(|index| (1 + (mix64(index) % 0x7bff) as u16).to_le_bytes()).collect()
        }
    };
    let global_scale = spec.global_scale().map(|_| (seed % 1000) as f32 / 999.0 + 0.1);
    (words.take(spec.data_bytes() as usize).collect(), scales, global_scale)
}

/// Gives all tensors from number `first` on, every other one in pieces, and calls `before` with each one's number.
pub(crate) fn give(writer: &mut Writer, first: usize, mut before: impl FnMut(usize)) -> Result<(), WriteError> {
    for (index, (name, spec)) in plan().tensors.iter().enumerate().skip(first) {
        before(index);
        let (data, scales, global_scale) = payload(name, spec);
        if index % 2 == 0 {
            writer.tensor(name, &data, (!scales.is_empty()).then_some(&scales), global_scale)?;
            continue;
        }
        writer.begin(name, global_scale)?;
        for piece in data.chunks(777_777) {
            writer.piece(RegionPart::Data, piece)?;
        }
        for piece in scales.chunks(10_000) {
            writer.piece(RegionPart::Scales, piece)?;
        }
        writer.end()?;
    }
    Ok(())
}

/// Writes the whole container to `target`.
pub(crate) fn write(target: &Path) {
    let mut writer = Writer::create(target, plan(), false).unwrap();
    give(&mut writer, 0, |_| ()).unwrap();
    writer.finish().unwrap();
}

/// The names in a folder, in order.
pub(crate) fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
