// The norm and the rotation of heads of queries or keys, by a warp.
#pragma once

#include "common/rows.cuh"

constexpr int HEAD_DIM = 128;
constexpr int PAIRS = 32;

/// `COUNT` heads at once, so that none waits for another. `v`: of each, dimensions lane, lane + 32, lane + 64 and lane + 96,
/// so both of a rotated pair; `weight`: likewise, if the head has a norm; `turn`: cosine and sine of the head's position.
template <int COUNT>
__device__ __forceinline__ void norm_and_turn(float (&v)[COUNT][4], const bool (&has_norm)[COUNT],
                                              const float (&weight)[COUNT][4], const float2 (&turn)[COUNT], float eps) {
    float squares[COUNT];
#pragma unroll
    for (int head = 0; head < COUNT; ++head) {
        const float(&of)[4] = v[head];
        squares[head] = of[0] * of[0] + of[1] * of[1] + of[2] * of[2] + of[3] * of[3];
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
        for (int head = 0; head < COUNT; ++head) {
            squares[head] += __shfl_xor_sync(0xffffffffu, squares[head], distance);
        }
    }
    // Roots and divisions are long: each lane has those of one head.
    float own = squares[0];
#pragma unroll
    for (int head = 1; head < COUNT; ++head) {
        own = int(threadIdx.x) % COUNT == head ? squares[head] : own;
    }
    own = 1.0f / sqrtf(own / HEAD_DIM + eps);
#pragma unroll
    for (int head = 0; head < COUNT; ++head) {
        const float scale = COUNT == 1 ? own : __shfl_sync(0xffffffffu, own, head);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[head][i] = has_norm[head] ? rounded(rounded(v[head][i] * scale) * weight[head][i]) : v[head][i];
        }
    }
#pragma unroll
    for (int head = 0; head < COUNT; ++head) {
        float low = rounded(v[head][0] * turn[head].x) - rounded(v[head][1] * turn[head].y);
        float high = rounded(v[head][1] * turn[head].x) + rounded(v[head][0] * turn[head].y);
        v[head][0] = low, v[head][1] = high;
    }
}

/// What a lane needs of a norm's weight; anything if there is none.
__device__ __forceinline__ void load_weight(float (&out)[4], const bf16 *weight, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        out[i] = weight ? __bfloat162float(weight[lane + 32 * i]) : 0.0f;
    }
}
