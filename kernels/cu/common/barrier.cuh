// Barriers in shared memory that count arrivals and bytes, and bulk copies that report to them. Hopper and later.
#pragma once

#include "common/async.cuh"

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// Makes barriers that this thread has set up known to copies; a block-wide barrier comes next.
__device__ __forceinline__ void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

/// Arrives, and lets the phase last until `bytes` more have been copied.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// How often `warp_arrive` arrives. A warp's lanes are in step before one of them arrives for all; racecheck of
/// compute-sanitizer does not see that, so for its sake each lane can arrive for itself: docs/cuda.md.
#ifdef MINNOW_RACECHECK
constexpr int WARP_ARRIVALS = 32;
#else
constexpr int WARP_ARRIVALS = 1;
#endif

/// Arrives for a whole warp.
__device__ __forceinline__ void warp_arrive(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 < WARP_ARRIVALS) {
        barrier_arrive(barrier);
    }
}

/// Waits for the end of the phase of this parity: phases count from 0.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/// Begins copying `bytes`, a multiple of 16; both sides aligned to 16.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/// As `copy_bulk`, of what will not be read again: it leaves the second-level cache first, and kernels' code and
/// activations stay.
__device__ __forceinline__ void copy_bulk_once(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
    asm volatile("{\n.reg .b64 first;\ncreatepolicy.fractional.L2::evict_first.b64 first, 1.0;\n"
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], first;\n}" ::
                     "r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/// Arrives as soon as all copies of `copy_16` that this thread has begun are done.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/// A barrier of the first `threads` threads of a block.
__device__ __forceinline__ void sync_first(int threads) {
    asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}
