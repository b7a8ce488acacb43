// experts_fp4_<projection>: one projection of the chosen experts, of rows quantized to four bits by quantize_rows_fp4
// (fp4_rows.cu), as products of four-bit numbers. As experts.cu otherwise, with up to 32 slots a tile, and the shared expert
// elsewhere. Weights: strips of `Nvfp4Codes` (common/fp4.cuh); scales: matrix-wide, of gate and up [experts, 2], of down
// [experts].
// Grid: x over the weight rows of each tile.  Block: 128 threads.
// Bound by memory with few rows: each weight is read once a tile.
// Oracle: kernels/src/oracle/fp4.rs, swiglu.rs. No GPU that runs this was at hand: tests/cuda/emulation.cpp runs what is in
// common/fp4.cuh under an emulation of the instruction.
#include "experts.cuh"
#include "gemm/fp4_tile.cuh"

namespace {

/// Four stages are 46 KiB: two blocks are resident.
template <int NT>
struct Tiles {
    using Type = Fp4Tile<4, 1, 2, NT, 4>;
};
static_assert(Tiles<QUANTIZED_SLOTS_MAX / 8>::Type::SHARED_BYTES <= 46 * 1024);

}  // namespace

#define EXPERTS(NAME, PROJECTION)                                                                                      \
    extern "C" __global__ void __launch_bounds__(128, 2)                                                               \
        NAME(bf16 *out, const uint8_t *records, const float *row_scales, const uint8_t *w, uint64_t bytes,             \
             const float *scales, const uint4 *tiles, const uint32_t *tile_count, const uint32_t *slot_rows,           \
             const uint32_t *slot_parts, int n, int k) {                                                               \
        constexpr int EACH = PROJECTION == GATE_UP ? 2 : 1;                                                            \
        experts_of_quantized_rows<Tiles, PROJECTION>(                                                                  \
            out, Weights{w, bytes, scales}, Routes{tiles, tile_count, slot_rows, slot_parts}, n, k, [&](int expert) {  \
                return Fp4Rows{records, row_scales, scales[expert * EACH], scales[expert * EACH + EACH - 1]};          \
            });                                                                                                        \
    }
EXPERTS(experts_fp4_gate_up, GATE_UP)
EXPERTS(experts_fp4_down, DOWN)
