//! AVX-512 with BF16: the products of a tile by dot products of pairs, and what surrounds products in BF16 on any engine.
//!
//! Every function that is compiled for these instructions is private; the methods of [`Avx512Bf16`] are the door.

use std::arch::is_x86_feature_detected;
use std::arch::x86_64::*;
use std::ops::Deref;

use super::wide::{ByteGroup, NibbleGroup, of_steps, transpose_eighths, transpose_quarters, widened};
use super::{Avx512Bw, EDGE, Engine, Job, Line, LinePlace, Order, STEP, Tile, Weights};
use crate::codec::STRIP;

/// Proof that this CPU has AVX-512F, BW, VL and BF16. The only way to get one is [`Avx512Bf16::detect`].
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx512Bf16(Avx512Bw);

impl Deref for Avx512Bf16 {
    type Target = Avx512Bw;

    fn deref(&self) -> &Avx512Bw {
        &self.0
    }
}

impl Avx512Bf16 {
    pub(in crate::cpu) fn detect() -> Option<Self> {
        let wide = Avx512Bw::detect()?;
        is_x86_feature_detected!("avx512bf16").then_some(Self(wide))
    }

    /// Rounds a row to BF16 and puts its columns in `order`; what `out` has beyond the row is zero. A row in another
    /// than the ascending order is whole spans.
    pub(super) fn narrow(self, row: &[f32], order: Order, out: &mut [Line]) {
        assert_eq!(out.len(), row.len().div_ceil(STEP));
        assert!(order == Order::Ascending || row.len().is_multiple_of(Order::SPAN));
        // SAFETY: `self` exists, so `detect` saw all features that `narrow` is compiled for.
        unsafe { narrow(row, out) }
        if order != Order::Ascending {
            // SAFETY: as above.
            unsafe { reorder(out, &order.columns()) }
        }
    }

    /// Rounds 32 values.
    #[inline]
    pub(super) fn narrow_line(self, values: &[f32; STEP], out: &mut Line) {
        // SAFETY: `self` exists, so `detect` saw all features that `narrow_line` is compiled for.
        unsafe { narrow_line(values, out) }
    }

    /// One line of a panel: two columns of sixteen rows, rounded.
    #[inline]
    pub(super) fn pair(self, first: &[f32; EDGE], second: &[f32; EDGE]) -> Line {
        // SAFETY: `self` exists, so `detect` saw all features that `pair` is compiled for.
        unsafe { pair(first, second) }
    }

    /// Codes of a group as BF16, each row as four lines in [`Order::Nibbles`]: line `step` of row `row` goes to
    /// `out[step * step_lines + row]`.
    pub(super) fn nibbles(self, codes: &NibbleGroup, out: &mut [Line], step_lines: usize) {
        assert!(out.len() >= 3 * step_lines + STRIP);
        // SAFETY: `self` exists, so `detect` saw all features that `nibbles` is compiled for.
        unsafe { nibbles(codes, out, step_lines) }
    }

    /// [`Self::nibbles`] for `i8_mma`, in [`Order::Bytes`].
    pub(super) fn bytes(self, codes: &ByteGroup, out: &mut [Line], step_lines: usize) {
        assert!(out.len() >= 3 * step_lines + STRIP);
        // SAFETY: `self` exists, so `detect` saw all features that `bytes` is compiled for.
        unsafe { bytes(codes, out, step_lines) }
    }

    /// `sum[f] += scales[f] * c[f]`; the scales are FP16, of eight features each.
    pub(super) fn add_scaled(self, sum: &mut Tile, c: &Tile, scales: [&[u8; 2 * STRIP]; 2]) {
        // SAFETY: `self` exists, so `detect` saw all features that `add_scaled` is compiled for.
        unsafe { add_scaled(sum, c, scales) }
    }
}

impl Engine for Avx512Bf16 {
    const READS_ROWS: bool = false;

    type Session = Self;

    fn vectors(self) -> Self {
        self
    }

    fn begin(self) -> Self {
        self
    }

    fn product(
        _proof: &Self,
        c: &mut [Tile],
        weights: &Weights<'_>,
        panels: &[&[Line]],
        job: Job,
        between: impl FnMut(usize),
    ) {
        let Job { tiles, steps, rows, is_fresh } = job;
        assert_eq!(c.len(), panels.len() * tiles);
        (0..steps).for_each(between);
        for (panel, c) in panels.iter().zip(c.chunks_exact_mut(tiles)) {
            assert!(panel.len() >= steps * EDGE);
            for (tile, c) in c.iter_mut().enumerate() {
                let source = Source::of(weights, tile, tiles, steps);
                if is_fresh {
                    *c = Tile::ZERO;
                }
                // SAFETY: the proof exists, so `detect` saw all features that these are compiled for; `source` and
                // the assertion above vouch for every address that they read.
                unsafe {
                    if rows <= EDGE / 2 {
                        eight_rows(c, source, panel, steps);
                    } else {
                        sixteen_rows(c, source, panel, steps);
                    }
                }
            }
        }
    }

