//! The decoder against the golden traces of `golden/model`: scripted blocks step by step, sampled rows, and the block
//! sequence of whole generations.

use minnow_common::random::{GOLDEN, mix64, unit_interval};
use minnow_tests::golden;
use minnowd::decoder::{
    Action, Algorithm, AntiLoop, BlockDecoder, Candidate, Candidates, CommitKind, Draw, FinishReason, Generation, Next,
    OnLimit, Options, SpecialIds, StepRecord, StepView, Uniforms, draw,
};
use safetensors::SafeTensors;
use serde_json::{Value, json};

#[test]
fn scripted_blocks_take_exactly_the_recorded_steps() {
    let cases = golden::json("golden/model/decode_scripted.json");
    let bytes = golden::bytes("golden/model/decode_scripted.safetensors");
    let logits = SafeTensors::deserialize(&bytes).unwrap();
    let special = special(&cases["special"]);
    let vocab = cases["vocab"].as_u64().unwrap() as usize;
    assert_eq!(cases["cases"].as_object().unwrap().len(), 79);

    for (name, case) in cases["cases"].as_object().unwrap() {
        let values = logits.tensor(name).map(|tensor| floats(tensor.data())).unwrap_or_default();
        let options = options(case["version"].as_str().unwrap(), &case["options"]);
        let mut decoder = BlockDecoder::new(ids(&case["tokens"]), options, special).unwrap();
        let mut uniforms = Sequential::new(case["seed"].as_u64().unwrap());
        let mut rows = values.chunks(8 * vocab);
        let mut records = Vec::new();
        let error = loop {
            match decoder.next() {
                Next::Forward { .. } => {
                    // Some recorded ranks differ in the ninth digit, so candidates, which are f32, would not do.
                    let values = rows.next().unwrap_or_else(|| panic!("{name}: more steps than recorded"));
                    records.push(decoder.step(&StepView::Logits { values, vocab }, &mut uniforms).unwrap());
                }
                Next::Done => break Value::Null,
                Next::NotConverged { masks, steps } => break json!(format!("{masks} masks after {steps} steps")),
            }
        };
        let expected = case["steps"].as_array().unwrap();
        for (step, (record, expected)) in records.iter().zip(expected).enumerate() {
            check_record(record, expected, &format!("{name}, step {step}"));
        }
        assert_eq!(records.len(), expected.len(), "{name}: steps");
        assert_eq!(decoder.steps(), case["num_steps"].as_u64().unwrap() as usize, "{name}: steps");
        assert_eq!(error, case["error"], "{name}: error");
        if error.is_null() {
            assert_eq!(decoder.tokens(), ids(&case["final"]), "{name}: final tokens");
        }
        // Reading a decimal f64 may miss its last bit.
        let recorded = case["uniforms"].as_array().unwrap().iter().map(|u| u.as_f64().unwrap());
        assert_eq!(uniforms.drawn.len(), recorded.len(), "{name}: random numbers used");
        assert!(uniforms.drawn.iter().zip(recorded).all(|(drawn, u)| (drawn - u).abs() < 1e-15), "{name}");
    }
}

#[test]
fn sampled_rows_give_the_recorded_tokens_and_confidences() {
    let golden_rows = golden::json("golden/model/sampling.json");
    let bytes = golden::bytes("golden/model/sampling.safetensors");
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let (_, rows) = tensors.tensors().into_iter().next().unwrap();
    let vocab = *rows.shape().last().unwrap();
    let values = floats(rows.data());

    let mut sequence = Sequential::new(golden_rows["rng"]["seed"].as_u64().unwrap());
    for first in golden_rows["rng"]["first"].as_array().unwrap() {
        assert!((sequence.number() - first.as_f64().unwrap()).abs() < 1e-15);
    }
    for case in golden_rows["cases"].as_array().unwrap() {
        let row = &values[case["row"].as_u64().unwrap() as usize * vocab..][..vocab];
        let options = options("2.2", case);
        let u = case["uniforms"].get(0).map_or(0.0, |u| u.as_f64().unwrap());
        let drawn = draw(row, &options, &ids(&case["banned"]), u);
        assert_eq!(u64::from(drawn.token), case["token"].as_u64().unwrap(), "{case}");
        // Options are f32, so temperature and top-p differ from the recorded f64 by up to 3e-8 of their value.
        assert!((drawn.confidence - case["confidence"].as_f64().unwrap()).abs() < 1e-6, "{case}: {drawn:?}");
    }
}

