//! One view over both containers: whoever needs a model's tensors need not know how they are stored.
//!
//! A checkpoint is a `.mnw` file, a Hugging Face folder of safetensors, or a lone `.safetensors` file whose folder has
//! the text files. Opening reads headers only. What a checkpoint *must* hold to be a model is
//! [`Checkpoint::check_model`]; a container without that is still a container.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use minnow_common::inventory::{self, Needed, Role};
use minnow_common::tensor::expert_family;
use minnow_common::{ConfigError, Encoding, FileOffset, GroupSize, ModelConfig, Shape, TensorSpec};
use thiserror::Error;

use crate::digest::Digest;
use crate::io::{self, Disk, IoBackend, IoError, ReadAt, ReadQueue, open_on, system_disk};
use crate::mnw::{self, BadScale, Container, MnwError, RegionPart};
use crate::names::{OPTIONAL_ASSETS, REQUIRED_ASSETS};
use crate::safetensors::{Folder, FolderError, StoredFloat, folder_of, open_file_on, open_folder_on};

/// The longest text file read from a folder. Tokenizers of a million entries stay below; all of them together must
/// fit a manifest of 128 MiB.
const ASSET_BYTES_MAX: u64 = 64 << 20;
/// Missing tensors that an error names; it counts the others.
const MISSING_NAMED_MAX: usize = 5;

/// An open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    source: Source,
    config: ModelConfig,
    assets: BTreeMap<String, String>,
    dropped_assets: Vec<String>,
    tensors: BTreeMap<String, StoredTensor>,
    model_id: String,
    path_id: String,
    files: Vec<Arc<dyn ReadAt>>,
    warnings: Vec<String>,
}

/// How a checkpoint is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceKind {
    /// One `.mnw` file.
    Mnw,
    /// safetensors, in one file or several.
    Safetensors,
}

#[derive(Debug)]
enum Source {
    Mnw(Box<Container>),
    Safetensors,
}

/// A tensor and where its bytes are.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredTensor {
    /// Shape, encoding, group size, global scale.
    pub spec: TensorSpec,
    /// Its file: an index into [`Checkpoint::files`].
    pub file: usize,
    /// Its codes or elements.
    pub data: Span,
    /// Its scales, exactly if it is quantized.
    pub scales: Option<Span>,
    /// What its bytes must hash to; known for `.mnw` only.
    pub digests: Option<Digests>,
}

/// A range of a file, checked to lie inside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where it starts.
    pub offset: FileOffset,
    /// How long it is.
    pub bytes: u64,
}

/// The digests of a tensor's regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digests {
    /// BLAKE3 of the data.
    pub data: Digest,
    /// BLAKE3 of the scales, exactly if the tensor is quantized.
    pub scales: Option<Digest>,
}

/// The bytes of a tensor: borrowed from a mapped or static file, else read into memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorBytes<'a> {
    /// Codes or elements, as stored.
    pub data: Cow<'a, [u8]>,
    /// Scales, as stored; present exactly for quantized tensors.
    pub scales: Option<Cow<'a, [u8]>>,
}

