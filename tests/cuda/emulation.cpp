// The native kernel of experts with activations of four bits, without a GPU: the code that decides what goes where
// (kernels/cu/common/fp4.cuh, bands.cuh) compiled for the host, its 32 lanes one after the other, and between them an
// emulation of the two instructions that lanes do together. tests/src/emulation.rs calls it.
//
// The emulation is written from NVIDIA's PTX ISA (9.0 to 9.2: "Matrix Fragments for mma.m16n8k64", "Block Scaling for
// mma.sync", "ldmatrix") and shares no code with the kernel. Where the document has only figures, which lane's scales belong
// to which row, it follows CUTLASS (include/cute/atom/mma_traits_sm120.hpp, SFALayout and SFBLayout of SM120_16x8x64_TN_VS).
#include "common/bands.cuh"
#include "common/fp4.cuh"

#include <cmath>

namespace {

constexpr int LANES = 32, TOKENS = 8, STRIP = 16;

double e2m1(uint32_t code) {
    constexpr double MAGNITUDE[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
    return code & 8 ? -MAGNITUDE[code & 7] : MAGNITUDE[code & 7];
}

double ue4m3(uint32_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if (exponent == 15 && mantissa == 7) {
        return std::nan("");
    }
    return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 7 - 3);
}

/// mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3, accumulating in place,
/// with {byte-id, thread-id} of zero. The sum is exact and rounded once: what hardware does in between is not documented.
void mma(float (&d)[LANES][4], const uint32_t (&a)[LANES][4], const uint32_t (&b)[LANES][2],
         const uint32_t (&scale_a)[LANES], const uint32_t (&scale_b)[LANES]) {
    constexpr int M = 16, N = 8, K = 64, THREAD_ID_A = 0, THREAD_ID_B = 0;
    double of_a[M][K], of_b[K][N];
    for (int lane = 0; lane < LANES; ++lane) {
        const int group = lane >> 2, thread = lane % 4;
        for (int i = 0; i < 32; ++i) {
            const int row = i < 8 || (16 <= i && i < 24) ? group : group + 8;
            const int column = i < 16 ? thread * 8 + (i & 7) : thread * 8 + (i & 7) + 32;
            // A pair of lanes of four has the scales of two rows; four bytes are those of 16 columns each.
            const uint32_t scales = scale_a[row % 8 * 4 + THREAD_ID_A * 2 + row / 8];
            of_a[row][column] = e2m1(a[lane][i / 8] >> (i % 8 * 4) & 15) * ue4m3(scales >> (column / 16 * 8) & 255);
        }
        for (int i = 0; i < 16; ++i) {
            const int row = i < 8 ? thread * 8 + (i & 7) : thread * 8 + (i & 7) + 32;
            const uint32_t scales = scale_b[group * 4 + THREAD_ID_B];
            of_b[row][group] = e2m1(b[lane][i / 8] >> (i % 8 * 4) & 15) * ue4m3(scales >> (row / 16 * 8) & 255);
        }
    }
    for (int lane = 0; lane < LANES; ++lane) {
        for (int i = 0; i < 4; ++i) {
            const int row = i < 2 ? lane >> 2 : (lane >> 2) + 8, column = lane % 4 * 2 + (i & 1);
            double sum = d[lane][i];
            for (int k = 0; k < K; ++k) {
                sum += of_a[row][k] * of_b[k][column];
            }
            d[lane][i] = float(sum);
        }
    }
}

/// ldmatrix.sync.aligned.m8n8.x4.shared.b16: lanes 8 j to 8 j + 7 name the rows of matrix j, 16 bytes each; of each matrix lane
/// l gets two elements of row l / 4.
void ldmatrix(uint32_t (&out)[LANES][4], const uint8_t *const (&rows)[LANES]) {
    for (int lane = 0; lane < LANES; ++lane) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            std::memcpy(&out[lane][matrix], rows[matrix * 8 + lane / 4] + lane % 4 * 4, 4);
        }
    }
}

void load_block(uint32_t (&words)[8], const uint16_t *block) {
    for (int i = 0; i < 8; ++i) {
        words[i] = block[2 * i] | uint32_t(block[2 * i + 1]) << 16;
    }
}

}  // namespace

/// Rows as both kernels of fp4_rows.cu make them. x, rounded: [rows, k] bf16; records: [rows] `Fp4Record::row_bytes(k)`;
/// scales: [rows].
extern "C" void fp4_rows(uint16_t *rounded, uint8_t *records, float *scales, const uint16_t *x, int rows, int k) {
    for (int row = 0; row < rows; ++row) {
        const uint16_t *of_row = x + size_t(row) * k;
        uint32_t words[8], largest = 0;
        for (int index = 0; index < k / FP4_BLOCK; ++index) {
            load_block(words, of_row + index * FP4_BLOCK);
            const uint32_t of_block = largest_of(words);
            largest = of_block > largest ? of_block : largest;
        }
        scales[row] = fp4_row_scale(largest);
        for (int index = 0; index < k / FP4_BLOCK; ++index) {
            load_block(words, of_row + index * FP4_BLOCK);
            const Fp4Block block = fp4_block(words, scales[row]);
            Fp4Record::put(records + row * Fp4Record::row_bytes(k), index, block);
            fp4_values(words, block, scales[row]);
            for (int i = 0; i < FP4_BLOCK; ++i) {
                rounded[size_t(row) * k + index * FP4_BLOCK + i] = uint16_t(words[i / 2] >> (i % 2 * 16));
            }
        }
    }
}

