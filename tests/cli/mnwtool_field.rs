//! Cases from the field: what users of other converters have met, as facts about this one. `docs/field-cases.md` says
//! which test has which case; some are in other files.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use minnow_formats::digest::Digest;
use minnow_formats::io::{self, IoBackend};
use minnow_formats::mnw::{self, HEADER_BYTES, Region};
use minnow_tests::program::{self, stderr};
use minnow_tests::{checkpoint, golden};
use serde_json::Value;

use crate::mnwtool::{
    SHARDED, SOURCE, Scratch, assert_refusal, done, done_json, edit_tensor, golden_path, on_small_disk, refused,
    tensors,
};

const ENCODINGS: [&str; 4] = ["original", "int8", "int4", "nvfp4"];
const BACKENDS: [&str; 5] = ["auto", "uring", "direct", "buffered", "mmap"];

fn text(path: &Path) -> &str {
    path.to_str().expect("a UTF-8 path")
}

/// The seeded tiny checkpoint, as a folder of one shard.
fn t16(scratch: &Scratch) -> PathBuf {
    let source = scratch.path("t16");
    std::fs::create_dir(&source).expect("a writable folder");
    checkpoint::write("t16", 1, &source);
    source
}

/// Converts with a named backend; `None`, with a line, where this machine refuses it.
fn converted_by(source: &str, target: &str, backend: &str) -> Option<Value> {
    let output = program::mnwtool(&["convert", source, target, "--experts", "int8", "--io", backend, "--json"]);
    let message = stderr(&output);
    if !output.status.success() && matches!(backend, "uring" | "direct") && message.contains("refused") {
        // C24: a refusal names the file, its file system and the cause.
        assert!(message.contains(source) && message.contains(": "), "{message}");
        eprintln!("skipped: {message}");
        return None;
    }
    assert!(output.status.success(), "{backend}: {message}");
    Some(serde_json::from_slice(&output.stdout).expect("one JSON object"))
}

/// C02
#[test]
fn too_little_space_is_told_in_numbers_before_the_first_byte() {
    let scratch = Scratch::new();
    let (source, mount) = (scratch.text("source.mnw"), scratch.path("small"));
    done(&["synth", &source, "--preset", "tiny"]);
    let target = mount.join("a.mnw");
    let tried = on_small_disk(&mount, || {
        [&[][..], &["--dry-run"], &["--resume"]]
            .map(|flags| program::mnwtool(&[&["convert", &source, text(&target)], flags].concat()))
    });
    let Some((outputs, left)) = tried else { return };
    let needed =
        done_json(&["convert", &source, &scratch.text("b.mnw"), "--dry-run", "--json"])["file_bytes"].to_string();
    for output in &outputs {
        assert_refusal(output, 1, &[text(&target), &needed, "free"]);
    }
    assert_eq!(left, 0);
}

/// C04
#[test]
fn a_missing_output_folder_is_noticed_before_weights_are_read() {
    let scratch = Scratch::new();
    let started = Instant::now();
    // The source does not even exist: the destination is looked at first.
    refused(&["convert", &scratch.text("absent"), &scratch.text("no/such/a.mnw")], 1, &["no/such", "does not exist"]);
    assert!(started.elapsed() < Duration::from_secs(1));
}

/// C06
#[test]
fn memory_does_not_grow_with_the_number_of_shards() {
    let scratch = Scratch::new();
    let (made, few, many) = (scratch.text("a.mnw"), scratch.text("few"), scratch.text("many"));
    done(&["synth", &made, "--preset", "tiny"]);
    let peak = |folder: &str, shard_mib: &str| {
        let files = done_json(&["extract", &made, folder, "--shard-mib", shard_mib, "--json"])["weight_files"].clone();
        let target = format!("{folder}.mnw");
        let report = done_json(&["convert", folder, &target, "--experts", "int4", "--workers", "2", "--json"]);
        (files.as_u64().expect("a count"), report["peak_rss_bytes"].as_u64().expect("a count"))
    };
    let (one_file, with_one) = peak(&few, "4096");
    let (files, with_many) = peak(&many, "1");
    assert!(one_file == 1 && files > 8, "{files} files");
    // Each open file may keep buffers of its own for unaligned reads; a shard may not.
    assert!(with_many < with_one + (32 << 20) && with_many < 1 << 30, "{with_one} bytes, with many files {with_many}");
}

