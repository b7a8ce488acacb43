//! The quick encoder and decoder against the scalar codec: the same bits, and the same refusals.

use minnow_common::random::{Symmetric, keyed};
use minnow_common::{Encoding, FloatType, GroupSize, Shape, TensorSpec};
use minnow_kernels::codec::{self, CodecError, Encoded, Encoder, FloatMatrix};
use minnow_kernels::cpu::Isa;
use minnow_tests::golden;

const QUANTIZED: [Encoding; 5] = [Encoding::I8Sym, Encoding::I8Mma, Encoding::I4Sym, Encoding::I4Mma, Encoding::Nvfp4];

const FLOATS: [FloatType; 3] = [FloatType::Bf16, FloatType::F16, FloatType::F32];

#[test]
fn every_golden_matrix_comes_out_of_every_instruction_set() {
    for name in golden::json("golden/mnw/quant/index.json").as_array().expect("a list of names") {
        let case = golden::json(&format!("golden/mnw/quant/{}.json", name.as_str().expect("a name")));
        let bytes = golden::bytes(&format!("golden/mnw/quant/{}", case["input"].as_str().expect("a file")));
        let float = match case["dtype"].as_str().expect("a type") {
            "bf16" => FloatType::Bf16,
            "f16" => FloatType::F16,
            _ => FloatType::F32,
        };
        let dim = |index: usize| case["shape"][index].as_u64().expect("a dimension") as usize;
        check(&bytes, float, dim(0), dim(1));
    }
}

#[test]
fn random_matrices_of_many_shapes_come_out_the_same() {
    // Widths around those at which groups and tiles fill up, and one of a real model.
    for (seed, cols) in [16, 32, 48, 64, 80, 128, 192, 256, 384, 576, 1024, 2048, 4096].into_iter().enumerate() {
        for rows in [8, 16, 24] {
            let sequence = Symmetric::new("shapes", (seed * 100 + rows) as u64);
            // Cubes spread magnitudes; one value in eight is zero, with either sign.
            let values: Vec<f32> = (0..(rows * cols) as u64)
                .map(|index| match index % 16 {
                    3 => 0.0,
                    11 => -0.0,
                    _ => sequence.at(index).powi(3) * 0.3,
                })
                .collect();
            for float in FLOATS {
                check(&stored(&values, float), float, rows, cols);
            }
        }
    }
    // Row-major encodings take any number of rows.
    for rows in [1, 3, 13] {
        let values: Vec<f32> = (0..rows * 48).map(|index| index as f32 - 70.5).collect();
        check(&stored(&values, FloatType::F32), FloatType::F32, rows, 48);
    }
}

#[test]
fn every_16_bit_pattern_comes_out_the_same_beside_its_neighbours_and_beside_others() {
    for float in [FloatType::Bf16, FloatType::F16] {
        // In order, neighbours have similar magnitudes and use the upper codes. An odd stride mixes them, but keeps the
        // magnitudes of a matrix within a factor of 2^16 or so, or all but a few values would be zero.
        for stride in [1u32, 5, 77] {
            for matrix in 0..(1 << 16) / 512 {
                let pattern = |index: u32| {
                    let spread = index.wrapping_mul(stride) % 2048;
                    // Both signs in each matrix.
                    ((matrix * 256 + spread % 1024) & 0x7fff | (index & 1) << 15) as u16
                };
                let bytes: Vec<u8> = (0..1024).flat_map(|index| pattern(index).to_le_bytes()).collect();
                check(&bytes, float, 8, 128);
            }
        }
    }
}

