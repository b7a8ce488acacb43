//! The scheduler's rules, one by one, and ten thousand random workloads against a simulated engine.

use std::collections::HashMap;

use minnow_common::random::keyed;

use super::*;

const LIMITS: Limits = Limits { running_max: 4, prefill_blocks_alone: 16, prefill_blocks_mixed: 2 };
const BLOCK_READY: Phase = Phase::Block { needs_page: false };

fn running(phases: &[Phase]) -> Scheduler {
    let mut scheduler = Scheduler::new(LIMITS);
    for (index, phase) in phases.iter().enumerate() {
        scheduler.enqueue(RequestId(index as u64));
        let _ = scheduler.start(*phase);
    }
    scheduler
}

#[test]
fn requests_start_in_the_order_they_came() {
    let mut scheduler = Scheduler::new(LIMITS);
    for id in 0..6 {
        scheduler.enqueue(RequestId(id));
    }
    for id in 0..4 {
        assert_eq!(scheduler.next_to_start(), Some(RequestId(id)));
        let _ = scheduler.start(BLOCK_READY);
    }
    assert_eq!(scheduler.next_to_start(), None, "four slots are taken");
    scheduler.remove(RequestId(1));
    assert_eq!(scheduler.next_to_start(), Some(RequestId(4)));
}

#[test]
fn a_start_leaves_running_requests_the_pages_they_are_about_to_take() {
    let scheduler = running(&[BLOCK_READY, Phase::Prefill { blocks: 5 }]);
    assert!(scheduler.has_room(3, 10));
    assert!(!scheduler.has_room(4, 10));
    assert!(Scheduler::new(LIMITS).has_room(10, 3), "alone, a request starts and takes what there is");
}

#[test]
fn every_block_takes_part_and_one_prompt_is_read() {
    let scheduler = running(&[
        BLOCK_READY,
        Phase::Prefill { blocks: 9 },
        Phase::Block { needs_page: true },
        Phase::Prefill { blocks: 9 },
    ]);
    let plan = scheduler.plan(100);
    assert_eq!(plan.blocks, [RequestId(0), RequestId(2)]);
    assert_eq!(plan.prefill, Some((RequestId(1), 2)));
    assert_eq!(running(&[Phase::Prefill { blocks: 40 }]).plan(100).prefill, Some((RequestId(0), 16)));
}

#[test]
fn prompts_take_no_more_time_than_refinement() {
    let mut scheduler = running(&[BLOCK_READY, Phase::Prefill { blocks: 1000 }]);
    let (mut refining, mut reading) = (0.0, 0.0);
    for _ in 0..1000 {
        let plan = scheduler.plan(10_000);
        assert_eq!(plan.blocks, [RequestId(0)]);
        // A block costs 1, a piece of prompt 3 more.
        let cost = if plan.prefill.is_some() { 4.0 } else { 1.0 };
        refining += 1.0;
        reading += cost - 1.0;
        scheduler.measured(&plan, cost);
    }
    assert!(reading <= refining + 8.0, "{reading} against {refining}");
    assert!(reading >= refining * 0.9, "the prompt is not starved either: {reading} against {refining}");
}

#[test]
fn when_all_wait_for_pages_the_youngest_gives_way() {
    let mut scheduler = running(&[Phase::Block { needs_page: true }, Phase::Block { needs_page: true }]);
    let plan = scheduler.plan(0);
    assert!(plan.is_empty());
    assert_eq!(plan.preempt, Some(RequestId(1)));
    scheduler.preempted(RequestId(1));
    assert_eq!((scheduler.running(), scheduler.waiting()), (1, 1));
    scheduler.enqueue(RequestId(2));
    assert_eq!(scheduler.next_to_start(), Some(RequestId(1)), "it keeps its place in the queue");
    assert_eq!(scheduler.plan(2).blocks, [RequestId(0)]);
}