    fn multiply_only(self, rounds: usize) -> usize {
        // SAFETY: `self` exists, so `detect` saw all features that `multiply_only` is compiled for.
        unsafe { multiply_only(rounds) }
    }
}

/// Where the lines of a feature tile lie: line of feature `f` and step `s` at `first + f * feature_bytes +
/// s * step_bytes`, all of them readable.
#[derive(Clone, Copy)]
pub(super) struct Source {
    pub(super) first: *const u8,
    pub(super) feature_bytes: usize,
    pub(super) step_bytes: usize,
}

impl Source {
    /// Feature tile `tile` of `tiles`, over `steps` steps.
    ///
    /// # Panics
    /// If any of its lines is not in `weights`.
    pub(super) fn of(weights: &Weights<'_>, tile: usize, tiles: usize, steps: usize) -> Self {
        const LINE_BYTES: usize = size_of::<Line>();
        match weights {
            Weights::Lines(lines) => {
                assert!(lines.len() >= steps * tiles * EDGE);
                let place = LinePlace::of(tile, tiles, steps);
                let first = lines[place.first..].as_ptr().cast();
                Self { first, feature_bytes: LINE_BYTES, step_bytes: place.step_lines * LINE_BYTES }
            }
            Weights::Rows { bytes, row_bytes } => {
                let last_row = (tile * EDGE + EDGE - 1) * row_bytes;
                assert!(steps > 0 && bytes.len() >= last_row + steps * LINE_BYTES);
                let first = bytes[tile * EDGE * row_bytes..].as_ptr();
                Self { first, feature_bytes: *row_bytes, step_bytes: LINE_BYTES }
            }
        }
    }

    /// Where a step begins.
    ///
    /// # Safety
    /// There is such a step.
    #[inline(always)]
    pub(super) unsafe fn at(self, step: usize) -> *const u8 {
        // SAFETY: the caller's promise: all lines of a step are readable, so they lie in one object.
        unsafe { self.first.add(step * self.step_bytes) }
    }
}

/// Adds the products of a feature tile with a panel to `c`.
///
/// # Safety
/// The CPU has the features; `weights` and `panel` have `steps` steps.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn sixteen_rows(c: &mut Tile, weights: Source, panel: &[Line], steps: usize) {
    // SAFETY: rows of a tile are sixteen f32; the callers' promise covers the lines. Four bytes at a time are read of
    // weights, at any alignment.
    unsafe {
        let mut sums = [_mm512_setzero_ps(); EDGE];
        for (sum, row) in sums.iter_mut().zip(&c.0) {
            *sum = _mm512_loadu_ps(row.as_ptr());
        }
        for step in 0..steps {
            let weights_step = weights.first.add(step * weights.step_bytes);
            for pair in 0..EDGE {
                let x = _mm512_loadu_si512(panel.as_ptr().add(step * EDGE + pair).cast());
                let x = std::mem::transmute::<__m512i, __m512bh>(x);
                for (feature, sum) in sums.iter_mut().enumerate() {
                    let weight = weights_step.add(feature * weights.feature_bytes + 4 * pair).cast::<i32>();
                    let weight = _mm512_set1_epi32(weight.read_unaligned());
                    *sum = _mm512_dpbf16_ps(*sum, std::mem::transmute::<__m512i, __m512bh>(weight), x);
                }
            }
        }
        for (sum, row) in sums.iter().zip(&mut c.0) {
            _mm512_storeu_ps(row.as_mut_ptr(), *sum);
        }
    }
}

