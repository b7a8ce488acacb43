//! Products of a block of features with panels: how each stored form becomes lines, and what is multiplied when.

use std::ops::Range;

use minnow_common::Encoding;

use super::avx512::Avx512Bf16;
use super::panels::PanelsView;
use super::{
    Avx512Bw, BLOCK_FEATURES, Dots, EDGE, Engine, FEW_TILES, Job, Line, LinePlace, Order, Plan, STEP, Tile, Weights,
};
use crate::codec::STRIP;
use crate::cpu::Isa;
use crate::cpu::decode::decode;
use crate::matrix::WeightMatrix;

/// Steps of a group of codes.
const GROUP_STEPS: usize = Order::SPAN / STEP;
/// Panels up to which BF16 is read where it is stored: as many as an engine takes at once, so that each line is read once. For
/// more it becomes lines first, for loads from rows a power of two apart cost more.
pub(super) const PANELS_IN_PLACE: usize = 2;

/// Memory of a thread, used again and again.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) lines: Vec<Line>,
    tiles: Vec<Tile>,
    pub(super) dots: Vec<Dots>,
    decoded: Vec<f32>,
}

/// Some features of a matrix, multiplied together.
#[derive(Clone, Copy)]
pub(super) struct Features<'a> {
    pub(super) w: &'a WeightMatrix<'a>,
    pub(super) first: usize,
    pub(super) count: usize,
    /// As they are stored, what is multiplied next, to be asked for meanwhile: anything.
    next: &'a [u8],
}

impl<'a> Features<'a> {
    /// How many are multiplied together, a divisor of [`BLOCK_FEATURES`]. Few where they are decoded group by group, or read in
    /// place: rows of codes, and of BF16, lie a power of two apart, so more of them would push each other, and the lines that
    /// they become, out of the same sets of the nearest cache.
    pub(super) fn together(w: &WeightMatrix<'_>) -> usize {
        match Plan::of(w) {
            Plan::Bf16 | Plan::Groups(_) => FEW_TILES * EDGE,
            Plan::Decoded => BLOCK_FEATURES,
        }
    }

    /// As many from `first` on, or what is left.
    pub(super) fn of(w: &'a WeightMatrix<'a>, first: usize) -> Self {
        Self::up_to(w, first, Self::together(w))
    }

    /// `count` from `first` on, or what is left.
    pub(super) fn up_to(w: &'a WeightMatrix<'a>, first: usize, count: usize) -> Self {
        Self { w, first, count: count.min(w.rows() - first), next: &[] }
    }

    /// The same, before others.
    pub(super) fn before(self, next: Option<Self>) -> Self {
        Self { next: next.map_or(&[], |next| next.bytes()), ..self }
    }

    /// As many of the same matrix, those that follow.
    pub(super) fn following(self) -> Option<Self> {
        let first = self.first + self.count;
        (first < self.w.rows()).then(|| Self::up_to(self.w, first, self.count))
    }

    /// As they are stored. (Rows, and strips of rows, follow each other in every encoding.)
    fn bytes(&self) -> &'a [u8] {
        let row_bytes = self.w.data().len() / self.w.rows();
        &self.w.data()[self.first * row_bytes..][..self.count * row_bytes]
    }

    pub(super) fn tiles(&self) -> usize {
        self.count.div_ceil(EDGE)
    }
}

/// `sums = products of some features with x`; `sums: [x's panels][tiles]`. Features that the matrix does not have come out as
/// zero, rows that a panel does not have as anything.
pub(super) fn products<E: Engine>(
    engine: E,
    session: &E::Session,
    sums: &mut [Tile],
    features: Features<'_>,
    x: PanelsView<'_>,
    scratch: &mut Scratch,
) {
    assert_eq!(sums.len(), x.count() * features.tiles());
    let block = Block::new(features, x);
    match Plan::of(features.w) {
        Plan::Groups(_) => block.groups::<E>(engine.vectors(), session, sums, scratch),
        Plan::Bf16 if E::READS_ROWS && block.can_be_in_place() => block.in_place::<E>(engine.vectors(), session, sums),
        plan => {
            block.lines(engine.vectors(), plan, scratch);
            block.multiply_lines::<E>(session, sums, &scratch.lines);
        }
    }
}

