//! A row's result is the same bits whatever rows are beside it, however many threads run, however a prefill is cut.

use minnow_common::random::mix64;
use minnow_common::{BLOCK, Encoding, FloatType};
use minnow_kernels::conformance::{AttentionCase, StoredExpert, StoredMatrix, random};
use minnow_kernels::cpu::{self, Isa};
use minnow_kernels::ops::{CANDIDATES, Candidate, Heads};

const ROWS: usize = 128;
/// Rows computed together, and the first of them.
const COMPANIES: [(usize, usize); 9] =
    [(1, 0), (1, 77), (2, 76), (31, 50), (32, 64), (33, 47), (128, 0), (3, 75), (5, 73)];

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Runs `work` with as many threads.
fn with_threads<T: Send>(threads: usize, work: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool").install(work)
}

#[test]
fn a_linear_row_does_not_see_its_company() {
    let bf16 = Encoding::Float(FloatType::Bf16);
    for (encoding, group, cols) in
        [(bf16, 0, 131), (Encoding::I8Mma, 64, 128), (Encoding::I4Sym, 16, 144), (Encoding::Nvfp4, 16, 1088)]
    {
        let w = StoredMatrix::random("w", 40, cols, encoding, group);
        let x = random("x", ROWS * cols);
        for isa in Isa::present() {
            let linear = |first: usize, count: usize| {
                let mut out = vec![f32::NAN; count * 40];
                cpu::linear(isa, &mut out, &x[first * cols..][..count * cols], &w.view());
                out
            };
            let all = with_threads(1, || linear(0, ROWS));
            for threads in [1, 2] {
                for (count, first) in COMPANIES {
                    let found = with_threads(threads, || linear(first, count));
                    let expected = bits(&all[first * 40..][..count * 40]);
                    assert_eq!(bits(&found), expected, "{isa} {encoding}, {count} rows, {threads} threads");
                }
            }
        }
    }
}

#[test]
fn integer_layouts_of_the_same_codes_give_the_same_bits() {
    let x = random("x", 5 * 256);
    for (sym, mma) in [(Encoding::I8Sym, Encoding::I8Mma), (Encoding::I4Sym, Encoding::I4Mma)] {
        for isa in Isa::present() {
            let linear = |encoding| {
                let mut out = vec![f32::NAN; 5 * 24];
                cpu::linear(isa, &mut out, &x, &StoredMatrix::random("w", 24, 256, encoding, 32).view());
                out
            };
            assert_eq!(bits(&linear(sym)), bits(&linear(mma)), "{isa} {sym}");
        }
    }
}

#[test]
fn an_expert_row_does_not_see_its_company() {
    let (hidden, inner, slots) = (128, 128, 4);
    for (encoding, group) in [
        (Encoding::Float(FloatType::Bf16), 0),
        (Encoding::I4Mma, 32),
        (Encoding::Nvfp4, 16),
        (Encoding::I4Mma, 128),
        (Encoding::I8Mma, 128),
    ] {
        let stored: Vec<_> = (0..9).map(|index| StoredExpert::random(index, hidden, inner, encoding, group)).collect();
        let x = random("x", ROWS * hidden);
        let ids: Vec<u32> = (0..(ROWS * slots) as u64).map(|slot| (mix64(slot) % 9) as u32).collect();
        let weights: Vec<f32> = random("weights", ROWS * slots);
        for isa in Isa::present() {
            let experts = |activations: &str, first: usize, count: usize| {
                let mut out = vec![f32::NAN; count * hidden];
                let x = &x[first * hidden..][..count * hidden];
                let (ids, weights) =
                    (&ids[first * slots..][..count * slots], &weights[first * slots..][..count * slots]);
                let expert = |id: u32| stored[id as usize].view();
                match activations {
                    "plain" => cpu::experts(isa, &mut out, x, ids, weights, hidden, expert),
                    "int8" => cpu::experts_int8(isa, &mut out, x, ids, weights, hidden, expert),
                    _ => cpu::experts_fp4(isa, &mut out, x, ids, weights, hidden, expert),
                }
                out
            };
            let kinds: &[&str] = match encoding {
                Encoding::Nvfp4 => &["plain", "fp4"],
                _ if cpu::has_int8_experts(&stored[0].gate.view()) => &["plain", "int8"],
                _ => &["plain"],
            };
            for activations in kinds {
                let all = with_threads(1, || experts(activations, 0, ROWS));
                for threads in [1, 2] {
                    for (count, first) in COMPANIES {
                        let found = with_threads(threads, || experts(activations, first, count));
                        let expected = bits(&all[first * hidden..][..count * hidden]);
                        let name = format!("{isa} {encoding}, {activations} activations");
                        assert_eq!(bits(&found), expected, "{name}, {count} rows, {threads} threads");
                    }
                }
            }
        }
    }
}

