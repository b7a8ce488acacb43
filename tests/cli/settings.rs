//! Where settings come from, what shows them, and what is installed beside the programs.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use minnow_tests::golden;
use minnow_tests::program::{self, stderr, stdout};

/// A folder with a settings file.
struct Settings {
    folder: tempfile::TempDir,
}

impl Settings {
    fn new(text: &str) -> Self {
        let settings = Self { folder: tempfile::tempdir().expect("a folder") };
        std::fs::write(settings.path(), text).expect("a writable folder");
        settings
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("minnowd.toml")
    }

    fn shown(&self, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
        let mut command = Command::new(program::path("minnowd"));
        command.args(["serve", "--print-config", "--config"]).arg(self.path()).args(arguments);
        command.envs(environment.iter().copied()).output().expect("minnowd starts")
    }

    /// Expects code 2 and one line with all of `words`.
    fn refused(&self, words: &[&str]) {
        let output = self.shown(&[], &[]);
        let message = stderr(&output);
        assert_eq!((output.status.code(), message.lines().count()), (Some(2), 1), "{message}");
        assert!(words.iter().all(|word| message.contains(word)) && message.contains("minnowd.toml: "), "{message}");
    }
}

#[test]
fn the_command_line_wins_over_the_environment_over_the_file_over_defaults() {
    let settings = Settings::new(
        "listen = [\"127.0.0.1:0\", \"unix:/tmp/x.sock\"]\nparallel = 2\nqueue_capacity = 3\nstrict-requests = true\n\
         threshold = 0.25\nalias = \"5\"\nsocket-mode = \"0600\"\ndrain-timeout = 7\nmax-tokens = 9\n",
    );
    let output =
        settings.shown(&["--drain-timeout", "8"], &[("MINNOWD_DRAIN_TIMEOUT", "6"), ("MINNOWD_MAX_TOKENS", "10")]);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", stderr(&output));
    let text = stdout(&output);
    let file = settings.path().display().to_string();
    for line in [
        format!("listen = [\"127.0.0.1:0\", \"unix:/tmp/x.sock\"]  # {file}"),
        format!("parallel = 2  # {file}"),
        format!("queue-capacity = 3  # {file}"),
        format!("strict-requests = true  # {file}"),
        format!("threshold = \"0.25\"  # {file}"),
        format!("alias = 5  # {file}"),
        format!("socket-mode = \"0600\"  # {file}"),
        "drain-timeout = 8  # the command line".to_owned(),
        "max-tokens = 10  # MINNOWD_MAX_TOKENS".to_owned(),
        "any-model = false  # default".to_owned(),
        "# seed is not set".to_owned(),
    ] {
        assert!(text.lines().any(|shown| shown == line), "no {line:?} in {text}");
    }
    // What is shown says the same when it is read.
    let again = Settings::new(&text);
    let values = |text: &str| -> Vec<String> {
        text.lines().map(|line| line.split("  # ").next().unwrap_or_default().to_owned()).collect()
    };
    let output = again.shown(&[], &[]);
    assert_eq!(values(&stdout(&output)), values(&text), "{}", stderr(&output));
}

#[test]
fn a_file_that_is_wrong_is_named_with_the_setting() {
    for (text, words) in [
        ("paralel = 2", &["paralel", "no such option"][..]),
        ("config = \"x\"", &["config", "no such option"]),
        ("parallel = \"many\"", &["parallel", "many"]),
        ("parallel = [1, 2]", &["parallel", "one value"]),
        ("any-model = \"yes\"", &["any-model", "true or false"]),
        ("listen = []", &["listen", "empty"]),
        ("[serve]\nparallel = 2", &["serve", "no such option"]),
        ("alias = 2026-01-01", &["alias", "expected text"]),
        ("socket-mode = 660", &["socket-mode", "\"0660\""]),
        ("\nparallel = = 2", &["line 2"]),
        ("device = \"tpu\"", &["device", "tpu"]),
    ] {
        Settings::new(text).refused(words);
    }
    let absent = program::minnowd(&["serve", "--config", "/nowhere.toml"]);
    assert!(absent.status.code() == Some(2) && stderr(&absent).contains("/nowhere.toml: "), "{}", stderr(&absent));
    // Values that are fine alone and not together are no different from typed ones.
    let output = Settings::new("tls-cert = \"c.pem\"").shown(&[], &[]);
    assert!(output.status.code() == Some(2) && stderr(&output).contains("--tls-cert needs --tls-key"));
}

