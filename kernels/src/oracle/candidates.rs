//! The best tokens of a position.

use std::cmp::Ordering;

use crate::ops::{CANDIDATES, Candidate};

/// The four largest logits of `row: [vocabulary]`, best first, the lower id first among equals, with their softmax
/// probabilities over the whole row. NaN ranks as minus infinity but makes every probability NaN. A row of fewer than
/// four tokens is filled up with its last candidate at confidence zero.
///
/// # Panics
/// If `row` is empty.
#[must_use]
pub fn candidates(row: &[f32]) -> [Candidate; CANDIDATES] {
    let rank = |token: usize| if row[token].is_nan() { f32::NEG_INFINITY } else { row[token] };
    // The sort is stable, so equal logits stay in the order of their ids; the two zeros are equal.
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| rank(b).partial_cmp(&rank(a)).unwrap_or(Ordering::Equal));
    let max = f64::from(rank(order[0]));
    let total: f64 = row.iter().map(|&logit| (f64::from(logit) - max).exp()).sum();
    std::array::from_fn(|place| match order.get(place) {
        Some(&token) => {
            let confidence = ((f64::from(row[token]) - max).exp() / total) as f32;
            Candidate { token: token as u32, logit: row[token], confidence }
        }
        None => {
            let token = order[order.len() - 1];
            Candidate { token: token as u32, logit: row[token], confidence: 0.0 }
        }
    })
}
