//! `mnwtool compare`: the size of errors, and what it does with checkpoints that differ otherwise.

use std::collections::BTreeMap;

use minnow_tests::{checkpoint, golden, program};
use serde_json::Value;

use crate::mnwtool::{SHARDED, SOURCE, Scratch, done, done_json, edit_tensor, golden_path, refused, without_tensor};

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Name -> entry of a list of objects.
fn by_name(list: &Value) -> BTreeMap<&str, &Value> {
    let list = list.as_array().expect("a list");
    list.iter().map(|entry| (entry["name"].as_str().expect("a name"), entry)).collect()
}

fn t16(scratch: &Scratch) -> String {
    let source = scratch.path("t16");
    std::fs::create_dir(&source).expect("a writable folder");
    checkpoint::write("t16", 1, &source);
    scratch.text("t16")
}

#[test]
fn a_checkpoint_does_not_differ_from_itself_in_another_container() {
    let report = done_json(&["compare", &golden_path(SOURCE), &golden_path(SHARDED), "--json"]);
    assert_eq!((&report["compared"], &report["identical"]), (&Value::from(20), &Value::from(20)));
    let report = done_json(&["compare", &golden_path(SHARDED), &golden_path("golden/mnw/tiny/bf16.mnw"), "--json"]);
    assert_eq!((&report["identical"], &report["total"]["relative_rms"]), (&Value::from(20), &Value::from(0.0)));
    assert_eq!(report["total"]["snr_db"], Value::Null);
    for list in ["missing", "extra", "shape_mismatch"] {
        assert_eq!(report[list], Value::Array(Vec::new()), "{list}");
    }
}

/// C28
#[test]
fn each_encoding_has_its_usual_error_by_tensor_layer_and_projection() {
    let scratch = Scratch::new();
    let source = t16(&scratch);
    for (experts, usual) in [("int8", 0.003..0.006), ("int4", 0.05..0.12), ("nvfp4", 0.07..0.12)] {
        let file = scratch.text(experts);
        done(&["convert", &source, &file, "--experts", experts]);
        let report = done_json(&["compare", &source, &file, "--json", "--workers", "3"]);
        let tensors = by_name(&report["tensors"]);
        for (name, tensor) in &tensors {
            let error = number(&tensor["relative_rms"]);
            if name.contains(".experts.") {
                assert!(usual.contains(&error), "{experts}: {name} is off by {error}");
                let snr = -20.0 * error.log10();
                assert!((number(&tensor["snr_db"]) - snr).abs() < 1e-9);
                assert!((number(&tensor["cosine"]) - (1.0 - error * error / 2.0)).abs() < 2e-3, "{tensor}");
                assert!(number(&tensor["max_abs_error"]) > 0.0);
            } else {
                assert_eq!((error, &tensor["identical"]), (0.0, &Value::from(true)), "{name}");
            }
        }
        let list = report["tensors"].as_array().expect("a list");
        assert!(list.is_sorted_by(|a, b| number(&a["relative_rms"]) >= number(&b["relative_rms"])), "not worst first");
        let projections = by_name(&report["projections"]);
        let up = projections["mlp.experts.*.up_proj"];
        assert_eq!(up["tensors"], 32);
        assert!(
            usual.contains(&number(&up["relative_rms"])) && up["worst"].as_str().expect("a name").contains("up_proj")
        );
        assert_eq!(projections["lm_head"]["relative_rms"], 0.0);
        let layers = by_name(&report["layers"]);
        assert_eq!(layers["layers.0"]["relative_rms"], 0.0);
        assert!(number(&layers["layers.2"]["relative_rms"]) > 0.0);
        assert!(
            layers["layers.2"]["worst"].as_str().is_some_and(|name| name.starts_with("model.layers.2.mlp.experts."))
        );
        let text = done(&["compare", &source, &file]);
        assert!(text.contains("by layer, worst first") && text.contains("mlp.experts.*.up_proj"), "{text}");
    }
}

#[test]
fn the_result_does_not_depend_on_workers_or_the_way_of_reading() {
    let scratch = Scratch::new();
    let source = t16(&scratch);
    let file = scratch.text("a.mnw");
    done(&["convert", &source, &file, "--experts", "nvfp4"]);
    let expected = done(&["compare", &source, &file, "--json", "--workers", "1"]);
    for flags in [["--workers", "8"], ["--workers", "64"], ["--io", "buffered"], ["--io", "mmap"]] {
        assert_eq!(done(&[&["compare", &source, &file, "--json"], &flags[..]].concat()), expected, "{flags:?}");
    }
}

