//! Every field of a generating request: where it may stand, what happens to it, which values it may have.
//!
//! One list for the parser, for `/openapi.json` and, held equal by a test, for the table of `docs/api.md`. Fields whose
//! rule needs more than a range are read elsewhere in this module and stand here with their JSON type only.

use serde_json::{Value, json};

/// A field.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Field {
    /// Its name.
    pub name: &'static str,
    /// Requests that know it.
    pub on: On,
    /// What happens to it.
    pub fate: Fate,
    /// Values it may have, besides null.
    pub values: Values,
}

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    /// Chat and text completions.
    Both,
    /// Chat completions.
    Chat,
    /// Text completions.
    Text,
}

impl On {
    /// Whether a field that stands `self` belongs to requests of the kind `other`.
    pub(crate) fn covers(self, other: Self) -> bool {
        self == Self::Both || self == other
    }
}

/// What happens to a field.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fate {
    /// It does what it says.
    Honoured,
    /// Any value is accepted, and nothing changes.
    NoEffect,
    /// It is accepted as long as it asks for nothing. `binds`: it would change what the answer has to be, so that it cannot
    /// be ignored.
    Neutral {
        /// The value that asks for nothing.
        only: Neutral,
        /// Whether it may not be ignored either.
        binds: bool,
    },
}

/// Values under which a field that is not supported asks for nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Neutral {
    /// This number.
    Number(f64),
    /// Numbers up to this one.
    NotAbove(f64),
    /// An empty string, list or object.
    Empty,
    /// This boolean.
    Boolean(bool),
    /// False or 0.
    FalseOrZero,
    /// Nothing but null.
    Null,
    /// A list of which every entry is this word.
    Only(&'static str),
}

impl Neutral {
    /// Whether `value` asks for nothing.
    pub(crate) fn is_met_by(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Number(only), Value::Number(number)) => number.as_f64() == Some(only),
            (Self::NotAbove(most), Value::Number(number)) => number.as_f64().is_some_and(|number| number <= most),
            (Self::Empty, Value::String(text)) => text.is_empty(),
            (Self::Empty, Value::Array(items)) => items.is_empty(),
            (Self::Empty, Value::Object(members)) => members.is_empty(),
            (Self::Boolean(only), Value::Bool(flag)) => *flag == only,
            (Self::FalseOrZero, Value::Bool(flag)) => !flag,
            (Self::FalseOrZero, Value::Number(number)) => number.as_f64() == Some(0.0),
            (Self::Only(word), Value::Array(items)) => items.iter().all(|item| item == word),
            _ => false,
        }
    }

    /// Completes "only ... is accepted".
    pub(crate) fn describe(self) -> String {
        match self {
            Self::Number(only) => only.to_string(),
            Self::NotAbove(most) => format!("a number up to {most}"),
            Self::Empty => "an empty value".to_owned(),
            Self::Boolean(only) => only.to_string(),
            Self::FalseOrZero => "false or 0".to_owned(),
            Self::Null => "null".to_owned(),
            Self::Only(word) => format!("[\"{word}\"]"),
        }
    }

    fn schema(self) -> Value {
        match self {
            Self::Number(only) => json!({ "type": ["number", "null"], "enum": [only, null] }),
            Self::NotAbove(most) => json!({ "type": ["number", "null"], "maximum": most }),
            Self::Empty => json!({ "enum": ["", [], {}, null] }),
            Self::Boolean(only) => json!({ "type": ["boolean", "null"], "enum": [only, null] }),
            Self::FalseOrZero => json!({ "enum": [false, 0, null] }),
            Self::Null => json!({ "type": "null" }),
            Self::Only(word) => json!({ "type": ["array", "null"], "items": { "const": word } }),
        }
    }
}

/// JSON types and ranges.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Values {
    /// Anything.
    Any,
    /// True or false.
    Boolean,
    /// An integer from the first to the second.
    Integer(i64, i64),
    /// A number from the first to the second.
    Number(f64, f64),
    /// A string.
    Text,
    /// An object.
    Object,
    /// A list.
    List,
    /// A string or a list.
    TextOrList,
    /// A string or an object.
    TextOrObject,
}