#[test]
fn the_dense_part_norm_and_gate_do_not_see_their_company() {
    let (hidden, inner) = (96, 48);
    let expert = StoredExpert::random(0, hidden, inner, Encoding::I8Sym, 16);
    let (x, weight) = (random("x", ROWS * hidden), random("norm", hidden));
    for isa in Isa::present() {
        let both = |first: usize, count: usize| {
            let x = &x[first * hidden..][..count * hidden];
            let (mut normed, mut out) = (vec![f32::NAN; x.len()], vec![f32::NAN; x.len()]);
            cpu::rms_norm(isa, &mut normed, x, &weight, 1e-6);
            cpu::feed_forward(isa, &mut out, &normed, &expert.view(), &mut cpu::GatedScratch::default());
            out
        };
        let all = with_threads(1, || both(0, ROWS));
        for (count, first) in COMPANIES {
            let found = with_threads(2, || both(first, count));
            assert_eq!(bits(&found), bits(&all[first * hidden..][..count * hidden]), "{isa}, {count} rows");
        }
    }
}

#[test]
fn attention_does_not_see_how_a_prefill_is_cut() {
    let heads = Heads { query: 4, kv: 2, dim: 40 };
    let row_len = heads.query * heads.dim;
    // More than a chunk of pages, and no whole number of chunks.
    let blocks = 5;
    let q = random("q", blocks * BLOCK * row_len);
    let len = heads.kv * BLOCK * heads.dim;
    let pages: Vec<_> =
        (0..blocks).map(|page| (random(&format!("k{page}"), len), random(&format!("v{page}"), len))).collect();
    let case = AttentionCase { name: String::new(), heads, q, pages, expected: Vec::new() };
    let pages = case.pages();
    for isa in Isa::present() {
        // Blocks `first..first + count` of the sequence in one call.
        let attention = |first: usize, count: usize| {
            let q = &case.q[first * BLOCK * row_len..][..count * BLOCK * row_len];
            let mut out = vec![f32::NAN; q.len()];
            cpu::attention(isa, &mut out, q, &pages[..first + count], heads);
            out
        };
        let kept = case.blocks(isa);
        let kept: Vec<_> = kept.iter().collect();
        let attend = |first: usize, count: usize| {
            let q = &case.q[first * BLOCK * row_len..][..count * BLOCK * row_len];
            let mut out = vec![f32::NAN; q.len()];
            cpu::attend(isa, &mut out, q, row_len, &kept[..first + count], 1, heads);
            out
        };
        let ways: [&(dyn Fn(usize, usize) -> Vec<f32> + Sync); 2] = [&attention, &attend];
        for (way, attention) in ways.into_iter().enumerate() {
            let all = with_threads(1, || attention(0, blocks));
            for threads in [1, 2] {
                for (first, count) in [(0, 1), (1, 1), (4, 1), (0, 3), (3, 2), (1, 4), (0, 5)] {
                    let found = with_threads(threads, || attention(first, count));
                    let expected = bits(&all[first * BLOCK * row_len..][..count * BLOCK * row_len]);
                    let place = format!("{isa}, way {way}, {count} blocks from {first}, {threads} threads");
                    assert_eq!(bits(&found), expected, "{place}");
                }
            }
        }
    }
}

#[test]
fn candidates_from_the_head_are_those_of_the_logits_in_any_company() {
    let (cols, vocabulary) = (72, 1300);
    let head = StoredMatrix::random("head", vocabulary, cols, Encoding::Float(FloatType::Bf16), 0);
    let x: Vec<f32> = random("x", ROWS * cols).iter().map(|value| 20.0 * value).collect();
    for isa in Isa::present() {
        let mut logits = vec![f32::NAN; ROWS * vocabulary];
        cpu::linear(isa, &mut logits, &x, &head.view());
        let expected: Vec<_> = logits.chunks(vocabulary).map(|row| cpu::candidates(isa, row)).collect();
        for threads in [1, 2] {
            for (count, first) in COMPANIES {
                let mut found = vec![[Candidate::default(); CANDIDATES]; count];
                let x = &x[first * cols..][..count * cols];
                with_threads(threads, || cpu::head_candidates(isa, &mut found, x, &head.view()));
                assert_eq!(found, expected[first..first + count], "{isa}, {count} rows, {threads} threads");
            }
        }
    }
}
