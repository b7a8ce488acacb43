//! AVX-512 without BF16: what moves and rounds numbers around products, for both arithmetics.
//!
//! Every function that is compiled for these instructions is private; the methods of [`Avx512Bw`] are the door.

use std::arch::is_x86_feature_detected;
use std::arch::x86_64::*;

use super::{CODE_STEP, CODE_STEPS, Dots, EDGE, Line, Order, Tile};
use crate::codec::STRIP;
use crate::oracle::{code_of, quantize_row, scale_of_group};

/// Proof that this CPU has AVX-512F, BW and VL. The only way to get one is [`Avx512Bw::detect`].
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx512Bw(());

/// Codes of one group of `i4_mma`, eight rows.
pub(super) type NibbleGroup = [u8; STRIP * Order::SPAN / 2];
/// Codes of one group of `i8_mma`, eight rows.
pub(super) type ByteGroup = [u8; STRIP * Order::SPAN];

/// How codes of weights become bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CodeBytes {
    /// As they are.
    Signed,
    /// With [`NIBBLE_OFFSET`] or [`BYTE_OFFSET`] added, which leaves none below zero.
    Unsigned,
}

/// The lowest code of four bits is minus this.
pub(super) const NIBBLE_OFFSET: i32 = 8;
/// The lowest code of eight bits is minus this.
pub(super) const BYTE_OFFSET: i32 = 128;

impl Avx512Bw {
    pub(super) fn detect() -> Option<Self> {
        let present = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl");
        present.then_some(Self(()))
    }

    /// Makes a panel of up to sixteen rows of as many lines each; rows that are not there are zero.
    /// `panel: [steps][16 pairs]`, each line a pair of columns of all rows.
    pub(super) fn pack(self, panel: &mut [Line], rows: &[&[Line]]) {
        assert!(rows.len() <= EDGE);
        for row in rows {
            assert_eq!(panel.len(), row.len() * EDGE);
        }
        // SAFETY: `self` exists, so `detect` saw all features that `pack` is compiled for.
        unsafe { pack(panel, rows) }
    }

    /// Copies the first `steps` lines of each of some rows, `row_bytes` apart, to `out[step * step_lines + row]`: step by step,
    /// for then what is written lies together.
    pub(super) fn copy_rows(self, rows: &[u8], row_bytes: usize, steps: usize, out: &mut [Line], step_lines: usize) {
        let count = rows.len() / row_bytes;
        assert!(steps * size_of::<Line>() <= row_bytes && count <= step_lines);
        assert!(steps == 0 || out.len() >= (steps - 1) * step_lines + count);
        // SAFETY: `self` exists, so `detect` saw all features that `copy_rows` is compiled for.
        unsafe { copy_rows(rows, row_bytes, steps, out, step_lines) }
    }

    /// `[row][feature]` of a `[feature][row]`.
    pub(super) fn transposed(self, tile: &Tile) -> Tile {
        // SAFETY: `self` exists, so `detect` saw all features that `transposed` is compiled for.
        unsafe { transposed(tile) }
    }

    /// `out += weight * row`, element by element.
    #[inline]
    pub(super) fn add_weighted(self, out: &mut [f32; EDGE], weight: f32, row: &[f32; EDGE]) {
        // SAFETY: `self` exists, so `detect` saw all features that `add_weighted` is compiled for.
        unsafe { add_weighted(out, weight, row) }
    }

    /// Asks for memory that is read later, into the second cache. `bytes` may be anything: nothing is accessed.
    #[inline]
    pub(super) fn prefetch(self, bytes: &[u8]) {
        for line in bytes.chunks(64) {
            // SAFETY: SSE is part of every x86-64 CPU, and a prefetch accesses nothing that a program could see.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) }
        }
    }

