//! The kernels of the step against the oracle.
//!
//! Inputs are rounded to BF16 first, and the oracle gets the rounded ones: what remains is the kernel's own error.

use half::bf16;
use minnow_common::{BLOCK, Routing};
use minnow_kernels::conformance::{AttentionCase, CandidatesCase, RmsNormCase, Tolerance, random};
use minnow_kernels::cuda::{
    Attention, BlockTables, Buffer, Choices, CudaError, Device, HeadTransform, Norm, NormShape, PagesOfLayer, Parts,
    Plain, Pointer, Router, RowBest, Sampler, TileBest, tiles_max,
};
use minnow_kernels::ops::{CANDIDATES, Heads, Page, RouterRules};
use minnow_kernels::oracle;

use crate::device;

/// Half the distance from one to the next BF16: the relative error of one rounding.
const ROUNDING: f32 = 1.0 / 256.0;

pub(super) fn in_bf16(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&value| bf16::from_f32(value)).collect()
}

pub(super) fn widened(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}

/// What BF16 leaves of the values.
pub(super) fn rounded(values: &[f32]) -> Vec<f32> {
    widened(&in_bf16(values))
}

/// A buffer in which every byte is set, so that what a kernel leaves out is seen: BF16 and f32 are NaN, indices huge.
pub(super) fn poisoned<T: Plain>(device: &Device, len: usize) -> Buffer<T> {
    let mut buffer = device.allocate(len).expect("device memory");
    buffer.fill_bytes(0xff).expect("a filled buffer");
    buffer
}

fn assert_close(name: &str, found: &[f32], expected: &[f32], tolerance: Tolerance) {
    if let Err(mismatch) = tolerance.check(found, expected) {
        panic!("{name}: {mismatch}");
    }
}

#[test]
fn norms_are_the_oracles() -> Result<(), CudaError> {
    let Some(device) = device() else { return Ok(()) };
    let norm = Norm::new(&device)?;
    for case in RmsNormCase::all().into_iter().filter(|case| Norm::check(case.weight.len()).is_ok()) {
        let dim = case.weight.len();
        let shape = NormShape { rows: case.x.len() / dim, dim, eps: case.eps };
        let weight = rounded(&case.weight);
        let y = rounded(&random("residual", case.x.len()));
        for with_y in [false, true] {
            let x = rounded(&case.x);
            let sum: Vec<f32> = match with_y {
                true => rounded(&x.iter().zip(&y).map(|(x, y)| x + y).collect::<Vec<_>>()),
                false => x.clone(),
            };
            let mut expected = vec![0.0; sum.len()];
            oracle::rms_norm(&mut expected, &sum, &weight, case.eps);

            let on_device = device.uploaded(&in_bf16(&x))?;
            let other = device.uploaded(&in_bf16(&y))?;
            let weights = device.uploaded(&in_bf16(&weight))?;
            let out = poisoned(&device, x.len());
            let added = if with_y { other.pointer() } else { Pointer::null() };
            // SAFETY: buffers of the stated sizes, alive until `to_vec` has waited.
            unsafe { norm.residual_norm(on_device.pointer(), added, weights.pointer(), out.pointer(), shape) }?;
            // The normalised value and its product with the weight are rounded; f32 before that.
            let tolerance = Tolerance { relative: 2.1 * ROUNDING, absolute: 0.0 };
            assert_close(&case.name, &widened(&out.to_vec()?), &expected, tolerance);
            let exact = Tolerance { relative: 0.0, absolute: 0.0 };
            assert_close(&case.name, &widened(&on_device.to_vec()?), &sum, exact);
        }
    }
    Ok(())
}

