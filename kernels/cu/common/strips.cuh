// Strips: how a weight matrix [N, K] lies in device memory, and how its elements become operands of the tensor cores.
//
// A strip is 16 rows (N is padded with zero rows), and it is made of blocks of UNIT columns. Eight strips are a band, the
// last one maybe fewer: bands follow one another, in a band the blocks of the same columns do, and those of the strips lie
// side by side. A block is its codes, then its scales. Codes lie in the order of the A operand of mma.m16n8k16, which is
// also that of wgmma's A in registers: lane l = 4 g + c holds of a 16 x 16 tile the pairs
//     a0 = (g, 2c..2c+1)   a1 = (g+8, 2c..)   a2 = (g, 2c+8..)   a3 = (g+8, 2c+8..)
// and 16 bytes of one lane are
//     bf16    16 x 16: a0 a1 a2 a3, 32 bits each
//     int8    16 x 32: for each of two tiles, a word with a0 in bytes 0, 2 and a1 in bytes 1, 3, then one with a2, a3
//     int4    16 x 64: for each of four tiles, a word whose halves (first, second of a pair) hold a0..a3 as nibbles
//     nvfp4   16 x 64: for each of four tiles, a word with bits as `Nvfp4::fragment` wants them; where weights are multiplied
//             as four-bit numbers, common/fp4.cuh has another order instead
// Scales of a block:
//     int8, int4   f16 [groups][8][2]: of rows g and g+8
//     nvfp4        bytes [8][2][4]: of rows g and g+8, one for each 16 columns; five bits of exponent, three of mantissa
// Integers and E2M1 times E4M3 are exact in bf16. The scale of an integer group multiplies the FP32 sum over that
// group, and groups are added in order; NVFP4's matrix-wide scale multiplies the whole sum.
// kernels/cu/gemm/strips.cu makes strips from a file's encodings; kernels/src/cuda/strips.rs knows the sizes.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "bands.cuh"

using bf16 = __nv_bfloat16;

/// a * b + c, two BF16 at once.
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/// (a & MASK) ^ b and (a & MASK) | b: one instruction, where the compiler makes two of two constants.
template <uint32_t MASK>
__device__ __forceinline__ uint32_t and_xor(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(a), "n"(MASK), "r"(b));
    return d;
}
template <uint32_t MASK>
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "n"(MASK), "r"(b));
    return d;
}

struct Bf16 {
    static constexpr int UNIT = 64, GROUP = 0;
    static constexpr int CODE_BYTES_A_COLUMN = 32;
    static constexpr int BYTES = UNIT * CODE_BYTES_A_COLUMN;
    static constexpr bool GLOBAL_SCALE = false;
    /// What a lane holds of 16 x 64 elements.
    struct Lane {
        uint4 tile[4];
    };

    static __device__ __forceinline__ void load(Lane &lane, const uint8_t *codes, const uint8_t *, int l) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            lane.tile[j] = reinterpret_cast<const uint4 *>(codes)[j * 32 + l];
        }
    }
    template <int J>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Lane &lane) {
        a[0] = lane.tile[J].x, a[1] = lane.tile[J].y, a[2] = lane.tile[J].z, a[3] = lane.tile[J].w;
    }
};

template <int G>
struct Int8 {
    static constexpr int UNIT = G < 64 ? 64 : G, GROUP = G;
    static constexpr int CODE_BYTES_A_COLUMN = 16;
    static constexpr int BYTES = UNIT * CODE_BYTES_A_COLUMN + UNIT / G * 32;
    static constexpr bool GLOBAL_SCALE = false;
    struct Lane {
        uint4 half[2];
    };

    static __device__ __forceinline__ void load(Lane &lane, const uint8_t *codes, const uint8_t *, int l) {
        lane.half[0] = reinterpret_cast<const uint4 *>(codes)[l];
        lane.half[1] = reinterpret_cast<const uint4 *>(codes)[32 + l];
    }
    /// Bytes 0 and 2 of `word`, two's complement. With m = the low seven bits and s = the sign bit, the code is m - 128 s;
    /// 0x4300 | m is 128 + m in BF16, and 0x4300 | (s << 7) is 128 + 128 s.
    static __device__ __forceinline__ uint32_t widen(uint32_t word) {
        uint32_t low = and_or<0x007f007fu>(word, 0x43004300u), high = and_or<0x00800080u>(word, 0x43004300u);
        return fma_bf16x2(high, 0xbf80bf80u, low);
    }
    template <int J>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Lane &lane) {
        uint32_t first = J % 2 ? lane.half[J / 2].z : lane.half[J / 2].x;
        uint32_t second = J % 2 ? lane.half[J / 2].w : lane.half[J / 2].y;
        a[0] = widen(first), a[1] = widen(first >> 8), a[2] = widen(second), a[3] = widen(second >> 8);
    }
};

