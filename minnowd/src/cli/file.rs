//! `--config FILE`: options of `minnowd serve` as TOML, below the command line and the environment. And the way back:
//! what is in effect, as such a file.
//!
//! A file is flat: `max-connections = 100`, named as on the command line. Its values become the options' defaults, so
//! that everything else (precedence, parsing, messages) is the command line's.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use toml::Value;

use crate::config::UsageError;
use crate::keys::mode_if_open;

/// The only command with a file.
const COMMAND: &str = "serve";
/// Options about the file itself.
const NOT_IN_FILES: [&str; 4] = ["config", "print-config", "help", "version"];
/// The option that is a secret.
const SECRET: &str = "api-key";
/// The option whose number is octal; a number in TOML would be decimal.
const OCTAL: &str = "socket-mode";

/// The file that is named on the command line or in the environment.
pub(super) fn named(command: &Command, arguments: &[OsString]) -> Option<PathBuf> {
    let lenient = command.clone().mut_subcommand(COMMAND, |serve| serve.ignore_errors(true)).ignore_errors(true);
    let matches = lenient.try_get_matches_from(arguments).ok()?;
    matches.subcommand_matches(COMMAND)?.get_one::<PathBuf>("config").cloned()
}

/// What a file sets: options by name, with their values as they would be typed.
#[derive(Debug, Default)]
pub(super) struct Settings {
    path: PathBuf,
    options: Vec<(String, Vec<String>)>,
}

