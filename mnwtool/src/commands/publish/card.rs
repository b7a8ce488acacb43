//! The card: a template, and what it may speak of.
//!
//! The template is the user's if there is one. It is rendered strictly: a name that is not known is an error, not an
//! empty place. `docs/mnwtool.md` lists the names.

use minijinja::{Environment, UndefinedBehavior};
use minnow_common::units::HumanBytes;
use serde_json::{Value, json};

use super::facts::Facts;
use super::{Options, Origin, facts_name};
use crate::failure::Failure;

/// The card of those who bring no template.
const TEMPLATE: &str = include_str!("card.md.jinja");
/// Steps of a template; the built-in one takes a few hundred for each file.
const FUEL: u64 = 1_000_000;

/// What a template knows.
pub(super) fn context(options: &Options, origin: &Origin, all: &[Facts]) -> Value {
    let title = options.title.clone().unwrap_or_else(|| match &options.repository {
        Some(repository) => repository.name().to_owned(),
        None => format!("{} for minnow", origin.repository.name()),
    });
    let words = all.iter().filter_map(|facts| Some(facts.experts.as_ref()?.word));
    let mut tags = vec!["minnow", "mnw", "llada2", "diffusion", "moe"];
    words.filter(|word| !matches!(*word, "original" | "mixed")).for_each(|word| {
        if !tags.contains(&word) {
            tags.push(word);
        }
    });
    json!({
        "title": title,
        "license": origin.license,
        "license_files": origin.licenses.iter().map(|(name, _)| name).collect::<Vec<_>>(),
        "base_model": origin.repository.to_string(),
        "base_revision": origin.revision.as_ref().map(ToString::to_string),
        "source_files": origin.json()["files"],
        "repository": options.repository.as_ref().map(ToString::to_string),
        "tags": tags,
        "tool_version": env!("CARGO_PKG_VERSION"),
        "tool_commit": option_env!("MINNOW_COMMIT"),
        "files": all.iter().map(file).collect::<Vec<_>>(),
    })
}

fn file(facts: &Facts) -> Value {
    let encodings: Vec<Value> = facts
        .shares
        .iter()
        .map(|(name, share)| {
            json!({
                "name": name, "tensors": share.tensors, "size": HumanBytes(share.bytes).to_string(),
                "bits": format!("{:.3}", share.bits()),
            })
        })
        .collect();
    let (cpu, gpu) = facts.memory_bytes();
    json!({
        "name": facts.name,
        "facts": facts_name(&facts.name),
        "bytes": facts.bytes,
        "size": HumanBytes(facts.bytes).to_string(),
        "sha256": facts.sha256,
        "experts": facts.experts.as_ref().map_or("none", |experts| experts.word),
        "encodings": encodings,
        "parameters": facts.parameters,
        "memory_cpu": HumanBytes(cpu).to_string(),
        "memory_gpu": HumanBytes(gpu).to_string(),
        "command": facts.command(),
        "compare": facts.comparison,
        "exam": facts.exam,
    })
}

/// The card's text.
pub(super) fn render(template: Option<&str>, context: &Value) -> Result<String, Failure> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_keep_trailing_newline(true);
    environment.set_fuel(Some(FUEL));
    environment.add_filter("percent", |share: Option<f64>| {
        share.map_or("-".to_owned(), |share| format!("{:.2} %", 100.0 * share))
    });
    environment.add_filter("fixed", |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}")));
    let name = if template.is_some() { "the template" } else { "the built-in template" };
    let failed = |error: minijinja::Error| Failure::of(format!("{name}: {error}"));
    environment.add_template("card", template.unwrap_or(TEMPLATE)).map_err(failed)?;
    environment.get_template("card").and_then(|card| card.render(context)).map_err(failed)
}
