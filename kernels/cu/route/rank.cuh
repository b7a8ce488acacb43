// What the router's kernels have in common: scores as numbers that can be ranked, and sums over experts.
#pragma once

#include "common/rows.cuh"

constexpr int ROWS = 32;
constexpr int EXPERTS_MAX = 256;
/// A thread for each expert.
constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int CANDIDATES_OF_LANE = EXPERTS_MAX / 32;

__device__ __forceinline__ float ranked(float x) {
    return isnan(x) ? -INFINITY : x;
}

__device__ __forceinline__ float sigmoid(float x) {
    return __frcp_rn(1.0f + expf(-x));
}

/// A number that is ordered as the float: NaN as minus infinity, both zeros the same.
__device__ __forceinline__ int ordered(float x) {
    int bits = __float_as_int(ranked(x) + 0.0f);
    return bits < 0 ? int(0x80000000u - uint32_t(bits)) : bits;
}

/// The float of an `ordered` number.
__device__ __forceinline__ float value_of(int x) {
    return __uint_as_float(x < 0 ? 0x80000000u - uint32_t(x) : uint32_t(x));
}

/// 1 if (a, index i) comes before (b, index j), of `ordered` numbers. There is none so large that adding one overflows.
__device__ __forceinline__ int precedes(int a, int i, int b, int j) {
    return a + int(i < j) > b;
}

/// What comes after everything else, and has a number before it.
constexpr int LAST = int(0x80000000u) + 1;

/// How many of 32 are above `bound`; `scores`: aligned to 16.
__device__ __forceinline__ int count_above(const int *scores, int bound) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        const int4 four = *reinterpret_cast<const int4 *>(scores + i);
        count += int(four.x > bound) + int(four.y > bound) + int(four.z > bound) + int(four.w > bound);
    }
    return count;
}

/// How many of 32 come before `own`; `scores`: aligned to 16. `place`: of `own` among them, which decides between
/// equals.
__device__ __forceinline__ int count_before(const int *scores, int own, int place) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        const int4 four = *reinterpret_cast<const int4 *>(scores + i);
        count += precedes(four.x, i, own, place) + precedes(four.y, i + 1, own, place);
        count += precedes(four.z, i + 2, own, place) + precedes(four.w, i + 3, own, place);
    }
    return count;
}

/// Counts for each of a lane's first `COUNT` candidates, of `32 * COUNT` at most, how many come before it. `scores`: aligned
/// to 16, `LAST` from the end of the pool to the next multiple of 32.
template <int COUNT>
__device__ __forceinline__ void rank_among(int (&rank)[CANDIDATES_OF_LANE], const int (&own)[CANDIDATES_OF_LANE],
                                           const int *scores, int pool, int lane) {
    if constexpr (COUNT <= 2) {
#pragma unroll
        for (int first = 0; first < COUNT; ++first) {
            if (first * 32 < pool) {
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    const int *of = scores + first * 32;
                    // Equals in front come before, equals behind do not.
                    rank[i] += first == i ? count_before(of, own[i], lane) : count_above(of, own[i] - int(first < i));
                }
            }
        }
    } else {
        // In few registers.
#pragma unroll 4
        for (int other = 0; other < pool; ++other) {
            const int score = scores[other];
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                rank[i] += precedes(score, other, own[i], i * 32 + lane);
            }
        }
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