/// C07
#[test]
fn a_tensor_larger_than_the_budget_is_never_in_memory_as_a_whole() {
    let memory = Path::new("/dev/shm");
    let room = rustix::fs::statvfs(memory).map_or(0, |space| space.f_bavail * space.f_frsize);
    if room < 4 << 30 {
        eprintln!("skipped: /dev/shm has no room for a checkpoint with large tensors");
        return;
    }
    let folder = tempfile::tempdir_in(memory).expect("a temporary folder");
    let path = |name: &str| text(&folder.path().join(name)).to_owned();
    // Embedding and head have 614 MiB each.
    done(&["synth", &path("a.mnw"), "--preset", "mini", "--layers", "1", "--workers", "2"]);
    let report = done_json(&["convert", &path("a.mnw"), &path("b.mnw"), "--workers", "8", "--json"]);
    let peak = report["peak_rss_bytes"].as_u64().expect("a count");
    assert!(peak < 300 << 20, "{peak} bytes");
}

/// C08
#[test]
fn a_truncated_shard_is_named_with_both_lengths_even_in_its_header() {
    let scratch = Scratch::new();
    let folder = scratch.copy_of(SHARDED, "cut");
    let shard = folder.join("model-00002-of-00002.safetensors");
    let bytes = std::fs::read(&shard).expect("a shard");
    for length in [0, 7, 8, 100, bytes.len() - 1] {
        std::fs::write(&shard, &bytes[..length]).expect("a writable folder");
        for command in [&["inspect"][..], &["convert"]] {
            let target = scratch.text("a.mnw");
            let mut arguments = [command, &[text(&folder)]].concat();
            if command == ["convert"] {
                arguments.push(&target);
            }
            refused(&arguments, 1, &["model-00002-of-00002.safetensors", &length.to_string()]);
        }
    }
}

/// C10
#[test]
fn a_missing_shard_is_told_with_the_number_of_its_tensors() {
    let scratch = Scratch::new();
    let folder = scratch.copy_of(SHARDED, "model");
    std::fs::remove_file(folder.join("model-00001-of-00002.safetensors")).expect("a shard");
    let index: Value = golden::json(&format!("{SHARDED}/model.safetensors.index.json"));
    let shards = index["weight_map"].as_object().expect("a map").values();
    let count = shards.filter(|shard| *shard == "model-00001-of-00002.safetensors").count();
    let words = ["model-00001-of-00002.safetensors", &count.to_string()];
    refused(&["convert", text(&folder), &scratch.text("a.mnw")], 1, &words);
}

/// C12
#[test]
fn only_files_that_the_index_names_are_opened() {
    let scratch = Scratch::new();
    let folder = scratch.copy_of(SHARDED, "model");
    for name in ["model-00001-of-00005.safetensors", "model-00002-of-00005.safetensors"] {
        // Whoever opened it would fail; root could read a file without permissions, but nobody can parse this.
        std::fs::write(folder.join(name), b"another split").expect("a writable folder");
    }
    let target = scratch.text("a.mnw");
    let output = program::mnwtool(&["convert", text(&folder), &target, "--model-id", "tiny"]);
    let messages = stderr(&output);
    assert!(output.status.success() && messages.contains("model-00001-of-00005.safetensors"), "{messages}");
    let expected = std::fs::read(golden_path("golden/mnw/tiny/bf16.mnw")).expect("golden data");
    assert!(std::fs::read(&target).expect("output") == expected);
}

/// C13
#[test]
fn a_single_file_without_an_index_converts_by_folder_or_by_file() {
    let scratch = Scratch::new();
    let folder = golden_path(SOURCE);
    let file = format!("{folder}/model.safetensors");
    let targets = [scratch.text("a.mnw"), scratch.text("b.mnw")];
    done(&["convert", &folder, &targets[0], "--model-id", "m"]);
    done(&["convert", &file, &targets[1], "--model-id", "m"]);
    assert!(std::fs::read(&targets[0]).expect("output") == std::fs::read(&targets[1]).expect("output"));
}

