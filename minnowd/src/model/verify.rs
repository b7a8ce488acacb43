//! Two backends on the same tokens, compared layer by layer: what `minnowd verify` reports.
//!
//! Rounding differs between backends, so values are compared by their relative distance and expert choices by whether
//! rounding can explain a difference. A choice compares biased scores with each other. If no score differs by more
//! than d between the backends, two scores can only swap places if they lie within 2d of each other, and two sums of
//! two scores (the strength of a group) within 4d. So a block whose choices differ although its closest decision has
//! a margin above 4d has been routed by another rule: that is a fault, whatever the values say. A *close call* is no
//! fault, but from there on another expert's output flows through the model, and only a wider tolerance fits.

use minnow_common::{BLOCK, ModelConfig, Routing};
use serde::Serialize;

use super::trace::{Rows, Trace};
use super::{Backend, Batch, ModelError, Need, PageId, Point, Segment};

/// Largest relative distance of f32 backends as long as all experts are the same.
///
/// A sum of K products carries a relative error of about sqrt(K) * 2^-24: 3e-6 for K = 2048. Each layer adds about
/// four of those, independent of each other, to the residual stream, so 32 layers end near sqrt(128) * 3e-6 = 3e-5.
/// Ten times that leaves room for sums that cancel, and is still a hundred times below what a wrong scale, a wrong
/// angle or a swapped row causes.
pub const TOLERANCE_F32: f64 = 3e-4;

/// [`TOLERANCE_F32`] for backends whose products take activations rounded to BF16.
///
/// Some ten roundings a layer, each of up to 2^-8 relative with either sign and 2^-9 in the mean, add up like a random
/// walk: 20 layers end near sqrt(200) * 2^-9 = 2.8 %. A wrong scale or a swapped row is far beyond.
pub const TOLERANCE_BF16: f64 = 0.045;

/// [`TOLERANCE_BF16`] where what enters the experts is quantized to four bits, by both backends.
///
/// Two values that differ by 2^-9 of themselves, as above, fall to different codes in one of so many cases, and codes are about
/// 2^-2 of a value apart: a root mean square of sqrt(2^-9 * 2^-2) = 2.2 % of what experts add. In 20 layers that ends near
/// sqrt(20) * 2.2 % = 10 %. A wrong scale is a factor of a tenth at least, and of two for the scale of a row.
pub const TOLERANCE_FP4: f64 = 0.1;

/// Largest relative distance once a close call fell differently.
///
/// A token that swaps one of its k experts replaces about 1/k of its routed output, and through the pool of its block
/// other tokens may follow; small models with k = 2 and random experts move by several percent. Values beyond this
/// have no resemblance left.
pub const TOLERANCE_AFTER_CLOSE_CALL: f64 = 0.25;

/// What two backends made of the same tokens.
#[derive(Clone, Debug, Serialize)]
pub struct VerifyReport {
    /// The backend under test, in words.
    pub subject: String,
    /// What it was compared with.
    pub reference: String,
    /// Positions evaluated.
    pub positions: usize,
    /// One entry a layer.
    pub layers: Vec<LayerReport>,
    /// After the final norm.
    pub normalized: Difference,
    /// The logits.
    pub logits: Difference,
    /// Positions with the same best token.
    pub top1_same: usize,
    /// Logits of the last block that change when the backend under test evaluates it alone, over the pages of the
    /// blocks before it. Must be none.
    pub cached_mismatches: usize,
    /// Every reason why the backends do not agree; empty if they do.
    pub faults: Vec<String>,
}

/// One layer's part of a [`VerifyReport`].
#[derive(Clone, Debug, Serialize)]
pub struct LayerReport {
    /// Keys after norm and rotation.
    pub key: Difference,
    /// Values.
    pub value: Difference,
    /// The residual stream after attention.
    pub attention: Difference,
    /// The residual stream after the layer.
    pub hidden: Difference,
    /// Expert choices; `None` for a dense layer.
    pub routing: Option<RoutingReport>,
}

/// How far values are from those of the reference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Difference {
    /// Largest absolute difference.
    pub max_abs: f64,
    /// Root mean square of the difference over that of the reference.
    pub relative_rms: f64,
    /// Cosine of the angle between both, taken as one vector each.
    pub cosine: f64,
    /// Values that are finite in one and not in the other.
    pub finite_mismatches: usize,
}

