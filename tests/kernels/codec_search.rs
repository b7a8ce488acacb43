//! What searching for scales wins, on the experts of the trained tiny model, and how far it is from the best there is.

use half::f16;
use minnow_common::random::Symmetric;
use minnow_common::tensor::is_expert;
use minnow_common::{Encoding, FloatType, GroupSize, Shape, TensorSpec};
use minnow_formats::checkpoint::Checkpoint;
use minnow_formats::io::IoBackend;
use minnow_kernels::codec::{self, E2M1, Encoder, FloatMatrix, Quality};
use minnow_kernels::cpu::Isa;
use minnow_tests::golden;

/// An expert's matrix, as stored and as f32.
struct Matrix {
    bytes: Vec<u8>,
    values: Vec<f32>,
    rows: usize,
    cols: usize,
}

/// Every `step`-th matrix of the experts. BF16 all of them.
fn experts(step: usize) -> Option<Vec<Matrix>> {
    let folder = golden::tiny_dir()?;
    let checkpoint = Checkpoint::open(&folder, IoBackend::Buffered).expect("the tiny model");
    let experts = checkpoint.tensors().iter().filter(|(name, _)| is_expert(name)).step_by(step);
    let matrices: Vec<Matrix> = experts
        .map(|(name, tensor)| {
            let (rows, cols) = tensor.spec.shape().as_matrix().expect("a matrix");
            let bytes = checkpoint.read(name).expect("readable bytes").data.into_owned();
            let values = FloatType::Bf16.widened(&bytes);
            Matrix { bytes, values, rows: rows as usize, cols: cols as usize }
        })
        .collect();
    assert!(!matrices.is_empty());
    Some(matrices)
}

/// Sum of squared errors of a matrix that was encoded and decoded again.
fn squared_error(matrix: &Matrix, encoding: Encoding, group: u64, quality: Quality) -> f64 {
    let source = FloatMatrix::new(&matrix.bytes, FloatType::Bf16, matrix.rows, matrix.cols).expect("a matrix");
    let group = GroupSize::new(group).expect("a size");
    let encoder = Encoder::new(Isa::detect()).with_quality(quality);
    let encoded = encoder.encode(&source, encoding, group).expect("finite weights");
    codec::check_scales(&encoded.scales, encoding).expect("scales that may be stored");
    let shape = Shape::matrix(matrix.rows, matrix.cols);
    let spec = TensorSpec::new(shape, encoding, group.get() as u64, encoded.global_scale).expect("a spec");
    let decoded = codec::decode(&encoded.data, &encoded.scales, &spec).expect("a tensor");
    decoded.iter().zip(&matrix.values).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum()
}

/// Lowering of the root of the mean square, in percent, from one sum of squares to another.
fn lowered(from: f64, to: f64) -> f64 {
    100.0 * (1.0 - (to / from).sqrt())
}

#[test]
fn search_lowers_the_error_of_the_tiny_models_experts() {
    let Some(matrices) = experts(1) else { return };
    let power: f64 = matrices.iter().flat_map(|matrix| &matrix.values).map(|value| f64::from(*value).powi(2)).sum();
    // Of the root mean square, in percent. The best there is for INT4 in groups of 128 and for NVFP4 is shown by the
    // two tests below; these bounds are just short of what is reached.
    let bounds = [
        (Encoding::I4Mma, 128, 14.0),
        (Encoding::I4Mma, 64, 11.5),
        (Encoding::I4Mma, 32, 11.0),
        (Encoding::I4Mma, 16, 11.5),
        (Encoding::I8Mma, 128, 2.5),
        (Encoding::Nvfp4, 16, 14.4),
    ];
    for (encoding, group, bound) in bounds {
        let [mut rtn, mut search] = [0.0; 2];
        for matrix in &matrices {
            let of_matrix =
                [Quality::Rtn, Quality::Search].map(|quality| squared_error(matrix, encoding, group, quality));
            assert!(of_matrix[1] <= of_matrix[0], "{encoding}/{group}: a matrix got worse, {of_matrix:?}");
            rtn += of_matrix[0];
            search += of_matrix[1];
        }
        let lower = lowered(rtn, search);
        println!(
            "{encoding}/{group}: relative RMS error {:.5} -> {:.5}, lower by {lower:.2} % (its square by {:.2} %)",
            (rtn / power).sqrt(),
            (search / power).sqrt(),
            100.0 * (1.0 - search / rtn),
        );
        assert!(lower >= bound, "{encoding}/{group}: lower by {lower} %, less than {bound} %");
    }
}

