//! The fields that every generating route shares: limits, sampling, diffusion, streaming, and those that are accepted
//! without effect ([`table`](super::table)).

use std::time::Duration;

use serde_json::{Value, json};

use super::form::Form;
use super::table::{CHOICES_MAX, Fate, On, PING_SECONDS_MAX, STEPS_MAX};
use crate::cache::Access;
use crate::config::Unsupported;
use crate::decoder::{Options, Preset};
use crate::grammar::Grammar;
use crate::http::error::{ApiError, Code};
use crate::http::fields::{Fields, as_text, wrong_type, wrong_value};

/// Stop strings of a request, and bytes of each.
const STOPS_MAX: usize = 16;
const STOP_BYTES_MAX: usize = 1024;
/// Seconds between pings of a silent stream, unless the request says otherwise.
const PING_SECONDS: i64 = 30;

/// What a request says about generating.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Settings {
    /// How many answers; at least one.
    pub choices: usize,
    /// Output limit; `None` leaves it to the server's default.
    pub limit: Option<Limit>,
    /// Decoding options, the server's where the request says nothing.
    pub options: Options,
    /// The grammar that the client wants the answer in.
    pub form: Option<Form>,
    /// `None` leaves it to the server.
    pub seed: Option<u64>,
    /// Whether known blocks are reused, and new ones offered to others.
    pub cache: Access,
    /// Strings that end the output.
    pub stops: Vec<String>,
    /// Events instead of one answer.
    pub stream: bool,
    /// What a stream shows besides text.
    pub extras: Extras,
    /// Fields that ask for something that does not exist here, where that is ignored.
    pub ignored: Vec<String>,
}

/// An output limit that the request gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// What the context leaves.
    Room,
    /// At most this many tokens.
    Tokens(usize),
}

/// What a stream shows besides text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extras {
    /// A last chunk with `usage`.
    pub usage: bool,
    /// Chunks about reading the prompt.
    pub progress: bool,
    /// `timings` on every chunk, and a chunk for each refinement step.
    pub timings: bool,
    /// A chunk for each refinement step with every position of the block.
    pub refinements: bool,
    /// Silence after which a comment is sent.
    pub ping: Option<Duration>,
}

impl Settings {
    /// Takes the shared fields that a kind of request knows out; `defaults` are the server's options.
    pub(crate) fn read(
        fields: &mut Fields,
        kind: On,
        defaults: &Options,
        unsupported: Unsupported,
    ) -> Result<Self, ApiError> {
        let mut known = fields.part(kind.fields().map(|field| field.name));
        let settings = Self::read_known(&mut known, kind, defaults, unsupported)?;
        fields.join(known);
        Ok(settings)
    }

    fn read_known(
        fields: &mut Fields,
        kind: On,
        defaults: &Options,
        unsupported: Unsupported,
    ) -> Result<Self, ApiError> {
        let ignored = take_inert(fields, kind, unsupported)?;
        let (options, form) = read_options(fields, kind, defaults)?;
        Ok(Self {
            choices: match fields.integer("n", 1..=i64::MAX)? {
                None => 1,
                Some(choices @ ..=CHOICES_MAX) => usize::try_from(choices).unwrap_or(1),
                Some(choices) => {
                    let message = format!("n is {choices}, but at most {CHOICES_MAX} are given");
                    return Err(ApiError::new(Code::UnsupportedValue, message).at("n"));
                }
            },
            cache: match fields.boolean("cache_prompt")? {
                Some(false) => Access::Private,
                Some(true) | None => Access::Shared,
            },
            limit: read_limit(fields, kind)?,
            options,
            form,
            #[expect(clippy::cast_sign_loss, reason = "only the negative value -1 passes, and it is filtered out")]
            seed: fields.integer("seed", -1..=i64::MAX)?.filter(|&seed| seed >= 0).map(|seed| seed as u64),
            stops: read_stops(fields, kind)?,
            stream: fields.boolean("stream")?.unwrap_or(false),
            extras: read_extras(fields)?,
            ignored,
        })
    }

    /// Whether events about prompt and steps are wanted.
    pub(crate) fn wants_progress(&self) -> bool {
        self.stream && (self.extras.progress || self.extras.timings)
    }

    /// Whether what each step does is wanted.
    pub(crate) fn is_watched(&self) -> bool {
        self.stream && self.extras.refinements
    }
}

