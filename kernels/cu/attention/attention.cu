// attend:  out[r, h] = softmax over the keys that the row sees of (q[r, h] . k / sqrt(128)), times v
// partial: the same over one chunk of the keys, not yet divided;   combine: folds the chunks of `partial`
// q, out: [blocks * 32, kv_heads * group, 128] bf16.   blocks: (start in page_tables, pages seen), the own page included.
// pool: pages of [layers, 2, kv_heads, 32, 128] bf16, keys first, `page_stride` elements each, from this layer's part on.
// sums: [blocks, CHUNKS_MAX, heads, 32, 128] f32.   weights: [blocks, CHUNKS_MAX, heads, 32] of (maximum, sum).
// Grid: attend: (kv_heads, ceil(group / 4), blocks), 256 threads; partial: (CHUNKS_MAX, kv_heads * ceil(group / 2),
// blocks), 128 threads: a warp has 16 rows of one query head; combine: (4, heads, blocks), 256 threads, a warp a row.
// Shared: 128 keys and 128 values of one head, then the queries, 64 KiB and 4 KiB a warp: rows of 256 bytes whose
// 16-byte pieces are swizzled by row.
//
// Order of sums: keys are taken in tiles of 4 pages. A chunk is `tiles_of_chunk` tiles, which depends on the row's own
// position alone; within a chunk the running maximum and sums go from tile to tile, and the chunks, each begun from
// nothing, are folded from the first to the last. `attend` folds in registers what `combine` folds from memory, with the
// same operations, so which of them ran cannot be told from the result.
// Rounding: q.k and all sums are FP32; weights are rounded to BF16 for the product with v, not for their own sum; the
// result is rounded once. Bound by the tensor cores when many rows share the keys, by latency when few do.
// Oracle: kernels/src/oracle/attention.rs
#include "common/rows.cuh"

constexpr int DIM = 128;
constexpr int PAGE = 32;
constexpr int TILE_PAGES = 4;
constexpr int TILE = TILE_PAGES * PAGE;
constexpr int CHUNKS_MAX = 32;
constexpr int TILE_BYTES = TILE * DIM * 2;
/// 1 / sqrt(128), times log2(e): weights are powers of two.
constexpr float SCALE = 0.08838834764831845f * 1.4426950408889634f;

/// Tiles that are summed without a fold: one for up to 4,096 keys, and so many more that 32 chunks always suffice.
__device__ __forceinline__ int tiles_of_chunk(int pages) {
    return (pages + CHUNKS_MAX * TILE_PAGES - 1) / (CHUNKS_MAX * TILE_PAGES);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
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

__device__ __forceinline__ void copy_async(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;");
}

/// Waits until at most `COUNT` of the latest groups of copies are under way.
template <int COUNT>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(COUNT));
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

__device__ __forceinline__ uint32_t packed(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&pair);
}