#[test]
fn whole_generations_take_the_recorded_blocks_commits_and_ends() {
    let generations = golden::json("golden/model/generation.json");
    let special = special(&generations["special"]);
    let mut replayed = 0;
    for (name, case) in generations["cases"].as_object().unwrap() {
        let options = options(case["version"].as_str().unwrap(), &case["options"]);
        if options.temperature > 0.0 {
            // The recorded steps have no logits to sample from.
            continue;
        }
        // Before LLaDA2.2 these ids are ordinary tokens.
        let special = match options.algorithm {
            Algorithm::V22 => special,
            _ => SpecialIds { delete: None, split: None, ..special },
        };
        replayed += 1;
        let max_new = case["max_tokens"].as_u64().unwrap() as usize;
        let mut generation =
            Generation::new(&ids(&case["prompt"]), max_new, &ids(&case["eos"]), options, special).unwrap();
        let mut uniforms = Sequential::new(case["seed"].as_u64().unwrap());
        let mut blocks = case["blocks"].as_array().unwrap().iter();
        let mut block = &Value::Null;
        let mut step = 0;
        let reason = loop {
            match generation.action() {
                Action::Prefill { start, tokens } => {
                    let positions = tokens.len();
                    assert_eq!(start + positions, case["prefill_tokens"].as_u64().unwrap() as usize, "{name}");
                    generation.prefilled(positions);
                }
                Action::Refine { start, .. } => {
                    if step == 0 {
                        block = blocks.next().unwrap_or_else(|| panic!("{name}: more blocks than recorded"));
                        assert_eq!(json!(start), block["start"], "{name}");
                    }
                    let recorded = &block["trace"][step];
                    let view = recorded_candidates(recorded);
                    let refinement = generation.refined(&StepView::Candidates(&view), &mut uniforms).unwrap();
                    check_record(&refinement.record, recorded, &format!("{name}, block {start}, step {step}"));
                    step += 1;
                    if refinement.finished.is_some() {
                        assert_eq!(json!(refinement.block.forwards), block["steps"], "{name}, block {start}");
                        assert_eq!(json!(refinement.record.output), block["final"], "{name}, block {start}");
                        step = 0;
                    }
                }
                Action::Commit { kind, .. } => {
                    let expected = if block["commit"] == "reuse" { CommitKind::Reuse } else { CommitKind::Refresh };
                    assert_eq!(kind, expected, "{name}: {}", block["commit"]);
                    generation.committed().unwrap();
                }
                Action::Finished(reason) => break reason,
            }
        };
        let expected = if case["finish_reason"] == "stop" { FinishReason::Stop } else { FinishReason::Length };
        assert_eq!(reason, expected, "{name}");
        assert_eq!(generation.completion(), ids(&case["token_ids"]), "{name}");
        assert!(blocks.next().is_none(), "{name}: fewer blocks than recorded");
    }
    assert!(replayed >= 8);
}

/// The generator of the golden files; see their README.
struct Sequential {
    seed: u64,
    drawn: Vec<f64>,
}

impl Sequential {
    fn new(seed: u64) -> Self {
        Self { seed, drawn: Vec::new() }
    }

    fn number(&mut self) -> f64 {
        let index = self.drawn.len() as u64 + 1;
        self.drawn.push(unit_interval(mix64(self.seed.wrapping_add(index.wrapping_mul(GOLDEN)))));
        self.drawn[self.drawn.len() - 1]
    }
}

impl Uniforms for Sequential {
    fn uniform(&mut self, _: Draw) -> f64 {
        self.number()
    }
}

/// Compares what the traces record. Those of LLaDA2.0 and 2.1 have no structural edits and no final rounds.
fn check_record(record: &StepRecord, expected: &Value, place: &str) {
    assert_eq!(record.input, ids(&expected["input"]), "{place}: input");
    assert_eq!(json!(record.m2t), expected["m2t"], "{place}: m2t");
    assert_eq!(json!(record.t2t), expected["t2t"], "{place}: t2t");
    assert_eq!(record.output, ids(&expected["output"]), "{place}: output");
    if expected.get("written").is_some() {
        assert_eq!(json!(record.is_final), expected["final"], "{place}: final");
        assert_eq!(json!(record.escapes), expected["escapes"], "{place}: escapes");
        assert_eq!(record.written, ids(&expected["written"]), "{place}: written");
        assert_eq!(json!(record.deletes), expected["deletes"], "{place}: deletes");
        assert_eq!(json!(record.splits), expected["splits"], "{place}: splits");
    }
}

/// Candidates as a trace implies them: the recorded best, and behind it what was written instead, if anything was.
fn recorded_candidates(step: &Value) -> Vec<Candidates> {
    let sampled = ids(&step["sampled"]);
    let written = ids(step.get("written").unwrap_or(&step["output"]));
    let confidences = step["sampled_conf"].as_array().unwrap();
    let candidates = |position: usize| {
        let best = Candidate { token: sampled[position], confidence: confidences[position].as_f64().unwrap() as f32 };
        let next = |token| Candidate { token, confidence: 0.0 };
        Candidates([best, next(written[position]), next(0), next(1)])
    };
    (0..sampled.len()).map(candidates).collect()
}

fn options(version: &str, changes: &Value) -> Options {
    let mut options = Options::reference(version.parse::<Algorithm>().unwrap());
    let float = |name: &str| changes.get(name).map(|value| value.as_f64().unwrap() as f32);
    let count = |name: &str| changes.get(name).map(|value| value.as_u64().unwrap() as usize);
    macro_rules! take {
        ($read:ident: $($field:ident),*) => {
            $(if let Some(value) = $read(stringify!($field)) { options.$field = value; })*
        };
    }
    take!(float: threshold, editing_threshold, temperature, top_p);
    take!(count: steps, max_post_steps, max_steps_per_block, num_to_transfer, top_k);
    if changes["on_limit"] == "force" {
        options.on_limit = OnLimit::Force;
    }
    if changes["anti_loop"] == "lowest" {
        options.anti_loop = AntiLoop::Lowest;
    }
    options
}

fn special(value: &Value) -> SpecialIds {
    let id = |name: &str| value[name].as_u64().map(|id| id as u32);
    SpecialIds { mask: id("mask").unwrap(), delete: id("delete"), split: id("split") }
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}
