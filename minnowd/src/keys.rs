//! API keys: where they come from, and whether one that was sent is among them.
//!
//! A key is hashed as soon as it is read, and only its SHA-256 is kept. What a client sends is hashed too and compared
//! with every key, to the last byte, so that the time an answer takes says nothing about keys.

use std::fmt;
use std::hint::black_box;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use minnow_formats::digest::sha256_bytes;
use thiserror::Error;

/// Shorter keys can be guessed over a network.
pub const KEY_BYTES_MIN: usize = 16;
/// Bits of a file's mode that let everyone read or change it.
const OPEN_TO_OTHERS: u32 = 0o006;

/// Why keys cannot be used. No message has a key in it.
#[derive(Debug, Error)]
pub enum KeyError {
    /// A key with characters that no header can carry, or none.
    #[error("{origin}: a key must have visible ASCII characters only, and at least one")]
    Characters {
        /// The option, or the file and line.
        origin: String,
    },
    /// A key that can be guessed.
    #[error("{origin}: a key of {bytes} bytes can be guessed; use at least {KEY_BYTES_MIN}, or --allow-weak-keys")]
    Weak {
        /// The option, or the file and line.
        origin: String,
        /// Its length.
        bytes: usize,
    },
    /// The file cannot be read.
    #[error("{}: {error}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The file is not a secret.
    #[error("{}: its mode is {mode:o}, so every user of this machine can read or change it; use 600 or 640", path.display())]
    Open {
        /// Which file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// A file without a key would let nobody in.
    #[error("{}: no key in it", path.display())]
    Empty {
        /// Which file.
        path: PathBuf,
    },
}

/// The SHA-256 of a key: its identity.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KeyDigest([u8; 32]);

impl fmt::Debug for KeyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyDigest")
    }
}

impl KeyDigest {
    /// Hashes a key that a client may use; `origin` is where it was found.
    pub fn new(key: &str, allows_weak: bool, origin: &str) -> Result<Self, KeyError> {
        let origin = || origin.to_owned();
        if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(KeyError::Characters { origin: origin() });
        }
        if key.len() < KEY_BYTES_MIN && !allows_weak {
            return Err(KeyError::Weak { origin: origin(), bytes: key.len() });
        }
        Ok(Self(sha256_bytes(key.as_bytes())))
    }
}

/// Where keys come from. Without any, no key is asked for.
#[derive(Clone, Debug, Default)]
pub struct KeySources {
    /// Keys of the command line and the environment.
    pub given: Vec<KeyDigest>,
    /// A file with one key a line, read again on SIGHUP.
    pub file: Option<PathBuf>,
    /// Whether keys may be short.
    pub allows_weak: bool,
}

impl KeySources {
    /// Whether requests need a key.
    #[must_use]
    pub fn are_there(&self) -> bool {
        !self.given.is_empty() || self.file.is_some()
    }

    /// All keys; none only if none are asked for.
    pub fn read(&self) -> Result<Vec<KeyDigest>, KeyError> {
        let mut keys = self.given.clone();
        if let Some(path) = &self.file {
            keys.extend(read_file(path, self.allows_weak)?);
        }
        Ok(keys)
    }
}

/// The mode of a file that every user of the machine can read or change; `None` if it may hold a secret.
///
/// # Errors
/// If there is no such file, or nothing is told of it.
pub(crate) fn mode_if_open(path: &Path) -> std::io::Result<Option<u32>> {
    let mode = std::fs::metadata(path)?.permissions().mode() & 0o777;
    Ok((mode & OPEN_TO_OTHERS != 0).then_some(mode))
}

fn read_file(path: &Path, allows_weak: bool) -> Result<Vec<KeyDigest>, KeyError> {
    let failed = |error| KeyError::File { path: path.to_owned(), error };
    if let Some(mode) = mode_if_open(path).map_err(failed)? {
        return Err(KeyError::Open { path: path.to_owned(), mode });
    }
    let text = std::fs::read_to_string(path).map_err(failed)?;
    let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
    let keys = lines
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
        .map(|(number, line)| KeyDigest::new(line, allows_weak, &format!("{}:{number}", path.display())));
    let keys = keys.collect::<Result<Vec<_>, _>>()?;
    if keys.is_empty() {
        return Err(KeyError::Empty { path: path.to_owned() });
    }
    Ok(keys)
}

