//! A model from a hub into the cache of Hugging Face's tools, before it is opened like any other.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use minnow_common::units::HumanBytes;
use minnow_formats::hub::{self, Hub, Patience, Watch};
use minnow_formats::io::{self, IoBackend};
use minnow_formats::mnw::{self, Level};
use tracing::{info, warn};

use crate::config::RemoteModel;

/// How often the log says how far it is.
const REPORT_EVERY: Duration = Duration::from_secs(10);
/// Threads that validate what came.
const WORKERS: usize = 8;

/// Finds the model in the cache or fetches it, and returns where it is.
pub(crate) fn fetch(model: &RemoteModel) -> anyhow::Result<PathBuf> {
    let RemoteModel { address, settings } = model;
    let hub = Hub::new(settings, Patience::default())?;
    info!("looking for {address} at {}", hub.endpoint());
    let watch = Logged { state: Mutex::new(State { bytes: 0, last: Instant::now() }) };
    let cached = hub::cached(&hub, &settings.cache, address, &io::system_disk(), &watch, &check)?;
    match cached.stale {
        Some(why) => warn!("{why}"),
        None => info!(
            "{address} is {} at commit {} ({} fetched)",
            cached.path.display(),
            cached.commit,
            HumanBytes(cached.fetched_bytes)
        ),
    }
    Ok(cached.path)
}

/// Whether what came is a sound container.
fn check(path: &Path) -> Result<(), String> {
    let file = io::open(path, IoBackend::Auto).map_err(|error| error.to_string())?;
    let container = mnw::open(file).map_err(|error| error.to_string())?;
    mnw::validate(&container, Level::Validate, WORKERS, &|_| ()).map(drop).map_err(|error| error.to_string())
}

/// Writes to the log now and then.
struct Logged {
    state: Mutex<State>,
}

struct State {
    bytes: u64,
    last: Instant,
}

impl Watch for Logged {
    fn moved(&self, bytes: u64, file: &str) {
        let mut state = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        state.bytes += bytes;
        if state.last.elapsed() >= REPORT_EVERY {
            state.last = Instant::now();
            info!("{} of {file} fetched", HumanBytes(state.bytes));
        }
    }

    /// A signal ends the process as long as nothing is served.
    fn is_stopped(&self) -> bool {
        false
    }

    fn note(&self, line: &str) {
        warn!("{line}");
    }
}
