//! Lanes as AVX-512 registers, and as pairs of AVX2 registers.
//!
//! All the unsafe of the CPU backend is here: calls of intrinsics, allowed by the proof that `self` is, and unaligned
//! loads and stores through references to arrays of exactly the size of the access.

use std::arch::is_x86_feature_detected;
use std::arch::x86_64::*;

use super::{LANES, Lanes, PAIRS, Tile};
use crate::codec::{E2M1, STRIP};
use crate::cpu::isa::Kernel;
use crate::cpu::products::Step;

/// Proof that this CPU has AVX-512F. The only way to get one is [`Avx512::detect`].
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx512(());

/// Proof that this CPU has AVX2, FMA and F16C. The only way to get one is [`Avx2::detect`].
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx2(());

impl Avx512 {
    pub(in crate::cpu) fn detect() -> Option<Self> {
        is_x86_feature_detected!("avx512f").then_some(Self(()))
    }

    /// Runs `kernel`, compiled with AVX-512F.
    pub(in crate::cpu) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx512f")]
        fn enabled<K: Kernel>(proof: Avx512, kernel: K) -> K::Output {
            kernel.run(proof)
        }
        // SAFETY: `self` exists, so `detect` saw AVX-512F on this CPU.
        unsafe { enabled(self, kernel) }
    }
}

impl Avx2 {
    pub(in crate::cpu) fn detect() -> Option<Self> {
        let present =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        present.then_some(Self(()))
    }

    /// Runs `kernel`, compiled with AVX2, FMA and F16C.
    pub(in crate::cpu) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn enabled<K: Kernel>(proof: Avx2, kernel: K) -> K::Output {
            kernel.run(proof)
        }
        // SAFETY: `self` exists, so `detect` saw AVX2, FMA and F16C on this CPU.
        unsafe { enabled(self, kernel) }
    }
}

/// Evaluates intrinsics. Only for methods of [`Avx512`] and [`Avx2`], and only for intrinsics of their features.
macro_rules! proven {
    ($($body:tt)*) => {
        // SAFETY: the method this stands in has a `self`, which proves that the CPU has the features of the intrinsics.
        // Those that take a pointer get it from a reference to an array of exactly the bytes they access, and need no
        // alignment.
        unsafe { $($body)* }
    };
}

impl Lanes for Avx512 {
    type Vector = __m512;

    const TILE: Tile = Tile::Wide;

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        proven!(_mm512_set1_ps(value))
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> __m512 {
        proven!(_mm512_loadu_ps(values.as_ptr()))
    }