/// Starts copying one head of up to 4 pages into a tile.
template <int THREADS>
__device__ __forceinline__ void load_tile(uint32_t to, const bf16 *head, const uint32_t *table, int pages,
                                          uint64_t page_stride) {
    constexpr int PIECES = PAGE * DIM / 8;
    for (int i = threadIdx.x; i < pages * PIECES; i += THREADS) {
        int page = i / PIECES, row = i % PIECES / 16, piece = i % 16;
        copy_async(to + swizzled(page * PAGE + row, piece), head + table[page] * page_stride + row * DIM + piece * 8);
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
};

template <int WARPS, bool IS_SPLIT>
__device__ __forceinline__ void attention(const bf16 *q, const bf16 *pool, const uint2 *blocks,
                                          const uint32_t *page_tables, bf16 *out, float *sums, float2 *weights,
                                          uint64_t page_stride, int kv_heads, int group, int kv_head, int part,
                                          int block_index, int first_chunk) {
    constexpr int THREADS = 32 * WARPS;
    extern __shared__ __align__(128) uint8_t memory[];
    uint32_t keys = static_cast<uint32_t>(__cvta_generic_to_shared(memory)), values = keys + TILE_BYTES;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    uint2 block = blocks[block_index];
    int pages = block.y, step = tiles_of_chunk(pages), tiles = (pages + TILE_PAGES - 1) / TILE_PAGES;
    int tile = IS_SPLIT ? first_chunk * step : 0;
    int end = IS_SPLIT ? min(tile + step, tiles) : tiles;
    if (tile >= end) {
        return;
    }
    const uint32_t *table = page_tables + block.x;
    const bf16 *key_head = pool + size_t(kv_head) * PAGE * DIM;
    const bf16 *value_head = key_head + size_t(kv_heads) * PAGE * DIM;
    auto pages_of = [&](int tile) { return min(TILE_PAGES, pages - tile * TILE_PAGES); };

    // The warp's rows among the 32 * group of this key and value head: head by head.
    int row = (part * WARPS + warp) * 16, heads = kv_heads * group, head = kv_head * group + row / PAGE;
    bool is_active = row < group * PAGE;
    size_t first_row = size_t(block_index) * PAGE + row % PAGE + lane / 4;
    // The warp's queries stay in shared memory: in registers they would push sums out.
    uint32_t queries = keys + 2 * TILE_BYTES + warp * 16 * DIM * 2;
    if (is_active) {
        const bf16 *from = q + ((size_t(block_index) * PAGE + row % PAGE) * heads + head) * DIM;
#pragma unroll
        for (int i = lane; i < 16 * 16; i += 32) {
            copy_async(queries + swizzled(i / 16, i % 16), from + size_t(i / 16) * heads * DIM + i % 16 * 8);
        }
    }
    load_tile<THREADS>(keys, key_head, table + tile * TILE_PAGES, pages_of(tile), page_stride);
    commit_copies();
    load_tile<THREADS>(values, value_head, table + tile * TILE_PAGES, pages_of(tile), page_stride);
    commit_copies();

    Sums all, chunk;
    all.clear();
    chunk.clear();
    int left_of_chunk = step;
    for (; tile < end; ++tile) {
        int tile_pages = pages_of(tile);
        bool is_fresh = left_of_chunk == step;
        float scores[16][4];
        wait_copies<1>();
        __syncthreads();
        if (is_active) {
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
                for (int page = 0; page < TILE_PAGES; ++page) {
                    if (page < tile_pages) {
#pragma unroll
                        for (int n = page * 4; n < page * 4 + 4; n += 2) {
                            uint32_t b[4];
                            load_matrices(b, keys + swizzled(n * 8 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
                            multiply(scores[n], query, b[0], b[1]);
                            multiply(scores[n + 1], query, b[2], b[3]);
                        }
                    }
                }
            }
        }
        __syncthreads();
        if (tile + 1 < end) {
            load_tile<THREADS>(keys, key_head, table + (tile + 1) * TILE_PAGES, pages_of(tile + 1), page_stride);
        }
        commit_copies();

        uint32_t shares[8][4];
        if (is_active) {
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
        wait_copies<1>();
        __syncthreads();
        if (is_active) {
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
        __syncthreads();
        if (tile + 1 < end) {
            load_tile<THREADS>(values, value_head, table + (tile + 1) * TILE_PAGES, pages_of(tile + 1), page_stride);
        }
        commit_copies();

        --left_of_chunk;
        if (!IS_SPLIT && (left_of_chunk == 0 || tile + 1 == end)) {
            left_of_chunk = step;
            float by[2], chunk_by[2];
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                float maximum = fmaxf(all.maximum[side], chunk.maximum[side]);
                by[side] = worth(all.maximum[side], maximum);
                chunk_by[side] = worth(chunk.maximum[side], maximum);
                all.total[side] = fold(all.total[side], by[side], chunk.total[side], chunk_by[side]);
                all.maximum[side] = maximum;
            }
#pragma unroll
            for (int n = 0; n < 16; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    all.values[n][i] = fold(all.values[n][i], by[i / 2], chunk.values[n][i], chunk_by[i / 2]);
                }
            }
            chunk.clear();
        }
    }
    if (!is_active) {
        return;
    }
    if (IS_SPLIT) {
        size_t of_chunk = (size_t(block_index) * CHUNKS_MAX + first_chunk) * heads + head;
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            size_t at = of_chunk * PAGE + row % PAGE + lane / 4 + side * 8;
            if (lane % 4 == 0) {
                weights[at] = make_float2(chunk.maximum[side], chunk.total[side]);
            }
#pragma unroll
            for (int n = 0; n < 16; ++n) {
                float2 pair = make_float2(chunk.values[n][side * 2], chunk.values[n][side * 2 + 1]);
                *reinterpret_cast<float2 *>(sums + at * DIM + n * 8 + lane % 4 * 2) = pair;
            }
        }
    } else {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            float inverse = __frcp_rn(all.total[side]);
            bf16 *to = out + ((first_row + side * 8) * heads + head) * DIM + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < 16; ++n) {
                uint32_t pair = packed(__fmul_rn(all.values[n][side * 2], inverse),
                                       __fmul_rn(all.values[n][side * 2 + 1], inverse));
                *reinterpret_cast<uint32_t *>(to + n * 8) = pair;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 1)
attend(const bf16 *q, const bf16 *pool, const uint2 *blocks, const uint32_t *page_tables, bf16 *out,
       uint64_t page_stride, int kv_heads, int group) {
    wait_for_previous();
    let_next_start();
    // The last blocks of a prompt see most keys: they begin first, so that no long one is left over at the end.
    int block = gridDim.z - 1 - blockIdx.z;
    attention<8, false>(q, pool, blocks, page_tables, out, nullptr, nullptr, page_stride, kv_heads, group, blockIdx.x,
                        blockIdx.y, block, 0);
}

extern "C" __global__ void __launch_bounds__(128, 2)
partial(const bf16 *q, const bf16 *pool, const uint2 *blocks, const uint32_t *page_tables, float *sums,
        float2 *weights, uint64_t page_stride, int kv_heads, int group) {
    wait_for_previous();
    let_next_start();
    attention<4, true>(q, pool, blocks, page_tables, nullptr, sums, weights, page_stride, kv_heads, group,
                       blockIdx.y % kv_heads, blockIdx.y / kv_heads, blockIdx.z, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(256)
combine(const float *sums, const float2 *weights, const uint2 *blocks, bf16 *out, int heads) {
    wait_for_previous();
    let_next_start();
    int lane = threadIdx.x % 32, row = blockIdx.x * 8 + threadIdx.x / 32, head = blockIdx.y, block = blockIdx.z;
    int pages = blocks[block].y, step = tiles_of_chunk(pages) * TILE_PAGES, chunks = (pages + step - 1) / step;
    float maximum = -INFINITY, total = 0.0f, values[4] = {};
#pragma unroll 4
    for (int chunk = 0; chunk < chunks; ++chunk) {
        size_t at = ((size_t(block) * CHUNKS_MAX + chunk) * heads + head) * PAGE + row;
        float2 weight = weights[at];
        float4 part = *reinterpret_cast<const float4 *>(sums + at * DIM + lane * 4);
        float new_maximum = fmaxf(maximum, weight.x);
        float by = worth(maximum, new_maximum), chunk_by = worth(weight.x, new_maximum);
        total = fold(total, by, weight.y, chunk_by);
        maximum = new_maximum;
        values[0] = fold(values[0], by, part.x, chunk_by);
        values[1] = fold(values[1], by, part.y, chunk_by);
        values[2] = fold(values[2], by, part.z, chunk_by);
        values[3] = fold(values[3], by, part.w, chunk_by);
    }
    float inverse = __frcp_rn(total);
    uint2 result = make_uint2(packed(__fmul_rn(values[0], inverse), __fmul_rn(values[1], inverse)),
                              packed(__fmul_rn(values[2], inverse), __fmul_rn(values[3], inverse)));
    *reinterpret_cast<uint2 *>(out + ((size_t(block) * PAGE + row) * heads + head) * DIM + lane * 4) = result;
}
