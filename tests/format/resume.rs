//! Conversions that were killed go on where they were, and end with the bytes of one that was not.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use minnow_common::random::mix64;
use minnow_formats::mnw::{self, WriteError, WriteOptions, Writer};

use crate::synthetic::{self, names_in};

/// Tells the test below that it is the child, and where to write.
const CHILD_TARGET: &str = "MINNOW_TEST_RESUME_TARGET";
const FINGERPRINT: &[u8] = b"source and options";
const KILLS: u64 = 20;

fn options() -> WriteOptions<'static> {
    WriteOptions { fingerprint: Some(FINGERPRINT), record_bytes: 1 << 20, ..WriteOptions::default() }
}

fn resume(target: &Path) -> Result<(Writer, usize), WriteError> {
    Writer::open(target, synthetic::plan(), &options())
}

/// A folder, a target in it, and what a clean run writes there.
fn clean() -> (tempfile::TempDir, PathBuf, Vec<u8>) {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let target = folder.path().join("out.mnw");
    synthetic::write(&target);
    let bytes = fs::read(&target).unwrap();
    fs::remove_file(&target).unwrap();
    (folder, target, bytes)
}

/// Completes the file; how many tensors did not have to be given again.
fn complete(target: &Path, expected: &[u8]) -> usize {
    let (mut writer, done) = resume(target).unwrap();
    synthetic::give(&mut writer, done, |_| ()).unwrap();
    let written = writer.finish().unwrap();
    assert_eq!((written.file_bytes, written.tensors), (expected.len() as u64, synthetic::plan().tensors.len()));
    assert!(fs::read(target).unwrap() == expected);
    assert_eq!(names_in(target.parent().unwrap()), ["out.mnw"]);
    done
}

/// Leaves what a kill would leave after `tensors` tensors.
fn interrupted(target: &Path, tensors: usize) {
    let (mut writer, done) = resume(target).unwrap();
    assert_eq!(done, 0);
    let stopped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        synthetic::give(&mut writer, 0, |index| {
            if index == tensors {
                std::panic::resume_unwind(Box::new("enough"));
            }
        })
    }));
    assert!(stopped.is_err());
    assert_eq!(writer.suspend().unwrap(), tensors);
}

/// Does nothing unless the next test starts it: then it writes, saying which tensor comes, until it is killed.
#[test]
fn a_child_that_is_to_be_killed() {
    let Some(target) = std::env::var_os(CHILD_TARGET) else { return };
    let (mut writer, done) = resume(Path::new(&target)).unwrap();
    synthetic::give(&mut writer, done, |index| println!("tensor {index}")).unwrap();
    println!("tensor 24");
    writer.finish().unwrap();
}

#[test]
fn a_killed_writer_is_resumed_to_the_same_bytes() {
    let (_folder, target, expected) = clean();
    let tensors = synthetic::plan().tensors.len();
    let mut kept = 0;
    for kill in 0..KILLS {
        // Some are killed a second time.
        for again in 0..=kill % 2 {
            let at = mix64(2 * kill + again) as usize % (tensors + 1);
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "resume::a_child_that_is_to_be_killed", "--nocapture"])
                .env(CHILD_TARGET, &target)
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            for line in BufReader::new(child.stdout.take().unwrap()).lines() {
                let line = line.unwrap();
                let index = line.rsplit_once("tensor ").and_then(|(_, index)| index.parse::<usize>().ok());
                if index.is_some_and(|index| index >= at) {
                    std::thread::sleep(Duration::from_micros(mix64(kill) % 8000));
                    break;
                }
            }
            child.kill().unwrap();
            let ended = child.wait().unwrap();
            if target.exists() {
                // It was too fast: then it is complete.
                assert!(fs::read(&target).unwrap() == expected, "killed at {at}: {ended}");
                fs::remove_file(&target).unwrap();
            }
        }
        if names_in(target.parent().unwrap()).iter().any(|name| name.ends_with(".tmp")) {
            assert!(!mnw::leftovers(&target).is_empty());
        }
        kept += complete(&target, &expected);
        fs::remove_file(&target).unwrap();
    }
    assert!(kept > 3 * KILLS as usize, "on average {} tensors were kept", kept as f64 / KILLS as f64);
}

#[test]
fn a_suspended_writer_goes_on_with_every_complete_tensor() {
    let (_folder, target, expected) = clean();
    for tensors in [0, 1, 2, 3, 23, 24] {
        if tensors == 24 {
            let (mut writer, _) = resume(&target).unwrap();
            synthetic::give(&mut writer, 0, |_| ()).unwrap();
            assert_eq!(writer.suspend().unwrap(), 24);
        } else {
            interrupted(&target, tensors);
        }
        let left = names_in(target.parent().unwrap());
        assert_eq!(left.len(), 2, "{left:?}");
        assert_eq!(mnw::leftovers(&target).len(), 2);
        assert_eq!(complete(&target, &expected), tensors);
        assert!(mnw::leftovers(&target).is_empty());
        fs::remove_file(&target).unwrap();
    }
}

#[test]
fn a_tensor_may_be_under_way_when_a_writer_is_suspended() {
    let (_folder, target, expected) = clean();
    let plan = synthetic::plan();
    let (mut writer, _) = resume(&target).unwrap();
    let (data, _, _) = synthetic::payload("a.first", &plan.tensors["a.first"]);
    writer.tensor("a.first", &data, None, None).unwrap();
    writer.begin("b.int8", None).unwrap();
    writer.piece(mnw::RegionPart::Data, &[1; 12345]).unwrap();
    assert_eq!(writer.suspend().unwrap(), 1);
    assert_eq!(complete(&target, &expected), 1);
}

