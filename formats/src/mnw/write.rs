//! Writing a `.mnw` file: all of it under its final name, or nothing (`docs/format-mnw.md` section 10.6).
//!
//! [`Writer::open`] makes every check that can fail before the first byte is written: destination, folder, free
//! space, and how the finished file can be given its name there. Then tensors come in order, each is hashed as it is
//! written, and [`Writer::finish`] writes manifest and header, syncs, reads the file back and publishes it. Until then
//! the bytes lie in `.{name}.{pid}-{counter}.tmp` beside the destination; dropping the writer removes that file.
//!
//! **Resuming.** With [`WriteOptions::fingerprint`] a journal beside the temporary file says which tensors are on the
//! medium. After a kill both stay, and a writer with the same fingerprint and plan goes on after the last tensor that is
//! there with the digest that the journal says: all of them are read again. [`Writer::suspend`] leaves the same behind
//! on purpose. A writer that is dropped, after an error or without one, removes both.
//!
//! **SHA-256.** The first bytes of the file hold the digest of its last ones, so the SHA-256 of the whole cannot be
//! computed while the payload is written: it must start with the header, which is known last. With
//! [`WriteOptions::sha256`] the complete file is read once more before it is published. That takes its length over the
//! speed of the disk or of one core's SHA-256, whichever is less, and compares every region with its digest as well.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use minnow_common::units::HumanBytes;
use minnow_common::{FileOffset, TensorSpec, TensorSpecError};
use rustix::io::Errno;
use thiserror::Error;

use super::error::{MnwError, RegionPart};
use super::header::{ALIGNMENT, Header, MANIFEST_BYTES_MAX};
use super::journal::{Found, Heading, Journal, Record, line};
use super::layout::Layout;
use super::manifest::{Manifest, Region, Tensor, check_assets};
use super::publish::{
    Publication, TemporaryFile, check_space, check_target, is_temporary_name, journal_path, take_lock,
};
use super::readback;
use super::scales::{BadScale, check_scales};
use super::validate;
use crate::digest::{self, Digest};
use crate::io::output::{BLOCK_BYTES, Output};
use crate::io::{Disk, IoBackend, OsCause, open_on, system_disk};
use crate::names;

/// Bytes of payload after which a journal is brought up to date, which takes a flush of the disk's cache.
const RECORD_BYTES: u64 = 256 << 20;

/// What a file will hold, known before any payload.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// See [`Manifest::model_id`].
    pub model_id: String,
    /// The three required assets and any of the three optional ones.
    pub assets: BTreeMap<String, String>,
    /// Every tensor. The global scale of an NVFP4 tensor may be any; the real one comes with its payload.
    pub tensors: BTreeMap<String, TensorSpec>,
}

/// How a file is written.
#[derive(Clone, Debug)]
pub struct WriteOptions<'a> {
    /// Replace an existing file, at once and only when the new one is complete.
    pub force: bool,
    /// Keep a journal, and go on with what a killed conversion with the same plan and fingerprint left behind. Holds
    /// whatever else determines the payload: the source and the options.
    pub fingerprint: Option<&'a [u8]>,
    /// Compute [`Written::sha256`] by reading the complete file once more, and check every region on the way.
    pub sha256: bool,
    /// Bytes of payload between two entries in the journal.
    pub record_bytes: u64,
    /// The disk that is written to.
    pub disk: Arc<dyn Disk>,
}

impl Default for WriteOptions<'_> {
    fn default() -> Self {
        Self { force: false, fingerprint: None, sha256: false, record_bytes: RECORD_BYTES, disk: system_disk() }
    }
}

/// A file being written.
#[derive(Debug)]
pub struct Writer {
    /// Ends its thread when dropped, and so is dropped before the file is removed.
    output: Output,
    file: Arc<File>,
    journal: Option<OpenJournal>,
    temporary: TemporaryFile,
    disk: Arc<dyn Disk>,
    target: PathBuf,
    folder: PathBuf,
    publication: Publication,
    wants_sha256: bool,
    /// Digests of tensors that have not come yet are zero.
    manifest: Manifest,
    manifest_offset: FileOffset,
    file_bytes: u64,
    /// Names of the tensors in order, and how many have come.
    names: Vec<String>,
    tensors_done: usize,
    /// The tensor that [`Writer::begin`] started.
    open: Option<OpenTensor>,
    /// A write failed, so what is in the file is not known.
    is_broken: bool,
}

/// A journal, and what is not in it yet. Removed when this is dropped.
#[derive(Debug)]
struct OpenJournal {
    journal: Arc<Journal>,
    /// Lines of tensors that may not be on the medium yet.
    waiting: Vec<u8>,
    /// Where in the file the journal's tensors end.
    recorded_to: u64,
    record_bytes: u64,
    is_kept: bool,
}

/// A tensor of which some bytes have come.
#[derive(Debug)]
struct OpenTensor {
    name: String,
    tensor: Tensor,
    /// The region that is being filled, what of it has come, and its hash so far.
    part: RegionPart,
    bytes_done: u64,
    hasher: blake3::Hasher,
}