/// Why a checkpoint cannot be opened. Every message starts with a path.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say what each field is")]
pub enum OpenError {
    /// A file cannot be opened or read.
    #[error(transparent)]
    Io(#[from] IoError),
    /// A `.mnw` file is refused.
    #[error("{file}: {error}")]
    Mnw { file: String, error: MnwError },
    /// safetensors are refused.
    #[error(transparent)]
    Safetensors(FolderError),
    /// A required text file is missing.
    #[error("{folder}: {name} is missing")]
    AssetMissing { folder: String, name: &'static str },
    /// A required text file is unusable.
    #[error("{folder}: {name} {fault}")]
    Asset { folder: String, name: &'static str, fault: &'static str },
    /// `config.json` breaks a rule.
    #[error("{folder}: {error}")]
    Config { folder: String, error: ConfigError },
}

/// Why a tensor's bytes cannot be had.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say what each field is")]
pub enum ReadError {
    /// There is no such tensor.
    #[error("there is no tensor {0:?}")]
    NoTensor(String),
    /// The file cannot be read.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The tensor is larger than this machine can address.
    #[error("tensor {tensor}: {bytes} bytes cannot be addressed on this machine")]
    TooLarge { tensor: String, bytes: u64 },
    /// The bytes are not those that were written.
    #[error("{file}: {error}")]
    Corrupt { file: String, error: MnwError },
}

/// Why a checkpoint is not the model that its configuration describes.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "the messages say what each field is")]
pub enum ModelError {
    /// Tensors are absent.
    #[error("{count} tensors that the model needs are missing: {}", first_of(.names, *.count))]
    Missing {
        count: usize,
        /// The first few.
        names: Vec<String>,
    },
    /// A tensor has another shape than the configuration says.
    #[error("tensor {tensor} has shape {found}, expected {expected}")]
    Shape { tensor: String, found: Shape, expected: Shape },
    /// A tensor that must be floating is quantized.
    #[error("tensor {tensor} is stored as {encoding}, expected bf16, f16 or f32: only routed experts are quantized")]
    Quantized { tensor: String, encoding: Encoding },
    /// Experts of one projection differ.
    #[error("tensor {second} is stored as {}, but {first} of the same projection as {}", stored(.second_as), stored(.first_as))]
    Family {
        first: String,
        first_as: (Encoding, Option<GroupSize>),
        second: String,
        second_as: (Encoding, Option<GroupSize>),
    },
}

impl Checkpoint {
    /// Opens a `.mnw` file (told by its first bytes, not its name), a folder, or a lone `.safetensors` file.
    pub fn open(path: &Path, backend: IoBackend) -> Result<Self, OpenError> {
        Self::open_on(&system_disk(), path, backend)
    }

    /// [`Checkpoint::open`], asking `disk`.
    pub fn open_on(disk: &Arc<dyn Disk>, path: &Path, backend: IoBackend) -> Result<Self, OpenError> {
        let path_id = last_component(path);
        if path.is_dir() {
            let opened = open_folder_on(disk, path, backend).map_err(OpenError::from)?;
            return Self::from_folder(disk, path, opened, path_id);
        }
        let file = open_on(disk, path, backend)?;
        let mut magic = [0; mnw::MAGIC.len()];
        let has_magic = file.len() >= magic.len() as u64 && {
            file.read_exact_at(FileOffset(0), &mut magic)?;
            magic == mnw::MAGIC
        };
        if !has_magic && path.extension() == Some(OsStr::new("safetensors")) {
            let opened = open_file_on(disk, path, backend).map_err(OpenError::from)?;
            return Self::from_folder(disk, &folder_of(path), opened, path_id);
        }
        Self::from_mnw(file, path_id)
    }

    /// Opens a `.mnw` file that is part of the program.
    pub fn from_static(label: &str, bytes: &'static [u8]) -> Result<Self, OpenError> {
        Self::from_mnw(io::from_static(label, bytes), last_component(Path::new(label)))
    }

    fn from_mnw(file: Arc<dyn ReadAt>, path_id: String) -> Result<Self, OpenError> {
        let container = mnw::open(file.clone()).map_err(|error| match error {
            MnwError::Io(error) => OpenError::Io(error),
            error => OpenError::Mnw { file: file.label().to_owned(), error },
        })?;
        Ok(Self { path_id, ..Self::from_container(container) })
    }

    /// The checkpoint in an open container.
    #[must_use]
    pub fn from_container(container: Container) -> Self {
        let span = |region: &mnw::Region| Span { offset: region.offset, bytes: region.bytes };
        let stored = |tensor: &mnw::Tensor| StoredTensor {
            spec: tensor.spec.clone(),
            file: 0,
            data: span(&tensor.data),
            scales: tensor.scales.as_ref().map(span),
            digests: Some(Digests {
                data: tensor.data.digest,
                scales: tensor.scales.as_ref().map(|region| region.digest),
            }),
        };
        let manifest = &container.manifest;
        Self {
            config: container.config.clone(),
            assets: manifest.assets.clone(),
            dropped_assets: Vec::new(),
            tensors: manifest.tensors.iter().map(|(name, tensor)| (name.clone(), stored(tensor))).collect(),
            model_id: manifest.model_id.clone(),
            path_id: last_component(Path::new(container.file.label())),
            files: vec![Arc::clone(&container.file)],
            warnings: Vec::new(),
            source: Source::Mnw(Box::new(container)),
        }
    }

    fn from_folder(disk: &Arc<dyn Disk>, folder: &Path, opened: Folder, path_id: String) -> Result<Self, OpenError> {
        let (assets, dropped_assets) = read_assets(disk, folder)?;
        let config = ModelConfig::from_json(&assets["config.json"])
            .map_err(|error| OpenError::Config { folder: folder.display().to_string(), error })?;
        let stored = |(name, (file, tensor)): (String, (usize, StoredFloat))| {
            let data = Span { offset: tensor.offset, bytes: tensor.spec.data_bytes() };
            (name, StoredTensor { spec: tensor.spec, file, data, scales: None, digests: None })
        };
        Ok(Self {
            source: Source::Safetensors,
            config,
            assets,
            dropped_assets,
            tensors: opened.tensors.into_iter().map(stored).collect(),
            model_id: path_id.clone(),
            path_id,
            files: opened.shards,
            warnings: opened.warnings,
        })
    }

    /// How it is stored.
    #[must_use]
    pub fn kind(&self) -> SourceKind {
        match self.source {
            Source::Mnw(_) => SourceKind::Mnw,
            Source::Safetensors => SourceKind::Safetensors,
        }
    }

    /// The container behind it, for [`mnw::validate`]; `None` for safetensors.
    #[must_use]
    pub fn container(&self) -> Option<&Container> {
        match &self.source {
            Source::Mnw(container) => Some(container),
            Source::Safetensors => None,
        }
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Its text files by name: everything in a `.mnw` file, of a folder the six known ones that are there.
    #[must_use]
    pub fn assets(&self) -> &BTreeMap<String, String> {
        &self.assets
    }

    /// Optional text files that exist but cannot be read as text, and are therefore not among the assets.
    #[must_use]
    pub fn dropped_assets(&self) -> &[String] {
        &self.dropped_assets
    }

    /// What was left aside when opening, a line each, to be shown to the user.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Every tensor, in bytewise order of the names.
    #[must_use]
    pub fn tensors(&self) -> &BTreeMap<String, StoredTensor> {
        &self.tensors
    }

    /// Where the model came from: what the manifest says, or the last component of the path.
    #[must_use]
    pub fn model_id(&self) -> &str {
        &self.model_id
    }

    /// The last component of the path it was opened from; empty for `.`, `..` and `/`. It is the `model_id` of a
    /// container converted from this checkpoint.
    #[must_use]
    pub fn path_id(&self) -> String {
        self.path_id.clone()
    }

    /// The open files.
    #[must_use]
    pub fn files(&self) -> &[Arc<dyn ReadAt>] {
        &self.files
    }

    /// The I/O backend in use.
    #[must_use]
    pub fn backend(&self) -> &'static str {
        self.files.first().map_or("none", |file| file.backend())
    }

    /// The first file's reason for not using the backend that `auto` prefers: one line to log.
    #[must_use]
    pub fn fallback(&self) -> Option<&str> {
        self.files.iter().find_map(|file| file.fallback())
    }

    /// A queue for reads of its files: a ring exactly if they are read by one, so for what [`Checkpoint::backend`] calls
    /// `uring`, else threads. The second value says why there is no ring where there was to be one.
    ///
    /// # Errors
    /// If the kernel refuses the ring for another reason than a lack of support.
    pub fn read_queue(
        &self,
        capacity: usize,
        read_bytes_max: usize,
    ) -> Result<(Box<dyn ReadQueue>, Option<String>), IoError> {
        match self.files.iter().find_map(|file| file.ring_file()) {
            Some(ring) => io::read_queue_on(ring.disk(), IoBackend::Auto, capacity, read_bytes_max),
            None => io::read_queue(IoBackend::Buffered, capacity, read_bytes_max),
        }
    }

    /// A digest of what the checkpoint is made of: of each file its name, length, time of the last change and tensors,
    /// and the assets. Two checkpoints with the same fingerprint hold the same bytes, unless someone set the clock back.
    #[must_use]
    pub fn fingerprint(&self) -> Digest {
        let mut hasher = blake3::Hasher::new();
        let mut text = |text: &str| {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        };
        for file in &self.files {
            text(&last_component(Path::new(file.label())));
            text(&format!("{} {:?}", file.len(), file.modified()));
        }
        for (name, StoredTensor { spec, file, data, scales, digests }) in &self.tensors {
            text(name);
            text(&format!("{} {} {:?} {:?}", spec.shape(), spec.encoding(), spec.group(), spec.global_scale()));
            text(&format!("{file} {data:?} {scales:?} {digests:?}"));
        }
        for (name, asset) in &self.assets {
            text(name);
            text(asset);
        }
        Digest(*hasher.finalize().as_bytes())
    }

    /// Checks that no file was changed since it was opened: length and time of the last change.
    pub fn check_unchanged(&self) -> Result<(), IoError> {
        self.files.iter().try_for_each(|file| file.check_unchanged())
    }

    /// The bytes of a tensor, as stored and unchecked; see [`Checkpoint::verify`].
    pub fn read(&self, name: &str) -> Result<TensorBytes<'_>, ReadError> {
        let tensor = self.tensor(name)?;
        let data = self.read_span(name, tensor.file, tensor.data)?;
        let scales = tensor.scales.map(|span| self.read_span(name, tensor.file, span)).transpose()?;
        Ok(TensorBytes { data, scales })
    }

    /// Checks bytes that [`Checkpoint::read`] gave: digests where they are known, and the values of scales.
    pub fn verify(&self, name: &str, bytes: &TensorBytes<'_>) -> Result<(), ReadError> {
        let tensor = self.tensor(name)?;
        let corrupt = |error| ReadError::Corrupt { file: self.files[tensor.file].label().to_owned(), error };
        if let Some(digests) = &tensor.digests {
            let regions = [
                (RegionPart::Data, Some(tensor.data), Some(digests.data), Some(&bytes.data)),
                (RegionPart::Scales, tensor.scales, digests.scales, bytes.scales.as_ref()),
            ];
            for (part, span, expected, bytes) in regions {
                let (Some(Span { offset, .. }), Some(expected), Some(bytes)) = (span, expected, bytes) else {
                    continue;
                };
                let found = Digest::of(bytes);
                if found != expected {
                    let tensor = name.into();
                    return Err(corrupt(MnwError::PayloadDigest { tensor, part, offset, expected, found }));
                }
            }
        }
        let encoding = tensor.spec.encoding();
        mnw::check_scales(encoding, bytes.scales.as_deref().unwrap_or_default()).map_err(|BadScale { index, bits }| {
            corrupt(MnwError::ScaleValue { tensor: name.to_owned(), encoding, index, bits })
        })
    }

    /// Level "model": every tensor that the configuration calls for is there with its exact shape, only routed experts
    /// are quantized, and the experts of a projection share encoding and group size. Other tensors are ignored.
    pub fn check_model(&self) -> Result<(), ModelError> {
        let needed = inventory::needed(&self.config);
        let present = || needed.iter().filter_map(|needed| Some((needed, &self.tensors.get(&needed.name)?.spec)));

        let mut families: BTreeMap<(&str, &str), (&str, &TensorSpec)> = BTreeMap::new();
        for (Needed { name, .. }, spec) in present().filter(|(needed, _)| needed.role == Role::Expert) {
            let Some(family) = expert_family(name) else { continue };
            let (first, first_spec) = families.entry(family).or_insert((name, spec));
            let (first_as, second_as) = ((first_spec.encoding(), first_spec.group()), (spec.encoding(), spec.group()));
            if first_as != second_as {
                let (first, second) = ((*first).to_owned(), name.clone());
                return Err(ModelError::Family { first, first_as, second, second_as });
            }
        }

        let missing: Vec<&Needed> = needed.iter().filter(|needed| !self.tensors.contains_key(&needed.name)).collect();
        if !missing.is_empty() {
            let names = missing.iter().take(MISSING_NAMED_MAX).map(|needed| needed.name.clone()).collect();
            return Err(ModelError::Missing { count: missing.len(), names });
        }

        for (Needed { name, shape, role }, spec) in present() {
            if spec.shape() != shape {
                let (found, expected) = (spec.shape().clone(), shape.clone());
                return Err(ModelError::Shape { tensor: name.clone(), found, expected });
            }
            if *role != Role::Expert && spec.encoding().is_quantized() {
                return Err(ModelError::Quantized { tensor: name.clone(), encoding: spec.encoding() });
            }
        }
        Ok(())
    }

    /// Names of tensors that the configuration does not call for.
    #[must_use]
    pub fn unneeded(&self) -> Vec<&str> {
        let needed = inventory::needed(&self.config);
        let needed: std::collections::HashSet<&str> = needed.iter().map(|needed| needed.name.as_str()).collect();
        self.tensors.keys().map(String::as_str).filter(|name| !needed.contains(name)).collect()
    }

    fn tensor(&self, name: &str) -> Result<&StoredTensor, ReadError> {
        self.tensors.get(name).ok_or_else(|| ReadError::NoTensor(name.to_owned()))
    }

    fn read_span(&self, tensor: &str, file: usize, span: Span) -> Result<Cow<'_, [u8]>, ReadError> {
        let too_large = || ReadError::TooLarge { tensor: tensor.to_owned(), bytes: span.bytes };
        let bytes = usize::try_from(span.bytes).map_err(|_| too_large())?;
        let file = &self.files[file];
        if let Some(whole) = file.as_slice() {
            // The span lies inside the file, and the file is in memory.
            let start = span.offset.0 as usize;
            return Ok(Cow::Borrowed(&whole[start..start + bytes]));
        }
        let mut out = Vec::new();
        out.try_reserve_exact(bytes).map_err(|_| too_large())?;
        out.resize(bytes, 0);
        file.read_exact_at(span.offset, &mut out)?;
        Ok(Cow::Owned(out))
    }
}

