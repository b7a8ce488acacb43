// A tile of a matrix product, out[t, n] = sum over k of x[row(t), k] * w[n, k], by mma.sync: what linear.cu and experts.cu
// are made of. Weights are the M operand and come as strips (common/strips.cuh), tokens are N.
//
// A block of WM x WN warps computes ROWS = WM * SW * 16 weight rows of COLS = WN * NT * 8 tokens. Weights and tokens of
// DEPTH columns are a stage; STAGES of them are in shared memory, all but one on their way. K is walked in order, 16
// columns a step, into FP32 sums (one a group for integer formats, added up in order with their scales): so the bits of
// an element depend on the weights' format and K alone, and are those of wide_tile.cuh too.
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

template <class FORMAT, int WM_, int WN_, int SW_, int NT_, int DEPTH_, int STAGES_>
struct Tile {
    using F = FORMAT;
    static constexpr int WM = WM_, WN = WN_, SW = SW_, NT = NT_, DEPTH = DEPTH_, STAGES = STAGES_;
    static constexpr int THREADS = 32 * WM * WN, STRIPS = WM * SW, ROWS = 16 * STRIPS, COLS = 8 * WN * NT;
    static_assert(DEPTH % F::UNIT == 0);
    static constexpr int STRIP_BYTES = DEPTH / F::UNIT * F::BYTES;
    /// A token row. Its pieces of 16 bytes are swizzled, number p of row t lying at p ^ t % 8, so that the same piece of
    /// eight rows is in different banks.
    static constexpr int PITCH = DEPTH * 2;
    static constexpr int WEIGHT_BYTES = STRIPS * STRIP_BYTES, STAGE_BYTES = WEIGHT_BYTES + COLS * PITCH;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES;

    /// What a thread ends up with of its warp's strip `s` and tokens `8 n` on: rows g and g+8, tokens 2c and 2c+1.
    float sum[SW][NT][4];

    /// Begins copying stage `index` of the weights. `weights`: the first strip; strips from `strips` on are left out.
    static __device__ __forceinline__ void copy_weights(uint8_t *shared, const uint8_t *weights, size_t strip_bytes,
                                                        int strips, int index) {
        constexpr int PIECES = STRIP_BYTES / 16, TOTAL = STRIPS * PIECES;
        uint32_t to = shared_address(shared) + index % STAGES * STAGE_BYTES;
        weights += size_t(index) * STRIP_BYTES;
#pragma unroll
        for (int first = 0; first < TOTAL; first += THREADS) {
            int piece = first + threadIdx.x, strip = piece / PIECES;
            if (piece < TOTAL && strip < strips) {
                copy_16(to + piece * 16, weights + strip * strip_bytes + piece % PIECES * 16);
            }
        }
    }

    /// Begins copying stage `index` of the tokens: row `rows[t]` of `x` for each `t < count`.
    static __device__ __forceinline__ void copy_tokens(uint8_t *shared, const bf16 *x, const uint32_t *rows, int count,
                                                       int k, int index) {
        constexpr int PIECES = DEPTH / 8;
        uint32_t to = shared_address(shared) + index % STAGES * STAGE_BYTES + WEIGHT_BYTES;
#pragma unroll
        for (int first = 0; first < COLS * PIECES; first += THREADS) {
            int piece = first + threadIdx.x, t = piece / PIECES, at = piece % PIECES;
            if ((COLS * PIECES % THREADS == 0 || piece < COLS * PIECES) && t < count) {
                copy_16(to + t * PITCH + (at ^ t % 8) * 16, x + size_t(rows[t]) * k + index * DEPTH + at * 8);
            }
        }
    }

    __device__ __forceinline__ void compute(const uint8_t *shared, int index) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, wm = warp % WM, wn = warp / WM;
        const uint8_t *stage = shared + index % STAGES * STAGE_BYTES, *strips = stage + wm * SW * STRIP_BYTES;
        const uint32_t tokens = shared_address(stage) + WEIGHT_BYTES + (wn * NT * 8 + lane % 8) * PITCH;
        const uint32_t piece = (lane / 8 ^ lane % 8) * 16;
#pragma unroll
        for (int unit64 = 0; unit64 < DEPTH / 64; ++unit64) {
            typename F::Lane weights[SW];
#pragma unroll
            for (int s = 0; s < SW; ++s) {
                const uint8_t *strip = strips + s * STRIP_BYTES;
                F::load(weights[s], strip + codes_at<F>(unit64), strip + scales_at<F>(unit64), lane);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t x[NT][4];
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    load_matrices(x[n], tokens + n * 8 * PITCH + unit64 * 128 + (piece ^ half * 64));
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

    /// The whole product. `x`, `rows`, `count` as in `copy_tokens`; `rows` is in shared memory, and `ready` fills it
    /// after it has waited for whatever the tokens depend on: weights are on their way before that.
    template <class READY>
    __device__ __forceinline__ void run(uint8_t *shared, const uint8_t *weights, size_t strip_bytes, int strips,
                                        const bf16 *x, const uint32_t *rows, int count, int k, READY ready) {
        const int stages = k / DEPTH;
#pragma unroll
        for (int index = 0; index < STAGES - 1; ++index) {
            if (index < stages) {
                copy_weights(shared, weights, strip_bytes, strips, index);
            }
        }
        ready();
        __syncthreads();
#pragma unroll
        for (int index = 0; index < STAGES - 1; ++index) {
            if (index < stages) {
                copy_tokens(shared, x, rows, count, k, index);
            }
            commit_copies();
        }
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
        for (int index = 0; index < stages; ++index) {
            wait_for_copies<STAGES - 2>();
            __syncthreads();
            if (index + STAGES - 1 < stages) {
                copy_weights(shared, weights, strip_bytes, strips, index + STAGES - 1);
                copy_tokens(shared, x, rows, count, k, index + STAGES - 1);
            }
            commit_copies();
            compute(shared, index);
        }
        wait_for_copies<0>();
        __syncthreads();
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
                    const uint8_t *scales = strips + s * STRIP_BYTES + group_at<F>(k);
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
