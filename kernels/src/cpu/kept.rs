//! Memory that is used again: fresh pages cost more than what most of it is needed for.
//!
//! Each thread keeps what it used last. Scratch of a task is borrowed for the task, which starts no other work, so it is
//! never asked for twice.

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
