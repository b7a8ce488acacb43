//! The shape of the repository itself: what lies at the top, who imports whom, where unsafe code is, how much data there is.

use std::path::{Path, PathBuf};

use minnow_tests::golden;

fn repository() -> &'static Path {
    golden::root().parent().expect("tests/ lies in the repository")
}

/// Every file of the repository that git would track, roughly: no `.git`, no `target`.
fn files_below(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("a readable entry").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name == ".git" || name == "target" {
            continue;
        }
        if path.is_dir() {
            files_below(&path, found);
        } else {
            found.push(path);
        }
    }
}

fn files() -> Vec<PathBuf> {
    let mut found = Vec::new();
    files_below(repository(), &mut found);
    found
}

fn shown(path: &Path) -> String {
    path.strip_prefix(repository()).expect("a file of the repository").display().to_string()
}

fn sources(below: &str) -> Vec<(String, String)> {
    files()
        .into_iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .map(|path| (shown(&path), std::fs::read_to_string(&path).expect("a UTF-8 source")))
        .filter(|(path, _)| path.starts_with(below))
        .collect()
}

/// The code of a file without comment lines and without its unit tests.
fn code(text: &str) -> String {
    let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_top_level_is_as_drawn() {
    let allowed = [
        "Cargo.toml",
        "Cargo.lock",
        "README.md",
        "mnwtool",
        "minnowd",
        "common",
        "kernels",
        "formats",
        "docs",
        "tests",
    ];
    for entry in std::fs::read_dir(repository()).expect("a readable repository") {
        let name = entry.expect("a readable entry").file_name().to_string_lossy().into_owned();
        assert!(
            name.starts_with('.') || name == "target" || allowed.contains(&name.as_str()),
            "{name} lies at the top"
        );
    }
}

#[test]
fn data_stays_below_25_mb() {
    let is_text = |path: &Path| {
        let text = ["rs", "md", "toml", "jinja", "html", "lock"];
        path.extension().and_then(|extension| extension.to_str()).is_some_and(|extension| text.contains(&extension))
    };
    let data: u64 = files()
        .iter()
        .filter(|path| !is_text(path))
        .map(|path| path.metadata().map_or(0, |metadata| metadata.len()))
        .sum();
    assert!(data < 25_000_000, "{data} bytes of data");
}

#[test]
fn crates_depend_downwards_only() {
    let allowed: [(&str, &[&str]); 5] = [
        ("common", &[]),
        ("formats", &["minnow-common"]),
        ("kernels", &["minnow-common"]),
        ("mnwtool", &["minnow-common", "minnow-formats", "minnow-kernels"]),
        ("minnowd", &["minnow-common", "minnow-formats", "minnow-kernels"]),
    ];
    for (name, allowed) in allowed {
        let manifest = std::fs::read_to_string(repository().join(name).join("Cargo.toml")).expect("a manifest");
        let dependencies = manifest.split("[dependencies]").nth(1).unwrap_or_default();
        let dependencies = dependencies.split("\n[").next().unwrap_or_default();
        for ours in ["minnow-common", "minnow-formats", "minnow-kernels", "mnwtool", "minnowd"] {
            let imports = dependencies.lines().any(|line| line.starts_with(ours));
            assert!(!imports || allowed.contains(&ours), "{name} depends on {ours}");
        }
    }
}

/// Packages that have one home (`docs/architecture.md`): a second one is a design question, not a line to slip in.
#[test]
fn packages_stay_at_home() {
    let homes: [(&str, &[&str]); 14] = [
        ("safetensors::", &["formats/src/safetensors", "mnwtool/src/commands/extract.rs"]),
        ("memmap2::", &["formats/src/io"]),
        ("io_uring::", &["formats/src/io"]),
        ("cudarc::", &["kernels/src/cuda"]),
        ("crossbeam_channel::", &["mnwtool/src/pipeline"]),
        ("indicatif::", &["mnwtool/src/progress.rs"]),
        ("clap::", &["mnwtool/src/cli.rs", "mnwtool/src/main.rs", "minnowd/src/cli.rs"]),
        ("candle_core::", &["minnowd/src/model"]),
        ("tokenizers::", &["minnowd/src/text"]),
        ("minijinja::", &["minnowd/src/text"]),
        ("minijinja_contrib::", &["minnowd/src/text"]),
        ("axum::", &["minnowd/src/http"]),
        ("tracing_subscriber::", &["minnowd/src/cli.rs"]),
        ("signal_hook::", &["mnwtool/src"]),
    ];
    for program in ["common/src", "formats/src", "kernels/src", "mnwtool/src", "minnowd/src"] {
        for (path, text) in sources(program) {
            let code = code(&text);
            for (package, homes) in homes {
                let used = code.contains(&format!("use {package}")) || code.contains(&format!(" {package}"));
                assert!(!used || homes.iter().any(|home| path.starts_with(home)), "{path} uses {package}");
            }
        }
    }
}

#[test]
fn plain_data_modules_know_no_model_server_or_clock() {
    for module in ["minnowd/src/decoder", "minnowd/src/cache", "minnowd/src/scheduler"] {
        for (path, text) in sources(module) {
            let code = code(&text);
            for foreign in [
                "crate::model",
                "crate::engine",
                "crate::http",
                "crate::text",
                "std::time",
                "std::fs",
                "tokio",
                "tracing",
            ] {
                assert!(!code.contains(foreign), "{path} uses {foreign}");
            }
        }
    }
}

#[test]
fn every_file_with_unsafe_code_is_listed_in_docs_unsafe() {
    let listed = std::fs::read_to_string(repository().join("docs/unsafe.md")).expect("docs/unsafe.md");
    for program in ["common/src", "formats/src", "kernels/src", "mnwtool/src", "minnowd/src"] {
        for (path, text) in sources(program) {
            let has_unsafe = code(&text).lines().any(|line| line.contains("unsafe ") && !line.contains("unsafe_"));
            assert!(!has_unsafe || listed.contains(&path), "{path} has unsafe code that docs/unsafe.md does not name");
        }
    }
}

#[test]
fn every_source_file_says_what_it_is_about() {
    for program in ["common/src", "formats/src", "kernels/src", "mnwtool/src", "minnowd/src", "tests"] {
        for (path, text) in sources(program) {
            assert!(text.starts_with("//!"), "{path} does not open with what it is about");
        }
    }
}

#[test]
fn documents_that_code_refers_to_exist() {
    for (path, text) in sources("") {
        for word in text.split(|c: char| c.is_whitespace() || "`()\",;".contains(c)) {
            let word = word.trim_end_matches('.');
            if word.starts_with("docs/") && word.ends_with(".md") {
                assert!(repository().join(word).exists(), "{path} refers to {word}, which is not there");
            }
        }
    }
}
