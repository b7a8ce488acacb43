//! Products of a block of features with panels: how each stored form becomes lines, and what is multiplied when.

use minnow_common::Encoding;

use super::avx512::Avx512Bf16;
use super::panels::PanelsView;
use super::{BLOCK_FEATURES, Dots, EDGE, Engine, Job, Line, Order, Plan, STEP, Tile, Weights};
use crate::codec::STRIP;
use crate::cpu::Isa;
use crate::cpu::decode::decode;
use crate::matrix::WeightMatrix;

/// Steps of a group of codes.
const GROUP_STEPS: usize = Order::SPAN / STEP;
/// Steps of weights in place that are multiplied before the next are asked for: as many as keep a block's part of all
/// its rows within half of a nearest cache.
const PLACE_STEPS: usize = 8;

/// Memory of a thread, used again and again.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) lines: Vec<Line>,
    tiles: Vec<Tile>,
    pub(super) dots: Vec<Dots>,
    decoded: Vec<f32>,
}

/// Feature tiles of the block of `w` that starts at feature `first`.
pub(super) fn tiles_of(w: &WeightMatrix<'_>, first: usize) -> usize {
    BLOCK_FEATURES.min(w.rows() - first).div_ceil(EDGE)
}

/// `sums = products of features first.. of w with x`; `sums: [x's panels][tiles_of(w, first)]`. Features that the
/// matrix does not have come out as zero, rows that a panel does not have as anything.
pub(super) fn products<E: Engine>(
    engine: E,
    session: &E::Session,
    sums: &mut [Tile],
    w: &WeightMatrix<'_>,
    first: usize,
    x: PanelsView<'_>,
    scratch: &mut Scratch,
) {
    let features = BLOCK_FEATURES.min(w.rows() - first);
    let tiles = features.div_ceil(EDGE);
    assert!(sums.len() == x.count() * tiles && x.steps == w.cols().div_ceil(STEP));
    let block = Block { w, first, features, tiles, x };
    match Plan::of(w) {
        Plan::Groups(_) => block.groups::<E>(engine.vectors(), session, sums, scratch),
        Plan::Bf16 if E::READS_ROWS && x.count() <= 2 && features == tiles * EDGE && w.cols().is_multiple_of(STEP) => {
            block.in_place::<E>(engine.vectors(), session, sums);
        }
        plan => {
            block.lines(engine.vectors(), plan, scratch);
            block.multiply::<E>(session, sums, &Weights::Lines(&scratch.lines), 0, x.steps, true);
            if w.encoding() == Encoding::Nvfp4 {
                sums.iter_mut().flat_map(|tile| tile.0.as_flattened_mut()).for_each(|sum| *sum *= w.global_scale());
            }
        }
    }
}

/// Some features of a matrix, and what they are multiplied with.
struct Block<'a> {
    w: &'a WeightMatrix<'a>,
    first: usize,
    features: usize,
    tiles: usize,
    x: PanelsView<'a>,
}

