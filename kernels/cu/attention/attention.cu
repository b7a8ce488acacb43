// attend:  out[r, h] = softmax over the keys that the row sees of (q[r, h] . k / sqrt(128)), times v
// attend_ahead: the same, for GPUs with twice the shared memory: copies of a tile begin before the one in front is used
// partial: the same over one chunk of the keys, not yet divided;   combine: folds the chunks of `partial`
// q, out: [blocks * 32, kv_heads * group, 128] bf16.   blocks: (start in page_tables, pages seen), the own page included.
// pool: pages of [layers, 2, kv_heads, 32, 128] bf16, keys first, `page_stride` elements each, from this layer's part on.
// sums: [blocks, CHUNKS_MAX, heads, 32, 128] f32.   weights: [blocks, CHUNKS_MAX, heads, 32] of (maximum, sum).
// Grid: attend(_ahead): (kv_heads, ceil(group / 4), blocks), 256 threads; partial: (CHUNKS_MAX, kv_heads * ceil(group / 2),
// blocks), 128 threads: a warp has 16 rows of one query head; combine: (4, heads, blocks), 256 threads, a warp a row.
// Shared: 128 keys and 128 values of one head (attend_ahead: twice), then the queries, 64 KiB and 4 KiB a warp: rows of
// 256 bytes whose 16-byte pieces are swizzled by row.
//
// Order of sums: keys are taken in tiles of 4 pages. A chunk is `tiles_of_chunk` tiles, which depends on the row's own
// position alone; within a chunk the running maximum and sums go from tile to tile, and the chunks, each begun from
// nothing, are folded from the first to the last. `attend` folds in registers what `combine` folds from memory, with the
// same operations, so which of them ran cannot be told from the result.
// Rounding: q.k and all sums are FP32; weights are rounded to BF16 for the product with v, not for their own sum; the
// result is rounded once. Bound by the tensor cores when many rows share the keys, by latency when few do.
// Oracle: kernels/src/oracle/attention.rs
#include "sums.cuh"

/// `BUFFERS`: tiles of keys and values that there is room for, one or two.
template <int WARPS, bool IS_SPLIT, int BUFFERS>
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
    // The warp's queries stay in shared memory: in registers they would push sums out.
    uint32_t queries = keys + BUFFERS * 2 * TILE_BYTES + warp * 16 * DIM * 2;
    if (is_active) {
        const bf16 *from = q + ((size_t(block_index) * PAGE + row % PAGE) * heads + head) * DIM;
        load_queries(queries, from, heads, lane);
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
        uint32_t shares[8][4];
        if (BUFFERS == 1) {
            wait_for_copies<1>();
            __syncthreads();
            if (is_active) {
                score(scores, queries, keys, lane);
            }
            __syncthreads();
            if (tile + 1 < end) {
                load_tile<THREADS>(keys, key_head, table + (tile + 1) * TILE_PAGES, pages_of(tile + 1), page_stride);
            }
            commit_copies();
            if (is_active) {
                weigh(shares, scores, chunk, tile_pages, is_fresh);
            }
            wait_for_copies<1>();
            __syncthreads();
            if (is_active) {
                add_values(chunk, shares, values, tile_pages, lane);
            }
            __syncthreads();
            if (tile + 1 < end) {
                load_tile<THREADS>(values, value_head, table + (tile + 1) * TILE_PAGES, pages_of(tile + 1), page_stride);
            }
            commit_copies();
        } else {
            // One barrier a tile, and a second buffer: warps are as far apart as a tile, so that some multiply while others
            // take exponentials.
            wait_for_copies<0>();
            __syncthreads();
            uint32_t here = (tile & 1) * 2 * TILE_BYTES, next = 2 * TILE_BYTES - here;
            if (tile + 1 < end) {
                const uint32_t *pages_of_next = table + (tile + 1) * TILE_PAGES;
                load_tile<THREADS>(keys + next, key_head, pages_of_next, pages_of(tile + 1), page_stride);
                load_tile<THREADS>(values + next, value_head, pages_of_next, pages_of(tile + 1), page_stride);
            }
            commit_copies();
            if (is_active) {
                score(scores, queries, keys + here, lane);
                weigh(shares, scores, chunk, tile_pages, is_fresh);
                add_values(chunk, shares, values + here, tile_pages, lane);
            }
        }

        --left_of_chunk;
        if (!IS_SPLIT && (left_of_chunk == 0 || tile + 1 == end)) {
            left_of_chunk = step;
            all.fold_in(chunk);
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
        all.store(out + ((size_t(block_index) * PAGE + row % PAGE) * heads + head) * DIM, size_t(heads) * DIM, lane);
    }
}

// The last blocks of a prompt see most keys: they begin first, so that no long one is left over at the end.
#define ATTEND(NAME, BUFFERS)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256, 1)                                                               \
        NAME(const bf16 *q, const bf16 *pool, const uint2 *blocks, const uint32_t *page_tables, bf16 *out,             \
             uint64_t page_stride, int kv_heads, int group) {                                                          \
        let_next_start();                                                                                              \
        wait_for_previous();                                                                                           \
        attention<8, false, BUFFERS>(q, pool, blocks, page_tables, out, nullptr, nullptr, page_stride, kv_heads,       \
                                     group, blockIdx.x, blockIdx.y, gridDim.z - 1 - blockIdx.z, 0);                    \
    }
ATTEND(attend, 1)
ATTEND(attend_ahead, 2)

extern "C" __global__ void __launch_bounds__(128, 2)
partial(const bf16 *q, const bf16 *pool, const uint2 *blocks, const uint32_t *page_tables, float *sums,
        float2 *weights, uint64_t page_stride, int kv_heads, int group) {
    let_next_start();
    wait_for_previous();
    attention<4, true, 1>(q, pool, blocks, page_tables, nullptr, sums, weights, page_stride, kv_heads, group,
                       blockIdx.y % kv_heads, blockIdx.y / kv_heads, blockIdx.z, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(256)
combine(const float *sums, const float2 *weights, const uint2 *blocks, bf16 *out, int heads) {
    let_next_start();
    wait_for_previous();
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
