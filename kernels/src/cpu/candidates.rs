//! The best tokens of positions, from logits or straight from the head.
//!
//! A vocabulary is taken in pieces of [`PIECE`] tokens. Each yields its four best and its part of the sum of
//! exponentials; the pieces are joined in order. So candidates computed with the head, which never holds more than a
//! piece of the logits, are those computed from whole rows of logits, bit for bit.

use std::cmp::Ordering;

use rayon::prelude::*;

use super::Isa;
use super::isa::Kernel;
use super::kept::with_kept;
use super::lanes::{LANES, Lanes};
use super::linear::{BlockScratch, FEATURES};
use super::products::Packed;
#[cfg(target_arch = "x86_64")]
use super::tiles::{self, HeadInput};
use crate::codec::STRIP;
use crate::matrix::WeightMatrix;
use crate::ops::{CANDIDATES, Candidate};

/// Tokens in a piece of the vocabulary: a whole number of strips, and few enough that its logits stay in cache.
const PIECE: usize = 512;
const _: () = assert!(PIECE.is_multiple_of(STRIP));

/// The four largest logits of `row: [vocabulary]`, best first, the lower id first among equals, with their softmax
/// probabilities over the whole row. NaN ranks as minus infinity but makes every probability NaN. A row of fewer than
/// four tokens is filled up with its last candidate at confidence zero.
///
/// # Panics
/// If `row` is empty.
#[must_use]
pub fn candidates(isa: Isa, row: &[f32]) -> [Candidate; CANDIDATES] {
    let pieces: Vec<Piece> = row
        .chunks(PIECE)
        .enumerate()
        .map(|(index, logits)| isa.run(PieceOfRow { logits, first_token: index * PIECE }))
        .collect();
    joined(pieces.iter())
}

/// [`candidates`] of the logits `head x`, for each row of `x: [rows, head.cols]`; `out: [rows]`.
///
/// Parallel over pieces of the vocabulary, and no more than a piece of logits is kept by each thread.
pub fn head_candidates(isa: Isa, out: &mut [[Candidate; CANDIDATES]], x: &[f32], head: &WeightMatrix<'_>) {
    let rows = out.len();
    assert_eq!(x.len(), rows * head.cols());
    if rows == 0 {
        return;
    }
    // [pieces, rows]
    let mut pieces = vec![Piece::default(); head.rows().div_ceil(PIECE) * rows];
    let source = PieceSource::new(isa, x, head);
    pieces.par_chunks_mut(rows).enumerate().for_each_init(
        || vec![0.0; PIECE * rows],
        |logits, (piece, out)| {
            let first_token = piece * PIECE;
            let tokens = PIECE.min(head.rows() - first_token);
            let logits = &mut logits[..tokens * rows];
            source.logits(logits, tokens, first_token);
            for (logits, out) in logits.chunks_exact(tokens).zip(out) {
                *out = isa.run(PieceOfRow { logits, first_token });
            }
        },
    );
    for (row, out) in out.iter_mut().enumerate() {
        *out = joined(pieces[row..].iter().step_by(rows));
    }
}

/// Rows whose logits are computed piece by piece, and the head.
enum PieceSource<'a> {
    F32 {
        isa: Isa,
        x: Packed,
        head: &'a WeightMatrix<'a>,
    },
    #[cfg(target_arch = "x86_64")]
    Bf16(HeadInput, &'a WeightMatrix<'a>),
}

impl<'a> PieceSource<'a> {
    fn new(isa: Isa, x: &[f32], head: &'a WeightMatrix<'a>) -> Self {
        #[cfg(target_arch = "x86_64")]
        if tiles::takes(isa, head) {
            return Self::Bf16(HeadInput::new(isa, x, head), head);
        }
        let mut packed = Packed::default();
        packed.set_all(isa, x, head.cols());
        Self::F32 { isa, x: packed, head }
    }

