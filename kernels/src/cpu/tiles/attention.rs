//! Block-causal attention on packed keys and values, a few pages at a time.
//!
//! Queries of all heads that share a key and value head are one matrix: the left operand of the products with keys, and
//! their weights the left operand of the products with values. Scores, maxima, totals and sums are f32; queries, keys,
//! values and weights are BF16. Pages are taken in chunks of [`CHUNK`] from the first page on, so a query's result does
//! not depend on how a sequence was cut into forward passes.

use minnow_common::BLOCK;
use rayon::prelude::*;

use super::{Avx512Bf16, EDGE, Engine, Job, Line, LinePlace, Order, STEP, Tile, Weights, Work, on_engine};
use crate::cpu::Isa;
use crate::cpu::columns::{ColumnBlock, column_blocks};
use crate::cpu::isa::Kernel;
use crate::cpu::kept::with_kept;
use crate::cpu::kv::KvRows;
use crate::cpu::lanes::{LANES, Lanes};
use crate::ops::Heads;

/// Pages whose scores are known before any of their values is added.
const CHUNK: usize = 4;
/// Panels of the keys of a page.
const KEY_PANELS: usize = BLOCK / EDGE;
const _: () = assert!(BLOCK == STEP && EDGE == LANES);

/// How a layer of a block is packed: for each head its keys, as panels of sixteen keys over the dimensions, then its
/// values, as panels of sixteen dimensions over the keys.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct PackedShape {
    heads: usize,
    dim_steps: usize,
    dim_panels: usize,
}

impl PackedShape {
    pub(in crate::cpu) fn of(heads: Heads) -> Self {
        Self { heads: heads.kv, dim_steps: heads.dim.div_ceil(STEP), dim_panels: heads.dim.div_ceil(EDGE) }
    }

    pub(in crate::cpu) fn layer_lines(self) -> usize {
        self.heads * self.head_lines()
    }

    fn key_lines(self) -> usize {
        KEY_PANELS * self.dim_steps * EDGE
    }

    fn head_lines(self) -> usize {
        self.key_lines() + self.dim_panels * EDGE
    }

    /// Keys and values of a head.
    fn head(self, layer: &[Line], head: usize) -> (&[Line], &[Line]) {
        layer[head * self.head_lines()..][..self.head_lines()].split_at(self.key_lines())
    }
}

/// Packs keys and values of all heads into `layer`, of [`PackedShape::layer_lines`].
pub(in crate::cpu) fn pack_layer(isa: Isa, layer: &mut [Line], heads: Heads, from: KvRows<'_>) {
    struct Pack<'a>(&'a mut [Line], Heads, KvRows<'a>);
    impl Work for Pack<'_> {
        type Output = ();

        fn run<E: Engine>(self, engine: E) {
            pack_rows(engine.vectors(), self.0, self.1, self.2);
        }
    }
    on_engine(isa, Pack(layer, heads, from));
}

fn pack_rows(vectors: Avx512Bf16, layer: &mut [Line], heads: Heads, from: KvRows<'_>) {
    let shape = PackedShape::of(heads);
    let mut narrowed = vec![Line::ZERO; BLOCK * shape.dim_steps];
    for (head, lines) in layer.chunks_exact_mut(shape.head_lines()).enumerate() {
        let (keys, values) = lines.split_at_mut(shape.key_lines());
        let row = |row: usize, at: usize| &from.rows[row * from.stride + at + head * heads.dim..][..heads.dim];
        for (key, lines) in narrowed.chunks_exact_mut(shape.dim_steps).enumerate() {
            vectors.narrow(row(key, from.keys_at), Order::Ascending, lines);
        }
        for (panel, keys) in keys.chunks_exact_mut(shape.dim_steps * EDGE).enumerate() {
            let rows: Vec<&[Line]> =
                narrowed[panel * EDGE * shape.dim_steps..].chunks_exact(shape.dim_steps).take(EDGE).collect();
            vectors.pack(keys, &rows);
        }
        for (panel, values) in values.chunks_exact_mut(EDGE).enumerate() {
            let dims = |key: usize| {
                let row = &row(key, from.values_at)[panel * EDGE..];
                let mut dims = [0.0; EDGE];
                let count = row.len().min(EDGE);
                dims[..count].copy_from_slice(&row[..count]);
                dims
            };
            for (pair, line) in values.iter_mut().enumerate() {
                *line = vectors.pair(&dims(2 * pair), &dims(2 * pair + 1));
            }
        }
    }
}

/// As [`crate::cpu::attend`], on packed layers.
pub(in crate::cpu) fn attend(isa: Isa, out: &mut [f32], q: &[f32], q_stride: usize, layers: &[&[Line]], heads: Heads) {
    on_engine(isa, Attend { out, q, q_stride, layers, heads });
}

