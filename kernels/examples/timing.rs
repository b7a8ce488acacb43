//! How fast the CPU kernels are here: `cargo run --release -p minnow-kernels --example timing [scalar|avx2|avx512]`.
//!
//! Prints the median and the spread of each operation at the sizes of LLaDA2.2-mini, for one block of 32 positions.

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use minnow_common::random::Symmetric;
use minnow_common::{Encoding, FloatType, GroupSize, Shape, TensorSpec};
use minnow_kernels::codec;
use minnow_kernels::cpu::{self, Expert, Isa};
use minnow_kernels::matrix::WeightMatrix;
use minnow_kernels::ops::{CANDIDATES, Candidate, Heads, Page};

const ROWS: usize = 32;
const HIDDEN: usize = 2048;
const INNER: usize = 512;
const EXPERTS: usize = 48;
const SLOTS: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let cap = std::env::args().nth(1).map(|name| name.parse::<Isa>()).transpose()?;
    let isa = Isa::detect_up_to(cap);
    println!("{isa}, {} threads", rayon::current_num_threads());
    let x = random("x", ROWS * HIDDEN);

    let bf16 = Encoding::Float(FloatType::Bf16);
    for encoding in [bf16, Encoding::I8Mma, Encoding::I4Mma, Encoding::Nvfp4] {
        let w = Stored::random("w", HIDDEN, HIDDEN, encoding)?;
        let mut out = vec![0.0; ROWS * HIDDEN];
        let view = w.view()?;
        report(&format!("linear {ROWS} x {HIDDEN} x {HIDDEN} {encoding}"), 2 * ROWS * HIDDEN * HIDDEN, || {
            cpu::linear(isa, &mut out, &x, &view);
        });
        report(&format!("linear 1 x {HIDDEN} x {HIDDEN} {encoding}"), 2 * HIDDEN * HIDDEN, || {
            cpu::linear(isa, &mut out[..HIDDEN], &x[..HIDDEN], &view);
        });
    }

    for encoding in [bf16, Encoding::I8Mma, Encoding::I4Mma, Encoding::Nvfp4] {
        let gate = Stored::random("gate", INNER, HIDDEN, encoding)?;
        let down = Stored::random("down", HIDDEN, INNER, encoding)?;
        let expert = Expert { gate: gate.view()?, up: gate.view()?, down: down.view()? };
        let ids: Vec<u32> = (0..ROWS * SLOTS).map(|slot| (slot * 7 % EXPERTS) as u32).collect();
        let weights = vec![0.125; ids.len()];
        let mut out = vec![0.0; ROWS * HIDDEN];
        report(&format!("{EXPERTS} experts, {ROWS} x {SLOTS} {encoding}"), 6 * ids.len() * HIDDEN * INNER, || {
            cpu::experts(isa, &mut out, &x, &ids, &weights, HIDDEN, |_| expert);
        });
    }

    let heads = Heads { query: 16, kv: 4, dim: 128 };
    let kv = random("kv", heads.kv * 32 * heads.dim);
    let pages = vec![Page { keys: &kv, values: &kv }; 32];
    let mut out = vec![0.0; ROWS * HIDDEN];
    let flop = 4 * ROWS * HIDDEN * pages.len() * 32;
    report("attention, 32 queries, 1024 keys", flop, || cpu::attention(isa, &mut out, &x, &pages, heads));

    let head = Stored::random("head", 16_384, HIDDEN, bf16)?;
    let view = head.view()?;
    let mut best = vec![[Candidate::default(); CANDIDATES]; ROWS];
    report("head of 16384 tokens with candidates bf16", 2 * ROWS * HIDDEN * 16_384, || {
        cpu::head_candidates(isa, &mut best, &x, &view);
    });
    Ok(())
}

/// Runs `work` often enough and prints the median, the quartiles and the rate.
fn report(name: &str, flop: usize, mut work: impl FnMut()) {
    work();
    let mut ms: Vec<f64> = (0..21)
        .map(|_| {
            let start = Instant::now();
            work();
            black_box(());
            start.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    ms.sort_by(f64::total_cmp);
    let (median, low, high) = (ms[10], ms[5], ms[15]);
    println!("{name:48} {median:8.3} ms ({low:.3} to {high:.3})  {:7.1} GFLOP/s", flop as f64 / median / 1e6);
}

/// A matrix with its bytes.
struct Stored {
    spec: TensorSpec,
    data: Vec<u8>,
    scales: Vec<u8>,
}

impl Stored {
    fn random(name: &str, rows: usize, cols: usize, encoding: Encoding) -> Result<Self, Box<dyn Error>> {
        let values = random(name, rows * cols);
        let (data, scales, group, global_scale) = match encoding {
            Encoding::Float(_) => {
                let bytes = values.iter().flat_map(|value| value.to_bits().to_le_bytes().into_iter().skip(2)).collect();
                (bytes, Vec::new(), 0, None)
            }
            _ => {
                let group = if encoding == Encoding::Nvfp4 { GroupSize::NVFP4 } else { GroupSize::DEFAULT };
                let encoded = codec::encode(&values, rows, cols, encoding, group)?;
                (encoded.data, encoded.scales, group.get() as u64, encoded.global_scale)
            }
        };
        let spec = TensorSpec::new(Shape::matrix(rows, cols), encoding, group, global_scale)?;
        Ok(Self { spec, data, scales })
    }

    fn view(&self) -> Result<WeightMatrix<'_>, codec::CodecError> {
        WeightMatrix::new(&self.spec, &self.data, &self.scales)
    }
}

fn random(name: &str, len: usize) -> Vec<f32> {
    let sequence = Symmetric::new(name, 1);
    (0..len as u64).map(|index| sequence.at(index)).collect()
}
