//! Memory that opening a file takes, counted in the allocator of this test program.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;

use minnow_common::{Encoding, FileOffset, FloatType, Shape, TensorSpec};
use minnow_formats::io::IoBackend;
use minnow_formats::mnw::{self, Header, MANIFEST_BYTES_MAX, Manifest, MnwError, Region, Tensor};
use minnow_formats::{Checkpoint, Digest};
use minnow_tests::golden;

/// The system's allocator, counting what each thread holds.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    let live = LIVE.get() + bytes;
    LIVE.set(live);
    PEAK.set(PEAK.get().max(live));
}

// SAFETY: every call goes to the system's allocator unchanged; counting allocates nothing, since the thread-local cells
// are initialised at compile time and need no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise that `memory` came from here with `layout` is passed on.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count(bytes as isize - layout.size() as isize);
        // SAFETY: the caller's promise that `memory` came from here with `layout` is passed on.
        unsafe { System.realloc(memory, layout, bytes) }
    }
}

/// The most bytes that this thread held at one time while `work` ran, above what it held before.
pub(crate) fn peak_bytes<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.get();
    PEAK.set(before);
    let result = work();
    (result, (PEAK.get() - before) as usize)
}

/// C34
#[test]
fn a_manifest_one_byte_too_long_is_refused_without_allocating() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let header = Header {
        manifest_offset: FileOffset(4096),
        manifest_bytes: MANIFEST_BYTES_MAX + 1,
        manifest_digest: Digest::of(b""),
    };
    file.write_all(&header.encode()).unwrap();
    file.as_file().set_len(header.file_bytes()).unwrap();
    let opened = minnow_formats::io::open(file.path(), IoBackend::Buffered).unwrap();
    let (result, peak) = peak_bytes(|| mnw::open(opened));
    assert!(matches!(result, Err(MnwError::ManifestBounds { .. })));
    assert!(peak < 4096, "{peak} bytes");
}

#[test]
fn a_file_beyond_four_gigabytes_opens_and_reads() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let template = golden_manifest();
    // 4 GiB and one page of zeros, which a sparse file holds for nothing, then a tensor with something in it.
    let tensor = |elements: u64, offset: u64, digest| {
        let spec =
            TensorSpec::new(Shape::new(vec![elements]).unwrap(), Encoding::Float(FloatType::F32), 0, None).unwrap();
        let data = Region { offset: FileOffset(offset), bytes: spec.data_bytes(), digest };
        Tensor { spec, data, scales: None }
    };
    let last_offset = (4 << 30) + 2 * 4096;
    let payload = [1.0f32, 2.0, 3.0].map(f32::to_le_bytes).concat();
    let manifest = Manifest {
        tensors: BTreeMap::from([
            ("huge".to_owned(), tensor((1 << 30) + 1024, 4096, Digest::of(b"unchecked at this level"))),
            ("last".to_owned(), tensor(3, last_offset, Digest::of(&payload))),
        ]),
        ..template
    };
    let encoded = manifest.encode();
    let header = Header {
        manifest_offset: FileOffset(last_offset + 4096),
        manifest_bytes: encoded.len() as u64,
        manifest_digest: Digest::of(&encoded),
    };
    file.write_all(&header.encode()).unwrap();
    file.as_file().write_all_at(&payload, last_offset).unwrap();
    file.seek(SeekFrom::Start(header.manifest_offset.0)).unwrap();
    file.write_all(&encoded).unwrap();
    for backend in [IoBackend::Auto, IoBackend::Buffered, IoBackend::Mmap] {
        let (checkpoint, peak) = peak_bytes(|| Checkpoint::open(file.path(), backend).unwrap());
        assert!(peak < 8 << 20, "{backend}: {peak} bytes");
        let bytes = checkpoint.read("last").unwrap();
        assert_eq!(bytes.data, payload);
        checkpoint.verify("last", &bytes).unwrap();
    }
}

fn golden_manifest() -> Manifest {
    let folder = tempfile::tempdir().unwrap();
    let path = golden::unpack_into("golden/mnw/tiny/bf16.mnw", folder.path());
    mnw::open(minnow_formats::io::open(&path, IoBackend::Buffered).unwrap()).unwrap().manifest
}
