//! The best tokens of one position: all that greedy decoding needs of a row of logits.

/// A token and how likely the model finds it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Candidate {
    /// The id.
    pub token: u32,
    /// Its softmax probability at temperature 1 over the whole vocabulary.
    pub confidence: f32,
}

/// The best tokens of one position: descending logit, ties by ascending id, so the first is the greedy choice. Four
/// suffice: at most three ids are ever banned together (MASK, DELETE and SPLIT).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Candidates(pub [Candidate; 4]);

impl Candidates {
    /// The best candidates of `row: [vocab]`. A row with NaN or positive infinity gives confidences that are not
    /// finite; rows shorter than four are filled up with token 0 at confidence 0.
    #[must_use]
    pub fn from_logits(row: &[f32]) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "f32 is what backends give and what is compared")]
        let narrow = |Scored { token, confidence }| Candidate { token, confidence: confidence as f32 };
        Self(Ranking::from_logits(row).0.map(narrow))
    }
}

/// A token with the confidence that the algorithms compare. Backends give it as f32. Where the decoder computes it
/// itself, from logits, it keeps the f64: golden traces hold ranks that differ in the ninth digit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Scored {
    pub(super) token: u32,
    pub(super) confidence: f64,
}

/// [`Candidates`] as the algorithms see them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ranking([Scored; 4]);

impl From<Candidates> for Ranking {
    fn from(candidates: Candidates) -> Self {
        Self(candidates.0.map(|Candidate { token, confidence }| Scored { token, confidence: confidence.into() }))
    }
}

impl Ranking {
    #[expect(clippy::cast_possible_truncation, reason = "token ids are u32")]
    pub(super) fn from_logits(row: &[f32]) -> Self {
        let mut best = [(f32::NEG_INFINITY, 0u32); 4];
        let mut filled = 0;
        for (token, &logit) in row.iter().enumerate() {
            if filled == best.len() && logit <= best[3].0 {
                continue;
            }
            // Ids ascend, so an equal logit goes behind those already there.
            let place = best[..filled].iter().position(|entry| logit > entry.0).unwrap_or(filled);
            if place < best.len() {
                best[place..].rotate_right(1);
                best[place] = (logit, token as u32);
                filled = (filled + 1).min(best.len());
            }
        }
        let top = f64::from(best[0].0);
        let weight = |logit: f32| (f64::from(logit) - top).exp();
        let total: f64 = row.iter().map(|&logit| weight(logit)).sum();
        let mut ranking = Self::default();
        for (slot, (logit, token)) in ranking.0.iter_mut().zip(best).take(filled) {
            *slot = Scored { token, confidence: weight(logit) / total };
        }
        ranking
    }

    /// The greedy choice.
    pub(super) fn greedy(&self) -> Scored {
        self.0[0]
    }

    /// The best token that is not in `banned`, which holds at most three ids.
    pub(super) fn best_except(&self, banned: &[u32]) -> Scored {
        debug_assert!(banned.len() < self.0.len());
        self.0.into_iter().find(|scored| !banned.contains(&scored.token)).unwrap_or(self.0[3])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_come_in_descending_order_and_ties_keep_the_lower_id_first() {
        let tokens = |row: &[f32]| Candidates::from_logits(row).0.map(|candidate| candidate.token);
        assert_eq!(tokens(&[0.0, 3.0, 1.0, 3.0, 2.0, 3.0]), [1, 3, 5, 4]);
        assert_eq!(tokens(&[0.0; 6]), [0, 1, 2, 3]);
        assert_eq!(tokens(&[-1.0, f32::NEG_INFINITY, f32::NEG_INFINITY, 2.0, f32::NEG_INFINITY]), [3, 0, 1, 2]);
        assert_eq!(tokens(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), [5, 4, 3, 2]);
        let two = Candidates::from_logits(&[0.0, 0.0, -1e30]);
        assert_eq!(two.0[0], Candidate { token: 0, confidence: 0.5 });
        assert_eq!(Ranking::from(two).best_except(&[0, 2]).token, 1);
    }

    #[test]
    fn broken_rows_show_in_the_confidence() {
        for value in [f32::NAN, f32::INFINITY] {
            assert!(!Candidates::from_logits(&[0.0, value, 1.0, 2.0, 3.0]).0[0].confidence.is_finite());
        }
        assert!(!Candidates::from_logits(&[f32::NEG_INFINITY; 5]).0[0].confidence.is_finite());
    }
}
