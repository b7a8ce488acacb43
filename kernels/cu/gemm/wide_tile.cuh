// A tile of a matrix product as in tile.cuh, by wgmma: for many rows, on Hopper. The weights go through registers, which
// hold them in the same order as mma.sync's A operand; the tokens are read from shared memory.
//
// Two warpgroups compute ROWS = 128 * MS weight rows of N tokens. Of the STAGES stages of DEPTH columns in shared memory,
// STAGES - 2 are on their way, one is read by products still running, and one by those being issued. A batch of 16-column
// steps is issued while the next one's weights are widened. Same order of sums as tile.cuh.
#pragma once

#include "common/async.cuh"
#include "common/strips.cuh"
#include "common/wgmma.cuh"

template <class FORMAT, int MS_, int N_, int DEPTH_, int STAGES_>
struct WideTile {
    using F = FORMAT;
    static constexpr int MS = MS_, N = N_, DEPTH = DEPTH_, STAGES = STAGES_;
    static constexpr int THREADS = 256, STRIPS = 8 * MS, ROWS = 16 * STRIPS, COLS = N;
    static_assert(DEPTH % F::UNIT == 0 && STAGES >= 3);
    static constexpr int STRIP_BYTES = DEPTH / F::UNIT * F::BYTES;
    static constexpr int TOKEN_BYTES = N * DEPTH * 2, WEIGHT_BYTES = STRIPS * STRIP_BYTES;
    /// Tokens lie first: the swizzle wants them 1024-byte aligned.
    static constexpr int STAGE_BYTES = (TOKEN_BYTES + WEIGHT_BYTES + 1023) / 1024 * 1024;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES;
    /// Steps of 16 columns issued together: at most 64 columns, and within one group of integers.
    static constexpr int BATCH = F::GROUP == 32 ? 2 : 4, BATCHES = DEPTH / 16 / BATCH;

    /// What a thread ends up with of block `m` of its warpgroup's 64 rows: as `Tile::sum`, tokens 8 i on at 4 i.
    float sum[MS][N / 2];

    /// The first row of block `m`, of which the thread has rows g and g+8.
    static __device__ __forceinline__ int row_of(int m) {
        return (threadIdx.x / 128 * MS + m) * 64 + threadIdx.x % 128 / 32 * 16;
    }

    static __device__ __forceinline__ void copy_weights(uint8_t *shared, const uint8_t *weights, size_t strip_bytes,
                                                        int strips, int index) {
        constexpr int PIECES = STRIP_BYTES / 16, TOTAL = STRIPS * PIECES;
        uint32_t to = shared_address(shared) + index % STAGES * STAGE_BYTES + TOKEN_BYTES;
        weights += size_t(index) * STRIP_BYTES;
#pragma unroll
        for (int first = 0; first < TOTAL; first += THREADS) {
            int piece = first + threadIdx.x, strip = piece / PIECES;
            if (piece < TOTAL && strip < strips) {
                copy_16(to + piece * 16, weights + strip * strip_bytes + piece % PIECES * 16);
            }
        }
    }

    /// Rows of 64 columns under the 128-byte swizzle; those of the next 64 columns follow.
    static __device__ __forceinline__ void copy_tokens(uint8_t *shared, const bf16 *x, const uint32_t *rows, int count,
                                                       int k, int index) {
        uint32_t to = shared_address(shared) + index % STAGES * STAGE_BYTES;
#pragma unroll
        for (int first = 0; first < N; first += THREADS / 8) {
            const int t = first + threadIdx.x / 8, at = threadIdx.x % 8;
            if (t < count) {
                const bf16 *from = x + size_t(rows[t]) * k + index * DEPTH + at * 8;
#pragma unroll
                for (int part = 0; part < DEPTH / 64; ++part) {
                    copy_16(to + part * (N * 128) + t * 128 + (at ^ t % 8) * 16, from + part * 64);
                }
            }
        }
    }

    template <class READY>
    __device__ __forceinline__ void run(uint8_t *shared, const uint8_t *weights, size_t strip_bytes, int strips,
                                        const bf16 *x, const uint32_t *rows, int count, int k, READY ready) {
        const int stages = k / DEPTH;
#pragma unroll
        for (int index = 0; index < STAGES - 2; ++index) {
            if (index < stages) {
                copy_weights(shared, weights, strip_bytes, strips, index);
            }
        }
        ready();
        __syncthreads();
#pragma unroll
        for (int index = 0; index < STAGES - 2; ++index) {
            if (index < stages) {
                copy_tokens(shared, x, rows, count, k, index);
            }
            commit_copies();
        }
        if constexpr (F::GROUP > 0) {
#pragma unroll
            for (int m = 0; m < MS; ++m) {
#pragma unroll
                for (int i = 0; i < N / 2; ++i) {
                    sum[m][i] = 0.0f;
                }
            }
        }
        // The compiler understands what is in flight only in this form: no zeroed sums, a loop that runs at least once, and
        // waits right behind what they leave in flight. Otherwise it waits for each product (its remark C7513 or C7514).
        int index = 0;
        do {
            stage<0>(shared, weights, strip_bytes, strips, x, rows, count, k, index);
            if constexpr (BATCHES % 2) {
                stage<1>(shared, weights, strip_bytes, strips, x, rows, count, k, index + 1);
            }
            index += BATCHES % 2 ? 2 : 1;
        } while (index < stages);
        wgmma_wait<0>();
        hold();
        finish_group();
        wait_for_copies<0>();
        __syncthreads();
    }

