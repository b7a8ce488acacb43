// Numbers of four bits: quantizing rows of activations as kernels/src/oracle/fp4.rs does, bit for bit, and the layouts of
// rows and weights for mma.m16n8k64 with block scales. All of it also compiles for the host, where tests/cuda/emulation.cpp
// runs it under an emulation of that instruction.
//
// E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign in bit 3. E4M3, here of scales: no sign; 0x7f is NaN.
//
// The instruction (PTX ISA 9.0, "Matrix Fragments for mma.m16n8k64" and "Block Scaling for mma.sync"), lane l = 4 g + c:
//     a0 = row g, columns 8c .. 8c+7     a1 = row g+8, the same     a2 = row g, columns 32+8c ..     a3 = row g+8, the same
//     b0 = columns 8c .. of token g      b1 = columns 32+8c ..      the first of eight codes in the low bits
//     scales of A: four bytes, one for 16 columns each; of row g in lane c = 0, of row g+8 in lane c = 1
//     scales of B: likewise, of token g in lane c = 0
// with selectors of zero: other lanes' scales are not looked at. With four scales a row no bytes are left to select.
#pragma once

#include "host_device.cuh"

/// Columns of a block that has a scale, and of a step of the instruction.
constexpr int FP4_BLOCK = 16, FP4_STEP = 64;

/// The scale of a row, a power of two, by the bits of its largest magnitude.
HOST_DEVICE float fp4_row_scale(uint32_t largest) {
    if (largest == 0 || largest >= 0x7f800000u) {
        return 1.0f;
    }
    // 2688 is 1.3125 * 2^11.
    const int exponent = int(largest >> 23) + ((largest & 0x007fffffu) > 0x00280000u) - 11;
    return float_of(uint32_t(exponent < 1 ? 1 : exponent) << 23);
}

HOST_DEVICE float e4m3_value(uint32_t code) {
    return code < 8 ? float(code) / 512.0f : code < 0x7f ? float_of((code << 20) + (120u << 23)) : float_of(0x7fc00000u);
}

