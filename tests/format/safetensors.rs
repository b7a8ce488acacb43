//! safetensors folders: what is read, and how each fault of a download or a copy is named.

use std::fs;
use std::path::Path;

use minnow_common::{Encoding, FloatType};
use minnow_formats::Checkpoint;
use minnow_formats::checkpoint::SourceKind;
use minnow_formats::io::IoBackend;
use minnow_tests::golden;
use serde_json::Value;

const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
const INDEX: &str = "model.safetensors.index.json";
const IN_FIRST: &str = "model.norm.weight";
const IN_SECOND: &str = "lm_head.weight";

/// A copy of a golden source folder.
fn copy_of(source: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(golden::root().join("golden/mnw/tiny").join(source)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

fn open(path: &Path) -> Result<Checkpoint, String> {
    Checkpoint::open(path, IoBackend::Auto).map_err(|error| error.to_string())
}

/// Opening `path` fails with a message that has all of `parts`.
fn assert_refused(path: &Path, parts: &[&str]) {
    let error = open(path).expect_err("a faulty checkpoint");
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

fn edit_index(folder: &Path, edit: impl FnOnce(&mut serde_json::Map<String, Value>)) {
    let path = folder.join(INDEX);
    let mut index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(index["weight_map"].as_object_mut().unwrap());
    fs::write(path, index.to_string()).unwrap();
}

/// A safetensors file of one F32 tensor, with any type name.
fn one_tensor(name: &str, dtype: &str) -> Vec<u8> {
    let header = format!(r#"{{"{name}":{{"dtype":"{dtype}","shape":[1],"data_offsets":[0,4]}}}}"#);
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 4]].concat()
}

#[test]
fn single_and_sharded_folders_are_the_same_checkpoint() {
    let single = open(&golden::root().join("golden/mnw/tiny/source")).unwrap();
    let sharded = open(&golden::root().join("golden/mnw/tiny/source-sharded/")).unwrap();
    let container = open(&golden::root().join("golden/mnw/tiny/bf16.mnw")).unwrap();
    assert_eq!((single.kind(), container.kind()), (SourceKind::Safetensors, SourceKind::Mnw));
    assert_eq!((single.files().len(), sharded.files().len()), (1, 2));
    assert_eq!((single.model_id(), sharded.path_id().as_str()), ("source", "source-sharded"));
    assert_eq!(single.assets(), container.assets());
    assert_eq!(single.config(), container.config());
    assert_eq!(single.tensors().len(), 20);
    for (name, tensor) in container.tensors() {
        let expected = container.read(name).unwrap();
        for folder in [&single, &sharded] {
            assert_eq!(folder.tensors()[name].spec, tensor.spec);
            let bytes = folder.read(name).unwrap();
            assert_eq!(bytes, expected, "{name}");
            folder.verify(name, &bytes).unwrap();
        }
    }
    single.check_model().unwrap();
    assert_eq!(
        single.tensors()["model.layers.0.mlp.gate.expert_bias"].spec.encoding(),
        Encoding::Float(FloatType::F32)
    );
    assert!(single.warnings().is_empty() && single.dropped_assets().is_empty());
}

#[test]
fn seeded_checkpoints_of_both_routings_are_models() {
    for preset in ["t16", "t16g"] {
        let folder = tempfile::tempdir().unwrap();
        minnow_tests::checkpoint::write(preset, 1, folder.path());
        let checkpoint = open(folder.path()).unwrap();
        checkpoint.check_model().unwrap();
        assert!(checkpoint.unneeded().is_empty());
    }
}

#[test]
fn a_truncated_shard_is_named_with_both_lengths() {
    let folder = copy_of("source-sharded");
    let path = folder.path().join(SHARDS[1]);
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    assert_refused(folder.path(), &[SHARDS[1], &whole.len().to_string(), &(whole.len() - 1).to_string()]);
    fs::write(&path, &whole[..100]).unwrap();
    assert_refused(folder.path(), &[SHARDS[1], "has 100 bytes", "for its header alone"]);
    fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
    assert_refused(folder.path(), &[SHARDS[1], &whole.len().to_string(), &(whole.len() + 1).to_string()]);
    fs::write(&path, "").unwrap();
    assert_refused(folder.path(), &[SHARDS[1], "has 0 bytes"]);
}

#[test]
fn missing_shards_are_listed_with_what_they_hold() {
    let folder = copy_of("source-sharded");
    fs::remove_file(folder.path().join(SHARDS[0])).unwrap();
    assert_refused(folder.path(), &["1 of 2 shards are missing", SHARDS[0], "10 tensors"]);
    fs::remove_file(folder.path().join(SHARDS[1])).unwrap();
    assert_refused(folder.path(), &["2 of 2 shards are missing", SHARDS[0], SHARDS[1], "20 tensors in all"]);
}

#[test]
fn the_index_is_checked_both_ways() {
    let folder = copy_of("source-sharded");
    edit_index(folder.path(), |map| drop(map.insert("ghost.weight".to_owned(), SHARDS[0].into())));
    assert_refused(folder.path(), &[INDEX, "1 tensors", SHARDS[0], "does not have", "ghost.weight"]);

    let folder = copy_of("source-sharded");
    edit_index(folder.path(), |map| drop(map.remove(IN_FIRST)));
    assert_refused(folder.path(), &[SHARDS[0], "1 tensors", "does not name", IN_FIRST]);

    // In the wrong shard is both.
    let folder = copy_of("source-sharded");
    edit_index(folder.path(), |map| drop(map.insert(IN_FIRST.to_owned(), SHARDS[1].into())));
    assert_refused(folder.path(), &[IN_FIRST]);

    let folder = copy_of("source-sharded");
    edit_index(folder.path(), |map| (0..7).for_each(|i| drop(map.insert(format!("ghost.{i}"), SHARDS[0].into()))));
    assert_refused(folder.path(), &["7 tensors", "ghost.4 and 2 more"]);
}

#[test]
fn an_index_that_leads_out_of_the_folder_or_is_malformed_is_refused() {
    for shard in ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b"] {
        let folder = copy_of("source-sharded");
        edit_index(folder.path(), |map| drop(map.insert("x".to_owned(), shard.into())));
        assert_refused(folder.path(), &[INDEX, "not a plain file name"]);
    }
    let folder = copy_of("source-sharded");
    let twice = format!(r#"{{"weight_map":{{"a":"{0}","a":"{0}"}}}}"#, SHARDS[0]);
    for text in ["", "[]", "{}", r#"{"weight_map":[]}"#, r#"{"weight_map":{}}"#, r#"{"weight_map":{"a":1}}"#, &twice] {
        fs::write(folder.path().join(INDEX), text).unwrap();
        assert_refused(folder.path(), &[INDEX, "is not a valid index"]);
    }
    let many: serde_json::Map<String, Value> =
        (0..600).map(|i| (i.to_string(), format!("{i}.safetensors").into())).collect();
    edit_index_to(folder.path(), many);
    assert_refused(folder.path(), &[INDEX, "600 shards, more than 512"]);
}

fn edit_index_to(folder: &Path, map: serde_json::Map<String, Value>) {
    fs::write(folder.join(INDEX), serde_json::json!({ "weight_map": map }).to_string()).unwrap();
}

#[test]
fn a_tensor_in_two_shards_is_refused() {
    let folder = copy_of("source-sharded");
    fs::copy(folder.path().join(SHARDS[0]), folder.path().join(SHARDS[1])).unwrap();
    assert_refused(folder.path(), &["is also in", SHARDS[0], SHARDS[1]]);
}

#[test]
fn other_types_are_refused_with_tensor_and_type() {
    for dtype in ["I64", "F64", "F8_E4M3", "BOOL", "bf16"] {
        let folder = copy_of("source");
        fs::write(folder.path().join("model.safetensors"), one_tensor("odd.weight", dtype)).unwrap();
        assert_refused(folder.path(), &["model.safetensors", "odd.weight", dtype]);
    }
}

#[test]
fn hostile_header_lengths_are_refused() {
    let folder = copy_of("source");
    let path = folder.path().join("model.safetensors");
    for length in [u64::MAX, 1 << 63, (16 << 20) + 1] {
        fs::write(&path, [&length.to_le_bytes()[..], b"{}"].concat()).unwrap();
        assert_refused(folder.path(), &["model.safetensors", &length.to_string(), "more than 16777216"]);
    }
    fs::write(&path, [&16u64.to_le_bytes()[..], b"{}"].concat()).unwrap();
    assert_refused(folder.path(), &["has 10 bytes, expected at least 24"]);
    let nested = "[".repeat(100_000);
    fs::write(&path, [&(nested.len() as u64).to_le_bytes()[..], nested.as_bytes()].concat()).unwrap();
    assert_refused(folder.path(), &["the header is not valid"]);
}

#[test]
fn other_weights_in_the_folder_are_ignored_with_one_warning() {
    let folder = copy_of("source-sharded");
    // Not even looked into.
    for name in ["consolidated.safetensors", "model-00001-of-00005.safetensors", "model.safetensors", "model.gguf"] {
        fs::write(folder.path().join(name), "garbage").unwrap();
    }
    let checkpoint = open(folder.path()).unwrap();
    assert_eq!((checkpoint.files().len(), checkpoint.warnings().len()), (2, 1));
    let warning = &checkpoint.warnings()[0];
    assert!(warning.contains("consolidated.safetensors") && warning.contains("00005"), "{warning}");
    assert!(!warning.contains(SHARDS[0]), "{warning}");
}

#[test]
fn a_folder_without_weights_says_what_it_has_instead() {
    let folder = copy_of("source-sharded");
    fs::remove_file(folder.path().join(INDEX)).unwrap();
    assert_refused(folder.path(), &["has neither", INDEX, "model.safetensors", SHARDS[0]]);
    let empty = tempfile::tempdir().unwrap();
    assert_refused(empty.path(), &["has neither"]);
}

#[test]
fn a_lone_file_is_a_checkpoint_unless_it_is_one_shard_of_several() {
    let folder = copy_of("source");
    let checkpoint = open(&folder.path().join("model.safetensors")).unwrap();
    assert_eq!((checkpoint.tensors().len(), checkpoint.model_id()), (20, "model.safetensors"));
    checkpoint.check_model().unwrap();

    let renamed = folder.path().join("weights.safetensors");
    fs::rename(folder.path().join("model.safetensors"), &renamed).unwrap();
    assert_eq!(open(&renamed).unwrap().tensors().len(), 20);

    // An index that names this file alone is checked, both ways.
    let map = checkpoint.tensors().keys().map(|name| (name.clone(), "weights.safetensors".into()));
    edit_index_to(folder.path(), map.collect());
    assert_eq!(open(&renamed).unwrap().tensors().len(), 20);
    edit_index(folder.path(), |map| drop(map.remove(IN_SECOND)));
    assert_refused(&renamed, &["does not name", IN_SECOND]);

    let folder = copy_of("source-sharded");
    assert_refused(&folder.path().join(SHARDS[0]), &[SHARDS[0], "one of the 2 shards", "give the folder"]);
}

#[test]
fn text_files_are_required_dropped_or_carried_along() {
    for name in ["config.json", "tokenizer.json", "chat_template.jinja"] {
        let folder = copy_of("source");
        fs::write(folder.path().join(name), b"\xff").unwrap();
        assert_refused(folder.path(), &[name, "is not UTF-8"]);
        fs::remove_file(folder.path().join(name)).unwrap();
        assert_refused(folder.path(), &[name, "is missing"]);
    }
    let folder = copy_of("source");
    fs::write(folder.path().join("generation_config.json"), b"\xff").unwrap();
    fs::create_dir(folder.path().join("special_tokens_map.json")).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), "{}").unwrap();
    fs::write(folder.path().join("README.md"), "not an asset").unwrap();
    let checkpoint = open(folder.path()).unwrap();
    assert_eq!(checkpoint.dropped_assets(), ["generation_config.json", "special_tokens_map.json"]);
    assert_eq!(checkpoint.assets().len(), 4);

    let folder = copy_of("source");
    fs::write(folder.path().join("config.json"), r#"{"model_type":"llama"}"#).unwrap();
    assert_refused(folder.path(), &["config.json", "model_type", "llama", "llada2_moe"]);
}

#[test]
fn a_model_that_lacks_tensors_or_has_other_shapes_is_named() {
    let folder = copy_of("source");
    let config = fs::read_to_string(folder.path().join("config.json")).unwrap();
    fs::write(folder.path().join("config.json"), config.replace(r#""num_experts": 2"#, r#""num_experts": 4"#)).unwrap();
    let error = open(folder.path()).unwrap().check_model().unwrap_err();
    assert_eq!(error.reason(), "missing-weight");
    let error = error.to_string();
    assert!(
        error.contains("6 tensors") && error.contains("experts.2.gate_proj.weight") && error.ends_with("and 1 more"),
        "{error}"
    );

    fs::write(folder.path().join("config.json"), config.replace(r#""vocab_size": 32"#, r#""vocab_size": 33"#)).unwrap();
    let error = open(folder.path()).unwrap().check_model().unwrap_err();
    assert_eq!(error.reason(), "weight-shape");
    assert!(error.to_string().contains("has shape [32, 64], expected [33, 64]"), "{error}");

    fs::write(folder.path().join("config.json"), config.replace(r#""use_qk_norm": true"#, r#""use_qk_norm": false"#))
        .unwrap();
    let checkpoint = open(folder.path()).unwrap();
    checkpoint.check_model().unwrap();
    assert_eq!(checkpoint.unneeded().len(), 2);
}