/// [`sixteen_rows`] of which only the first eight matter, with the same bits in those.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn eight_rows(c: &mut Tile, weights: Source, panel: &[Line], steps: usize) {
    // SAFETY: as in `sixteen_rows`, and half of each row and line.
    unsafe {
        let mut sums = [_mm256_setzero_ps(); EDGE];
        for (sum, row) in sums.iter_mut().zip(&c.0) {
            *sum = _mm256_loadu_ps(row.as_ptr());
        }
        for step in 0..steps {
            let weights_step = weights.first.add(step * weights.step_bytes);
            for pair in 0..EDGE {
                let x = _mm256_loadu_si256(panel.as_ptr().add(step * EDGE + pair).cast());
                let x = std::mem::transmute::<__m256i, __m256bh>(x);
                for (feature, sum) in sums.iter_mut().enumerate() {
                    let weight = weights_step.add(feature * weights.feature_bytes + 4 * pair).cast::<i32>();
                    let weight = _mm256_set1_epi32(weight.read_unaligned());
                    *sum = _mm256_dpbf16_ps(*sum, std::mem::transmute::<__m256i, __m256bh>(weight), x);
                }
            }
        }
        for (sum, row) in sums.iter().zip(&mut c.0) {
            _mm256_storeu_ps(row.as_mut_ptr(), *sum);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn multiply_only(rounds: usize) -> usize {
    const SUMS: usize = 16;
    let one = _mm512_set1_epi32(std::hint::black_box(0x3f80_3f80));
    // SAFETY: both types are 64 bytes of anything.
    let factor = unsafe { std::mem::transmute::<__m512i, __m512bh>(one) };
    let mut sums = [_mm512_setzero_ps(); SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, factor, factor);
        }
    }
    let mut total = 0.0;
    for sum in sums {
        total += _mm512_reduce_add_ps(sum);
    }
    std::hint::black_box(total);
    // Each is sixteen pairs of a product and an addition.
    rounds * SUMS * EDGE * 2 * 2
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn narrow(row: &[f32], out: &mut [Line]) {
    let (whole, rest) = row.as_chunks::<STEP>();
    for (values, out) in whole.iter().zip(&mut *out) {
        narrow_line(values, out);
    }
    if !rest.is_empty() {
        let mut padded = [0.0; STEP];
        padded[..rest.len()].copy_from_slice(rest);
        narrow_line(&padded, &mut out[whole.len()]);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn narrow_line(values: &[f32; STEP], out: &mut Line) {
    // SAFETY: both halves of the values, and the line, are 64 bytes; vector types are 64 bytes of anything.
    unsafe {
        let (low, high) = (_mm512_loadu_ps(values.as_ptr()), _mm512_loadu_ps(values.as_ptr().add(EDGE)));
        let both = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
        _mm512_storeu_si512(out.0.as_mut_ptr().cast(), both);
    }
}

/// Puts ascending lines into another order, span by span.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn reorder(lines: &mut [Line], columns: &[u8; Order::SPAN]) {
    const LINES: usize = Order::SPAN / STEP;
    let (column_lines, _) = columns.as_chunks::<STEP>();
    // SAFETY: 32 columns are 32 bytes, a line is 64.
    unsafe {
        let mut places = [_mm512_setzero_si512(); LINES];
        for (place, columns) in places.iter_mut().zip(column_lines) {
            *place = _mm512_cvtepu8_epi16(_mm256_loadu_si256(columns.as_ptr().cast()));
        }
        for span in lines.as_chunks_mut::<LINES>().0 {
            let mut ascending = [_mm512_setzero_si512(); LINES];
            for (value, line) in ascending.iter_mut().zip(&*span) {
                *value = _mm512_loadu_si512(line.0.as_ptr().cast());
            }
            for (line, place) in span.iter_mut().zip(places) {
                // The look-up uses the lowest six bits of a place: which of 64 columns, in either half.
                let low = _mm512_permutex2var_epi16(ascending[0], place, ascending[1]);
                let high = _mm512_permutex2var_epi16(ascending[2], place, ascending[3]);
                let is_high = _mm512_cmpgt_epi16_mask(place, _mm512_set1_epi16(63));
                _mm512_storeu_si512(line.0.as_mut_ptr().cast(), _mm512_mask_blend_epi16(is_high, low, high));
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn pair(first: &[f32; EDGE], second: &[f32; EDGE]) -> Line {
    // SAFETY: sixteen f32 are 64 bytes, as is a line; vector types of one size are bytes of anything.
    unsafe {
        let first = _mm512_cvtneps_pbh(_mm512_loadu_ps(first.as_ptr()));
        let second = _mm512_cvtneps_pbh(_mm512_loadu_ps(second.as_ptr()));
        let first = _mm512_cvtepu16_epi32(std::mem::transmute::<__m256bh, __m256i>(first));
        let second = _mm512_cvtepu16_epi32(std::mem::transmute::<__m256bh, __m256i>(second));
        let both = _mm512_or_si512(first, _mm512_slli_epi32::<16>(second));
        let mut line = Line::ZERO;
        _mm512_storeu_si512(line.0.as_mut_ptr().cast(), both);
        line
    }
}

/// BF16 of the integers that four bits can be, by their bits; twice, for a look-up uses five bits.
const NIBBLES: [u16; STEP] = {
    let mut table = [0; STEP];
    let mut code = 0;
    while code < STEP {
        let value = ((code as i32 & 15) ^ 8) - 8;
        table[code] = ((value as f32).to_bits() >> 16) as u16;
        code += 1;
    }
    table
};

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn nibbles(codes: &NibbleGroup, out: &mut [Line], step_lines: usize) {
    let (tiles, _) = codes.as_chunks::<64>();
    let mut vectors = [_mm512_setzero_si512(); 8];
    for (vector, tile) in vectors.iter_mut().zip(tiles) {
        // SAFETY: a tile is 64 bytes.
        *vector = unsafe { _mm512_loadu_si512(tile.as_ptr().cast()) };
    }
    // Each tile has eight bytes of each of eight rows; afterwards a vector is a row.
    let rows = transpose_eighths(vectors);
    // SAFETY: the table is 64 bytes.
    let table = unsafe { _mm512_loadu_si512(NIBBLES.as_ptr().cast()) };
    let out: [_; 4] = of_steps(out, step_lines);
    for (row, codes) in rows.into_iter().enumerate() {
        // Five bits of each word are looked up; the fifth is the next nibble's and changes nothing.
        let lines = [
            _mm512_permutexvar_epi16(codes, table),
            _mm512_permutexvar_epi16(_mm512_srli_epi16::<4>(codes), table),
            _mm512_permutexvar_epi16(_mm512_srli_epi16::<8>(codes), table),
            _mm512_permutexvar_epi16(_mm512_srli_epi16::<12>(codes), table),
        ];
        for (step, line) in lines.into_iter().enumerate() {
            // SAFETY: a line is 64 bytes.
            unsafe { _mm512_storeu_si512(out[step][row].0.as_mut_ptr().cast(), line) }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn bytes(codes: &ByteGroup, out: &mut [Line], step_lines: usize) {
    let (quarter_tiles, _) = codes.as_chunks::<64>();
    let out: [_; 4] = of_steps(out, step_lines);
    for half in 0..2 {
        // Four tiles, 64 columns, each with sixteen bytes of rows 0 to 3, then of rows 4 to 7.
        for four_rows in 0..2 {
            let mut vectors = [_mm512_setzero_si512(); 4];
            for (tile, vector) in vectors.iter_mut().enumerate() {
                let bytes = &quarter_tiles[(4 * half + tile) * 2 + four_rows];
                // SAFETY: these are 64 bytes.
                *vector = unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) };
            }
            for (row, codes) in transpose_quarters(vectors).into_iter().enumerate() {
                let [first, second, third, fourth] = [
                    float_of_byte(_mm512_slli_epi32::<24>(codes)),
                    float_of_byte(_mm512_slli_epi32::<16>(codes)),
                    float_of_byte(_mm512_slli_epi32::<8>(codes)),
                    float_of_byte(codes),
                ];
                let row = 4 * four_rows + row;
                for (step, line) in [halves_joined(first, second), halves_joined(third, fourth)].into_iter().enumerate()
                {
                    // SAFETY: a line is 64 bytes.
                    unsafe {
                        _mm512_storeu_si512(out[2 * half + step][row].0.as_mut_ptr().cast(), line);
                    }
                }
            }
        }
    }
}

/// The topmost byte of each lane, with its sign, as f32 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn float_of_byte(codes: __m512i) -> __m512i {
    _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(codes)))
}

/// f32 that are exact BF16, from two vectors, side by side: `first` in the low halves.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn halves_joined(first: __m512i, second: __m512i) -> __m512i {
    let low = _mm512_srli_epi32::<16>(first);
    // low | (second & mask)
    _mm512_ternarylogic_epi32::<0xf8>(low, second, _mm512_set1_epi32(0xffff_0000u32 as i32))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn add_scaled(sum: &mut Tile, c: &Tile, scales: [&[u8; 2 * STRIP]; 2]) {
    let factors = widened(scales);
    // SAFETY: rows of tiles are sixteen f32.
    unsafe {
        for ((sum, c), factor) in sum.0.iter_mut().zip(&c.0).zip(factors) {
            let old = _mm512_loadu_ps(sum.as_ptr());
            let new = _mm512_fmadd_ps(_mm512_set1_ps(factor), _mm512_loadu_ps(c.as_ptr()), old);
            _mm512_storeu_ps(sum.as_mut_ptr(), new);
        }
    }
}
