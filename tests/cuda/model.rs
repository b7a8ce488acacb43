//! Forward passes of the backend: against the reference, and against themselves in company, cut, from the cache, recorded
//! and not, to the bit.

use minnow_common::random::keyed;
use minnow_common::{BLOCK, Encoding, GroupSize};
use minnow_formats::checkpoint::Checkpoint;
use minnow_formats::io::IoBackend;
use minnow_tests::convert;
use minnowd::demo;
use minnowd::model::cuda::{Cuda, CudaOptions};
use minnowd::model::reference::Reference;
use minnowd::model::trace::Trace;
use minnowd::model::verify::{TOLERANCE_BF16, TOLERANCE_FP4, compare};
use minnowd::model::{Backend, Batch, ExpertActivations, Need, Output, PageId, Point, Segment};
use minnowd::weights::{LoadOptions, Weights};

use crate::device;

/// The embedded demo model, for `running_max` requests; `None` without a GPU.
fn demo_model(running_max: usize) -> Option<Cuda> {
    device()?;
    let checkpoint = demo_checkpoint();
    let options = CudaOptions {
        ordinal: 0,
        running_max,
        context: 1024,
        cache_max_bytes: None,
        verifies: true,
        expert_activations: ExpertActivations::Plain,
    };
    Some(Cuda::new(&checkpoint, options).expect("the backend starts"))
}

fn demo_checkpoint() -> Checkpoint {
    Checkpoint::from_static(demo::NAME, demo::checkpoint()).expect("the demo checkpoint")
}

/// `blocks` blocks of ordinary tokens, others for each seed.
fn some_tokens(blocks: usize, seed: u64) -> Vec<u32> {
    (0..(blocks * BLOCK) as u64).map(|index| (keyed(seed, &[index]) % 1700) as u32).collect()
}

fn pages(first: usize, count: usize) -> Vec<PageId> {
    (first..first + count).map(|page| PageId(page as u32)).collect()
}

