//! `mnwtool`: makes, describes, checks and unpacks `.mnw` checkpoints. Files in, files out.
//!
//! This file parses, calls, and maps the outcome to an exit code: 0 done, 1 failed, 2 wrong usage, 130 or 143 stopped by
//! a signal.

mod cli;
mod commands;
mod failure;
mod pipeline;
mod plan;
mod process;
mod progress;
mod rules;
mod scan;
mod signals;
mod synthetic;
mod terminal;

use std::process::ExitCode;

use cli::{Command, Refused};
use failure::Failure;

fn main() -> ExitCode {
    let outcome = match cli::parse(std::env::args_os()) {
        Ok(Command::Convert(options)) => commands::convert::run(&options),
        Ok(Command::Inspect(options)) => commands::inspect::run(&options),
        Ok(Command::Validate(options)) => commands::validate::run(&options),
        Ok(Command::Compare(options)) => commands::compare::run(&options),
        Ok(Command::Extract(options)) => commands::extract::run(&options),
        Ok(Command::Synth(options)) => commands::synth::run(&options),
        Ok(Command::Publish(options)) => commands::publish::run(&options),
        Ok(Command::CheckPublished(options)) => commands::publish::run_check(&options),
        Ok(Command::Push(options)) => commands::push::run(&options),
        Ok(Command::Pull(options)) => commands::pull::run(&options),
        Ok(Command::Repair(options)) => commands::repair::run(&options),
        Ok(Command::Manual(options)) => commands::manual::run(&options),
        Err(Refused::Shown(text)) => terminal::print(&text),
        Err(Refused::Usage(message)) => Err(Failure::Usage(message)),
    };
    let Err(failure) = outcome else { return ExitCode::SUCCESS };
    if let Some(message) = failure.message() {
        terminal::say(message);
    }
    ExitCode::from(failure.exit_code())
}
