//! Memory that is used again: fresh pages cost more than what most of it is needed for.
//!
//! Each thread keeps what it used last. Scratch of a task is borrowed for the task, which starts no other work, so it is
//! never asked for twice; what lives while other tasks run is taken out meanwhile.

/// Runs `work` with what this thread keeps in `kept`.
macro_rules! with_kept {
    ($type:ty, $work:expr) => {{
        thread_local! {
            static KEPT: std::cell::RefCell<$type> = std::cell::RefCell::new(<$type>::default());
        }
        KEPT.with_borrow_mut($work)
    }};
}
pub(super) use with_kept;

/// [`with_kept`] for work that starts other work: a thread that waits for it may be given the like, which then finds nothing
/// kept and starts with the default.
macro_rules! with_taken {
    ($type:ty, $work:expr) => {{
        thread_local! {
            static KEPT: std::cell::Cell<$type> = std::cell::Cell::new(<$type>::default());
        }
        let mut taken = KEPT.take();
        let result = $work(&mut taken);
        KEPT.set(taken);
        result
    }};
}
pub(super) use with_taken;
