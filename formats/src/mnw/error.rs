//! Everything that makes a `.mnw` file unacceptable, and the reason code of each.

use std::fmt;

use minnow_common::{ARCHITECTURE, ConfigError, Encoding, FileOffset, ShapeError, TensorSpecError};
use serde::Serialize;
use thiserror::Error;

use super::header::{ALIGNMENT, HEADER_BYTES, MANIFEST_BYTES_MAX};
use super::msgpack::MsgpackError;
use crate::digest::Digest;
use crate::io::IoError;

/// Which region of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RegionPart {
    /// The codes or floating elements.
    Data,
    /// The scales of a quantized tensor.
    Scales,
}

impl fmt::Display for RegionPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Data => "data",
            Self::Scales => "scales",
        })
    }
}

/// Why a file is refused. [`MnwError::reason`] gives the code of `docs/format-mnw.md` section 12.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say what each field is")]
pub enum MnwError {
    /// Too short for a header.
    #[error("the file has {file_bytes} bytes, expected at least the {HEADER_BYTES} bytes of a header")]
    HeaderShort { file_bytes: u64 },
    /// Not a `.mnw` v1 file.
    #[error("the file starts with \"{}\", expected \"MINNOW01\"", .found.escape_ascii())]
    Magic { found: [u8; 8] },
    /// Truncated or extended.
    #[error("the file has {found} bytes, expected the {declared} bytes its header declares")]
    FileLength { declared: u64, found: u64 },
    /// The manifest is not where it can be.
    #[error(
        "a manifest of {bytes} bytes at {offset:#x} is impossible in a file of {file_bytes} bytes (it has 1 to \
         {MANIFEST_BYTES_MAX} bytes, starts at a multiple of {ALIGNMENT} and ends where the file ends)"
    )]
    ManifestBounds { offset: u64, bytes: u64, file_bytes: u64 },
    /// The manifest's bytes changed.
    #[error("the manifest has BLAKE3 {found}, expected {expected} as the header says")]
    ManifestDigest { expected: Digest, found: Digest },
    /// The manifest is not MessagePack of the allowed kind.
    #[error("the manifest is not valid MessagePack: {0}")]
    Msgpack(#[from] MsgpackError),
    /// A field is missing or has the wrong type.
    #[error("manifest field {place} is not {expected}")]
    Schema { place: String, expected: &'static str },
    /// Another format version.
    #[error("the manifest has version {0}, expected 1")]
    Version(u64),
    /// Another architecture.
    #[error("the architecture is {0:?}, expected {ARCHITECTURE:?}, the only one supported")]
    Architecture(String),
    /// `config.json` breaks a rule.
    #[error(transparent)]
    Config(ConfigError),
    /// A required asset is absent.
    #[error("asset {0} is missing")]
    AssetMissing(&'static str),
    /// An asset's name is not a plain file name.
    #[error("asset name {0:?} is not a plain file name of up to 128 letters, digits, dots, hyphens and underscores")]
    AssetName(String),
    /// An asset that no writer stores (strict).
    #[error("asset {0} is not one of the six known names")]
    AssetUnknown(String),
    /// Nothing inside.
    #[error("the file has no tensors")]
    NoTensors,
    /// A tensor's name is unusable.
    #[error("tensor name {0:?} is not 1 to 512 bytes of printable text")]
    TensorName(String),
    /// An unknown encoding.
    #[error("tensor {tensor}: unknown encoding {encoding:?}")]
    Encoding { tensor: String, encoding: String },
    /// An impossible shape.
    #[error("tensor {tensor}: {error}")]
    Shape { tensor: String, error: ShapeError },
    /// Shape, encoding, group size and global scale do not go together.
    #[error("tensor {tensor}: {error}")]
    Spec { tensor: String, error: TensorSpecError },
    /// The data region has the wrong length.
    #[error("tensor {tensor}: data has {found} bytes, expected {expected} for its shape and encoding")]
    PayloadLength { tensor: String, expected: u64, found: u64 },
    /// The scales region is missing or has the wrong length.
    #[error("tensor {tensor}: scales have {found} bytes, expected {expected} for its shape and group size")]
    ScalesLength { tensor: String, expected: u64, found: u64 },
    /// A floating tensor with scales.
    #[error("tensor {tensor}: a floating tensor has no scales")]
    FloatScales { tensor: String },
    /// A region starts where none may.
    #[error("tensor {tensor}: {part} start at {offset}, expected a multiple of {ALIGNMENT} after the header")]
    RegionAlign { tensor: String, part: RegionPart, offset: FileOffset },
    /// A region leaves the payload.
    #[error("tensor {tensor}: {bytes} bytes of {part} at {offset} pass the end of the payload at {payload_end}")]
    RegionBounds { tensor: String, part: RegionPart, offset: FileOffset, bytes: u64, payload_end: FileOffset },
    /// A digest is not 64 hexadecimal digits.
    #[error("tensor {tensor}: the digest of its {part} is not 64 hexadecimal digits")]
    DigestText { tensor: String, part: RegionPart },
    /// Two regions share bytes.
    #[error("tensor {second}: its region at {offset} overlaps one of {first}")]
    Overlap { first: String, second: String, offset: FileOffset },
    /// Payload bytes changed.
    #[error("tensor {tensor}: {part} have BLAKE3 {found}, expected {expected}; they start at {offset}")]
    PayloadDigest { tensor: Box<str>, part: RegionPart, offset: FileOffset, expected: Digest, found: Digest },
    /// A stored scale is not positive and finite.
    #[error("tensor {tensor}: scale {index} is {bits:#06x}, not a positive finite value of {encoding}")]
    ScaleValue { tensor: String, encoding: Encoding, index: u64, bits: u16 },
    /// Regions are valid but not where a writer puts them (strict).
    #[error("{what} at {found}, expected {expected} in canonical order")]
    Order { what: String, found: FileOffset, expected: FileOffset },
    /// The manifest is valid but not the bytes a writer makes (strict).
    #[error("the manifest differs from its canonical form at byte {at}")]
    Noncanonical { at: u64 },
    /// A byte between regions is not zero (strict).
    #[error("the padding byte at {offset} is {value:#04x}, expected zero")]
    Padding { offset: FileOffset, value: u8 },
    /// The file could not be read.
    #[error(transparent)]
    Io(#[from] IoError),
}

impl MnwError {
    /// The reason code.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::HeaderShort { .. } => "header-short",
            Self::Magic { .. } => "magic",
            Self::FileLength { .. } => "file-length",
            Self::ManifestBounds { .. } => "manifest-bounds",
            Self::ManifestDigest { .. } => "manifest-digest",
            Self::Msgpack(_) => "msgpack",
            Self::Schema { .. } => "schema",
            Self::Version(_) => "version",
            Self::Architecture(_) => "architecture",
            Self::Config(_) => "config",
            Self::AssetMissing(_) => "asset-missing",
            Self::AssetName(_) | Self::AssetUnknown(_) => "asset-name",
            Self::NoTensors => "no-tensors",
            Self::TensorName(_) => "tensor-name",
            Self::Encoding { .. } => "encoding",
            Self::Shape { error: ShapeError::Overflow, .. } => "overflow",
            Self::Shape { .. } => "shape",
            Self::Spec { error, .. } => match error {
                TensorSpecError::Overflow => "overflow",
                TensorSpecError::FloatMetadata => "float-metadata",
                TensorSpecError::Packed { .. } => "packed-shape",
                TensorSpecError::Group { .. } => "group-size",
                TensorSpecError::GlobalScale { .. } => "global-scale",
            },
            Self::PayloadLength { .. } => "payload-length",
            Self::ScalesLength { .. } => "scales-length",
            Self::FloatScales { .. } => "float-metadata",
            Self::RegionAlign { .. } => "region-align",
            Self::RegionBounds { .. } => "region-bounds",
            Self::DigestText { .. } => "digest-text",
            Self::Overlap { .. } => "overlap",
            Self::PayloadDigest { .. } => "payload-digest",
            Self::ScaleValue { .. } => "scale-value",
            Self::Order { .. } => "order",
            Self::Noncanonical { .. } => "noncanonical",
            Self::Padding { .. } => "padding",
            Self::Io(_) => "io",
        }
    }

    /// The tensor it is about, of two the second.
    #[must_use]
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Self::TensorName(tensor)
            | Self::Encoding { tensor, .. }
            | Self::Shape { tensor, .. }
            | Self::Spec { tensor, .. }
            | Self::PayloadLength { tensor, .. }
            | Self::ScalesLength { tensor, .. }
            | Self::FloatScales { tensor }
            | Self::RegionAlign { tensor, .. }
            | Self::RegionBounds { tensor, .. }
            | Self::DigestText { tensor, .. }
            | Self::Overlap { second: tensor, .. }
            | Self::ScaleValue { tensor, .. } => Some(tensor),
            Self::PayloadDigest { tensor, .. } => Some(tensor),
            _ => None,
        }
    }

    /// The region it is about.
    #[must_use]
    pub fn region(&self) -> Option<RegionPart> {
        match self {
            Self::RegionAlign { part, .. }
            | Self::RegionBounds { part, .. }
            | Self::DigestText { part, .. }
            | Self::PayloadDigest { part, .. } => Some(*part),
            Self::PayloadLength { .. } => Some(RegionPart::Data),
            Self::ScalesLength { .. } | Self::FloatScales { .. } | Self::ScaleValue { .. } => Some(RegionPart::Scales),
            _ => None,
        }
    }

    /// Where in the file it is.
    #[must_use]
    pub fn offset(&self) -> Option<FileOffset> {
        match self {
            Self::RegionAlign { offset, .. }
            | Self::RegionBounds { offset, .. }
            | Self::Overlap { offset, .. }
            | Self::PayloadDigest { offset, .. }
            | Self::Order { found: offset, .. }
            | Self::Padding { offset, .. } => Some(*offset),
            Self::ManifestBounds { offset, .. } => Some(FileOffset(*offset)),
            Self::Io(IoError::Read { offset, .. } | IoError::OutsideFile { offset, .. }) => Some(*offset),
            Self::Io(IoError::CutShort { found, .. }) => Some(FileOffset(*found)),
            _ => None,
        }
    }
}
