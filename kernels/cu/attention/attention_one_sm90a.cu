// attend_one: norm_and_rope of rope.cu, then attend of attention.cu, of a single block, in one kernel for Hopper; the same
// bits. Arguments and layouts: there, but blocks has one entry, and that block's own page is the only one written.
// Grid: (8, kv_heads * ceil(group / 2)), clusters of 8.  Block: 256 threads in two halves, each with a chunk of the keys at a
// time: chunk c is of half c / 8 % 2 of block c % 8; a warp has 16 of 64 rows, those of two query heads.
// Shared: `Shared`: for each half a tile of keys and values; the queries; what the cluster has summed for this block's rows;
// rows on their way.
// Bound by latency: keys and values of earlier blocks come before the queries are there, and each block is sent the sums of
// the rows that it folds, for it would wait longer for what it fetched.   Oracle: kernels/src/oracle/{norm,rope,attention}.rs
#include "common/barrier.cuh"
#include "common/cluster.cuh"
#include "rope/head.cuh"
#include "sums.cuh"

namespace {

constexpr int CLUSTER = 8;
constexpr int HALVES = 2;
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 16 * WARPS;
/// Chunks that the halves of all blocks compute at once.
constexpr int AT_ONCE = HALVES * CLUSTER;
/// Rows that a block norms, and folds.
constexpr int OWN_ROWS = ROWS / CLUSTER;
/// Floats between rows of sums: a thread's pairs of eight rows are in different banks.
constexpr int PITCH = DIM + 8;

/// The sums of some chunk for the rows of a block.
struct Part {
    float values[OWN_ROWS][PITCH];
    /// Maximum and total.
    float2 weights[OWN_ROWS];
};

struct Shared {
    /// Keys, then values; then what their sums are, of all blocks' rows.
    uint8_t tiles[HALVES][2 * TILE_BYTES];
    uint8_t queries[ROWS * DIM * 2];
    Part parts[AT_ONCE];
    /// What each warp has normed or copied: of the queries, and of the own page.
    bf16 rows[HALVES * WARPS][2][DIM];
    /// Says that `parts` are there.
    alignas(16) uint64_t received;
};
static_assert(sizeof(Shared) == 217 * 1024 + 16, "kernels/src/cuda/attention.rs has it too");
static_assert(CLUSTER * sizeof(Part) <= 2 * TILE_BYTES);

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

/// Sends the sums of a chunk to the blocks that fold their rows, a warp's first eight and its others; by half a block, whose
/// tiles are overwritten. What stays here, in block `rank`, is put in its place.
__device__ __forceinline__ void send(Shared &s, const Sums &chunk, int half, int rank, int slot, bool is_active, int warp,
                                     int lane) {
    static_assert(OWN_ROWS == 8);
    Part *parts = reinterpret_cast<Part *>(s.tiles[half]);
    sync_half(half);
    if (is_active) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const int owner = warp * 2 + side;
            Part &to = owner == rank ? s.parts[slot] : parts[owner];
            const int row = lane / 4;
            if (lane % 4 == 0) {
                to.weights[row] = make_float2(chunk.maximum[side], chunk.total[side]);
            }
#pragma unroll
            for (int n = 0; n < 16; ++n) {
                *reinterpret_cast<float2 *>(&to.values[row][n * 8 + lane % 4 * 2]) =
                    make_float2(chunk.values[n][side * 2], chunk.values[n][side * 2 + 1]);
            }
        }
        let_copies_see();
    }
    __syncwarp();
    // By one lane, and none to this block: memcheck of compute-sanitizer takes others for copies to nowhere.
    if (lane == 0) {
#pragma unroll 1
        for (int to = warp * 2; to < warp * 2 + 2; ++to) {
            if (to != rank) {
                send_bulk(address_in_block(shared_address(&s.parts[slot]), to), shared_address(&parts[to]), sizeof(Part),
                          address_in_block(shared_address(&s.received), to));
            }
        }
    }
}

