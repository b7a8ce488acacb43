// choose_block: choose of route.cu, and of a single block order too, by a cluster of blocks of threads for each block of
//               rows, for Hopper; the same bits. Routing by block capacity only.
// Arguments and layouts: route.cu. stride, tile_rows: as order's; what it writes is written if the batch is one block.
// Grid: 8 blocks of threads a block of rows, a cluster.  Block: 256 threads: a thread for each expert, then a warp for each
// of 4 rows.
// Bound by latency: one multiprocessor would issue for 10 us what eight issue for 2; they meet twice.
// Oracle: kernels/src/oracle/router.rs
#include "common/cluster.cuh"
#include "rank.cuh"

namespace {

constexpr int CLUSTER = 8;
/// Rows of a block of threads.
constexpr int OWN_ROWS = ROWS / CLUSTER;

struct Shared {
    /// The largest biased score of each expert among the rows of each block of the cluster.
    int peaks_of[CLUSTER][EXPERTS_MAX];
    alignas(16) int peaks[EXPERTS_MAX];
    /// Of this block's rows.
    float scores[OWN_ROWS][EXPERTS_MAX];
    /// A bit for each of the 32 rows: the same in every block of the cluster once all have told the others.
    uint32_t chosen[EXPERTS_MAX];
    uint32_t in_pool[WARPS];
    uint16_t list[EXPERTS_MAX];
    /// The pool's biased scores of this block's rows.
    alignas(16) int pool_scores[OWN_ROWS][EXPERTS_MAX];
    uint16_t picked[OWN_ROWS][32];
    int first_slot[EXPERTS_MAX];
    int scratch[WARPS];
};

/// The `k` best of the pool for one of this block's rows, by a warp; the pool is of up to `32 * COUNT`.
template <int COUNT>
__device__ __forceinline__ void pick(Shared &s, uint32_t *ids, int row, int lane, int capacity, int k) {
    int own[CANDIDATES_OF_LANE], places[CANDIDATES_OF_LANE];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int place = i * 32 + lane;
        places[i] = 0;
        own[i] = place < capacity ? s.pool_scores[row][place] : LAST;
        if (place >= capacity) {
            s.pool_scores[row][place] = LAST;
        }
    }
    __syncwarp();
    rank_among<COUNT>(places, own, s.pool_scores[row], capacity, lane);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        if (i * 32 + lane < capacity && places[i] < k) {
            const int id = s.list[i * 32 + lane];
            ids[places[i]] = id;
            s.picked[row][places[i]] = id;
        }
    }
}

}  // namespace

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
choose_block(const float *logits, const float *bias, uint32_t *ids, float *weights, uint32_t *masks, uint32_t *slot_rows,
             uint32_t *slot_parts, uint4 *tiles, uint32_t *tile_count, int experts, int k, float scale,
             int capacity, int stride, int tile_rows) {
    __shared__ Shared s;
    const int rank = blockIdx.x % CLUSTER, block = blockIdx.x / CLUSTER, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int expert = threadIdx.x;
    const size_t first_row = size_t(block) * ROWS + rank * OWN_ROWS;
    let_next_start();
    arrive_in_cluster();
    s.chosen[expert] = 0;
    const float own_bias = expert < experts ? bias[expert] : 0.0f;
    wait_for_previous();
    float logit[OWN_ROWS];
#pragma unroll
    for (int row = 0; row < OWN_ROWS; ++row) {
        logit[row] = expert < experts ? logits[(first_row + row) * experts + expert] : -INFINITY;
    }
    int peak = ordered(-INFINITY);
#pragma unroll
    for (int row = 0; row < OWN_ROWS; ++row) {
        const float score = sigmoid(logit[row]);
        s.scores[row][expert] = score;
        peak = max(peak, expert < experts ? ordered(score + own_bias) : peak);
    }
    wait_for_cluster();
#pragma unroll
    for (int other = 0; other < CLUSTER; ++other) {
        in_block(s.peaks_of[rank], other)[expert] = peak;
    }
    // From here on all peaks are there, and `chosen` is zero everywhere.
    sync_cluster();
#pragma unroll
    for (int other = 0; other < CLUSTER; ++other) {
        peak = max(peak, s.peaks_of[other][expert]);
    }
    s.peaks[expert] = peak;
    __syncthreads();
    int before = 0;
    // Rolled up: code that runs once has to be fetched, too.
#pragma unroll 1
    for (int first = 0; first < EXPERTS_MAX; first += 32) {
        before += first == warp * 32 ? count_before(s.peaks + first, peak, lane)
                                     : count_above(s.peaks + first, peak - int(first < warp * 32));
    }
    const bool is_member = expert < experts && before < capacity;
    const uint32_t members = __ballot_sync(0xffffffffu, is_member);
    if (lane == 0) {
        s.in_pool[warp] = members;
    }
    __syncthreads();
    if (is_member) {
        int place = __popc(members & ((1u << lane) - 1));
        for (int word = 0; word < warp; ++word) {
            place += __popc(s.in_pool[word]);
        }
        s.list[place] = expert;
        // Places in the list, which ascends, stand for expert numbers in every comparison.
#pragma unroll
        for (int row = 0; row < OWN_ROWS; ++row) {
            s.pool_scores[row][place] = ordered(s.scores[row][expert] + own_bias);
        }
    }
    __syncthreads();
    if (warp < OWN_ROWS) {
        const size_t first = (first_row + warp) * k;
        if (capacity <= 64) {
            pick<2>(s, ids + first, warp, lane, capacity, k);
        } else {
            pick<CANDIDATES_OF_LANE>(s, ids + first, warp, lane, capacity, k);
        }
        __syncwarp();
        for (int i = lane; i < k * CLUSTER; i += 32) {
            atomicOr(in_block(&s.chosen[s.picked[warp][i / CLUSTER]], i % CLUSTER), 1u << (rank * OWN_ROWS + warp));
        }
        const float weight = lane < k ? s.scores[warp][s.picked[warp][lane]] : 0.0f;
        float total = 0.0f;
        for (int slot = 0; slot < k; ++slot) {
            total += __shfl_sync(0xffffffffu, weight, slot);
        }
        if (lane < k) {
            weights[first + lane] = __fmul_rn(k == 1 ? weight : __fdiv_rn(weight, total + 1e-20f), scale);
        }
    }
    // No block reads or writes another's memory after this.
    sync_cluster();
    const uint32_t mask = s.chosen[expert];
    if (rank == 0 && expert < experts) {
        masks[size_t(block) * experts + expert] = mask;
    }
    if (gridDim.x > CLUSTER) {
        return;
    }
    // A single block: its slots are all there are.
    const int all = __popc(mask), tiles_of_expert = (all + tile_rows - 1) / tile_rows;
    const int start = sum_before(all, s.scratch).x;
    s.first_slot[expert] = start;
    const int2 tile_before = sum_before(tiles_of_expert, s.scratch);
    if (rank == 0) {
        for (int i = 0; i < tiles_of_expert; ++i) {
            const int done = i * tile_rows;
            tiles[tile_before.x + i] = make_uint4(expert, start + done, min(tile_rows, all - done), 0);
        }
        if (threadIdx.x == 0) {
            *tile_count = tile_before.y;
        }
    }
    for (int i = threadIdx.x; i < OWN_ROWS * k; i += THREADS) {
        const int row = rank * OWN_ROWS + i / k, id = s.picked[i / k][i % k];
        const int slot = s.first_slot[id] + __popc(s.chosen[id] & ((1u << row) - 1));
        slot_rows[slot] = row;
        slot_parts[slot] = row * stride + i % k;
    }
}
