// quantize_rows_<group>: rows for the products below: codes [rows, k] s8 in the order of gemm/int8_tile.cuh, and scales
//                        [rows, k / group] f32, of x: [rows, k] bf16
// experts_int8_<projection>_<format>: one projection of the chosen experts, of rows quantized so. As experts.cu otherwise,
//                        with up to 32 slots a tile, and the shared expert elsewhere.
// A group's scale is its largest magnitude over 127, one for zeros, at least the smallest normal number; codes are rounded
// to the nearest even and limited to 127; a code whose quotient is NaN is 0, for the scale says so.
// Grid: quantize_rows: a thread for 16 columns; experts: x over the weight rows of each tile.  Block: 256; 128.
// Bound by memory with few rows: each weight is read once a tile.
// Oracle: kernels/src/oracle/int8.rs, swiglu.rs
#include "experts.cuh"
#include "gemm/int8_tile.cuh"

namespace {

/// Shared memory of a block, so that three are resident where there is so much, and one on every GPU from Ampere on.
constexpr int SHARED_BYTES = 74 * 1024;

template <class F, int NT>
struct OfSlots {
    using Two = Int8Tile<F, 4, 1, 2, NT, 2>;
    static constexpr int FIT = SHARED_BYTES / Two::STAGE_BYTES;
    using Type = Int8Tile<F, 4, 1, 2, NT, FIT < 4 ? FIT : 4>;
};
template <class F>
struct Of {
    template <int NT>
    using Tiles = OfSlots<F, NT>;
};

template <int G>
__device__ __forceinline__ void quantize(int8_t *codes, float *scales, const bf16 *x, size_t pieces) {
    constexpr int THREADS_OF_GROUP = G / 16;
    allow_kernel_behind();
    wait_for_kernel_in_front();
    const size_t piece = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const bool is_there = piece < pieces;
    float v[16];
    uint32_t largest = 0;
    if (is_there) {
        const uint4 low = reinterpret_cast<const uint4 *>(x)[piece * 2], high = reinterpret_cast<const uint4 *>(x)[piece * 2 + 1];
        const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            v[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
            // Magnitudes are ordered as their bits are, NaN above all.
            largest = max(largest, __float_as_uint(v[i]) & 0x7fffffffu);
        }
    }
#pragma unroll
    for (int distance = 1; distance < THREADS_OF_GROUP; distance *= 2) {
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    }
    if (!is_there) {
        return;
    }
    const float ratio = __fdiv_rn(__uint_as_float(largest), 127.0f), normal = __uint_as_float(0x00800000u);
    const float scale = largest == 0 ? 1.0f : ratio < normal ? normal : ratio;
    uint32_t out[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        out[c] = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float quotient = __fdiv_rn(v[2 * c + j / 2 + j % 2 * 8], scale);
            const int code = isnan(quotient) ? 0 : max(-127, min(127, __float2int_rn(quotient)));
            out[c] |= (uint32_t(code) & 0xffu) << (8 * j);
        }
    }
    reinterpret_cast<uint4 *>(codes)[piece] = make_uint4(out[0], out[1], out[2], out[3]);
    if (piece % THREADS_OF_GROUP == 0) {
        scales[piece / THREADS_OF_GROUP] = scale;
    }
}

}  // namespace

#define QUANTIZE(G)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        quantize_rows_##G(int8_t *codes, float *scales, const bf16 *x, uint64_t pieces) {                              \
        quantize<G>(codes, scales, x, pieces);                                                                         \
    }
QUANTIZE(32)
QUANTIZE(64)
QUANTIZE(128)

#define EXPERTS(NAME, FORMAT, PROJECTION)                                                                              \
    extern "C" __global__ void __launch_bounds__(128, 3)                                                               \
        NAME(bf16 *out, const int8_t *codes, const float *row_scales, const uint8_t *w, uint64_t bytes,                \
             const uint4 *tiles, const uint32_t *tile_count, const uint32_t *slot_rows, const uint32_t *slot_parts,    \
             int n, int k) {                                                                                           \
        const QuantizedRows x{codes, row_scales};                                                                      \
        experts_of_quantized_rows<Of<FORMAT>::Tiles, PROJECTION>(                                                      \
            out, Weights{w, bytes, nullptr}, Routes{tiles, tile_count, slot_rows, slot_parts}, n, k,                   \
            [&](int) { return x; });                                                                                   \
    }
#define BOTH(SUFFIX, FORMAT)                                                                                           \
    EXPERTS(experts_int8_gate_up_##SUFFIX, FORMAT, GATE_UP)                                                            \
    EXPERTS(experts_int8_down_##SUFFIX, FORMAT, DOWN)
BOTH(int8_32, Int8<32>)
BOTH(int8_64, Int8<64>)
BOTH(int8_128, Int8<128>)
BOTH(int4_32, Int4<32>)
BOTH(int4_64, Int4<64>)
BOTH(int4_128, Int4<128>)
