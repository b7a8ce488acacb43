// Attention's arithmetic: what a warp does with 16 rows of queries and a tile of keys and values in shared memory, and the
// order of the sums. Every kernel of this folder is made of this, so which of them ran cannot be told from a result.
#pragma once

#include "common/async.cuh"
#include "common/exp.cuh"
#include "common/rows.cuh"

constexpr int DIM = 128;
constexpr int PAGE = 32;
constexpr int TILE_PAGES = 4;
constexpr int TILE = TILE_PAGES * PAGE;
constexpr int CHUNKS_MAX = 32;
constexpr int TILE_BYTES = TILE * DIM * 2;
/// 1 / sqrt(128), times log2(e): weights are powers of two.
constexpr float SCALE = 0.08838834764831845f * LOG2E;

/// Tiles that are summed without a fold: one for up to 4,096 keys, and so many more that 32 chunks always suffice.
__device__ __forceinline__ int tiles_of_chunk(int pages) {
    return (pages + CHUNKS_MAX * TILE_PAGES - 1) / (CHUNKS_MAX * TILE_PAGES);
}

/// What a maximum and a sum relative to it are worth relative to a new maximum.
__device__ __forceinline__ float worth(float maximum, float new_maximum) {
    return exp2_fast(__fmaf_rn(maximum, SCALE, -__fmul_rn(new_maximum, SCALE)));
}

/// One value of a fold. Written with intrinsics so that every kernel does the same two operations.
__device__ __forceinline__ float fold(float sum, float by, float chunk, float chunk_by) {
    return __fmaf_rn(sum, by, __fmul_rn(chunk, chunk_by));
}

__device__ __forceinline__ uint32_t swizzled(int row, int piece) {
    return row * (DIM * 2) + ((piece ^ (row & 7)) << 4);
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from));
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from));
}

/// d += a * b for 16 x 16 by 16 x 8.
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Starts copying one head of up to 4 pages into a tile.
template <int THREADS>
__device__ __forceinline__ void load_tile(uint32_t to, const bf16 *head, const uint32_t *table, int pages,
                                          uint64_t page_stride) {
    constexpr int PIECES = PAGE * DIM / 8;
    for (int i = threadIdx.x; i < pages * PIECES; i += THREADS) {
        int page = i / PIECES, row = i % PIECES / 16, piece = i % 16;
        copy_16(to + swizzled(page * PAGE + row, piece), head + table[page] * page_stride + row * DIM + piece * 8);
    }
}

/// Starts copying a warp's 16 rows of queries of one of `heads` heads.
__device__ __forceinline__ void load_queries(uint32_t to, const bf16 *from, int heads, int lane) {
#pragma unroll
    for (int i = lane; i < 16 * 16; i += 32) {
        copy_16(to + swizzled(i / 16, i % 16), from + size_t(i / 16) * heads * DIM + i % 16 * 8);
    }
}

/// Sums of a warp's 16 rows over keys: a thread has rows lane / 4 and lane / 4 + 8, columns 2 (lane % 4) + {0, 1} of
/// each 8.
struct Sums {
    float maximum[2], total[2], values[16][4];

    __device__ __forceinline__ void clear() {
        maximum[0] = maximum[1] = -INFINITY;
        total[0] = total[1] = 0.0f;
#pragma unroll
        for (int n = 0; n < 16; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                values[n][i] = 0.0f;
            }
        }
    }

    /// Folds a chunk in, as `combine` does from memory.
    __device__ __forceinline__ void fold_in(const Sums &chunk) {
        float by[2], chunk_by[2];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const float new_maximum = fmaxf(maximum[side], chunk.maximum[side]);
            by[side] = worth(maximum[side], new_maximum);
            chunk_by[side] = worth(chunk.maximum[side], new_maximum);
            total[side] = fold(total[side], by[side], chunk.total[side], chunk_by[side]);
            maximum[side] = new_maximum;
        }
