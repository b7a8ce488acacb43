// Blocks of threads that run side by side and read each other's shared memory. Hopper and later.
#pragma once

#include <cooperative_groups.h>

#include "common/async.cuh"

/// Waits for all threads of the cluster; what they wrote before, in shared or global memory, can be read by all after.
__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// Waits for all threads of the cluster, without a promise about what they wrote: for blocks that end only when no other
/// reads their memory any more.
__device__ __forceinline__ void sync_cluster_before_end() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

/// Where `p`, in this block's shared memory, is in block `rank`'s of the cluster.
template <class T>
__device__ __forceinline__ T *in_block(T *p, int rank) {
    return cooperative_groups::this_cluster().map_shared_rank(p, rank);
}
