//! Safetensors files as a sink: where each tensor lies is known from the plan, so headers come first and bytes follow.
//!
//! A file is an 8-byte header length, a JSON header, and the tensors one after the other (the safetensors format). More
//! than one file needs `model.safetensors.index.json`, which says which tensor is where.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use minnow_common::Encoding;
use serde_json::{Map, Value, json};
use thiserror::Error;

use super::sink::{Sink, SinkError};
use super::source::Unit;
use super::tray::Content;
use crate::plan::Planned;

/// The key in a header that is not a tensor.
const METADATA: &str = "__metadata__";
/// Headers are padded with spaces so that tensors start at a multiple of this.
const HEADER_ALIGNMENT: usize = 8;
/// The longest header that readers, ours included, accept.
const HEADER_BYTES_MAX: usize = 16 << 20;

/// Why a plan cannot be stored as safetensors.
#[derive(Debug, PartialEq, Error)]
pub(crate) enum ShardsError {
    /// The name means something else in a header.
    #[error("a tensor named {METADATA} cannot be stored in a safetensors file")]
    ReservedName,
    /// Only floating types have a safetensors name.
    #[error("{name}: {encoding} cannot be stored in a safetensors file")]
    Quantized { name: String, encoding: Encoding },
    /// One file would have too many tensors.
    #[error("the header of {file} would have {bytes} bytes, and the most is {HEADER_BYTES_MAX}; choose smaller shards")]
    HeaderTooLong { file: String, bytes: usize },
}

/// One file to be.
#[derive(Debug, PartialEq)]
pub(crate) struct Shard {
    /// Its name within the folder.
    pub(crate) file: String,
    /// The tensors of the plan that it holds.
    pub(crate) tensors: Range<usize>,
    /// Length and header, as they are written.
    header: Vec<u8>,
    /// Bytes of the tensors.
    data_bytes: u64,
}

impl Shard {
    /// Length of the file.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.header.len() as u64 + self.data_bytes
    }
}

/// Divides `plan` into files of at most `bytes_max` bytes of tensors, in order. A tensor above that has its own file.
pub(crate) fn shards(plan: &[Planned], bytes_max: u64) -> Result<Vec<Shard>, ShardsError> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut filled_bytes = 0;
    for (index, tensor) in plan.iter().enumerate() {
        match ranges.last_mut() {
            Some(range) if tensor.target_bytes() <= bytes_max.saturating_sub(filled_bytes) => range.end = index + 1,
            _ => {
                ranges.push(index..index + 1);
                filled_bytes = 0;
            }
        }
        filled_bytes += tensor.target_bytes();
    }
    let count = ranges.len();
    let named = |(number, range): (usize, Range<usize>)| {
        let file = match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        let (header, data_bytes) = header(&file, &plan[range.clone()])?;
        Ok(Shard { file, tensors: range, header, data_bytes })
    };
    ranges.into_iter().enumerate().map(named).collect()
}

/// The first bytes of a file that holds `tensors`, and how many follow.
fn header(file: &str, tensors: &[Planned]) -> Result<(Vec<u8>, u64), ShardsError> {
    let mut entries = Map::new();
    entries.insert(METADATA.to_owned(), json!({"format": "pt"}));
    let mut next = 0;
    for tensor in tensors {
        if tensor.name == METADATA {
            return Err(ShardsError::ReservedName);
        }
        let Encoding::Float(float) = tensor.target.encoding() else {
            let (name, encoding) = (tensor.name.clone(), tensor.target.encoding());
            return Err(ShardsError::Quantized { name, encoding });
        };
        let end = next + tensor.target.data_bytes();
        let entry = json!({
            "dtype": float.safetensors_name(),
            "shape": tensor.target.shape().dims(),
            "data_offsets": [next, end],
        });
        entries.insert(tensor.name.clone(), entry);
        next = end;
    }
    let mut text = Value::from(entries).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(HEADER_ALIGNMENT), b' ');
    if text.len() > HEADER_BYTES_MAX {
        return Err(ShardsError::HeaderTooLong { file: file.to_owned(), bytes: text.len() });
    }
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    Ok((bytes, next))
}

