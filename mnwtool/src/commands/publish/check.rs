//! Whether a folder is ready to be pushed: everything that is wrong with it, in words.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use minnow_formats::digest;
use minnow_formats::io::{self, IoBackend};
use serde_json::Value;

use super::{CARD, check_strictly, facts_name, matter, sums};
use crate::failure::Failure;

/// What is left of a template, or of a draft.
const LEFTOVERS: [&str; 5] = ["{{", "{%", "TODO", "FIXME", "undefined"];

/// Looks at everything. `progress` is told of bytes that were read.
pub(super) fn problems(folder: &Path, workers: usize, progress: &(dyn Fn(u64) + Sync)) -> Result<Vec<String>, Failure> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| Failure::at(folder, error))? {
        let entry = entry.map_err(|error| Failure::at(folder, error))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.retain(|name| !name.starts_with('.'));
    names.sort();
    let mut problems = Vec::new();
    let mut digests = BTreeMap::new();
    for name in names.iter().filter(|name| *name != sums::NAME) {
        let path = folder.join(name);
        let digest = io::open(&path, IoBackend::Auto).and_then(|file| digest::sha256(&file, &|bytes| progress(bytes)));
        match digest {
            Ok(digest) => drop(digests.insert(name.as_str(), digest)),
            Err(error) => problems.push(error.to_string()),
        }
    }
    let models: Vec<&str> = names.iter().map(String::as_str).filter(|name| name.ends_with(".mnw")).collect();
    if models.is_empty() {
        problems.push("there is no .mnw file".to_owned());
    }
    problems.extend(check_sums(folder, &digests));
    for name in &models {
        if let Err(fault) = check_strictly(&folder.join(name), workers, progress) {
            problems.push(format!("{name} is not valid ({fault})"));
        }
        if let Some(sha256) = digests.get(name) {
            problems.extend(check_facts(folder, name, sha256));
        }
    }
    match fs::read_to_string(folder.join(CARD)) {
        Ok(card) => problems.extend(check_card(&card, &models, &digests)),
        Err(error) => problems.push(format!("{CARD}: {error}")),
    }
    Ok(problems)
}

fn check_sums(folder: &Path, digests: &BTreeMap<&str, String>) -> Vec<String> {
    let listed = match fs::read_to_string(folder.join(sums::NAME)) {
        Ok(text) => sums::parse(&text).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    let listed = match listed {
        Ok(listed) => listed,
        Err(error) => return vec![format!("{}: {error}", sums::NAME)],
    };
    let mut problems = Vec::new();
    for (expected, name) in &listed {
        match digests.get(name.as_str()) {
            None => problems.push(format!("{} names {name}, which is not there", sums::NAME)),
            Some(found) if found != expected => {
                problems.push(format!("{name} has SHA-256 {found}, but {} has {expected}", sums::NAME));
            }
            Some(_) => {}
        }
    }
    let is_listed = |name: &str| listed.iter().any(|(_, known)| known == name);
    problems.extend(digests.keys().filter(|name| !is_listed(name)).map(|name| format!("{} lacks {name}", sums::NAME)));
    problems
}

fn check_facts(folder: &Path, name: &str, sha256: &str) -> Vec<String> {
    let facts = facts_name(name);
    let text = match fs::read_to_string(folder.join(&facts)) {
        Ok(text) => text,
        Err(error) => return vec![format!("{facts}: {error}")],
    };
    let Ok(json) = serde_json::from_str::<Value>(&text) else { return vec![format!("{facts} is not JSON")] };
    let bytes = fs::metadata(folder.join(name)).map_or(0, |found| found.len());
    let mut problems = Vec::new();
    for (key, expected) in [("file", Value::from(name)), ("sha256", sha256.into()), ("bytes", bytes.into())] {
        if json[key] != expected {
            problems.push(format!("{facts} says {key} {}, but it is {expected}", json[key]));
        }
    }
    problems
}

fn check_card(card: &str, models: &[&str], digests: &BTreeMap<&str, String>) -> Vec<String> {
    let mut problems = matter::problems(card);
    for leftover in LEFTOVERS.iter().filter(|leftover| card.contains(**leftover)) {
        problems.push(format!("the card holds {leftover:?}, which is left of a template or a draft"));
    }
    for name in models {
        if !card.contains(name) {
            problems.push(format!("the card does not name {name}"));
        }
        if digests.get(name).is_some_and(|sha256| !card.contains(sha256.as_str())) {
            problems.push(format!("the card does not have the SHA-256 of {name}"));
        }
    }
    let is_part = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let mut unknown: Vec<&str> = card
        .split(|c| !is_part(c))
        .filter(|word| word.len() > ".mnw".len() && word.ends_with(".mnw") && !models.contains(word))
        .collect();
    unknown.sort_unstable();
    unknown.dedup();
    problems.extend(unknown.iter().map(|name| format!("the card names {name}, which is not there")));
    for command in ["mnwtool", "minnowd"] {
        if !card.contains(command) {
            problems.push(format!("the card has no command of {command}"));
        }
    }
    problems
}
