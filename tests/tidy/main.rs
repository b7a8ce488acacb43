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
    let homes: [(&str, &[&str]); 21] = [
        ("safetensors::", &["formats/src/safetensors", "mnwtool/src/commands/extract.rs"]),
        ("memmap2::", &["formats/src/io"]),
        ("ureq::", &["formats/src/hub"]),
        ("saphyr::", &["mnwtool/src/commands/publish"]),
        ("io_uring::", &["formats/src/io"]),
        ("cudarc::", &["kernels/src/cuda"]),
        ("crossbeam_channel::", &["mnwtool/src/pipeline"]),
        ("indicatif::", &["mnwtool/src/progress.rs"]),
        ("clap::", &["mnwtool/src/cli.rs", "mnwtool/src/main.rs", "minnowd/src/cli"]),
        ("clap_complete::", &["mnwtool/src/cli.rs", "minnowd/src/cli"]),
        ("clap_mangen::", &["mnwtool/src/cli.rs", "minnowd/src/cli"]),
        ("toml::", &["minnowd/src/cli"]),
        ("rustls::", &["minnowd/src/http/tls.rs"]),
        ("tokio_rustls::", &["minnowd/src/http/tls.rs"]),
        ("candle_core::", &["minnowd/src/model"]),
        ("tokenizers::", &["minnowd/src/text"]),
        ("minijinja::", &["minnowd/src/text", "mnwtool/src/commands/publish"]),
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

/// The converter cases of the list of field cases; the numbers that are not here are not in it either.
const CONVERTER_CASES: [u32; 31] = [
    1, 2, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 17, 18, 19, 20, 21, 22, 23, 24, 25, 27, 28, 29, 30, 31, 32, 33, 34, 35,
];

#[test]
fn every_field_case_has_the_test_that_its_row_names() {
    let text = std::fs::read_to_string(repository().join("docs/field-cases.md")).expect("docs/field-cases.md");
    let mut cases = Vec::new();
    for row in text.lines().filter(|line| line.starts_with("| ") && line.contains('`')) {
        let case = row.split('|').nth(1).unwrap_or_default().trim();
        let [_, file, _, test, _] = row.split('`').collect::<Vec<_>>()[..] else { panic!("{row}") };
        let source = std::fs::read_to_string(repository().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(source.contains(&format!("fn {test}(")), "{case}: {file} has no test {test}");
        cases.push(case.to_owned());
    }
    for number in CONVERTER_CASES {
        assert!(cases.contains(&format!("C{number:02}")), "docs/field-cases.md has no row for C{number:02}");
    }
}

/// Every package that a build for x86-64 Linux needs, as cargo describes it. Those for other systems are not there on a
/// machine that has only built the workspace; `cargo deny` looks at them too.
fn packages() -> Vec<serde_json::Value> {
    let mut metadata = std::process::Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    metadata.current_dir(repository()).args(["metadata", "--format-version", "1", "--locked", "--offline"]);
    metadata.args(["--filter-platform", "x86_64-unknown-linux-gnu"]);
    let output = metadata.output().expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    json["packages"].as_array().expect("a list").clone()
}

/// The strings of `allow = [...]` in `.ci/deny.toml`.
fn allowed_licenses() -> Vec<String> {
    let text = std::fs::read_to_string(repository().join(".ci/deny.toml")).expect(".ci/deny.toml");
    let list = text.split("allow = [").nth(1).and_then(|rest| rest.split(']').next()).expect("a list");
    let lines = list.lines().map(str::trim).filter(|line| line.starts_with('"'));
    lines.map(|line| line.trim_matches(|c| c == '"' || c == ',').to_owned()).collect()
}

/// Whether an SPDX expression can be met by what is allowed. `AND` binds more strongly than `OR`; parentheses do not nest.
fn is_met(expression: &str, allowed: &[String]) -> bool {
    let expression = expression.replace('/', " OR ");
    if let Some((inner, rest)) = expression.strip_prefix('(').and_then(|text| text.split_once(") AND ")) {
        return is_met(inner, allowed) && is_met(rest, allowed);
    }
    let is_allowed = |id: &str| allowed.iter().any(|known| known == id.trim());
    expression.split(" OR ").any(|choice| choice.split(" AND ").all(is_allowed))
}

#[test]
fn every_package_comes_from_crates_io_with_a_licence_that_we_accept() {
    let allowed = allowed_licenses();
    assert!(allowed.iter().any(|id| id == "MIT"), "{allowed:?}");
    for package in packages() {
        let (name, source) = (&package["name"], package["source"].as_str());
        assert!(
            source.is_none_or(|source| source.contains("github.com/rust-lang/crates.io-index")),
            "{name}: {source:?}"
        );
        let license = package["license"].as_str().unwrap_or_default();
        assert!(is_met(license, &allowed), "{name} has licence {license:?}, which .ci/deny.toml does not allow");
        for banned in ["openssl-sys", "native-tls", "aws-lc-sys"] {
            assert_ne!(name, banned);
        }
    }
    let both = ["MIT".to_owned(), "ISC".to_owned()];
    for (expression, expected) in [
        ("MIT AND ISC", true),
        ("MIT AND GPL-3.0", false),
        ("GPL-3.0 OR ISC", true),
        ("(GPL-3.0 OR MIT) AND ISC", true),
        ("(GPL-3.0 OR MIT) AND GPL-3.0", false),
        ("GPL-3.0/MIT", true),
        ("", false),
    ] {
        assert_eq!(is_met(expression, &both), expected, "{expression}");
    }
}
