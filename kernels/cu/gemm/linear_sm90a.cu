// linear_wide_<what>_<tile>: the products of linear.cu for many rows, by wgmma; the same bits.
// Arguments, layouts and what: linear.cu. tile: weight rows x tokens of a block.
// Grid: x over the weight rows, y over the tokens.  Block: 256 threads.  Shared: `WideTile` and 1 KiB, up to 201 KiB.
// Bound by the tensor cores; see wide_tile.cuh.   Oracle: kernels/src/oracle/{linear,swiglu,candidates}.rs
#include "finish.cuh"
#include "wide_tile.cuh"

namespace {

enum What { BF16, GATED, BEST_TOKENS };

template <class T, What WHAT>
__device__ __forceinline__ void linear(bf16 *out, Best best, const bf16 *x, const uint8_t *w, int rows, int n, int k,
                                       int pitch) {
    extern __shared__ __align__(1024) uint8_t shared[];
    // Behind the stages, which are aligned only if nothing lies in front of them.
    uint32_t *row_of = reinterpret_cast<uint32_t *>(shared + T::SHARED_BYTES);
    const int strip = blockIdx.x * T::STRIPS, first = blockIdx.y * T::COLS, count = min(rows - first, T::COLS);
    const size_t strip_bytes = size_t(k) / Bf16::UNIT * Bf16::BYTES;
    T tile;
    tile.run(shared, w + strip * strip_bytes, strip_bytes, (n + 15) / 16 - strip, x, row_of, count, k, [&] {
        for (int t = threadIdx.x; t < T::COLS; t += T::THREADS) {
            row_of[t] = first + t;
        }
        wait_for_kernel_in_front();
        allow_kernel_behind();
    });
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4 * 2;
    constexpr int WIDTH = WHAT == GATED ? T::ROWS / 2 : T::ROWS;
    static_assert(OutTile<WIDTH>::PITCH * 2 * T::COLS <= T::SHARED_BYTES);
    OutTile<WIDTH> values{reinterpret_cast<bf16 *>(shared)};
#pragma unroll
    for (int m = 0; m < T::MS; ++m) {
#pragma unroll
        for (int i = 0; i < T::N / 8; ++i) {
            const float sum[4] = {tile.sum[m][4 * i], tile.sum[m][4 * i + 1], tile.sum[m][4 * i + 2], tile.sum[m][4 * i + 3]};
            if constexpr (WHAT == GATED) {
                values.put_gated(sum, T::row_of(m) / 2 + g, t + i * 8);
            } else {
                values.put(sum, T::row_of(m) + g, t + i * 8);
            }
        }
    }
    __syncthreads();
    if constexpr (WHAT == BEST_TOKENS) {
        static_assert(T::ROWS == BEST_WIDTH);
        store_best(values, best, first, count, blockIdx.x, gridDim.x, min(n - strip * 16, WIDTH));
    } else {
        const int columns = WHAT == GATED ? n / 2 : n, column = blockIdx.x * WIDTH;
        values.store(out + column, pitch, count, columns - column, [&](int token) { return first + token; });
    }
}

using Tile256x128 = WideTile<Bf16, 2, 128, 64, 4>;
using Tile128x128 = WideTile<Bf16, 1, 128, 64, 6>;
using Tile128x64 = WideTile<Bf16, 1, 64, 64, 4>;
using Tile256x64 = WideTile<Bf16, 2, 64, 64, 5>;

}  // namespace

#define LINEAR(NAME, TILE, WHAT)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        NAME(bf16 *out, const bf16 *x, const uint8_t *w, int rows, int n, int k, int pitch) {                          \
        linear<TILE, WHAT>(out, Best{}, x, w, rows, n, k, pitch);                                                      \
    }
LINEAR(linear_wide_bf16_256x128, Tile256x128, BF16)
LINEAR(linear_wide_bf16_128x128, Tile128x128, BF16)
LINEAR(linear_wide_bf16_128x64, Tile128x64, BF16)
LINEAR(linear_wide_gated_256x128, Tile256x128, GATED)
LINEAR(linear_wide_gated_128x128, Tile128x128, GATED)
LINEAR(linear_wide_gated_128x64, Tile128x64, GATED)

#define BEST_OF(NAME, TILE)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        NAME(uint32_t *tokens, float *logits, float *sums, const bf16 *x, const uint8_t *w, int rows, int n, int k) {  \
        linear<TILE, BEST_TOKENS>(nullptr, Best{tokens, logits, sums}, x, w, rows, n, k, 0);                           \
    }
BEST_OF(linear_wide_best_256x128, Tile256x128)
BEST_OF(linear_wide_best_256x64, Tile256x64)
