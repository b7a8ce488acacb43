//! What names a repository and a file in it. Parsed once; afterwards a [`RepoPath`] can be joined to a folder, and all of
//! them can stand in an address.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// The longest part of a repository's name.
const NAME_BYTES_MAX: usize = 96;
/// The longest path in a repository, and the longest revision.
const PATH_BYTES_MAX: usize = 512;

/// A model repository: `OWNER/NAME`, each of letters, digits, `.`, `_` and `-`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repository {
    owner: String,
    name: String,
}

/// A branch, a tag or a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revision(String);

/// A file in a repository: relative, and without anything that leads elsewhere.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RepoPath(String);

/// `hf:OWNER/NAME[@REVISION]/FILE`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// The repository.
    pub repository: Repository,
    /// What follows the `@`.
    pub revision: Option<Revision>,
    /// The file.
    pub path: RepoPath,
}

/// Why something typed, or sent by a server, names nothing.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "the messages say what each field is")]
pub enum AddressError {
    #[error("{0:?} is no repository: expected OWNER/NAME, of letters, digits, '.', '_' and '-'")]
    Repository(String),
    #[error("{0:?} is no revision: expected a branch, a tag or a commit")]
    Revision(String),
    #[error("{0:?} is no path in a repository: expected a relative one without '..'")]
    Path(String),
    #[error("{0:?} is no address: expected hf:OWNER/NAME/FILE or hf:OWNER/NAME@REVISION/FILE")]
    Address(String),
}

impl Repository {
    /// The user or organisation.
    #[must_use]
    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// The name below the owner.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl FromStr for Repository {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let is_name = |name: &str| {
            (1..=NAME_BYTES_MAX).contains(&name.len())
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
                && !name.starts_with(['.', '-'])
                && !name.ends_with(['.', '-'])
                && !name.contains("..")
                && !name.contains("--")
        };
        match text.split_once('/') {
            Some((owner, name)) if is_name(owner) && is_name(name) => {
                Ok(Self { owner: owner.to_owned(), name: name.to_owned() })
            }
            _ => Err(AddressError::Repository(text.to_owned())),
        }
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)
    }
}

impl Revision {
    /// The branch that a repository starts with.
    #[must_use]
    pub fn main() -> Self {
        Self("main".to_owned())
    }

    /// As it stands in an address: one component.
    #[must_use]
    pub fn encoded(&self) -> String {
        encoded(&self.0, b"")
    }

    /// Whether it is a commit's full id, which always means the same.
    #[must_use]
    pub fn is_commit(&self) -> bool {
        self.0.len() == 40 && self.0.bytes().all(|byte| byte.is_ascii_hexdigit())
    }
}

impl FromStr for Revision {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if is_relative_path(text) { Ok(Self(text.to_owned())) } else { Err(AddressError::Revision(text.to_owned())) }
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl RepoPath {
    /// The path as text, with `/` between its components.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Its last component.
    #[must_use]
    pub fn file_name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or_default()
    }

    /// As it stands in an address.
    #[must_use]
    pub fn encoded(&self) -> String {
        encoded(&self.0, b"/")
    }
}

impl FromStr for RepoPath {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if is_relative_path(text) { Ok(Self(text.to_owned())) } else { Err(AddressError::Path(text.to_owned())) }
    }
}

impl fmt::Display for RepoPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Address {
    /// What every address starts with.
    pub const PREFIX: &'static str = "hf:";
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let no_address = || AddressError::Address(text.to_owned());
        let rest = text.strip_prefix(Self::PREFIX).ok_or_else(no_address)?;
        let (owner, rest) = rest.split_once('/').ok_or_else(no_address)?;
        let (name, path) = rest.split_once('/').ok_or_else(no_address)?;
        let (name, revision) = match name.split_once('@') {
            Some((name, revision)) => (name, Some(revision.parse()?)),
            None => (name, None),
        };
        Ok(Self { repository: format!("{owner}/{name}").parse()?, revision, path: path.parse()? })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.revision {
            Some(revision) => write!(f, "{}{}@{revision}/{}", Self::PREFIX, self.repository, self.path),
            None => write!(f, "{}{}/{}", Self::PREFIX, self.repository, self.path),
        }
    }
}

/// Whether `text` is components joined by `/`, none of which leads elsewhere or could not be printed.
fn is_relative_path(text: &str) -> bool {
    let is_component = |part: &str| !matches!(part, "" | "." | "..");
    text.len() <= PATH_BYTES_MAX
        && text.split('/').all(is_component)
        && text.chars().all(|c| c != '\\' && (c == '\'' || c == '"' || c.escape_debug().len() == 1))
}

/// Percent-encodes everything but unreserved characters (RFC 3986, 2.3) and those in `kept`.
fn encoded(text: &str, kept: &[u8]) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || kept.contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        for text in ["hf:a/b/c.mnw", "hf:inclusionAI/LLaDA2.2-mini@v1.0/x.mnw", "hf:a/b@0123/sub/folder/c d.mnw"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_leads_elsewhere_is_refused() {
        for text in
            ["", ".", "..", "/etc/passwd", "a/../b", "a//b", "a/", "a\\b", "a\nb", "\u{202e}a", &"a".repeat(513)]
        {
            assert!(text.parse::<RepoPath>().is_err(), "{text:?}");
            assert!(text.parse::<Revision>().is_err(), "{text:?}");
        }
        for text in [
            "a",
            "a/b/c",
            "/b",
            "a/",
            "../b",
            "a/..",
            "a b/c",
            "a/b--c",
            "a/-b",
            "a/b?x",
            &format!("a/{}", "b".repeat(97)),
        ] {
            assert!(text.parse::<Repository>().is_err(), "{text:?}");
        }
        for text in ["a/b/c", "hf:a", "hf:a/b", "hf:a/b/", "hf:a/b@/c", "hf:/b/c", "hf:a/b/../c", "hf://a/b/c"] {
            assert!(text.parse::<Address>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn addresses_are_percent_encoded() {
        assert_eq!("ä b/c#?%.mnw".parse::<RepoPath>().unwrap().encoded(), "%C3%A4%20b/c%23%3F%25.mnw");
        assert_eq!("refs/pr/1".parse::<Revision>().unwrap().encoded(), "refs%2Fpr%2F1");
    }
}