    /// Quantizes a row to eight bits in groups of [`Order::SPAN`], as [`crate::oracle::quantize_row`], and puts the codes
    /// in the order of `columns`. `row` and `scales` are whole groups.
    pub(super) fn quantize(self, row: &[f32], columns: &[u8; Order::SPAN], out: &mut [Line], scales: &mut [f32]) {
        assert!(row.len() == scales.len() * Order::SPAN && out.len() * CODE_STEP == row.len());
        // SAFETY: `self` exists, so `detect` saw all features that `quantize` is compiled for.
        unsafe { quantize(row, columns, out, scales) }
    }

    /// Quantizes [`Order::SPAN`] values of each of sixteen rows, `values[column][row]`, and makes them a panel in the order
    /// of `columns`. Returns the scales.
    pub(super) fn quantize_columns(
        self,
        values: &[[f32; EDGE]; Order::SPAN],
        columns: &[u8; Order::SPAN],
        panel: &mut [Line; CODE_STEPS * EDGE],
    ) -> [f32; EDGE] {
        // SAFETY: `self` exists, so `detect` saw all features that `quantize_columns` is compiled for.
        unsafe { quantize_columns(values, columns, panel) }
    }

    /// Codes of a group of `i4_mma` as bytes, each row as two lines in [`Order::NibbleCodes`]: line `step` of row `row`
    /// goes to `out[step * step_lines + row]`.
    pub(super) fn nibble_codes(self, codes: &NibbleGroup, form: CodeBytes, out: &mut [Line], step_lines: usize) {
        assert!(out.len() >= step_lines + STRIP);
        // SAFETY: `self` exists, so `detect` saw all features that `nibble_codes` is compiled for.
        unsafe { nibble_codes(codes, form, out, step_lines) }
    }

    /// [`Self::nibble_codes`] for `i8_mma`, in [`Order::ByteCodes`].
    pub(super) fn byte_codes(self, codes: &ByteGroup, form: CodeBytes, out: &mut [Line], step_lines: usize) {
        assert!(out.len() >= step_lines + STRIP);
        // SAFETY: `self` exists, so `detect` saw all features that `byte_codes` is compiled for.
        unsafe { byte_codes(codes, form, out, step_lines) }
    }

    /// FP16 scales of sixteen features.
    pub(super) fn widened(self, scales: [&[u8; 2 * STRIP]; 2]) -> [f32; EDGE] {
        // SAFETY: `self` exists, so `detect` saw all features that `widened` is compiled for.
        unsafe { widened(scales) }
    }

    /// `sum[f][r] += dots[f][r] * (row_scales[r] * scales[f])`, each operation rounded.
    pub(super) fn add_dots(self, sum: &mut Tile, dots: &Dots, scales: &[f32; EDGE], row_scales: &[f32; EDGE]) {
        // SAFETY: `self` exists, so `detect` saw all features that `add_dots` is compiled for.
        unsafe { add_dots(sum, dots, scales, row_scales) }
    }

