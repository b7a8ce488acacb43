//! Validation that lists everything: each problem with tensor, region and offset, whatever the number of threads.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use minnow_formats::io::{self, IoBackend};
use minnow_formats::mnw::{self, Container, Level, RegionPart};
use minnow_tests::golden;

use crate::synthetic;

fn open_bytes(bytes: Vec<u8>) -> Container {
    mnw::open(io::from_static("bytes", bytes.leak())).unwrap()
}

#[test]
fn every_damaged_region_is_named_with_tensor_and_offset() {
    let mut bytes = golden::bytes("golden/mnw/tiny/i8_mma.mnw");
    let container = open_bytes(bytes.clone());
    let regions: Vec<_> =
        container.manifest.regions().map(|(name, part, region)| (name.to_owned(), part, *region)).collect();
    let damaged: Vec<_> = regions.iter().step_by(3).collect();
    for (_, _, region) in &damaged {
        bytes[region.end() as usize - 1] ^= 0x10;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let path = folder.path().join("damaged.mnw");
    fs::write(&path, &bytes).unwrap();
    for (backend, workers) in [
        (IoBackend::Auto, 1),
        (IoBackend::Auto, 8),
        (IoBackend::Direct, 3),
        (IoBackend::Buffered, 64),
        (IoBackend::Mmap, 2),
    ] {
        let Ok(file) = io::open(&path, backend) else { continue };
        let read = AtomicU64::new(0);
        let progress = |bytes| {
            read.fetch_add(bytes, Ordering::Relaxed);
        };
        let findings = mnw::validate_all(&file, Level::Strict, workers, &progress);
        assert!(!findings.is_valid() && !findings.is_cut_off);
        assert_eq!((findings.tensors, findings.file_bytes), (container.manifest.tensors.len(), bytes.len() as u64));
        assert_eq!(findings.weight_bytes, read.into_inner());
        let digests: Vec<_> = findings.problems.iter().filter(|problem| problem.reason == "payload-digest").collect();
        assert_eq!(digests.len(), damaged.len());
        for (problem, (name, part, region)) in digests.iter().zip(&damaged) {
            assert_eq!((problem.tensor.as_ref(), problem.region), (Some(name), Some(*part)));
            assert_eq!(problem.offset, Some(region.offset.0));
            for text in [name, &region.offset.to_string(), &region.digest.to_hex()] {
                assert!(problem.message.contains(text), "{}", problem.message);
            }
        }
        // Damaged scales may have become impossible ones as well; nothing else is wrong.
        assert!(findings.problems.iter().all(|problem| ["payload-digest", "scale-value"].contains(&problem.reason)));
    }
}

#[test]
fn the_first_of_all_problems_is_the_one_that_is_reported_alone() {
    let folder = tempfile::tempdir().unwrap();
    let mut listed_more = 0;
    for case in golden::json("hostile/mnw/manifest.json")["cases"].as_array().unwrap() {
        let (name, reason) = (case["file"].as_str().unwrap(), case["reason"].as_str().unwrap());
        let level = case["reject_at"].as_str().unwrap();
        let path = golden::unpack_into(&format!("hostile/mnw/{name}"), folder.path());
        let file = io::open(&path, IoBackend::Buffered).unwrap();
        for asked in [Level::Open, Level::Validate, Level::Strict] {
            let findings = mnw::validate_all(&file, asked, 3, &|_| ());
            let refused = level.parse::<Level>().is_ok_and(|level| level <= asked);
            assert_eq!(findings.is_valid(), !refused, "{name} at {asked}: {:?}", findings.problems);
            if let Some(first) = findings.problems.first() {
                assert_eq!(first.reason, reason, "{name} at {asked}");
                assert!(!first.message.contains(char::is_control), "{:?}", first.message);
                listed_more += usize::from(findings.problems.len() > 1);
            }
        }
    }
    assert!(listed_more > 0);
}

#[test]
fn sound_tensors_are_checked_although_others_are_not() {
    let mut bytes = golden::bytes("golden/mnw/tiny/bf16.mnw");
    let container = open_bytes(bytes.clone());
    let (mut manifest, header) = (container.manifest.clone(), container.header);
    let names: Vec<String> = manifest.tensors.keys().cloned().collect();
    let region = |name: &str| container.manifest.tensors[name].data;
    // Two regions off the boundaries, one that overlaps the next, and a flipped bit in a sound one.
    manifest.tensors.get_mut(&names[1]).unwrap().data.offset.0 += 1;
    manifest.tensors.get_mut(&names[3]).unwrap().data.offset.0 += 512;
    manifest.tensors.get_mut(&names[5]).unwrap().data.offset = region(&names[6]).offset;
    bytes[region(&names[8]).offset.0 as usize] ^= 1;
    let encoded = manifest.encode();
    bytes.truncate(header.manifest_offset.0 as usize);
    bytes.extend_from_slice(&encoded);
    let header = mnw::Header {
        manifest_bytes: encoded.len() as u64,
        manifest_digest: minnow_formats::Digest::of(&encoded),
        ..header
    };
    bytes[..64].copy_from_slice(&header.encode());
    let findings = mnw::validate_all(&io::from_static("bytes", bytes.leak()), Level::Strict, 4, &|_| ());
    let found = |reason: &str| -> Vec<&str> {
        let problems = findings.problems.iter().filter(|problem| problem.reason == reason);
        problems.map(|problem| problem.tensor.as_deref().unwrap()).collect()
    };
    assert_eq!(found("region-align"), [&names[1], &names[3]]);
    assert!(found("overlap").iter().any(|&name| name == names[5] || name == names[6]));
    let digests = found("payload-digest");
    assert!(digests.contains(&names[8].as_str()) && digests.len() <= 2, "{digests:?}");
    assert_eq!(findings.tensors, names.len() - 2);
    // The canonical form of an unsound manifest is not asked for.
    assert!(!findings.problems.iter().any(|problem| ["order", "noncanonical"].contains(&problem.reason)));
}

#[test]
fn findings_are_machine_readable() {
    let mut bytes = golden::bytes("golden/mnw/tiny/nvfp4.mnw");
    let container = open_bytes(bytes.clone());
    let (name, _, region) = container.manifest.regions().find(|(_, part, _)| *part == RegionPart::Scales).unwrap();
    bytes[region.offset.0 as usize + 3] = 0x80;
    let findings = mnw::validate_all(&io::from_static("bytes", bytes.leak()), Level::Validate, 1, &|_| ());
    let json = serde_json::to_value(&findings).unwrap();
    assert_eq!((&json["level"], &json["is_cut_off"]), (&"validate".into(), &false.into()));
    let problems = json["problems"].as_array().unwrap();
    assert_eq!(problems.len(), 2);
    assert_eq!(problems[0]["reason"], "payload-digest");
    assert_eq!(problems[1]["reason"], "scale-value");
    for problem in problems {
        assert_eq!((&problem["tensor"], &problem["region"]), (&name.into(), &"scales".into()));
    }
    assert_eq!(problems[0]["offset"], region.offset.0);
    assert_eq!(problems[1]["offset"], region.offset.0 + 3);
}

#[test]
fn a_file_cut_short_under_validation_names_the_regions_that_are_gone() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let path = golden::unpack_into("golden/mnw/tiny/i8_mma.mnw", folder.path());
    for backend in [IoBackend::Auto, IoBackend::Buffered] {
        let whole = golden::bytes("golden/mnw/tiny/i8_mma.mnw");
        fs::write(&path, &whole).unwrap();
        let container = mnw::open(io::open(&path, backend).unwrap()).unwrap();
        let regions: Vec<_> = container.manifest.regions().collect();
        let cut = regions[regions.len() / 2].2.offset.0;
        let gone: Vec<_> = regions.iter().filter(|(_, _, region)| region.end() > cut).map(|(name, ..)| *name).collect();
        // The manifest is read before, so this happens between the two.
        let once = std::sync::Once::new();
        let file = container.file.clone();
        let progress = |_| {
            once.call_once(|| fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(cut).unwrap());
        };
        let findings = mnw::validate_all(&file, Level::Validate, 1, &progress);
        let named: Vec<_> = findings.problems.iter().filter_map(|problem| problem.tensor.as_deref()).collect();
        assert!(
            findings.problems.iter().all(|problem| problem.reason == "io" && problem.message.contains("i8_mma.mnw"))
        );
        // What was read ahead before the cut is fine.
        assert!(!named.is_empty() && named.len() <= gone.len() && gone.ends_with(&named), "{:?}", findings.problems);
    }
}

#[test]
fn sixty_four_validations_of_one_file_agree() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let path = folder.path().join("out.mnw");
    synthetic::write(&path);
    let mut bytes = fs::read(&path).unwrap();
    let container = open_bytes(bytes.clone());
    for name in ["b.int8", "m.07", "z.last"] {
        bytes[container.manifest.tensors[name].data.offset.0 as usize] ^= 1;
    }
    fs::write(&path, &bytes).unwrap();
    let file = io::open(&path, IoBackend::Auto).unwrap();
    let expected = mnw::validate_all(&file, Level::Strict, 1, &|_| ());
    assert_eq!(expected.problems.len(), 3);
    assert_eq!(mnw::validate_all(&file, Level::Strict, 64, &|_| ()), expected);
    std::thread::scope(|scope| {
        let one = || mnw::validate_all(&file, Level::Strict, 2, &|_| ());
        let all: Vec<_> = (0..64).map(|_| scope.spawn(one)).collect();
        for found in all {
            assert_eq!(found.join().unwrap(), expected);
        }
    });
}
