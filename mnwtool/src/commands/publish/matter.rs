//! The YAML between the lines of dashes at the top of a card.

use minnow_formats::hub::Repository;
use saphyr::{LoadableYamlNode, Yaml};

const DASHES: &str = "---";

/// The text between the first two lines of dashes.
fn text(card: &str) -> Option<&str> {
    let rest = card.strip_prefix(DASHES)?.strip_prefix('\n')?;
    rest.find("\n---\n").map(|end| &rest[..=end])
}

/// The licence that a card names.
pub(super) fn license(card: &str) -> Option<String> {
    let documents = Yaml::load_from_str(text(card)?).ok()?;
    Some(documents.first()?.as_mapping_get("license")?.as_str()?.to_owned())
}

/// What is wrong with the front matter of a card.
pub(super) fn problems(card: &str) -> Vec<String> {
    let Some(text) = text(card) else {
        return vec!["the card does not start with YAML between two lines of ---".to_owned()];
    };
    let documents = match Yaml::load_from_str(text) {
        Ok(documents) => documents,
        Err(error) => return vec![format!("the card's front matter is not YAML: {error}")],
    };
    let Some(matter) = documents.first().filter(|matter| matter.is_mapping()) else {
        return vec!["the card's front matter is no map".to_owned()];
    };
    let mut problems = Vec::new();
    let mut expect = |key: &str, expected: &str, is_good: &dyn Fn(&Yaml<'_>) -> bool| {
        if !matter.as_mapping_get(key).is_some_and(is_good) {
            problems.push(format!("the card's front matter has no {key}: expected {expected}"));
        }
    };
    let is_repository = |value: &Yaml<'_>| value.as_str().is_some_and(|name| name.parse::<Repository>().is_ok());
    expect("license", "the licence's id", &|value| value.as_str().is_some_and(|id| !id.is_empty()));
    expect("base_model", "OWNER/NAME, or a list of them", &|value| {
        is_repository(value)
            || value.as_sequence().is_some_and(|list| !list.is_empty() && list.iter().all(is_repository))
    });
    expect("base_model_relation", "quantized", &|value| value.as_str() == Some("quantized"));
    expect("pipeline_tag", "text-generation", &|value| value.as_str() == Some("text-generation"));
    expect("tags", "a list of words", &|value| {
        value.as_sequence().is_some_and(|list| list.iter().all(|tag| tag.as_str().is_some()))
    });
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_that_the_hub_needs_is_asked_for() {
        let good = "---\nlicense: mit\nbase_model:\n  - a/b\nbase_model_relation: quantized\n\
                    pipeline_tag: text-generation\ntags: [x, \"y\"]\n---\n# card\n";
        assert_eq!(problems(good), [""; 0]);
        assert_eq!(license(good).as_deref(), Some("mit"));
        for (from, to, word) in [
            ("license: mit", "license:", "license"),
            ("  - a/b", "  - a b", "base_model"),
            ("quantized", "finetune", "base_model_relation"),
            ("text-generation", "text", "pipeline_tag"),
            ("[x, \"y\"]", "x", "tags"),
            ("tags: [x", "tags: [[x", "not YAML"),
            ("---\n# card", "# card", "two lines of ---"),
        ] {
            let found = problems(&good.replacen(from, to, 1));
            assert!(found.len() == 1 && found[0].contains(word), "{to}: {found:?}");
        }
    }
}
