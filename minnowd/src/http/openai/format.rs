//! `response_format` and `text.format`: the form that the whole text of an answer must have.
//!
//! The model is told in a system message, and held to it while it writes ([`form`](super::form)). A schema is refused here
//! if a keyword of it cannot be enforced; what else is wrong with it shows when its grammar is made.

use serde_json::{Map, Value, json};

use super::form;
use crate::grammar;
use crate::http::error::{ApiError, Code};
use crate::http::fields::{Fields, wrong_value};

/// The form that a text must have.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Format {
    /// A JSON object.
    Object {
        /// The field that says so.
        path: String,
    },
    /// JSON that fits a schema.
    Schema {
        /// The schema as it was sent.
        schema: Value,
        /// Where it stands in the request.
        path: String,
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
                None => Ok(Some(Self::Object { path: "response_format".to_owned() })),
                Some(schema) => Self::schema(schema, format.path("schema")).map(Some),
            },
            Some("json_schema") => {
                let path = format.path("json_schema");
                let inner = Fields::nested(path, format.required("json_schema")?)?;
                Self::named(inner).map(Some)
            }
            _ => Err(wrong_value(&format.path("type"), &kind, "must be text, json_object or json_schema")),
        }
    }

    /// Reads `text.format`, where a schema stands beside its name; `None` is plain text.
    pub(crate) fn read_flat(mut format: Fields) -> Result<Option<Self>, ApiError> {
        let kind = format.required("type")?;
        match kind.as_str() {
            Some("text") => Ok(None),
            Some("json_object") => Ok(Some(Self::Object { path: format.path("type") })),
            Some("json_schema") => Self::named(format).map(Some),
            _ => Err(wrong_value(&format.path("type"), &kind, "must be text, json_object or json_schema")),
        }
    }

    /// `{name, schema}`
    fn named(mut fields: Fields) -> Result<Self, ApiError> {
        fields.required("name")?;
        let Some(schema) = fields.map("schema")? else {
            let path = fields.path("schema");
            return Err(ApiError::new(Code::MissingParameter, format!("{path} is required")).at(path));
        };
        Self::schema(schema, fields.path("schema"))
    }

    fn schema(schema: Map<String, Value>, path: String) -> Result<Self, ApiError> {
        let schema = Value::Object(schema);
        grammar::check_schema(&schema).map_err(|error| form::refused(error, &path))?;
        Ok(Self::Schema { schema, path })
    }

    /// The schema that the text fits.
    pub(super) fn as_schema(&self) -> Value {
        match self {
            Self::Object { .. } => json!({ "type": "object" }),
            Self::Schema { schema, .. } => schema.clone(),
        }
    }

    /// The field that says so.
    pub(super) fn path(&self) -> &str {
        match self {
            Self::Object { path } | Self::Schema { path, .. } => path,
        }
    }

    /// The system message that tells the model.
    pub(crate) fn instruction(&self) -> Value {
        let content = match self {
            Self::Object { .. } => "Answer with one JSON object and nothing else.".to_owned(),
            Self::Schema { schema, .. } => {
                format!("Answer with JSON that fits this JSON schema, and nothing else: {schema}")
            }
        };
        json!({ "role": "system", "content": content })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(format: Value) -> Result<Option<Format>, ApiError> {
        Format::read(&mut Fields::new(Map::from_iter([("response_format".to_owned(), format)])))
    }

    #[test]
    fn formats_become_schemas() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let named = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": true}});
        let format = read(named).unwrap().unwrap();
        assert_eq!(format.as_schema(), schema);
        assert_eq!(format.path(), "response_format.json_schema.schema");
        assert!(format.instruction()["content"].as_str().unwrap().ends_with(&schema.to_string()));
        let object = read(json!({"type": "json_object"})).unwrap().unwrap();
        assert_eq!(object.as_schema(), json!({"type": "object"}));
        assert_eq!(
            read(json!({"type": "json_object", "schema": schema})).unwrap().unwrap().path(),
            "response_format.schema"
        );
        assert!(read(json!({"type": "text"})).unwrap().is_none() && read(Value::Null).unwrap().is_none());
    }

    #[test]
    fn a_flat_format_is_the_same_at_another_place() {
        let read = |format: Value| Format::read_flat(Fields::nested("text.format".to_owned(), format).unwrap());
        let schema = json!({"type": "object"});
        let format = read(json!({"type": "json_schema", "name": "x", "schema": schema})).unwrap().unwrap();
        assert_eq!((format.as_schema(), format.path()), (schema, "text.format.schema"));
        assert!(read(json!({"type": "text"})).unwrap().is_none());
        assert_eq!(read(json!({"type": "json_object"})).unwrap().unwrap().as_schema(), json!({"type": "object"}));
        for (format, param) in [
            (json!({"type": "json_schema", "name": "x"}), "text.format.schema"),
            (json!({"type": "json_schema", "schema": {}}), "text.format.name"),
            (json!({"type": "json_schema", "name": "x", "schema": {"not": {}}}), "text.format.schema.not"),
            (json!({"type": "xml"}), "text.format.type"),
        ] {
            assert_eq!(read(format).unwrap_err().body()["error"]["param"], param);
        }
    }

    #[test]
    fn what_is_no_format_is_refused() {
        let inner = "response_format.json_schema";
        let with = |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        for (format, param) in [
            (json!("json"), "response_format".to_owned()),
            (json!({}), "response_format.type".to_owned()),
            (json!({"type": "yaml"}), "response_format.type".to_owned()),
            (json!({"type": "json_schema"}), inner.to_owned()),
            (json!({"type": "json_schema", "json_schema": {"name": "x"}}), format!("{inner}.schema")),
            (json!({"type": "json_schema", "json_schema": {"schema": {}}}), format!("{inner}.name")),
            (with(json!(5)), format!("{inner}.schema")),
            (with(json!({"properties": {"a": {"not": {"type": "null"}}}})), format!("{inner}.schema.properties.a.not")),
            (
                json!({"type": "json_object", "schema": {"uniqueItems": true}}),
                "response_format.schema.uniqueItems".to_owned(),
            ),
        ] {
            assert_eq!(read(format.clone()).unwrap_err().body()["error"]["param"], json!(param), "{format}");
        }
    }
}
