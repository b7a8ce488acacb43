//! How fast the CPU kernels are here: `cargo run --release -p minnow-kernels --example timing [ISA [ROWS [NAME]]]`.
//!
//! Prints the median and the spread of each operation at the sizes of LLaDA2.2-mini, for `ROWS` positions, one block of 32
//! unless given; only those whose name contains `NAME`. Experts in use are 48 for a block and 256 for six or more, as the
//! router may have it.

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use minnow_common::random::Symmetric;
use minnow_common::{BLOCK, Encoding, FloatType, GroupSize, Shape, TensorSpec};
use minnow_kernels::codec;
use minnow_kernels::cpu::{self, Expert, Isa, KvBlock, KvRows};
use minnow_kernels::matrix::WeightMatrix;
use minnow_kernels::ops::{CANDIDATES, Candidate, Heads};

const HIDDEN: usize = 2048;
const INNER: usize = 512;
const SLOTS: usize = 8;
/// Tokens of the head: a tenth of the vocabulary.
const TOKENS: usize = 16_384;
/// Experts with weights of their own: more than any cache holds. Others share them.
const STORED: usize = 32;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let cap = arguments.next().map(|name| name.parse::<Isa>()).transpose()?;
    let rows = arguments.next().map_or(Ok(BLOCK), |rows| rows.parse::<usize>())?;
    let part = arguments.next().unwrap_or_default();
    let report = |name: &str, flop: usize, work: &mut dyn FnMut()| {
        if name.contains(&part) {
            report(name, flop, work);
        }
    };
    if rows == 0 || !rows.is_multiple_of(BLOCK) {
        return Err(format!("ROWS must be whole blocks of {BLOCK}, not {rows}").into());
    }
    let isa = Isa::detect_up_to(cap);
    println!("{isa}, {} threads, {rows} rows", rayon::current_num_threads());
    let x = random("x", rows * HIDDEN);
    let heads = Heads { query: 16, kv: 4, dim: 128 };

    let bf16 = Encoding::Float(FloatType::Bf16);
    let qkv_rows = (heads.query + 2 * heads.kv) * heads.dim;
    for (features, encoding) in [
        (qkv_rows, bf16),
        (HIDDEN, bf16),
        (INNER, bf16),
        (HIDDEN, Encoding::I8Mma),
        (HIDDEN, Encoding::I4Mma),
        (HIDDEN, Encoding::Nvfp4),
    ] {
        let w = Stored::random("w", features, HIDDEN, encoding)?;
        let mut out = vec![0.0; rows * features];
        let view = w.view()?;
        report(&format!("linear {rows} x {HIDDEN} x {features} {encoding}"), 2 * rows * HIDDEN * features, &mut || {
            cpu::linear(isa, &mut out, &x, &view);
        });
    }
    let mut out = vec![0.0; rows * HIDDEN];
    let down = Stored::random("down", HIDDEN, INNER, bf16)?;
    let view = down.view()?;
    report(&format!("linear {rows} x {INNER} x {HIDDEN} bf16"), 2 * rows * HIDDEN * INNER, &mut || {
        cpu::linear(isa, &mut out, &x[..rows * INNER], &view);
    });
    let router = Stored::random("router", 256, HIDDEN, bf16)?;
    let view = router.view()?;
    let mut scores = vec![0.0; rows * 256];
    report("router in f32", 2 * rows * HIDDEN * 256, &mut || cpu::linear_f32(isa, &mut scores, &x, &view));
    report("sigmoid", rows * 256, &mut || cpu::sigmoid(isa, &mut scores));
    let ones = vec![1.0; HIDDEN];
    let mut y = x.clone();
    report("add and norm", 4 * rows * HIDDEN, &mut || cpu::add_and_norm(isa, &mut out, &mut y, &x, &ones, 1e-6));

    let experts = (48 * rows / BLOCK).min(256);
    let ids: Vec<u32> = (0..rows * SLOTS).map(|slot| (slot * 7 % experts) as u32).collect();
    let weights = vec![0.125; ids.len()];
    for encoding in [bf16, Encoding::I8Mma, Encoding::I4Mma, Encoding::Nvfp4] {
        let rounded = &format!("{experts} experts, {rows} x {SLOTS} {encoding}");
        let eight_bits = &format!("{rounded}, eight bits");
        if !eight_bits.contains(&part) {
            continue;
        }
        let of_expert = |expert: usize| -> Result<_, Box<dyn Error>> {
            let gate = Stored::random(&format!("gate {expert}"), INNER, HIDDEN, encoding)?;
            Ok((gate, Stored::random(&format!("down {expert}"), HIDDEN, INNER, encoding)?))
        };
        let stored = (0..STORED).map(of_expert).collect::<Result<Vec<_>, _>>()?;
        let views = stored
            .iter()
            .map(|(gate, down)| Ok(Expert { gate: gate.view()?, up: gate.view()?, down: down.view()? }))
            .collect::<Result<Vec<_>, codec::CodecError>>()?;
        let flop = 6 * ids.len() * HIDDEN * INNER;
        report(rounded, flop, &mut || {
            cpu::experts(isa, &mut out, &x, &ids, &weights, HIDDEN, |id| views[id as usize % STORED]);
        });
        if cpu::has_int8_experts(&views[0].gate) {
            report(eight_bits, flop, &mut || {
                cpu::experts_int8(isa, &mut out, &x, &ids, &weights, HIDDEN, |id| views[id as usize % STORED]);
            });
        }
    }

    let qkv = random("qkv", rows * qkv_rows);
    let (keys_at, values_at) = (heads.query * heads.dim, (heads.query + heads.kv) * heads.dim);
    let blocks: Vec<KvBlock> = (0..rows / BLOCK)
        .map(|block| {
            let mut kv = KvBlock::new(isa, heads, 1);
            let rows = &qkv[block * BLOCK * qkv_rows..][..BLOCK * qkv_rows];
            kv.write(isa, 0, KvRows { rows, stride: qkv_rows, keys_at, values_at });
            kv
        })
        .collect();
    let earlier = vec![&blocks[0]; 32];
    let seen: Vec<&KvBlock> = earlier.into_iter().chain(&blocks).collect();
    let flop = 4 * rows * HIDDEN * (1024 + (rows + BLOCK) / 2);
    report("attention, after 1024 tokens", flop, &mut || cpu::attend(isa, &mut out, &qkv, qkv_rows, &seen, 0, heads));

    let head = Stored::random("head", TOKENS, HIDDEN, bf16)?;
    let view = head.view()?;
    let mut best = vec![[Candidate::default(); CANDIDATES]; rows];
    report(&format!("head of {TOKENS} tokens with candidates"), 2 * rows * HIDDEN * TOKENS, &mut || {
        cpu::head_candidates(isa, &mut best, &x, &view);
    });
    Ok(())
}