    #[inline(always)]
    fn store(self, vector: __m512, out: &mut [f32; LANES]) {
        proven!(_mm512_storeu_ps(out.as_mut_ptr(), vector))
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        proven!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_min_ps(a, b))
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        proven!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    }

    #[inline(always)]
    fn scale_by_power(self, a: __m512, exponent: __m512) -> __m512 {
        proven!(_mm512_scalef_ps(a, exponent))
    }

    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        proven! {
            let low = _mm512_castps512_ps256(a);
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(a)));
            sum_of_eight(_mm256_add_ps(low, high))
        }
    }

    #[inline(always)]
    fn sum_each(self, a: [__m512; 8]) -> [f32; 8] {
        proven! {
            let mut eights = [_mm256_setzero_ps(); 8];
            for (eight, a) in eights.iter_mut().zip(a) {
                let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(a)));
                *eight = _mm256_add_ps(_mm512_castps512_ps256(a), high);
            }
            sums_of_eights(eights)
        }
    }

    #[inline(always)]
    fn dots(self, x: &[[i32; STRIP]; PAIRS], weights: &[[i32; PAIRS]; STRIP]) -> [[i32; STRIP]; STRIP] {
        proven!(dots_of_pairs(x, weights))
    }

    #[inline(always)]
    fn bf16(self, bytes: &[u8; 2 * LANES]) -> __m512 {
        proven! {
            let halves = _mm256_loadu_si256(bytes.as_ptr().cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
        }
    }

    #[inline(always)]
    fn f16(self, bytes: &[u8; 2 * LANES]) -> __m512 {
        proven!(_mm512_cvtph_ps(_mm256_loadu_si256(bytes.as_ptr().cast())))
    }

    #[inline(always)]
    fn i8(self, bytes: u128) -> __m512 {
        proven! {
            let bytes = _mm_set_epi64x((bytes >> 64) as i64, bytes as i64);
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
        }
    }

    #[inline(always)]
    fn i8_of_tile(self, bytes: u128) -> __m512 {
        proven!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(tile_row_in_order(bytes))))
    }

    #[inline(always)]
    fn i4(self, nibbles: u64) -> __m512 {
        proven! {
            // Each nibble to the top of its lane, and back with its sign.
            let shifts = _mm512_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
            let top = _mm512_sllv_epi32(halves_to_lanes(nibbles), shifts);
            _mm512_cvtepi32_ps(_mm512_srai_epi32::<28>(top))
        }
    }

    #[inline(always)]
    fn i4_of_tile(self, nibbles: u64) -> __m512 {
        proven! {
            // By `PLACE_IN_TILE_ROW`, columns 0 to 3 and 8 to 11 are in the low half, the others in the high half.
            let low = _mm512_set1_epi32(nibbles as i32);
            let halves = _mm512_mask_set1_epi32(low, 0xf0f0, (nibbles >> 32) as i32);
            let shifts = _mm512_setr_epi32(28, 24, 12, 8, 28, 24, 12, 8, 20, 16, 4, 0, 20, 16, 4, 0);
            _mm512_cvtepi32_ps(_mm512_srai_epi32::<28>(_mm512_sllv_epi32(halves, shifts)))
        }
    }

    #[inline(always)]
    fn e2m1(self, nibbles: u64) -> __m512 {
        proven! {
            let shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
            // The table look-up uses the lowest four bits of a lane.
            let codes = _mm512_srlv_epi32(halves_to_lanes(nibbles), shifts);
            _mm512_permutexvar_ps(codes, _mm512_loadu_ps(E2M1.as_ptr()))
        }
    }

    #[inline(always)]
    fn max_magnitude(self, max: __m512, a: __m512) -> __m512 {
        proven! {
            // Magnitudes are ordered as their bits are.
            let magnitude = _mm512_and_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(i32::MAX));
            _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(max), magnitude))
        }
    }

    #[inline(always)]
    fn largest(self, max: __m512) -> f32 {
        proven! {
            let low = _mm512_castps512_ps256(max);
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(max)));
            largest_of_eight(_mm256_max_epi32(_mm256_castps_si256(low), _mm256_castps_si256(high)))
        }
    }

    #[inline(always)]
    fn to_i8(self, a: __m512) -> u128 {
        proven!(bits_of(_mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a))))
    }

    #[inline(always)]
    fn to_i4(self, a: __m512) -> u64 {
        proven!(packed_nibbles(_mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a))))
    }

    #[inline(always)]
    fn to_i8_of_tile(self, a: __m512) -> u128 {
        proven!(bits_of(tile_row_of_columns(_mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)))))
    }

    #[inline(always)]
    fn to_i4_of_tile(self, a: __m512) -> u64 {
        proven!(packed_nibbles(tile_row_of_columns(_mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)))))
    }

    #[inline(always)]
    fn to_e2m1(self, a: __m512) -> u64 {
        proven! {
            let bits = _mm512_castps_si512(a);
            let magnitude = _mm512_castsi512_ps(_mm512_and_epi32(bits, _mm512_set1_epi32(i32::MAX)));
            let magnitude = _mm512_min_ps(magnitude, _mm512_set1_ps(E2M1_MAX));
            // Below one, codes count halves, and so do the lowest bits of an f32 from 2^22 up.
            let halves = _mm512_castps_si512(_mm512_add_ps(magnitude, _mm512_set1_ps(HALVES)));
            let below_one = _mm512_sub_epi32(halves, _mm512_set1_epi32(HALVES.to_bits() as i32));
            // From one on, a code is the exponent and the first bit of the mantissa, rounded like any f32.
            let bits_of_magnitude = _mm512_castps_si512(magnitude);
            let odd = _mm512_and_epi32(_mm512_srli_epi32::<22>(bits_of_magnitude), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(_mm512_add_epi32(bits_of_magnitude, _mm512_set1_epi32(0x1f_ffff)), odd);
            let from_one = _mm512_sub_epi32(_mm512_srli_epi32::<22>(rounded), _mm512_set1_epi32(126 << 1));
            let is_below_one = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(magnitude, _mm512_set1_ps(1.0));
            let code = _mm512_mask_blend_epi32(is_below_one, from_one, below_one);
            let sign = _mm512_and_epi32(_mm512_srli_epi32::<28>(bits), _mm512_set1_epi32(8));
            packed_nibbles(_mm512_cvtepi32_epi8(_mm512_or_epi32(code, sign)))
        }
    }
}

