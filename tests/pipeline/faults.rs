//! Faults that happen while a conversion runs: a clear error soon after, and no file.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use minnow_tests::program::{self, stderr};
use rustix::process::{Pid, Signal, kill_process};

/// How long a conversion may take to notice.
const NOTICED_MAX: Duration = Duration::from_secs(1);

fn text(path: &Path) -> &str {
    path.to_str().expect("a UTF-8 path")
}

/// Starts a conversion that takes a while, stops it in the middle, does `harm` to the folder, and lets it go on. Its
/// message; tried again if it was done before it could be stopped.
fn harmed(harm: impl Fn(&Path)) -> String {
    for _ in 0..20 {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let work = folder.path().join("work");
        std::fs::create_dir(&work).expect("a writable folder");
        let source = folder.path().join("source.mnw");
        let made = program::mnwtool(&["synth", text(&source), "--preset", "tiny"]);
        assert!(made.status.success(), "{}", stderr(&made));
        let target = work.join("out.mnw");
        let child = Command::new(program::path("mnwtool"))
            // An entry in the journal for each tensor makes it slow.
            .args(["convert", text(&source), text(&target), "--workers", "1", "--journal-mib", "0"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("mnwtool starts");
        let id = Pid::from_child(&child);
        let started = Instant::now();
        while std::fs::read_dir(&work).is_ok_and(|mut entries| entries.next().is_none())
            && started.elapsed() < NOTICED_MAX
        {
            std::thread::sleep(Duration::from_micros(200));
        }
        let stopped = kill_process(id, Signal::STOP);
        if target.exists() || stopped.is_err() {
            let _ = kill_process(id, Signal::CONT);
            let _ = child.wait_with_output();
            continue;
        }
        harm(folder.path());
        kill_process(id, Signal::CONT).expect("a stopped child");
        let harmed_at = Instant::now();
        let output = child.wait_with_output().expect("a child");
        if output.status.success() {
            // It had read everything already.
            continue;
        }
        assert!(harmed_at.elapsed() < NOTICED_MAX, "noticed after {:?}", harmed_at.elapsed());
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(!target.exists());
        let left = std::fs::read_dir(&work).map_or(0, Iterator::count);
        assert_eq!(left, 0, "something is left in {}", work.display());
        let message = stderr(&output);
        assert_eq!(message.lines().count(), 1, "{message}");
        return message;
    }
    panic!("every conversion was done before it could be stopped");
}

#[test]
fn a_source_that_grows_while_it_is_read_is_an_error() {
    let message = harmed(|folder| {
        let mut file = std::fs::File::options().append(true).open(folder.join("source.mnw")).expect("our own file");
        file.write_all(b"more").expect("our own file");
    });
    assert!(message.contains("source.mnw") && message.contains("changed"), "{message}");
}

#[test]
fn a_source_that_is_rewritten_while_it_is_read_is_an_error() {
    let message = harmed(|folder| {
        let path = folder.join("source.mnw");
        let mut file = std::fs::File::options().write(true).open(path).expect("our own file");
        file.write_all(b"MINNOW01").expect("our own file");
    });
    assert!(message.contains("source.mnw") && message.contains("changed"), "{message}");
}

#[test]
fn a_source_that_is_cut_short_while_it_is_read_is_an_error() {
    let message = harmed(|folder| {
        let file = std::fs::File::options().write(true).open(folder.join("source.mnw")).expect("our own file");
        file.set_len(8192).expect("our own file");
    });
    assert!(message.contains("source.mnw") && message.contains("8192"), "{message}");
}

#[test]
fn an_output_folder_that_disappears_is_an_error() {
    let message = harmed(|folder| std::fs::remove_dir_all(folder.join("work")).expect("our own folder"));
    // Whatever it was doing: its folder is in the message.
    assert!(message.contains("/work"), "{message}");
}