/// The code of the E4M3 value nearest to `value >= 0`; ties to the even code, at most 448.
HOST_DEVICE uint32_t e4m3_nearest(float value) {
    if (value >= 448.0f) {
        return 126;
    }
    // Below 2^-6 values are 2^-9 apart, as floats of 2^14 are: the sum is rounded there, to even.
    if (value < 0.015625f) {
        return bits_of(value + 16384.0f) & 0xfu;
    }
    const uint32_t bits = bits_of(value);
    return ((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120u << 3);
}

/// The E2M1 code of the value nearest to `value`; ties to the even code, at most 6, the sign kept.
HOST_DEVICE uint32_t e2m1_nearest(float value) {
    const uint32_t bits = bits_of(value);
    const float magnitude = float_of(bits & 0x7fffffffu);
    const uint32_t code = (magnitude > 0.25f) + (magnitude >= 0.75f) + (magnitude > 1.25f) + (magnitude >= 1.75f) +
                          (magnitude > 2.5f) + (magnitude >= 3.5f) + (magnitude > 5.0f);
    return code | bits >> 31 << 3;
}

HOST_DEVICE float e2m1_value(uint32_t code) {
    const uint32_t exponent = code >> 1 & 3, mantissa = code & 1;
    const float magnitude = exponent == 0 ? float(mantissa) * 0.5f : float_of((126 + exponent) << 23 | mantissa << 22);
    return code & 8 ? -magnitude : magnitude;
}

/// Sixteen columns of a row: their codes, the first of eight in the low bits of a word, and their E4M3 scale.
struct Fp4Block {
    uint32_t codes[2], scale;
};

/// The BF16 value number `i` of a block that lies in eight words.
HOST_DEVICE float bf16_value(const uint32_t (&words)[8], int i) {
    return float_of(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
}

/// The bits of the largest magnitude: they are ordered as the magnitudes are, NaN above all.
HOST_DEVICE uint32_t largest_of(const uint32_t (&words)[8]) {
    uint32_t largest = 0;
    for (int i = 0; i < FP4_BLOCK; ++i) {
        const uint32_t magnitude = bits_of(bf16_value(words, i)) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/// Quantizes a block of BF16 values of a row of scale `row_scale`.
HOST_DEVICE Fp4Block fp4_block(const uint32_t (&words)[8], float row_scale) {
    Fp4Block block = {{0, 0}, 0x7f};
    const uint32_t largest = largest_of(words);
    if (largest >= 0x7f800000u) {
        return block;
    }
    const uint32_t nearest = e4m3_nearest(float_of(largest) / 6.0f / row_scale);
    block.scale = largest == 0 ? 0x38 : nearest == 0 ? 1 : nearest;
    const float divisor = e4m3_value(block.scale) * row_scale;
    for (int i = 0; i < FP4_BLOCK; ++i) {
        block.codes[i / 8] |= e2m1_nearest(bf16_value(words, i) / divisor) << (i % 8 * 4);
    }
    return block;
}

/// What a block is, as BF16 in eight words: rounded to nearest even, which does something in the subnormal range only.
HOST_DEVICE void fp4_values(uint32_t (&words)[8], const Fp4Block &block, float row_scale) {
    const float multiplier = e4m3_value(block.scale) * row_scale;
    for (int i = 0; i < FP4_BLOCK; ++i) {
        const float value = e2m1_value(block.codes[i / 8] >> (i % 8 * 4) & 15) * multiplier;
        const uint32_t bits = bits_of(value);
        const uint32_t bf16_bits = value == value ? (bits + 0x7fffu + (bits >> 16 & 1)) >> 16 : 0x7fc0u;
        words[i / 2] = i % 2 ? words[i / 2] | bf16_bits << 16 : bf16_bits;
    }
}

/// A row on its way into the instruction: records of 128 columns, each 64 bytes of codes in order, then the scales of its
/// eight blocks, and eight bytes of nothing. Rows of records are in different banks for what is read of eight at a time.
struct Fp4Record {
    static constexpr int COLUMNS = 128, SCALES_AT = COLUMNS / 2, BYTES = 80;

    /// Bytes of a row of `k` columns.
    static HOST_DEVICE size_t row_bytes(int k) { return size_t(k) / COLUMNS * BYTES; }
    /// Writes block number `index` of a row that begins at `row`.
    static HOST_DEVICE void put(uint8_t *row, int index, const Fp4Block &block) {
        uint8_t *record = row + size_t(index) / (COLUMNS / FP4_BLOCK) * BYTES;
        const int at = index % (COLUMNS / FP4_BLOCK);
        uint32_t *codes = reinterpret_cast<uint32_t *>(record) + at * 2;
        codes[0] = block.codes[0], codes[1] = block.codes[1];
        record[SCALES_AT + at] = uint8_t(block.scale);
    }
    /// Which bytes of eight records `pitch` apart lane `l` names to ldmatrix.x4: it gets b0 and b1 of both steps.
    static HOST_DEVICE int matrix_row(int pitch, int l) { return l % 8 * pitch + l / 8 * 16; }
    /// Where the scales of lane `l`'s token are, for step `step` of a record.
    static HOST_DEVICE int scales(int pitch, int step, int l) { return l / 4 * pitch + SCALES_AT + step * 4; }
};

/// Blocks of weights of 16 rows by 64 columns: 16 bytes of a lane are a0 to a3, then come the scales, bytes [8][2][4]: of
/// rows g and g+8. For common/strips.cuh, and of the same size as its Nvfp4.
struct Nvfp4Codes {
    static constexpr int UNIT = FP4_STEP, GROUP = 0;
    static constexpr int CODE_BYTES_A_COLUMN = 8;
    static constexpr int BYTES = UNIT * CODE_BYTES_A_COLUMN + 64;
    /// The tile takes care of the matrix-wide scale: gemm/fp4_tile.cuh.
    static constexpr bool GLOBAL_SCALE = false;
    /// What a lane holds of 16 x 64 elements.
    struct Lane {
        Words a;
        uint32_t scales;
    };

    static HOST_DEVICE void load(Lane &lane, const uint8_t *block, int l) {
        lane.a = reinterpret_cast<const Words *>(block)[l];
        lane.scales = reinterpret_cast<const uint32_t *>(block + UNIT * CODE_BYTES_A_COLUMN)[l / 4 * 2 + l % 2];
    }
};

/// An NVFP4 matrix `[n, k]` as the file has it: docs/format-mnw.md section 8.
struct Nvfp4Source {
    const uint8_t *data, *scales;

    /// Eight codes of row `row` from column `column` on, a multiple of eight; zero for padding rows.
    HOST_DEVICE uint32_t codes(int row, int column, int n, int k) const {
        const size_t tile = size_t(row / 8) * (k / 64) + column / 64;
        const int lane = row % 8 * 4 + column % 32 / 8;
        const uint8_t *bytes = data + tile * 256 + (column % 64 / 32 * 32 + lane) * 4;
        return row >= n ? 0 : bytes[0] | bytes[1] << 8 | bytes[2] << 16 | uint32_t(bytes[3]) << 24;
    }
    /// Four scales of row `row` from column `column` on, a multiple of 64; zero for padding rows.
    HOST_DEVICE uint32_t four_scales(int row, int column, int n, int k) const {
        const uint8_t *bytes = scales + ((size_t(row / 8) * (k / 64) + column / 64) * 8 + row % 8) * 4;
        return row >= n ? 0 : bytes[0] | bytes[1] << 8 | bytes[2] << 16 | uint32_t(bytes[3]) << 24;
    }
};

/// Word `at` of the block of `Nvfp4Codes` whose first column is `column`, and whose rows g and g+8 are rows `first_upper` + g
/// of `upper` and `first_lower` + g of `lower`.
HOST_DEVICE uint32_t nvfp4_codes_word(int at, const Nvfp4Source &upper, const Nvfp4Source &lower, int first_upper,
                                      int first_lower, int column, int n, int k) {
    constexpr int CODE_WORDS = Nvfp4Codes::UNIT * Nvfp4Codes::CODE_BYTES_A_COLUMN / 4;
    if (at >= CODE_WORDS) {
        const int g = (at - CODE_WORDS) / 2;
        return at % 2 ? lower.four_scales(first_lower + g, column, n, k) : upper.four_scales(first_upper + g, column, n, k);
    }
    const int lane = at / 4, of_lane = at % 4, g = lane / 4, c = lane % 4;
    const int first_column = column + of_lane / 2 * 32 + c * 8;
    return of_lane % 2 ? lower.codes(first_lower + g, first_column, n, k) : upper.codes(first_upper + g, first_column, n, k);
}

/// Scales a lane's sums of rows g and g+8 and tokens 2c and 2c+1, by the matrix-wide scales, then by those of the tokens'
/// rows: powers of two, so this rounds nothing that is not subnormal, and in this order nothing is that need not be.
HOST_DEVICE void scale_fp4_sums(float (&sum)[4], float upper_scale, float lower_scale, float first_row, float second_row) {
    sum[0] = sum[0] * upper_scale * first_row, sum[1] = sum[1] * upper_scale * second_row;
    sum[2] = sum[2] * lower_scale * first_row, sum[3] = sum[3] * lower_scale * second_row;
}