/// [`products`] of at most `panels` panels at a time, a number that is even: `done` gets each part's sums and its first panel.
#[expect(clippy::too_many_arguments, reason = "those of `products`, and two")]
pub(super) fn products_in_parts<E: Engine>(
    engine: E,
    session: &E::Session,
    sums: &mut Vec<Tile>,
    features: Features<'_>,
    x: PanelsView<'_>,
    scratch: &mut Scratch,
    panels: usize,
    mut done: impl FnMut(usize, &[Tile]),
) {
    let plan = Plan::of(features.w);
    // Lines are the same for all parts.
    let has_lines = x.count() > panels && matches!(plan, Plan::Bf16 | Plan::Decoded);
    if has_lines {
        Block::new(features, x).lines(engine.vectors(), plan, scratch);
    }
    for first_panel in (0..x.count()).step_by(panels) {
        let part = x.part(first_panel, panels);
        sums.resize(part.count() * features.tiles(), Tile::ZERO);
        if has_lines {
            Block::new(features, part).multiply_lines::<E>(session, sums, &scratch.lines);
        } else {
            // What comes next is asked for once.
            let is_last = first_panel + panels >= x.count();
            let next = if is_last { features.next } else { &[] };
            products(engine, session, sums, Features { next, ..features }, part, scratch);
        }
        done(first_panel, sums);
    }
}

/// Some features, and what they are multiplied with.
struct Block<'a> {
    features: Features<'a>,
    tiles: usize,
    x: PanelsView<'a>,
}

impl<'a> Block<'a> {
    fn new(features: Features<'a>, x: PanelsView<'a>) -> Self {
        assert_eq!(x.steps, features.w.cols().div_ceil(STEP));
        Self { features, tiles: features.tiles(), x }
    }

    /// Whether BF16 can be read, and should be, where it is stored.
    fn can_be_in_place(&self) -> bool {
        let is_whole = self.features.count == self.tiles * EDGE && self.features.w.cols().is_multiple_of(STEP);
        is_whole && self.x.count() <= PANELS_IN_PLACE
    }

    /// `sums = products` with everything that [`Self::lines`] made.
    fn multiply_lines<E: Engine>(&self, session: &E::Session, sums: &mut [Tile], lines: &[Line]) {
        self.multiply::<E>(session, sums, &Weights::Lines(lines), |_| ());
        if self.features.w.encoding() == Encoding::Nvfp4 {
            let scale = self.features.w.global_scale();
            sums.iter_mut().flat_map(|tile| tile.0.as_flattened_mut()).for_each(|sum| *sum *= scale);
        }
    }

    /// `sums = products`, two panels at a time; `between` is called for the steps of each.
    fn multiply<E: Engine>(
        &self,
        session: &E::Session,
        sums: &mut [Tile],
        weights: &Weights<'_>,
        mut between: impl FnMut(usize),
    ) {
        for (pair, sums) in sums.chunks_mut(2 * self.tiles).enumerate() {
            self.multiply_pair::<E>(session, sums, weights, pair, 0..self.x.steps, &mut between);
        }
    }

    /// `sums = products` over some steps, with one pair of panels, or the last alone.
    fn multiply_pair<E: Engine>(
        &self,
        session: &E::Session,
        sums: &mut [Tile],
        weights: &Weights<'_>,
        pair: usize,
        steps: Range<usize>,
        between: impl FnMut(usize),
    ) {
        let panel = |index| self.x.steps_of(2 * pair + index, steps.start, steps.len());
        let job = Job { tiles: self.tiles, steps: steps.len(), rows: self.x.rows_of(2 * pair), is_fresh: true };
        if sums.len() > self.tiles {
            E::product(session, sums, weights, &[panel(0), panel(1)], job, between);
        } else {
            E::product(session, sums, weights, &[panel(0)], job, between);
        }
    }

