//! Law 3 on the engine: the tokens of a request depend on the request only. Random requests are run alone and cold, and
//! then in every company the runner can put them into; the tokens and the forwards of every block must be the same.

use std::collections::BTreeMap;
use std::sync::Arc;

use minnow_common::random::keyed;
use minnow_common::{Encoding, GroupSize};
use minnow_formats::checkpoint::Checkpoint;
use minnow_formats::io::IoBackend;
use minnow_tests::{checkpoint, convert};
use minnowd::cache::Access;
use minnowd::decoder::{Algorithm, Options, SpecialIds};
use minnowd::engine::runner::{Limits, Outcome, Progress, RequestId, Runner, Task};
use minnowd::model::Backend;
use minnowd::model::cpu::Cpu;
use minnowd::model::reference::Reference;
use minnowd::weights::{LoadOptions, Weights};

const SPECIAL: SpecialIds = SpecialIds { mask: 484, delete: Some(505), split: Some(506) };
const LIMITS: Limits = Limits { running_max: 8, prefill_blocks_alone: 16, prefill_blocks_mixed: 2 };
/// Positions of any request here.
const PAGES_OF_ONE: usize = 8;

/// Seeded random numbers below a limit.
struct Dice {
    seed: u64,
    rolls: u64,
}

impl Dice {
    fn roll(&mut self, limit: usize) -> usize {
        self.rolls += 1;
        (keyed(self.seed, &[self.rolls]) % limit as u64) as usize
    }
}

/// Random requests: greedy and sampled, long and short, many with a prefix in common.
fn tasks(seed: u64, count: usize) -> Vec<Task> {
    let mut dice = Dice { seed, rolls: 0 };
    let shared: Vec<u32> = (0..160).map(|_| dice.roll(470) as u32).collect();
    (0..count)
        .map(|index| {
            let mut prompt = shared[..[0, 31, 32, 64, 100, 128][dice.roll(6)]].to_vec();
            let own = 1 + dice.roll(40);
            prompt.extend((0..own).map(|_| dice.roll(470) as u32));
            let mut options = Options::serving(Algorithm::V22);
            options.max_post_steps = dice.roll(4);
            options.steps = 4 + dice.roll(12);
            options.threshold = [0.5, 0.3, 0.9][dice.roll(3)];
            if dice.roll(3) == 0 {
                (options.temperature, options.top_k, options.top_p) = (0.8, 20, 0.95);
            }
            let max_new = [1, 31, 32, 33, 64, 70][dice.roll(6)];
            let cache = if dice.roll(5) == 0 { Access::Private } else { Access::Shared };
            Task {
                prompt,
                max_new,
                options,
                seed: index as u64,
                stop_ids: Arc::from([481, 489]),
                cache,
                language: None,
            }
        })
        .collect()
}

/// What must not change: tokens, reason, forwards of each block.
fn essence(outcome: &Outcome) -> (Vec<u32>, &'static str, Vec<usize>) {
    let forwards = outcome.stats.blocks.iter().map(|block| block.forwards).collect();
    (outcome.tokens.clone(), outcome.reason.name(), forwards)
}

/// How requests come: all at once, or spread over the run; some are cancelled.
struct Company {
    limits: Limits,
    /// At each step, this many of 100 times, another request arrives; 100 is all at once.
    arrivals: usize,
    /// Beside each request, this many of 100 times, one more that is cancelled after a few steps.
    aborted: usize,
    seed: u64,
}

