//! The manifest: MessagePack to checked values, and back to the same bytes (`docs/format-mnw.md` sections 4 and 11).
//!
//! [`Manifest::parse`] meets every check that needs no other byte of the file. Afterwards each region lies inside the
//! payload, none overlaps another, and every length agrees with its shape. Fields may come in any order and unknown
//! ones are passed over; [`Manifest::encode`] writes the one canonical form.

use std::collections::BTreeMap;

use minnow_common::{ARCHITECTURE, Encoding, FileOffset, ModelConfig, Shape, TensorSpec, TensorSpecError};

use super::error::{MnwError, RegionPart};
use super::faults::Faults;
use super::header::ALIGNMENT;
use super::msgpack::{self, Encoder, Pairs, Value};
use crate::digest::Digest;
use crate::names;

/// The format version, the `1` of "v1".
const VERSION: u64 = 1;

/// What a file holds. Maps are in bytewise order of their keys, which is the order on disk.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifest {
    /// Where the model came from: the last component of the converter's source path, or what `--model-id` said.
    pub model_id: String,
    /// Text files by name.
    pub assets: BTreeMap<String, String>,
    /// Tensors by name.
    pub tensors: BTreeMap<String, Tensor>,
}

/// A tensor and where its bytes lie.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Shape, encoding, group size, global scale.
    pub spec: TensorSpec,
    /// Its codes or elements: [`TensorSpec::data_bytes`] bytes.
    pub data: Region,
    /// Its scales, [`TensorSpec::scales_bytes`] bytes; present exactly for quantized tensors.
    pub scales: Option<Region>,
}

/// A range of the file and what its bytes must hash to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// A multiple of 4096, at least 4096.
    pub offset: FileOffset,
    /// At least 1; padding is not counted.
    pub bytes: u64,
    /// BLAKE3 of these bytes.
    pub digest: Digest,
}

impl Manifest {
    /// Reads and checks a manifest whose payload ends at `payload_end`. Every fault goes to `faults`, and what is left of
    /// the manifest holds only tensors without. `None` if nothing is left, or `faults` takes no more.
    pub(super) fn parse(
        bytes: &[u8],
        payload_end: FileOffset,
        faults: &mut Faults,
    ) -> Option<(Self, Option<ModelConfig>)> {
        let raw = match RawManifest::parse(bytes) {
            Ok(raw) => raw,
            Err(fault) => {
                faults.add(fault);
                return None;
            }
        };
        let mut assets = BTreeMap::new();
        for (name, value) in raw.assets {
            let place = || format!("assets.{}", name.escape_debug());
            match value.text() {
                None => faults.add(MnwError::Schema { place: place(), expected: "text" })?,
                Some(_) if !names::is_asset_name(name) => faults.add(MnwError::AssetName(name.to_owned()))?,
                Some(text) => drop(assets.insert(name.to_owned(), text.to_owned())),
            }
        }
        let config = match check_assets(&assets) {
            Ok(config) => Some(config),
            Err(fault) => {
                faults.add(fault)?;
                None
            }
        };
        let mut tensors = BTreeMap::new();
        let mut found_any = false;
        for (name, value) in raw.tensors {
            found_any = true;
            if !names::is_tensor_name(name) {
                faults.add(MnwError::TensorName(name.to_owned()))?;
                continue;
            }
            match parse_tensor(name, value, payload_end) {
                Ok(tensor) => drop(tensors.insert(name.to_owned(), tensor)),
                Err(fault) => faults.add(fault)?,
            }
        }
        if !found_any {
            faults.add(MnwError::NoTensors)?;
        }
        let manifest = Self { model_id: raw.model_id, assets, tensors };
        manifest.check_overlaps(faults)?;
        Some((manifest, config))
    }

