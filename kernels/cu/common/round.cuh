// Rounding to BF16, always by the instruction that rounds two numbers at once: the one for a single number has an eighth of
// its rate.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>

using bf16 = __nv_bfloat16;

/// Two numbers as BF16.
__device__ __forceinline__ uint32_t packed(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float low_of(uint32_t pair) {
    return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float high_of(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ bf16 low_bf16(uint32_t pair) {
    return __ushort_as_bfloat16(static_cast<uint16_t>(pair));
}
__device__ __forceinline__ bf16 high_bf16(uint32_t pair) {
    return __ushort_as_bfloat16(static_cast<uint16_t>(pair >> 16));
}

/// Rounds to BF16 and back: a rounding point of the model description, section 4.
__device__ __forceinline__ float rounded(float x) {
    // Zero in the lower half: the pair is the number's bits.
    return __uint_as_float(packed(0.0f, x));
}
