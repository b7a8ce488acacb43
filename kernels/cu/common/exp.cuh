// Exponentials by one instruction: of two, so factors are multiplied by log2(e) first.
#pragma once

constexpr float LOG2E = 1.4426950408889634f;

/// 2^x, to some two units in the last place.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
