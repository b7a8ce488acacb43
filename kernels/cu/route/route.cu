// choose: experts of each row of a block, by block capacity (groups == 0) or by groups, and who chose which
// order:  lists the rows of each expert over the whole batch, in tiles of at most `tile_rows`
// logits: [blocks * 32, experts] f32, experts <= 256.   bias: [experts] f32.   ids: [blocks * 32, k] u32.
// weights: [blocks * 32, k] f32.   masks: [blocks, experts] u32, bit r: row r of the block chose the expert.
// slot_rows: [slots] u32, the row of a slot;   slot_parts: [slots] u32, row * stride + place of the expert in ids.
// tiles: [tile_count] of (expert, first slot, slots, 0), experts ascending;   slots = blocks * 32 * k.
// Grid: one block of threads a block of rows.  Block: 256 threads, for `choose` 8 warps of four rows each.
// Shared: choose: (32 experts + 2048) floats, the biased scores and a list of expert numbers for each warp.
// All FP32; ties: the larger value first, the lower index first among equals; NaN ranks as minus infinity. A weight is
// score / (sum of the chosen scores in the order of ids + 1e-20) * scale, without the division if k == 1.
// `order` takes the rows of an expert in ascending order. Bound by latency.   Oracle: kernels/src/oracle/router.rs
#include "common/rows.cuh"

constexpr int ROWS = 32;
constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int EXPERTS_MAX = 256;
constexpr int CANDIDATES_OF_LANE = EXPERTS_MAX / 32;

__device__ __forceinline__ float ranked(float x) {
    return isnan(x) ? -INFINITY : x;
}

__device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

/// Whether (a, index i) comes before (b, index j).
__device__ __forceinline__ bool precedes(float a, int i, float b, int j) {
    return a > b || (a == b && i < j);
}

/// How many of the set bits of `flags` (one thread each, over the block) belong to threads before this one, and how
/// many there are. `scratch`: [WARPS] ints.
__device__ __forceinline__ int2 place_among(bool flag, int *scratch) {
    uint32_t of_warp = __ballot_sync(0xffffffffu, flag);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) {
        scratch[warp] = __popc(of_warp);
    }
    __syncthreads();
    int before = 0, all = 0;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) {
        before += other < warp ? scratch[other] : 0;
        all += scratch[other];
    }
    __syncthreads();
    return make_int2(before + __popc(of_warp & ((1u << lane) - 1)), all);
}

extern "C" __global__ void __launch_bounds__(THREADS)
choose(const float *logits, const float *bias, uint32_t *ids, float *weights, uint32_t *masks, int experts, int k,
       float scale, int capacity, int groups, int kept) {
    extern __shared__ float biased[];
    auto *lists = reinterpret_cast<uint16_t *>(biased + ROWS * experts);
    __shared__ float peaks[EXPERTS_MAX];
    __shared__ uint32_t chosen[EXPERTS_MAX];
    __shared__ float strengths[ROWS][32];
    __shared__ int scratch[WARPS];
    wait_for_previous();
    let_next_start();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, expert = threadIdx.x;
    const float *of_block = logits + size_t(blockIdx.x) * ROWS * experts;

    chosen[expert] = 0;
    float peak = -INFINITY;
    if (expert < experts) {
        float of_expert = bias[expert];
#pragma unroll 8
        for (int row = 0; row < ROWS; ++row) {
            float score = ranked(sigmoid(of_block[row * experts + expert]) + of_expert);
            biased[row * experts + expert] = score;
            peak = fmaxf(peak, score);
        }
    }
    peaks[expert] = peak;
    __syncthreads();

    int pool = capacity;
    uint16_t *list = lists;
    if (groups == 0) {
        int rank = 0;
        for (int other = 0; other < experts; ++other) {
            rank += precedes(peaks[other], other, peak, expert);
        }
        bool is_in = expert < experts && rank < capacity;
        int2 place = place_among(is_in, scratch);
        if (is_in) {
            list[place.x] = expert;
        }
    } else {
        // A thread sums the two best of a group of a row; neighbours begin at different members, so at different banks.
        int size = experts / groups;
        for (int i = threadIdx.x; i < ROWS * groups; i += THREADS) {
            const float *members = biased + i / groups * experts + i % groups * size;
            float best = -INFINITY, second = -INFINITY;
            for (int j = 0; j < size; ++j) {
                float score = members[(j + threadIdx.x) % size];
                second = fmaxf(second, fminf(best, score));
                best = fmaxf(best, score);
            }
            strengths[i / groups][i % groups] = size > 1 ? best + second : best;
        }
        pool = kept * size;
        list = lists + warp * EXPERTS_MAX;
    }
    __syncthreads();

    for (int row = warp * (ROWS / WARPS); row < (warp + 1) * (ROWS / WARPS); ++row) {
        const float *scores = biased + row * experts;
        if (groups != 0) {
            int rank = 0, size = experts / groups;
            float strength = lane < groups ? strengths[row][lane] : 0.0f;
            for (int other = 0; other < groups; ++other) {
                rank += precedes(strengths[row][other], other, strength, lane);
            }
            uint32_t open = __ballot_sync(0xffffffffu, lane < groups && rank < kept);
            __syncwarp();
            for (int i = lane; i < pool; i += 32) {
                // The group with i / size open ones before it.
                int group = __fns(open, 0, i / size + 1);
                list[i] = group * size + i % size;
            }
            __syncwarp();
        }
        float own[CANDIDATES_OF_LANE];
        int rank[CANDIDATES_OF_LANE];
#pragma unroll
        for (int i = 0; i < CANDIDATES_OF_LANE; ++i) {
            rank[i] = 0;
            own[i] = i * 32 + lane < pool ? scores[list[i * 32 + lane]] : 0.0f;
        }
        for (int other = 0; other < pool; ++other) {
            // The list ascends, so places stand for expert numbers.
            float score = scores[list[other]];
#pragma unroll
            for (int i = 0; i < CANDIDATES_OF_LANE; ++i) {
                if (i * 32 < pool) {
                    rank[i] += precedes(score, other, own[i], i * 32 + lane);
                }
            }
        }
        size_t first = (size_t(blockIdx.x) * ROWS + row) * k;
#pragma unroll
        for (int i = 0; i < CANDIDATES_OF_LANE; ++i) {
            if (i * 32 + lane < pool && rank[i] < k) {
                int id = list[i * 32 + lane];
                ids[first + rank[i]] = id;
                // Handed over through memory, which a warp sees in order.
                weights[first + rank[i]] = sigmoid(of_block[row * experts + id]);
                atomicOr(&chosen[id], 1u << row);
            }
        }
        __syncwarp();
        float total = 0.0f;
        for (int slot = 0; slot < k; ++slot) {
            total += weights[first + slot];
        }
        __syncwarp();
        if (lane < k) {
            float weight = weights[first + lane];
            weights[first + lane] = __fmul_rn(k == 1 ? weight : __fdiv_rn(weight, total + 1e-20f), scale);
        }
    }
    __syncthreads();
    if (expert < experts) {
        masks[size_t(blockIdx.x) * experts + expert] = chosen[expert];
    }
}

