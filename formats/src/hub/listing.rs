//! What a repository holds: its files with the lengths and digests that the hub states.

use serde::Deserialize;

use super::Watch;
use super::address::{RepoPath, Repository, Revision};
use super::client::{Answer, Ask, Content, Hub, Redirects};
use super::error::HubError;

/// Pages of a listing; each has up to a thousand files.
const PAGES_MAX: usize = 1000;

/// By what the hub knows a file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Identity {
    /// The SHA-256 of its bytes: large files. 64 lower-case digits.
    Sha256(String),
    /// Its git object id, SHA-1 over its length and bytes: small files. 40 lower-case digits.
    Git(String),
}

/// One file of a repository at one commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileInfo {
    /// The repository.
    pub repository: Repository,
    /// The commit that was current when it was asked for: the same address with it always means the same bytes.
    pub commit: Revision,
    /// The file.
    pub path: RepoPath,
    /// Its length.
    pub bytes: u64,
    /// Its digest.
    pub identity: Identity,
}

/// A repository at one commit.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The commit.
    pub commit: Revision,
    /// Its files.
    pub files: Vec<FileInfo>,
}

impl Identity {
    /// Reads 64 or 40 hexadecimal digits, as an entity tag or plain.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim().trim_start_matches("W/").trim_matches('"').to_lowercase();
        if !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        match text.len() {
            64 => Some(Self::Sha256(text)),
            40 => Some(Self::Git(text)),
            _ => None,
        }
    }

    /// The digits.
    #[must_use]
    pub fn digits(&self) -> &str {
        match self {
            Self::Sha256(digits) | Self::Git(digits) => digits,
        }
    }

    /// What the digits are, for messages.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Sha256(_) => "SHA-256",
            Self::Git(_) => "git object id",
        }
    }
}

impl FileInfo {
    /// Where it is, for messages: `hf:OWNER/NAME/FILE`.
    #[must_use]
    pub fn label(&self) -> String {
        format!("hf:{}/{}", self.repository, self.path)
    }
}

impl Hub {
    /// Asks for length and digest of a file.
    pub fn file_info(
        &self,
        repository: &Repository,
        revision: &Revision,
        path: &RepoPath,
        watch: &dyn Watch,
    ) -> Result<FileInfo, HubError> {
        let url = self.resolve_url(repository, revision, path);
        // The content server knows nothing of commits and digests: what the hub itself says before it is wanted.
        let ask = Ask { method: "HEAD", url: &url, headers: &[], redirects: Redirects::OnHost };
        let answer = self.patiently(watch, |_| self.once(&ask, Content::Nothing))?;
        let missing =
            |what: &str| HubError::Nonsense { place: answer.place.clone(), fault: format!("it has no {what}") };
        let header = |name: &str| header(&answer, name);
        let commit: Revision =
            header("x-repo-commit").and_then(|text| text.parse().ok()).ok_or_else(|| missing("commit"))?;
        let identity = header("x-linked-etag").or_else(|| header("etag"));
        let identity = identity.and_then(|text| Identity::parse(&text)).ok_or_else(|| missing("digest"))?;
        let bytes = header("x-linked-size").or_else(|| header("content-length"));
        let bytes = bytes.and_then(|text| text.parse().ok()).ok_or_else(|| missing("length"))?;
        Ok(FileInfo { repository: repository.clone(), commit, path: path.clone(), bytes, identity })
    }

    /// Asks for the commit that `revision` means.
    pub fn commit(
        &self,
        repository: &Repository,
        revision: &Revision,
        watch: &dyn Watch,
    ) -> Result<Revision, HubError> {
        #[derive(Deserialize)]
        struct Info {
            sha: String,
        }
        let url = format!("{}/api/models/{repository}/revision/{}", self.endpoint(), revision.encoded());
        let ask = Ask { method: "GET", url: &url, headers: &[], redirects: Redirects::Followed };
        let (Info { sha }, _) = self.json(&ask, None, watch)?;
        sha.parse().map_err(|error| HubError::Address { place: url, error })
    }

