//! Reports from the field that concern the engine, as tests. Which report is held by which test, these and others:
//!
//! | report | symptom elsewhere | tests here |
//! |---|---|---|
//! | S16 | a disconnect does not stop generation | `http::a_client_that_goes_away_cancels_its_request` |
//! | S19 | aborted requests leak pages | `five_hundred_aborts_leave_no_page_in_use`, `soak` |
//! | S40 | the longest prompts crash or hang | `http::the_context_limit_is_exact` |
//! | S56 | short rests after a long hit crash | `a_rest_of_any_length_after_a_long_hit_gives_the_same_answer` |
//! | S58, S59 | the prefix cache changes results | `invariance` (with cache, without, warm), `model::a_prefill_may_be_cut_anywhere`, `cache::what_is_saved_comes_back_bit_for_bit` |
//! | S60 | a hundred clients crash it or wait for minutes | `soak::a_burst_beyond_the_queue_is_refused_at_once`, `soak::clients_of_all_kinds_leave_the_server_as_they_found_it` |
//! | S61 | the cache is keyed on tokens past the stop | `a_turn_after_a_stop_in_a_block_reuses_all_that_was_seen` |
//! | S62 | a hit is reported and then restored only in part | `cached_tokens_are_the_whole_blocks_that_match` |
//! | S63 | one long prompt stalls the others | `scheduler::prompts_take_no_more_time_than_refinement`, `a_running_stream_keeps_half_its_steps_beside_a_long_prompt` |
//! | D02 | unfinished blocks enter the prefix cache | `an_answer_that_ended_in_a_block_can_be_continued` |
//! | D03, D04, D22 | company changes answers, or first blocks | `invariance`, `eight_prompts_in_a_batch_have_the_first_blocks_they_have_alone` |
//! | D07 | the scheduler changes a single request; a wrong algorithm is taken | `invariance` (against one at a time), `an_algorithm_the_model_cannot_run_is_refused_at_start` |
//! | D08 | one slow request holds the batch | `a_short_request_beside_a_long_one_takes_no_more_forwards` |
//! | D12 | later requests differ from the first | `fifty_requests_equal_the_first` |
//! | D13 | lengths are not exact | `http::the_token_limit_is_exact`, `output_is_as_long_as_asked_for` |
//! | D14 | the end token cuts wrongly | `the_output_ends_exactly_at_an_end_token_in_any_row` |
//! | D16, D17 | seeds are not honoured, alone or in company | `invariance` (a third is sampled), `a_seed_decides_the_answer` |
//! | D24 | the cache index takes most of the scheduler's time | `bookkeeping_for_128_long_prompts_costs_a_small_part_of_a_forward` |

use std::sync::Arc;
use std::time::{Duration, Instant};

use minnow_tests::program;
use minnowd::cache::Access;
use minnowd::decoder::{Algorithm, Options, SpecialIds};
use minnowd::engine::FinishReason;
use minnowd::engine::runner::{Limits, Outcome, Progress, RequestId, Runner, Task};

use crate::company::{Company, Dice, LIMITS, Subject, abort, essence, run, run_together, synthetic_tasks};
use crate::scripted::{Script, Scripted};

const SPECIAL: SpecialIds = SpecialIds { mask: 484, delete: Some(505), split: Some(506) };

fn synthetic() -> Subject {
    let folder = tempfile::tempdir().expect("a temporary folder");
    Subject::synthetic(folder.path(), None)
}

/// A greedy task without stop ids that uses the cache.
fn task(prompt: Vec<u32>, max_new: usize) -> Task {
    let mut options = Options::serving(Algorithm::V22);
    (options.max_post_steps, options.steps) = (2, 8);
    Task { prompt, max_new, options, seed: 1, stop_ids: Arc::from([]), cache: Access::Shared, language: None }
}

fn scripted(pages: usize, script: Script, limits: Limits) -> Runner {
    Runner::new(Box::new(Scripted::new(pages, script)), SPECIAL, limits)
}

/// Ordinary tokens that depend on the seed.
fn tokens(seed: u64, count: usize) -> Vec<u32> {
    let mut dice = Dice::new(seed);
    (0..count).map(|_| dice.roll(470) as u32).collect()
}