/// A finished file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Where it is.
    pub path: PathBuf,
    /// Its length.
    pub file_bytes: u64,
    /// Bytes of all regions, padding not counted.
    pub weight_bytes: u64,
    /// Tensors in it.
    pub tensors: usize,
    /// SHA-256 of the whole file, 64 lower-case digits, if it was asked for.
    pub sha256: Option<String>,
    /// How it was written: `direct` or `buffered`.
    pub backend: &'static str,
    /// Why it was not written directly: one line to log.
    pub fallback: Option<String>,
}

/// Why a file was not written.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say what each field is")]
pub enum WriteError {
    /// The plan itself is not acceptable.
    #[error("cannot be written: {0}")]
    Plan(MnwError),
    /// The manifest would be longer than a reader accepts, or the file longer than 2^64 bytes.
    #[error("cannot be written: the manifest would have {manifest_bytes} bytes, more than {MANIFEST_BYTES_MAX}")]
    ManifestTooLong { manifest_bytes: u64 },
    /// The file would pass 2^64 bytes.
    #[error("cannot be written: the file would be longer than 2^64 bytes")]
    TooLong,
    /// The destination is not a file name.
    #[error("{path}: is not the name of a file")]
    NoName { path: String },
    /// Something exists there.
    #[error("{path}: exists already and is not overwritten")]
    Exists { path: String },
    /// Something other than a file exists there, so it is not replaced.
    #[error("{path}: is not a regular file and is not replaced")]
    NotReplaceable { path: String },
    /// The folder does not exist or is not one.
    #[error("{folder}: is not an existing folder, so {name} cannot be written there")]
    NoFolder { folder: String, name: String },
    /// Nothing can be created in the folder.
    #[error("{folder}: is not writable: {}", OsCause(.error))]
    NotWritable { folder: String, error: io::Error },
    /// The file system has too little room.
    #[error(
        "{path}: needs {needed} bytes ({}), but its file system has {free} bytes free ({})",
        HumanBytes(*.needed), HumanBytes(*.free)
    )]
    NoSpace { path: String, needed: u64, free: u64 },
    /// The finished file could not be given its name without a risk of overwriting another.
    #[error(
        "{folder}: has neither hard links ({}) nor exclusive renames ({}), so no file can be published there \
         without a risk of overwriting another",
        OsCause(.link), OsCause(.rename)
    )]
    NoPublication { folder: String, link: io::Error, rename: io::Error },
    /// The system refused.
    #[error("{path}: {action} failed: {}", OsCause(.error))]
    Io { path: String, action: &'static str, error: io::Error },
    /// The writer was used after a write had failed.
    #[error("{path}: cannot be completed after an earlier error")]
    Broken { path: String },
    /// Another process is writing the same file, with a journal.
    #[error("{path}: is being written by another process")]
    Busy { path: String },
    /// What was left behind belongs to another conversion.
    #[error(
        "{journal}: was left by a conversion from another source or with other options, so it cannot be resumed; \
         remove it to start again"
    )]
    OtherConversion { journal: String },
    /// The journal is unusable.
    #[error("{journal}: {action} failed: {}", OsCause(.error))]
    Journal { journal: String, action: &'static str, error: io::Error },
    /// A tensor came out of order, twice, or is not in the plan.
    #[error("tensor {found} was given where {} was due", .expected.as_deref().unwrap_or("the end"))]
    Unexpected { found: String, expected: Option<String> },
    /// A payload has the wrong length.
    #[error("tensor {tensor}: {part} have {found} bytes, planned were {expected}")]
    Length { tensor: String, part: RegionPart, expected: u64, found: u64 },
    /// The global scale does not fit the encoding.
    #[error("tensor {tensor}: {error}")]
    Spec { tensor: String, error: TensorSpecError },
    /// A scale that no reader accepts.
    #[error("tensor {tensor}: {error}")]
    Scale { tensor: String, error: BadScale },
    /// Tensors are missing.
    #[error("{} tensors were not given, the first is {next}", .missing)]
    Incomplete { missing: usize, next: String },
    /// The file that was just written does not read back.
    #[error("{path}: does not read back as it was written: {error}")]
    ReadBack { path: String, error: MnwError },
    /// The file that was just written has another manifest than was written.
    #[error("{path}: does not read back as it was written: the manifest differs")]
    ReadBackDiffers { path: String },
}

impl Plan {
    /// The exact length of the file.
    pub fn file_bytes(&self) -> Result<u64, WriteError> {
        Ok(Draft::of(self.clone())?.file_bytes)
    }
}

/// A plan with its layout: the manifest as it will be, but for digests and global scales, which have a fixed length.
struct Draft {
    manifest: Manifest,
    manifest_offset: FileOffset,
    file_bytes: u64,
}

