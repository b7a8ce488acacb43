//! Writing containers: the bytes are the golden ones, and a file appears whole, over nothing, or not at all.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use minnow_common::{Encoding, FloatType, Shape, TensorSpec};
use minnow_formats::Checkpoint;
use minnow_formats::io::{self, IoBackend};
use minnow_formats::mnw::{self, Level, Plan, WriteError, WriteOptions, Writer, Written};
use minnow_tests::golden;
use sha2::{Digest, Sha256};

use crate::synthetic;

fn golden_file(name: &str) -> Checkpoint {
    Checkpoint::open(&golden::root().join("golden/mnw/tiny").join(name), IoBackend::Auto).unwrap()
}

fn plan_of(checkpoint: &Checkpoint, model_id: &str) -> Plan {
    let tensors = checkpoint.tensors().iter().map(|(name, tensor)| (name.clone(), tensor.spec.clone()));
    Plan { model_id: model_id.to_owned(), assets: checkpoint.assets().clone(), tensors: tensors.collect() }
}

fn give_all(writer: &mut Writer, checkpoint: &Checkpoint) -> Result<(), WriteError> {
    for (name, tensor) in checkpoint.tensors() {
        let bytes = checkpoint.read(name).unwrap();
        writer.tensor(name, &bytes.data, bytes.scales.as_deref(), tensor.spec.global_scale())?;
    }
    Ok(())
}

/// Writes `checkpoint` to `target` as the model "tiny".
fn copy(checkpoint: &Checkpoint, target: &Path, force: bool) -> Result<Written, WriteError> {
    let mut writer = Writer::create(target, plan_of(checkpoint, "tiny"), force)?;
    give_all(&mut writer, checkpoint)?;
    writer.finish()
}

fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_copy_of_a_golden_container_is_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    for name in
        ["bf16", "f16", "f32", "i4_mma", "i4_sym", "i8_mma", "i8_sym", "mixed", "nvfp4"].map(|n| format!("{n}.mnw"))
    {
        let checkpoint = golden_file(&name);
        let target = folder.path().join(&name);
        let mut writer = Writer::create(&target, plan_of(&checkpoint, checkpoint.model_id()), false).unwrap();
        give_all(&mut writer, &checkpoint).unwrap();
        let expected_bytes = writer.file_bytes();
        let written = writer.finish().unwrap();
        assert!(fs::read(&target).unwrap() == golden::bytes(&format!("golden/mnw/tiny/{name}")), "{name}");
        assert_eq!((written.path, written.file_bytes), (target.clone(), expected_bytes));
        assert_eq!(written.tensors, checkpoint.tensors().len());
        assert_eq!(fs::metadata(&target).unwrap().permissions().mode() & 0o777 & !0o644, 0);
        let container = mnw::open(io::open(&target, IoBackend::Auto).unwrap()).unwrap();
        mnw::validate(&container, Level::Strict, 2, &|_| ()).unwrap();
    }
}

#[test]
fn the_sha256_is_that_of_the_file_and_only_there_when_asked_for() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let target = folder.path().join("out.mnw");
    let options = WriteOptions { sha256: true, ..WriteOptions::default() };
    let (mut writer, _) = Writer::open(&target, synthetic::plan(), &options).unwrap();
    synthetic::give(&mut writer, 0, |_| ()).unwrap();
    let written = writer.finish().unwrap();
    let expected: String = Sha256::digest(fs::read(&target).unwrap()).iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(written.sha256, Some(expected));
    let container = mnw::open(io::open(&target, IoBackend::Auto).unwrap()).unwrap();
    mnw::validate(&container, Level::Strict, 2, &|_| ()).unwrap();
    assert_eq!(copy(&golden_file("f16.mnw"), &target, true).unwrap().sha256, None);
}

#[test]
fn safetensors_folders_become_the_golden_container() {
    let folder = tempfile::tempdir().unwrap();
    for source in ["source", "source-sharded", "source/model.safetensors"] {
        let target = folder.path().join("out.mnw");
        copy(&golden_file(source), &target, true).unwrap();
        assert!(fs::read(&target).unwrap() == golden::bytes("golden/mnw/tiny/bf16.mnw"), "{source}");
    }
    assert_eq!(names_in(folder.path()), ["out.mnw"]);
}

