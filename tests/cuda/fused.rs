//! A kernel that does at once what others do one after the other gives the same bits; on a GPU that has it, else skipped.

use half::bf16;
use minnow_common::BLOCK;
use minnow_kernels::conformance::random;
use minnow_kernels::cuda::{Attention, BlockTables, Buffer, CudaError, HeadTransform, PagesOfLayer};
use minnow_kernels::ops::Heads;

use super::kernels::{in_bf16, poisoned};
use crate::device;

#[test]
fn attention_of_one_block_at_once_is_that_of_three_kernels() -> Result<(), CudaError> {
    let Some(device) = device() else { return Ok(()) };
    let attention = Attention::new(&device)?;
    if !attention.takes_one(1) {
        eprintln!("skipped: this GPU has no kernel for one block");
        return Ok(());
    }
    for heads in [Heads { query: 16, kv: 4, dim: 128 }, Heads { query: 6, kv: 2, dim: 128 }] {
        let (width, eps) = ((heads.query + 2 * heads.kv) * heads.dim, 1e-6);
        let page = 2 * heads.kv * BLOCK * heads.dim;
        // One tile and several, one chunk to as many as there are, and chunks of several tiles.
        for seen in [1, 4, 5, 33, 64, 65, 129, 300, 520] {
            let name = format!("{} heads, {seen} pages", heads.query);
            let qkv = device.uploaded(&in_bf16(&random(&name, BLOCK * width)))?;
            let norms = [device.uploaded(&in_bf16(&random("q", 128)))?, device.uploaded(&in_bf16(&random("k", 128)))?];
            let turns = device.uploaded(&in_bf16(&random("turns", seen * BLOCK * 64)))?;
            let earlier = in_bf16(&random("pages", (seen + 1) * page));
            let table: Vec<u32> = (0..seen as u32).rev().collect();
            let (entries, table) = (device.uploaded(&[0, seen as u32])?, device.uploaded(&table)?);
            let transform = HeadTransform {
                query_norm: norms[0].pointer(),
                key_norm: norms[1].pointer(),
                rotations: turns.pointer(),
                eps,
            };
            let tables = BlockTables { blocks: entries.pointer(), page_tables: table.pointer() };
            let rows = BLOCK * heads.query * heads.dim;
            let q = poisoned::<bf16>(&device, rows);
            let (sums, weights) = attention.scratch_len(1, heads);
            let scratch = (poisoned::<f32>(&device, sums), poisoned::<f32>(&device, weights));
            let outs = [poisoned::<bf16>(&device, rows), poisoned::<bf16>(&device, rows)];
            let pools = [device.uploaded(&earlier)?, device.uploaded(&earlier)?];
            let pages = |pool: &Buffer<bf16>| PagesOfLayer { first: pool.pointer(), page_stride: page as u64 };
            // SAFETY: buffers of the stated sizes, alive until `to_vec` has waited.
            unsafe {
                let scratch = (scratch.0.pointer(), scratch.1.pointer());
                attention.norm_and_rope(q.pointer(), pages(&pools[0]), qkv.pointer(), &transform, tables, 1, heads)?;
                attention.attend(outs[0].pointer(), q.pointer(), pages(&pools[0]), tables, scratch, 1, heads)?;
                device.synchronize()?;
                attention.attend_one(outs[1].pointer(), pages(&pools[1]), qkv.pointer(), &transform, tables, heads)?;
            }
            assert!(bits(&outs[0])? == bits(&outs[1])?, "{name}");
            assert!(bits(&pools[0])? == bits(&pools[1])?, "{name}: pages");
        }
    }
    Ok(())
}

fn bits(buffer: &Buffer<bf16>) -> Result<Vec<u16>, CudaError> {
    Ok(buffer.to_vec()?.iter().map(|value| value.to_bits()).collect())
}
