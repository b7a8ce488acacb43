//! `mnwtool compare`: how far the weights of one checkpoint are from those of another, tensor by tensor.
//!
//! Both sides may be any checkpoint; values are compared as they are after dequantization. The size of an error is a
//! result, never a failure: only files that cannot be read or decoded fail.

mod error;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::path::PathBuf;

use minnow_formats::checkpoint::{Checkpoint, StoredTensor};
use minnow_formats::io::IoBackend;
use serde_json::{Value, json};

use super::encoding_words;
use crate::failure::Failure;
use crate::progress::Progress;
use crate::scan::{self, ScanError, Values};
use crate::terminal;
use error::Difference;

/// Tensors and groups that the table for people shows, worst first.
const ROWS_SHOWN_MAX: usize = 20;

/// What to compare.
#[derive(Debug)]
pub(crate) struct Options {
    /// What the values should be.
    pub(crate) source: PathBuf,
    /// What they are.
    pub(crate) file: PathBuf,
    pub(crate) workers: usize,
    pub(crate) io: IoBackend,
    pub(crate) json: bool,
    pub(crate) progress: bool,
}

/// Compares all tensors that both have and lists the others.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let open = |path| Checkpoint::open(path, options.io).map_err(Failure::of);
    let (source, file) = (open(&options.source)?, open(&options.file)?);
    let matched = Matched::of(&source, &file);
    let differences = differences(&source, &file, &matched.pairs, options)?;
    let report = Report::of(options, &matched, &differences);
    if options.json { terminal::print_json(&report.json()) } else { terminal::print(&report.text()) }
}

/// Compares two open checkpoints; what `--json` prints.
pub(super) fn report(options: &Options, source: &Checkpoint, file: &Checkpoint) -> Result<Value, Failure> {
    let matched = Matched::of(source, file);
    let differences = differences(source, file, &matched.pairs, options)?;
    Ok(Report::of(options, &matched, &differences).json())
}

/// A tensor that both checkpoints have, in one shape.
struct Pair<'a> {
    name: &'a str,
    source: &'a StoredTensor,
    file: &'a StoredTensor,
}

/// The tensors of two checkpoints, by what can be said of them.
struct Matched<'a> {
    pairs: Vec<Pair<'a>>,
    /// Only the source has them.
    missing: Vec<&'a str>,
    /// Only the file has them.
    extra: Vec<&'a str>,
    /// Both have them, in different shapes.
    reshaped: Vec<Pair<'a>>,
}

impl<'a> Matched<'a> {
    fn of(source: &'a Checkpoint, file: &'a Checkpoint) -> Self {
        let mut matched = Self { pairs: Vec::new(), missing: Vec::new(), extra: Vec::new(), reshaped: Vec::new() };
        for (name, tensor) in source.tensors() {
            match file.tensors().get(name) {
                None => matched.missing.push(name),
                Some(other) => {
                    let pair = Pair { name, source: tensor, file: other };
                    let same = tensor.spec.shape() == other.spec.shape();
                    if same { matched.pairs.push(pair) } else { matched.reshaped.push(pair) }
                }
            }
        }
        let names = file.tensors().keys().map(String::as_str);
        matched.extra = names.filter(|name| !source.tensors().contains_key(*name)).collect();
        matched
    }
}