#pragma unroll
        for (int n = 0; n < 16; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                values[n][i] = fold(values[n][i], by[i / 2], chunk.values[n][i], chunk_by[i / 2]);
            }
        }
    }

    /// Divides by the totals and writes the warp's 16 rows from `out` on, `pitch` elements apart.
    __device__ __forceinline__ void store(bf16 *out, size_t pitch, int lane) const {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const float inverse = __frcp_rn(total[side]);
            bf16 *to = out + (lane / 4 + side * 8) * pitch + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < 16; ++n) {
                *reinterpret_cast<uint32_t *>(to + n * 8) = packed(__fmul_rn(values[n][side * 2], inverse),
                                                                   __fmul_rn(values[n][side * 2 + 1], inverse));
            }
        }
    }
};

/// scores = q . k of a warp's 16 rows of queries and the keys of a tile, both at shared addresses; anything for pages that are
/// not there: without branches loads run ahead of products.
__device__ __forceinline__ void score(float (&scores)[16][4], uint32_t queries, uint32_t keys, int lane) {
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scores[n][i] = 0.0f;
        }
    }
    // Sixteen sums side by side, so that no product waits for the one before.
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        uint32_t query[4];
        load_matrices(query, queries + swizzled(lane % 16, k * 2 + lane / 16));
#pragma unroll
        for (int n = 0; n < 16; n += 2) {
            uint32_t b[4];
            load_matrices(b, keys + swizzled(n * 8 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
            multiply(scores[n], query, b[0], b[1]);
            multiply(scores[n + 1], query, b[2], b[3]);
        }
    }
}

/// Turns scores of a tile into weights, rounded for the product with the values, and brings `chunk` to their maximum.
__device__ __forceinline__ void weigh(uint32_t (&shares)[8][4], float (&scores)[16][4], Sums &chunk, int tile_pages,
                                      bool is_fresh) {
    float maximum[2] = {chunk.maximum[0], chunk.maximum[1]};
#pragma unroll
    for (int n = 0; n < 16; ++n) {
        if (n / 4 < tile_pages) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                maximum[i / 2] = fmaxf(maximum[i / 2], scores[n][i]);
            }
        }
    }
    float total[2] = {};
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        maximum[side] = fmaxf(maximum[side], __shfl_xor_sync(0xffffffffu, maximum[side], 1));
        maximum[side] = fmaxf(maximum[side], __shfl_xor_sync(0xffffffffu, maximum[side], 2));
    }
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float share = n / 4 < tile_pages ? worth(scores[n][i], maximum[i / 2]) : 0.0f;
            total[i / 2] += share;
            scores[n][i] = share;
        }
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float *pair = &scores[k * 2 + i / 2][i % 2 * 2];
            shares[k][i] = packed(pair[0], pair[1]);
        }
    }
    float by[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        total[side] += __shfl_xor_sync(0xffffffffu, total[side], 1);
        total[side] += __shfl_xor_sync(0xffffffffu, total[side], 2);
        by[side] = worth(chunk.maximum[side], maximum[side]);
        chunk.total[side] = is_fresh ? total[side] : __fmaf_rn(chunk.total[side], by[side], total[side]);
        chunk.maximum[side] = maximum[side];
    }
    // The first tile of a chunk meets zeros.
    if (!is_fresh) {
#pragma unroll
        for (int n = 0; n < 16; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                chunk.values[n][i] = __fmul_rn(chunk.values[n][i], by[i / 2]);
            }
        }
    }
}

/// Adds the weighted values of a tile.
__device__ __forceinline__ void add_values(Sums &chunk, const uint32_t (&shares)[8][4], uint32_t values, int tile_pages,
                                           int lane) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        if (k / 2 < tile_pages) {
            int key = k * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
            for (int d = 0; d < 8; ++d) {
                uint32_t b[4];
                load_matrices_transposed(b, values + swizzled(key, d * 2 + lane / 16));
                multiply(chunk.values[2 * d], shares[k], b[0], b[1]);
                multiply(chunk.values[2 * d + 1], shares[k], b[2], b[3]);
            }
        }
    }
}
