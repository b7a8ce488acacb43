//! A folder of safetensors shards as one set of tensors, checked against its index both ways.
//!
//! The index alone decides which files belong to the checkpoint: another set of weights in the same folder is named in
//! a warning and otherwise left alone. Every tensor that the index names must be in its shard, and the other way round.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, de};
use thiserror::Error;

use super::header::{HeaderError, StoredFloat, parse_header};
use crate::io::{Disk, IoBackend, IoError, ReadAt, open_on, system_disk};
use crate::names::shortlist;

/// The file that says which shard has which tensor.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// The only shard of a folder without an index.
pub const SINGLE_FILE: &str = "model.safetensors";

/// The longest index: five times what the largest released model needs for each of a million tensors.
const INDEX_BYTES_MAX: u64 = 64 << 20;
/// Shards open at one time; a descriptor each.
const SHARDS_MAX: usize = 512;

/// The tensors of a checkpoint and the open files that hold them.
#[derive(Debug)]
pub struct Folder {
    /// The open shards, in order of their names.
    pub shards: Vec<Arc<dyn ReadAt>>,
    /// Each tensor by name, with the number of its shard.
    pub tensors: BTreeMap<String, (usize, StoredFloat)>,
    /// What was left aside, in words.
    pub warnings: Vec<String>,
}

