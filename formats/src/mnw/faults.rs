//! What is wrong with a file: the first thing, for those who only want to know whether, or everything.

use minnow_common::FileOffset;
use serde::Serialize;

use super::error::{MnwError, RegionPart};

/// The most problems that are listed. A file with more is broken in one way, many times.
pub const PROBLEMS_MAX: usize = 1000;

/// Something that makes a file unacceptable, for people and for programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The reason code ([`MnwError::reason`]).
    pub reason: &'static str,
    /// The tensor it is about.
    pub tensor: Option<String>,
    /// Which of its regions.
    pub region: Option<RegionPart>,
    /// Where in the file; of a damaged region where it starts.
    pub offset: Option<u64>,
    /// What is wrong, with the numbers.
    pub message: String,
}

/// Faults in the order in which the checks are made, up to a limit.
#[derive(Debug)]
pub(super) struct Faults {
    found: Vec<Fault>,
    limit: usize,
}

/// A fault, and where it was met if its error does not say that itself.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) error: MnwError,
    pub(super) tensor: Option<String>,
    pub(super) region: Option<RegionPart>,
    pub(super) offset: Option<FileOffset>,
}

impl Faults {
    /// Takes up to `limit` faults.
    pub(super) fn up_to(limit: usize) -> Self {
        Self { found: Vec::new(), limit }
    }

    /// Notes a fault. `None` if that was the last one of interest, so that checking can stop.
    pub(super) fn add(&mut self, fault: impl Into<Fault>) -> Option<()> {
        if self.found.len() < self.limit {
            self.found.push(fault.into());
        }
        (self.found.len() < self.limit).then_some(())
    }

    /// Whether one is enough.
    pub(super) fn only_first(&self) -> bool {
        self.limit == 1
    }

    pub(super) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Whether there may be more than those listed.
    pub(super) fn is_full(&self) -> bool {
        self.found.len() >= self.limit
    }

    /// The first one.
    pub(super) fn into_first(self) -> Option<MnwError> {
        self.found.into_iter().next().map(|fault| fault.error)
    }

    /// The regions that they are about.
    pub(super) fn into_places(self) -> impl Iterator<Item = (String, RegionPart)> {
        self.found.into_iter().filter_map(|fault| Some((fault.tensor?, fault.region?)))
    }

    pub(super) fn into_problems(self) -> Vec<Problem> {
        self.found.into_iter().map(Fault::into_problem).collect()
    }
}

impl From<MnwError> for Fault {
    fn from(error: MnwError) -> Self {
        Self { tensor: error.tensor().map(str::to_owned), region: error.region(), offset: error.offset(), error }
    }
}

impl Fault {
    /// A fault that was met at region `of`.
    pub(super) fn of(error: MnwError, of: Option<(&str, RegionPart)>) -> Self {
        let fault = Self::from(error);
        match of {
            Some((tensor, region)) => Self { tensor: Some(tensor.to_owned()), region: Some(region), ..fault },
            None => fault,
        }
    }

    fn into_problem(self) -> Problem {
        Problem {
            reason: self.error.reason(),
            // Names from a file may hold anything until they were checked.
            tensor: self.tensor.map(|name| name.escape_debug().to_string()),
            region: self.region,
            offset: self.offset.map(|offset| offset.0),
            message: self.error.to_string(),
        }
    }
}
