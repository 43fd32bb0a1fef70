// The functions of kernels/ptx.cuh, which says what they do, for the emulator.
#pragma once

#include <immintrin.h>

#include <chrono>

// Kernels run one after another.
inline void wait_for_producer() {}
inline void release_consumer() {}

template <int threads>
inline void second_barrier() { emulator::second_barrier(threads); }

inline unsigned long long now_ns() {
    // Whoever asks for the time waits for something.
    emulator::give_way();
    return std::chrono::steady_clock::now().time_since_epoch().count();
}

template <class T>
inline T* dynamic_shared() { return reinterpret_cast<T*>(emulator::dynamic); }

inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - emulator::dynamic);
}

inline const uint8_t* at_shared(uint32_t address) {
    return emulator::dynamic + static_cast<int32_t>(address);
}

inline uint4 load_shared_16(uint32_t from) {
    uint4 v;
    std::memcpy(&v, at_shared(from), 16);
    return v;
}

inline uint2 load_shared_8(uint32_t from) {
    uint2 v;
    std::memcpy(&v, at_shared(from), 8);
    return v;
}

inline void copy_async_16(uint32_t to, const void* from) { emulator::copy_later(to, from, 16); }
inline void copy_async_8(uint32_t to, const void* from) { emulator::copy_later(to, from, 8); }
inline void commit_copies() { emulator::commit_copies(); }
template <int pending>
inline void wait_for_copies() { emulator::wait_for_copies(pending); }

inline void prefetch_to_l2(const void*, unsigned) {}

inline uint4 load_in_order(const void* from) { return *static_cast<const uint4*>(from); }

inline uint4 load_once(const void* from) { return *static_cast<const uint4*>(from); }

inline uint4 load_system(const void* from) {
    const auto* words = static_cast<const unsigned*>(from);
    const auto word = [&](int i) { return __atomic_load_n(words + i, __ATOMIC_SEQ_CST); };
    return make_uint4(word(0), word(1), word(2), word(3));
}

inline void store_system(void* to, uint4 v) {
    auto* words = static_cast<unsigned*>(to);
    const unsigned values[4] = {v.x, v.y, v.z, v.w};
    for (int i = 0; i < 4; i++) __atomic_store_n(words + i, values[i], __ATOMIC_SEQ_CST);
}

inline unsigned long long load_system_64(const void* from) {
    return __atomic_load_n(static_cast<const unsigned long long*>(from), __ATOMIC_SEQ_CST);
}

inline void store_system_64(void* to, unsigned long long v) {
    __atomic_store_n(static_cast<unsigned long long*>(to), v, __ATOMIC_SEQ_CST);
}

inline __m128i four_halves(const void* from) {
    return _mm_loadl_epi64(static_cast<const __m128i*>(from));
}

inline uint32_t multiply_pairs(uint32_t a, uint32_t b) {
    const __m128 product =
        _mm_mul_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(a)), _mm_cvtph_ps(_mm_cvtsi32_si128(b)));
    return _mm_cvtsi128_si32(_mm_cvtps_ph(product, _MM_FROUND_TO_NEAREST_INT));
}

namespace emulator {

struct Operands {
    uint32_t a[4], b[2];
};

struct Products {
    float d[4];
};

// The last lane to come has all operands and multiplies them: d = a b, columns of b lie together.
inline void multiply(Meeting& meeting) {
    alignas(32) float a[16][16], b[16][8], d[16][8];
    const auto two = [](uint32_t halves, float& low, float& high) {
        const __m128 pair = _mm_cvtph_ps(_mm_cvtsi32_si128(halves));
        low = _mm_cvtss_f32(pair);
        high = _mm_cvtss_f32(_mm_shuffle_ps(pair, pair, 1));
    };
    for (int lane = 0; lane < WARP; lane++) {
        const int g = lane / 4, q = lane % 4;
        const Operands o = brought<Operands>(meeting, lane);
        for (int i = 0; i < 4; i++) {
            const int row = g + i % 2 * 8, column = 2 * q + i / 2 * 8;
            two(o.a[i], a[row][column], a[row][column + 1]);
        }
        for (int i = 0; i < 2; i++) two(o.b[i], b[2 * q + i * 8][g], b[2 * q + 1 + i * 8][g]);
    }
    for (int row = 0; row < 16; row++) {
        __m256 sum = _mm256_setzero_ps();
        for (int k = 0; k < 16; k++) {
            sum = _mm256_fmadd_ps(_mm256_set1_ps(a[row][k]), _mm256_load_ps(b[k]), sum);
        }
        _mm256_store_ps(d[row], sum);
    }
    for (int lane = 0; lane < WARP; lane++) {
        const int g = lane / 4, q = lane % 4;
        const Products p = {d[g][2 * q], d[g][2 * q + 1], d[g + 8][2 * q], d[g + 8][2 * q + 1]};
        std::memcpy(meeting.brought[lane], &p, sizeof(p));
    }
}

// Row i of matrix m is at the address that lane 8 m + i brings.
inline uint32_t matrix_word(const Meeting& meeting, int matrix, bool transposed) {
    const int g = lane() / 4, q = lane() % 4;
    const auto element = [&](int row, int column) {
        uint16_t half;
        const uint32_t address = brought<uint32_t>(meeting, matrix * 8 + row);
        std::memcpy(&half, at_shared(address) + column * 2, 2);
        return static_cast<uint32_t>(half);
    };
    if (transposed) return element(2 * q, g) | element(2 * q + 1, g) << 16;
    return element(g, 2 * q) | element(g, 2 * q + 1) << 16;
}

}  // namespace emulator

inline void mma(
    float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1
) {
    const emulator::Operands mine = {{a0, a1, a2, a3}, {b0, b1}};
    const auto& meeting = emulator::meet(~0u, mine, emulator::multiply);
    const auto p = emulator::brought<emulator::Products>(meeting, emulator::lane());
    for (int i = 0; i < 4; i++) d[i] += p.d[i];
}

inline void load_matrices(
    uint32_t address, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d
) {
    const auto& meeting = emulator::meet(~0u, address);
    uint32_t* const to[4] = {&a, &b, &c, &d};
    for (int m = 0; m < 4; m++) *to[m] = emulator::matrix_word(meeting, m, false);
}

inline void load_transposed(
    uint32_t address, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d
) {
    const auto& meeting = emulator::meet(~0u, address);
    uint32_t* const to[4] = {&a, &b, &c, &d};
    for (int m = 0; m < 4; m++) *to[m] = emulator::matrix_word(meeting, m, true);
}

inline void load_two(uint32_t address, uint32_t& a, uint32_t& b) {
    const auto& meeting = emulator::meet(~0u, address);
    a = emulator::matrix_word(meeting, 0, false);
    b = emulator::matrix_word(meeting, 1, false);
}
