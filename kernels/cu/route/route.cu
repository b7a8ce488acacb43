// choose: experts of each row of a block, by block capacity (groups == 0) or by groups, and who chose which
// order:  lists the rows of each expert over the whole batch, in tiles of at most `tile_rows`
// logits: [blocks * 32, experts] f32, experts <= 256.   bias: [experts] f32.   ids: [blocks * 32, k] u32.
// weights: [blocks * 32, k] f32.   masks: [blocks, experts] u32, bit r: row r of the block chose the expert.
// slot_rows: [slots] u32, the row of a slot;   slot_parts: [slots] u32, row * stride + place of the expert in ids.
// tiles: [tile_count] of (expert, first slot, slots, 0), experts ascending;   slots = blocks * 32 * k.
// Grid: one block of threads a block of rows.  Block: choose: 1024 threads, a warp a row; order: 256.
// Shared: choose: 32 * experts floats, experts rounded up to a multiple of 32, and 32 * 256 16-bit numbers: the biased scores, and a list of experts for each
// warp, of which choosing by block needs but one.
// All FP32; ties: the larger value first, the lower index first among equals; NaN ranks as minus infinity. A weight is
// score / (sum of the chosen scores in the order of ids + 1e-20) * scale, without the division if k == 1.
// `order` takes the rows of an expert in ascending order. Bound by latency.   Oracle: kernels/src/oracle/router.rs
#include "rank.cuh"

/// `order` has a thread for each expert, `choose` four.
constexpr int PARTS = 4;

