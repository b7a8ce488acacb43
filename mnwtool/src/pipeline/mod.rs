//! The pipeline: tensors in name order in, the bytes of the output in file order out.
//!
//! ```text
//!  source::units --> reader (reads in flight) --> N workers (quantize) --> reorder --> sink
//!                      ^                                                                |
//!                      +-------------------------- empty trays -------------------------+
//! ```
//!
//! A unit is a slice of a tensor that is copied, or a tensor (or strip of rows) that is transformed. It is numbered at
//! the source, and its result is written in that order, so the output cannot depend on the number of workers, on the
//! way it is read or on luck; nor can the error that is reported, which is the first one in that order. A unit needs a
//! tray to start and gives it back when it has been written: that bounds memory, whatever any thread's speed.
//!
//! The calling thread is the last stage. Hashing and writing go on in the writer's own threads.

pub(crate) mod budget;
mod quantize;
mod read;
mod reorder;
pub(crate) mod shards;
pub(crate) mod sink;
pub(crate) mod source;
mod tray;

use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, bounded};
use minnow_formats::Digest;
use minnow_formats::io::{self, IoBackend, IoError, ReadQueue, SyncQueue};
use minnow_kernels::codec::Quality;
use thiserror::Error;

use crate::plan::{Planned, Work};
use crate::progress::Progress;
use crate::signals::{Interrupt, Signals};
use budget::Budget;
pub(crate) use quantize::UnitError;
use quantize::Worker;
use read::Reader;
use reorder::Reorder;
use sink::{Sink, SinkError};
use source::{Part, Source, Unit};
pub(crate) use tray::Content;
use tray::Tray;

/// How long a signal may go unnoticed while nothing arrives at the sink.
const SIGNAL_LATENCY_MAX: Duration = Duration::from_millis(50);

/// What is to be done.
#[derive(Clone, Copy)]
pub(crate) struct Job<'a> {
    /// Every tensor of the output.
    pub(crate) plan: &'a [Planned],
    /// How many of them the output has already.
    pub(crate) first: usize,
    /// Where they come from.
    pub(crate) source: &'a dyn Source,
    /// How it is read; `None` if it is in no file.
    pub(crate) io: Option<IoBackend>,
    /// How codes are chosen.
    pub(crate) quality: Quality,
    /// Threads that transform.
    pub(crate) workers: usize,
}

/// What was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Done {
    /// Bytes that were read from the source's files.
    pub(crate) bytes_read: u64,
}

