//! `mnwtool` and `minnowd` as processes.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The path of a program of this workspace, built first if cargo has not built it for this run.
///
/// # Panics
/// If it does not build.
#[must_use]
pub fn path(name: &str) -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let folder = BUILT.get_or_init(|| {
        // Test executables lie in TARGET/PROFILE/deps, programs in TARGET/PROFILE.
        let exe = std::env::current_exe().expect("the path of this test");
        let folder = exe.parent().and_then(|deps| deps.parent()).expect("a target folder").to_owned();
        let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        build.current_dir(crate::golden::root()).args(["build", "--quiet", "-p", "mnwtool", "-p", "minnowd", "--bins"]);
        if folder.file_name().is_some_and(|profile| profile == "release") {
            build.arg("--release");
        }
        assert!(build.status().expect("cargo runs").success(), "the programs do not build");
        folder
    });
    folder.join(name)
}

/// Runs `mnwtool` with `args` and waits.
#[must_use]
pub fn mnwtool(args: &[&str]) -> Output {
    Command::new(path("mnwtool")).args(args).output().expect("mnwtool starts")
}

/// Runs `minnowd` with `args` and waits.
#[must_use]
pub fn minnowd(args: &[&str]) -> Output {
    Command::new(path("minnowd")).args(args).output().expect("minnowd starts")
}

/// Standard output as text.
#[must_use]
pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Standard error as text.
#[must_use]
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
