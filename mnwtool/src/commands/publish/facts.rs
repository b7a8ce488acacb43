//! What is true of one published file: read from it, computed from it and its source, or given.

use std::collections::BTreeMap;
use std::path::Path;

use minnow_common::tensor::is_expert;
use minnow_common::{Encoding, GroupSize};
use minnow_formats::checkpoint::{Checkpoint, StoredTensor};
use minnow_formats::digest::{self, Digest};
use minnow_formats::io::IoBackend;
use minnow_kernels::codec::{Encoder, FloatMatrix, Quality};
use minnow_kernels::cpu::Isa;
use serde_json::{Value, json};

use super::{Options, Origin, check_strictly};
use crate::commands::inspect::Memory;
use crate::commands::{compare, encodings_json};
use crate::failure::Failure;
use crate::plan::{self, Share};
use crate::progress::Progress;

/// Tokens in the cache that memory is told for.
const CACHE_TOKENS: u64 = 8192;

/// One file.
pub(super) struct Facts {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) sha256: String,
    pub(super) manifest_blake3: String,
    pub(super) model_id: String,
    pub(super) parameters: u64,
    pub(super) tensors: usize,
    pub(super) shares: BTreeMap<&'static str, Share>,
    /// How routed experts are stored; `None` if there are none.
    pub(super) experts: Option<Experts>,
    pub(super) memory: Memory,
    pub(super) comparison: Option<Value>,
    pub(super) exam: Option<Value>,
}

/// How routed experts are stored.
pub(super) struct Experts {
    /// The value of `--experts`, or `mixed`.
    pub(super) word: &'static str,
    group: Option<GroupSize>,
    is_mma: bool,
    quality: Option<Quality>,
}

impl Facts {
    /// Validates the file, and finds out.
    pub(super) fn gather(
        path: &Path,
        name: &str,
        source: Option<&Checkpoint>,
        options: &Options,
        exam: Option<Value>,
    ) -> Result<Self, Failure> {
        let checkpoint = Checkpoint::open(path, IoBackend::Auto).map_err(Failure::of)?;
        let Some(container) = checkpoint.container() else { return Err(Failure::at(path, "is no .mnw file")) };
        let file = &checkpoint.files()[0];
        let progress = Progress::new(2 * file.len(), options.progress && !options.json);
        check_strictly(path, options.workers, &|bytes| progress.advance(bytes, name))
            .map_err(|fault| Failure::at(path, format!("not valid ({fault})")))?;
        checkpoint.check_model().map_err(|error| Failure::at(path, error))?;
        let sha256 = digest::sha256(file, &|bytes| progress.advance(bytes, name)).map_err(Failure::of)?;
        drop(progress);
        let comparison = match (source, &options.source) {
            (Some(source), Some(source_path)) => {
                let options = compare::Options {
                    source: source_path.clone(),
                    file: path.to_owned(),
                    workers: options.workers,
                    io: IoBackend::Auto,
                    json: options.json,
                    progress: options.progress,
                };
                Some(compare::report(&options, source, &checkpoint)?)
            }
            _ => None,
        };
        let tensors = checkpoint.tensors();
        let stored_bytes = |tensor: &StoredTensor| tensor.spec.data_bytes() + tensor.spec.scales_bytes();
        Ok(Self {
            name: name.to_owned(),
            bytes: file.len(),
            sha256,
            manifest_blake3: container.header.manifest_digest.to_hex(),
            model_id: checkpoint.model_id().to_owned(),
            parameters: tensors.values().map(|tensor| tensor.spec.shape().elements()).sum(),
            tensors: tensors.len(),
            shares: plan::shares(tensors.values().map(|tensor| &tensor.spec)),
            experts: experts(&checkpoint, source)?,
            memory: Memory::of(tensors.values().map(stored_bytes).sum(), checkpoint.config()),
            comparison: comparison.as_ref().map(comparison_summary),
            exam,
        })
    }

    /// Memory for weights and the cache of [`CACHE_TOKENS`] tokens: on a CPU (f32), and on a GPU (bf16).
    pub(super) fn memory_bytes(&self) -> (u64, u64) {
        let cache = self.memory.kv_bytes_per_1024() * (CACHE_TOKENS / 1024);
        (self.memory.weight_bytes() + cache, self.memory.weight_bytes() + cache / 2)
    }

    /// The command that makes the file from its source, as far as the file tells.
    pub(super) fn command(&self) -> Option<String> {
        let experts = self.experts.as_ref()?;
        let mut command = format!("mnwtool convert SOURCE {} --experts {}", self.name, experts.word);
        match (experts.word, experts.group) {
            ("mixed", _) => return None,
            ("int8" | "int4", Some(group)) => {
                command +=
                    &format!(" --group-size {group} --quant-layout {}", if experts.is_mma { "mma" } else { "row" });
            }
            _ => {}
        }
        if let Some(quality) = experts.quality {
            command += &format!(" --quality {quality}");
        }
        Some(format!("{command} --model-id {}", self.model_id)).filter(|_| super::is_plain_name(&self.model_id))
    }