struct Attend<'a> {
    /// `[rows, query heads, dim]`
    out: &'a mut [f32],
    /// `[rows, q_stride]`
    q: &'a [f32],
    q_stride: usize,
    /// Of each page.
    layers: &'a [&'a [Line]],
    heads: Heads,
}

impl Work for Attend<'_> {
    type Output = ();

    fn run<E: Engine>(self, engine: E) {
        let Self { out, q, q_stride, layers, heads } = self;
        let row_len = heads.query * heads.dim;
        let blocks = out.len() / (row_len * BLOCK);
        let earlier_pages = layers.len() - blocks;
        let sharing = heads.query / heads.kv;
        // All heads that share keys together, unless that leaves threads without work.
        let together = if blocks * heads.kv >= 2 * rayon::current_num_threads() { sharing } else { 1 };
        let tasks: Vec<(usize, usize, ColumnBlock<'_>)> = out
            .chunks_exact_mut(row_len * BLOCK)
            .enumerate()
            .flat_map(|(block, out)| {
                let parts = column_blocks(out, row_len, together * heads.dim);
                parts.into_iter().enumerate().map(move |(part, out)| (block, part * together, out))
            })
            .collect();
        tasks.into_par_iter().with_max_len(1).for_each(|(block, first_head, out)| {
            let group = Group {
                q: &q[block * BLOCK * q_stride..][..BLOCK * q_stride],
                q_stride,
                first_head,
                count: together,
                kv_head: first_head / sharing,
                layers: &layers[..=earlier_pages + block],
                heads,
            };
            with_kept!(Scratch, |scratch| group.run(engine, out, scratch));
        });
    }
}

/// Some heads of one block of queries that share keys and values.
struct Group<'a> {
    q: &'a [f32],
    q_stride: usize,
    first_head: usize,
    count: usize,
    kv_head: usize,
    layers: &'a [&'a [Line]],
    heads: Heads,
}

#[derive(Default)]
struct Scratch {
    row: Vec<Line>,
    /// As [`Weights::Lines`], over the dimensions.
    queries: Vec<Line>,
    /// `[pages][key panels][tiles]`
    scores: Vec<Tile>,
    /// `[pages][tiles][16 queries]`
    weights: Vec<Line>,
    /// `[dim panels][tiles]`
    sums: Vec<Tile>,
}

impl Group<'_> {
    fn run<E: Engine>(&self, engine: E, mut out: ColumnBlock<'_>, scratch: &mut Scratch) {
        let session = engine.begin();
        let shape = PackedShape::of(self.heads);
        let dim = self.heads.dim;
        let tiles = self.count * BLOCK / EDGE;
        self.arrange_queries(engine.vectors(), shape, tiles, scratch);
        scratch.scores.resize(CHUNK * KEY_PANELS * tiles, Tile::ZERO);
        scratch.weights.resize(CHUNK * tiles * EDGE, Line::ZERO);
        scratch.sums.clear();
        scratch.sums.resize(shape.dim_panels * tiles, Tile::ZERO);
        let mut running = vec![Running::START; tiles];
        for chunk in self.layers.chunks(CHUNK) {
            let page_tiles = KEY_PANELS * tiles;
            for (layer, scores) in chunk.iter().zip(scratch.scores.chunks_exact_mut(page_tiles)) {
                let (keys, _) = shape.head(layer, self.kv_head);
                let (first, second) = keys.split_at(shape.dim_steps * EDGE);
                let job = Job { tiles, steps: shape.dim_steps, rows: EDGE, is_fresh: true };
                E::product(&session, scores, &Weights::Lines(&scratch.queries), &[first, second], job, |_| ());
            }
            for (tile, running) in running.iter_mut().enumerate() {
                let softmax = Softmax {
                    scores: &mut scratch.scores[..chunk.len() * page_tiles],
                    weights: &mut scratch.weights[..chunk.len() * tiles * EDGE],
                    tile,
                    tiles,
                    scale: (1.0 / (dim as f64).sqrt()) as f32,
                    running,
                    vectors: engine.vectors(),
                };
                let shrink = Isa::Avx512.run(softmax);
                for sums in scratch.sums.chunks_exact_mut(tiles) {
                    for (row, shrink) in sums[tile].0.iter_mut().zip(shrink) {
                        row.iter_mut().for_each(|sum| *sum *= shrink);
                    }
                }
            }
            for (layer, weights) in chunk.iter().zip(scratch.weights.chunks_exact(tiles * EDGE)) {
                let (_, values) = shape.head(layer, self.kv_head);
                let job = Job { tiles, steps: 1, rows: EDGE, is_fresh: false };
                for (values, sums) in values.chunks(2 * EDGE).zip(scratch.sums.chunks_mut(2 * tiles)) {
                    let weights = Weights::Lines(weights);
                    match values.split_at_checked(EDGE) {
                        Some((first, second)) if !second.is_empty() => {
                            E::product(&session, sums, &weights, &[first, second], job, |_| ());
                        }
                        _ => E::product(&session, sums, &weights, &[values], job, |_| ()),
                    }
                }
            }
        }
        for (index, sums) in scratch.sums.iter().enumerate() {
            let (panel, tile) = (index / tiles, index % tiles);
            for (query, (sums, total)) in sums.0.iter().zip(running[tile].total).enumerate() {
                let (head, row) = (tile * EDGE / BLOCK, tile * EDGE % BLOCK + query);
                let out = &mut out.row_mut(row)[head * dim..][..dim][panel * EDGE..];
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out = sum / total;
                }
            }
        }
    }

    /// Queries as lines, those of a head after those of the one before.
    fn arrange_queries(&self, vectors: Avx512Bf16, shape: PackedShape, tiles: usize, scratch: &mut Scratch) {
        scratch.row.resize(shape.dim_steps, Line::ZERO);
        scratch.queries.resize(shape.dim_steps * tiles * EDGE, Line::ZERO);
        for head in 0..self.count {
            for row in 0..BLOCK {
                let at = row * self.q_stride + (self.first_head + head) * self.heads.dim;
                vectors.narrow(&self.q[at..][..self.heads.dim], Order::Ascending, &mut scratch.row);
                let place = LinePlace::of((head * BLOCK + row) / EDGE, tiles, shape.dim_steps);
                for (step, line) in scratch.row.iter().enumerate() {
                    scratch.queries[place.of_step(step) + row % EDGE] = *line;
                }
            }
        }
    }
}

