// Pieces of kernels that work row by row: sums over warps and blocks in a fixed order, eight BF16 at a time.
#pragma once

#include "common/round.cuh"

/// Eight BF16, 16 bytes, the unit of every load and store here.
struct alignas(16) Eight {
    uint32_t pairs[4];

    __device__ __forceinline__ float operator[](int i) const {
        return i % 2 ? high_of(pairs[i / 2]) : low_of(pairs[i / 2]);
    }
    /// Rounds.
    __device__ __forceinline__ void put(int pair, float low, float high) {
        pairs[pair] = packed(low, high);
    }
};

/// Waits for the kernel in front, if this one was allowed to start early; nothing below Hopper.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

/// Lets the kernel behind start: it may use what this one leaves of the machine until it waits.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/// The sum over the 32 lanes, the same bits in every lane.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    }
    return x;
}

/// The sum over a block of `WARPS` warps in a fixed order, the same bits in every thread. `scratch`: `[WARPS]`.
template <int WARPS>
__device__ __forceinline__ float block_sum(float x, float *scratch) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) {
        scratch[threadIdx.x / 32] = x;
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        sum += scratch[warp];
    }
    return sum;
}
