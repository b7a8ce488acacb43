//! The CUDA matrix products against the oracle, and against themselves in other company; on a GPU, else skipped.
//!
//! Activations are rounded to BF16 first. Weights are what their encoding makes of random values, so what remains is the
//! order of FP32 sums and the roundings to BF16 that the model description asks for.

use half::bf16;
use minnow_common::{Encoding, FloatType};
use minnow_kernels::conformance::{StoredExpert, StoredMatrix, random};
use minnow_kernels::cuda::{
    Buffer, Choices, CudaError, Device, Experts, Format, Fp4Experts, Int8Experts, LaunchShape, Linear, Pointer,
    QuantizedRows, Relayout, Slots, Stored, Strips, TileBest, VOCABULARY_TILE, argument,
};
use minnow_kernels::matrix::WeightMatrix;
use minnow_kernels::oracle;
use minnow_tests::emulation::{CodeStrips, Rows};

use super::kernels::{in_bf16, poisoned, rounded, widened};
use crate::device;

const BF16: Encoding = Encoding::Float(FloatType::Bf16);

/// A matrix, or several, in device memory.
struct OnDevice {
    data: Buffer<u8>,
    scales: Buffer<f32>,
    format: Format,
    rows: usize,
    cols: usize,
}

impl OnDevice {
    fn strips(&self) -> Strips {
        let global_scales = if self.scales.is_empty() { Pointer::null() } else { self.scales.pointer() };
        Strips { format: self.format, rows: self.rows, cols: self.cols, data: self.data.pointer(), global_scales }
    }
}

/// Lays out each of `matrices`: one, or a pair of gate and up.
fn laid_out(device: &Device, matrices: &[Vec<WeightMatrix<'_>>]) -> Result<OnDevice, CudaError> {
    laid_out_in(device, matrices, Format::of(matrices[0][0].encoding(), matrices[0][0].group())?)
}

/// The same in a format that keeps them.
fn laid_out_in(device: &Device, matrices: &[Vec<WeightMatrix<'_>>], format: Format) -> Result<OnDevice, CudaError> {
    let relayout = Relayout::new(device)?;
    let first = matrices[0][0];
    let (encoding, cols) = (first.encoding(), first.cols());
    let rows = first.rows() * matrices[0].len();
    let bytes = format.matrix_bytes(rows, cols);
    let data = poisoned::<u8>(device, bytes * matrices.len());
    let mut global_scales = Vec::new();
    for (index, matrix) in matrices.iter().enumerate() {
        let stored: Vec<_> = matrix
            .iter()
            .map(|matrix| Ok((device.uploaded(matrix.data())?, device.uploaded(matrix.scales())?)))
            .collect::<Result<_, CudaError>>()?;
        let source = |index: usize| Stored { data: stored[index].0.pointer(), scales: stored[index].1.pointer() };
        let target = data.at(index * bytes);
        // SAFETY: buffers of the stored sizes, alive until `synchronize` has waited.
        unsafe {
            match matrix.len() {
                1 => relayout.alone(target, source(0), encoding, format, first.rows(), cols)?,
                _ => relayout.pair(target, source(0), source(1), encoding, format, first.rows(), cols)?,
            }
        }
        device.synchronize()?;
        global_scales.extend(matrix.iter().map(WeightMatrix::global_scale));
    }
    let scales = if encoding == Encoding::Nvfp4 { global_scales } else { Vec::new() };
    Ok(OnDevice { data, scales: device.uploaded(&scales)?, format, rows, cols })
}

/// BF16 values that differ by more than one rounding to BF16 and what sums in another order may differ by.
fn assert_near(name: &str, found: &[bf16], expected: &[f32], sums: f32) {
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found.to_f32() - expected).abs();
        assert!(error <= expected.abs() / 200.0 + sums, "{name}: value {index} is {found}, the oracle has {expected}");
    }
}

