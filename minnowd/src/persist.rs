//! The prefix cache across restarts: its warmest blocks in one file, `prefix-cache.bin` of `--cache-dir`.
//!
//! [`save`] runs when the daemon drains. [`Loader`] reads the file a few blocks at a time, so that the engine takes
//! requests at once and reads between steps while pages are free; a request that comes before its prefix only misses
//! it. Reading each block at its first hit would keep pages free for longer, but whatever was not asked for by the
//! next drain would then be lost, or have to be copied from the old file. For the same reason a loader is to be run to
//! its end before the cache is saved again.
//!
//! The K/V in the file are used as they are, so nothing is taken that is not certainly right: the file is bound to
//! whatever decides their bits ([`CacheKey`]), and each block to its tokens and to the block before it. The digests
//! guard against accidents; whoever may write to the folder is trusted. Layout, all numbers little-endian:
//!
//! ```text
//! header   magic "MNWPAGES", version u32 = 1, page bytes u64, key [32], BLAKE3 of all that [32]
//! blocks   warmest first and each after its parent:
//!            parent u32: 0 for a first block, otherwise 1 + the parent's index in the file
//!            tokens u32 [32]
//!            page [page bytes], as the backend exports it
//!            BLAKE3 [32] of the parent's digest (the header's for a first block), tokens and page
//! ```

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use minnow_common::BLOCK;
use thiserror::Error;

use crate::cache::{BlockTokens, PageId, PrefixCache, Restored};
use crate::model::{Backend, ModelError};

const FILE_NAME: &str = "prefix-cache.bin";
const TEMPORARY_NAME: &str = "prefix-cache.bin.partial";
const LOCK_NAME: &str = "prefix-cache.lock";

const MAGIC: [u8; 8] = *b"MNWPAGES";
const VERSION: u32 = 1;
const DIGEST_BYTES: usize = 32;
const VERSION_AT: usize = MAGIC.len();
const PAGE_BYTES_AT: usize = VERSION_AT + size_of::<u32>();
const KEY_AT: usize = PAGE_BYTES_AT + size_of::<u64>();
const HEADER_DIGEST_AT: usize = KEY_AT + DIGEST_BYTES;
const HEADER_BYTES: usize = HEADER_DIGEST_AT + DIGEST_BYTES;

const TOKENS_AT: usize = size_of::<u32>();
const PAGE_AT: usize = TOKENS_AT + BLOCK * size_of::<u32>();

/// What decides the bits of a page, besides the tokens.
#[derive(Clone, Copy, Debug)]
pub struct Identity<'a> {
    /// Identifies the contents of the checkpoint: every weight, and the configuration.
    pub checkpoint: &'a str,
    /// [`Backend::arithmetic`].
    pub arithmetic: &'a str,
    /// The program's version.
    pub program: &'a str,
}

/// Whose pages a file has. A file with another key is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheKey {
    digest: [u8; DIGEST_BYTES],
    page_bytes: usize,
}

/// What was saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Blocks in the file.
    pub blocks: usize,
    /// Blocks of the cache that the limit left out.
    pub left_out: usize,
    /// Bytes of the file.
    pub file_bytes: u64,
}

