// What follows a tile of sums: rounding, SwiGLU, the best tokens, and the way to global memory. The same code ends every
// product, few rows or many, so it cannot make their results differ.
#pragma once

#include "common/strips.cuh"

/// bf16(bf16(silu(gate)) * up), both arguments rounded to BF16 first.
__device__ __forceinline__ bf16 swiglu(float gate, float up) {
    float g = __bfloat162float(__float2bfloat16_rn(gate)), u = __bfloat162float(__float2bfloat16_rn(up));
    float silu = __fdividef(g, 1.0f + __expf(-g));
    return __float2bfloat16_rn(__bfloat162float(__float2bfloat16_rn(silu)) * u);
}

/// A tile on its way out: `[tokens][width]` BF16 in shared memory, rows padded by 16 bytes.
template <int WIDTH>
struct OutTile {
    static constexpr int PITCH = WIDTH + 8;
    bf16 *values;

    /// Puts what a thread has of a strip and eight tokens: rows g and g+8, tokens t and t+1.
    __device__ __forceinline__ void put(const float (&sum)[4], int row, int t) const {
        bf16 *at = values + t * PITCH + row;
        at[0] = __float2bfloat16_rn(sum[0]), at[PITCH] = __float2bfloat16_rn(sum[1]);
        at[8] = __float2bfloat16_rn(sum[2]), at[PITCH + 8] = __float2bfloat16_rn(sum[3]);
    }

    /// The same where rows g are gates and rows g+8 their ups.
    __device__ __forceinline__ void put_gated(const float (&sum)[4], int row, int t) const {
        bf16 *at = values + t * PITCH + row;
        at[0] = swiglu(sum[0], sum[2]), at[PITCH] = swiglu(sum[1], sum[3]);
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
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    const int row = warp % T::WM * T::SW * 16, t = warp / T::WM * T::NT * 8 + 2 * c;
#pragma unroll
    for (int s = 0; s < T::SW; ++s) {
#pragma unroll
        for (int i = 0; i < T::NT; ++i) {
            float(&sum)[4] = tile.warp.sum[s][i];
            if constexpr (T::F::GLOBAL_SCALE) {
                sum[0] *= upper_scale, sum[1] *= upper_scale, sum[2] *= lower_scale, sum[3] *= lower_scale;
            }
            if constexpr (IS_GATED) {
                values.put_gated(sum, row / 2 + g + s * 8, t + i * 8);
            } else {
                values.put(sum, row + g + s * 16, t + i * 8);
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

/// BF16 bits as a number that orders as their values do: the zeros are equal, NaN is minus infinity.
__device__ __forceinline__ uint32_t rank_of(uint32_t bits) {
    bits = bits == 0x8000u ? 0u : bits;
    bits = (bits & 0x7fffu) > 0x7f80u ? 0xff80u : bits;
    return bits & 0x8000u ? ~bits & 0xffffu : bits | 0x8000u;
}
__device__ __forceinline__ float value_of(uint32_t rank) {
    return __uint_as_float((rank & 0x8000u ? rank & 0x7fffu : ~rank & 0xffffu) << 16);
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
            for (int i = 0; i < 8; ++i) {
                const uint32_t bits = i % 2 ? words[u][i / 2] >> 16 : words[u][i / 2] & 0xffffu;
                const int id = lane * 8 + i;
                key[u][i] = id < width ? rank_of(bits) << 16 | (0xffffu - id) : 0;
            }
        }
#pragma unroll
        for (int place = 0; place < BEST; ++place) {
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                uint32_t mine = 0;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    mine = max(mine, key[u][i]);
                }
                winner[u][place] = __reduce_max_sync(0xffffffffu, mine);
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    key[u][i] = key[u][i] == winner[u][place] ? 0 : key[u][i];
                }
            }
        }
        float sum[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            const float top = value_of(winner[u][0] >> 16);
            sum[u] = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float logit = __uint_as_float(i % 2 ? words[u][i / 2] & 0xffff0000u : words[u][i / 2] << 16);
                const bool counts = lane * 8 + i < width && logit != -INFINITY;
                sum[u] += counts ? __expf(logit - top) : 0.0f;
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
