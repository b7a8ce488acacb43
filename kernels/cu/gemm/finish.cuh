// What follows a tile of sums: rounding, SwiGLU, the best tokens, and the way to global memory. The same code ends every
// product, few rows or many, so it cannot make their results differ.
#pragma once

#include "common/async.cuh"
#include "common/exp.cuh"
#include "common/round.cuh"
#include "common/strips.cuh"

/// bf16(silu(gate)) * up, both arguments rounded to BF16 first; the product is still to be rounded.
__device__ __forceinline__ float swiglu(float gate, float up) {
    const float g = rounded(gate);
    return rounded(__fdividef(g, 1.0f + __expf(-g))) * rounded(up);
}

/// A tile on its way out: `[tokens][width]` BF16 in shared memory, rows padded by 16 bytes.
template <int WIDTH>
struct OutTile {
    static constexpr int PITCH = WIDTH + 8;
    bf16 *values;

    /// Puts what a warp has of the strip from row `row` on and of eight tokens from `t` on: thread 4 g + c has rows g and g+8,
    /// tokens 2c and 2c+1.
    __device__ __forceinline__ void put(const float (&sum)[4], int row, int t) const {
        const uint32_t upper = packed(sum[0], sum[1]), lower = packed(sum[2], sum[3]);
        const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
        const uint32_t to = shared_address(values + (t + lane % 8) * PITCH + row + lane / 8 % 2 * 8);
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(upper), "r"(lower)
                     : "memory");
#else
        bf16 *at = values + (t + lane % 4 * 2) * PITCH + row + lane / 4;
        at[0] = low_bf16(upper), at[PITCH] = high_bf16(upper);
        at[8] = low_bf16(lower), at[PITCH + 8] = high_bf16(lower);
#endif
    }

    /// The same where rows g are gates and rows g+8 their ups; eight rows from `row` on.
    __device__ __forceinline__ void put_gated(const float (&sum)[4], int row, int t) const {
        const uint32_t pair = packed(swiglu(sum[0], sum[2]), swiglu(sum[1], sum[3]));
        const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
        const uint32_t to = shared_address(values + (t + lane % 8) * PITCH + row);
        asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(to), "r"(pair) : "memory");
#else
        bf16 *at = values + (t + lane % 4 * 2) * PITCH + row + lane / 4;
        at[0] = low_bf16(pair), at[PITCH] = high_bf16(pair);
#endif
    }

    /// Writes `count` tokens, `width` values each (a multiple of 8), to `out + row_of(t) * pitch`; by the first `THREADS`
    /// threads.
    template <int THREADS, class ROW_OF>
    __device__ __forceinline__ void store(bf16 *out, size_t pitch, int count, int width, ROW_OF row_of) const {
        for (int piece = threadIdx.x; piece < count * (WIDTH / 8); piece += THREADS) {
            int t = piece / (WIDTH / 8), at = piece % (WIDTH / 8) * 8;
            if (at < width) {
                *reinterpret_cast<uint4 *>(out + size_t(row_of(t)) * pitch + at) =
                    *reinterpret_cast<const uint4 *>(values + t * PITCH + at);
            }
        }
    }
};

/// Puts the sums of all of `tile`, a `Tile` or `BulkTile`, into `values`: rounded, or through SwiGLU where rows g are gates.
/// The scales are NVFP4's for the whole matrix, of rows g and of rows g+8.
template <bool IS_GATED, class T, int WIDTH>
__device__ __forceinline__ void put_tile(OutTile<WIDTH> values, T &tile, float upper_scale = 1.0f, float lower_scale = 1.0f) {
    const int warp = threadIdx.x / 32, row = warp % T::WM * T::SW * 16, t = warp / T::WM * T::NT * 8;
#pragma unroll
    for (int s = 0; s < T::SW; ++s) {
#pragma unroll
        for (int i = 0; i < T::NT; ++i) {
            float(&sum)[4] = tile.warp.sum[s][i];
            if constexpr (T::F::GLOBAL_SCALE) {
                sum[0] *= upper_scale, sum[1] *= upper_scale, sum[2] *= lower_scale, sum[3] *= lower_scale;
            }
            if constexpr (IS_GATED) {
                values.put_gated(sum, row / 2 + s * 8, t + i * 8);
            } else {
                values.put(sum, row + s * 16, t + i * 8);
            }
        }
    }
}

/// Writes the sums of `tile`, as above, to `out + (first + token) * pitch + weight row`: of `count` tokens, and of the weight
/// rows from `strip` on as far as there are, `n` in all.
template <class T>
__device__ __forceinline__ void store_sums(float *out, const T &tile, int first, int count, int strip, int n, int pitch) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    const int row = warp % T::WM * T::SW * 16 + g, t = warp / T::WM * T::NT * 8 + 2 * c;
    for (int s = 0; s < T::SW; ++s) {
        for (int i = 0; i < T::NT * 4; ++i) {
            const int to = t + i / 4 * 8 + i % 2, from = strip * 16 + row + s * 16 + i % 4 / 2 * 8;
            if (to < count && from < n) {
                out[size_t(first + to) * pitch + from] = tile.warp.sum[s][i / 4][i % 4];
            }
        }
    }
}