#[test]
fn adversarial_values_come_out_the_same() {
    let tiny = f32::from_bits(1);
    let scale_min = 2f32.powi(-24);
    let mut matrices: Vec<Vec<f32>> = Vec::new();
    for unit in [1.0, 0.1, 1e-6, scale_min, scale_min * 1.5, scale_min / 3.0, 1e-30, tiny, 5000.0, 65_504.0, 1e30] {
        // Every tie of every code book, with its neighbours, in units of a scale.
        let ties = (0..=64).map(|index| index as f32 * 0.25 - 8.0).flat_map(|x| [x, x.next_up(), x.next_down()]);
        matrices.push(ties.chain((0..62).map(|index| index as f32 * 2.0 - 61.5)).map(|x| x * unit).collect());
    }
    for limit in [7.0, 127.0] {
        // The largest scales of FP16, the first that overflows, and the smallest.
        for scale in [65_504.0, 65_519.0, 65_519.996, 65_520.0, 65_536.0, scale_min, scale_min * 0.5, scale_min * 2.5] {
            let edge: f32 = scale * limit;
            matrices
                .push([edge, edge.next_down(), edge.next_up(), -edge, edge / 2.0, edge / limit, -0.0, 0.0].to_vec());
        }
    }
    matrices.push(vec![f32::MAX, f32::MIN, f32::MIN_POSITIVE, -f32::MIN_POSITIVE, tiny, -tiny, 0.0, -0.0]);
    matrices.push(vec![-0.0]);
    matrices.push(vec![0.0]);
    for pattern in matrices {
        let all: Vec<f32> = pattern.iter().copied().cycle().take(16 * 256).collect();
        // Alone as well, so that nothing else decides about the scale of the matrix.
        let mut one_group = vec![0.0; 8 * 256];
        one_group[5 * 256 + 128..][..16].copy_from_slice(&all[..16]);
        for float in FLOATS {
            check(&stored(&all, float), float, 16, 256);
            check(&stored(&one_group, float), float, 8, 256);
        }
    }
}

