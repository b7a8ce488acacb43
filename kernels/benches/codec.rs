//! The codecs, scalar beside vector: `cargo bench -p minnow-kernels --bench codec [FILTER]`.
//!
//! One thread. Encoding counts bytes of floating source, decoding bytes of f32 produced. The matrix is an expert of
//! LLaDA2.2-mini, 512 x 2048: 2 MiB of BF16, so source and result lie in the L2 and L3 caches; `memory` goes round 128
//! of them instead, so that every source comes from memory. `scalar` is the oracle, with the widening it needs.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use minnow_common::random::Symmetric;
use minnow_common::{Encoding, FloatType, GroupSize, Shape, TensorSpec};
use minnow_kernels::codec::{self, Encoder, FloatMatrix, Quality};
use minnow_kernels::cpu::Isa;

const ROWS: usize = 512;
const COLS: usize = 2048;
const ELEMENTS: u64 = (ROWS * COLS) as u64;

const ENCODINGS: [Encoding; 5] = [Encoding::I8Sym, Encoding::I8Mma, Encoding::I4Sym, Encoding::I4Mma, Encoding::Nvfp4];

fn group_of(encoding: Encoding) -> GroupSize {
    if encoding == Encoding::Nvfp4 { GroupSize::NVFP4 } else { GroupSize::DEFAULT }
}

fn vector_sets() -> impl Iterator<Item = Isa> {
    Isa::present().filter(|isa| *isa != Isa::Scalar)
}

/// Weights as a checkpoint stores them: sums of four uniform numbers, which look like a bell.
fn stored(float: FloatType) -> Vec<u8> {
    let sequence = Symmetric::new("bench", 1);
    let values = (0..ELEMENTS).map(|index| (0..4).map(|part| sequence.at(4 * index + part)).sum::<f32>() * 0.02);
    match float {
        FloatType::Bf16 => values.flat_map(|value| half::bf16::from_f32(value).to_le_bytes()).collect(),
        FloatType::F16 => values.flat_map(|value| half::f16::from_f32(value).to_le_bytes()).collect(),
        FloatType::F32 => values.flat_map(|value| value.to_le_bytes()).collect(),
    }
}

/// Empty regions of the right size.
fn regions(encoding: Encoding) -> (Vec<u8>, Vec<u8>) {
    let data = encoding.data_bytes(ELEMENTS).expect("no overflow");
    (vec![0; data as usize], vec![0; encoding.scales_bytes(ELEMENTS, group_of(encoding)) as usize])
}

fn encode(criterion: &mut Criterion) {
    for float in [FloatType::Bf16, FloatType::F16, FloatType::F32] {
        let bytes = stored(float);
        let source = FloatMatrix::new(&bytes, float, ROWS, COLS).expect("a matrix");
        for encoding in ENCODINGS {
            let mut bench = criterion.benchmark_group(format!("encode/{float}/{encoding}"));
            bench.throughput(Throughput::Bytes(bytes.len() as u64));
            let (mut data, mut scales) = regions(encoding);
            for isa in vector_sets() {
                bench.bench_function(BenchmarkId::from_parameter(isa), |bencher| {
                    let encoder = Encoder::new(isa);
                    bencher.iter(|| {
                        encoder.encode_into(black_box(&source), encoding, group_of(encoding), &mut data, &mut scales)
                    });
                });
            }
            bench.bench_function("scalar", |bencher| {
                bencher.iter(|| {
                    let values = float.widened(black_box(&bytes));
                    codec::encode(&values, ROWS, COLS, encoding, group_of(encoding))
                });
            });
        }
    }
}

fn encode_from_memory(criterion: &mut Criterion) {
    const MATRICES: usize = 128;
    let matrices: Vec<Vec<u8>> = vec![stored(FloatType::Bf16); MATRICES];
    let isa = Isa::detect();
    for encoding in ENCODINGS {
        let mut bench = criterion.benchmark_group(format!("memory/BF16/{encoding}"));
        bench.throughput(Throughput::Bytes(matrices[0].len() as u64));
        let (mut data, mut scales) = regions(encoding);
        bench.bench_function(BenchmarkId::from_parameter(isa), |bencher| {
            let mut sources = matrices.iter().cycle();
            bencher.iter(|| {
                let bytes = sources.next().expect("an endless circle");
                let source = FloatMatrix::new(bytes, FloatType::Bf16, ROWS, COLS).expect("a matrix");
                Encoder::new(isa).encode_into(&source, encoding, group_of(encoding), &mut data, &mut scales)
            });
        });
    }
}

fn search(criterion: &mut Criterion) {
    let bytes = stored(FloatType::Bf16);
    let source = FloatMatrix::new(&bytes, FloatType::Bf16, ROWS, COLS).expect("a matrix");
    for encoding in [Encoding::I8Mma, Encoding::I4Mma, Encoding::Nvfp4] {
        let mut bench = criterion.benchmark_group(format!("search/BF16/{encoding}"));
        bench.throughput(Throughput::Bytes(bytes.len() as u64));
        let (mut data, mut scales) = regions(encoding);
        for isa in Isa::present() {
            let encoder = Encoder::new(isa).with_quality(Quality::Search);
            bench.bench_function(BenchmarkId::from_parameter(isa), |bencher| {
                bencher.iter(|| {
                    encoder.encode_into(black_box(&source), encoding, group_of(encoding), &mut data, &mut scales)
                });
            });
        }
    }
}

fn decode(criterion: &mut Criterion) {
    let bytes = stored(FloatType::Bf16);
    let source = FloatMatrix::new(&bytes, FloatType::Bf16, ROWS, COLS).expect("a matrix");
    let mut out = vec![0.0; ROWS * COLS];
    for encoding in ENCODINGS {
        let group = group_of(encoding);
        let encoded = Encoder::new(Isa::detect()).encode(&source, encoding, group).expect("finite weights");
        let shape = Shape::matrix(ROWS, COLS);
        let spec = TensorSpec::new(shape, encoding, group.get() as u64, encoded.global_scale).expect("a spec");
        let mut bench = criterion.benchmark_group(format!("decode/{encoding}"));
        bench.throughput(Throughput::Bytes(4 * ELEMENTS));
        for isa in vector_sets() {
            bench.bench_function(BenchmarkId::from_parameter(isa), |bencher| {
                bencher.iter(|| codec::decode_into(isa, black_box(&encoded.data), &encoded.scales, &spec, &mut out));
            });
        }
        bench.bench_function("scalar", |bencher| {
            bencher.iter(|| codec::decode(black_box(&encoded.data), &encoded.scales, &spec));
        });
    }
}

criterion_group! {
    name = codecs;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = encode, encode_from_memory, search, decode
}
criterion_main!(codecs);
