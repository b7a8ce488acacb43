//! The containers, conversions and failures of `golden/mnw/tiny/index.json`, through the program's command line.

use std::path::{Path, PathBuf};
use std::process::Output;

use minnow_tests::golden;
use minnow_tests::program::{self, stderr};
use serde_json::Value;

const WORKER_COUNTS: [&str; 5] = ["1", "2", "3", "8", "64"];

fn tiny(name: &str) -> PathBuf {
    golden::root().join("golden/mnw/tiny").join(name)
}

fn index() -> Value {
    golden::json("golden/mnw/tiny/index.json")
}

/// The flags that mean an encoding.
fn experts_flags(encoding: &str) -> Vec<String> {
    let flags: &[&str] = match encoding {
        "original" => &[],
        "i8_mma" => &["--experts", "int8"],
        "i8_sym" => &["--experts", "int8", "--quant-layout", "row"],
        "i4_mma" => &["--experts", "int4", "--quant-layout", "mma"],
        "i4_sym" => &["--experts", "int4", "--quant-layout", "row"],
        "nvfp4" => &["--experts", "nvfp4"],
        other => panic!("no flags for {other}"),
    };
    flags.iter().map(|flag| (*flag).to_owned()).collect()
}

/// Runs the conversion that an entry of the index describes, from `source` into `folder/out.mnw`.
fn convert(entry: &Value, source: &Path, folder: &Path, more: &[&str]) -> (Output, PathBuf) {
    let output = folder.join("out.mnw");
    let path = |path: &Path| path.to_str().expect("a UTF-8 path").to_owned();
    let mut arguments = vec!["convert".to_owned(), path(source), path(&output)];
    arguments.extend(experts_flags(entry["encoding"].as_str().expect("an encoding")));
    arguments.extend(["--group-size".to_owned(), entry["group_size"].to_string()]);
    arguments.extend(["--model-id".to_owned(), entry["model_id"].as_str().expect("a model id").to_owned()]);
    let rules = match &entry["rules"] {
        Value::String(file) => Some(golden::json(&format!("golden/mnw/tiny/{file}"))),
        Value::Array(rules) if !rules.is_empty() => Some(entry["rules"].clone()),
        _ => None,
    };
    if let Some(rules) = rules {
        let file = folder.join("rules.json");
        std::fs::write(&file, rules.to_string()).expect("a writable folder");
        arguments.extend(["--tensor-rules".to_owned(), path(&file)]);
    }
    let mut arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    arguments.extend(more);
    (program::mnwtool(&arguments), output)
}

/// Names in `folder`, hidden ones included.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}

fn assert_golden(entry: &Value, source: &Path, more: &[&str]) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (output, path) = convert(entry, source, folder.path(), more);
    assert!(output.status.success(), "{entry}: {}", stderr(&output));
    let bytes = std::fs::read(&path).expect("the output");
    assert_eq!(blake3::hash(&bytes).to_hex().as_str(), entry["blake3"], "{entry} {more:?}");
    assert!(names(folder.path()).iter().all(|name| !name.ends_with(".tmp")), "{:?}", names(folder.path()));
}

#[test]
fn the_seven_containers_are_made_byte_for_byte_from_either_source_at_any_worker_count() {
    let index = index();
    let made: Vec<&Value> =
        index["files"].as_array().expect("a list").iter().filter(|entry| entry["source"].is_string()).collect();
    assert_eq!(made.len(), 7);
    for entry in made {
        for source in ["source", "source-sharded"] {
            for workers in WORKER_COUNTS {
                assert_golden(entry, &tiny(source), &["--workers", workers]);
            }
        }
    }
}

#[test]
fn the_seventeen_conversions_are_made_byte_for_byte_at_any_worker_count() {
    let index = index();
    let conversions = index["conversions"].as_array().expect("a list");
    assert_eq!(conversions.len(), 17);
    for entry in conversions {
        let source = tiny(entry["source"].as_str().expect("a source"));
        for workers in WORKER_COUNTS {
            assert_golden(entry, &source, &["--workers", workers]);
        }
    }
}

#[test]
fn every_io_backend_gives_the_same_bytes() {
    let index = index();
    for entry in index["files"].as_array().expect("a list").iter().filter(|entry| entry["source"].is_string()) {
        for backend in ["auto", "uring", "direct", "buffered", "mmap"] {
            let folder = tempfile::tempdir().expect("a temporary folder");
            // A named backend that file system or kernel refuse fails; that is another test's business.
            let probe = convert(entry, &tiny("source-sharded"), folder.path(), &["--io", backend]).0;
            if matches!(backend, "uring" | "direct") && stderr(&probe).contains("refused") {
                eprintln!("skipped: {}", stderr(&probe));
                continue;
            }
            for workers in ["1", "8"] {
                assert_golden(entry, &tiny("source-sharded"), &["--io", backend, "--workers", workers]);
            }
        }
    }
}

#[test]
fn the_fourteen_failing_conversions_fail_with_one_line_and_leave_nothing() {
    let index = index();
    let failing = index["failing_conversions"].as_array().expect("a list");
    assert_eq!(failing.len(), 14);
    for entry in failing {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let source = tiny(entry["source"].as_str().expect("a source"));
        let (output, _) = convert(entry, &source, folder.path(), &[]);
        let code = output.status.code();
        assert!(matches!(code, Some(1 | 2)), "{entry}: {code:?}");
        let message = stderr(&output);
        assert_eq!(message.lines().count(), 1, "{entry}: {message}");
        assert!(message.starts_with("mnwtool: "), "{message}");
        let left: Vec<String> = names(folder.path()).into_iter().filter(|name| name != "rules.json").collect();
        assert_eq!(left, [""; 0], "{entry}");
    }
}

#[test]
fn an_int4_conversion_of_the_trained_tiny_model_does_not_depend_on_the_workers() {
    let Some(source) = golden::tiny_dir() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let source = source.to_str().expect("a UTF-8 path");
    let mut digests = Vec::new();
    for workers in WORKER_COUNTS {
        let output = folder.path().join(format!("{workers}.mnw"));
        let output = output.to_str().expect("a UTF-8 path");
        let result = program::mnwtool(&[
            "convert",
            source,
            output,
            "--experts",
            "int4",
            "--model-id",
            "tiny",
            "--workers",
            workers,
        ]);
        assert!(result.status.success(), "{}", stderr(&result));
        digests.push(blake3::hash(&std::fs::read(output).expect("the output")));
    }
    assert!(digests.iter().all(|digest| *digest == digests[0]));
}
