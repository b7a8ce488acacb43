// A tile of a matrix product of four-bit numbers, by mma.sync with block scales, for GPUs of compute capability 12.x: weights
// in strips of `Nvfp4Codes`, rows in records (common/fp4.cuh has both). As tile.cuh, but for that.
//
// K is walked in order, 64 columns a step, into one FP32 sum, which is multiplied by the weights' matrix-wide scale, then by the
// row's: so the bits of an element depend on K and its own row alone, whatever the tile. Products of E2M1 and
// E4M3 pairs are exact; how the 64 of a step are added is the hardware's affair.
#pragma once

#include "common/fp4.cuh"
#include "tile.cuh"

/// d += (a * scales) * (b * scales) of 16 x 64 by 64 x 8: common/fp4.cuh has who holds what.
__device__ __forceinline__ void mma_16864(float (&d)[4], const Words &a, uint32_t b0, uint32_t b1, uint32_t scales_a,
                                          uint32_t scales_b) {
    constexpr uint16_t SELECTOR = 0;
    asm volatile("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {%12,%12}, {%11}, {%12,%12};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1), "r"(scales_a),
                   "r"(scales_b), "n"(SELECTOR));
}

/// Rows in records and their scales, `[rows]`, with the matrix-wide scales of the weights that they meet, of rows g and g+8.
struct Fp4Rows {
    const uint8_t *records;
    const float *scales;
    float upper_scale, lower_scale;
};

template <int WM_, int WN_, int SW_, int NT_, int STAGES_>
struct Fp4Tile {
    using F = Nvfp4Codes;
    static constexpr int WM = WM_, WN = WN_, SW = SW_, NT = NT_, DEPTH = Fp4Record::COLUMNS, STAGES = STAGES_;
    static constexpr int THREADS = 32 * WM * WN, STRIPS = WM * SW, ROWS = 16 * STRIPS, COLS = 8 * WN * NT;
    static constexpr int BLOCKS = DEPTH / F::UNIT, PITCH = Fp4Record::BYTES;
    static constexpr int WEIGHT_BYTES = BLOCKS * STRIPS * F::BYTES, STAGE_BYTES = WEIGHT_BYTES + COLS * PITCH;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES;
    static_assert(STRIPS <= BAND);

    /// As `WarpTile`, which puts it where finish.cuh finds it.
    struct {
        float sum[SW][NT][4];
    } warp;

    /// As `Tile::run`; the sums are scaled.
    template <class READY>
    __device__ __forceinline__ void run(uint8_t *shared, const uint8_t *w, int strips, int strip, Fp4Rows x,
                                        const uint32_t *rows, int count, int k, READY ready) {
        const int lane = threadIdx.x % 32, wm = threadIdx.x / 32 % WM, wn = threadIdx.x / 32 / WM;
        auto start = [&] {
#pragma unroll
            for (int s = 0; s < SW; ++s) {
#pragma unroll
                for (int n = 0; n < NT; ++n) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        warp.sum[s][n][i] = 0.0f;
                    }
                }
            }
        };
        in_stages<Fp4Tile>(
            shared, w, strips, strip, k, ready,
            [&](int index) {
                const int row_bytes = Fp4Record::row_bytes(k);
                copy_rows<Fp4Tile, Fp4Record::BYTES>(shared, x.records, rows, count, row_bytes, index);
            },
            start,
            [&](int, const uint8_t *stage) {
                add(stage + wm * SW * F::BYTES, stage + WEIGHT_BYTES + wn * NT * 8 * PITCH, lane);
            });
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const int t = (wn * NT + n) * 8 + lane % 4 * 2;
            const float first = x.scales[rows[min(t, count - 1)]], second = x.scales[rows[min(t + 1, count - 1)]];
#pragma unroll
            for (int s = 0; s < SW; ++s) {
                scale_fp4_sums(warp.sum[s][n], x.upper_scale, x.lower_scale, first, second);
            }
        }
    }

  private:
    /// A stage: the warp's strips at `strips`, the records of its tokens at `records`.
    __device__ __forceinline__ void add(const uint8_t *strips, const uint8_t *records, int lane) {
        uint32_t b[NT][4];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            load_matrices(b[n], shared_address(records + n * 8 * PITCH + Fp4Record::matrix_row(PITCH, lane)));
        }
#pragma unroll
        for (int step = 0; step < BLOCKS; ++step) {
            F::Lane weights[SW];
#pragma unroll
            for (int s = 0; s < SW; ++s) {
                F::load(weights[s], strips + (step * STRIPS + s) * F::BYTES, lane);
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const uint8_t *at = records + n * 8 * PITCH + Fp4Record::scales(PITCH, step, lane);
                const uint32_t scales = *reinterpret_cast<const uint32_t *>(at);
#pragma unroll
                for (int s = 0; s < SW; ++s) {
                    mma_16864(warp.sum[s][n], weights[s].a, b[n][2 * step], b[n][2 * step + 1], weights[s].scales, scales);
                }
            }
        }
    }
};
