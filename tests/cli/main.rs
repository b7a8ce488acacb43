//! The two programs as a user sees them: arguments, messages, exit codes, files.

mod minnowd;
mod mnwtool;
mod mnwtool_compare;
mod mnwtool_field;
mod mnwtool_hub;
mod mnwtool_publish;
mod mnwtool_refusals;
mod settings;