impl Draft {
    fn of(plan: Plan) -> Result<Self, WriteError> {
        let Plan { model_id, assets, tensors } = plan;
        check_assets(&assets).map_err(WriteError::Plan)?;
        if let Some(name) = assets.keys().find(|name| !names::is_known_asset(name)) {
            return Err(WriteError::Plan(MnwError::AssetUnknown(name.clone())));
        }
        if tensors.is_empty() {
            return Err(WriteError::Plan(MnwError::NoTensors));
        }
        if let Some(name) = tensors.keys().find(|name| !names::is_tensor_name(name)) {
            return Err(WriteError::Plan(MnwError::TensorName(name.clone())));
        }
        let layout = Layout::of(tensors.values()).ok_or(WriteError::TooLong)?;
        let region = |offset, bytes| Region { offset, bytes, digest: Digest([0; 32]) };
        let placed = tensors.into_iter().zip(&layout.places).map(|((name, spec), place)| {
            let data = region(place.data, spec.data_bytes());
            let scales = place.scales.map(|offset| region(offset, spec.scales_bytes()));
            (name, Tensor { spec, data, scales })
        });
        let manifest = Manifest { model_id, assets, tensors: placed.collect() };
        let manifest_bytes = manifest.encode().len() as u64;
        if manifest_bytes > MANIFEST_BYTES_MAX {
            return Err(WriteError::ManifestTooLong { manifest_bytes });
        }
        let end = layout.manifest_offset.checked_add(manifest_bytes).ok_or(WriteError::TooLong)?;
        Ok(Self { manifest, manifest_offset: layout.manifest_offset, file_bytes: end.0 })
    }

    /// A digest of everything that determines the bytes of the file, the payload by way of `fingerprint`.
    fn conversion(&self, fingerprint: &[u8]) -> Digest {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(fingerprint.len() as u64).to_le_bytes());
        hasher.update(fingerprint);
        hasher.update(&self.manifest.encode());
        Digest(*hasher.finalize().as_bytes())
    }
}

impl Writer {
    /// Checks that `plan` can be written to `target` and creates the temporary file. With `force`, an existing file is
    /// replaced, at once and only when the new one is complete.
    pub fn create(target: &Path, plan: Plan, force: bool) -> Result<Self, WriteError> {
        Self::open(target, plan, &WriteOptions { force, ..WriteOptions::default() }).map(|(writer, _)| writer)
    }

    /// [`Writer::open`] for a conversion that may be resumed: also gives the number of tensors, the first ones in
    /// order, that are complete already and are not to be given again.
    pub fn create_or_resume(
        target: &Path,
        plan: Plan,
        force: bool,
        fingerprint: &[u8],
    ) -> Result<(Self, usize), WriteError> {
        let fingerprint = Some(fingerprint);
        Self::open(target, plan, &WriteOptions { force, fingerprint, ..WriteOptions::default() })
    }

    /// Checks that `plan` can be written to `target`, and creates the temporary file or goes on with one that was left
    /// behind. The second value is the number of tensors that are complete.
    pub fn open(target: &Path, plan: Plan, options: &WriteOptions<'_>) -> Result<(Self, usize), WriteError> {
        let disk = &options.disk;
        let folder = check_target(target, options.force)?;
        let mut draft = Draft::of(plan)?;
        let failed = |action| move |error| WriteError::Io { path: target.display().to_string(), action, error };

        let conversion = options.fingerprint.map(|fingerprint| draft.conversion(fingerprint));
        let found = match conversion {
            Some(conversion) => Leftover::find(disk, target, &folder, &mut draft, conversion)?,
            None => None,
        };
        let present = found.as_ref().map_or(0, |found| found.bytes_on_disk);
        check_space(target, &folder, draft.file_bytes, present)?;

        let (file, temporary, journal, publication, tensors_done) = match found {
            Some(Leftover { file, temporary, journal, tensors_done, .. }) => {
                let publication = match options.force {
                    true => Publication::Replace,
                    false => {
                        let (_, mut probe) = TemporaryFile::create(disk, target, &folder)?;
                        Publication::probe(target, &folder, &mut probe)?
                    }
                };
                // No header until the rest is complete, whatever was there.
                disk.write_at(&file, &[0; ALIGNMENT as usize], 0).map_err(failed("writing"))?;
                (file, temporary, Some(journal), publication, tensors_done)
            }
            None => {
                let (file, mut temporary) = TemporaryFile::create(disk, target, &folder)?;
                let publication = match options.force {
                    true => Publication::Replace,
                    false => Publication::probe(target, &folder, &mut temporary)?,
                };
                let journal = match conversion {
                    Some(conversion) => Some(new_journal(disk, target, &folder, &temporary, conversion)?),
                    None => None,
                };
                (file, temporary, journal, publication, 0)
            }
        };

        let Draft { manifest, manifest_offset, file_bytes } = draft;
        let names: Vec<String> = manifest.tensors.keys().cloned().collect();
        let due = names.get(tensors_done).map(|name| manifest.tensors[name].data.offset);
        let start = if tensors_done == 0 { FileOffset(0) } else { due.unwrap_or(manifest_offset) };
        let file = Arc::new(file);
        let label = target.display().to_string();
        let output = Output::new(Arc::clone(disk), Arc::clone(&file), label, start.0, file_bytes)
            .map_err(failed("starting to write"))?;
        let journal = journal.map(|journal| OpenJournal {
            journal: Arc::new(journal),
            waiting: Vec::new(),
            recorded_to: start.0,
            record_bytes: options.record_bytes,
            is_kept: false,
        });
        let mut writer = Self {
            output,
            file,
            journal,
            temporary,
            disk: Arc::clone(disk),
            target: target.to_owned(),
            folder,
            publication,
            wants_sha256: options.sha256,
            manifest,
            manifest_offset,
            file_bytes,
            names,
            tensors_done,
            open: None,
            is_broken: false,
        };
        if tensors_done == 0 {
            // The header page stays zero until everything else is in place, so that a partial file has no magic.
            writer.append(&[0; ALIGNMENT as usize])?;
        }
        Ok((writer, tensors_done))
    }

