//! Seeded random damage to headers and manifests: nothing panics, and whatever is accepted is consistent.

use minnow_common::FileOffset;
use minnow_common::random::mix64;
use minnow_formats::Digest;
use minnow_formats::io::{self, IoError, ReadAt};
use minnow_formats::mnw::{self, Container, Header, Level};
use minnow_formats::safetensors::parse_header;
use minnow_tests::golden;
use std::sync::Arc;

const MUTATIONS: u64 = 20_000;
const SEED: u64 = 0x6d69_6e6e_6f77;

/// A file in memory that is freed again.
#[derive(Debug)]
struct Bytes(Vec<u8>);

impl ReadAt for Bytes {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_exact_at(&self, offset: FileOffset, out: &mut [u8]) -> Result<(), IoError> {
        let start = usize::try_from(offset.0).ok();
        let found = start.and_then(|start| self.0.get(start..)?.get(..out.len()));
        let outside = || IoError::OutsideFile {
            path: self.label().to_owned(),
            offset,
            bytes: out.len() as u64,
            file_bytes: self.len(),
        };
        let found = found.ok_or_else(outside)?;
        out.copy_from_slice(found);
        Ok(())
    }

    fn label(&self) -> &str {
        "mutated"
    }

    fn backend(&self) -> &'static str {
        "memory"
    }
}

/// Random numbers in sequence.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix64(self.0)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// Damages `bytes` in one to four places: flips, replaced integers, removed, repeated and inserted pieces.
    fn damage(&mut self, bytes: &mut Vec<u8>) {
        const TELLING: [u8; 16] =
            [0x00, 0x01, 0x7f, 0x80, 0x90, 0xa0, 0xc0, 0xc1, 0xca, 0xcb, 0xcf, 0xd3, 0xdb, 0xdd, 0xdf, 0xff];
        for _ in 0..=self.below(4) {
            if bytes.is_empty() {
                return;
            }
            let at = self.below(bytes.len());
            match self.below(6) {
                0 => bytes[at] ^= 1 << self.below(8),
                1 => bytes[at] = TELLING[self.below(TELLING.len())],
                2 => bytes[at] = self.next() as u8,
                3 => {
                    let end = (at + 1 + self.below(16)).min(bytes.len());
                    bytes.drain(at..end);
                }
                4 => {
                    let end = (at + 1 + self.below(64)).min(bytes.len());
                    let piece = bytes[at..end].to_vec();
                    let to = self.below(bytes.len());
                    bytes.splice(to..to, piece);
                }
                _ => {
                    let value = [u64::MAX, 1 << 63, 1 << 32, 0, self.next()][self.below(5)];
                    let end = (at + 8).min(bytes.len());
                    bytes[at..end].copy_from_slice(&value.to_be_bytes()[..end - at]);
                }
            }
        }
    }
}

/// What holds of every container that was accepted, checked again from scratch.
fn assert_consistent(container: &Container, file_bytes: u64) {
    assert_eq!(container.header.file_bytes(), file_bytes);
    let mut end_before = 4096;
    let mut regions: Vec<_> = container.manifest.regions().map(|(_, _, region)| *region).collect();
    regions.sort_by_key(|region| region.offset);
    for region in regions {
        assert!(region.offset.0 >= end_before && region.offset.0.is_multiple_of(4096) && region.bytes > 0);
        end_before = region.offset.0.checked_add(region.bytes).unwrap();
    }
    assert!(end_before <= container.header.manifest_offset.0);
    for tensor in container.manifest.tensors.values() {
        let elements: u64 = tensor.spec.shape().dims().iter().product();
        assert_eq!(elements, tensor.spec.shape().elements());
        assert_eq!(tensor.data.bytes, tensor.spec.data_bytes());
        assert_eq!(tensor.scales.map_or(0, |region| region.bytes), tensor.spec.scales_bytes());
        assert_eq!(tensor.scales.is_some(), tensor.spec.encoding().is_quantized());
    }
}

#[test]
fn damaged_manifests_are_refused_or_consistent() {
    let mut random = Random(SEED);
    let (mut opened, mut strict) = (0, 0);
    for name in ["i4_mma", "nvfp4", "mixed", "f16"] {
        let original = golden::bytes(&format!("golden/mnw/tiny/{name}.mnw"));
        let container = mnw::open(Arc::new(Bytes(original.clone()))).unwrap();
        let payload_end = container.header.manifest_offset.0 as usize;
        for _ in 0..MUTATIONS / 4 {
            let mut manifest = original[payload_end..].to_vec();
            random.damage(&mut manifest);
            // A header that fits, so that the damage is looked at.
            let header = Header {
                manifest_bytes: manifest.len() as u64,
                manifest_digest: Digest::of(&manifest),
                ..container.header
            };
            let mut file = original[..payload_end].to_vec();
            file[..64].copy_from_slice(&header.encode());
            file.extend_from_slice(&manifest);
            let file_bytes = file.len() as u64;
            let Ok(container) = mnw::open(Arc::new(Bytes(file))) else { continue };
            opened += 1;
            assert_consistent(&container, file_bytes);
            if mnw::validate(&container, Level::Strict, 1, &|_| ()).is_ok() {
                strict += 1;
                assert_eq!(container.manifest.encode(), manifest);
            }
        }
    }
    // The damage is neither always fatal nor mostly harmless: changed digests, texts and names still open.
    assert!(opened > MUTATIONS / 50 && opened < MUTATIONS, "{opened} of {MUTATIONS} opened");
    assert!(strict < opened, "{strict} of {opened} passed strict");
}

#[test]
fn damaged_headers_are_refused_or_consistent() {
    let mut random = Random(SEED ^ 1);
    let original = golden::bytes("golden/mnw/tiny/f32.mnw");
    for _ in 0..MUTATIONS {
        let mut file = original.clone();
        let mut header = file[..64].to_vec();
        random.damage(&mut header);
        header.resize(64, 0);
        file[..64].copy_from_slice(&header);
        if random.below(4) == 0 {
            file.truncate(random.below(file.len()));
        }
        let file_bytes = file.len() as u64;
        if let Ok(container) = mnw::open(Arc::new(Bytes(file))) {
            assert_consistent(&container, file_bytes);
        }
    }
}

#[test]
fn damaged_safetensors_headers_are_refused_or_consistent() {
    let mut random = Random(SEED ^ 2);
    let original = golden::bytes("golden/mnw/tiny/source/model.safetensors");
    let header_bytes = u64::from_le_bytes(original[..8].try_into().unwrap()) as usize;
    for _ in 0..MUTATIONS {
        let mut header = original[8..8 + header_bytes].to_vec();
        random.damage(&mut header);
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        if random.below(8) == 0 {
            random.damage(&mut file);
        }
        file.extend_from_slice(&header);
        file.extend_from_slice(&original[8 + header_bytes..]);
        let file_bytes = file.len() as u64;
        let Ok(tensors) = parse_header(&Bytes(file)) else { continue };
        let mut end = tensors[0].offset.0;
        for tensor in tensors {
            assert_eq!(tensor.offset.0, end);
            end += tensor.spec.data_bytes();
        }
        assert_eq!(end, file_bytes);
    }
}

#[test]
fn static_bytes_are_read_like_a_file() {
    let bytes: &'static [u8] = golden::bytes("golden/mnw/tiny/f32.mnw").leak();
    let ours = mnw::open(Arc::new(Bytes(bytes.to_vec()))).unwrap();
    assert_eq!(mnw::open(io::from_static("f32.mnw", bytes)).unwrap().manifest, ours.manifest);
}
