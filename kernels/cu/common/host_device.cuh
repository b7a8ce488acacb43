// What is computed the same on the device and, in tests, on the host: no CUDA header, no intrinsic.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HOST_DEVICE inline
#endif

HOST_DEVICE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
HOST_DEVICE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/// Sixteen bytes that are loaded or stored at once.
struct alignas(16) Words {
    uint32_t word[4];
};
