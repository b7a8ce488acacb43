//! Where the engine's thread and everyone else meet: the bounded inbox, the state, and what the engine last said of itself.
//!
//! One mutex and one condition. The engine waits for the condition only when it has nothing at all to do, and looks at
//! everything again after each wake-up; everyone who puts something in or changes the state wakes it. `tests/loom` runs
//! this file under every schedule, which is why the primitives come from `super::sync`.
//!
//! Always holds: an item that was taken in is given out exactly once, by [`Mailbox::take`] to the engine or by
//! [`Mailbox::drain`] or [`Mailbox::fail`] to whoever has to refuse it; nothing is taken in unless the state is ready.

use std::collections::VecDeque;

use super::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use super::{State, SubmitError};

/// What the inbox holds.
pub trait Item {
    /// Forgets requests that nobody waits for any more.
    fn forget_abandoned(&mut self);

    /// Its requests that someone waits for; without any, the item is of no use.
    fn count(&self) -> usize;
}

/// How many requests may be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Requests in the inbox and with the engine.
    pub present_max: usize,
    /// Those of them that may wait, as refusals say.
    pub waiting_max: usize,
}

/// What the engine said of itself last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Requests that run.
    pub active: usize,
    /// Requests that the engine has taken and not started.
    pub queued: usize,
}

/// The meeting point. `T` is whatever else the engine publishes.
pub struct Mailbox<I, T> {
    inner: Mutex<Inner<I, T>>,
    changed: Condvar,
    bounds: Bounds,
}

struct Inner<I, T> {
    state: State,
    inbox: VecDeque<I>,
    occupancy: Occupancy,
    is_waiting: bool,
    published: T,
}

/// What can be seen from outside.
#[derive(Clone, Copy, Debug)]
pub struct View<T> {
    /// What the engine is doing.
    pub state: State,
    /// Requests that run.
    pub active: usize,
    /// Requests that wait, in the inbox or with the engine.
    pub queued: usize,
    /// Whether the engine waits for something to do.
    pub is_waiting: bool,
    /// What it published last.
    pub published: T,
}

/// What the engine has to do besides new items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Nothing: wait for items.
    None,
    /// Something that a drain makes unnecessary.
    Optional,
    /// Requests.
    Requests,
}

impl<I: Item, T: Copy> Mailbox<I, T> {
    /// An empty mailbox whose engine is still to come.
    pub fn new(bounds: Bounds, published: T) -> Self {
        let inner = Inner {
            state: State::Loading,
            inbox: VecDeque::new(),
            occupancy: Occupancy::default(),
            is_waiting: false,
            published,
        };
        Self { inner: Mutex::new(inner), changed: Condvar::new(), bounds }
    }

    /// The engine is there. A drain that came first still holds.
    pub fn open(&self) {
        let mut inner = self.lock();
        if inner.state == State::Loading {
            inner.state = State::Ready;
        }
    }

    /// Takes an item in, or says why not.
    pub fn submit(&self, item: I) -> Result<(), SubmitError> {
        let mut inner = self.lock();
        match inner.state {
            State::Ready => {}
            State::Loading => return Err(SubmitError::Loading),
            State::Draining => return Err(SubmitError::Draining),
            State::Failed => return Err(SubmitError::WorkerFailed),
        }
        inner.inbox.iter_mut().for_each(Item::forget_abandoned);
        inner.inbox.retain(|item| item.count() > 0);
        let queued = inner.occupancy.queued + inner.in_inbox();
        if inner.occupancy.active + queued + item.count() > self.bounds.present_max {
            return Err(SubmitError::QueueFull { queued, capacity: self.bounds.waiting_max });
        }
        inner.inbox.push_back(item);
        drop(inner);
        self.changed.notify_all();
        Ok(())
    }

    /// Refuses new items from now on. Gives the ones that the engine has not taken, which are to be refused as well.
    pub fn drain(&self) -> VecDeque<I> {
        let mut inner = self.lock();
        if inner.state != State::Failed {
            inner.state = State::Draining;
        }
        let inbox = std::mem::take(&mut inner.inbox);
        drop(inner);
        self.changed.notify_all();
        inbox
    }

    /// The engine has failed. Gives the items that it has not taken.
    pub fn fail(&self) -> VecDeque<I> {
        let mut inner = self.lock();
        inner.state = State::Failed;
        inner.occupancy = Occupancy::default();
        std::mem::take(&mut inner.inbox)
    }

    /// For the engine: new items; waits for them if there is nothing else to do. `None` once drained and done.
    pub fn take(&self, work: Work) -> Option<VecDeque<I>> {
        let mut inner = self.lock();
        loop {
            let is_draining = inner.state == State::Draining;
            let is_busy = match work {
                Work::None => false,
                Work::Optional => !is_draining,
                Work::Requests => true,
            };
            if is_busy || !inner.inbox.is_empty() {
                inner.is_waiting = false;
                let taken = std::mem::take(&mut inner.inbox);
                // They are with the engine from here on, so that no one is let in for a place that is taken.
                inner.occupancy.queued += taken.iter().map(Item::count).sum::<usize>();
                return Some(taken);
            }
            if is_draining {
                return None;
            }
            inner.is_waiting = true;
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// For the engine: what it has now.
    pub fn publish(&self, occupancy: Occupancy, published: T) {
        let mut inner = self.lock();
        inner.occupancy = occupancy;
        inner.published = published;
    }

    /// Whether a drain has begun.
    pub fn is_draining(&self) -> bool {
        self.lock().state == State::Draining
    }

    /// What can be seen from outside.
    pub fn view(&self) -> View<T> {
        let inner = self.lock();
        View {
            state: inner.state,
            active: inner.occupancy.active,
            queued: inner.occupancy.queued + inner.in_inbox(),
            is_waiting: inner.is_waiting,
            published: inner.published,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner<I, T>> {
        // Nothing in here panics while it holds the lock, and every update is complete when it is released.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<I: Item, T> Inner<I, T> {
    /// Requests in the inbox.
    fn in_inbox(&self) -> usize {
        self.inbox.iter().map(Item::count).sum()
    }
}