    /// Length that the file will have.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Writes the next tensor. Tensors come in bytewise order of their names; `scales` is there exactly for quantized
    /// ones, `global_scale` exactly for NVFP4.
    pub fn tensor(
        &mut self,
        name: &str,
        data: &[u8],
        scales: Option<&[u8]>,
        global_scale: Option<f32>,
    ) -> Result<(), WriteError> {
        let mut tensor = self.due(name, global_scale)?;
        let scales = scales.unwrap_or_default();
        let lengths = [
            (RegionPart::Data, tensor.spec.data_bytes(), data.len() as u64),
            (RegionPart::Scales, tensor.spec.scales_bytes(), scales.len() as u64),
        ];
        if let Some((part, expected, found)) = lengths.into_iter().find(|(_, expected, found)| expected != found) {
            return Err(WriteError::Length { tensor: name.to_owned(), part, expected, found });
        }
        check_scales(tensor.spec.encoding(), scales)
            .map_err(|error| WriteError::Scale { tensor: name.to_owned(), error })?;

        self.region(&mut tensor.data, data)?;
        if let Some(region) = &mut tensor.scales {
            self.region(region, scales)?;
        }
        self.tensor_is_complete(name.to_owned(), tensor)
    }

    /// Starts the next tensor, as [`Writer::tensor`] does, for bytes that come in pieces. After an error here, in
    /// [`Writer::piece`] or in [`Writer::end`] the file is lost, and the writer is only good for dropping.
    pub fn begin(&mut self, name: &str, global_scale: Option<f32>) -> Result<(), WriteError> {
        let tensor = self.due(name, global_scale)?;
        let (name, hasher) = (name.to_owned(), blake3::Hasher::new());
        self.open = Some(OpenTensor { name, tensor, part: RegionPart::Data, bytes_done: 0, hasher });
        Ok(())
    }

    /// Writes the next bytes of the tensor that was begun: all of its data, then all of its scales, of which a piece
    /// holds a whole number.
    pub fn piece(&mut self, part: RegionPart, bytes: &[u8]) -> Result<(), WriteError> {
        if self.open.as_ref().is_some_and(|open| open.part != part) {
            self.close_region()?;
        }
        let Some(open) = &mut self.open else {
            let expected = self.names.get(self.tensors_done).cloned();
            return Err(WriteError::Unexpected { found: format!("a piece of {part}"), expected });
        };
        let (length, tensor) = (open.region_bytes(part), || open.name.clone());
        let found = open.bytes_done + bytes.len() as u64;
        if open.part != part || found > length {
            return Err(WriteError::Length { tensor: tensor(), part, expected: length, found });
        }
        if part == RegionPart::Scales {
            check_scales(open.tensor.spec.encoding(), bytes)
                .map_err(|error| WriteError::Scale { tensor: tensor(), error })?;
        }
        digest::update(&mut open.hasher, bytes);
        open.bytes_done = found;
        self.append(bytes)
    }

    /// Ends the tensor that was begun; all of its bytes must have come.
    pub fn end(&mut self) -> Result<(), WriteError> {
        self.close_region()?;
        let Some(OpenTensor { name, tensor, part, .. }) = self.open.take() else {
            let expected = self.names.get(self.tensors_done).cloned();
            return Err(WriteError::Unexpected { found: "the end of a tensor".to_owned(), expected });
        };
        if part == RegionPart::Data && tensor.scales.is_some() {
            let expected = tensor.spec.scales_bytes();
            return Err(WriteError::Length { tensor: name, part: RegionPart::Scales, expected, found: 0 });
        }
        self.tensor_is_complete(name, tensor)
    }

    fn tensor_is_complete(&mut self, name: String, tensor: Tensor) -> Result<(), WriteError> {
        if let Some(journal) = &mut self.journal {
            journal.waiting.extend(line(&Record::of(&name, &tensor)));
        }
        self.manifest.tensors.insert(name, tensor);
        self.tensors_done += 1;
        let due = |journal: &OpenJournal| self.output.position() - journal.recorded_to >= journal.record_bytes;
        if self.journal.as_ref().is_some_and(due) { self.record() } else { Ok(()) }
    }

    /// Has the journal brought up to date once the tensors so far are on the medium.
    fn record(&mut self) -> Result<(), WriteError> {
        let Some(open) = &mut self.journal else { return Ok(()) };
        open.recorded_to = self.output.position();
        let (journal, lines) = (Arc::clone(&open.journal), std::mem::take(&mut open.waiting));
        let recorded = self.output.when_durable(Box::new(move || journal.append(&lines)));
        self.checked(recorded)
    }

