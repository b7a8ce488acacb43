//! From a checkpoint's files into device memory: several threads read into pinned slots, and while they do, this thread
//! copies full slots to the device and lays matrices out there.
//!
//! A slot is host memory, as much device memory, and an event; it is read into again when the event says that the device
//! is done with it. Host memory is [`SLOTS`] slots, whatever the size of the model. The parts of a checkpoint do not
//! depend on each other, so they are taken as they come.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};

use half::bf16;
use minnow_common::units::FileOffset;
use minnow_common::{Encoding, TensorSpec};
use minnow_formats::checkpoint::{Checkpoint, ReadError, Span, TensorBytes};
use minnow_kernels::cuda::{Buffer, Device, Event, Pinned, Relayout, Stored};

use super::weights::{Homes, Item, LoadError, Target, shape, spec_of};

/// Parts that are being read, copied or laid out at a time.
const SLOTS: usize = 12;
/// Of which the device may have so many.
const QUEUED_MAX: usize = 4;
/// Threads that read: enough for a disk's queue, or for the memory's bandwidth where files are cached.
const READERS: usize = 8;
/// Large matrices come in parts of about this many bytes.
const PART_BYTES: usize = 16 << 20;
/// Rows of a strip; parts of a matrix begin at whole strips.
const STRIP_ROWS: usize = 16;
/// Regions of a slot start at a multiple of this: files are read straight into it where their alignment allows.
const ALIGNMENT: usize = 4096;

/// Rows of one tensor, or a whole gate and a whole up, with where their regions lie in a slot.
struct Part<'a> {
    name: &'a str,
    up: Option<&'a str>,
    target: Target,
    first_row: usize,
    rows: usize,
    /// Data, scales, data and scales of the other of a pair; absent ones are empty.
    regions: [Region; 4],
}

/// A range of a file and its place in a slot.
#[derive(Clone, Copy, Default)]
struct Region {
    file: usize,
    offset: u64,
    bytes: usize,
    at: usize,
}

struct Slot {
    host: Pinned<u8>,
    device: Buffer<u8>,
    event: Event,
}

/// Reads all items into their places.
pub(super) fn load(
    device: &Device,
    checkpoint: &Checkpoint,
    items: &[Item],
    homes: &mut Homes,
    verifies: bool,
) -> Result<(), LoadError> {
    let mut items: Vec<&Item> = items.iter().collect();
    let place = |name: &str| checkpoint.tensors().get(name).map(|tensor| (tensor.file, tensor.data.offset.0));
    items.sort_by_key(|item| place(&item.name));
    let mut parts = Vec::new();
    for item in items {
        match item.target {
            Target::Vector(_) | Target::Bias(_) => small(checkpoint, item, homes, verifies)?,
            Target::Rows(_) | Target::Strips { .. } => cut(checkpoint, item, &mut parts)?,
        }
    }
    let slot_bytes = parts.iter().map(Part::bytes).max().unwrap_or(0);
    let (free, free_slots) = channel();
    for _ in 0..SLOTS.min(parts.len()) {
        let slot =
            Slot { host: device.pinned(slot_bytes)?, device: device.allocate(slot_bytes)?, event: device.event()? };
        // The receiver is right here.
        let _ = free.send(slot);
    }
    let (relayout, free_slots, next) = (Relayout::new(device)?, Mutex::new(free_slots), AtomicUsize::new(0));
    let (done, full_slots) = channel();
    std::thread::scope(|scope| {
        for _ in 0..READERS {
            let done = done.clone();
            scope.spawn(|| read_parts(checkpoint, &parts, &next, &free_slots, done, verifies));
        }
        drop(done);
        // Whatever happens here, `free` is dropped at the end of it, which ends the readers.
        let free = free;
        let mut queued: VecDeque<Slot> = VecDeque::new();
        for (part, slot) in full_slots {
            let slot = slot?;
            put(checkpoint, &relayout, device, &parts[part], &slot, homes)?;
            queued.push_back(slot);
            if queued.len() > QUEUED_MAX
                && let Some(slot) = queued.pop_front()
            {
                slot.event.synchronize()?;
                // Nobody wants it once all parts were taken.
                let _ = free.send(slot);
            }
        }
        device.synchronize()?;
        Ok(())
    })
}

/// A tensor of a few kilobytes.
fn small(checkpoint: &Checkpoint, item: &Item, homes: &mut Homes, verifies: bool) -> Result<(), LoadError> {
    let bytes = checkpoint.read(&item.name)?;
    if verifies {
        checkpoint.verify(&item.name, &bytes)?;
    }
    let Encoding::Float(float) = spec_of(checkpoint, &item.name)?.encoding() else {
        unreachable!("vectors are floating")
    };
    let values = float.widened(&bytes.data);
    match item.target {
        Target::Bias(start) => homes.biases.upload(start, &values)?,
        Target::Vector(start) => {
            // They are stored as BF16, so nothing is rounded.
            let values: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
            homes.vectors.upload(start, &values)?;
        }
        Target::Rows(_) | Target::Strips { .. } => unreachable!("matrices come in parts"),
    }
    Ok(())
}

