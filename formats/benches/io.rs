//! How fast files are read, written and checked here, to be compared with `dd` in the same minute
//! (`docs/measurements/io.md` has the loop around it and its results).
//!
//! ```text
//! cargo bench -p minnow-formats --bench io -- read uring FILE     whole file through a queue, nothing done with it
//! cargo bench -p minnow-formats --bench io -- write FILE GIB      a container of float tensors, published
//! cargo bench -p minnow-formats --bench io -- journal FILE GIB    the same with a journal
//! cargo bench -p minnow-formats --bench io -- sha256 FILE GIB     the same and its SHA-256
//! cargo bench -p minnow-formats --bench io -- validate FILE N     digests of a container in N threads
//! cargo bench -p minnow-formats --bench io -- hash                BLAKE3, SHA-256 and copying in memory
//! ```

use std::collections::BTreeMap;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use minnow_common::{Encoding, FileOffset, FloatType, Shape, TensorSpec};
use minnow_formats::io::{IoBackend, ReadRequest, open, read_queue};
use minnow_formats::mnw::{self, Level, Plan, WriteOptions, Writer};
use sha2::Digest as _;

/// Reads in flight, and bytes of each.
const DEPTH: usize = 8;
const READ_BYTES: usize = 1 << 20;
/// Bytes of a tensor that is written.
const TENSOR_BYTES: usize = 64 << 20;
const CONFIG: &str = r#"{"model_type":"llada2_moe","vocab_size":512,"hidden_size":256,"intermediate_size":512,
    "num_hidden_layers":3,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":128,"rms_norm_eps":1e-6,
    "max_position_embeddings":1024,"first_k_dense_replace":1,"num_experts":16,"num_experts_per_tok":2,
    "num_shared_experts":1,"moe_intermediate_size":128,"routed_scaling_factor":2.5,"rope_theta":3000000,
    "expert_capacity":6}"#;

fn main() {
    let typed: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let typed: Vec<&str> = typed.iter().map(String::as_str).collect();
    match typed[..] {
        ["read", backend, file] => read(Path::new(file), backend.parse().expect("a backend")),
        [kind @ ("write" | "journal" | "sha256"), file, gib] => {
            write(Path::new(file), gib.parse().expect("a number of GiB"), kind);
        }
        ["validate", file, workers] => validate(Path::new(file), workers.parse().expect("a number of threads")),
        ["hash"] | [] => hash(),
        _ => panic!("see the head of formats/benches/io.rs"),
    }
}

/// Runs `work` once and prints its speed.
fn timed<T>(what: &str, bytes: u64, work: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    let result = work();
    let seconds = started.elapsed().as_secs_f64();
    println!("{what}: {:.3} GB/s ({bytes} bytes, {seconds:.3} s)", bytes as f64 / 1e9 / seconds);
    result
}

fn read(path: &Path, backend: IoBackend) {
    let file = open(path, backend).expect("a readable file");
    let (mut queue, note) = read_queue(backend, DEPTH, READ_BYTES).expect("a queue");
    let ranges: Vec<u64> = (0..file.len()).step_by(READ_BYTES).collect();
    println!("{} in flight as {}{}", DEPTH, file.backend(), note.unwrap_or_default());
    timed(&format!("read {backend}"), file.len(), || {
        let mut waiting = ranges.iter();
        let mut buffers: Vec<_> = (0..DEPTH).map(|_| queue.buffer(READ_BYTES)).collect();
        loop {
            while !buffers.is_empty()
                && let Some(&start) = waiting.next()
            {
                let bytes = (file.len() - start).min(READ_BYTES as u64) as usize;
                let (offset, buffer) = (FileOffset(start), buffers.pop().expect("it is not empty"));
                let request = ReadRequest { file: file.clone(), offset, bytes, buffer, tag: start };
                queue.submit(request).expect("as many buffers as places");
            }
            let Some(completion) = queue.complete() else { return };
            completion.result.expect("a read");
            buffers.push(completion.buffer);
        }
    });
}

fn write(path: &Path, gib: u64, kind: &str) {
    let spec = || {
        let shape = Shape::vector(TENSOR_BYTES / 2);
        TensorSpec::new(shape, Encoding::Float(FloatType::Bf16), 0, None).expect("a specification")
    };
    let count = (gib << 30) / TENSOR_BYTES as u64;
    let assets = [("config.json", CONFIG), ("tokenizer.json", "{}"), ("chat_template.jinja", "")];
    let plan = Plan {
        model_id: "bench".to_owned(),
        assets: assets.map(|(name, text)| (name.to_owned(), text.to_owned())).into(),
        tensors: BTreeMap::from_iter((0..count).map(|index| (format!("t.{index:05}"), spec()))),
    };
    let content: Vec<u8> =
        (0..TENSOR_BYTES as u32 / 4).flat_map(|i| i.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    let options = WriteOptions {
        force: true,
        sha256: kind == "sha256",
        fingerprint: (kind == "journal").then_some(b"bench"),
        ..WriteOptions::default()
    };
    let written = timed(kind, gib << 30, || {
        let (mut writer, _) = Writer::open(path, plan, &options).expect("a writable path");
        for index in 0..count {
            writer.tensor(&format!("t.{index:05}"), &content, None, None).expect("a write");
        }
        writer.finish().expect("a finished file")
    });
    println!("as {} {}", written.backend, written.sha256.unwrap_or_default());
}

fn validate(path: &Path, workers: usize) {
    let file = open(path, IoBackend::Auto).expect("a readable file");
    let what = format!("validate with {workers} threads as {}", file.backend());
    let findings = timed(&what, file.len(), || mnw::validate_all(&file, Level::Validate, workers, &|_| ()));
    assert!(findings.is_valid(), "{:?}", findings.problems);
}

fn hash() {
    let content = vec![0x5au8; 1 << 30];
    let bytes = content.len() as u64;
    timed("BLAKE3, one thread", bytes, || black_box(blake3::hash(&content)));
    timed("BLAKE3, all cores, pieces of 4 MiB", bytes, || {
        let mut hasher = blake3::Hasher::new();
        for piece in content.chunks(4 << 20) {
            hasher.update_rayon(piece);
        }
        black_box(hasher.finalize())
    });
    timed("SHA-256", bytes, || black_box(sha2::Sha256::digest(&content)));
    let mut target = vec![1u8; 4 << 20];
    timed("copying", bytes, || {
        content.chunks(4 << 20).for_each(|piece| {
            target.copy_from_slice(piece);
            black_box(&target);
        });
    });
}
