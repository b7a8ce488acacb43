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

/// Waits for all threads of the cluster, without a promise about what they wrote: for blocks that end only when no other
/// reads their memory any more.
__device__ __forceinline__ void sync_cluster_before_end() {
    arrive_in_cluster();
    wait_for_cluster();
}

/// Where `p`, in this block's shared memory, is in block `rank`'s of the cluster.
template <class T>
__device__ __forceinline__ T *in_block(T *p, int rank) {
    return cooperative_groups::this_cluster().map_shared_rank(p, rank);
}
