// embed:         x[r, d] = embedding[tokens[r], d]
// norm_and_rope: splits qkv[r] into heads; queries and keys are normalised per head and rotated, values are left alone;
//                queries go to q, keys and values into the page of their block
// tokens: [rows] u32, below the vocabulary.   embedding: [vocab, dim] bf16.   x: [rows, dim] bf16.   dim: a multiple of 8.
// qkv: [rows, (heads + 2 kv_heads) * 128] bf16.   q: [rows, heads * 128] bf16.
// query_weight, key_weight: [128] bf16, or null for no norm.   tables: [positions, 32, 2] bf16, cosine and sine.
// pool: pages of [layers, 2, kv_heads, 32, 128] bf16, keys first, `page_stride` elements each, from this layer's part on.
// blocks: [rows / 32] of (start in page_tables, pages seen): rows 32 b to 32 b + 31 are the block of the last of them.
// Grid: embed: one block a row; norm_and_rope: (rows, ceil((heads + 2 kv_heads) / 8)).  Block: 256 threads, a warp a head.
// Rounding: cosine and sine are BF16; x * scale, the product with the weight, both products of a rotation and their sum
// are each rounded to BF16; everything else is FP32.
// Bound by memory: each value is read once and written once.   Oracle: kernels/src/oracle/norm.rs, rope.rs
#include "head.cuh"

constexpr int ROWS_OF_BLOCK = 32;
constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(256)
embed(const uint32_t *tokens, const bf16 *embedding, bf16 *x, int dim) {
    let_next_start();
    wait_for_previous();
    const bf16 *from = embedding + size_t(tokens[blockIdx.x]) * dim;
    bf16 *to = x + size_t(blockIdx.x) * dim;
    for (int d = threadIdx.x * 8; d < dim; d += blockDim.x * 8) {
        *reinterpret_cast<Eight *>(to + d) = *reinterpret_cast<const Eight *>(from + d);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
norm_and_rope(const bf16 *qkv, const bf16 *query_weight, const bf16 *key_weight, const __nv_bfloat162 *tables,
              const uint2 *blocks, const uint32_t *page_tables, bf16 *q, bf16 *pool, uint64_t page_stride, int heads,
              int kv_heads, float eps) {
    let_next_start();
    wait_for_previous();
    int row = blockIdx.x, lane = threadIdx.x % 32, head = blockIdx.y * WARPS + threadIdx.x / 32;
    if (head >= heads + 2 * kv_heads) {
        return;
    }
    const bf16 *from = qkv + (size_t(row) * (heads + 2 * kv_heads) + head) * HEAD_DIM;
    float v[1][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[0][i] = __bfloat162float(from[lane + 32 * i]);
    }
    uint2 block = blocks[row / ROWS_OF_BLOCK];
    bool is_query = head < heads, is_key = !is_query && head < heads + kv_heads;
    if (is_query || is_key) {
        const bf16 *weight = is_query ? query_weight : key_weight;
        int position = (block.y - 1) * ROWS_OF_BLOCK + row % ROWS_OF_BLOCK;
        float of_lane[1][4];
        float2 turn[1] = {__bfloat1622float2(tables[size_t(position) * PAIRS + lane])};
        load_weight(of_lane[0], weight, lane);
        norm_and_turn<1>(v, {weight != nullptr}, of_lane, turn, eps);
    }
    bf16 *to;
    if (is_query) {
        to = q + (size_t(row) * heads + head) * HEAD_DIM;
    } else {
        // Keys, then values: the heads of both follow each other in a page as they do in qkv.
        size_t page = page_tables[block.x + block.y - 1];
        to = pool + page * page_stride + (size_t(head - heads) * ROWS_OF_BLOCK + row % ROWS_OF_BLOCK) * HEAD_DIM;
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t pair = packed(v[0][i], v[0][i + 1]);
        to[lane + 32 * i] = low_bf16(pair), to[lane + 32 * (i + 1)] = high_bf16(pair);
    }
}
