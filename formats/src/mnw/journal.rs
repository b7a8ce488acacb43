//! The journal of a conversion that may be resumed: `.{name}.resume`, beside the temporary file.
//!
//! One line of text each: first which conversion it is and the name of its temporary file, then a line for each tensor
//! whose bytes are on the medium. A line starts with a checksum, so that what a crash left half written is told from
//! what is there. The journal is a claim: whoever resumes reads the tensors again and compares their digests.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::publish::take_lock;
use crate::digest::Digest;
use crate::io::Disk;

/// The format of the lines, to be raised when they change.
const VERSION: u32 = 1;
/// Digits of a line's checksum: the start of the BLAKE3 of its text.
const CHECKSUM_DIGITS: usize = 16;
/// The longest journal that is read. A million tensors, more than a manifest holds, stay below.
const JOURNAL_BYTES_MAX: u64 = 512 << 20;

/// An open, locked journal.
#[derive(Debug)]
pub(super) struct Journal {
    disk: Arc<dyn Disk>,
    file: File,
    path: PathBuf,
    /// Where the next line goes.
    end: Mutex<u64>,
}

/// The first line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Heading {
    version: u32,
    /// What is written, from what, and how: a digest of everything that determines the bytes.
    pub(super) conversion: String,
    /// Name of the temporary file, in the same folder.
    pub(super) temporary: String,
}

/// A tensor that is complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    pub(super) tensor: String,
    /// BLAKE3 of the data.
    pub(super) data: String,
    /// BLAKE3 of the scales.
    pub(super) scales: Option<String>,
    /// The bits of the global scale, so that it survives exactly.
    pub(super) global_scale_bits: Option<u32>,
}

/// What there is at a journal's path.
#[derive(Debug)]
pub(super) enum Found {
    /// No journal, or one that says nothing.
    Nothing,
    /// A journal that another process is writing.
    Busy,
    /// A journal with everything that it says.
    Journal(Journal, Heading, Vec<Record>),
}

impl Heading {
    pub(super) fn new(conversion: Digest, temporary: String) -> Self {
        Self { version: VERSION, conversion: conversion.to_hex(), temporary }
    }
}

