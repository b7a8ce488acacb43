// best_tokens: merges what the head kept of each tile of tokens into the four best of a row and their confidence
// tile_tokens: [rows, tiles, 4] u32.   tile_logits: [rows, tiles, 4] f32, best first; missing: token 2^32 - 1, -inf.
// tile_sums: [rows, tiles] f32, the sum over the tile of exp(logit - the tile's best).
// tokens: [rows, 4] u32, the larger logit first, the lower token first among equals.   logits, confidences: [rows, 4].
// Grid: one block a row.  Block: 128 threads; thread t takes tiles t, t + 128, ..
// confidence = exp(logit - best) / (sum over tiles of tile_sum * exp(the tile's best - best)); FP32, summed by thread,
// then over the block in a fixed order. A NaN among the sums makes every confidence NaN.
// Bound by latency.   Oracle: kernels/src/oracle/candidates.rs
#include "common/rows.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int KEPT = 4;
constexpr uint32_t NONE = 0xffffffffu;

/// A candidate with its order; the greater key is the better candidate.
__device__ __forceinline__ uint64_t key_of(float logit, uint32_t token) {
    // The two zeros are equal; negative floats compare in reverse as integers.
    uint32_t bits = __float_as_uint(logit == 0.0f ? 0.0f : logit);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t(bits) << 32 | ~token;
}

extern "C" __global__ void __launch_bounds__(THREADS)
best_tokens(const uint32_t *tile_tokens, const float *tile_logits, const float *tile_sums, uint32_t *tokens,
            float *logits, float *confidences, int tiles) {
    __shared__ uint64_t best_of_warp[WARPS];
    __shared__ float scratch[WARPS];
    __shared__ float kept_logits[KEPT];
    let_next_start();
    wait_for_previous();
    size_t first = size_t(blockIdx.x) * tiles;
    uint64_t keys[KEPT] = {};
    float values[KEPT];
    for (int tile = threadIdx.x; tile < tiles; tile += THREADS) {
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            uint32_t token = tile_tokens[(first + tile) * KEPT + i];
            float logit = tile_logits[(first + tile) * KEPT + i];
            // A missing entry has key 0 so that it loses to a token of -inf.
            uint64_t key = token == NONE ? 0 : key_of(logit, token);
            float value = logit;
#pragma unroll
            for (int place = 0; place < KEPT; ++place) {
                if (key > keys[place]) {
                    uint64_t other_key = keys[place];
                    float other = values[place];
                    keys[place] = key;
                    values[place] = value;
                    key = other_key;
                    value = other;
                }
            }
        }
    }
#pragma unroll
    for (int place = 0; place < KEPT; ++place) {
        uint64_t best = keys[0];
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            uint64_t other = __shfl_xor_sync(0xffffffffu, best, distance);
            best = other > best ? other : best;
        }
        if (threadIdx.x % 32 == 0) {
            best_of_warp[threadIdx.x / 32] = best;
        }
        __syncthreads();
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            best = best_of_warp[warp] > best ? best_of_warp[warp] : best;
        }
        // Tokens differ, so exactly one thread holds it.
        if (best != 0 && keys[0] == best) {
            tokens[blockIdx.x * KEPT + place] = ~uint32_t(best);
            kept_logits[place] = values[0];
#pragma unroll
            for (int i = 0; i + 1 < KEPT; ++i) {
                keys[i] = keys[i + 1];
                values[i] = values[i + 1];
            }
            keys[KEPT - 1] = 0;
        }
        __syncthreads();
    }
    float best = kept_logits[0], sum = 0.0f;
    for (int tile = threadIdx.x; tile < tiles; tile += THREADS) {
        float of_tile = tile_logits[(first + tile) * KEPT];
        sum += tile_sums[first + tile] * expf(of_tile - best);
    }
    sum = block_sum<WARPS>(sum, scratch);
    if (threadIdx.x < KEPT) {
        float logit = kept_logits[threadIdx.x];
        logits[blockIdx.x * KEPT + threadIdx.x] = logit;
        confidences[blockIdx.x * KEPT + threadIdx.x] = expf(logit - best) / sum;
    }
}