/// Why nothing was saved; an older file is still there.
#[derive(Debug, Error)]
pub enum SaveError {
    /// Another process is saving to the same folder.
    #[error("{}: another process is writing its prefix cache here", folder.display())]
    Busy {
        /// The folder.
        folder: PathBuf,
    },
    /// The backend could not give a page.
    #[error("{0}")]
    Page(#[from] ModelError),
    /// The file system refused.
    #[error("{}: {doing}: {source}", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To which file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

/// Why a file is not used at all.
#[derive(Debug, Error)]
pub enum Ignored {
    /// It cannot be opened or read.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It is too short, or begins with something else.
    #[error("it is no prefix cache")]
    Magic,
    /// It was written by a newer or older program.
    #[error("it has version {found}, expected {VERSION}")]
    Version {
        /// Its version.
        found: u32,
    },
    /// Its header does not match its digest.
    #[error("its header is damaged")]
    Header,
    /// It has the pages of another checkpoint, backend or program.
    #[error("it belongs to another checkpoint, backend or version of this program")]
    Foreign,
}

/// What became of a file's blocks so far.
#[derive(Debug, Default)]
pub struct LoadReport {
    /// Blocks that are in the cache now.
    pub restored: usize,
    /// Blocks that the cache had already.
    pub known: usize,
    /// Blocks that are damaged, or come after one that is not there.
    pub skipped: usize,
    /// Why reading ended; `None` while there is more.
    pub end: Option<LoadEnd>,
}

/// Why no more blocks are read.
#[derive(Debug)]
pub enum LoadEnd {
    /// The file has no more.
    Whole,
    /// The file ends within a block.
    Truncated,
    /// No page is free.
    NoRoom,
    /// The file could not be read any further.
    Io(io::Error),
    /// The backend refused a page.
    Page(ModelError),
}

/// A file of saved blocks, being read.
#[derive(Debug)]
pub struct Loader<R = File> {
    source: R,
    header_digest: [u8; DIGEST_BYTES],
    /// Blocks read so far, by their index in the file; `None` for those that are no good.
    blocks: Vec<Option<LoadedBlock>>,
    /// One block of the file: parent, tokens, page, digest.
    buffer: Vec<u8>,
    report: LoadReport,
}

#[derive(Debug)]
struct LoadedBlock {
    /// Index in the file.
    parent: Option<usize>,
    tokens: BlockTokens,
    digest: [u8; DIGEST_BYTES],
}

impl CacheKey {
    /// The key of pages with `page_bytes` bytes each.
    #[must_use]
    pub fn new(identity: &Identity<'_>, page_bytes: usize) -> Self {
        let mut hasher = blake3::Hasher::new();
        for part in [identity.checkpoint, identity.arithmetic, identity.program] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        Self { digest: hasher.finalize().into(), page_bytes }
    }

    fn header(&self) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..VERSION_AT].copy_from_slice(&MAGIC);
        header[VERSION_AT..PAGE_BYTES_AT].copy_from_slice(&VERSION.to_le_bytes());
        header[PAGE_BYTES_AT..KEY_AT].copy_from_slice(&(self.page_bytes as u64).to_le_bytes());
        header[KEY_AT..HEADER_DIGEST_AT].copy_from_slice(&self.digest);
        let digest = blake3::hash(&header[..HEADER_DIGEST_AT]);
        header[HEADER_DIGEST_AT..].copy_from_slice(digest.as_bytes());
        header
    }

    /// Bytes of one block in the file.
    fn block_bytes(&self) -> usize {
        PAGE_AT + self.page_bytes + DIGEST_BYTES
    }
}

/// Writes the warmest blocks of `cache` into `folder`, in place of what was there: at most `bytes_max` bytes. The file
/// appears complete and synced, or not at all, and only its owner may read it, since it tells what users wrote. The
/// folder is made if need be; two daemons need two.
///
/// Call it when no sequence is being evaluated; `key` is that of `backend`.
pub fn save(
    folder: &Path,
    key: &CacheKey,
    bytes_max: u64,
    cache: &PrefixCache,
    backend: &dyn Backend,
) -> Result<Saved, SaveError> {
    let io_error = |doing, path: &Path| {
        let path = path.to_owned();
        move |source| SaveError::Io { doing, path, source }
    };
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(io_error("creating the folder", folder))?;
    let open =
        |path: &Path, truncate| OpenOptions::new().create(true).write(true).truncate(truncate).mode(0o600).open(path);
    let lock_path = folder.join(LOCK_NAME);
    let lock = open(&lock_path, false).map_err(io_error("opening", &lock_path))?;
    lock.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => SaveError::Busy { folder: folder.to_owned() },
        TryLockError::Error(source) => io_error("locking", &lock_path)(source),
    })?;

    let temporary = folder.join(TEMPORARY_NAME);
    let mut file = open(&temporary, true).map_err(io_error("creating", &temporary))?;
    let saved = write(&mut file, key, bytes_max, cache, backend)
        .map_err(|error| match error {
            WriteError::Page(error) => SaveError::Page(error),
            WriteError::Io(source) => io_error("writing", &temporary)(source),
        })
        .and_then(|saved| {
            file.sync_all().map_err(io_error("syncing", &temporary))?;
            fs::rename(&temporary, folder.join(FILE_NAME)).map_err(io_error("renaming", &temporary))?;
            File::open(folder).and_then(|folder| folder.sync_all()).map_err(io_error("syncing", folder))?;
            Ok(saved)
        });
    if saved.is_err() {
        // It is overwritten by the next attempt if it cannot be removed.
        let _ = fs::remove_file(&temporary);
    }
    saved
}

