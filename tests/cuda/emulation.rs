//! The native kernel of experts with activations of four bits: its layouts under an emulation of its instruction, on the
//! host, against the oracle and against what devices without the instruction compute. Needs no GPU.

use half::bf16;
use minnow_common::{Encoding, GroupSize};
use minnow_formats::checkpoint::Checkpoint;
use minnow_formats::io::IoBackend;
use minnow_kernels::codec::{E2M1, decode_rows, e4m3};
use minnow_kernels::conformance::{StoredMatrix, random};
use minnow_kernels::cpu::{self, Isa};
use minnow_kernels::matrix::WeightMatrix;
use minnow_kernels::oracle::{self, Fp4Row};
use minnow_tests::emulation::{CodeStrips, Rows};
use minnow_tests::{convert, golden};
use minnowd::weights::{FeedForward, LoadOptions, Weights};

/// Relative error of one rounding to f32.
const ROUNDING: f64 = 1.0 / 16_777_216.0;
/// The smallest subnormal f32.
const LEAST: f64 = 1.401_298_464_324_817e-45;
/// Columns of a step of the instruction.
const STEP: usize = 64;

fn bits(values: &[f32]) -> Vec<u16> {
    values.iter().map(|&value| bf16::from_f32(value).to_bits()).collect()
}

fn widened(bits: &[u16]) -> Vec<f32> {
    bits.iter().map(|&bits| bf16::from_bits(bits).to_f32()).collect()
}

/// Products with one matrix, `[rows, matrix.rows()]`.
fn product(x: &Rows, matrix: &WeightMatrix<'_>) -> Vec<f32> {
    let width = matrix.rows().next_multiple_of(16);
    let out = x.product(&CodeStrips::alone(matrix));
    out.chunks_exact(width).flat_map(|row| &row[..matrix.rows()]).copied().collect()
}

/// Products with a gate and an up that lie in one matrix.
fn products(x: &Rows, gate: &WeightMatrix<'_>, up: &WeightMatrix<'_>) -> [Vec<f32>; 2] {
    let out = x.product(&CodeStrips::pair(gate, up));
    // Eight rows of one, eight of the other.
    [0, 1].map(|which| out.as_chunks::<8>().0.iter().skip(which).step_by(2).flatten().copied().collect())
}

/// Rows of every kind: ordinary, with a few large columns, tiny, huge, of zeros; more than one tile of tokens.
fn rows(name: &str, cols: usize) -> Vec<f32> {
    let mut x = random(name, 11 * cols);
    for (row, x) in x.chunks_exact_mut(cols).enumerate() {
        match row % 5 {
            1 => x.iter_mut().step_by(37).for_each(|value| *value *= 50.0),
            2 => x.iter_mut().for_each(|value| *value *= 1e-20),
            3 => x.iter_mut().for_each(|value| *value *= 3e15),
            4 => x[cols / 2..].fill(0.0),
            _ => {}
        }
    }
    x[5 * cols..6 * cols].fill(0.0);
    widened(&bits(&x))
}

/// Compares products of quantized rows of `x: [rows, cols]` with the sum of the exact terms.
///
/// Terms are products of codes with codes and scales with scales: twelve bits, exact, and so is the sum of a step. What is
/// rounded: the sum after each step, and its product with the matrix-wide scale; the row's scale is a power of two, and
/// rounds only what becomes subnormal. `more`: further roundings of a sum, each of at most the sum of all magnitudes.
fn assert_exact_but_for_sums(name: &str, found: &[f32], x: &[f32], matrix: &WeightMatrix<'_>, more: usize) {
    let (n, k) = (matrix.rows(), matrix.cols());
    let codes = matrix.without_global_scale();
    let mut weights = vec![0.0; n * k];
    for (row, out) in weights.chunks_exact_mut(k).enumerate() {
        decode_rows(&codes, row, out);
    }
    for (row, (found, x)) in found.chunks_exact(n).zip(x.chunks_exact(k)).enumerate() {
        let Fp4Row { codes, scales, scale } = Fp4Row::new(x);
        let block_scales = scales.iter().flat_map(|&code| [f64::from(e4m3(code)) * f64::from(scale); 16]);
        let values: Vec<f64> =
            codes.iter().zip(block_scales).map(|(&code, scale)| f64::from(E2M1[usize::from(code)]) * scale).collect();
        for ((column, found), weights) in found.iter().enumerate().zip(weights.chunks_exact(k)) {
            let terms = values.iter().zip(weights).map(|(&x, &w)| x * f64::from(w));
            let scale = f64::from(matrix.global_scale());
            let (sum, magnitude) = terms.fold((0.0, 0.0), |(sum, all), term| (sum + term, all + term.abs()));
            let allowed = (k / STEP + 1 + more) as f64 * ROUNDING * magnitude * scale + LEAST;
            let error = (f64::from(*found) - sum * scale).abs();
            assert!(error <= allowed, "{name}: row {row}, column {column} is {found}, not {}", sum * scale);
        }
    }
}