/// The effective settings as answers report them.
pub(crate) fn describe(options: &Options, seed: Option<u64>, max_tokens: Option<usize>) -> Value {
    json!({
        "seed": seed.map_or(json!(-1), |seed| json!(seed)),
        "temperature": shortest(options.temperature),
        "top_k": options.top_k,
        "top_p": shortest(options.top_p),
        "max_tokens": max_tokens.map_or(json!(-1), |tokens| json!(tokens)),
        "algorithm": options.algorithm.to_string(),
        "threshold": shortest(options.threshold),
        "editing_threshold": shortest(options.editing_threshold),
        "max_post_steps": options.max_post_steps,
        "steps": options.steps,
        "max_steps_per_block": options.max_steps_per_block,
    })
}

/// The f64 that prints as `value` does: 0.6 and not 0.6000000238418579.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}

fn read_limit(fields: &mut Fields, kind: On) -> Result<Option<Limit>, ApiError> {
    let mut limit = None;
    // All are checked; the first one given counts.
    for name in kind.limits() {
        let given = fields.integer(name, kind.limit_min()..=i64::MAX)?;
        limit = limit.or(given);
    }
    Ok(limit.map(|tokens| usize::try_from(tokens).map_or(Limit::Room, Limit::Tokens)))
}

/// Decoding options, and the client's own grammar.
fn read_options(fields: &mut Fields, kind: On, defaults: &Options) -> Result<(Options, Option<Form>), ApiError> {
    let mut inner = fields.object("minnow")?;
    let named = inner.as_mut().map(read_preset).transpose()?.flatten();
    // A preset stands for thresholds, so thresholds beat it wherever either stands.
    let mut options = match read_preset(fields)?.or(named) {
        Some(preset) => defaults.with_preset(preset),
        None => *defaults,
    };
    let mut form = None;
    if let Some(mut inner) = inner {
        read_diffusion(&mut inner, &mut options)?;
        form = read_form(&mut inner)?;
        if let Some(path) = inner.rest().into_iter().next() {
            let message = format!("{path} is not known; minnow holds diffusion options, regex and grammar only");
            return Err(ApiError::new(Code::UnknownParameter, message).at(path));
        }
    }
    read_diffusion(fields, &mut options)?;
    if let Some(temperature) = fields.number("temperature", 0.0..=kind.temperature_max())? {
        /// Below this, sampling is greedy in all but name.
        const GREEDY_BELOW: f64 = 1e-3;
        options.temperature = if temperature < GREEDY_BELOW { 0.0 } else { temperature as f32 };
    }
    if let Some(top_p) = fields.number("top_p", 0.0..=1.0)? {
        options.top_p = top_p as f32;
    }
    if let Some(top_k) = fields.integer("top_k", 0..=i64::MAX)? {
        options.top_k = usize::try_from(top_k).unwrap_or(usize::MAX);
    }
    options.check().map_err(|error| ApiError::new(Code::InvalidValue, error.to_string()).at(error.field))?;
    Ok((options, form))
}

fn read_form(fields: &mut Fields) -> Result<Option<Form>, ApiError> {
    let path = fields.path("grammar");
    match (fields.text("regex")?, fields.text("grammar")?) {
        (Some(_), Some(_)) => {
            let message = format!("{path} and {} cannot hold together", fields.path("regex"));
            Err(ApiError::new(Code::UnsupportedParameter, message).at(path))
        }
        (Some(regex), None) => Ok(Some(Form::of_field(Grammar::Regex(regex), fields.path("regex")))),
        (None, Some(lark)) => Ok(Some(Form::of_field(Grammar::Lark(lark), path))),
        (None, None) => Ok(None),
    }
}

fn read_preset(fields: &mut Fields) -> Result<Option<Preset>, ApiError> {
    let Some(name) = fields.text("preset")? else { return Ok(None) };
    let refused = |_| wrong_value(&fields.path("preset"), &json!(name), "must be \"quality\" or \"speed\"");
    name.parse().map(Some).map_err(refused)
}

fn read_diffusion(fields: &mut Fields, options: &mut Options) -> Result<(), ApiError> {
    for (name, target) in [("threshold", &mut options.threshold), ("editing_threshold", &mut options.editing_threshold)]
    {
        if let Some(value) = fields.number(name, 0.0..=1.0)? {
            *target = value as f32;
        }
    }
    for (name, least, target) in [
        ("max_post_steps", 0, &mut options.max_post_steps),
        ("steps", 1, &mut options.steps),
        ("max_steps_per_block", 1, &mut options.max_steps_per_block),
    ] {
        if let Some(value) = fields.integer(name, least..=STEPS_MAX)? {
            *target = usize::try_from(value).unwrap_or(usize::MAX);
        }
    }
    Ok(())
}

