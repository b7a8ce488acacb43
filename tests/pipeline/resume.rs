//! Conversions that are killed: what they leave, and that continuing them gives the same file for less work.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use minnow_common::random::Symmetric;
use minnow_tests::program::{self, stderr};
use serde_json::Value;

/// A checkpoint that takes a while, and a folder for its conversions.
struct Field {
    folder: tempfile::TempDir,
    expected: Vec<u8>,
    whole_source: u64,
    duration: Duration,
}

impl Field {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = |name: &str| folder.path().join(name);
        let made = program::mnwtool(&["synth", text(&path("source.mnw")), "--preset", "tiny"]);
        assert!(made.status.success(), "{}", stderr(&made));
        let started = Instant::now();
        let clean = json(program::mnwtool(&arguments(&path("source.mnw"), &path("clean.mnw"), &["--json"])));
        let duration = started.elapsed();
        let expected = std::fs::read(path("clean.mnw")).expect("output");
        let whole_source = clean["bytes_read"].as_u64().expect("a count");
        assert_eq!(clean["resumed_tensors"], 0);
        Self { folder, expected, whole_source, duration }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn start(&self, more: &[&str]) -> Child {
        Command::new(program::path("mnwtool"))
            .args(arguments(&self.path("source.mnw"), &self.path("out.mnw"), more))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("mnwtool starts")
    }

    /// Starts a conversion and kills it after a share of the time that a whole one takes.
    fn killed_after(&self, share: f64, more: &[&str]) {
        let mut child = self.start(more);
        std::thread::sleep(self.duration.mul_f64(share));
        child.kill().expect("a child");
        child.wait().expect("a child");
    }

    /// Continues what was killed, and checks the file. The report; `None` if the kill came too late.
    fn resumed(&self) -> Option<Value> {
        let out = self.path("out.mnw");
        // The name is there only with all of the file behind it.
        let report = match out.exists() {
            true => None,
            false => Some(json(self.resume(&["--json"]))),
        };
        assert!(std::fs::read(&out).expect("output") == self.expected, "the bytes differ");
        report
    }

    fn resume(&self, more: &[&str]) -> std::process::Output {
        let more = [&["--resume"], more].concat();
        program::mnwtool(&arguments(&self.path("source.mnw"), &self.path("out.mnw"), &more))
    }

    /// Names in the folder besides source and clean output.
    fn left(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).expect("a folder");
        let names = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
        names.filter(|name| name != "source.mnw" && name != "clean.mnw").collect()
    }

    fn clear(&self) {
        for name in self.left() {
            std::fs::remove_file(self.path(&name)).expect("our own file");
        }
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a UTF-8 path")
}

/// A conversion with a journal entry for every tensor, so that there is something to resume in a small file.
fn arguments<'a>(source: &'a Path, target: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    let fixed = ["convert", text(source), text(target), "--experts", "int4", "--workers", "1", "--journal-mib", "0"];
    [&fixed[..], more].concat()
}

fn json(output: std::process::Output) -> Value {
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// C14
#[test]
fn twenty_random_kills_are_resumed_to_the_same_bytes_with_less_reading() {
    let field = Field::new();
    let moments = Symmetric::new("kills", 1);
    let mut saved = 0;
    for kill in 0..20 {
        let share = f64::from(moments.at(kill).abs()) * 1.1;
        field.killed_after(share, &[]);
        if let Some(report) = field.resumed() {
            let resumed = report["resumed_tensors"].as_u64().expect("a count");
            let read = report["bytes_read"].as_u64().expect("a count");
            assert_eq!(read < field.whole_source, resumed > 0, "{report}");
            saved += u64::from(resumed > 0);
        }
        let left = field.left();
        assert!(left == ["out.mnw"] || left.len() > 1 && field.path("out.mnw").exists(), "{left:?}");
        field.clear();
    }
    assert!(saved >= 5, "only {saved} of 20 runs had something to resume");
}

/// C14
#[test]
fn a_conversion_may_be_killed_again_and_again() {
    let field = Field::new();
    field.killed_after(0.3, &[]);
    for _ in 0..3 {
        if !field.path("out.mnw").exists() {
            field.killed_after(0.3, &["--resume"]);
        }
    }
    field.resumed();
    assert_eq!(field.left(), ["out.mnw"]);
}

#[test]
fn leftovers_are_reported_and_left_alone_without_resume() {
    let field = Field::new();
    while field.left().iter().all(|name| !name.ends_with(".resume")) {
        field.clear();
        field.killed_after(0.6, &[]);
    }
    let before = field.left();
    let output = program::mnwtool(&arguments(&field.path("source.mnw"), &field.path("out.mnw"), &[]));
    let message = stderr(&output);
    assert!(output.status.success(), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(message.contains("--resume") && before.iter().all(|name| message.contains(name.as_str())), "{message}");
    assert!(std::fs::read(field.path("out.mnw")).expect("output") == field.expected);
    let after = field.left();
    assert!(before.iter().all(|name| after.contains(name)), "{before:?} became {after:?}");
    // What was left is still good for resuming.
    std::fs::remove_file(field.path("out.mnw")).expect("our own file");
    assert!(field.resumed().is_some_and(|report| report["bytes_read"].as_u64() < Some(field.whole_source)));
}

#[test]
fn another_source_or_other_options_are_not_resumed() {
    let field = Field::new();
    while field.left().iter().all(|name| !name.ends_with(".resume")) {
        field.clear();
        field.killed_after(0.6, &[]);
    }
    for other in [&["--quality", "search"][..], &["--group-size", "64"], &["--model-id", "other"]] {
        let output = field.resume(other);
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.contains(".out.mnw.resume") && message.contains("other options"), "{message}");
    }
    // The same bytes with a later time of change are another source.
    let file = std::fs::File::options().write(true).open(field.path("source.mnw")).expect("our own file");
    file.set_modified(std::time::SystemTime::now()).expect("our own file");
    let output = field.resume(&[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("another source"), "{}", stderr(&output));
    assert!(!field.path("out.mnw").exists());
}

#[test]
fn an_interrupted_resumable_run_leaves_what_it_has() {
    let field = Field::new();
    for attempt in 0.. {
        let child = field.start(&["--resume"]);
        std::thread::sleep(field.duration.mul_f64(0.6));
        let sent =
            rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::TERM);
        let code = child.wait_with_output().expect("a child").status.code();
        if sent.is_ok() && code == Some(143) && !field.left().is_empty() {
            break;
        }
        assert!(attempt < 20, "never interrupted at work");
        field.clear();
    }
    let report = field.resumed().expect("an unfinished conversion");
    assert!(report["bytes_read"].as_u64() <= Some(field.whole_source));
    assert_eq!(field.left(), ["out.mnw"]);
}
