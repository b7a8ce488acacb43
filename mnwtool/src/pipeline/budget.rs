//! The bounds of the pipeline: how many of each thing exist at once, and how large each may be.

use crate::plan::{Planned, Work};

/// The most worker threads that may be asked for.
pub(crate) const WORKERS_MAX: usize = 64;
/// Workers that are started when no number was asked for: more only wait for one another on the usual disk.
const WORKERS_DEFAULT_MAX: usize = 8;

/// Units beyond one a worker that may be under way: one being written, one waiting for its turn.
const UNITS_STAGED: usize = 2;

/// Bytes of a slice of a tensor that is copied.
pub(crate) const SLICE_BYTES: u64 = 4 << 20;
/// Elements that are decoded together. Every matrix that a conversion may quantize fits.
pub(crate) const DECODED_ELEMENTS: u64 = 1 << 24;

/// Code, stacks, manifest and assets: what the process takes besides the units under way.
const FIXED_BYTES: u64 = 64 << 20;
/// What direct reads keep aligned in each thread that reads.
const READ_BUFFER_BYTES: u64 = 4 << 20;

/// The number of workers meant by `--workers`: 0 stands for one a CPU, at most eight.
pub(crate) fn worker_count(typed: u64) -> usize {
    match typed as usize {
        0 => std::thread::available_parallelism().map_or(1, |cpus| cpus.get().min(WORKERS_DEFAULT_MAX)),
        count => count.min(WORKERS_MAX),
    }
}

/// Units that may have been started and not yet written: this bounds every queue and the reordering.
pub(crate) fn units_in_flight_max(workers: usize) -> usize {
    workers + UNITS_STAGED
}

/// What the process may take at most while it carries out `plan`: the largest unit, source, values and result
/// together, times the units in flight.
pub(crate) fn memory_bytes_max(plan: &[Planned], workers: usize) -> u64 {
    let largest = plan.iter().map(unit_bytes).max().unwrap_or(0);
    FIXED_BYTES + workers as u64 * READ_BUFFER_BYTES + units_in_flight_max(workers) as u64 * largest
}

fn unit_bytes(tensor: &Planned) -> u64 {
    let values = |elements: u64| elements * size_of::<f32>() as u64;
    match tensor.work {
        Work::Copy => SLICE_BYTES.min(tensor.source_bytes()),
        Work::Repack => tensor.source_bytes() + tensor.target_bytes(),
        Work::Encode => tensor.source_bytes() + values(tensor.source.shape().elements()) + tensor.target_bytes(),
        Work::Decode => {
            let elements = tensor.source.shape().elements().min(DECODED_ELEMENTS);
            // Stored codes take at most a byte an element, scales at most an eighth of that; the result at most four.
            2 * elements + 2 * values(elements)
        }
    }
}
