// A tile of a matrix product as in tile.cuh, by wgmma, for many rows on Hopper. The weights go through registers, which
// hold them in the same order as mma.sync's A operand; the tokens are read from shared memory.
//
// One warpgroup brings the stages, of DEPTH columns, of which STAGES are in shared memory. Two others compute ROWS = 128 * MS
// weight rows of N tokens: while the products of one run, the other widens its next weights. Same order of sums as
// warp_tile.cuh. Offsets within the tokens are of 32 bits: up to 64 GiB of them.
#pragma once

#include "common/barrier.cuh"
#include "common/strips.cuh"
#include "common/wgmma.cuh"

/// `N_MAX`: tokens that stages have room for. Tiles with the same stages may follow each other, whatever their `N`.
template <class FORMAT, int MS_, int N_, int DEPTH_, int STAGES_, int N_MAX = N_>
struct WideTile {
    using F = FORMAT;
    static constexpr int MS = MS_, N = N_, DEPTH = DEPTH_, STAGES = STAGES_;
    /// The first 256 threads work, the others carry.
    static constexpr int WORKERS = 256, CARRIERS = 128, THREADS = WORKERS + CARRIERS;
    static constexpr int STRIPS = 8 * MS, ROWS = 16 * STRIPS, COLS = N, BLOCKS = DEPTH / F::UNIT;
    static_assert(DEPTH % F::UNIT == 0 && N % 16 == 0);
    static constexpr int TOKEN_BYTES = N_MAX * DEPTH * 2, WEIGHT_BYTES = BLOCKS * STRIPS * F::BYTES;
    /// Tokens lie first: the swizzle wants them 1024-byte aligned.
    static constexpr int STAGE_BYTES = (TOKEN_BYTES + WEIGHT_BYTES + 1023) / 1024 * 1024;
    /// The stages, then a barrier that says a stage is full, and one that says it was read, for each.
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + STAGES * 16;
    /// Steps of 16 columns issued together: at most 64 columns, and within one group of integers.
    static constexpr int BATCH = F::GROUP == 32 ? 2 : 4, BATCHES = DEPTH / 16 / BATCH;

    /// What a thread ends up with of block `m` of its warpgroup's 64 rows: as `WarpTile::sum`, tokens 8 i on at 4 i.
    float sum[MS][N / 2];

