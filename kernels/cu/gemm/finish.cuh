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

/// Where the best tokens of rows go: tokens, logits `[rows, tiles, 4]`, sums `[rows, tiles]`.
struct Best {
    uint32_t *tokens;
    float *logits, *sums;
};
constexpr int BEST = 4, BEST_WIDTH = 256;

/// The best four of each token's `width` logits, best first, the lower id first among equals, NaN as minus infinity,
/// and the sum of exp(logit - best logit). One warp a token, by the first `THREADS` threads.
template <int THREADS>
__device__ __forceinline__ void store_best(const OutTile<BEST_WIDTH> &tile, Best best, int first_row, int count,
                                           int vocabulary_tile, int tiles, int width) {
    const int lane = threadIdx.x % 32;
    for (int t = threadIdx.x / 32; t < count; t += THREADS / 32) {
        uint4 eight = *reinterpret_cast<const uint4 *>(tile.values + t * OutTile<BEST_WIDTH>::PITCH + lane * 8);
        const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
        float logit[8];
        uint32_t key[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t bits = i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffffu;
            logit[i] = __uint_as_float(bits << 16);
            uint32_t rank = bits == 0x8000u ? 0u : bits;
            rank = (rank & 0x7fffu) > 0x7f80u ? 0xff80u : rank;
            rank = rank & 0x8000u ? ~rank & 0xffffu : rank | 0x8000u;
            const int id = lane * 8 + i;
            key[i] = id < width ? rank << 16 | (0xffffu - id) : 0;
        }
        const size_t place = size_t(first_row + t) * tiles + vocabulary_tile;
        float top = 0.0f;
#pragma unroll
        for (int rank = 0; rank < BEST; ++rank) {
            uint32_t mine = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                mine = max(mine, key[i]);
            }
            const uint32_t winner = __reduce_max_sync(0xffffffffu, mine);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                key[i] = key[i] == winner ? 0 : key[i];
            }
            const int id = 0xffff - (winner & 0xffffu);
            const bf16 stored = tile.values[t * OutTile<BEST_WIDTH>::PITCH + id % BEST_WIDTH];
            const float value = winner && !__hisnan(stored) ? __bfloat162float(stored) : -INFINITY;
            top = rank == 0 ? value : top;
            if (lane == 0) {
                best.tokens[place * BEST + rank] = winner ? vocabulary_tile * BEST_WIDTH + id : 0xffffffffu;
                best.logits[place * BEST + rank] = value;
            }
        }
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const bool counts = lane * 8 + i < width && logit[i] != -INFINITY;
            sum += counts ? __expf(logit[i] - top) : 0.0f;
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        }
        if (lane == 0) {
            best.sums[place] = sum;
        }
    }
}