fn read_stops(fields: &mut Fields, kind: On) -> Result<Vec<String>, ApiError> {
    let name = kind.stops();
    let stops = match fields.take(name) {
        None => return Ok(Vec::new()),
        Some(Value::String(stop)) if kind != On::Messages => vec![(name.to_owned(), stop)],
        Some(Value::Array(items)) if items.len() <= STOPS_MAX => {
            let named = items.into_iter().enumerate().map(|(index, item)| {
                let path = format!("{name}[{index}]");
                as_text(&path, item).map(|text| (path, text))
            });
            named.collect::<Result<_, _>>()?
        }
        Some(Value::Array(items)) => {
            let message = format!("{name} has {} strings, at most {STOPS_MAX} are allowed", items.len());
            return Err(ApiError::new(Code::InvalidValue, message).at(name));
        }
        Some(other) if kind == On::Messages => return Err(wrong_type(name, "a list of strings", &other)),
        Some(other) => return Err(wrong_type(name, "a string or a list of strings", &other)),
    };
    for (path, stop) in &stops {
        if !(1..=STOP_BYTES_MAX).contains(&stop.len()) {
            let message = format!("{path} has {} bytes, it must have 1 to {STOP_BYTES_MAX}", stop.len());
            return Err(ApiError::new(Code::InvalidValue, message).at(path));
        }
    }
    Ok(stops.into_iter().map(|(_, stop)| stop).collect())
}

fn read_extras(fields: &mut Fields) -> Result<Extras, ApiError> {
    let mut usage = false;
    if let Some(mut options) = fields.object("stream_options")? {
        usage = options.boolean("include_usage")?.unwrap_or(false);
    }
    let seconds = fields.integer("sse_ping_interval", -1..=PING_SECONDS_MAX)?.unwrap_or(PING_SECONDS);
    Ok(Extras {
        usage,
        progress: fields.boolean("return_progress")?.unwrap_or(false),
        timings: fields.boolean("timings_per_token")?.unwrap_or(false),
        refinements: fields.boolean("return_refinements")?.unwrap_or(false),
        ping: u64::try_from(seconds).ok().filter(|&seconds| seconds > 0).map(Duration::from_secs),
    })
}

/// Takes out what this kind of request accepts without effect. Gives the names of fields that are ignored although they
/// ask for something.
fn take_inert(fields: &mut Fields, kind: On, unsupported: Unsupported) -> Result<Vec<String>, ApiError> {
    let mut ignored = Vec::new();
    for field in kind.fields() {
        match field.fate {
            Fate::Honoured => {}
            Fate::NoEffect => {
                fields.take(field.name);
            }
            Fate::Neutral { only, binds } => match fields.take(field.name) {
                Some(value) if !only.is_met_by(&value) => {
                    if binds || unsupported == Unsupported::Refuse {
                        let (name, only) = (field.name, only.describe());
                        let message = format!("{name} is not supported: only {only} is accepted");
                        return Err(ApiError::new(Code::UnsupportedParameter, message).at(name));
                    }
                    ignored.push(field.name.to_owned());
                }
                _ => {}
            },
        }
    }
    Ok(ignored)
}

#[cfg(test)]
mod tests {
    use super::super::table::Values;
    use super::*;
    use crate::decoder::Algorithm;

    fn defaults() -> Options {
        Options::serving(Algorithm::V22)
    }

    fn read(value: Value) -> Result<(Settings, Vec<String>), ApiError> {
        read_as(On::Text, value)
    }

    fn read_as(kind: On, value: Value) -> Result<(Settings, Vec<String>), ApiError> {
        let Value::Object(members) = value else { panic!("not an object") };
        let mut fields = Fields::new(members);
        Settings::read(&mut fields, kind, &defaults(), Unsupported::Refuse).map(|settings| (settings, fields.rest()))
    }

    #[test]
    fn an_empty_request_gets_the_servers_defaults() {
        let (settings, rest) = read(json!({})).unwrap();
        assert_eq!(settings.options, defaults());
        assert_eq!((settings.limit, settings.seed, settings.stream), (None, None, false));
        assert_eq!(settings.extras.ping, Some(Duration::from_secs(30)));
        assert!(rest.is_empty());
    }

    #[test]
    fn the_first_limit_given_wins() {
        let limit = |value| read(value).unwrap().0.limit;
        assert_eq!(
            limit(json!({"max_tokens": 64, "max_completion_tokens": 3, "n_predict": 9})),
            Some(Limit::Tokens(3))
        );
        assert_eq!(limit(json!({"max_tokens": null, "n_predict": 0})), Some(Limit::Tokens(0)));
        assert_eq!(limit(json!({"max_tokens": -1})), Some(Limit::Room));
    }