/// The largest E2M1 value.
const E2M1_MAX: f32 = 6.0;

/// 2^22: f32 from here to twice this are multiples of one half.
const HALVES: f32 = (1 << 22) as f32;

/// The low half of `nibbles` in lanes 0 to 7, the high half in lanes 8 to 15.
#[inline]
#[target_feature(enable = "avx512f")]
fn halves_to_lanes(nibbles: u64) -> __m512i {
    let low = _mm512_set1_epi32(nibbles as i32);
    _mm512_mask_set1_epi32(low, 0xff00, (nibbles >> 32) as i32)
}

/// The bytes of a row of an `mma` tile in column order, by `PLACE_IN_TILE_ROW`.
#[inline]
#[target_feature(enable = "avx2")]
fn tile_row_in_order(bytes: u128) -> __m128i {
    let stored = _mm_set_epi64x((bytes >> 64) as i64, bytes as i64);
    _mm_shuffle_epi8(stored, _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15))
}

/// Bytes in column order as a row of an `mma` tile: undoes [`tile_row_in_order`].
#[inline]
#[target_feature(enable = "avx2")]
fn tile_row_of_columns(bytes: __m128i) -> __m128i {
    _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15))
}

#[inline]
#[target_feature(enable = "avx2")]
fn bits_of(bytes: __m128i) -> u128 {
    u128::from(_mm_extract_epi64::<1>(bytes) as u64) << 64 | u128::from(_mm_cvtsi128_si64(bytes) as u64)
}

/// The low halves of sixteen bytes, lowest first.
#[inline]
#[target_feature(enable = "avx2")]
fn packed_nibbles(bytes: __m128i) -> u64 {
    let low_halves = _mm_and_si128(bytes, _mm_set1_epi8(15));
    // Each pair to `first + 16 * second`, in sixteen bits.
    let pairs = _mm_maddubs_epi16(low_halves, _mm_set1_epi16(0x1001));
    _mm_cvtsi128_si64(_mm_packus_epi16(pairs, pairs)) as u64
}

/// The largest lane of non-negative f32, compared as bits.
#[inline]
#[target_feature(enable = "avx2")]
fn largest_of_eight(a: __m256i) -> f32 {
    let four = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
    let two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
    let one = _mm_max_epi32(two, _mm_shuffle_epi32::<1>(two));
    f32::from_bits(_mm_cvtsi128_si32(one) as u32)
}

