//! `mnwtool publish`: the folder that strangers get, from a checkpoint to a repository and back.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use minnow_tests::hub::FakeHub;
use minnow_tests::program::{self, stderr, stdout};
use minnow_tests::{checkpoint, golden};
use serde_json::Value;

use crate::mnwtool::{Scratch, done, done_json, refused, sha256};

const REPO: &str = "someone/t16-mnw";

/// A source of the seeded tiny checkpoint with a licence, and two files made from it.
fn made(scratch: &Scratch) -> [String; 3] {
    let source = scratch.path("t16");
    std::fs::create_dir(&source).expect("a writable folder");
    checkpoint::write("t16", 1, &source);
    std::fs::write(source.join("README.md"), "---\nlicense: apache-2.0\n---\n# t16\n").expect("a writable folder");
    std::fs::write(source.join("LICENSE.txt"), "Do what you like.\n").expect("a writable folder");
    let source = source.to_str().expect("UTF-8").to_owned();
    let (rtn, search) = (scratch.text("t16-int4.mnw"), scratch.text("t16-nvfp4.mnw"));
    done(&["convert", &source, &rtn, "--experts", "int4"]);
    done(&["convert", &source, &search, "--experts", "nvfp4", "--quality", "search"]);
    [source, rtn, search]
}

/// Every file of a folder with its bytes.
fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let name = |path: &PathBuf| path.file_name().expect("a name").to_string_lossy().into_owned();
    entries.map(|path| (name(&path), std::fs::read(&path).expect("a file"))).collect()
}

#[test]
fn the_same_files_make_the_same_folder_with_all_that_strangers_need() {
    let scratch = Scratch::new();
    let [source, rtn, search] = made(&scratch);
    let publish = |to: &str, workers: &str| {
        done_json(&[
            "publish",
            &rtn,
            &search,
            "--to",
            to,
            "--source",
            &source,
            "--base-model",
            "someone/t16",
            "--base-revision",
            "v1",
            "--repo",
            REPO,
            "--workers",
            workers,
            "--json",
        ])
    };
    let (one, two) = (scratch.text("one"), scratch.text("two"));
    publish(&one, "1");
    publish(&two, "4");
    let files = contents(Path::new(&one));
    assert!(files == contents(Path::new(&two)));
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "LICENSE.txt",
            "README.md",
            "SHA256SUMS",
            "t16-int4.minnow.json",
            "t16-int4.mnw",
            "t16-nvfp4.minnow.json",
            "t16-nvfp4.mnw",
        ]
    );
    // No second copy of what may be a hundred gigabytes.
    let inode = |path: &Path| std::fs::metadata(path).expect("a file").ino();
    assert_eq!(inode(Path::new(&rtn)), inode(&scratch.path("one/t16-int4.mnw")));
    let summed = Command::new("sha256sum").args(["-c", "SHA256SUMS"]).current_dir(&one).output().expect("sha256sum");
    assert!(summed.status.success() && stdout(&summed).lines().count() == 6, "{}", stdout(&summed));
    done(&["publish", "--check", &one]);

    // What the file and its source tell, the options included: nobody wrote them down.
    for (name, quality, experts) in [("t16-int4", "rtn", "int4"), ("t16-nvfp4", "search", "nvfp4")] {
        let facts: Value = serde_json::from_slice(&files[&format!("{name}.minnow.json")]).expect("JSON");
        assert_eq!(facts["sha256"], sha256(&scratch.path(&format!("one/{name}.mnw"))));
        assert_eq!((&facts["options"]["quality"], &facts["options"]["experts"]), (&quality.into(), &experts.into()));
        assert_eq!(
            (&facts["source"]["repository"], &facts["source"]["revision"]),
            (&"someone/t16".into(), &"v1".into())
        );
        assert_eq!(facts["source"]["files"][0]["sha256"], sha256(&scratch.path("t16/model.safetensors")));
        let error = facts["compare"]["total"]["relative_rms"].as_f64().expect("a number");
        assert!((0.01..0.2).contains(&error), "{error}");
        // Its command makes it again.
        let command = facts["options"]["command"].as_str().expect("a command");
        let again = scratch.text(&format!("again-{name}.mnw"));
        let words: Vec<&str> = command.split(' ').skip(1).collect();
        let words: Vec<&str> = words
            .iter()
            .map(|word| match *word {
                "SOURCE" => source.as_str(),
                word if word.ends_with(".mnw") => again.as_str(),
                word => word,
            })
            .collect();
        done(&words);
        assert_eq!(facts["sha256"], sha256(Path::new(&again)), "{command}");
    }
    let card = String::from_utf8(files["README.md"].clone()).expect("UTF-8");
    assert!(card.starts_with("---\nlicense: \"apache-2.0\"\nbase_model: \"someone/t16\"\n"), "{card}");
    for words in ["base_model_relation: quantized", "[LICENSE.txt](LICENSE.txt)", "mlp.experts.*.down_proj", REPO] {
        assert!(card.contains(words), "{words}: {card}");
    }
    // A parser that has nothing to do with ours, where there is one.
    let yaml = "import sys, yaml; print(yaml.safe_load(open(sys.argv[1]).read().split('---')[1])['base_model'])";
    let parsed = Command::new("python3").args(["-c", yaml]).arg(scratch.path("one/README.md")).output();
    match parsed {
        Ok(parsed) if parsed.status.success() => assert_eq!(stdout(&parsed), "someone/t16\n"),
        _ => eprintln!("skipped: python3 has no yaml here"),
    }
}

