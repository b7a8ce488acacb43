// experts_<width>_<projection>_<format>: one projection of the chosen experts, and of the shared expert beside them.
//   gate_up   act[s, i] = bf16(bf16(silu(gate_e x[slot_rows[s]])) * (up_e x[slot_rows[s]])); act[slots + r]: the shared one's
//   down      parts[slot_parts[s]] = down_e act[s]; parts[r * stride + stride - 1]: the shared one's
// x: [rows, k] bf16.   act: [slots + rows, n / 2] bf16.   parts: [rows * stride, n] bf16.   Rows 16-byte aligned.
// Weights: strips (common/strips.cuh), expert after expert, gate and up interleaved by eight rows; the shared expert's
// are bf16. n: a multiple of 16.   k: a multiple of 128.
// tiles[i]: expert, first slot, slots (1 to 32, `few`, or 64, `many`), 0. Blocks beyond tile_count leave at once.
// Grid: the shared expert's blocks, then x over the weight rows of each tile.  Block, shared: `Tile` for 99 KiB.
// Bound by memory with few rows: each weight is read once a tile.
// Oracle: kernels/src/oracle/experts.rs
#include "experts.cuh"

namespace {

using SharedTile = Tile<Bf16, 4, 1, 2, 4, 64, 4>;

template <class F>
struct Few {
    template <int NT>
    using Tiles = Fitting<F, 4, 1, 2, NT, DEPTH_OF<F>, 4>;
};
template <class F>
struct Many {
    template <int NT>
    using Tiles = Fitting<F, 4, 1, 2, NT, DEPTH_OF<F>, 3>;
};

}  // namespace

#define EXPERTS(NAME, FORMAT, WIDTH, NT_MAX, PROJECTION)                                                               \
    extern "C" __global__ void __launch_bounds__(128, NT_MAX > 4 ? 1 : 3)                                              \
        NAME(bf16 *out, const bf16 *x, const uint8_t *w, uint64_t bytes, const float *scales, const uint8_t *shared_w, \
             const uint4 *tiles, const uint32_t *tile_count, const uint32_t *slot_rows, const uint32_t *slot_parts,    \
             int n, int k, int rows, int slots, int stride, int shared_blocks) {                                       \
        experts<FORMAT, WIDTH<FORMAT>::Tiles, NT_MAX, SharedTile, PROJECTION>(                                         \
            out, x, Weights{w, bytes, scales}, shared_w, Routes{tiles, tile_count, slot_rows, slot_parts}, n, k, rows, \
            slots, stride, shared_blocks);                                                                             \
    }
#define ALL(SUFFIX, FORMAT)                                                                                            \
    EXPERTS(experts_few_gate_up_##SUFFIX, FORMAT, Few, 4, GATE_UP)                                                     \
    EXPERTS(experts_few_down_##SUFFIX, FORMAT, Few, 4, DOWN)                                                           \
    EXPERTS(experts_many_gate_up_##SUFFIX, FORMAT, Many, 8, GATE_UP)                                                   \
    EXPERTS(experts_many_down_##SUFFIX, FORMAT, Many, 8, DOWN)
FOR_EVERY_FORMAT(ALL)
