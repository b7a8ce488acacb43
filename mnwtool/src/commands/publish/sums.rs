//! `SHA256SUMS`, as `sha256sum` writes and checks it.

use minnow_formats::hub::Identity;
use thiserror::Error;

/// The file's name.
pub(crate) const NAME: &str = "SHA256SUMS";

/// A line that is none.
#[derive(Debug, PartialEq, Eq, Error)]
#[error("line {0} is no SHA-256 and a file name")]
pub(crate) struct BadLine(usize);

/// The text for digests and names, in the order given. Names have no line breaks or backslashes.
pub(crate) fn text<'a>(files: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    files.map(|(sha256, name)| format!("{sha256}  {name}\n")).collect()
}

/// Digests and names.
pub(crate) fn parse(text: &str) -> Result<Vec<(String, String)>, BadLine> {
    let line = |(line, number): (&str, usize)| {
        let (digest, name) = line.split_once("  ").or_else(|| line.split_once(" *")).ok_or(BadLine(number))?;
        match Identity::parse(digest) {
            Some(Identity::Sha256(digest)) if !name.is_empty() => Ok((digest, name.to_owned())),
            _ => Err(BadLine(number)),
        }
    };
    text.lines().zip(1..).filter(|(text, _)| !text.is_empty()).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_round_trip() {
        let (a, b) = ("ab".repeat(32), "cd".repeat(32));
        let text = text([(a.as_str(), "x.mnw"), (b.as_str(), "y z")].into_iter());
        assert_eq!(parse(&text), Ok(vec![(a.clone(), "x.mnw".to_owned()), (b, "y z".to_owned())]));
        assert_eq!(parse(&format!("{a}  x\nhello\n")), Err(BadLine(2)));
        assert_eq!(parse(&format!("{a}  \n")), Err(BadLine(1)));
    }
}