/// Why an output is not complete.
#[derive(Debug, Error)]
pub(crate) enum PipelineError {
    /// A tensor could not be read or transformed.
    #[error("{name}: {error}")]
    Unit { name: String, error: UnitError },
    /// A copied tensor is not what its container's manifest says.
    #[error("{name}: {part} differs from its digest in the source's manifest; the file is damaged")]
    Digest { name: String, part: Part },
    /// The source cannot be read in the way that was asked for, or has changed.
    #[error(transparent)]
    Source(#[from] IoError),
    /// The output could not be written.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// SIGINT or SIGTERM.
    #[error("interrupted")]
    Interrupted(Interrupt),
}

/// A unit whose inputs are there.
struct Filled {
    sequence: u64,
    unit: Unit,
    tray: Tray,
}

/// A unit whose results are there, or never will be.
struct Finished {
    sequence: u64,
    unit: Unit,
    tray: Tray,
    result: Result<(), UnitError>,
}

/// Carries out `job` into `sink`. On an error all threads have ended on return.
pub(crate) fn run(
    job: Job<'_>,
    sink: &mut dyn Sink,
    signals: &Signals,
    progress: &Progress,
) -> Result<Done, PipelineError> {
    let Job { plan, first, source, quality, workers, .. } = job;
    let Budget { trays, read_bytes_max, .. } = Budget::of(plan, workers);
    let mut queue = queue(job.io, trays, read_bytes_max)?;
    // Every channel has room for every tray, so nothing waits in a send.
    let (empty_out, empty_in) = bounded::<Tray>(trays);
    let (filled_out, filled_in) = bounded::<Filled>(trays);
    let (finished_out, finished_in) = bounded::<Finished>(trays);
    for _ in 0..trays {
        // The receiver is there until the reader has it.
        let _ = empty_out.send(Tray::new(queue.buffer(read_bytes_max)));
    }

    std::thread::scope(|scope| {
        let reader = Reader { plan, source, queue, filled: filled_out, finished: finished_out.clone() };
        let reader = scope.spawn(move || reader.run((0..).zip(source::units(plan, first)), &empty_in));
        for _ in 0..workers {
            let (filled_in, finished_out) = (filled_in.clone(), finished_out.clone());
            scope.spawn(move || {
                let mut worker = Worker::new(source, quality);
                for Filled { sequence, unit, mut tray } in filled_in {
                    let result = worker.transform(&plan[unit.tensor], &unit, &mut tray);
                    if finished_out.send(Finished { sequence, unit, tray, result }).is_err() {
                        return;
                    }
                }
            });
        }
        drop((filled_in, finished_out));

        // Owned by this closure, so that returning early closes them and every thread above ends.
        let (empty_out, finished_in) = (empty_out, finished_in);
        let mut reorder = Reorder::default();
        let mut check = DigestCheck::default();
        loop {
            if let Some(signal) = signals.received() {
                return Err(PipelineError::Interrupted(signal));
            }
            match finished_in.recv_timeout(SIGNAL_LATENCY_MAX) {
                Ok(finished) => reorder.push(finished.sequence, finished),
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => break,
            }
            while let Some(Finished { unit, tray, result, .. }) = reorder.pop() {
                let tensor = &plan[unit.tensor];
                result.map_err(|error| PipelineError::Unit { name: tensor.name.clone(), error })?;
                check.update(tensor, &unit, &tray, source)?;
                sink.write(tensor, &unit, tray.content(&unit))?;
                progress.advance(unit.source_bytes(tensor), &tensor.name);
                // A reader that has read everything takes no more.
                let _ = empty_out.send(tray);
            }
        }
        source.check_unchanged()?;
        Ok(Done { bytes_read: reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)) })
    })
}

/// A queue for `trays` reads; an idle one for a source that is in no file.
fn queue(io: Option<IoBackend>, trays: usize, read_bytes_max: usize) -> Result<Box<dyn ReadQueue>, IoError> {
    match io {
        // The source told of a fallback when it was opened, which asks the same questions.
        Some(backend) => Ok(io::read_queue(backend, trays, read_bytes_max)?.0),
        None => Ok(Box::new(SyncQueue::new(trays))),
    }
}

/// Compares tensors that go by piece by piece with the digests of their container.
#[derive(Default)]
struct DigestCheck {
    /// By [`Part`].
    hashers: [blake3::Hasher; 2],
}

impl DigestCheck {
    fn update(&mut self, tensor: &Planned, unit: &Unit, tray: &Tray, source: &dyn Source) -> Result<(), PipelineError> {
        let comes_in_pieces = matches!(tensor.work, Work::Copy | Work::Decode);
        let Some(expected) = source.digests(&tensor.name).filter(|_| comes_in_pieces) else { return Ok(()) };
        for part in Part::BOTH {
            if unit.piece.bytes_of(tensor, part) > 0 {
                self.hashers[part as usize].update(tray.inputs.bytes(part));
            }
        }
        if unit.is_last {
            let hashers = std::mem::take(&mut self.hashers);
            for (part, expected) in [(Part::Data, Some(expected.data)), (Part::Scales, expected.scales)] {
                let found = Digest(*hashers[part as usize].finalize().as_bytes());
                if expected.is_some_and(|expected| expected != found) {
                    return Err(PipelineError::Digest { name: tensor.name.clone(), part });
                }
            }
        }
        Ok(())
    }
}
