//! The experts' feed-forward: gathered once, gate, up and SiLU together, and a sum over experts in ascending order.

use std::ops::Range;

use rayon::prelude::*;

use super::codes::{self, CodeWork};
use super::panels::{Narrowed, PanelsView};
use super::product::{self, Features, Scratch};
use super::reuse::Lines;
use super::{
    Avx512Bw, BLOCK_FEATURES, CODE_STEP, CODE_STEPS, CodeEngine, EDGE, Engine, Line, Order, Plan, STEP, Tile, Work,
    on_code_engine, on_engine,
};
use crate::cpu::Isa;
use crate::cpu::columns::{ColumnBlock, column_blocks};
use crate::cpu::elementwise::SwigluInPlace;
use crate::cpu::experts::{Expert, Used};
use crate::cpu::kept::with_kept;

/// Rows that an expert takes at a time: they and what becomes of them stay in the second cache. Weights are decoded once
/// for as many.
const ROWS_TOGETHER: usize = 128;
/// Features of `down` that a task computes at most.
const DOWN_FEATURES: usize = 256;
/// Bytes of their sums, of all rows: they stay in the second cache.
const SUMS_BYTES: usize = 1 << 19;

/// `out[r] = sum of weight * feed_forward(x[r])` over all uses of all experts, in ascending order of `used`.
/// `x`, `out`: `[rows, hidden]`; `weights` by slot. All experts have the same shape and encodings.
pub(in crate::cpu) fn experts(isa: Isa, out: &mut [f32], x: &[f32], weights: &[f32], hidden: usize, used: &[Used<'_>]) {
    if !used.is_empty() {
        on_engine(isa, Experts { out, x, weights, hidden, used });
    }
}

/// [`experts`] with activations of eight bits.
pub(in crate::cpu) fn experts_int8(
    isa: Isa,
    out: &mut [f32],
    x: &[f32],
    weights: &[f32],
    hidden: usize,
    used: &[Used<'_>],
) {
    if !used.is_empty() {
        on_code_engine(isa, Experts { out, x, weights, hidden, used });
    }
}

struct Experts<'a> {
    out: &'a mut [f32],
    x: &'a [f32],
    weights: &'a [f32],
    hidden: usize,
    used: &'a [Used<'a>],
}

impl Work for Experts<'_> {
    type Output = ();

    fn run<E: Engine>(self, engine: E) {
        self.compute(Rounded(engine));
    }
}

impl CodeWork for Experts<'_> {
    type Output = ();

    fn run<E: CodeEngine>(self, engine: E) {
        self.compute(Quantized(engine));
    }
}

/// What becomes of activations where they meet weights.
trait Arithmetic: Copy + Send + Sync {
    /// Columns of a line.
    const STEP: usize;

    type Session;

    fn wide(self) -> Avx512Bw;

    fn begin(self) -> Self::Session;

    /// In which order columns lie in lines that meet such weights.
    fn order(plan: Plan) -> Order;

    /// Rows of `x: [rows, width]`, as they enter a projection.
    fn narrowed(self, x: &[f32], width: usize, order: Order) -> Narrowed;

    /// Products as they leave a projection; shapes as in [`product::products`].
    fn products(
        self,
        session: &Self::Session,
        sums: &mut [Tile],
        features: Features<'_>,
        x: PanelsView<'_>,
        scratch: &mut Scratch,
    );

    /// A panel of sixteen rows, as they enter a projection: `values: [columns][16 rows]`, whole steps. `scales`: `[groups]`
    /// where rows are quantized, else empty.
    fn pack(self, values: &[[f32; EDGE]], columns: &[u8; Order::SPAN], panel: &mut [Line], scales: &mut [[f32; EDGE]]);
}

/// Activations are rounded to BF16.
#[derive(Clone, Copy)]
struct Rounded<E>(E);

impl<E: Engine> Arithmetic for Rounded<E> {
    const STEP: usize = STEP;

    type Session = E::Session;

    fn wide(self) -> Avx512Bw {
        *self.0.vectors()
    }

    fn begin(self) -> E::Session {
        self.0.begin()
    }

    fn order(plan: Plan) -> Order {
        plan.order()
    }

