//! What the engine promises beside law 3 (`invariance.rs`): reuse between turns, choices that share a prompt, refusals.

use std::collections::BTreeMap;
use std::sync::Arc;

use minnowd::cache::Access;
use minnowd::decoder::{Algorithm, Options};
use minnowd::engine::runner::{Limits, Outcome, Progress, RequestId, Runner, Task};

use crate::company::{LIMITS, Subject, essence, run, synthetic_tasks};

/// A runner of the synthetic model, and a task for it that uses the cache and has no stop ids.
fn runner_and_task(pages: usize, limits: Limits) -> (Runner, Task) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let runner = Subject::synthetic(folder.path(), None).runner(pages, 1, limits);
    let task = Task { stop_ids: Arc::from([]), cache: Access::Shared, ..synthetic_tasks(11, 1).remove(0) };
    (runner, task)
}

#[test]
fn choices_read_their_prompt_once_and_equal_their_solo_answers() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let subject = Subject::synthetic(folder.path(), None);
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
        let solo = subject.alone(&(0..6).map(choice).collect::<Vec<_>>());
        assert!(solo.iter().any(|answer| *answer != solo[0]), "other seeds, other answers");
        // Side by side, two by two, and with so few pages that choices give way and read the prompt again.
        for (running_max, pages) in [(6, 64), (2, 64), (6, 10)] {
            let limits = Limits { running_max, prefill_blocks_alone: 1, prefill_blocks_mixed: 1 };
            let mut runner = subject.runner(pages, 1, limits);
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
    let (mut runner, mut task) = runner_and_task(64, Limits { running_max: 1, ..LIMITS });
    (task.prompt, task.max_new) = ((1..=64).collect(), 64);
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
    let (mut runner, mut first) = runner_and_task(64, LIMITS);
    (first.prompt, first.max_new) = ((1..=40).collect(), 88);
    let answer = run(&mut runner, first.clone());
    assert_eq!(answer.tokens.len(), 88);

    let mut second = first.clone();
    second.prompt.extend(&answer.tokens);
    second.prompt.extend([7, 8, 9]);
    let again = run(&mut runner, second);
    // 40 + 88 tokens are four whole blocks, the last of which was kept because its K/V were final.
    assert!(again.stats.cached_tokens >= 96, "{} tokens were reused", again.stats.cached_tokens);

    first.cache = Access::Private;
    let private = run(&mut runner, first);
    assert_eq!(private.stats.cached_tokens, 0);
    assert_eq!(essence(&private), essence(&answer));
}

#[test]
fn what_a_stop_string_hid_is_not_offered_to_others() {
    let (mut runner, mut task) = runner_and_task(64, LIMITS);
    (task.prompt, task.max_new) = ((1..=32).collect(), 96);
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
    let again = run(&mut runner, task);
    assert_eq!(again.stats.cached_tokens, 32, "only the prompt is known");
}

#[test]
fn a_task_that_the_whole_cache_cannot_hold_is_refused_with_the_numbers() {
    let (mut runner, mut task) = runner_and_task(2, LIMITS);
    (task.prompt, task.max_new) = (vec![1; 40], 30);
    let error = runner.submit(task).expect_err("too long").to_string();
    assert!(error.contains('3') && error.contains('2'), "{error}");
}
