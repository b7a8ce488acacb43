//! The shared table of cases, through every instruction set this CPU has.

use minnow_common::{Encoding, FloatType, Shape, TensorSpec};
use minnow_kernels::codec;
use minnow_kernels::conformance::{
    Arithmetic, AttentionCase, CandidatesCase, ExpertsCase, LinearCase, RmsNormCase, StoredMatrix, SwigluCase,
    Tolerance, random,
};
use minnow_kernels::cpu::{self, HeadNorm, Isa, KvBlock};
use minnow_kernels::matrix::WeightMatrix;
use minnow_kernels::ops::{CANDIDATES, Candidate, Heads};
use minnow_kernels::oracle;

/// The instruction sets to run; those that are absent are named.
fn backends() -> impl Iterator<Item = Isa> {
    for isa in Isa::ALL.into_iter().filter(|isa| !isa.is_present()) {
        eprintln!("skipped: this CPU has no {isa}");
    }
    Isa::present()
}

fn assert_close(isa: Isa, name: &str, found: &[f32], expected: &[f32], tolerance: Tolerance) {
    if let Err(mismatch) = tolerance.check(found, expected) {
        panic!("{isa}, {name}: {mismatch}");
    }
}

#[test]
fn stored_weights_decode_to_the_bits_of_the_codec() {
    let (bf16, f16, f32) =
        (Encoding::Float(FloatType::Bf16), Encoding::Float(FloatType::F16), Encoding::Float(FloatType::F32));
    for (rows, cols, encoding, group) in [
        (3, 7, bf16, 0),
        (9, 33, f16, 0),
        (17, 16, f32, 0),
        (11, 48, Encoding::I8Sym, 16),
        (8, 128, Encoding::I8Sym, 128),
        (9, 192, Encoding::I4Sym, 64),
        (3, 32, Encoding::I4Sym, 32),
        (16, 96, Encoding::I8Mma, 32),
        (24, 256, Encoding::I8Mma, 128),
        (8, 16, Encoding::I4Mma, 16),
        (40, 320, Encoding::I4Mma, 64),
        (8, 64, Encoding::Nvfp4, 16),
        (32, 448, Encoding::Nvfp4, 16),
    ] {
        let stored = StoredMatrix::random("decode", rows, cols, encoding, group);
        let expected = stored.values();
        for isa in backends() {
            let mut found = vec![f32::NAN; rows * cols];
            cpu::decode(isa, &stored.view(), 0, &mut found);
            let same = found.iter().zip(&expected).all(|(found, expected)| found.to_bits() == expected.to_bits());
            assert!(same, "{isa}, {rows} x {cols} {encoding}/{group}");
            if rows > 8 {
                let later = &expected[8 * cols..];
                cpu::decode(isa, &stored.view(), 8, &mut found[..later.len()]);
                assert_eq!(found[..later.len()], *later, "{isa}, from row 8 of {rows} x {cols} {encoding}");
            }
        }
    }
}

#[test]
fn every_code_and_scale_decodes_to_the_bits_of_the_codec() {
    // All byte values as codes, -128, -8 and negative zero among them; scales from the smallest to the largest.
    for (encoding, group) in [
        (Encoding::I8Sym, 16),
        (Encoding::I8Mma, 16),
        (Encoding::I4Sym, 16),
        (Encoding::I4Mma, 16),
        (Encoding::Nvfp4, 16),
    ] {
        let global_scale = (encoding == Encoding::Nvfp4).then_some(1.1e-3);
        let spec = TensorSpec::new(Shape::matrix(16, 512), encoding, group, global_scale).expect("a spec");
        let data: Vec<u8> = (0..spec.data_bytes()).map(|index| (index * 37 + index / 256) as u8).collect();
        let scales: Vec<u8> = match encoding {
            Encoding::Nvfp4 => (0..spec.scales_bytes()).map(|index| (index % 127) as u8).collect(),
            _ => (0..spec.scales_bytes() / 2).flat_map(|index| (1 + index as u16 * 61).to_le_bytes()).collect(),
        };
        codec::check_scales(&scales, encoding).expect("scales that may be stored");
        let expected = codec::decode(&data, &scales, &spec).expect("a matrix");
        let matrix = WeightMatrix::new(&spec, &data, &scales).expect("a matrix");
        for isa in backends() {
            let mut found = vec![f32::NAN; expected.len()];
            cpu::decode(isa, &matrix, 0, &mut found);
            let different =
                found.iter().zip(&expected).position(|(found, expected)| found.to_bits() != expected.to_bits());
            assert_eq!(different, None, "{isa} {encoding}");
        }
    }
}

