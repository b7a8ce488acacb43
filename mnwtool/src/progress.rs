//! The progress bar: the only writer to the terminal while a command works, and only if there is a terminal.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

/// Bytes that have been worked off, and on what. Clears itself when dropped.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// A bar on standard error, or nothing visible if that is no terminal or `wanted` is false.
    pub(crate) fn new(bytes: u64, wanted: bool) -> Self {
        if !wanted || !std::io::stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let bar = ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr());
        let template = "{bar:24} {binary_bytes} of {binary_total_bytes}, {speed}, {eta} left  {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.with_key("speed", speed));
        }
        Self(bar)
    }

    /// `bytes` more are done, the last ones of `tensor`.
    pub(crate) fn advance(&self, bytes: u64, tensor: &str) {
        // What is not shown need not be said, once for each unit.
        if !self.0.is_hidden() {
            self.0.set_message(tensor.to_owned());
        }
        self.0.inc(bytes);
    }

    /// `bytes` that were done must be done again.
    pub(crate) fn take_back(&self, bytes: u64) {
        self.0.set_position(self.0.position().saturating_sub(bytes));
    }

    /// Does `work`, which writes to the terminal, with the bar out of the way.
    pub(crate) fn aside(&self, work: impl FnOnce()) {
        self.0.suspend(work);
    }

    /// `bytes` were done before: they count, but not as fast.
    pub(crate) fn start_at(&self, bytes: u64) {
        self.0.set_position(bytes);
        self.0.reset_eta();
    }
}

/// Gigabytes a second, with the unit of the summary.
fn speed(state: &ProgressState, out: &mut dyn std::fmt::Write) {
    // Writing to the bar's line cannot fail.
    let _ = write!(out, "{:.2} GB/s", state.per_sec() / 1e9);
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
