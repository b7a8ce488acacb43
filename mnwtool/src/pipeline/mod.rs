//! The pipeline: tensors in name order in, the bytes of the output in file order out.
//!
//! ```text
//!  source::units -- units --> N workers (read, quantize) -- results --> reorder --> sink
//!        ^                                                                           |
//!        +------------------------------- credits -----------------------------------+
//! ```
//!
//! A unit is a slice of a tensor that is copied, or a tensor (or strip of rows) that is transformed. It is numbered at
//! the source, and its result is written in that order, so the output cannot depend on the number of workers or on
//! luck; nor can the error that is reported, which is the first one in that order. A unit needs a credit to start and
//! returns it when it has been written: that bounds memory, whatever any thread's speed.

pub(crate) mod budget;
mod quantize;
mod reorder;
pub(crate) mod shards;
pub(crate) mod sink;
pub(crate) mod source;

use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, bounded};
use minnow_formats::Digest;
use thiserror::Error;

use crate::plan::{Planned, Work};
use crate::progress::Progress;
use crate::signals::{Interrupt, Signals};
use quantize::Content;
pub(crate) use quantize::UnitError;
use reorder::Reorder;
use sink::{Sink, SinkError};
use source::{Source, Unit};

/// How long a signal may go unnoticed while all workers are busy.
const SIGNAL_LATENCY_MAX: Duration = Duration::from_millis(50);

/// Why an output is not complete.
#[derive(Debug, Error)]
pub(crate) enum PipelineError {
    /// A tensor could not be read or transformed.
    #[error("{name}: {error}")]
    Unit { name: String, error: UnitError },
    /// A copied tensor is not what its container's manifest says.
    #[error("{name}: {part} differs from its digest in the source's manifest; the file is damaged")]
    Digest { name: String, part: source::Part },
    /// The output could not be written.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// SIGINT or SIGTERM.
    #[error("interrupted")]
    Interrupted(Interrupt),
}

/// Carries out `plan`, whose tensors come from `source`, into `sink`. On an error all threads have ended on return.
pub(crate) fn run(
    plan: &[Planned],
    source: &dyn Source,
    sink: &mut dyn Sink,
    workers: usize,
    signals: &Signals,
    progress: &Progress,
) -> Result<(), PipelineError> {
    let in_flight = budget::units_in_flight_max(workers);
    let (credit, credits) = bounded::<()>(in_flight);
    let (unit_out, unit_in) = bounded::<(u64, Unit)>(in_flight);
    let (result_out, result_in) = bounded::<(u64, Unit, Result<Content, UnitError>)>(in_flight);

    std::thread::scope(|scope| {
        scope.spawn(move || {
            for unit in (0..).zip(source::units(plan)) {
                // Either fails only when the receiving side has given up.
                if credit.send(()).is_err() || unit_out.send(unit).is_err() {
                    return;
                }
            }
        });
        for _ in 0..workers {
            let (unit_in, result_out) = (unit_in.clone(), result_out.clone());
            scope.spawn(move || {
                for (sequence, unit) in unit_in {
                    let result = quantize::transform(&plan[unit.tensor], &unit, source);
                    if result_out.send((sequence, unit, result)).is_err() {
                        return;
                    }
                }
            });
        }
        drop((unit_in, result_out));

        // Owned by this closure, so that returning early closes them and every thread above ends.
        let (credits, result_in) = (credits, result_in);
        let mut reorder = Reorder::default();
        let mut check = DigestCheck::default();
        loop {
            if let Some(signal) = signals.received() {
                return Err(PipelineError::Interrupted(signal));
            }
            match result_in.recv_timeout(SIGNAL_LATENCY_MAX) {
                Ok((sequence, unit, result)) => reorder.push(sequence, (unit, result)),
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            while let Some((unit, result)) = reorder.pop() {
                let tensor = &plan[unit.tensor];
                let content = result.map_err(|error| PipelineError::Unit { name: tensor.name.clone(), error })?;
                check.update(tensor, &unit, &content, source)?;
                sink.write(tensor, &unit, &content)?;
                progress.advance(unit.source_bytes(tensor));
                drop(content);
                // One credit was spent on this unit, so one is there.
                let _ = credits.recv();
            }
        }
    })
}

/// Compares tensors that are copied slice by slice with the digests of their container.
#[derive(Default)]
struct DigestCheck {
    data: blake3::Hasher,
    scales: blake3::Hasher,
}

impl DigestCheck {
    fn update(
        &mut self,
        tensor: &Planned,
        unit: &Unit,
        content: &Content,
        source: &dyn Source,
    ) -> Result<(), PipelineError> {
        let Some(expected) = source.digests(&tensor.name).filter(|_| tensor.work == Work::Copy) else { return Ok(()) };
        match content {
            Content::Data(bytes) => self.data.update(bytes),
            Content::Scales(bytes) => self.scales.update(bytes),
            Content::Tensor(_) => return Ok(()),
        };
        if unit.is_last {
            let found = std::mem::take(self);
            let compared = [
                (source::Part::Data, found.data, Some(expected.data)),
                (source::Part::Scales, found.scales, expected.scales),
            ];
            for (part, found, expected) in compared {
                let found = Digest(*found.finalize().as_bytes());
                if expected.is_some_and(|expected| expected != found) {
                    return Err(PipelineError::Digest { name: tensor.name.clone(), part });
                }
            }
        }
        Ok(())
    }
}