#[test]
fn what_a_card_needs_is_asked_for_before_anything_is_made() {
    let scratch = Scratch::new();
    let [source, rtn, _] = made(&scratch);
    let to = scratch.text("to");
    refused(&["publish", &rtn, "--to", &to, "--license", "mit"], 2, &["--base-model"]);
    refused(&["publish", &rtn, "--to", &to, "--base-model", "a/b"], 2, &["--license"]);
    let publish = |more: &[&str]| {
        let base = ["publish", rtn.as_str(), "--to", to.as_str(), "--source", source.as_str(), "--base-model", "a/b"];
        base.iter().copied().map(str::to_owned).chain(more.iter().map(|word| (*word).to_owned())).collect::<Vec<_>>()
    };
    let refuse = |more: &[&str], code, words: &[&str]| {
        let arguments = publish(more);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        refused(&arguments, code, words);
        assert!(!Path::new(&to).exists());
    };
    refuse(&["--exam", "other.mnw=x.json"], 2, &["other.mnw"]);
    let template = scratch.text("card.jinja");
    for (text, word) in [
        ("---\nlicense: {{ licence }}\n---\n", "undefined"),
        ("{% for x in range(9999) %}{% for y in range(9999) %}{% endfor %}{% endfor %}", "fuel"),
        ("# no front matter {{ files[0].name }}", "does not start with YAML"),
    ] {
        std::fs::write(&template, text).expect("a writable folder");
        refuse(&["--template", &template], 1, &[word]);
    }
    // A name that would need quotes in a command.
    let odd = scratch.text("a b.mnw");
    std::fs::copy(&rtn, &odd).expect("a writable folder");
    refused(&["publish", &odd, "--to", &to, "--license", "mit", "--base-model", "a/b"], 1, &["a b.mnw", "letters"]);
    let mut bytes = std::fs::read(&rtn).expect("a file");
    bytes[5000] ^= 1;
    std::fs::write(&odd, bytes).expect("a writable folder");
    let bad = scratch.text("bad.mnw");
    std::fs::rename(&odd, &bad).expect("a writable folder");
    refused(&["publish", &bad, "--to", &to, "--license", "mit", "--base-model", "a/b"], 1, &["bad.mnw", "not valid"]);
    assert!(!Path::new(&to).exists());
}

#[test]
fn a_check_lists_everything_that_is_wrong() {
    let scratch = Scratch::new();
    let [source, rtn, _] = made(&scratch);
    let to = scratch.text("to");
    done(&["publish", &rtn, "--to", &to, "--source", &source, "--base-model", "a/b", "--repo", REPO]);
    let card = scratch.path("to/README.md");
    let text = std::fs::read_to_string(&card).expect("a card");
    let problems = || {
        let output = program::mnwtool(&["publish", "--check", &to, "--json"]);
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(output.status.code(), Some(if report["valid"] == true { 0 } else { 1 }));
        report["problems"].to_string()
    };
    assert_eq!(problems(), "[]");
    let digest = sha256(Path::new(&rtn));
    for (from, to, word) in [
        ("license: ", "licence: ", "license"),
        ("relation: quantized", "relation: adapter", "base_model_relation"),
        ("pipeline_tag: text-generation", "pipeline_tag: [", "not YAML"),
        ("\n## Files", "\n{{ files }}\n## Files", "left of a template"),
        (digest.as_str(), "0", "does not have the SHA-256"),
        ("serve --model t16-int4.mnw", "serve --model t16-int3.mnw", "t16-int3.mnw, which is not there"),
    ] {
        let changed = text.replacen(from, to, 9);
        assert_ne!(changed, text, "{from}");
        std::fs::write(&card, changed).expect("a writable folder");
        let found = problems();
        // Whatever else it is, it is not what was summed.
        assert!(found.contains(word) && found.contains("README.md has SHA-256"), "{to}: {found}");
    }
    std::fs::write(&card, &text).expect("a writable folder");
    std::fs::write(scratch.path("to/stray.txt"), "x").expect("a writable folder");
    assert!(problems().contains("SHA256SUMS lacks stray.txt"));
    std::fs::remove_file(scratch.path("to/stray.txt")).expect("a writable folder");
    std::fs::remove_file(scratch.path("to/t16-int4.minnow.json")).expect("a writable folder");
    let found = problems();
    assert!(found.contains("names t16-int4.minnow.json, which is not there"), "{found}");
    assert_eq!(found.matches("t16-int4.minnow.json").count(), 2, "{found}");
}

