//! What `mnwtool` does when all is well, and the small things every `mnwtool` test needs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use minnow_tests::program::{self, stderr, stdout};
use minnow_tests::{checkpoint, golden};
use serde_json::Value;

/// A folder of its own for a test.
pub(crate) struct Scratch(tempfile::TempDir);

impl Scratch {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("a UTF-8 path").to_owned()
    }

    /// A copy of a folder of golden data.
    pub(crate) fn copy_of(&self, golden_folder: &str, name: &str) -> PathBuf {
        let target = self.path(name);
        std::fs::create_dir(&target).expect("a writable folder");
        for entry in std::fs::read_dir(golden::root().join(golden_folder)).expect("golden data") {
            let entry = entry.expect("an entry").path();
            std::fs::write(target.join(entry.file_name().expect("a name")), std::fs::read(&entry).expect("a file"))
                .expect("a writable folder");
        }
        target
    }

    /// Everything in the folder except what `known` names.
    pub(crate) fn left_besides(&self, known: &[&str]) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path()).expect("a folder");
        let names = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
        names.filter(|name| !known.contains(&name.as_str())).collect()
    }
}

/// The tiny source with two shards, in the repository.
pub(crate) const SHARDED: &str = "golden/mnw/tiny/source-sharded";
/// The same in one file.
pub(crate) const SOURCE: &str = "golden/mnw/tiny/source";

pub(crate) fn golden_path(name: &str) -> String {
    golden::root().join(name).to_str().expect("a UTF-8 path").to_owned()
}

/// Runs and expects success; standard output.
pub(crate) fn done(arguments: &[&str]) -> String {
    let output = program::mnwtool(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    stdout(&output)
}

/// Runs and expects success; the one JSON object on standard output.
pub(crate) fn done_json(arguments: &[&str]) -> Value {
    let text = done(arguments);
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {text}"))
}

/// Runs and expects failure with exit code `code`, nothing on standard output, and one line with all of `words` on
/// standard error.
pub(crate) fn refused(arguments: &[&str], code: i32, words: &[&str]) -> String {
    let output = program::mnwtool(arguments);
    assert_eq!(stdout(&output), "", "{arguments:?}");
    assert_refusal(&output, code, words)
}

/// Runs `work` while a file system of 4 MiB lies at `mount`, which is made for it. Returns what `work` did and how many
/// files it left there; `None` where nothing can be mounted, which is said.
pub(crate) fn on_small_disk<T>(mount: &Path, work: impl FnOnce() -> T) -> Option<(T, usize)> {
    std::fs::create_dir(mount).expect("a writable folder");
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=4m", "tmpfs"]).arg(mount).output();
    if !mounted.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: a 4 MiB tmpfs cannot be mounted here");
        return None;
    }
    let done = work();
    let left = std::fs::read_dir(mount).expect("a folder").count();
    let unmounted = Command::new("umount").arg(mount).status();
    assert!(unmounted.is_ok_and(|status| status.success()), "{} stays mounted", mount.display());
    Some((done, left))
}

/// Checks exit code and message of a failed run.
pub(crate) fn assert_refusal(output: &Output, code: i32, words: &[&str]) -> String {
    let message = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(message.starts_with("mnwtool: "), "{message}");
    for word in words {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
    message
}

/// SHA-256 of a file, as `sha256sum` and Hugging Face show it.
pub(crate) fn sha256(path: &Path) -> String {
    use sha2::Digest;
    let digest = sha2::Sha256::digest(std::fs::read(path).expect("a file"));
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Name -> (dtype, shape, bytes) of all tensors of a safetensors folder.
pub(crate) fn tensors(folder: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let mut tensors = BTreeMap::new();
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let bytes = std::fs::read(&path).expect("a file");
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        for (name, view) in file.tensors() {
            let entry = (format!("{:?}", view.dtype()), view.shape().to_vec(), view.data().to_vec());
            assert!(tensors.insert(name.clone(), entry).is_none(), "{name} twice");
        }
    }
    tensors
}

#[test]
fn a_conversion_reports_its_size_and_counts() {
    let scratch = Scratch::new();
    let (source, output) = (golden_path(SOURCE), scratch.text("a.mnw"));
    let plan =
        done_json(&["convert", &source, &output, "--experts", "int4", "--group-size", "32", "--dry-run", "--json"]);
    assert_eq!(scratch.left_besides(&[]), [""; 0]);
    let result = done_json(&["convert", &source, &output, "--experts", "int4", "--group-size", "32", "--json"]);
    let bytes = std::fs::metadata(&output).expect("the output").len();
    assert_eq!(result["file_bytes"], bytes);
    assert_eq!(result["path"], output);
    assert_eq!(result["tensors"], 20);
    assert_eq!(result["encodings"]["i4_mma"]["tensors"], 6);
    let peak = result["peak_rss_bytes"].as_u64().expect("a count");
    assert!(peak > 1 << 20 && plan["memory_bytes_max"].as_u64().is_some_and(|bound| peak < bound), "{peak}: {plan}");
    for key in ["weight_bytes", "source_bytes", "seconds"] {
        assert!(result[key].is_number(), "{key} of {result}");
    }
    for key in ["path", "file_bytes", "weight_bytes", "tensors", "source_bytes", "encodings"] {
        assert_eq!(plan[key], result[key], "the plan told another {key}");
    }
    assert_eq!(result["sha256"], sha256(Path::new(&output)));
    assert_eq!((&result["quality"], &result["bytes_read"]), (&Value::from("rtn"), &result["source_bytes"]));
    let estimate = &plan["estimate"];
    assert!(estimate["seconds_min"].as_f64().is_some_and(|seconds| seconds > 0.0), "{plan}");
    let unchecked = done_json(&["convert", &source, &output, "--force", "--no-sha256", "--json"]);
    assert_eq!(unchecked["sha256"], Value::Null);
    let text = done(&["convert", &source, &output, "--force"]);
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("20 tensors") && text.starts_with(&output), "{text}");
}

