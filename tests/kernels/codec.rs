//! The codecs against every golden result of `golden/mnw/quant`, bit for bit.

use std::time::Instant;

use minnow_common::dtype::round_to_bf16;
use minnow_common::random::Symmetric;
use minnow_common::{Encoding, FloatType, GroupSize, Shape, TensorSpec};
use minnow_kernels::codec::{self, CodecError};
use minnow_tests::golden;
use serde_json::Value;

const QUANTIZED: [Encoding; 5] = [Encoding::I8Sym, Encoding::I8Mma, Encoding::I4Sym, Encoding::I4Mma, Encoding::Nvfp4];

#[test]
fn every_golden_matrix_is_encoded_and_decoded_bit_for_bit() {
    let (mut encoded, mut refused) = (0, 0);
    for name in golden::json("golden/mnw/quant/index.json").as_array().expect("a list of names") {
        let name = name.as_str().expect("a name");
        let case = golden::json(&format!("golden/mnw/quant/{name}.json"));
        let values = source_values(&case);
        for expected in case["results"].as_array().expect("results") {
            check_result(name, &case, &values, expected);
            *(if expected["error"].is_null() { &mut encoded } else { &mut refused }) += 1;
        }
    }
    assert_eq!((encoded, refused), (343, 116));
}

fn source_values(case: &Value) -> Vec<f32> {
    let bytes = golden::bytes(&format!("golden/mnw/quant/{}", case["input"].as_str().expect("a file")));
    assert_eq!(blake3::hash(&bytes).to_hex().as_str(), case["input_blake3"]);
    let float = match case["dtype"].as_str().expect("a type") {
        "f32" => FloatType::F32,
        "bf16" => FloatType::Bf16,
        "f16" => FloatType::F16,
        other => panic!("unknown type {other}"),
    };
    float.widened(&bytes)
}

