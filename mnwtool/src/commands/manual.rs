//! `mnwtool manual`: the pages of `man`, made by `cli` from the command line itself.

use std::path::PathBuf;

use crate::failure::Failure;

/// What to write where.
#[derive(Debug)]
pub(crate) struct Options {
    /// Made if it is not there.
    pub folder: PathBuf,
    /// File names and contents.
    pub pages: Vec<(String, Vec<u8>)>,
}

/// Writes the pages, over older ones.
pub(crate) fn run(Options { folder, pages }: &Options) -> Result<(), Failure> {
    std::fs::create_dir_all(folder).map_err(|error| Failure::at(folder, error))?;
    for (name, text) in pages {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(|error| Failure::at(&path, error))?;
    }
    Ok(())
}