/// The index of several files; `None` for a single one, which needs none.
pub(crate) fn index_json(plan: &[Planned], shards: &[Shard]) -> Option<String> {
    if shards.len() < 2 {
        return None;
    }
    let places = shards.iter().flat_map(|shard| plan[shard.tensors.clone()].iter().map(|tensor| (tensor, &shard.file)));
    let weight_map: Map<String, Value> =
        places.map(|(tensor, file)| (tensor.name.clone(), Value::from(file.as_str()))).collect();
    let total_bytes: u64 = plan.iter().map(Planned::target_bytes).sum();
    Some(format!("{:#}\n", json!({"metadata": {"total_size": total_bytes}, "weight_map": weight_map})))
}

/// Writes the files of a plan one after the other into a folder.
#[derive(Debug)]
pub(crate) struct ShardSink<'a> {
    folder: &'a Path,
    shards: &'a [Shard],
    next: usize,
    open: Option<(PathBuf, BufWriter<File>)>,
}

impl<'a> ShardSink<'a> {
    /// A sink for `shards`, which must come from the plan that is carried out.
    pub(crate) fn new(folder: &'a Path, shards: &'a [Shard]) -> Self {
        Self { folder, shards, next: 0, open: None }
    }

    /// Writes and syncs what is left. Every tensor of the plan must have come.
    pub(crate) fn finish(mut self) -> Result<(), SinkError> {
        self.close()
    }

    fn close(&mut self) -> Result<(), SinkError> {
        let Some((path, writer)) = self.open.take() else { return Ok(()) };
        let synced = writer.into_inner().map_err(io::IntoInnerError::into_error).and_then(|file| file.sync_all());
        synced.map_err(|error| SinkError::write(&path, error))
    }
}

impl Sink for ShardSink<'_> {
    fn write(&mut self, _tensor: &Planned, unit: &Unit, content: Content<'_>) -> Result<(), SinkError> {
        while self.open.is_none() || !self.shards[self.next - 1].tensors.contains(&unit.tensor) {
            self.close()?;
            let shard = &self.shards[self.next];
            let path = self.folder.join(&shard.file);
            let created = create(&path, &shard.header).map_err(|error| SinkError::write(&path, error))?;
            self.open = Some((path, created));
            self.next += 1;
        }
        match (&mut self.open, content) {
            (Some((path, writer)), Content::Data(bytes)) => {
                writer.write_all(bytes).map_err(|error| SinkError::write(path, error))
            }
            _ => unreachable!("a plan for safetensors copies and decodes, and both give data"),
        }
    }
}

fn create(path: &Path, header: &[u8]) -> io::Result<BufWriter<File>> {
    let mut writer = BufWriter::new(OpenOptions::new().write(true).create_new(true).open(path)?);
    writer.write_all(header)?;
    Ok(writer)
}

#[cfg(test)]
mod tests {
    use minnow_common::{FloatType, Shape, TensorSpec};

    use super::*;
    use crate::plan::Work;

    fn planned(name: &str, elements: usize) -> Planned {
        let spec = TensorSpec::new(Shape::vector(elements), Encoding::Float(FloatType::F32), 0, None).unwrap();
        Planned { name: name.to_owned(), source: spec.clone(), target: spec, work: Work::Copy }
    }

    #[test]
    fn files_fill_up_in_order_and_a_large_tensor_is_alone() {
        let plan = [planned("a", 2), planned("b", 2), planned("c", 9), planned("d", 1)];
        let shards = shards(&plan, 16).unwrap();
        assert_eq!(shards.iter().map(|shard| shard.tensors.clone()).collect::<Vec<_>>(), [0..2, 2..3, 3..4]);
        assert_eq!(shards[1].file, "model-00002-of-00003.safetensors");
        assert_eq!(shards[0].file_bytes(), shards[0].header.len() as u64 + 16);
        assert!(shards.iter().all(|shard| shard.header.len() % 8 == 0));
        let index: Value = serde_json::from_str(&index_json(&plan, &shards).unwrap()).unwrap();
        assert_eq!(index["weight_map"]["c"], "model-00002-of-00003.safetensors");
        assert_eq!(index["metadata"]["total_size"], 56);
    }

    #[test]
    fn one_file_has_the_plain_name_and_no_index() {
        let plan = [planned("a", 2), planned("b", 2)];
        let shards = shards(&plan, 1 << 20).unwrap();
        assert_eq!((shards.len(), shards[0].file.as_str()), (1, "model.safetensors"));
        assert_eq!(index_json(&plan, &shards), None);
        assert_eq!(super::shards(&[planned(METADATA, 1)], 1), Err(ShardsError::ReservedName));
    }
}