/// How expert choices compare in one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct RoutingReport {
    /// Choices that both made, whatever their order.
    pub same: usize,
    /// Choices in all: positions times experts per token.
    pub choices: usize,
    /// Blocks in which a choice differs and rounding explains it.
    pub close_calls: usize,
    /// Blocks in which a choice differs and rounding cannot explain it.
    pub unexplained: usize,
    /// Smallest distance of any decision from a tie, in the reference.
    pub closest_margin: f32,
    /// Largest difference of a biased score.
    pub score_difference: f32,
}

impl VerifyReport {
    /// Whether the backends agree.
    #[must_use]
    pub fn agrees(&self) -> bool {
        self.faults.is_empty()
    }
}

/// Evaluates `tokens` (whole blocks, from position 0) on both backends in one forward each, into pages 0, 1, ..., and
/// compares everything on the way; then the last block once more, alone. `tolerance` is the relative distance allowed while the expert choices are the same,
/// [`TOLERANCE_F32`] for f32 backends.
pub fn compare(
    subject: &mut dyn Backend,
    reference: &mut dyn Backend,
    tokens: &[u32],
    tolerance: f64,
) -> Result<VerifyReport, ModelError> {
    let ours = traced(subject, tokens)?;
    let theirs = traced(reference, tokens)?;
    let cached_mismatches = cached_mismatches(subject, tokens, &ours)?;
    let config = reference.config();
    let difference = |layer, point| match (ours.rows(0, layer, point), theirs.rows(0, layer, point)) {
        (Some(ours), Some(theirs)) => Difference::between(&ours.values, &theirs.values),
        _ => Difference { finite_mismatches: tokens.len(), ..Difference::default() },
    };
    let layers = (0..config.num_hidden_layers).map(|index| LayerReport {
        key: difference(Some(index), Point::Key),
        value: difference(Some(index), Point::Value),
        attention: difference(Some(index), Point::Attention),
        hidden: difference(Some(index), Point::Hidden),
        routing: RoutingReport::between(&ours, &theirs, index, config),
    });
    let mut report = VerifyReport {
        subject: subject.describe(),
        reference: reference.describe(),
        positions: tokens.len(),
        layers: layers.collect(),
        normalized: difference(None, Point::Normalized),
        logits: difference(None, Point::Logits),
        top1_same: same_best(&ours, &theirs),
        cached_mismatches,
        faults: Vec::new(),
    };
    report.faults = report.find_faults(tolerance);
    Ok(report)
}

fn traced(backend: &mut dyn Backend, tokens: &[u32]) -> Result<Trace, ModelError> {
    let pages = pages_of(tokens);
    let segment = Segment { tokens, pages: &pages, need: Need::Logits };
    let mut trace = Trace::default();
    backend.forward(&Batch { segments: &[segment] }, Some(&mut trace))?;
    Ok(trace)
}

fn cached_mismatches(backend: &mut dyn Backend, tokens: &[u32], whole: &Trace) -> Result<usize, ModelError> {
    let pages = pages_of(tokens);
    let last = &tokens[tokens.len() - BLOCK..];
    let mut trace = Trace::default();
    let segment = Segment { tokens: last, pages: &pages, need: Need::Logits };
    backend.forward(&Batch { segments: &[segment] }, Some(&mut trace))?;
    let logits = |trace: &Trace| trace.rows(0, None, Point::Logits).map_or(Vec::new(), |rows| rows.values.clone());
    let (alone, whole) = (logits(&trace), logits(whole));
    let differs = |(a, b): &(&f32, &f32)| a.to_bits() != b.to_bits();
    Ok(alone.iter().rev().zip(whole.iter().rev()).filter(differs).count())
}

/// A page for each block.
fn pages_of(tokens: &[u32]) -> Vec<PageId> {
    (0..).map(PageId).take(tokens.len() / BLOCK).collect()
}

