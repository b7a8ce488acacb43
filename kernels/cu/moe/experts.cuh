// The two products of the experts as tiles, for experts.cu and those of quantized rows: what a block does that has a tile of slots, or of the shared
// expert's rows.
#pragma once

#include "gemm/finish.cuh"
#include "gemm/tile.cuh"

/// The weights of all experts, of one projection: expert e's strips at `data + e * bytes`.
struct Weights {
    const uint8_t *data;
    size_t bytes;
    /// NVFP4's matrix-wide scales, of gate and up `[experts, 2]`, of down `[experts]`.
    const float *scales;
};

/// Which slots belong to which expert: kernels/src/cuda/experts.rs, `Routes`.
struct Routes {
    const uint4 *tiles;
    const uint32_t *tile_count, *slot_rows, *slot_parts;
};

enum Projection { GATE_UP, DOWN };

/// `DO(suffix, format)` for every format that experts are stored in.
#define FOR_EVERY_FORMAT(DO)                                                                                           \
    DO(bf16, Bf16)                                                                                                     \
    DO(int8_32, Int8<32>)                                                                                              \
    DO(int8_64, Int8<64>)                                                                                              \
    DO(int8_128, Int8<128>)                                                                                            \
    DO(int4_32, Int4<32>)                                                                                              \
    DO(int4_64, Int4<64>)                                                                                              \
    DO(int4_128, Int4<128>)                                                                                            \
    DO(nvfp4, Nvfp4)

template <int N>
struct Count {
    static constexpr int VALUE = N;
};

/// Calls `with(Count<NT>{})` for the narrowest tile of 8 NT slots that has room for `count`: of up to 32, or else of `NT_MAX`.
template <int NT_MAX, class WITH>
__device__ __forceinline__ void with_room_for(int count, WITH with) {
    if (count <= 8) {
        with(Count<1>{});
    } else if (count <= 16) {
        with(Count<2>{});
    } else if (count <= 24) {
        with(Count<3>{});
    } else if (NT_MAX <= 4 || count <= 32) {
        with(Count<4>{});
    } else {
        with(Count<NT_MAX>{});
    }
}

/// Columns of a stage, so that stages are about as large for every format.
template <class F>
constexpr int DEPTH_OF = F::CODE_BYTES_A_COLUMN > 16 ? 64 : 128;

/// Shared memory every block may have on any GPU from Ampere on, less what lists of rows take.
constexpr int SHARED_MAX = 99 * 1024 - 512;

template <class F, int WM, int WN, int SW, int NT, int DEPTH, int STAGES_MAX>
struct Fitting {
    static constexpr int STAGE_BYTES = Tile<F, WM, WN, SW, NT, DEPTH, 2>::STAGE_BYTES;
    static constexpr int STAGES = SHARED_MAX / STAGE_BYTES < STAGES_MAX ? SHARED_MAX / STAGE_BYTES : STAGES_MAX;
    static_assert(STAGES >= 2);
    using Type = Tile<F, WM, WN, SW, NT, DEPTH, STAGES>;
};

/// The tile of `T::ROWS` weight rows from strip `strip` on and `count` tokens. `rows[t]` (shared memory) are rows of `x`
/// and `targets[t]` those of `out` once `ready` was called. `n`: weight rows; `out` has n / 2 columns after SwiGLU.
/// `T`: a `Tile`, an `Int8Tile` with `QuantizedRows` for `x`, or an `Fp4Tile` with `Fp4Rows`.
template <class T, Projection PROJECTION, class X, class READY>
__device__ __forceinline__ void expert_tile(uint8_t *shared, bf16 *out, X x, const uint8_t *w, float upper_scale,
                                            float lower_scale, int strip, int count, int n, int k, const uint32_t *rows,
                                            const uint32_t *targets, READY ready) {
    T tile;
    tile.run(shared, w, (n + 15) / 16, strip, x, rows, count, k, ready);
    constexpr int WIDTH = PROJECTION == GATE_UP ? T::ROWS / 2 : T::ROWS;
    static_assert(OutTile<WIDTH>::PITCH * 2 * T::COLS <= T::SHARED_BYTES);
    OutTile<WIDTH> values{reinterpret_cast<bf16 *>(shared)};
    put_tile<PROJECTION == GATE_UP>(values, tile, upper_scale, lower_scale);
    __syncthreads();
    const int columns = PROJECTION == GATE_UP ? n / 2 : n, column = strip * 16 / (PROJECTION == GATE_UP ? 2 : 1);
    values.template store<T::THREADS>(out + column, columns, count, columns - column, [&](int token) { return targets[token]; });
}