#[test]
fn an_existing_file_is_kept_unless_forced() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("out.mnw");
    fs::write(&target, "precious").unwrap();
    let checkpoint = golden_file("f16.mnw");
    let error = copy(&checkpoint, &target, false).unwrap_err();
    assert!(matches!(error, WriteError::Exists { .. }), "{error}");
    assert_eq!(fs::read(&target).unwrap(), b"precious");

    // Forced, it is there until the new one is complete.
    let mut writer = Writer::create(&target, plan_of(&checkpoint, checkpoint.model_id()), true).unwrap();
    give_all(&mut writer, &checkpoint).unwrap();
    assert_eq!(fs::read(&target).unwrap(), b"precious");
    writer.finish().unwrap();
    assert!(fs::read(&target).unwrap() == golden::bytes("golden/mnw/tiny/f16.mnw"));
    assert_eq!(names_in(folder.path()), ["out.mnw"]);

    let link = folder.path().join("link.mnw");
    std::os::unix::fs::symlink("nowhere", &link).unwrap();
    assert!(matches!(copy(&checkpoint, &link, false), Err(WriteError::Exists { .. })));
    fs::create_dir(folder.path().join("folder.mnw")).unwrap();
    let error = copy(&checkpoint, &folder.path().join("folder.mnw"), true).unwrap_err();
    assert!(matches!(error, WriteError::NotReplaceable { .. }), "{error}");
}

#[test]
fn a_missing_folder_is_named_at_once() {
    let started = Instant::now();
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let error = copy(&golden_file("f16.mnw"), &missing.join("out.mnw"), false).unwrap_err();
    assert!(matches!(error, WriteError::NoFolder { .. }), "{error}");
    assert!(error.to_string().starts_with(missing.to_str().unwrap()), "{error}");
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = copy(&golden_file("f16.mnw"), &file.join("out.mnw"), false).unwrap_err();
    assert!(matches!(error, WriteError::NoFolder { .. }), "{error}");
    for target in ["..", "/"] {
        let error = copy(&golden_file("f16.mnw"), Path::new(target), false).unwrap_err();
        assert!(matches!(error, WriteError::NoName { .. }), "{error}");
    }
    assert!(started.elapsed() < Duration::from_secs(1));
}

#[test]
fn a_folder_that_takes_no_files_is_named() {
    // Nothing can be created in the process file system, not even by root.
    let error = copy(&golden_file("f16.mnw"), Path::new("/proc/out.mnw"), false).unwrap_err();
    assert!(matches!(error, WriteError::NotWritable { .. } | WriteError::NoSpace { .. }), "{error}");
    assert!(error.to_string().starts_with("/proc"), "{error}");
}

#[test]
fn a_writer_that_is_dropped_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = golden_file("i8_sym.mnw");
    let mut writer = Writer::create(&folder.path().join("out.mnw"), plan_of(&checkpoint, "tiny"), false).unwrap();
    let names = names_in(folder.path());
    assert_eq!(names.len(), 1);
    assert!(
        names[0].starts_with(&format!(".out.mnw.{}-", std::process::id())) && names[0].ends_with(".tmp"),
        "{names:?}"
    );
    let (name, _) = checkpoint.tensors().iter().next().unwrap();
    writer.tensor(name, &checkpoint.read(name).unwrap().data, None, None).unwrap();
    drop(writer);
    assert!(names_in(folder.path()).is_empty());
}

#[test]
fn scales_that_no_reader_accepts_are_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = golden_file("i8_sym.mnw");
    let mut writer = Writer::create(&folder.path().join("out.mnw"), plan_of(&checkpoint, "tiny"), false).unwrap();
    for (name, tensor) in checkpoint.tensors() {
        let bytes = checkpoint.read(name).unwrap();
        let Some(scales) = &bytes.scales else {
            writer.tensor(name, &bytes.data, None, None).unwrap();
            continue;
        };
        let mut zeroed = scales.to_vec();
        zeroed[2..4].fill(0);
        let error = writer.tensor(name, &bytes.data, Some(&zeroed), tensor.spec.global_scale()).unwrap_err();
        assert!(matches!(error, WriteError::Scale { .. }), "{error}");
        assert!(matches!(writer.tensor(name, &bytes.data, None, None), Err(WriteError::Length { .. })));
        break;
    }
    let checkpoint = golden_file("nvfp4.mnw");
    let mut writer = Writer::create(&folder.path().join("out.mnw"), plan_of(&checkpoint, "tiny"), false).unwrap();
    for (name, tensor) in checkpoint.tensors() {
        let bytes = checkpoint.read(name).unwrap();
        if tensor.spec.encoding().is_quantized() {
            for scale in [None, Some(0.0), Some(f32::NAN), Some(-1.0)] {
                let error = writer.tensor(name, &bytes.data, bytes.scales.as_deref(), scale).unwrap_err();
                assert!(matches!(error, WriteError::Spec { .. }), "{error}");
            }
            break;
        }
        writer.tensor(name, &bytes.data, None, None).unwrap();
    }
}

