//! `response_format`: the form that the whole text of an answer must have.
//!
//! Decoding is not constrained: the model is told, and its text is checked when it is complete. Surrounding white space
//! and one Markdown fence are no fault and are taken away. Schemas are JSON Schema 2020-12; references stay within the
//! schema, nothing is fetched.

use std::sync::Arc;

use jsonschema::{Draft, Validator};
use serde_json::{Map, Value, json};

use crate::http::error::{ApiError, Code};
use crate::http::fields::{Fields, wrong_value};

/// Characters of a schema violation that an error shows.
const REASON_SHOWN_MAX: usize = 300;

/// The form that a text must have. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) enum Format {
    /// A JSON object.
    Object,
    /// JSON that fits a schema.
    Schema {
        /// The schema as it was sent.
        source: Arc<Value>,
        /// What checks it.
        validator: Arc<Validator>,
    },
}

impl Format {
    /// Takes `response_format` out; `None` is plain text.
    pub(crate) fn read(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        let Some(mut format) = fields.object("response_format")? else { return Ok(None) };
        let kind = format.required("type")?;
        match kind.as_str() {
            Some("text") => Ok(None),
            Some("json_object") => match format.map("schema")? {
                None => Ok(Some(Self::Object)),
                Some(schema) => Self::schema(schema, "response_format.schema").map(Some),
            },
            Some("json_schema") => {
                let path = "response_format.json_schema";
                let mut inner = Fields::nested(path.to_owned(), format.required("json_schema")?)?;
                inner.required("name")?;
                let Some(schema) = inner.map("schema")? else {
                    let path = inner.path("schema");
                    return Err(ApiError::new(Code::MissingParameter, format!("{path} is required")).at(path));
                };
                Self::schema(schema, &inner.path("schema")).map(Some)
            }
            _ => Err(wrong_value("response_format.type", &kind, "must be text, json_object or json_schema")),
        }
    }

    fn schema(schema: Map<String, Value>, path: &str) -> Result<Self, ApiError> {
        let source = Value::Object(schema);
        let compiled = jsonschema::options().with_draft(Draft::Draft202012).build(&source);
        let validator = compiled.map_err(|error| {
            let message = format!("{path} is no usable JSON schema: {}", shortened(&error.to_string()));
            ApiError::new(Code::InvalidValue, message).at(path)
        })?;
        Ok(Self::Schema { source: Arc::new(source), validator: Arc::new(validator) })
    }

    /// The system message that tells the model.
    pub(crate) fn instruction(&self) -> Value {
        let content = match self {
            Self::Object => "Answer with one JSON object and nothing else.".to_owned(),
            Self::Schema { source, .. } => {
                format!("Answer with JSON that fits this JSON schema, and nothing else: {source}")
            }
        };
        json!({ "role": "system", "content": content })
    }

    /// The JSON in `text`, or why there is none of this form.
    pub(crate) fn check<'a>(&self, text: &'a str) -> Result<&'a str, String> {
        let json = unfenced(text.trim());
        let value: Value = serde_json::from_str(json).map_err(|error| format!("it is not JSON: {error}"))?;
        match self {
            Self::Object if value.is_object() => Ok(json),
            Self::Object => Err("it is JSON, but not an object".to_owned()),
            Self::Schema { validator, .. } => match validator.validate(&value) {
                Ok(()) => Ok(json),
                Err(error) => Err(format!("it does not fit the schema: {}", shortened(&error.to_string()))),
            },
        }
    }
}

/// What stands within a Markdown fence around all of `text`, with or without a language; else `text`.
fn unfenced(text: &str) -> &str {
    let inner = || {
        let (language, rest) = text.strip_prefix("```")?.split_once('\n')?;
        let is_language = language.trim().chars().all(char::is_alphanumeric);
        is_language.then_some(rest.strip_suffix("```")?.trim())
    };
    inner().unwrap_or(text)
}

fn shortened(text: &str) -> String {
    text.chars().take(REASON_SHOWN_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(format: Value) -> Result<Option<Format>, ApiError> {
        Format::read(&mut Fields::new(Map::from_iter([("response_format".to_owned(), format)])))
    }

    fn schema(schema: Value) -> Result<Format, ApiError> {
        read(json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})).map(Option::unwrap)
    }

    #[test]
    fn white_space_and_one_fence_are_taken_away() {
        for text in ["{\"a\":1}", " {\"a\":1}\n", "```json\n{\"a\":1}\n```", "```\n{\"a\":1}```\n"] {
            assert_eq!(Format::Object.check(text), Ok("{\"a\":1}"), "{text}");
        }
        for text in ["", "1", "[]", "{\"a\":1} x", "```json\n{\"a\":1}", "x ```\n{}\n```", "```\n```\n{}\n```\n```"] {
            assert!(Format::Object.check(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_schema_is_checked() {
        let format = schema(json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}));
        let format = format.unwrap();
        assert_eq!(format.check("{\"a\": 1}"), Ok("{\"a\": 1}"));
        assert!(format.check("{\"a\": \"1\"}").unwrap_err().contains("schema"));
        assert!(format.check("{}").is_err());
    }

    #[test]
    fn what_is_no_format_is_refused() {
        for (format, param) in [
            (json!("json"), "response_format"),
            (json!({}), "response_format.type"),
            (json!({"type": "yaml"}), "response_format.type"),
            (json!({"type": "json_schema"}), "response_format.json_schema"),
            (json!({"type": "json_schema", "json_schema": {"name": "x"}}), "response_format.json_schema.schema"),
            (json!({"type": "json_schema", "json_schema": {"schema": {}}}), "response_format.json_schema.name"),
            (
                json!({"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}),
                "response_format.json_schema.schema",
            ),
            (json!({"type": "json_object", "schema": {"type": "nothing"}}), "response_format.schema"),
            (json!({"type": "json_object", "schema": {"$ref": "http://127.0.0.1:1/x"}}), "response_format.schema"),
            (json!({"type": "json_object", "schema": {"$ref": "file:///etc/passwd"}}), "response_format.schema"),
        ] {
            assert_eq!(read(format.clone()).unwrap_err().body()["error"]["param"], param, "{format}");
        }
        assert!(read(json!({"type": "text"})).unwrap().is_none() && read(Value::Null).unwrap().is_none());
    }

    #[test]
    fn a_schema_that_refers_to_itself_ends() {
        for circular in [
            json!({"$ref": "#"}),
            json!({"allOf": [{"$ref": "#"}]}),
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
            json!({"properties": {"a": {"$ref": "#"}}}),
        ] {
            if let Ok(format) = schema(circular) {
                let _ = format.check("{\"a\":{\"a\":{}}}");
            }
        }
    }
}
