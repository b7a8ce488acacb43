// attend_wide: attend of attention.cu, for Hopper: the same bits, by wgmma.
// Arguments and layouts: attention.cu.
// Grid: (kv_heads, ceil(group / 4), blocks).  Block: 384 threads: two warpgroups with 64 rows each, those of two query heads,
// and one that brings keys and values, as in gemm/wide_tile.cuh.
// Shared: `Shared`: two tiles of 128 keys and of 128 values, each two halves of 64 dimensions in rows of 128 bytes under the
// 128-byte swizzle; the queries as in attention.cu.
// Bound by the tensor cores: mma.sync would read a tile from shared memory once for 16 rows, wgmma does for 64; while one
// warpgroup takes exponentials the other multiplies.   Oracle: kernels/src/oracle/attention.rs
#include "common/barrier.cuh"
#include "common/wgmma.cuh"
#include "sums.cuh"

namespace {

constexpr int BUFFERS = 2;
constexpr int WORKERS = 256, CARRIERS = 128;
constexpr int HALF_BYTES = TILE_BYTES / 2;

struct Shared {
    /// Keys, then values.
    uint8_t tiles[BUFFERS][2][TILE_BYTES];
    uint8_t queries[WORKERS / 32][16 * DIM * 2];
    /// Of keys and of values: that the tile is there, and that all have read it.
    uint64_t full[BUFFERS][2], read[BUFFERS][2];
};

/// The other warpgroup's turn to multiply queries and keys, so that it takes exponentials later than this one.
__device__ __forceinline__ void await_turn(int warpgroup) {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + warpgroup), "n"(WORKERS) : "memory");
}
__device__ __forceinline__ void give_turn(int warpgroup) {
    asm volatile("bar.arrive %0, %1;" ::"r"(2 + warpgroup), "n"(WORKERS) : "memory");
}

