//! SIGINT and SIGTERM: the first asks the running command to stop and clean up. The second ends the program at once, for
//! a disk that hangs; only then may a temporary file stay behind.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// The number of a signal that asked for an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interrupt(i32);

impl Interrupt {
    /// The exit code that shells expect: 128 and the signal's number.
    pub(crate) fn exit_code(self) -> u8 {
        128 + self.0 as u8
    }
}

/// The signals received since [`Signals::listen`].
#[derive(Debug, Default)]
pub(crate) struct Signals(Arc<AtomicUsize>);

impl Signals {
    /// Takes over SIGINT and SIGTERM.
    pub(crate) fn listen() -> io::Result<Self> {
        let signals = Self::default();
        let armed = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // In this order the first signal only arms the exit that the second one takes.
            flag::register_conditional_shutdown(signal, i32::from(Interrupt(signal).exit_code()), Arc::clone(&armed))?;
            flag::register(signal, Arc::clone(&armed))?;
            flag::register_usize(signal, Arc::clone(&signals.0), signal as usize)?;
        }
        Ok(signals)
    }

    /// The signal that asks for an end, if one came.
    pub(crate) fn received(&self) -> Option<Interrupt> {
        match self.0.load(Ordering::Relaxed) {
            0 => None,
            signal => Some(Interrupt(signal as i32)),
        }
    }
}