    /// Logits of `tokens` tokens from `first_token` on: `out: [rows, tokens]`.
    fn logits(&self, out: &mut [f32], tokens: usize, first_token: usize) {
        match self {
            Self::F32 { isa, x, head } => {
                for token in (0..tokens).step_by(FEATURES) {
                    with_kept!(BlockScratch, |scratch| {
                        let products = scratch.products(*isa, x.view(), head, first_token + token);
                        for (products, out) in products.iter().zip(out.chunks_exact_mut(tokens)) {
                            let out = &mut out[token..tokens.min(token + FEATURES)];
                            out.copy_from_slice(&products[..out.len()]);
                        }
                    });
                }
            }
            #[cfg(target_arch = "x86_64")]
            Self::Bf16(input, head) => input.logits(out, tokens, head, first_token),
        }
    }
}

/// What a piece of a row contributes.
#[derive(Clone, Copy, Default)]
struct Piece {
    best: Best,
    /// The largest logit; minus infinity if all are that or NaN.
    max: f32,
    /// The sum of `exp(logit - max)`; zero if `max` is minus infinity, NaN if any logit is.
    total: f32,
}

struct PieceOfRow<'a> {
    logits: &'a [f32],
    first_token: usize,
}

impl Kernel for PieceOfRow<'_> {
    type Output = Piece;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> Piece {
        let mut best = Best::default();
        for (token, &logit) in (self.first_token..).zip(self.logits) {
            best.offer(token as u32, logit);
        }
        let max = best.first_rank();
        // Whatever is subtracted from minus infinity, exp gives zero; infinity minus itself would give NaN.
        let minus_max = lanes.splat(if max == f32::NEG_INFINITY { 0.0 } else { -max });
        let mut total = lanes.splat(0.0);
        let (vectors, rest) = self.logits.as_chunks::<LANES>();
        for logits in vectors {
            total = lanes.add(total, lanes.exp(lanes.add(lanes.load(logits), minus_max)));
        }
        let mut last = [f32::NEG_INFINITY; LANES];
        last[..rest.len()].copy_from_slice(rest);
        total = lanes.add(total, lanes.exp(lanes.add(lanes.load(&last), minus_max)));
        Piece { best, max, total: lanes.sum(total) }
    }
}

/// Up to four tokens, best first; the earlier first among equals.
#[derive(Clone, Copy, Default)]
struct Best {
    entries: [(u32, f32); CANDIDATES],
    count: usize,
}

impl Best {
    /// Takes in a token, if it is among the best. Tokens come in ascending order.
    #[inline(always)]
    fn offer(&mut self, token: u32, logit: f32) {
        if self.count == CANDIDATES && !precedes(logit, self.entries[CANDIDATES - 1].1) {
            return;
        }
        let place = self.entries[..self.count].iter().position(|entry| precedes(logit, entry.1)).unwrap_or(self.count);
        self.count = CANDIDATES.min(self.count + 1);
        self.entries[place..self.count].rotate_right(1);
        self.entries[place] = (token, logit);
    }

    fn first_rank(&self) -> f32 {
        if self.count == 0 { f32::NEG_INFINITY } else { rank(self.entries[0].1) }
    }
}

/// NaN ranks as minus infinity.
fn rank(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit }
}

/// Whether `logit` comes before `other`, which belongs to a lower token.
#[inline(always)]
fn precedes(logit: f32, other: f32) -> bool {
    rank(logit).partial_cmp(&rank(other)) == Some(Ordering::Greater)
}

/// The candidates of a row from all its pieces, in order.
fn joined<'a>(pieces: impl Iterator<Item = &'a Piece> + Clone) -> [Candidate; CANDIDATES] {
    let mut best = Best::default();
    let mut max = f32::NEG_INFINITY;
    for piece in pieces.clone() {
        for &(token, logit) in &piece.best.entries[..piece.best.count] {
            best.offer(token, logit);
        }
        max = max.max(piece.max);
    }
    let relative = |logit: f32| (f64::from(logit) - f64::from(max)).exp();
    let total: f64 = pieces.map(|piece| f64::from(piece.total) * relative(piece.max)).sum();
    assert!(best.count > 0, "a row of no logits has no candidates");
    std::array::from_fn(|place| {
        let (token, logit) = best.entries[place.min(best.count - 1)];
        let confidence = if place < best.count { (relative(logit) / total) as f32 } else { 0.0 };
        Candidate { token, logit, confidence }
    })
}
