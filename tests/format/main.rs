//! `.mnw`, safetensors and file access, against the golden and hostile files.

mod allocation;
mod containers;
mod hostile;
mod io;
mod mutation;
mod safetensors;
mod writer;