#[test]
fn a_value_that_is_not_finite_is_named_wherever_it_is() {
    let (rows, cols) = (8, 128);
    for float in FLOATS {
        let bad: &[&[u8]] = match float {
            FloatType::Bf16 => &[&[0xc0, 0x7f], &[0x80, 0xff], &[0x81, 0x7f]],
            FloatType::F16 => &[&[0x00, 0x7e], &[0x00, 0xfc], &[0x01, 0xfc]],
            FloatType::F32 => &[&[0, 0, 0xc0, 0x7f], &[0, 0, 0x80, 0xff], &[1, 0, 0x80, 0x7f]],
        };
        let clean = stored(&vec![0.5; rows * cols], float);
        for index in 0..rows * cols {
            let bad = bad[index % bad.len()];
            let mut bytes = clean.clone();
            bytes[index * float.bytes()..][..bad.len()].copy_from_slice(bad);
            // A later one, and a group whose scale overflows before or after it, do not hide it.
            if index % 3 == 0 {
                bytes[(rows * cols - 1) * float.bytes()..][..bad.len()].copy_from_slice(bad);
            }
            if index % 4 == 0 && float != FloatType::F16 {
                let large = (index + 777) % (rows * cols) * float.bytes();
                bytes[large..][..float.bytes()].copy_from_slice(&stored(&[1e9], float));
            }
            let source = FloatMatrix::new(&bytes, float, rows, cols).expect("a matrix");
            let expected =
                Err(CodecError::NonFinite { row: index / cols, col: index % cols, value: float.widened(bad)[0] });
            for isa in Isa::present() {
                for encoding in QUANTIZED {
                    let found = Encoder::new(isa).encode(&source, encoding, group(16));
                    assert_same(&found, &expected, &format!("{isa}: {float} as {encoding}, at {index}"));
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_encoded_is_refused_before_any_arithmetic() {
    let bytes = stored(&[1.0; 8 * 64], FloatType::Bf16);
    let source = FloatMatrix::new(&bytes, FloatType::Bf16, 8, 64).expect("a matrix");
    let encoder = Encoder::new(Isa::detect());
    let float = Encoding::Float(FloatType::F16);
    assert_eq!(encoder.encode(&source, float, group(16)), Err(CodecError::NotQuantized(float)));
    assert!(matches!(encoder.encode(&source, Encoding::I8Sym, group(128)), Err(CodecError::Spec(_))));
    assert!(matches!(encoder.encode(&source, Encoding::Nvfp4, group(32)), Err(CodecError::Spec(_))));
    for (data, scales, region) in [(511, 64, "data"), (513, 64, "data"), (512, 62, "scales"), (512, 66, "scales")] {
        let (mut data, mut scales) = (vec![0; data], vec![0; scales]);
        let refused = encoder.encode_into(&source, Encoding::I8Mma, group(16), &mut data, &mut scales);
        assert!(matches!(refused, Err(CodecError::Length { region: found, .. }) if found == region), "{refused:?}");
    }
    let short = FloatMatrix::new(&bytes[1..], FloatType::Bf16, 8, 64).map(|_| ());
    assert_eq!(short, Err(CodecError::Length { region: "source", expected: 1024, found: 1023 }));
    assert!(matches!(FloatMatrix::new(&[], FloatType::F32, 0, 64), Err(CodecError::Shape(_))));
    assert!(FloatMatrix::new(&[], FloatType::F32, usize::MAX, 64).is_err());
}

#[test]
fn any_stored_bytes_decode_the_same() {
    let (rows, cols) = (16, 256);
    for encoding in Encoding::ALL {
        for size in if encoding == Encoding::Nvfp4 { &[16][..] } else { &[16, 32, 64, 128] } {
            let (size, global) = (if encoding.is_quantized() { *size } else { 0 }, Some(0.37));
            let spec = TensorSpec::new(
                Shape::matrix(rows, cols),
                encoding,
                size,
                global.filter(|_| encoding == Encoding::Nvfp4),
            )
            .expect("a spec");
            let noise = |bytes: u64, part: u64| -> Vec<u8> { (0..bytes).map(|at| keyed(part, &[at]) as u8).collect() };
            let (data, scales) = (noise(spec.data_bytes(), 1), noise(spec.scales_bytes(), 2));
            let expected = codec::decode(&data, &scales, &spec).expect("a tensor");
            for isa in Isa::present() {
                let mut found = vec![0.0; expected.len()];
                codec::decode_into(isa, &data, &scales, &spec, &mut found).expect("a tensor");
                let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
                let differs = expected.iter().zip(&found).position(|(&a, &b)| !same(a, b));
                assert_eq!(differs, None, "{isa}, {encoding}, groups of {size}");
            }
            let short = codec::decode_into(Isa::detect(), &data, &scales, &spec, &mut [0.0; 5]);
            assert_eq!(short, Err(CodecError::Length { region: "values", expected: 4096, found: 5 }));
        }
    }
}

/// Encodes with every encoding and group that fit, by every instruction set, and compares with the scalar codec; what
/// was encoded is decoded and compared as well.
fn check(bytes: &[u8], float: FloatType, rows: usize, cols: usize) {
    let values = float.widened(bytes);
    let source = FloatMatrix::new(bytes, float, rows, cols).expect("a matrix");
    for encoding in QUANTIZED {
        for size in [16, 32, 64, 128] {
            let expected = codec::encode(&values, rows, cols, encoding, group(size));
            for isa in Isa::present() {
                let found = Encoder::new(isa).encode(&source, encoding, group(size));
                assert_same(&found, &expected, &format!("{isa}: {float} {rows} x {cols} as {encoding}/{size}"));
            }
            let Ok(encoded) = expected else { continue };
            let spec =
                TensorSpec::new(Shape::matrix(rows, cols), encoding, size, encoded.global_scale).expect("a spec");
            let expected = codec::decode(&encoded.data, &encoded.scales, &spec).expect("a tensor");
            for isa in Isa::present() {
                let mut found = vec![f32::NAN; rows * cols];
                codec::decode_into(isa, &encoded.data, &encoded.scales, &spec, &mut found).expect("a tensor");
                let differs = expected.iter().zip(&found).position(|(a, b)| a.to_bits() != b.to_bits());
                assert_eq!(differs, None, "{isa}: {float} {rows} x {cols} from {encoding}/{size}");
            }
        }
    }
}

fn assert_same(found: &Result<Encoded, CodecError>, expected: &Result<Encoded, CodecError>, context: &str) {
    match (found, expected) {
        (Ok(found), Ok(expected)) => {
            let at = |a: &[u8], b: &[u8]| a.iter().zip(b).position(|(a, b)| a != b);
            assert_eq!(at(&found.scales, &expected.scales), None, "{context}: first scale byte that differs");
            assert_eq!(at(&found.data, &expected.data), None, "{context}: first data byte that differs");
            assert_eq!(found, expected, "{context}");
        }
        (
            Err(CodecError::NonFinite { row, col, value }),
            Err(CodecError::NonFinite { row: expected_row, col: expected_col, value: expected_value }),
        ) => {
            assert_eq!((row, col, value.to_bits()), (expected_row, expected_col, expected_value.to_bits()), "{context}")
        }
        _ => assert_eq!(found, expected, "{context}"),
    }
}

fn group(size: u64) -> GroupSize {
    GroupSize::new(size).expect("a size")
}

/// `values` as a checkpoint would store them, rounded to `float`.
fn stored(values: &[f32], float: FloatType) -> Vec<u8> {
    match float {
        FloatType::Bf16 => values.iter().flat_map(|&value| half::bf16::from_f32(value).to_le_bytes()).collect(),
        FloatType::F16 => values.iter().flat_map(|&value| half::f16::from_f32(value).to_le_bytes()).collect(),
        FloatType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}