#[test]
fn a_full_disk_is_refused_before_the_first_byte_or_named_at_the_failing_one() {
    let folder = tempfile::tempdir().unwrap();
    let mounted = Mount::tmpfs(folder.path(), "size=256k");
    let Some(_mounted) = mounted else {
        eprintln!("skipped: no tmpfs can be mounted here, so a full disk cannot be shown");
        return;
    };
    let target = folder.path().join("out.mnw");
    let checkpoint = golden_file("bf16.mnw");
    let filler = folder.path().join("filler");

    fs::write(&filler, vec![1; 200 << 10]).unwrap();
    let error = copy(&checkpoint, &target, false).unwrap_err();
    let needed = golden::bytes("golden/mnw/tiny/bf16.mnw").len();
    assert!(matches!(error, WriteError::NoSpace { needed: found, .. } if found == needed as u64), "{error}");
    assert!(error.to_string().contains(&format!("needs {needed} bytes")), "{error}");
    assert_eq!(names_in(folder.path()), ["filler"]);

    // Someone else takes the space meanwhile.
    fs::remove_file(&filler).unwrap();
    let mut writer = Writer::create(&target, plan_of(&checkpoint, "tiny"), false).unwrap();
    fs::write(&filler, vec![1; 200 << 10]).unwrap();
    let written = give_all(&mut writer, &checkpoint).and_then(|()| writer.finish());
    let error = written.unwrap_err().to_string();
    assert!(error.contains("ENOSPC") && error.contains("out.mnw"), "{error}");
    assert_eq!(names_in(folder.path()), ["filler"]);
}

#[test]
fn a_writer_is_of_no_use_after_a_failed_write() {
    let folder = tempfile::tempdir().unwrap();
    let Some(_mounted) = Mount::tmpfs(folder.path(), "size=48m") else {
        eprintln!("skipped: no tmpfs can be mounted here, so a full disk cannot be shown");
        return;
    };
    let spec = TensorSpec::new(Shape::vector(4 << 20), Encoding::Float(FloatType::F32), 0, None).unwrap();
    let tensors = ["a", "b"].map(|name| (name.to_owned(), spec.clone())).into();
    let plan = Plan { tensors, ..plan_of(&golden_file("f32.mnw"), "full") };
    let mut writer = Writer::create(&folder.path().join("out.mnw"), plan, false).unwrap();
    let filler = folder.path().join("filler");
    fs::write(&filler, vec![1; 40 << 20]).unwrap();
    let data = vec![0; 16 << 20];
    let error = writer.tensor("a", &data, None, None).unwrap_err().to_string();
    assert!(error.contains("out.mnw: writing failed: ENOSPC"), "{error}");
    fs::remove_file(&filler).unwrap();
    for name in ["a", "b"] {
        assert!(matches!(writer.tensor(name, &data, None, None), Err(WriteError::Broken { .. })));
    }
    assert!(matches!(writer.finish(), Err(WriteError::Broken { .. })));
    assert!(names_in(folder.path()).is_empty());
}

/// A file system that is unmounted when this is dropped.
struct Mount<'a>(&'a Path);

impl<'a> Mount<'a> {
    fn tmpfs(at: &'a Path, options: &str) -> Option<Self> {
        let mut command = Command::new("mount");
        let output = command.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(at).output().ok()?;
        output.status.success().then_some(Self(at))
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).status();
    }
}

#[test]
fn containers_are_written_to_shared_memory_too() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        eprintln!("skipped: /dev/shm is not writable");
        return;
    };
    let target = folder.path().join("out.mnw");
    let written = copy(&golden_file("mixed.mnw"), &target, false).unwrap();
    // Old kernels have no direct writes there, and new ones do.
    assert_eq!(written.fallback.is_some(), written.backend == "buffered");
    assert!(fs::read(&target).unwrap() == golden::bytes("golden/mnw/tiny/mixed.mnw"));
}

#[test]
fn a_plan_knows_the_length_of_its_file() {
    let checkpoint = golden_file("nvfp4.mnw");
    let mut plan = plan_of(&checkpoint, "tiny");
    assert_eq!(plan.file_bytes().unwrap(), golden::bytes("golden/mnw/tiny/nvfp4.mnw").len() as u64);
    plan.tensors.clear();
    assert!(matches!(plan.file_bytes(), Err(WriteError::Plan(_))));
}