#[test]
fn five_hundred_aborts_leave_no_page_in_use() {
    let mut runner = scripted(200, |position| (position % 400) as u32, LIMITS);
    let mut tasks = synthetic_tasks(5, 40);
    tasks.iter_mut().for_each(|task| task.options.temperature = 0.0);
    abort(&mut runner, &tasks, 500, 6);
    assert_eq!(runner.pages().running, 0);
}

#[test]
fn a_rest_of_any_length_after_a_long_hit_gives_the_same_answer() {
    let subject = synthetic();
    // Pieces of two blocks, so that a rest of 33 tokens crosses into a piece of its own.
    let limits = Limits { prefill_blocks_alone: 2, ..LIMITS };
    for rest in [1, 2, 31, 32, 33, 63, 64, 65] {
        let mut warm = subject.runner(64, 1, limits);
        let mut conversation = tokens(3, 70);
        for turn in 0..5 {
            let question = task(conversation.clone(), 20);
            let answer = run(&mut warm, question.clone());
            let cold = run(&mut subject.runner(64, 1, limits), Task { cache: Access::Private, ..question });
            assert_eq!(essence(&answer), essence(&cold), "turn {turn}, {rest} new tokens");
            conversation.extend(&answer.tokens);
            conversation.extend(tokens(100 + turn, rest));
        }
        assert!(warm.cache_stats().hit_tokens > 0);
    }
}

#[test]
fn a_turn_after_a_stop_in_a_block_reuses_all_that_was_seen() {
    for visible_blocks in [0, 1, 2] {
        let mut runner = scripted(64, |position| (position % 400) as u32, LIMITS);
        let prompt = tokens(4, 64);
        let id = runner.submit(task(prompt.clone(), 300)).expect("a task that fits");
        // A stop string is found in the block after the visible ones, 10 tokens into it.
        let mut output: Vec<u32> = Vec::new();
        while output.len() < (visible_blocks + 1) * 32 {
            for report in runner.step().expect("a step").reports {
                if let Progress::Block { tokens, .. } = report.progress {
                    output.extend(tokens);
                }
            }
        }
        runner.stop(id, visible_blocks);
        while runner.running() > 0 {
            runner.step().expect("a step");
        }
        output.truncate(visible_blocks * 32 + 10);
        let again = run(&mut runner, task([prompt, output, tokens(9, 30)].concat(), 1));
        assert_eq!(again.stats.cached_tokens, 64 + visible_blocks * 32);
    }
}

#[test]
fn cached_tokens_are_the_whole_blocks_that_match() {
    let mut runner = scripted(300, |position| (position % 400) as u32, LIMITS);
    let known = tokens(5, 256);
    run(&mut runner, task(known.clone(), 1));
    let mut dice = Dice::new(12);
    for round in 0..40 {
        let matching = dice.roll(257);
        let mut prompt = known[..matching].to_vec();
        // Other tokens follow: none of them is the one that would go on matching.
        prompt.extend(known.get(matching).map(|token| (token + 1 + round as u32) % 470));
        prompt.extend(tokens(1000 + round, 1 + dice.roll(60)));
        let outcome = run(&mut runner, Task { max_new: 1, ..task(prompt, 1) });
        assert_eq!(outcome.stats.cached_tokens, matching / 32 * 32, "{matching} tokens match");
    }
}

#[test]
fn an_answer_that_ended_in_a_block_can_be_continued() {
    let subject = synthetic();
    for max_new in [1, 17, 31, 40, 50] {
        let mut warm = subject.runner(64, 1, LIMITS);
        let first = task(tokens(6, 45), max_new);
        let answer = run(&mut warm, first.clone());
        let follow_up = task([&first.prompt[..], &answer.tokens, &tokens(7, 40)].concat(), 40);
        let cold = run(&mut subject.runner(64, 1, LIMITS), Task { cache: Access::Private, ..follow_up.clone() });
        assert_eq!(essence(&run(&mut warm, follow_up)), essence(&cold), "after {max_new} tokens");
    }
}