/// Runs all tasks in company and returns their outcomes in order. Pages and holders must add up after every step, and
/// no page may be in use at the end.
fn run_together(runner: &mut Runner, tasks: &[Task], company: &Company) -> Vec<Outcome> {
    let mut dice = Dice { seed: company.seed, rolls: 0 };
    let mut arriving = tasks.iter().enumerate();
    let mut names: BTreeMap<RequestId, usize> = BTreeMap::new();
    let mut doomed: Vec<(RequestId, usize)> = Vec::new();
    let mut outcomes: Vec<Option<Outcome>> = vec![None; tasks.len()];
    let mut all_arrived = false;
    for step in 0.. {
        while !all_arrived && dice.roll(100) < company.arrivals {
            let Some((index, task)) = arriving.next() else {
                all_arrived = true;
                break;
            };
            names.insert(runner.submit(task.clone()).expect("a task that fits"), index);
            if dice.roll(100) < company.aborted {
                let id = runner.submit(task.clone()).expect("a task that fits");
                doomed.push((id, step + dice.roll(12)));
            }
        }
        doomed.retain(|(id, end)| {
            if *end <= step {
                runner.cancel(*id);
            }
            *end > step
        });
        let done = runner.step().expect("a step");
        runner.check().expect("pages and holders add up");
        for report in done.reports {
            let Some(&index) = names.get(&report.id) else { continue };
            match report.progress {
                Progress::Finished(outcome) => outcomes[index] = Some(outcome),
                Progress::Failed(error) => panic!("request {index}: {error}"),
                _ => {}
            }
        }
        if all_arrived && outcomes.iter().all(Option::is_some) && doomed.is_empty() {
            break;
        }
    }
    assert_eq!((runner.running(), runner.waiting(), runner.pages().running), (0, 0, 0));
    outcomes.into_iter().map(|outcome| outcome.expect("all ended")).collect()
}

/// Every way of running requests together that is tried, and the pages it has.
fn companies() -> Vec<(&'static str, Company, usize)> {
    let limits = |running_max, prefill_blocks_alone, prefill_blocks_mixed| Limits {
        running_max,
        prefill_blocks_alone,
        prefill_blocks_mixed,
    };
    let company = |limits, arrivals, aborted, seed| Company { limits, arrivals, aborted, seed };
    vec![
        ("two at a time", company(limits(2, 16, 2), 100, 0, 1), 64),
        ("eight at random times, short pieces of prompt", company(limits(8, 1, 1), 30, 0, 2), 128),
        ("thirty-two at once, long pieces of prompt", company(limits(32, 16, 16), 100, 0, 3), 256),
        ("with others that are cancelled", company(limits(6, 3, 2), 40, 60, 4), 96),
        ("with so few pages that requests give way", company(limits(8, 4, 2), 100, 20, 5), PAGES_OF_ONE + 3),
    ]
}

fn check_invariance(name: &str, count: usize, backend: &dyn Fn(usize, usize) -> Box<dyn Backend>) {
    let tasks = tasks(7, count);
    let alone: Vec<_> = tasks
        .iter()
        .map(|task| {
            let mut runner = Runner::new(backend(PAGES_OF_ONE, 1), SPECIAL, LIMITS);
            let outcome = runner.run(task.clone(), &mut |_| std::ops::ControlFlow::Continue(())).expect("an answer");
            essence(&outcome)
        })
        .collect();
    for (company_name, company, pages) in companies() {
        let mut runner = Runner::new(backend(pages, 2), SPECIAL, company.limits);
        // The second time, the cache is warm from the first.
        for warmth in ["cold", "warm"] {
            let together = run_together(&mut runner, &tasks, &company);
            for (index, (outcome, alone)) in together.iter().zip(&alone).enumerate() {
                assert_eq!(&essence(outcome), alone, "{name}, {company_name}, {warmth}: request {index}");
            }
        }
        if company_name.contains("few pages") {
            assert!(runner.counters().preemptions > 0, "{name}: nothing had to give way");
        } else {
            assert!(runner.cache_stats().hit_tokens > 0, "{name}: the cache was of no use");
        }
    }
}

fn weights(folder: &std::path::Path, encoding: Option<(Encoding, u64)>) -> Weights {
    let source = Checkpoint::open(folder, IoBackend::Buffered).expect("a checkpoint");
    let Some((encoding, group)) = encoding else {
        return Weights::load(&source, LoadOptions::default()).expect("weights");
    };
    let file = folder.join(format!("{encoding}.mnw"));
    convert::write_mnw(&source, &file, encoding, GroupSize::new(group).expect("a group size"));
    let converted = Checkpoint::open(&file, IoBackend::Buffered).expect("a container");
    Weights::load(&converted, LoadOptions::default()).expect("weights")
}

