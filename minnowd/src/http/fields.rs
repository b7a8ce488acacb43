//! Members of a JSON object, read once, each with its path for error messages.
//!
//! Reading takes a member out, so that what is left at the end is what nobody knows. `null` always means "not given".
//! Integers may be written `5` or `5.0`, nothing else.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::{ApiError, Code};

/// An object that is being read.
#[derive(Debug)]
pub(crate) struct Fields {
    prefix: String,
    members: Map<String, Value>,
}

impl Fields {
    /// The outermost object of a request.
    pub(crate) fn new(members: Map<String, Value>) -> Self {
        Self { prefix: String::new(), members }
    }

    /// `value`, which stands at `path` and must be an object.
    pub(crate) fn nested(path: String, value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(members) => Ok(Self { prefix: format!("{path}."), members }),
            other => Err(wrong_type(&path, "an object", &other)),
        }
    }

    /// The path of a member, as the client would write it.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// A member, without taking it out.
    pub(crate) fn peek(&self, name: &str) -> Option<&Value> {
        self.members.get(name).filter(|value| !value.is_null())
    }

    /// Takes a member of any type out.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.members.swap_remove(name).filter(|value| !value.is_null())
    }

    /// Takes a member that must be there.
    pub(crate) fn required(&mut self, name: &str) -> Result<Value, ApiError> {
        self.take(name).ok_or_else(|| {
            let path = self.path(name);
            ApiError::new(Code::MissingParameter, format!("{path} is required")).at(path)
        })
    }

    /// Takes a string that must be there.
    pub(crate) fn required_text(&mut self, name: &str) -> Result<String, ApiError> {
        let value = self.required(name)?;
        as_text(&self.path(name), value)
    }

    /// Takes a boolean out.
    pub(crate) fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.convert(name, |path, value| match value {
            Value::Bool(flag) => Ok(flag),
            other => Err(wrong_type(path, "a boolean", &other)),
        })
    }

    /// Takes an integer out.
    pub(crate) fn integer(&mut self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        self.convert(name, |path, value| as_integer(path, &value, &range))
    }

    /// Takes a number out.
    pub(crate) fn number(&mut self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        self.convert(name, |path, value| match value.as_f64() {
            Some(number) if range.contains(&number) => Ok(number),
            Some(_) => {
                let expected = format!("must be from {} to {}", range.start(), range.end());
                Err(wrong_value(path, &value, &expected))
            }
            None => Err(wrong_type(path, "a number", &value)),
        })
    }

    /// Takes a string out.
    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.convert(name, as_text)
    }

    /// Takes a list out.
    pub(crate) fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        self.convert(name, as_list)
    }

    /// Takes an object out.
    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Fields>, ApiError> {
        self.convert(name, |path, value| Self::nested(path.to_owned(), value))
    }

    /// Takes an object out as it is.
    pub(crate) fn map(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        self.convert(name, |path, value| match value {
            Value::Object(members) => Ok(members),
            other => Err(wrong_type(path, "an object", &other)),
        })
    }

    /// Moves the members with these names into an object of their own, which stands at the same place.
    pub(crate) fn part<'a>(&mut self, names: impl Iterator<Item = &'a str>) -> Self {
        let members = names.filter_map(|name| self.members.swap_remove_entry(name)).collect();
        Self { prefix: self.prefix.clone(), members }
    }

    /// Takes the members of a part back.
    pub(crate) fn join(&mut self, part: Self) {
        self.members.extend(part.members);
    }

    /// Paths of the members that nobody took, nulls left out, sorted.
    pub(crate) fn rest(self) -> Vec<String> {
        let named = self.members.iter().filter(|(_, value)| !value.is_null());
        let mut rest: Vec<String> = named.map(|(name, _)| format!("{}{name}", self.prefix)).collect();
        rest.sort_unstable();
        rest
    }

    fn convert<T>(
        &mut self,
        name: &str,
        convert: impl FnOnce(&str, Value) -> Result<T, ApiError>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        convert(&self.path(name), value).map(Some)
    }
}

/// `value` as a string.
pub(crate) fn as_text(path: &str, value: Value) -> Result<String, ApiError> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(wrong_type(path, "a string", &other)),
    }
}

/// `value` as a list.
pub(crate) fn as_list(path: &str, value: Value) -> Result<Vec<Value>, ApiError> {
    match value {
        Value::Array(items) => Ok(items),
        other => Err(wrong_type(path, "a list", &other)),
    }
}