#[test]
fn experts_are_summed_in_order_and_normalised() -> Result<(), CudaError> {
    let Some(device) = device() else { return Ok(()) };
    let norm = Norm::new(&device)?;
    for (rows, slots, stride, dim) in [(3, 4, 5, 256), (33, 8, 9, 2048), (2, 8, 8, 72)] {
        let name = format!("{rows} rows of {dim}, {slots} of {stride} parts");
        let x = rounded(&random(&format!("{name} x"), rows * dim));
        let parts = rounded(&random(&format!("{name} parts"), rows * stride * dim));
        let shares = random(&format!("{name} shares"), rows * slots);
        let weight = rounded(&random("combine weight", dim));
        let round = |value: f32| bf16::from_f32(value).to_f32();
        let mut sum = x.clone();
        for (row, x) in sum.chunks_exact_mut(dim).enumerate() {
            let part = |slot: usize| &parts[(row * stride + slot) * dim..][..dim];
            for (d, x) in x.iter_mut().enumerate() {
                let mut y = 0.0f32;
                for slot in 0..slots {
                    y = shares[row * slots + slot].mul_add(part(slot)[d], y);
                }
                y = round(y);
                if stride > slots {
                    y = round(y + part(slots)[d]);
                }
                *x = round(*x + y);
            }
        }
        let mut expected = vec![0.0; sum.len()];
        oracle::rms_norm(&mut expected, &sum, &weight, 1e-6);

        let on_device = device.uploaded(&in_bf16(&x))?;
        let (parts, shares) = (device.uploaded(&in_bf16(&parts))?, device.uploaded(&shares)?);
        let weights = device.uploaded(&in_bf16(&weight))?;
        let out = poisoned(&device, x.len());
        let of_rows = Parts { parts: parts.pointer(), weights: shares.pointer(), slots, stride };
        let shape = NormShape { rows, dim, eps: 1e-6 };
        // SAFETY: buffers of the stated sizes, alive until `to_vec` has waited.
        unsafe { norm.combine_norm(on_device.pointer(), &of_rows, weights.pointer(), out.pointer(), shape) }?;
        // The same operations in the same order: the sums are the same bits.
        assert_eq!(widened(&on_device.to_vec()?), sum, "{name}");
        let tolerance = Tolerance { relative: 2.1 * ROUNDING, absolute: 0.0 };
        assert_close(&name, &widened(&out.to_vec()?), &expected, tolerance);
    }
    Ok(())
}

/// Pages of a case in device memory, in reverse, so that no kernel can take a page's place for its number.
struct DevicePages {
    pool: Buffer<bf16>,
    stride: usize,
    count: usize,
}

impl DevicePages {
    fn new(device: &Device, case: &AttentionCase) -> Result<Self, CudaError> {
        let values = case.pages.iter().rev().flat_map(|(keys, values)| [keys, values]).flatten();
        let values: Vec<bf16> = values.map(|&value| bf16::from_f32(value)).collect();
        let stride = values.len() / case.pages.len();
        Ok(Self { pool: device.uploaded(&values)?, stride, count: case.pages.len() })
    }

    fn of_layer(&self) -> PagesOfLayer {
        PagesOfLayer { first: self.pool.pointer(), page_stride: self.stride as u64 }
    }

    fn table(&self) -> Vec<u32> {
        (0..self.count as u32).rev().collect()
    }
}

/// Attention of a case on the device, all its blocks `copies` times over in one batch.
fn attend(device: &Device, case: &AttentionCase, copies: usize) -> Result<Vec<f32>, CudaError> {
    let attention = Attention::new(device)?;
    let blocks = case.q.len() / (case.heads.query * case.heads.dim * BLOCK);
    let pages = DevicePages::new(device, case)?;
    let seen = (0..blocks).map(|block| (pages.count - blocks + 1 + block) as u32);
    let entries: Vec<u32> = seen.flat_map(|seen| [0, seen]).collect();
    let (entries, table) = (device.uploaded(&entries.repeat(copies))?, device.uploaded(&pages.table())?);
    let q = device.uploaded(&in_bf16(&case.q).repeat(copies))?;
    let out = poisoned::<bf16>(device, q.len());
    let (sums, weights) = attention.scratch_len(blocks * copies, case.heads);
    let (sums, weights) = (poisoned::<f32>(device, sums), poisoned::<f32>(device, weights));
    let tables = BlockTables { blocks: entries.pointer(), page_tables: table.pointer() };
    let scratch = (sums.pointer(), weights.pointer());
    let (out_at, q_at) = (out.pointer(), q.pointer());
    // SAFETY: buffers of the stated sizes, alive until `to_vec` has waited.
    unsafe { attention.attend(out_at, q_at, pages.of_layer(), tables, scratch, blocks * copies, case.heads) }?;
    Ok(widened(&out.to_vec()?))
}

#[test]
fn attention_is_the_oracles() -> Result<(), CudaError> {
    let Some(device) = device() else { return Ok(()) };
    for mut case in AttentionCase::all().into_iter().filter(|case| Attention::check(case.heads, 64).is_ok()) {
        case.q = rounded(&case.q);
        case.pages.iter_mut().for_each(|(keys, values)| (*keys, *values) = (rounded(keys), rounded(values)));
        let pages: Vec<Page<'_>> = case.pages();
        let mut expected = vec![0.0; case.q.len()];
        oracle::attention(&mut expected, &case.q, &pages, case.heads);
        // Each weight of the mean of values up to one is rounded, with either sign, and so is the result.
        let tolerance = Tolerance { relative: ROUNDING, absolute: 0.75 * ROUNDING };
        let found = attend(&device, &case, 1)?;
        assert_close(&case.name, &found, &expected, tolerance);

        // Forty copies go another way through the GPU.
        for copy in attend(&device, &case, 40)?.chunks_exact(found.len()) {
            let same = copy.iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{}: company changes bits", case.name);
        }
    }
    Ok(())
}