#[test]
fn int4_scales_are_nearly_the_best_of_all_fp16() {
    // With a given scale nothing beats the nearest code, and groups are independent: trying every FP16 scale is the
    // best there is.
    let Some(matrices) = experts(60) else { return };
    let [mut rtn, mut search, mut best] = [0.0; 3];
    for matrix in &matrices {
        rtn += squared_error(matrix, Encoding::I4Mma, 128, Quality::Rtn);
        search += squared_error(matrix, Encoding::I4Mma, 128, Quality::Search);
        best += matrix.values.chunks(128).map(best_of_fp16_scales).sum::<f64>();
    }
    let (found, possible) = (lowered(rtn, search), lowered(rtn, best));
    println!("i4/128 on {} matrices: lower by {found:.2} %, with the best scales by {possible:.2} %", matrices.len());
    assert!(found <= possible + 0.01 && found > possible - 0.2, "lower by {found} %, possible are {possible} %");
}

fn best_of_fp16_scales(values: &[f32]) -> f64 {
    let max_abs = values.iter().fold(0.0f32, |max, value| max.max(value.abs()));
    let mut best = f64::INFINITY;
    // Twice a scale that fits has no codes that the scale itself has not, so it goes down from there, to where the
    // largest value alone costs more than all together did before.
    for bits in (1..=f16::from_f32(max_abs / 3.5).to_bits()).rev() {
        let scale = f16::from_bits(bits).to_f32();
        let excess = f64::from(max_abs - 8.0 * scale);
        if excess > 0.0 && excess * excess > best {
            break;
        }
        let errors = values.iter().map(|value| (value / scale).round_ties_even().clamp(-8.0, 7.0) * scale - value);
        best = best.min(errors.map(|error| f64::from(error).powi(2)).sum());
    }
    best
}

#[test]
fn nvfp4_scales_are_nearly_as_good_as_real_numbers_could_be() {
    // If block scales were real numbers instead of products of an E4M3 and a global scale, one could only do better.
    let Some(matrices) = experts(60) else { return };
    let [mut rtn, mut search, mut best] = [0.0; 3];
    for matrix in &matrices {
        rtn += squared_error(matrix, Encoding::Nvfp4, 16, Quality::Rtn);
        search += squared_error(matrix, Encoding::Nvfp4, 16, Quality::Search);
        for block in matrix.values.chunks(16) {
            best += best_of_real_scales(block);
        }
    }
    let (found, possible) = (lowered(rtn, search), lowered(rtn, best));
    println!("nvfp4 on {} matrices: lower by {found:.2} %, with real scales by {possible:.2} %", matrices.len());
    assert!(found <= possible && found > possible - 4.0, "lower by {found} %, possible are {possible} %");
}