    /// Codes in groups: each group's sum is scaled and added.
    fn groups<E: Engine>(&self, vectors: Avx512Bf16, session: &E::Session, sums: &mut [Tile], scratch: &mut Scratch) {
        let stored = StoredGroups::of(&self.features);
        let step_lines = self.tiles * EDGE;
        let Scratch { lines, tiles: of_group, .. } = scratch;
        of_group.resize(2 * self.tiles, Tile::ZERO);
        sums.fill(Tile::ZERO);
        let decode = |codes: &[u8], out: &mut [Line]| {
            if let Ok(nibbles) = codes.try_into() {
                vectors.nibbles(nibbles, out, step_lines);
            } else {
                let bytes = codes.try_into().expect("codes have four bits or eight");
                vectors.bytes(bytes, out, step_lines);
            }
        };
        stored.in_turn(*vectors, lines, GROUP_STEPS, step_lines, decode, |group, lines, decode_next| {
            let steps = group * GROUP_STEPS..(group + 1) * GROUP_STEPS;
            for (pair, sums) in sums.chunks_mut(2 * self.tiles).enumerate() {
                let c = &mut of_group[..sums.len()];
                self.multiply_pair::<E>(session, c, &Weights::Lines(lines), pair, steps.clone(), |step| {
                    if pair == 0 {
                        decode_next(step);
                    }
                });
                for (index, (sum, c)) in sums.iter_mut().zip(c).enumerate() {
                    let strip = 2 * (index % self.tiles);
                    vectors.add_scaled(sum, c, [stored.scales(strip, group), stored.scales(strip + 1, group)]);
                }
            }
        });
    }

    /// BF16 from where it is stored, while the next is asked for.
    fn in_place<E: Engine>(&self, vectors: Avx512Bf16, session: &E::Session, sums: &mut [Tile]) {
        const LINE_BYTES: usize = size_of::<Line>();
        let Features { w, next, .. } = self.features;
        let weights = Weights::Rows { bytes: self.features.bytes(), row_bytes: 2 * w.cols() };
        let lines_a_step = next.len().div_ceil(LINE_BYTES).div_ceil(self.x.steps).max(1);
        let mut next = next.chunks(lines_a_step * LINE_BYTES);
        self.multiply::<E>(session, sums, &weights, |_| vectors.prefetch(next.next().unwrap_or_default()));
    }

    /// Everything as lines, in ascending order, zero where the matrix ends.
    fn lines(&self, vectors: Avx512Bf16, plan: Plan, scratch: &mut Scratch) {
        let Features { w, first, count, .. } = self.features;
        let (cols, steps) = (w.cols(), self.x.steps);
        let Scratch { lines, decoded, .. } = scratch;
        lines.resize(steps * self.tiles * EDGE, Line::ZERO);
        if !count.is_multiple_of(EDGE) || !cols.is_multiple_of(STEP) {
            lines.fill(Line::ZERO);
        }
        if plan == Plan::Bf16 {
            // A tile after the other, and in it step by step, so that what is written lies together.
            let whole = cols / STEP;
            for (tile, rows) in self.features.bytes().chunks(EDGE * 2 * cols).enumerate() {
                let place = LinePlace::of(tile, self.tiles, steps);
                vectors.copy_rows(rows, 2 * cols, whole, &mut lines[place.first..], place.step_lines);
                if !cols.is_multiple_of(STEP) {
                    for (row, line) in rows.chunks_exact(2 * cols).zip(&mut lines[place.of_step(whole)..]) {
                        copy_bf16(&row[whole * 2 * STEP..], line);
                    }
                }
            }
            return;
        }
        let plain = w.without_global_scale();
        decoded.resize(STRIP * cols, 0.0);
        let mut row_lines = vec![Line::ZERO; steps];
        for strip in (0..count).step_by(STRIP) {
            let decoded = &mut decoded[..STRIP.min(count - strip) * cols];
            decode(Isa::Avx512, &plain, first + strip, decoded);
            let place = LinePlace::of(strip / EDGE, self.tiles, steps);
            for (feature, row) in (strip % EDGE..).zip(decoded.chunks_exact(cols)) {
                vectors.narrow(row, Order::Ascending, &mut row_lines);
                for (step, line) in row_lines.iter().enumerate() {
                    lines[place.of_step(step) + feature] = *line;
                }
            }
        }
    }
}