/// C15
#[test]
fn a_group_size_that_does_not_divide_is_refused_before_anything_is_written() {
    let scratch = Scratch::new();
    let started = Instant::now();
    // Rows of 64 elements, groups of 128.
    let words = ["model.layers.0.mlp.experts.0.down_proj.weight", "128", "i4_mma"];
    refused(&["convert", &golden_path(SOURCE), &scratch.text("a.mnw"), "--experts", "int4"], 1, &words);
    refused(&["convert", &golden_path(SOURCE), &scratch.text("a.mnw"), "--experts", "int4", "--dry-run"], 1, &words);
    assert!(started.elapsed() < Duration::from_secs(2));
    assert_eq!(scratch.left_besides(&[]), [""; 0]);
}

/// C17
#[test]
fn an_expert_of_zeros_and_a_group_of_zeros_stay_exact_zeros() {
    let scratch = Scratch::new();
    let source = t16(&scratch);
    let weights = source.join("model.safetensors");
    let (dead, partly) = ("model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.experts.4.up_proj.weight");
    edit_tensor(&weights, dead, |bytes| bytes.fill(0));
    // The first 128 elements of BF16.
    edit_tensor(&weights, partly, |bytes| bytes[..256].fill(0));
    for experts in &ENCODINGS[1..] {
        let (file, folder) = (scratch.text(experts), scratch.text(&format!("{experts}.d")));
        done(&["convert", text(&source), &file, "--experts", experts]);
        done(&["validate", &file, "--level", "strict"]);
        done(&["extract", &file, &folder, "--dtype", "f32"]);
        let all = tensors(Path::new(&folder));
        assert!(all[dead].2.iter().all(|&byte| byte & 0x7f == 0), "{experts}: {dead} is not zero");
        let values =
            |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<_>>();
        assert!(values(&all[partly].2)[..128].iter().all(|value| *value == 0.0), "{experts}");
        assert!(values(&all[partly].2)[128..].iter().any(|value| *value != 0.0), "{experts}");
        for (name, (dtype, _, bytes)) in &all {
            assert!(dtype != "F32" || values(bytes).iter().all(|value| value.is_finite()), "{experts}: {name}");
        }
        let suspects = done_json(&["inspect", &file, "--stats", "--json"])["suspicious"].to_string();
        assert!(suspects.contains(dead) && !suspects.contains(partly), "{suspects}");
    }
}

/// Overwrites the scales of a tensor with zeros and makes every digest fit again, as a faulty writer would.
fn zero_scales(file: &str, name: &str) {
    let opened = io::open(Path::new(file), IoBackend::Buffered).expect("a file");
    let container = mnw::open(opened).expect("a container");
    let (mut header, scales) = (container.header, container.manifest.tensors[name].scales.expect("scales"));
    let mut bytes = std::fs::read(file).expect("a file");
    let zeros = &mut bytes[scales.offset.0 as usize..scales.end() as usize];
    zeros.fill(0);
    let fitting = Digest::of(zeros);
    let start = header.manifest_offset.0 as usize;
    let mut manifest = container.manifest;
    manifest.tensors.get_mut(name).expect("a tensor").scales = Some(Region { digest: fitting, ..scales });
    let encoded = manifest.encode();
    bytes[start..].copy_from_slice(&encoded);
    header.manifest_digest = Digest::of(&encoded);
    bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
    std::fs::write(file, bytes).expect("a writable file");
}

/// C18
#[test]
fn zeroed_scales_are_told_even_if_every_digest_fits() {
    let scratch = Scratch::new();
    let source = t16(&scratch);
    let name = "model.layers.2.mlp.experts.9.down_proj.weight";
    for experts in &ENCODINGS[1..] {
        let file = scratch.text(experts);
        done(&["convert", text(&source), &file, "--experts", experts]);
        let sound = done_json(&["inspect", &file, "--stats", "--json"])["suspicious"].to_string();
        assert_eq!(sound, "[]", "{experts}");
        zero_scales(&file, name);
        if *experts == "nvfp4" {
            // The format allows a block scale of zero, so only the values can tell.
            done(&["validate", &file, "--level", "strict"]);
            let report = done_json(&["inspect", &file, "--stats", "--json"]);
            assert!(report["suspicious"].to_string().contains(name), "{}", report["suspicious"]);
        } else {
            refused(&["validate", &file], 1, &[name, "scale-value"]);
            let output = program::minnowd(&["generate", "--model", &file, "hello"]);
            assert!(output.status.code() == Some(1) && stderr(&output).contains(name), "{}", stderr(&output));
        }
    }
}