#[test]
fn linear_is_the_oracles() {
    for case in LinearCase::all() {
        for isa in backends() {
            let expected = case.expected_in(Arithmetic::of(isa));
            let mut out = vec![f32::NAN; expected.len()];
            cpu::linear(isa, &mut out, &case.x, &case.w.view());
            assert_close(isa, &case.name, &out, &expected, case.tolerance_in(Arithmetic::of(isa)));
            cpu::linear_f32(isa, &mut out, &case.x, &case.w.view());
            assert_close(isa, &case.name, &out, &case.expected, case.tolerance());
        }
    }
}

#[test]
fn rms_norm_is_the_oracles() {
    for case in RmsNormCase::all() {
        for isa in backends() {
            let mut out = vec![f32::NAN; case.x.len()];
            cpu::rms_norm(isa, &mut out, &case.x, &case.weight, case.eps);
            assert_close(isa, &case.name, &out, &case.expected, case.tolerance());
        }
    }
}

#[test]
fn swiglu_is_the_oracles() {
    for case in SwigluCase::all() {
        for isa in backends() {
            let mut out = case.gate.clone();
            cpu::swiglu(isa, &mut out, &case.up);
            assert_close(isa, &case.name, &out, &case.expected, case.tolerance());
        }
    }
}

#[test]
fn attention_is_the_oracles() {
    for case in AttentionCase::all() {
        for isa in backends() {
            let mut out = vec![f32::NAN; case.q.len()];
            cpu::attention(isa, &mut out, &case.q, &case.pages(), case.heads);
            assert_close(isa, &case.name, &out, &case.expected, case.tolerance());
        }
    }
}

#[test]
fn attention_over_kept_blocks_is_the_oracles() {
    for case in AttentionCase::all() {
        for isa in backends() {
            let blocks = case.blocks(isa);
            let blocks: Vec<_> = blocks.iter().collect();
            let stride = case.heads.query * case.heads.dim;
            let mut out = vec![f32::NAN; case.q.len()];
            cpu::attend(isa, &mut out, &case.q, stride, &blocks, 1, case.heads);
            let arithmetic = Arithmetic::of(isa);
            assert_close(isa, &case.name, &out, &case.expected_in(arithmetic), case.tolerance_in(arithmetic));
        }
    }
}

#[test]
fn exported_blocks_come_back_bit_for_bit() {
    let case = &AttentionCase::all()[1];
    for isa in backends() {
        for block in case.blocks(isa) {
            let mut bytes = vec![0; KvBlock::bytes(isa, case.heads, 2)];
            block.export(&mut bytes);
            let mut other = KvBlock::new(isa, case.heads, 2);
            other.import(&bytes);
            let mut again = vec![1; bytes.len()];
            other.export(&mut again);
            assert!(bytes == again && bytes.iter().any(|&byte| byte != 0), "{isa}");
        }
    }
}

/// A mean square and a root as in `RmsNormCase`, then two products and an addition of values up to two.
#[test]
fn prepared_heads_are_the_oracles() {
    let heads = Heads { query: 3, kv: 2, dim: 40 };
    let (rows, stride, pairs) = (7, 6 * 40, 12);
    let x = random("heads", rows * stride);
    let (query, key) = (random("query norm", heads.dim), random("key norm", heads.dim));
    let (mut cos, mut sin) = (vec![0.0; rows * pairs], vec![0.0; rows * pairs]);
    oracle::rope_tables(&mut cos, &mut sin, &oracle::inv_freq(1e4, 2 * pairs), 1000);
    let mut expected = x.clone();
    for (row, values) in expected.chunks_exact_mut(stride).enumerate() {
        for (head, values) in values.chunks_exact_mut(heads.dim).take(heads.query + heads.kv).enumerate() {
            let before = values.to_vec();
            oracle::rms_norm(values, &before, if head < heads.query { &query } else { &key }, 1e-6);
            oracle::rotate(values, &cos[row * pairs..][..pairs], &sin[row * pairs..][..pairs]);
        }
    }
    for isa in backends() {
        let mut found = x.clone();
        let norm = HeadNorm { query: &query, key: &key, eps: 1e-6 };
        cpu::prepare_heads(isa, &mut found, stride, heads, Some(norm), &cos, &sin);
        assert_close(isa, "heads", &found, &expected, Tolerance { relative: 0.0, absolute: 2e-6 });
    }
}