/// Cuts an item into parts. Only a BF16 matrix of its own is ever large enough for several.
fn cut<'a>(checkpoint: &Checkpoint, item: &'a Item, parts: &mut Vec<Part<'a>>) -> Result<(), LoadError> {
    let tensor = |name: &str| checkpoint.tensors().get(name).ok_or_else(|| ReadError::NoTensor(name.to_owned()));
    let first = tensor(&item.name)?;
    let (rows, _) = shape(&first.spec);
    let row_bytes = first.data.bytes as usize / rows;
    let is_cut = item.up.is_none() && first.scales.is_none();
    let rows_of_part = match is_cut {
        true => (PART_BYTES / row_bytes / STRIP_ROWS * STRIP_ROWS).max(STRIP_ROWS),
        false => rows,
    };
    let up = item.up.as_deref().map(tensor).transpose()?;
    for first_row in (0..rows).step_by(rows_of_part) {
        let count = rows_of_part.min(rows - first_row);
        let mut end = 0;
        let mut region = |file: usize, offset: u64, bytes: usize| {
            let region = Region { file, offset, bytes, at: end };
            end = (end + bytes).next_multiple_of(ALIGNMENT);
            region
        };
        let mut whole = |file: usize, span: Option<Span>| {
            span.map_or(Region::default(), |span| region(file, span.offset.0, span.bytes as usize))
        };
        let [mut data, scales] = [Some(first.data), first.scales].map(|span| whole(first.file, span));
        let of_up = up.map(|up| (up.file, up.data, up.scales));
        let others =
            of_up.map_or([Region::default(); 2], |(file, data, scales)| [whole(file, Some(data)), whole(file, scales)]);
        data.offset += (first_row * row_bytes) as u64;
        data.bytes = count * row_bytes;
        let up = item.up.as_deref();
        let regions = [data, scales, others[0], others[1]];
        parts.push(Part { name: &item.name, up, target: item.target, first_row, rows: count, regions });
    }
    Ok(())
}

impl Part<'_> {
    /// Bytes of a slot that it takes.
    fn bytes(&self) -> usize {
        self.regions.iter().map(|region| region.at + region.bytes).max().unwrap_or(0)
    }
}

/// Reads parts into free slots until there are no more parts, or nobody hands slots out any more.
fn read_parts(
    checkpoint: &Checkpoint,
    parts: &[Part<'_>],
    next: &AtomicUsize,
    free_slots: &Mutex<Receiver<Slot>>,
    done: Sender<(usize, Result<Slot, LoadError>)>,
    verifies: bool,
) {
    loop {
        let index = next.fetch_add(1, Ordering::Relaxed);
        let Some(part) = parts.get(index) else { return };
        let slot = free_slots.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(mut slot) = slot else { return };
        let read = read_part(checkpoint, part, slot.host.values_mut(), verifies);
        if done.send((index, read.map(|()| slot))).is_err() {
            return;
        }
    }
}

fn read_part(checkpoint: &Checkpoint, part: &Part<'_>, out: &mut [u8], verifies: bool) -> Result<(), LoadError> {
    for region in part.regions.iter().filter(|region| region.bytes > 0) {
        let file = &checkpoint.files()[region.file];
        let bytes = &mut out[region.at..][..region.bytes];
        file.read_exact_at(FileOffset(region.offset), bytes).map_err(ReadError::from)?;
    }
    if !verifies {
        return Ok(());
    }
    let of = |region: Region| &out[region.at..][..region.bytes];
    let check = |name: &str, data: Region, scales: Region| {
        let scales = (scales.bytes > 0).then(|| of(scales).into());
        checkpoint.verify(name, &TensorBytes { data: of(data).into(), scales })
    };
    let [data, scales, up_data, up_scales] = part.regions;
    if data.bytes as u64 == spec_of(checkpoint, part.name)?.data_bytes() {
        check(part.name, data, scales)?;
    } else if part.first_row == 0 {
        // The digest is of the whole, which no slot holds: this thread reads it once more, while others go on.
        checkpoint.verify(part.name, &checkpoint.read(part.name)?)?;
    }
    if let Some(up) = part.up {
        check(up, up_data, up_scales)?;
    }
    Ok(())
}

/// Queues the way of a part from its slot to its place.
fn put(
    checkpoint: &Checkpoint,
    relayout: &Relayout,
    device: &Device,
    part: &Part<'_>,
    slot: &Slot,
    homes: &mut Homes,
) -> Result<(), LoadError> {
    let spec = spec_of(checkpoint, part.name)?;
    let (_, cols) = shape(spec);
    // SAFETY: the slot is not read into before its event has passed.
    unsafe { slot.device.upload_async(0, &slot.host, 0, part.bytes()) }?;
    let [data, scales, up_data, up_scales] = part.regions;
    match part.target {
        Target::Rows(offset) => {
            let at = homes.matrices.at(offset + part.first_row * (data.bytes / part.rows));
            // SAFETY: the layout has room for these rows, and the slot stays as it is until its event.
            unsafe { device.copy(at, slot.device.pointer(), data.bytes) }?;
        }
        Target::Strips { offset, scale, format } => {
            let up_spec = part.up.map(|up| spec_of(checkpoint, up)).transpose()?;
            let global: Vec<f32> =
                [Some(spec), up_spec].into_iter().flatten().filter_map(TensorSpec::global_scale).collect();
            if !global.is_empty() {
                homes.scales.upload(scale, &global)?;
            }
            let stored = |data: Region, scales: Region| Stored {
                data: slot.device.at(data.at),
                scales: slot.device.at(scales.at),
            };
            let encoding = spec.encoding();
            let at = homes.matrices.at(offset + format.matrix_bytes(part.first_row, cols));
            // SAFETY: the layout has room for the matrix, and its regions were just copied, of the sizes that shape and
            // encoding ask for.
            unsafe {
                match part.up {
                    Some(_) => {
                        let (gate, up) = (stored(data, scales), stored(up_data, up_scales));
                        relayout.pair(at, gate, up, encoding, format, part.rows, cols)?;
                    }
                    None => relayout.alone(at, stored(data, scales), encoding, format, part.rows, cols)?,
                }
            }
        }
        Target::Vector(_) | Target::Bias(_) => unreachable!("small tensors are not parts"),
    }
    slot.event.record()?;
    Ok(())
}