    /// Rounds sums to BF16, in place.
    pub(super) fn round(self, tile: &mut Tile) {
        // SAFETY: `self` exists, so `detect` saw all features that `round` is compiled for.
        unsafe { round(tile) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn copy_rows(rows: &[u8], row_bytes: usize, steps: usize, out: &mut [Line], step_lines: usize) {
    for (step, lines) in (0..steps).zip(out.chunks_mut(step_lines)) {
        for (row, line) in rows.chunks_exact(row_bytes).zip(lines) {
            let bytes = &row[step * size_of::<Line>()..][..size_of::<Line>()];
            // SAFETY: both are 64 bytes.
            unsafe {
                _mm512_storeu_si512(line.0.as_mut_ptr().cast(), _mm512_loadu_si512(bytes.as_ptr().cast()));
            }
        }
    }
}

/// The lines of a strip in each of `STEPS` steps, `step_lines` apart.
///
/// # Panics
/// If there are not as many.
#[inline]
pub(super) fn of_steps<const STEPS: usize>(out: &mut [Line], step_lines: usize) -> [&mut [Line; STRIP]; STEPS] {
    let mut steps = out.chunks_mut(step_lines).map(|lines| lines.first_chunk_mut());
    std::array::from_fn(|_| steps.next().flatten().expect("there is room for every line"))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn pack(panel: &mut [Line], rows: &[&[Line]]) {
    for (step, out) in panel.as_chunks_mut::<EDGE>().0.iter_mut().enumerate() {
        let mut vectors = [_mm512_setzero_si512(); EDGE];
        for (vector, row) in vectors.iter_mut().zip(rows) {
            // SAFETY: a line is 64 bytes.
            *vector = unsafe { _mm512_loadu_si512(row[step].0.as_ptr().cast()) };
        }
        let vectors = transpose(vectors);
        for (vector, line) in vectors.iter().zip(out) {
            // SAFETY: a line is 64 bytes.
            unsafe { _mm512_storeu_si512(line.0.as_mut_ptr().cast(), *vector) }
        }
    }
}

/// Lane `j` of vector `i` to lane `i` of vector `j`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn transpose(rows: [__m512i; EDGE]) -> [__m512i; EDGE] {
    let zero = _mm512_setzero_si512();
    // Pairs of rows, then fours: quarter q of fours[4 g + c] is column 4 q + c of rows 4 g to 4 g + 3.
    let mut fours = [zero; EDGE];
    for group in 0..4 {
        let [a, b, c, d] = [rows[4 * group], rows[4 * group + 1], rows[4 * group + 2], rows[4 * group + 3]];
        let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        fours[4 * group] = _mm512_unpacklo_epi64(ab_low, cd_low);
        fours[4 * group + 1] = _mm512_unpackhi_epi64(ab_low, cd_low);
        fours[4 * group + 2] = _mm512_unpacklo_epi64(ab_high, cd_high);
        fours[4 * group + 3] = _mm512_unpackhi_epi64(ab_high, cd_high);
    }
    let mut out = [zero; EDGE];
    for column in 0..4 {
        let quarters = transpose_quarters([fours[column], fours[4 + column], fours[8 + column], fours[12 + column]]);
        for (quarter, vector) in quarters.into_iter().enumerate() {
            out[4 * quarter + column] = vector;
        }
    }
    out
}

/// Quarter `j` of vector `i` to quarter `i` of vector `j`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn transpose_quarters([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let (ab_low, ab_high) = (_mm512_shuffle_i64x2::<0x44>(a, b), _mm512_shuffle_i64x2::<0xee>(a, b));
    let (cd_low, cd_high) = (_mm512_shuffle_i64x2::<0x44>(c, d), _mm512_shuffle_i64x2::<0xee>(c, d));
    [
        _mm512_shuffle_i64x2::<0x88>(ab_low, cd_low),
        _mm512_shuffle_i64x2::<0xdd>(ab_low, cd_low),
        _mm512_shuffle_i64x2::<0x88>(ab_high, cd_high),
        _mm512_shuffle_i64x2::<0xdd>(ab_high, cd_high),
    ]
}

/// Eight bytes `j` of vector `i` to eight bytes `i` of vector `j`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn transpose_eighths(v: [__m512i; 8]) -> [__m512i; 8] {
    // Quarter q of even[i] is eighth 2 q of vectors 2 i and 2 i + 1; of odd[i], eighth 2 q + 1.
    let mut even = [_mm512_setzero_si512(); 4];
    let mut odd = even;
    for i in 0..4 {
        even[i] = _mm512_unpacklo_epi64(v[2 * i], v[2 * i + 1]);
        odd[i] = _mm512_unpackhi_epi64(v[2 * i], v[2 * i + 1]);
    }
    let (even, odd) = (transpose_quarters(even), transpose_quarters(odd));
    [even[0], odd[0], even[1], odd[1], even[2], odd[2], even[3], odd[3]]
}

/// FP16 scales of sixteen features.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn widened(scales: [&[u8; 2 * STRIP]; 2]) -> [f32; EDGE] {
    let mut factors = [0.0; EDGE];
    // SAFETY: eight FP16 are sixteen bytes, and sixteen f32 are 64.
    unsafe {
        let low = _mm_loadu_si128(scales[0].as_ptr().cast());
        let high = _mm_loadu_si128(scales[1].as_ptr().cast());
        _mm512_storeu_ps(factors.as_mut_ptr(), _mm512_cvtph_ps(_mm256_set_m128i(high, low)));
    }
    factors
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn transposed(tile: &Tile) -> Tile {
    let mut vectors = [_mm512_setzero_si512(); EDGE];
    for (vector, row) in vectors.iter_mut().zip(&tile.0) {
        // SAFETY: sixteen f32 are 64 bytes.
        *vector = unsafe { _mm512_loadu_si512(row.as_ptr().cast()) };
    }
    let mut out = Tile::ZERO;
    for (vector, row) in transpose(vectors).into_iter().zip(&mut out.0) {
        // SAFETY: sixteen f32 are 64 bytes.
        unsafe { _mm512_storeu_si512(row.as_mut_ptr().cast(), vector) }
    }
    out
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn add_weighted(out: &mut [f32; EDGE], weight: f32, row: &[f32; EDGE]) {
    // SAFETY: sixteen f32 are 64 bytes.
    unsafe {
        let sum = _mm512_fmadd_ps(_mm512_set1_ps(weight), _mm512_loadu_ps(row.as_ptr()), _mm512_loadu_ps(out.as_ptr()));
        _mm512_storeu_ps(out.as_mut_ptr(), sum);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn quantize(row: &[f32], columns: &[u8; Order::SPAN], out: &mut [Line], scales: &mut [f32]) {
    let groups = row.as_chunks::<{ Order::SPAN }>().0.iter().zip(out.as_chunks_mut::<CODE_STEPS>().0);
    for ((values, lines), scale) in groups.zip(scales) {
        let mut codes = [0.0; Order::SPAN];
        *scale = quantize_row(values, &mut codes);
        let codes = codes.map(|code| code as i8);
        let ordered = columns.map(|column| codes[usize::from(column) % Order::SPAN]);
        for (codes, line) in ordered.as_chunks::<CODE_STEP>().0.iter().zip(lines) {
            // SAFETY: the codes are 64 bytes, as is a line.
            unsafe { _mm512_storeu_si512(line.0.as_mut_ptr().cast(), _mm512_loadu_si512(codes.as_ptr().cast())) }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn quantize_columns(
    values: &[[f32; EDGE]; Order::SPAN],
    columns: &[u8; Order::SPAN],
    panel: &mut [Line; CODE_STEPS * EDGE],
) -> [f32; EDGE] {
    // Magnitudes are ordered as their bits are, NaN above all.
    let mut max = [0; EDGE];
    for column in values {
        for (max, value) in max.iter_mut().zip(column) {
            *max = value.abs().to_bits().max(*max);
        }
    }
    let scales = max.map(|max| scale_of_group(f32::from_bits(max)));
    for (columns, line) in columns.as_chunks::<4>().0.iter().zip(panel) {
        let mut fours = [0u32; EDGE];
        for (place, &column) in columns.iter().enumerate() {
            let column = &values[usize::from(column) % Order::SPAN];
            for ((four, value), scale) in fours.iter_mut().zip(column).zip(scales) {
                *four |= u32::from(code_of(*value, scale) as i8 as u8) << (8 * place);
            }
        }
        // SAFETY: sixteen times four codes are 64 bytes, as is a line.
        unsafe { _mm512_storeu_si512(line.0.as_mut_ptr().cast(), _mm512_loadu_si512(fours.as_ptr().cast())) }
    }
    scales
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn nibble_codes(codes: &NibbleGroup, form: CodeBytes, out: &mut [Line], step_lines: usize) {
    let (tiles, _) = codes.as_chunks::<64>();
    let mut vectors = [_mm512_setzero_si512(); 8];
    for (vector, tile) in vectors.iter_mut().zip(tiles) {
        // SAFETY: a tile is 64 bytes.
        *vector = unsafe { _mm512_loadu_si512(tile.as_ptr().cast()) };
    }
    let (sign_bits, low_halves) = (_mm512_set1_epi8(0x88u8 as i8), _mm512_set1_epi8(0x0f));
    let offset = _mm512_set1_epi8(match form {
        CodeBytes::Signed => NIBBLE_OFFSET as i8,
        CodeBytes::Unsigned => 0,
    });
    let out: [_; CODE_STEPS] = of_steps(out, step_lines);
    // Each tile has eight bytes of each of eight rows; afterwards a vector is a row.
    for (row, codes) in transpose_eighths(vectors).into_iter().enumerate() {
        // With its sign bit turned over, a nibble is the code plus the offset.
        let codes = _mm512_xor_si512(codes, sign_bits);
        let lines = [codes, _mm512_srli_epi16::<4>(codes)];
        for (step, line) in lines.into_iter().enumerate() {
            let line = _mm512_sub_epi8(_mm512_and_si512(line, low_halves), offset);
            // SAFETY: a line is 64 bytes.
            unsafe { _mm512_storeu_si512(out[step][row].0.as_mut_ptr().cast(), line) }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn byte_codes(codes: &ByteGroup, form: CodeBytes, out: &mut [Line], step_lines: usize) {
    let (quarter_tiles, _) = codes.as_chunks::<64>();
    // With its sign bit turned over, a byte is the code plus the offset.
    let turned = _mm512_set1_epi8(match form {
        CodeBytes::Signed => 0,
        CodeBytes::Unsigned => BYTE_OFFSET as u8 as i8,
    });
    for step in 0..CODE_STEPS {
        // Four tiles, 64 columns, each with sixteen bytes of rows 0 to 3, then of rows 4 to 7.
        for four_rows in 0..2 {
            let mut vectors = [_mm512_setzero_si512(); 4];
            for (tile, vector) in vectors.iter_mut().enumerate() {
                let bytes = &quarter_tiles[(4 * step + tile) * 2 + four_rows];
                // SAFETY: these are 64 bytes.
                *vector = unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) };
            }
            for (row, codes) in transpose_quarters(vectors).into_iter().enumerate() {
                let place = &mut out[step * step_lines + 4 * four_rows + row];
                // SAFETY: a line is 64 bytes.
                unsafe { _mm512_storeu_si512(place.0.as_mut_ptr().cast(), _mm512_xor_si512(codes, turned)) }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn add_dots(sum: &mut Tile, dots: &Dots, scales: &[f32; EDGE], row_scales: &[f32; EDGE]) {
    // SAFETY: rows of tiles, of dots, and row scales are 64 bytes.
    unsafe {
        let row_scales = _mm512_loadu_ps(row_scales.as_ptr());
        for ((sum, dots), scale) in sum.0.iter_mut().zip(&dots.0).zip(scales) {
            let factor = _mm512_mul_ps(row_scales, _mm512_set1_ps(*scale));
            let product = _mm512_cvtepi32_ps(_mm512_loadu_si512(dots.as_ptr().cast()));
            let scaled = _mm512_mul_ps(product, factor);
            _mm512_storeu_ps(sum.as_mut_ptr(), _mm512_add_ps(_mm512_loadu_ps(sum.as_ptr()), scaled));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn round(tile: &mut Tile) {
    for value in tile.0.as_flattened_mut() {
        let bits = value.to_bits();
        let to_even = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        // NaN stays NaN, whatever its lower half was.
        let rounded = if value.is_nan() { bits | 0x40_0000 } else { to_even };
        *value = f32::from_bits(rounded & 0xffff_0000);
    }
}