    fn narrowed(self, x: &[f32], width: usize, order: Order) -> Narrowed {
        Narrowed::new(self.0.vectors(), x, width, order)
    }

    fn products(
        self,
        session: &E::Session,
        sums: &mut [Tile],
        features: Features<'_>,
        x: PanelsView<'_>,
        scratch: &mut Scratch,
    ) {
        product::products(self.0, session, sums, features, x, scratch);
    }

    fn pack(
        self,
        values: &[[f32; EDGE]],
        columns: &[u8; Order::SPAN],
        panel: &mut [Line],
        _scales: &mut [[f32; EDGE]],
    ) {
        let column = |place: usize| place / Order::SPAN * Order::SPAN + usize::from(columns[place % Order::SPAN]);
        for (pair, line) in panel.iter_mut().enumerate() {
            *line = self.0.vectors().pair(&values[column(2 * pair)], &values[column(2 * pair + 1)]);
        }
    }
}

/// Activations are quantized to eight bits in the groups of the weights, and what leaves a projection is rounded to BF16.
#[derive(Clone, Copy)]
struct Quantized<E>(E);

impl<E: CodeEngine> Arithmetic for Quantized<E> {
    const STEP: usize = CODE_STEP;

    type Session = E::Session;

    fn wide(self) -> Avx512Bw {
        self.0.wide()
    }

    fn begin(self) -> E::Session {
        self.0.begin_codes()
    }

    fn order(plan: Plan) -> Order {
        plan.code_order().expect("only codes in groups meet codes")
    }

    fn narrowed(self, x: &[f32], width: usize, order: Order) -> Narrowed {
        Narrowed::quantized(self.0.wide(), x, width, order)
    }

    fn products(
        self,
        session: &E::Session,
        sums: &mut [Tile],
        features: Features<'_>,
        x: PanelsView<'_>,
        scratch: &mut Scratch,
    ) {
        codes::products(self.0, session, sums, features, x, scratch);
    }

    fn pack(self, values: &[[f32; EDGE]], columns: &[u8; Order::SPAN], panel: &mut [Line], scales: &mut [[f32; EDGE]]) {
        let groups =
            values.as_chunks::<{ Order::SPAN }>().0.iter().zip(panel.as_chunks_mut::<{ CODE_STEPS * EDGE }>().0);
        for ((values, lines), scales) in groups.zip(scales) {
            *scales = self.0.wide().quantize_columns(values, columns, lines);
        }
    }
}

/// At most [`ROWS_TOGETHER`] rows of one expert.
struct Share<'a> {
    expert: &'a Expert<'a>,
    rows: &'a [u32],
    slots: &'a [u32],
    /// Activations between the projections, in panels for `down`.
    gated: &'a [Line],
    /// Their scales, if they are quantized.
    scales: &'a [[f32; EDGE]],
}

#[derive(Default)]
struct GateScratch {
    panels: Vec<Line>,
    gate: Vec<Tile>,
    up: Vec<Tile>,
    /// `[panels][inner, padded][16 rows]`
    gated: Vec<[f32; EDGE]>,
    scales: Vec<[f32; EDGE]>,
    products: Scratch,
}

#[derive(Default)]
struct DownScratch {
    sums: Vec<Tile>,
    /// `[rows][tiles]`
    by_row: Vec<[f32; EDGE]>,
    products: Scratch,
}