template <int G>
struct Int4 {
    static constexpr int UNIT = G < 64 ? 64 : G, GROUP = G;
    static constexpr int CODE_BYTES_A_COLUMN = 8;
    static constexpr int BYTES = UNIT * CODE_BYTES_A_COLUMN + UNIT / G * 32;
    static constexpr bool GLOBAL_SCALE = false;
    struct Lane {
        uint4 tiles;
    };

    static __device__ __forceinline__ void load(Lane &lane, const uint8_t *codes, const uint8_t *, int l) {
        lane.tiles = reinterpret_cast<const uint4 *>(codes)[l];
    }
    /// The low nibbles of both halves, two's complement: with its top bit flipped a nibble is code + 8, and
    /// 0x4300 | (code + 8) is 136 + code in BF16.
    static __device__ __forceinline__ uint32_t widen(uint32_t word) {
        return fma_bf16x2(and_xor<0x000f000fu>(word, 0x43084308u), 0x3f803f80u, 0xc308c308u);
    }
    template <int J>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Lane &lane) {
        uint32_t word = J == 0 ? lane.tiles.x : J == 1 ? lane.tiles.y : J == 2 ? lane.tiles.z : lane.tiles.w;
        a[0] = widen(word), a[1] = widen(word >> 4), a[2] = widen(word >> 8), a[3] = widen(word >> 12);
    }
};

struct Nvfp4 {
    static constexpr int UNIT = 64, GROUP = 0;
    static constexpr int CODE_BYTES_A_COLUMN = 8;
    static constexpr int BYTES = UNIT * CODE_BYTES_A_COLUMN + 64;
    static constexpr bool GLOBAL_SCALE = true;
    /// What elements lack beside the matrix-wide scale: E2M1 read as BF16 is 2^-126 of its value, a scale 2^118.
    static constexpr float FACTOR = 256.0f;
    struct Lane {
        uint4 tiles;
        uint2 scales;
    };

    static __device__ __forceinline__ void load(Lane &lane, const uint8_t *codes, const uint8_t *scales, int l) {
        lane.tiles = reinterpret_cast<const uint4 *>(codes)[l];
        lane.scales = reinterpret_cast<const uint2 *>(scales)[l / 4];
    }
    /// Scale `J` of four, twice, as BF16: 2^118 of its value.
    template <int J>
    static __device__ __forceinline__ uint32_t scale(uint32_t four) {
        return __byte_perm(four, 0, 0x4040u | J | J << 8) * 16u + 0x70007000u;
    }
    /// A BF16 whose sign, two low bits of exponent and top bit of mantissa are E2M1's is 2^-126 of its value. The bits of
    /// a0, a1, a2 lie so that a rotation brings them there; a3's fill the gaps: sign 4, exponent 1 and 0, mantissa 3.
    template <int J>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Lane &lane) {
        uint32_t word = J == 0 ? lane.tiles.x : J == 1 ? lane.tiles.y : J == 2 ? lane.tiles.z : lane.tiles.w;
        uint32_t upper = scale<J>(lane.scales.x), lower = scale<J>(lane.scales.y);
        constexpr uint32_t MASK = 0x81c081c0u, NO_MORE = 0x80008000u;
        uint32_t last = and_or<0x01800180u>(word << 7, and_or<0x00400040u>(word << 3, word << 11 & 0x80008000u));
        a[0] = fma_bf16x2(word & MASK, upper, NO_MORE);
        a[1] = fma_bf16x2(__funnelshift_r(word, word, 3) & MASK, lower, NO_MORE);
        a[2] = fma_bf16x2(__funnelshift_r(word, word, 6) & MASK, upper, NO_MORE);
        a[3] = fma_bf16x2(last, lower, NO_MORE);
    }
};

/// Where blocks number `block` of the strips from `strip` on begin, up to the end of the band; `strips` and `blocks`: of the
/// matrix, and of a strip.
template <class F>
__device__ __forceinline__ const uint8_t *blocks_at(const uint8_t *matrix, int strips, int blocks, int strip, int block) {
    return matrix + place_of_block(strips, blocks, strip, block) * F::BYTES;
}

/// Where, in a block, 16 x 64 codes begin, and the scales (NVFP4's), and those of the group around column `k`.
template <class F>
__device__ __forceinline__ constexpr int codes_at(int unit64) {
    return unit64 * 64 % F::UNIT * F::CODE_BYTES_A_COLUMN;
}
template <class F>
__device__ __forceinline__ constexpr int scales_at() {
    return F::UNIT * F::CODE_BYTES_A_COLUMN;
}
template <class F>
__device__ __forceinline__ constexpr int group_at(int k) {
    return F::UNIT * F::CODE_BYTES_A_COLUMN + k % F::UNIT / F::GROUP * 32;
}
