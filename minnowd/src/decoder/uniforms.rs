//! Where random choices come from.
//!
//! Serving uses [`KeyedUniforms`]: each number is a function of what it is for, so a request's choices depend neither
//! on how many were made before nor on what else runs. Tests replay recorded sequences through the same trait.

use minnow_common::random::{keyed, unit_interval};

/// What a random number is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Drawing a position's candidate.
    Sample,
    /// Drawing again where a final round forbids the candidate.
    Repick,
    /// Choosing the position that leaves a loop; the position is the number of the attempt.
    EscapeIndex,
    /// Drawing the token that leaves a loop, at this attempt.
    EscapeToken {
        /// Number of the attempt in this step, from 0.
        attempt: u8,
    },
}

/// One random choice: the key that names it within a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Draw {
    /// What it is for.
    pub purpose: Purpose,
    /// Steps done in this block.
    pub step: usize,
    /// Index in the block.
    pub position: usize,
}

/// A source of uniform numbers in [0, 1).
pub trait Uniforms {
    /// The number for this choice.
    fn uniform(&mut self, draw: Draw) -> f64;
}

/// Numbers keyed by (seed, choice, block, step, position, purpose): the order of asking does not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyedUniforms {
    /// The request's seed.
    pub seed: u64,
    /// Which of several answers to the same request.
    pub choice: u64,
    /// Absolute index of the block in its sequence.
    pub block: u64,
}

impl Uniforms for KeyedUniforms {
    fn uniform(&mut self, draw: Draw) -> f64 {
        let purpose = match draw.purpose {
            Purpose::Sample => 0,
            Purpose::Repick => 1,
            Purpose::EscapeIndex => 2,
            Purpose::EscapeToken { attempt } => 3 + u64::from(attempt),
        };
        unit_interval(keyed(self.seed, &[self.choice, self.block, draw.step as u64, draw.position as u64, purpose]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_depends_on_its_key_only() {
        let mut keys = Vec::new();
        for step in 0..4 {
            for position in 0..4 {
                for purpose in [Purpose::Sample, Purpose::Repick, Purpose::EscapeIndex] {
                    keys.push(Draw { purpose, step, position });
                }
                keys.extend((0..5).map(|attempt| Draw { purpose: Purpose::EscapeToken { attempt }, step, position }));
            }
        }
        let source = |seed, choice, block| KeyedUniforms { seed, choice, block };
        let forwards: Vec<f64> = keys.iter().map(|&key| source(7, 0, 3).uniform(key)).collect();
        let mut one = source(7, 0, 3);
        let mut backwards: Vec<f64> = keys.iter().rev().map(|&key| one.uniform(key)).collect();
        backwards.reverse();
        assert_eq!(forwards, backwards);
        let mut distinct: Vec<u64> = forwards.iter().map(|value| value.to_bits()).collect();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), keys.len());
        for other in [source(8, 0, 3), source(7, 1, 3), source(7, 0, 4)] {
            assert!(keys.iter().zip(&forwards).all(|(&key, &value)| other.clone().uniform(key) != value));
        }
    }
}
