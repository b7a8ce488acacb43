// attend_one: norm_and_rope of rope.cu, then attend of attention.cu, of a single block, in one kernel for Hopper; the same
// bits. Arguments and layouts: there, but blocks has one entry, and that block's own page is the only one written.
// Grid: (8, kv_heads * ceil(group / 2)), clusters of 8.  Block: 256 threads in two halves, each with a chunk of the keys at a
// time: chunk c is of half c / 8 % 2 of block c % 8; a warp has 16 of 64 rows, those of two query heads.
// Shared: `Shared`: for each half a tile of keys and values, then its first and its second chunk's sums; and the queries.
// Bound by latency: keys and values of earlier blocks come before the queries are there, and the chunks are folded over the
// cluster's shared memory.   Oracle: kernels/src/oracle/{norm,rope,attention}.rs
#include "common/cluster.cuh"
#include "rope/head.cuh"
#include "sums.cuh"

namespace {

constexpr int CLUSTER = 8;
constexpr int HALVES = 2;
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 16 * WARPS;
/// Floats between rows of sums: a thread's pairs of eight rows are in different banks.
constexpr int PITCH = DIM + 8;

struct Chunk {
    float values[ROWS][PITCH];
    float2 weights[ROWS];
};

struct Shared {
    /// Keys, then values; the second chunk's sums once both are done with.
    uint8_t tiles[HALVES][2 * TILE_BYTES];
    uint8_t queries[ROWS * DIM * 2];
    Chunk first[HALVES];
};
static_assert(sizeof(Shared) == 213 * 1024, "kernels/src/cuda/attention.rs has it too");
static_assert(CHUNKS_MAX == 2 * HALVES * CLUSTER && sizeof(Chunk) <= 2 * TILE_BYTES);

__device__ __forceinline__ void sync_half(int half) {
    asm volatile("bar.sync %0, %1;" ::"r"(half + 1), "n"(THREADS) : "memory");
}

/// Starts copying one head of `pages` pages into a tile; by half a block.
__device__ __forceinline__ void load_pages(uint32_t to, const bf16 *head, const uint32_t *table, int pages,
                                           uint64_t page_stride) {
    constexpr int PIECES = PAGE * DIM / 8;
    for (int i = threadIdx.x % THREADS; i < pages * PIECES; i += THREADS) {
        int page = i / PIECES, row = i % PIECES / 16, piece = i % 16;
        copy_16(to + swizzled(page * PAGE + row, piece), head + table[page] * page_stride + row * DIM + piece * 8);
    }
}

/// Puts dimension `d` of a row of a tile.
__device__ __forceinline__ void put(uint8_t *tile, int row, int d, bf16 value) {
    *reinterpret_cast<bf16 *>(tile + swizzled(row, d / 8) + d % 8 * 2) = value;
}

}  // namespace

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(HALVES * THREADS, 1)
attend_one(const bf16 *qkv, const bf16 *query_weight, const bf16 *key_weight, const __nv_bfloat162 *tables, bf16 *pool,
           const uint2 *blocks, const uint32_t *page_tables, bf16 *out, uint64_t page_stride, int kv_heads, int group,
           float eps) {
    extern __shared__ __align__(128) uint8_t memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const int kv_head = blockIdx.y % kv_heads, part = blockIdx.y / kv_heads, rank = blockIdx.x, heads = kv_heads * group;
    const int half = threadIdx.x / THREADS, warp = threadIdx.x / 32 % WARPS, lane = threadIdx.x % 32;
    const uint2 block = blocks[0];
    const int pages = block.y, step = tiles_of_chunk(pages), tiles = (pages + TILE_PAGES - 1) / TILE_PAGES;
    const int chunks = (tiles + step - 1) / step, own_tile = tiles - 1, own_place = (pages - 1) % TILE_PAGES;
    const uint32_t *table = page_tables + block.x;
    bf16 *key_head = pool + size_t(kv_head) * PAGE * DIM, *value_head = key_head + size_t(kv_heads) * PAGE * DIM;
    const uint32_t keys = shared_address(s.tiles[half]), values = keys + TILE_BYTES;
    const uint32_t queries = shared_address(s.queries) + warp * 16 * DIM * 2;
    auto pages_of = [&](int tile) { return min(TILE_PAGES, pages - tile * TILE_PAGES); };
    // The own page is not in the pool yet.
    auto load = [&](uint32_t to, const bf16 *head, int tile) {
        load_pages(to, head, table + tile * TILE_PAGES, pages_of(tile) - int(tile == own_tile), page_stride);
    };
    const bool is_active = (part * WARPS + warp) * 16 < group * PAGE;

    let_next_start();
    int chunk_index = rank + half * CLUSTER;
    if (chunk_index < chunks) {
        load(keys, key_head, chunk_index * step);
    }
    commit_copies();
    if (chunk_index < chunks) {
        load(values, value_head, chunk_index * step);
    }
    commit_copies();
    // Eight warps: the queries' rows are those of two heads, the keys' and values' those of one.
    constexpr int OWN_QUERIES = ROWS / (HALVES * WARPS), OWN_KEYS = PAGE / (HALVES * WARPS);
    const int width = (heads + 2 * kv_heads) * DIM, eighth = threadIdx.x / 32, first_position = (pages - 1) * PAGE;
    const int query_row = eighth * OWN_QUERIES, key_row = eighth * OWN_KEYS;
    const int last = chunks - 1, own_half = last / CLUSTER % HALVES;
    // The own page goes to the half that has the last chunk.
    const bool has_own = last % CLUSTER == rank, has_queries = part * ROWS + query_row < group * PAGE;
    float query_norm[4], key_norm[4];
    float2 query_turn[OWN_QUERIES], key_turn[OWN_KEYS];
    load_weight(query_norm, query_weight, lane);
    load_weight(key_norm, key_weight, lane);
#pragma unroll
    for (int i = 0; i < OWN_QUERIES; ++i) {
        query_turn[i] = __bfloat1622float2(tables[size_t(first_position + (query_row + i) % PAGE) * PAIRS + lane]);
    }
#pragma unroll
    for (int i = 0; i < OWN_KEYS; ++i) {
        key_turn[i] = __bfloat1622float2(tables[size_t(first_position + key_row + i) * PAIRS + lane]);
    }
    wait_for_previous();
    float q[OWN_QUERIES][4], k[OWN_KEYS][4];
    bf16 v[OWN_KEYS][4];
    if (has_queries) {
        const int head = kv_head * group + (part * ROWS + query_row) / PAGE;
#pragma unroll
        for (int i = 0; i < OWN_QUERIES; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                q[i][j] = __bfloat162float(qkv[size_t((query_row + i) % PAGE) * width + head * DIM + lane + 32 * j]);
            }
        }
    }
    if (has_own) {
#pragma unroll
        for (int i = 0; i < OWN_KEYS; ++i) {
            const bf16 *from = qkv + size_t(key_row + i) * width + (heads + kv_head) * DIM + lane;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                k[i][j] = __bfloat162float(from[32 * j]), v[i][j] = from[kv_heads * DIM + 32 * j];
            }
        }
    }
    if (has_queries) {
        norm_and_turn<OWN_QUERIES>(q, query_weight != nullptr, query_norm, query_turn, eps);
#pragma unroll
        for (int i = 0; i < OWN_QUERIES; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                put(s.queries, query_row + i, lane + 32 * j, __float2bfloat16_rn(q[i][j]));
            }
        }
    }
    if (has_own) {
        norm_and_turn<OWN_KEYS>(k, key_weight != nullptr, key_norm, key_turn, eps);
        uint8_t *key_rows = s.tiles[own_half], *value_rows = key_rows + TILE_BYTES;
        // If the tile is the chunk's first, its place in shared memory is free; otherwise it is read from the pool.
        const bool is_here = last < HALVES * CLUSTER && last * step == own_tile;
        const size_t page = table[pages - 1] * page_stride;
#pragma unroll
        for (int i = 0; i < OWN_KEYS; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int row = key_row + i, d = lane + 32 * j;
                const bf16 key = __float2bfloat16_rn(k[i][j]);
                if (is_here) {
                    put(key_rows, own_place * PAGE + row, d, key);
                    put(value_rows, own_place * PAGE + row, d, v[i][j]);
                }
                if (part == 0 || !is_here) {
                    key_head[page + row * DIM + d] = key;
                    value_head[page + row * DIM + d] = v[i][j];
                }
            }
        }
    }
    // Rows of the queries, and the own page whether in shared memory or in the pool.
    __syncthreads();

    bool is_first_tile = true;
    for (; chunk_index < chunks; chunk_index += HALVES * CLUSTER) {
        const int begin = chunk_index * step, end = min(begin + step, tiles);
        Sums chunk;
        chunk.clear();
        for (int tile = begin; tile < end; ++tile) {
            const int tile_pages = pages_of(tile);
            if (!is_first_tile) {
                // Everybody has read the tile before this one. By now the own page is in the pool.
                sync_half(half);
                load_pages(keys, key_head, table + tile * TILE_PAGES, tile_pages, page_stride);
                commit_copies();
                load_pages(values, value_head, table + tile * TILE_PAGES, tile_pages, page_stride);
                commit_copies();
            }
            is_first_tile = false;
            float scores[16][4];
            uint32_t shares[8][4];
            wait_for_copies<1>();
            sync_half(half);
            if (is_active) {
                score(scores, queries, keys, tile_pages, lane);
                weigh(shares, scores, chunk, tile_pages, tile == begin);
            }
            wait_for_copies<0>();
            sync_half(half);
            if (is_active) {
                add_values(chunk, shares, values, tile_pages, lane);
            }
        }
        // A second chunk's sums go where its tiles were.
        const bool is_second = chunk_index >= HALVES * CLUSTER;
        if (is_second) {
            sync_half(half);
        }
        Chunk &to = is_second ? *reinterpret_cast<Chunk *>(s.tiles[half]) : s.first[half];
        if (is_active) {
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const int row = warp * 16 + lane / 4 + side * 8;
                if (lane % 4 == 0) {
                    to.weights[row] = make_float2(chunk.maximum[side], chunk.total[side]);
                }
#pragma unroll
                for (int n = 0; n < 16; ++n) {
                    *reinterpret_cast<float2 *>(&to.values[row][n * 8 + lane % 4 * 2]) =
                        make_float2(chunk.values[n][side * 2], chunk.values[n][side * 2 + 1]);
                }
            }
        }
    }
    sync_cluster();

    // As `combine`: a warp folds one of the block's eighth of the rows.
    const int row = rank * (ROWS / CLUSTER) + eighth;
    if (part * ROWS + row < group * PAGE) {
        float maximum = -INFINITY, total = 0.0f, sum[4] = {};
#pragma unroll 4
        for (int index = 0; index < chunks; ++index) {
            const int of_half = index / CLUSTER % HALVES;
            Chunk *from = index < HALVES * CLUSTER ? &s.first[of_half] : reinterpret_cast<Chunk *>(s.tiles[of_half]);
            from = in_block(from, index % CLUSTER);
            const float2 weight = from->weights[row];
            const float4 values_of = *reinterpret_cast<const float4 *>(&from->values[row][lane * 4]);
            const float new_maximum = fmaxf(maximum, weight.x);
            const float by = worth(maximum, new_maximum), chunk_by = worth(weight.x, new_maximum);
            total = fold(total, by, weight.y, chunk_by);
            maximum = new_maximum;
            sum[0] = fold(sum[0], by, values_of.x, chunk_by);
            sum[1] = fold(sum[1], by, values_of.y, chunk_by);
            sum[2] = fold(sum[2], by, values_of.z, chunk_by);
            sum[3] = fold(sum[3], by, values_of.w, chunk_by);
        }
        const float inverse = __frcp_rn(total);
        const uint2 result = make_uint2(packed(__fmul_rn(sum[0], inverse), __fmul_rn(sum[1], inverse)),
                                        packed(__fmul_rn(sum[2], inverse), __fmul_rn(sum[3], inverse)));
        const int head = kv_head * group + (part * ROWS + row) / PAGE;
        *reinterpret_cast<uint2 *>(out + (size_t(row % PAGE) * heads + head) * DIM + lane * 4) = result;
    }
    // No block ends while another reads its memory.
    sync_cluster_before_end();
}
