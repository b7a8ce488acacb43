//! AVX-512 VNNI: products of codes by dot products of fours, scaled and added while they are in registers.
//!
//! The instruction multiplies unsigned bytes with signed ones. So weights come with an offset that leaves none below zero
//! ([`CodeBytes::Unsigned`]), and a sum starts at minus the offset times the codes of its row, which takes it away again.
//! Nothing overflows: over 128 columns the products of 255 with 127 come to less than 2^22, and what is taken away to less
//! than 2^21.

use std::arch::is_x86_feature_detected;
use std::arch::x86_64::*;

use super::avx512::Source;
use super::wide::CodeBytes;
use super::{Avx512Bw, CODE_STEPS, CodeEngine, Codes, Dots, EDGE, Line, RowCodes, Tile, Weights};

/// Proof that this CPU has AVX-512 VNNI, and all of [`Avx512Bw`]. The only way to get one is [`Avx512Vnni::detect`].
#[derive(Clone, Copy)]
pub(super) struct Avx512Vnni(Avx512Bw);

impl Avx512Vnni {
    pub(super) fn detect() -> Option<Self> {
        let wide = Avx512Bw::detect()?;
        is_x86_feature_detected!("avx512vnni").then_some(Self(wide))
    }
}

/// Features whose sums with two panels are in registers together.
const TOGETHER: usize = EDGE / 2;

impl CodeEngine for Avx512Vnni {
    const FORM: CodeBytes = CodeBytes::Unsigned;

    type Session = Self;

    fn wide(self) -> Avx512Bw {
        self.0
    }

    fn begin_codes(self) -> Self {
        self
    }

    fn add_group(
        _proof: &Self,
        sums: &mut [Tile],
        weights: &Codes<'_>,
        rows: &[RowCodes<'_>],
        _dots: &mut [Dots],
        between: impl FnMut(usize),
    ) {
        (0..CODE_STEPS).for_each(between);
        let tiles = weights.scales.len();
        assert!(sums.len() == rows.len() * tiles && rows.iter().all(|rows| rows.lines.len() == CODE_STEPS * EDGE));
        let lines = Weights::Lines(weights.lines);
        for (tile, scales) in weights.scales.iter().enumerate() {
            let source = Source::of(&lines, tile, tiles, CODE_STEPS);
            // SAFETY: the proof exists, so `detect` saw all features that these are compiled for; `source` vouches for
            // the lines of sixteen features, and panels were checked above.
            unsafe {
                match rows {
                    [rows] => add_codes([rows], [&mut sums[tile].0], source, weights.offset, scales),
                    [first, second] => {
                        let (of_first, of_second) = sums.split_at_mut(tiles);
                        let of_first = of_first[tile].0.as_chunks_mut::<TOGETHER>().0.iter_mut();
                        let of_second = of_second[tile].0.as_chunks_mut::<TOGETHER>().0.iter_mut();
                        let scales = scales.as_chunks::<TOGETHER>().0;
                        for (half, ((a, b), scales)) in of_first.zip(of_second).zip(scales).enumerate() {
                            let first_line = source.first.add(half * TOGETHER * source.feature_bytes);
                            let source = Source { first: first_line, ..source };
                            add_codes([first, second], [a, b], source, weights.offset, scales);
                        }
                    }
                    _ => unreachable!("there are one or two panels"),
                }
            }
        }
    }
}

/// `sums[panel][f][r] += float(product of row r with feature f) * (row scale * scales[f])`.
///
/// # Safety
/// The CPU has the features; `weights` has `FEATURES` features of [`CODE_STEPS`] lines, and so many panels have rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn add_codes<const PANELS: usize, const FEATURES: usize>(
    rows: [&RowCodes<'_>; PANELS],
    sums: [&mut [[f32; EDGE]; FEATURES]; PANELS],
    weights: Source,
    offset: i32,
    scales: &[f32; FEATURES],
) {
    // SAFETY: lines, rows of sums, and scales are 64 bytes; the callers' promise covers addresses. Four bytes at a time
    // are read of weights, at any alignment.
    unsafe {
        let mut dots = [[_mm512_setzero_si512(); FEATURES]; PANELS];
        for (dots, rows) in dots.iter_mut().zip(rows) {
            *dots = [without_offset(rows.lines, offset); FEATURES];
        }
        for step in 0..CODE_STEPS {
            let weights_step = weights.first.add(step * weights.step_bytes);
            for four in 0..EDGE {
                let mut x = [_mm512_setzero_si512(); PANELS];
                for (x, rows) in x.iter_mut().zip(rows) {
                    *x = _mm512_loadu_si512(rows.lines.as_ptr().add(step * EDGE + four).cast());
                }
                for feature in 0..FEATURES {
                    let weight = weights_step.add(feature * weights.feature_bytes + 4 * four).cast::<i32>();
                    let weight = _mm512_set1_epi32(weight.read_unaligned());
                    for (dots, x) in dots.iter_mut().zip(x) {
                        dots[feature] = _mm512_dpbusd_epi32(dots[feature], weight, x);
                    }
                }
            }
        }
        for ((dots, rows), sums) in dots.iter().zip(rows).zip(sums) {
            let row_scales = _mm512_loadu_ps(rows.scales.as_ptr());
            for ((dots, sum), scale) in dots.iter().zip(sums).zip(scales) {
                let factor = _mm512_mul_ps(row_scales, _mm512_set1_ps(*scale));
                let scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(*dots), factor);
                _mm512_storeu_ps(sum.as_mut_ptr(), _mm512_add_ps(_mm512_loadu_ps(sum.as_ptr()), scaled));
            }
        }
    }
}

/// Minus the offset times the sum of each row's codes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn without_offset(lines: &[Line], offset: i32) -> __m512i {
    let ones = _mm512_set1_epi8(1);
    let mut sums = [_mm512_setzero_si512(); 2];
    for lines in lines.as_chunks::<2>().0 {
        for (sum, line) in sums.iter_mut().zip(lines) {
            // SAFETY: a line is 64 bytes.
            let codes = unsafe { _mm512_loadu_si512(line.0.as_ptr().cast()) };
            *sum = _mm512_dpbusd_epi32(*sum, ones, codes);
        }
    }
    _mm512_mullo_epi32(_mm512_add_epi32(sums[0], sums[1]), _mm512_set1_epi32(-offset))
}
