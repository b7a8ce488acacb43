//! Products of a block of features with rows that were quantized to eight bits, as [`crate::oracle::linear_int8`] says.
//!
//! Codes of weights are decoded to bytes, a group of columns of a block at a time, and multiplied with all rows while they
//! are in the nearest cache. A group's product is exact on every engine, and groups are added in ascending order, so engines
//! agree to the bit and a row's result does not depend on the rows beside it.

use minnow_common::Encoding;

use super::panels::PanelsView;
use super::product::{Features, Scratch, StoredGroups};
use super::wide::{BYTE_OFFSET, NIBBLE_OFFSET};
use super::{CODE_STEPS, CodeEngine, Codes, Dots, EDGE, FEW_TILES, Line, RowCodes, Tile};

/// A piece of work written over [`CodeEngine`].
pub(super) trait CodeWork {
    type Output;

    fn run<E: CodeEngine>(self, engine: E) -> Self::Output;
}

/// [`super::product::products`] of codes, rounded to BF16. The matrix has codes in groups.
pub(super) fn products<E: CodeEngine>(
    engine: E,
    session: &E::Session,
    sums: &mut [Tile],
    features: Features<'_>,
    x: PanelsView<'_>,
    scratch: &mut Scratch,
) {
    let wide = engine.wide();
    let tiles = features.tiles();
    let stored = StoredGroups::of(&features);
    assert!(sums.len() == x.count() * tiles && x.steps == stored.groups * CODE_STEPS);
    let (step_lines, Scratch { lines, dots, .. }) = (tiles * EDGE, scratch);
    dots.resize(2 * tiles, Dots::ZERO);
    sums.fill(Tile::ZERO);
    let offset = if features.w.encoding() == Encoding::I4Mma { NIBBLE_OFFSET } else { BYTE_OFFSET };
    let decode = |codes: &[u8], out: &mut [Line]| {
        if let Ok(nibbles) = codes.try_into() {
            wide.nibble_codes(nibbles, E::FORM, out, step_lines);
        } else {
            let bytes = codes.try_into().expect("codes have four bits or eight");
            wide.byte_codes(bytes, E::FORM, out, step_lines);
        }
    };
    stored.in_turn(wide, lines, CODE_STEPS, step_lines, decode, |group, lines, decode_next| {
        // Beyond the last strip, codes are zero and scales too.
        let mut scales = [[0.0; EDGE]; FEW_TILES];
        for (tile, scales) in scales.iter_mut().enumerate().take(tiles) {
            *scales = wide.widened([stored.scales(2 * tile, group), stored.scales(2 * tile + 1, group)]);
        }
        let weights = Codes { lines, offset, scales: &scales[..tiles] };
        for (pair, sums) in sums.chunks_mut(2 * tiles).enumerate() {
            let rows = |index: usize| RowCodes {
                lines: x.steps_of(2 * pair + index, group * CODE_STEPS, CODE_STEPS),
                scales: x.scales_of(2 * pair + index, group),
            };
            let between = |step| {
                if pair == 0 {
                    decode_next(step);
                }
            };
            if sums.len() > tiles {
                E::add_group(session, sums, &weights, &[rows(0), rows(1)], dots, between);
            } else {
                E::add_group(session, sums, &weights, &[rows(0)], dots, between);
            }
        }
    });
    sums.iter_mut().for_each(|tile| wide.round(tile));
}

#[cfg(test)]
mod tests {
    use half::f16;
    use minnow_common::{Shape, TensorSpec};

    use super::super::panels::Narrowed;
    use super::super::{Amx, Avx512Bw, Avx512Vnni, CODE_STEP, CodeBytes, Order, Plan};
    use super::*;
    use crate::codec;
    use crate::conformance::random;
    use crate::cpu::{Isa, experts_int8};
    use crate::matrix::WeightMatrix;
    use crate::oracle::linear_int8;

    /// What [`products`] makes of all features and rows: `[rows, features]`.
    fn all_products<E: CodeEngine>(engine: E, w: &WeightMatrix<'_>, x: &[f32]) -> Vec<f32> {
        let session = engine.begin_codes();
        let order = Plan::of(w).code_order().expect("codes in groups");
        let narrowed = Narrowed::quantized(engine.wide(), x, w.cols(), order);
        let (rows, steps) = (narrowed.rows(), narrowed.steps());
        let mut lines = vec![Line::ZERO; PanelsView::lines_of(rows, steps)];
        let mut scales = Vec::new();
        let all: Vec<u32> = (0..rows as u32).collect();
        for (panel, rows) in lines.chunks_exact_mut(steps * EDGE).zip(all.chunks(EDGE)) {
            let rows_of_panel: Vec<_> = rows.iter().map(|&row| narrowed.row(row as usize)).collect();
            engine.wide().pack(panel, &rows_of_panel);
            scales.extend(narrowed.scales_of(rows));
        }
        let x = PanelsView { lines: &lines, steps, rows, scales: &scales };
        let mut out = vec![0.0; rows * w.rows()];
        let mut scratch = Scratch::default();
        let blocks = std::iter::successors(Some(Features::of(w, 0)), |features| features.following());
        for features in blocks {
            let tiles = features.tiles();
            let mut sums = vec![Tile([[f32::NAN; EDGE]; EDGE]); x.count() * tiles];
            products(engine, &session, &mut sums, features.before(features.following()), x, &mut scratch);
            for row in 0..rows {
                for feature in 0..features.count {
                    let tile = &sums[row / EDGE * tiles + feature / EDGE];
                    out[row * w.rows() + features.first + feature] = tile.0[feature % EDGE][row % EDGE];
                }
            }
        }
        out
    }

