// linear_wide_<what>_<tile>: the products of linear.cu for many rows, by wgmma; the same bits.
// Arguments, layouts and what: linear.cu. tile: weight rows x tokens of a block.
// Grid: x over the tokens, y over the weight rows, so that blocks of the same weights run together.
// Block: 384 threads.  Shared: `WideTile`, up to 201 KiB.
// Bound by the tensor cores; see wide_tile.cuh.   Oracle: kernels/src/oracle/{linear,swiglu,candidates}.rs
#include "finish.cuh"
#include "wide_tile.cuh"

namespace {

enum What { BF16, F32, GATED, BEST_TOKENS };

template <class T, What WHAT>
__device__ __forceinline__ void linear(void *out, Best best, const bf16 *x, const uint8_t *w, int rows, int n, int k,
                                       int pitch) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const int strip = blockIdx.y * T::STRIPS, first = blockIdx.x * T::COLS, count = min(rows - first, T::COLS);
    T::begin(shared);
    if (threadIdx.x >= T::WORKERS) {
        T::as_carrier();
        T::bring(shared, w, (n + 15) / 16, strip, x, count, k, 0, [&] {
            wait_for_kernel_in_front();
            allow_kernel_behind();
        }, [&](int t) { return uint32_t(first + t); }, gridDim.x == 1);
        return;
    }
    T::as_worker();
    T tile;
    tile.multiply(shared, k, 0);
    // The stages' memory is used again below.
    sync_first(T::WORKERS);
    // What is overwritten below may still be read by the kernel in front, as far as these threads know.
    wait_for_kernel_in_front();
    if constexpr (WHAT == F32) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4 * 2;
        for (int m = 0; m < T::MS; ++m) {
            for (int i = 0; i < T::N / 2; ++i) {
                const int to = t + i / 4 * 8 + i % 2, from = strip * 16 + T::row_of(m) + g + i % 4 / 2 * 8;
                if (to < count && from < n) {
                    static_cast<float *>(out)[size_t(first + to) * pitch + from] = tile.sum[m][i];
                }
            }
        }
        return;
    }
    constexpr int WIDTH = WHAT == GATED ? T::ROWS / 2 : T::ROWS;
    static_assert(OutTile<WIDTH>::PITCH * 2 * T::COLS <= T::SHARED_BYTES);
    OutTile<WIDTH> values{reinterpret_cast<bf16 *>(shared)};
#pragma unroll
    for (int m = 0; m < T::MS; ++m) {
#pragma unroll
        for (int i = 0; i < T::N / 8; ++i) {
            const float(&all)[T::N / 2] = tile.sum[m];
            const float sum[4] = {all[4 * i], all[4 * i + 1], all[4 * i + 2], all[4 * i + 3]};
            if constexpr (WHAT == GATED) {
                values.put_gated(sum, T::row_of(m) / 2, i * 8);
            } else {
                values.put(sum, T::row_of(m), i * 8);
            }
        }
    }
    sync_first(T::WORKERS);
    if constexpr (WHAT == BEST_TOKENS) {
        static_assert(T::ROWS == BEST_WIDTH);
        store_best<T::WORKERS>(values, best, first, count, blockIdx.y, gridDim.y, min(n - strip * 16, WIDTH));
    } else {
        const int columns = WHAT == GATED ? n / 2 : n, column = blockIdx.y * WIDTH;
        values.template store<T::WORKERS>(static_cast<bf16 *>(out) + column, pitch, count, columns - column,
                                          [&](int token) { return first + token; });
    }
}

using Tile256x128 = WideTile<Bf16, 2, 128, 64, 4>;
using Tile128x128 = WideTile<Bf16, 1, 128, 64, 6>;
using Tile128x64 = WideTile<Bf16, 1, 64, 64, 8>;
using Tile256x64 = WideTile<Bf16, 2, 64, 64, 5>;

}  // namespace

#define LINEAR(NAME, TILE, WHAT)                                                                                       \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                               \
        NAME(void *out, const bf16 *x, const uint8_t *w, int rows, int n, int k, int pitch) {                          \
        linear<TILE, WHAT>(out, Best{}, x, w, rows, n, k, pitch);                                                      \
    }
LINEAR(linear_wide_bf16_256x128, Tile256x128, BF16)
LINEAR(linear_wide_bf16_128x128, Tile128x128, BF16)
LINEAR(linear_wide_bf16_128x64, Tile128x64, BF16)
LINEAR(linear_wide_f32_128x64, Tile128x64, F32)
LINEAR(linear_wide_gated_256x128, Tile256x128, GATED)
LINEAR(linear_wide_gated_128x128, Tile128x128, GATED)
LINEAR(linear_wide_gated_128x64, Tile128x64, GATED)

#define BEST_OF(NAME, TILE)                                                                                            \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                               \
        NAME(uint32_t *tokens, float *logits, float *sums, const bf16 *x, const uint8_t *w, int rows, int n, int k) {  \
        linear<TILE, BEST_TOKENS>(nullptr, Best{tokens, logits, sums}, x, w, rows, n, k, 0);                           \
    }
BEST_OF(linear_wide_best_256x128, Tile256x128)
BEST_OF(linear_wide_best_256x64, Tile256x64)
