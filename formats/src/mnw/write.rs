//! Writing a `.mnw` file: all of it under its final name, or nothing (`docs/format-mnw.md` section 10.6).
//!
//! [`Writer::create`] makes every check that can fail before the first byte is written: destination, folder, free
//! space, and how the finished file can be given its name there. Then tensors come in order, each is hashed as it is
//! written, and [`Writer::finish`] writes manifest and header, syncs, reads the file back and publishes it. Until then
//! the bytes lie in `.{name}.{pid}-{counter}.tmp` beside the destination; dropping the writer removes that file.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use minnow_common::units::HumanBytes;
use minnow_common::{FileOffset, TensorSpec, TensorSpecError};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use thiserror::Error;

use super::error::{MnwError, RegionPart};
use super::header::{ALIGNMENT, Header, MANIFEST_BYTES_MAX};
use super::layout::Layout;
use super::manifest::{Manifest, Region, Tensor, check_assets};
use super::scales::{BadScale, check_scales};
use super::validate;
use crate::digest::Digest;
use crate::io::{IoBackend, OsCause};
use crate::names;

/// Bytes collected before they go to the file in one write.
const BUFFER_BYTES: usize = 4 << 20;
/// Temporary names tried before giving up; they are taken only by files a killed process with our id left behind.
const NAMES_TRIED_MAX: u32 = 100;

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

/// A file being written.
#[derive(Debug)]
pub struct Writer {
    out: BufWriter<File>,
    /// Bytes given to `out` so far.
    written: FileOffset,
    temporary: TemporaryFile,
    target: PathBuf,
    folder: PathBuf,
    publication: Publication,
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
}

impl Writer {
    /// Checks that `plan` can be written to `target` and creates the temporary file. With `force`, an existing file is
    /// replaced, at once and only when the new one is complete.
    pub fn create(target: &Path, plan: Plan, force: bool) -> Result<Self, WriteError> {
        let folder = check_target(target, force)?;
        let Draft { manifest, manifest_offset, file_bytes } = Draft::of(plan)?;
        check_space(target, &folder, file_bytes)?;
        let (file, mut temporary) = TemporaryFile::create(target, &folder)?;
        let publication =
            if force { Publication::Replace } else { Publication::probe(target, &folder, &mut temporary)? };
        let names = manifest.tensors.keys().cloned().collect();
        let mut writer = Self {
            out: BufWriter::with_capacity(BUFFER_BYTES, file),
            written: FileOffset(0),
            temporary,
            target: target.to_owned(),
            folder,
            publication,
            manifest,
            manifest_offset,
            file_bytes,
            names,
            tensors_done: 0,
            open: None,
            is_broken: false,
        };
        // The header page stays zero until everything else is in place, so that a partial file has no magic.
        writer.append(&[0; ALIGNMENT as usize])?;
        Ok(writer)
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
        self.manifest.tensors.insert(name.to_owned(), tensor);
        self.tensors_done += 1;
        Ok(())
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
        open.hasher.update(bytes);
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
        self.manifest.tensors.insert(name, tensor);
        self.tensors_done += 1;
        Ok(())
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
        let manifest = self.manifest.encode();
        self.append(&manifest)?;
        let header = Header {
            manifest_offset: self.manifest_offset,
            manifest_bytes: manifest.len() as u64,
            manifest_digest: Digest::of(&manifest),
        };
        self.out.flush().map_err(|error| self.io_error("writing", error))?;
        let file = self.out.get_ref();
        file.write_all_at(&header.encode(), 0).map_err(|error| self.io_error("writing the header", error))?;
        file.set_len(self.file_bytes).map_err(|error| self.io_error("setting the length", error))?;
        file.sync_all().map_err(|error| self.io_error("syncing", error))?;

        self.read_back()?;
        self.publish()?;
        Ok(Written {
            file_bytes: self.file_bytes,
            weight_bytes: self.manifest.weight_bytes(),
            tensors: self.names.len(),
            path: std::mem::take(&mut self.target),
        })
    }

    /// Writes one region and the zeros after it, and notes its digest.
    fn region(&mut self, region: &mut Region, bytes: &[u8]) -> Result<(), WriteError> {
        debug_assert_eq!(self.written, region.offset, "regions follow each other as they were laid out");
        region.digest = Digest::of(bytes);
        self.append(bytes)?;
        self.pad()
    }

    /// Writes zeros up to where the next region starts.
    fn pad(&mut self) -> Result<(), WriteError> {
        let padding = (self.written.0.next_multiple_of(ALIGNMENT) - self.written.0) as usize;
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
        let spec = &tensor.spec;
        let group = spec.group().map_or(0, |group| group.get() as u64);
        tensor.spec = TensorSpec::new(spec.shape().clone(), spec.encoding(), group, global_scale)
            .map_err(|error| WriteError::Spec { tensor: name.to_owned(), error })?;
        Ok(tensor)
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        match self.out.write_all(bytes) {
            Ok(()) => {
                self.written.0 += bytes.len() as u64;
                Ok(())
            }
            Err(error) => {
                self.is_broken = true;
                Err(self.io_error("writing", error))
            }
        }
    }

    fn check_whole(&self) -> Result<(), WriteError> {
        match self.is_broken {
            true => Err(WriteError::Broken { path: self.target.display().to_string() }),
            false => Ok(()),
        }
    }

