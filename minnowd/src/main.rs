//! `minnowd`: parse, call, map the outcome to an exit code.

use minnowd::arenas;
use minnowd::supervisor::Supervisor;

fn main() -> std::process::ExitCode {
    // SAFETY: this is the first thing the program does, so no other thread runs and nothing was opened.
    let supervisor = unsafe {
        arenas::share();
        Supervisor::from_environment()
    };
    minnowd::cli::main(supervisor)
}
