// experts_few_<projection>_<format>: the kernels of this name in experts.cu, for Hopper; the same bits.
// experts_fewest_<projection>_<format>: likewise, of INT4, faster while most tiles are of up to 16 slots.
// Arguments and layouts: experts.cu; tiles of up to 32 slots.
// Grid: the shared expert's blocks, then x over the weight rows of each tile.  Block: 4 warps that multiply, 1 or 2 that bring.  Shared: `BulkTile`.
// Bound by memory: each weight is read once a tile, by bulk copies; those of `down` begin before its tokens are there.
// Oracle: kernels/src/oracle/experts.rs
#include "experts.cuh"
#include "gemm/bulk_tile.cuh"

namespace {

/// Shared memory of a block, so that three are resident.
constexpr int SHARED_BYTES = 75 * 1024;

/// Weights of a block that are on their way at a time, at least two stages.
constexpr int FLIGHT_BYTES = 28 * 1024;

template <class F, int NT, int CARRIERS>
struct Bulk {
    template <int STAGES, int FLIGHT>
    using Of = BulkTile<F, 4, 1, 2, NT, DEPTH_OF<F>, STAGES, CARRIERS, FLIGHT>;
    using One = Of<1, 1>;
    static constexpr int STAGES = SHARED_BYTES / (One::STAGE_BYTES + 16) < 6 ? SHARED_BYTES / (One::STAGE_BYTES + 16) : 6;
    static_assert(STAGES >= 2);
    static constexpr int FLIGHT = FLIGHT_BYTES / One::WEIGHT_BYTES > 2 ? FLIGHT_BYTES / One::WEIGHT_BYTES : 2;
    using Type = Of<STAGES, FLIGHT < STAGES ? FLIGHT : STAGES>;
};

/// 128 weight rows of 32 rows of activations: with one block of mini, all blocks of `gate_up` are resident at once.
template <int CARRIERS>
using SharedTile = BulkTile<Bf16, 4, 1, 2, 4, 64, 3, CARRIERS>;
static_assert(SharedTile<1>::SHARED_BYTES <= SHARED_BYTES);

template <class T, Projection PROJECTION, class ROW, class TARGET>
__device__ __forceinline__ void bulk_tile(uint8_t *shared, bf16 *out, const bf16 *x, const uint8_t *w, float upper_scale,
                                          float lower_scale, int strip, int count, int n, int k, ROW row_of,
                                          TARGET target_of) {
    T::begin(shared);
    if (threadIdx.x >= T::WORKERS) {
        T::template bring<PROJECTION == GATE_UP>(shared, w, (n + 15) / 16, strip, x, count, k, [&] {
            wait_for_kernel_in_front();
            allow_kernel_behind();
        }, row_of);
        return;
    }
    T tile;
    tile.multiply(shared, k);
    constexpr int WIDTH = PROJECTION == GATE_UP ? T::ROWS / 2 : T::ROWS;
    static_assert(OutTile<WIDTH>::PITCH * 2 * T::COLS <= T::SHARED_BYTES);
    OutTile<WIDTH> values{reinterpret_cast<bf16 *>(shared)};
    put_tile<PROJECTION == GATE_UP>(values, tile, upper_scale, lower_scale);
    // What is overwritten below may still be read by the kernel in front, as far as these threads know.
    wait_for_kernel_in_front();
    sync_first(T::WORKERS);
    const int columns = PROJECTION == GATE_UP ? n / 2 : n, column = strip * 16 / (PROJECTION == GATE_UP ? 2 : 1);
    values.template store<T::WORKERS>(out + column, columns, count, columns - column, target_of);
}

template <class F, Projection PROJECTION, int CARRIERS>
__device__ __forceinline__ void few(bf16 *out, const bf16 *x, Weights w, const uint8_t *shared_w, Routes routes, int n, int k,
                                    int rows, int slots, int stride, int shared_blocks) {
    extern __shared__ __align__(128) uint8_t shared[];
    if (int(blockIdx.x) < shared_blocks) {
        using T = SharedTile<CARRIERS>;
        const int across = (n + T::ROWS - 1) / T::ROWS, first = blockIdx.x / across * T::COLS;
        bulk_tile<T, PROJECTION>(
            shared, out, x, shared_w, 1.0f, 1.0f, blockIdx.x % across * T::STRIPS, min(rows - first, T::COLS), n, k,
            [&](int t) { return uint32_t(PROJECTION == GATE_UP ? first + t : slots + first + t); },
            [&](int t) { return PROJECTION == GATE_UP ? slots + first + t : (first + t) * stride + stride - 1; });
        return;
    }
    // The tiles were made two kernels in front of DOWN's, which GATE_UP's waited for before it let DOWN's start.
    if (PROJECTION == GATE_UP) {
        wait_for_kernel_in_front();
        allow_kernel_behind();
    }
    const int across = (n + 127) / 128, block = blockIdx.x - shared_blocks;
    const uint32_t tile_count = *routes.tile_count;
    const uint4 slots_of = routes.tiles[block / across];
    if (block / across >= int(tile_count)) {
        return;
    }
    const int first = slots_of.y, count = slots_of.z;
    float upper_scale = 1.0f, lower_scale = 1.0f;
    if constexpr (F::GLOBAL_SCALE) {
        const int each = PROJECTION == GATE_UP ? 2 : 1;
        upper_scale = w.scales[slots_of.x * each] * F::FACTOR, lower_scale = w.scales[slots_of.x * each + each - 1] * F::FACTOR;
    }
    with_room_for<4>(count, [&](auto nt) {
        using T = typename Bulk<F, decltype(nt)::VALUE, CARRIERS>::Type;
        bulk_tile<T, PROJECTION>(
            shared, out, x, w.data + slots_of.x * w.bytes, upper_scale, lower_scale, block % across * T::STRIPS, count, n, k,
            [&](int t) { return PROJECTION == GATE_UP ? routes.slot_rows[first + t] : first + t; },
            [&](int t) { return PROJECTION == GATE_UP ? first + t : routes.slot_parts[first + t]; });
    });
}

}  // namespace

