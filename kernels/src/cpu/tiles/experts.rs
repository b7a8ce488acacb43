//! The experts' feed-forward: gathered once, gate, up and SiLU together, and a sum over experts in ascending order.

use rayon::prelude::*;

use super::panels::{Narrowed, PanelsView};
use super::product::{Scratch, products, tiles_of};
use super::reuse::Lines;
use super::{Activations, BLOCK_FEATURES, EDGE, Engine, Line, Order, Plan, STEP, Tile, Work, on_engine};
use crate::cpu::Isa;
use crate::cpu::columns::column_blocks;
use crate::cpu::elementwise::SwigluInPlace;
use crate::cpu::experts::{Expert, Used};
use crate::cpu::kept::with_kept;

/// Rows that an expert takes at a time: they and what becomes of them stay in the second cache. Weights are decoded once
/// for as many.
const ROWS_TOGETHER: usize = 128;

/// `out[r] += weight * feed_forward(x[r])` over all uses of all experts, in ascending order of `used`.
/// `x`, `out`: `[rows, hidden]`; `weights` by slot. All experts have the same shape and encodings.
pub(in crate::cpu) fn experts(
    isa: Isa,
    out: &mut [f32],
    x: &[f32],
    weights: &[f32],
    hidden: usize,
    used: &[Used<'_>],
    activations: Activations,
) {
    if !used.is_empty() {
        on_engine(isa, Experts { out, x, weights, hidden, used, activations });
    }
}

struct Experts<'a> {
    out: &'a mut [f32],
    x: &'a [f32],
    weights: &'a [f32],
    hidden: usize,
    used: &'a [Used<'a>],
    activations: Activations,
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
    products: Scratch,
}

impl Work for Experts<'_> {
    type Output = ();

    fn run<E: Engine>(self, engine: E) {
        let Self { out, x, weights, hidden, used, activations } = self;
        let Expert { gate, down, .. } = &used[0].expert;
        for Used { expert, .. } in used {
            let plans = [&expert.gate, &expert.up, &expert.down].map(Plan::of);
            assert_eq!(plans, [Plan::of(gate), Plan::of(gate), Plan::of(down)], "experts are stored alike");
        }
        let inner = gate.rows();
        let gated_steps = inner.div_ceil(STEP);
        let (gate_order, gated_groups) = (Plan::of(gate).order(), inner / Order::SPAN);
        let (narrowed, gated_groups) = match activations {
            Activations::Rounded => (Narrowed::new(engine.vectors(), x, hidden, gate_order), 0),
            Activations::Int8 => (Narrowed::quantized(engine.vectors(), x, hidden, gate_order), gated_groups),
        };
        let down_columns = Plan::of(down).order().columns();

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
            let session = engine.begin();
            with_kept!(GateScratch, |scratch| {
                task.run(engine, &session, &narrowed, &down_columns, activations, scratch);
            });
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
        let blocks = column_blocks(out, hidden, BLOCK_FEATURES);
        blocks.into_par_iter().enumerate().for_each(|(block, columns)| {
            let session = engine.begin();
            let first = block * BLOCK_FEATURES;
            let add = |DownScratch { sums, products: scratch }: &mut DownScratch| {
                let mut columns = columns;
                for share in &shares {
                    let w = &share.expert.down;
                    let tiles = tiles_of(w, first);
                    let rows = share.rows.len();
                    let panels = PanelsView { lines: share.gated, steps: gated_steps, rows, scales: share.scales };
                    sums.resize(panels.count() * tiles, Tile::ZERO);
                    products(engine, &session, sums, w, first, panels, scratch);
                    for (index, tile) in sums.iter_mut().enumerate() {
                        if activations == Activations::Int8 {
                            engine.vectors().round(tile);
                        }
                        let (panel, tile_of_block) = (index / tiles, index % tiles);
                        let by_row = engine.vectors().transposed(tile);
                        for (row, values) in by_row.0.iter().enumerate().take(panels.rows_of(panel)) {
                            let place = panel * EDGE + row;
                            let out = columns.row_mut(share.rows[place] as usize);
                            let out = &mut out[tile_of_block * EDGE..];
                            let width = out.len().min(EDGE);
                            let weight = weights[share.slots[place] as usize];
                            engine.vectors().add_weighted(&mut out[..width], weight, values);
                        }
                    }
                }
            };
            with_kept!(DownScratch, add);
        });
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
    fn run<E: Engine>(
        self,
        engine: E,
        session: &E::Session,
        x: &Narrowed,
        down_columns: &[u8; Order::SPAN],
        activations: Activations,
        scratch: &mut GateScratch,
    ) {
        let Self { expert, rows, out, scales: scales_out } = self;
        let vectors = engine.vectors();
        let GateScratch { panels, gate, up, gated, scales, products: of_products } = scratch;
        let steps = x.steps();
        panels.resize(PanelsView::lines_of(rows.len(), steps), Line::ZERO);
        scales.clear();
        for (panel, rows) in panels.chunks_exact_mut(steps * EDGE).zip(rows.chunks(EDGE)) {
            let lines: Vec<&[Line]> = rows.iter().map(|&row| x.row(row as usize)).collect();
            vectors.pack(panel, &lines);
            scales.extend(x.scales_of(rows));
        }
        let view = PanelsView { lines: panels, steps, rows: rows.len(), scales };

        let inner = expert.gate.rows();
        let padded = inner.next_multiple_of(STEP);
        gated.resize(view.count() * padded, [0.0; EDGE]);
        // What lies beyond `inner` has to be zero, for it is multiplied with zeros: NaN would stay.
        gated.chunks_exact_mut(padded).for_each(|panel| panel[inner..].fill([0.0; EDGE]));
        for first in (0..inner).step_by(BLOCK_FEATURES) {
            let tiles = tiles_of(&expert.gate, first);
            gate.resize(view.count() * tiles, Tile::ZERO);
            up.resize(view.count() * tiles, Tile::ZERO);
            products(engine, session, gate, &expert.gate, first, view, of_products);
            products(engine, session, up, &expert.up, first, view, of_products);
            for (index, (gate, up)) in gate.iter_mut().zip(&mut *up).enumerate() {
                if activations == Activations::Int8 {
                    vectors.round(gate);
                    vectors.round(up);
                }
                let (panel, tile) = (index / tiles, index % tiles);
                let swiglu = SwigluInPlace { gate: gate.0.as_flattened_mut(), up: up.0.as_flattened() };
                Isa::Avx512.run(swiglu);
                let place = panel * padded + first + tile * EDGE;
                let features = EDGE.min(inner - first - tile * EDGE);
                gated[place..][..features].copy_from_slice(&gate.0[..features]);
            }
        }
        if activations == Activations::Int8 {
            for (values, scales) in gated.as_chunks_mut::<{ Order::SPAN }>().0.iter_mut().zip(scales_out) {
                *scales = vectors.quantize_columns(values);
            }
        }
        for (gated, out) in gated.chunks_exact(padded).zip(out.chunks_exact_mut(padded / 2)) {
            for (pair, line) in out.iter_mut().enumerate() {
                let column =
                    |place: usize| place / Order::SPAN * Order::SPAN + usize::from(down_columns[place % Order::SPAN]);
                *line = vectors.pair(&gated[column(2 * pair)], &gated[column(2 * pair + 1)]);
            }
        }
    }
}
