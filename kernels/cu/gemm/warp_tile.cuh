// What one warp does of a tile of a matrix product by mma.sync: SW strips of weight rows, NT times eight tokens, one stage
// of DEPTH columns in shared memory after the other. tile.cuh and bulk_tile.cuh bring the stages.
//
// K is walked in order, 16 columns a step, into FP32 sums (one a group for integer formats, added up in order with their
// scales): so the bits of an element depend on the weights' format and K alone, and are those of wide_tile.cuh too.
#pragma once

#include "common/async.cuh"
#include "common/strips.cuh"

__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/// `ACROSS`: strips of the block of threads, whose blocks of the same columns lie side by side.
template <class FORMAT, int ACROSS, int SW, int NT, int DEPTH>
struct WarpTile {
    using F = FORMAT;
    static_assert(DEPTH % F::UNIT == 0 && DEPTH % 64 == 0);
    /// A row of tokens, padded so that the same 16 bytes of eight rows that follow one another are in different banks.
    static constexpr int PITCH = DEPTH * 2 + 16;

    /// What a thread ends up with of strip `s` and tokens 8 n on: rows g and g+8, tokens 2c and 2c+1.
    float sum[SW][NT][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int s = 0; s < SW; ++s) {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sum[s][n][i] = 0.0f;
                    part[s][n][i] = 0.0f;
                }
            }
        }
    }

    /// Adds a stage: the warp's strips at `strips`, its tokens at the shared address `tokens`, in rows of `PITCH` bytes.
    __device__ __forceinline__ void add(const uint8_t *strips, uint32_t tokens) {
        const int lane = threadIdx.x % 32;
        tokens += lane % 8 * PITCH + lane / 8 * 16;
#pragma unroll
        for (int unit64 = 0; unit64 < DEPTH / 64; ++unit64) {
            typename F::Lane weights[SW];
#pragma unroll
            for (int s = 0; s < SW; ++s) {
                const uint8_t *block = strips + (unit64 * 64 / F::UNIT * ACROSS + s) * F::BYTES;
                F::load(weights[s], block + codes_at<F>(unit64), block + scales_at<F>(), lane);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t x[NT][4];
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    load_matrices(x[n], tokens + n * 8 * PITCH + unit64 * 128 + half * 64);
                }
                if (half == 0) {
                    step<0>(weights, x, strips, unit64, lane);
                    step<1>(weights, x, strips, unit64, lane);
                } else {
                    step<2>(weights, x, strips, unit64, lane);
                    step<3>(weights, x, strips, unit64, lane);
                }
            }
        }
    }

  private:
    /// Sums of the current integer group; unused by other formats.
    float part[SW][NT][4];

    template <int J>
    __device__ __forceinline__ void step(const typename F::Lane (&weights)[SW], const uint32_t (&x)[NT][4],
                                         const uint8_t *strips, int unit64, int lane) {
        const int k = unit64 * 64 + J * 16;
#pragma unroll
        for (int s = 0; s < SW; ++s) {
            uint32_t a[4];
            F::template fragment<J>(a, weights[s]);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                mma_16816(F::GROUP ? part[s][n] : sum[s][n], a, x[n][J % 2 * 2], x[n][J % 2 * 2 + 1]);
            }
            if constexpr (F::GROUP > 0) {
                if ((k + 16) % F::GROUP == 0) {
                    const uint8_t *scales = strips + (k / F::UNIT * ACROSS + s) * F::BYTES + group_at<F>(k);
                    float2 scale = __half22float2(reinterpret_cast<const __half2 *>(scales)[lane / 4]);
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        add_group(sum[s][n], part[s][n], scale);
                    }
                }
            }
        }
    }

    static __device__ __forceinline__ void add_group(float (&sum)[4], float (&part)[4], float2 scale) {
        sum[0] = __fmaf_rn(part[0], scale.x, sum[0]), sum[1] = __fmaf_rn(part[1], scale.x, sum[1]);
        sum[2] = __fmaf_rn(part[2], scale.y, sum[2]), sum[3] = __fmaf_rn(part[3], scale.y, sum[3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            part[i] = 0.0f;
        }
    }
};
