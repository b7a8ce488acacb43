//! Who takes the next step: queue, admission, the mix of prefill and refinement, preemption. Plain data: no model, no
//! clock, no text. The engine says what its requests need and how long steps took; the answers depend on that only.
//!
//! Rules, in order of strength:
//! - First come, first served: requests start in the order they came. While the first one waiting does not fit, none
//!   after it starts, so nothing starves.
//! - A request starts when the pages for its prompt and its first block are there, and one more for each running
//!   request, so that those can go on.
//! - Every running request that refines a block takes part in every step. One prompt is read at a time, the oldest.
//! - While others refine, reading prompts may take no more time in the long run than refining does: a step with a
//!   piece of prompt must be earned by steps without. So running streams keep at least half of their speed.
//! - Hence a bound: the oldest running request ends after at most twice the time of its own steps, and each request
//!   starts after at most twice the steps of those that came before it, whatever comes later.
//! - A request that needs a page when there is none waits. When all wait, the youngest gives its pages back and is
//!   computed again later, with the same result; the oldest never is. A request alone always has room: whoever made
//!   it checked it against the whole cache.

use std::collections::VecDeque;

/// Names a request; given out in the order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Bounds of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests that run at once; at least 1.
    pub running_max: usize,
    /// Blocks of a prompt read in one step when nothing is refined.
    pub prefill_blocks_alone: usize,
    /// Blocks of a prompt read in one step together with refinement.
    pub prefill_blocks_mixed: usize,
}

/// What a running request needs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// So many whole blocks of tokens have no K/V yet.
    Prefill {
        /// At least 1.
        blocks: usize,
    },
    /// One block: a refinement, or a final block's K/V computed again.
    Block {
        /// Whether the block has no page yet.
        needs_page: bool,
    },
    /// Nothing for now: its client has not taken what there is.
    Held,
}

/// What to do in the next step. Requests are in the order of arrival.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Requests that evaluate their block.
    pub blocks: Vec<RequestId>,
    /// The request whose prompt is read on, and how many blocks of it.
    pub prefill: Option<(RequestId, usize)>,
    /// Give this request's pages back, call [`Scheduler::preempted`] and plan again.
    pub preempt: Option<RequestId>,
}

impl Plan {
    /// Whether there is nothing to evaluate: all are held, or a request has to give way first.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.prefill.is_none()
    }
}

/// The queue and the running requests.
#[derive(Clone, Debug)]
pub struct Scheduler {
    limits: Limits,
    /// Sorted by arrival.
    waiting: VecDeque<RequestId>,
    /// Sorted by arrival.
    running: Vec<(RequestId, Phase)>,
    /// Time that refinement has taken and prompt reading has not, while both wanted to: may be negative.
    earned: f64,
    /// What a step without prompt takes lately.
    usual: f64,
}

/// Earned time is kept up to this many usual steps, so that a long quiet time does not become a long stall.
const EARNED_STEPS_MAX: f64 = 2.0;
/// Weight of the newest step in the usual one.
const USUAL_WEIGHT: f64 = 0.2;

impl Scheduler {
    /// An empty scheduler.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, waiting: VecDeque::new(), running: Vec::new(), earned: 0.0, usual: 0.0 }
    }

    /// Puts a request at the end of the queue. Ids must ascend.
    pub fn enqueue(&mut self, id: RequestId) {
        debug_assert!(self.waiting.back().is_none_or(|last| *last < id));
        self.waiting.push_back(id);
    }

    /// Requests waiting.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Requests running.
    #[must_use]
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// The request that starts next, if a slot is free. The engine then asks [`has_room`](Self::has_room) and calls
    /// [`start`](Self::start).
    #[must_use]
    pub fn next_to_start(&self) -> Option<RequestId> {
        self.waiting.front().copied().filter(|_| self.running.len() < self.limits.running_max)
    }

    /// Whether a request that needs `wanted` pages for its prompt and first block may start when `available` pages are
    /// free or can be freed: what running requests are about to take is left to them.
    #[must_use]
    pub fn has_room(&self, wanted: usize, available: usize) -> bool {
        let promised: usize = self
            .running
            .iter()
            .map(|(_, phase)| match phase {
                Phase::Prefill { blocks } => blocks + 1,
                Phase::Block { .. } | Phase::Held => 1,
            })
            .sum();
        wanted + promised <= available || self.running.is_empty()
    }

    /// Moves the first waiting request to the running ones.
    ///
    /// # Panics
    /// If nothing waits.
    pub fn start(&mut self, phase: Phase) -> RequestId {
        let id = self.waiting.pop_front().expect("a request waits");
        let index = self.running.partition_point(|(other, _)| *other < id);
        self.running.insert(index, (id, phase));
        id
    }

    /// Says what a running request needs next.
    pub fn set_phase(&mut self, id: RequestId, phase: Phase) {
        if let Some(entry) = self.running.iter_mut().find(|(other, _)| *other == id) {
            entry.1 = phase;
        }
    }

    /// Forgets a request, wherever it is.
    pub fn remove(&mut self, id: RequestId) {
        self.waiting.retain(|other| *other != id);
        self.running.retain(|(other, _)| *other != id);
    }

    /// Moves a running request back to its place in the queue.
    pub fn preempted(&mut self, id: RequestId) {
        self.running.retain(|(other, _)| *other != id);
        let index = self.waiting.partition_point(|other| *other < id);
        self.waiting.insert(index, id);
    }

    /// Chooses the next step when `available` pages are free or can be freed.
    #[must_use]
    pub fn plan(&self, available: usize) -> Plan {
        let mut plan = Plan::default();
        let mut left = available;
        let mut is_short = false;
        for (id, phase) in &self.running {
            match *phase {
                Phase::Block { needs_page: false } => plan.blocks.push(*id),
                Phase::Block { needs_page: true } if left > 0 => {
                    left -= 1;
                    plan.blocks.push(*id);
                }
                Phase::Block { .. } => is_short = true,
                Phase::Prefill { .. } => is_short |= left == 0,
                Phase::Held => {}
            }
        }
        let blocks_max = if plan.blocks.is_empty() {
            self.limits.prefill_blocks_alone
        } else if self.earned >= 0.0 {
            self.limits.prefill_blocks_mixed
        } else {
            0
        };
        plan.prefill = self.oldest_prefill().and_then(|(id, blocks)| {
            let blocks = blocks.min(blocks_max).min(left);
            (blocks > 0).then_some((id, blocks))
        });
        if plan.is_empty() && is_short {
            plan.preempt = self.running.last().map(|(id, _)| *id);
        }
        plan
    }

    /// Reports how long the step of `plan` took, in any unit that stays the same.
    pub fn measured(&mut self, plan: &Plan, cost: f64) {
        if plan.blocks.is_empty() {
            return;
        }
        if plan.prefill.is_some() {
            // Refining has taken its usual time of this step, reading the prompt the rest.
            self.earned += self.usual - (cost - self.usual).max(0.0);
        } else {
            self.usual = if self.usual == 0.0 { cost } else { self.usual + (cost - self.usual) * USUAL_WEIGHT };
            if self.oldest_prefill().is_some() {
                self.earned += cost;
            }
        }
        self.earned = self.earned.min(EARNED_STEPS_MAX * self.usual);
    }

    fn oldest_prefill(&self) -> Option<(RequestId, usize)> {
        self.running.iter().find_map(|(id, phase)| match phase {
            Phase::Prefill { blocks } => Some((*id, *blocks)),
            Phase::Block { .. } | Phase::Held => None,
        })
    }
}

#[cfg(test)]
mod tests;