impl Field {
    /// Its JSON schema.
    pub(crate) fn schema(&self) -> Value {
        if let Fate::Neutral { only, .. } = self.fate {
            return only.schema();
        }
        match self.values {
            Values::Any => json!({}),
            Values::Boolean => json!({ "type": ["boolean", "null"] }),
            Values::Integer(least, most) => json!({ "type": ["integer", "null"], "minimum": least, "maximum": most }),
            Values::Number(least, most) => json!({ "type": ["number", "null"], "minimum": least, "maximum": most }),
            Values::Text => json!({ "type": ["string", "null"] }),
            Values::Object => json!({ "type": ["object", "null"] }),
            Values::List => json!({ "type": ["array", "null"] }),
            Values::TextOrList => json!({ "type": ["string", "array", "null"] }),
            Values::TextOrObject => json!({ "type": ["string", "object", "null"] }),
        }
    }
}

/// Most steps that any option may ask for; the decoder's own bound.
pub(crate) const STEPS_MAX: i64 = 100_000;
/// Most answers to one prompt.
pub(crate) const CHOICES_MAX: i64 = 8;
/// Most seconds between pings.
pub(crate) const PING_SECONDS_MAX: i64 = 86_400;

const fn honoured(name: &'static str, on: On, values: Values) -> Field {
    Field { name, on, fate: Fate::Honoured, values }
}

const fn without_effect(name: &'static str) -> Field {
    Field { name, on: On::Both, fate: Fate::NoEffect, values: Values::Any }
}

const fn neutral(name: &'static str, on: On, only: Neutral) -> Field {
    Field { name, on, fate: Fate::Neutral { only, binds: false }, values: Values::Any }
}

const fn binding(name: &'static str, on: On, only: Neutral) -> Field {
    Field { name, on, fate: Fate::Neutral { only, binds: true }, values: Values::Any }
}