impl Block<'_> {
    /// Adds products over some steps to `sums`, two panels at a time.
    fn multiply<E: Engine>(
        &self,
        session: &E::Session,
        sums: &mut [Tile],
        weights: &Weights<'_>,
        first_step: usize,
        steps: usize,
        is_fresh: bool,
    ) {
        for (pair, sums) in sums.chunks_mut(2 * self.tiles).enumerate() {
            let panel = |index| self.x.steps_of(2 * pair + index, first_step, steps);
            let rows = self.x.rows_of(2 * pair);
            let job = Job { tiles: self.tiles, steps, rows, is_fresh };
            if sums.len() > self.tiles {
                E::product(session, sums, weights, &[panel(0), panel(1)], job);
            } else {
                E::product(session, sums, weights, &[panel(0)], job);
            }
        }
    }

    /// Codes in groups: each group's sum is scaled and added.
    fn groups<E: Engine>(&self, vectors: Avx512Bf16, session: &E::Session, sums: &mut [Tile], scratch: &mut Scratch) {
        let (w, step_lines) = (self.w, self.tiles * EDGE);
        let groups = w.cols() / Order::SPAN;
        scratch.lines.resize(GROUP_STEPS * step_lines, Line::ZERO);
        if !self.features.is_multiple_of(EDGE) {
            // An odd number of strips leaves half a tile: those lines stay zero.
            scratch.lines.fill(Line::ZERO);
        }
        scratch.tiles.resize(2 * self.tiles, Tile::ZERO);
        sums.fill(Tile::ZERO);
        let stored = StoredGroups::of(w, self.first, self.features);
        for group in 0..groups {
            for strip in 0..stored.strips {
                let codes_of_group = stored.codes(strip, group);
                if group + 1 < groups {
                    vectors.prefetch(stored.codes(strip, group + 1));
                }
                let out = &mut scratch.lines[strip * STRIP..];
                if let Ok(nibbles) = codes_of_group.try_into() {
                    vectors.nibbles(nibbles, out, step_lines);
                } else {
                    let bytes = codes_of_group.try_into().expect("codes have four bits or eight");
                    vectors.bytes(bytes, out, step_lines);
                }
            }
            for (pair, sums) in sums.chunks_mut(2 * self.tiles).enumerate() {
                let panel = |index| self.x.steps_of(2 * pair + index, group * GROUP_STEPS, GROUP_STEPS);
                let rows = self.x.rows_of(2 * pair);
                let job = Job { tiles: self.tiles, steps: GROUP_STEPS, rows, is_fresh: true };
                let c = &mut scratch.tiles[..sums.len()];
                let lines = Weights::Lines(&scratch.lines);
                if sums.len() > self.tiles {
                    E::product(session, c, &lines, &[panel(0), panel(1)], job);
                } else {
                    E::product(session, c, &lines, &[panel(0)], job);
                }
                for (index, (sum, c)) in sums.iter_mut().zip(c).enumerate() {
                    let strip = 2 * (index % self.tiles);
                    vectors.add_scaled(sum, c, [stored.scales(strip, group), stored.scales(strip + 1, group)]);
                }
            }
        }
    }

    /// BF16 from where it is stored.
    fn in_place<E: Engine>(&self, vectors: Avx512Bf16, session: &E::Session, sums: &mut [Tile]) {
        let row_bytes = 2 * self.w.cols();
        let rows = |first: usize| &self.w.data()[first * row_bytes..];
        let line_bytes = size_of::<Line>();
        for first_step in (0..self.x.steps).step_by(PLACE_STEPS) {
            let steps = PLACE_STEPS.min(self.x.steps - first_step);
            // What comes next: further columns of these rows, or the first ones of the rows of the next block.
            let next_step = first_step + steps;
            let (next_rows, next_byte) = if next_step < self.x.steps {
                (self.first, next_step * line_bytes)
            } else {
                (self.first + self.features, 0)
            };
            for row in next_rows..self.w.rows().min(next_rows + self.features) {
                let columns = &self.w.data()[row * row_bytes..][next_byte..row_bytes];
                vectors.prefetch(&columns[..columns.len().min(PLACE_STEPS * line_bytes)]);
            }
            let bytes = &rows(self.first)[first_step * line_bytes..];
            self.multiply::<E>(session, sums, &Weights::Rows { bytes, row_bytes }, first_step, steps, first_step == 0);
        }
    }

    /// Everything as lines `[steps][tiles][16 features]`, in ascending order, zero where the matrix ends.
    fn lines(&self, vectors: Avx512Bf16, plan: Plan, scratch: &mut Scratch) {
        let (w, cols, steps) = (self.w, self.w.cols(), self.x.steps);
        let Scratch { lines, decoded, .. } = scratch;
        lines.resize(steps * self.tiles * EDGE, Line::ZERO);
        if !self.features.is_multiple_of(EDGE) || !cols.is_multiple_of(STEP) {
            lines.fill(Line::ZERO);
        }
        let step_lines = self.tiles * EDGE;
        if plan == Plan::Bf16 {
            for feature in 0..self.features {
                let row = &w.data()[(self.first + feature) * 2 * cols..][..2 * cols];
                let (whole, rest) = row.as_chunks::<{ 2 * STEP }>();
                for (step, bytes) in whole.iter().enumerate() {
                    copy_bf16(bytes, &mut lines[step * step_lines + feature]);
                }
                if !rest.is_empty() {
                    copy_bf16(rest, &mut lines[whole.len() * step_lines + feature]);
                }
            }
            return;
        }
        let plain = w.without_global_scale();
        decoded.resize(STRIP * cols, 0.0);
        let mut row_lines = vec![Line::ZERO; steps];
        for first in (0..self.features).step_by(STRIP) {
            let decoded = &mut decoded[..STRIP.min(self.features - first) * cols];
            decode(Isa::Avx512, &plain, self.first + first, decoded);
            for (feature, row) in (first..).zip(decoded.chunks_exact(cols)) {
                vectors.narrow(row, Order::Ascending, &mut row_lines);
                for (step, line) in row_lines.iter().enumerate() {
                    lines[step * step_lines + feature] = *line;
                }
            }
        }
    }
}

/// Where codes and scales of groups of [`Order::SPAN`] lie, of some features.
pub(super) struct StoredGroups<'a> {
    w: &'a WeightMatrix<'a>,
    first_strip: usize,
    pub(super) strips: usize,
    groups: usize,
}

impl<'a> StoredGroups<'a> {
    pub(super) fn of(w: &'a WeightMatrix<'a>, first: usize, features: usize) -> Self {
        Self { w, first_strip: first / STRIP, strips: features / STRIP, groups: w.cols() / Order::SPAN }
    }

    pub(super) fn codes(&self, strip: usize, group: usize) -> &'a [u8] {
        let group_bytes = self.w.data().len() / (self.w.rows() / STRIP) / self.groups;
        &self.w.data()[((self.first_strip + strip) * self.groups + group) * group_bytes..][..group_bytes]
    }

    /// FP16; zero beyond the last strip.
    pub(super) fn scales(&self, strip: usize, group: usize) -> &'a [u8; 2 * STRIP] {
        if strip >= self.strips {
            return &[0; 2 * STRIP];
        }
        &self.w.scales().as_chunks().0[(self.first_strip + strip) * self.groups + group]
    }
}

/// Little-endian BF16 to the start of a line.
fn copy_bf16(bytes: &[u8], line: &mut Line) {
    for (out, bytes) in line.0.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *out = u16::from_le_bytes(*bytes);
    }
}
