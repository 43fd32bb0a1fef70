// At load: from stored rows to the order of formats.cuh. Runs once for each matrix.
#include "formats.cuh"

// A matrix as it is stored: rows one behind the other. Two of them make one matrix whose tiles have
// 8 rows of each.
struct Stored {
    const uint8_t* codes[2];
    // NVFP4 only: E4M3, one for 16 columns.
    const uint8_t* scales[2];
    int rows;
    int columns;
    int interleaved;
    // The codes are BF16; else they are in the device's own format.
    int from_bf16;
};

// Which stored row is row `r` of tile `t`, and of which matrix.
__device__ __forceinline__ bool stored_row(const Stored& s, int t, int r, int& part, int& row) {
    part = s.interleaved ? r / 8 : 0;
    row = s.interleaved ? t * 8 + r % 8 : t * TILE + r;
    return row < s.rows;
}

// 16 bits of F16; `overflow` is set where the value is too large.
__device__ __forceinline__ uint32_t f16_bits(const Stored& s, int part, size_t at, int* overflow) {
    const uint32_t bits = reinterpret_cast<const uint16_t*>(s.codes[part])[at];
    if (!s.from_bf16) return bits;
    const float value = __uint_as_float(bits << 16) * F16_FACTOR;
    if (!(fabsf(value) <= 65504.0f)) *overflow = 1;
    return __half_as_ushort(__float2half_rn(value));
}

__device__ __forceinline__ uint32_t byte_at(const Stored& s, int part, size_t at) {
    return s.codes[part][at];
}

// 4 stored bytes = 8 codes from column `k` on; see decode_nvfp4 for the order of the bits.
__device__ __forceinline__ uint32_t nvfp4_word(const Stored& s, int part, int row, int k) {
    // A scale's sign goes to its codes, so that the kernels' scales have none.
    const uint32_t flip =
        s.scales[part][static_cast<size_t>(row) * (s.columns / 16) + k / 16] >> 7;
    uint32_t word = 0;
    for (int p = 0; p < 4; p++) {
        const uint32_t pair =
            k + 2 * p < s.columns
                ? byte_at(s, part, (static_cast<size_t>(row) * s.columns + k) / 2 + p)
                : 0;
        for (int half = 0; half < 2; half++) {
            const uint32_t code = pair >> (4 * half) & 15;
            const uint32_t sign = (code >> 3) ^ flip, magnitude = code & 7;
            const uint32_t bits = p < 2 ? (sign << 15 | magnitude << 9) >> (3 * p)
                                        : sign << (16 - p) | magnitude << (9 - 3 * p);
            word |= bits << (16 * half);
        }
    }
    return word;
}

// One thread for each 16 bytes of codes. `tiles` and `units` cover the padded matrix.
extern "C" __global__ void repack_codes(
    const __grid_constant__ Stored s, int format, int tiles, int units, uint4* out,
    int* overflow
) {
    const int slots = format == F16 ? 4 : format == FP8 ? 2 : 1;
    const size_t pieces = static_cast<size_t>(tiles) * units * slots * 64;
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < pieces;
         i += static_cast<size_t>(gridDim.x) * blockDim.x) {
        const int lane = i % WARP, half = i / WARP % 2, slot = i / 64 % slots;
        const size_t unit_of_all = i / 64 / slots;
        const int t = unit_of_all / units, unit = unit_of_all % units;
        const int g = lane / 4, q = lane % 4;
        uint32_t words[4] = {};
        int part, row;
        if (format == F16) {
            // Half h holds the operands of the block's h-th mma: two rows, two pairs of columns.
            for (int j = 0; j < 8; j++) {
                const int k = unit * UNIT + slot * BLOCK + 8 * q + 4 * half + j / 4 * 2 + j % 2;
                if (stored_row(s, t, g + j / 2 % 2 * 8, part, row) && k < s.columns) {
                    const size_t at = static_cast<size_t>(row) * s.columns + k;
                    words[j / 2] |= f16_bits(s, part, at, overflow) << (j % 2 * 16);
                }
            }
        } else if (format == FP8) {
            const int k = unit * UNIT + (slot * 2 + half) * BLOCK + 8 * q;
            for (int j = 0; j < 16; j++) {
                if (stored_row(s, t, g + j / 8 * 8, part, row) && k + j % 8 < s.columns) {
                    words[j / 4] |=
                        byte_at(s, part, static_cast<size_t>(row) * s.columns + k + j % 8)
                        << (j % 4 * 8);
                }
            }
        } else {
            for (int j = 0; j < 4; j++) {
                const int k = unit * UNIT + (half * 2 + j / 2) * BLOCK + 8 * q;
                if (stored_row(s, t, g + j % 2 * 8, part, row) && k < s.columns) {
                    words[j] = nvfp4_word(s, part, row, k);
                }
            }
        }
        out[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// NVFP4's scales: one thread for each byte of [tile][unit][g][q / 2][block][row half].
extern "C" __global__ void repack_scales(
    const __grid_constant__ Stored s, int tiles, int units, uint8_t* out
) {
    const size_t bytes = static_cast<size_t>(tiles) * units * NVFP4_SCALES;
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < bytes;
         i += static_cast<size_t>(gridDim.x) * blockDim.x) {
        const int lower = i % 2, block = i / 2 % 4, pair = i / 8 % 2, g = i / 16 % 8;
        const size_t unit_of_all = i / NVFP4_SCALES;
        const int t = unit_of_all / units, unit = unit_of_all % units;
        const int group = unit * (UNIT / 16) + block * 2 + pair;
        int part, row;
        uint8_t scale = 0;
        if (stored_row(s, t, g + 8 * lower, part, row) && group * 16 < s.columns) {
            scale = s.scales[part][static_cast<size_t>(row) * (s.columns / 16) + group] & 0x7F;
        }
        out[i] = scale;
    }
}
