// residual_norm: x[r, d] += y[r, d] (absent y: nothing is added), then
//                out[r, d] = x[r, d] / sqrt(mean over d of x[r, d]^2, plus eps) * weight[d]
// combine_norm:  y[r, d] = sum over slots, in order, of weights[r, s] * parts[r, s, d], then as residual_norm
// x, out: [rows, dim] bf16.   y: [rows, dim] bf16.   weight: [dim] bf16.
// parts: [rows, stride, dim] bf16: the `slots` routed experts of a row, then, if stride > slots, the shared one.
// weights: [rows, slots] f32.   dim: a multiple of 8, up to 4096.   Rows 16-byte aligned.
// Grid: one block a row.  Block: a thread for eight values, whole warps.  Shared: 16 floats, one partial sum a warp.
// Rounding: the sum over the slots, the shared expert's addition, the residual addition, x * scale and the product with
// weight are each rounded to BF16; everything else is FP32. A row's order of sums depends on dim alone.
// Bound by memory: each value is read once and written once.   Oracle: kernels/src/oracle/norm.rs, experts.rs
#include "common/rows.cuh"

constexpr int THREADS_MAX = 512;
/// Routed experts whose values are on their way at once.
constexpr int SLOTS_AT_ONCE = 8;

/// The norm's weight at a thread's values: nothing that a kernel in front writes.
__device__ __forceinline__ Eight weight_at(const bf16 *weight, int d, int dim) {
    return d < dim && weight ? *reinterpret_cast<const Eight *>(weight + d) : Eight{};
}

/// By all threads: `a` has zeros behind the row's end.
__device__ __forceinline__ void normalise(const Eight &a, const Eight &weight, bf16 *out, int d, int dim, float eps) {
    __shared__ float scratch[THREADS_MAX / 32];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        squares += a[i] * a[i];
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) {
        scratch[threadIdx.x / 32] = squares;
    }
    __syncthreads();
    float sum = 0.0f;
    // Rolled up: code that runs once has to be fetched, too.
#pragma unroll 2
    for (int warp = 0; warp < blockDim.x / 32; ++warp) {
        sum += scratch[warp];
    }
    const float scale = 1.0f / sqrtf(sum / dim + eps);
    if (d < dim) {
        Eight h;
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            h.put(i / 2, rounded(a[i] * scale) * weight[i], rounded(a[i + 1] * scale) * weight[i + 1]);
        }
        *reinterpret_cast<Eight *>(out + d) = h;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS_MAX)
residual_norm(bf16 *x, const bf16 *y, const bf16 *weight, bf16 *out, int dim, float eps) {
    let_next_start();
    const int d = threadIdx.x * 8;
    const Eight weights = weight_at(weight, d, dim);
    wait_for_previous();
    const size_t row = size_t(blockIdx.x) * dim;
    Eight a = {};
    if (d < dim) {
        a = *reinterpret_cast<const Eight *>(x + row + d);
        if (y) {
            const Eight b = *reinterpret_cast<const Eight *>(y + row + d);
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                a.put(i / 2, a[i] + b[i], a[i + 1] + b[i + 1]);
            }
            *reinterpret_cast<Eight *>(x + row + d) = a;
        }
    }
    if (out) {
        normalise(a, weights, out + row, d, dim, eps);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS_MAX)
combine_norm(bf16 *x, const bf16 *parts, const float *weights, const bf16 *weight, bf16 *out, int slots, int stride,
             int dim, float eps) {
    let_next_start();
    const int d = threadIdx.x * 8;
    const Eight norm_weights = weight_at(weight, d, dim);
    wait_for_previous();
    const size_t row = size_t(blockIdx.x) * dim;
    const bf16 *of_row = parts + row * stride;
    Eight a = {};
    if (d < dim) {
        a = *reinterpret_cast<const Eight *>(x + row + d);
        const bool has_shared = stride > slots;
        Eight shared = {};
        if (has_shared) {
            shared = *reinterpret_cast<const Eight *>(of_row + size_t(slots) * dim + d);
        }
        float sum[8] = {};
#pragma unroll 1
        for (int first = 0; first < slots; first += SLOTS_AT_ONCE) {
            Eight part[SLOTS_AT_ONCE];
            float share[SLOTS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < SLOTS_AT_ONCE; ++i) {
                if (first + i < slots) {
                    part[i] = *reinterpret_cast<const Eight *>(of_row + size_t(first + i) * dim + d);
                    share[i] = weights[blockIdx.x * slots + first + i];
                }
            }
#pragma unroll
            for (int i = 0; i < SLOTS_AT_ONCE; ++i) {
                if (first + i < slots) {
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        sum[j] += share[i] * part[i][j];
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum[i] = rounded(sum[i]);
            sum[i] = has_shared ? rounded(sum[i] + shared[i]) : sum[i];
        }
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            a.put(i / 2, a[i] + sum[i], a[i + 1] + sum[i + 1]);
        }
        *reinterpret_cast<Eight *>(x + row + d) = a;
    }
    if (out) {
        normalise(a, norm_weights, out + row, d, dim, eps);
    }
}
