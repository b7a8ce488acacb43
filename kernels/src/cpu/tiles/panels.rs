//! Rows of `x`, rounded and arranged for products.

use rayon::prelude::*;

use super::avx512::Avx512Bf16;
use super::reuse::Lines;
use super::{Avx512Bw, CODE_STEP, EDGE, Line, Order, STEP};
use crate::cpu::kept::with_kept;

/// Rounded rows, each as lines in some order.
pub(super) struct Narrowed {
    /// `[rows][steps]`
    lines: Lines,
    steps: usize,
    /// Of rows that were quantized to eight bits, `[rows][groups]`; else empty.
    scales: Vec<f32>,
}

impl Narrowed {
    /// Rounds `x: [rows, width]`.
    pub(super) fn new(vectors: Avx512Bf16, x: &[f32], width: usize, order: Order) -> Self {
        let steps = width.div_ceil(STEP);
        let mut lines = Lines::new(x.len() / width * steps);
        let rows = lines.par_chunks_mut(steps).zip(x.par_chunks_exact(width)).with_min_len(ROWS_A_TASK);
        rows.for_each(|(lines, row)| vectors.narrow(row, order, lines));
        Self { lines, steps, scales: Vec::new() }
    }

    /// Quantizes `x: [rows, width]` to eight bits, in whole groups.
    pub(super) fn quantized(wide: Avx512Bw, x: &[f32], width: usize, order: Order) -> Self {
        let (steps, groups, columns) = (width / CODE_STEP, width / Order::SPAN, order.columns());
        let mut lines = Lines::new(x.len() / width * steps);
        let mut scales = vec![0.0; x.len() / width * groups];
        let rows = lines.par_chunks_mut(steps).zip(scales.par_chunks_mut(groups)).zip(x.par_chunks_exact(width));
        rows.with_min_len(ROWS_A_TASK).for_each(|((lines, scales), row)| wide.quantize(row, &columns, lines, scales));
        Self { lines, steps, scales }
    }

    /// Scales of some rows, at most sixteen, as a panel has them: `[groups][16 rows]`. Nothing unless quantized.
    pub(super) fn scales_of<'s>(&'s self, rows: &'s [u32]) -> impl Iterator<Item = [f32; EDGE]> + 's {
        let groups = self.scales.len() / self.rows();
        (0..groups).map(move |group| {
            let mut scales = [0.0; EDGE];
            for (scale, &row) in scales.iter_mut().zip(rows) {
                *scale = self.scales[row as usize * groups + group];
            }
            scales
        })
    }

    pub(super) fn is_quantized(&self) -> bool {
        !self.scales.is_empty()
    }

    pub(super) fn row(&self, row: usize) -> &[Line] {
        &self.lines[row * self.steps..][..self.steps]
    }

    pub(super) fn rows(&self) -> usize {
        self.lines.len() / self.steps
    }

    pub(super) fn steps(&self) -> usize {
        self.steps
    }
}

/// Rows that are rounded by one task at least: below that, starting it costs more.
const ROWS_A_TASK: usize = 16;

/// Rows in panels of sixteen: `[panels][steps][16 pairs]`, see [`Avx512Bw::pack`]; the last may not be full.
pub(super) struct Panels {
    lines: Lines,
    steps: usize,
    rows: usize,
}

impl Panels {
    /// All rows of `x: [rows, width]`, rounded, in order. Sixteen at a time, so that they are read once.
    pub(super) fn of(vectors: Avx512Bf16, x: &[f32], width: usize, order: Order) -> Self {
        let (rows, steps) = (x.len() / width, width.div_ceil(STEP));
        let mut lines = Lines::new(PanelsView::lines_of(rows, steps));
        lines.par_chunks_mut(steps * EDGE).zip(x.par_chunks(EDGE * width)).for_each(|(panel, x)| {
            with_kept!(Vec<Line>, |narrow: &mut Vec<Line>| {
                narrow.resize(EDGE * steps, Line::ZERO);
                let rows = x.chunks_exact(width).zip(narrow.chunks_exact_mut(steps));
                let rows: Vec<&[Line]> = rows
                    .map(|(row, lines)| {
                        vectors.narrow(row, order, lines);
                        &*lines
                    })
                    .collect();
                vectors.pack(panel, &rows);
            });
        });
        Self { lines, steps, rows }
    }

    pub(super) fn view(&self) -> PanelsView<'_> {
        PanelsView { lines: &self.lines, steps: self.steps, rows: self.rows, scales: &[] }
    }
}

/// [`Panels`] that lie anywhere.
#[derive(Clone, Copy)]
pub(super) struct PanelsView<'a> {
    /// `[panels][steps][16 pairs]`
    pub(super) lines: &'a [Line],
    pub(super) steps: usize,
    /// At least one.
    pub(super) rows: usize,
    /// `[panels][groups][16 rows]` where `x` was quantized to eight bits; else empty.
    pub(super) scales: &'a [[f32; EDGE]],
}

impl<'a> PanelsView<'a> {
    /// Lines of as many rows.
    pub(super) fn lines_of(rows: usize, steps: usize) -> usize {
        rows.div_ceil(EDGE) * steps * EDGE
    }

    pub(super) fn count(&self) -> usize {
        self.rows.div_ceil(EDGE)
    }

    /// Some steps of a panel.
    pub(super) fn steps_of(&self, panel: usize, first: usize, count: usize) -> &'a [Line] {
        &self.lines[(panel * self.steps + first) * EDGE..][..count * EDGE]
    }

    /// Rows in a panel.
    pub(super) fn rows_of(&self, panel: usize) -> usize {
        EDGE.min(self.rows - panel * EDGE)
    }

    /// Panels `first..first + count`, or fewer at the end, as panels of their own.
    pub(super) fn part(&self, first: usize, count: usize) -> Self {
        let rows = (count * EDGE).min(self.rows - first * EDGE);
        let lines = &self.lines[first * self.steps * EDGE..][..Self::lines_of(rows, self.steps)];
        let groups = self.scales.len() / self.count();
        let scales = &self.scales[first * groups..][..rows.div_ceil(EDGE) * groups];
        Self { lines, steps: self.steps, rows, scales }
    }

    /// Scales of a group of columns in a panel, of rows that were quantized.
    pub(super) fn scales_of(&self, panel: usize, group: usize) -> &'a [f32; EDGE] {
        &self.scales[panel * (self.scales.len() / self.count()) + group]
    }
}
