//! One forward of one block for each of some sequences: a step of refinement.

use super::{Bench, pages, tokens};
use crate::model::{Batch, Need, PageId, Segment};

/// A row for each number of sequences. All share a prefix of `prefix_blocks` blocks and differ in their last block.
pub(super) fn measure(
    bench: &mut Bench<'_>,
    prefix_blocks: usize,
    batches: &[usize],
    need: Need,
) -> anyhow::Result<()> {
    let config = bench.weights.config.clone();
    let block = minnow_common::BLOCK;
    let prefix = tokens(&config, 0, prefix_blocks * block);
    let prefix_pages = pages(0, prefix_blocks);
    for (index, chunk) in prefix.chunks(super::prefill::CHUNK_DEFAULT).enumerate() {
        let done = index * super::prefill::CHUNK_DEFAULT / block;
        let segment =
            Segment { tokens: chunk, pages: &prefix_pages[..done + chunk.len() / block], need: Need::Nothing };
        bench.backend.forward(&Batch { segments: &[segment] }, None)?;
    }
    for &sequences in batches {
        let blocks: Vec<Vec<u32>> = (1..=sequences as u64).map(|sequence| tokens(&config, sequence, block)).collect();
        let tables: Vec<Vec<PageId>> =
            (0..sequences).map(|own| [&prefix_pages[..], &pages(prefix_blocks + own, 1)].concat()).collect();
        let segments: Vec<Segment<'_>> =
            blocks.iter().zip(&tables).map(|(tokens, pages)| Segment { tokens, pages, need }).collect();
        let name = format!("{sequences} x {block} at {}, {need:?}", prefix_blocks * block).to_lowercase();
        bench.row(name, &[Batch { segments: &segments }])?;
    }
    Ok(())
}