    /// The canonical bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Encoder::new();
        out.map(5);
        out.text("version");
        out.uint(VERSION);
        out.text("architecture");
        out.text(ARCHITECTURE);
        out.text("model_id");
        out.text(&self.model_id);
        out.text("assets");
        out.map(self.assets.len());
        for (name, text) in &self.assets {
            out.text(name);
            out.text(text);
        }
        out.text("tensors");
        out.map(self.tensors.len());
        for (name, tensor) in &self.tensors {
            out.text(name);
            tensor.encode(&mut out);
        }
        out.into_bytes()
    }

    /// Bytes of all regions, padding not counted.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        self.regions().map(|(_, _, region)| region.bytes).sum()
    }

    /// Every region in canonical order: tensors by name, data before scales.
    pub fn regions(&self) -> impl Iterator<Item = (&str, RegionPart, &Region)> {
        self.tensors.iter().flat_map(|(name, tensor)| {
            let data = (name.as_str(), RegionPart::Data, &tensor.data);
            let scales = tensor.scales.as_ref().map(|region| (name.as_str(), RegionPart::Scales, region));
            std::iter::once(data).chain(scales)
        })
    }

    fn check_overlaps(&self, faults: &mut Faults) -> Option<()> {
        let mut regions: Vec<_> = self.regions().collect();
        regions.sort_by_key(|(_, _, region)| region.offset);
        for pair in regions.windows(2).filter(|pair| pair[0].2.end() > pair[1].2.offset.0) {
            faults.add(MnwError::Overlap {
                first: pair[0].0.to_owned(),
                second: pair[1].0.to_owned(),
                offset: pair[1].2.offset,
            })?;
        }
        Some(())
    }
}

/// The top level of a manifest, with everything below it as it is written.
struct RawManifest<'a> {
    model_id: String,
    assets: Pairs<'a>,
    tensors: Pairs<'a>,
}

impl<'a> RawManifest<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Self, MnwError> {
        let [version, architecture, model_id, assets, tensors] = fields(
            msgpack::parse(bytes)?,
            "the manifest",
            ["version", "architecture", "model_id", "assets", "tensors"],
        )?;
        let version = required(version, Value::uint, "version", "a non-negative integer")?;
        if version != VERSION {
            return Err(MnwError::Version(version));
        }
        let architecture = required(architecture, Value::text, "architecture", "text")?;
        if architecture != ARCHITECTURE {
            return Err(MnwError::Architecture(architecture.to_owned()));
        }
        Ok(Self {
            model_id: required(model_id, Value::text, "model_id", "text")?.to_owned(),
            assets: required(assets, Value::map, "assets", "a map")?,
            tensors: required(tensors, Value::map, "tensors", "a map")?,
        })
    }
}

impl Tensor {
    fn encode(&self, out: &mut Encoder) {
        let spec = &self.spec;
        out.map(4 + usize::from(self.scales.is_some()) + usize::from(spec.global_scale().is_some()));
        out.text("shape");
        out.array(spec.shape().rank());
        spec.shape().dims().iter().for_each(|&dim| out.uint(dim));
        out.text("encoding");
        out.text(spec.encoding().name());
        out.text("data");
        self.data.encode(out);
        if let Some(scales) = &self.scales {
            out.text("scales");
            scales.encode(out);
        }
        out.text("group_size");
        out.uint(spec.group().map_or(0, |group| group.get() as u64));
        if let Some(scale) = spec.global_scale() {
            out.text("global_scale");
            out.float(scale);
        }
    }
}

impl Region {
    /// One past the last byte. Does not overflow in a checked manifest.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset.0 + self.bytes
    }

    fn encode(&self, out: &mut Encoder) {
        out.map(3);
        out.text("offset");
        out.uint(self.offset.0);
        out.text("bytes");
        out.uint(self.bytes);
        out.text("blake3");
        out.text(&self.digest.to_hex());
    }
}

/// Checks that the required assets are there and that `config.json` describes a model.
pub(super) fn check_assets(assets: &BTreeMap<String, String>) -> Result<ModelConfig, MnwError> {
    if let Some(missing) = names::REQUIRED_ASSETS.into_iter().find(|&name| !assets.contains_key(name)) {
        return Err(MnwError::AssetMissing(missing));
    }
    ModelConfig::from_json(&assets["config.json"]).map_err(MnwError::Config)
}

