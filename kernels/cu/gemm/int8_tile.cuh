// A tile of a matrix product of codes with codes, by mma.sync of eight-bit integers, for every GPU from Ampere on: weights
// of INT8 or INT4 strips (common/strips.cuh), rows quantized in the groups of the weights. As tile.cuh, but for that.
//
// The product of a group is an exact integer, and contributes float(product) * (row scale * weight scale) to an FP32 sum,
// groups in ascending order, each operation rounded: kernels/src/oracle/int8.rs, bit for bit, whatever the tile.
//
// Sixteen columns of a row's codes lie in the order in which INT4's nibbles come out of their words:
//     byte 4 c + j is column 2 c + (0, 8, 1, 9)[j], c = 0 .. 3
#pragma once

#include "tile.cuh"

/// d += a * b of 16 x 32 by 32 x 8, exact.
__device__ __forceinline__ void mma_16832(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Codes of 16 x 16 elements as two words: those of row g and those of row g + 8, columns as above. `SHIFT`: products are
/// 2^SHIFT times too large.
template <class F>
struct Codes;

template <int G>
struct Codes<Int8<G>> {
    static constexpr int SHIFT = 0;
    template <int J>
    static __device__ __forceinline__ void words(uint32_t &upper, uint32_t &lower, const typename Int8<G>::Lane &lane) {
        const uint32_t first = J % 2 ? lane.half[J / 2].z : lane.half[J / 2].x;
        const uint32_t second = J % 2 ? lane.half[J / 2].w : lane.half[J / 2].y;
        upper = __byte_perm(first, second, 0x6240), lower = __byte_perm(first, second, 0x7351);
    }
};

template <int G>
struct Codes<Int4<G>> {
    static constexpr int SHIFT = 4;
    template <int J>
    static __device__ __forceinline__ void words(uint32_t &upper, uint32_t &lower, const typename Int4<G>::Lane &lane) {
        const uint32_t word = J == 0 ? lane.tiles.x : J == 1 ? lane.tiles.y : J == 2 ? lane.tiles.z : lane.tiles.w;
        upper = word << 4 & 0xf0f0f0f0u, lower = word & 0xf0f0f0f0u;
    }
};

/// Rows of codes, `[rows, k]`, and their scales, `[rows, k / GROUP]`.
struct QuantizedRows {
    const int8_t *codes;
    const float *scales;
};

template <class FORMAT, int WM_, int WN_, int SW_, int NT_, int STAGES_>
struct Int8Tile {
    using F = FORMAT;
    static constexpr int WM = WM_, WN = WN_, SW = SW_, NT = NT_, DEPTH = 128, STAGES = STAGES_, GROUP = F::GROUP;
    static constexpr int THREADS = 32 * WM * WN, STRIPS = WM * SW, ROWS = 16 * STRIPS, COLS = 8 * WN * NT;
    /// A row of codes, padded so that the same 16 bytes of eight rows that follow one another are in different banks.
    static constexpr int BLOCKS = DEPTH / F::UNIT, PITCH = DEPTH + 16;
    static constexpr int WEIGHT_BYTES = BLOCKS * STRIPS * F::BYTES, STAGE_BYTES = WEIGHT_BYTES + COLS * PITCH;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES;
    static_assert(STRIPS <= BAND);

    /// As `WarpTile`, which puts it where finish.cuh finds it.
    struct {
        float sum[SW][NT][4];
    } warp;

    /// As `Tile::run`.
    template <class READY>
    __device__ __forceinline__ void run(uint8_t *shared, const uint8_t *w, int strips, int strip, QuantizedRows x,
                                        const uint32_t *rows, int count, int k, READY ready) {
        const int lane = threadIdx.x % 32, wm = threadIdx.x / 32 % WM, wn = threadIdx.x / 32 / WM;
        // Scales of rows 2 c and 2 c + 1 of each eight.
        const float *scales[NT][2];
        auto start = [&] {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int t = min((wn * NT + n) * 8 + lane % 4 * 2 + i, count - 1);
                    scales[n][i] = x.scales + size_t(rows[t]) * (k / GROUP);
                }
            }
#pragma unroll
            for (int s = 0; s < SW; ++s) {
#pragma unroll
                for (int n = 0; n < NT; ++n) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        warp.sum[s][n][i] = 0.0f, part[s][n][i] = 0;
                    }
                }
            }
        };
        in_stages<Int8Tile>(
            shared, w, strips, strip, k, ready,
            [&](int index) { copy_rows<Int8Tile>(shared, x.codes, rows, count, k, index); }, start,
            [&](int index, const uint8_t *stage) {
                const uint32_t row = shared_address(stage) + WEIGHT_BYTES + (wn * NT * 8 + lane % 8) * PITCH + lane / 8 * 16;
                add(stage + wm * SW * F::BYTES, row, scales, index * (DEPTH / GROUP), lane);
            });
    }

  private:
    int part[SW][NT][4];

    __device__ __forceinline__ void add(const uint8_t *strips, uint32_t rows, const float *const (&scales)[NT][2], int group,
                                        int lane) {
#pragma unroll
        for (int unit64 = 0; unit64 < DEPTH / 64; ++unit64) {
            typename F::Lane weights[SW];
#pragma unroll
            for (int s = 0; s < SW; ++s) {
                const uint8_t *block = strips + (unit64 * 64 / F::UNIT * STRIPS + s) * F::BYTES;
                F::load(weights[s], block + codes_at<F>(unit64), block + scales_at<F>(), lane);
            }
            uint32_t x[NT][4];
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                load_matrices(x[n], rows + n * 8 * PITCH + unit64 * 64);
            }
            step<0>(weights, x, strips, scales, group, unit64, lane);
            step<1>(weights, x, strips, scales, group, unit64, lane);
        }
    }

    /// 32 columns: two tiles of 16.
    template <int HALF>
    __device__ __forceinline__ void step(const typename F::Lane (&weights)[SW], const uint32_t (&x)[NT][4],
                                         const uint8_t *strips, const float *const (&scales)[NT][2], int group, int unit64,
                                         int lane) {
        const int k = unit64 * 64 + HALF * 32;
#pragma unroll
        for (int s = 0; s < SW; ++s) {
            uint32_t a[4];
            Codes<F>::template words<2 * HALF>(a[0], a[1], weights[s]);
            Codes<F>::template words<2 * HALF + 1>(a[2], a[3], weights[s]);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                mma_16832(part[s][n], a, x[n][2 * HALF], x[n][2 * HALF + 1]);
            }
            if ((k + 32) % GROUP == 0) {
                const uint8_t *of_group = strips + (k / F::UNIT * STRIPS + s) * F::BYTES + group_at<F>(k);
                const float2 scale = __half22float2(reinterpret_cast<const __half2 *>(of_group)[lane / 4]);
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const float first = scales[n][0][group + k / GROUP], second = scales[n][1][group + k / GROUP];
                    add_product(warp.sum[s][n][0], part[s][n][0], first, scale.x);
                    add_product(warp.sum[s][n][1], part[s][n][1], second, scale.x);
                    add_product(warp.sum[s][n][2], part[s][n][2], first, scale.y);
                    add_product(warp.sum[s][n][3], part[s][n][3], second, scale.y);
                }
            }
        }
    }

    static __device__ __forceinline__ void add_product(float &sum, int &product, float row_scale, float scale) {
        sum = __fadd_rn(sum, __fmul_rn(float(product >> Codes<F>::SHIFT), __fmul_rn(row_scale, scale)));
        product = 0;
    }
};
