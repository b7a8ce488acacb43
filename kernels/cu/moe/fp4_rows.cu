// round_rows_fp4:     out[r] = what four bits leave of x[r]; out: [rows, k] bf16
// quantize_rows_fp4:  the same rows as codes: records (common/fp4.cuh), and scales [rows] f32
// x: [rows, k] bf16, rows 16-byte aligned; not `out`.   k: a multiple of 16; for records, of 128.
// Grid: a warp for each row.  Block: 256 threads.
// Bound by memory: each row is read twice, the second time from a cache, and written once.   Oracle: kernels/src/oracle/fp4.rs
#include "common/async.cuh"
#include "common/fp4.cuh"
#include <cuda_bf16.h>

using bf16 = __nv_bfloat16;

namespace {

__device__ __forceinline__ void load_block(uint32_t (&words)[8], const bf16 *block) {
    const Words first = reinterpret_cast<const Words *>(block)[0], second = reinterpret_cast<const Words *>(block)[1];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        words[i] = first.word[i], words[4 + i] = second.word[i];
    }
}

/// Calls `put(row, index, words, block, scale)` for each block of 16 columns of each row.
template <class PUT>
__device__ __forceinline__ void quantize(const bf16 *x, int rows, int k, PUT put) {
    allow_kernel_behind();
    wait_for_kernel_in_front();
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) {
        return;
    }
    const bf16 *of_row = x + size_t(row) * k;
    uint32_t words[8], largest = 0;
    for (int index = lane; index < k / FP4_BLOCK; index += 32) {
        load_block(words, of_row + index * FP4_BLOCK);
        largest = max(largest, largest_of(words));
    }
    const float scale = fp4_row_scale(__reduce_max_sync(0xffffffffu, largest));
    for (int index = lane; index < k / FP4_BLOCK; index += 32) {
        load_block(words, of_row + index * FP4_BLOCK);
        put(row, index, words, fp4_block(words, scale), scale);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) round_rows_fp4(bf16 *out, const bf16 *x, int rows, int k) {
    quantize(x, rows, k, [&](int row, int index, uint32_t(&words)[8], const Fp4Block &block, float scale) {
        fp4_values(words, block, scale);
        Words *to = reinterpret_cast<Words *>(out + size_t(row) * k + index * FP4_BLOCK);
        to[0] = {{words[0], words[1], words[2], words[3]}}, to[1] = {{words[4], words[5], words[6], words[7]}};
    });
}

extern "C" __global__ void __launch_bounds__(256)
    quantize_rows_fp4(uint8_t *records, float *scales, const bf16 *x, int rows, int k) {
    quantize(x, rows, k, [&](int row, int index, uint32_t(&)[8], const Fp4Block &block, float scale) {
        Fp4Record::put(records + row * Fp4Record::row_bytes(k), index, block);
        if (index == 0) {
            scales[row] = scale;
        }
    });
}