impl Experts<'_> {
    fn compute<A: Arithmetic>(self, arithmetic: A) {
        let Self { out, x, weights, hidden, used } = self;
        let Expert { gate, down, .. } = &used[0].expert;
        for Used { expert, .. } in used {
            let plans = [&expert.gate, &expert.up, &expert.down].map(Plan::of);
            assert_eq!(plans, [Plan::of(gate), Plan::of(gate), Plan::of(down)], "experts are stored alike");
        }
        let inner = gate.rows();
        let gated_steps = inner.div_ceil(A::STEP);
        let narrowed = arithmetic.narrowed(x, hidden, A::order(Plan::of(gate)));
        let gated_groups = if narrowed.is_quantized() { inner / Order::SPAN } else { 0 };
        let down_columns = A::order(Plan::of(down)).columns();

        let pieces: Vec<(&Expert<'_>, &[u32], &[u32])> = used
            .iter()
            .flat_map(|used| {
                let pieces = used.rows.chunks(ROWS_TOGETHER).zip(used.slots.chunks(ROWS_TOGETHER));
                pieces.map(|(rows, slots)| (&used.expert, rows, slots))
            })
            .collect();
        let lines = pieces.iter().map(|(_, rows, _)| PanelsView::lines_of(rows.len(), gated_steps)).sum();
        let mut gated = Lines::new(lines);
        let mut scales = vec![[0.0; EDGE]; lines / (gated_steps * EDGE) * gated_groups];
        let (mut rest, mut rest_of_scales) = (&mut gated[..], &mut scales[..]);
        let mut tasks = Vec::with_capacity(pieces.len());
        for &(expert, rows, _) in &pieces {
            let (of_piece, others) = rest.split_at_mut(PanelsView::lines_of(rows.len(), gated_steps));
            rest = others;
            let (scales, others) = rest_of_scales.split_at_mut(rows.len().div_ceil(EDGE) * gated_groups);
            rest_of_scales = others;
            tasks.push(GateTask { expert, rows, out: of_piece, scales });
        }
        tasks.into_par_iter().with_max_len(1).for_each(|task| {
            let session = arithmetic.begin();
            with_kept!(GateScratch, |scratch| task.run(arithmetic, &session, &narrowed, &down_columns, scratch));
        });

        let (mut rest, mut rest_of_scales) = (&gated[..], &scales[..]);
        let mut shares = Vec::with_capacity(pieces.len());
        for (expert, rows, slots) in pieces {
            let (of_piece, others) = rest.split_at(PanelsView::lines_of(rows.len(), gated_steps));
            rest = others;
            let (scales, others) = rest_of_scales.split_at(rows.len().div_ceil(EDGE) * gated_groups);
            rest_of_scales = others;
            shares.push(Share { expert, rows, slots, gated: of_piece, scales });
        }
        let count = features_a_task(hidden, out.len() / hidden);
        let blocks = column_blocks(out, hidden, count);
        blocks.into_par_iter().enumerate().for_each(|(block, columns)| {
            let session = arithmetic.begin();
            let features = block * count..hidden.min((block + 1) * count);
            let task = DownTask { out: columns, weights, shares: &shares, gated_steps, features };
            with_kept!(DownScratch, |scratch| task.run(arithmetic, &session, scratch));
        });
    }
}

/// Features of `down` that a task computes for so many rows. Each task reads what lies between the projections, of all
/// experts, so more are better, as long as their sums stay in the second cache and there is a task for each thread.
fn features_a_task(hidden: usize, rows: usize) -> usize {
    let fitting = (SUMS_BYTES / size_of::<f32>() / rows).min(hidden / rayon::current_num_threads());
    (fitting.min(DOWN_FEATURES) / BLOCK_FEATURES).max(1) * BLOCK_FEATURES
}

/// The second half of the work: some features of all rows of all experts.
struct DownTask<'a> {
    /// As many columns as there are features.
    out: ColumnBlock<'a>,
    /// By slot.
    weights: &'a [f32],
    shares: &'a [Share<'a>],
    gated_steps: usize,
    features: Range<usize>,
}