/// Adds lanes four apart, then two, then one.
#[inline]
#[target_feature(enable = "avx2")]
fn sum_of_eight(a: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

/// [`sum_of_eight`] of each.
#[inline]
#[target_feature(enable = "avx2")]
fn sums_of_eights(v: [__m256; 8]) -> [f32; 8] {
    // Four sums of vector i, then four of vector i + 4; of these, two of vectors i, i + 2, i + 4 and i + 6; then all.
    let mut fours = [_mm256_setzero_ps(); 4];
    for (i, four) in fours.iter_mut().enumerate() {
        let low = _mm256_permute2f128_ps::<0x20>(v[i], v[i + 4]);
        *four = _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(v[i], v[i + 4]));
    }
    let mut twos = [_mm256_setzero_ps(); 2];
    for (i, two) in twos.iter_mut().enumerate() {
        let (a, b) = (_mm256_castps_pd(fours[2 * i]), _mm256_castps_pd(fours[2 * i + 1]));
        let low = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
        *two = _mm256_add_ps(low, _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
    }
    let even = _mm256_shuffle_ps::<0b10_00_10_00>(twos[0], twos[1]);
    let all = _mm256_add_ps(even, _mm256_shuffle_ps::<0b11_01_11_01>(twos[0], twos[1]));
    let mut out = [0.0; 8];
    // SAFETY: eight f32 are 32 bytes.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), all) }
    out
}

impl Lanes for Avx2 {
    /// Lanes 0 to 7 and 8 to 15.
    type Vector = [__m256; 2];

    const TILE: Tile = Tile::Narrow;

    #[inline(always)]
    fn splat(self, value: f32) -> [__m256; 2] {
        proven!([_mm256_set1_ps(value); 2])
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> [__m256; 2] {
        let [low, high] = halves::<_, _, 8>(values);
        proven!([_mm256_loadu_ps(low.as_ptr()), _mm256_loadu_ps(high.as_ptr())])
    }

    #[inline(always)]
    fn store(self, vector: [__m256; 2], out: &mut [f32; LANES]) {
        let (low, high) = out.split_at_mut(8);
        proven! {
            _mm256_storeu_ps(low.as_mut_ptr(), vector[0]);
            _mm256_storeu_ps(high.as_mut_ptr(), vector[1]);
        }
    }

    #[inline(always)]
    fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        proven!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        proven!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn div(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        proven!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn mul_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        proven!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }

    #[inline(always)]
    fn max(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        proven!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn min(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        proven!([_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn round(self, a: [__m256; 2]) -> [__m256; 2] {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        proven!([_mm256_round_ps::<NEAREST>(a[0]), _mm256_round_ps::<NEAREST>(a[1])])
    }

    #[inline(always)]
    fn scale_by_power(self, a: [__m256; 2], exponent: [__m256; 2]) -> [__m256; 2] {
        proven!([scale_eight_by_power(a[0], exponent[0]), scale_eight_by_power(a[1], exponent[1])])
    }

    #[inline(always)]
    fn sum(self, a: [__m256; 2]) -> f32 {
        proven!(sum_of_eight(_mm256_add_ps(a[0], a[1])))
    }

    #[inline(always)]
    fn sum_each(self, a: [[__m256; 2]; 8]) -> [f32; 8] {
        proven! {
            let mut eights = [_mm256_setzero_ps(); 8];
            for (eight, a) in eights.iter_mut().zip(a) {
                *eight = _mm256_add_ps(a[0], a[1]);
            }
            sums_of_eights(eights)
        }
    }

    #[inline(always)]
    fn add_products<const R: usize, const N: usize>(
        self,
        all: &mut [[[__m256; 2]; STRIP]; STRIP],
        x: (&[Step], usize),
        weights: (&[Step], usize),
    ) {
        for half in 0..2 {
            proven! { add_products_of_eights::<R, N>(all, half, x, weights) }
        }
    }

    #[inline(always)]
    fn dots(self, x: &[[i32; STRIP]; PAIRS], weights: &[[i32; PAIRS]; STRIP]) -> [[i32; STRIP]; STRIP] {
        proven!(dots_of_pairs(x, weights))
    }

    #[inline(always)]
    fn bf16(self, bytes: &[u8; 2 * LANES]) -> [__m256; 2] {
        let [low, high] = halves::<_, _, LANES>(bytes);
        proven!([eight_bf16(low), eight_bf16(high)])
    }

    #[inline(always)]
    fn f16(self, bytes: &[u8; 2 * LANES]) -> [__m256; 2] {
        let [low, high] = halves::<_, _, LANES>(bytes);
        proven! {
            let (low, high) = (_mm_loadu_si128(low.as_ptr().cast()), _mm_loadu_si128(high.as_ptr().cast()));
            [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)]
        }
    }

    #[inline(always)]
    fn i8(self, bytes: u128) -> [__m256; 2] {
        proven!([eight_i8(bytes as i64), eight_i8((bytes >> 64) as i64)])
    }

    #[inline(always)]
    fn i8_of_tile(self, bytes: u128) -> [__m256; 2] {
        proven! {
            let ordered = tile_row_in_order(bytes);
            let high = _mm_unpackhi_epi64(ordered, ordered);
            [_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(ordered)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high))]
        }
    }

    #[inline(always)]
    fn i4_of_tile(self, nibbles: u64) -> [__m256; 2] {
        proven! {
            // By `PLACE_IN_TILE_ROW`, columns 0 to 3 and 8 to 11 are in the low half, the others in the high half.
            let (low, high) = (_mm_set1_epi32(nibbles as i32), _mm_set1_epi32((nibbles >> 32) as i32));
            let halves = _mm256_set_m128i(high, low);
            let first = _mm256_sllv_epi32(halves, _mm256_setr_epi32(28, 24, 12, 8, 28, 24, 12, 8));
            let second = _mm256_sllv_epi32(halves, _mm256_setr_epi32(20, 16, 4, 0, 20, 16, 4, 0));
            [
                _mm256_cvtepi32_ps(_mm256_srai_epi32::<28>(first)),
                _mm256_cvtepi32_ps(_mm256_srai_epi32::<28>(second)),
            ]
        }
    }

    #[inline(always)]
    fn i4(self, nibbles: u64) -> [__m256; 2] {
        proven!([eight_i4(nibbles as i32), eight_i4((nibbles >> 32) as i32)])
    }

    #[inline(always)]
    fn e2m1(self, nibbles: u64) -> [__m256; 2] {
        proven!([eight_e2m1(nibbles as i32), eight_e2m1((nibbles >> 32) as i32)])
    }

    #[inline(always)]
    fn max_magnitude(self, max: [__m256; 2], a: [__m256; 2]) -> [__m256; 2] {
        proven!([max_magnitude_of_eight(max[0], a[0]), max_magnitude_of_eight(max[1], a[1])])
    }

    #[inline(always)]
    fn largest(self, max: [__m256; 2]) -> f32 {
        proven!(largest_of_eight(_mm256_max_epi32(_mm256_castps_si256(max[0]), _mm256_castps_si256(max[1]))))
    }

    #[inline(always)]
    fn to_i8(self, a: [__m256; 2]) -> u128 {
        proven!(bits_of(bytes_of_lanes([_mm256_cvtps_epi32(a[0]), _mm256_cvtps_epi32(a[1])])))
    }

    #[inline(always)]
    fn to_i4(self, a: [__m256; 2]) -> u64 {
        proven!(packed_nibbles(bytes_of_lanes([_mm256_cvtps_epi32(a[0]), _mm256_cvtps_epi32(a[1])])))
    }

    #[inline(always)]
    fn to_i8_of_tile(self, a: [__m256; 2]) -> u128 {
        proven! {
            let bytes = bytes_of_lanes([_mm256_cvtps_epi32(a[0]), _mm256_cvtps_epi32(a[1])]);
            bits_of(tile_row_of_columns(bytes))
        }
    }

    #[inline(always)]
    fn to_i4_of_tile(self, a: [__m256; 2]) -> u64 {
        proven! {
            let bytes = bytes_of_lanes([_mm256_cvtps_epi32(a[0]), _mm256_cvtps_epi32(a[1])]);
            packed_nibbles(tile_row_of_columns(bytes))
        }
    }

    #[inline(always)]
    fn to_e2m1(self, a: [__m256; 2]) -> u64 {
        proven!(packed_nibbles(bytes_of_lanes([eight_e2m1_codes(a[0]), eight_e2m1_codes(a[1])])))
    }
}

/// [`Lanes::add_products`] in one half of the lanes: twelve sums, three factors and an `x` are all registers. (With sums of
/// both halves handed over as an array of their own, compilers kept one in memory.)
#[inline]
#[target_feature(enable = "avx2,fma")]
fn add_products_of_eights<const R: usize, const N: usize>(
    all: &mut [[[__m256; 2]; STRIP]; STRIP],
    half: usize,
    (x, row): (&[Step], usize),
    (weights, feature): (&[Step], usize),
) {
    assert!(row + R <= STRIP && feature + N <= STRIP && half < 2);
    let mut sums = [[_mm256_setzero_ps(); N]; R];
    for (r, sums) in sums.iter_mut().enumerate() {
        for (n, sum) in sums.iter_mut().enumerate() {
            *sum = all[row + r][feature + n][half];
        }
    }
    for (x, weights) in x.iter().zip(weights) {
        let mut factors = [_mm256_setzero_ps(); N];
        for (n, factor) in factors.iter_mut().enumerate() {
            *factor = eight_of(weights, feature + n, half);
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            let x = eight_of(x, row + r, half);
            for (sum, factor) in sums.iter_mut().zip(factors) {
                *sum = _mm256_fmadd_ps(x, factor, *sum);
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (n, sum) in sums.iter().enumerate() {
            all[row + r][feature + n][half] = *sum;
        }
    }
}

/// Half of sixteen columns of a row.
#[inline]
#[target_feature(enable = "avx2")]
fn eight_of(step: &Step, row: usize, half: usize) -> __m256 {
    let values: &[f32; 8] = &step.0[row].as_chunks().0[half];
    // SAFETY: eight f32 are what is loaded, from wherever they lie.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn max_magnitude_of_eight(max: __m256, a: __m256) -> __m256 {
    // Magnitudes are ordered as their bits are.
    let magnitude = _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(i32::MAX));
    _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(max), magnitude))
}

/// Sixteen integers of -128 to 127 as bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn bytes_of_lanes(lanes: [__m256i; 2]) -> __m128i {
    // Packing works within halves of a register, so the middle quarters have to change places.
    let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(lanes[0], lanes[1]));
    _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words))
}

