//! Which hub, as whom, and where its files are kept: what `HF_*` variables and the token file say.
//!
//! The variables are those of Hugging Face's own tools. They are looked up by a function of the caller, which is the
//! command line: nothing here reads the environment.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// The hub that is meant if nothing is said.
const ENDPOINT: &str = "https://huggingface.co";
/// The longest token file that is read. Tokens have 37 characters.
const TOKEN_BYTES_MAX: u64 = 4096;

/// A password for a hub. Shown as nothing but the fact that there is one.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

/// Text that cannot be a token. The text is not part of the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("holds no token: expected one line of letters, digits and signs")]
pub struct BadToken;

/// Where a hub is, who asks, and where files are kept.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `http://` or `https://` and a host, perhaps a port and a path; no slash at the end.
    pub endpoint: String,
    /// Who asks; nobody in particular if absent.
    pub token: Option<Token>,
    /// The folder of all Hugging Face tools: `models--OWNER--NAME` and so on.
    pub cache: PathBuf,
}

/// Settings that cannot be meant.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say what each field is")]
pub enum SettingsError {
    #[error("HF_ENDPOINT: {0:?} is no address of a hub: expected https://HOST or http://HOST")]
    Endpoint(String),
    #[error("{place}: {error}")]
    Token { place: String, error: BadToken },
    #[error("{path}: {error}")]
    TokenFile { path: String, error: std::io::Error },
    #[error("no folder for downloads: none of HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME and HOME is set")]
    NoCache,
}

impl Token {
    /// Takes the token from a text, without spaces and line breaks around it.
    pub fn parse(text: &str) -> Result<Self, BadToken> {
        let text = text.trim();
        let is_token = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
        if is_token { Ok(Self(text.to_owned())) } else { Err(BadToken) }
    }

    /// The value of an `Authorization` header.
    pub(super) fn bearer(&self) -> String {
        format!("Bearer {}", self.0)
    }

    /// `text` without the token, should a server have put it there.
    pub(super) fn hidden_in(&self, text: &str) -> String {
        text.replace(&self.0, "[token]")
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[token]")
    }
}

impl Settings {
    /// What `variable` says, which looks a name up in the environment. A `token_file` comes before all other tokens and
    /// must be there; then `HF_TOKEN`, `HF_TOKEN_PATH`, and the file that `hf auth login` writes.
    pub fn from_environment(
        variable: impl Fn(&str) -> Option<OsString>,
        token_file: Option<&Path>,
    ) -> Result<Self, SettingsError> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let folder = |name: &str| variable(name).map(PathBuf::from);
        let home = folder("HF_HOME")
            .or_else(|| folder("XDG_CACHE_HOME").map(|cache| cache.join("huggingface")))
            .or_else(|| folder("HOME").map(|home| home.join(".cache/huggingface")));
        let cache = folder("HF_HUB_CACHE").or_else(|| home.as_ref().map(|home| home.join("hub")));

        let endpoint = match variable("HF_ENDPOINT") {
            Some(text) => parse_endpoint(&text.to_string_lossy())?,
            None => ENDPOINT.to_owned(),
        };
        let token = match (token_file, variable("HF_TOKEN")) {
            (Some(path), _) => Some(read_token(path)?),
            (None, Some(text)) => {
                let place = "HF_TOKEN".to_owned();
                Some(Token::parse(&text.to_string_lossy()).map_err(|error| SettingsError::Token { place, error })?)
            }
            (None, None) => match folder("HF_TOKEN_PATH").or_else(|| home.map(|home| home.join("token"))) {
                Some(path) if path.exists() => Some(read_token(&path)?),
                _ => None,
            },
        };
        Ok(Self { endpoint, token, cache: cache.ok_or(SettingsError::NoCache)? })
    }
}

fn parse_endpoint(text: &str) -> Result<String, SettingsError> {
    let refused = || SettingsError::Endpoint(text.to_owned());
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://")).ok_or_else(refused)?;
    // What stands before an @ would be a password, which belongs into no setting that is shown.
    let is_address = !rest.trim_matches('/').is_empty()
        && rest.bytes().all(|byte| byte.is_ascii_graphic() && !b"?#@\\".contains(&byte));
    if is_address { Ok(text.trim_end_matches('/').to_owned()) } else { Err(refused()) }
}

fn read_token(path: &Path) -> Result<Token, SettingsError> {
    let shown = || path.display().to_string();
    let failed = |error| SettingsError::TokenFile { path: shown(), error };
    if std::fs::metadata(path).map_err(failed)?.len() > TOKEN_BYTES_MAX {
        return Err(SettingsError::Token { place: shown(), error: BadToken });
    }
    let text = std::fs::read(path).map_err(failed)?;
    let text = String::from_utf8(text).map_err(|_| SettingsError::Token { place: shown(), error: BadToken })?;
    Token::parse(&text).map_err(|error| SettingsError::Token { place: shown(), error })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&str, &str)], token_file: Option<&Path>) -> Result<Settings, SettingsError> {
        let variable = |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
        Settings::from_environment(variable, token_file)
    }

    #[test]
    fn the_variables_of_other_tools_mean_the_same_here() {
        let found = settings(&[("HOME", "/home/x")], None).unwrap();
        assert_eq!((found.endpoint.as_str(), found.token), (ENDPOINT, None));
        assert_eq!(found.cache, Path::new("/home/x/.cache/huggingface/hub"));
        let found = settings(&[("HOME", "/home/x"), ("HF_HOME", "/h"), ("HF_ENDPOINT", "http://127.0.0.1:80/")], None);
        let found = found.unwrap();
        assert_eq!((found.endpoint.as_str(), found.cache.as_path()), ("http://127.0.0.1:80", Path::new("/h/hub")));
        assert_eq!(settings(&[("HF_HUB_CACHE", "/c")], None).unwrap().cache, Path::new("/c"));
        assert!(matches!(settings(&[], None), Err(SettingsError::NoCache)));
        for endpoint in ["huggingface.co", "https://", "ftp://x", "https://user:secret@x", "https://x?y"] {
            assert!(settings(&[("HOME", "/"), ("HF_ENDPOINT", endpoint)], None).is_err(), "{endpoint}");
        }
    }

    #[test]
    fn tokens_come_from_the_first_place_that_has_one_and_are_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let (given, login) = (folder.path().join("given"), folder.path().join("token"));
        std::fs::write(&given, "hf_given\n").unwrap();
        std::fs::write(&login, "hf_login").unwrap();
        let home = folder.path().to_str().unwrap();
        let of = |pairs: &[(&str, &str)], file| settings(&[&[("HF_HOME", home)], pairs].concat(), file).unwrap().token;
        assert_eq!(of(&[("HF_TOKEN", "hf_variable")], Some(&given)), Some(Token("hf_given".to_owned())));
        assert_eq!(of(&[("HF_TOKEN", "hf_variable")], None), Some(Token("hf_variable".to_owned())));
        assert_eq!(of(&[], None), Some(Token("hf_login".to_owned())));
        assert_eq!(of(&[("HF_TOKEN", "")], None), Some(Token("hf_login".to_owned())));

        let shown = format!("{:?}", settings(&[("HF_HOME", home)], None).unwrap());
        assert!(!shown.contains("hf_login") && shown.contains("[token]"), "{shown}");
        let message = settings(&[("HF_HOME", home), ("HF_TOKEN", "hf_se cret")], None).unwrap_err().to_string();
        assert!(!message.contains("cret") && message.contains("HF_TOKEN"), "{message}");
        assert!(settings(&[("HF_HOME", home)], Some(&folder.path().join("absent"))).is_err());
    }
}
