//! The golden containers: accepted at every level, and written again to the same bytes.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use minnow_formats::io::{self, IoBackend};
use minnow_formats::mnw::{self, Container, Level, Manifest};
use minnow_formats::{Checkpoint, Digest};
use minnow_tests::golden;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

const FILES: [&str; 9] = [
    "bf16.mnw",
    "f16.mnw",
    "f32.mnw",
    "i4_mma.mnw",
    "i4_sym.mnw",
    "i8_mma.mnw",
    "i8_sym.mnw",
    "mixed.mnw",
    "nvfp4.mnw",
];

fn path(file: &str) -> PathBuf {
    golden::root().join("golden/mnw/tiny").join(file)
}

fn open(path: &Path) -> Container {
    mnw::open(io::open(path, IoBackend::Auto).unwrap()).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The bytes of the manifest as they lie in the file.
fn manifest_bytes(container: &Container) -> Vec<u8> {
    let mut bytes = vec![0; container.header.manifest_bytes as usize];
    container.file.read_exact_at(container.header.manifest_offset, &mut bytes).unwrap();
    bytes
}

#[test]
fn every_golden_container_passes_every_level() {
    for file in FILES {
        let container = open(&path(file));
        for (level, workers) in [(Level::Open, 1), (Level::Validate, 1), (Level::Strict, 3), (Level::Strict, 0)] {
            let read = AtomicU64::new(0);
            let progress = |bytes| {
                read.fetch_add(bytes, Ordering::Relaxed);
            };
            let report = mnw::validate(&container, level, workers, &progress).unwrap_or_else(|e| panic!("{file}: {e}"));
            assert_eq!(report.level, level);
            assert_eq!(report.tensors, container.manifest.tensors.len());
            assert_eq!(report.file_bytes, std::fs::metadata(path(file)).unwrap().len());
            let expected = if level == Level::Open { 0 } else { report.weight_bytes };
            assert_eq!(read.into_inner(), expected, "{file}: progress adds up");
        }
    }
}

#[test]
fn header_and_manifest_encode_to_the_bytes_they_came_from() {
    for file in FILES {
        let container = open(&path(file));
        let bytes = std::fs::read(path(file)).unwrap();
        assert_eq!(container.header.encode(), bytes[..64], "{file}");
        assert_eq!(container.manifest.encode(), manifest_bytes(&container), "{file}");
    }
    for entry in golden::json("golden/mnw/tiny/index.json")["files"].as_array().unwrap() {
        let container = open(&path(entry["file"].as_str().unwrap()));
        assert_eq!(Digest::of(&manifest_bytes(&container)).to_hex(), entry["manifest_blake3"]);
    }
}

#[test]
fn rmp_serde_writes_the_same_manifests() {
    for file in FILES {
        let container = open(&path(file));
        let bytes = manifest_bytes(&container);
        let theirs: RmpManifest = rmp_serde::from_slice(&bytes).unwrap();
        assert_eq!(rmp_serde::to_vec_named(&theirs).unwrap(), bytes, "{file}");
        let ours = RmpManifest::from(&container.manifest);
        assert_eq!(rmp_serde::to_vec_named(&ours).unwrap(), container.manifest.encode(), "{file}");
    }
}

#[test]
fn a_container_is_a_checkpoint_in_a_file_and_in_the_program() {
    let bytes: &'static [u8] = golden::bytes("golden/mnw/tiny/nvfp4.mnw").leak();
    let in_program = Checkpoint::from_static("nvfp4.mnw", bytes).unwrap();
    assert_eq!(in_program.backend(), "memory");
    for backend in [IoBackend::Auto, IoBackend::Buffered, IoBackend::Mmap] {
        let in_file = Checkpoint::open(&path("nvfp4.mnw"), backend).unwrap();
        in_file.check_model().unwrap();
        assert!(in_file.unneeded().is_empty());
        assert_eq!((in_file.model_id(), in_file.path_id().as_str()), ("tiny", "nvfp4.mnw"));
        assert_eq!(in_file.tensors(), in_program.tensors());
        for name in in_file.tensors().keys() {
            let read = in_file.read(name).unwrap();
            in_file.verify(name, &read).unwrap();
            assert_eq!(read, in_program.read(name).unwrap(), "{name}");
        }
    }
    assert!(matches!(in_program.read("model.norm.weight").unwrap().data, std::borrow::Cow::Borrowed(_)));
    assert!(in_program.read("no.such.tensor").is_err());
}

#[test]
fn a_flipped_bit_is_found_when_it_is_asked_for() {
    let mut bytes = golden::bytes("golden/mnw/tiny/i4_mma.mnw");
    bytes[4096] ^= 1;
    let checkpoint = Checkpoint::from_static("flipped.mnw", bytes.leak()).unwrap();
    let name = "lm_head.weight";
    let error = checkpoint.verify(name, &checkpoint.read(name).unwrap()).unwrap_err().to_string();
    assert!(error.starts_with("flipped.mnw: tensor lm_head.weight: data have BLAKE3"), "{error}");
    checkpoint.verify("model.norm.weight", &checkpoint.read("model.norm.weight").unwrap()).unwrap();
}

#[test]
fn a_truncated_container_says_what_was_expected_and_found() {
    let folder = tempfile::tempdir().unwrap();
    let whole = golden::bytes("golden/mnw/tiny/i4_mma.mnw");
    for length in [0, 1, 63, 64, 4095, whole.len() - 1] {
        let path = folder.path().join("cut.mnw");
        std::fs::write(&path, &whole[..length]).unwrap();
        for backend in [IoBackend::Auto, IoBackend::Buffered, IoBackend::Mmap] {
            let error = Checkpoint::open(&path, backend).unwrap_err().to_string();
            let expected = if length < 64 { 64 } else { whole.len() };
            for part in ["cut.mnw".to_owned(), format!("has {length} bytes"), expected.to_string()] {
                assert!(error.contains(&part), "{length}: {error}");
            }
        }
    }
}

/// The manifest as its reference writer has it.
#[derive(Serialize, Deserialize)]
struct RmpManifest {
    version: u32,
    architecture: String,
    model_id: String,
    assets: BTreeMap<String, String>,
    tensors: BTreeMap<String, RmpTensor>,
}

#[derive(Serialize, Deserialize)]
struct RmpTensor {
    shape: Vec<u64>,
    encoding: String,
    data: RmpRegion,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scales: Option<RmpRegion>,
    group_size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    global_scale: Option<f32>,
}

#[derive(Serialize, Deserialize)]
struct RmpRegion {
    offset: u64,
    bytes: u64,
    blake3: String,
}

impl From<&Manifest> for RmpManifest {
    fn from(manifest: &Manifest) -> Self {
        let region = |region: &mnw::Region| RmpRegion {
            offset: region.offset.0,
            bytes: region.bytes,
            blake3: region.digest.to_hex(),
        };
        let tensor = |tensor: &mnw::Tensor| RmpTensor {
            shape: tensor.spec.shape().dims().to_vec(),
            encoding: tensor.spec.encoding().to_string(),
            data: region(&tensor.data),
            scales: tensor.scales.as_ref().map(region),
            group_size: tensor.spec.group().map_or(0, |group| group.get() as u64),
            global_scale: tensor.spec.global_scale(),
        };
        Self {
            version: 1,
            architecture: minnow_common::ARCHITECTURE.to_owned(),
            model_id: manifest.model_id.clone(),
            assets: manifest.assets.clone(),
            tensors: manifest.tensors.iter().map(|(name, value)| (name.clone(), tensor(value))).collect(),
        }
    }
}
