//! The one inner loop: products of rows of `x` with a strip of f32 weights.
//!
//! A product is sixteen partial sums, each over every sixteenth column, added up by [`Lanes::sum`]. What it comes to
//! depends on its two rows only, never on the tile it is computed in. Both sides lie in memory as the loop reads them:
//! one run, from a cache line's border on. Rows of a matrix are a power of two apart, which would put all of them into
//! the same few places of the nearest cache.

use rayon::prelude::*;

use super::Isa;
use super::isa::Kernel;
use super::lanes::{LANES, Lanes, Tile};
use crate::codec::STRIP;

/// Rows of `x` that lie side by side.
pub(super) const GROUP: usize = STRIP;
/// Steps that are taken together for a few groups: their part of the weights stays in the nearest cache meanwhile.
const PANEL: usize = 32;
/// Groups that share a panel. Their sums are on the stack.
const TOGETHER: usize = 4;

/// Sixteen columns of each of eight rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Step(pub(super) [[f32; LANES]; STRIP]);

impl Step {
    pub(super) const ZERO: Self = Self([[0.0; LANES]; STRIP]);
}

/// Rows of `x`: `[groups of eight][steps]`, zero beyond the last column, anything beyond the last row.
#[derive(Default)]
pub(super) struct Packed {
    steps: Vec<Step>,
    rows: usize,
    /// Steps of a row.
    width: usize,
}

impl Packed {
    /// Takes all rows of `x: [_, cols]`, in the memory of those it held. Parallel over groups.
    pub(super) fn set_all(&mut self, isa: Isa, x: &[f32], cols: usize) {
        (self.rows, self.width) = (x.len() / cols, cols.div_ceil(LANES));
        self.steps.resize(self.rows.div_ceil(GROUP) * self.width, Step::ZERO);
        self.steps
            .par_chunks_exact_mut(self.width)
            .zip(x.par_chunks(GROUP * cols))
            .for_each(|(group, x)| isa.run(PackGroup { group, rows: x.chunks_exact(cols) }));
    }

    /// Takes `rows` of `cols` columns each, in the memory of those it held.
    #[inline(always)]
    pub(super) fn set<'a, L: Lanes>(
        &mut self,
        lanes: L,
        mut rows: impl ExactSizeIterator<Item = &'a [f32]>,
        cols: usize,
    ) {
        (self.rows, self.width) = (rows.len(), cols.div_ceil(LANES));
        self.steps.resize(self.rows.div_ceil(GROUP) * self.width, Step::ZERO);
        for group in self.steps.chunks_exact_mut(self.width) {
            PackGroup { group, rows: rows.by_ref().take(GROUP) }.run(lanes);
        }
    }

    pub(super) fn view(&self) -> PackedView<'_> {
        PackedView { steps: &self.steps, rows: self.rows, width: self.width }
    }
}

/// A borrowed [`Packed`].
#[derive(Clone, Copy)]
pub(super) struct PackedView<'a> {
    steps: &'a [Step],
    rows: usize,
    width: usize,
}

impl<'a> PackedView<'a> {
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Up to `count` groups of eight rows from group `first` on.
    pub(super) fn part(&self, first: usize, count: usize) -> Self {
        let rows = (count * GROUP).min(self.rows - first * GROUP);
        let steps = &self.steps[first * self.width..][..rows.div_ceil(GROUP) * self.width];
        Self { steps, rows, width: self.width }
    }

    /// Each eight rows, as weights may be given to [`products`].
    pub(super) fn groups(&self) -> impl Iterator<Item = &'a [Step]> + use<'a> {
        self.steps.chunks_exact(self.width)
    }
}

/// Writes up to eight rows into a group.
struct PackGroup<'a, R> {
    group: &'a mut [Step],
    rows: R,
}

impl<'a, R: Iterator<Item = &'a [f32]>> Kernel for PackGroup<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        for (place, row) in self.rows.enumerate() {
            for (values, step) in row.chunks(LANES).zip(&mut *self.group) {
                lanes.store(lanes.load_part(values), &mut step.0[place]);
            }
        }
    }
}

/// The partial sums of a group of rows with a strip of weights.
type Sums<L> = [[<L as Lanes>::Vector; STRIP]; GROUP];

