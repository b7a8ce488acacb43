//! Counter-based random numbers: a value is a function of its key, never of what was drawn before.
//!
//! `mix64` is the splitmix64 finalizer (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
//! Synthetic weights follow `tests/golden/model/README.md`, so that any language can build the same tiny checkpoints.

/// The golden-ratio increment of splitmix64.
pub const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The splitmix64 finalizer: a bijection on 64 bits with full avalanche.
#[must_use]
pub fn mix64(mut z: u64) -> u64 {
    z ^= z >> 30;
    z = z.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z ^= z >> 27;
    z = z.wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// 64-bit FNV-1a of a text.
#[must_use]
pub fn fnv1a64(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

/// A uniform number in [0, 1) from 64 random bits: the upper 53 bits, scaled.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "53 bits fit an f64 exactly")]
pub fn unit_interval(bits: u64) -> f64 {
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// Folds the parts of a key into 64 well-mixed bits; the order of the parts matters.
#[must_use]
pub fn keyed(seed: u64, parts: &[u64]) -> u64 {
    parts
        .iter()
        .fold(mix64(seed ^ GOLDEN), |hash, &part| mix64(hash.wrapping_add(GOLDEN) ^ mix64(part.wrapping_add(GOLDEN))))
}

/// An endless sequence of f32 values, uniform in [-1, 1), that depends on a tensor's name, a seed and the index only.
#[derive(Clone, Copy, Debug)]
pub struct Symmetric {
    base: u64,
}

impl Symmetric {
    /// The sequence of tensor `name` under `seed`.
    #[must_use]
    pub fn new(name: &str, seed: u64) -> Self {
        Self { base: mix64(fnv1a64(name) ^ mix64(seed)) }
    }

    /// Element `index`: `(2k - 2^24) / 2^24` with 24 random bits k, exact in f32.
    #[must_use]
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_wrap, reason = "25-bit integers fit an f32 exactly")]
    pub fn at(self, index: u64) -> f32 {
        let bits = mix64(self.base.wrapping_add(index.wrapping_mul(GOLDEN))) >> 40;
        (2 * bits as i64 - (1 << 24)) as f32 / (1u32 << 24) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_the_published_one() {
        // First outputs of splitmix64 with seed 1234567 (Vigna's reference program).
        let mut state = 1_234_567u64;
        let mut next = || {
            state = state.wrapping_add(GOLDEN);
            mix64(state)
        };
        assert_eq!(next(), 6_457_827_717_110_365_317);
        assert_eq!(next(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn keys_differ_by_every_part_and_their_order() {
        let base = keyed(1, &[2, 3]);
        for other in [keyed(0, &[2, 3]), keyed(1, &[3, 2]), keyed(1, &[2]), keyed(1, &[2, 3, 0]), keyed(1, &[2, 4])] {
            assert_ne!(base, other);
        }
        assert!((0..1000).all(|i| (0.0..1.0).contains(&unit_interval(keyed(7, &[i])))));
    }
}