/// `value` as an integer: `5` and `5.0` are, `5.5` and `"5"` are not.
pub(crate) fn as_integer(path: &str, value: &Value, range: &RangeInclusive<i64>) -> Result<i64, ApiError> {
    /// Up to here every integer has its own f64.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let Value::Number(number) = value else { return Err(wrong_type(path, "an integer", value)) };
    let integer = match (number.as_i64(), number.as_f64()) {
        (Some(integer), _) => Some(integer),
        #[expect(clippy::cast_possible_truncation, reason = "a whole number below 2^53")]
        (None, Some(float)) if float.fract() == 0.0 && float.abs() <= EXACT => Some(float as i64),
        (None, Some(float)) if float.fract() != 0.0 => return Err(wrong_type(path, "an integer", value)),
        _ => None,
    };
    match integer {
        Some(integer) if range.contains(&integer) => Ok(integer),
        _ if *range.end() == i64::MAX => Err(wrong_value(path, value, &format!("must be at least {}", range.start()))),
        _ => Err(wrong_value(path, value, &format!("must be from {} to {}", range.start(), range.end()))),
    }
}

/// The refusal of a value of the wrong JSON type.
pub(crate) fn wrong_type(path: &str, expected: &str, found: &Value) -> ApiError {
    let found = match found {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.is_f64() => "a number with a fraction",
        Value::Number(_) => "an integer",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    ApiError::new(Code::InvalidType, format!("{path} must be {expected}, not {found}")).at(path)
}

/// The refusal of a value outside its range; `expected` completes "NAME is VALUE, but it ...".
pub(crate) fn wrong_value(path: &str, found: &Value, expected: &str) -> ApiError {
    ApiError::new(Code::InvalidValue, format!("{path} is {}, but it {expected}", shortened(found))).at(path)
}

/// A value as JSON, cut after 60 characters.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(value: Value) -> Fields {
        match value {
            Value::Object(members) => Fields::new(members),
            _ => panic!("not an object"),
        }
    }

    #[test]
    fn integers_may_be_written_with_a_zero_fraction_and_nothing_else() {
        let mut f = fields(json!({"a": 5, "b": 5.0, "c": 5.5, "d": "5", "e": null, "f": -1, "g": true, "h": 1e300}));
        assert_eq!(f.integer("a", 0..=9).unwrap(), Some(5));
        assert_eq!(f.integer("b", 0..=9).unwrap(), Some(5));
        assert_eq!(f.integer("e", 0..=9).unwrap(), None);
        for (name, code) in [
            ("c", Code::InvalidType),
            ("d", Code::InvalidType),
            ("f", Code::InvalidValue),
            ("g", Code::InvalidType),
            ("h", Code::InvalidValue),
        ] {
            let error = f.integer(name, 0..=9).unwrap_err();
            assert_eq!(error.code(), code, "{name}");
            assert_eq!(error.body()["error"]["param"], name);
        }
    }

    #[test]
    fn the_largest_seed_is_exact() {
        let mut f = fields(json!({"a": i64::MAX, "b": u64::MAX}));
        assert_eq!(f.integer("a", -1..=i64::MAX).unwrap(), Some(i64::MAX));
        assert_eq!(f.integer("b", -1..=i64::MAX).unwrap_err().code(), Code::InvalidValue);
    }

    #[test]
    fn nested_members_carry_their_path() {
        let mut outer = fields(json!({"minnow": {"threshold": "x", "other": 1}}));
        let mut inner = outer.object("minnow").unwrap().unwrap();
        let error = inner.number("threshold", 0.0..=1.0).unwrap_err();
        assert_eq!(error.body()["error"]["param"], "minnow.threshold");
        assert_eq!(inner.rest(), ["minnow.other"]);
    }

    #[test]
    fn what_nobody_took_is_named_in_order() {
        let mut f = fields(json!({"z": 1, "known": 2, "a": 3, "gone": null}));
        f.take("known");
        assert_eq!(f.rest(), ["a", "z"]);
    }

    #[test]
    fn long_values_are_cut_in_messages() {
        let mut f = fields(json!({"a": "é".repeat(500)}));
        let message = f.integer("a", 0..=1).unwrap_err().body()["error"]["message"].as_str().unwrap().len();
        assert!(message < 200);
        let error = wrong_value("a", &json!("é".repeat(500)), "must be short");
        assert!(error.body()["error"]["message"].as_str().unwrap().chars().count() < 120);
    }
}