impl Journal {
    /// Starts a journal at `path`, over any old one there.
    pub(super) fn create(disk: &Arc<dyn Disk>, path: &Path, heading: &Heading) -> io::Result<Self> {
        match disk.remove(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = disk.create(path)?;
        // Nobody else has had the time to take it; where files have no locks, that is as good as it gets.
        let _ = disk.lock(&file);
        let journal = Self { disk: Arc::clone(disk), file, path: path.to_owned(), end: Mutex::new(0) };
        if let Err(error) = journal.append(&line(heading)) {
            let _ = disk.remove(path);
            return Err(error);
        }
        Ok(journal)
    }

    /// Opens the journal at `path` and reads it, up to the first line that is not whole.
    pub(super) fn open(disk: &Arc<dyn Disk>, path: &Path) -> io::Result<Found> {
        let file = match disk.reopen(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
            Err(error) => return Err(error),
        };
        let metadata = file.metadata()?;
        if !metadata.is_file() || metadata.len() > JOURNAL_BYTES_MAX {
            return Err(io::Error::other("it is not a journal"));
        }
        if !take_lock(&**disk, &file) {
            return Ok(Found::Busy);
        }
        let text = read_whole(&**disk, &file, metadata.len() as usize)?;
        let mut lines = text.split_inclusive(|&byte| byte == b'\n');
        let Some((heading, heading_bytes)) = lines.next().and_then(parse::<Heading>) else { return Ok(Found::Nothing) };
        if heading.version != VERSION {
            return Ok(Found::Nothing);
        }
        let mut end = heading_bytes;
        let mut records = Vec::new();
        for (record, bytes) in lines.map_while(parse::<Record>) {
            records.push(record);
            end += bytes;
        }
        // What follows is no whole line, and must not come after the next one.
        disk.set_len(&file, end)?;
        let journal = Self { disk: Arc::clone(disk), file, path: path.to_owned(), end: Mutex::new(end) };
        Ok(Found::Journal(journal, heading, records))
    }

    /// Cuts off all records but the first `count` of `records`, which are all there are.
    pub(super) fn keep_first(&self, records: &[Record], count: usize) -> io::Result<()> {
        let surplus: u64 = records[count..].iter().map(|record| line(record).len() as u64).sum();
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        *end -= surplus;
        self.disk.set_len(&self.file, *end)
    }

    /// Adds whole lines.
    pub(super) fn append(&self, lines: &[u8]) -> io::Result<()> {
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        let mut done = 0;
        while done < lines.len() {
            match self.disk.write_at(&self.file, &lines[done..], *end + done as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        *end += lines.len() as u64;
        Ok(())
    }

    /// Removes the file.
    pub(super) fn remove(&self) -> io::Result<()> {
        self.disk.remove(&self.path)
    }
}

/// `{checksum} {json}\n`
pub(super) fn line<T: Serialize>(value: &T) -> Vec<u8> {
    let json = serde_json::to_string(value).expect("structures of texts and numbers have a JSON form");
    format!("{} {json}\n", checksum(json.as_bytes())).into_bytes()
}

fn checksum(json: &[u8]) -> String {
    let mut digits = Digest::of(json).to_hex();
    digits.truncate(CHECKSUM_DIGITS);
    digits
}

/// A line's value and the bytes of the line; `None` if it is not whole.
fn parse<T: for<'a> Deserialize<'a>>(line: &[u8]) -> Option<(T, u64)> {
    let (digits, rest) = line.strip_suffix(b"\n")?.split_at_checked(CHECKSUM_DIGITS)?;
    let json = rest.strip_prefix(b" ")?;
    if checksum(json).as_bytes() != digits {
        return None;
    }
    Some((serde_json::from_slice(json).ok()?, line.len() as u64))
}

fn read_whole(disk: &dyn Disk, file: &File, bytes: usize) -> io::Result<Vec<u8>> {
    let mut text = vec![0; bytes];
    let mut done = 0;
    while done < bytes {
        match disk.read_at(file, &mut text[done..], done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    text.truncate(done);
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::system_disk;

    fn record(name: &str) -> Record {
        Record { tensor: name.to_owned(), data: "d".to_owned(), scales: None, global_scale_bits: Some(7) }
    }

    #[test]
    fn whole_lines_are_read_and_the_rest_is_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(".x.resume");
        let heading = Heading::new(Digest::of(b"what"), ".x.1-2.tmp".to_owned());
        let journal = Journal::create(&system_disk(), &path, &heading).unwrap();
        journal.append(&line(&record("a"))).unwrap();
        journal.append(&line(&record("b"))).unwrap();
        assert!(matches!(Journal::open(&system_disk(), &path).unwrap(), Found::Busy));
        drop(journal);

        let whole = std::fs::read(&path).unwrap();
        let first = line(&heading).len();
        for length in 0..=whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            match Journal::open(&system_disk(), &path).unwrap() {
                Found::Nothing => assert!(length < first, "{length}"),
                Found::Busy => panic!("nobody has it"),
                Found::Journal(journal, found, records) => {
                    assert_eq!(found, heading);
                    let expected = [first, first + line(&record("a")).len(), whole.len()];
                    let count = expected.iter().filter(|&&end| end <= length).count() - 1;
                    assert_eq!(records, [record("a"), record("b")][..count]);
                    journal.append(&line(&record("c"))).unwrap();
                    drop(journal);
                    let Found::Journal(journal, _, records) = Journal::open(&system_disk(), &path).unwrap() else {
                        panic!("it was whole")
                    };
                    assert_eq!(records.last(), Some(&record("c")));
                    journal.keep_first(&records, 0).unwrap();
                    assert_eq!(std::fs::read(&path).unwrap(), line(&heading));
                }
            }
        }
        let mut damaged = whole;
        let at = damaged.len() - 5;
        damaged[at] ^= 1;
        std::fs::write(&path, &damaged).unwrap();
        let Found::Journal(_, _, records) = Journal::open(&system_disk(), &path).unwrap() else { panic!() };
        assert_eq!(records, [record("a")]);
    }
}