/// [`Lanes::to_e2m1`] of eight lanes, a code a lane, in the same steps as the AVX-512 one.
#[inline]
#[target_feature(enable = "avx2")]
fn eight_e2m1_codes(a: __m256) -> __m256i {
    let bits = _mm256_castps_si256(a);
    let magnitude = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(i32::MAX)));
    let magnitude = _mm256_min_ps(magnitude, _mm256_set1_ps(E2M1_MAX));
    let halves = _mm256_castps_si256(_mm256_add_ps(magnitude, _mm256_set1_ps(HALVES)));
    let below_one = _mm256_sub_epi32(halves, _mm256_set1_epi32(HALVES.to_bits() as i32));
    let bits_of_magnitude = _mm256_castps_si256(magnitude);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<22>(bits_of_magnitude), _mm256_set1_epi32(1));
    let rounded = _mm256_add_epi32(_mm256_add_epi32(bits_of_magnitude, _mm256_set1_epi32(0x1f_ffff)), odd);
    let from_one = _mm256_sub_epi32(_mm256_srli_epi32::<22>(rounded), _mm256_set1_epi32(126 << 1));
    let is_below_one = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_LT_OQ>(magnitude, _mm256_set1_ps(1.0)));
    let code = _mm256_blendv_epi8(from_one, below_one, is_below_one);
    let sign = _mm256_and_si256(_mm256_srli_epi32::<28>(bits), _mm256_set1_epi32(8));
    _mm256_or_si256(code, sign)
}