/// Where the best tokens of rows go: tokens, logits `[rows, tiles, 4]`, sums `[rows, tiles]`.
struct Best {
    uint32_t *tokens;
    float *logits, *sums;
};
constexpr int BEST = 4, BEST_WIDTH = 256;

/// Two BF16 as numbers of 16 bits that order as their values do: the zeros are equal, NaN is minus infinity.
__device__ __forceinline__ uint32_t ranks_of(uint32_t pair) {
    // Minus zero plus zero is zero; the larger of NaN and a number is the number.
    pair = fma_bf16x2(pair, 0x3f803f80u, 0);
    asm("max.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(0xff80ff80u));
    const uint32_t negative = pair >> 15 & 0x00010001u;
    return pair ^ (negative * 0x7fffu | 0x80008000u);
}
__device__ __forceinline__ float value_of(uint32_t rank) {
    return __uint_as_float((rank & 0x8000u ? rank & 0x7fffu : ~rank & 0xffffu) << 16);
}

/// Puts the larger first.
__device__ __forceinline__ void exchange(uint32_t &a, uint32_t &b) {
    const uint32_t larger = max(a, b);
    b = min(a, b), a = larger;
}

/// The four largest of eight, in order, into the first four.
__device__ __forceinline__ void sort_four_of(uint32_t (&key)[8]) {
#pragma unroll
    for (int half = 0; half < 8; half += 4) {
        exchange(key[half], key[half + 1]), exchange(key[half + 2], key[half + 3]);
        exchange(key[half], key[half + 2]), exchange(key[half + 1], key[half + 3]);
        exchange(key[half + 1], key[half + 2]);
    }
    // One run down, the other up: the larger of each pair are the four largest, and bitonic.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        key[i] = max(key[i], key[7 - i]);
    }
    exchange(key[0], key[2]), exchange(key[1], key[3]);
    exchange(key[0], key[1]), exchange(key[2], key[3]);
}

/// The best four of each token's `width` logits, best first, the lower id first among equals, NaN as minus infinity,
/// and the sum of exp(logit - best logit). One warp a token, several tokens at a time; by the first `THREADS` threads.
template <int THREADS>
__device__ __forceinline__ void store_best(const OutTile<BEST_WIDTH> &tile, Best best, int first_row, int count,
                                           int vocabulary_tile, int tiles, int width) {
    constexpr int WARPS = THREADS / 32, AT_ONCE = 4;
    const int lane = threadIdx.x % 32;
    for (int first = threadIdx.x / 32; first < count; first += WARPS * AT_ONCE) {
        uint32_t words[AT_ONCE][4], key[AT_ONCE][8], winner[AT_ONCE][BEST];
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            const int t = min(first + u * WARPS, count - 1);
            const uint4 eight = *reinterpret_cast<const uint4 *>(tile.values + t * OutTile<BEST_WIDTH>::PITCH + lane * 8);
            words[u][0] = eight.x, words[u][1] = eight.y, words[u][2] = eight.z, words[u][3] = eight.w;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t ranks = ranks_of(words[u][i]), id = 0xffffu - (lane * 8 + i * 2);
                key[u][2 * i] = ranks << 16 | id, key[u][2 * i + 1] = (ranks & 0xffff0000u) | (id - 1);
            }
        }
        if (width < BEST_WIDTH) {
            // The vocabulary ends here.
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    if (lane * 8 + i >= width) {
                        key[u][i] = 0;
                        const uint32_t word = words[u][i / 2];
                        words[u][i / 2] = i % 2 ? (word & 0xffffu) | 0xff800000u : (word & 0xffff0000u) | 0xff80u;
                    }
                }
            }
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            sort_four_of(key[u]);
        }
#pragma unroll
        for (int place = 0; place < BEST; ++place) {
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                winner[u][place] = __reduce_max_sync(0xffffffffu, key[u][0]);
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                const bool is_own = key[u][0] == winner[u][place];
#pragma unroll
                for (int i = 0; i + 1 < BEST - place; ++i) {
                    key[u][i] = is_own ? key[u][i + 1] : key[u][i];
                }
            }
        }
        float sum[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            // Where all are minus infinity, none counts.
            const float top = value_of(winner[u][0] >> 16), base = top == -INFINITY ? 0.0f : top * LOG2E;
            sum[u] = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[u] += exp2_fast(__fmaf_rn(low_of(words[u][i]), LOG2E, -base));
                sum[u] += exp2_fast(__fmaf_rn(high_of(words[u][i]), LOG2E, -base));
            }
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                sum[u] += __shfl_xor_sync(0xffffffffu, sum[u], distance);
            }
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            const int t = first + u * WARPS;
            const size_t at = size_t(first_row + t) * tiles + vocabulary_tile;
            if (t < count && lane < BEST) {
                const uint32_t of_lane = lane == 0   ? winner[u][0]
                                         : lane == 1 ? winner[u][1]
                                         : lane == 2 ? winner[u][2]
                                                     : winner[u][3];
                const uint32_t id = vocabulary_tile * BEST_WIDTH + 0xffffu - (of_lane & 0xffffu);
                best.tokens[at * BEST + lane] = of_lane ? id : 0xffffffffu;
                best.logits[at * BEST + lane] = of_lane ? value_of(of_lane >> 16) : -INFINITY;
            }
            if (t < count && lane == BEST) {
                best.sums[at] = sum[u];
            }
        }
    }
}