/// All of them.
pub(crate) const FIELDS: &[Field] = &[
    honoured("model", On::Both, Values::Text),
    honoured("messages", On::Chat, Values::List),
    honoured("prompt", On::Text, Values::TextOrList),
    honoured("max_completion_tokens", On::Both, Values::Integer(-1, i64::MAX)),
    honoured("max_tokens", On::Both, Values::Integer(-1, i64::MAX)),
    honoured("n_predict", On::Both, Values::Integer(-1, i64::MAX)),
    honoured("temperature", On::Both, Values::Number(0.0, 2.0)),
    honoured("top_p", On::Both, Values::Number(0.0, 1.0)),
    honoured("top_k", On::Both, Values::Integer(0, i64::MAX)),
    honoured("seed", On::Both, Values::Integer(-1, i64::MAX)),
    honoured("stop", On::Both, Values::TextOrList),
    honoured("stream", On::Both, Values::Boolean),
    honoured("stream_options", On::Both, Values::Object),
    honoured("n", On::Both, Values::Integer(1, CHOICES_MAX)),
    honoured("tools", On::Chat, Values::List),
    honoured("tool_choice", On::Chat, Values::TextOrObject),
    honoured("parallel_tool_calls", On::Chat, Values::Boolean),
    honoured("response_format", On::Chat, Values::Object),
    honoured("chat_template_kwargs", On::Chat, Values::Object),
    honoured("cache_prompt", On::Both, Values::Boolean),
    honoured("return_progress", On::Both, Values::Boolean),
    honoured("timings_per_token", On::Both, Values::Boolean),
    honoured("return_refinements", On::Both, Values::Boolean),
    honoured("sse_ping_interval", On::Both, Values::Integer(-1, PING_SECONDS_MAX)),
    honoured("preset", On::Both, Values::Text),
    honoured("threshold", On::Both, Values::Number(0.0, 1.0)),
    honoured("editing_threshold", On::Both, Values::Number(0.0, 1.0)),
    honoured("steps", On::Both, Values::Integer(1, STEPS_MAX)),
    honoured("max_steps_per_block", On::Both, Values::Integer(1, STEPS_MAX)),
    honoured("max_post_steps", On::Both, Values::Integer(0, STEPS_MAX)),
    honoured("minnow", On::Both, Values::Object),
    binding("logprobs", On::Chat, Neutral::Boolean(false)),
    binding("logprobs", On::Text, Neutral::FalseOrZero),
    binding("top_logprobs", On::Both, Neutral::Number(0.0)),
    binding("n_probs", On::Both, Neutral::Number(0.0)),
    binding("continue_final_message", On::Chat, Neutral::Boolean(false)),
    binding("add_generation_prompt", On::Chat, Neutral::Boolean(true)),
    binding("modalities", On::Both, Neutral::Only("text")),
    neutral("frequency_penalty", On::Both, Neutral::Number(0.0)),
    neutral("presence_penalty", On::Both, Neutral::Number(0.0)),
    neutral("min_p", On::Both, Neutral::Number(0.0)),
    neutral("dynatemp_range", On::Both, Neutral::Number(0.0)),
    neutral("xtc_probability", On::Both, Neutral::Number(0.0)),
    neutral("dry_multiplier", On::Both, Neutral::Number(0.0)),
    neutral("mirostat", On::Both, Neutral::Number(0.0)),
    neutral("repeat_penalty", On::Both, Neutral::Number(1.0)),
    neutral("typ_p", On::Both, Neutral::Number(1.0)),
    neutral("typical_p", On::Both, Neutral::Number(1.0)),
    neutral("top_n_sigma", On::Both, Neutral::NotAbove(0.0)),
    binding("logit_bias", On::Both, Neutral::Empty),
    binding("grammar", On::Both, Neutral::Empty),
    binding("json_schema", On::Both, Neutral::Null),
    neutral("lora", On::Both, Neutral::Empty),
    neutral("echo", On::Both, Neutral::Boolean(false)),
    neutral("ignore_eos", On::Both, Neutral::Boolean(false)),
    neutral("functions", On::Both, Neutral::Null),
    neutral("function_call", On::Both, Neutral::Null),
    neutral("audio", On::Both, Neutral::Null),
    neutral("prediction", On::Both, Neutral::Null),
    neutral("web_search_options", On::Both, Neutral::Null),
    binding("suffix", On::Text, Neutral::Empty),
    binding("best_of", On::Text, Neutral::Number(1.0)),
    without_effect("user"),
    without_effect("metadata"),
    without_effect("store"),
    without_effect("service_tier"),
    without_effect("safety_identifier"),
    without_effect("prompt_cache_key"),
    without_effect("prompt_cache_retention"),
    without_effect("reasoning_effort"),
    without_effect("verbosity"),
    without_effect("reasoning_format"),
    without_effect("reasoning_control"),
    without_effect("thinking_budget_tokens"),
    without_effect("reasoning_budget_tokens"),
    without_effect("samplers"),
    without_effect("backend_sampling"),
    without_effect("repeat_last_n"),
    without_effect("dynatemp_exponent"),
    without_effect("xtc_threshold"),
    without_effect("dry_base"),
    without_effect("dry_allowed_length"),
    without_effect("dry_penalty_last_n"),
    without_effect("dry_sequence_breakers"),
    without_effect("mirostat_tau"),
    without_effect("mirostat_eta"),
    without_effect("min_keep"),
    without_effect("n_keep"),
    without_effect("id_slot"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_has_one_fate_for_each_kind_of_request() {
        for kind in [On::Chat, On::Text] {
            let names: Vec<&str> =
                FIELDS.iter().filter(|field| field.on.covers(kind)).map(|field| field.name).collect();
            let distinct: std::collections::HashSet<&str> = names.iter().copied().collect();
            assert_eq!(distinct.len(), names.len(), "{kind:?}");
        }
    }

    #[test]
    fn a_neutral_value_is_the_one_its_schema_allows() {
        for (only, met, missed) in [
            (Neutral::Number(1.0), json!(1), json!(1.1)),
            (Neutral::NotAbove(0.0), json!(-1), json!(0.5)),
            (Neutral::Empty, json!({}), json!({"a": 1})),
            (Neutral::Boolean(true), json!(true), json!(false)),
            (Neutral::FalseOrZero, json!(0), json!(true)),
            (Neutral::Null, json!(null), json!([])),
            (Neutral::Only("text"), json!(["text"]), json!(["audio"])),
        ] {
            // Null never gets as far as the rule: it means that the field was not given.
            assert!(met.is_null() || only.is_met_by(&met), "{only:?}");
            assert!(!only.is_met_by(&missed), "{only:?}");
            let schema = jsonschema::validator_for(&only.schema()).unwrap();
            assert!(schema.is_valid(&met) && !schema.is_valid(&missed) && schema.is_valid(&Value::Null), "{only:?}");
        }
    }
}