impl VerifyReport {
    fn find_faults(&self, tolerance: f64) -> Vec<String> {
        let mut faults = Vec::new();
        let mut allowed = tolerance;
        let mut judge = |place: String, difference: &Difference, allowed: f64| {
            if difference.finite_mismatches > 0 {
                faults.push(format!("{place}: {} values are finite in one only", difference.finite_mismatches));
            } else if difference.relative_rms > allowed {
                faults.push(format!("{place}: relative RMS {:.2e} exceeds {allowed:.0e}", difference.relative_rms));
            }
        };
        let mut unexplained = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            judge(format!("layer {index}, keys"), &layer.key, allowed);
            judge(format!("layer {index}, values"), &layer.value, allowed);
            judge(format!("layer {index}, after attention"), &layer.attention, allowed);
            if let Some(routing) = &layer.routing {
                if routing.unexplained > 0 {
                    unexplained.push(format!(
                        "layer {index}: {} blocks are routed differently, though scores differ by {:.1e} at most",
                        routing.unexplained, routing.score_difference
                    ));
                }
                if routing.close_calls > 0 {
                    allowed = allowed.max(TOLERANCE_AFTER_CLOSE_CALL);
                }
            }
            judge(format!("layer {index}, output"), &layer.hidden, allowed);
        }
        judge("final norm".to_owned(), &self.normalized, allowed);
        judge("logits".to_owned(), &self.logits, allowed);
        faults.extend(unexplained);
        if self.cached_mismatches > 0 {
            faults.push(format!("last block alone: {} logits differ from the whole forward", self.cached_mismatches));
        }
        faults
    }
}

impl Difference {
    /// The difference of `ours` from `theirs`; values that are not finite in either are left out.
    #[must_use]
    pub fn between(ours: &[f32], theirs: &[f32]) -> Self {
        let finite_mismatches = ours.iter().zip(theirs).filter(|(a, b)| a.is_finite() != b.is_finite()).count();
        let (mut max_abs, mut error, mut square_ours, mut square_theirs, mut product) = (0.0f64, 0.0, 0.0, 0.0, 0.0);
        for (&a, &b) in ours.iter().zip(theirs).filter(|(a, b)| a.is_finite() && b.is_finite()) {
            let (a, b) = (f64::from(a), f64::from(b));
            max_abs = max_abs.max((a - b).abs());
            error += (a - b) * (a - b);
            square_ours += a * a;
            square_theirs += b * b;
            product += a * b;
        }
        let over = |part: f64, whole: f64, empty: f64| if whole > 0.0 { part / whole } else { empty };
        Self {
            max_abs,
            relative_rms: over(error, square_theirs, error).sqrt(),
            cosine: over(product, (square_ours * square_theirs).sqrt(), 1.0),
            finite_mismatches: finite_mismatches + ours.len().abs_diff(theirs.len()),
        }
    }
}

impl RoutingReport {
    fn between(ours: &Trace, theirs: &Trace, layer: usize, config: &ModelConfig) -> Option<Self> {
        let pair = |point| Some((ours.rows(0, Some(layer), point)?, theirs.rows(0, Some(layer), point)?));
        let (our_ids, their_ids) = pair(Point::RouterIds)?;
        let (our_scores, their_scores) = pair(Point::RouterScores)?;
        let mut report = Self { closest_margin: f32::INFINITY, ..Self::default() };
        for block in 0..their_ids.values.len() / their_ids.width / BLOCK {
            let of = |rows: &Rows| {
                rows.values.get(block * BLOCK * rows.width..(block + 1) * BLOCK * rows.width).map(<[f32]>::to_vec)
            };
            let (our_ids, their_ids) = (of(our_ids)?, of(their_ids)?);
            let (our_scores, their_scores) = (of(our_scores)?, of(their_scores)?);
            let same = same_choices(&our_ids, &their_ids, config.num_experts_per_tok);
            let margin = closest_margin(&their_scores, config);
            let moved = our_scores.iter().zip(&their_scores).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            report.same += same;
            report.choices += their_ids.len();
            report.closest_margin = report.closest_margin.min(margin);
            report.score_difference = report.score_difference.max(moved);
            if same < their_ids.len() {
                let is_explained = margin <= 4.0 * moved;
                report.close_calls += usize::from(is_explained);
                report.unexplained += usize::from(!is_explained);
            }
        }
        Some(report)
    }
}

