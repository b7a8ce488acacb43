//! Outputs in a grammar: whatever the model says, every finished one is in it. The model here is a pure function that
//! gives random logits, with a liking for what closes things so that outputs end.

use std::sync::Arc;

use minnow_common::random::{keyed, unit_interval};
use minnow_formats::checkpoint::Checkpoint;
use minnowd::decoder::{Action, Algorithm, FinishReason, Generation, Options, SpecialIds, StepView};
use minnowd::demo;
use minnowd::grammar::{CallGrammar, CallStart, CallTool, Grammar, GrammarError, Grammars};
use minnowd::text::{Dialect, SpecialTokens, Token, Tokenizer};
use serde_json::{Value, json};

/// A vocabulary, and what turns grammars into languages over it.
struct Bench {
    tokenizer: Arc<Tokenizer>,
    special: SpecialTokens,
    vocab: usize,
    grammars: Grammars,
    /// Added to each id's random logit.
    liking: Vec<f32>,
}

impl Bench {
    fn new() -> Self {
        let checkpoint = Checkpoint::from_static(demo::NAME, demo::checkpoint()).unwrap();
        let assets = checkpoint.assets();
        let tokenizer = Arc::new(Tokenizer::from_json(&assets["tokenizer.json"]).unwrap());
        let generation_config = assets.get("generation_config.json").map(String::as_str);
        let special = SpecialTokens::resolve(checkpoint.config(), generation_config, &tokenizer).unwrap();
        let vocab = checkpoint.config().vocab_size;
        let grammars = Grammars::new(Arc::clone(&tokenizer), vocab, special.clone());
        let likes = |id: u32| match tokenizer.token(id) {
            _ if special.stop.contains(&id) => 9.0,
            Some(Token::Text(bytes)) if bytes.iter().all(|byte| b"\"}]:,{".contains(byte)) => 7.0,
            Some(Token::Text(bytes)) if bytes.iter().all(u8::is_ascii_digit) => 3.0,
            Some(Token::Text(_)) => 0.0,
            _ => -2.0,
        };
        let liking = (0..u32::try_from(vocab).unwrap()).map(likes).collect();
        Self { tokenizer, special, vocab, grammars, liking }
    }

    /// `[tokens, vocab]`: a function of the block and of the seed only.
    fn logits(&self, tokens: &[u32], seed: u64) -> Vec<f32> {
        let words: Vec<u64> = tokens.iter().map(|&token| u64::from(token)).collect();
        let state = keyed(seed, &words);
        let logit =
            |i: usize, v: usize| (unit_interval(keyed(state, &[i as u64, v as u64])) * 8.0) as f32 + self.liking[v];
        (0..tokens.len()).flat_map(|i| (0..self.vocab).map(move |v| logit(i, v))).collect()
    }

    /// Runs one output to its end.
    fn run(&self, grammar: &Grammar, options: Options, prompt: usize, seed: u64, max_new: usize) -> Output {
        let language = self.grammars.compile(grammar).unwrap();
        let special: SpecialIds = self.special.decoder_ids();
        let prompt: Vec<u32> = vec![5; prompt];
        let mut generation =
            Generation::new(&prompt, max_new, &self.special.stop, options, special).unwrap().within(language);
        let (mut forwards, mut forced) = (0, 0);
        loop {
            match generation.action() {
                Action::Prefill { tokens, .. } => {
                    let positions = tokens.len();
                    generation.prefilled(positions);
                }
                Action::Refine { tokens, needs_logits, .. } => {
                    assert!(needs_logits);
                    let values = self.logits(tokens, seed);
                    let mut uniforms = generation.uniforms(seed, 0);
                    let view = StepView::Logits { values: &values, vocab: self.vocab };
                    let refinement = generation.refined(&view, &mut uniforms).unwrap();
                    forwards += 1;
                    forced += refinement.record.determined;
                    // Giving way once changes nothing.
                    if forwards == 3 && refinement.finished.is_none() {
                        generation.rewind();
                    }
                    assert!(forwards < 20_000, "no end");
                }
                Action::Commit { .. } => generation.committed().unwrap(),
                Action::Finished(reason) => {
                    let tokens = generation.completion().to_vec();
                    let text = self.tokenizer.decode_with_specials(&tokens);
                    return Output { reason, tokens, text, forced };
                }
            }
        }
    }
}

struct Output {
    reason: FinishReason,
    tokens: Vec<u32>,
    text: String,
    forced: usize,
}

impl Output {
    /// The text without the end-of-turn token.
    fn text(&self) -> &str {
        self.text.trim_end_matches("<|role_end|>").trim_end_matches("<|endoftext|>")
    }
}

fn options(seed: u64) -> Options {
    let algorithm = [Algorithm::V20, Algorithm::V21, Algorithm::V22][(seed % 3) as usize];
    let mut options = Options::serving(algorithm);
    options.temperature = if seed.is_multiple_of(2) { 0.0 } else { 0.8 };
    options.threshold = [0.0, 0.05, 0.5, 1.0][(seed / 3 % 4) as usize];
    options.max_steps_per_block = if seed.is_multiple_of(5) { 3 } else { 1000 };
    options
}

