//! What a request may choose about decoding, and what it gets if it does not.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// How a block is refined; one for each generation of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// LLaDA2.0: scheduled unmasking.
    V20,
    /// LLaDA2.1: threshold unmasking and token editing.
    V21,
    /// LLaDA2.2: unmasking, token editing, DELETE and SPLIT together.
    V22,
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V20 => "2.0",
            Self::V21 => "2.1",
            Self::V22 => "2.2",
        })
    }
}

impl FromStr for Algorithm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "2.0" => Ok(Self::V20),
            "2.1" => Ok(Self::V21),
            "2.2" => Ok(Self::V22),
            _ => Err("expected 2.0, 2.1 or 2.2".to_owned()),
        }
    }
}

/// What happens to a block that has not settled when its steps are used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnLimit {
    /// Report it; the block is lost. The reference's candidates are then unrestricted.
    Error,
    /// The last step fills everything and bans MASK, DELETE and SPLIT, so that the block can be published. LLaDA2.0 and
    /// 2.1 never take MASK for a candidate in this mode.
    Force,
}

/// Which position is changed when a step would bring back a block that was there before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AntiLoop {
    /// A random one of those the step changed.
    Random,
    /// The one of them with the lowest greedy confidence.
    Lowest,
}

/// A name for a pair of thresholds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    /// Fewer mistakes.
    Quality,
    /// Fewer forwards.
    Speed,
}

impl FromStr for Preset {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "quality" => Ok(Self::Quality),
            "speed" => Ok(Self::Speed),
            _ => Err("expected quality or speed".to_owned()),
        }
    }
}

impl Preset {
    /// `threshold` and `editing_threshold`; the table "Presets" of `docs/block-diffusion.md`.
    fn thresholds(self, algorithm: Algorithm) -> (f32, f32) {
        match (self, algorithm) {
            (Self::Quality, Algorithm::V20) => (0.95, 1.0),
            (Self::Speed, Algorithm::V20) => (0.7, 1.0),
            (Self::Quality, Algorithm::V21) => (0.7, 0.5),
            (Self::Quality, Algorithm::V22) => (0.7, 0.0),
            (Self::Speed, Algorithm::V21 | Algorithm::V22) => (0.5, 0.0),
        }
    }
}

/// Options of one request. [`check`](Self::check) says whether they make sense.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// How blocks are refined.
    pub algorithm: Algorithm,
    /// A masked position is filled when its confidence is above this. 0 to 1.
    pub threshold: f32,
    /// A filled position is rewritten when the confidence of another token is above this. 0 to 1; not in LLaDA2.0.
    pub editing_threshold: f32,
    /// Steps over which the filling of a block is scheduled at the latest. LLaDA2.0 and 2.2.
    pub steps: usize,
    /// Steps allowed after the last original mask is filled. LLaDA2.1 and 2.2.
    pub max_post_steps: usize,
    /// Steps allowed for a block. LLaDA2.1 and 2.2; LLaDA2.0 has `steps`.
    pub max_steps_per_block: usize,
    /// Positions filled in a step even if none is above the threshold. LLaDA2.1.
    pub num_to_transfer: usize,
    /// 0 is greedy.
    pub temperature: f32,
    /// Sample among this many best tokens; 0 is all.
    pub top_k: usize,
    /// Sample among the fewest tokens that hold this share of probability; 1 is all.
    pub top_p: f32,
    /// What happens at `max_steps_per_block`.
    pub on_limit: OnLimit,
    /// How a loop is left. LLaDA2.2.
    pub anti_loop: AntiLoop,
}

/// An option whose value does not make sense.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("{field} is {value}, expected {expected}")]
pub struct OptionError {
    /// The option's name, as in requests.
    pub field: &'static str,
    /// The value given.
    pub value: String,
    /// What may stand there.
    pub expected: &'static str,
}

/// Bound on counts of steps, so that the memory of a block (32 tokens a step) stays below 13 MB.
const STEPS_MAX: usize = 100_000;