  private:
    /// Sums of the current integer group, and what its scales are.
    float part[F::GROUP > 0 ? MS : 1][F::GROUP > 0 ? N / 2 : 1];
    float2 scale[MS];
    uint32_t a[2][MS][BATCH][4];

    template <int PARITY>
    __device__ __forceinline__ void stage(uint8_t *shared, const uint8_t *weights, size_t strip_bytes, int strips,
                                          const bf16 *x, const uint32_t *rows, int count, int k, int index) {
        wait_for_copies<STAGES - 3>();
        // What this thread's copies wrote is for wgmma, which reads by another way than loads and stores do.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (index + STAGES - 2 < k / DEPTH) {
            copy_weights(shared, weights, strip_bytes, strips, index + STAGES - 2);
            copy_tokens(shared, x, rows, count, k, index + STAGES - 2);
        }
        commit_copies();
        batches<PARITY>(shared + index % STAGES * STAGE_BYTES, index);
    }

    template <int PARITY, int I = 0>
    __device__ __forceinline__ void batches(const uint8_t *stage, int index) {
        if constexpr (I < BATCHES) {
            batch<(PARITY + I) % 2, I>(stage, index);
            batches<PARITY, I + 1>(stage, index);
        }
    }

    template <int BUFFER, int I>
    __device__ __forceinline__ void batch(const uint8_t *stage, int index) {
        constexpr int FIRST = I * BATCH, UNIT64 = FIRST / 4;
        const int lane = threadIdx.x % 32, group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32;
        float2 next_scale[MS];
#pragma unroll
        for (int m = 0; m < MS; ++m) {
            const uint8_t *strip = stage + TOKEN_BYTES + ((group * MS + m) * 4 + warp) * STRIP_BYTES;
            typename F::Lane weights;
            F::load(weights, strip + codes_at<F>(UNIT64), strip + scales_at<F>(UNIT64), lane);
            fragments<FIRST % 4>(a[BUFFER][m], weights);
            if constexpr (F::GROUP > 0) {
                const uint8_t *scales = strip + group_at<F>(FIRST * 16);
                next_scale[m] = __half22float2(reinterpret_cast<const __half2 *>(scales)[lane / 4]);
            }
        }
        constexpr bool OPENS = F::GROUP > 0 && FIRST * 16 % (F::GROUP > 0 ? F::GROUP : 16) == 0;
        if constexpr (OPENS) {
            wgmma_wait<0>();
            hold();
            if (I > 0 || index > 0) {
                finish_group();
            }
#pragma unroll
            for (int m = 0; m < MS; ++m) {
                scale[m] = next_scale[m];
            }
        }
        if (F::GROUP > 0 && OPENS) {
            hold();
        }
        wgmma_fence();
        const uint32_t tokens = shared_address(stage) + UNIT64 * (N * 128) + FIRST % 4 * 32;
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
#pragma unroll
            for (int m = 0; m < MS; ++m) {
                if constexpr (F::GROUP > 0) {
                    wgmma<N>(part[m], a[BUFFER][m][j], wgmma_operand(tokens + j * 32), !(OPENS && j == 0));
                } else {
                    wgmma<N>(sum[m], a[BUFFER][m][j], wgmma_operand(tokens + j * 32), index > 0 || I > 0 || j > 0);
                }
            }
        }
        wgmma_commit();
        // All but this batch are done: so their buffer, and from the next stage on the last but one stage, are free.
        wgmma_wait<1>();
    }

    template <int FIRST, int J = 0>
    static __device__ __forceinline__ void fragments(uint32_t (&a)[BATCH][4], const typename F::Lane &weights) {
        if constexpr (J < BATCH) {
            F::template fragment<FIRST + J>(a[J], weights);
            fragments<FIRST, J + 1>(a, weights);
        }
    }

    /// Adds the group whose products are done.
    __device__ __forceinline__ void finish_group() {
        if constexpr (F::GROUP > 0) {
#pragma unroll
            for (int m = 0; m < MS; ++m) {
#pragma unroll
                for (int i = 0; i < N / 2; ++i) {
                    sum[m][i] = __fmaf_rn(part[m][i], i % 4 < 2 ? scale[m].x : scale[m].y, sum[m][i]);
                }
            }
        }
    }

    /// Keeps the compiler from moving what it does with sums across waits and fences.
    __device__ __forceinline__ void hold() {
#pragma unroll
        for (int m = 0; m < MS; ++m) {
#pragma unroll
            for (int i = 0; i < N / 2; ++i) {
                if constexpr (F::GROUP > 0) {
                    asm volatile("" : "+f"(part[m][i])::"memory");
                } else {
                    asm volatile("" : "+f"(sum[m][i])::"memory");
                }
            }
        }
    }
};
