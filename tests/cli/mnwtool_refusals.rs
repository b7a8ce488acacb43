//! What `mnwtool` refuses: one clear line with names and values, the right exit code, and nothing left behind.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use minnow_tests::{checkpoint, golden, program};
use serde_json::Value;

use crate::mnwtool::{
    SHARDED, SOURCE, Scratch, assert_refusal, done, edit_tensor, golden_path, on_small_disk, refused, without_tensor,
};

fn text(path: &Path) -> &str {
    path.to_str().expect("a UTF-8 path")
}

/// Expects `convert SOURCE` to be refused, and the output's folder to stay as it was.
fn convert_refused(scratch: &Scratch, source: &Path, flags: &[&str], words: &[&str]) -> String {
    let before = scratch.left_besides(&[]);
    let output = scratch.text("refused.mnw");
    let mut arguments = vec!["convert", text(source), &output];
    arguments.extend(flags);
    let message = refused(&arguments, 1, words);
    assert_eq!(scratch.left_besides(&[]), before);
    message
}

#[test]
fn bad_flags_are_usage_errors_that_name_flag_and_value() {
    for (line, words) in [
        ("convert a b --experts int5", &["int5", "--experts"][..]),
        ("convert a b --group-size 48", &["48", "--group-size"]),
        ("convert a b --experts nvfp4 --quant-layout row", &["--quant-layout row", "nvfp4"]),
        ("convert a b --experts nvfp4 --group-size 64", &["--group-size 64", "nvfp4"]),
        ("convert a b --workers 65", &["65", "--workers"]),
        ("convert a b --io floppy", &["floppy", "--io"]),
        ("convert a b --quality best", &["best", "--quality"]),
        ("convert a b --journal-mib x", &["--journal-mib", "x"]),
        ("convert a b c", &["c"]),
        ("convert a", &["OUTPUT"]),
        ("compare a", &["FILE"]),
        ("publish a", &["--to"]),
        ("push a", &["REPO"]),
        ("pull", &["REPO"]),
        ("synth a", &["--preset"]),
        ("synth a --preset mini --layers 21", &["--layers 21", "mini", "20"]),
        ("validate a --level deep", &["deep", "--level"]),
        ("extract a b --dtype f8", &["f8", "--dtype"]),
        ("explain a", &["explain"]),
    ] {
        refused(&line.split(' ').collect::<Vec<_>>(), 2, words);
    }
}

/// C08, C30
#[test]
fn damaged_or_incomplete_sources_are_named() {
    let scratch = Scratch::new();

    let truncated = scratch.copy_of(SHARDED, "truncated");
    let shard = truncated.join("model-00002-of-00002.safetensors");
    let bytes = std::fs::read(&shard).expect("a shard");
    std::fs::write(&shard, &bytes[..bytes.len() - 100]).expect("a writable folder");
    let (full, cut) = (bytes.len().to_string(), (bytes.len() - 100).to_string());
    convert_refused(&scratch, &truncated, &[], &["model-00002-of-00002.safetensors", &full, &cut]);

    let lacking = scratch.copy_of(SHARDED, "lacking-shard");
    std::fs::remove_file(lacking.join("model-00001-of-00002.safetensors")).expect("a shard");
    convert_refused(&scratch, &lacking, &[], &["model-00001-of-00002.safetensors"]);

    let lacking = scratch.copy_of(SOURCE, "lacking-tensor");
    without_tensor(&lacking, "model.norm.weight");
    convert_refused(&scratch, &lacking, &[], &["lacking-tensor", "model.norm.weight"]);

    let other = scratch.copy_of(SOURCE, "other-architecture");
    let config = std::fs::read_to_string(other.join("config.json")).expect("a configuration");
    std::fs::write(other.join("config.json"), config.replace("llada2_moe", "llama")).expect("a writable folder");
    convert_refused(&scratch, &other, &[], &["other-architecture", "llama", "llada2_moe"]);

    let unnamed = scratch.copy_of(SOURCE, "no-tokenizer");
    std::fs::remove_file(unnamed.join("tokenizer.json")).expect("a tokenizer");
    convert_refused(&scratch, &unnamed, &[], &["no-tokenizer", "tokenizer.json"]);

    std::fs::create_dir(scratch.path("empty")).expect("a writable folder");
    convert_refused(&scratch, &scratch.path("empty"), &[], &["empty"]);
    convert_refused(&scratch, &scratch.path("absent"), &[], &["absent"]);
    convert_refused(
        &scratch,
        &Path::new(&golden_path(SOURCE)).join("config.json").join("under-a-file"),
        &[],
        &["under-a-file"],
    );
}

