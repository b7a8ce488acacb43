//! `minnowd`: parse, call, map the outcome to an exit code.

fn main() -> std::process::ExitCode {
    minnowd::cli::main()
}
