//! Names that nobody can guess: request ids, answer ids, call ids, fresh seeds.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Characters of an id after its prefix.
const LENGTH: usize = 24;
const ALPHABET: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// `prefix` and 24 random characters.
pub(crate) fn random(prefix: &str) -> String {
    let mut id = String::with_capacity(prefix.len() + LENGTH);
    id.push_str(prefix);
    while id.len() < prefix.len() + LENGTH {
        let mut bits = entropy();
        // 62^8 is below 2^48, so eight characters use the better-mixed part of 64 bits.
        for _ in 0..8 {
            id.push(char::from(ALPHABET[(bits % 62) as usize]));
            bits /= 62;
        }
    }
    id
}

/// A seed that JavaScript can read back: 53 bits.
pub(crate) fn fresh_seed() -> u64 {
    entropy() >> 11
}

/// 64 bits that differ on each call. The standard library keys its hash maps from the system's entropy, and each
/// `RandomState` has its own key; the empty SipHash under that key is as unpredictable as the key.
fn entropy() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn ids_are_long_and_differ() {
        let ids: HashSet<String> = (0..10_000).map(|_| random("call_")).collect();
        assert_eq!(ids.len(), 10_000);
        assert!(ids.iter().all(|id| id.len() == 29 && id[5..].bytes().all(|byte| byte.is_ascii_alphanumeric())));
    }

    #[test]
    fn seeds_fit_a_double() {
        assert!((0..1000).all(|_| fresh_seed() < 1 << 53));
    }
}