/// Folds `count` chunks' sums of a row in, four columns a lane.
__device__ __forceinline__ void fold_in(float &maximum, float &total, float (&sum)[4], const Shared &s, int row, int count,
                                        int lane) {
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
        const float2 weights = s.parts[i].weights[row];
        const float4 values = *reinterpret_cast<const float4 *>(&s.parts[i].values[row][lane * 4]);
        const float new_maximum = fmaxf(maximum, weights.x);
        const float by = worth(maximum, new_maximum), chunk_by = worth(weights.x, new_maximum);
        total = fold(total, by, weights.y, chunk_by);
        maximum = new_maximum;
        sum[0] = fold(sum[0], by, values.x, chunk_by);
        sum[1] = fold(sum[1], by, values.y, chunk_by);
        sum[2] = fold(sum[2], by, values.z, chunk_by);
        sum[3] = fold(sum[3], by, values.w, chunk_by);
    }
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
    const uint32_t received = shared_address(&s.received);
    if (threadIdx.x == 0) {
        barrier_init(received, 1 + HALVES * WARP_ARRIVALS);
        barriers_ready();
    }
    arrive_in_cluster();
    const int slot = rank + half * CLUSTER;
    if (slot < chunks) {
        load(keys, key_head, slot * step);
    }
    commit_copies();
    if (slot < chunks) {
        load(values, value_head, slot * step);
    }
    commit_copies();
    // Each block of the cluster norms an eighth of the rows for all of them: a query's by every warp, and one of the own page's,
    // whose keys are the first four warps' and whose values the others'.
    constexpr int OWN_KEYS = PAGE / CLUSTER;
    static_assert(OWN_ROWS == HALVES * WARPS && 2 * OWN_KEYS == HALVES * WARPS);
    const int width = (heads + 2 * kv_heads) * DIM, eighth = threadIdx.x / 32, first_position = (pages - 1) * PAGE;
    const int row = rank * OWN_ROWS + eighth, own_row = rank * OWN_KEYS + eighth % OWN_KEYS;
    const bool has_query = part * ROWS + row < group * PAGE, is_key = eighth < OWN_KEYS;
    const int head = kv_head * group + (part * ROWS + row) / PAGE;
    float norms[2][4];
    float2 turns[2];
    load_weight(norms[0], query_weight, lane);
    load_weight(norms[1], key_weight, lane);
    turns[0] = __bfloat1622float2(tables[size_t(first_position + row % PAGE) * PAIRS + lane]);
    turns[1] = __bfloat1622float2(tables[size_t(first_position + own_row) * PAIRS + lane]);
    wait_for_previous();
    const bf16 *query = qkv + size_t(row % PAGE) * width + (has_query ? head : 0) * DIM + lane;
    const bf16 *own = qkv + size_t(own_row) * width + (heads + kv_head + (is_key ? 0 : kv_heads)) * DIM + lane;
    float v[2][4];
    bf16 value[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        v[0][j] = __bfloat162float(query[32 * j]);
        value[j] = own[32 * j], v[1][j] = __bfloat162float(value[j]);
    }
    norm_and_turn<2>(v, {query_weight != nullptr, key_weight != nullptr}, norms, turns, eps);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const uint32_t pair = packed(v[0][j], v[1][j]);
        s.rows[eighth][0][lane + 32 * j] = low_bf16(pair);
        s.rows[eighth][1][lane + 32 * j] = is_key ? high_bf16(pair) : value[j];
    }
    __syncwarp();
    wait_for_cluster();
    const int piece = lane % 16;
    if (has_query) {
        const uint4 eight = *reinterpret_cast<const uint4 *>(&s.rows[eighth][0][piece * 8]);
#pragma unroll
        for (int block_of = lane / 16; block_of < CLUSTER; block_of += 2) {
            *reinterpret_cast<uint4 *>(in_block(s.queries, block_of) + swizzled(row, piece)) = eight;
        }
    }
    // The own page goes to the half that has the last chunk. If the tile is the chunk's first, its place in shared memory is
    // free; otherwise it is read from the pool.
    const int last = chunks - 1;
    const bool is_here = last < HALVES * CLUSTER && last * step == own_tile;
    bf16 *in_pool = (is_key ? key_head : value_head) + table[pages - 1] * page_stride + own_row * DIM + piece * 8;
    const uint4 own_eight = *reinterpret_cast<const uint4 *>(&s.rows[eighth][1][piece * 8]);
    if (lane < 16) {
        if (is_here) {
            uint8_t *tile = in_block(s.tiles[last / CLUSTER % HALVES], last % CLUSTER) + (is_key ? 0 : TILE_BYTES);
            *reinterpret_cast<uint4 *>(tile + swizzled(own_place * PAGE + own_row, piece)) = own_eight;
        } else {
            *reinterpret_cast<uint4 *>(in_pool) = own_eight;
        }
    }
    // Rows of the queries, and the own page whether in shared memory or in the pool.
    sync_cluster();
    if (lane < 16 && is_here && part == 0) {
        *reinterpret_cast<uint4 *>(in_pool) = own_eight;
    }

    // As `combine`: a warp folds one row, of what all blocks have sent.
    float maximum = -INFINITY, total = 0.0f, sum[4] = {};
    bool is_first_tile = true;
    for (int first_chunk = 0; first_chunk < chunks; first_chunk += AT_ONCE) {
        const int chunk_index = first_chunk + slot, at_once = min(chunks - first_chunk, AT_ONCE);
        if (threadIdx.x == 0) {
            const int own = int(first_chunk + rank < chunks) + int(first_chunk + CLUSTER + rank < chunks);
            barrier_expect(received, (at_once - own) * sizeof(Part));
        }
        Sums chunk;
        chunk.clear();
        const int begin = chunk_index * step, end = min(begin + step, tiles);
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
                score(scores, queries, keys, lane);
                weigh(shares, scores, chunk, tile_pages, tile == begin);
            }
            wait_for_copies<0>();
            sync_half(half);
            if (is_active) {
                add_values(chunk, shares, values, tile_pages, lane);
            }
        }
        if (first_chunk > 0) {
            // Everybody has folded what lies where this goes.
            sync_cluster();
        }
        if (chunk_index < chunks) {
            send(s, chunk, half, rank, slot, is_active, warp, lane);
        }
        if (warp == rank / 2) {
            // Each half says that what it has for this block is there, or that it has nothing.
            warp_arrive(received);
        }
        barrier_wait(received, first_chunk / AT_ONCE % 2);
        if (has_query) {
            fold_in(maximum, total, sum, s, eighth, at_once, lane);
        }
        wait_until_sent();
    }
    if (has_query) {
        const float inverse = __frcp_rn(total);
        const uint2 result = make_uint2(packed(__fmul_rn(sum[0], inverse), __fmul_rn(sum[1], inverse)),
                                        packed(__fmul_rn(sum[2], inverse), __fmul_rn(sum[3], inverse)));
        *reinterpret_cast<uint2 *>(out + (size_t(row % PAGE) * heads + head) * DIM + lane * 4) = result;
    }
}