/// Why a folder is refused. Every message starts with a path.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say what each field is")]
pub enum FolderError {
    /// A file cannot be opened or read.
    #[error(transparent)]
    Io(#[from] IoError),
    /// A shard's header is refused.
    #[error("{file}: {error}")]
    Header { file: String, error: HeaderError },
    /// There are no weights where they should be.
    #[error("{folder}: has neither {INDEX_FILE} nor {SINGLE_FILE}{found}")]
    NoWeights { folder: String, found: String },
    /// The index is not what an index is.
    #[error("{file}: is not a valid index: {error}")]
    Index { file: String, error: String },
    /// A shard name that leads out of the folder.
    #[error("{file}: shard name {shard:?} is not a plain file name")]
    ShardName { file: String, shard: String },
    /// More shards than files may be open.
    #[error("{file}: names {count} shards, more than {SHARDS_MAX}")]
    ShardCount { file: String, count: usize },
    /// Shards that are not there.
    #[error("{folder}: {} of {shards} shards are missing: {}", .missing.len(), missing_list(.missing))]
    MissingShards {
        folder: String,
        shards: usize,
        /// Names, and how many tensors the index has in each.
        missing: Vec<(String, usize)>,
    },
    /// The index names tensors that its shards do not have.
    #[error("{file}: names {count} tensors that {shard} does not have: {names}")]
    NotInShard { file: String, shard: String, count: usize, names: String },
    /// A shard has tensors that the index does not name.
    #[error("{shard}: has {count} tensors that {INDEX_FILE} does not name: {names}")]
    NotInIndex { shard: String, count: usize, names: String },
    /// Two shards have the same tensor.
    #[error("{second}: tensor {tensor} is also in {first}")]
    Duplicate { tensor: String, first: String, second: String },
    /// One shard of several was given as if it were the whole.
    #[error("{file}: is one of the {shards} shards of {folder}; give the folder instead")]
    OneShardOfSeveral { file: String, shards: usize, folder: String },
}

/// Opens the checkpoint in `folder`: by its index, or as a single `model.safetensors`.
pub fn open_folder(folder: &Path, backend: IoBackend) -> Result<Folder, FolderError> {
    open_folder_on(&system_disk(), folder, backend)
}

/// [`open_folder`], asking `disk`.
pub fn open_folder_on(disk: &Arc<dyn Disk>, folder: &Path, backend: IoBackend) -> Result<Folder, FolderError> {
    let mut opened = if folder.join(INDEX_FILE).exists() {
        open_indexed(disk, folder, &Index::read(disk, folder)?, backend)?
    } else if folder.join(SINGLE_FILE).exists() {
        open_shards(disk, folder, &[SINGLE_FILE], backend)?
    } else {
        let found = other_weight_files(folder, &[]);
        let found = if found.is_empty() { String::new() } else { format!(", only {}", shortlist(&found)) };
        return Err(FolderError::NoWeights { folder: folder.display().to_string(), found });
    };
    let used: Vec<&str> = opened.shards.iter().filter_map(|shard| shard.label().rsplit('/').next()).collect();
    let others = other_weight_files(folder, &used);
    if !others.is_empty() {
        let names = shortlist(&others);
        opened.warnings.push(format!("{}: ignored weight files of another checkpoint: {names}", folder.display()));
    }
    Ok(opened)
}

/// Opens a lone safetensors file. If its folder has an index that names it, it must be the only shard.
pub fn open_file(file: &Path, backend: IoBackend) -> Result<Folder, FolderError> {
    open_file_on(&system_disk(), file, backend)
}

/// [`open_file`], asking `disk`.
pub fn open_file_on(disk: &Arc<dyn Disk>, file: &Path, backend: IoBackend) -> Result<Folder, FolderError> {
    let folder = folder_of(file);
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    if folder.join(INDEX_FILE).exists() {
        let index = Index::read(disk, &folder)?;
        let shards = index.shards();
        if shards.contains_key(&*name) {
            if shards.len() > 1 {
                let (file, folder) = (file.display().to_string(), folder.display().to_string());
                return Err(FolderError::OneShardOfSeveral { file, shards: shards.len(), folder });
            }
            return open_indexed(disk, &folder, &index, backend);
        }
    }
    open_shards(disk, &folder, &[&*name], backend)
}

/// The folder that `file` lies in.
pub(crate) fn folder_of(file: &Path) -> PathBuf {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

fn open_indexed(disk: &Arc<dyn Disk>, folder: &Path, index: &Index, backend: IoBackend) -> Result<Folder, FolderError> {
    let wanted = index.shards();
    let missing: Vec<(String, usize)> = wanted
        .iter()
        .filter(|(shard, _)| !folder.join(shard).exists())
        .map(|(shard, tensors)| ((*shard).to_owned(), tensors.len()))
        .collect();
    if !missing.is_empty() {
        return Err(FolderError::MissingShards { folder: folder.display().to_string(), shards: wanted.len(), missing });
    }
    let shards: Vec<&str> = wanted.keys().copied().collect();
    let opened = open_shards(disk, folder, &shards, backend)?;
    for (number, (&shard, named)) in wanted.iter().enumerate() {
        let has = |name: &str| opened.tensors.get(name).is_some_and(|(holder, _)| *holder == number);
        let absent: Vec<&str> = named.iter().copied().filter(|name| !has(name)).collect();
        if !absent.is_empty() {
            return Err(FolderError::NotInShard {
                file: index.file.clone(),
                shard: shard.to_owned(),
                count: absent.len(),
                names: shortlist(&absent),
            });
        }
        let unnamed: Vec<&str> = opened
            .tensors
            .iter()
            .filter(|(name, (holder, _))| *holder == number && !named.contains(name.as_str()))
            .map(|(name, _)| name.as_str())
            .collect();
        if !unnamed.is_empty() {
            return Err(FolderError::NotInIndex {
                shard: opened.shards[number].label().to_owned(),
                count: unnamed.len(),
                names: shortlist(&unnamed),
            });
        }
    }
    Ok(opened)
}

fn open_shards(disk: &Arc<dyn Disk>, folder: &Path, names: &[&str], backend: IoBackend) -> Result<Folder, FolderError> {
    let mut shards: Vec<Arc<dyn ReadAt>> = Vec::new();
    let mut tensors = BTreeMap::new();
    for (number, name) in names.iter().enumerate() {
        let shard = open_on(disk, &folder.join(name), backend)?;
        let header = parse_header(&*shard).map_err(|error| match error {
            HeaderError::Io(error) => FolderError::Io(error),
            error => FolderError::Header { file: shard.label().to_owned(), error },
        })?;
        for tensor in header {
            if let Some((holder, _)) = tensors.get(&tensor.name) {
                let first: &Arc<dyn ReadAt> = &shards[*holder];
                return Err(FolderError::Duplicate {
                    first: first.label().to_owned(),
                    second: shard.label().to_owned(),
                    tensor: tensor.name,
                });
            }
            tensors.insert(tensor.name.clone(), (number, tensor));
        }
        shards.push(shard);
    }
    Ok(Folder { shards, tensors, warnings: Vec::new() })
}

/// Names of files in `folder` that look like weights and are not among `used`, sorted.
fn other_weight_files(folder: &Path, used: &[&str]) -> Vec<String> {
    let is_weights = |name: &str| match name.rsplit_once('.') {
        Some((_, "safetensors" | "gguf" | "pth" | "pt")) => true,
        Some((stem, "bin")) => stem.starts_with("pytorch_model"),
        _ => false,
    };
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| is_weights(name) && !used.contains(&name.as_str()))
        .collect();
    names.sort();
    names
}

fn missing_list(missing: &[(String, usize)]) -> String {
    let described: Vec<String> =
        missing.iter().map(|(shard, tensors)| format!("{shard} ({tensors} tensors)")).collect();
    let tensors: usize = missing.iter().map(|(_, tensors)| tensors).sum();
    format!("{}; {tensors} tensors in all", shortlist(&described))
}

/// The index: which shard has which tensor.
struct Index {
    file: String,
    weight_map: BTreeMap<String, String>,
}

impl Index {
    fn read(disk: &Arc<dyn Disk>, folder: &Path) -> Result<Self, FolderError> {
        let path = folder.join(INDEX_FILE);
        let label = path.display().to_string();
        let wrong = |error: String| FolderError::Index { file: label.clone(), error };
        let file = open_on(disk, &path, IoBackend::Buffered)?;
        if file.len() > INDEX_BYTES_MAX {
            return Err(wrong(format!("it has {} bytes, more than {INDEX_BYTES_MAX}", file.len())));
        }
        let mut json = vec![0; file.len() as usize];
        file.read_exact_at(minnow_common::FileOffset(0), &mut json)?;
        let RawIndex { weight_map: WeightMap(weight_map) } =
            serde_json::from_slice(&json).map_err(|error| wrong(error.to_string()))?;
        if weight_map.is_empty() {
            return Err(wrong("weight_map is empty".to_owned()));
        }
        let index = Self { file: label, weight_map };
        let shards = index.shards();
        if let Some(shard) = shards.keys().find(|shard| !is_plain_file_name(shard)) {
            return Err(FolderError::ShardName { file: index.file.clone(), shard: (*shard).to_owned() });
        }
        if shards.len() > SHARDS_MAX {
            return Err(FolderError::ShardCount { count: shards.len(), file: index.file });
        }
        Ok(index)
    }

    /// The tensors of each shard, in order of the shards' names.
    fn shards(&self) -> BTreeMap<&str, BTreeSet<&str>> {
        let mut shards: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (tensor, shard) in &self.weight_map {
            shards.entry(shard).or_default().insert(tensor);
        }
        shards
    }
}

fn is_plain_file_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\\', '\0'])
}

#[derive(Deserialize)]
struct RawIndex {
    weight_map: WeightMap,
}

/// `weight_map`, no name twice.
struct WeightMap(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object that maps tensor names to file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some((name, shard)) = map.next_entry::<String, String>()? {
                    if entries.contains_key(&name) {
                        return Err(de::Error::custom(format!("the name {name:?} occurs twice")));
                    }
                    entries.insert(name, shard);
                }
                Ok(WeightMap(entries))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}
