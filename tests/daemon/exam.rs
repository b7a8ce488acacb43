//! The held-out exam of the trained tiny model, taken by the real programs.
//!
//! The expected results were measured with another implementation; its README lists them per task. All of these need
//! the BF16 original (`MINNOW_TINY_DIR`), except for those that use the embedded model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use minnow_tests::{golden, program};
use serde_json::Value;

/// Exact match at threshold 0.5 in percent, by task, rounded as in the model's README.
const EXACT_MATCH: [(&str, u64); 35] = [
    ("add", 100),
    ("sub", 93),
    ("mul", 100),
    ("compare", 100),
    ("sort_words", 92),
    ("sort_numbers", 92),
    ("reverse_words", 100),
    ("reverse_letters", 100),
    ("count_letters", 60),
    ("spell", 93),
    ("capital", 100),
    ("capital_inverse", 100),
    ("continent", 100),
    ("currency", 100),
    ("language", 100),
    ("science", 42),
    ("opposite", 100),
    ("date", 57),
    ("units", 100),
    ("copy", 100),
    ("json_format", 100),
    ("json_read", 100),
    ("sequence", 100),
    ("case", 88),
    ("list_ops", 70),
    ("define", 100),
    ("tool_call", 100),
    ("tool_call_xml", 100),
    ("tools_unused", 100),
    ("tool_result", 100),
    ("multi_turn", 100),
    ("lookup", 0),
    ("long_lookup", 0),
    ("long_chat", 83),
    ("smalltalk", 100),
];

/// Points by which a quantized model's score may differ from the original's.
const POINTS_MAX: f64 = 2.0;