/// `out[r][at + n] = sum over k of x[r, k] * weights[n, k]`; `out: [rows of x]`. Of rows that the strip does not have,
/// `weights` and `out` hold anything.
#[inline(always)]
pub(super) fn products<L: Lanes, const WIDTH: usize>(
    lanes: L,
    out: &mut [[f32; WIDTH]],
    at: usize,
    x: PackedView<'_>,
    weights: &[Step],
) {
    assert!(out.len() == x.rows && weights.len() == x.width);
    for (out, groups) in out.chunks_mut(TOGETHER * GROUP).zip(x.steps.chunks(TOGETHER * x.width)) {
        let mut sums: [Sums<L>; TOGETHER] = [[[lanes.splat(0.0); STRIP]; GROUP]; TOGETHER];
        for first in (0..x.width).step_by(PANEL) {
            let panel = first..x.width.min(first + PANEL);
            for (index, group) in groups.chunks_exact(x.width).enumerate() {
                let rows = GROUP.min(out.len() - index * GROUP);
                add_panel(lanes, &mut sums[index], rows, &group[panel.clone()], &weights[panel.clone()]);
            }
        }
        for (out, sums) in out.chunks_mut(GROUP).zip(&sums) {
            for (out, sums) in out.iter_mut().zip(sums) {
                out[at..at + STRIP].copy_from_slice(&lanes.sum_each(*sums));
            }
        }
    }
}

/// Adds the products of the first `rows` rows of `x`, in tiles that fit the registers.
#[inline(always)]
fn add_panel<L: Lanes>(lanes: L, sums: &mut Sums<L>, rows: usize, x: &[Step], weights: &[Step]) {
    let mut row = 0;
    while row + 4 <= rows {
        match L::TILE {
            Tile::Wide => {
                lanes.add_products::<4, 4>(sums, (x, row), (weights, 0));
                lanes.add_products::<4, 4>(sums, (x, row), (weights, 4));
            }
            Tile::Narrow => {
                lanes.add_products::<4, 3>(sums, (x, row), (weights, 0));
                lanes.add_products::<4, 3>(sums, (x, row), (weights, 3));
                lanes.add_products::<4, 2>(sums, (x, row), (weights, 6));
            }
        }
        row += 4;
    }
    if row + 2 <= rows {
        lanes.add_products::<2, 4>(sums, (x, row), (weights, 0));
        lanes.add_products::<2, 4>(sums, (x, row), (weights, 4));
        row += 2;
    }
    if row < rows {
        lanes.add_products::<1, 8>(sums, (x, row), (weights, 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Strip<'a> {
        x: &'a [f32],
        w: &'a [f32],
        cols: usize,
    }

    impl Kernel for Strip<'_> {
        type Output = Vec<[f32; STRIP]>;

        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) -> Self::Output {
            let (mut x, mut weights) = (Packed::default(), Packed::default());
            x.set(lanes, self.x.chunks_exact(self.cols), self.cols);
            weights.set(lanes, self.w.chunks_exact(self.cols), self.cols);
            let mut out = vec![[f32::NAN; STRIP]; x.rows];
            products(lanes, &mut out, 0, x.view(), &weights.steps);
            out
        }
    }

    /// A row's products are the same bits whatever rows are beside it.
    #[test]
    fn rows_do_not_see_each_other() {
        let values = minnow_common::random::Symmetric::new("products", 1);
        for cols in [1, 16, 40, 512, 1000, 2048] {
            let x: Vec<f32> = (0..45 * cols).map(|index| values.at(index as u64)).collect();
            let w: Vec<f32> = (0..STRIP * cols).map(|index| values.at(1 << 20 | index as u64)).collect();
            for isa in Isa::present() {
                let together = isa.run(Strip { x: &x, w: &w, cols });
                for first in [0, 3, 37] {
                    for count in 1..=8 {
                        let x = &x[first * cols..][..count * cols];
                        let found = isa.run(Strip { x, w: &w, cols });
                        assert_eq!(found, together[first..first + count], "{isa}: {count} rows of {cols} from {first}");
                    }
                }
                let expected: f64 = x[..cols].iter().zip(&w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                assert!((f64::from(together[0][0]) - expected).abs() < 1e-4, "{isa}: {} {expected}", together[0][0]);
            }
        }
    }

    /// What was packed before leaves no trace.
    #[test]
    fn memory_is_used_again() {
        struct Twice;
        impl Kernel for Twice {
            type Output = [[f32; STRIP]; 1];

            #[inline(always)]
            fn run<L: Lanes>(self, lanes: L) -> Self::Output {
                let mut packed = Packed::default();
                let row = |value| [value; 40];
                packed.set(lanes, [row(f32::NAN).as_slice(); 9].into_iter(), 40);
                packed.set(lanes, [&row(2.0)[..35]; 8].into_iter(), 35);
                let mut out = [[0.0; STRIP]];
                products(lanes, &mut out, 0, PackedView { rows: 1, ..packed.view() }, &packed.steps);
                out
            }
        }
        for isa in Isa::present() {
            assert_eq!(isa.run(Twice), [[140.0; STRIP]], "{isa}");
        }
    }
}
