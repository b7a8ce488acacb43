//! The engine's mailbox under every schedule of the threads that meet in it.
//!
//! The file under test is compiled a second time here, on loom's primitives: loom runs each scenario again and again
//! until every order of lock, wait and wake-up has been seen, and reports a deadlock if a wake-up can be lost. What else
//! crosses threads is std's and tokio's own (a flag, a channel); `docs/decisions/threads-meet-in-a-mailbox.md` says why
//! that is all.

#[expect(dead_code, reason = "the program uses all of it, the scenarios here what threads meet in")]
#[path = "../../minnowd/src/engine/mailbox.rs"]
mod mailbox;

mod sync {
    pub(super) use loom::sync::{Condvar, Mutex, MutexGuard};
    pub(super) use std::sync::PoisonError;
}

use loom::sync::Arc;
use loom::thread;

use mailbox::{Bounds, Item, Mailbox, Occupancy, Work};
use minnowd::engine::{State, SubmitError};

/// A request with a name.
struct Request(u8);

impl Item for Request {
    fn forget_abandoned(&mut self) {}

    fn count(&self) -> usize {
        1
    }
}

type Box = Arc<Mailbox<Request, ()>>;

fn mailbox(present_max: usize) -> Box {
    let mailbox = Mailbox::new(Bounds { present_max, waiting_max: present_max }, ());
    mailbox.open();
    Arc::new(mailbox)
}

/// An engine whose requests take one step each. Gives the names of those it ran.
fn serve(mailbox: &Box) -> Vec<u8> {
    let mut ran = Vec::new();
    let mut running = Vec::new();
    loop {
        let work = if running.is_empty() { Work::None } else { Work::Requests };
        let Some(taken) = mailbox.take(work) else { return ran };
        running.extend(taken.into_iter().map(|Request(name)| name));
        ran.append(&mut running);
        mailbox.publish(Occupancy { active: 0, queued: 0 }, ());
    }
}

fn names(items: impl IntoIterator<Item = Request>) -> Vec<u8> {
    items.into_iter().map(|Request(name)| name).collect()
}

#[test]
fn every_request_is_run_or_given_back_once_and_a_drain_always_ends() {
    loom::model(|| {
        let mailbox = mailbox(8);
        let engine = thread::spawn({
            let mailbox = Arc::clone(&mailbox);
            move || serve(&mailbox)
        });
        let client = thread::spawn({
            let mailbox = Arc::clone(&mailbox);
            move || [1, 2].map(|name| (name, mailbox.submit(Request(name))))
        });
        let mut seen = names(mailbox.drain());
        let sent = client.join().expect("a client");
        // No wake-up may be lost: loom calls it a deadlock if the engine sleeps for ever.
        seen.extend(engine.join().expect("an engine"));
        seen.sort_unstable();
        let accepted: Vec<u8> = sent.iter().filter(|(_, answer)| answer.is_ok()).map(|(name, _)| *name).collect();
        assert_eq!(seen, accepted, "each one once, and no other");
        assert!(sent.iter().all(|(_, answer)| matches!(answer, Ok(()) | Err(SubmitError::Draining))));
    });
}

#[test]
fn two_clients_never_share_the_last_place() {
    loom::model(|| {
        let mailbox = mailbox(1);
        let clients = [1, 2].map(|name| {
            let mailbox = Arc::clone(&mailbox);
            thread::spawn(move || mailbox.submit(Request(name)).is_ok())
        });
        let engine = thread::spawn({
            let mailbox = Arc::clone(&mailbox);
            move || {
                // It takes what comes first and has not finished it when the other one asks.
                let taken = names(mailbox.take(Work::None).expect("nobody drains"));
                mailbox.publish(Occupancy { active: taken.len(), queued: 0 }, ());
                taken.len()
            }
        });
        let accepted =
            clients.map(|client| client.join().expect("a client")).into_iter().filter(|&is_in| is_in).count();
        assert_eq!((accepted, engine.join().expect("an engine")), (1, 1));
    });
}

#[test]
fn what_a_failed_engine_leaves_is_given_back_once_and_nothing_more_is_taken_in() {
    loom::model(|| {
        let mailbox = mailbox(8);
        let engine = thread::spawn({
            let mailbox = Arc::clone(&mailbox);
            move || names(mailbox.fail())
        });
        let sent = [1, 2].map(|name| (name, mailbox.submit(Request(name))));
        let left = engine.join().expect("an engine");
        let accepted: Vec<u8> = sent.iter().filter(|(_, answer)| answer.is_ok()).map(|(name, _)| *name).collect();
        assert_eq!(left, accepted);
        assert_eq!(mailbox.submit(Request(3)), Err(SubmitError::WorkerFailed));
        assert_eq!(mailbox.view().state, State::Failed);
    });
}

#[test]
fn a_drain_makes_optional_work_unnecessary_and_wakes_the_engine() {
    loom::model(|| {
        let mailbox = mailbox(8);
        let engine = thread::spawn({
            let mailbox = Arc::clone(&mailbox);
            move || {
                let mut pieces = 2;
                loop {
                    let work = if pieces > 0 { Work::Optional } else { Work::None };
                    if mailbox.take(work).is_none() {
                        return pieces;
                    }
                    pieces -= 1;
                }
            }
        });
        assert!(mailbox.drain().is_empty());
        assert!(engine.join().expect("an engine") <= 2);
    });
}
