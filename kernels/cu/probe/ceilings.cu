// read_all: reads every 16 bytes of `from` once;   copy_all: copies them to `to`
// multiply_all: `steps` times eight independent BF16 products of 16 x 16 by 16 x 8 in each warp, on registers alone
// from, to: [len] uint4.   out: one u32, written only if the exclusive or of everything is one unlikely value, so that
// no load can be left out.
// Grid: any.  Block: 512 threads, each with four loads under way. Bound by memory: they measure what it gives at best.
#include <cstdint>

constexpr int LOADS = 4;

extern "C" __global__ void __launch_bounds__(512) read_all(const uint4 *from, uint64_t len, uint32_t *out) {
    uint64_t step = uint64_t(gridDim.x) * blockDim.x, at = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    uint32_t seen = 0;
    for (; at + (LOADS - 1) * step < len; at += LOADS * step) {
        uint4 v[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            v[i] = __ldcs(from + at + i * step);
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            seen ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
        }
    }
    if (seen == 0x5eed1e55) {
        *out = seen;
    }
}

extern "C" __global__ void __launch_bounds__(512) copy_all(const uint4 *from, uint64_t len, uint4 *to) {
    uint64_t step = uint64_t(gridDim.x) * blockDim.x, at = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; at + (LOADS - 1) * step < len; at += LOADS * step) {
        uint4 v[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            v[i] = __ldcs(from + at + i * step);
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            __stcs(to + at + i * step, v[i]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(512) multiply_all(uint32_t steps, float *out) {
    constexpr int SUMS = 8;
    float d[SUMS][4] = {};
    // Ones and small fractions, so that sums stay finite.
    uint32_t a = 0x3c003c00u + threadIdx.x, b = 0x3c003c00u;
    for (uint32_t step = 0; step < steps; ++step) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, "
                         "{%5, %5}, {%0, %1, %2, %3};"
                         : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
                         : "r"(a), "r"(b));
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        sum += d[i][0] + d[i][1] + d[i][2] + d[i][3];
    }
    if (sum == 1.0e-30f) {
        *out = sum;
    }
}
