// strips_bf16, strips_int8, strips_int4, strips_nvfp4, strips_nvfp4_codes: a stored matrix [n, k], or a pair of them, as strips
// (common/strips.cuh; of codes: common/fp4.cuh), without padding rows or columns of the source being read.
// upper, lower: where rows g and g+8 of a strip come from: row s * stride + g of `upper` and s * stride + g of `lower`.
// One matrix: stride 16, and lower = rows from 8 on of the same (lower_row = 8). Gate and up: stride 8, lower_row = 0.
// data: as the file has it: bf16 row-major, i8 and i4 row-major or in tiles (`tiled`), nvfp4 in tiles.
// scales: as the file has them.   target: strips * k / UNIT * BYTES bytes, 16-byte aligned.   k: a multiple of UNIT.
// Grid: x over the words of a strip, y = strips.  Block: 256 threads, a 32-bit word of the target each.  Shared: none.
// Bound by memory; it runs once, while weights are loaded.   Oracle: tests/kernels/cuda_matrices.rs, by value.
#include "common/fp4.cuh"
#include "common/strips.cuh"

namespace {

struct Source {
    const uint8_t *data, *scales;
};

/// The byte of codes that an INT8 element is, or holds the two nibbles of an INT4 element.
__device__ __forceinline__ size_t position(int row, int col, int k, bool tiled) {
    if (!tiled) {
        return size_t(row) * k + col;
    }
    size_t tile = size_t(row / 8) * (k / 16) + col / 16;
    return (tile * 32 + row % 8 * 4 + col % 8 / 2) * 4 + col % 16 / 8 * 2 + col % 2;
}

/// The scale of an integer group, FP16 bits; one for padding rows.
__device__ __forceinline__ uint32_t integer_scale(const Source &source, int row, int n, int group, int groups, bool tiled) {
    if (row >= n) {
        return 0x3c00u;
    }
    size_t index = tiled ? (size_t(row / 8) * groups + group) * 8 + row % 8 : size_t(row) * groups + group;
    return reinterpret_cast<const uint16_t *>(source.scales)[index];
}

/// An E4M3 scale of a group of 16; zero for padding rows.
__device__ __forceinline__ uint32_t e4m3_scale(const Source &source, int row, int n, int group, int k) {
    return row >= n ? 0 : source.scales[(size_t(row / 8) * (k / 64) + group / 4) * 32 + row % 8 * 4 + group % 4];
}

/// E4M3 (finite, not negative, not zero) with five bits of exponent, of which 21 is one: common/strips.cuh, `scale`.
__device__ __forceinline__ uint32_t five_bit_exponent(uint32_t e4m3) {
    if (e4m3 >= 8) {
        return e4m3 + ((21 - 7) << 3);
    }
    uint32_t top = 31 - __clz(e4m3 | 1);
    return (21 - 9 + top) << 3 | (e4m3 << (3 - top) & 7);
}

/// Element (row, col) of E2M1; zero for padding rows and under a scale of zero.
__device__ __forceinline__ uint32_t e2m1(const Source &source, int row, int col, int n, int k) {
    if (e4m3_scale(source, row, n, col / 16, k) == 0) {
        return 0;
    }
    size_t tile = size_t(row / 8) * (k / 64) + col / 64;
    size_t byte = tile * 256 + (col % 64 / 32 * 32 + row % 8 * 4 + col % 32 / 8) * 4 + col % 8 / 2;
    return source.data[byte] >> (col % 2 * 4) & 15;
}

/// Spreads E2M1 code `code` of pair `i`, first or second of it, to its bits in a word.
__device__ __forceinline__ uint32_t spread(uint32_t code, int i, int second) {
    uint32_t sign = code >> 3, rest = code & 7, word;
    if (i == 3) {
        word = sign << 4 | (rest >> 1) | (rest & 1) << 3;
        return word << (16 * second);
    }
    word = sign << 15 | rest << 6;
    uint32_t by = 16 * second + 3 * i;
    return word << by | (by ? word >> (32 - by) : 0);
}

enum Kind { BF16, INT8, INT4, NVFP4, NVFP4_CODES };

template <Kind KIND>
__device__ __forceinline__ void make(uint32_t *target, Source upper, Source lower, int n, int k, int group, int stride,
                                     int lower_row, int tiled) {
    constexpr int COLUMN_BYTES = KIND == BF16 ? 32 : KIND == INT8 ? 16 : 8;
    const int unit = (KIND == INT8 || KIND == INT4) && group > 64 ? group : 64;
    const int code_words = unit * COLUMN_BYTES / 4;
    const int block_words = code_words + (KIND == BF16 ? 0 : KIND == NVFP4 || KIND == NVFP4_CODES ? 16 : unit / group * 8);
    const int word_of_strip = blockIdx.x * blockDim.x + threadIdx.x;
    if (word_of_strip >= k / unit * block_words) {
        return;
    }
    const int block = word_of_strip / block_words, at = word_of_strip % block_words;
    const int first = blockIdx.y * stride;
    // Padding rows of a lone matrix whose rows end within the strip.
    auto row_of = [&](int g, int i) { return first + g + (i % 2 ? lower_row : 0); };
    auto source_of = [&](int i) { return i % 2 ? lower : upper; };
    uint32_t word = 0;
    if constexpr (KIND == NVFP4_CODES) {
        word = nvfp4_codes_word(at, {upper.data, upper.scales}, {lower.data, lower.scales}, row_of(0, 0), row_of(0, 1),
                                block * unit, n, k);
    } else if (at >= code_words) {
        const int scale = at - code_words;
        if constexpr (KIND == NVFP4) {
            const int g = scale / 2, i = scale % 2;
            for (int of_four = 0; of_four < 4; ++of_four) {
                uint32_t e4m3 = e4m3_scale(source_of(i), row_of(g, i), n, block * 4 + of_four, k);
                word |= (e4m3 ? five_bit_exponent(e4m3) : 0) << (8 * of_four);
            }
        } else if constexpr (KIND != BF16) {
            const int g = scale % 8, of_row = block * (unit / group) + scale / 8;
            word = integer_scale(upper, row_of(g, 0), n, of_row, k / group, tiled) |
                   integer_scale(lower, row_of(g, 1), n, of_row, k / group, tiled) << 16;
        }
    } else {
        const int lane = at / 4 % 32, of_lane = at % 4, g = lane / 4, c = lane % 4;
        if constexpr (KIND == BF16) {
            const int col = block * unit + at / 128 * 16 + 2 * c + of_lane / 2 * 8, row = row_of(g, of_lane);
            if (row < n) {
                const uint8_t *data = source_of(of_lane).data;
                word = *reinterpret_cast<const uint32_t *>(data + (size_t(row) * k + col) * 2);
            }
        } else {
            const int tile = KIND == INT8 ? at / 128 * 2 + of_lane / 2 : at / 128 * 4 + of_lane;
            for (int i = KIND == INT8 ? of_lane % 2 * 2 : 0; i < (KIND == INT8 ? of_lane % 2 * 2 + 2 : 4); ++i) {
                const Source source = source_of(i);
                const int row = row_of(g, i);
                for (int second = 0; second < 2 && row < n; ++second) {
                    const int col = block * unit + tile * 16 + i / 2 * 8 + 2 * c + second;
                    if constexpr (KIND == INT8) {
                        word |= uint32_t(source.data[position(row, col, k, tiled)]) << (16 * second + 8 * (i % 2));
                    } else if constexpr (KIND == INT4) {
                        size_t nibble = position(row, col, k, tiled);
                        uint32_t code = source.data[nibble / 2] >> (nibble % 2 * 4) & 15u;
                        word |= code << (16 * second + 4 * i);
                    } else {
                        word |= spread(e2m1(source, row, col, n, k), i, second);
                    }
                }
            }
        }
    }
    target[place_of_block(gridDim.y, k / unit, blockIdx.y, block) * block_words + at] = word;
}

}  // namespace

#define STRIPS(NAME, KIND)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        NAME(uint32_t *target, const uint8_t *upper, const uint8_t *upper_scales, const uint8_t *lower,                \
             const uint8_t *lower_scales, int n, int k, int group, int stride, int lower_row, int tiled) {             \
        make<KIND>(target, {upper, upper_scales}, {lower, lower_scales}, n, k, group, stride, lower_row, tiled);       \
    }
STRIPS(strips_bf16, BF16)
STRIPS(strips_int8, INT8)
STRIPS(strips_int4, INT4)
STRIPS(strips_nvfp4, NVFP4)
STRIPS(strips_nvfp4_codes, NVFP4_CODES)