/// Opens the saved blocks of `folder`: `None` if there are none, the reason if they cannot be used.
pub fn open(folder: &Path, key: &CacheKey) -> Result<Option<Loader>, Ignored> {
    match File::open(folder.join(FILE_NAME)) {
        Ok(file) => Loader::new(file, key).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Why blocks could not be written.
#[derive(Debug, Error)]
pub enum WriteError {
    /// The backend could not give a page.
    #[error("{0}")]
    Page(#[from] ModelError),
    /// The target refused.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Writes the warmest blocks of `cache` to `target`: at most `bytes_max` bytes, but always a header.
pub fn write(
    target: &mut impl Write,
    key: &CacheKey,
    bytes_max: u64,
    cache: &PrefixCache,
    backend: &dyn Backend,
) -> Result<Saved, WriteError> {
    let header = key.header();
    target.write_all(&header)?;
    let block_bytes = key.block_bytes() as u64;
    let blocks_max = bytes_max.saturating_sub(HEADER_BYTES as u64) / block_bytes;

    let warmest = cache.warmest();
    let blocks = warmest.len().min(usize::try_from(blocks_max).unwrap_or(usize::MAX));
    // Number in the file (0 is none) and digest, by page.
    let mut written: HashMap<PageId, (u32, [u8; DIGEST_BYTES])> = HashMap::with_capacity(blocks);
    let mut buffer = vec![0; key.block_bytes()];
    for (number, block) in (1..).zip(&warmest[..blocks]) {
        // A block comes after its parent.
        let (parent, before) = block.parent.map_or_else(|| (0, header_digest(&header)), |page| written[&page]);
        let digest_at = buffer.len() - DIGEST_BYTES;
        backend.export_page(block.page, &mut buffer[PAGE_AT..digest_at])?;
        buffer[..TOKENS_AT].copy_from_slice(&parent.to_le_bytes());
        for (bytes, token) in buffer[TOKENS_AT..PAGE_AT].chunks_exact_mut(size_of::<u32>()).zip(block.tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        let digest = block_digest(&before, &buffer[TOKENS_AT..digest_at]);
        buffer[digest_at..].copy_from_slice(&digest);
        target.write_all(&buffer)?;
        written.insert(block.page, (number, digest));
    }
    let file_bytes = HEADER_BYTES as u64 + blocks as u64 * block_bytes;
    Ok(Saved { blocks, left_out: warmest.len() - blocks, file_bytes })
}

impl<R: Read> Loader<R> {
    /// Reads the header of `source`.
    pub fn new(mut source: R, key: &CacheKey) -> Result<Self, Ignored> {
        let mut header = [0; HEADER_BYTES];
        if read_full(&mut source, &mut header)? < HEADER_BYTES || header[..VERSION_AT] != MAGIC {
            return Err(Ignored::Magic);
        }
        let version = read_u32(&header[VERSION_AT..PAGE_BYTES_AT]);
        if version != VERSION {
            return Err(Ignored::Version { found: version });
        }
        let header_digest = header_digest(&header);
        if *blake3::hash(&header[..HEADER_DIGEST_AT]).as_bytes() != header_digest {
            return Err(Ignored::Header);
        }
        if header != key.header() {
            return Err(Ignored::Foreign);
        }
        let buffer = vec![0; key.block_bytes()];
        Ok(Self { source, header_digest, blocks: Vec::new(), buffer, report: LoadReport::default() })
    }

    /// Reads up to `blocks` blocks into free pages of `cache` and `backend`; nothing is evicted for them. Says what
    /// happened so far. `usize::MAX` reads all there are.
    pub fn load(&mut self, blocks: usize, cache: &mut PrefixCache, backend: &mut dyn Backend) -> &LoadReport {
        for _ in 0..blocks {
            if self.report.end.is_some() {
                break;
            }
            self.report.end = self.load_one(cache, backend).err();
        }
        &self.report
    }

    /// What happened so far.
    #[must_use]
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// Ends reading.
    #[must_use]
    pub fn into_report(self) -> LoadReport {
        self.report
    }

    fn load_one(&mut self, cache: &mut PrefixCache, backend: &mut dyn Backend) -> Result<(), LoadEnd> {
        match read_full(&mut self.source, &mut self.buffer).map_err(LoadEnd::Io)? {
            0 => return Err(LoadEnd::Whole),
            bytes if bytes < self.buffer.len() => return Err(LoadEnd::Truncated),
            _ => {}
        }
        let block = self.checked_block();
        let is_good = block.is_some();
        self.blocks.push(block);
        if !is_good {
            self.report.skipped += 1;
            return Ok(());
        }
        let tokens = self.prefix(self.blocks.len() - 1);
        let page_bytes = &self.buffer[PAGE_AT..self.buffer.len() - DIGEST_BYTES];
        match cache.restore(&tokens, |page| backend.import_page(page, page_bytes)).map_err(LoadEnd::Page)? {
            Restored::Inserted => self.report.restored += 1,
            Restored::Known => self.report.known += 1,
            // Its parent was evicted since.
            Restored::NoParent => self.report.skipped += 1,
            Restored::NoRoom => return Err(LoadEnd::NoRoom),
        }
        Ok(())
    }

    /// The block in the buffer, if it and all before it in its prefix are undamaged.
    fn checked_block(&self) -> Option<LoadedBlock> {
        let parent = (read_u32(&self.buffer[..TOKENS_AT]) as usize).checked_sub(1);
        let before = match parent {
            Some(index) => &self.blocks.get(index)?.as_ref()?.digest,
            None => &self.header_digest,
        };
        let (contents, stored) = self.buffer[TOKENS_AT..].split_last_chunk()?;
        let digest = block_digest(before, contents);
        let token_bytes = self.buffer[TOKENS_AT..PAGE_AT].chunks_exact(size_of::<u32>());
        let mut tokens = [0; BLOCK];
        tokens.iter_mut().zip(token_bytes).for_each(|(token, bytes)| *token = read_u32(bytes));
        (digest == *stored).then_some(LoadedBlock { parent, tokens, digest })
    }

    /// Tokens of all blocks from position 0 up to that at `index`, which is good, and so are its ancestors.
    fn prefix(&self, index: usize) -> Vec<u32> {
        let of = |index: usize| self.blocks[index].as_ref();
        let chain = std::iter::successors(of(index), |block| block.parent.and_then(of));
        let mut blocks: Vec<&BlockTokens> = chain.map(|block| &block.tokens).collect();
        blocks.reverse();
        blocks.into_iter().flatten().copied().collect()
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} blocks of the saved prefix cache restored", self.restored)?;
        if self.skipped > 0 {
            write!(f, ", {} damaged or unreachable ones skipped", self.skipped)?;
        }
        match &self.end {
            None | Some(LoadEnd::Whole) => Ok(()),
            Some(LoadEnd::Truncated) => f.write_str("; the file is cut short"),
            Some(LoadEnd::NoRoom) => f.write_str("; no page is left for more"),
            Some(LoadEnd::Io(error)) => write!(f, "; reading stopped: {error}"),
            Some(LoadEnd::Page(error)) => write!(f, "; reading stopped: {error}"),
        }
    }
}

/// The stored digest of a header.
fn header_digest(header: &[u8; HEADER_BYTES]) -> [u8; DIGEST_BYTES] {
    let mut digest = [0; DIGEST_BYTES];
    digest.copy_from_slice(&header[HEADER_DIGEST_AT..]);
    digest
}

/// The digest of a block with this `contents` (tokens and page) after the block or header with digest `before`.
fn block_digest(before: &[u8; DIGEST_BYTES], contents: &[u8]) -> [u8; DIGEST_BYTES] {
    blake3::Hasher::new().update(before).update(contents).finalize().into()
}

/// The number in `bytes: [4]`.
fn read_u32(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |&bytes| u32::from_le_bytes(bytes))
}

/// Reads until `out` is full or the source ends; the number of bytes read.
fn read_full(source: &mut impl Read, out: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < out.len() {
        match source.read(&mut out[filled..]) {
            Ok(0) => break,
            Ok(bytes) => filled += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}