#[test]
fn company_arrival_cuts_cache_and_threads_do_not_change_a_token_on_the_cpu() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    checkpoint::write("t16", 1, folder.path());
    let encodings = [None, Some((Encoding::I8Mma, 128)), Some((Encoding::I4Mma, 128)), Some((Encoding::Nvfp4, 16))];
    for encoding in encodings {
        let weights = weights(folder.path(), encoding);
        let name = encoding.map_or("bf16".to_owned(), |(encoding, _)| encoding.to_string());
        check_invariance(&name, 24, &|pages, threads| {
            Box::new(Cpu::new(weights.clone(), pages, Some(threads), None).expect("a backend"))
        });
    }
}

#[test]
fn company_does_not_change_a_token_on_the_reference() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    checkpoint::write("t16", 1, folder.path());
    let weights = weights(folder.path(), None);
    check_invariance("reference", 8, &|pages, _| Box::new(Reference::new(&weights, pages).expect("a backend")));
}

#[test]
fn choices_read_their_prompt_once_and_equal_their_solo_answers() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    checkpoint::write("t16", 1, folder.path());
    let weights = weights(folder.path(), None);
    let backend = |pages| Box::new(Cpu::new(weights.clone(), pages, Some(1), None).expect("a backend"));
    for (cache, prompt_tokens) in
        [Access::Shared, Access::Private].into_iter().flat_map(|cache| [(cache, 100), (cache, 20)])
    {
        let mut options = Options::serving(Algorithm::V22);
        (options.temperature, options.max_post_steps, options.steps) = (0.9, 2, 6);
        let choice = |index: u64| Task {
            prompt: (0..prompt_tokens).map(|index| index * 37 % 470).collect(),
            max_new: 70,
            options,
            seed: 40 + index,
            stop_ids: Arc::from([481]),
            cache,
            language: None,
        };
        let solo: Vec<_> = (0..6)
            .map(|index| {
                let mut runner = Runner::new(backend(PAGES_OF_ONE), SPECIAL, LIMITS);
                let go_on = &mut |_: &Progress| std::ops::ControlFlow::Continue(());
                essence(&runner.run(choice(index), go_on).expect("an answer"))
            })
            .collect();
        assert!(solo.iter().any(|answer| *answer != solo[0]), "other seeds, other answers");
        // Side by side, two by two, and with so few pages that choices give way and read the prompt again.
        for (running_max, pages) in [(6, 64), (2, 64), (6, PAGES_OF_ONE + 2)] {
            let limits = Limits { running_max, prefill_blocks_alone: 1, prefill_blocks_mixed: 1 };
            let mut runner = Runner::new(backend(pages), SPECIAL, limits);
            let first = runner.submit(choice(0)).expect("a task that fits");
            let mut ids = vec![first];
            ids.extend((1..6).map(|index| runner.submit_choice(choice(index), first).expect("a task that fits")));
            let mut outcomes: BTreeMap<RequestId, Outcome> = BTreeMap::new();
            while outcomes.len() < ids.len() {
                for report in runner.step().expect("a step").reports {
                    if let Progress::Finished(outcome) = report.progress {
                        outcomes.insert(report.id, outcome);
                    }
                }
                runner.check().expect("pages and holders add up");
            }
            for (id, solo) in ids.iter().zip(&solo) {
                assert_eq!(&essence(&outcomes[id]), solo, "{cache:?}, {running_max} at a time");
            }
            assert_eq!(runner.pages().running, 0);
            let read: usize = outcomes
                .values()
                .map(|outcome| {
                    let stats = &outcome.stats;
                    stats.processed_tokens - 32 * (stats.denoise_forwards + stats.commit_forwards)
                })
                .sum();
            if runner.counters().preemptions == 0 {
                assert_eq!(read, prompt_tokens as usize / 32 * 32, "{cache:?}, {running_max} at a time");
            }
        }
    }
}

