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
    pub on: &'static [On],
    /// What happens to it.
    pub fate: Fate,
    /// Values it may have, besides null.
    pub values: Values,
}

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Text,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`
    Messages,
}

impl On {
    /// The fields of such a request.
    pub(crate) fn fields(self) -> impl Iterator<Item = &'static Field> {
        FIELDS.iter().filter(move |field| field.on.contains(&self))
    }

    /// Fields that limit the output; the first one given counts.
    pub(crate) fn limits(self) -> &'static [&'static str] {
        match self {
            Self::Chat | Self::Text => &["max_completion_tokens", "max_tokens", "n_predict"],
            Self::Responses => &["max_output_tokens"],
            Self::Messages => &["max_tokens"],
        }
    }

    /// The least output limit. Where -1 may be written, it is what the context leaves.
    pub(crate) fn limit_min(self) -> i64 {
        if self == Self::Messages { 0 } else { -1 }
    }

    /// The field with strings that end the output.
    pub(crate) fn stops(self) -> &'static str {
        if self == Self::Messages { "stop_sequences" } else { "stop" }
    }

    /// The highest temperature.
    pub(crate) fn temperature_max(self) -> f64 {
        if self == Self::Messages { 1.0 } else { 2.0 }
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
    /// This word.
    Word(&'static str),
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
            (Self::Word(word), Value::String(text)) => text == word,
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
            Self::Word(word) => format!("\"{word}\""),
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
            Self::Word(word) => json!({ "enum": [word, null] }),
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

/// Kinds of requests that know a field: completions of both kinds, one kind, those with tools, all.
const BOTH: &[On] = &[On::Chat, On::Text];
const CHAT: &[On] = &[On::Chat];
const TEXT: &[On] = &[On::Text];
const RESPONSES: &[On] = &[On::Responses];
const MESSAGES: &[On] = &[On::Messages];
const BUT_MESSAGES: &[On] = &[On::Chat, On::Text, On::Responses];
const ALL: &[On] = &[On::Chat, On::Text, On::Responses, On::Messages];

const fn honoured(name: &'static str, on: &'static [On], values: Values) -> Field {
    Field { name, on, fate: Fate::Honoured, values }
}

const fn without_effect(name: &'static str, on: &'static [On]) -> Field {
    Field { name, on, fate: Fate::NoEffect, values: Values::Any }
}

const fn neutral(name: &'static str, on: &'static [On], only: Neutral) -> Field {
    Field { name, on, fate: Fate::Neutral { only, binds: false }, values: Values::Any }
}

const fn binding(name: &'static str, on: &'static [On], only: Neutral) -> Field {
    Field { name, on, fate: Fate::Neutral { only, binds: true }, values: Values::Any }
}

/// All of them.
const FIELDS: &[Field] = &[
    honoured("model", ALL, Values::Text),
    honoured("messages", &[On::Chat, On::Messages], Values::List),
    honoured("prompt", TEXT, Values::TextOrList),
    honoured("input", RESPONSES, Values::TextOrList),
    honoured("instructions", RESPONSES, Values::Text),
    honoured("system", MESSAGES, Values::TextOrList),
    honoured("max_output_tokens", RESPONSES, Values::Integer(-1, i64::MAX)),
    honoured("max_tokens", MESSAGES, Values::Integer(0, i64::MAX)),
    honoured("max_completion_tokens", BOTH, Values::Integer(-1, i64::MAX)),
    honoured("max_tokens", BOTH, Values::Integer(-1, i64::MAX)),
    honoured("n_predict", BOTH, Values::Integer(-1, i64::MAX)),
    honoured("temperature", BUT_MESSAGES, Values::Number(0.0, 2.0)),
    honoured("temperature", MESSAGES, Values::Number(0.0, 1.0)),
    honoured("top_p", ALL, Values::Number(0.0, 1.0)),
    honoured("top_k", &[On::Chat, On::Text, On::Messages], Values::Integer(0, i64::MAX)),
    honoured("seed", ALL, Values::Integer(-1, i64::MAX)),
    honoured("stop", BUT_MESSAGES, Values::TextOrList),
    honoured("stop_sequences", MESSAGES, Values::List),
    honoured("stream", ALL, Values::Boolean),
    honoured("stream_options", BOTH, Values::Object),
    honoured("n", BOTH, Values::Integer(1, CHOICES_MAX)),
    honoured("tools", &[On::Chat, On::Responses, On::Messages], Values::List),
    honoured("tool_choice", &[On::Chat, On::Responses], Values::TextOrObject),
    honoured("tool_choice", MESSAGES, Values::Object),
    honoured("parallel_tool_calls", &[On::Chat, On::Responses], Values::Boolean),
    honoured("response_format", CHAT, Values::Object),
    honoured("text", RESPONSES, Values::Object),
    honoured("metadata", RESPONSES, Values::Object),
    honoured("user", RESPONSES, Values::Text),
    honoured("chat_template_kwargs", CHAT, Values::Object),
    honoured("cache_prompt", ALL, Values::Boolean),
    honoured("return_progress", BUT_MESSAGES, Values::Boolean),
    honoured("timings_per_token", BOTH, Values::Boolean),
    honoured("return_refinements", BOTH, Values::Boolean),
    honoured("sse_ping_interval", ALL, Values::Integer(-1, PING_SECONDS_MAX)),
    honoured("preset", ALL, Values::Text),
    honoured("threshold", ALL, Values::Number(0.0, 1.0)),
    honoured("editing_threshold", ALL, Values::Number(0.0, 1.0)),
    honoured("steps", ALL, Values::Integer(1, STEPS_MAX)),
    honoured("max_steps_per_block", ALL, Values::Integer(1, STEPS_MAX)),
    honoured("max_post_steps", ALL, Values::Integer(0, STEPS_MAX)),
    honoured("minnow", ALL, Values::Object),
    binding("logprobs", CHAT, Neutral::Boolean(false)),
    binding("logprobs", TEXT, Neutral::FalseOrZero),
    binding("top_logprobs", BUT_MESSAGES, Neutral::Number(0.0)),
    binding("n_probs", BOTH, Neutral::Number(0.0)),
    binding("continue_final_message", CHAT, Neutral::Boolean(false)),
    binding("add_generation_prompt", CHAT, Neutral::Boolean(true)),
    binding("modalities", BOTH, Neutral::Only("text")),
    binding("previous_response_id", RESPONSES, Neutral::Null),
    binding("conversation", RESPONSES, Neutral::Null),
    binding("background", RESPONSES, Neutral::Boolean(false)),
    binding("prompt", RESPONSES, Neutral::Null),
    binding("max_tool_calls", RESPONSES, Neutral::Null),
    binding("truncation", RESPONSES, Neutral::Word("disabled")),
    binding("output_format", MESSAGES, Neutral::Null),
    binding("mcp_servers", MESSAGES, Neutral::Empty),
    binding("container", MESSAGES, Neutral::Null),
    neutral("frequency_penalty", BOTH, Neutral::Number(0.0)),
    neutral("presence_penalty", BOTH, Neutral::Number(0.0)),
    neutral("min_p", BOTH, Neutral::Number(0.0)),
    neutral("dynatemp_range", BOTH, Neutral::Number(0.0)),
    neutral("xtc_probability", BOTH, Neutral::Number(0.0)),
    neutral("dry_multiplier", BOTH, Neutral::Number(0.0)),
    neutral("mirostat", BOTH, Neutral::Number(0.0)),
    neutral("repeat_penalty", BOTH, Neutral::Number(1.0)),
    neutral("typ_p", BOTH, Neutral::Number(1.0)),
    neutral("typical_p", BOTH, Neutral::Number(1.0)),
    neutral("top_n_sigma", BOTH, Neutral::NotAbove(0.0)),
    binding("logit_bias", BOTH, Neutral::Empty),
    binding("grammar", BOTH, Neutral::Empty),
    binding("json_schema", BOTH, Neutral::Null),
    neutral("lora", BOTH, Neutral::Empty),
    neutral("echo", BOTH, Neutral::Boolean(false)),
    neutral("ignore_eos", BOTH, Neutral::Boolean(false)),
    neutral("functions", BOTH, Neutral::Null),
    neutral("function_call", BOTH, Neutral::Null),
    neutral("audio", BOTH, Neutral::Null),
    neutral("prediction", BOTH, Neutral::Null),
    neutral("web_search_options", BOTH, Neutral::Null),
    binding("suffix", TEXT, Neutral::Empty),
    binding("best_of", TEXT, Neutral::Number(1.0)),
    without_effect("user", BOTH),
    without_effect("metadata", &[On::Chat, On::Text, On::Messages]),
    without_effect("include", RESPONSES),
    without_effect("reasoning", RESPONSES),
    without_effect("stream_options", RESPONSES),
    without_effect("output_config", MESSAGES),
    without_effect("thinking", MESSAGES),
    without_effect("cache_control", MESSAGES),
    without_effect("store", BUT_MESSAGES),
    without_effect("service_tier", BUT_MESSAGES),
    without_effect("safety_identifier", BUT_MESSAGES),
    without_effect("prompt_cache_key", BUT_MESSAGES),
    without_effect("prompt_cache_retention", BUT_MESSAGES),
    without_effect("reasoning_effort", BOTH),
    without_effect("verbosity", BOTH),
    without_effect("reasoning_format", BOTH),
    without_effect("reasoning_control", BOTH),
    without_effect("thinking_budget_tokens", BOTH),
    without_effect("reasoning_budget_tokens", BOTH),
    without_effect("samplers", BOTH),
    without_effect("backend_sampling", BOTH),
    without_effect("repeat_last_n", BOTH),
    without_effect("dynatemp_exponent", BOTH),
    without_effect("xtc_threshold", BOTH),
    without_effect("dry_base", BOTH),
    without_effect("dry_allowed_length", BOTH),
    without_effect("dry_penalty_last_n", BOTH),
    without_effect("dry_sequence_breakers", BOTH),
    without_effect("mirostat_tau", BOTH),
    without_effect("mirostat_eta", BOTH),
    without_effect("min_keep", BOTH),
    without_effect("n_keep", BOTH),
    without_effect("id_slot", BOTH),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_has_one_fate_for_each_kind_of_request() {
        for kind in [On::Chat, On::Text, On::Responses, On::Messages] {
            let names: Vec<&str> = kind.fields().map(|field| field.name).collect();
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
            (Neutral::Word("disabled"), json!("disabled"), json!("auto")),
        ] {
            // Null never gets as far as the rule: it means that the field was not given.
            assert!(met.is_null() || only.is_met_by(&met), "{only:?}");
            assert!(!only.is_met_by(&missed), "{only:?}");
            let schema = jsonschema::validator_for(&only.schema()).unwrap();
            assert!(schema.is_valid(&met) && !schema.is_valid(&missed) && schema.is_valid(&Value::Null), "{only:?}");
        }
    }
}