/// `exp` is within four roundings; an addition and a division follow.
#[test]
fn scores_are_the_oracles() {
    let mut logits: Vec<f32> = random("router", 1003).iter().map(|value| 30.0 * value).collect();
    logits.extend([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, 200.0, -200.0]);
    let mut expected = logits.clone();
    oracle::sigmoid(&mut expected);
    for isa in backends() {
        let mut found = logits.clone();
        cpu::sigmoid(isa, &mut found);
        assert_close(isa, "sigmoid", &found, &expected, Tolerance { relative: 6e-7, absolute: 1e-37 });
    }
}

#[test]
fn experts_are_the_oracles() {
    for case in ExpertsCase::all() {
        for isa in backends() {
            let mut out = vec![f32::NAN; case.x.len()];
            let expert = |id: u32| case.experts[id as usize].view();
            cpu::experts(isa, &mut out, &case.x, &case.ids, &case.weights, case.hidden, expert);
            let arithmetic = Arithmetic::of(isa);
            assert_close(isa, &case.name, &out, &case.expected_in(arithmetic), case.tolerance_in(arithmetic));
        }
    }
}

/// To the bit: codes, their products and the sums of groups leave nothing open. `silu` has the same bits on all instruction
/// sets but the scalar one.
#[test]
fn experts_with_activations_of_eight_bits_are_the_oracles() {
    const EXACT: Tolerance = Tolerance { relative: 0.0, absolute: 0.0 };
    for isa in backends() {
        let mut cases = 0;
        for case in ExpertsCase::all() {
            let Some(expected) = case.expected_int8(isa) else { continue };
            if isa > Isa::Avx2Fma {
                let of_avx2 = case.expected_int8(Isa::Avx2Fma).expect("stored for that");
                assert_close(isa, &case.name, &expected, &of_avx2, EXACT);
            }
            let mut out = vec![f32::NAN; case.x.len()];
            let expert = |id: u32| case.experts[id as usize].view();
            cpu::experts_int8(isa, &mut out, &case.x, &case.ids, &case.weights, case.hidden, expert);
            assert_close(isa, &case.name, &out, &expected, EXACT);
            cases += 1;
        }
        assert_eq!(cases, 3, "{isa}");
    }
}

/// What enters is the oracle's to the bit, and so is all of it but for the order of sums, as long as no `silu` lies so near
/// the border of two codes that this decides: with these numbers none does.
#[test]
fn experts_with_activations_of_four_bits_are_the_oracles() {
    for isa in backends() {
        let mut cases = 0;
        for case in ExpertsCase::all() {
            let Some(expected) = case.expected_fp4() else { continue };
            let mut out = vec![f32::NAN; case.x.len()];
            let expert = |id: u32| case.experts[id as usize].view();
            cpu::experts_fp4(isa, &mut out, &case.x, &case.ids, &case.weights, case.hidden, expert);
            assert_close(isa, &case.name, &out, &expected, case.tolerance());
            cases += 1;
        }
        assert_eq!(cases, 1);
    }
}

#[test]
fn candidates_are_the_oracles() {
    for case in CandidatesCase::all() {
        for isa in backends() {
            let found = cpu::candidates(isa, &case.row);
            let tokens = |list: &[Candidate]| -> Vec<(u32, u32)> {
                list.iter().map(|candidate| (candidate.token, candidate.logit.to_bits())).collect()
            };
            assert_eq!(tokens(&found), tokens(&case.expected), "{isa}, {}", case.name);
            let confidences = |list: [Candidate; CANDIDATES]| list.map(|candidate| candidate.confidence);
            let (found, expected) = (confidences(found), confidences(case.expected));
            assert_close(isa, &case.name, &found, &expected, case.tolerance());
        }
    }
}