#[test]
fn a_key_in_a_file_is_a_secret_and_is_not_shown() {
    let settings = Settings::new("api-key = [\"a-key-that-is-not-shown\", \"another-key-of-that-kind\"]");
    settings.refused(&["its mode is 644", "every user can read it"]);
    std::fs::set_permissions(settings.path(), std::fs::Permissions::from_mode(0o600)).expect("a file");
    let output = settings.shown(&[], &[]);
    let text = stdout(&output);
    assert!(text.contains("# api-key: 2 not shown") && !text.contains("a-key-that"), "{text}{}", stderr(&output));
    let help = Command::new(program::path("minnowd"))
        .args(["serve", "--help"])
        .env("MINNOWD_API_KEY", "secret-of-mine")
        .output();
    let help = stdout(&help.expect("minnowd starts"));
    assert!(help.contains("MINNOWD_API_KEY") && !help.contains("secret-of-mine"), "{help}");
}

#[test]
fn both_programs_write_completions_and_manual_pages() {
    for (name, command, option) in [("minnowd", "serve", "--drain-timeout"), ("mnwtool", "convert", "--group-size")] {
        let run = |arguments: &[&str]| {
            let output = Command::new(program::path(name)).args(arguments).output().expect("the program starts");
            assert!(output.status.success(), "{}", stderr(&output));
            stdout(&output)
        };
        for shell in ["bash", "zsh", "fish"] {
            let script = run(&["completions", shell]);
            assert!(script.contains(name) && script.contains(option.trim_start_matches('-')), "{shell}: {script}");
        }
        let parsed = Command::new("bash").args(["-n", "-c", &run(&["completions", "bash"])]).status().expect("bash");
        assert!(parsed.success());
        let folder = tempfile::tempdir().expect("a folder");
        let to = folder.path().join("man1");
        run(&["manual", to.to_str().expect("UTF-8")]);
        let main = std::fs::read_to_string(to.join(format!("{name}.1"))).expect("a page");
        assert!(main.starts_with(".ie") || main.contains(".TH"), "{main}");
        let page = std::fs::read_to_string(to.join(format!("{name}-{command}.1"))).expect("a page");
        assert!(page.contains(&option.replace('-', "\\-")), "{page}");
    }
}

/// A file of `minnowd/packaging`.
fn packaging(name: &str) -> PathBuf {
    golden::root().join("../minnowd/packaging").join(name)
}

#[test]
fn the_packaged_settings_are_settings_as_they_stand_and_with_every_comment_removed() {
    let text = std::fs::read_to_string(packaging("minnowd.toml")).expect("a file");
    let output = Settings::new(&text).shown(&[], &[]);
    assert!(output.status.success(), "{}", stderr(&output));
    for line in text.lines().filter_map(|line| line.strip_prefix('#')).filter(|line| !line.starts_with(' ')) {
        let output = Settings::new(line).shown(&["--insecure-plaintext", "--insecure-no-auth"], &[]);
        let message = stderr(&output);
        // One line of a pair asks for the other one.
        assert!(output.status.success() || message.contains("needs --tls-"), "{line}: {message}");
    }
}

#[test]
fn systemd_finds_nothing_wrong_with_the_units_and_little_exposed() {
    let analyze = |arguments: &[&str]| Command::new("systemd-analyze").args(arguments).output();
    let Ok(version) = analyze(&["--version"]) else {
        eprintln!("skipped: there is no systemd-analyze");
        return;
    };
    assert!(version.status.success());
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    // The program and the page lie elsewhere in a checkout.
    let service = std::fs::read_to_string(packaging("minnowd.service")).expect("a unit");
    let program = program::path("minnowd");
    let service = service.replace("/usr/bin/minnowd", program.to_str().expect("UTF-8"));
    std::fs::write(at("minnowd.service"), service).expect("a writable folder");
    std::fs::copy(packaging("minnowd.socket"), at("minnowd.socket")).expect("a writable folder");
    let verified =
        analyze(&["verify", "--man=no", &at("minnowd.service"), &at("minnowd.socket")]).expect("it ran before");
    let complaints = stderr(&verified);
    let complaints: Vec<&str> = complaints.lines().filter(|line| line.contains("minnowd")).collect();
    assert!(verified.status.success() && complaints.is_empty(), "{}", stderr(&verified));
    let exposed = analyze(&["security", "--offline=true", "--threshold=20", "--no-pager", &at("minnowd.service")]);
    let exposed = exposed.expect("it ran before");
    let score = stdout(&exposed).lines().last().unwrap_or_default().to_owned();
    println!("{score}");
    assert!(exposed.status.success() && score.contains("minnowd.service"), "{score}{}", stderr(&exposed));
}