/// Strips as strips_nvfp4_codes makes them: rows g and g+8 of strip s are rows s * stride + g of `upper` and
/// lower_row + s * stride + g of `lower`, which are as a file has them, [n, k] each.
extern "C" void fp4_strips(uint32_t *target, const uint8_t *upper, const uint8_t *upper_scales, const uint8_t *lower,
                           const uint8_t *lower_scales, int n, int k, int strips, int stride, int lower_row) {
    const int blocks = k / Nvfp4Codes::UNIT, block_words = Nvfp4Codes::BYTES / 4;
    for (int strip = 0; strip < strips; ++strip) {
        for (int block = 0; block < blocks; ++block) {
            uint32_t *of_block = target + place_of_block(strips, blocks, strip, block) * block_words;
            for (int at = 0; at < block_words; ++at) {
                of_block[at] = nvfp4_codes_word(at, {upper, upper_scales}, {lower, lower_scales}, strip * stride,
                                                strip * stride + lower_row, block * Nvfp4Codes::UNIT, n, k);
            }
        }
    }
}

/// The sums of experts_fp4_sm120f.cu before they are rounded, `out[rows, 16 strips]`: of the rows in `records` with the strips
/// `w`, aligned to 16, whose rows g and g+8 have these matrix-wide scales.
extern "C" void fp4_product(float *out, const uint8_t *records, const float *row_scales, int rows, const uint8_t *w,
                            int strips, int k, float upper_scale, float lower_scale) {
    const int blocks = k / Nvfp4Codes::UNIT;
    constexpr int PITCH = Fp4Record::BYTES, STEPS = Fp4Record::COLUMNS / FP4_STEP;
    for (int strip = 0; strip < strips; ++strip) {
        for (int first = 0; first < rows; first += TOKENS) {
            float sum[LANES][4] = {};
            for (int index = 0; index < k / Fp4Record::COLUMNS; ++index) {
                // Shared memory holds anything where there is no token: here what turns into NaN.
                alignas(16) uint8_t stage[TOKENS * PITCH];
                std::memset(stage, 0x7f, sizeof stage);
                for (int t = 0; t < TOKENS && first + t < rows; ++t) {
                    const uint8_t *row = records + (first + t) * Fp4Record::row_bytes(k);
                    std::memcpy(stage + t * PITCH, row + size_t(index) * Fp4Record::BYTES, Fp4Record::BYTES);
                }
                const uint8_t *named[LANES];
                uint32_t b[LANES][4];
                for (int lane = 0; lane < LANES; ++lane) {
                    named[lane] = stage + Fp4Record::matrix_row(PITCH, lane);
                }
                ldmatrix(b, named);
                for (int step = 0; step < STEPS; ++step) {
                    uint32_t a[LANES][4], of_step[LANES][2], scale_a[LANES], scale_b[LANES];
                    const size_t place = place_of_block(strips, blocks, strip, index * STEPS + step);
                    for (int lane = 0; lane < LANES; ++lane) {
                        Nvfp4Codes::Lane weights;
                        Nvfp4Codes::load(weights, w + place * Nvfp4Codes::BYTES, lane);
                        std::memcpy(a[lane], weights.a.word, sizeof a[lane]);
                        scale_a[lane] = weights.scales;
                        of_step[lane][0] = b[lane][2 * step], of_step[lane][1] = b[lane][2 * step + 1];
                        std::memcpy(&scale_b[lane], stage + Fp4Record::scales(PITCH, step, lane), 4);
                    }
                    mma(sum, a, of_step, scale_a, scale_b);
                }
            }
            for (int lane = 0; lane < LANES; ++lane) {
                const int t = first + lane % 4 * 2;
                const float first_row = row_scales[t < rows ? t : rows - 1];
                const float second_row = row_scales[t + 1 < rows ? t + 1 : rows - 1];
                scale_fp4_sums(sum[lane], upper_scale, lower_scale, first_row, second_row);
                for (int i = 0; i < 4; ++i) {
                    // As finish.cuh puts them: rows g and g+8, tokens 2c and 2c+1.
                    if (t + i % 2 < rows) {
                        out[size_t(t + i % 2) * strips * STRIP + strip * STRIP + lane / 4 + i / 2 * 8] = sum[lane][i];
                    }
                }
            }
        }
    }
}
