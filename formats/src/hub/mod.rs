//! Hugging Face: files of a repository, by HTTP and nothing else.
//!
//! ```text
//! address   what was typed: hf:OWNER/NAME[@REVISION]/FILE
//! settings  endpoint, token, cache folder, from the environment that the caller hands in
//! client    one request: token, redirects, what a status means, and when to try again
//! listing   what a repository holds
//! remote    a file as a `ReadAt`: whoever reads a local file reads this one
//! pull      a whole file to disk, in parallel, resumable, verified while it comes
//! cache     the folder that all Hugging Face tools share
//! repair    a damaged file made whole, fetching only what is damaged
//! push      files to a repository, in one commit
//! ```
//!
//! Three things always hold. The token goes to the endpoint's own host only, over TLS or to this machine. No error has
//! it, nor the query of an address, which on a content server is as good as a password. And a file is under its final
//! name complete and with the digest that the hub states, or not at all. Why this is no use of the `hf-hub` crate:
//! `docs/decisions/hugging-face-client.md`.

mod address;
mod cache;
mod client;
mod error;
mod listing;
mod pull;
mod push;
mod remote;
mod repair;
mod settings;

pub use address::{Address, AddressError, RepoPath, Repository, Revision};
pub use cache::{Cached, cached};
pub use client::{Hub, Patience};
pub use error::HubError;
pub use listing::{FileInfo, Identity, Listed};
pub use pull::{CONNECTIONS_MAX, Pull, Pulled, git_object_id, pull};
pub use push::{Outgoing, Private, Push, PushError, Pushed, Sending, push};
pub use remote::RemoteFile;
pub use repair::{RepairError, Repaired, repair};
pub use settings::{BadToken, Settings, SettingsError, Token};

/// Who looks on while bytes come and go.
pub trait Watch: Sync {
    /// `bytes` more were moved, the last ones of `file`.
    fn moved(&self, bytes: u64, file: &str);

    /// `bytes` that were counted before must be moved once more.
    fn lost(&self, bytes: u64) {
        let _ = bytes;
    }

    /// Whether to stop; asked between any two buffers and while waiting.
    fn is_stopped(&self) -> bool;

    /// Something that ended well, but not at once: one line.
    fn note(&self, line: &str) {
        let _ = line;
    }
}

/// Nobody looks on, and nothing stops.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unwatched;

impl Watch for Unwatched {
    fn moved(&self, _: u64, _: &str) {}

    fn is_stopped(&self) -> bool {
        false
    }
}