#[test]
fn inspect_describes_files_and_folders() {
    let folder = done_json(&["inspect", &golden_path(SHARDED), "--json", "--tensors", "--stats"]);
    assert_eq!((&folder["kind"], &folder["convertible"]), (&Value::from("safetensors"), &Value::from(true)));
    assert_eq!(folder["files"].as_array().expect("a list").len(), 2);
    assert_eq!(folder["tensors"].as_array().expect("a list").len(), 20);
    assert!(folder["tensors"][0]["stats"]["rms"].as_f64().is_some_and(|rms| rms > 0.0));
    assert_eq!(folder["suspicious"], Value::from(Vec::<Value>::new()));
    let file = done_json(&["inspect", &golden_path("golden/mnw/tiny/i4_mma.mnw"), "--json"]);
    assert_eq!((&file["kind"], &file["model_id"]), (&Value::from("mnw"), &Value::from("tiny")));
    assert_eq!(file["parameters"], folder["parameters"]);
    assert_eq!(file["encodings"]["i4_mma"]["bits_per_weight"], 4.5);
    assert_eq!(file["manifest_blake3"].as_str().map(str::len), Some(64));
    assert_eq!(folder["sha256"].as_array().expect("a list").len(), 2);
    let first = Path::new(&golden_path(SHARDED)).join("model-00001-of-00002.safetensors");
    assert_eq!(folder["sha256"][0], sha256(&first));
    let memory = &file["memory"];
    assert!(memory["weight_bytes"].as_u64() > Some(0) && memory["kv_bytes_per_1024_tokens_f32"].as_u64() > Some(0));
    assert!(folder["outlier_rule"].as_str().is_some_and(|rule| rule.contains("median")));
    assert!(file.get("tensors").is_none());
    let text = done(&["inspect", &golden_path(SOURCE)]);
    assert!(text.contains("convertible  yes") && text.contains("LLaDA2.2"), "{text}");
    for role in ["embedding", "attention", "router", "shared experts", "experts", "final norm", "head"] {
        assert!(text.contains(role), "{role} is not in the tree: {text}");
    }
}

/// C29
#[test]
fn inspect_tells_the_exact_size_of_each_conversion_beforehand() {
    let scratch = Scratch::new();
    let source = golden_path(SOURCE);
    let report = done_json(&["inspect", &source, "--json"]);
    let conversions = report["conversions"].as_array().expect("a list");
    assert_eq!(conversions.len(), 4);
    for conversion in conversions {
        let experts = conversion["experts"].as_str().expect("a word");
        let output = scratch.text(experts);
        if conversion["possible"] == true {
            done(&["convert", &source, &output, "--experts", experts]);
            let bytes = std::fs::metadata(&output).expect("the output").len();
            assert_eq!(conversion["file_bytes"], bytes, "{experts}");
        } else {
            // Its rows are shorter than the usual group.
            let problem = conversion["problem"].as_str().expect("a reason");
            refused(&["convert", &source, &output, "--experts", experts], 1, &[problem]);
        }
    }
    let quantized = done_json(&["inspect", &golden_path("golden/mnw/tiny/i4_mma.mnw"), "--json"]);
    let possible = |experts: &str| {
        let list = quantized["conversions"].as_array().expect("a list");
        list.iter().find(|entry| entry["experts"] == experts).map(|entry| entry["possible"].clone())
    };
    assert_eq!((possible("original"), possible("int8")), (Some(true.into()), Some(false.into())));
}

