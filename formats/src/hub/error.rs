//! What a hub, or the way to it, can refuse. Messages name the place; they never have a token or the query of an address.

use std::fmt;
use std::io;

use thiserror::Error;

use super::address::AddressError;
use crate::io::OsCause;

/// Why something at a hub could not be had or done.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say what each field is")]
pub enum HubError {
    /// No connection, or it broke, as often as patience lasts.
    #[error("{place}: {cause}{}", Tries(*.tries))]
    Unreachable { place: String, cause: String, tries: u32 },
    /// The certificate is not that of the host, or the server does not speak TLS.
    #[error("{place}: no safe connection: {cause}")]
    Tls { place: String, cause: String },
    /// The hub wants to know who asks, and was not told or does not believe it.
    #[error("{place}: {}{}", if *.had_token { "the token is refused; it may have expired, or may not do this" } else { "needs a token: set HF_TOKEN, or use --token-file" }, Said(.said))]
    Unauthorized { place: String, had_token: bool, said: String },
    /// The hub knows who asks, and refuses.
    #[error("{place}: access is refused{}", Said(.said))]
    Forbidden { place: String, said: String },
    /// There is no such repository, revision or file.
    #[error("{place}: not found{}", Said(.said))]
    NotFound { place: String, said: String },
    /// Any other answer.
    #[error("{place}: the server answers {status}{}{}", Said(.said), Tries(*.tries))]
    Status { place: String, status: u16, said: String, tries: u32 },
    /// An answer that is no answer to what was asked.
    #[error("{place}: the server's answer makes no sense: {fault}")]
    Nonsense { place: String, fault: String },
    /// Redirected too often, or to a place where nothing may be fetched from.
    #[error("{place}: is redirected {fault}")]
    Redirect { place: String, fault: String },
    /// A token would travel unprotected.
    #[error("{endpoint}: a token is not sent over http:// to another machine; use https://, or no token")]
    Plain { endpoint: String },
    /// A path that cannot be one.
    #[error("{place}: {error}")]
    Address { place: String, error: AddressError },
    /// What came is not what the hub said it would be.
    #[error("{place}: has {what} {found}, but the hub states {expected}")]
    Digest { place: String, what: &'static str, found: String, expected: String },
    /// The output's name is taken.
    #[error("{path}: already exists; --force replaces it")]
    Exists { path: String },
    /// Another process is at it.
    #[error("{path}: is being downloaded by another process")]
    Busy { path: String },
    /// The disk refuses.
    #[error("{path}: {action} failed: {}", OsCause(.error))]
    Disk { path: String, action: &'static str, error: io::Error },
    /// The file came as the hub states it, and is no good.
    #[error("{path}: was fetched as the hub has it, but is not valid: {fault}")]
    Invalid { path: String, fault: String },
    /// Whoever watches wants no more.
    #[error("stopped")]
    Stopped,
}

impl HubError {
    /// Whether another try by someone else, with a network, might do better.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }
}

/// `, after N tries`, if there were several.
struct Tries(u32);

impl fmt::Display for Tries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 > 1 { write!(f, ", after {} tries", self.0) } else { Ok(()) }
    }
}

/// What the server said, if it did.
struct Said<'a>(&'a str);

impl fmt::Display for Said<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, " ({})", self.0) }
    }
}
