//! The two programs as a user sees them: arguments, messages, exit codes, files.

mod mnwtool;
mod mnwtool_refusals;
