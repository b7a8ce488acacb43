//! safetensors: one file's header, and a folder of shards seen as one set of tensors.
//!
//! The format is described at <https://huggingface.co/docs/safetensors>. Only floating tensors are read; they are the
//! sources of conversion and what the BF16 releases ship as.

mod folder;
mod header;

pub(crate) use folder::folder_of;
pub use folder::{Folder, FolderError, INDEX_FILE, SINGLE_FILE, open_file, open_file_on, open_folder, open_folder_on};
pub use header::{HEADER_BYTES_MAX, HeaderError, StoredFloat, parse_header};