    /// Notes the digest of the region that is being filled, pads it, and goes on to the scales.
    fn close_region(&mut self) -> Result<(), WriteError> {
        let Some(open) = &mut self.open else { return Ok(()) };
        let (part, expected, found) = (open.part, open.region_bytes(open.part), open.bytes_done);
        if found != expected {
            return Err(WriteError::Length { tensor: open.name.clone(), part, expected, found });
        }
        let digest = Digest(*std::mem::take(&mut open.hasher).finalize().as_bytes());
        match (part, &mut open.tensor.scales) {
            (RegionPart::Data, scales) => {
                open.tensor.data.digest = digest;
                if scales.is_some() {
                    (open.part, open.bytes_done) = (RegionPart::Scales, 0);
                }
            }
            (RegionPart::Scales, Some(scales)) => scales.digest = digest,
            (RegionPart::Scales, None) => {}
        }
        self.pad()
    }

    /// Writes manifest and header, syncs, reads the file back, and gives it its name.
    pub fn finish(mut self) -> Result<Written, WriteError> {
        self.check_whole()?;
        if let Some(next) = self.names.get(self.tensors_done) {
            return Err(WriteError::Incomplete { missing: self.names.len() - self.tensors_done, next: next.clone() });
        }
        self.record()?;
        let manifest = self.manifest.encode();
        self.append(&manifest)?;
        let header = Header {
            manifest_offset: self.manifest_offset,
            manifest_bytes: manifest.len() as u64,
            manifest_digest: Digest::of(&manifest),
        };
        let completed = self.output.complete();
        self.checked(completed)?;
        let mut page = [0; ALIGNMENT as usize];
        page[..header.encode().len()].copy_from_slice(&header.encode());
        self.output.write_page(&page, 0).map_err(|error| self.io_error("writing the header", error))?;
        let (disk, file) = (&self.disk, &*self.file);
        disk.set_len(file, self.file_bytes).map_err(|error| self.io_error("setting the length", error))?;
        disk.sync_all(file).map_err(|error| self.io_error("syncing", error))?;

        let sha256 = self.read_back()?;
        self.publication.publish(&mut self.temporary, &self.target)?;
        if let Some(open) = &mut self.journal {
            open.is_kept = true;
            open.journal.remove().map_err(|error| WriteError::Journal {
                journal: journal_path(&self.target, &self.folder).display().to_string(),
                action: "removing it",
                error,
            })?;
        }
        self.sync_folder()?;
        Ok(Written {
            file_bytes: self.file_bytes,
            weight_bytes: self.manifest.weight_bytes(),
            tensors: self.names.len(),
            sha256,
            backend: self.output.backend(),
            fallback: self.output.note(),
            path: std::mem::take(&mut self.target),
        })
    }

    /// Stops, and leaves what is complete for a later [`Writer::create_or_resume`]: how many tensors that is. For an
    /// interrupt; without a fingerprint, or if what is there cannot be put on the medium, everything is removed.
    pub fn suspend(mut self) -> Result<usize, WriteError> {
        self.check_whole()?;
        let completed = self.output.complete();
        self.checked(completed)?;
        let Some(open) = &mut self.journal else { return Ok(0) };
        let lines = std::mem::take(&mut open.waiting);
        let recorded = self.disk.sync_data(&self.file).and_then(|()| open.journal.append(&lines));
        if let Err(error) = recorded {
            return Err(self.io_error("suspending", error));
        }
        open.is_kept = true;
        self.temporary.is_there = false;
        Ok(self.tensors_done)
    }

    /// Writes one region and the zeros after it, and notes its digest.
    fn region(&mut self, region: &mut Region, bytes: &[u8]) -> Result<(), WriteError> {
        debug_assert_eq!(self.output.position(), region.offset.0, "regions follow each other as they were laid out");
        let mut hasher = blake3::Hasher::new();
        // In turns, so that the disk has work while the next block is hashed.
        for block in bytes.chunks(BLOCK_BYTES) {
            digest::update(&mut hasher, block);
            self.append(block)?;
        }
        region.digest = Digest(*hasher.finalize().as_bytes());
        self.pad()
    }

    /// Writes zeros up to where the next region starts.
    fn pad(&mut self) -> Result<(), WriteError> {
        let position = self.output.position();
        let padding = (position.next_multiple_of(ALIGNMENT) - position) as usize;
        self.append(&[0; ALIGNMENT as usize][..padding])
    }

    /// The planned tensor, which must be the next one, with its real global scale.
    fn due(&self, name: &str, global_scale: Option<f32>) -> Result<Tensor, WriteError> {
        self.check_whole()?;
        let expected = self.names.get(self.tensors_done);
        let is_due = self.open.is_none() && expected.is_some_and(|due| due == name);
        let Some(mut tensor) = self.manifest.tensors.get(name).filter(|_| is_due).cloned() else {
            return Err(WriteError::Unexpected { found: name.escape_debug().to_string(), expected: expected.cloned() });
        };
        tensor.spec = with_global_scale(&tensor.spec, global_scale)
            .map_err(|error| WriteError::Spec { tensor: name.to_owned(), error })?;
        Ok(tensor)
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        let appended = self.output.append(bytes);
        self.checked(appended)
    }

    /// After an error of the output nothing more can be written.
    fn checked(&mut self, result: io::Result<()>) -> Result<(), WriteError> {
        result.map_err(|error| {
            self.is_broken = true;
            self.io_error("writing", error)
        })
    }