#[test]
fn a_value_that_cannot_be_quantized_is_named_by_tensor_row_and_column() {
    let scratch = Scratch::new();
    let source = scratch.path("t16");
    std::fs::create_dir(&source).expect("a writable folder");
    checkpoint::write("t16", 1, &source);
    let expert = "model.layers.2.mlp.experts.7.up_proj.weight";
    // Row 3, column 5 of [128, 256] in BF16.
    edit_tensor(&source.join("model.safetensors"), expert, |bytes| {
        bytes[2 * (3 * 256 + 5)..][..2].copy_from_slice(&[0xc0, 0x7f])
    });
    for workers in ["1", "8"] {
        convert_refused(
            &scratch,
            &source,
            &["--experts", "int4", "--workers", workers],
            &[expert, "row 3", "column 5", "NaN"],
        );
    }
    // Floating tensors are copied whatever they hold.
    done(&["convert", text(&source), &scratch.text("kept.mnw")]);
}

/// C31
#[test]
fn a_damaged_container_is_noticed_while_it_is_copied_repacked_or_extracted() {
    let scratch = Scratch::new();
    let golden = std::fs::read(golden_path("golden/mnw/tiny/i8_sym.mnw")).expect("golden data");
    let list = done(&["inspect", &golden_path("golden/mnw/tiny/i8_sym.mnw"), "--json", "--tensors"]);
    assert!(list.contains("experts.0.down_proj"));
    // The first region is lm_head; experts follow the attention tensors. Damage one byte of each.
    for (offset, name) in [(4096, "lm_head.weight"), (32768, "model.layers.0.mlp.experts.0.down_proj.weight")] {
        let mut bytes = golden.clone();
        bytes[offset] ^= 0x10;
        std::fs::write(scratch.path("bad.mnw"), &bytes).expect("a writable folder");
        let bad = scratch.path("bad.mnw");
        convert_refused(&scratch, &bad, &[], &["bad.mnw", name, "digest"]);
        convert_refused(&scratch, &bad, &["--experts", "int8"], &["bad.mnw", name, "digest"]);
        refused(&["extract", text(&bad), &scratch.text("folder")], 1, &["bad.mnw", name, "digest"]);
        assert_eq!(scratch.left_besides(&["bad.mnw"]), [""; 0]);
    }
}

/// C05
#[test]
fn truncated_containers_tell_both_sizes() {
    let scratch = Scratch::new();
    let bytes = std::fs::read(golden_path("golden/mnw/tiny/bf16.mnw")).expect("golden data");
    for length in [0, 1, 63, 64, 4095, bytes.len() - 1] {
        std::fs::write(scratch.path("cut.mnw"), &bytes[..length]).expect("a writable folder");
        let found = length.to_string();
        for command in ["validate", "inspect"] {
            refused(&[command, &scratch.text("cut.mnw")], 1, &["cut.mnw", &found]);
        }
    }
}

/// C32
#[test]
fn an_existing_output_stays_untouched_without_force() {
    let scratch = Scratch::new();
    let source = golden_path(SOURCE);
    std::fs::write(scratch.path("old.mnw"), b"precious").expect("a writable folder");
    let old = scratch.text("old.mnw");
    refused(&["convert", &source, &old], 1, &[&old, "already exists", "--force"]);
    refused(&["synth", &old, "--preset", "tiny"], 1, &[&old, "already exists", "--force"]);
    assert_eq!(std::fs::read(&old).expect("the old file"), b"precious");
    done(&["convert", &source, &old, "--force"]);
    done(&["validate", &old]);
    // Even with force, a source is not its own output, nor is an asset of it.
    let before = std::fs::read(&old).expect("the file");
    refused(&["convert", &old, &old, "--force"], 1, &[&old, "source itself"]);
    let folder = scratch.copy_of(SOURCE, "model");
    let config = folder.join("config.json");
    refused(&["convert", text(&folder), text(&config), "--force"], 1, &["config.json", "source itself"]);
    refused(&["convert", &source, text(&folder), "--force"], 1, &["model", "is a folder"]);
    assert_eq!(std::fs::read(&old).expect("the file"), before);
    assert_eq!(scratch.left_besides(&["old.mnw", "model"]), [""; 0]);
}

#[test]
fn a_missing_output_folder_is_named() {
    let scratch = Scratch::new();
    let (output, folder) = (scratch.text("no/such/a.mnw"), scratch.text("no/such"));
    refused(&["convert", &golden_path(SOURCE), &output], 1, &[&output, &folder, "does not exist"]);
    refused(&["synth", &output, "--preset", "tiny"], 1, &[&output, &folder]);
    refused(&["extract", &golden_path("golden/mnw/tiny/bf16.mnw"), &output], 1, &[&output, &folder]);
}

#[test]
fn extraction_never_writes_into_a_folder_with_contents() {
    let scratch = Scratch::new();
    let source = golden_path("golden/mnw/tiny/bf16.mnw");
    let folder = scratch.path("folder");
    std::fs::create_dir(&folder).expect("a writable folder");
    std::fs::write(folder.join("keep"), b"x").expect("a writable folder");
    refused(&["extract", &source, text(&folder)], 1, &["folder", "not empty"]);
    std::fs::remove_file(folder.join("keep")).expect("a file");
    done(&["extract", &source, text(&folder)]);
    refused(&["extract", &golden_path(SOURCE), &scratch.text("other")], 1, &["source", "no .mnw file"]);
    assert_eq!(scratch.left_besides(&["folder"]), [""; 0]);
}