    /// Products in plain integers, and all else as on AMX: what surrounds its tiles runs where there are none.
    #[derive(Clone, Copy)]
    struct Plain(Avx512Bw);

    impl CodeEngine for Plain {
        const FORM: CodeBytes = CodeBytes::Signed;

        type Session = Self;

        fn wide(self) -> Avx512Bw {
            self.0
        }

        fn begin_codes(self) -> Self {
            self
        }

        fn add_group(
            session: &Self,
            sums: &mut [Tile],
            weights: &Codes<'_>,
            rows: &[RowCodes<'_>],
            dots: &mut [Dots],
            between: impl FnMut(usize),
        ) {
            (0..CODE_STEPS).for_each(between);
            let tiles = weights.scales.len();
            let code = |line: &Line, byte: usize| i32::from(line.0[byte / 2].to_le_bytes()[byte % 2] as i8);
            for (index, (sum, dots)) in sums.iter_mut().zip(dots).enumerate() {
                let (rows, tile) = (&rows[index / tiles], index % tiles);
                for (place, dot) in dots.0.as_flattened_mut().iter_mut().enumerate() {
                    let (feature, row) = (tile * EDGE + place / EDGE, place % EDGE);
                    let product = |column: usize| {
                        let (step, byte) = (column / CODE_STEP, column % CODE_STEP);
                        code(&weights.lines[step * tiles * EDGE + feature], byte)
                            * code(&rows.lines[step * EDGE + byte / 4], 4 * row + byte % 4)
                    };
                    *dot = (0..Order::SPAN).map(product).sum();
                }
                session.0.add_dots(sum, dots, &weights.scales[tile], rows.scales);
            }
        }
    }

    /// Every code there is, with scales from the smallest to the largest, and rows of all kinds.
    #[test]
    fn products_of_codes_are_the_oracles_on_every_engine() {
        let bits = |values: &[f32]| -> Vec<u32> {
            values.iter().map(|value| if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }).collect()
        };
        let (amx, vnni, plain) = (Amx::detect(), Avx512Vnni::detect(), Avx512Bw::detect().map(Plain));
        for (name, is_present) in [("AMX", amx.is_some()), ("AVX-512 VNNI", vnni.is_some())] {
            eprintln!("{name}: {}", if is_present { "runs" } else { "skipped, for this CPU has none" });
        }
        for (rows, cols, features) in
            [(1, 128, 8), (8, 256, 64), (9, 384, 24), (17, 128, 72), (40, 512, 144), (33, 128, 48)]
        {
            for encoding in [Encoding::I4Mma, Encoding::I8Mma] {
                let spec = TensorSpec::new(Shape::matrix(features, cols), encoding, 128, None).expect("a spec");
                let data: Vec<u8> = (0..spec.data_bytes()).map(|index| (index * 37 + index / 256) as u8).collect();
                let scale = |index: u64| f16::from_f32(0.001 * (1 + index * 7 % 1000) as f32).to_le_bytes();
                let scales: Vec<u8> = (0..spec.scales_bytes() / 2).flat_map(scale).collect();
                let w = WeightMatrix::new(&spec, &data, &scales).expect("a matrix");
                let ones = f16::ONE.to_le_bytes().repeat(scales.len() / 2);
                let codes = codec::decode(&data, &ones, &spec).expect("a matrix");
                let code_one = if encoding == Encoding::I4Mma { 0x11 } else { 1 };
                let values = codec::decode(&vec![code_one; data.len()], &scales, &spec).expect("a matrix");
                let group_scales: Vec<f32> = values.into_iter().step_by(128).collect();

                let mut x = random("rows of codes", rows * cols);
                x[..128].fill(1.0);
                if rows > 8 {
                    x[cols..][..128].fill(0.0);
                    x[2 * cols..3 * cols].fill(-1e30);
                    x[3 * cols..][..cols].iter_mut().for_each(|value| *value *= 1e-41);
                    x[4 * cols + 100] = f32::NAN;
                    x[5 * cols + 3] = f32::NEG_INFINITY;
                }
                let mut expected = vec![0.0; rows * features];
                linear_int8(&mut expected, &x, &codes, &group_scales, cols, 128);
                let without_engine = Isa::present().map(|isa| {
                    let mut out = vec![0.0; rows * features];
                    experts_int8::linear(isa, &mut out, &experts_int8::quantized(isa, &x, cols), &w);
                    (format!("{isa} without an engine"), Some(out))
                });
                let found = [
                    ("amx", amx.map(|engine| all_products(engine, &w, &x))),
                    ("avx512vnni", vnni.map(|engine| all_products(engine, &w, &x))),
                    ("plain", plain.map(|engine| all_products(engine, &w, &x))),
                ];
                let found = found.map(|(name, found)| (name.to_owned(), found));
                for (name, found) in found.into_iter().chain(without_engine) {
                    let Some(found) = found else { continue };
                    assert_eq!(bits(&found), bits(&expected), "{name}, {rows} rows, {features} x {cols} {encoding}");
                }
            }
        }
    }
}
