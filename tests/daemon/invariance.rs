//! Law 3 on the engine: the tokens of a request depend on the request only. Random requests are run alone and cold, and
//! then in every company that the runner can put them into; the tokens and the forwards of every block must be the same.
//!
//! By default a few requests, in CI; with `MINNOW_LONG=200` two hundred of each kind.

use minnow_common::Encoding;
use minnow_tests::golden;
use minnowd::cache::Access;
use minnowd::engine::runner::{Limits, Runner, Task};
use minnowd::persist::{self, CacheKey, Identity};

use crate::company::{
    Company, Essence, PAGES_OF_ONE, Subject, abort, essence, exam_tasks, long_count, run_together, synthetic_tasks,
};

/// What happened on the runner before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    /// Nothing: the cache is cold.
    Nothing,
    /// The same requests.
    Same,
    /// Other requests, some with the same beginnings.
    Others,
    /// So many requests that were aborted at random points.
    Aborts(usize),
    /// The same requests in another process, whose cache was saved and restored.
    Restart,
}

/// One way of running the requests.
struct Setting {
    name: &'static str,
    company: Company,
    /// Whether there are so few pages that requests have to give way.
    is_tight: bool,
    threads: usize,
    /// Overrides what requests say about the cache.
    cache: Option<Access>,
    before: Before,
}

fn settings() -> Vec<Setting> {
    let setting = |name, (running_max, alone, mixed), arrivals, aborted| {
        let limits = Limits { running_max, prefill_blocks_alone: alone, prefill_blocks_mixed: mixed };
        let seed = running_max as u64 + arrivals as u64;
        let company = Company { limits, arrivals, aborted, seed };
        Setting { name, company, is_tight: false, threads: 2, cache: None, before: Before::Nothing }
    };
    vec![
        Setting { threads: 1, ..setting("two at a time", (2, 16, 2), 100, 0) },
        setting("four at random times, the shortest pieces of prompt", (4, 1, 1), 30, 0),
        Setting { threads: 3, ..setting("eight at random times", (8, 2, 1), 40, 0) },
        Setting { before: Before::Same, ..setting("sixteen at once, warm", (16, 5, 3), 100, 0) },
        Setting { before: Before::Others, ..setting("thirty-two, warm from others", (32, 16, 16), 100, 0) },
        Setting { cache: Some(Access::Private), ..setting("eight without cache", (8, 40, 40), 60, 0) },
        Setting { cache: Some(Access::Shared), ..setting("eight with cache", (8, 7, 2), 60, 0) },
        setting("six, and others that are cancelled", (6, 3, 2), 40, 60),
        Setting { is_tight: true, ..setting("so few pages that requests give way", (8, 4, 2), 100, 20) },
        Setting {
            before: Before::Aborts(if long_count().is_some() { 500 } else { 60 }),
            ..setting("after aborts", (8, 2, 2), 50, 0)
        },
        Setting { before: Before::Restart, ..setting("after a restart", (4, 16, 2), 100, 0) },
    ]
}

/// Runs `tasks` in every setting; each outcome must be what it was alone.
fn check(name: &str, subject: &Subject, tasks: &[Task], others: &[Task]) {
    let alone = subject.alone(tasks);
    for setting in settings() {
        let tasks: Vec<Task> =
            tasks.iter().map(|task| Task { cache: setting.cache.unwrap_or(task.cache), ..task.clone() }).collect();
        let mut runner = prepared(subject, &setting, &tasks, &alone, others);
        let hits_before = runner.cache_stats().hit_tokens;
        compare(name, &setting, &run_together(&mut runner, &tasks, &setting.company), &alone);
        let hits = runner.cache_stats().hit_tokens - hits_before;
        match setting.cache {
            Some(Access::Private) => assert_eq!(hits, 0, "{name}, {}: private requests found something", setting.name),
            _ => assert!(hits > 0, "{name}, {}: the cache was of no use", setting.name),
        }
        // The trained model's answers may all end before they need another page.
        if setting.is_tight && subject.text_is_noise() {
            assert!(runner.counters().preemptions > 0, "{name}: nothing had to give way");
        }
    }
}

