// residual_norm: x[r, d] += y[r, d] (absent y: nothing is added), then
//                out[r, d] = x[r, d] / sqrt(mean over d of x[r, d]^2, plus eps) * weight[d]
// combine_norm:  y[r, d] = sum over slots, in order, of weights[r, s] * parts[r, s, d], then as residual_norm
// x, out: [rows, dim] bf16.   y: [rows, dim] bf16.   weight: [dim] bf16.
// parts: [rows, stride, dim] bf16: the `slots` routed experts of a row, then, if stride > slots, the shared one.
// weights: [rows, slots] f32.   dim: a multiple of 8, up to 8192.   Rows 16-byte aligned.
// Grid: one block a row.  Block: 256 threads.  Shared: 8 floats, one partial sum a warp.
// Rounding: the sum over the slots, the shared expert's addition, the residual addition, x * scale and the product with
// weight are each rounded to BF16; everything else is FP32. A row's order of sums depends on dim alone.
// Bound by memory: each value is read once and written once.   Oracle: kernels/src/oracle/norm.rs, experts.rs
#include "common/rows.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
/// Pieces of eight that a thread holds: 4 * 256 * 8 = 8192.
constexpr int PIECES = 4;

__device__ __forceinline__ void normalise(float (&v)[PIECES][8], const bf16 *weight, bf16 *out, int dim, float eps) {
    __shared__ float scratch[WARPS];
    float squares = 0.0f;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        if ((piece * THREADS + threadIdx.x) * 8 < dim) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                squares += v[piece][i] * v[piece][i];
            }
        }
    }
    float scale = 1.0f / sqrtf(block_sum<WARPS>(squares, scratch) / dim + eps);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        int d = (piece * THREADS + threadIdx.x) * 8;
        if (d < dim) {
            Eight w = *reinterpret_cast<const Eight *>(weight + d), h;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                h.v[i] = __float2bfloat16_rn(rounded(v[piece][i] * scale) * __bfloat162float(w.v[i]));
            }
            *reinterpret_cast<Eight *>(out + d) = h;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
residual_norm(bf16 *x, const bf16 *y, const bf16 *weight, bf16 *out, int dim, float eps) {
    let_next_start();
    wait_for_previous();
    size_t row = size_t(blockIdx.x) * dim;
    float v[PIECES][8];
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        int d = (piece * THREADS + threadIdx.x) * 8;
        if (d < dim) {
            Eight a = *reinterpret_cast<const Eight *>(x + row + d);
            if (y) {
                Eight b = *reinterpret_cast<const Eight *>(y + row + d);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    a.v[i] = __float2bfloat16_rn(__bfloat162float(a.v[i]) + __bfloat162float(b.v[i]));
                }
                *reinterpret_cast<Eight *>(x + row + d) = a;
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                v[piece][i] = __bfloat162float(a.v[i]);
            }
        }
    }
    if (out) {
        normalise(v, weight, out + row, dim, eps);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
combine_norm(bf16 *x, const bf16 *parts, const float *weights, const bf16 *weight, bf16 *out, int slots, int stride,
             int dim, float eps) {
    let_next_start();
    wait_for_previous();
    size_t row = size_t(blockIdx.x) * dim;
    const bf16 *of_row = parts + row * stride;
    float v[PIECES][8];
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        int d = (piece * THREADS + threadIdx.x) * 8;
        if (d < dim) {
            float sum[8] = {};
#pragma unroll 8
            for (int slot = 0; slot < slots; ++slot) {
                float share = weights[blockIdx.x * slots + slot];
                Eight part = *reinterpret_cast<const Eight *>(of_row + size_t(slot) * dim + d);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    sum[i] += share * __bfloat162float(part.v[i]);
                }
            }
            Eight a = *reinterpret_cast<const Eight *>(x + row + d), shared = {};
            if (stride > slots) {
                shared = *reinterpret_cast<const Eight *>(of_row + size_t(slots) * dim + d);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float y = rounded(sum[i]);
                if (stride > slots) {
                    y = rounded(y + __bfloat162float(shared.v[i]));
                }
                a.v[i] = __float2bfloat16_rn(__bfloat162float(a.v[i]) + y);
                v[piece][i] = __bfloat162float(a.v[i]);
            }
            *reinterpret_cast<Eight *>(x + row + d) = a;
        }
    }
    if (out) {
        normalise(v, weight, out + row, dim, eps);
    }
}
