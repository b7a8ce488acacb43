//! Where results go: the last stage, alone in its thread, so that hashing and writing need no locks.

use std::io;
use std::path::Path;

use minnow_formats::io::OsCause;
use minnow_formats::mnw::{RegionPart, WriteError, Writer, Written};
use thiserror::Error;

use super::source::{Piece, Unit};
use super::tray::Content;
use crate::plan::Planned;

/// Takes the results of all units, in order.
pub(crate) trait Sink {
    /// Writes what has become of `unit`, a part of `tensor`.
    fn write(&mut self, tensor: &Planned, unit: &Unit, content: Content<'_>) -> Result<(), SinkError>;
}

/// Why an output cannot be written: one line that starts with a path.
#[derive(Debug, Error)]
#[error("{0}")]
pub(crate) struct SinkError(String);

impl SinkError {
    /// The system refused to write `path`.
    pub(crate) fn write(path: &Path, error: io::Error) -> Self {
        Self(format!("{}: writing failed: {}", path.display(), OsCause(&error)))
    }

    /// The container's writer failed on `output`.
    pub(crate) fn mnw(output: &Path, error: &WriteError) -> Self {
        use WriteError as Error;
        match error {
            Error::NoName { .. }
            | Error::Exists { .. }
            | Error::NotReplaceable { .. }
            | Error::NoFolder { .. }
            | Error::NotWritable { .. }
            | Error::NoSpace { .. }
            | Error::NoPublication { .. }
            | Error::Io { .. }
            | Error::Broken { .. }
            | Error::Busy { .. }
            | Error::OtherConversion { .. }
            | Error::Journal { .. }
            | Error::ReadBack { .. }
            | Error::ReadBackDiffers { .. } => Self(error.to_string()),
            _ => Self(format!("{}: {error}", output.display())),
        }
    }
}

/// A `.mnw` file as a sink.
#[derive(Debug)]
pub(crate) struct MnwSink<'a> {
    writer: Writer,
    output: &'a Path,
    /// Whether some pieces of a tensor have been written and others are still to come.
    tensor_is_open: bool,
}

impl<'a> MnwSink<'a> {
    /// Writes through `writer`; `output` is for messages.
    pub(crate) fn new(writer: Writer, output: &'a Path) -> Self {
        Self { writer, output, tensor_is_open: false }
    }

    /// Completes and publishes the file.
    pub(crate) fn finish(self) -> Result<Written, SinkError> {
        self.writer.finish().map_err(|error| SinkError::mnw(self.output, &error))
    }

    /// Leaves what is complete for a later run, and says how many tensors that is.
    pub(crate) fn suspend(self) -> Result<usize, SinkError> {
        self.writer.suspend().map_err(|error| SinkError::mnw(self.output, &error))
    }

    fn try_write(&mut self, tensor: &Planned, unit: &Unit, content: Content<'_>) -> Result<(), WriteError> {
        let (part, bytes) = match content {
            Content::Tensor { data, scales, global_scale } => {
                return self.writer.tensor(&tensor.name, data, Some(scales), global_scale);
            }
            Content::Data(bytes) => (RegionPart::Data, bytes),
            Content::Scales(bytes) => (RegionPart::Scales, bytes),
        };
        debug_assert!(matches!(unit.piece, Piece::Bytes { .. }), "only copies come in pieces");
        if !self.tensor_is_open {
            self.writer.begin(&tensor.name, tensor.source.global_scale())?;
        }
        self.writer.piece(part, bytes)?;
        self.tensor_is_open = !unit.is_last;
        if unit.is_last { self.writer.end() } else { Ok(()) }
    }
}

impl Sink for MnwSink<'_> {
    fn write(&mut self, tensor: &Planned, unit: &Unit, content: Content<'_>) -> Result<(), SinkError> {
        self.try_write(tensor, unit, content).map_err(|error| SinkError::mnw(self.output, &error))
    }
}