#[test]
fn rules_files_are_checked_before_anything_is_read() {
    let scratch = Scratch::new();
    let source = golden_path(SOURCE);
    let rules = scratch.text("rules.json");
    let layer = "model.layers.0.mlp.experts.";
    for (json, words) in [
        (format!(r#"[{{"prefix": "{layer}", "group": 32}}]"#), &["rules.json", "rule 1", "`group`"][..]),
        (format!(r#"[{{"prefix": "{layer}", "encoding": "fp4_mma"}}]"#), &["rules.json", "rule 1", "fp4_mma"]),
        (r#"[{"prefix": "nothing."}]"#.to_owned(), &["rule 1", "nothing."]),
        ("[".to_owned(), &["rules.json"]),
    ] {
        std::fs::write(&rules, json).expect("a writable folder");
        convert_refused(&scratch, Path::new(&source), &["--tensor-rules", &rules], words);
    }
    convert_refused(&scratch, Path::new(&source), &["--tensor-rules", &scratch.text("absent.json")], &["absent.json"]);
}

#[test]
fn rules_that_look_like_mistakes_are_warned_about() {
    let scratch = Scratch::new();
    let rules = scratch.text("rules.json");
    let rule = serde_json::json!([{"prefix": "model.layers.0.mlp.experts.", "encoding": "i8_sym", "group_size": 32},
                                  {"prefix": "model.layers.0.mlp.experts.", "encoding": "nvfp4"}]);
    std::fs::write(&rules, rule.to_string()).expect("a writable folder");
    let target = scratch.text("a.mnw");
    let arguments =
        ["convert", &golden_path(SOURCE), &target, "--group-size", "64", "--experts", "int8", "--tensor-rules", &rules];
    let output = program::mnwtool(&arguments);
    assert!(output.status.success());
    let messages = program::stderr(&output);
    assert!(messages.contains("rule 2 has no group_size") && messages.contains("--group-size 64"), "{messages}");
}

/// C01
#[test]
fn a_full_disk_is_told_and_leaves_nothing() {
    let scratch = Scratch::new();
    let mount = scratch.path("full");
    let target = mount.join("a.mnw");
    let tried = on_small_disk(&mount, || program::mnwtool(&["synth", text(&target), "--preset", "tiny"]));
    let Some((output, left)) = tried else { return };
    assert_refusal(&output, 1, &[text(&target), "ENOSPC", "no space left on device"]);
    assert_eq!(left, 0);
}

#[test]
fn an_output_that_cannot_grow_is_told_and_leaves_nothing() {
    let scratch = Scratch::new();
    let target = scratch.text("a.mnw");
    // A limit on file sizes fails in the middle of writing, where the check for free space cannot see it coming.
    let limited = format!(
        "trap '' XFSZ; ulimit -f 1024; exec '{}' synth '{target}' --preset tiny",
        program::path("mnwtool").display()
    );
    let output = Command::new("sh").args(["-c", &limited]).output().expect("a shell");
    assert_refusal(&output, 1, &[&target, "EFBIG"]);
    assert_eq!(scratch.left_besides(&[]), [""; 0]);
}

#[test]
fn what_may_not_be_read_is_told() {
    let scratch = Scratch::new();
    let folder = scratch.copy_of(SOURCE, "locked");
    let weights = folder.join("model.safetensors");
    std::fs::set_permissions(&weights, std::fs::Permissions::from_mode(0o000)).expect("our own file");
    let mut command = if rustix::process::getuid().is_root() {
        // Root may read anything, so a copy of the program runs as nobody.
        let copy = scratch.path("mnwtool");
        std::fs::copy(program::path("mnwtool"), &copy).expect("a writable folder");
        let parent = copy.parent().expect("a folder");
        std::fs::set_permissions(parent, std::fs::Permissions::from_mode(0o777)).expect("our own folder");
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(copy);
        command
    } else {
        Command::new(program::path("mnwtool"))
    };
    match command.arg("convert").arg(&folder).arg(scratch.path("a.mnw")).output() {
        Ok(output) if output.status.code() != Some(127) => {
            assert_refusal(&output, 1, &["model.safetensors", "EACCES", "permission denied"]);
        }
        _ => eprintln!("skipped: no other user can be taken on here"),
    }
    assert_eq!(scratch.left_besides(&["locked", "mnwtool"]), [""; 0]);
}

#[test]
fn names_from_outside_cannot_write_to_the_terminal() {
    let message = refused(&["inspect", "a\u{1b}[31m\nb"], 1, &["a\\u{1b}[31m\\nb"]);
    assert!(!message.contains('\u{1b}'));
}

#[test]
fn an_index_that_disagrees_with_its_shards_is_refused() {
    let scratch = Scratch::new();
    let folder = scratch.copy_of(SHARDED, "model");
    let path = folder.join("model.safetensors.index.json");
    let mut index: Value = golden::json(&format!("{SHARDED}/model.safetensors.index.json"));
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00002.safetensors".into();
    std::fs::write(&path, index.to_string()).expect("a writable folder");
    convert_refused(&scratch, &folder, &[], &["model.ghost.weight"]);
}
