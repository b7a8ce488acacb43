//! `mnwtool inspect`: what a checkpoint is, what it holds, and whether it can be converted.

mod stats;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use minnow_common::tensor::is_expert;
use minnow_common::units::HumanBytes;
use minnow_common::{ARCHITECTURE, ModelConfig, Routing};
use minnow_formats::checkpoint::{Checkpoint, SourceKind, StoredTensor};
use minnow_formats::io::IoBackend;
use minnow_formats::names::shortlist;
use serde_json::{Map, Value, json};

use super::{encodings_json, encodings_table};
use crate::failure::Failure;
use crate::plan;
use crate::progress::Progress;
use crate::terminal;
use stats::Stats;

/// What to look at, and how closely.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) path: PathBuf,
    pub(crate) tensors: bool,
    pub(crate) stats: bool,
    pub(crate) json: bool,
}

/// Describes the checkpoint on standard output.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let checkpoint = Checkpoint::open(&options.path, IoBackend::Auto).map_err(Failure::of)?;
    let stats = if options.stats { Some(all_stats(&checkpoint, !options.json)?) } else { None };
    let view =
        View { path: &options.path, checkpoint: &checkpoint, stats, lists_tensors: options.tensors || options.stats };
    if options.json { terminal::print_json(&view.json()) } else { terminal::print(&view.text()) }
}

/// The statistics of every tensor, in name order. One tensor, or part of one, is in memory at a time.
fn all_stats(checkpoint: &Checkpoint, progress: bool) -> Result<Vec<Stats>, Failure> {
    let bytes = |tensor: &StoredTensor| tensor.spec.data_bytes() + tensor.spec.scales_bytes();
    let progress = Progress::new(checkpoint.tensors().values().map(bytes).sum(), progress);
    let one = |(name, tensor): (&String, &StoredTensor)| {
        let stats = stats::of(checkpoint, name, &tensor.spec).map_err(Failure::of)?;
        progress.advance(bytes(tensor));
        Ok(stats)
    };
    checkpoint.tensors().iter().map(one).collect()
}

struct View<'a> {
    path: &'a Path,
    checkpoint: &'a Checkpoint,
    /// In the order of `checkpoint.tensors()`.
    stats: Option<Vec<Stats>>,
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

    /// Tensors that a trained model does not have: experts of zeros, values that are no numbers.
    fn suspects(&self) -> Vec<String> {
        let Some(stats) = &self.stats else { return Vec::new() };
        let named: Vec<(&String, &Stats)> = self.checkpoint.tensors().keys().zip(stats).collect();
        let list = |what: &str, wanted: &dyn Fn(&str, &Stats) -> bool| {
            let names: Vec<&String> =
                named.iter().filter(|(name, stats)| wanted(name, stats)).map(|(name, _)| *name).collect();
            (!names.is_empty()).then(|| format!("{what} ({}): {}", names.len(), shortlist(&names)))
        };
        [
            list("experts whose weights are all zero", &|name, stats| is_expert(name) && stats.is_all_zero()),
            list("tensors with values that are not finite", &|_, stats| stats.nonfinite > 0),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    fn text(&self) -> String {
        let Self { path, checkpoint, .. } = self;
        let config = checkpoint.config();
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
        line(
            "convertible",
            match self.problem() {
                None if self.is_quantized() => "yes; what is quantized can only be copied or repacked".to_owned(),
                None => "yes".to_owned(),
                Some(problem) => format!("no: {problem}"),
            },
        );
        line("encodings", String::new());
        text.push_str(&encodings_table(&self.shares()));
        if self.lists_tensors {
            text.push_str("tensors\n");
            for (index, (name, tensor)) in checkpoint.tensors().iter().enumerate() {
                let encoding = encoding_words(tensor);
                let _ = write!(text, "  {name}  {}  {encoding}", tensor.spec.shape());
                if let Some(stats) = &self.stats {
                    let _ = write!(text, "  {}", stats[index]);
                }
                text.push('\n');
            }
        }
        for suspect in self.suspects() {
            let _ = writeln!(text, "suspicious   {suspect}");
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
            "convertible": problem.is_none(),
            "problem": problem,
        });
        if self.lists_tensors {
            let tensors = checkpoint.tensors().iter().enumerate().map(|(index, (name, tensor))| {
                let mut entry = json!({
                    "name": name,
                    "shape": tensor.spec.shape().dims(),
                    "encoding": tensor.spec.encoding().name(),
                    "group_size": tensor.spec.group().map_or(0, |group| group.get()),
                    "bytes": tensor.spec.data_bytes() + tensor.spec.scales_bytes(),
                });
                if let Some(stats) = &self.stats {
                    entry["stats"] = stats[index].json();
                }
                entry
            });
            object["tensors"] = tensors.collect();
        }
        if self.stats.is_some() {
            object["suspicious"] = self.suspects().into();
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

fn encoding_words(tensor: &StoredTensor) -> String {
    match tensor.spec.group() {
        Some(group) => format!("{}/{group}", tensor.spec.encoding()),
        None => tensor.spec.encoding().to_string(),
    }
}