/// Runs `work` often enough and prints the median, the quartiles and the rate.
fn report(name: &str, flop: usize, work: &mut dyn FnMut()) {
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
    println!("{name:56} {median:8.3} ms ({low:.3} to {high:.3})  {:7.1} GFLOP/s", flop as f64 / median / 1e6);
}

/// A matrix with its bytes, which lie as in a file: rows of tiles that begin in the middle of a cache line would be two.
struct Stored {
    spec: TensorSpec,
    data: Aligned,
    scales: Vec<u8>,
}

/// Bytes of which the first starts a cache line.
struct Aligned {
    bytes: Vec<u8>,
    start: usize,
}

impl Aligned {
    fn new(bytes: &[u8]) -> Self {
        const LINE: usize = 64;
        let mut aligned = vec![0; bytes.len() + LINE];
        let start = aligned.as_ptr().align_offset(LINE);
        aligned[start..][..bytes.len()].copy_from_slice(bytes);
        aligned.truncate(start + bytes.len());
        Self { bytes: aligned, start }
    }
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
        Ok(Self { spec, data: Aligned::new(&data), scales })
    }

    fn view(&self) -> Result<WeightMatrix<'_>, codec::CodecError> {
        WeightMatrix::new(&self.spec, &self.data.bytes[self.data.start..], &self.scales)
    }
}

fn random(name: &str, len: usize) -> Vec<f32> {
    let sequence = Symmetric::new(name, 1);
    (0..len as u64).map(|index| sequence.at(index)).collect()
}
