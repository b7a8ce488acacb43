//! `mnwtool inspect`: what a checkpoint is, what it holds, and what can be made of it.

mod outlook;
mod stats;
mod tree;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use minnow_common::units::HumanBytes;
use minnow_common::{ARCHITECTURE, ModelConfig, Routing};
use minnow_formats::checkpoint::{Checkpoint, SourceKind, StoredTensor};
use minnow_formats::digest;
use minnow_formats::hub::Address;
use minnow_formats::io::IoBackend;
use serde_json::{Map, Value, json};

use super::pull::open_remote;
use super::remote::Access;
use super::{encoding_words, encodings_json, encodings_table};
use crate::failure::Failure;
use crate::plan;
use crate::progress::Progress;
use crate::terminal;
pub(super) use outlook::Memory;
use stats::Stats;
use tree::Tree;

/// What to look at, and how closely.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) place: Place,
    pub(crate) tensors: bool,
    pub(crate) stats: bool,
    pub(crate) workers: usize,
    pub(crate) json: bool,
}

/// Where the checkpoint is.
#[derive(Debug)]
pub(crate) enum Place {
    /// On this machine.
    Local(PathBuf),
    /// At a hub; only header and manifest are read.
    Hub(Address, Access),
}

/// Describes the checkpoint on standard output.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let (path, checkpoint) = match &options.place {
        Place::Local(path) => (path.clone(), Checkpoint::open(path, IoBackend::Auto).map_err(Failure::of)?),
        Place::Hub(address, access) => {
            (PathBuf::from(address.to_string()), open_remote(Arc::new(access.file(address)?))?)
        }
    };
    let close_look = if options.stats { Some(CloseLook::at(&checkpoint, options)?) } else { None };
    let lists_tensors = options.tensors || options.stats;
    let view = View { path: &path, checkpoint: &checkpoint, close_look, lists_tensors };
    if options.json { terminal::print_json(&view.json()) } else { terminal::print(&view.text()) }
}

/// What only reading every byte tells.
struct CloseLook {
    /// In the order of [`Checkpoint::tensors`].
    stats: Vec<Stats>,
    /// In the order of [`Checkpoint::files`].
    sha256: Vec<String>,
}

impl CloseLook {
    fn at(checkpoint: &Checkpoint, options: &Options) -> Result<Self, Failure> {
        let stats = stats::all(checkpoint, options.workers, !options.json).map_err(Failure::of)?;
        let progress = Progress::new(checkpoint.files().iter().map(|file| file.len()).sum(), !options.json);
        let files = checkpoint.files().iter();
        let sha256 = files.map(|file| digest::sha256(file, &|bytes| progress.advance(bytes, file.label())));
        Ok(Self { sha256: sha256.collect::<Result<_, _>>().map_err(Failure::of)?, stats })
    }
}

struct View<'a> {
    path: &'a Path,
    checkpoint: &'a Checkpoint,
    close_look: Option<CloseLook>,
    lists_tensors: bool,
}