#[test]
fn eight_prompts_in_a_batch_have_the_first_blocks_they_have_alone() {
    let subject = synthetic();
    let tasks: Vec<Task> = (0..8).map(|index| task(tokens(20 + index, 10 + 9 * index as usize), 30)).collect();
    let alone = subject.alone(&tasks);
    let company = Company { limits: LIMITS, arrivals: 100, aborted: 0, seed: 1 };
    let mut runner = subject.runner(128, 2, LIMITS);
    let together = run_together(&mut runner, &tasks, &company);
    assert!(runner.counters().batch_max >= 6, "they did run together");
    for (outcome, alone) in together.iter().zip(&alone) {
        assert_eq!(&essence(outcome), alone);
    }
}

#[test]
fn an_algorithm_the_model_cannot_run_is_refused_at_start() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    minnow_tests::checkpoint::write("t16g", 1, folder.path());
    let path = folder.path().to_str().expect("UTF-8");
    let output = program::minnowd(&["generate", "--model", path, "--algorithm", "2.2", "--max-tokens", "1", "x"]);
    assert_eq!(output.status.code(), Some(2), "{}", program::stderr(&output));
    assert!(program::stderr(&output).contains("--algorithm 2.2"), "{}", program::stderr(&output));
}

/// Forwards from the submission of each request to its end, when `tasks` are submitted together.
fn forwards_to_end(runner: &mut Runner, tasks: &[Task]) -> Vec<u64> {
    let ids: Vec<RequestId> = tasks.iter().map(|task| runner.submit(task.clone()).expect("a task that fits")).collect();
    let mut ends = vec![0; ids.len()];
    while ends.contains(&0) {
        for report in runner.step().expect("a step").reports {
            if let Progress::Finished(_) = report.progress {
                let index = ids.iter().position(|id| *id == report.id).expect("one of these");
                ends[index] = runner.counters().forwards;
            }
        }
    }
    ends
}

#[test]
fn a_short_request_beside_a_long_one_takes_no_more_forwards() {
    let subject = synthetic();
    let (long, short) = (task(tokens(30, 20), 120), task(tokens(31, 20), 12));
    let solo = forwards_to_end(&mut subject.runner(64, 1, LIMITS), std::slice::from_ref(&short))[0];
    let beside = forwards_to_end(&mut subject.runner(64, 1, LIMITS), &[long, short])[1];
    assert!(beside * 2 <= solo * 3, "{beside} forwards beside a long request, {solo} alone");
}

#[test]
fn a_running_stream_keeps_half_its_steps_beside_a_long_prompt() {
    // Every forward of the script takes about the same time, so this counts forwards; the time-based rule itself is
    // tested with the scheduler.
    let mut runner = scripted(600, |position| (position % 400) as u32, LIMITS);
    let stream = runner.submit(task(tokens(40, 20), 3000)).expect("a task that fits");
    while runner.counters().forwards < 10 {
        runner.step().expect("a step");
    }
    let long = runner.submit(task(tokens(41, 4000), 1)).expect("a task that fits");
    let before = runner.counters().forwards;
    let mut steps = 0;
    'run: loop {
        for report in runner.step().expect("a step").reports {
            match report.progress {
                Progress::Finished(_) if report.id == long => break 'run,
                Progress::Step { .. } | Progress::Block { .. } if report.id == stream => steps += 1,
                _ => {}
            }
        }
    }
    let forwards = runner.counters().forwards - before;
    assert!(steps * 2 >= forwards, "{steps} steps in {forwards} forwards");
}

#[test]
fn fifty_requests_equal_the_first() {
    let subject = synthetic();
    let mut runner = subject.runner(64, 2, LIMITS);
    let question = task(tokens(50, 40), 40);
    let first = essence(&run(&mut runner, question.clone()));
    for number in 1..50 {
        assert_eq!(essence(&run(&mut runner, question.clone())), first, "request {number}");
    }
}