#[test]
fn heads_are_normalised_and_rotated_into_pages() -> Result<(), CudaError> {
    let Some(device) = device() else { return Ok(()) };
    let attention = Attention::new(&device)?;
    let heads = Heads { query: 8, kv: 2, dim: 128 };
    let (blocks, width, eps) = (3, (heads.query + 2 * heads.kv) * heads.dim, 1e-6);
    // Block b sees 3 b + 1 pages, so its positions begin at 96 b; its own page is number 2 - b.
    let entries: Vec<u32> = (0..blocks as u32).flat_map(|block| [10 * block, 3 * block + 1]).collect();
    let mut table = vec![u32::MAX; 40];
    (0..blocks).for_each(|block| table[10 * block + 3 * block] = (2 - block) as u32);
    let positions = 3 * blocks * BLOCK;
    let (mut cos, mut sin) = (vec![0.0; positions * 32], vec![0.0; positions * 32]);
    oracle::rope_tables(&mut cos, &mut sin, &oracle::inv_freq(1e4, 64), 0);
    let (cos, sin) = (rounded(&cos), rounded(&sin));
    let turns: Vec<bf16> = cos.iter().zip(&sin).flat_map(|(&c, &s)| [bf16::from_f32(c), bf16::from_f32(s)]).collect();

    let qkv = rounded(&random("qkv", blocks * BLOCK * width));
    let norms = [rounded(&random("query norm", 128)), rounded(&random("key norm", 128))];
    for with_norm in [false, true] {
        let on_device = device.uploaded(&in_bf16(&qkv))?;
        let weights = [device.uploaded(&in_bf16(&norms[0]))?, device.uploaded(&in_bf16(&norms[1]))?];
        let (turns, entries, table) = (device.uploaded(&turns)?, device.uploaded(&entries)?, device.uploaded(&table)?);
        let page = 2 * heads.kv * BLOCK * heads.dim;
        let (q, pool) = (
            poisoned::<bf16>(&device, blocks * BLOCK * heads.query * heads.dim),
            poisoned::<bf16>(&device, blocks * page),
        );
        let norm_at = |index: usize| if with_norm { weights[index].pointer() } else { Pointer::null() };
        let transform = HeadTransform { query_norm: norm_at(0), key_norm: norm_at(1), rotations: turns.pointer(), eps };
        let pages = PagesOfLayer { first: pool.pointer(), page_stride: page as u64 };
        let tables = BlockTables { blocks: entries.pointer(), page_tables: table.pointer() };
        let (q_at, qkv_at) = (q.pointer(), on_device.pointer());
        // SAFETY: buffers of the stated sizes, alive until `to_vec` has waited.
        unsafe { attention.norm_and_rope(q_at, pages, qkv_at, &transform, tables, blocks, heads) }?;
        let (q, pool) = (widened(&q.to_vec()?), widened(&pool.to_vec()?));

        for row in 0..blocks * BLOCK {
            let (block, position) = (row / BLOCK, 96 * (row / BLOCK) + row % BLOCK);
            for head in 0..heads.query + 2 * heads.kv {
                let mut expected = qkv[row * width + head * 128..][..128].to_vec();
                let is_value = head >= heads.query + heads.kv;
                if !is_value {
                    if with_norm {
                        let x = expected.clone();
                        let weight = &norms[usize::from(head >= heads.query)];
                        oracle::rms_norm(&mut expected, &x, weight, eps);
                    }
                    oracle::rotate(&mut expected, &cos[position * 32..][..32], &sin[position * 32..][..32]);
                }
                let found = match head.checked_sub(heads.query) {
                    None => &q[(row * heads.query + head) * 128..][..128],
                    Some(head) => &pool[(2 - block) * page + (head * BLOCK + row % BLOCK) * 128..][..128],
                };
                // Five roundings on the way, few of them of the largest value.
                let largest = expected.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
                let absolute = if is_value { 0.0 } else { 4.0 * ROUNDING * largest };
                let name = format!("row {row}, head {head}, norm {with_norm}");
                assert_close(&name, found, &expected, Tolerance { relative: 0.0, absolute });
            }
        }
    }
    Ok(())
}