/// C18
#[test]
fn an_expert_far_larger_than_the_others_is_flagged() {
    let scratch = Scratch::new();
    let source = t16(&scratch);
    let name = "model.layers.2.mlp.experts.9.down_proj.weight";
    edit_tensor(&source.join("model.safetensors"), name, |bytes| {
        // 8.0 in BF16; the others are below 0.2.
        bytes.as_chunks_mut::<2>().0.fill([0x00, 0x41]);
    });
    let report = done_json(&["inspect", text(&source), "--stats", "--json"]);
    let suspects = report["suspicious"].to_string();
    assert!(suspects.contains("far larger") && suspects.contains(name), "{suspects}");
}

/// C21, C25
#[test]
fn every_backend_reads_and_writes_on_every_file_system_here() {
    let places = [std::env::temp_dir(), PathBuf::from("/dev/shm"), golden::root().join("../target")];
    let mut first = None;
    for place in places.iter().filter(|place| place.is_dir()) {
        let folder = tempfile::tempdir_in(place).expect("a temporary folder");
        checkpoint::write("t16", 1, folder.path());
        for backend in BACKENDS {
            let target = folder.path().join(format!("{backend}.mnw"));
            let Some(report) = converted_by(text(folder.path()), text(&target), backend) else { continue };
            let used = report["io"].as_str().expect("a word");
            assert!(backend == "auto" || used == backend, "{backend} was asked for, {used} was used");
            assert!(matches!(report["io_write"].as_str(), Some("direct" | "buffered")), "{report}");
            let mut bytes = std::fs::read(&target).expect("output");
            // The folder's random name is the model's, in the manifest: compare what comes before.
            bytes.truncate(report["weight_bytes"].as_u64().expect("a count") as usize);
            assert!(
                first.get_or_insert_with(|| bytes[4096..].to_vec()) == &bytes[4096..],
                "{backend} on {}",
                place.display()
            );
        }
    }
}

/// C22
#[test]
fn odd_offsets_and_lengths_are_read_by_every_backend() {
    let scratch = Scratch::new();
    let folder = scratch.path("odd");
    std::fs::create_dir(&folder).expect("a writable folder");
    checkpoint::write("t16", 1, &folder);
    // A header one byte longer shifts every tensor to an odd offset.
    let weights = folder.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).expect("a file");
    let header_bytes = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    bytes.insert(8 + header_bytes as usize, b' ');
    bytes[..8].copy_from_slice(&(header_bytes + 1).to_le_bytes());
    std::fs::write(&weights, bytes).expect("a writable folder");
    let mut files = Vec::new();
    for backend in BACKENDS {
        let target = scratch.text(backend);
        if converted_by(text(&folder), &target, backend).is_some() {
            files.push(std::fs::read(target).expect("output"));
        }
    }
    assert!(files.len() >= 3 && files.iter().all(|file| *file == files[0]));
}

/// C23
#[test]
fn direct_conversions_leave_the_page_cache_alone() {
    let scratch = Scratch::new();
    let (source, target) = (scratch.text("a.mnw"), scratch.text("b.mnw"));
    done(&["synth", &source, "--preset", "tiny"]);
    let cached = |path: &str| -> Option<u64> {
        let output =
            Command::new("fincore").args(["--bytes", "--noheadings", "--output", "RES", path]).output().ok()?;
        String::from_utf8_lossy(&output.stdout).trim().parse().ok()
    };
    let forget = |path: &str| {
        let advice = rustix::fs::Advice::DontNeed;
        let file = std::fs::File::open(path).expect("a file");
        file.sync_all().expect("a disk");
        rustix::fs::fadvise(&file, 0, None, advice).expect("a regular file");
    };
    forget(&source);
    let Some(before) = cached(&source) else {
        eprintln!("skipped: there is no fincore here");
        return;
    };
    let Some(report) = converted_by(&source, &target, "direct") else { return };
    let bytes = std::fs::metadata(&source).expect("a file").len();
    let grown = cached(&source).expect("a count").saturating_sub(before);
    assert!(grown < bytes / 10, "{grown} of {bytes} bytes of the source are cached");
    if report["io_write"] == "direct" {
        let (cached, bytes) = (cached(&target).expect("a count"), std::fs::metadata(&target).expect("a file").len());
        assert!(cached < bytes / 10, "{cached} of {bytes} bytes of the output are cached");
    }
}

