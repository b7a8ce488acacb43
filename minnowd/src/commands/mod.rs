//! What the program does: one file, one verb.

pub mod bench;
pub mod eval;
pub mod generate;
pub mod serve;
pub mod verify;
