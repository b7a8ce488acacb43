// experts_wide_<projection>_<format>: the products of experts.cu for many slots, by wgmma; the same bits.
// Arguments and layouts: experts.cu; tiles of up to 160 slots. The shared expert is not beside them: linear_sm90a.cu.
// Grid: a block for each multiprocessor; each takes every gridDim-th of the weight rows of the tiles, and brings the next
// ones' stages while it writes.  Block: 384 threads.  Shared: `WideTile` and what leaves it, 225 KiB.
// Bound by the tensor cores from about 100 slots an expert on, by memory below.   Oracle: kernels/src/oracle/experts.rs
#include "experts.cuh"
#include "gemm/wide_tile.cuh"

namespace {

constexpr int N_MAX = 160;

/// Sums of integer formats take twice the registers, for the group and for all: so half the rows. DOWN has so many rows
/// that smaller tiles are as good, and they leave room for more stages.
template <class F, Projection PROJECTION>
constexpr int BLOCKS_OF = F::GROUP > 0 || PROJECTION == DOWN ? 1 : 2;
template <class F>
constexpr int DEPTH_WIDE = F::CODE_BYTES_A_COLUMN > 16 ? 64 : 128;
constexpr int SHARED_BYTES = 225 * 1024;

template <class F, Projection PROJECTION>
struct Plan {
    static constexpr int MS = BLOCKS_OF<F, PROJECTION>, ROWS = 128 * MS;
    static constexpr int WIDTH = PROJECTION == GATE_UP ? ROWS / 2 : ROWS;
    /// What leaves a block, behind the stages.
    static constexpr int OUT_BYTES = OutTile<WIDTH>::PITCH * 2 * N_MAX;
    static constexpr int STAGE_BYTES = WideTile<F, MS, N_MAX, DEPTH_WIDE<F>, 1>::STAGE_BYTES + 16;
    static constexpr int FIT = (SHARED_BYTES - OUT_BYTES) / STAGE_BYTES, STAGES = FIT < 6 ? FIT : 6;
    template <int N>
    using Tile = WideTile<F, MS, N, DEPTH_WIDE<F>, STAGES, N_MAX>;
};

/// A tile of slots: what `bring` and `multiply` want to know.
struct Slots {
    int expert, first, count, strip;
};

template <class F, Projection PROJECTION>
__device__ __forceinline__ Slots slots_of(const Routes &routes, int block, int across) {
    const uint4 tile = routes.tiles[block / across];
    return {int(tile.x), int(tile.y), int(tile.z), block % across * (Plan<F, PROJECTION>::ROWS / 16)};
}

/// Calls `with` with the width of a tile for `count` slots.
template <class WITH>
__device__ __forceinline__ void for_width(int count, WITH with) {
    if (count <= 32) {
        with(Count<32>{});
    } else if (count <= 64) {
        with(Count<64>{});
    } else if (count <= 96) {
        with(Count<96>{});
    } else if (count <= 128) {
        with(Count<128>{});
    } else {
        with(Count<160>{});
    }
}

template <class F, Projection PROJECTION>
__device__ __forceinline__ void wide(bf16 *out, const bf16 *x, Weights w, Routes routes, int n, int k) {
    using P = Plan<F, PROJECTION>;
    using Any = typename P::template Tile<N_MAX>;
    extern __shared__ __align__(1024) uint8_t shared[];
    Any::begin(shared);
    // As in experts_few_sm90a.cu: DOWN's tiles were made two kernels in front.
    if (PROJECTION == GATE_UP) {
        wait_for_kernel_in_front();
        allow_kernel_behind();
    }
    const int across = (n + P::ROWS - 1) / P::ROWS, blocks = int(*routes.tile_count) * across;
    int before = 0;
    if (threadIdx.x >= Any::WORKERS) {
        Any::as_carrier();
        for (int block = blockIdx.x; block < blocks; block += gridDim.x, before += k / Any::DEPTH) {
            const Slots slots = slots_of<F, PROJECTION>(routes, block, across);
            for_width(slots.count, [&](auto width) {
                using T = typename P::template Tile<decltype(width)::VALUE>;
                T::bring(shared, w.data + slots.expert * w.bytes, (n + 15) / 16, slots.strip, x, slots.count, k, before, [&] {
                    if (PROJECTION == DOWN && before == 0) {
                        wait_for_kernel_in_front();
                        allow_kernel_behind();
                    }
                }, [&](int t) { return PROJECTION == GATE_UP ? routes.slot_rows[slots.first + t] : slots.first + t; });
            });
        }
        return;
    }
    Any::as_worker();
    // What is overwritten may still be read by the kernel in front, as far as these threads know.
    wait_for_kernel_in_front();
    OutTile<P::WIDTH> values{reinterpret_cast<bf16 *>(shared + (Any::SHARED_BYTES + 15) / 16 * 16)};
    for (int block = blockIdx.x; block < blocks; block += gridDim.x, before += k / Any::DEPTH) {
        const Slots slots = slots_of<F, PROJECTION>(routes, block, across);
        float upper_scale = 1.0f, lower_scale = 1.0f;
        if constexpr (F::GLOBAL_SCALE) {
            const int each = PROJECTION == GATE_UP ? 2 : 1;
            upper_scale = w.scales[slots.expert * each] * F::FACTOR;
            lower_scale = w.scales[slots.expert * each + each - 1] * F::FACTOR;
        }
        for_width(slots.count, [&](auto width) {
            using T = typename P::template Tile<decltype(width)::VALUE>;
            T tile;
            tile.multiply(shared, k, before);
#pragma unroll
            for (int m = 0; m < T::MS; ++m) {
#pragma unroll
                for (int i = 0; i < T::N / 8; ++i) {
                    float sum[4] = {tile.sum[m][4 * i], tile.sum[m][4 * i + 1], tile.sum[m][4 * i + 2],
                                    tile.sum[m][4 * i + 3]};
                    if constexpr (F::GLOBAL_SCALE) {
                        sum[0] *= upper_scale, sum[1] *= upper_scale, sum[2] *= lower_scale, sum[3] *= lower_scale;
                    }
                    if constexpr (PROJECTION == GATE_UP) {
                        values.put_gated(sum, T::row_of(m) / 2, i * 8);
                    } else {
                        values.put(sum, T::row_of(m), i * 8);
                    }
                }
            }
        });
        sync_first(Any::WORKERS);
        const int columns = PROJECTION == GATE_UP ? n / 2 : n, column = slots.strip * 16 / (PROJECTION == GATE_UP ? 2 : 1);
        values.template store<Any::WORKERS>(out + column, columns, slots.count, columns - column, [&](int token) {
            return PROJECTION == GATE_UP ? slots.first + token : int(routes.slot_parts[slots.first + token]);
        });
        // The next tile's values come to the same place.
        sync_first(Any::WORKERS);
    }
}

}  // namespace

#define EXPERTS(NAME, FORMAT, PROJECTION)                                                                              \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                                  \
        NAME(bf16 *out, const bf16 *x, const uint8_t *w, uint64_t bytes, const float *scales, const uint4 *tiles,      \
             const uint32_t *tile_count, const uint32_t *slot_rows, const uint32_t *slot_parts, int n, int k) {        \
        wide<FORMAT, PROJECTION>(out, x, Weights{w, bytes, scales}, Routes{tiles, tile_count, slot_rows, slot_parts},  \
                                 n, k);                                                                                \
    }
#define ALL(SUFFIX, FORMAT)                                                                                            \
    EXPERTS(experts_wide_gate_up_##SUFFIX, FORMAT, GATE_UP)                                                            \
    EXPERTS(experts_wide_down_##SUFFIX, FORMAT, DOWN)
FOR_EVERY_FORMAT(ALL)
