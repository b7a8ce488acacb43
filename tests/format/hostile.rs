//! Every malformed container of `hostile/mnw`: refused at its level, for its reason, and at no level before that.

use minnow_formats::Checkpoint;
use minnow_formats::io::{self, IoBackend};
use minnow_formats::mnw::{self, Level, MnwError};
use minnow_tests::golden;

use crate::allocation::peak_bytes;

struct Case {
    file: String,
    reject_at: String,
    reason: String,
}

fn cases() -> Vec<Case> {
    let manifest = golden::json("hostile/mnw/manifest.json");
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let cases = manifest["cases"].as_array().unwrap().iter().map(|case| Case {
        file: text(&case["file"]),
        reject_at: text(&case["reject_at"]),
        reason: text(&case["reason"]),
    });
    cases.collect()
}

/// The first level that refuses the file, and why; empty if none does.
fn first_refusal(path: &std::path::Path, backend: IoBackend, workers: usize) -> (&'static str, String) {
    let container = match mnw::open(io::open(path, backend).unwrap()) {
        Ok(container) => container,
        Err(error) => return ("open", error.reason().to_owned()),
    };
    for (level, name) in [(Level::Open, "open"), (Level::Validate, "validate"), (Level::Strict, "strict")] {
        if let Err(error) = mnw::validate(&container, level, workers, &|_| ()) {
            return (name, error.reason().to_owned());
        }
    }
    match Checkpoint::open(path, backend).unwrap().check_model() {
        Ok(()) => ("", String::new()),
        Err(error) => ("model", error.reason().to_owned()),
    }
}

#[test]
fn all_120_malformed_files_are_refused_at_their_level_for_their_reason() {
    let cases = cases();
    assert_eq!(cases.len(), 120);
    let folder = tempfile::tempdir().unwrap();
    let mut wrong = Vec::new();
    for case in &cases {
        let path = golden::unpack_into(&format!("hostile/mnw/{}", case.file), folder.path());
        for (backend, workers) in [(IoBackend::Auto, 1), (IoBackend::Buffered, 3), (IoBackend::Mmap, 2)] {
            let (level, reason) = first_refusal(&path, backend, workers);
            if (level, &reason) != (case.reject_at.as_str(), &case.reason) {
                wrong.push(format!("{}: {level} {reason}, expected {} {}", case.file, case.reject_at, case.reason));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_malformed_file_takes_no_more_memory_than_a_good_one() {
    let folder = tempfile::tempdir().unwrap();
    for case in cases() {
        let path = golden::unpack_into(&format!("hostile/mnw/{}", case.file), folder.path());
        let (_, peak) = peak_bytes(|| mnw::open(io::open(&path, IoBackend::Buffered).unwrap()).map(|_| ()));
        assert!(peak < 1 << 20, "{}: {peak} bytes", case.file);
    }
}

#[test]
fn a_refusal_names_the_file_and_shows_no_control_characters() {
    let folder = tempfile::tempdir().unwrap();
    for case in cases().iter().filter(|case| case.reject_at == "open") {
        let path = golden::unpack_into(&format!("hostile/mnw/{}", case.file), folder.path());
        let error = Checkpoint::open(&path, IoBackend::Auto).unwrap_err();
        assert_eq!(error.reason(), Some(case.reason.as_str()), "{}", case.file);
        let message = error.to_string();
        assert!(message.contains(&case.file), "{message}");
        assert!(!message.contains(char::is_control), "{}: {message:?}", case.file);
    }
}

#[test]
fn the_first_fault_is_reported_whatever_the_number_of_workers() {
    let mut bytes = golden::bytes("golden/mnw/tiny/i8_mma.mnw");
    let container = mnw::open(io::from_static("whole", bytes.clone().leak())).unwrap();
    // One byte of every region but the first tensor's.
    for (name, _, region) in container.manifest.regions() {
        if name != "lm_head.weight" {
            bytes[region.offset.0 as usize] ^= 1;
        }
    }
    let broken = mnw::open(io::from_static("broken", bytes.leak())).unwrap();
    let second = broken.manifest.tensors.keys().nth(1).unwrap();
    for workers in 1..=8 {
        let error = mnw::validate(&broken, Level::Validate, workers, &|_| ()).unwrap_err();
        assert!(matches!(&error, MnwError::PayloadDigest { tensor, .. } if **tensor == **second), "{workers}: {error}");
    }
}
