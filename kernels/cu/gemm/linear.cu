// linear_<tile>_<what>: out[t, n] = sum over k of x[t, k] * w[n, k], by mma.sync, for few rows or GPUs without wgmma.
// x: [rows, k] bf16.   w: [n, k] bf16 as strips (common/strips.cuh).   k: a multiple of 128.   Rows 16-byte aligned.
// what: `bf16`    out: [rows, pitch] bf16, of which n, a multiple of 8, are written
//       `f32`     out: [rows, pitch] f32, of which n are written
//       `gated`   w: gate and up interleaved by eight rows; out: [rows, pitch] bf16, of which n / 2 are written:
//                 bf16(bf16(silu(gate)) * up)
//       `best`    the best tokens of each row and tile of 256 weight rows: finish.cuh
// Grid: x over the tokens, y over the weight rows, so that blocks of the same weights run together.  Block, shared: `Tile`.
// See warp_tile.cuh for the order of sums.
// Bound by memory with few rows (each weight is read once for 32 or 64 tokens), by the tensor cores with many.
// Oracle: kernels/src/oracle/{linear,swiglu,candidates}.rs
#include "finish.cuh"
#include "tile.cuh"

namespace {

/// 16 or 32 weight rows of 32 tokens, for matrices so small that the blocks must be.
using Thin = Tile<Bf16, 1, 4, 1, 1, 128, 6>;
using Narrow = Tile<Bf16, 2, 4, 1, 1, 128, 5>;
/// 256 weight rows of 32 tokens, for the head.
using Broad = Tile<Bf16, 8, 1, 2, 4, 64, 2>;
/// 256 weight rows of 64 tokens, for many rows.
using Many = Tile<Bf16, 8, 1, 2, 8, 64, 2>;

enum What { BF16, F32, GATED, BEST_TOKENS };

template <class T, What WHAT>
__device__ __forceinline__ void linear(void *out, Best best, const bf16 *x, const uint8_t *w, int rows, int n, int k,
                                       int pitch) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint32_t row_of[T::COLS];
    const int strip = blockIdx.y * T::STRIPS, first = blockIdx.x * T::COLS, count = min(rows - first, T::COLS);
    T tile;
    tile.run(shared, w, (n + 15) / 16, strip, x, row_of, count, k, [&] {
        for (int t = threadIdx.x; t < T::COLS; t += T::THREADS) {
            row_of[t] = first + t;
        }
        wait_for_kernel_in_front();
        allow_kernel_behind();
    });
    if constexpr (WHAT == F32) {
        return store_sums(static_cast<float *>(out), tile, first, count, strip, n, pitch);
    }
    constexpr int WIDTH = WHAT == GATED ? T::ROWS / 2 : T::ROWS;
    static_assert(OutTile<WIDTH>::PITCH * 2 * T::COLS <= T::SHARED_BYTES);
    OutTile<WIDTH> values{reinterpret_cast<bf16 *>(shared)};
    put_tile<WHAT == GATED>(values, tile);
    __syncthreads();
    if constexpr (WHAT == BEST_TOKENS) {
        static_assert(T::ROWS == BEST_WIDTH);
        store_best<T::THREADS>(values, best, first, count, blockIdx.y, gridDim.y, min(n - strip * 16, WIDTH));
    } else {
        const int columns = WHAT == GATED ? n / 2 : n, column = blockIdx.y * WIDTH;
        values.template store<T::THREADS>(static_cast<bf16 *>(out) + column, pitch, count, columns - column,
                     [&](int token) { return first + token; });
    }
}

}  // namespace

#define LINEAR(NAME, TILE, WHAT)                                                                                       \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS)                                                        \
        NAME(void *out, const bf16 *x, const uint8_t *w, int rows, int n, int k, int pitch) {                          \
        linear<TILE, WHAT>(out, Best{}, x, w, rows, n, k, pitch);                                                      \
    }
LINEAR(linear_thin_bf16, Thin, BF16)
LINEAR(linear_thin_f32, Thin, F32)
LINEAR(linear_thin_gated, Thin, GATED)
LINEAR(linear_narrow_bf16, Narrow, BF16)
LINEAR(linear_narrow_gated, Narrow, GATED)
LINEAR(linear_broad_bf16, Broad, BF16)
LINEAR(linear_many_bf16, Many, BF16)
LINEAR(linear_many_gated, Many, GATED)

#define BEST_OF(NAME, TILE)                                                                                            \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS)                                                        \
        NAME(uint32_t *tokens, float *logits, float *sums, const bf16 *x, const uint8_t *w, int rows, int n, int k) {  \
        linear<TILE, BEST_TOKENS>(nullptr, Best{tokens, logits, sums}, x, w, rows, n, k, 0);                           \
    }
BEST_OF(linear_broad_best, Broad)
BEST_OF(linear_many_best, Many)