    /// The first row of block `m`, of which the thread has rows g and g+8.
    static __device__ __forceinline__ int row_of(int m) {
        return (threadIdx.x / 128 * MS + m) * 64 + threadIdx.x % 128 / 32 * 16;
    }

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
                barrier_init(full(shared, index), 1 + CARRIERS);
                barrier_init(read(shared, index), WORKERS / 32 * WARP_ARRIVALS);
            }
            barriers_ready();
        }
        __syncthreads();
    }

    /// Before `bring`, and before `multiply`: registers move from who brings to who works. 40 and 232 are what 168 for
    /// all at the start come to.
    static __device__ __forceinline__ void as_carrier() {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    }
    static __device__ __forceinline__ void as_worker() {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    }

    /// Brings everything, as `BulkTile::bring`; by the last warpgroup. `before`: stages of the tiles before this one;
    /// `is_once`: whether nobody else reads the weights.
    template <class READY, class ROW_OF>
    static __device__ __forceinline__ void bring(const uint8_t *shared, const uint8_t *w, int strips, int strip,
                                                 const bf16 *x, int count, int k, int before, READY ready, ROW_OF row_of,
                                                 bool is_once = false) {
        const int carrier = threadIdx.x - WORKERS, stages = k / DEPTH;
        const uint32_t start = shared_address(shared);
        auto bring_weights = [&](int index) {
            const int slot = before + index;
            if (slot >= STAGES) {
                barrier_wait(read(shared, slot), (slot / STAGES - 1) % 2);
            }
            if (carrier == 0) {
                const int present = min(STRIPS, strips - strip);
                barrier_expect(full(shared, slot), BLOCKS * present * F::BYTES);
#pragma unroll
                for (int part = 0; part < BLOCKS * MS; ++part) {
                    const int from_strip = strip + part % MS * BAND, block = part / MS;
                    if (from_strip < strips) {
                        const uint32_t to = start + slot % STAGES * STAGE_BYTES + TOKEN_BYTES + part * (BAND * F::BYTES);
                        const uint8_t *from = blocks_at<F>(w, strips, k / F::UNIT, from_strip, index * BLOCKS + block);
                        const int bytes = min(BAND, strips - from_strip) * F::BYTES;
                        if (is_once) {
                            copy_bulk_once(to, from, bytes, full(shared, slot));
                        } else {
                            copy_bulk(to, from, bytes, full(shared, slot));
                        }
                    }
                }
            }
        };
        // The first tile's weights are on their way before its tokens are there.
        const int early = before == 0 ? min(STAGES, stages) : 0;
        for (int index = 0; index < early; ++index) {
            bring_weights(index);
        }
        ready();
        // Rows of 64 columns under the 128-byte swizzle; those of the next 64 columns follow. Eight lanes have a row.
        constexpr int COPIES = N / 16;
        const int at = carrier % 8, t0 = carrier / 8;
        uint32_t from_row[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int t = t0 + i * 16;
            from_row[i] = t < count ? row_of(t) * uint32_t(k / 8) + at : 0;
        }
        auto bring_tokens = [&](int index) {
            const uint4 *from = reinterpret_cast<const uint4 *>(x) + index * (DEPTH / 8);
            const uint32_t to = start + (before + index) % STAGES * STAGE_BYTES + t0 * 128 + (at ^ t0 % 8) * 16;
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                if (t0 + i * 16 < count) {
#pragma unroll
                    for (int part = 0; part < DEPTH / 64; ++part) {
                        copy_16(to + part * (N_MAX * 128) + i * (16 * 128), from + from_row[i] + part * 8);
                    }
                }
            }
            barrier_arrive_after_copies(full(shared, before + index));
        };
        for (int index = 0; index < stages; ++index) {
            if (index >= early) {
                bring_weights(index);
            }
            bring_tokens(index);
        }
    }

    /// The sums; by the two other warpgroups.
    __device__ __forceinline__ void multiply(const uint8_t *shared, int k, int before) {
        if constexpr (F::GROUP > 0) {
#pragma unroll
            for (int m = 0; m < MS; ++m) {
#pragma unroll
                for (int i = 0; i < N / 2; ++i) {
                    sum[m][i] = 0.0f;
                }
            }
        }
        // Sums without groups begin with the first stage's products, and are not cleared before: the compiler would take
        // their registers for used since whatever ran last.
        if constexpr (F::GROUP == 0) {
            stage<true>(shared, before);
        }
        for (int index = F::GROUP == 0 ? 1 : 0; index < k / DEPTH; ++index) {
            stage<false>(shared, before + index);
        }
    }

  private:
    /// Sums of the current integer group.
    float part[F::GROUP > 0 ? MS : 1][F::GROUP > 0 ? N / 2 : 1];

    template <bool FIRST_OF_ALL>
    __device__ __forceinline__ void stage(const uint8_t *shared, int slot) {
        barrier_wait(full(shared, slot), slot / STAGES % 2);
        // Carriers wrote tokens as loads and stores do, and wgmma reads by another way. Theirs would be the fence, but it
        // waits for all of a thread's copies; after the barrier it orders them just as well from here.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        batches<FIRST_OF_ALL, 0>(shared + slot % STAGES * STAGE_BYTES);
        warp_arrive(read(shared, slot));
    }

    template <bool FIRST_OF_ALL, int I>
    __device__ __forceinline__ void batches(const uint8_t *stage) {
        if constexpr (I < BATCHES) {
            batch<FIRST_OF_ALL && I == 0, I>(stage);
            batches<FIRST_OF_ALL, I + 1>(stage);
        }
    }

    /// Issues a batch and waits for it: the other warpgroup's keeps the tensor cores busy meanwhile.
    template <bool CLEARS, int I>
    __device__ __forceinline__ void batch(const uint8_t *stage) {
        constexpr int FIRST = I * BATCH, UNIT64 = FIRST / 4, GROUP = F::GROUP > 0 ? F::GROUP : 1 << 20;
        constexpr bool OPENS = FIRST * 16 % GROUP == 0, CLOSES = (FIRST + BATCH) * 16 % GROUP == 0;
        const int lane = threadIdx.x % 32;
        const uint8_t *blocks = stage + TOKEN_BYTES +
                                (UNIT64 * 64 / F::UNIT * STRIPS + threadIdx.x / 128 * MS * 4 + threadIdx.x % 128 / 32) * F::BYTES;
        uint32_t a[MS][BATCH][4];
        float2 scale[MS];
#pragma unroll
        for (int m = 0; m < MS; ++m) {
            const uint8_t *block = blocks + m * 4 * F::BYTES;
            typename F::Lane weights;
            F::load(weights, block + codes_at<F>(UNIT64), block + scales_at<F>(), lane);
            fragments<FIRST % 4>(a[m], weights);
            if constexpr (F::GROUP > 0 && CLOSES) {
                scale[m] = __half22float2(reinterpret_cast<const __half2 *>(block + group_at<F>(FIRST * 16))[lane / 4]);
            }
        }
        wgmma_fence();
        const uint32_t tokens = shared_address(stage) + UNIT64 * (N_MAX * 128) + FIRST % 4 * 32;
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
#pragma unroll
            for (int m = 0; m < MS; ++m) {
                if constexpr (F::GROUP > 0) {
                    wgmma<N>(part[m], a[m][j], wgmma_operand(tokens + j * 32), !(OPENS && j == 0));
                } else {
                    wgmma<N>(sum[m], a[m][j], wgmma_operand(tokens + j * 32), !(CLEARS && j == 0));
                }
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
        if constexpr (F::GROUP > 0 && CLOSES) {
#pragma unroll
            for (int m = 0; m < MS; ++m) {
#pragma unroll
                for (int i = 0; i < N / 2; ++i) {
                    sum[m][i] = __fmaf_rn(part[m][i], i % 4 < 2 ? scale[m].x : scale[m].y, sum[m][i]);
                }
            }
        }
    }

    template <int FIRST, int J = 0>
    static __device__ __forceinline__ void fragments(uint32_t (&a)[BATCH][4], const typename F::Lane &weights) {
        if constexpr (J < BATCH) {
            F::template fragment<FIRST + J>(a[J], weights);
            fragments<FIRST, J + 1>(a, weights);
        }
    }
};