/// A block of the kernels in experts.cu. `TILES<NT>::Type`: the tile for up to 8 NT slots; `NT_MAX` the most.
template <class F, template <int> class TILES, int NT_MAX, class SHARED_TILE, Projection PROJECTION>
__device__ __forceinline__ void experts(bf16 *out, const bf16 *x, Weights w, const uint8_t *shared_w, Routes routes, int n,
                                        int k, int rows, int slots, int stride, int shared_blocks) {
    extern __shared__ __align__(128) uint8_t shared[];
    constexpr int COLS = 8 * NT_MAX > SHARED_TILE::COLS ? 8 * NT_MAX : SHARED_TILE::COLS;
    __shared__ uint32_t row_of[COLS], target_of[COLS];

    if (int(blockIdx.x) < shared_blocks) {
        using T = SHARED_TILE;
        const int across = (n + T::ROWS - 1) / T::ROWS, first = blockIdx.x / across * T::COLS;
        const int count = min(rows - first, T::COLS);
        expert_tile<T, PROJECTION>(shared, out, x, shared_w, 1.0f, 1.0f, blockIdx.x % across * T::STRIPS, count, n, k,
                                   row_of, target_of, [&] {
            for (int t = threadIdx.x; t < count; t += T::THREADS) {
                row_of[t] = PROJECTION == GATE_UP ? first + t : slots + first + t;
                target_of[t] = PROJECTION == GATE_UP ? slots + first + t : (first + t) * stride + stride - 1;
            }
            wait_for_kernel_in_front();
            allow_kernel_behind();
        });
        return;
    }
    // The tiles were made two kernels in front of DOWN's, which GATE_UP's waited for before it let DOWN's start.
    if (PROJECTION == GATE_UP) {
        wait_for_kernel_in_front();
        allow_kernel_behind();
    }
    using Any = typename TILES<NT_MAX>::Type;
    const int across = (n + Any::ROWS - 1) / Any::ROWS, block = blockIdx.x - shared_blocks;
    if (block / across >= int(*routes.tile_count)) {
        return;
    }
    const uint4 slots_of = routes.tiles[block / across];
    const int first = slots_of.y, count = slots_of.z, strip = block % across * Any::STRIPS;
    float upper_scale = 1.0f, lower_scale = 1.0f;
    if constexpr (F::GLOBAL_SCALE) {
        const int each = PROJECTION == GATE_UP ? 2 : 1;
        upper_scale = w.scales[slots_of.x * each] * F::FACTOR, lower_scale = w.scales[slots_of.x * each + each - 1] * F::FACTOR;
    }
    with_room_for<NT_MAX>(count, [&](auto nt) {
        using T = typename TILES<decltype(nt)::VALUE>::Type;
        expert_tile<T, PROJECTION>(shared, out, x, w.data + slots_of.x * w.bytes, upper_scale, lower_scale, strip, count, n,
                                   k, row_of, target_of, [&] {
            for (int t = threadIdx.x; t < count; t += T::THREADS) {
                row_of[t] = PROJECTION == GATE_UP ? routes.slot_rows[first + t] : first + t;
                target_of[t] = PROJECTION == GATE_UP ? first + t : routes.slot_parts[first + t];
            }
            if (PROJECTION == DOWN) {
                wait_for_kernel_in_front();
                allow_kernel_behind();
            }
        });
    });
}

/// The most slots of a tile of quantized rows.
constexpr int QUANTIZED_SLOTS_MAX = 32;

/// A block of the kernels that multiply quantized rows. `TILES<NT>::Type`: the tile for up to 8 NT slots; `x_of(e)`: the rows
/// as that tile takes them for expert `e`. The shared expert is elsewhere.
template <template <int> class TILES, Projection PROJECTION, class X_OF>
__device__ __forceinline__ void experts_of_quantized_rows(bf16 *out, Weights w, Routes routes, int n, int k, X_OF x_of) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint32_t row_of[QUANTIZED_SLOTS_MAX], target_of[QUANTIZED_SLOTS_MAX];
    allow_kernel_behind();
    wait_for_kernel_in_front();
    constexpr int ROWS = TILES<1>::Type::ROWS;
    const int across = (n + ROWS - 1) / ROWS;
    if (int(blockIdx.x) / across >= int(*routes.tile_count)) {
        return;
    }
    const uint4 slots_of = routes.tiles[blockIdx.x / across];
    const int first = slots_of.y, count = slots_of.z, strip = blockIdx.x % across * (ROWS / 16);
    with_room_for<QUANTIZED_SLOTS_MAX / 8>(count, [&](auto nt) {
        using T = typename TILES<decltype(nt)::VALUE>::Type;
        expert_tile<T, PROJECTION>(shared, out, x_of(slots_of.x), w.data + slots_of.x * w.bytes, 1.0f, 1.0f, strip, count, n,
                                   k, row_of, target_of, [&] {
            for (int t = threadIdx.x; t < count; t += T::THREADS) {
                row_of[t] = PROJECTION == GATE_UP ? routes.slot_rows[first + t] : first + t;
                target_of[t] = PROJECTION == GATE_UP ? first + t : routes.slot_parts[first + t];
            }
        });
    });
}