#define EXPERTS(NAME, FORMAT, PROJECTION, CARRIERS)                                                                    \
    extern "C" __global__ void __launch_bounds__(128 + 32 * CARRIERS, 3)                                               \
        NAME(bf16 *out, const bf16 *x, const uint8_t *w, uint64_t bytes, const float *scales, const uint8_t *shared_w, \
             const uint4 *tiles, const uint32_t *tile_count, const uint32_t *slot_rows, const uint32_t *slot_parts,    \
             int n, int k, int rows, int slots, int stride, int shared_blocks) {                                       \
        few<FORMAT, PROJECTION, CARRIERS>(out, x, Weights{w, bytes, scales}, shared_w,                                 \
                                          Routes{tiles, tile_count, slot_rows, slot_parts}, n, k, rows, slots, stride, \
                                          shared_blocks);                                                              \
    }
#define BOTH(WIDTH, SUFFIX, FORMAT, CARRIERS)                                                                          \
    EXPERTS(experts_##WIDTH##_gate_up_##SUFFIX, FORMAT, GATE_UP, CARRIERS)                                             \
    EXPERTS(experts_##WIDTH##_down_##SUFFIX, FORMAT, DOWN, CARRIERS)
// A second warp that brings leaves fewer registers to each: too few for INT4 and many slots.
BOTH(few, bf16, Bf16, 2)
BOTH(few, int8_32, Int8<32>, 2)
BOTH(few, int8_64, Int8<64>, 2)
BOTH(few, int8_128, Int8<128>, 2)
BOTH(few, int4_32, Int4<32>, 1)
BOTH(few, int4_64, Int4<64>, 1)
BOTH(few, int4_128, Int4<128>, 1)
BOTH(few, nvfp4, Nvfp4, 2)
BOTH(fewest, int4_32, Int4<32>, 2)
BOTH(fewest, int4_64, Int4<64>, 2)
BOTH(fewest, int4_128, Int4<128>, 2)