#[test]
fn time_spent_waiting_for_a_slot_is_not_decoding_time() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    checkpoint::write("t16", 1, folder.path());
    let backend = Cpu::new(weights(folder.path(), None), 64, Some(1), None).expect("a backend");
    let limits = Limits { running_max: 1, ..LIMITS };
    let mut runner = Runner::new(Box::new(backend), SPECIAL, limits);
    let mut task = tasks(11, 1).remove(0);
    (task.prompt, task.max_new, task.stop_ids, task.cache) = ((1..=64).collect(), 64, Arc::from([]), Access::Shared);
    let second = [task.clone(), task].map(|task| runner.submit(task).expect("a task that fits"))[1];
    let mut started = None;
    let stats = 'run: loop {
        let step = runner.step().expect("a step");
        let mine = step.reports.into_iter().filter(|report| report.id == second);
        for report in mine {
            match report.progress {
                Progress::Started { .. } => started = Some(std::time::Instant::now()),
                Progress::Finished(outcome) => break 'run outcome.stats,
                _ => {}
            }
        }
    };
    let since_started = started.expect("a start").elapsed();
    assert_eq!(stats.cached_tokens, 64, "its prompt was known, so its first block began at once");
    assert!(stats.decode + stats.prefill <= since_started, "{:?} of {since_started:?}", stats.decode);
    assert!(stats.blocks[0].elapsed <= since_started, "{:?} of {since_started:?}", stats.blocks[0].elapsed);
}

#[test]
fn a_follow_up_turn_reuses_every_whole_block_of_the_first() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    checkpoint::write("t16", 1, folder.path());
    let backend = Cpu::new(weights(folder.path(), None), 64, Some(1), None).expect("a backend");
    let mut runner = Runner::new(Box::new(backend), SPECIAL, LIMITS);
    let mut first = tasks(11, 1).remove(0);
    (first.prompt, first.max_new, first.stop_ids, first.cache) =
        ((1..=40).collect(), 88, Arc::from([]), Access::Shared);
    let go_on = &mut |_: &Progress| std::ops::ControlFlow::Continue(());
    let answer = runner.run(first.clone(), go_on).expect("an answer");
    assert_eq!(answer.tokens.len(), 88);

    let mut second = first.clone();
    second.prompt.extend(&answer.tokens);
    second.prompt.extend([7, 8, 9]);
    let again = runner.run(second, go_on).expect("an answer");
    // 40 + 88 tokens are four whole blocks, the last of which was kept because its K/V were final.
    assert!(again.stats.cached_tokens >= 96, "{} tokens were reused", again.stats.cached_tokens);

    first.cache = Access::Private;
    let private = runner.run(first, go_on).expect("an answer");
    assert_eq!(private.stats.cached_tokens, 0);
    assert_eq!(essence(&private), essence(&answer));
}

#[test]
fn what_a_stop_string_hid_is_not_offered_to_others() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    checkpoint::write("t16", 1, folder.path());
    let backend = Cpu::new(weights(folder.path(), None), 64, Some(1), None).expect("a backend");
    let mut runner = Runner::new(Box::new(backend), SPECIAL, LIMITS);
    let mut task = tasks(11, 1).remove(0);
    (task.prompt, task.max_new, task.stop_ids, task.cache) = ((1..=32).collect(), 96, Arc::from([]), Access::Shared);
    let id = runner.submit(task.clone()).expect("a task that fits");
    let mut output = Vec::new();
    while output.len() < 64 {
        for report in runner.step().expect("a step").reports {
            if let Progress::Block { tokens, .. } = report.progress {
                output.extend(tokens);
            }
        }
    }
    // Of the two blocks of output, the client sees all of none: a stop string begins in the first one.
    runner.stop(id, 0);
    let end = runner.step().expect("a step");
    assert!(end.reports.iter().any(|report| matches!(report.progress, Progress::Finished(_))));
    task.prompt.extend(&output);
    task.prompt.push(9);
    let again = runner.run(task, &mut |_| std::ops::ControlFlow::Continue(())).expect("an answer");
    assert_eq!(again.stats.cached_tokens, 32, "only the prompt is known");
}

#[test]
fn a_task_that_the_whole_cache_cannot_hold_is_refused_with_the_numbers() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    checkpoint::write("t16", 1, folder.path());
    let backend = Cpu::new(weights(folder.path(), None), 2, Some(1), None).expect("a backend");
    let mut runner = Runner::new(Box::new(backend), SPECIAL, LIMITS);
    let mut task = tasks(11, 1).remove(0);
    (task.prompt, task.max_new) = (vec![1; 40], 30);
    let error = runner.submit(task).expect_err("too long").to_string();
    assert!(error.contains('3') && error.contains('2'), "{error}");
}