extern "C" __global__ void __launch_bounds__(PARTS * THREADS)
choose(const float *logits, const float *bias, uint32_t *ids, float *weights, uint32_t *masks, int experts, int k,
       float scale, int capacity, int groups, int kept) {
    extern __shared__ __align__(16) int biased[];
    const int pitch = (experts + 31) / 32 * 32;
    auto *lists = reinterpret_cast<uint16_t *>(biased + ROWS * pitch);
    __shared__ __align__(16) int peaks[PARTS][EXPERTS_MAX];
    __shared__ int ranks[PARTS][EXPERTS_MAX];
    __shared__ uint32_t chosen[EXPERTS_MAX];
    __shared__ uint32_t in_pool[EXPERTS_MAX / 32];
    __shared__ int strengths[ROWS][32];
    __shared__ uint16_t picked[ROWS][32];
    let_next_start();
    wait_for_previous();
    int row = threadIdx.x / 32, lane = threadIdx.x % 32, expert = threadIdx.x % THREADS, part = threadIdx.x / THREADS;
    const float *of_block = logits + size_t(blockIdx.x) * ROWS * experts;

    // Four threads share the rows of an expert.
    int peak = ordered(-INFINITY);
    if (expert < experts) {
        float of_expert = bias[expert];
#pragma unroll
        for (int i = 0; i < ROWS / PARTS; ++i) {
            int at = part * (ROWS / PARTS) + i;
            int score = ordered(sigmoid(of_block[at * experts + expert]) + of_expert);
            biased[at * pitch + expert] = score;
            peak = max(peak, score);
        }
    }
    peaks[part][expert] = peak;
    if (part == 0) {
        chosen[expert] = 0;
    }
    __syncthreads();

    int pool = capacity;
    uint16_t *list = lists;
    if (groups == 0) {
        peak = max(max(peaks[0][expert], peaks[1][expert]), max(peaks[2][expert], peaks[3][expert]));
        __syncthreads();
        if (part == 0) {
            peaks[0][expert] = peak;
        }
        __syncthreads();
        // And the comparisons with the others.
        int rank = 0;
#pragma unroll
        for (int i = 0; i < EXPERTS_MAX / PARTS; i += 32) {
            const int first = part * (EXPERTS_MAX / PARTS) + i;
            rank += first == expert / 32 * 32 ? count_before(&peaks[0][first], peak, lane)
                                              : count_above(&peaks[0][first], peak - int(first < expert));
        }
        ranks[part][expert] = rank;
        __syncthreads();
        if (part == 0) {
            rank = ranks[0][expert] + ranks[1][expert] + ranks[2][expert] + ranks[3][expert];
            uint32_t members = __ballot_sync(0xffffffffu, expert < experts && rank < capacity);
            if (lane == 0) {
                in_pool[expert / 32] = members;
            }
        }
        __syncthreads();
        if (part == 0 && (in_pool[expert / 32] >> lane & 1)) {
            int place = __popc(in_pool[expert / 32] & ((1u << lane) - 1));
            for (int word = 0; word < expert / 32; ++word) {
                place += __popc(in_pool[word]);
            }
            list[place] = expert;
        }
    } else {
        // A thread sums the two best of a group of a row; neighbours begin at different members, so at different banks.
        int size = experts / groups;
        for (int i = threadIdx.x; i < ROWS * groups; i += PARTS * THREADS) {
            const int *members = biased + i / groups * pitch + i % groups * size;
            int best = ordered(-INFINITY), second = best;
            for (int j = 0; j < size; ++j) {
                int score = members[(j + threadIdx.x) % size];
                second = max(second, min(best, score));
                best = max(best, score);
            }
            float sum = size > 1 ? value_of(best) + value_of(second) : value_of(best);
            strengths[i / groups][i % groups] = ordered(sum);
        }
        pool = kept * size;
        list = lists + row * EXPERTS_MAX;
    }
    __syncthreads();

    int *scores = biased + row * pitch;
    if (groups != 0) {
        int rank = 0, size = experts / groups;
        int strength = lane < groups ? strengths[row][lane] : 0;
        for (int other = 0; other < groups; ++other) {
            rank += precedes(strengths[row][other], other, strength, lane);
        }
        uint32_t open = __ballot_sync(0xffffffffu, lane < groups && rank < kept);
        for (int i = lane; i < pool; i += 32) {
            // The group with i / size open ones before it.
            int group = __fns(open, 0, i / size + 1);
            list[i] = group * size + i % size;
        }
        __syncwarp();
    }
    // The pool's scores move to the front of the row, in the order of the list, which ascends: so places stand for
    // expert numbers in every comparison.
    int own[CANDIDATES_OF_LANE], rank[CANDIDATES_OF_LANE];
#pragma unroll
    for (int i = 0; i < CANDIDATES_OF_LANE; ++i) {
        rank[i] = 0;
        own[i] = i * 32 + lane < pool ? scores[list[i * 32 + lane]] : 0;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CANDIDATES_OF_LANE; ++i) {
        if (i * 32 < pool) {
            scores[i * 32 + lane] = i * 32 + lane < pool ? own[i] : LAST;
        }
    }
    __syncwarp();
    if (pool <= 64) {
        rank_among<2>(rank, own, scores, pool, lane);
    } else {
        rank_among<CANDIDATES_OF_LANE>(rank, own, scores, pool, lane);
    }
    size_t first = (size_t(blockIdx.x) * ROWS + row) * k;
#pragma unroll
    for (int i = 0; i < CANDIDATES_OF_LANE; ++i) {
        if (i * 32 + lane < pool && rank[i] < k) {
            int id = list[i * 32 + lane];
            ids[first + rank[i]] = id;
            picked[row][rank[i]] = id;
            atomicOr(&chosen[id], 1u << row);
        }
    }
    __syncwarp();
    float weight = lane < k ? sigmoid(of_block[row * experts + picked[row][lane]]) : 0.0f, total = 0.0f;
    for (int slot = 0; slot < k; ++slot) {
        total += __shfl_sync(0xffffffffu, weight, slot);
    }
    if (lane < k) {
        weights[first + lane] = __fmul_rn(k == 1 ? weight : __fdiv_rn(weight, total + 1e-20f), scale);
    }
    __syncthreads();
    if (part == 0 && expert < experts) {
        masks[size_t(blockIdx.x) * experts + expert] = chosen[expert];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
order(const uint32_t *ids, const uint32_t *masks, uint32_t *slot_rows, uint32_t *slot_parts, uint4 *tiles,
      uint32_t *tile_count, int experts, int k, int stride, int tile_rows) {
    __shared__ int first_slot[EXPERTS_MAX];
    __shared__ uint32_t of_block[EXPERTS_MAX];
    __shared__ int scratch[WARPS];
    let_next_start();
    wait_for_previous();
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
