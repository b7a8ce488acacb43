//! What of JSON Schema can be enforced while an output is written.

use serde_json::{Map, Value, json};

use super::GrammarError;

/// Keywords that constrain and that the parser does not know. Keywords that nobody knows constrain nothing.
const UNSUPPORTED: [&str; 19] = [
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$dynamicAnchor",
    "$recursiveRef",
    "$recursiveAnchor",
    "$vocabulary",
];

/// Supported keywords whose value may be a schema, a list of schemas, or schemas by name.
const NESTED: [&str; 3] = ["items", "additionalItems", "additionalProperties"];
const LISTED: [&str; 5] = ["allOf", "anyOf", "oneOf", "prefixItems", "items"];
const NAMED: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// The parser's own switches, which would let clients turn the enforcement off, and we use for [`WHITE_SPACE`].
const SWITCHES: &str = "x-guidance";

/// Deeper schemas are refused; the request's own limit is lower.
const DEPTH_MAX: usize = 100;

/// White space between the tokens of JSON: a space, or a line break with its indentation. A model that does not know
/// what to say could otherwise say nothing for ever.
const WHITE_SPACE: &str = r"\x20|\x0A[\x20\x09]{0,40}";

/// The schema as the parser takes it, if it can enforce all of it.
pub(super) fn enforceable(schema: &Value) -> Result<Value, GrammarError> {
    check(schema)?;
    let mut members = match schema {
        Value::Object(members) => members.clone(),
        Value::Bool(true) => Map::new(),
        _ => return Err(GrammarError::Unusable("a schema must be an object".to_owned())),
    };
    members.insert(SWITCHES.to_owned(), json!({ "whitespace_pattern": WHITE_SPACE }));
    Ok(Value::Object(members))
}

/// Refuses a schema that uses a keyword which cannot be enforced. What else may be wrong with it shows when it is used.
///
/// # Errors
/// The keyword's path, from the schema on.
pub fn check(schema: &Value) -> Result<(), GrammarError> {
    check_at(schema, "", 0)
}

/// `path` leads to `schema`.
fn check_at(schema: &Value, path: &str, depth: usize) -> Result<(), GrammarError> {
    let Value::Object(members) = schema else { return Ok(()) };
    if depth > DEPTH_MAX {
        return Err(GrammarError::Unusable(format!("the schema is nested deeper than {DEPTH_MAX}")));
    }
    let step = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    if let Some(keyword) = UNSUPPORTED.iter().find(|keyword| constrains(members, keyword)) {
        return Err(GrammarError::Keyword { path: step(keyword) });
    }
    for (name, value) in members {
        let keyword = name.as_str();
        match value {
            Value::Object(_) if NESTED.contains(&keyword) => check_at(value, &step(name), depth + 1)?,
            Value::Array(list) if LISTED.contains(&keyword) => {
                for (index, value) in list.iter().enumerate() {
                    check_at(value, &step(&format!("{name}[{index}]")), depth + 1)?;
                }
            }
            Value::Object(named) if NAMED.contains(&keyword) => {
                for (key, value) in named {
                    check_at(value, &step(&format!("{name}.{key}")), depth + 1)?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether a keyword is there and says something: `uniqueItems: false` does not.
fn constrains(members: &Map<String, Value>, keyword: &str) -> bool {
    members.get(keyword).is_some_and(|value| *value != Value::Bool(false) || keyword == "not")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keyword_that_cannot_be_enforced_is_named_with_its_path() {
        for (schema, path) in [
            (json!({"not": {}}), "not"),
            (json!({"properties": {"a": {"uniqueItems": true}}}), "properties.a.uniqueItems"),
            (json!({"anyOf": [{}, {"items": {"contains": {}}}]}), "anyOf[1].items.contains"),
            (json!({"$defs": {"x": {"prefixItems": [{"if": {}}]}}}), "$defs.x.prefixItems[0].if"),
        ] {
            assert_eq!(enforceable(&schema), Err(GrammarError::Keyword { path: path.to_owned() }), "{schema}");
        }
        for schema in [
            json!({"properties": {"not": {"type": "string"}, "if": {}}, "required": ["not"]}),
            json!({"uniqueItems": false, "x-order": {"not": 1}, "enum": [{"not": 1}], "default": {"if": 1}}),
            json!(true),
        ] {
            assert!(enforceable(&schema).is_ok(), "{schema}");
        }
    }

    #[test]
    fn clients_cannot_switch_enforcement_off() {
        let schema = json!({"type": "object", "x-guidance": {"lenient": true}});
        let enforced = enforceable(&schema).unwrap();
        assert_eq!(enforced["type"], "object");
        assert_eq!(enforced["x-guidance"], json!({"whitespace_pattern": WHITE_SPACE}));
    }
}