fn eval(args: &[&str]) -> Value {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let data = golden::unpack_into("golden/tiny/eval.jsonl", folder.path());
    let mut all = vec!["eval", "--json", "--data", data.to_str().expect("a UTF-8 path")];
    all.extend(args);
    let output = program::minnowd(&all);
    assert!(output.status.success(), "minnowd {all:?}: {}", program::stderr(&output));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// Converts the tiny model with the given options.
fn converted(tiny: &Path, folder: &Path, experts: &str) -> PathBuf {
    let target = folder.join(format!("tiny-{experts}.mnw"));
    let (source, target_text) = (tiny.to_str().expect("UTF-8"), target.to_str().expect("UTF-8"));
    let output = program::mnwtool(&["convert", source, target_text, "--experts", experts]);
    assert!(output.status.success(), "{}", program::stderr(&output));
    target
}

#[test]
fn the_reference_reproduces_the_exam_answer_by_answer() {
    let Some(tiny) = golden::tiny_dir() else { return };
    let result = eval(&["--model", tiny.to_str().expect("UTF-8"), "--device", "reference"]);

    let percent = |score: &Value| {
        let (right, asked) = (score["right"].as_f64().unwrap_or(-1.0), score["questions"].as_f64().unwrap_or(1.0));
        (100.0 * right / asked).round() as u64
    };
    let scores: BTreeMap<&str, u64> =
        EXACT_MATCH.iter().map(|(task, _)| (*task, percent(&result["tasks"][*task]))).collect();
    assert_eq!(scores, EXACT_MATCH.into_iter().collect());
    assert_eq!(result["all"]["right"], 330);
    assert_eq!(result["all"]["questions"], 374);

    let expected = golden::json("golden/tiny/eval_reference.json");
    for answer in result["answers"].as_array().expect("answers") {
        let id = answer["id"].as_str().expect("an id");
        let expected = &expected["results"]["0.5"][id];
        for field in ["ok", "text", "completion_tokens", "forwards"] {
            assert_eq!(answer[field], expected[field], "{id}: {field}");
        }
    }
}

#[test]
fn quantized_experts_cost_no_more_than_two_points() {
    let Some(tiny) = golden::tiny_dir() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let original = eval(&["--model", tiny.to_str().expect("UTF-8"), "--device", "cpu"]);
    let original = original["exact_match"].as_f64().expect("a score");
    println!("bf16: {original:.1} %");
    for experts in ["int8", "int4", "nvfp4"] {
        let file = converted(&tiny, folder.path(), experts);
        let result = eval(&["--model", file.to_str().expect("UTF-8"), "--device", "cpu"]);
        let score = result["exact_match"].as_f64().expect("a score");
        println!(
            "{experts}: {score:.1} %, {:.2} tokens a forward",
            result["tokens_per_forward"].as_f64().unwrap_or(0.0)
        );
        assert!((score - original).abs() <= POINTS_MAX, "{experts}: {score}, bf16: {original}");
    }
}

/// Four bits are as coarse for activations as for weights, so the score may fall as if weights were quantized once more.
#[test]
fn activations_of_four_bits_cost_no_more_than_two_points() {
    let Some(tiny) = golden::tiny_dir() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = converted(&tiny, folder.path(), "nvfp4");
    let model = file.to_str().expect("UTF-8");
    let score = |more: &[&str]| {
        let result = eval(&[&["--model", model, "--device", "cpu"], more].concat());
        println!("{more:?}: {} right in {} forwards", result["all"]["right"], result["all"]["forwards"]);
        result["exact_match"].as_f64().expect("a score")
    };
    let (plain, fp4) = (score(&[]), score(&["--fp4-expert-activations"]));
    assert!((fp4 - plain).abs() <= POINTS_MAX, "{fp4} with activations of four bits, {plain} without");
    // The reference computes the same definition, in f32.
    let output = program::minnowd(&["verify", "--device", "cpu", "--model", model, "--fp4-expert-activations"]);
    println!("{}", program::stdout(&output));
    assert!(output.status.success(), "{}{}", program::stdout(&output), program::stderr(&output));
}

/// Eight bits cost less than four, and the allowance is the same.
#[test]
fn activations_of_eight_bits_cost_no_more_than_two_points() {
    let Some(tiny) = golden::tiny_dir() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = converted(&tiny, folder.path(), "int4");
    let result = eval(&["--model", file.to_str().expect("UTF-8"), "--device", "cpu", "--int8-expert-activations"]);
    println!("{} right in {} forwards", result["all"]["right"], result["all"]["forwards"]);
    let score = result["exact_match"].as_f64().expect("a score");
    // The reference answers 330 of 374.
    let original = 100.0 * 330.0 / 374.0;
    assert!((score - original).abs() <= POINTS_MAX, "{score} with activations of eight bits, {original} without");
}

#[test]
fn the_cpu_engine_agrees_with_the_reference_for_every_encoding() {
    let Some(tiny) = golden::tiny_dir() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut models = vec![tiny.clone()];
    models.extend(["original", "int8", "int4", "nvfp4"].map(|experts| converted(&tiny, folder.path(), experts)));
    for model in models {
        let output = program::minnowd(&["verify", "--device", "cpu", "--model", model.to_str().expect("UTF-8")]);
        assert!(
            output.status.success(),
            "{}: {}{}",
            model.display(),
            program::stdout(&output),
            program::stderr(&output)
        );
    }
}

#[test]
fn the_embedded_model_is_what_mnwtool_makes_of_the_original() {
    let Some(tiny) = golden::tiny_dir() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let target = folder.path().join("demo.mnw");
    let (source, target_text) = (tiny.to_str().expect("UTF-8"), target.to_str().expect("UTF-8"));
    let args =
        ["convert", source, target_text, "--experts", "int4", "--group-size", "128", "--model-id", "minnow-tiny"];
    let output = program::mnwtool(&args);
    assert!(output.status.success(), "{}", program::stderr(&output));
    let made = std::fs::read(&target).expect("the file");
    assert!(made == minnowd::demo::checkpoint(), "the embedded checkpoint differs from a fresh conversion");
}

#[test]
fn the_embedded_model_answers_without_any_file() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let output = std::process::Command::new(program::path("minnowd"))
        .args(["generate", "What is 17 + 25?"])
        .env_clear()
        .current_dir(folder.path())
        .output()
        .expect("minnowd starts");
    assert!(output.status.success(), "{}", program::stderr(&output));
    assert!(program::stdout(&output).contains("42"), "{}", program::stdout(&output));
}

#[test]
fn a_question_that_cannot_be_asked_is_named_by_its_line() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (text, named) in [
        ("{\"expected\": \"x\", \"prompt\": \"a\"}\n{\"expected\"", "questions.jsonl:2"),
        ("{\"expected\": \"x\"}\n", "questions.jsonl:1"),
        ("\n", "no questions"),
        ("{\"expected\": \"x\", \"prompt_ids\": [99999]}\n", "questions.jsonl:1"),
    ] {
        let data = folder.path().join("questions.jsonl");
        std::fs::write(&data, text).expect("a writable folder");
        let output = program::minnowd(&["eval", "--data", data.to_str().expect("UTF-8")]);
        assert_eq!(output.status.code(), Some(1), "{text}");
        let stderr = program::stderr(&output);
        let lines: Vec<&str> = stderr.lines().filter(|line| !line.contains(" INFO ")).collect();
        assert!(matches!(lines[..], [line] if line.contains(named)), "{text}: {stderr}");
    }
}