/// Sums over the threads before this one, and over all. `scratch`: [WARPS] ints.
__device__ __forceinline__ int2 sum_before(int value, int *scratch) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sum = value;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        int other = __shfl_up_sync(0xffffffffu, sum, distance);
        sum += lane >= distance ? other : 0;
    }
    if (lane == 31) {
        scratch[warp] = sum;
    }
    __syncthreads();
    int before = 0, all = 0;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) {
        before += other < warp ? scratch[other] : 0;
        all += scratch[other];
    }
    __syncthreads();
    return make_int2(before + sum - value, all);
}

extern "C" __global__ void __launch_bounds__(THREADS)
order(const uint32_t *ids, const uint32_t *masks, uint32_t *slot_rows, uint32_t *slot_parts, uint4 *tiles,
      uint32_t *tile_count, int experts, int k, int stride, int tile_rows) {
    __shared__ int first_slot[EXPERTS_MAX];
    __shared__ uint32_t of_block[EXPERTS_MAX];
    __shared__ int scratch[WARPS];
    wait_for_previous();
    let_next_start();
    int expert = threadIdx.x, blocks = gridDim.x;
    int before = 0, all = 0;
    if (expert < experts) {
#pragma unroll 8
        for (int block = 0; block < blocks; ++block) {
            int count = __popc(masks[size_t(block) * experts + expert]);
            before += block < blockIdx.x ? count : 0;
            all += count;
        }
        of_block[expert] = masks[size_t(blockIdx.x) * experts + expert];
    }
    int start = sum_before(all, scratch).x;
    first_slot[expert] = start + before;
    int tiles_of_expert = (all + tile_rows - 1) / tile_rows;
    int2 tile = sum_before(tiles_of_expert, scratch);
    if (blockIdx.x == 0) {
        for (int i = 0; i < tiles_of_expert; ++i) {
            int done = i * tile_rows;
            tiles[tile.x + i] = make_uint4(expert, start + done, min(tile_rows, all - done), 0);
        }
        if (threadIdx.x == 0) {
            *tile_count = tile.y;
        }
    }
    for (int i = threadIdx.x; i < ROWS * k; i += THREADS) {
        int row = i / k, row_of_batch = blockIdx.x * ROWS + row;
        int id = ids[size_t(row_of_batch) * k + i % k];
        int slot = first_slot[id] + __popc(of_block[id] & ((1u << row) - 1));
        slot_rows[slot] = row_of_batch;
        slot_parts[slot] = row_of_batch * stride + i % k;
    }
}