#[test]
fn what_is_not_as_the_journal_says_is_written_again() {
    let (_folder, target, expected) = clean();
    let folder = target.parent().unwrap().to_owned();
    let temporary = |folder: &Path| {
        let names = names_in(folder);
        folder.join(names.iter().find(|name| name.ends_with(".tmp")).unwrap())
    };
    let flip = |path: &Path, at: usize| {
        let mut bytes = fs::read(path).unwrap();
        bytes[at] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let offsets: Vec<usize> = {
        fs::write(&target, &expected).unwrap();
        let container = mnw::open(minnow_formats::io::open(&target, Default::default()).unwrap()).unwrap();
        fs::remove_file(&target).unwrap();
        container.manifest.tensors.values().map(|tensor| tensor.data.offset.0 as usize).collect()
    };
    // In the third tensor, in the scales of the second one, and in the padding after the first.
    for (at, kept) in [(offsets[2] + 17, 2), (offsets[2] - 1, 1), (offsets[1] - 1, 0)] {
        interrupted(&target, 10);
        flip(&temporary(&folder), at);
        assert_eq!(complete(&target, &expected), kept);
        fs::remove_file(&target).unwrap();
    }
    interrupted(&target, 10);
    fs::OpenOptions::new().write(true).open(temporary(&folder)).unwrap().set_len(offsets[5] as u64 + 1).unwrap();
    assert_eq!(complete(&target, &expected), 5);
    fs::remove_file(&target).unwrap();

    // A journal that was damaged counts up to there; without its temporary file it counts for nothing.
    interrupted(&target, 10);
    let journal = folder.join(".out.mnw.resume");
    let lines: Vec<usize> = fs::read(&journal).unwrap().split_inclusive(|&b| b == b'\n').map(<[u8]>::len).collect();
    flip(&journal, lines[..5].iter().sum::<usize>() + 30);
    assert_eq!(complete(&target, &expected), 4);
    fs::remove_file(&target).unwrap();
    interrupted(&target, 10);
    fs::remove_file(temporary(&folder)).unwrap();
    assert_eq!(complete(&target, &expected), 0);
    fs::remove_file(&target).unwrap();
    fs::write(&journal, "nonsense").unwrap();
    assert_eq!(complete(&target, &expected), 0);
}

#[test]
fn another_conversion_is_not_resumed_and_nothing_of_it_is_lost() {
    let (_folder, target, expected) = clean();
    interrupted(&target, 5);
    let before = names_in(target.parent().unwrap());
    let other = WriteOptions { fingerprint: Some(b"other options"), ..options() };
    let error = Writer::open(&target, synthetic::plan(), &other).unwrap_err();
    assert!(
        matches!(&error, WriteError::OtherConversion { journal } if journal.ends_with("/.out.mnw.resume")),
        "{error}"
    );
    let mut plan = synthetic::plan();
    plan.model_id = "another".to_owned();
    let error = Writer::open(&target, plan, &options()).unwrap_err();
    assert!(matches!(error, WriteError::OtherConversion { .. }), "{error}");

    // Without a fingerprint, leftovers are neither used nor touched.
    let mut writer = Writer::create(&target, synthetic::plan(), false).unwrap();
    synthetic::give(&mut writer, 0, |_| ()).unwrap();
    writer.finish().unwrap();
    fs::remove_file(&target).unwrap();
    assert_eq!(names_in(target.parent().unwrap()), before);
    assert_eq!(complete(&target, &expected), 5);
}

#[test]
fn two_processes_do_not_write_one_file() {
    let (_folder, target, expected) = clean();
    let (writer, _) = resume(&target).unwrap();
    let error = resume(&target).unwrap_err();
    assert!(matches!(error, WriteError::Busy { .. }) && error.to_string().contains("out.mnw"), "{error}");
    assert!(mnw::leftovers(&target).is_empty(), "what is being written is not left over");
    drop(writer);
    assert!(names_in(target.parent().unwrap()).is_empty(), "a writer that is dropped leaves nothing");
    assert_eq!(complete(&target, &expected), 0);
}

#[test]
fn a_journal_cannot_lead_to_a_foreign_file() {
    let (_folder, target, expected) = clean();
    let folder = target.parent().unwrap();
    interrupted(&target, 3);
    let journal = folder.join(".out.mnw.resume");
    let text = fs::read_to_string(&journal).unwrap();
    let (heading, rest) = text.split_once('\n').unwrap();
    let json = &heading[17..];
    let name = names_in(folder).into_iter().find(|name| name.ends_with(".tmp")).unwrap();
    let victim = folder.join("victim.tmp");
    fs::copy(folder.join(&name), &victim).unwrap();
    let before = fs::read(&victim).unwrap();
    let json = json.replace(&name, "victim.tmp");
    let checksum = &minnow_formats::Digest::of(json.as_bytes()).to_hex()[..16];
    fs::write(&journal, format!("{checksum} {json}\n{rest}")).unwrap();
    fs::remove_file(folder.join(&name)).unwrap();
    let (mut writer, done) = resume(&target).unwrap();
    assert_eq!(done, 0);
    synthetic::give(&mut writer, 0, |_| ()).unwrap();
    writer.finish().unwrap();
    assert!(fs::read(&target).unwrap() == expected && fs::read(&victim).unwrap() == before);
}
