//! Standard output and standard error, outside of the time in which the progress bar owns the terminal.

use std::io::{self, ErrorKind, Write};
use std::path::Path;

use crate::failure::Failure;

/// Writes a result to standard output. A reader that closed it early is no failure.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::of(format!("standard output: {error}"))),
        _ => Ok(()),
    }
}

/// Writes one JSON value and a line break to standard output.
pub(crate) fn print_json(value: &serde_json::Value) -> Result<(), Failure> {
    print(&format!("{value}\n"))
}

/// Tells of something that is no error, on standard error.
pub(crate) fn warn(path: &Path, message: &str) {
    say(&format!("{}: warning: {message}", path.display()));
}

/// Writes one line to standard error, after the program's name. Whatever could move the cursor is escaped, for paths
/// and names come from outside.
pub(crate) fn say(message: &str) {
    let mut line = String::from("mnwtool: ");
    for symbol in message.chars() {
        if symbol.is_control() { line.extend(symbol.escape_default()) } else { line.push(symbol) }
    }
    line.push('\n');
    // If standard error is closed there is no one left to tell.
    let _ = io::stderr().write_all(line.as_bytes());
}
