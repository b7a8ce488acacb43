// A tile of a matrix product, out[t, n] = sum over k of x[row(t), k] * w[n, k], by mma.sync, for every GPU from Ampere on:
// what linear.cu and experts.cu are made of. Weights are the M operand and come as strips (common/strips.cuh), tokens are N.
//
// A block of WM x WN warps computes ROWS = WM * SW * 16 weight rows of COLS = WN * NT * 8 tokens. Weights and tokens of
// DEPTH columns are a stage; STAGES of them are in shared memory, all but one on their way. Sums: warp_tile.cuh.
#pragma once

#include "warp_tile.cuh"

/// Begins copying stage `index` of the weights of `T`, a `Tile`, an `Int8Tile` or an `Fp4Tile`: of `strips` in all, those from `strip` on.
template <class T>
__device__ __forceinline__ void copy_weights(uint8_t *shared, const uint8_t *w, int strips, int strip, int k,
                                             int index) {
    using F = typename T::F;
    constexpr int STRIPS = T::STRIPS, ACROSS = STRIPS < BAND ? STRIPS : BAND, PIECES = ACROSS * F::BYTES / 16;
    uint32_t to = shared_address(shared) + index % T::STAGES * T::STAGE_BYTES;
#pragma unroll
    for (int part = 0; part < T::BLOCKS * STRIPS / ACROSS; ++part) {
        const int from_strip = strip + part % (STRIPS / ACROSS) * ACROSS, block = part / (STRIPS / ACROSS);
        const int pieces = min(ACROSS, strips - from_strip) * (F::BYTES / 16);
        const uint8_t *from = blocks_at<F>(w, strips, k / F::UNIT, from_strip, index * T::BLOCKS + block);
#pragma unroll
        for (int first = 0; first < PIECES; first += T::THREADS) {
            const int piece = first + threadIdx.x;
            if (piece < pieces) {
                copy_16(to + (part * PIECES + piece) * 16, from + piece * 16);
            }
        }
    }
}

/// Begins copying stage `index` of the rows: row `rows[t]` of `x: [any, k]` for each `t < count`, `DEPTH` elements of it.
template <class T, int DEPTH = T::DEPTH, class X>
__device__ __forceinline__ void copy_rows(uint8_t *shared, const X *x, const uint32_t *rows, int count, int k,
                                          int index) {
    constexpr int COLUMNS = 16 / sizeof(X), PIECES = DEPTH / COLUMNS;
    uint32_t to = shared_address(shared) + index % T::STAGES * T::STAGE_BYTES + T::WEIGHT_BYTES;
#pragma unroll
    for (int first = 0; first < T::COLS * PIECES; first += T::THREADS) {
        int piece = first + threadIdx.x, t = piece / PIECES, at = piece % PIECES;
        if ((T::COLS * PIECES % T::THREADS == 0 || piece < T::COLS * PIECES) && t < count) {
            copy_16(to + t * T::PITCH + at * 16, x + size_t(rows[t]) * k + index * DEPTH + at * COLUMNS);
        }
    }
}

/// Goes through the stages of a product of codes by `T`, as `Tile::run` does of its own. (Through this, some of the kernels that
/// are made of `Tile` would spill more registers.) Weights are on their way before `ready`, which fills the list of rows after it
/// has waited for whatever they depend on; `copy_rows_of(index)` begins copying stage `index` of the rows; `start` is called
/// when the list is there, and `add(index, stage)` for each stage in order, which is in shared memory then.
template <class T, class READY, class COPY, class START, class ADD>
__device__ __forceinline__ void in_stages(uint8_t *shared, const uint8_t *w, int strips, int strip, int k, READY ready,
                                          COPY copy_rows_of, START start, ADD add) {
    const int stages = k / T::DEPTH;
#pragma unroll
    for (int index = 0; index < T::STAGES - 1; ++index) {
        if (index < stages) {
            copy_weights<T>(shared, w, strips, strip, k, index);
        }
    }
    ready();
    __syncthreads();
#pragma unroll
    for (int index = 0; index < T::STAGES - 1; ++index) {
        if (index < stages) {
            copy_rows_of(index);
        }
        commit_copies();
    }
    start();
    for (int index = 0; index < stages; ++index) {
        wait_for_copies<T::STAGES - 2>();
        __syncthreads();
        if (index + T::STAGES - 1 < stages) {
            copy_weights<T>(shared, w, strips, strip, k, index + T::STAGES - 1);
            copy_rows_of(index + T::STAGES - 1);
        }
        commit_copies();
        add(index, shared + index % T::STAGES * T::STAGE_BYTES);
    }
    wait_for_copies<0>();
    __syncthreads();
}

template <class FORMAT, int WM_, int WN_, int SW_, int NT_, int DEPTH_, int STAGES_>
struct Tile {
    using F = FORMAT;
    static constexpr int WM = WM_, WN = WN_, SW = SW_, NT = NT_, DEPTH = DEPTH_, STAGES = STAGES_;
    static_assert(STAGES >= 2);
    static constexpr int THREADS = 32 * WM * WN, STRIPS = WM * SW, ROWS = 16 * STRIPS, COLS = 8 * WN * NT;
    using Warp = WarpTile<F, STRIPS, SW, NT, DEPTH>;
    static constexpr int BLOCKS = DEPTH / F::UNIT, PITCH = Warp::PITCH;
    static constexpr int WEIGHT_BYTES = BLOCKS * STRIPS * F::BYTES, STAGE_BYTES = WEIGHT_BYTES + COLS * PITCH;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES;

    Warp warp;

    /// The whole product. `x`, `rows`, `count` as in `copy_rows`; `rows` is in shared memory, and `ready` fills it
    /// after it has waited for whatever the tokens depend on: weights are on their way before that.
    template <class READY>
    __device__ __forceinline__ void run(uint8_t *shared, const uint8_t *w, int strips, int strip,
                                        const bf16 *x, const uint32_t *rows, int count, int k, READY ready) {
        const int stages = k / DEPTH;
#pragma unroll
        for (int index = 0; index < STAGES - 1; ++index) {
            if (index < stages) {
                copy_weights<Tile>(shared, w, strips, strip, k, index);
            }
        }
        ready();
        __syncthreads();
#pragma unroll
        for (int index = 0; index < STAGES - 1; ++index) {
            if (index < stages) {
                copy_rows<Tile>(shared, x, rows, count, k, index);
            }
            commit_copies();
        }
        warp.clear();
        const int wm = threadIdx.x / 32 % WM, wn = threadIdx.x / 32 / WM;
        for (int index = 0; index < stages; ++index) {
            wait_for_copies<STAGES - 2>();
            __syncthreads();
            if (index + STAGES - 1 < stages) {
                copy_weights<Tile>(shared, w, strips, strip, k, index + STAGES - 1);
                copy_rows<Tile>(shared, x, rows, count, k, index + STAGES - 1);
            }
            commit_copies();
            const uint8_t *stage = shared + index % STAGES * STAGE_BYTES;
            warp.add(stage + wm * SW * F::BYTES, shared_address(stage) + WEIGHT_BYTES + wn * NT * 8 * PITCH);
        }
        wait_for_copies<0>();
        __syncthreads();
    }
};
