//! The rules file of `--tensor-rules`: a JSON list that gives tensors by name prefix another encoding.
//!
//! Text in, rules out; `plan.rs` applies them. A key that nobody reads would be a silent mistake, so unknown and
//! repeated keys are errors (stricter than `docs/format-mnw.md` section 10.3 says upstream is).

use std::fmt;

use minnow_common::Encoding;
use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
use thiserror::Error;

/// Gives every tensor whose name starts with `prefix` an encoding and a group size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    /// Compared with the raw start of the full tensor name.
    pub(crate) prefix: String,
    /// `None` keeps the source's encoding.
    pub(crate) encoding: Option<Encoding>,
    /// `None` means the encoding's default, not `--group-size`.
    pub(crate) group: Option<u64>,
}

/// Why a rules file cannot be used.
#[derive(Debug, Error)]
#[error("{0}")]
pub(crate) struct RulesError(#[from] serde_json::Error);

/// Parses a rules file; errors name the rule (counted from 1), the key and the place.
pub(crate) fn parse(text: &str) -> Result<Vec<Rule>, RulesError> {
    Ok(serde_json::from_str::<Rules>(text)?.0)
}

struct Rules(Vec<Rule>);

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRule {
    prefix: String,
    encoding: Option<String>,
    group_size: Option<u64>,
}

impl<'de> Deserialize<'de> for Rules {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Rules;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of {prefix, encoding, group_size}")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Rules, A::Error> {
                let mut rules = Vec::new();
                loop {
                    let number = rules.len() + 1;
                    let named = |error: &dyn fmt::Display| A::Error::custom(format!("rule {number}: {error}"));
                    match list.next_element::<RawRule>().map_err(|error| named(&error))? {
                        Some(raw) => rules.push(checked(raw).map_err(|error| named(&error))?),
                        None => return Ok(Rules(rules)),
                    }
                }
            }
        }
        deserializer.deserialize_seq(List)
    }
}

fn checked(raw: RawRule) -> Result<Rule, String> {
    let encoding = match raw.encoding {
        None => None,
        Some(name) => Some(name.parse().map_err(|error| {
            let names = Encoding::ALL.map(Encoding::name).join(", ");
            format!("{error}, expected null or one of {names}")
        })?),
    };
    Ok(Rule { prefix: raw.prefix, encoding, group: raw.group_size.filter(|&group| group != 0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_and_absent_keep_the_source() {
        let rules = parse(
            r#"[{"prefix": "a", "encoding": "i8_sym", "group_size": 64}, {"prefix": "b", "encoding": null}, {"prefix": "c"}]"#,
        )
        .unwrap();
        assert_eq!(rules[0], Rule { prefix: "a".into(), encoding: Some(Encoding::I8Sym), group: Some(64) });
        assert_eq!(rules[1], Rule { prefix: "b".into(), encoding: None, group: None });
        assert_eq!(rules[2].encoding, None);
        assert_eq!(parse("[]").unwrap(), []);
    }

    #[test]
    fn mistakes_name_the_rule_and_the_key() {
        for (text, words) in [
            (r#"[{"prefix": "a"}, {"prefix": "b", "group": 32}]"#, &["rule 2", "`group`", "group_size"][..]),
            (r#"[{"prefix": "a", "prefix": "b"}]"#, &["rule 1", "duplicate", "prefix"]),
            (r#"[{"encoding": "i8_sym"}]"#, &["rule 1", "prefix"]),
            (r#"[{"prefix": "a", "encoding": "fp4_mma"}]"#, &["rule 1", "fp4_mma", "i4_mma"]),
            (r#"[{"prefix": "a", "group_size": -16}]"#, &["rule 1", "-16"]),
            (r#"{"prefix": "a"}"#, &["a list"]),
            (r#"[{"prefix": "a"}] trailing"#, &["trailing"]),
            ("", &["EOF"]),
        ] {
            let message = parse(text).unwrap_err().to_string();
            for word in words {
                assert!(message.contains(word), "{text}: {message}");
            }
        }
    }
}
