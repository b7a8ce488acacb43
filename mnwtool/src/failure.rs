//! How a command ends when it does not succeed.

use std::fmt::Display;
use std::path::Path;

use crate::pipeline::{PipelineError, UnitError};
use crate::signals::Interrupt;

/// The three ways to fail, each with its exit code.
#[derive(Debug)]
pub(crate) enum Failure {
    /// What was typed cannot be done: 2. One line without the program's name.
    Usage(String),
    /// It was tried and failed, or the file is not valid: 1. One line that starts with a path.
    Failed(String),
    /// A signal asked for the end, and everything is cleaned up: 128 and its number.
    Interrupted(Interrupt),
}

impl Failure {
    /// A failure of an error that does not name its file.
    pub(crate) fn at(path: &Path, error: impl Display) -> Self {
        Self::Failed(format!("{}: {error}", path.display()))
    }

    /// A failure of an error whose message starts with the path.
    pub(crate) fn of(error: impl Display) -> Self {
        Self::Failed(error.to_string())
    }

    /// A failure of the pipeline. What went wrong while reading is told with the source's name.
    pub(crate) fn in_pipeline(source: &Path, error: PipelineError) -> Self {
        match error {
            PipelineError::Interrupted(interrupt) => Self::Interrupted(interrupt),
            PipelineError::Sink(error) => Self::of(error),
            PipelineError::Source(error) => Self::of(error),
            PipelineError::Unit { name, error: UnitError::Read(error) } => {
                Self::Failed(format!("{error} (tensor {name})"))
            }
            error => Self::at(source, error),
        }
    }

    /// The line for standard error, if there is anything to say.
    pub(crate) fn message(&self) -> Option<&str> {
        match self {
            Self::Usage(message) | Self::Failed(message) => Some(message),
            Self::Interrupted(_) => None,
        }
    }

    /// The exit code.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Failed(_) => 1,
            Self::Usage(_) => 2,
            Self::Interrupted(interrupt) => interrupt.exit_code(),
        }
    }
}