    /// Asks for everything that a repository holds at a revision.
    pub fn list(&self, repository: &Repository, revision: &Revision, watch: &dyn Watch) -> Result<Listed, HubError> {
        #[derive(Deserialize)]
        struct Entry {
            #[serde(rename = "type")]
            kind: String,
            path: String,
            oid: String,
            size: u64,
            lfs: Option<Lfs>,
        }
        #[derive(Deserialize)]
        struct Lfs {
            oid: String,
            size: u64,
        }
        let commit = self.commit(repository, revision, watch)?;
        let mut url = format!("{}/api/models/{repository}/tree/{}?recursive=true", self.endpoint(), commit.encoded());
        let mut files = Vec::new();
        for _ in 0..PAGES_MAX {
            let ask = Ask { method: "GET", url: &url, headers: &[], redirects: Redirects::Followed };
            let (entries, headers): (Vec<Entry>, _) = self.json(&ask, None, watch)?;
            let nonsense = |fault: String| HubError::Nonsense { place: format!("hf:{repository}"), fault };
            for Entry { path, oid, size, lfs, .. } in entries.into_iter().filter(|entry| entry.kind == "file") {
                // The path will be one on this machine's disk.
                let path =
                    path.parse().map_err(|error| HubError::Address { place: format!("hf:{repository}"), error })?;
                let (oid, bytes) = lfs.map_or((oid, size), |lfs| (lfs.oid, lfs.size));
                let identity = Identity::parse(&oid).ok_or_else(|| nonsense(format!("{path} has no digest")))?;
                files.push(FileInfo { repository: repository.clone(), commit: commit.clone(), path, bytes, identity });
            }
            match headers.get("link").and_then(|value| next_page(value.to_str().ok()?)) {
                Some(next) if next.starts_with(self.endpoint()) => url = next,
                Some(next) => return Err(nonsense(format!("the next page is at {next}"))),
                None => return Ok(Listed { commit, files }),
            }
        }
        Err(HubError::Nonsense { place: url, fault: "the listing has no end".to_owned() })
    }

    pub(super) fn resolve_url(&self, repository: &Repository, revision: &Revision, path: &RepoPath) -> String {
        format!("{}/{repository}/resolve/{}/{}", self.endpoint(), revision.encoded(), path.encoded())
    }
}

pub(super) fn header(answer: &Answer, name: &str) -> Option<String> {
    answer.headers.get(name)?.to_str().ok().map(str::to_owned)
}

/// The address with `rel="next"` of a `Link` header.
fn next_page(link: &str) -> Option<String> {
    link.split(',').find_map(|part| {
        let (address, parameters) = part.split_once(';')?;
        let is_next = parameters.contains("rel=\"next\"") || parameters.contains("rel=next");
        is_next.then(|| address.trim().trim_start_matches('<').trim_end_matches('>').to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_digits_of_one_of_two_lengths() {
        let (sha, git) = ("ab".repeat(32), "cd".repeat(20));
        assert_eq!(Identity::parse(&format!("\"{}\"", sha.to_uppercase())), Some(Identity::Sha256(sha.clone())));
        assert_eq!(Identity::parse(&format!("W/\"{git}\"")), Some(Identity::Git(git)));
        for wrong in ["", "\"\"", &sha[1..], &format!("{sha}0"), &sha.replace('a', "g"), "../../x"] {
            assert_eq!(Identity::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_next_page_is_found_among_links() {
        let link = "<https://h/api?cursor=a>; rel=\"first\", <https://h/api?cursor=b>; rel=\"next\"";
        assert_eq!(next_page(link).as_deref(), Some("https://h/api?cursor=b"));
        assert_eq!(next_page("<https://h/api>; rel=\"prev\""), None);
    }
}
