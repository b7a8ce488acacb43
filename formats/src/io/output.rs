//! Sequential writing at the speed of the disk: large direct writes in a thread of their own.
//!
//! What is appended is copied into one aligned buffer while another one is being written, so copying and whatever the
//! caller computes in between overlap with the disk. The room is reserved first, which also brings an error for a full
//! disk to the front. Where direct writes are refused the same blocks go through the page cache, with a note.
//!
//! A failed write shows in the next call of any method. Nothing after it is written.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::OsCause;
use super::aligned::AlignedBuffer;
use super::direct::{alignments, is_lack_of_support};
use super::disk::Disk;
use super::file::file_system;

/// Bytes of a write: from a megabyte on, disks are at their full speed.
pub(crate) const BLOCK_BYTES: usize = 4 << 20;
/// One buffer is filled while one is written and one waits, which evens out what either side takes now and then.
const BUFFERS: usize = 3;
/// Positions and lengths of direct writes are multiples of this.
const PAGE_BYTES: usize = AlignedBuffer::ALIGNMENT;

/// A file that is written from front to back.
#[derive(Debug)]
pub(crate) struct Output {
    shared: Arc<Shared>,
    /// `None` once the thread was told that nothing follows.
    commands: Option<SyncSender<Command>>,
    spare: Receiver<AlignedBuffer>,
    /// The buffer being filled, of which the first `filled` bytes belong to the file at `start`.
    current: Option<AlignedBuffer>,
    filled: usize,
    start: u64,
    thread: Option<JoinHandle<()>>,
}

/// To be done once everything before it is on the medium.
pub(crate) type WhenDurable = Box<dyn FnOnce() -> io::Result<()> + Send>;

enum Command {
    Write { buffer: AlignedBuffer, bytes: usize, offset: u64 },
    WhenDurable(WhenDurable),
}

/// What the thread and its owner both look at.
#[derive(Debug)]
struct Shared {
    disk: Arc<dyn Disk>,
    file: Arc<File>,
    label: String,
    /// Whether the descriptor is in direct mode.
    is_direct: AtomicBool,
    /// Set with `fault`, or when the owner gives up: nothing more is written.
    is_over: AtomicBool,
    fault: Mutex<Option<io::Error>>,
    note: Mutex<Option<String>>,
}

impl Output {
    /// Writes `file`, of which the first `start` bytes (a multiple of a page) are there already and which will have
    /// `file_bytes` bytes. `label` is its name in the note.
    pub(crate) fn new(
        disk: Arc<dyn Disk>,
        file: Arc<File>,
        label: String,
        start: u64,
        file_bytes: u64,
    ) -> io::Result<Self> {
        debug_assert!(start.is_multiple_of(PAGE_BYTES as u64));
        let shared = Arc::new(Shared {
            disk,
            file,
            label,
            is_direct: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            fault: Mutex::default(),
            note: Mutex::default(),
        });
        let (commands, incoming) = sync_channel(BUFFERS);
        let (outgoing, spare) = sync_channel(BUFFERS);
        for _ in 0..BUFFERS {
            outgoing.try_send(AlignedBuffer::new(BLOCK_BYTES)).map_err(io::Error::other)?;
        }
        let theirs = Arc::clone(&shared);
        let work = move || theirs.work(&incoming, &outgoing, file_bytes);
        let thread = std::thread::Builder::new().name("write".to_owned()).spawn(work)?;
        let thread = Some(thread);
        Ok(Self { shared, commands: Some(commands), spare, current: None, filled: 0, start, thread })
    }

    /// Where the next byte will lie.
    pub(crate) fn position(&self) -> u64 {
        self.start + self.filled as u64
    }

    /// Why writes go through the page cache, if they do: one line to log.
    pub(crate) fn note(&self) -> Option<String> {
        self.shared.note().clone()
    }