/// A runner on which what is to come before has happened.
fn prepared(subject: &Subject, setting: &Setting, tasks: &[Task], alone: &[Essence], others: &[Task]) -> Runner {
    let largest = tasks.iter().map(|task| (task.prompt.len() + task.max_new).div_ceil(32)).max().unwrap_or(0);
    let pages = if setting.is_tight { largest + 2 } else { 32 * PAGES_OF_ONE };
    let fresh = || subject.runner(pages, setting.threads, setting.company.limits);
    let mut runner = fresh();
    match setting.before {
        Before::Nothing => {}
        Before::Same => compare("before", setting, &run_together(&mut runner, tasks, &setting.company), alone),
        Before::Others => drop(run_together(&mut runner, others, &setting.company)),
        Before::Aborts(count) => abort(&mut runner, tasks, count, 17),
        Before::Restart => {
            drop(run_together(&mut runner, tasks, &setting.company));
            let folder = tempfile::tempdir().expect("a temporary folder");
            let arithmetic = runner.backend().arithmetic();
            let identity = Identity { checkpoint: "the same", arithmetic: &arithmetic, program: minnowd::VERSION };
            let key = CacheKey::new(&identity, runner.backend().page_bytes());
            let saved = persist::save(folder.path(), &key, u64::MAX, runner.cache(), runner.backend()).expect("a file");
            assert!(saved.blocks > 0);
            runner = fresh();
            runner.restore(persist::open(folder.path(), &key).expect("a sound file").expect("a file"));
            // Half of it before the first request, the rest is never read: as when the process is asked at once.
            let report = runner.restore_some(saved.blocks / 2);
            assert!(report.is_none(), "there is more to restore");
            assert!(runner.pages().idle > 0);
        }
    }
    runner
}

fn compare(name: &str, setting: &Setting, outcomes: &[minnowd::engine::runner::Outcome], alone: &[Essence]) {
    for (index, (outcome, alone)) in outcomes.iter().zip(alone).enumerate() {
        assert_eq!(&essence(outcome), alone, "{name}, {}: request {index}", setting.name);
    }
}

#[test]
fn company_arrival_cuts_cache_threads_aborts_and_restarts_do_not_change_a_token_on_the_cpu() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let count = long_count().unwrap_or(12);
    let encodings = [None, Some((Encoding::I8Mma, 128)), Some((Encoding::I4Mma, 128)), Some((Encoding::Nvfp4, 16))];
    for encoding in encodings {
        let subject = Subject::synthetic(folder.path(), encoding);
        let name = encoding.map_or("bf16".to_owned(), |(encoding, _)| encoding.to_string());
        check(&name, &subject, &synthetic_tasks(7, count), &synthetic_tasks(8, count / 2));
        eprintln!("{name}: {count} requests, the same in all companies");
    }
}

#[test]
fn company_does_not_change_a_token_on_the_reference() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let subject = Subject::synthetic(folder.path(), None).on_reference();
    let count = long_count().map_or(6, |count| count.min(24));
    check("reference", &subject, &synthetic_tasks(7, count), &synthetic_tasks(8, count / 2));
}

#[test]
fn company_does_not_change_a_chat_or_a_tool_call_of_the_trained_model() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let embedded = Subject::trained(None, folder.path());
    let count = long_count().unwrap_or(6);
    check("embedded", &embedded, &exam_tasks(&embedded, 3, count), &exam_tasks(&embedded, 4, count / 2));
    let Some(count) = long_count() else { return };
    let Some(original) = golden::tiny_dir() else { return };
    for encoding in [None, Some((Encoding::I8Mma, 128)), Some((Encoding::Nvfp4, 16))] {
        let subject = Subject::trained(Some((&original, encoding)), folder.path());
        let name = encoding.map_or("tiny bf16".to_owned(), |(encoding, _)| format!("tiny {encoding}"));
        check(&name, &subject, &exam_tasks(&subject, 3, count), &exam_tasks(&subject, 4, count / 2));
        eprintln!("{name}: {count} requests, the same in all companies");
    }
}