/// Where codes and scales of groups of [`Order::SPAN`] lie, of some features.
pub(super) struct StoredGroups<'a> {
    features: &'a Features<'a>,
    strips: usize,
    /// At least one.
    pub(super) groups: usize,
    /// Bytes of the codes of a group of a strip.
    group_bytes: usize,
}

impl<'a> StoredGroups<'a> {
    pub(super) fn of(features: &'a Features<'a>) -> Self {
        let groups = features.w.cols() / Order::SPAN;
        let group_bytes = features.w.data().len() / (features.w.rows() / STRIP) / groups;
        Self { features, strips: features.count / STRIP, groups, group_bytes }
    }

    /// Calls `work` for each group with its lines, `[steps][step_lines]`, in ascending order. `decode(codes, out)` puts a
    /// strip into them, from where `out` starts on; what is multiplied next is asked for meanwhile. The lines of the next
    /// group are another buffer, and `work` gets what decodes them: to be called once for each step, in any place of its
    /// own work, which the processor can then do at the same time.
    pub(super) fn in_turn(
        &self,
        wide: Avx512Bw,
        lines: &mut Vec<Line>,
        steps: usize,
        step_lines: usize,
        decode: impl Fn(&[u8], &mut [Line]),
        mut work: impl FnMut(usize, &[Line], &mut dyn FnMut(usize)),
    ) {
        lines.resize(2 * steps * step_lines, Line::ZERO);
        if !self.strips.is_multiple_of(2) {
            // An odd number of strips leaves half a tile: those lines stay zero.
            lines.fill(Line::ZERO);
        }
        let (mut this, mut next) = lines.split_at_mut(steps * step_lines);
        let decode = |strip: usize, group: usize, lines: &mut [Line]| {
            wide.prefetch(self.next_codes(strip, group));
            decode(self.codes(strip, group), &mut lines[strip * STRIP..]);
        };
        (0..self.strips).for_each(|strip| decode(strip, 0, this));
        for group in 0..self.groups {
            let mut decode_next = |step: usize| {
                if group + 1 < self.groups {
                    let strips = self.strips * step / steps..self.strips * (step + 1) / steps;
                    strips.for_each(|strip| decode(strip, group + 1, next));
                }
            };
            work(group, this, &mut decode_next);
            std::mem::swap(&mut this, &mut next);
        }
    }

    fn place(&self, strip: usize, group: usize) -> usize {
        (strip * self.groups + group) * self.group_bytes
    }

    fn codes(&self, strip: usize, group: usize) -> &'a [u8] {
        let strips = &self.features.w.data()[self.features.first / STRIP * self.groups * self.group_bytes..];
        &strips[self.place(strip, group)..][..self.group_bytes]
    }

    /// The same codes of what is multiplied next; fewer or none where that ends earlier.
    fn next_codes(&self, strip: usize, group: usize) -> &'a [u8] {
        let codes = self.features.next.get(self.place(strip, group)..).unwrap_or_default();
        &codes[..codes.len().min(self.group_bytes)]
    }

    /// FP16; zero beyond the last strip.
    pub(super) fn scales(&self, strip: usize, group: usize) -> &'a [u8; 2 * STRIP] {
        if strip >= self.strips {
            return &[0; 2 * STRIP];
        }
        &self.features.w.scales().as_chunks().0[(self.features.first / STRIP + strip) * self.groups + group]
    }
}

/// Little-endian BF16 to the start of a line.
fn copy_bf16(bytes: &[u8], line: &mut Line) {
    for (out, bytes) in line.0.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *out = u16::from_le_bytes(*bytes);
    }
}