impl View<'_> {
    fn kind(&self) -> &'static str {
        match self.checkpoint.kind() {
            SourceKind::Mnw => "mnw",
            SourceKind::Safetensors => "safetensors",
        }
    }

    fn parameters(&self) -> u64 {
        self.checkpoint.tensors().values().map(|tensor| tensor.spec.shape().elements()).sum()
    }

    fn file_bytes(&self) -> u64 {
        self.checkpoint.files().iter().map(|file| file.len()).sum()
    }

    fn shares(&self) -> std::collections::BTreeMap<&'static str, plan::Share> {
        plan::shares(self.checkpoint.tensors().values().map(|tensor| &tensor.spec))
    }

    /// Why the checkpoint cannot be converted, if it cannot.
    fn problem(&self) -> Option<String> {
        self.checkpoint.check_model().err().map(|error| error.to_string())
    }

    /// What is wrong with the values, if they were looked at.
    fn suspects(&self) -> Vec<String> {
        let Some(CloseLook { stats, .. }) = &self.close_look else { return Vec::new() };
        stats::suspects(self.checkpoint.tensors().keys().map(String::as_str).zip(stats))
    }

    fn stats(&self, index: usize) -> Option<&Stats> {
        self.close_look.as_ref().map(|close_look| &close_look.stats[index])
    }

    fn memory(&self) -> Memory {
        let bytes = |tensor: &StoredTensor| tensor.spec.data_bytes() + tensor.spec.scales_bytes();
        Memory::of(self.checkpoint.tensors().values().map(bytes).sum(), self.checkpoint.config())
    }

    /// BLAKE3 of the manifest, which holds those of all regions: it stands for the whole content.
    fn manifest_blake3(&self) -> Option<String> {
        self.checkpoint.container().map(|container| container.header.manifest_digest.to_hex())
    }

    fn text(&self) -> String {
        let Self { path, checkpoint, .. } = self;
        let config = checkpoint.config();
        let problem = self.problem();
        let mut text = String::new();
        let mut line = |label: &str, value: String| {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{label:<13}{value}");
        };
        let files = checkpoint.files().len();
        line("path", path.display().to_string());
        line("kind", format!("{}, {files} {}", self.kind(), if files == 1 { "file" } else { "files" }));
        line("model id", checkpoint.model_id().to_owned());
        line("architecture", format!("{ARCHITECTURE}, {}", family(config)));
        line("shape", shape_line(config));
        line("parameters", format!("{} in {} tensors", self.parameters(), checkpoint.tensors().len()));
        line("size", format!("{} ({} bytes)", HumanBytes(self.file_bytes()), self.file_bytes()));
        let assets =
            checkpoint.assets().iter().map(|(name, text)| format!("{name} ({})", HumanBytes(text.len() as u64)));
        line("assets", assets.collect::<Vec<_>>().join(", "));
        if !checkpoint.dropped_assets().is_empty() {
            line("unreadable", checkpoint.dropped_assets().join(", "));
        }
        if let Some(digest) = self.manifest_blake3() {
            line("manifest", format!("blake3 {digest}"));
        }
        if let Some(CloseLook { sha256, .. }) = &self.close_look {
            for (file, digest) in checkpoint.files().iter().zip(sha256) {
                line("sha256", format!("{digest}  {}", file.label()));
            }
        }
        line("to run", self.memory().text());
        line(
            "convertible",
            match problem {
                None if self.is_quantized() => "yes; what is quantized can only be copied or repacked".to_owned(),
                None => "yes, and this is what you would get:".to_owned(),
                Some(ref problem) => format!("no: {problem}"),
            },
        );
        if problem.is_none() {
            outlook::prospects(checkpoint).iter().for_each(|prospect| text.push_str(&prospect.text()));
        }
        text.push_str("encodings\n");
        text.push_str(&encodings_table(&self.shares()));
        text.push_str("tree\n");
        text.push_str(&Tree::of(checkpoint).text());
        if self.lists_tensors {
            text.push_str("tensors\n");
            for (index, (name, tensor)) in checkpoint.tensors().iter().enumerate() {
                let encoding = encoding_words(tensor);
                let _ = write!(text, "  {name}  {}  {encoding}", tensor.spec.shape());
                if let Some(stats) = self.stats(index) {
                    let _ = write!(text, "  {stats}");
                }
                text.push('\n');
            }
        }
        for suspect in self.suspects() {
            let _ = writeln!(text, "suspicious   {suspect}");
        }
        if self.close_look.is_some() {
            let _ = writeln!(text, "rule         {}", stats::OUTLIER_RULE);
        }
        text
    }

    fn is_quantized(&self) -> bool {
        self.checkpoint.tensors().values().any(|tensor| tensor.spec.encoding().is_quantized())
    }

    fn json(&self) -> Value {
        let Self { path, checkpoint, .. } = self;
        let config = checkpoint.config();
        let assets: Map<String, Value> =
            checkpoint.assets().iter().map(|(name, text)| (name.clone(), Value::from(text.len()))).collect();
        let problem = self.problem();
        let mut object = json!({
            "path": path.to_string_lossy(),
            "kind": self.kind(),
            "model_id": checkpoint.model_id(),
            "architecture": ARCHITECTURE,
            "family": family(config),
            "routing": match config.routing {
                Routing::Block { capacity } => json!({"by": "block", "capacity": capacity}),
                Routing::Groups { groups, kept } => json!({"by": "groups", "groups": groups, "kept": kept}),
            },
            "layers": config.num_hidden_layers,
            "parameters": self.parameters(),
            "tensor_count": checkpoint.tensors().len(),
            "files": checkpoint.files().iter().map(|file| file.label()).collect::<Vec<_>>(),
            "file_bytes": self.file_bytes(),
            "encodings": encodings_json(&self.shares()),
            "assets": assets,
            "dropped_assets": checkpoint.dropped_assets(),
            "manifest_blake3": self.manifest_blake3(),
            "tree": Tree::of(checkpoint).json(),
            "memory": self.memory().json(),
            "convertible": problem.is_none(),
            "problem": problem,
        });
        if problem.is_none() {
            object["conversions"] = outlook::prospects(checkpoint).iter().map(outlook::Prospect::json).collect();
        }
        if self.lists_tensors {
            let tensors = checkpoint.tensors().iter().enumerate().map(|(index, (name, tensor))| {
                let mut entry = json!({
                    "name": name,
                    "shape": tensor.spec.shape().dims(),
                    "encoding": tensor.spec.encoding().name(),
                    "group_size": tensor.spec.group().map_or(0, |group| group.get()),
                    "bytes": tensor.spec.data_bytes() + tensor.spec.scales_bytes(),
                });
                if let Some(stats) = self.stats(index) {
                    entry["stats"] = stats.json();
                }
                entry
            });
            object["tensors"] = tensors.collect();
        }
        if let Some(CloseLook { sha256, .. }) = &self.close_look {
            object["sha256"] = sha256.as_slice().into();
            object["suspicious"] = self.suspects().into();
            object["outlier_rule"] = stats::OUTLIER_RULE.into();
        }
        object
    }
}

fn family(config: &ModelConfig) -> String {
    match config.routing {
        Routing::Block { capacity } => format!("LLaDA2.2 (block routing, at most {capacity} experts a block)"),
        Routing::Groups { groups, kept } => format!("LLaDA2.0 or 2.1 (routing by the best {kept} of {groups} groups)"),
    }
}

fn shape_line(config: &ModelConfig) -> String {
    format!(
        "{} layers ({} dense), hidden {}, {} experts of {} ({} a token, {} shared), {} heads of {} ({} for keys), vocabulary {}",
        config.num_hidden_layers,
        config.first_k_dense_replace.min(config.num_hidden_layers),
        config.hidden_size,
        config.num_experts,
        config.moe_intermediate_size,
        config.num_experts_per_tok,
        config.num_shared_experts,
        config.num_attention_heads,
        config.head_dim,
        config.num_key_value_heads,
        config.vocab_size,
    )
}