/// The difference of each pair. Large tensors are cut into pieces, so that no worker is left alone with one.
fn differences(
    source: &Checkpoint,
    file: &Checkpoint,
    pairs: &[Pair<'_>],
    options: &Options,
) -> Result<Vec<Difference>, Failure> {
    let pieces: Vec<(usize, Range<u64>)> = pairs
        .iter()
        .enumerate()
        .flat_map(|(index, pair)| scan::pieces(&[&pair.source.spec, &pair.file.spec]).map(move |range| (index, range)))
        .collect();
    let elements = |pair: &Pair<'_>| pair.source.spec.shape().elements();
    let progress = Progress::new(pairs.iter().map(elements).sum(), options.progress && !options.json);
    let look = |(left, right): &mut (Values, Values), index: usize| {
        let (pair, range) = &pieces[index];
        let Pair { name, source: expected, file: found } = &pairs[*pair];
        let expected = left.read(source, name, &expected.spec, range)?;
        let found = right.read(file, name, &found.spec, range)?;
        progress.advance(range.end - range.start, name);
        Ok(Difference::of(expected, found))
    };
    let parts = scan::each(pieces.len(), options.workers, look).map_err(|error: ScanError| Failure::of(error))?;
    let mut whole = vec![Difference::default(); pairs.len()];
    for ((pair, _), part) in pieces.iter().zip(&parts) {
        whole[*pair].add(part);
    }
    Ok(whole)
}

/// The layer that a tensor belongs to, and what it is there, without the expert's number.
fn place(name: &str) -> (&str, String) {
    let within = |rest: &str| {
        let rest = rest.strip_suffix(".weight").unwrap_or(rest);
        match rest.split_once(".experts.").and_then(|(before, after)| Some((before, after.split_once('.')?.1))) {
            Some((before, projection)) => format!("{before}.experts.*.{projection}"),
            None => rest.to_owned(),
        }
    };
    let number = |rest: &str| rest.split_once('.').map(|(number, rest)| (number.len(), rest.to_owned()));
    const LAYERS: &str = "model.layers.";
    match name.strip_prefix(LAYERS).and_then(number) {
        Some((digits, rest)) => (&name["model.".len()..LAYERS.len() + digits], within(&rest)),
        None => ("outside layers", within(name)),
    }
}

/// Tensors taken together.
#[derive(Default)]
struct Group<'a> {
    tensors: usize,
    total: Difference,
    worst: Option<(&'a str, f64)>,
}

impl<'a> Group<'a> {
    fn add(&mut self, name: &'a str, difference: &Difference) {
        self.tensors += 1;
        self.total.add(difference);
        let error = difference.relative_rms();
        if self.worst.is_none_or(|(_, worst)| error > worst) {
            self.worst = Some((name, error));
        }
    }
}

struct Report<'a> {
    options: &'a Options,
    matched: &'a Matched<'a>,
    /// Pairs with their differences, worst first; equals by name.
    tensors: Vec<(&'a Pair<'a>, &'a Difference)>,
    total: Group<'a>,
    layers: Vec<(String, Group<'a>)>,
    projections: Vec<(String, Group<'a>)>,
}

impl<'a> Report<'a> {
    fn of(options: &'a Options, matched: &'a Matched<'a>, differences: &'a [Difference]) -> Self {
        let mut total = Group::default();
        let (mut layers, mut projections) = (BTreeMap::<String, Group<'a>>::new(), BTreeMap::new());
        for (pair, difference) in matched.pairs.iter().zip(differences) {
            let (layer, projection) = place(pair.name);
            total.add(pair.name, difference);
            layers.entry(layer.to_owned()).or_default().add(pair.name, difference);
            projections.entry(projection).or_insert_with(Group::default).add(pair.name, difference);
        }
        let mut tensors: Vec<_> = matched.pairs.iter().zip(differences).collect();
        tensors.sort_by(|(_, a), (_, b)| b.relative_rms().total_cmp(&a.relative_rms()));
        Self { options, matched, tensors, total, layers: worst_first(layers), projections: worst_first(projections) }
    }

    fn json(&self) -> Value {
        let group = |name: &str, group: &Group<'_>| {
            let mut entry = json!({"name": name, "tensors": group.tensors});
            entry["worst"] = group.worst.map(|(name, _)| name).into();
            extended(entry, &group.total)
        };
        let tensor = |(pair, difference): &(&Pair<'_>, &Difference)| {
            let entry = json!({
                "name": pair.name,
                "source_encoding": encoding_words(pair.source),
                "file_encoding": encoding_words(pair.file),
            });
            extended(entry, difference)
        };
        let reshaped = self.matched.reshaped.iter().map(|pair| {
            let (source, file) = (pair.source.spec.shape().dims(), pair.file.spec.shape().dims());
            json!({"name": pair.name, "source_shape": source, "file_shape": file})
        });
        json!({
            "source": self.options.source.to_string_lossy(),
            "file": self.options.file.to_string_lossy(),
            "compared": self.tensors.len(),
            "identical": self.identical(),
            "missing": self.matched.missing,
            "extra": self.matched.extra,
            "shape_mismatch": reshaped.collect::<Vec<_>>(),
            "total": group("total", &self.total),
            "layers": self.layers.iter().map(|(name, of)| group(name, of)).collect::<Vec<_>>(),
            "projections": self.projections.iter().map(|(name, of)| group(name, of)).collect::<Vec<_>>(),
            "tensors": self.tensors.iter().map(tensor).collect::<Vec<_>>(),
        })
    }

    fn text(&self) -> String {
        let mut text = format!(
            "{} against {}: {} tensors compared, {} of them without any difference\n",
            self.options.file.display(),
            self.options.source.display(),
            self.tensors.len(),
            self.identical(),
        );
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {}  what", error::HEADING);
        let _ = writeln!(text, "  {}  all tensors", self.total.total);
        for (title, groups) in [("by layer", &self.layers), ("by projection", &self.projections)] {
            let _ = writeln!(text, "{title}, worst first");
            let differing: Vec<_> = groups.iter().filter(|(_, group)| !group.total.is_none()).collect();
            for (name, group) in differing.iter().take(ROWS_SHOWN_MAX) {
                let worst = group.worst.map_or("", |(worst, _)| worst);
                let worst =
                    if group.tensors > 1 { format!(" ({}, worst {worst})", group.tensors) } else { String::new() };
                let _ = writeln!(text, "  {}  {name}{worst}", group.total);
            }
            rest(&mut text, differing.len());
            match groups.len() - differing.len() {
                0 => {}
                exact => _ = writeln!(text, "  {exact} without any difference"),
            }
        }
        let differing = self.tensors.len() - self.identical();
        let _ = writeln!(text, "tensors that differ, worst first");
        for (pair, difference) in self.tensors.iter().take(ROWS_SHOWN_MAX.min(differing)) {
            let (name, from, to) = (pair.name, encoding_words(pair.source), encoding_words(pair.file));
            let _ = writeln!(text, "  {difference}  {name} ({from} to {to})");
        }
        rest(&mut text, differing);
        for (what, names) in [("missing", &self.matched.missing), ("extra", &self.matched.extra)] {
            for name in names {
                let _ = writeln!(text, "{what}  {name}");
            }
        }
        for Pair { name, source, file } in &self.matched.reshaped {
            let _ = writeln!(text, "shape  {name}: {} and {}", source.spec.shape(), file.spec.shape());
        }
        text
    }

    fn identical(&self) -> usize {
        self.tensors.iter().filter(|(_, difference)| difference.is_none()).count()
    }
}

fn rest(text: &mut String, rows: usize) {
    if rows > ROWS_SHOWN_MAX {
        let _ = writeln!(text, "  and {} more; --json lists all", rows - ROWS_SHOWN_MAX);
    }
}

fn worst_first(groups: BTreeMap<String, Group<'_>>) -> Vec<(String, Group<'_>)> {
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by(|(_, a), (_, b)| b.total.relative_rms().total_cmp(&a.total.relative_rms()));
    groups
}

fn extended(mut entry: Value, difference: &Difference) -> Value {
    if let (Value::Object(entry), Value::Object(more)) = (&mut entry, difference.json()) {
        entry.extend(more);
    }
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_layer_and_projection() {
        for (name, layer, projection) in [
            ("model.layers.12.mlp.experts.7.up_proj.weight", "layers.12", "mlp.experts.*.up_proj"),
            ("model.layers.0.mlp.gate.expert_bias", "layers.0", "mlp.gate.expert_bias"),
            ("model.layers.3.mlp.shared_experts.up_proj.weight", "layers.3", "mlp.shared_experts.up_proj"),
            ("lm_head.weight", "outside layers", "lm_head"),
            ("model.layers", "outside layers", "model.layers"),
            ("model.layers.5", "outside layers", "model.layers.5"),
        ] {
            assert_eq!(place(name), (layer, projection.to_owned()), "{name}");
        }
    }
}
