//! The reader: keeps reads of the coming units in flight, and hands each unit to the workers once all of it is there.
//!
//! A unit takes an empty tray before it is read, so there are never more reads than trays. Buffers belong to the queue
//! while it reads into them; then they lie in the tray again, and workers use them where they are.

use std::collections::HashMap;

use crossbeam_channel::{Receiver, Sender, TryRecvError};
use minnow_common::FileOffset;
use minnow_formats::io::{IoError, ReadCompletion, ReadQueue, ReadRequest};

use super::quantize::UnitError;
use super::source::{Part, Source, Unit};
use super::tray::Tray;
use super::{Filled, Finished};
use crate::plan::Planned;

/// Reads units, in the order in which they come.
pub(super) struct Reader<'a> {
    pub(super) plan: &'a [Planned],
    pub(super) source: &'a dyn Source,
    pub(super) queue: Box<dyn ReadQueue>,
    pub(super) filled: Sender<Filled>,
    /// Units that could not be read skip the workers.
    pub(super) finished: Sender<Finished>,
}

/// A unit of which something is still being read.
struct Waiting {
    unit: Unit,
    tray: Tray,
    reads: u32,
    error: Option<IoError>,
}

/// The other stages have ended.
struct Closed;

impl Reader<'_> {
    /// Reads until there are no more units, or nobody takes them any more. Returns the number of bytes read.
    pub(super) fn run(mut self, units: impl Iterator<Item = (u64, Unit)>, empty: &Receiver<Tray>) -> u64 {
        let mut bytes_read = 0;
        // Whoever closed a channel knows why.
        let _ = self.read_all(units, empty, &mut bytes_read);
        bytes_read
    }

    fn read_all(
        &mut self,
        mut units: impl Iterator<Item = (u64, Unit)>,
        empty: &Receiver<Tray>,
        bytes_read: &mut u64,
    ) -> Result<(), Closed> {
        let mut waiting = HashMap::new();
        let mut has_more = true;
        loop {
            while has_more {
                let tray = match empty.try_recv() {
                    Ok(tray) => tray,
                    Err(TryRecvError::Disconnected) => return Err(Closed),
                    Err(TryRecvError::Empty) if self.queue.in_flight() > 0 => break,
                    Err(TryRecvError::Empty) => empty.recv().map_err(|_| Closed)?,
                };
                match units.next() {
                    Some((sequence, unit)) => *bytes_read += self.start(sequence, unit, tray, &mut waiting)?,
                    None => has_more = false,
                }
            }
            match self.queue.complete() {
                Some(completion) => self.settle(completion, &mut waiting)?,
                None if has_more => {}
                None => return Ok(()),
            }
        }
    }

    /// Starts the reads of a unit; one that needs none goes on at once.
    fn start(
        &mut self,
        sequence: u64,
        unit: Unit,
        mut tray: Tray,
        waiting: &mut HashMap<u64, Waiting>,
    ) -> Result<u64, Closed> {
        let (tensor, source) = (&self.plan[unit.tensor], self.source);
        let mut requests = Vec::with_capacity(Part::BOTH.len());
        for part in Part::BOTH {
            let range = unit.piece.range_of(tensor, part);
            if range.is_empty() {
                continue;
            }
            let Some((file, start)) = source.place(&tensor.name, part) else { continue };
            let bytes = (range.end - range.start) as usize;
            requests.push(ReadRequest {
                file: file.clone(),
                offset: FileOffset(start.0 + range.start),
                bytes,
                buffer: tray.inputs.take(part, bytes),
                tag: tag(sequence, part),
            });
        }
        let bytes = requests.iter().map(|request| request.bytes as u64).sum();
        if requests.is_empty() {
            self.filled.send(Filled { sequence, unit, tray }).map_err(|_| Closed)?;
            return Ok(bytes);
        }
        waiting.insert(sequence, Waiting { unit, tray, reads: requests.len() as u32, error: None });
        for mut request in requests {
            while let Err(refused) = self.queue.submit(request) {
                request = refused;
                // It is full, so something is in flight.
                if let Some(completion) = self.queue.complete() {
                    self.settle(completion, waiting)?;
                }
            }
        }
        Ok(bytes)
    }

    /// Puts a buffer back into its tray, and sends the unit on if that was the last one.
    fn settle(&self, completion: ReadCompletion, waiting: &mut HashMap<u64, Waiting>) -> Result<(), Closed> {
        let ReadCompletion { tag, buffer, result } = completion;
        let (sequence, part) = (tag / 2, Part::BOTH[(tag % 2) as usize]);
        let Some(unit) = waiting.get_mut(&sequence) else { return Ok(()) };
        unit.reads -= 1;
        match result {
            Ok(filled) => unit.tray.inputs.put(part, buffer, filled),
            Err(error) => {
                unit.tray.inputs.put(part, buffer, 0..0);
                unit.error.get_or_insert(error);
            }
        }
        if unit.reads > 0 {
            return Ok(());
        }
        let Some(Waiting { unit, tray, error, .. }) = waiting.remove(&sequence) else { return Ok(()) };
        // What was read after a change is not what was opened; it is cheap to know at once, and dear to learn at the end.
        let error = match (error, self.source.place(&self.plan[unit.tensor].name, Part::Data)) {
            (None, Some((file, _))) => file.check_unchanged().err(),
            (error, _) => error,
        };
        match error {
            None => self.filled.send(Filled { sequence, unit, tray }).map_err(|_| Closed),
            Some(error) => {
                let result = Err(UnitError::Read(error));
                self.finished.send(Finished { sequence, unit, tray, result }).map_err(|_| Closed)
            }
        }
    }
}

fn tag(sequence: u64, part: Part) -> u64 {
    2 * sequence + part as u64
}
