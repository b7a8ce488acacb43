//! What must be true of an output before work starts, so that nobody learns it after an hour.
//!
//! The writer checks again when it matters; these checks are for early and clear messages.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use minnow_common::units::HumanBytes;

use crate::failure::Failure;

/// The folder that `output` will lie in, if `output` names a file that may be written there.
pub(super) fn check_file(output: &Path, force: bool) -> Result<PathBuf, Failure> {
    let folder = folder_of(output)?;
    match fs::symlink_metadata(output) {
        Ok(found) if found.is_dir() => Err(Failure::at(output, "is a folder; name a file")),
        Ok(_) if !force => Err(Failure::at(output, "already exists; --force replaces it")),
        _ => Ok(folder),
    }
}

/// The folder that `folder` will lie in, if it may be made: there is none yet, or an empty one.
pub(super) fn check_new_folder(folder: &Path) -> Result<PathBuf, Failure> {
    let parent = folder_of(folder)?;
    match fs::symlink_metadata(folder) {
        Ok(found) if !found.is_dir() => Err(Failure::at(folder, "already exists and is no folder")),
        Ok(_) => match fs::read_dir(folder).map(|mut entries| entries.next().is_none()) {
            Ok(true) => Ok(parent),
            Ok(false) => Err(Failure::at(folder, "already exists and is not empty; name a new folder")),
            Err(error) => Err(Failure::at(folder, error)),
        },
        Err(_) => Ok(parent),
    }
}

fn folder_of(path: &Path) -> Result<PathBuf, Failure> {
    if path.file_name().is_none() {
        return Err(Failure::at(path, "does not end with a name"));
    }
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    match fs::metadata(&folder) {
        Ok(found) if found.is_dir() => Ok(folder),
        Ok(_) => Err(Failure::at(path, format!("{} is no folder", folder.display()))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(Failure::at(path, format!("folder {} does not exist", folder.display())))
        }
        Err(error) => Err(Failure::at(path, format!("folder {}: {error}", folder.display()))),
    }
}

/// Refuses an output that is one of the files it is made from, by whatever name.
pub(super) fn check_not_among<'a>(output: &Path, sources: impl Iterator<Item = &'a Path>) -> Result<(), Failure> {
    let identity = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let Some(target) = identity(output) else { return Ok(()) };
    for source in sources {
        if identity(source) == Some(target) {
            return Err(Failure::at(output, format!("is the source itself ({})", source.display())));
        }
    }
    Ok(())
}

/// Refuses `output` if its folder's file system has fewer free bytes than it will need.
pub(super) fn check_space(output: &Path, folder: &Path, needed_bytes: u64) -> Result<(), Failure> {
    // Some file systems do not know their size and report no blocks at all; then the writer will find out.
    let Ok(space) = rustix::fs::statvfs(folder) else { return Ok(()) };
    let free_bytes = space.f_bavail.saturating_mul(space.f_frsize);
    if space.f_blocks == 0 || free_bytes >= needed_bytes {
        return Ok(());
    }
    Err(Failure::at(
        output,
        format!(
            "needs {needed_bytes} bytes ({}), but {} has {free_bytes} free ({}): ENOSPC, no space left on device",
            HumanBytes(needed_bytes),
            folder.display(),
            HumanBytes(free_bytes)
        ),
    ))
}

/// A folder that is removed with all it holds unless it is published.
pub(super) struct TemporaryFolder {
    path: PathBuf,
    published: bool,
}

impl TemporaryFolder {
    /// Makes a new folder in `parent`, named after `folder` and this process.
    pub(super) fn create(folder: &Path, parent: &Path) -> Result<Self, Failure> {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let path = parent.join(format!(".{name}.{}-0.tmp", std::process::id()));
        fs::create_dir(&path).map_err(|error| Failure::at(folder, format!("{}: {error}", path.display())))?;
        Ok(Self { path, published: false })
    }

    /// Where it is until then.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the folder its final name. Fails if something that is not an empty folder has that name by now.
    pub(super) fn publish(mut self, folder: &Path, parent: &Path) -> Result<(), Failure> {
        let sync = |path: &Path| File::open(path).and_then(|opened| opened.sync_all());
        sync(&self.path).and_then(|()| fs::rename(&self.path, folder)).map_err(|error| Failure::at(folder, error))?;
        self.published = true;
        sync(parent).map_err(|error| Failure::at(folder, error))
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        if !self.published {
            // There is nobody left to tell if this fails too.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}