    fn check_whole(&self) -> Result<(), WriteError> {
        match self.is_broken {
            true => Err(WriteError::Broken { path: self.target.display().to_string() }),
            false => Ok(()),
        }
    }

    /// Opens the complete file as a reader does, and reads all of it if that was asked for.
    fn read_back(&self) -> Result<Option<String>, WriteError> {
        let path = || self.target.display().to_string();
        let error = |error| WriteError::ReadBack { path: path(), error };
        let backend = if self.wants_sha256 { IoBackend::Auto } else { IoBackend::Buffered };
        let file = open_on(&self.disk, &self.temporary.path, backend).map_err(|e| error(MnwError::Io(e)))?;
        let container = validate::open(file).map_err(error)?;
        if container.manifest != self.manifest {
            return Err(WriteError::ReadBackDiffers { path: path() });
        }
        match self.wants_sha256 {
            true => readback::sha256(&container).map(Some).map_err(error),
            false => Ok(None),
        }
    }

    fn sync_folder(&self) -> Result<(), WriteError> {
        match self.disk.sync_folder(&self.folder) {
            // Some network file systems have nothing to sync a folder with.
            Err(error) if error.raw_os_error() != Some(Errno::INVAL.raw_os_error()) => {
                Err(self.io_error("syncing the folder", error))
            }
            _ => Ok(()),
        }
    }

    fn io_error(&self, action: &'static str, error: io::Error) -> WriteError {
        WriteError::Io { path: self.target.display().to_string(), action, error }
    }
}

impl Drop for OpenJournal {
    fn drop(&mut self) {
        if !self.is_kept {
            // There is no one left to tell; without its temporary file it says nothing.
            let _ = self.journal.remove();
        }
    }
}

impl Record {
    fn of(name: &str, tensor: &Tensor) -> Self {
        Self {
            tensor: name.to_owned(),
            data: tensor.data.digest.to_hex(),
            scales: tensor.scales.as_ref().map(|region| region.digest.to_hex()),
            global_scale_bits: tensor.spec.global_scale().map(f32::to_bits),
        }
    }

    /// The planned tensor `name` with what the record says of it; `None` if it speaks of another.
    fn completed(&self, name: &str, planned: &Tensor) -> Option<Tensor> {
        let spec = &planned.spec;
        let scale = self.global_scale_bits.map(f32::from_bits);
        let mut tensor = Tensor { spec: with_global_scale(spec, scale).ok()?, ..planned.clone() };
        tensor.data.digest = Digest::from_hex(&self.data)?;
        if let Some(region) = &mut tensor.scales {
            region.digest = Digest::from_hex(self.scales.as_deref()?)?;
        }
        (self.tensor == name).then_some(tensor)
    }
}

fn with_global_scale(spec: &TensorSpec, global_scale: Option<f32>) -> Result<TensorSpec, TensorSpecError> {
    let group = spec.group().map_or(0, |group| group.get() as u64);
    TensorSpec::new(spec.shape().clone(), spec.encoding(), group, global_scale)
}

/// What a killed conversion left behind, checked.
struct Leftover {
    file: File,
    temporary: TemporaryFile,
    journal: Journal,
    tensors_done: usize,
    bytes_on_disk: u64,
}

impl Leftover {
    /// Looks for what `conversion` to `target` left behind, and enters what is verifiably complete into `draft`. `None`
    /// if there is nothing to go on with.
    fn find(
        disk: &Arc<dyn Disk>,
        target: &Path,
        folder: &Path,
        draft: &mut Draft,
        conversion: Digest,
    ) -> Result<Option<Self>, WriteError> {
        let path = journal_path(target, folder);
        let shown = || path.display().to_string();
        let failed = |action| {
            let journal = shown();
            move |error| WriteError::Journal { journal, action, error }
        };
        let busy = || WriteError::Busy { path: target.display().to_string() };
        let (journal, heading, records) = match Journal::open(disk, &path).map_err(failed("reading it"))? {
            Found::Nothing => return Ok(None),
            Found::Busy => return Err(busy()),
            Found::Journal(journal, heading, records) => (journal, heading, records),
        };
        if heading.conversion != conversion.to_hex() {
            return Err(WriteError::OtherConversion { journal: shown() });
        }
        // The name comes from a file that anyone may have written: it must be one that we give.
        let name = target.file_name().unwrap_or_default();
        if !is_temporary_name(name.as_encoded_bytes(), heading.temporary.as_bytes()) {
            return Ok(None);
        }
        let temporary = folder.join(&heading.temporary);
        let file = match disk.reopen(&temporary) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(WriteError::Io { path: shown(), action: "opening what was left", error }),
        };
        if !take_lock(&**disk, &file) {
            return Err(busy());
        }
        let claimed: Vec<(String, Tensor)> = draft
            .manifest
            .tensors
            .iter()
            .zip(&records)
            .map_while(|((name, planned), record)| Some((name.clone(), record.completed(name, planned)?)))
            .collect();
        let tensors_done = match open_on(disk, &temporary, IoBackend::Auto) {
            Ok(file) => readback::complete_tensors(&file, claimed.iter().map(|(_, tensor)| tensor)),
            Err(_) => 0,
        };
        draft.manifest.tensors.extend(claimed.into_iter().take(tensors_done));
        journal.keep_first(&records, tensors_done).map_err(failed("shortening it"))?;
        let bytes_on_disk = file.metadata().map_or(0, |found| std::os::unix::fs::MetadataExt::blocks(&found) * 512);
        let temporary = TemporaryFile::at(disk, temporary);
        Ok(Some(Self { file, temporary, journal, tensors_done, bytes_on_disk }))
    }
}