    #[test]
    fn top_level_beats_the_minnow_object_which_beats_the_server() {
        let (settings, _) = read(json!({"minnow": {"threshold": 0.9, "max_post_steps": 2}, "threshold": 0.7})).unwrap();
        assert_eq!(settings.options.threshold, 0.7);
        assert_eq!(settings.options.max_post_steps, 2);
        assert_eq!(settings.options.steps, defaults().steps);
        assert_eq!(describe(&settings.options, Some(5), Some(8))["threshold"], json!(0.7));
    }

    #[test]
    fn a_preset_is_a_starting_point_that_thresholds_beat() {
        let thresholds = |value| {
            let options = read(value).unwrap().0.options;
            (options.threshold, options.editing_threshold)
        };
        let named =
            |preset| (defaults().with_preset(preset).threshold, defaults().with_preset(preset).editing_threshold);
        assert_ne!(named(Preset::Quality), named(Preset::Speed));
        assert_eq!(thresholds(json!({"preset": "quality"})), named(Preset::Quality));
        assert_eq!(thresholds(json!({"minnow": {"preset": "speed"}})), named(Preset::Speed));
        assert_eq!(thresholds(json!({"minnow": {"preset": "speed"}, "preset": "quality"})), named(Preset::Quality));
        let (_, editing) = named(Preset::Quality);
        assert_eq!(thresholds(json!({"minnow": {"threshold": 0.25}, "preset": "quality"})), (0.25, editing));
    }

    #[test]
    fn wrong_values_name_their_field() {
        for (value, param) in [
            (json!({"temperature": "hot"}), "temperature"),
            (json!({"temperature": 2.5}), "temperature"),
            (json!({"top_p": -1}), "top_p"),
            (json!({"top_k": 1.5}), "top_k"),
            (json!({"max_tokens": -5}), "max_tokens"),
            (json!({"max_tokens": 4, "max_completion_tokens": -2}), "max_completion_tokens"),
            (json!({"max_completion_tokens": 4, "max_tokens": "9"}), "max_tokens"),
            (json!({"seed": 1.5}), "seed"),
            (json!({"seed": -2}), "seed"),
            (json!({"stream": "yes"}), "stream"),
            (json!({"stream_options": 1}), "stream_options"),
            (json!({"stream_options": {"include_usage": 1}}), "stream_options.include_usage"),
            (json!({"n": 0}), "n"),
            (json!({"n": 9}), "n"),
            (json!({"stop": 5}), "stop"),
            (json!({"stop": ""}), "stop"),
            (json!({"stop": ["a", ""]}), "stop[1]"),
            (json!({"stop": [1]}), "stop[0]"),
            (json!({"stop": vec!["x"; 17]}), "stop"),
            (json!({"stop": "x".repeat(1025)}), "stop"),
            (json!({"minnow": 5}), "minnow"),
            (json!({"minnow": {"blocks": 5}}), "minnow.blocks"),
            (json!({"minnow": {"steps": 0}}), "minnow.steps"),
            (json!({"minnow": {"regex": 5}}), "minnow.regex"),
            (json!({"minnow": {"regex": "a", "grammar": "start: \"a\""}}), "minnow.grammar"),
            (json!({"steps": 0.5}), "steps"),
            (json!({"preset": "best"}), "preset"),
            (json!({"preset": 1}), "preset"),
            (json!({"minnow": {"preset": "best"}}), "minnow.preset"),
            (json!({"threshold": 1.5}), "threshold"),
            (json!({"cache_prompt": "no"}), "cache_prompt"),
            (json!({"return_progress": 1}), "return_progress"),
            (json!({"logit_bias": {"5": 10}}), "logit_bias"),
            (json!({"grammar": "root ::= x"}), "grammar"),
            (json!({"frequency_penalty": 0.5}), "frequency_penalty"),
            (json!({"repeat_penalty": 1.1}), "repeat_penalty"),
            (json!({"top_n_sigma": 1}), "top_n_sigma"),
            (json!({"functions": []}), "functions"),
            (json!({"modalities": ["text", "audio"]}), "modalities"),
            (json!({"sse_ping_interval": -2}), "sse_ping_interval"),
        ] {
            let error = read(value.clone()).unwrap_err();
            assert_eq!(error.body()["error"]["param"], param, "{value}");
            assert_eq!(error.status(), 400);
        }
    }