impl Settings {
    /// Reads a file and checks every value that it sets.
    pub(super) fn read(path: &Path, command: &Command) -> Result<Self, UsageError> {
        let failed = |what: String| UsageError(format!("{}: {what}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
        let table: toml::Table = text.parse().map_err(|error: toml::de::Error| failed(one_line(&error, &text)))?;
        let mut options = Vec::new();
        for (key, value) in table {
            let name = key.replace('_', "-");
            let failed = |what: &str| failed(format!("{key}: {what}"));
            let known = serve(command).get_arguments().find(|option| option.get_long() == Some(&name));
            let option = known.filter(|_| !NOT_IN_FILES.contains(&name.as_str()));
            let option = option.ok_or_else(|| failed("there is no such option of minnowd serve"))?;
            let values = typed(&name, value).map_err(|what| failed(&what))?;
            check(command, option, &values).map_err(|what| failed(&what))?;
            options.push((name, values));
        }
        if options.iter().any(|(name, _)| name == SECRET)
            && let Some(mode) = mode_if_open(path).map_err(|error| failed(error.to_string()))?
        {
            return Err(failed(format!("it holds an {SECRET}, and its mode is {mode:o}: every user can read it")));
        }
        Ok(Self { path: path.to_owned(), options })
    }

    /// `command` with the file's values where nothing else is said.
    pub(super) fn beneath(&self, command: Command) -> Command {
        command.mut_subcommand(COMMAND, |serve| {
            serve.mut_args(|option| match self.of(&option) {
                Some(values) => option.default_values(values.to_vec()),
                None => option,
            })
        })
    }

    fn of(&self, option: &Arg) -> Option<&[String]> {
        let found = self.options.iter().find(|(name, _)| option.get_long() == Some(name));
        found.map(|(_, values)| values.as_slice())
    }
}

fn serve(command: &Command) -> &Command {
    command.find_subcommand(COMMAND).expect("a command line with serve")
}

/// The message and where, without the picture of the line.
fn one_line(error: &toml::de::Error, text: &str) -> String {
    let line = error.span().map(|span| text[..span.start].lines().count().max(1));
    let line = line.map_or_else(String::new, |line| format!("line {line}: "));
    format!("{line}{}", error.message().replace('\n', ", "))
}

/// A value as it would be typed.
fn typed(name: &str, value: Value) -> Result<Vec<String>, String> {
    match value {
        Value::Integer(_) if name == OCTAL => Err("write it as text, such as \"0660\"".to_owned()),
        Value::String(text) => Ok(vec![text]),
        Value::Integer(number) => Ok(vec![number.to_string()]),
        Value::Float(number) => Ok(vec![number.to_string()]),
        Value::Boolean(flag) => Ok(vec![flag.to_string()]),
        Value::Array(list) => {
            let values = list.into_iter().map(|value| match value {
                Value::Array(_) => Err("lists do not nest".to_owned()),
                value => typed(name, value),
            });
            Ok(values.collect::<Result<Vec<_>, _>>()?.concat())
        }
        Value::Datetime(_) | Value::Table(_) => {
            Err("expected text, a number, true, false, or a list of those".to_owned())
        }
    }
}

/// Whether the option takes these values, on its own.
fn check(command: &Command, option: &Arg, values: &[String]) -> Result<(), String> {
    let is_flag = matches!(option.get_action(), ArgAction::SetTrue);
    let is_list = matches!(option.get_action(), ArgAction::Append);
    match values {
        [] => return Err("the list is empty".to_owned()),
        [_, _, ..] if !is_list => return Err("expected one value, not a list".to_owned()),
        [value] if is_flag && value != "true" && value != "false" => return Err("expected true or false".to_owned()),
        _ if is_flag => return Ok(()),
        _ => {}
    }
    let name = option.get_long().unwrap_or_default();
    let arguments = values.iter().map(|value| format!("--{name}={value}"));
    let arguments = ["minnowd".to_owned(), COMMAND.to_owned()].into_iter().chain(arguments);
    // Without the environment: what is wrong there is not the file's fault.
    let alone =
        command.clone().mut_subcommand(COMMAND, |serve| serve.mut_args(|option| option.env(None::<&'static str>)));
    match alone.try_get_matches_from(arguments) {
        Ok(_) => Ok(()),
        Err(error) => Err(super::one_line(&error)),
    }
}

/// Every setting in effect as a file, each with where it comes from.
pub(super) fn shown(command: &Command, matches: &ArgMatches, file: Option<&Settings>) -> String {
    let mut text = "# minnowd serve: what is in effect, and where it comes from\n".to_owned();
    for option in serve(command).get_arguments() {
        let Some(name) = option.get_long().filter(|name| !NOT_IN_FILES.contains(name)) else { continue };
        let id = option.get_id().as_str();
        let raw = matches.get_raw(id).into_iter().flatten();
        let values: Vec<String> = raw.map(|value| value.to_string_lossy().into_owned()).collect();
        if values.is_empty() {
            let _ = writeln!(text, "# {name} is not set");
            continue;
        }
        let origin = match matches.value_source(id) {
            Some(ValueSource::CommandLine) => "the command line".to_owned(),
            Some(ValueSource::EnvVariable) => option.get_env().unwrap_or_default().to_string_lossy().into_owned(),
            _ => match file.filter(|file| file.of(option).is_some()) {
                Some(file) => file.path.display().to_string(),
                None => "default".to_owned(),
            },
        };
        if name == SECRET {
            let _ = writeln!(text, "# {name}: {} not shown  # {origin}", values.len());
            continue;
        }
        let values: Vec<String> = values.iter().map(|value| written(name, value)).collect();
        let _ = match option.get_action() {
            ArgAction::Append => writeln!(text, "{name} = [{}]  # {origin}", values.join(", ")),
            _ => writeln!(text, "{name} = {}  # {origin}", values.join(", ")),
        };
    }
    text
}

/// A value as TOML: bare where that means the same when it is read.
fn written(name: &str, value: &str) -> String {
    let is_number = value.parse::<i64>().is_ok_and(|number| number.to_string() == value);
    let is_bare = is_number || matches!(value, "true" | "false");
    if is_bare && name != OCTAL { value.to_owned() } else { Value::String(value.to_owned()).to_string() }
}
