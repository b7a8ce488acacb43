// experts_wide_<projection>_<format>: the products of experts.cu for many slots, by wgmma; the same bits.
// Arguments and layouts: experts.cu; tiles of up to 128 slots. The shared expert is not beside them: linear_sm90a.cu.
// Grid: x over the weight rows of each tile.  Block: 256 threads.  Shared: `WideTile` and 1 KiB, up to 201 KiB.
// Bound by the tensor cores from about 100 slots an expert on, by memory below.   Oracle: kernels/src/oracle/experts.rs
#include "experts.cuh"
#include "gemm/wide_tile.cuh"

namespace {

/// Sums of integer formats take twice the registers, for the group and for all: so half the rows.
template <class F, int N>
using Wide = WideTile<F, (F::GROUP > 0 ? 1 : 2), N, (F::CODE_BYTES_A_COLUMN > 16 ? 64 : 128), 4>;

template <class F, int N, Projection PROJECTION>
__device__ __forceinline__ void wide_tile(uint8_t *shared, bf16 *out, const bf16 *x, const uint8_t *w, float upper_scale,
                                          float lower_scale, int strip, int first, int count, int n, int k,
                                          const Routes &routes) {
    using T = Wide<F, N>;
    // Behind the stages, which are aligned only if nothing lies in front of them.
    uint32_t *row_of = reinterpret_cast<uint32_t *>(shared + T::SHARED_BYTES), *target_of = row_of + N;
    const size_t strip_bytes = size_t(k) / F::UNIT * F::BYTES;
    T tile;
    tile.run(shared, w + strip * strip_bytes, strip_bytes, (n + 15) / 16 - strip, x, row_of, count, k, [&] {
        for (int t = threadIdx.x; t < count; t += T::THREADS) {
            row_of[t] = PROJECTION == GATE_UP ? routes.slot_rows[first + t] : first + t;
            target_of[t] = PROJECTION == GATE_UP ? first + t : routes.slot_parts[first + t];
        }
        if (PROJECTION == DOWN) {
            wait_for_kernel_in_front();
            allow_kernel_behind();
        }
    });
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4 * 2;
    constexpr int WIDTH = PROJECTION == GATE_UP ? T::ROWS / 2 : T::ROWS;
    static_assert(OutTile<WIDTH>::PITCH * 2 * T::COLS <= T::SHARED_BYTES);
    OutTile<WIDTH> values{reinterpret_cast<bf16 *>(shared)};
#pragma unroll
    for (int m = 0; m < T::MS; ++m) {
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {
            float sum[4] = {tile.sum[m][4 * i], tile.sum[m][4 * i + 1], tile.sum[m][4 * i + 2], tile.sum[m][4 * i + 3]};
            if constexpr (F::GLOBAL_SCALE) {
                sum[0] *= upper_scale, sum[1] *= upper_scale, sum[2] *= lower_scale, sum[3] *= lower_scale;
            }
            if constexpr (PROJECTION == GATE_UP) {
                values.put_gated(sum, T::row_of(m) / 2 + g, t + i * 8);
            } else {
                values.put(sum, T::row_of(m) + g, t + i * 8);
            }
        }
    }
    __syncthreads();
    const int columns = PROJECTION == GATE_UP ? n / 2 : n, column = strip * 16 / (PROJECTION == GATE_UP ? 2 : 1);
    values.store(out + column, columns, count, columns - column, [&](int token) { return target_of[token]; });
}

template <class F, Projection PROJECTION>
__device__ __forceinline__ void wide(bf16 *out, const bf16 *x, Weights w, Routes routes, int n, int k) {
    extern __shared__ __align__(1024) uint8_t shared[];
    // As in experts.cuh: DOWN's tiles were made two kernels in front.
    if (PROJECTION == GATE_UP) {
        wait_for_kernel_in_front();
        allow_kernel_behind();
    }
    using Any = Wide<F, 128>;
    const int across = (n + Any::ROWS - 1) / Any::ROWS;
    if (blockIdx.x / across >= *routes.tile_count) {
        return;
    }
    const uint4 slots_of = routes.tiles[blockIdx.x / across];
    const int first = slots_of.y, count = slots_of.z, strip = blockIdx.x % across * Any::STRIPS;
    float upper_scale = 1.0f, lower_scale = 1.0f;
    if constexpr (F::GLOBAL_SCALE) {
        const int each = PROJECTION == GATE_UP ? 2 : 1;
        upper_scale = w.scales[slots_of.x * each] * F::FACTOR, lower_scale = w.scales[slots_of.x * each + each - 1] * F::FACTOR;
    }
    auto with = [&](auto n_tokens) {
        wide_tile<F, decltype(n_tokens)::VALUE, PROJECTION>(shared, out, x, w.data + slots_of.x * w.bytes, upper_scale,
                                                           lower_scale, strip, first, count, n, k, routes);
    };
    if (count <= 32) {
        with(Count<32>{});
    } else if (count <= 64) {
        with(Count<64>{});
    } else if (count <= 96) {
        with(Count<96>{});
    } else {
        with(Count<128>{});
    }
}

}  // namespace

#define EXPERTS(NAME, FORMAT, PROJECTION)                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        NAME(bf16 *out, const bf16 *x, const uint8_t *w, uint64_t bytes, const float *scales, const uint4 *tiles,      \
             const uint32_t *tile_count, const uint32_t *slot_rows, const uint32_t *slot_parts, int n, int k) {        \
        wide<FORMAT, PROJECTION>(out, x, Weights{w, bytes, scales}, Routes{tiles, tile_count, slot_rows, slot_parts},  \
                                 n, k);                                                                                \
    }
#define ALL(SUFFIX, FORMAT)                                                                                            \
    EXPERTS(experts_wide_gate_up_##SUFFIX, FORMAT, GATE_UP)                                                            \
    EXPERTS(experts_wide_down_##SUFFIX, FORMAT, DOWN)
ALL(bf16, Bf16)
ALL(int8_32, Int8<32>)
ALL(int8_64, Int8<64>)
ALL(int8_128, Int8<128>)
ALL(int4_32, Int4<32>)
ALL(int4_64, Int4<64>)
ALL(int4_128, Int4<128>)
ALL(nvfp4, Nvfp4)
