//! `.mnw`, safetensors and file access, against the golden and hostile files.

mod allocation;
mod containers;
mod faults;
mod findings;
mod hostile;
mod io;
mod mutation;
mod resume;
mod safetensors;
mod synthetic;
mod writer;