/// 60 schemas of every kind that can be enforced.
pub(crate) fn schemas() -> Vec<Value> {
    let mut schemas = vec![
        json!(true),
        json!({"type": "object"}),
        json!({"type": "null"}),
        json!({"type": "boolean"}),
        json!({"type": "integer"}),
        json!({"type": "number"}),
        json!({"type": "string"}),
        json!({"type": "array"}),
        json!({"type": ["string", "null"]}),
        json!({"type": ["integer", "boolean"]}),
        json!({"const": 7}),
        json!({"const": "a \"quoted\" word"}),
        json!({"const": {"a": [1, {"b": null}]}}),
        json!({"enum": ["red", "green", "blue"]}),
        json!({"enum": [1, "1", true, null, [1]]}),
        json!({"type": "integer", "minimum": 0}),
        json!({"type": "integer", "minimum": -5, "maximum": 5}),
        json!({"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 12}),
        json!({"type": "integer", "minimum": 100, "maximum": 99999}),
        json!({"type": "number", "minimum": 0, "maximum": 1}),
        json!({"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.5}),
        json!({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000}),
        json!({"type": "string", "minLength": 3}),
        json!({"type": "string", "maxLength": 4}),
        json!({"type": "string", "minLength": 2, "maxLength": 6}),
        json!({"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"}),
        json!({"type": "string", "pattern": "^(ab|cd)+$"}),
        json!({"type": "string", "pattern": "x"}),
        json!({"type": "string", "format": "date"}),
        json!({"type": "string", "format": "uuid"}),
        json!({"type": "string", "format": "ipv4"}),
        json!({"type": "array", "items": {"type": "integer"}}),
        json!({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}),
        json!({"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 3, "maxItems": 3}),
        json!({"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": false, "minItems": 2}),
        json!({"type": "array", "maxItems": 0}),
        json!({"type": "array", "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2}, "maxItems": 3}),
        json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}),
        json!({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "required": ["c"], "additionalProperties": false}),
        json!({"type": "object", "properties": {}, "additionalProperties": {"type": "boolean"}}),
        json!({"type": "object", "patternProperties": {"^n[0-9]$": {"type": "integer"}}, "additionalProperties": false}),
        json!({"type": "object", "required": ["x", "y"]}),
        json!({"type": "object", "properties": {"o": {"type": "object", "properties": {"i": {"type": "integer"}},
            "required": ["i"], "additionalProperties": false}}, "required": ["o"], "additionalProperties": false}),
        json!({"anyOf": [{"type": "string", "maxLength": 5}, {"type": "integer"}]}),
        json!({"anyOf": [{"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"]}, {"type": "null"}]}),
        json!({"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]}),
        json!({"oneOf": [{"const": "a"}, {"const": "b"}, {"type": "integer", "maximum": 3}]}),
        json!({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}),
        json!({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}]}),
        json!({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer", "minimum": 0}}}),
        json!({"$defs": {"tree": {"type": "object", "properties": {"v": {"type": "integer"},
            "l": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}}, "required": ["v", "l"],
            "additionalProperties": false}}, "$ref": "#/$defs/tree"}),
        json!({"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["next"], "additionalProperties": false}),
        json!({"definitions": {"c": {"enum": ["x", "y"]}}, "type": "array", "items": {"$ref": "#/definitions/c"},
            "minItems": 1, "maxItems": 5}),
        json!({"type": "object", "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 150}, "email": {"type": "string", "format": "email"}},
            "required": ["name", "age"], "additionalProperties": false, "title": "Person", "description": "who"}),
    ];
    for bounds in 0..5 {
        schemas.push(json!({"type": "object", "additionalProperties": false, "required": ["id", "tags"],
            "properties": {"id": {"type": "integer", "minimum": bounds, "maximum": 10 * bounds + 1},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 1 + bounds}, "maxItems": bounds}}}));
    }
    schemas
}

#[test]
fn every_finished_output_fits_its_schema_whatever_the_model_says() {
    let bench = Bench::new();
    let schemas = schemas();
    assert_eq!(schemas.len(), 60);
    let rounds = if std::env::var_os("MINNOW_LONG").is_some() { 17 } else { 3 };
    let (mut finished, mut all) = (0, 0);
    for (index, schema) in schemas.iter().enumerate() {
        let validator = jsonschema::options().should_validate_formats(true).build(schema).unwrap();
        let grammar = Grammar::Json(schema.clone());
        for round in 0..rounds {
            let seed = 1000 * round + index as u64;
            let prompt = (seed as usize * 7) % 75;
            let output = bench.run(&grammar, options(seed), prompt, seed, 320);
            all += 1;
            if output.reason == FinishReason::Length {
                continue;
            }
            finished += 1;
            let value: Value = serde_json::from_str(output.text())
                .unwrap_or_else(|error| panic!("{schema} seed {seed}: {error}: {}", output.text));
            assert!(validator.is_valid(&value), "{schema} seed {seed}: {value}");
        }
    }
    assert!(finished * 10 > all * 8, "only {finished} of {all} outputs ended by themselves");
}

#[test]
fn an_output_in_a_grammar_depends_on_its_request_only() {
    let bench = Bench::new();
    for (index, schema) in schemas().iter().enumerate().step_by(9) {
        let (grammar, seed) = (Grammar::Json(schema.clone()), index as u64);
        let run = || bench.run(&grammar, options(seed), 40, seed, 200).tokens;
        assert_eq!(run(), run(), "{schema}");
    }
}

#[test]
fn regular_expressions_and_lark_are_followed() {
    let bench = Bench::new();
    for seed in 0..20 {
        let code = bench.run(&Grammar::Regex("[A-Z]{3}-[0-9]{2,5}".to_owned()), options(seed), 3, seed, 200);
        let (letters, digits) = code.text().split_once('-').unwrap();
        assert!(letters.len() == 3 && letters.bytes().all(|byte| byte.is_ascii_uppercase()), "{}", code.text);
        assert!((2..=5).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit()), "{}", code.text);

        let lark = "start: \"yes\" | \"no\" \" because \" /[a-z]{1,9}/".to_owned();
        let answer = bench.run(&Grammar::Lark(lark), options(seed), 0, seed, 200);
        let text = answer.text();
        assert!(text == "yes" || text.strip_prefix("no because ").is_some_and(|word| !word.is_empty()), "{text}");
    }
    let only = bench.run(&Grammar::Regex("the only answer there is".to_owned()), options(0), 0, 0, 200);
    assert_eq!(only.text(), "the only answer there is");
    assert!(only.forced > 0, "what is certain needs no model");
}

#[test]
fn calls_are_well_formed_in_both_dialects() {
    let bench = Bench::new();
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"], "additionalProperties": false});
    let tool = |name: &str| CallTool { name: name.to_owned(), parameters: Some(parameters.clone()) };
    let validator = jsonschema::validator_for(&parameters).unwrap();
    for dialect in [Dialect::Sections, Dialect::Tagged] {
        let (before, after) = match dialect {
            Dialect::Sections => ("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
            Dialect::Tagged => ("\"arguments\": ", "}\n</tool_call>"),
        };
        let mut counts = [0; 2];
        for (index, start) in [
            CallStart::Begun { has_name: false },
            CallStart::Begun { has_name: true },
            CallStart::Free,
            CallStart::FreeJson(json!({"type": "integer"})),
        ]
        .into_iter()
        .enumerate()
        {
            let has_name = start == CallStart::Begun { has_name: true };
            let tools = if has_name { vec![tool("weather")] } else { vec![tool("weather"), tool("get-time")] };
            for seed in 0..10 {
                let calls_max = [Some(2), Some(1)][(seed % 2) as usize];
                let grammar =
                    Grammar::Calls(CallGrammar { dialect, tools: tools.clone(), calls_max, start: start.clone() });
                let output = bench.run(&grammar, options(seed), 2, seed + 100 * index as u64, 400);
                if output.reason == FinishReason::Length {
                    continue;
                }
                let whole = if has_name { format!("{before}{}", output.text) } else { output.text.clone() };
                let pieces: Vec<&str> = whole.split(before).skip(1).collect();
                counts[usize::from(pieces.is_empty())] += 1;
                for piece in &pieces {
                    let (arguments, _) = piece.split_once(after).unwrap_or_else(|| panic!("{dialect:?} {whole}"));
                    let value: Value = serde_json::from_str(arguments).unwrap_or_else(|_| panic!("{whole}"));
                    assert!(validator.is_valid(&value), "{whole}");
                }
                match &start {
                    CallStart::Begun { .. } => assert!(!pieces.is_empty(), "{whole}"),
                    CallStart::FreeJson(_) if pieces.is_empty() => {
                        assert!(serde_json::from_str::<i64>(output.text()).is_ok(), "{whole}");
                    }
                    _ => {}
                }
                assert!(pieces.len() <= calls_max.unwrap_or(0));
            }
        }
        assert!(counts[0] > 10, "{dialect:?}: {counts:?}");
    }
}

#[test]
fn what_is_no_grammar_is_refused() {
    let bench = Bench::new();
    let refused = |grammar: Grammar| bench.grammars.compile(&grammar).unwrap_err();
    assert_eq!(
        refused(Grammar::Json(json!({"properties": {"a": {"not": {}}}}))),
        GrammarError::Keyword { path: "properties.a.not".to_owned() }
    );
    for grammar in [
        Grammar::Json(json!({"type": "nothing"})),
        Grammar::Json(json!({"type": "string", "format": "no-such-format"})),
        Grammar::Json(json!({"allOf": [{"type": "string"}, {"type": "integer"}]})),
        Grammar::Json(json!({"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 4}]})),
        Grammar::Json(json!({"$ref": "http://127.0.0.1:1/x"})),
        Grammar::Regex("(".to_owned()),
        Grammar::Lark("start: nowhere".to_owned()),
        Grammar::Lark(String::new()),
    ] {
        assert!(matches!(refused(grammar), GrammarError::Unusable(message) if !message.is_empty()));
    }
}