#[test]
fn embeddings_are_copied() -> Result<(), CudaError> {
    let Some(device) = device() else { return Ok(()) };
    let attention = Attention::new(&device)?;
    let dim = 264;
    let table = in_bf16(&random("embedding", 9 * dim));
    let tokens = [8u32, 0, 3, 3];
    let (on_device, ids) = (device.uploaded(&table)?, device.uploaded(&tokens)?);
    let x = poisoned::<bf16>(&device, tokens.len() * dim);
    // SAFETY: buffers of the stated sizes, alive until `to_vec` has waited.
    unsafe { attention.embed(x.pointer(), ids.pointer(), on_device.pointer(), tokens.len(), dim) }?;
    let expected: Vec<bf16> = tokens.iter().flat_map(|&id| &table[id as usize * dim..][..dim]).copied().collect();
    assert_eq!(x.to_vec()?, expected);
    Ok(())
}

#[test]
fn experts_are_chosen_as_by_the_oracle_and_listed_in_order() -> Result<(), CudaError> {
    let Some(device) = device() else { return Ok(()) };
    let router = Router::new(&device)?;
    // blocks, experts, k, routing, tile_rows
    let cases = [
        (1, 256, 8, Routing::Block { capacity: 48 }, 32),
        (5, 256, 8, Routing::Block { capacity: 48 }, 16),
        (3, 32, 4, Routing::Block { capacity: 12 }, 8),
        (2, 12, 1, Routing::Block { capacity: 1 }, 128),
        (40, 256, 8, Routing::Block { capacity: 256 }, 128),
        (2, 256, 8, Routing::Groups { groups: 8, kept: 4 }, 32),
        (3, 32, 4, Routing::Groups { groups: 1, kept: 1 }, 64),
        (1, 24, 2, Routing::Groups { groups: 24, kept: 3 }, 32),
    ];
    for (blocks, experts, k, routing, tile_rows) in cases {
        let name = format!("{blocks} blocks, {k} of {experts}, {routing:?}");
        let rows = blocks * BLOCK;
        let mut logits: Vec<f32> = random(&name, rows * experts).iter().map(|value| 6.0 * value).collect();
        // Ties in every selection, and a row and an expert of NaN.
        logits[..8 * experts].iter_mut().for_each(|logit| *logit = (*logit * 2.0).round());
        if blocks > 1 {
            logits[40 * experts..41 * experts].fill(f32::NAN);
        }
        let mut bias: Vec<f32> = random("bias", experts).iter().map(|value| (value * 8.0).round() / 64.0).collect();
        if experts > 200 {
            bias[77] = f32::NAN;
        }
        let rules = RouterRules { routing, experts_per_token: k, scale: 2.5 };
        Router::check(experts, &rules)?;
        let mut scores = logits.clone();
        oracle::sigmoid(&mut scores);
        let (mut ids, mut weights) = (vec![0; rows * k], vec![0.0; rows * k]);
        oracle::route(&mut ids, &mut weights, &scores, &bias, &rules);

        let (slots, stride) = (rows * k, k + 1);
        let tiles = tiles_max(&rules, blocks, experts, tile_rows);
        let (logits, bias) = (device.uploaded(&logits)?, device.uploaded(&bias)?);
        let mut first_bits: Option<Vec<u32>> = None;
        for at_once in [false, true] {
            let name = format!("{name}, at once: {at_once}");
            let (found_ids, found_weights) = (poisoned::<u32>(&device, slots), poisoned::<f32>(&device, slots));
            let masks = poisoned::<u32>(&device, blocks * experts);
            let (slot_rows, slot_parts) = (poisoned::<u32>(&device, slots), poisoned::<u32>(&device, slots));
            let (found_tiles, tile_count) = (poisoned::<[u32; 4]>(&device, tiles), poisoned::<u32>(&device, 1));
            let choices = Choices {
                ids: found_ids.pointer(),
                weights: found_weights.pointer(),
                masks: masks.pointer(),
                slot_rows: slot_rows.pointer(),
                slot_parts: slot_parts.pointer(),
                tiles: found_tiles.pointer(),
                tile_count: tile_count.pointer(),
            };
            // SAFETY: buffers of the stated sizes, alive until `to_vec` has waited.
            unsafe {
                let (logits, bias) = (logits.pointer(), bias.pointer());
                if at_once {
                    router.route(&choices, logits, bias, &rules, rows, experts, stride, tile_rows)?;
                } else {
                    router.choose(&choices, logits, bias, &rules, rows, experts)?;
                    router.order(&choices, &rules, rows, experts, stride, tile_rows)?;
                }
            }
            assert_eq!(found_ids.to_vec()?, ids, "{name}");
            // Two exponentials of different libraries, a sum and a division.
            let tolerance = Tolerance { relative: 16.0 * f32::EPSILON, absolute: 0.0 };
            let found_weights = found_weights.to_vec()?;
            assert_close(&name, &found_weights, &weights, tolerance);
            let bits: Vec<u32> = found_weights.iter().map(|weight| weight.to_bits()).collect();
            assert_eq!(*first_bits.get_or_insert_with(|| bits.clone()), bits, "{name}");

            // Slots by expert, then by row.
            let mut order: Vec<usize> = (0..slots).collect();
            order.sort_by_key(|&slot| (ids[slot], slot / k));
            let expected_rows: Vec<u32> = order.iter().map(|&slot| (slot / k) as u32).collect();
            let expected_parts: Vec<u32> = order.iter().map(|&slot| (slot / k * stride + slot % k) as u32).collect();
            assert_eq!(slot_rows.to_vec()?, expected_rows, "{name}");
            assert_eq!(slot_parts.to_vec()?, expected_parts, "{name}");
            let mut expected_tiles = Vec::new();
            let mut start = 0;
            for of_expert in order.chunk_by(|&a, &b| ids[a] == ids[b]) {
                for tile in of_expert.chunks(tile_rows) {
                    expected_tiles.push([ids[tile[0]], start, tile.len() as u32, 0]);
                    start += tile.len() as u32;
                }
            }
            let count = tile_count.to_vec()?[0] as usize;
            assert_eq!(found_tiles.to_vec()?[..count], expected_tiles, "{name}");
        }
    }
    Ok(())
}