#[test]
fn rows_are_quantized_as_by_the_oracle_to_the_bit() {
    const COLS: usize = 128;
    let mut x = rows("emulated rows", COLS);
    // Every BF16 in a row of its own, beside fractions of it.
    for value in (0..=u16::MAX).map(|bits| bf16::from_bits(bits).to_f32()) {
        let mut row = [0.0; COLS];
        row[..4].copy_from_slice(&[value, value / 3.0, -value / 7.0, value * 0.999]);
        row[16..18].copy_from_slice(&[value / 64.0, -0.0]);
        x.extend(row);
    }
    let found = Rows::new(&bits(&x), COLS);
    let records = found.records.chunks_exact(80);
    for (row, ((x, rounded), record)) in
        x.chunks_exact(COLS).zip(found.rounded.chunks_exact(COLS)).zip(records).enumerate()
    {
        let expected = Fp4Row::new(x);
        assert_eq!(found.scales[row], expected.scale, "row {row}");
        assert_eq!(record[64..72], expected.scales, "row {row}");
        let codes: Vec<u8> = record[..64].iter().flat_map(|byte| [byte & 15, byte >> 4]).collect();
        assert_eq!(codes, expected.codes, "row {row}");
        for (rounded, expected) in widened(rounded).iter().zip(expected.values()) {
            let same = rounded.to_bits() == expected.to_bits() || rounded.is_nan() && expected.is_nan();
            assert!(same, "row {row}: {rounded:e}, not {expected:e}");
        }
    }
}

#[test]
fn products_of_padded_matrices_and_of_pairs_are_exact_but_for_the_order_of_sums() {
    for (n, k) in [(8, 128), (16, 128), (24, 384), (136, 256), (256, 128)] {
        let name = format!("{n} x {k}");
        let [gate, up] =
            ["gate", "up"].map(|which| StoredMatrix::random(&format!("{name} {which}"), n, k, Encoding::Nvfp4, 16));
        let x = rows(&name, k);
        let quantized = Rows::new(&bits(&x), k);
        assert_exact_but_for_sums(&name, &product(&quantized, &gate.view()), &x, &gate.view(), 0);
        let [gates, ups] = products(&quantized, &gate.view(), &up.view());
        assert_exact_but_for_sums(&format!("{name}, gate"), &gates, &x, &gate.view(), 0);
        assert_exact_but_for_sums(&format!("{name}, up"), &ups, &x, &up.view(), 0);
    }
}

#[test]
fn a_rows_bits_do_not_depend_on_its_neighbours_and_nan_stays_in_its_row() {
    let (n, k) = (40, 256);
    let matrix = StoredMatrix::random("neighbours", n, k, Encoding::Nvfp4, 16);
    let x = rows("neighbours", k);
    let product = |x: &[f32]| product(&Rows::new(&bits(x), k), &matrix.view());
    let together = product(&x);
    for (row, (x, together)) in x.chunks_exact(k).zip(together.chunks_exact(n)).enumerate() {
        assert_eq!(product(x), together, "row {row}");
    }
    let mut x = x;
    x[3 * k + 100] = f32::INFINITY;
    x[9 * k] = f32::NAN;
    let beside = product(&x);
    for (row, (found, expected)) in beside.chunks_exact(n).zip(together.chunks_exact(n)).enumerate() {
        match row {
            3 | 9 => assert!(found.iter().all(|value| value.is_nan()), "row {row}"),
            _ => assert_eq!(found, expected, "row {row}"),
        }
    }
}

#[test]
fn the_tiny_models_experts_are_the_oracles_and_those_of_other_devices() {
    let Some(tiny) = golden::tiny_dir() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("tiny-nvfp4.mnw");
    let source = Checkpoint::open(&tiny, IoBackend::Auto).expect("the tiny model");
    convert::write_mnw(&source, &file, Encoding::Nvfp4, GroupSize::NVFP4);
    let checkpoint = Checkpoint::open(&file, IoBackend::Auto).expect("what was just written");
    let weights = Weights::load(&checkpoint, LoadOptions::default()).expect("a model");
    let mut experts = 0;
    for (index, layer) in weights.layers.iter().enumerate() {
        let FeedForward::Experts(of_layer) = &layer.feed_forward else { continue };
        for (number, expert) in of_layer.routed.iter().enumerate() {
            let name = format!("layer {index}, expert {number}");
            let [gate, up, down] = expert.matrices().map(|matrix| matrix.view());
            let x = rows(&name, gate.cols());
            let entering = Rows::new(&bits(&x), gate.cols());
            let [gates, ups] = products(&entering, &gate, &up);
            assert_exact_but_for_sums(&format!("{name}, gate"), &gates, &x, &gate, 0);
            assert_exact_but_for_sums(&format!("{name}, up"), &ups, &x, &up, 0);
            let mut act = vec![0.0; gates.len()];
            oracle::swiglu(&mut act, &widened(&bits(&gates)), &widened(&bits(&ups)));
            let act = widened(&bits(&act));
            let between = Rows::new(&bits(&act), down.cols());
            assert_exact_but_for_sums(&format!("{name}, down"), &product(&between, &down), &act, &down, 0);

            // What devices without the instruction take instead: rounded rows through the ordinary products, which round
            // each sum, and where everything is f32 each weight too, as large an error as one rounding of the sum.
            if number == 0 {
                for isa in Isa::present() {
                    let mut found = vec![0.0; gates.len()];
                    cpu::linear(isa, &mut found, &widened(&entering.rounded), &gate);
                    assert_exact_but_for_sums(&format!("{name}, gate on {isa}"), &found, &x, &gate, gate.cols() + 1);
                }
            }
            experts += 1;
        }
    }
    println!("{experts} experts");
    assert!(experts > 0);
}
