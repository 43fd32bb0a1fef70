// Stored formats of weights, in the order in which the mma instruction takes them.
//
// A matrix [rows, columns] is cut into tiles of 16 rows and units of 128 columns, padded with
// zeros. A unit of a tile is 1 (NVFP4), 2 (FP8, FP8_ROWS) or 4 (F16) slots of 1 KiB; a warp copies a slot as
// 2 x 32 lanes x 16 bytes, and each lane gets its own operands. Lane (g, q) owns rows g and g + 8.
// Within a block of 32 columns it owns columns 8q..8q+7, so that it reads its part of the vector as
// 16 consecutive bytes: the columns of a dot product may be permuted as long as both sides agree.
// `repack.cu` writes this order; columns 8q..8q+3 go to the block's first mma, the others to its
// second.
#pragma once

#include "common.cuh"

// FP8 has a scale for 128 x 128 codes, FP8_ROWS one for each row, which the finished sums are
// multiplied with.
enum Format : int { F16 = 0, FP8 = 1, NVFP4 = 2, FP8_ROWS = 3 };

// Codes of 8 bits.
template <int format>
constexpr bool IS_FP8 = format == FP8 || format == FP8_ROWS;

constexpr int TILE = 16;
constexpr int UNIT = 128;
constexpr int BLOCK = 32;
constexpr int SLOT_CODES = 1024;
// A slot in shared memory: codes, and 8 bytes of scales a lane.
constexpr int SLOT = SLOT_CODES + WARP * 8;
// Bytes of scales of a unit: 16 rows x 8 groups of E4M3; two f32 (rows 0..7, rows 8..15).
constexpr int NVFP4_SCALES = 128;
constexpr int FP8_SCALES = 8;

template <int format>
constexpr int SLOTS = format == F16 ? 4 : IS_FP8<format> ? 2 : 1;

template <int format>
constexpr int SCALES = format == NVFP4 ? NVFP4_SCALES : format == FP8 ? FP8_SCALES : 0;

// BF16 weights are stored as f16 times this: exact for all between 2^-20 and 1023, and smaller ones
// lose less than 2^-31.
constexpr float F16_FACTOR = 64;

// What the decoded values of a format are short of.
template <int format>
constexpr float DECODED_SCALE = format == NVFP4 ? 128.0f : IS_FP8<format> ? 256.0f : 1 / F16_FACTOR;

// A matrix, or a rank's share of it (cuda/layout.rs has the same struct).
struct Matrix {
    const uint8_t* codes;
    // Of units; FP8_ROWS: an f32 for each row.
    const uint8_t* scales;
    // NVFP4's scale of the whole tensor, else 1.
    float global;
    // Stored rows, a multiple of 16.
    int rows;
    // Columns that the vector has, a multiple of 8.
    int columns;
    int format;

    // The scale that a row's finished sums take.
    template <int format>
    __device__ float row_scale(int row) const {
        return format == FP8_ROWS ? __ldg(reinterpret_cast<const float*>(scales) + row) : 1;
    }

    __device__ int tiles() const { return rows / TILE; }
    __device__ int units() const { return (columns + UNIT - 1) / UNIT; }

    // Where the codes and the scales of a unit lie, counted over all tiles, and over all matrices where
    // several of one size lie one behind the other.
    template <int format>
    __device__ const uint8_t* codes_of(unsigned unit) const {
        return codes + static_cast<size_t>(unit) * (SLOTS<format> * SLOT_CODES);
    }

    template <int format>
    __device__ const uint8_t* scales_of(unsigned unit) const {
        return scales + static_cast<size_t>(unit) * SCALES<format>;
    }
};

// NVFP4's scales of the two matrices in an interleaved one, whose own is then 1.
struct Globals {
    float gate;
    float up;
};

// Two of a word's E4M3 scales s (never negative), each as two f16 of s * 2^7: bytes 0 and 1, or 2 and
// 3. The bits of s at 13..7 of an f16 make s * 2^-8, subnormals included; a factor of 2^15 follows.
__device__ __forceinline__ void nvfp4_scales(
    uint32_t word, int half_of, uint32_t& first, uint32_t& second
) {
    constexpr uint32_t two_to_15 = 0x78007800;
    const uint32_t bits = __byte_perm(word, 0, half_of == 0 ? 0x1404 : 0x3424) >> 1;
    const uint32_t both = multiply_pairs(bits, two_to_15);
    first = __byte_perm(both, 0, 0x1010);
    second = __byte_perm(both, 0, 0x3232);
}

// 8 codes times their scale, as 4 pairs of f16 that are exact and 2^-7 times the value. The bits
// sign, e1, e0, m of a code at 15, 11, 10, 9 of an f16 make value * 2^-14. In each half of the word
// the first code lies there and the second 3 bits lower; the third has its sign at 14 and the rest
// from 5 on, the fourth its sign at 13 and the rest from 2 on.
__device__ __forceinline__ void decode_nvfp4(uint32_t word, uint32_t scale, uint32_t (&out)[4]) {
    constexpr uint32_t place = 0x8E008E00;
    constexpr uint32_t sign = 0x80008000, rest = 0x0E000E00;
    out[0] = multiply_pairs(word & place, scale);
    out[1] = multiply_pairs(word << 3 & place, scale);
    out[2] = multiply_pairs((word << 1 & sign) | (word << 6 & rest), scale);
    out[3] = multiply_pairs((word << 2 & sign) | (word << 9 & rest), scale);
}

// 4 E4M3 codes as 2 pairs of f16, 2^-8 times the value: the bits at 15 and 13..7.
__device__ __forceinline__ void decode_fp8(uint32_t word, uint32_t& low, uint32_t& high) {
    const auto pair = [](uint32_t bytes) {
        return (bytes & 0x80008000) | (bytes >> 1 & 0x3F803F80);
    };
    low = pair(__byte_perm(word, 0, 0x1404));
    high = pair(__byte_perm(word, 0, 0x3424));
}