/// C24
#[test]
fn a_named_backend_is_used_or_its_refusal_names_path_and_file_system() {
    let scratch = Scratch::new();
    let source = t16(&scratch);
    for backend in BACKENDS {
        if let Some(report) = converted_by(text(&source), &scratch.text(backend), backend) {
            assert!(backend == "auto" || report["io"] == backend, "{report}");
        }
    }
}

/// C30
#[test]
fn an_unknown_architecture_is_refused_with_the_supported_one() {
    let scratch = Scratch::new();
    let folder = scratch.copy_of(SOURCE, "other");
    let config = std::fs::read_to_string(folder.join("config.json")).expect("a configuration");
    std::fs::write(folder.join("config.json"), config.replace("llada2_moe", "mixtral")).expect("a writable folder");
    for command in [&["inspect", text(&folder)][..], &["convert", text(&folder), &scratch.text("a.mnw")]] {
        refused(command, 1, &["other", "mixtral", "llada2_moe"]);
    }
}

/// C31
#[test]
fn one_flipped_bit_anywhere_in_the_payload_is_found_and_named() {
    let scratch = Scratch::new();
    let golden = std::fs::read(golden_path("golden/mnw/tiny/i4_mma.mnw")).expect("golden data");
    let list = done_json(&["inspect", &golden_path("golden/mnw/tiny/i4_mma.mnw"), "--json", "--tensors"]);
    let names: Vec<&str> =
        list["tensors"].as_array().expect("a list").iter().filter_map(|tensor| tensor["name"].as_str()).collect();
    let bad = scratch.text("bad.mnw");
    for offset in (4096..65536).step_by(4096) {
        let mut bytes = golden.clone();
        bytes[offset] ^= 0x40;
        std::fs::write(&bad, bytes).expect("a writable folder");
        let output = program::mnwtool(&["validate", &bad, "--json"]);
        assert_eq!(output.status.code(), Some(1));
        let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        let problem = &report["problems"][0];
        assert!(problem["tensor"].as_str().is_some_and(|name| names.contains(&name)), "{problem}");
        // It starts where its region does.
        assert!(problem["offset"].as_u64().is_some_and(|start| start <= offset as u64), "{problem}");
    }
}

/// C33
#[test]
fn converting_twice_gives_the_same_bytes() {
    let scratch = Scratch::new();
    let source = t16(&scratch);
    for experts in ENCODINGS {
        let files = ["1", "1", "8", "64"].map(|workers| {
            let target = scratch.text("a.mnw");
            done(&["convert", text(&source), &target, "--experts", experts, "--workers", workers, "--force"]);
            std::fs::read(target).expect("output")
        });
        assert!(files.iter().all(|file| *file == files[0]), "{experts}");
    }
}

/// C34
#[test]
fn hostile_files_are_refused_within_a_second() {
    let scratch = Scratch::new();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let list = golden::json("hostile/mnw/manifest.json");
    for entry in list["cases"].as_array().expect("a list") {
        let file = entry["file"].as_str().expect("a name");
        let path = golden::unpack_into(&format!("hostile/mnw/{file}"), folder.path());
        for command in [&["inspect", text(&path)][..], &["convert", text(&path), &scratch.text("a.mnw")]] {
            let started = Instant::now();
            let output = program::mnwtool(command);
            assert!(started.elapsed() < Duration::from_secs(1), "{file}: {:?}", started.elapsed());
            assert!(matches!(output.status.code(), Some(0 | 1)), "{file}: {}", stderr(&output));
            let _ = std::fs::remove_file(scratch.path("a.mnw"));
        }
        assert_eq!(scratch.left_besides(&[]), [""; 0], "{file}");
    }
}

/// C35
#[test]
fn router_weights_and_biases_keep_their_precision_in_every_encoding() {
    let scratch = Scratch::new();
    let source = t16(&scratch);
    let expected = tensors(&source);
    for experts in ENCODINGS {
        let (file, folder) = (scratch.text(experts), scratch.text(&format!("{experts}.d")));
        done(&["convert", text(&source), &file, "--experts", experts]);
        done(&["extract", &file, &folder]);
        let found = tensors(Path::new(&folder));
        let routers: Vec<&String> = expected.keys().filter(|name| name.contains(".mlp.gate.")).collect();
        assert_eq!(routers.len(), 4);
        for name in routers {
            assert_eq!(found[name], expected[name], "{experts}: {name}");
        }
        assert_eq!(found["model.layers.1.mlp.gate.expert_bias"].0, "F32");
    }
}