    fn read_back(&self) -> Result<(), WriteError> {
        let path = || self.target.display().to_string();
        let error = |error| WriteError::ReadBack { path: path(), error };
        let file = crate::io::open(&self.temporary.path, IoBackend::Buffered).map_err(|e| error(MnwError::Io(e)))?;
        let container = validate::open(file).map_err(error)?;
        if container.manifest == self.manifest { Ok(()) } else { Err(WriteError::ReadBackDiffers { path: path() }) }
    }

    fn publish(&mut self) -> Result<(), WriteError> {
        let temporary = &self.temporary.path;
        let published = match self.publication {
            Publication::Link => fs::hard_link(temporary, &self.target),
            Publication::Rename => rename_exclusively(temporary, &self.target),
            Publication::Replace => fs::rename(temporary, &self.target),
        };
        match published {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(WriteError::Exists { path: self.target.display().to_string() });
            }
            Err(error) => return Err(self.io_error("publishing", error)),
        }
        match self.publication {
            Publication::Link => {
                self.temporary.remove().map_err(|e| self.io_error("removing the temporary name", e))?
            }
            Publication::Rename | Publication::Replace => self.temporary.is_there = false,
        }
        match File::open(&self.folder).and_then(|folder| folder.sync_all()) {
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

impl OpenTensor {
    fn region_bytes(&self, part: RegionPart) -> u64 {
        match part {
            RegionPart::Data => self.tensor.spec.data_bytes(),
            RegionPart::Scales => self.tensor.spec.scales_bytes(),
        }
    }
}

/// Checks the destination and returns its folder.
fn check_target(target: &Path, force: bool) -> Result<PathBuf, WriteError> {
    let path = || target.display().to_string();
    let Some(name) = target.file_name() else { return Err(WriteError::NoName { path: path() }) };
    let folder = match target.parent() {
        Some(parent) if parent.as_os_str().is_empty() => PathBuf::from("."),
        Some(parent) => parent.to_owned(),
        None => return Err(WriteError::NoName { path: path() }),
    };
    if !folder.is_dir() {
        let name = name.to_string_lossy().into_owned();
        return Err(WriteError::NoFolder { folder: folder.display().to_string(), name });
    }
    match fs::symlink_metadata(target) {
        Ok(_) if !force => Err(WriteError::Exists { path: path() }),
        Ok(found) if !found.is_file() && !found.is_symlink() => Err(WriteError::NotReplaceable { path: path() }),
        _ => Ok(folder),
    }
}

/// Checks that the whole file fits. An old file under the same name is kept until the new one is complete.
fn check_space(target: &Path, folder: &Path, needed: u64) -> Result<(), WriteError> {
    // A file system that cannot say, or says that it has no blocks at all, is tried.
    let Ok(info) = rustix::fs::statvfs(folder) else { return Ok(()) };
    let free = info.f_bavail.saturating_mul(info.f_frsize);
    if info.f_blocks == 0 || free >= needed {
        return Ok(());
    }
    Err(WriteError::NoSpace { path: target.display().to_string(), needed, free })
}

/// A file that disappears when this is dropped.
#[derive(Debug)]
struct TemporaryFile {
    path: PathBuf,
    is_there: bool,
}

impl TemporaryFile {
    /// Creates an empty file beside `target` that nobody else has.
    fn create(target: &Path, folder: &Path) -> Result<(File, Self), WriteError> {
        let mut tried = 0;
        loop {
            let path = temporary_name(target, folder);
            match OpenOptions::new().write(true).create_new(true).mode(0o644).open(&path) {
                Ok(file) => return Ok((file, Self { path, is_there: true })),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && tried < NAMES_TRIED_MAX => tried += 1,
                Err(error) => {
                    return Err(WriteError::NotWritable { folder: folder.display().to_string(), error });
                }
            }
        }
    }

    fn remove(&mut self) -> io::Result<()> {
        self.is_there = false;
        fs::remove_file(&self.path)
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if self.is_there {
            // There is no one left to tell; the name says what the file is.
            let _ = self.remove();
        }
    }
}

/// `.{name}.{pid}-{counter}.tmp` in `folder`; another one at each call.
fn temporary_name(target: &Path, folder: &Path) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let counter = COUNTER.fetch_add(1, Ordering::Relaxed);
    let mut name = OsString::from(".");
    name.push(target.file_name().unwrap_or_default());
    name.push(format!(".{}-{counter}.tmp", std::process::id()));
    folder.join(name)
}

/// How the finished file gets its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Publication {
    /// A second hard link; fails if the name is taken.
    Link,
    /// A rename that fails if the name is taken, where there are no hard links.
    Rename,
    /// A rename over whatever has the name (`force`).
    Replace,
}

impl Publication {
    /// Finds out, with the empty temporary file, what the file system can do. May give that file another name.
    fn probe(target: &Path, folder: &Path, temporary: &mut TemporaryFile) -> Result<Self, WriteError> {
        let probe = temporary_name(target, folder);
        let link = match fs::hard_link(&temporary.path, &probe) {
            Ok(()) => {
                let path = probe.display().to_string();
                let error = |error| WriteError::Io { path, action: "removing a probe", error };
                return fs::remove_file(&probe).map(|()| Self::Link).map_err(error);
            }
            Err(error) => error,
        };
        match rename_exclusively(&temporary.path, &probe) {
            Ok(()) => {
                temporary.path = probe;
                Ok(Self::Rename)
            }
            Err(rename) => Err(WriteError::NoPublication { folder: folder.display().to_string(), link, rename }),
        }
    }
}

fn rename_exclusively(from: &Path, to: &Path) -> io::Result<()> {
    Ok(rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
}

#[cfg(test)]
mod tests {
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