    /// What `FILE.minnow.json` says.
    pub(super) fn json(&self, origin: &Origin) -> Value {
        let options = self.experts.as_ref().map(|experts| {
            json!({
                "experts": experts.word,
                "group_size": experts.group.map(GroupSize::get),
                "quant_layout": experts.group.map(|_| if experts.is_mma { "mma" } else { "row" }),
                // Known only if some experts were made again from the source, and came out the same.
                "quality": experts.quality.map(|quality| quality.to_string()),
                "command": self.command(),
            })
        });
        let (cpu, gpu) = self.memory_bytes();
        json!({
            "file": self.name,
            "bytes": self.bytes,
            "sha256": self.sha256,
            "manifest_blake3": self.manifest_blake3,
            "model_id": self.model_id,
            "tool": {"name": "mnwtool", "version": env!("CARGO_PKG_VERSION"), "commit": option_env!("MINNOW_COMMIT")},
            "source": origin.json(),
            "options": options,
            "parameters": self.parameters,
            "tensors": self.tensors,
            "encodings": encodings_json(&self.shares),
            "memory": {"cache_tokens": CACHE_TOKENS, "cpu_bytes": cpu, "gpu_bytes": gpu, "note": "activations come on top"},
            "compare": self.comparison,
            "exam": self.exam,
        })
    }
}

/// Encoding, group size and quality of the experts.
fn experts(checkpoint: &Checkpoint, source: Option<&Checkpoint>) -> Result<Option<Experts>, Failure> {
    let mut experts = checkpoint.tensors().iter().filter(|(name, _)| is_expert(name));
    let Some((_, first)) = experts.next() else { return Ok(None) };
    let (encoding, group) = (first.spec.encoding(), first.spec.group());
    let is_mma = matches!(encoding, Encoding::I8Mma | Encoding::I4Mma | Encoding::Nvfp4);
    if experts.any(|(_, tensor)| (tensor.spec.encoding(), tensor.spec.group()) != (encoding, group)) {
        return Ok(Some(Experts { word: "mixed", group: None, is_mma, quality: None }));
    }
    let word = match encoding {
        Encoding::Float(_) => "original",
        Encoding::I8Sym | Encoding::I8Mma => "int8",
        Encoding::I4Sym | Encoding::I4Mma => "int4",
        Encoding::Nvfp4 => "nvfp4",
    };
    let quality = match (source, group) {
        (Some(source), Some(group)) => quality_of(checkpoint, source, encoding, group)?,
        _ => None,
    };
    Ok(Some(Experts { word, group, is_mma, quality }))
}

/// With which quality the first expert of each projection was made, if it is the same for all: found out by making them
/// again from the source.
fn quality_of(
    checkpoint: &Checkpoint,
    source: &Checkpoint,
    encoding: Encoding,
    group: GroupSize,
) -> Result<Option<Quality>, Failure> {
    let firsts: Vec<&String> = checkpoint.tensors().keys().filter(|name| name.contains(".experts.0.")).collect();
    for quality in [Quality::Rtn, Quality::Search] {
        let mut fits = !firsts.is_empty();
        for name in &firsts {
            let (stored, Some(original)) = (&checkpoint.tensors()[*name], source.tensors().get(*name)) else {
                return Ok(None);
            };
            let (Encoding::Float(float), Some((rows, cols)), Some(digests)) =
                (original.spec.encoding(), original.spec.shape().as_matrix(), &stored.digests)
            else {
                return Ok(None);
            };
            let bytes = source.read(name).map_err(Failure::of)?;
            let encoder = Encoder::new(Isa::detect()).with_quality(quality);
            let made = FloatMatrix::new(&bytes.data, float, rows as usize, cols as usize)
                .and_then(|matrix| encoder.encode(&matrix, encoding, group));
            fits &= made.is_ok_and(|made| {
                Digest::of(&made.data) == digests.data && Some(Digest::of(&made.scales)) == digests.scales
            });
        }
        if fits {
            return Ok(Some(quality));
        }
    }
    Ok(None)
}

/// Of a comparison, what a reader of a card wants: all, and each projection that differs.
fn comparison_summary(report: &Value) -> Value {
    let part = |group: &Value| {
        json!({
            "name": group["name"], "tensors": group["tensors"], "relative_rms": group["relative_rms"],
            "snr_db": group["snr_db"], "max_abs_error": group["max_abs_error"], "worst": group["worst"],
        })
    };
    let projections = report["projections"].as_array().map(Vec::as_slice).unwrap_or_default();
    json!({
        "compared": report["compared"],
        "identical": report["identical"],
        "missing": report["missing"],
        "total": part(&report["total"]),
        "projections": projections.iter().filter(|group| group["identical"] == false).map(part).collect::<Vec<_>>(),
    })
}

/// Of the result of `minnowd eval --json`, what belongs to the model rather than to the machine. `None` if it is none.
pub(super) fn exam_summary(result: &Value) -> Option<Value> {
    let all = result.get("all")?;
    Some(json!({
        "questions": all.get("questions")?.as_u64()?,
        "right": all.get("right")?.as_u64()?,
        "exact_match_percent": result.get("exact_match")?.as_f64()?,
        "tokens_per_forward": result.get("tokens_per_forward")?.as_f64()?,
        "threshold": result.get("threshold")?.as_f64()?,
        "backend": result.get("backend"),
    }))
}