/// Of sixteen queries: the largest score so far, and the sum of `exp(score - largest)`.
#[derive(Clone, Copy)]
struct Running {
    max: [f32; EDGE],
    total: [f32; EDGE],
}

impl Running {
    const START: Self = Self { max: [f32::NEG_INFINITY; EDGE], total: [0.0; EDGE] };
}

/// Turns scores of a chunk into weights, for one tile of queries; the result is what earlier sums shrink by.
struct Softmax<'a> {
    scores: &'a mut [Tile],
    weights: &'a mut [Line],
    tile: usize,
    tiles: usize,
    scale: f32,
    running: &'a mut Running,
    vectors: Avx512Bf16,
}

impl Kernel for Softmax<'_> {
    type Output = [f32; EDGE];

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> [f32; EDGE] {
        let Self { scores, weights, tile, tiles, scale, running, vectors } = self;
        let scale = lanes.splat(scale);
        // Scores of a query are one row of every `tiles`-th tile.
        let mut largest = Tile::ZERO;
        for (row, largest) in largest.0.iter_mut().enumerate() {
            let mut max = lanes.splat(f32::NEG_INFINITY);
            for scores in scores[tile..].iter_mut().step_by(tiles) {
                let score = lanes.mul(lanes.load(&scores.0[row]), scale);
                lanes.store(score, &mut scores.0[row]);
                max = lanes.max(score, max);
            }
            lanes.store(max, largest);
        }
        let mut max = lanes.load(&running.max);
        let old_max = max;
        for column in &vectors.transposed(&largest).0 {
            max = lanes.max(lanes.load(column), max);
        }
        lanes.store(max, &mut running.max);
        let minus_one = lanes.splat(-1.0);
        let mut shrink = [0.0; EDGE];
        lanes.store(lanes.exp(lanes.add(old_max, lanes.mul(max, minus_one))), &mut shrink);

        let mut sums = Tile::ZERO;
        for (row, sum) in sums.0.iter_mut().enumerate() {
            let minus_max = lanes.splat(-running.max[row]);
            let mut total = lanes.splat(0.0);
            let pages = scores.chunks_exact(KEY_PANELS * tiles).zip(weights.chunks_exact_mut(tiles * EDGE));
            for (scores, weights) in pages {
                let mut of_page = [0.0; BLOCK];
                for (panel, out) in of_page.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                    let score = lanes.load(&scores[panel * tiles + tile].0[row]);
                    let weight = lanes.exp(lanes.add(score, minus_max));
                    total = lanes.add(total, weight);
                    lanes.store(weight, out);
                }
                vectors.narrow_line(&of_page, &mut weights[tile * EDGE + row]);
            }
            lanes.store(total, sum);
        }
        let mut total = lanes.splat(0.0);
        for column in &vectors.transposed(&sums).0 {
            total = lanes.add(total, lanes.load(column));
        }
        let shrink_vector = lanes.load(&shrink);
        lanes.store(lanes.mul_add(lanes.load(&running.total), shrink_vector, total), &mut running.total);
        shrink
    }
}