fn forward(backend: &mut Cuda, segments: &[Segment<'_>]) -> Vec<Output> {
    backend.forward(&Batch { segments }, None).expect("a valid batch")
}

/// Everything an output says, as bits.
fn bits(output: &Output) -> Vec<u32> {
    match output {
        Output::Nothing => Vec::new(),
        Output::Candidates(rows) => {
            rows.iter().flat_map(|row| row.0).flat_map(|entry| [entry.token, entry.confidence.to_bits()]).collect()
        }
        Output::Logits(logits) => logits.values().iter().map(|logit| logit.to_bits()).collect(),
    }
}

fn exported(backend: &Cuda, pages: &[PageId]) -> Vec<Vec<u8>> {
    let export = |&page: &PageId| {
        let mut bytes = vec![0; backend.page_bytes()];
        backend.export_page(page, &mut bytes).expect("a written page");
        bytes
    };
    pages.iter().map(export).collect()
}

#[test]
fn the_demo_model_agrees_with_the_reference() {
    let Some(mut backend) = demo_model(1) else { return };
    let weights = Weights::load(&demo_checkpoint(), LoadOptions::default()).expect("the demo weights");
    let mut reference = Reference::new(&weights, 5).expect("the reference starts");
    let report = compare(&mut backend, &mut reference, &some_tokens(5, 2), TOLERANCE_BF16).expect("two forwards");
    assert!(report.agrees(), "{:?}", report.faults);
}

#[test]
fn activations_of_four_bits_agree_with_the_reference_and_with_themselves_in_company() {
    if device().is_none() {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("demo-nvfp4.mnw");
    convert::write_mnw(&demo_checkpoint(), &file, Encoding::Nvfp4, GroupSize::NVFP4);
    let checkpoint = Checkpoint::open(&file, IoBackend::Auto).expect("what was just written");
    let options = CudaOptions {
        ordinal: 0,
        running_max: 8,
        context: 1024,
        cache_max_bytes: None,
        verifies: true,
        expert_activations: ExpertActivations::Fp4,
    };
    let mut backend = Cuda::new(&checkpoint, options).expect("the backend starts");
    eprintln!("{}", backend.describe());
    let weights = Weights::load(&checkpoint, LoadOptions::default()).expect("a model");
    let reference = Reference::new(&weights, 5).expect("the reference starts");
    let mut reference = reference.with_fp4_expert_activations(&weights).expect("NVFP4 experts");
    let report = compare(&mut backend, &mut reference, &some_tokens(5, 2), TOLERANCE_FP4).expect("two forwards");
    assert!(report.agrees(), "{:?}", report.faults);

    let tokens: Vec<Vec<u32>> = (0..150).map(|seed| some_tokens(1, seed)).collect();
    let tables: Vec<Vec<PageId>> = (0..150).map(|page| pages(page, 1)).collect();
    let segments: Vec<Segment<'_>> =
        tokens.iter().zip(&tables).map(|(tokens, pages)| Segment { tokens, pages, need: Need::Candidates }).collect();
    let together = forward(&mut backend, &segments);
    for index in [0, 1, 77, 149] {
        let alone = forward(&mut backend, &segments[index..=index]);
        assert_eq!(bits(&together[index]), bits(&alone[0]), "segment {index}");
    }
}

#[test]
fn cuts_and_company_change_no_bit() {
    let Some(mut backend) = demo_model(40) else { return };
    let tokens = some_tokens(9, 1);
    let table = pages(0, 9);
    for need in [Need::Candidates, Need::Logits] {
        let whole = forward(&mut backend, &[Segment { tokens: &tokens, pages: &table, need }]);
        let whole_pages = exported(&backend, &table);
        let last_rows = |output: &Output| {
            let all = bits(output);
            all[all.len() / 9 * 8..].to_vec()
        };
        let expected = last_rows(&whole[0]);
        for cuts in [&[1, 1, 1, 1, 1, 1, 1, 1, 1][..], &[8, 1], &[3, 5, 1]] {
            let table = pages(9, 9);
            let mut done = 0;
            for &blocks in cuts {
                let part = &tokens[done * BLOCK..(done + blocks) * BLOCK];
                done += blocks;
                let need = if done == 9 { need } else { Need::Nothing };
                let outputs = forward(&mut backend, &[Segment { tokens: part, pages: &table[..done], need }]);
                if done == 9 {
                    assert_eq!(bits(&outputs[0]), expected, "{need:?} cut as {cuts:?}");
                }
            }
            assert_eq!(exported(&backend, &table), whole_pages, "pages cut as {cuts:?}");
        }
        // Beside a prompt, others that refine, and one that wants logits.
        for others in [1, 3, 30] {
            let lone: Vec<Vec<u32>> = (0..others).map(|other| some_tokens(1, 100 + other)).collect();
            let prompt = some_tokens(7, 50);
            let (prompt_table, logits_table) = (pages(200, 7), pages(210, 1));
            let tables: Vec<Vec<PageId>> = (0..others as usize).map(|other| pages(300 + other, 1)).collect();
            let mut segments = vec![
                Segment { tokens: &prompt, pages: &prompt_table, need: Need::Nothing },
                Segment { tokens: &lone[0], pages: &logits_table, need: Need::Logits },
            ];
            segments.extend(lone.iter().zip(&tables).map(|(tokens, pages)| Segment {
                tokens,
                pages,
                need: Need::Candidates,
            }));
            segments.push(Segment { tokens: &tokens[8 * BLOCK..], pages: &table, need });
            let outputs = forward(&mut backend, &segments);
            assert_eq!(bits(&outputs[segments.len() - 1]), expected, "{need:?} beside {others} others");
            let alone = forward(&mut backend, &segments[2..3]);
            assert_eq!(bits(&outputs[2]), bits(&alone[0]), "another beside {others} others");
        }
    }
}

#[test]
fn a_batch_larger_than_the_workspace_is_the_same_in_several_passes() {
    let Some(mut backend) = demo_model(300) else { return };
    let tokens: Vec<Vec<u32>> = (0..330).map(|seed| some_tokens(1, seed)).collect();
    let tables: Vec<Vec<PageId>> = (0..330).map(|page| pages(page, 1)).collect();
    let segments: Vec<Segment<'_>> =
        tokens.iter().zip(&tables).map(|(tokens, pages)| Segment { tokens, pages, need: Need::Candidates }).collect();
    let long = some_tokens(32, 7);
    let long_table = pages(400, 32);
    let segments = [segments, vec![Segment { tokens: &long, pages: &long_table, need: Need::Candidates }]].concat();
    let together = forward(&mut backend, &segments);
    for index in [0, 1, 200, 329, 330] {
        let alone = forward(&mut backend, &segments[index..=index]);
        assert_eq!(bits(&together[index]), bits(&alone[0]), "segment {index}");
    }
}

#[test]
fn what_a_probe_sees_is_what_a_graph_computes() {
    let Some(mut backend) = demo_model(4) else { return };
    let (tokens, table) = (some_tokens(3, 3), pages(0, 3));
    let segment = |need| Segment { tokens: &tokens, pages: &table, need };
    let recorded = forward(&mut backend, &[segment(Need::Candidates)]);
    let again = forward(&mut backend, &[segment(Need::Candidates)]);
    let mut trace = Trace::default();
    let batch = [segment(Need::Candidates)];
    let probed = backend.forward(&Batch { segments: &batch }, Some(&mut trace)).expect("a valid batch");
    assert_eq!(bits(&recorded[0]), bits(&again[0]));
    assert_eq!(bits(&recorded[0]), bits(&probed[0]));

    let logits = forward(&mut backend, &[segment(Need::Logits)]);
    let seen = trace.rows(0, None, Point::Logits).expect("logits were seen");
    let (Output::Logits(logits), Output::Candidates(candidates)) = (&logits[0], &recorded[0]) else {
        panic!("outputs of the wrong kind")
    };
    assert_eq!(logits.values(), seen.values);
    for (row, candidates) in logits.rows().zip(candidates) {
        let expected = minnowd::decoder::Candidates::from_logits(row);
        assert_eq!(candidates.0.map(|entry| entry.token), expected.0.map(|entry| entry.token));
        for (found, expected) in candidates.0.iter().zip(expected.0) {
            // Sums of exponentials in f32, in another order.
            assert!((found.confidence - expected.confidence).abs() <= 1e-5 * expected.confidence.max(1e-3));
        }
    }
}

#[test]
fn pages_go_out_and_come_back_to_the_bit() {
    let Some(mut backend) = demo_model(2) else { return };
    let (tokens, table) = (some_tokens(4, 9), pages(0, 4));
    let batch = [Segment { tokens: &tokens, pages: &table, need: Need::Candidates }];
    let expected = forward(&mut backend, &batch);
    let moved = pages(10, 3);
    for (page, bytes) in moved.iter().zip(exported(&backend, &table[..3])) {
        backend.import_page(*page, &bytes).expect("a page of this backend");
    }
    assert_eq!(exported(&backend, &moved), exported(&backend, &table[..3]));
    let table = [&moved[..], &pages(20, 1)].concat();
    let last = [Segment { tokens: &tokens[3 * BLOCK..], pages: &table, need: Need::Candidates }];
    let found = forward(&mut backend, &last);
    let all = bits(&expected[0]);
    assert_eq!(bits(&found[0]), all[all.len() / 4 * 3..]);
    let mut buffer = vec![0; backend.page_bytes()];
    assert!(backend.export_page(PageId(40), &mut buffer).is_err(), "nothing was ever written there");
}