#[test]
fn output_is_as_long_as_asked_for() {
    let mut runner = scripted(64, |position| (position % 400) as u32, LIMITS);
    for prompt in [0, 1, 31, 32, 33] {
        for max_new in [0, 1, 31, 32, 33, 1000] {
            let Outcome { reason, tokens, .. } = run(&mut runner, task(tokens(60, prompt), max_new));
            assert_eq!((tokens.len(), reason), (max_new, FinishReason::Length), "{prompt} and {max_new} tokens");
        }
    }
}

#[test]
fn the_output_ends_exactly_at_an_end_token_in_any_row() {
    const END: u32 = 481;
    // The end token stands at row 0, 1 or 31 of the second output block; more of them follow.
    let scripts: [(usize, Script); 3] = [
        (64, |position| if position >= 64 { END } else { 7 }),
        (65, |position| if position >= 65 { END } else { 7 }),
        (95, |position| if position >= 95 { END } else { 7 }),
    ];
    for (end, script) in scripts {
        let mut runner = scripted(64, script, LIMITS);
        let question = Task { stop_ids: Arc::from([END]), ..task(vec![1; 32], 500) };
        let Outcome { reason, tokens, .. } = run(&mut runner, question);
        assert_eq!((tokens.len(), reason), (end + 1 - 32, FinishReason::Stop));
        let (last, text) = tokens.split_last().expect("some tokens");
        assert_eq!(*last, END);
        assert!(text.iter().all(|token| *token == 7), "nothing but text before the end");
    }
}

#[test]
fn a_seed_decides_the_answer() {
    let subject = synthetic();
    let mut runner = subject.runner(64, 1, LIMITS);
    let mut question = task(tokens(70, 40), 40);
    question.options.temperature = 1.0;
    let mut ask = |seed| essence(&run(&mut runner, Task { seed, ..question.clone() }));
    assert_eq!(ask(5), ask(5));
    assert_ne!(ask(5), ask(6));
}

/// Time for `steps` steps that each refine a block of every request.
fn time_of_steps(runner: &mut Runner, steps: usize) -> Duration {
    let mut done = 0;
    let since = Instant::now();
    while done < steps {
        let before = runner.counters().forwards;
        runner.step().expect("a step");
        done += (runner.counters().forwards - before) as usize;
    }
    since.elapsed()
}

#[test]
fn bookkeeping_for_128_long_prompts_costs_a_small_part_of_a_forward() {
    const STREAMS: usize = 128;
    const STEPS: usize = 40;
    let limits = Limits { running_max: STREAMS, prefill_blocks_alone: 128, prefill_blocks_mixed: 128 };
    // Scheduler, cache, decoders and all else around the model: 4096 tokens each, no two alike.
    let mut around = scripted(STREAMS * 224, |position| (position % 400) as u32, limits);
    // The model itself, at its cheapest: a synthetic one of 3 layers without any context.
    let subject = synthetic();
    let mut model = subject.runner(STREAMS * 4, 2, limits);
    for stream in 0..STREAMS as u64 {
        // A position in each step, so that none ends before the last has begun.
        let mut long = task(tokens(1000 + stream, 4096), 3000);
        (long.options.threshold, long.options.steps) = (1.0, 32);
        around.submit(long).expect("a task that fits");
        model.submit(task(tokens(1000 + stream, 8), 100)).expect("a task that fits");
    }
    while around.counters().batch_max < STREAMS {
        let step = around.step().expect("a step");
        assert!(!step.is_idle, "all ended before they were side by side");
    }
    time_of_steps(&mut model, 2);
    // One after the other in small pieces, so that both see the same load of this machine.
    let (mut bookkeeping, mut forwards) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..4 {
        bookkeeping += time_of_steps(&mut around, STEPS / 4);
        forwards += time_of_steps(&mut model, 1);
    }
    let (bookkeeping, forward) = (bookkeeping.as_secs_f64() / STEPS as f64, forwards.as_secs_f64() / 4.0);
    eprintln!(
        "{:.0} us around a step of {STREAMS}, {:.0} us for the smallest forward",
        bookkeeping * 1e6,
        forward * 1e6
    );
    assert!(bookkeeping < forward * 0.1, "{bookkeeping} s around a step of {forward} s");
    around.check().expect("pages and holders add up");
}
