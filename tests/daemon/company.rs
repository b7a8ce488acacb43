//! Requests and the company they run in: the harness of the tests that hold the engine to law 3.
//!
//! A [`Subject`] is a model to run; [`synthetic_tasks`] and [`exam_tasks`] are requests for it; a [`Company`] is one way
//! to run many of them together. Whatever is seeded is the same in every run.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use minnow_common::random::keyed;
use minnow_common::{Encoding, GroupSize};
use minnow_formats::checkpoint::Checkpoint;
use minnow_formats::io::IoBackend;
use minnow_tests::{checkpoint, convert, golden};
use minnowd::cache::Access;
use minnowd::decoder::{Algorithm, Options, SpecialIds};
use minnowd::demo;
use minnowd::engine::runner::{Limits, Outcome, Progress, RequestId, Runner, Task};
use minnowd::model::Backend;
use minnowd::model::cpu::Cpu;
use minnowd::model::reference::Reference;
use minnowd::weights::{LoadOptions, Weights};

/// Limits that nothing depends on.
pub const LIMITS: Limits = Limits { running_max: 8, prefill_blocks_alone: 16, prefill_blocks_mixed: 2 };
/// Pages that any task here fits into.
pub const PAGES_OF_ONE: usize = 16;

/// Requests of each kind in the long form of a test, if `MINNOW_LONG` asks for it: minutes instead of seconds.
pub fn long_count() -> Option<usize> {
    let text = std::env::var("MINNOW_LONG").ok()?;
    Some(text.parse().expect("MINNOW_LONG is a number of requests"))
}

/// Seeded random numbers below a limit.
pub struct Dice {
    seed: u64,
    rolls: u64,
}

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self { seed, rolls: 0 }
    }

    pub fn roll(&mut self, limit: usize) -> usize {
        self.rolls += 1;
        (keyed(self.seed, &[self.rolls]) % limit as u64) as usize
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.roll(from.len())]
    }
}

/// A model, and what its tokens mean.
pub struct Subject {
    weights: Weights,
    pub special: SpecialIds,
    pub stop_ids: Arc<[u32]>,
    is_reference: bool,
}

impl Subject {
    /// A seeded model of 16 experts, its experts stored as given; random weights, so its text is noise.
    pub fn synthetic(folder: &Path, experts: Option<(Encoding, u64)>) -> Self {
        if !folder.join("config.json").exists() {
            checkpoint::write("t16", 1, folder);
        }
        Self {
            weights: weights(folder, experts),
            special: SpecialIds { mask: 484, delete: Some(505), split: Some(506) },
            stop_ids: Arc::from([481, 489]),
            is_reference: false,
        }
    }

    /// The trained model of 20 M parameters: the BF16 original in `folder` with its experts stored as given, or the
    /// embedded one.
    pub fn trained(original: Option<(&Path, Option<(Encoding, u64)>)>, folder: &Path) -> Self {
        let weights = match original {
            Some((original, None)) => {
                let source = Checkpoint::open(original, IoBackend::Buffered).expect("a checkpoint");
                Weights::load(&source, LoadOptions::default()).expect("weights")
            }
            Some((original, Some((encoding, group)))) => converted(original, folder, encoding, group),
            None => {
                let embedded = Checkpoint::from_static(demo::NAME, demo::checkpoint()).expect("a container");
                Weights::load(&embedded, LoadOptions::default()).expect("weights")
            }
        };
        let special = SpecialIds { mask: 1755, delete: Some(1790), split: Some(1791) };
        Self { weights, special, stop_ids: Arc::from([1752, 1760]), is_reference: false }
    }

    /// Whether answers go on to their limit, since the weights are random.
    pub fn text_is_noise(&self) -> bool {
        self.special.mask == 484
    }

    /// The same on the reference backend.
    pub fn on_reference(self) -> Self {
        Self { is_reference: true, ..self }
    }

    fn backend(&self, pages: usize, threads: usize) -> Box<dyn Backend> {
        if self.is_reference {
            return Box::new(Reference::new(&self.weights, pages).expect("a backend"));
        }
        Box::new(Cpu::new(self.weights.clone(), pages, Some(threads), None).expect("a backend"))
    }

    /// A runner with `pages` pages and nothing in its cache.
    pub fn runner(&self, pages: usize, threads: usize, limits: Limits) -> Runner {
        Runner::new(self.backend(pages, threads), self.special, limits)
    }

    /// What each task gives when nothing else runs and nothing is cached.
    pub fn alone(&self, tasks: &[Task]) -> Vec<Essence> {
        let alone = |task: &Task| {
            let mut runner = self.runner(PAGES_OF_ONE, 1, LIMITS);
            essence(&run(&mut runner, task.clone()))
        };
        tasks.iter().map(alone).collect()
    }
}

fn weights(folder: &Path, experts: Option<(Encoding, u64)>) -> Weights {
    match experts {
        Some((encoding, group)) => converted(folder, folder, encoding, group),
        None => {
            let source = Checkpoint::open(folder, IoBackend::Buffered).expect("a checkpoint");
            Weights::load(&source, LoadOptions::default()).expect("weights")
        }
    }
}

fn converted(source: &Path, folder: &Path, encoding: Encoding, group: u64) -> Weights {
    let source = Checkpoint::open(source, IoBackend::Buffered).expect("a checkpoint");
    let file = folder.join(format!("{encoding}.mnw"));
    convert::write_mnw(&source, &file, encoding, GroupSize::new(group).expect("a group size"));
    let converted = Checkpoint::open(&file, IoBackend::Buffered).expect("a container");
    Weights::load(&converted, LoadOptions::default()).expect("weights")
}