/// A simulated request: so many prompt blocks, so many output blocks of so many steps each.
#[derive(Clone, Copy, Debug)]
struct Work {
    prompt: usize,
    output: usize,
    steps: usize,
    /// Prompt and output blocks whose K/V exist.
    done: usize,
    /// Steps of the current block.
    step: usize,
    pages: usize,
}

impl Work {
    fn phase(&self, finished: usize) -> Phase {
        let known = self.prompt + finished;
        if self.done < known {
            return Phase::Prefill { blocks: known - self.done };
        }
        Phase::Block { needs_page: self.pages <= self.done }
    }
}

#[test]
fn ten_thousand_random_workloads_end_within_their_budget_and_without_starvation() {
    for workload in 0..10_000u64 {
        let number = |index: u64, limit: u64| (keyed(workload, &[index]) % limit) as usize;
        let pages = 8 + number(0, 40);
        let limits = Limits {
            running_max: 1 + number(1, 6),
            prefill_blocks_alone: 1 + number(2, 16),
            prefill_blocks_mixed: 1 + number(3, 3),
        };
        let count = 1 + number(4, 12) as u64;
        let mut work: HashMap<RequestId, Work> = HashMap::new();
        let mut finished: HashMap<RequestId, usize> = HashMap::new();
        let mut scheduler = Scheduler::new(limits);
        let mut total_steps = 0;
        for id in 0..count {
            let prompt = number(100 + id * 3, pages as u64 / 2);
            let output = 1 + number(101 + id * 3, (pages - prompt) as u64 - 1);
            let steps = 1 + number(102 + id * 3, 6);
            work.insert(RequestId(id), Work { prompt, output, steps, done: 0, step: 0, pages: 0 });
            finished.insert(RequestId(id), 0);
            scheduler.enqueue(RequestId(id));
            total_steps += prompt + output * steps;
        }
        let mut first_start = Vec::new();
        let mut steps = 0;
        while !work.is_empty() {
            let used: usize = work.values().map(|work| work.pages).sum();
            assert!(used <= pages, "workload {workload}: {used} of {pages} pages");
            let mut available = pages - used;
            while let Some(id) = scheduler.next_to_start() {
                let wanted = work[&id].prompt + finished[&id] + 1;
                if !scheduler.has_room(wanted, available) {
                    break;
                }
                assert_eq!(scheduler.start(work[&id].phase(finished[&id])), id);
                if !first_start.contains(&id) {
                    first_start.push(id);
                }
                available = pages - work.values().map(|work| work.pages).sum::<usize>();
            }
            let plan = scheduler.plan(available);
            if plan.is_empty() {
                let id = plan.preempt.unwrap_or_else(|| panic!("workload {workload}: nothing runs"));
                assert!(scheduler.running() > 1, "workload {workload}: a request alone is preempted");
                let entry = work.get_mut(&id).expect("a running request");
                (entry.pages, entry.done, entry.step) = (0, 0, 0);
                scheduler.preempted(id);
                continue;
            }
            steps += 1;
            // Preempted work is done again, but the oldest request goes on in every step or every other one.
            assert!(steps <= 4 * (total_steps + 1) * count as usize, "workload {workload} does not end");
            if let Some((id, blocks)) = plan.prefill {
                let entry = work.get_mut(&id).expect("a running request");
                entry.done += blocks;
                entry.pages = entry.pages.max(entry.done);
            }
            for id in &plan.blocks {
                let entry = work.get_mut(id).expect("a running request");
                entry.pages = entry.pages.max(entry.done + 1);
                entry.step += 1;
                if entry.step == entry.steps {
                    entry.step = 0;
                    entry.done += 1;
                    *finished.get_mut(id).expect("a request") += 1;
                    if finished[id] == entry.output {
                        work.remove(id);
                        scheduler.remove(*id);
                        continue;
                    }
                }
            }
            scheduler.measured(&plan, 1.0 + plan.prefill.map_or(0.0, |(_, blocks)| blocks as f64));
            for (id, entry) in &work {
                scheduler.set_phase(*id, entry.phase(finished[id]));
            }
        }
        assert!(first_start.is_sorted(), "workload {workload}: started out of order");
    }
}