    /// `direct` or `buffered`.
    pub(crate) fn backend(&self) -> &'static str {
        if self.shared.note().is_some() { "buffered" } else { "direct" }
    }

    /// Writes `bytes` after what came before.
    pub(crate) fn append(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        self.check()?;
        while !bytes.is_empty() {
            if self.current.is_none() {
                // The thread returns every buffer, also of a write that failed.
                self.current = self.spare.recv().ok();
                self.check()?;
            }
            let Some(buffer) = &mut self.current else { return Err(self.stopped()) };
            let count = bytes.len().min(BLOCK_BYTES - self.filled);
            buffer[self.filled..][..count].copy_from_slice(&bytes[..count]);
            self.filled += count;
            bytes = &bytes[count..];
            if self.filled == BLOCK_BYTES {
                self.send_block()?;
            }
        }
        Ok(())
    }

    /// Has `act` called, in the writing thread, when everything up to here is on the medium. The position is at a
    /// multiple of a page.
    pub(crate) fn when_durable(&mut self, act: WhenDurable) -> io::Result<()> {
        debug_assert!(self.filled.is_multiple_of(PAGE_BYTES));
        self.send_block()?;
        self.send(Command::WhenDurable(act))
    }

    /// Writes what is left, filled up with zeros to a whole page, and waits for everything. The caller sets the length.
    pub(crate) fn complete(&mut self) -> io::Result<()> {
        let padded = self.filled.next_multiple_of(PAGE_BYTES);
        if let Some(buffer) = &mut self.current {
            buffer[self.filled..padded].fill(0);
        }
        self.send_block()?;
        self.join();
        self.check()
    }

    /// Writes one page, after [`Output::complete`].
    pub(crate) fn write_page(&self, page: &[u8; PAGE_BYTES], offset: u64) -> io::Result<()> {
        let mut buffer = AlignedBuffer::new(PAGE_BYTES);
        buffer.copy_from_slice(page);
        self.shared.write(&buffer, offset)
    }

    /// Gives the buffer being filled to the thread. All but the last block are whole pages.
    fn send_block(&mut self) -> io::Result<()> {
        let Some(buffer) = self.current.take() else { return self.check() };
        let (bytes, offset) = (self.filled.next_multiple_of(PAGE_BYTES), self.start);
        self.start += self.filled as u64;
        self.filled = 0;
        self.send(Command::Write { buffer, bytes, offset })
    }

    fn send(&mut self, command: Command) -> io::Result<()> {
        self.check()?;
        let sent = self.commands.as_ref().is_some_and(|commands| commands.send(command).is_ok());
        if sent { Ok(()) } else { Err(self.stopped()) }
    }

    /// The error of the thread, if it has one. It is told once; afterwards the file is only known to be broken.
    fn check(&self) -> io::Result<()> {
        if !self.shared.is_over.load(Ordering::Acquire) {
            return Ok(());
        }
        Err(self.shared.fault().take().unwrap_or_else(|| self.stopped()))
    }

    fn stopped(&self) -> io::Error {
        let fault = self.shared.fault().take();
        fault.unwrap_or_else(|| io::Error::other("an earlier write failed"))
    }

    fn join(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            self.shared.fail(io::Error::other("the writing thread panicked"));
        }
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
        self.join();
    }
}

impl Shared {
    fn work(&self, incoming: &Receiver<Command>, outgoing: &SyncSender<AlignedBuffer>, file_bytes: u64) {
        let mut is_prepared = false;
        for command in incoming {
            let is_over = self.is_over.load(Ordering::Acquire);
            let result = match command {
                Command::Write { buffer, bytes, offset } => {
                    let written = if is_over {
                        Ok(())
                    } else {
                        let prepared = if is_prepared { Ok(()) } else { self.prepare(file_bytes) };
                        is_prepared = true;
                        prepared.and_then(|()| self.write(&buffer[..bytes], offset)).and_then(|()| self.check_name())
                    };
                    // The fault must be there before the buffer: whoever waits for one then looks for a fault.
                    written.unwrap_or_else(|error| self.fail(error));
                    // There are only as many buffers as the channel has room for, and an owner that is gone needs none.
                    let _ = outgoing.try_send(buffer);
                    Ok(())
                }
                Command::WhenDurable(_) if is_over => Ok(()),
                Command::WhenDurable(act) => self.disk.sync_data(&self.file).and_then(|()| act()),
            };
            result.unwrap_or_else(|error| self.fail(error));
        }
    }

    /// Goes to direct mode and reserves the room, each where the file system has it.
    fn prepare(&self, file_bytes: u64) -> io::Result<()> {
        match alignments(&self.file).and_then(|_| self.disk.set_direct(&self.file, true)) {
            Ok(()) => self.is_direct.store(true, Ordering::Relaxed),
            Err(error) if is_lack_of_support(&error) => self.go_through_the_page_cache(&OsCause(&error)),
            Err(error) => return Err(error),
        }
        match self.disk.allocate(&self.file, file_bytes) {
            Err(error) if !is_lack_of_support(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// Writes whole pages at a multiple of a page, however many calls that takes.
    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let is_direct = self.is_direct.load(Ordering::Relaxed);
            match self.disk.write_at(&self.file, &bytes[done..], offset + done as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    // The next direct write starts at a page again; what is written twice is the same.
                    let end = bytes.len().min(done + count);
                    let whole = if is_direct { end - end % PAGE_BYTES } else { end };
                    if whole == done {
                        self.go_through_the_page_cache(&"less than a page was written");
                    }
                    done = whole;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_direct && is_lack_of_support(&error) => {
                    self.go_through_the_page_cache(&OsCause(&error));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// A file without a name can never be finished; better to hear of it now.
    fn check_name(&self) -> io::Result<()> {
        match self.disk.links(&self.file) {
            Ok(0) => Err(rustix::io::Errno::NOENT.into()),
            _ => Ok(()),
        }
    }

    fn go_through_the_page_cache(&self, cause: &dyn std::fmt::Display) {
        // A descriptor on which the flag could not be set has nothing to clear.
        let _ = self.disk.set_direct(&self.file, false);
        self.is_direct.store(false, Ordering::Relaxed);
        *self.note() = Some(format!(
            "{}: direct writes are refused by {} ({cause}), writing through the page cache",
            self.label,
            file_system(&self.file)
        ));
    }

    /// Notes the first error.
    fn fail(&self, error: io::Error) {
        let mut fault = self.fault();
        if !self.is_over.load(Ordering::Acquire) {
            *fault = Some(error);
        }
        self.is_over.store(true, Ordering::Release);
    }

    fn fault(&self) -> MutexGuard<'_, Option<io::Error>> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self) -> MutexGuard<'_, Option<String>> {
        self.note.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Write { bytes, offset, .. } => write!(f, "Write({bytes} bytes at {offset:#x})"),
            Self::WhenDurable(_) => f.write_str("WhenDurable"),
        }
    }
}