/// How many ids of each row of `per_token` appear in the same row of the other.
fn same_choices(ours: &[f32], theirs: &[f32], per_token: usize) -> usize {
    let rows = ours.chunks_exact(per_token).zip(theirs.chunks_exact(per_token));
    rows.map(|(ours, theirs)| theirs.iter().filter(|id| ours.contains(id)).count()).sum()
}

/// How close the choices of one block came to a tie: the smallest gap between the last that was chosen and the first
/// that was not, over all choices. `scores: [32, experts]`, biased. Infinite if nothing was left out anywhere.
fn closest_margin(scores: &[f32], config: &ModelConfig) -> f32 {
    let experts = config.num_experts;
    let rows = || scores.chunks_exact(experts);
    match config.routing {
        Routing::Block { capacity } => {
            let peaks: Vec<f32> =
                (0..experts).map(|expert| rows().map(|row| row[expert]).fold(f32::NEG_INFINITY, f32::max)).collect();
            // At a tie anything from here on is allowed; the margin is then zero anyway.
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|&a, &b| peaks[b].total_cmp(&peaks[a]));
            let of_tokens = rows().map(|row| {
                let pool: Vec<f32> = order[..capacity].iter().map(|&expert| row[expert]).collect();
                gap_after(pool, config.num_experts_per_tok)
            });
            of_tokens.fold(gap_after(peaks.clone(), capacity), f32::min)
        }
        Routing::Groups { groups, kept } => {
            let of_tokens = rows().map(|row| {
                let strengths: Vec<f32> = row.chunks_exact(experts / groups).map(strength).collect();
                let mut order: Vec<usize> = (0..groups).collect();
                order.sort_by(|&a, &b| strengths[b].total_cmp(&strengths[a]));
                let members = |group: &usize| row.chunks_exact(experts / groups).nth(*group).unwrap_or_default();
                let open: Vec<f32> = order[..kept].iter().flat_map(members).copied().collect();
                gap_after(strengths, kept).min(gap_after(open, config.num_experts_per_tok))
            });
            of_tokens.fold(f32::INFINITY, f32::min)
        }
    }
}

/// Sum of the two largest scores of a group.
fn strength(group: &[f32]) -> f32 {
    let mut sorted = group.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    sorted.iter().take(2).sum()
}

/// The gap between the `count` largest values and the rest; infinite if there is no rest.
fn gap_after(mut values: Vec<f32>, count: usize) -> f32 {
    values.sort_by(|a, b| b.total_cmp(a));
    match values.get(count) {
        Some(next) => values[count - 1] - next,
        None => f32::INFINITY,
    }
}

/// Positions whose largest logit is at the same token.
fn same_best(ours: &Trace, theirs: &Trace) -> usize {
    let (Some(ours), Some(theirs)) = (ours.rows(0, None, Point::Logits), theirs.rows(0, None, Point::Logits)) else {
        return 0;
    };
    let best = |row: &[f32]| {
        let larger = |best: usize, index: usize| if row[index] > row[best] { index } else { best };
        (0..row.len()).fold(0, larger)
    };
    let rows = ours.values.chunks_exact(ours.width).zip(theirs.values.chunks_exact(theirs.width));
    rows.filter(|(ours, theirs)| best(ours) == best(theirs)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_relative_and_see_infinities() {
        let difference = Difference::between(&[3.0, 4.0], &[3.0, 5.0]);
        assert_eq!(difference.max_abs, 1.0);
        assert!((difference.relative_rms - (1.0f64 / 34.0).sqrt()).abs() < 1e-12);
        assert_eq!(Difference::between(&[f32::NAN, 1.0], &[1.0, 1.0]).finite_mismatches, 1);
        assert_eq!(Difference::between(&[f32::NAN], &[f32::INFINITY]).finite_mismatches, 0);
        assert_eq!(Difference::between(&[0.0], &[0.0]), Difference { cosine: 1.0, ..Difference::default() });
    }

    #[test]
    fn margins_are_the_gap_to_what_was_left_out() {
        assert_eq!(gap_after(vec![1.0, 5.0, 2.0], 1), 3.0);
        assert_eq!(gap_after(vec![1.0, 5.0, 2.0], 3), f32::INFINITY);
        assert_eq!(strength(&[1.0, 3.0, 2.0]), 5.0);
    }
}
