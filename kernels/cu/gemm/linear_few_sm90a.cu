// linear_few_<what>_<tile>: the products of linear.cu for few rows, for Hopper; the same bits.
// Arguments, layouts and what: linear.cu. tile: weight rows x tokens of a block.
// k: a multiple of the tile's DEPTH, below.
// Grid: x over the tokens, y over the weight rows, so that blocks of the same weights run together.
// Block: 192 to 384 threads.  Shared: `BulkTile`.
// Bound by memory: each weight is read once for 32 tokens, by bulk copies that begin before their tokens are there.
// Oracle: kernels/src/oracle/{linear,swiglu}.rs
#include "finish.cuh"
#include "bulk_tile.cuh"

namespace {

enum What { BF16, F32, GATED };

template <class T, What WHAT>
__device__ __forceinline__ void linear(void *out, const bf16 *x, const uint8_t *w, int rows, int n, int k, int pitch) {
    extern __shared__ __align__(128) uint8_t shared[];
    const int strip = blockIdx.y * T::STRIPS, first = blockIdx.x * T::COLS, count = min(rows - first, T::COLS);
    T::begin(shared);
    if (threadIdx.x >= T::WORKERS) {
        T::template bring<false>(shared, w, (n + 15) / 16, strip, x, count, k, [&] {
            allow_kernel_behind();
            wait_for_kernel_in_front();
        }, [&](int t) { return uint32_t(first + t); });
        return;
    }
    T tile;
    tile.multiply(shared, k);
    // What is overwritten below may still be read by the kernel in front, as far as these threads know.
    wait_for_kernel_in_front();
    if constexpr (WHAT == F32) {
        return store_sums(static_cast<float *>(out), tile, first, count, strip, n, pitch);
    }
    constexpr int WIDTH = WHAT == GATED ? T::ROWS / 2 : T::ROWS;
    static_assert(OutTile<WIDTH>::PITCH * 2 * T::COLS <= T::SHARED_BYTES);
    OutTile<WIDTH> values{reinterpret_cast<bf16 *>(shared)};
    put_tile<WHAT == GATED>(values, tile);
    sync_first(T::WORKERS);
    const int columns = WHAT == GATED ? n / 2 : n, column = blockIdx.y * WIDTH;
    values.template store<T::WORKERS>(static_cast<bf16 *>(out) + column, pitch, count, columns - column,
                                      [&](int token) { return first + token; });
}

using Tile16x16 = BulkTile<Bf16, 1, 2, 1, 1, 256, 6, 4>;
using Tile16x32 = BulkTile<Bf16, 1, 4, 1, 1, 256, 4, 4>;
using Tile32x32 = BulkTile<Bf16, 2, 4, 1, 1, 256, 4, 4>;
using Tile64x32 = BulkTile<Bf16, 4, 2, 1, 2, 128, 4, 4>;

}  // namespace

#define LINEAR(NAME, TILE, WHAT)                                                                                       \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, 2)                                                     \
        NAME(void *out, const bf16 *x, const uint8_t *w, int rows, int n, int k, int pitch) {                          \
        linear<TILE, WHAT>(out, x, w, rows, n, k, pitch);                                                              \
    }
LINEAR(linear_few_bf16_16x32, Tile16x32, BF16)
LINEAR(linear_few_bf16_32x32, Tile32x32, BF16)
LINEAR(linear_few_bf16_64x32, Tile64x32, BF16)
LINEAR(linear_few_f32_16x16, Tile16x16, F32)
LINEAR(linear_few_f32_32x32, Tile32x32, F32)
LINEAR(linear_few_gated_16x32, Tile16x32, GATED)
LINEAR(linear_few_gated_32x32, Tile32x32, GATED)
LINEAR(linear_few_gated_64x32, Tile64x32, GATED)