/// Brings one head of a tile, zeros for pages that it lacks; by the last warpgroup.
__device__ __forceinline__ void bring_tile(uint32_t to, const bf16 *head, const uint32_t *table, int pages,
                                           uint64_t page_stride) {
    constexpr int PIECES = PAGE * DIM / 8;
    const int carrier = threadIdx.x - WORKERS;
    for (int page = 0; page < TILE_PAGES; ++page) {
        const bf16 *from = page < pages ? head + table[page] * page_stride : head;
#pragma unroll
        for (int i = carrier; i < PIECES; i += CARRIERS) {
            const int row = page * PAGE + i / 16, half = i % 16 / 8, piece = i % 8;
            copy_16_or_zeros(to + half * HALF_BYTES + row * 128 + (piece ^ row % 8) * 16, from + i * 8, page < pages);
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(WORKERS + CARRIERS, 1)
attend_wide(const bf16 *q, const bf16 *pool, const uint2 *blocks, const uint32_t *page_tables, bf16 *out,
            uint64_t page_stride, int kv_heads, int group) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    // The last blocks of a prompt see most keys: they begin first, so that no long one is left over at the end.
    const int kv_head = blockIdx.x, part = blockIdx.y, block_index = gridDim.z - 1 - blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warpgroup = threadIdx.x / 128;
    let_next_start();
    if (threadIdx.x == 0) {
        for (int i = 0; i < BUFFERS * 2; ++i) {
            barrier_init(shared_address(&s.full[0][0] + i), CARRIERS);
            barrier_init(shared_address(&s.read[0][0] + i), WORKERS / 32 * WARP_ARRIVALS);
        }
        barriers_ready();
    }
    __syncthreads();
    wait_for_previous();
    const uint2 block = blocks[block_index];
    const int pages = block.y, step = tiles_of_chunk(pages), tiles = (pages + TILE_PAGES - 1) / TILE_PAGES;
    auto pages_of = [&](int tile) { return min(TILE_PAGES, pages - tile * TILE_PAGES); };

    if (threadIdx.x >= WORKERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const uint32_t *table = page_tables + block.x;
        const bf16 *key_head = pool + size_t(kv_head) * PAGE * DIM;
        const bf16 *value_head = key_head + size_t(kv_heads) * PAGE * DIM;
        for (int tile = 0; tile < tiles; ++tile) {
            const int buffer = tile % BUFFERS;
#pragma unroll 1
            for (int what = 0; what < 2; ++what) {
                if (tile >= BUFFERS) {
                    barrier_wait(shared_address(&s.read[buffer][what]), (tile / BUFFERS - 1) % 2);
                }
                bring_tile(shared_address(s.tiles[buffer][what]), what == 0 ? key_head : value_head,
                           table + tile * TILE_PAGES, pages_of(tile), page_stride);
                barrier_arrive_after_copies(shared_address(&s.full[buffer][what]));
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    // The warp's rows among the 32 * group of this key and value head: head by head.
    const int row = (part * (WORKERS / 32) + warp) * 16, heads = kv_heads * group, head = kv_head * group + row / PAGE;
    const bool is_active = row < group * PAGE;
    const uint32_t queries = shared_address(s.queries[warp]);
    {
        const bf16 *from = q + ((size_t(block_index) * PAGE + row % PAGE) * heads + (is_active ? head : 0)) * DIM;
        load_queries(queries, from, heads, lane);
        commit_copies();
        wait_for_copies<0>();
        __syncwarp();
    }
    if (warpgroup == 1) {
        give_turn(0);
    }
    Sums all, chunk;
    all.clear();
    chunk.clear();
    int left_of_chunk = step;
    for (int tile = 0; tile < tiles; ++tile) {
        const int buffer = tile % BUFFERS, parity = tile / BUFFERS % 2;
        const bool is_fresh = left_of_chunk == step;
        float scores[16][4];
        uint32_t shares[8][4];
        {
            uint32_t query[8][4];
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                load_matrices(query[k], queries + swizzled(lane % 16, k * 2 + lane / 16));
            }
            const uint32_t keys = shared_address(s.tiles[buffer][0]);
            barrier_wait(shared_address(&s.full[buffer][0]), parity);
            // Carriers wrote as loads and stores do, and wgmma reads by another way: as in gemm/wide_tile.cuh.
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            await_turn(warpgroup);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                wgmma<128>(reinterpret_cast<float(&)[64]>(scores), query[k],
                           wgmma_operand(keys + k / 4 * HALF_BYTES + k % 4 * 32), k > 0);
            }
            wgmma_commit();
            // Before this one's products are there: the other's queue behind them. (Behind the wait, the compiler would give
            // the turn after the exponentials.)
            give_turn(1 - warpgroup);
            wgmma_wait<0>();
            warp_arrive(shared_address(&s.read[buffer][0]));
        }
        weigh(shares, scores, chunk, pages_of(tile), is_fresh);
        const uint32_t values = shared_address(s.tiles[buffer][1]);
        barrier_wait(shared_address(&s.full[buffer][1]), parity);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        wgmma_fence();
        // Values of pages that are not there are zeros, and so are their shares: they add nothing.
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            wgmma<128, true>(reinterpret_cast<float(&)[64]>(chunk.values), shares[k],
                             wgmma_operand_across(values + k * (16 * 128), HALF_BYTES), k > 0 || !is_fresh);
        }
        wgmma_commit();
        wgmma_wait<0>();
        warp_arrive(shared_address(&s.read[buffer][1]));

        --left_of_chunk;
        if (left_of_chunk == 0 || tile + 1 == tiles) {
            left_of_chunk = step;
            all.fold_in(chunk);
            chunk.maximum[0] = chunk.maximum[1] = -INFINITY;
        }
    }
    // Turns are even: the last one is taken by nobody.
    if (warpgroup == 0) {
        await_turn(0);
    }
    if (is_active) {
        all.store(out + ((size_t(block_index) * PAGE + row % PAGE) * heads + head) * DIM, size_t(heads) * DIM, lane);
    }
}