fn parse_tensor(name: &str, value: Value<'_>, payload_end: FileOffset) -> Result<Tensor, MnwError> {
    let tensor = || name.to_owned();
    let place = |field: &str| format!("tensors.{name}.{field}");
    let [shape, encoding, data, scales, group, global_scale] =
        fields(value, name, ["shape", "encoding", "data", "scales", "group_size", "global_scale"])?;

    let dims = required(shape, Value::array, &place("shape"), "an array")?
        .map(|dim| dim.uint().ok_or_else(|| MnwError::Schema { place: place("shape"), expected: "a list of integers" }))
        // One more than the highest rank tells that the rank is too high.
        .take(minnow_common::shape::RANK_MAX + 1)
        .collect::<Result<Vec<u64>, MnwError>>()?;
    let encoding = required(encoding, Value::text, &place("encoding"), "text")?;
    let encoding: Encoding =
        encoding.parse().map_err(|_| MnwError::Encoding { tensor: tensor(), encoding: encoding.to_owned() })?;
    let group = optional(group, Value::uint, &place("group_size"), "a non-negative integer")?.unwrap_or(0);
    let global_scale = optional(global_scale, Value::float, &place("global_scale"), "a float")?;
    let data = RawRegion::parse(data, name, RegionPart::Data)?
        .ok_or_else(|| MnwError::Schema { place: place("data"), expected: "a map" })?;
    let scales = RawRegion::parse(scales, name, RegionPart::Scales)?;

    let shape = Shape::new(dims).map_err(|error| MnwError::Shape { tensor: tensor(), error })?;
    let spec_error = |error| MnwError::Spec { tensor: tensor(), error };
    let expected = encoding.data_bytes(shape.elements()).ok_or_else(|| spec_error(TensorSpecError::Overflow))?;
    if data.bytes != expected {
        return Err(MnwError::PayloadLength { tensor: tensor(), expected, found: data.bytes });
    }
    let spec = TensorSpec::new(shape, encoding, group, global_scale).map_err(spec_error)?;
    match &scales {
        Some(_) if !encoding.is_quantized() => return Err(MnwError::FloatScales { tensor: tensor() }),
        _ => {
            let found = scales.as_ref().map_or(0, |region| region.bytes);
            if found != spec.scales_bytes() {
                return Err(MnwError::ScalesLength { tensor: tensor(), expected: spec.scales_bytes(), found });
            }
        }
    }
    let data = data.check(name, RegionPart::Data, payload_end)?;
    let scales = scales.map(|region| region.check(name, RegionPart::Scales, payload_end)).transpose()?;
    Ok(Tensor { spec, data, scales })
}

/// A region as it is written, before its place in the file is checked.
struct RawRegion<'a> {
    offset: FileOffset,
    bytes: u64,
    digest: &'a str,
}

impl<'a> RawRegion<'a> {
    fn parse(value: Option<Value<'a>>, tensor: &str, part: RegionPart) -> Result<Option<Self>, MnwError> {
        let Some(value) = value else { return Ok(None) };
        let place = |field: &str| format!("tensors.{tensor}.{part}{field}");
        let [offset, bytes, digest] = fields(value, &place(""), ["offset", "bytes", "blake3"])?;
        Ok(Some(Self {
            offset: FileOffset(required(offset, Value::uint, &place(".offset"), "a non-negative integer")?),
            bytes: required(bytes, Value::uint, &place(".bytes"), "a non-negative integer")?,
            digest: required(digest, Value::text, &place(".blake3"), "text")?,
        }))
    }

    fn check(self, tensor: &str, part: RegionPart, payload_end: FileOffset) -> Result<Region, MnwError> {
        let Self { offset, bytes, digest } = self;
        let tensor = || tensor.to_owned();
        if offset.0 < ALIGNMENT || !offset.0.is_multiple_of(ALIGNMENT) {
            return Err(MnwError::RegionAlign { tensor: tensor(), part, offset });
        }
        if bytes == 0 || offset.checked_add(bytes).is_none_or(|end| end > payload_end) {
            return Err(MnwError::RegionBounds { tensor: tensor(), part, offset, bytes, payload_end });
        }
        let digest = Digest::from_hex(digest).ok_or_else(|| MnwError::DigestText { tensor: tensor(), part })?;
        Ok(Region { offset, bytes, digest })
    }
}

/// The values of the named fields of a structure; `None` for those that are absent.
fn fields<'a, const N: usize>(
    value: Value<'a>,
    place: &str,
    names: [&str; N],
) -> Result<[Option<Value<'a>>; N], MnwError> {
    let pairs = value.map().ok_or_else(|| MnwError::Schema { place: place.to_owned(), expected: "a map" })?;
    let mut found = [None; N];
    for (name, value) in pairs {
        if let Some(index) = names.iter().position(|&wanted| wanted == name) {
            found[index] = Some(value);
        }
    }
    Ok(found)
}

/// A field that must be there and have the type that `read` reads.
fn required<'a, T>(
    value: Option<Value<'a>>,
    read: impl FnOnce(Value<'a>) -> Option<T>,
    place: &str,
    expected: &'static str,
) -> Result<T, MnwError> {
    value.and_then(read).ok_or_else(|| MnwError::Schema { place: place.to_owned(), expected })
}

/// A field that may be absent, but not of another type.
fn optional<'a, T>(
    value: Option<Value<'a>>,
    read: impl FnOnce(Value<'a>) -> Option<T>,
    place: &str,
    expected: &'static str,
) -> Result<Option<T>, MnwError> {
    value.map(|value| required(Some(value), read, place, expected)).transpose()
}