/// The keys that open the server now. Cheap to clone; all clones see a change.
#[derive(Clone, Debug, Default)]
pub struct Keys(Arc<RwLock<Vec<KeyDigest>>>);

impl Keys {
    /// These keys from now on.
    #[must_use]
    pub fn new(keys: Vec<KeyDigest>) -> Self {
        Self(Arc::new(RwLock::new(keys)))
    }

    /// Other keys from now on.
    pub fn replace(&self, keys: Vec<KeyDigest>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = keys;
    }

    /// Whether a key is asked for at all.
    #[must_use]
    pub fn are_needed(&self) -> bool {
        !self.0.read().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// The key that `sent` is, if it is one.
    #[must_use]
    pub fn find(&self, sent: &[u8]) -> Option<KeyDigest> {
        let sent = sha256_bytes(sent);
        let mut found = false;
        for key in self.0.read().unwrap_or_else(PoisonError::into_inner).iter() {
            let differing = key.0.iter().zip(&sent).fold(0, |differing, (a, b)| black_box(differing | (a ^ b)));
            found |= black_box(differing == 0);
        }
        // The digest of what was sent is that of the key it equals.
        found.then_some(KeyDigest(sent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "correct-horse-battery";

    #[test]
    fn only_whole_keys_are_found() {
        let other = KeyDigest::new("another-key-of-enough-bytes", false, "").unwrap();
        let key = KeyDigest::new(KEY, false, "").unwrap();
        let keys = Keys::new(vec![other, key, other]);
        assert_eq!(keys.find(KEY.as_bytes()), Some(key));
        for wrong in ["", "correct-horse-batter", "correct-horse-battery ", "Correct-horse-battery"] {
            assert_eq!(keys.find(wrong.as_bytes()), None, "{wrong}");
        }
        keys.replace(vec![other]);
        assert_eq!(keys.find(KEY.as_bytes()), None);
        assert!(keys.are_needed() && !Keys::default().are_needed());
    }

    #[test]
    fn keys_that_cannot_be_sent_or_can_be_guessed_are_refused_without_being_shown() {
        for (key, allows_weak) in
            [("short", false), ("", true), ("with space in the middle", true), ("schlüssel-zum-haus", true)]
        {
            let message = KeyDigest::new(key, allows_weak, "--api-key").unwrap_err().to_string();
            assert!(message.starts_with("--api-key: ") && (key.is_empty() || !message.contains(key)), "{message}");
        }
        assert!(KeyDigest::new("short", true, "").is_ok());
        let shown = format!("{:?}", KeyDigest::new(KEY, false, "").unwrap());
        assert_eq!(shown, "KeyDigest");
    }

    #[test]
    fn a_file_has_a_key_a_line_and_is_a_secret() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        let mode = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        std::fs::write(&path, format!("# who\n\n  {KEY}\r\nanother-key-of-enough-bytes\n")).unwrap();
        let sources = KeySources { file: Some(path.clone()), ..KeySources::default() };
        mode(0o644);
        assert!(matches!(sources.read(), Err(KeyError::Open { mode: 0o644, .. })));
        mode(0o640);
        let keys = sources.read().unwrap();
        assert_eq!(keys.len(), 2);
        assert!(Keys::new(keys).find(KEY.as_bytes()).is_some());
        std::fs::write(&path, "# nobody yet\n").unwrap();
        assert!(matches!(sources.read(), Err(KeyError::Empty { .. })));
        std::fs::write(&path, format!("{KEY}\nshort\n")).unwrap();
        let message = sources.read().unwrap_err().to_string();
        assert!(message.contains("keys:2: a key of 5 bytes") && !message.contains(KEY), "{message}");
        assert!(KeySources::default().read().unwrap().is_empty() && !KeySources::default().are_there());
    }
}
