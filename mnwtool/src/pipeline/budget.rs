//! The bounds of the pipeline: how many of each thing exist at once, and how large each may be.
//!
//! Everything that grows with the work lies in a tray (`tray.rs`), so the number of trays times the largest unit is the
//! memory of a conversion, whatever the size of the model.

use minnow_formats::io::ReadRequest;

use super::source::{self, Part};
use crate::plan::{Planned, Work};

/// The most worker threads that may be asked for.
pub(crate) const WORKERS_MAX: usize = 64;
/// Workers that are started when no number was asked for: more only wait for one another on the usual disk.
const WORKERS_DEFAULT_MAX: usize = 8;

/// Units that may be on their way from the disk while every worker has one: with eight reads of a few megabytes in
/// flight, disks are at their full speed.
const UNITS_READ_AHEAD_MAX: usize = 8;
/// Reading and computing overlap from two on.
const UNITS_READ_AHEAD_MIN: usize = 2;
/// Bytes that may be on their way from the disk, unless [`UNITS_READ_AHEAD_MIN`] units have more.
const READ_AHEAD_BYTES: u64 = 64 << 20;
/// Units whose results wait: one being written, one for its turn.
const UNITS_STAGED: usize = 2;

/// Bytes of a slice of a tensor that is copied.
pub(crate) const SLICE_BYTES: u64 = 4 << 20;
/// Elements that are decoded together.
pub(crate) const DECODED_ELEMENTS: u64 = 1 << 21;

/// Code, stacks, manifest and assets: what the process takes besides trays and threads.
const FIXED_BYTES: u64 = 96 << 20;
/// What direct reads outside of the queue keep aligned in each thread that makes them.
const BOUNCE_BYTES: u64 = 4 << 20;
/// The writer's two blocks.
const WRITE_BYTES: u64 = 2 * (4 << 20);

/// The number of workers meant by `--workers`: 0 stands for one a CPU, at most eight.
pub(crate) fn worker_count(typed: u64) -> usize {
    match typed as usize {
        0 => std::thread::available_parallelism().map_or(1, |cpus| cpus.get().min(WORKERS_DEFAULT_MAX)),
        count => count.min(WORKERS_MAX),
    }
}

/// The bounds for one plan and one number of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    /// Units that may have been started and not yet written, and so what every queue of the pipeline holds at most.
    pub(crate) trays: usize,
    /// The longest single read.
    pub(crate) read_bytes_max: usize,
    /// What the process may take at most.
    pub(crate) memory_bytes_max: u64,
}

impl Budget {
    /// The bounds for carrying out `plan`.
    pub(crate) fn of(plan: &[Planned], workers: usize) -> Self {
        let largest = |bytes: &dyn Fn(&Planned) -> u64| plan.iter().map(bytes).max().unwrap_or(0);
        let read_bytes_max = largest(&|tensor| unit_reads(tensor).0);
        let read_ahead = (READ_AHEAD_BYTES / read_bytes_max.max(1)) as usize;
        let trays = workers + read_ahead.clamp(UNITS_READ_AHEAD_MIN, UNITS_READ_AHEAD_MAX) + UNITS_STAGED;
        let read_bytes_max = read_bytes_max as usize;
        // Every tray's first buffer is as large as the longest read, since the ring knows it by that size.
        let tray_bytes = ReadRequest::buffer_bytes(read_bytes_max) as u64 + largest(&tray_bytes_beyond_first_buffer);
        let worker_bytes = BOUNCE_BYTES + largest(&scratch_bytes);
        let memory_bytes_max = FIXED_BYTES + WRITE_BYTES + trays as u64 * tray_bytes + workers as u64 * worker_bytes;
        Self { trays, read_bytes_max, memory_bytes_max }
    }
}

/// Bytes of data and of scales that the largest unit of a tensor reads.
fn unit_reads(tensor: &Planned) -> (u64, u64) {
    let (data, scales) = (tensor.source.data_bytes(), tensor.source.scales_bytes());
    match tensor.work {
        Work::Copy => (data.max(scales).min(SLICE_BYTES), 0),
        Work::Encode | Work::Repack => (data, scales),
        Work::Decode => {
            let first = source::pieces(tensor).next();
            let bytes = |part| first.as_ref().map_or(0, |piece| piece.bytes_of(tensor, part));
            (bytes(Part::Data), bytes(Part::Scales))
        }
    }
}

fn tray_bytes_beyond_first_buffer(tensor: &Planned) -> u64 {
    let results = match tensor.work {
        Work::Copy => 0,
        Work::Encode | Work::Repack => tensor.target_bytes(),
        Work::Decode => decoded_elements(tensor) * size_of::<f32>() as u64,
    };
    results + unit_reads(tensor).1
}

fn scratch_bytes(tensor: &Planned) -> u64 {
    match tensor.work {
        Work::Copy | Work::Encode => 0,
        Work::Repack => tensor.target_bytes(),
        Work::Decode => decoded_elements(tensor) * size_of::<f32>() as u64,
    }
}

fn decoded_elements(tensor: &Planned) -> u64 {
    tensor.source.shape().elements().min(DECODED_ELEMENTS)
}