/// Lines of the card's shell blocks.
fn commands(card: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut is_inside = false;
    for line in card.lines() {
        match line {
            "```sh" => is_inside = true,
            "```" => is_inside = false,
            line if is_inside => lines.push(line.to_owned()),
            _ => {}
        }
    }
    lines
}

#[test]
fn a_published_model_comes_back_by_the_commands_of_its_card_and_serves_as_before() {
    let (hub, scratch) = (FakeHub::new(), Scratch::new());
    let demo = golden::root().join("../minnowd/src/demo/minnow-tiny-int4.mnw");
    let original = scratch.text("tiny.mnw");
    std::fs::copy(demo, &original).expect("a writable folder");
    let exam = golden::unpack_into("golden/tiny/eval.jsonl", &scratch.path(""));
    let take = |model: &str| {
        let data = exam.to_str().expect("UTF-8");
        let output = program::minnowd(&["eval", "--model", model, "--data", data, "--every", "19", "--json"]);
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice::<Value>(&output.stdout).expect("JSON")
    };
    let before = take(&original);
    let result = scratch.text("exam.json");
    std::fs::write(&result, before.to_string()).expect("a writable folder");
    let out = scratch.text("out");
    done(&[
        "publish",
        &original,
        "--to",
        &out,
        "--license",
        "mit",
        "--base-model",
        "someone/tiny",
        "--repo",
        REPO,
        "--exam",
        &format!("tiny.mnw={result}"),
    ]);
    let card = std::fs::read_to_string(scratch.path("out/README.md")).expect("a card");
    assert!(card.contains(&format!("| {} | {} |", before["all"]["right"], before["all"]["questions"])), "{card}");

    let here = scratch.path("here");
    std::fs::create_dir(&here).expect("a writable folder");
    let command = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let mut command = Command::new(program::path(words[0]));
        command.args(&words[1..]).current_dir(&here);
        command.env_remove("HF_TOKEN").env("HF_ENDPOINT", hub.endpoint()).env("HF_HOME", scratch.path("hf"));
        command.env("MINNOWD_LISTEN", "127.0.0.1:0");
        command
    };
    let pushed = command(&format!("mnwtool push {out} {REPO} --create public")).output().expect("mnwtool starts");
    assert!(pushed.status.success(), "{}", stderr(&pushed));
    println!("$ mnwtool push out {REPO} --create public\n{}", stdout(&pushed));

    let lines = commands(&card);
    assert_eq!(lines.len(), 4, "{lines:?}");
    for line in &lines {
        if line.starts_with("minnowd serve") {
            serve_until_ready(command(line));
        } else if line.starts_with("mnwtool convert SOURCE") {
            // Its source is not published; the test above makes such files again.
        } else {
            let output = command(line).output().expect("the program starts");
            assert!(output.status.success(), "{line}: {}", stderr(&output));
            println!("$ {line}\n{}", stdout(&output));
        }
    }
    let pulled = here.join("tiny.mnw");
    assert_eq!(sha256(&pulled), sha256(Path::new(&original)));
    let pulled = pulled.to_str().expect("UTF-8");
    done(&["validate", pulled, "--level", "strict"]);
    let after = take(pulled);
    assert_eq!((&after["all"], &after["answers"]), (&before["all"], &before["answers"]));

    // The cache is that of Hugging Face's own tools: the file is a link to its bytes.
    let cache = scratch.path("hf/hub/models--someone--t16-mnw");
    let commit = std::fs::read_to_string(cache.join("refs/main")).expect("a commit");
    let link = cache.join("snapshots").join(commit).join("tiny.mnw");
    assert_eq!(std::fs::read_link(&link).expect("a link"), Path::new("../../blobs").join(sha256(Path::new(&original))));
    // And what is there is used where there is no network.
    hub.go_wrong(|_| Some(minnow_tests::hub::Fault::Mute));
    let address = format!("minnowd generate --model hf:{REPO}/tiny.mnw hello --max-tokens 8");
    let output = command(&address).output().expect("minnowd starts");
    assert!(output.status.success() && stderr(&output).contains("cannot be reached"), "{}", stderr(&output));
}

/// Runs a server until it is ready, and ends it.
fn serve_until_ready(mut command: Command) {
    let mut child = command.stderr(Stdio::piped()).spawn().expect("minnowd starts");
    let mut seen = String::new();
    for line in BufReader::new(child.stderr.take().expect("a pipe")).lines() {
        let line = line.expect("UTF-8");
        seen.push_str(&line);
        seen.push('\n');
        if line.contains("ready") {
            let pid = rustix::process::Pid::from_child(&child);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a running process");
        }
    }
    let status = child.wait().expect("an end");
    assert!(status.success() && seen.contains("ready"), "{seen}");
}
