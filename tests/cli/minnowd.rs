//! What `minnowd` refuses: one clear line with names and values, and the right exit code.

use std::net::TcpListener;
use std::path::Path;

use minnow_tests::{checkpoint, golden, program};

/// Expects exit code `code` and one line on stderr that contains all of `words`.
fn refused(arguments: &[&str], code: i32, words: &[&str]) {
    let output = program::minnowd(arguments);
    let stderr = program::stderr(&output);
    let lines: Vec<&str> = stderr.lines().filter(|line| !line.contains(" INFO ")).collect();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{arguments:?} printed {}", program::stdout(&output));
    let [line] = lines[..] else { panic!("{arguments:?}: not one line: {stderr}") };
    assert!(line.starts_with("minnowd: "), "{line}");
    for word in words {
        assert!(line.contains(word), "{arguments:?}: {word:?} is not in {line:?}");
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a UTF-8 path")
}

#[test]
fn bad_flags_are_usage_errors_that_name_flag_and_value() {
    for (line, words) in [
        ("", &["no command"][..]),
        ("fly", &["fly"]),
        ("serve --device cuda:x", &["--device", "cuda:x", "cuda:N"]),
        ("serve --device tpu", &["--device", "tpu"]),
        ("serve --listen 8080", &["--listen", "8080"]),
        ("serve --listen 0.0.0.0:8080", &["0.0.0.0:8080", "--tls-cert", "--api-key-file", "--insecure-no-auth"]),
        ("serve --parallel 0", &["--parallel", "0"]),
        ("serve --threads 0", &["--threads", "0"]),
        ("serve --threshold 2", &["threshold", "2"]),
        ("serve --temperature -1", &["temperature", "-1"]),
        ("serve --algorithm 3.0", &["--algorithm", "3.0"]),
        ("serve --max-context 8", &["--max-context", "8", "2048"]),
        ("serve --cache-max-mib 1", &["--cache-max-mib", "1"]),
        ("serve --isa sse", &["--isa", "sse"]),
        ("serve --io floppy", &["--io", "floppy"]),
        (
            "serve --int8-expert-activations --fp4-expert-activations",
            &["--int8-expert-activations", "--fp4-expert-activations", "exclude"],
        ),
        ("generate", &["<PROMPT>"]),
        ("generate hi --raw --system x", &["--raw", "--system"]),
        ("generate hi --regex x --grammar y", &["--regex", "--grammar"]),
        ("eval", &["--data"]),
        ("eval --data x --every 0", &["--every", "0"]),
    ] {
        refused(&line.split_whitespace().collect::<Vec<_>>(), 2, words);
    }
}

#[test]
fn models_that_cannot_be_read_are_named() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let at = |name: &str| folder.path().join(name);
    let generate = |path: &Path, words: &[&str]| refused(&["generate", "x", "--model", text(path)], 1, words);

    generate(&at("nothing.mnw"), &["nothing.mnw"]);
    std::fs::create_dir(at("empty")).expect("a folder");
    generate(&at("empty"), &["empty"]);

    let whole = golden::bytes("golden/mnw/tiny/i4_mma.mnw");
    for length in [0, 1, 63, 64, 4095, whole.len() - 1] {
        std::fs::write(at("cut.mnw"), &whole[..length]).expect("a writable folder");
        generate(&at("cut.mnw"), &["cut.mnw"]);
    }
    let mut flipped = whole.clone();
    flipped[4096] ^= 1;
    std::fs::write(at("flipped.mnw"), &flipped).expect("a writable folder");
    generate(&at("flipped.mnw"), &["lm_head.weight"]);

    checkpoint::write("t16", 1, folder.path());
    let shard = at("model.safetensors");
    let bytes = std::fs::read(&shard).expect("a shard");
    std::fs::write(&shard, &bytes[..bytes.len() - 7]).expect("a writable folder");
    generate(folder.path(), &["model.safetensors"]);
    std::fs::write(&shard, &bytes).expect("a writable folder");

    let config = std::fs::read_to_string(at("config.json")).expect("a configuration");
    std::fs::write(at("config.json"), config.replace("llada2_moe", "llama")).expect("a writable folder");
    generate(folder.path(), &["model_type", "llama", "llada2_moe"]);
    std::fs::write(at("config.json"), config.replace("\"num_hidden_layers\":3", "\"num_hidden_layers\":4"))
        .expect("a writable folder");
    generate(folder.path(), &["model.layers.3."]);
}

#[test]
fn activations_of_four_bits_need_nvfp4_experts() {
    let arguments = ["generate", "x", "--device", "cpu", "--fp4-expert-activations"];
    refused(&arguments, 1, &["--fp4-expert-activations", "nvfp4", "mlp.experts.0.gate_proj.weight", "i4_mma"]);
}

#[test]
fn a_port_in_use_is_said_at_once() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    refused(&["serve", "--listen", &address], 1, &["--listen", &address, "in use"]);
}

#[test]
fn an_output_is_held_to_a_schema_and_an_unusable_one_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let (good, bad) = (folder.path().join("good.json"), folder.path().join("bad.json"));
    std::fs::write(&good, r#"{"type":"array","items":{"enum":[1,2,3]},"minItems":2,"maxItems":4}"#).expect("written");
    std::fs::write(&bad, r#"{"properties":{"a":{"not":{}}}}"#).expect("written");
    let output = program::minnowd(&["generate", "What is 2 + 2?", "--max-tokens", "200", "--json-schema", text(&good)]);
    let list: Vec<u8> = serde_json::from_str(&program::stdout(&output)).expect("a list");
    assert!((2..=4).contains(&list.len()) && list.iter().all(|item| (1..=3).contains(item)), "{list:?}");
    refused(&["generate", "x", "--json-schema", text(&bad)], 1, &["--json-schema", "properties.a.not"]);
    refused(&["generate", "x", "--json-schema", "/nowhere"], 1, &["--json-schema", "/nowhere"]);
    refused(&["generate", "x", "--regex", "("], 1, &["--regex"]);
}