#[test]
fn best_tokens_are_the_oracles() -> Result<(), CudaError> {
    /// What the head keeps of a tile of logits.
    fn kept(tile: &[f32], first: usize) -> ([u32; 4], [f32; 4], f32) {
        let best = oracle::candidates(tile);
        let rank = |logit: f32| if logit.is_nan() { f32::NEG_INFINITY } else { logit };
        let max = rank(best[0].logit);
        let present = |place: usize| place < tile.len();
        let token = |place: usize| if present(place) { best[place].token + first as u32 } else { u32::MAX };
        let logit = |place: usize| if present(place) { rank(best[place].logit) } else { f32::NEG_INFINITY };
        let sum = tile.iter().filter(|logit| **logit != f32::NEG_INFINITY).map(|logit| (logit - max).exp()).sum();
        (std::array::from_fn(token), std::array::from_fn(logit), sum)
    }

    const TILE: usize = 256;
    let Some(device) = device() else { return Ok(()) };
    let sampler = Sampler::new(&device)?;
    for case in CandidatesCase::all().into_iter().filter(|case| case.row.len() >= CANDIDATES) {
        let tiles: Vec<_> = case.row.chunks(TILE).enumerate().map(|(index, tile)| kept(tile, index * TILE)).collect();
        let tokens: Vec<u32> = tiles.iter().flat_map(|tile| tile.0).collect();
        let logits: Vec<f32> = tiles.iter().flat_map(|tile| tile.1).collect();
        let sums: Vec<f32> = tiles.iter().map(|tile| tile.2).collect();
        // Two rows of the same.
        let (tokens, logits) = (device.uploaded(&tokens.repeat(2))?, device.uploaded(&logits.repeat(2))?);
        let sums = device.uploaded(&sums.repeat(2))?;
        let (out_tokens, out_logits, out_confidences) =
            (poisoned::<u32>(&device, 8), poisoned::<f32>(&device, 8), poisoned::<f32>(&device, 8));
        let of_tiles = TileBest { tokens: tokens.pointer(), logits: logits.pointer(), sums: sums.pointer() };
        let out = RowBest {
            tokens: out_tokens.pointer(),
            logits: out_logits.pointer(),
            confidences: out_confidences.pointer(),
        };
        // SAFETY: buffers of the stated sizes, alive until `to_vec` has waited.
        unsafe { sampler.best_tokens(&out, &of_tiles, 2, tiles.len()) }?;
        let expected = case.expected.map(|candidate| candidate.token);
        assert_eq!(out_tokens.to_vec()?, [expected, expected].concat(), "{}", case.name);
        let expected = case.expected.map(|candidate| candidate.confidence);
        assert_close(&case.name, &out_confidences.to_vec()?, &[expected, expected].concat(), case.tolerance());
        let is_nan = case.row.iter().all(|logit| logit.is_nan());
        let expected = case.expected.map(|candidate| if is_nan { f32::NEG_INFINITY } else { candidate.logit });
        assert_eq!(out_logits.to_vec()?, [expected, expected].concat(), "{}", case.name);
    }
    Ok(())
}
