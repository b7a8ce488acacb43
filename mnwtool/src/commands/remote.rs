//! What all commands that speak to a hub share: how it is reached, who watches, and how a refusal ends a command.

use std::path::Path;
use std::sync::Arc;

use minnow_formats::hub::{Address, Hub, HubError, Patience, RemoteFile, Revision, Settings, Watch};
use minnow_formats::io::{self, IoBackend};
use minnow_formats::mnw::{self, Level};

use crate::failure::Failure;
use crate::progress::Progress;
use crate::signals::Signals;
use crate::terminal;

/// Where the hub is, who asks, and how stubbornly.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    pub(crate) settings: Settings,
    /// Tries of one request without any progress.
    pub(crate) tries: u32,
    /// Connections at a time.
    pub(crate) connections: usize,
}

impl Access {
    /// The hub.
    pub(crate) fn hub(&self) -> Result<Hub, Failure> {
        let patience = Patience { tries: self.tries, ..Patience::default() };
        Hub::new(&self.settings, patience).map_err(|error| Failure::Usage(error.to_string()))
    }

    /// A file at the hub, to be read in parts.
    pub(crate) fn file(&self, address: &Address) -> Result<RemoteFile, Failure> {
        let hub = Arc::new(self.hub()?);
        let main = Revision::main();
        let revision = address.revision.as_ref().unwrap_or(&main);
        let info = hub.file_info(&address.repository, revision, &address.path, &Speaking).map_err(Failure::of)?;
        Ok(RemoteFile::new(hub, info))
    }
}

/// Tells of what is tried again, and nothing else: for requests that move no files.
pub(crate) struct Speaking;

impl Watch for Speaking {
    fn moved(&self, _: u64, _: &str) {}

    fn is_stopped(&self) -> bool {
        false
    }

    fn note(&self, line: &str) {
        terminal::say(line);
    }
}

/// Shows progress, passes signals on, and tells of what went well at the second try.
pub(crate) struct Onlooker {
    progress: Progress,
    signals: Signals,
}

impl Onlooker {
    /// Takes over signals, and shows a bar of `bytes` if it is `wanted`.
    pub(crate) fn new(bytes: u64, wanted: bool) -> Result<Self, Failure> {
        let signals = Signals::listen().map_err(|error| Failure::of(format!("signal handlers: {error}")))?;
        Ok(Self { progress: Progress::new(bytes, wanted), signals })
    }

    /// The bar.
    pub(crate) fn progress(&self) -> &Progress {
        &self.progress
    }

    /// How an error ends the command: a stop is the signal's doing.
    pub(crate) fn failure(&self, error: HubError) -> Failure {
        match (error, self.signals.received()) {
            (HubError::Stopped, Some(interrupt)) => Failure::Interrupted(interrupt),
            (error, _) => Failure::of(error),
        }
    }
}

impl Watch for Onlooker {
    fn moved(&self, bytes: u64, file: &str) {
        self.progress.advance(bytes, file);
    }

    fn lost(&self, bytes: u64) {
        self.progress.take_back(bytes);
    }

    fn is_stopped(&self) -> bool {
        self.signals.received().is_some()
    }

    fn note(&self, line: &str) {
        self.progress.aside(|| terminal::say(line));
    }
}

/// What is wrong with a `.mnw` file, if anything is: the first thing, and how many there are.
pub(crate) fn check_container(path: &Path, workers: usize, progress: &(dyn Fn(u64) + Sync)) -> Result<(), String> {
    let file = io::open(path, IoBackend::Auto).map_err(|error| error.to_string())?;
    let findings = mnw::validate_all(&file, Level::Validate, workers, progress);
    match &findings.problems[..] {
        [] => Ok(()),
        [only] => Err(format!("{}: {}", only.reason, only.message)),
        all @ [first, ..] => Err(format!("{}: {}; {} problems in all", first.reason, first.message, all.len())),
    }
}

/// Whether a file of this name is a container that can be checked.
pub(crate) fn is_container(name: &str) -> bool {
    name.ends_with(".mnw")
}