#[inline]
#[target_feature(enable = "avx2")]
fn eight_bf16(bytes: &[u8; 16]) -> __m256 {
    // SAFETY: the pointer comes from a reference to the sixteen bytes that are read; no alignment is needed.
    let halves = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn eight_i8(bytes: i64) -> __m256 {
    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn eight_i4(nibbles: i32) -> __m256 {
    // Each nibble to the top of its lane, and back with its sign.
    let top = _mm256_sllv_epi32(_mm256_set1_epi32(nibbles), _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0));
    _mm256_cvtepi32_ps(_mm256_srai_epi32::<28>(top))
}

#[inline]
#[target_feature(enable = "avx2")]
fn eight_e2m1(nibbles: i32) -> __m256 {
    let magnitudes = _mm256_setr_ps(E2M1[0], E2M1[1], E2M1[2], E2M1[3], E2M1[4], E2M1[5], E2M1[6], E2M1[7]);
    // The table look-up uses the lowest three bits of a lane; the fourth becomes the sign.
    let codes = _mm256_srlv_epi32(_mm256_set1_epi32(nibbles), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    let sign = _mm256_slli_epi32::<31>(_mm256_srli_epi32::<3>(codes));
    _mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, codes), _mm256_castsi256_ps(sign))
}

/// [`Lanes::dots`]
#[inline]
#[target_feature(enable = "avx2")]
fn dots_of_pairs(x: &[[i32; STRIP]; PAIRS], weights: &[[i32; PAIRS]; STRIP]) -> [[i32; STRIP]; STRIP] {
    let mut sums = [_mm256_setzero_si256(); STRIP];
    for (pair, x) in x.iter().enumerate() {
        // SAFETY: the pointer comes from a reference to the eight lanes that are read; no alignment is needed.
        let x = unsafe { _mm256_loadu_si256(x.as_ptr().cast()) };
        for (sum, weights) in sums.iter_mut().zip(weights) {
            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(x, _mm256_set1_epi32(weights[pair])));
        }
    }
    let mut dots = [[0; STRIP]; STRIP];
    for (dots, sum) in dots.iter_mut().zip(sums) {
        // SAFETY: the pointer comes from a reference to the eight lanes that are written; no alignment is needed.
        unsafe { _mm256_storeu_si256(dots.as_mut_ptr().cast(), sum) }
    }
    dots
}

/// An array as its two halves.
#[inline(always)]
fn halves<T, const N: usize, const HALF: usize>(array: &[T; N]) -> [&[T; HALF]; 2] {
    const { assert!(N == 2 * HALF) }
    let (low, high) = array.as_chunks::<HALF>().0.split_at(1);
    [&low[0], &high[0]]
}

/// `a * 2^exponent`, in two steps, for 2^n itself may be out of range.
#[inline]
#[target_feature(enable = "avx2")]
fn scale_eight_by_power(a: __m256, exponent: __m256) -> __m256 {
    let n = _mm256_cvtps_epi32(exponent);
    let first = _mm256_srai_epi32::<1>(n);
    let second = _mm256_sub_epi32(n, first);
    _mm256_mul_ps(_mm256_mul_ps(a, eight_powers(first)), eight_powers(second))
}

/// `2^n` for -126 to 127.
#[inline]
#[target_feature(enable = "avx2")]
fn eight_powers(n: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))))
}