impl Options {
    /// The reference's defaults (the 2.1 model card's "quality" mode for 2.1), with errors at the limit and a random
    /// way out of loops. `docs/block-diffusion.md` has the table.
    #[must_use]
    pub fn reference(algorithm: Algorithm) -> Self {
        let (threshold, editing_threshold) = match algorithm {
            Algorithm::V20 => (0.95, 1.0),
            Algorithm::V21 => (0.7, 0.5),
            Algorithm::V22 => (0.5, 0.0),
        };
        Self {
            algorithm,
            threshold,
            editing_threshold,
            steps: 32,
            max_post_steps: 16,
            max_steps_per_block: 1000,
            num_to_transfer: 1,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            on_limit: OnLimit::Error,
            anti_loop: AntiLoop::Random,
        }
    }

    /// The defaults for serving: every block ends in tokens that can be published, and loops are left the same way in
    /// every run.
    #[must_use]
    pub fn serving(algorithm: Algorithm) -> Self {
        Self { on_limit: OnLimit::Force, anti_loop: AntiLoop::Lowest, ..Self::reference(algorithm) }
    }

    /// These options with a preset's thresholds.
    #[must_use]
    pub fn with_preset(self, preset: Preset) -> Self {
        let (threshold, editing_threshold) = preset.thresholds(self.algorithm);
        Self { threshold, editing_threshold, ..self }
    }

    /// Refuses values that make no sense, naming the field as requests do.
    pub fn check(&self) -> Result<(), OptionError> {
        self.check_numbers()?;
        count("steps", self.steps)?;
        count("max_steps_per_block", self.max_steps_per_block)?;
        count("num_to_transfer", self.num_to_transfer)
    }

    /// The part of [`check`](Self::check) that the arithmetic relies on.
    pub(super) fn check_numbers(&self) -> Result<(), OptionError> {
        let unit = |field, value: f32| match value {
            0.0..=1.0 => Ok(()),
            _ => Err(OptionError { field, value: value.to_string(), expected: "a number from 0 to 1" }),
        };
        unit("threshold", self.threshold)?;
        unit("editing_threshold", self.editing_threshold)?;
        unit("top_p", self.top_p)?;
        // Far below this, a temperature is greedy in all but name, and logits divided by it overflow.
        if self.temperature != 0.0 && !(1e-3..=100.0).contains(&self.temperature) {
            let (field, value) = ("temperature", self.temperature.to_string());
            return Err(OptionError { field, value, expected: "0, or a number from 0.001 to 100" });
        }
        for (field, value) in [
            ("steps", self.steps),
            ("max_post_steps", self.max_post_steps),
            ("max_steps_per_block", self.max_steps_per_block),
        ] {
            if value > STEPS_MAX {
                return Err(OptionError { field, value: value.to_string(), expected: "at most 100000" });
            }
        }
        Ok(())
    }
}

fn count(field: &'static str, value: usize) -> Result<(), OptionError> {
    match value {
        0 => Err(OptionError { field, value: value.to_string(), expected: "at least 1" }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_make_sense_and_nonsense_is_named() {
        for algorithm in [Algorithm::V20, Algorithm::V21, Algorithm::V22] {
            assert_eq!(Options::serving(algorithm).check(), Ok(()));
            assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
        }
        let options = Options::serving(Algorithm::V22);
        for (changed, expected) in [
            (Options { threshold: f32::NAN, ..options }, "threshold is NaN, expected a number from 0 to 1"),
            (
                Options { editing_threshold: -0.5, ..options },
                "editing_threshold is -0.5, expected a number from 0 to 1",
            ),
            (Options { top_p: 1.5, ..options }, "top_p is 1.5, expected a number from 0 to 1"),
            (Options { temperature: -1.0, ..options }, "temperature is -1, expected 0, or a number from 0.001 to 100"),
            (Options { steps: 0, ..options }, "steps is 0, expected at least 1"),
            (Options { max_post_steps: 1 << 20, ..options }, "max_post_steps is 1048576, expected at most 100000"),
            (Options { max_steps_per_block: 0, ..options }, "max_steps_per_block is 0, expected at least 1"),
        ] {
            assert_eq!(changed.check().unwrap_err().to_string(), expected);
        }
        assert!("2.3".parse::<Algorithm>().is_err());
    }
}
