//! Real clients against the real server and the embedded model.

use std::io::Write;
use std::process::{Command, Stdio};

use minnow_tests::golden;
use minnow_tests::program::Server;
use serde_json::{Value, json};

/// A Python with the `openai` package, from `MINNOW_OPENAI_PYTHON`; CI must have one.
fn python() -> Option<std::ffi::OsString> {
    let python = std::env::var_os("MINNOW_OPENAI_PYTHON");
    if python.is_none() {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "MINNOW_OPENAI_PYTHON must be set in CI");
        eprintln!("skipped: MINNOW_OPENAI_PYTHON names no Python with the openai package");
    }
    python
}

#[test]
fn the_openai_client_gets_five_exam_questions_right_plain_and_streaming() {
    let Some(python) = python() else { return };
    let exam = golden::json_lines("golden/tiny/eval.jsonl");
    let chosen = ["add-0", "capital-1", "mul-0", "opposite-0", "units-0"];
    let questions: Vec<&Value> =
        chosen.iter().map(|id| exam.iter().find(|question| question["id"] == *id).expect("an exam question")).collect();
    let messages: Vec<&Value> = questions.iter().map(|question| &question["messages"]).collect();

    let server = Server::start(&[]);
    let script = golden::root().join("daemon/python/openai_chat.py");
    let mut client = Command::new(python)
        .arg(script)
        .arg(format!("http://{}/v1", server.address()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .env("NO_PROXY", "*")
        .spawn()
        .expect("Python starts");
    let input = json!(messages).to_string();
    client.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("Python reads");
    let output = client.wait_with_output().expect("Python ends");
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect();
    assert_eq!(lines.len(), questions.len() + 1, "{text}");
    for (question, answer) in questions.iter().zip(&lines) {
        assert!(answer["version"].as_str().is_some_and(|version| version.starts_with("3.")), "{}", answer["version"]);
        for field in ["plain", "streamed"] {
            assert_eq!(answer[field], question["expected"], "{}", question["id"]);
        }
        for field in ["plain_reason", "streamed_reason"] {
            assert_eq!(answer[field], "stop", "{}", question["id"]);
        }
        assert_eq!(answer["plain_usage"], answer["streamed_usage"], "{}", question["id"]);
    }
    assert_eq!(lines[questions.len()], json!({"error": "model_not_found"}));
}