impl DownTask<'_> {
    fn run<A: Arithmetic>(self, arithmetic: A, session: &A::Session, scratch: &mut DownScratch) {
        let Self { mut out, weights, shares, gated_steps, features: of_task } = self;
        let DownScratch { sums, by_row, products: scratch } = scratch;
        let width = of_task.len();
        // Rows of `out` lie a power of two apart, in the same few sets of the caches; added up here, they do not.
        let row_tiles = width.div_ceil(EDGE);
        by_row.clear();
        by_row.resize(out.rows() * row_tiles, [0.0; EDGE]);
        for (index, share) in shares.iter().enumerate() {
            let rows = share.rows.len();
            let panels = PanelsView { lines: share.gated, steps: gated_steps, rows, scales: share.scales };
            let of_next = shares.get(index + 1).map(|share| Features::of(&share.expert.down, of_task.start));
            let mut features = Features::of(&share.expert.down, of_task.start);
            loop {
                let following = features.following().filter(|following| following.first < of_task.end);
                let tiles = features.tiles();
                sums.resize(panels.count() * tiles, Tile::ZERO);
                arithmetic.products(session, sums, features.before(following.or(of_next)), panels, scratch);
                for (index, tile) in sums.iter().enumerate() {
                    let (panel, column) = (index / tiles, (features.first - of_task.start) / EDGE + index % tiles);
                    let values = arithmetic.wide().transposed(tile);
                    for (row, values) in values.0.iter().enumerate().take(panels.rows_of(panel)) {
                        let place = panel * EDGE + row;
                        let sum = &mut by_row[share.rows[place] as usize * row_tiles + column];
                        arithmetic.wide().add_weighted(sum, weights[share.slots[place] as usize], values);
                    }
                }
                let Some(following) = following else { break };
                features = following;
            }
        }
        for (row, sums) in by_row.chunks_exact(row_tiles).enumerate() {
            out.row_mut(row).copy_from_slice(&sums.as_flattened()[..width]);
        }
    }
}

/// The first half of the work for some rows of an expert: `out = silu(gate(x)) * up(x)`, as panels in the order of columns
/// that `down` wants.
struct GateTask<'a> {
    expert: &'a Expert<'a>,
    rows: &'a [u32],
    out: &'a mut [Line],
    /// `[panels][groups]`, for activations of eight bits.
    scales: &'a mut [[f32; EDGE]],
}

impl GateTask<'_> {
    fn run<A: Arithmetic>(
        self,
        arithmetic: A,
        session: &A::Session,
        x: &Narrowed,
        down_columns: &[u8; Order::SPAN],
        scratch: &mut GateScratch,
    ) {
        let Self { expert, rows, out, scales: scales_out } = self;
        let GateScratch { panels, gate, up, gated, scales, products: of_products } = scratch;
        let steps = x.steps();
        panels.resize(PanelsView::lines_of(rows.len(), steps), Line::ZERO);
        scales.clear();
        for (panel, rows) in panels.chunks_exact_mut(steps * EDGE).zip(rows.chunks(EDGE)) {
            let lines: Vec<&[Line]> = rows.iter().map(|&row| x.row(row as usize)).collect();
            arithmetic.wide().pack(panel, &lines);
            scales.extend(x.scales_of(rows));
        }
        let view = PanelsView { lines: panels, steps, rows: rows.len(), scales };

        let inner = expert.gate.rows();
        let padded = inner.next_multiple_of(A::STEP);
        gated.resize(view.count() * padded, [0.0; EDGE]);
        // What lies beyond `inner` has to be zero, for it is multiplied with zeros: NaN would stay.
        gated.chunks_exact_mut(padded).for_each(|panel| panel[inner..].fill([0.0; EDGE]));
        for first in (0..inner).step_by(Features::together(&expert.gate)) {
            let [of_gate, of_up] = [&expert.gate, &expert.up].map(|w| Features::of(w, first));
            let tiles = of_gate.tiles();
            gate.resize(view.count() * tiles, Tile::ZERO);
            up.resize(view.count() * tiles, Tile::ZERO);
            arithmetic.products(session, gate, of_gate.before(Some(of_up)), view, of_products);
            arithmetic.products(session, up, of_up.before(of_gate.following()), view, of_products);
            for (index, (gate, up)) in gate.iter_mut().zip(&*up).enumerate() {
                let (panel, tile) = (index / tiles, index % tiles);
                let swiglu = SwigluInPlace { gate: gate.0.as_flattened_mut(), up: up.0.as_flattened() };
                Isa::Avx512.run(swiglu);
                let place = panel * padded + first + tile * EDGE;
                let features = EDGE.min(inner - first - tile * EDGE);
                gated[place..][..features].copy_from_slice(&gate.0[..features]);
            }
        }
        let groups = scales_out.len() / view.count();
        let panels = gated.chunks_exact(padded).zip(out.chunks_exact_mut(padded / A::STEP * EDGE));
        for (panel, (gated, out)) in panels.enumerate() {
            arithmetic.pack(gated, down_columns, out, &mut scales_out[panel * groups..][..groups]);
        }
    }
}
