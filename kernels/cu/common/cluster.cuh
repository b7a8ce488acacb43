// Blocks of threads that run side by side and read each other's shared memory. Hopper and later.
#pragma once

#include <cooperative_groups.h>

#include "common/async.cuh"

/// Waits for all threads of the cluster; what they wrote before, in shared or global memory, can be read by all after.
__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// Arrives at the cluster's barrier, without a promise about what was written; `wait_for_cluster` comes later. At a kernel's
/// beginning: whoever is past that may use the shared memory of all blocks.
__device__ __forceinline__ void arrive_in_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

/// Where a shared address of this block is in block `rank` of the cluster, for instructions that want it as a number.
__device__ __forceinline__ uint32_t address_in_block(uint32_t address, int rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

/// Begins copying `bytes`, a multiple of 16, of this block's shared memory to another's, whose barrier they are reported to.
__device__ __forceinline__ void send_bulk(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n"
                 "cp.async.bulk.commit_group;" ::"r"(to), "r"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/// Waits until all that this thread sends has been read.
__device__ __forceinline__ void wait_until_sent() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/// What this thread has written to shared memory comes before copies that are begun after the next barrier of its block or
/// warp.
__device__ __forceinline__ void let_copies_see() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Where `p`, in this block's shared memory, is in block `rank`'s of the cluster.
template <class T>
__device__ __forceinline__ T *in_block(T *p, int rank) {
    return cooperative_groups::this_cluster().map_shared_rank(p, rank);
}