#[test]
fn products_are_the_oracles_and_the_same_for_any_number_of_rows() -> Result<(), CudaError> {
    let Some(device) = device() else { return Ok(()) };
    let linear = Linear::new(&device)?;
    for (n, k) in [(8, 128), (72, 256), (320, 512), (1000, 256), (3072, 2048)] {
        let name = format!("{n} x {k}");
        let (gate, up) = (
            StoredMatrix::random(&format!("{name} gate"), n, k, BF16, 0),
            StoredMatrix::random(&format!("{name} up"), n, k, BF16, 0),
        );
        let alone = laid_out(&device, &[vec![gate.view()]])?;
        let pair = laid_out(&device, &[vec![gate.view(), up.view()]])?;
        const ROWS: usize = 600;
        let x = rounded(&random(&format!("{name} x"), ROWS * k));
        let on_device = device.uploaded(&in_bf16(&x))?;
        let mut whole: Option<[Vec<u32>; 3]> = None;
        for rows in [ROWS, 1, 7, 32, 33, 100, 300] {
            let (out, gated) = (poisoned::<bf16>(&device, ROWS * n), poisoned::<bf16>(&device, ROWS * n));
            let f32_out = poisoned::<f32>(&device, ROWS * n);
            let x_pointer = on_device.pointer();
            // SAFETY: buffers of the stated sizes, alive until `to_vec` has waited.
            unsafe {
                linear.bf16(out.pointer(), x_pointer, &alone.strips(), rows)?;
                linear.f32(f32_out.pointer(), x_pointer, &alone.strips(), rows)?;
                linear.gate_up(gated.pointer(), x_pointer, &pair.strips(), rows)?;
            }
            let (out, gated, f32_out) = (out.to_vec()?, gated.to_vec()?, f32_out.to_vec()?);
            let untouched = |value: &bf16| value.to_bits() == 0xffff;
            assert!(out[rows * n..].iter().chain(&gated[rows * n..]).all(untouched), "{name}: {rows} rows");
            assert!(f32_out[rows * n..].iter().all(|value| value.to_bits() == u32::MAX), "{name}: {rows} rows");
            let bits = [
                out[..rows * n].iter().map(|value| u32::from(value.to_bits())).collect(),
                gated[..rows * n].iter().map(|value| u32::from(value.to_bits())).collect(),
                f32_out[..rows * n].iter().map(|value| value.to_bits()).collect::<Vec<_>>(),
            ];
            match &whole {
                None => {
                    let (mut expected, mut other) = (vec![0.0; 40 * n], vec![0.0; 40 * n]);
                    oracle::linear(&mut expected, &x[..40 * k], &gate.values(), k);
                    oracle::linear(&mut other, &x[..40 * k], &up.values(), k);
                    // The tensor cores cut sums off instead of rounding them: 2^-24 of the terms' sum, a few times.
                    let sums = 1e-5 * (k as f32).sqrt();
                    assert_near(&name, &out[..40 * n], &expected, sums);
                    assert_near(&name, &in_bf16(&f32_out[..40 * n]), &expected, sums);
                    let (mut silu, gates, ups) = (vec![0.0; 40 * n], rounded(&expected), rounded(&other));
                    oracle::swiglu(&mut silu, &gates, &vec![1.0; 40 * n]);
                    let silu: Vec<f32> = rounded(&silu).iter().zip(&ups).map(|(silu, up)| silu * up).collect();
                    assert_near(&name, &gated[..40 * n], &silu, 0.02);
                    whole = Some(bits);
                }
                Some(whole) => {
                    for (bits, whole) in bits.iter().zip(whole) {
                        assert!(*bits == whole[..bits.len()], "{name}: {rows} rows are not as those of {ROWS}");
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn the_head_keeps_the_best_tokens_of_each_tile() -> Result<(), CudaError> {
    let Some(device) = device() else { return Ok(()) };
    let linear = Linear::new(&device)?;
    for (n, k) in [(8usize, 128), (264, 256), (1792, 256), (4096, 512)] {
        let tiles = n.div_ceil(VOCABULARY_TILE);
        let head = StoredMatrix::random("head", n, k, BF16, 0);
        let weights = laid_out(&device, &[vec![head.view()]])?;
        const ROWS: usize = 150;
        let x = device.uploaded(&in_bf16(&random("head x", ROWS * k)))?;
        let mut whole: Option<[Vec<u32>; 3]> = None;
        for rows in [ROWS, 1, 33, 64] {
            let (tokens, logits) =
                (poisoned::<u32>(&device, ROWS * tiles * 4), poisoned::<f32>(&device, ROWS * tiles * 4));
            let (sums, plain) = (poisoned::<f32>(&device, ROWS * tiles), poisoned::<bf16>(&device, ROWS * n));
            let best = TileBest { tokens: tokens.pointer(), logits: logits.pointer(), sums: sums.pointer() };
            // SAFETY: buffers of the stated sizes, alive until `to_vec` has waited.
            unsafe {
                linear.head_best(&best, x.pointer(), &weights.strips(), rows)?;
                linear.bf16(plain.pointer(), x.pointer(), &weights.strips(), rows)?;
            }
            let (tokens, logits, sums) = (tokens.to_vec()?, logits.to_vec()?, sums.to_vec()?);
            let plain = widened(&plain.to_vec()?);
            for (index, sum) in sums[..rows * tiles].iter().enumerate() {
                let (row, first) = (index / tiles, index % tiles * VOCABULARY_TILE);
                let tile = &plain[row * n..][first..n.min(first + VOCABULARY_TILE)];
                let best = oracle::candidates(tile);
                for place in 0..4.min(tile.len()) {
                    assert_eq!(tokens[index * 4 + place], best[place].token + first as u32, "row {row} of {n} x {k}");
                    assert_eq!(logits[index * 4 + place], best[place].logit);
                }
                let expected: f32 = tile.iter().map(|logit| (logit - best[0].logit).exp()).sum();
                assert!((sum - expected).abs() <= 1e-4 * expected, "row {row} of {n} x {k}: {sum}, not {expected}");
            }
            let bits = [
                tokens[..rows * tiles * 4].to_vec(),
                logits[..rows * tiles * 4].iter().map(|value| value.to_bits()).collect(),
                sums[..rows * tiles].iter().map(|value| value.to_bits()).collect::<Vec<_>>(),
            ];
            match &whole {
                None => whole = Some(bits),
                Some(whole) => {
                    for (bits, whole) in bits.iter().zip(whole) {
                        assert!(*bits == whole[..bits.len()], "{rows} rows are not as those of {ROWS}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// Each row's experts, as a router would list them.
struct Routed {
    tiles: Buffer<[u32; 4]>,
    tile_count: Buffer<u32>,
    slot_rows: Buffer<u32>,
    slot_parts: Buffer<u32>,
    tiles_max: usize,
}

impl Routed {
    /// What the experts' kernels read of it.
    fn choices(&self) -> Choices {
        Choices {
            ids: Pointer::null(),
            weights: Pointer::null(),
            masks: Pointer::null(),
            slot_rows: self.slot_rows.pointer(),
            slot_parts: self.slot_parts.pointer(),
            tiles: self.tiles.pointer(),
            tile_count: self.tile_count.pointer(),
        }
    }
}

fn routed(device: &Device, ids: &[u32], k: usize, tile_rows: usize) -> Result<Routed, CudaError> {
    let mut order: Vec<usize> = (0..ids.len()).collect();
    order.sort_by_key(|&slot| (ids[slot], slot / k));
    let rows: Vec<u32> = order.iter().map(|&slot| (slot / k) as u32).collect();
    let parts: Vec<u32> = order.iter().map(|&slot| (slot / k * (k + 1) + slot % k) as u32).collect();
    let (mut tiles, mut first) = (Vec::new(), 0);
    for of_expert in order.chunk_by(|&a, &b| ids[a] == ids[b]) {
        for tile in of_expert.chunks(tile_rows) {
            tiles.push([ids[tile[0]], first, tile.len() as u32, 0]);
            first += tile.len() as u32;
        }
    }
    let count = tiles.len();
    // Blocks of tiles that are not there leave at once.
    tiles.extend([[u32::MAX; 4]; 3]);
    Ok(Routed {
        tiles_max: tiles.len(),
        tiles: device.uploaded(&tiles)?,
        tile_count: device.uploaded(&[count as u32])?,
        slot_rows: device.uploaded(&rows)?,
        slot_parts: device.uploaded(&parts)?,
    })
}

#[test]
fn experts_are_the_oracles_in_every_format_and_the_same_for_few_slots_and_many() -> Result<(), CudaError> {
    let Some(device) = device() else { return Ok(()) };
    const ROWS: usize = 200;
    let (hidden, inner, k) = (256, 256, 3);
    let formats = [(BF16, 0), (Encoding::Nvfp4, 16)].into_iter().chain(
        [Encoding::I8Mma, Encoding::I8Sym, Encoding::I4Mma, Encoding::I4Sym]
            .into_iter()
            .flat_map(|encoding| [32, 64, 128].map(|group| (encoding, group))),
    );
    for (encoding, group) in formats {
        let name = format!("{encoding}/{group}");
        let stored: Vec<_> = (0..4).map(|index| StoredExpert::random(index, hidden, inner, encoding, group)).collect();
        let shared = StoredExpert::random(9, hidden, inner, BF16, 0);
        let pairs: Vec<_> = stored.iter().map(|expert| vec![expert.gate.view(), expert.up.view()]).collect();
        let downs: Vec<_> = stored.iter().map(|expert| vec![expert.down.view()]).collect();
        let (pairs, downs) = (laid_out(&device, &pairs)?, laid_out(&device, &downs)?);
        let shared_pair = laid_out(&device, &[vec![shared.gate.view(), shared.up.view()]])?;
        let shared_down = laid_out(&device, &[vec![shared.down.view()]])?;
        let experts = Experts::new(&device, &[pairs.format])?;
        let x = rounded(&random("expert rows", ROWS * hidden));
        let on_device = device.uploaded(&in_bf16(&x))?;
        // The third expert is rare, so that there are tiles of every width.
        let ids: Vec<u32> = (0..ROWS * k).map(|slot| [0, 1, if slot / k < 6 { 2 } else { 3 }][slot % k]).collect();

        let mut whole: Option<Vec<bf16>> = None;
        for (rows, tile_rows) in
            [(20, 32), (20, experts.tile_rows(ROWS * k, 1)), (ROWS, 32), (ROWS, experts.tile_rows(ROWS * k, 1))]
        {
            let routed = routed(&device, &ids[..rows * k], k, tile_rows)?;
            let choices = routed.choices();
            let slots = Slots { choices: &choices, tiles_max: routed.tiles_max, tile_rows, rows, experts_per_token: k };
            let act = poisoned::<bf16>(&device, rows * (k + 1) * inner);
            let parts = poisoned::<bf16>(&device, rows * (k + 1) * hidden);
            // SAFETY: buffers of the stated sizes, alive until `to_vec` has waited.
            unsafe {
                let (pair, down) = (shared_pair.strips(), shared_down.strips());
                experts.gate_up(act.pointer(), on_device.pointer(), &pairs.strips(), Some(&pair), &slots)?;
                experts.down(parts.pointer(), act.pointer(), &downs.strips(), Some(&down), &slots, k + 1)?;
            }
            let parts = parts.to_vec()?;
            match &whole {
                None => {
                    for row in 0..rows {
                        for slot in 0..=k {
                            let expert = if slot < k { &stored[ids[row * k + slot] as usize] } else { &shared };
                            let expected = expert_in_bf16(expert, &x[row * hidden..][..hidden]);
                            let found = &parts[(row * (k + 1) + slot) * hidden..][..hidden];
                            // A rounding of `act` that goes the other way is 2^-8 of one of `inner` terms.
                            assert_near(&format!("{name}, row {row}, slot {slot}"), found, &expected, 0.01);
                        }
                    }
                    whole = Some(parts);
                }
                Some(whole) => {
                    let same = parts.iter().zip(whole).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{name}: {rows} rows in tiles of {tile_rows} are not as 20 in tiles of 32");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn experts_of_quantized_rows_are_the_oracles_to_the_bit() -> Result<(), CudaError> {
    let Some(device) = device() else { return Ok(()) };
    const ROWS: usize = 200;
    let (hidden, inner, k) = (256, 128, 3);
    let encodings = [Encoding::I8Mma, Encoding::I8Sym, Encoding::I4Mma, Encoding::I4Sym];
    for (encoding, group) in encodings.into_iter().flat_map(|encoding| [32, 64, 128].map(|group| (encoding, group))) {
        let name = format!("{encoding}/{group}");
        let stored: Vec<_> = (0..4).map(|index| StoredExpert::random(index, hidden, inner, encoding, group)).collect();
        let pairs: Vec<_> = stored.iter().map(|expert| vec![expert.gate.view(), expert.up.view()]).collect();
        let downs: Vec<_> = stored.iter().map(|expert| vec![expert.down.view()]).collect();
        let (pairs, downs) = (laid_out(&device, &pairs)?, laid_out(&device, &downs)?);
        let experts = Int8Experts::new(&device, &[pairs.format])?;
        let mut x = rounded(&random("expert rows", ROWS * hidden));
        // A group of zeros has a scale too.
        x[..group as usize].fill(0.0);
        let on_device = device.uploaded(&in_bf16(&x))?;
        let ids: Vec<u32> = (0..ROWS * k).map(|slot| [0, 1, if slot / k < 6 { 2 } else { 3 }][slot % k]).collect();
        let codes = poisoned::<u8>(&device, ROWS * hidden.max(k * inner));
        let scales = poisoned::<f32>(&device, ROWS * hidden.max(k * inner) / 32);
        let scratch = QuantizedRows { codes: codes.pointer(), scales: scales.pointer() };
        let product = |x: &[f32], matrix: &StoredMatrix| {
            let mut out = vec![0.0; matrix.view().rows()];
            oracle::linear_int8(&mut out, x, &matrix.codes(), &matrix.group_scales(), x.len(), group as usize);
            out
        };

        let routed = routed(&device, &ids, k, Int8Experts::TILE_ROWS)?;
        let choices = routed.choices();
        let tile_rows = Int8Experts::TILE_ROWS;
        let (tiles_max, rows, experts_per_token) = (routed.tiles_max, ROWS, k);
        let slots = Slots { choices: &choices, tiles_max, tile_rows, rows, experts_per_token };
        let act = poisoned::<bf16>(&device, ROWS * k * inner);
        let parts = poisoned::<bf16>(&device, ROWS * (k + 1) * hidden);
        // SAFETY: buffers of the stated sizes, alive until `to_vec` has waited.
        unsafe {
            experts.gate_up(act.pointer(), on_device.pointer(), &pairs.strips(), None, &slots, scratch)?;
            experts.down(parts.pointer(), act.pointer(), &downs.strips(), None, &slots, k + 1, scratch)?;
        }
        let (act, parts) = (act.to_vec()?, parts.to_vec()?);
        let (slot_rows, slot_parts) = (routed.slot_rows.to_vec()?, routed.slot_parts.to_vec()?);
        for (slot, (&row, &part)) in slot_rows.iter().zip(&slot_parts).enumerate() {
            // Some rows of every expert: the oracle is slow.
            if row >= 12 && row % 31 != 0 {
                continue;
            }
            let (row, part) = (row as usize, part as usize);
            let expert = &stored[ids[row * k + part % (k + 1)] as usize];
            let x = &x[row * hidden..][..hidden];
            let (gate, up) = (product(x, &expert.gate), product(x, &expert.up));
            let mut expected = vec![0.0; inner];
            oracle::swiglu(&mut expected, &gate, &up);
            let act = &act[slot * inner..][..inner];
            // Gate and up are the oracle's bits; what follows has three roundings.
            assert_near(&format!("{name}, row {row}, act"), act, &expected, 0.01);
            let expected = in_bf16(&product(&widened(act), &expert.down));
            assert_eq!(&parts[part * hidden..][..hidden], expected, "{name}, row {row}, part {part}");
        }
    }
    Ok(())
}

/// The kernels of four-bit rows run on every GPU: what one rounds and the other quantizes are the oracle's bits, and the codes
/// and the strips lie as the host's twins put them.
#[test]
fn rows_of_four_bits_are_the_oracles_to_the_bit_and_weights_lie_as_on_the_host() -> Result<(), CudaError> {
    let Some(device) = device() else { return Ok(()) };
    for (rows, cols) in [(1, 128), (13, 512), (200, 2048)] {
        let mut x = rounded(&random(&format!("{rows} rows of four bits"), rows * cols));
        x[..16].iter_mut().for_each(|value| *value = bf16::from_f32(*value * 3e5).to_f32());
        x[cols - 5] = -0.0;
        if rows > 9 {
            x[3 * cols..4 * cols].fill(0.0);
            x[5 * cols..6 * cols].iter_mut().for_each(|value| *value = bf16::from_f32(*value * 1e-37).to_f32());
            x[7 * cols + 17] = f32::NAN;
            x[9 * cols + 1] = f32::NEG_INFINITY;
        }
        let on_device = device.uploaded(&in_bf16(&x))?;
        let out = poisoned::<bf16>(&device, rows * cols);
        let records = poisoned::<u8>(&device, rows * cols / 128 * 80);
        let scales = poisoned::<f32>(&device, rows);
        let shape = LaunchShape::new([rows.div_ceil(8) as u32, 1, 1], 256);
        let [rows_argument, cols_argument] = [rows as i32, cols as i32];
        let (of_rows, of_cols) = (argument(&rows_argument), argument(&cols_argument));
        // SAFETY: the parameters of the sources; buffers of the stated sizes, alive until `to_vec` has waited.
        unsafe {
            let (x, out) = (on_device.pointer(), out.pointer());
            let round = device.kernel("fp4_rows", "round_rows_fp4")?;
            round.launch(shape, &[argument(&out), argument(&x), of_rows, of_cols])?;
            let (records, scales) = (records.pointer(), scales.pointer());
            let quantize = device.kernel("fp4_rows", "quantize_rows_fp4")?;
            quantize.launch(shape, &[argument(&records), argument(&scales), argument(&x), of_rows, of_cols])?;
        }
        let mut expected = x.clone();
        oracle::round_to_fp4(&mut expected, cols);
        for (index, (found, expected)) in widened(&out.to_vec()?).iter().zip(&expected).enumerate() {
            let same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
            assert!(same, "value {index} of {rows} x {cols} is {found:e}, not {expected:e}");
        }
        let bits: Vec<u16> = in_bf16(&x).iter().map(|value| value.to_bits()).collect();
        let on_host = Rows::new(&bits, cols);
        assert_eq!(scales.to_vec()?, on_host.scales, "{rows} x {cols}");
        // The last eight bytes of a record are nobody's.
        let used = |records: &[u8]| -> Vec<u8> {
            records.chunks_exact(80).flat_map(|record| &record[..72]).copied().collect()
        };
        assert!(used(&records.to_vec()?) == used(&on_host.records), "{rows} x {cols}: records differ");
    }
    for (n, k) in [(8, 128), (40, 256), (320, 512)] {
        let [gate, up] = ["gate", "up"].map(|name| StoredMatrix::random(name, n, k, Encoding::Nvfp4, 16));
        let alone = laid_out_in(&device, &[vec![gate.view()]], Format::Nvfp4Codes)?;
        assert!(alone.data.to_vec()? == CodeStrips::alone(&gate.view()).bytes(), "{n} x {k}");
        let pair = laid_out_in(&device, &[vec![gate.view(), up.view()]], Format::Nvfp4Codes)?;
        assert!(pair.data.to_vec()? == CodeStrips::pair(&gate.view(), &up.view()).bytes(), "{n} x {k}, a pair");
    }
    Ok(())
}

#[test]
fn experts_of_four_bit_rows_are_the_oracles_and_the_same_for_few_slots_and_many() -> Result<(), CudaError> {
    let Some(device) = device() else { return Ok(()) };
    const ROWS: usize = 200;
    let (hidden, inner, k) = (256, 128, 3);
    let stored: Vec<_> = (0..4).map(|index| StoredExpert::random(index, hidden, inner, Encoding::Nvfp4, 16)).collect();
    let shared = StoredExpert::random(9, hidden, inner, BF16, 0);
    let pairs: Vec<_> = stored.iter().map(|expert| vec![expert.gate.view(), expert.up.view()]).collect();
    let downs: Vec<_> = stored.iter().map(|expert| vec![expert.down.view()]).collect();
    let is_native = Fp4Experts::is_native_on(&device)?;
    let format = if is_native { Format::Nvfp4Codes } else { Format::Nvfp4 };
    let (pairs, downs) = (laid_out_in(&device, &pairs, format)?, laid_out_in(&device, &downs, format)?);
    let shared_pair = laid_out(&device, &[vec![shared.gate.view(), shared.up.view()]])?;
    let shared_down = laid_out(&device, &[vec![shared.down.view()]])?;
    let experts = Fp4Experts::new(&device, &[format])?;
    assert_eq!(experts.is_native(), is_native);
    eprintln!("products of {}", if is_native { "four-bit numbers" } else { "what they stand for, in BF16" });
    let x = rounded(&random("expert rows", ROWS * hidden));
    let on_device = device.uploaded(&in_bf16(&x))?;
    let ids: Vec<u32> = (0..ROWS * k).map(|slot| [0, 1, if slot / k < 6 { 2 } else { 3 }][slot % k]).collect();
    let codes = poisoned::<u8>(&device, 2 * ROWS * hidden.max(k * inner));
    let scales = poisoned::<f32>(&device, ROWS * k);
    let scratch = QuantizedRows { codes: codes.pointer(), scales: scales.pointer() };
    let product = |x: &[f32], matrix: &StoredMatrix| {
        let (mut out, mut x) = (vec![0.0; matrix.view().rows()], x.to_vec());
        let cols = x.len();
        oracle::round_to_fp4(&mut x, cols);
        oracle::linear(&mut out, &x, &matrix.values(), cols);
        rounded(&out)
    };

    let mut whole: Option<Vec<bf16>> = None;
    for rows in [20, ROWS] {
        let tile_rows = experts.tile_rows(rows * k, 1);
        let routed = routed(&device, &ids[..rows * k], k, tile_rows)?;
        let choices = routed.choices();
        let slots = Slots { choices: &choices, tiles_max: routed.tiles_max, tile_rows, rows, experts_per_token: k };
        let act = poisoned::<bf16>(&device, rows * (k + 1) * inner);
        let parts = poisoned::<bf16>(&device, rows * (k + 1) * hidden);
        // SAFETY: buffers of the stated sizes, alive until `to_vec` has waited.
        unsafe {
            let (x, pair, down) = (on_device.pointer(), shared_pair.strips(), shared_down.strips());
            experts.gate_up(act.pointer(), x, &pairs.strips(), Some(&pair), &slots, scratch)?;
            experts.down(parts.pointer(), act.pointer(), &downs.strips(), Some(&down), &slots, k + 1, scratch)?;
        }
        let (act, parts) = (act.to_vec()?, parts.to_vec()?);
        let (slot_rows, slot_parts) = (routed.slot_rows.to_vec()?, routed.slot_parts.to_vec()?);
        for (slot, (&row, &part)) in slot_rows.iter().zip(&slot_parts).enumerate() {
            // Some rows of every expert: the oracle is slow.
            if row >= 12 && row % 31 != 0 {
                continue;
            }
            let (row, part) = (row as usize, part as usize);
            let expert = &stored[ids[row * k + part % (k + 1)] as usize];
            let x = &x[row * hidden..][..hidden];
            let (gate, up) = (product(x, &expert.gate), product(x, &expert.up));
            let mut expected = vec![0.0; inner];
            oracle::swiglu(&mut expected, &gate, &up);
            let act = &act[slot * inner..][..inner];
            assert_near(&format!("{rows} rows, row {row}, act"), act, &expected, 0.01);
            // Of what the device made of the row, so that no code can fall otherwise.
            let expected = product(&widened(act), &expert.down);
            let found = &parts[part * hidden..][..hidden];
            assert_near(&format!("{rows} rows, row {row}, part {part}"), found, &expected, 1e-4);
        }
        for row in 0..rows.min(3) {
            let expected = expert_in_bf16(&shared, &x[row * hidden..][..hidden]);
            let found = &parts[(row * (k + 1) + k) * hidden..][..hidden];
            assert_near(&format!("row {row}, the shared expert"), found, &expected, 0.01);
        }
        match &whole {
            None => whole = Some(parts),
            Some(whole) => {
                let same = parts.iter().zip(whole).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{rows} rows are not as 20");
            }
        }
    }
    Ok(())
}

/// `down(silu(gate x) * (up x))` with the roundings of the model description, section 4.
fn expert_in_bf16(expert: &StoredExpert, x: &[f32]) -> Vec<f32> {
    let product = |matrix: &StoredMatrix, x: &[f32]| {
        let mut out = vec![0.0; matrix.view().rows()];
        oracle::linear(&mut out, x, &matrix.values(), x.len());
        rounded(&out)
    };
    let (gate, up) = (product(&expert.gate, x), product(&expert.up, x));
    let mut silu = vec![0.0; gate.len()];
    oracle::swiglu(&mut silu, &gate, &vec![1.0; gate.len()]);
    let act: Vec<f32> = rounded(&silu).iter().zip(&up).map(|(silu, up)| silu * up).collect();
    product(&expert.down, &rounded(&act))
}