/// Starts a journal for a new temporary file.
fn new_journal(
    disk: &Arc<dyn Disk>,
    target: &Path,
    folder: &Path,
    temporary: &TemporaryFile,
    conversion: Digest,
) -> Result<Journal, WriteError> {
    let path = journal_path(target, folder);
    let failed = |error| WriteError::Journal { journal: path.display().to_string(), action: "creating it", error };
    let name = temporary.path.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| failed(io::Error::other("the name is not UTF-8")))?;
    Journal::create(disk, &path, &Heading::new(conversion, name.to_owned())).map_err(failed)
}

impl OpenTensor {
    fn region_bytes(&self, part: RegionPart) -> u64 {
        match part {
            RegionPart::Data => self.tensor.spec.data_bytes(),
            RegionPart::Scales => self.tensor.spec.scales_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use minnow_common::{Encoding, FloatType, Shape};

    fn plan() -> Plan {
        let config = r#"{"model_type":"llada2_moe","vocab_size":512,"hidden_size":256,"intermediate_size":512,
            "num_hidden_layers":3,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":128,"rms_norm_eps":1e-6,
            "max_position_embeddings":1024,"first_k_dense_replace":1,"num_experts":16,"num_experts_per_tok":2,
            "num_shared_experts":1,"moe_intermediate_size":128,"routed_scaling_factor":2.5,"rope_theta":3000000,
            "expert_capacity":6}"#;
        let assets = [("config.json", config), ("tokenizer.json", "{}"), ("chat_template.jinja", "")];
        let spec = TensorSpec::new(Shape::vector(3), Encoding::Float(FloatType::F32), 0, None).unwrap();
        Plan {
            model_id: "m".to_owned(),
            assets: assets.map(|(name, text)| (name.to_owned(), text.to_owned())).into(),
            tensors: [("a".to_owned(), spec.clone()), ("b".to_owned(), spec)].into(),
        }
    }

    fn names_in(folder: &Path) -> Vec<String> {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn each_way_of_publishing_leaves_one_whole_file() {
        for publication in [Publication::Link, Publication::Rename, Publication::Replace] {
            let folder = tempfile::tempdir().unwrap();
            let target = folder.path().join("x.mnw");
            let mut writer = Writer::create(&target, plan(), false).unwrap();
            assert_eq!(writer.publication, Publication::Link);
            assert_eq!(names_in(folder.path()).len(), 1);
            writer.publication = publication;
            writer.tensor("a", &[1; 12], None, None).unwrap();
            writer.tensor("b", &[2; 12], None, None).unwrap();
            let written = writer.finish().unwrap();
            assert_eq!(names_in(folder.path()), ["x.mnw"]);
            assert_eq!(fs::metadata(&target).unwrap().len(), written.file_bytes);
            assert_eq!(written.file_bytes, plan().file_bytes().unwrap());
            assert_eq!((written.weight_bytes, written.tensors), (24, 2));
        }
    }

    #[test]
    fn a_file_that_appears_meanwhile_is_not_overwritten() {
        for publication in [Publication::Link, Publication::Rename] {
            let folder = tempfile::tempdir().unwrap();
            let target = folder.path().join("x.mnw");
            let mut writer = Writer::create(&target, plan(), false).unwrap();
            writer.publication = publication;
            writer.tensor("a", &[1; 12], None, None).unwrap();
            writer.tensor("b", &[2; 12], None, None).unwrap();
            fs::write(&target, "theirs").unwrap();
            assert!(matches!(writer.finish(), Err(WriteError::Exists { .. })));
            assert_eq!(names_in(folder.path()), ["x.mnw"]);
            assert_eq!(fs::read(&target).unwrap(), b"theirs");
        }
    }

    #[test]
    fn tensors_out_of_order_or_of_the_wrong_size_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("x.mnw");
        let mut writer = Writer::create(&target, plan(), false).unwrap();
        assert!(matches!(writer.tensor("b", &[0; 12], None, None), Err(WriteError::Unexpected { .. })));
        assert!(matches!(writer.tensor("c", &[0; 12], None, None), Err(WriteError::Unexpected { .. })));
        assert!(matches!(writer.tensor("a", &[0; 11], None, None), Err(WriteError::Length { .. })));
        assert!(matches!(writer.tensor("a", &[0; 12], Some(&[0]), None), Err(WriteError::Length { .. })));
        assert!(matches!(writer.tensor("a", &[0; 12], None, Some(1.0)), Err(WriteError::Spec { .. })));
        writer.tensor("a", &[0; 12], None, None).unwrap();
        assert!(matches!(writer.tensor("a", &[0; 12], None, None), Err(WriteError::Unexpected { .. })));
        assert!(matches!(writer.finish(), Err(WriteError::Incomplete { missing: 1, .. })));
        assert!(names_in(folder.path()).is_empty());
    }

    #[test]
    fn pieces_give_the_bytes_of_the_whole() {
        let folder = tempfile::tempdir().unwrap();
        let (whole, pieces) = (folder.path().join("whole.mnw"), folder.path().join("pieces.mnw"));
        let quantized = TensorSpec::new(Shape::matrix(8, 640), Encoding::I8Sym, 16, None).unwrap();
        let plan = || {
            let mut plan = plan();
            plan.tensors.insert("b".to_owned(), quantized.clone());
            plan
        };
        let (data, scales) = ([7; 5120], [0x3c; 640]);

        let mut writer = Writer::create(&whole, plan(), false).unwrap();
        writer.tensor("a", &[1; 12], None, None).unwrap();
        writer.tensor("b", &data, Some(&scales), None).unwrap();
        writer.finish().unwrap();

        let mut writer = Writer::create(&pieces, plan(), false).unwrap();
        writer.begin("a", None).unwrap();
        assert!(matches!(writer.begin("a", None), Err(WriteError::Unexpected { .. })));
        writer.piece(RegionPart::Data, &[1; 5]).unwrap();
        writer.piece(RegionPart::Data, &[1; 7]).unwrap();
        writer.end().unwrap();
        writer.begin("b", None).unwrap();
        for piece in data.chunks(1000) {
            writer.piece(RegionPart::Data, piece).unwrap();
        }
        writer.piece(RegionPart::Scales, &scales[..2]).unwrap();
        writer.piece(RegionPart::Scales, &scales[2..]).unwrap();
        writer.end().unwrap();
        writer.finish().unwrap();
        assert_eq!(fs::read(whole).unwrap(), fs::read(pieces).unwrap());
    }

    #[test]
    fn pieces_that_do_not_add_up_are_refused() {
        type Writing = fn(&mut Writer) -> Result<(), WriteError>;
        let too_short: Writing = |writer| {
            writer.begin("a", None)?;
            writer.piece(RegionPart::Data, &[0; 11])?;
            writer.end()
        };
        let too_long: Writing = |writer| {
            writer.begin("a", None)?;
            writer.piece(RegionPart::Data, &[0; 13])
        };
        let surplus: Writing = |writer| {
            writer.begin("a", None)?;
            writer.piece(RegionPart::Data, &[0; 12])?;
            writer.piece(RegionPart::Scales, &[0; 2])
        };
        let folder = tempfile::tempdir().unwrap();
        for writing in [too_short, too_long, surplus] {
            let mut writer = Writer::create(&folder.path().join("x.mnw"), plan(), false).unwrap();
            assert!(matches!(writing(&mut writer), Err(WriteError::Length { .. })));
        }
        let mut writer = Writer::create(&folder.path().join("x.mnw"), plan(), false).unwrap();
        assert!(matches!(writer.piece(RegionPart::Data, &[]), Err(WriteError::Unexpected { .. })));
        assert!(matches!(writer.end(), Err(WriteError::Unexpected { .. })));
        drop(writer);
        assert!(names_in(folder.path()).is_empty());
    }

    #[test]
    fn a_plan_that_no_reader_would_accept_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("x.mnw");
        let changed = |change: &dyn Fn(&mut Plan)| {
            let mut plan = plan();
            change(&mut plan);
            Writer::create(&target, plan, false).map(|_| ()).unwrap_err()
        };
        let spec = plan().tensors["a"].clone();
        let error = changed(&|plan| plan.tensors.clear());
        assert!(matches!(error, WriteError::Plan(MnwError::NoTensors)));
        let error = changed(&|plan| drop(plan.tensors.insert("a\n".to_owned(), spec.clone())));
        assert!(matches!(error, WriteError::Plan(MnwError::TensorName(_))));
        let error = changed(&|plan| drop(plan.assets.remove("tokenizer.json")));
        assert!(matches!(error, WriteError::Plan(MnwError::AssetMissing("tokenizer.json"))));
        let error = changed(&|plan| drop(plan.assets.insert("extra.txt".to_owned(), String::new())));
        assert!(matches!(error, WriteError::Plan(MnwError::AssetUnknown(_))));
        let error = changed(&|plan| drop(plan.assets.insert("config.json".to_owned(), "{}".to_owned())));
        assert!(matches!(error, WriteError::Plan(MnwError::Config(_))));
        let long = "x".repeat(MANIFEST_BYTES_MAX as usize);
        let error = changed(&|plan| drop(plan.assets.insert("tokenizer.json".to_owned(), long.clone())));
        assert!(matches!(error, WriteError::ManifestTooLong { .. }));
        let huge =
            TensorSpec::new(Shape::new(vec![1 << 50]).unwrap(), Encoding::Float(FloatType::F32), 0, None).unwrap();
        let error = changed(&|plan| drop(plan.tensors.insert("huge".to_owned(), huge.clone())));
        assert!(matches!(error, WriteError::NoSpace { needed, free, .. } if needed > 1 << 52 && free < needed));
        assert!(names_in(folder.path()).is_empty());
    }
}
