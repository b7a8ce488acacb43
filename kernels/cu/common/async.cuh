// Copies from global to shared memory that run by themselves, and the order between a kernel and the one in front.
#pragma once

#include <cstdint>

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// Begins copying 16 bytes; both sides aligned to 16. Not kept in the first-level cache.
__device__ __forceinline__ void copy_16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/// As `copy_16`, or zeros.
__device__ __forceinline__ void copy_16_or_zeros(uint32_t to, const void *from, bool copies) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(copies ? 16 : 0) : "memory");
}

/// Ends a group of copies: those since the last call.
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most `PENDING` of this thread's groups are still being copied.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/// Waits until the kernel in front is done and what it wrote can be read. Every kernel does this, so whatever ran
/// before that one is done too. Below Hopper kernels do not overlap.
__device__ __forceinline__ void wait_for_kernel_in_front() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Allows the kernel behind to start, once every block of this one has said so.
__device__ __forceinline__ void allow_kernel_behind() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