/// The least squared error of a block over all real scales. As the scale falls, a value changes its code where it
/// passes a boundary; between boundaries the error is a parabola in the scale, with a known lowest point.
fn best_of_real_scales(values: &[f32]) -> f64 {
    const BOUNDARIES: [f64; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
    let magnitudes: Vec<f64> = values.iter().map(|value| f64::from(value.abs())).collect();
    let mut changes: Vec<f64> = magnitudes
        .iter()
        .flat_map(|value| BOUNDARIES.map(|boundary| value / boundary))
        .filter(|scale| *scale > 0.0)
        .collect();
    changes.push(0.0);
    changes.sort_by(f64::total_cmp);
    let mut best = magnitudes.iter().map(|value| value * value).sum::<f64>();
    for pair in changes.windows(2) {
        let middle = f64::midpoint(pair[0], pair[1]);
        let codes = magnitudes.iter().map(|value| {
            let code = BOUNDARIES.iter().filter(|boundary| value / middle > **boundary).count();
            f64::from(E2M1[code])
        });
        let [mut product, mut square, mut power] = [0.0; 3];
        for (value, code) in magnitudes.iter().zip(codes) {
            product += value * code;
            square += code * code;
            power += value * value;
        }
        // With the least-squares scale of these codes, whether or not it lies between the boundaries: nearest codes
        // could only be better still, and those are another pair's.
        if square > 0.0 {
            best = best.min((power - product * product / square).max(0.0));
        }
    }
    best
}

#[test]
fn every_instruction_set_finds_the_same_scales() {
    let (rows, cols) = (16, 1024);
    let sequence = Symmetric::new("search", 1);
    // Magnitudes over many powers of two: sums that were not added in the same order would differ.
    let values = (0..(rows * cols) as u64).map(|index| sequence.at(index).powi(5) * 3.0);
    let bytes: Vec<u8> = values.flat_map(|value| half::bf16::from_f32(value).to_le_bytes()).collect();
    let source = FloatMatrix::new(&bytes, FloatType::Bf16, rows, cols).expect("a matrix");
    for encoding in [Encoding::I8Sym, Encoding::I8Mma, Encoding::I4Sym, Encoding::I4Mma, Encoding::Nvfp4] {
        for group in if encoding == Encoding::Nvfp4 { &[16][..] } else { &[16, 32, 64, 128] } {
            let group = GroupSize::new(*group).expect("a size");
            let encode = |isa| Encoder::new(isa).with_quality(Quality::Search).encode(&source, encoding, group);
            let expected = encode(Isa::Scalar).expect("finite values");
            for isa in Isa::present() {
                assert!(encode(isa).as_ref() == Ok(&expected), "{isa}, {encoding}/{group}");
            }
        }
    }
}

#[test]
fn extremes_keep_scales_that_may_be_stored() {
    let tiny = f32::from_bits(1);
    let edge = 7.0 * 65_504.0;
    for values in [[0.0, -0.0, tiny, -tiny], [edge, -edge, 1.0, 0.0], [1e-8, -3e-8, 2e-8, 0.0], [-8.0, 7.0, 1.0, 2.0]] {
        let bytes: Vec<u8> = values.iter().cycle().take(8 * 128).flat_map(|value: &f32| value.to_le_bytes()).collect();
        let values = FloatType::F32.widened(&bytes);
        let source = FloatMatrix::new(&bytes, FloatType::F32, 8, 128).expect("a matrix");
        for encoding in [Encoding::I8Sym, Encoding::I8Mma, Encoding::I4Sym, Encoding::I4Mma, Encoding::Nvfp4] {
            let group = GroupSize::NVFP4;
            let encoded = |quality| {
                let encode = |isa| Encoder::new(isa).with_quality(quality).encode(&source, encoding, group);
                let encoded = encode(Isa::Scalar).expect("finite values");
                assert!(Isa::present().all(|isa| encode(isa).as_ref() == Ok(&encoded)), "{encoding}");
                codec::check_scales(&encoded.scales, encoding).expect("scales that may be stored");
                let spec = TensorSpec::new(Shape::matrix(8, 128), encoding, 16, encoded.global_scale).expect("a spec");
                let decoded = codec::decode(&encoded.data, &encoded.scales, &spec).expect("a tensor");
                decoded.iter().zip(&values).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum::<f64>()
            };
            let (rtn, search) = (encoded(Quality::Rtn), encoded(Quality::Search));
            assert!(search <= rtn, "{encoding}: {values:?} got worse, {rtn} -> {search}");
        }
    }
}

#[test]
fn search_refuses_what_rounding_to_nearest_refuses() {
    let mut values = vec![1.0f32; 8 * 64];
    values[100] = 1e9;
    for bad in [None, Some(f32::NAN)] {
        values[200] = bad.unwrap_or(1.0);
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let source = FloatMatrix::new(&bytes, FloatType::F32, 8, 64).expect("a matrix");
        let refusal = |quality| {
            let encoder = Encoder::new(Isa::detect()).with_quality(quality);
            encoder.encode(&source, Encoding::I4Mma, GroupSize::NVFP4).map_err(|error| error.to_string())
        };
        assert!(refusal(Quality::Rtn).is_err());
        assert_eq!(refusal(Quality::Search), refusal(Quality::Rtn));
    }
}
