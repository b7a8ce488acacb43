//! The shared table of cases, through every instruction set this CPU has.

use minnow_common::{Encoding, FloatType, Shape, TensorSpec};
use minnow_kernels::codec;
use minnow_kernels::conformance::{
    AttentionCase, CandidatesCase, ExpertsCase, LinearCase, RmsNormCase, StoredMatrix, SwigluCase, Tolerance,
};
use minnow_kernels::cpu::{self, Isa};
use minnow_kernels::matrix::WeightMatrix;
use minnow_kernels::ops::{CANDIDATES, Candidate};

/// The instruction sets to run; those that are absent are named.
fn backends() -> impl Iterator<Item = Isa> {
    for isa in [Isa::Avx2Fma, Isa::Avx512].into_iter().filter(|isa| !isa.is_present()) {
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
            let mut out = vec![f32::NAN; case.expected.len()];
            cpu::linear(isa, &mut out, &case.x, &case.w.view());
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
            let mut out = vec![f32::NAN; case.gate.len()];
            cpu::swiglu(isa, &mut out, &case.gate, &case.up);
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
fn experts_are_the_oracles() {
    for case in ExpertsCase::all() {
        for isa in backends() {
            let mut out = vec![f32::NAN; case.x.len()];
            let expert = |id: u32| case.experts[id as usize].view();
            cpu::experts(isa, &mut out, &case.x, &case.ids, &case.weights, case.hidden, expert);
            assert_close(isa, &case.name, &out, &case.expected, case.tolerance());
        }
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