impl OpenError {
    /// The reason code of a refused `.mnw` file.
    #[must_use]
    pub fn reason(&self) -> Option<&'static str> {
        match self {
            Self::Mnw { error, .. } => Some(error.reason()),
            _ => None,
        }
    }
}

impl From<FolderError> for OpenError {
    fn from(error: FolderError) -> Self {
        match error {
            FolderError::Io(error) => Self::Io(error),
            error => Self::Safetensors(error),
        }
    }
}

impl ModelError {
    /// The reason code (`docs/format-mnw.md` section 12).
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Missing { .. } => "missing-weight",
            Self::Shape { .. } => "weight-shape",
            Self::Quantized { .. } => "quantized-weight",
            Self::Family { .. } => "expert-family",
        }
    }
}

/// `names`, which are the first of `count`, and how many more there are.
fn first_of(names: &[String], count: usize) -> String {
    match count.saturating_sub(names.len()) {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

fn stored((encoding, group): &(Encoding, Option<GroupSize>)) -> String {
    match group {
        Some(group) => format!("{encoding} in groups of {group}"),
        None => encoding.to_string(),
    }
}

/// The last component of a path, lossily as text (`docs/format-mnw.md` section 4.3).
fn last_component(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

/// The six known text files of a folder, and the names of optional ones that exist but are not text.
fn read_assets(disk: &Arc<dyn Disk>, folder: &Path) -> Result<(BTreeMap<String, String>, Vec<String>), OpenError> {
    let mut assets = BTreeMap::new();
    let mut dropped = Vec::new();
    let label = || folder.display().to_string();
    for name in REQUIRED_ASSETS {
        if !folder.join(name).exists() {
            return Err(OpenError::AssetMissing { folder: label(), name });
        }
        let text = read_text(disk, &folder.join(name)).map_err(|fault| match fault {
            TextFault::Io(error) => OpenError::Io(error),
            TextFault::TooLong => OpenError::Asset { folder: label(), name, fault: "is longer than 64 MiB" },
            TextFault::NotUtf8 => OpenError::Asset { folder: label(), name, fault: "is not UTF-8 text" },
        })?;
        assets.insert(name.to_owned(), text);
    }
    for name in OPTIONAL_ASSETS {
        if folder.join(name).symlink_metadata().is_err() {
            continue;
        }
        match read_text(disk, &folder.join(name)) {
            Ok(text) => drop(assets.insert(name.to_owned(), text)),
            Err(_) => dropped.push(name.to_owned()),
        }
    }
    Ok((assets, dropped))
}

enum TextFault {
    Io(IoError),
    TooLong,
    NotUtf8,
}

fn read_text(disk: &Arc<dyn Disk>, path: &Path) -> Result<String, TextFault> {
    let file = open_on(disk, path, IoBackend::Buffered).map_err(TextFault::Io)?;
    if file.len() > ASSET_BYTES_MAX {
        return Err(TextFault::TooLong);
    }
    let mut bytes = vec![0; file.len() as usize];
    file.read_exact_at(FileOffset(0), &mut bytes).map_err(TextFault::Io)?;
    String::from_utf8(bytes).map_err(|_| TextFault::NotUtf8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_id_is_the_last_component() {
        for (path, id) in [
            ("models/LLaDA2.2-mini", "LLaDA2.2-mini"),
            ("models/LLaDA2.2-mini/", "LLaDA2.2-mini"),
            ("models/LLaDA2.2-mini/.", "LLaDA2.2-mini"),
            ("a/b.mnw", "b.mnw"),
            (".", ""),
            ("..", ""),
            ("/", ""),
        ] {
            assert_eq!(last_component(Path::new(path)), id, "{path}");
        }
    }
}
