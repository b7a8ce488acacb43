//! Parts of a file at a hub, and the file as a [`ReadAt`], so that whoever reads a local file can read this one.
//!
//! Each read is a request of its own. That suits a header, a manifest, and a few tensors; whole files are for
//! [`super::pull`].

use std::io::Read;
use std::ops::Range;
use std::sync::Arc;

use minnow_common::FileOffset;

use super::client::{Answer, Ask, Content, Fault, Hub, Redirects};
use super::error::HubError;
use super::listing::{FileInfo, header};
use super::{Unwatched, Watch};
use crate::io::{IoError, ReadAt};

/// What is read from a connection at once.
const BUFFER_BYTES: usize = 128 << 10;
/// What must come, in however many tries, to count as progress: a connection that breaks after a few bytes each time
/// gets nowhere.
const PROGRESS_BYTES: u64 = 64 << 10;

/// Who gets parts of a range, one after the other, each with where in the file it starts.
pub(super) type Take<'a> = dyn FnMut(u64, &[u8]) -> Result<(), HubError> + 'a;

/// A file at a hub, at one commit.
#[derive(Debug)]
pub struct RemoteFile {
    hub: Arc<Hub>,
    info: FileInfo,
    label: String,
}

impl RemoteFile {
    /// The file that `info` describes. Nothing is sent until something is read.
    #[must_use]
    pub fn new(hub: Arc<Hub>, info: FileInfo) -> Self {
        let label = info.label();
        Self { hub, info, label }
    }

    /// What the hub says of it.
    #[must_use]
    pub fn info(&self) -> &FileInfo {
        &self.info
    }

    /// Fetches a range that lies inside the file and shows it to `take`, part after part with where each starts.
    pub(super) fn copy(&self, range: Range<u64>, watch: &dyn Watch, take: &mut Take<'_>) -> Result<(), HubError> {
        if range.is_empty() { Ok(()) } else { self.hub.stream(&self.info, range.start, range.end, watch, take) }
    }
}

impl ReadAt for RemoteFile {
    fn len(&self) -> u64 {
        self.info.bytes
    }

    fn read_exact_at(&self, offset: FileOffset, out: &mut [u8]) -> Result<(), IoError> {
        let bytes = out.len() as u64;
        let end = match offset.checked_add(bytes) {
            Some(end) if end.0 <= self.info.bytes => end.0,
            _ => {
                let (path, file_bytes) = (self.label.clone(), self.info.bytes);
                return Err(IoError::OutsideFile { path, offset, bytes, file_bytes });
            }
        };
        if bytes == 0 {
            return Ok(());
        }
        let mut take = |at: u64, part: &[u8]| {
            // The parts come in order and lie in the range that was asked for.
            let start = (at - offset.0) as usize;
            out[start..start + part.len()].copy_from_slice(part);
            Ok(())
        };
        self.hub.stream(&self.info, offset.0, end, &Unwatched, &mut take).map_err(|error| IoError::Hub {
            path: self.label.clone(),
            offset,
            bytes,
            error: Box::new(error),
        })
    }

    fn label(&self) -> &str {
        &self.label
    }

    fn backend(&self) -> &'static str {
        "http"
    }
}

impl Hub {
    /// Streams `start..end` of a file to `take`, over as many connections as it takes. What `take` got is not asked for
    /// again.
    pub(super) fn stream(
        &self,
        file: &FileInfo,
        start: u64,
        end: u64,
        watch: &dyn Watch,
        take: &mut Take<'_>,
    ) -> Result<(), HubError> {
        let url = self.resolve_url(&file.repository, &file.commit, &file.path);
        let label = file.label();
        let mut buffer = vec![0; BUFFER_BYTES.min((end - start) as usize)];
        let mut at = start;
        let mut counted = start;
        let streamed = self.patiently(watch, |tries| {
            let range = format!("bytes={at}-{}", end - 1);
            let ask = Ask { method: "GET", url: &url, headers: &[("range", &range)], redirects: Redirects::Followed };
            let mut answer = self.once(&ask, Content::Nothing)?;
            check_range(&answer, &label, at, end, file.bytes).map_err(Fault::Lasting)?;
            let place = answer.place.clone();
            let mut reader = answer.body.as_reader();
            while at < end {
                if watch.is_stopped() {
                    return Err(Fault::Lasting(HubError::Stopped));
                }
                let wanted = buffer.len().min((end - at) as usize);
                let count = reader.read(&mut buffer[..wanted]).map_err(|error| Fault::cut(&place, &error))?;
                if count == 0 {
                    let ended =
                        std::io::Error::new(std::io::ErrorKind::UnexpectedEof, format!("it ended at byte {at}"));
                    return Err(Fault::cut(&place, &ended));
                }
                take(at, &buffer[..count]).map_err(Fault::Lasting)?;
                at += count as u64;
                if at - counted >= PROGRESS_BYTES {
                    counted = at;
                    tries.got_further();
                }
            }
            Ok(())
        });
        streamed.map_err(|error| error.about(&label))
    }
}

/// Checks that an answer is the range that was asked for, of a file of the length that was promised.
fn check_range(answer: &Answer, label: &str, start: u64, end: u64, file_bytes: u64) -> Result<(), HubError> {
    let nonsense = |fault: String| Err(HubError::Nonsense { place: label.to_owned(), fault });
    let length: Option<u64> = header(answer, "content-length").and_then(|text| text.parse().ok());
    if answer.status == 200 {
        // Whoever knows no ranges sends everything; that is as good if everything was asked for.
        return match length {
            Some(length) if length != file_bytes => {
                nonsense(format!("it has {length} bytes, but the hub states {file_bytes}"))
            }
            _ if start == 0 && end == file_bytes => Ok(()),
            _ => nonsense("the server sends whole files only".to_owned()),
        };
    }
    let range = header(answer, "content-range").unwrap_or_default();
    if range == format!("bytes {start}-{}/{file_bytes}", end - 1) {
        return Ok(());
    }
    nonsense(format!("bytes {start}-{}/{file_bytes} were asked for, and {range:?} comes", end - 1))
}
