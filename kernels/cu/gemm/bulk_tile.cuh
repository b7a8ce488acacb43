// A tile of a matrix product as in tile.cuh, for few rows on Hopper: some warps bring the stages, and the others, which
// are never held up by one another, multiply. Same arithmetic: warp_tile.cuh. Offsets within the tokens are of 32 bits: up to
// 64 GiB of them.
#pragma once

#include "common/barrier.cuh"
#include "warp_tile.cuh"

/// `FLIGHT`: stages that are on their way at a time. A burst of more fills the queues of the memory system, and what is short
/// and urgent, lists and tokens, waits behind it.
template <class FORMAT, int WM_, int WN_, int SW_, int NT_, int DEPTH_, int STAGES_, int CARRIERS_, int FLIGHT_ = STAGES_>
struct BulkTile {
    using F = FORMAT;
    static constexpr int WM = WM_, WN = WN_, SW = SW_, NT = NT_, DEPTH = DEPTH_, STAGES = STAGES_, FLIGHT = FLIGHT_;
    static_assert(FLIGHT <= STAGES);
    static constexpr int WARPS = WM * WN, WORKERS = 32 * WARPS;
    /// Warps that bring the tokens; the first of them brings the weights too.
    static constexpr int CARRIERS = CARRIERS_, THREADS = WORKERS + 32 * CARRIERS;
    static constexpr int STRIPS = WM * SW, ROWS = 16 * STRIPS, COLS = 8 * WN * NT;
    using Warp = WarpTile<F, STRIPS, SW, NT, DEPTH>;
    static constexpr int BLOCKS = DEPTH / F::UNIT, PITCH = Warp::PITCH;
    static constexpr int WEIGHT_BYTES = BLOCKS * STRIPS * F::BYTES, STAGE_BYTES = WEIGHT_BYTES + COLS * PITCH;
    /// The stages, then a barrier that says a stage is full, and one that says it was read, for each.
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + STAGES * 16;

    Warp warp;

    static __device__ __forceinline__ uint32_t full(const uint8_t *shared, int index) {
        return shared_address(shared) + STAGES * STAGE_BYTES + index % STAGES * 8;
    }
    static __device__ __forceinline__ uint32_t read(const uint8_t *shared, int index) {
        return full(shared, index) + STAGES * 8;
    }

    /// First of all, by all threads.
    static __device__ __forceinline__ void begin(const uint8_t *shared) {
        if (threadIdx.x == 0) {
            for (int index = 0; index < STAGES; ++index) {
                barrier_init(full(shared, index), 1 + 32 * CARRIERS);
                barrier_init(read(shared, index), WARPS * WARP_ARRIVALS);
            }
            barriers_ready();
        }
        __syncthreads();
    }

    /// Brings everything; by the last warps. Weights: of `strips` in all, those from `strip` on. `ready` waits for whatever
    /// the tokens depend on; then, or before if `IS_LISTED`, `row_of(t)` is which row of `x` token t is, for t < `count`.
    template <bool IS_LISTED, class READY, class ROW_OF>
    static __device__ __forceinline__ void bring(const uint8_t *shared, const uint8_t *w, int strips, int strip,
                                                 const bf16 *x, int count, int k, READY ready, ROW_OF row_of) {
        const int carrier = threadIdx.x - WORKERS, stages = k / DEPTH;
        const uint32_t start = shared_address(shared);
        auto bring_weights = [&](int index) {
            if (carrier == 0) {
                constexpr int ACROSS = STRIPS < BAND ? STRIPS : BAND;
                const int present = min(STRIPS, strips - strip);
                barrier_expect(full(shared, index), BLOCKS * present * F::BYTES);
#pragma unroll
                for (int part = 0; part < BLOCKS * STRIPS / ACROSS; ++part) {
                    const int from_strip = strip + part % (STRIPS / ACROSS) * ACROSS, block = part / (STRIPS / ACROSS);
                    if (from_strip < strips) {
                        copy_bulk_once(start + index % STAGES * STAGE_BYTES + part * (ACROSS * F::BYTES),
                                       blocks_at<F>(w, strips, k / F::UNIT, from_strip, index * BLOCKS + block),
                                       min(ACROSS, strips - from_strip) * F::BYTES, full(shared, index));
                    }
                }
            }
        };
        // Parts of rows are too short for bulk copies, which a warp begins one by one: 16 bytes a lane instead.
        constexpr int PIECES = DEPTH / 8, EACH = 32 * CARRIERS, COPIES = COLS * PIECES / EACH;
        static_assert(COLS * PIECES % EACH == 0);
        uint32_t at[COPIES];
        auto find_rows = [&] {
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const int t = (i * EACH + carrier) / PIECES;
                at[i] = t < count ? row_of(t) : 0;
            }
        };
        if (IS_LISTED) {
            find_rows();
        }
#pragma unroll 1
        for (int index = 0; index < FLIGHT && index < stages; ++index) {
            bring_weights(index);
        }
        ready();
        if (!IS_LISTED) {
            find_rows();
        }
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            at[i] = at[i] * uint32_t(k / 8) + (i * EACH + carrier) % PIECES;
        }
        auto bring_tokens = [&](int index) {
            const uint4 *from = reinterpret_cast<const uint4 *>(x) + index * PIECES;
            const uint32_t to = start + index % STAGES * STAGE_BYTES + WEIGHT_BYTES;
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const int piece = i * EACH + carrier, t = piece / PIECES;
                if (t < count) {
                    copy_16(to + t * PITCH + piece % PIECES * 16, from + at[i]);
                }
            }
            barrier_arrive_after_copies(full(shared, index));
        };
#pragma unroll 1
        for (int index = 0; index < FLIGHT && index < stages; ++index) {
            bring_tokens(index);
        }
#pragma unroll 1
        for (int index = FLIGHT; index < stages; ++index) {
            if (index >= STAGES) {
                barrier_wait(read(shared, index), (index / STAGES - 1) % 2);
            }
            if (FLIGHT < STAGES) {
                barrier_wait(full(shared, index - FLIGHT), (index - FLIGHT) / STAGES % 2);
            }
            bring_weights(index);
            bring_tokens(index);
        }
    }

    /// The sums; by all other warps. Shared memory is free afterwards.
    __device__ __forceinline__ void multiply(const uint8_t *shared, int k) {
        warp.clear();
        const int wm = threadIdx.x / 32 % WM, wn = threadIdx.x / 32 / WM;
        for (int index = 0; index < k / DEPTH; ++index) {
            barrier_wait(full(shared, index), index / STAGES % 2);
            const uint8_t *stage = shared + index % STAGES * STAGE_BYTES;
            warp.add(stage + wm * SW * F::BYTES, shared_address(stage) + WEIGHT_BYTES + wn * NT * 8 * PITCH);
            warp_arrive(read(shared, index));
        }
        sync_first(WORKERS);
    }
};