    #[test]
    fn ranges_are_those_of_the_table() {
        let mut read_here = 0;
        let kinds = [On::Text, On::Responses, On::Messages];
        let all = kinds.into_iter().flat_map(|kind| kind.fields().map(move |field| (kind, field)));
        for (kind, field) in all.filter(|(_, field)| field.fate == Fate::Honoured && field.name != "n") {
            let (fine, wrong) = match field.values {
                Values::Boolean => (vec![json!(true), json!(false)], vec![json!(1), json!("true")]),
                Values::Integer(least, most) => {
                    let above = most.checked_add(1).map(|above| json!(above));
                    let wrong = [json!(least - 1), json!("1"), json!(0.5)].into_iter().chain(above);
                    (vec![json!(least), json!(most)], wrong.collect())
                }
                Values::Number(least, most) => {
                    (vec![json!(least), json!(most)], vec![json!(least - 0.1), json!(most + 0.1), json!("1")])
                }
                _ => continue,
            };
            let read = |value| read_as(kind, json!({ field.name: value }));
            for value in fine {
                let (_, rest) = read(value).unwrap_or_else(|error| panic!("{}", error.body()));
                read_here += usize::from(rest.is_empty());
            }
            for value in wrong {
                match read(value) {
                    Err(error) => assert_eq!(error.body()["error"]["param"], field.name),
                    Ok((_, rest)) => assert_eq!(rest, [field.name], "read elsewhere, or not at all"),
                }
            }
        }
        assert!(read_here > 80, "{read_here}");
    }

    #[test]
    fn a_dialect_knows_its_own_fields_only() {
        let (settings, rest) = read_as(
            On::Messages,
            json!({"max_tokens": 3, "stop_sequences": ["x"], "top_k": 2, "stop": "y", "n": 2, "max_output_tokens": 4}),
        )
        .unwrap();
        assert_eq!(
            (settings.limit, settings.stops, settings.choices),
            (Some(Limit::Tokens(3)), vec!["x".to_owned()], 1)
        );
        assert_eq!(rest, ["max_output_tokens", "n", "stop"]);
        let (settings, rest) =
            read_as(On::Responses, json!({"max_tokens": 3, "max_output_tokens": 4, "top_k": 5})).unwrap();
        assert_eq!((settings.limit, settings.options.top_k), (Some(Limit::Tokens(4)), defaults().top_k));
        assert_eq!(rest, ["max_tokens", "top_k"]);
        for (kind, value, param) in [
            (On::Messages, json!({"temperature": 1.5}), "temperature"),
            (On::Messages, json!({"stop_sequences": "x"}), "stop_sequences"),
            (On::Messages, json!({"stop_sequences": ["x", ""]}), "stop_sequences[1]"),
            (On::Messages, json!({"mcp_servers": [{}]}), "mcp_servers"),
            (On::Responses, json!({"truncation": "auto"}), "truncation"),
            (On::Responses, json!({"previous_response_id": "resp_1"}), "previous_response_id"),
            (On::Responses, json!({"background": true}), "background"),
        ] {
            assert_eq!(read_as(kind, value.clone()).unwrap_err().body()["error"]["param"], param, "{value}");
        }
    }

    #[test]
    fn neutral_values_pass_and_unknown_fields_are_named() {
        let (_, rest) = read(json!({
            "n": 1, "frequency_penalty": 0, "repeat_penalty": 1.0, "logit_bias": {}, "grammar": "", "top_n_sigma": -1,
            "user": "u", "metadata": {"a": "b"}, "modalities": ["text"], "top_logprobs": 0, "frobnicate": 1,
        }))
        .unwrap();
        assert_eq!(rest, ["frobnicate"]);
    }

    #[test]
    fn unsupported_settings_can_be_ignored_but_not_those_that_bind_the_answer() {
        let ignore = |value: Value| {
            let Value::Object(members) = value else { panic!("not an object") };
            Settings::read(&mut Fields::new(members), On::Chat, &defaults(), Unsupported::Ignore)
                .map(|settings| settings.ignored)
        };
        assert_eq!(
            ignore(json!({"min_p": 0.1, "mirostat": 2, "echo": false})),
            Ok(vec!["min_p".to_owned(), "mirostat".to_owned()])
        );
        assert!(ignore(json!({"logit_bias": {"5": 1}})).is_err() && ignore(json!({"grammar": "x"})).is_err());
    }

    #[test]
    fn a_tiny_temperature_is_greedy() {
        assert_eq!(read(json!({"temperature": 1e-7})).unwrap().0.options.temperature, 0.0);
    }
}
