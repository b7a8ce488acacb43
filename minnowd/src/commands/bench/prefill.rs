//! Reading a prompt into keys and values, from position 0, in chunks.

use minnow_common::BLOCK;

use super::{Bench, pages, tokens};
use crate::model::{Batch, Need, Segment};

/// Positions read in one forward by default: what the engine does when nothing else runs.
pub(crate) const CHUNK_DEFAULT: usize = 512;

/// A row for each length of a prompt.
pub(super) fn measure(bench: &mut Bench<'_>, lengths: &[usize], chunk: usize) -> anyhow::Result<()> {
    let config = bench.weights.config.clone();
    for &length in lengths {
        let prompt = tokens(&config, 0, length);
        let table = pages(0, length / BLOCK);
        let segments: Vec<[Segment<'_>; 1]> = prompt
            .chunks(chunk)
            .enumerate()
            .map(|(index, tokens)| {
                let end = (index * chunk + tokens.len()) / BLOCK;
                [Segment { tokens, pages: &table[..end], need: Need::Nothing }]
            })
            .collect();
        let forwards: Vec<Batch<'_>> = segments.iter().map(|segments| Batch { segments }).collect();
        bench.row(format!("prefill {length} in chunks of {chunk}"), &forwards)?;
    }
    Ok(())
}