/// Random requests for the synthetic model: greedy and sampled, long and short, many with a prefix in common.
pub fn synthetic_tasks(seed: u64, count: usize) -> Vec<Task> {
    let mut dice = Dice::new(seed);
    // The prefix is that of all seeds.
    let shared: Vec<u32> = (0..160).map(|index| (keyed(7, &[index]) % 470) as u32).collect();
    (0..count)
        .map(|index| {
            let mut prompt = shared[..dice.pick(&[0, 31, 32, 64, 100, 128])].to_vec();
            let own = 1 + dice.roll(40);
            prompt.extend((0..own).map(|_| dice.roll(470) as u32));
            let mut options = Options::serving(Algorithm::V22);
            options.max_post_steps = dice.roll(4);
            options.steps = 4 + dice.roll(12);
            options.threshold = dice.pick(&[0.5, 0.3, 0.9]);
            if dice.roll(3) == 0 {
                (options.temperature, options.top_k, options.top_p) = (0.8, 20, 0.95);
            }
            let mut max_new = dice.pick(&[1, 31, 32, 33, 64, 70]);
            if index < 4 {
                // So that there is always something to find, and some outgrow the pages they started with.
                prompt.splice(..prompt.len() - own, shared[..64].iter().copied());
                max_new = 110;
            }
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

/// Requests for the trained model: chats of the exam, every third with tools, some sampled; those of one task have a
/// system message in common.
pub fn exam_tasks(subject: &Subject, seed: u64, count: usize) -> Vec<Task> {
    let mut dice = Dice::new(seed);
    let questions: Vec<(bool, Vec<u32>)> = golden::json_lines("golden/tiny/eval.jsonl")
        .iter()
        .map(|question| {
            let ids = question["prompt_ids"].as_array().expect("ids");
            let ids: Vec<u32> = ids.iter().map(|id| id.as_u64().expect("an id") as u32).collect();
            (!question["tools"].is_null(), ids)
        })
        .filter(|(_, ids)| ids.len() < (PAGES_OF_ONE - 4) * 32)
        .collect();
    let (with_tools, plain): (Vec<_>, Vec<_>) = questions.into_iter().partition(|(has_tools, _)| *has_tools);
    let mut asked: Vec<Vec<u32>> = Vec::new();
    (0..count)
        .map(|index| {
            let among = if index % 3 == 0 { &with_tools } else { &plain };
            let prompt = match asked.last() {
                // Now and then the same again, so that there is something to find in any cache.
                Some(before) if index % 5 == 4 => Vec::clone(before),
                _ => among[dice.roll(among.len())].1.clone(),
            };
            if index % 3 == 0 {
                asked.push(prompt.clone());
            }
            let mut options = Options::serving(Algorithm::V22);
            if dice.roll(3) == 0 {
                (options.temperature, options.top_p) = (0.7, 0.95);
            }
            let cache = if index % 7 == 6 { Access::Private } else { Access::Shared };
            let max_new = if index < 3 { 96 } else { dice.pick(&[20, 64, 96]) };
            Task {
                prompt,
                max_new,
                options,
                seed: index as u64,
                stop_ids: Arc::clone(&subject.stop_ids),
                cache,
                language: None,
            }
        })
        .collect()
}

/// What must not change: tokens, reason, forwards of each block.
pub type Essence = (Vec<u32>, &'static str, Vec<usize>);

/// The essence of an outcome.
pub fn essence(outcome: &Outcome) -> Essence {
    let forwards = outcome.stats.blocks.iter().map(|block| block.forwards).collect();
    (outcome.tokens.clone(), outcome.reason.name(), forwards)
}

/// Runs one task with nothing beside it.
pub fn run(runner: &mut Runner, task: Task) -> Outcome {
    runner.run(task, &mut |_| ControlFlow::Continue(())).expect("an answer")
}

/// How requests come: all at once, or spread over the run; some are cancelled.
#[derive(Clone, Copy)]
pub struct Company {
    pub limits: Limits,
    /// At each step, this many of 100 times, another request arrives; 100 is all at once.
    pub arrivals: usize,
    /// Beside each request, this many of 100 times, one more that is cancelled after a few steps.
    pub aborted: usize,
    pub seed: u64,
}

/// Runs all tasks in company and returns their outcomes in order. Pages and holders must add up after every step, and
/// no page may be in use at the end.
pub fn run_together(runner: &mut Runner, tasks: &[Task], company: &Company) -> Vec<Outcome> {
    let mut dice = Dice::new(company.seed);
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

/// Submits tasks and cancels all of them at random points, wherever they are by then: waiting, reading their prompt,
/// refining, or about to commit. The same task comes again and again until `count` are aborted.
pub fn abort(runner: &mut Runner, tasks: &[Task], count: usize, seed: u64) {
    let mut dice = Dice::new(seed);
    let mut alive: Vec<RequestId> = Vec::new();
    let mut aborted = 0;
    while aborted < count {
        while alive.len() < 12 {
            alive.push(runner.submit(tasks[dice.roll(tasks.len())].clone()).expect("a task that fits"));
        }
        for report in runner.step().expect("a step").reports {
            if matches!(report.progress, Progress::Finished(_)) {
                alive.retain(|id| *id != report.id);
            }
        }
        runner.check().expect("pages and holders add up");
        while dice.roll(3) > 0 && !alive.is_empty() {
            runner.cancel(alive.swap_remove(dice.roll(alive.len())));
            runner.check().expect("pages and holders add up");
            aborted += 1;
        }
    }
    for id in alive {
        runner.cancel(id);
    }
    assert_eq!((runner.running(), runner.waiting(), runner.pages().running), (0, 0, 0));
}