/// C18, C29
#[test]
fn inspect_says_why_a_folder_is_not_convertible_and_flags_dead_experts() {
    let scratch = Scratch::new();
    let folder = scratch.copy_of(SOURCE, "zeroed");
    let path = folder.join("model.safetensors");
    edit_tensor(&path, "model.layers.0.mlp.experts.1.up_proj.weight", |bytes| bytes.fill(0));
    let text = done(&["inspect", folder.to_str().expect("UTF-8"), "--stats"]);
    let suspicious = text.lines().find(|line| line.starts_with("suspicious")).expect("a line on the dead expert");
    assert!(suspicious.contains("model.layers.0.mlp.experts.1.up_proj.weight"), "{suspicious}");

    let sharded = scratch.copy_of(SHARDED, "lacking");
    without_tensor(&sharded, "model.layers.0.mlp.gate.weight");
    let report = done_json(&["inspect", sharded.to_str().expect("UTF-8"), "--json"]);
    assert_eq!(report["convertible"], false);
    assert!(report["problem"].as_str().is_some_and(|why| why.contains("model.layers.0.mlp.gate.weight")), "{report}");
}

/// Changes the bytes of one tensor of a safetensors file in place.
pub(crate) fn edit_tensor(path: &Path, name: &str, edit: impl FnOnce(&mut [u8])) {
    let mut bytes = std::fs::read(path).expect("a file");
    let header_bytes = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_bytes]).expect("a header");
    let offset = |index: usize| header[name]["data_offsets"][index].as_u64().expect("an offset") as usize;
    edit(&mut bytes[8 + header_bytes + offset(0)..8 + header_bytes + offset(1)]);
    std::fs::write(path, bytes).expect("a writable file");
}

/// Takes one tensor out of whichever file of a folder holds it.
pub(crate) fn without_tensor(folder: &Path, lost: &str) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let bytes = std::fs::read(&path).expect("a file");
        let file = safetensors::SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let kept: Vec<_> = file.tensors().into_iter().filter(|(name, _)| name != lost).collect();
        std::fs::write(&path, safetensors::serialize(kept, None).expect("valid tensors")).expect("a writable file");
    }
    let index = folder.join("model.safetensors.index.json");
    if let Ok(text) = std::fs::read_to_string(&index) {
        let mut json: Value = serde_json::from_str(&text).expect("an index");
        json["weight_map"].as_object_mut().expect("a map").remove(lost);
        std::fs::write(index, json.to_string()).expect("a writable file");
    }
}