fn check_result(name: &str, case: &Value, values: &[f32], expected: &Value) {
    let encoding: Encoding = expected["encoding"].as_str().expect("an encoding").parse().expect("a known encoding");
    let group = GroupSize::new(expected["group_size"].as_u64().expect("a size")).expect("a known size");
    let dim = |index: usize| case["shape"][index].as_u64().expect("a dimension") as usize;
    let context = format!("{name} {encoding}/{group}");
    let encoded = codec::encode(values, dim(0), dim(1), encoding, group);
    match expected["error"].as_str() {
        Some("nonfinite") => return assert!(matches!(encoded, Err(CodecError::NonFinite { .. })), "{context}"),
        Some("scale-overflow") => {
            return assert!(matches!(encoded, Err(CodecError::ScaleOverflow { .. })), "{context}");
        }
        Some(other) => panic!("{context}: unknown error {other}"),
        None => {}
    }
    let encoded = encoded.unwrap_or_else(|error| panic!("{context}: {error}"));
    assert_eq!(hex(&encoded.data), expected["data"], "{context}: data");
    assert_eq!(hex(&encoded.scales), expected["scales"], "{context}: scales");
    let global_scale = expected["global_scale_f32_hex"].as_str();
    assert_eq!(encoded.global_scale.map(|scale| format!("{:08x}", scale.to_bits())).as_deref(), global_scale);
    codec::check_scales(&encoded.scales, encoding).expect("scales that may be stored");

    let spec = TensorSpec::new(Shape::matrix(dim(0), dim(1)), encoding, group.get() as u64, encoded.global_scale)
        .expect("a spec");
    let decoded = codec::decode(&encoded.data, &encoded.scales, &spec).expect("a decodable matrix");
    let digest = |values: &[f32]| {
        blake3::hash(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>()).to_hex().to_string()
    };
    assert_eq!(digest(&decoded), expected["dequantized_f32_blake3"], "{context}");
    // The BF16 digest is of the two-byte values.
    let bf16: Vec<u8> =
        decoded.iter().flat_map(|&value| ((round_to_bf16(value).to_bits() >> 16) as u16).to_le_bytes()).collect();
    assert_eq!(blake3::hash(&bf16).to_hex().as_str(), expected["dequantized_bf16_blake3"], "{context}");
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn packed_layouts_are_the_golden_permutations() {
    let golden = golden::json("golden/mnw/quant/permutations.json");
    let list = |key: &str| -> Vec<usize> {
        golden[key].as_array().expect(key).iter().map(|index| index.as_u64().expect("an index") as usize).collect()
    };
    // Row-major scales are numbered 1.. so that all are valid FP16; codes count up as bytes.
    let (rows, cols, group) = (16, 64, 16);
    let sym = spec(rows, cols, Encoding::I8Sym, group, None);
    let codes: Vec<u8> = (0..rows * cols).map(|index| index as u8).collect();
    let scales: Vec<u8> = (0..rows * cols / group).flat_map(|index| (index as u16 + 1).to_le_bytes()).collect();
    let (data, packed_scales) = codec::repack(&codes, &scales, &sym, Encoding::I8Mma).expect("the same code book");
    let permutation = list("mma_codes_N16_K64");
    assert!(permutation.len() == data.len() && data.iter().zip(permutation).all(|(&code, at)| code == codes[at]));
    let permutation = list("mma_scales_N16_K64_group16");
    assert_eq!(permutation.len() * 2, packed_scales.len());
    assert!(packed_scales.chunks_exact(2).zip(permutation).all(|(scale, at)| *scale == scales[2 * at..2 * at + 2]));

    // NVFP4 has no row-major form on disk, so its order is seen through decoding one code, or one scale, at a time.
    let (rows, cols) = (16, 128);
    let nvfp4 = spec(rows, cols, Encoding::Nvfp4, 16, Some(1.0));
    let lit = |data: &[u8], scales: &[u8]| {
        codec::decode(data, scales, &nvfp4).expect("a matrix").iter().position(|&value| value == 6.0)
    };
    for (position, at) in list("nvfp4_codes_N16_K128").into_iter().enumerate() {
        let mut data = vec![0; rows * cols / 2];
        data[position / 2] = if position.is_multiple_of(2) { 0x07 } else { 0x70 };
        assert_eq!(lit(&data, &vec![0x38; rows * cols / 16]), Some(at));
    }
    for (position, at) in list("nvfp4_scales_N16_K128").into_iter().enumerate() {
        let mut scales = vec![0; rows * cols / 16];
        scales[position] = 0x38;
        assert_eq!(lit(&vec![0x77; rows * cols / 2], &scales), Some(at * 16));
    }
}

#[test]
fn code_values_are_the_golden_tables() {
    let golden = golden::json("golden/mnw/quant/tables.json");
    let list = |key: &str| -> Vec<f32> {
        golden[key].as_array().expect(key).iter().map(|value| value.as_f64().expect("a number") as f32).collect()
    };
    assert_eq!((0..127).map(codec::e4m3).collect::<Vec<_>>(), list("e4m3_positive_codes_0_126"));
    assert_eq!(codec::E2M1[..8], list("e2m1_codes_0_7"));
}

#[test]
fn the_nvfp4_example_of_the_specification_holds() {
    let mut values = vec![0.0; 8 * 64];
    values[..16]
        .copy_from_slice(&[0.0, -0.0, 0.1, 0.26, 0.3, -0.5, 0.75, 1.0, 1.25, 1.5, -1.75, 2.5, 3.0, 5.0, 5.1, 6.0]);
    values[7 * 64 + 63] = 12.0;
    let encoded = codec::encode(&values, 8, 64, Encoding::Nvfp4, GroupSize::NVFP4).expect("finite values");
    assert_eq!(encoded.global_scale.map(f32::to_bits), Some(0x3b92_4925));
    assert_eq!(encoded.data[..8], [0x80, 0x10, 0x91, 0x22, 0x32, 0x4c, 0x65, 0x77]);
    assert_eq!(encoded.data[252..], [0, 0, 0, 0x70]);
    assert_eq!(encoded.scales[..4], [0x76, 0x38, 0x38, 0x38]);
    assert_eq!(encoded.scales[28..], [0x38, 0x38, 0x38, 0x7e]);
}

#[test]
fn repacking_there_and_back_changes_nothing_and_keeps_every_value() {
    let (rows, cols) = (24, 256);
    let values = random("repack", rows * cols);
    for (sym, mma) in [(Encoding::I8Sym, Encoding::I8Mma), (Encoding::I4Sym, Encoding::I4Mma)] {
        for group in [16, 32, 64, 128] {
            let size = GroupSize::new(group as u64).expect("a size");
            let encoded = codec::encode(&values, rows, cols, sym, size).expect("finite values");
            let packed = codec::encode(&values, rows, cols, mma, size).expect("finite values");
            let (sym_spec, mma_spec) = (spec(rows, cols, sym, group, None), spec(rows, cols, mma, group, None));
            let there = codec::repack(&encoded.data, &encoded.scales, &sym_spec, mma).expect("the same code book");
            assert_eq!(there, (packed.data, packed.scales));
            let back = codec::repack(&there.0, &there.1, &mma_spec, sym).expect("the same code book");
            assert_eq!(back, (encoded.data, encoded.scales));
        }
    }
    let nvfp4 = codec::encode(&values, rows, cols, Encoding::Nvfp4, GroupSize::NVFP4).expect("finite values");
    let nvfp4_spec = spec(rows, cols, Encoding::Nvfp4, 16, nvfp4.global_scale);
    let same = codec::repack(&nvfp4.data, &nvfp4.scales, &nvfp4_spec, Encoding::Nvfp4).expect("the same encoding");
    assert_eq!(same, (nvfp4.data.clone(), nvfp4.scales.clone()));
    let other = codec::repack(&nvfp4.data, &nvfp4.scales, &nvfp4_spec, Encoding::I4Mma);
    assert_eq!(other, Err(CodecError::CodeBook { from: Encoding::Nvfp4, to: Encoding::I4Mma }));
}

#[test]
fn an_odd_row_count_can_be_row_major_but_not_packed() {
    let values = random("odd", 3 * 48);
    let group = GroupSize::new(16).expect("a size");
    let encoded = codec::encode(&values, 3, 48, Encoding::I4Sym, group).expect("finite values");
    let sym = spec(3, 48, Encoding::I4Sym, 16, None);
    let decoded = codec::decode(&encoded.data, &encoded.scales, &sym).expect("a matrix");
    for (value, decoded) in values.iter().zip(decoded) {
        assert!((value - decoded).abs() < 0.08, "{value} became {decoded}");
    }
    for packed in [Encoding::I4Mma, Encoding::I8Mma, Encoding::Nvfp4] {
        assert!(matches!(codec::encode(&values, 3, 48, packed, group), Err(CodecError::Spec(_))));
    }
    assert!(matches!(codec::repack(&encoded.data, &encoded.scales, &sym, Encoding::I4Mma), Err(CodecError::Spec(_))));
}

#[test]
fn refusals_carry_the_place_and_the_value() {
    let group = GroupSize::new(16).expect("a size");
    let mut values = vec![1.0; 8 * 64];
    values[3 * 64 + 40] = 1e9;
    let overflow = CodecError::ScaleOverflow { row: 3, group: 2, max_abs: 1e9 };
    assert_eq!(codec::encode(&values, 8, 64, Encoding::I8Mma, group), Err(overflow));
    values[5 * 64 + 7] = f32::NEG_INFINITY;
    let nonfinite = CodecError::NonFinite { row: 5, col: 7, value: f32::NEG_INFINITY };
    for encoding in QUANTIZED {
        assert_eq!(codec::encode(&values, 8, 64, encoding, group), Err(nonfinite.clone()));
    }
    assert_eq!(nonfinite.to_string(), "the value in row 5, column 7 is -inf, which cannot be quantized");
    assert!(matches!(codec::encode(&values, 8, 63, Encoding::I8Sym, group), Err(CodecError::Spec(_))));
    assert!(matches!(codec::encode(&values, 7, 64, Encoding::I8Sym, group), Err(CodecError::Length { .. })));
    assert!(matches!(codec::encode(&[], 0, 64, Encoding::I8Sym, group), Err(CodecError::Shape(_))));
    let float = Encoding::Float(FloatType::Bf16);
    assert_eq!(codec::encode(&values, 8, 64, float, group), Err(CodecError::NotQuantized(float)));
    let short = codec::decode(&[0; 511], &[0; 64], &spec(8, 64, Encoding::I8Sym, 16, None));
    assert_eq!(short, Err(CodecError::Length { region: "data", expected: 512, found: 511 }));
}

#[test]
fn scales_that_poison_results_are_found() {
    let fp16 = |bits: u16| [0x00, 0x3c].into_iter().chain(bits.to_le_bytes()).collect::<Vec<u8>>();
    for encoding in [Encoding::I8Sym, Encoding::I8Mma, Encoding::I4Sym, Encoding::I4Mma] {
        for allowed in [0x0001, 0x3c00, 0x7bff] {
            assert_eq!(codec::check_scales(&fp16(allowed), encoding), Ok(()));
        }
        for bits in [0x0000, 0x8000, 0x8001, 0xbc00, 0x7c00, 0xfc00, 0x7e00, 0x7c01] {
            let bad = CodecError::BadScale { index: 1, bits, encoding };
            assert_eq!(codec::check_scales(&fp16(bits), encoding), Err(bad));
        }
    }
    assert_eq!(codec::check_scales(&(0..127).collect::<Vec<u8>>(), Encoding::Nvfp4), Ok(()));
    for bits in 127..=255u8 {
        let bad = CodecError::BadScale { index: 2, bits: u16::from(bits), encoding: Encoding::Nvfp4 };
        assert_eq!(codec::check_scales(&[0, 126, bits], Encoding::Nvfp4), Err(bad));
    }
}

#[test]
fn encoding_a_real_expert_takes_milliseconds() {
    let values = random("expert", 512 * 2048);
    for encoding in QUANTIZED {
        let group = if encoding == Encoding::Nvfp4 { GroupSize::NVFP4 } else { GroupSize::DEFAULT };
        let start = Instant::now();
        let encoded = codec::encode(&values, 512, 2048, encoding, group).expect("finite values");
        let encoding_ms = start.elapsed().as_secs_f64() * 1e3;
        let spec = spec(512, 2048, encoding, group.get(), encoded.global_scale);
        let start = Instant::now();
        codec::decode(&encoded.data, &encoded.scales, &spec).expect("a matrix");
        let decoding_ms = start.elapsed().as_secs_f64() * 1e3;
        println!("{encoding}: 512 x 2048 encoded in {encoding_ms:.2} ms, decoded in {decoding_ms:.2} ms");
        // Generous, for slow and busy machines: it catches an allocation an element, not a lost percent.
        assert!(encoding_ms < 500.0, "{encoding} took {encoding_ms} ms");
    }
}

fn spec(rows: usize, cols: usize, encoding: Encoding, group: usize, global_scale: Option<f32>) -> TensorSpec {
    TensorSpec::new(Shape::matrix(rows, cols), encoding, group as u64, global_scale).expect("a valid spec")
}

fn random(name: &str, len: usize) -> Vec<f32> {
    let sequence = Symmetric::new(name, 1);
    (0..len as u64).map(|index| sequence.at(index)).collect()
}
