//! Which names tensors and assets may have, in both containers (`docs/format-mnw.md` section 4.4 and 11).
//!
//! Names are printed, compared and, for assets, may one day be written to disk. So a tensor name is short printable
//! text, and an asset name is a plain file name that no system gives a meaning to.

/// Assets without which a model cannot be served; every container has them.
pub const REQUIRED_ASSETS: [&str; 3] = ["chat_template.jinja", "config.json", "tokenizer.json"];

/// Assets that are carried along where they exist.
pub const OPTIONAL_ASSETS: [&str; 3] = ["generation_config.json", "special_tokens_map.json", "tokenizer_config.json"];

/// The longest tensor name, in bytes.
pub const TENSOR_NAME_BYTES_MAX: usize = 512;

/// The longest asset name, in bytes.
pub const ASSET_NAME_BYTES_MAX: usize = 128;

/// Whether `name` is one of the six assets that a writer may store.
#[must_use]
pub fn is_known_asset(name: &str) -> bool {
    REQUIRED_ASSETS.contains(&name) || OPTIONAL_ASSETS.contains(&name)
}

/// Whether `name` matches `[A-Za-z0-9_][A-Za-z0-9._-]{0,127}`.
#[must_use]
pub fn is_asset_name(name: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    match name.as_bytes() {
        [first, rest @ ..] => {
            word(*first)
                && rest.len() < ASSET_NAME_BYTES_MAX
                && rest.iter().all(|&byte| word(byte) || byte == b'.' || byte == b'-')
        }
        [] => false,
    }
}

/// Whether `name` is 1 to 512 bytes of printable text: no control, format or unassigned characters, no line breaks.
#[must_use]
pub fn is_tensor_name(name: &str) -> bool {
    // `escape_debug` leaves exactly the printable characters alone, and these three.
    let printable = |c: char| matches!(c, '\\' | '"' | '\'') || c.escape_debug().len() == 1;
    !name.is_empty() && name.len() <= TENSOR_NAME_BYTES_MAX && name.chars().all(printable)
}

/// Up to five of `names`, joined by commas, then how many more there are: for error messages.
#[must_use]
pub fn shortlist<S: AsRef<str>>(names: &[S]) -> String {
    const SHOWN: usize = 5;
    let shown: Vec<&str> = names.iter().take(SHOWN).map(AsRef::as_ref).collect();
    match names.len().saturating_sub(SHOWN) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asset_names_are_plain_file_names() {
        for name in ["config.json", "_x", "0", "a-b.c", &"a".repeat(128)] {
            assert!(is_asset_name(name), "{name}");
        }
        for name in ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\0", "-x", ".hidden", "é", &"a".repeat(129)] {
            assert!(!is_asset_name(name), "{name}");
        }
    }

    #[test]
    fn tensor_names_are_printable() {
        for name in ["lm_head.weight", "a b", "poids é", "it's \"\\\"", &"a".repeat(512)] {
            assert!(is_tensor_name(name), "{name}");
        }
        for name in ["", "a\n", "\x1b[31m", "a\u{202e}b", "a\u{2028}", "\0", "\u{7f}", &"a".repeat(513)] {
            assert!(!is_tensor_name(name), "{name:?}");
        }
    }

    #[test]
    fn long_lists_are_cut_and_counted() {
        assert_eq!(shortlist(&["a", "b"]), "a, b");
        assert_eq!(shortlist(&["a", "b", "c", "d", "e", "f", "g"]), "a, b, c, d, e and 2 more");
    }
}