#[test]
fn validate_names_level_and_counts_or_the_reason() {
    let scratch = Scratch::new();
    let good = golden_path("golden/mnw/tiny/nvfp4.mnw");
    for level in ["open", "validate", "strict"] {
        let report = done_json(&["validate", &good, "--level", level, "--json", "--workers", "2"]);
        assert_eq!((&report["valid"], &report["level"]), (&Value::from(true), &Value::from(level)));
        assert_eq!(report["tensors"], 20);
    }
    assert!(done(&["validate", &good]).contains("valid at level validate"));

    let mut bytes = std::fs::read(&good).expect("golden data");
    bytes[4096] ^= 1;
    std::fs::write(scratch.path("bad.mnw"), bytes).expect("a writable folder");
    let bad = scratch.text("bad.mnw");
    refused(&["validate", &bad], 1, &[&bad, "payload-digest", "lm_head.weight"]);
    let output = program::mnwtool(&["validate", &bad, "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_str(&stdout(&output)).expect("one JSON object");
    assert_eq!((&report["valid"], &report["reason"]), (&Value::from(false), &Value::from("payload-digest")));
    done(&["validate", &bad, "--level", "open"]);
}

#[test]
fn validate_lists_every_problem_with_tensor_and_offset() {
    let scratch = Scratch::new();
    let mut bytes = std::fs::read(golden_path("golden/mnw/tiny/nvfp4.mnw")).expect("golden data");
    let damaged = [4096, 32768, 40960];
    for offset in damaged {
        bytes[offset] ^= 1;
    }
    std::fs::write(scratch.path("bad.mnw"), bytes).expect("a writable folder");
    let bad = scratch.text("bad.mnw");
    let output = program::mnwtool(&["validate", &bad]);
    assert_refusal(&output, 1, &[&bad, "payload-digest", "lm_head.weight", "3 problems in all"]);
    assert_eq!(stdout(&output).lines().count(), 3, "{}", stdout(&output));
    let mut reports = Vec::new();
    for workers in ["1", "2", "64"] {
        let output = program::mnwtool(&["validate", &bad, "--json", "--workers", workers]);
        assert_eq!(output.status.code(), Some(1));
        let mut report: Value = serde_json::from_str(&stdout(&output)).expect("one JSON object");
        let problems = report["problems"].as_array().expect("a list");
        let offsets: Vec<u64> = problems.iter().filter_map(|problem| problem["offset"].as_u64()).collect();
        assert_eq!(offsets.len(), 3, "{report}");
        assert!(problems.iter().all(|problem| problem["reason"] == "payload-digest" && problem["tensor"].is_string()));
        assert_eq!(offsets[0], 4096);
        report["seconds"] = Value::Null;
        reports.push(report);
    }
    assert!(reports.iter().all(|report| *report == reports[0]));
}

#[test]
fn every_hostile_file_gets_the_same_answer_from_validate_as_from_its_list() {
    let scratch = Scratch::new();
    let list = golden::json("hostile/mnw/manifest.json");
    let list = list["cases"].as_array().expect("a list");
    assert_eq!(list.len(), 120);
    for entry in list {
        let file = entry["file"].as_str().expect("a name");
        let level = entry["reject_at"].as_str().expect("a level");
        if level == "model" {
            continue;
        }
        let path = golden::unpack_into(&format!("hostile/mnw/{file}"), scratch.0.path());
        let path = path.to_str().expect("UTF-8");
        let output = program::mnwtool(&["validate", path, "--level", level]);
        assert_refusal(&output, 1, &[file, entry["reason"].as_str().expect("a reason")]);
    }
}

#[test]
fn what_is_extracted_is_what_was_converted() {
    let scratch = Scratch::new();
    let (source, original) = (golden_path(SOURCE), golden_path("golden/mnw/tiny/bf16.mnw"));
    let (folder, again) = (scratch.text("folder"), scratch.text("again.mnw"));
    let report = done_json(&["extract", &original, &folder, "--json"]);
    assert_eq!((&report["weight_files"], &report["tensors"]), (&Value::from(1), &Value::from(20)));
    assert_eq!(tensors(Path::new(&folder)), tensors(Path::new(&source)));
    for asset in ["config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"] {
        let read = |folder: &str| std::fs::read(Path::new(folder).join(asset)).expect("an asset");
        assert_eq!(read(&folder), read(&source), "{asset}");
    }
    done(&["convert", &folder, &again, "--model-id", "tiny"]);
    assert_eq!(std::fs::read(&again).expect("output"), std::fs::read(&original).expect("golden data"));
    assert_eq!(scratch.left_besides(&["folder", "again.mnw"]), [""; 0]);
}

#[test]
fn quantized_experts_survive_extraction_as_f32_and_a_second_conversion() {
    let scratch = Scratch::new();
    for (file, flags) in [
        ("i4_mma.mnw", &["--experts", "int4", "--group-size", "32"][..]),
        ("i8_sym.mnw", &["--experts", "int8", "--group-size", "32", "--quant-layout", "row"][..]),
        ("nvfp4.mnw", &["--experts", "nvfp4"][..]),
    ] {
        let original = golden_path(&format!("golden/mnw/tiny/{file}"));
        let (folder, again) = (scratch.text(&format!("{file}.d")), scratch.text(file));
        done(&["extract", &original, &folder, "--dtype", "f32"]);
        let mut arguments = vec!["convert", &folder, &again, "--model-id", "tiny"];
        arguments.extend(flags);
        done(&arguments);
        assert_eq!(std::fs::read(&again).expect("output"), std::fs::read(&original).expect("golden data"), "{file}");
    }
}

#[test]
fn several_files_are_written_with_an_index_that_reads_back() {
    let scratch = Scratch::new();
    let (made, folder, again) = (scratch.text("a.mnw"), scratch.text("folder"), scratch.text("b.mnw"));
    done(&["synth", &made, "--preset", "tiny", "--experts", "int8"]);
    let report = done_json(&["extract", &made, &folder, "--shard-mib", "2", "--json"]);
    let files = report["weight_files"].as_u64().expect("a count");
    assert!(files > 2, "{report}");
    let index: Value = serde_json::from_slice(
        &std::fs::read(Path::new(&folder).join("model.safetensors.index.json")).expect("an index"),
    )
    .expect("JSON");
    let all = tensors(Path::new(&folder));
    assert_eq!(index["weight_map"].as_object().expect("a map").len(), all.len());
    done(&["convert", &folder, &again]);
    assert!(done(&["validate", &again, "--level", "strict"]).contains("strict"));
}

#[test]
fn synthetic_checkpoints_are_strictly_valid_and_depend_on_preset_and_seed_only() {
    let scratch = Scratch::new();
    let mut first = None;
    for (name, workers, encoding) in
        [("a", "1", "nvfp4"), ("b", "4", "nvfp4"), ("c", "2", "original"), ("d", "2", "int4")]
    {
        let path = scratch.text(name);
        done(&["synth", &path, "--preset", "tiny", "--seed", "7", "--workers", workers, "--experts", encoding]);
        done(&["validate", &path, "--level", "strict"]);
        let report = done_json(&["inspect", &path, "--stats", "--json"]);
        assert_eq!(report["suspicious"], Value::from(Vec::<Value>::new()));
        assert_eq!(report["convertible"], true);
        if encoding == "nvfp4" {
            let bytes = std::fs::read(&path).expect("output");
            assert_eq!(first.get_or_insert_with(|| bytes.clone()), &bytes);
        }
    }
    // Quantizing while making and making, then quantizing, are the same.
    let (made, converted) = (scratch.text("d"), scratch.text("e"));
    done(&["convert", &scratch.text("c"), &converted, "--experts", "int4", "--model-id", "tiny-synthetic"]);
    assert_eq!(std::fs::read(made).expect("output"), std::fs::read(converted).expect("output"));
}

/// C11, C19
#[test]
fn a_folder_with_a_second_weight_set_and_unknown_tensors_converts_with_warnings() {
    let scratch = Scratch::new();
    let folder = scratch.copy_of(SHARDED, "model");
    std::fs::write(folder.join("consolidated.safetensors"), b"not even safetensors").expect("a writable folder");
    std::fs::write(folder.join("special_tokens_map.json"), b"\xff\xfe").expect("a writable folder");
    let shard = folder.join("model-00001-of-00002.safetensors");
    let bytes = std::fs::read(&shard).expect("a file");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let extra = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![2], &[0; 8]).expect("a tensor");
    let mut all = file.tensors();
    all.push(("model.extra".to_owned(), extra));
    std::fs::write(&shard, safetensors::serialize(all, None).expect("valid tensors")).expect("a writable file");
    let index = folder.join("model.safetensors.index.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&index).expect("an index")).expect("JSON");
    json["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors".into();
    std::fs::write(index, json.to_string()).expect("a writable file");

    let target = scratch.text("a.mnw");
    let output = program::mnwtool(&["convert", folder.to_str().expect("UTF-8"), &target]);
    let messages = stderr(&output);
    assert!(output.status.success(), "{messages}");
    for words in ["model.extra", "consolidated.safetensors", "special_tokens_map.json"] {
        assert_eq!(
            messages.lines().filter(|line| line.contains(words) && line.contains("warning")).count(),
            1,
            "{messages}"
        );
    }
    assert_eq!(done_json(&["inspect", &target, "--json"])["tensor_count"], 21);
    done(&["validate", &target, "--level", "strict"]);
}

#[test]
fn signals_stop_a_conversion_cleanly() {
    for (signal, code) in [(rustix::process::Signal::INT, 130), (rustix::process::Signal::TERM, 143)] {
        let scratch = Scratch::new();
        let mut child = Command::new(program::path("mnwtool"))
            .args(["synth", &scratch.text("mini.mnw"), "--preset", "mini", "--layers", "3", "--experts", "int4"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("mnwtool starts");
        let deadline = Instant::now() + Duration::from_secs(60);
        while scratch.left_besides(&[]).is_empty() {
            assert!(
                Instant::now() < deadline && child.try_wait().expect("a child").is_none(),
                "no temporary file came"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(100));
        rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).expect("a running child");
        let sent = Instant::now();
        let output = child.wait_with_output().expect("a child");
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        assert!(sent.elapsed() < Duration::from_secs(10), "stopping took {:?}", sent.elapsed());
        assert_eq!(scratch.left_besides(&[]), [""; 0]);
        assert_eq!(stdout(&output), "");
    }
}

#[test]
fn the_seeded_checkpoint_converts_in_every_encoding() {
    let scratch = Scratch::new();
    let source = scratch.path("t16");
    std::fs::create_dir(&source).expect("a writable folder");
    checkpoint::write("t16", 1, &source);
    for encoding in ["original", "int8", "int4", "nvfp4"] {
        let target = scratch.text(encoding);
        done(&["convert", source.to_str().expect("UTF-8"), &target, "--experts", encoding]);
        done(&["validate", &target, "--level", "strict"]);
    }
}