#[test]
fn tensors_that_only_one_side_has_are_listed_and_are_no_failure() {
    let scratch = Scratch::new();
    let lacking = scratch.copy_of(SHARDED, "lacking");
    without_tensor(&lacking, "model.norm.weight");
    let lacking = lacking.to_str().expect("UTF-8");
    let source = golden_path(SOURCE);
    let report = done_json(&["compare", &source, lacking, "--json"]);
    assert_eq!((&report["missing"][0], &report["compared"]), (&Value::from("model.norm.weight"), &Value::from(19)));
    let report = done_json(&["compare", lacking, &source, "--json"]);
    assert_eq!(report["extra"][0], "model.norm.weight");
    assert!(done(&["compare", &source, lacking]).contains("missing  model.norm.weight"));

    let other = t16(&scratch);
    let report = done_json(&["compare", &source, &other, "--json"]);
    let reshaped = by_name(&report["shape_mismatch"]);
    assert!(
        reshaped["lm_head.weight"]["source_shape"].is_array() && reshaped["lm_head.weight"]["file_shape"].is_array()
    );
}

#[test]
fn a_changed_value_is_found_and_what_is_no_number_is_counted() {
    let scratch = Scratch::new();
    let name = "model.layers.0.mlp.experts.1.up_proj.weight";
    let folder = scratch.copy_of(SOURCE, "changed");
    edit_tensor(&folder.join("model.safetensors"), name, |bytes| bytes[1] ^= 0x80);
    let report = done_json(&["compare", &golden_path(SOURCE), folder.to_str().expect("UTF-8"), "--json"]);
    assert_eq!((&report["identical"], &report["tensors"][0]["name"]), (&Value::from(19), &Value::from(name)));
    edit_tensor(&folder.join("model.safetensors"), name, |bytes| bytes[..2].copy_from_slice(&[0xc0, 0x7f]));
    let report = done_json(&["compare", &golden_path(SOURCE), folder.to_str().expect("UTF-8"), "--json"]);
    let worst = &report["tensors"][0];
    assert_eq!((&worst["nonfinite"], &worst["relative_rms"]), (&Value::from(1), &Value::Null));
}

#[test]
fn what_cannot_be_read_is_a_failure() {
    let scratch = Scratch::new();
    std::fs::write(scratch.path("junk"), b"junk").expect("a writable folder");
    refused(&["compare", &golden_path(SOURCE), &scratch.text("junk")], 1, &["junk"]);
    refused(&["compare", &scratch.text("absent"), &golden_path(SOURCE)], 1, &["absent"]);
}

#[test]
fn quality_search_is_deterministic_and_lowers_the_error_of_the_tiny_model() {
    let Some(source) = golden::tiny_dir() else { return };
    let source = source.to_str().expect("a UTF-8 path");
    let scratch = Scratch::new();
    // In percent; just short of what kernels/src/codec/search.rs reaches.
    for (experts, bound) in [("int4", 14.0), ("nvfp4", 14.4)] {
        let mut errors = Vec::new();
        for quality in ["rtn", "search"] {
            let file = scratch.text(&format!("{experts}-{quality}.mnw"));
            done(&["convert", source, &file, "--experts", experts, "--quality", quality, "--workers", "1"]);
            done(&["validate", &file, "--level", "strict"]);
            let again = scratch.text("again.mnw");
            done(&["convert", source, &again, "--experts", experts, "--quality", quality, "--workers", "8", "--force"]);
            let same = std::fs::read(&file).expect("output") == std::fs::read(&again).expect("output");
            assert!(same, "{experts} {quality} depends on the workers");
            let report = done_json(&["compare", source, &file, "--json"]);
            let projections = by_name(&report["projections"]);
            let experts = projections.iter().filter(|(name, _)| name.contains(".experts.*."));
            errors.push(
                experts
                    .map(|(name, entry)| (name.to_string(), number(&entry["relative_rms"])))
                    .collect::<BTreeMap<_, _>>(),
            );
        }
        let rms =
            |errors: &BTreeMap<String, f64>| (errors.values().map(|error| error * error).sum::<f64>() / 3.0).sqrt();
        let lower = 100.0 * (1.0 - rms(&errors[1]) / rms(&errors[0]));
        println!(
            "{experts}: relative RMS error {:.5} -> {:.5}, lower by {lower:.2} %",
            rms(&errors[0]),
            rms(&errors[1])
        );
        assert!(lower >= bound, "{experts}: lower by {lower} %, less than {bound} %");
    }
}

#[test]
fn the_default_quality_is_the_specified_one() {
    let scratch = Scratch::new();
    let (plain, rtn, search) = (scratch.text("plain"), scratch.text("rtn"), scratch.text("search"));
    let source = t16(&scratch);
    for (file, flags) in [(&plain, &[][..]), (&rtn, &["--quality", "rtn"]), (&search, &["--quality", "search"])] {
        let arguments = [&["convert", &source, file, "--experts", "int4", "--model-id", "m"], flags].concat();
        assert!(program::mnwtool(&arguments).status.success());
    }
    let read = |file: &str| std::fs::read(file).expect("output");
    assert_eq!(read(&plain), read(&rtn));
    assert_eq!(read(&plain).len(), read(&search).len());
    assert_ne!(read(&plain), read(&search));
}
