// What nvcc gives a kernel, for g++: included before each kernels/*.cu. Arithmetic is the host's;
// -ffp-contract=off keeps a row's result free of what the compiler makes of its neighbours.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "block.h"
#include "registry.h"

#undef __global__
#undef __device__
#undef __shared__
#undef __launch_bounds__
#undef __forceinline__
#undef __align__
#undef __grid_constant__
#undef __cluster_dims__
#define __device__
#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__
#define __launch_bounds__(...)
// A block's thread of the host has it for the block.
#define __shared__ static thread_local
// build.sh finds kernels and their clusters by these words.
#define __global__ EMULATED_KERNEL
#ifndef __emulator_names
#define EMULATED_KERNEL
#endif
#define __cluster_dims__(x, y, z) EMULATED_CLUSTER(x)
#ifndef __emulator_names
#define EMULATED_CLUSTER(x)
#endif

using std::max;
using std::min;

template <class A, class B>
inline auto min(A a, B b) -> decltype(a + b) { return a < b ? a : b; }
template <class A, class B>
inline auto max(A a, B b) -> decltype(a + b) { return a > b ? a : b; }

inline void __syncthreads() { emulator::barrier(); }
inline void __syncwarp(unsigned mask = ~0u) { emulator::meet(mask, 0); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __threadfence(); }
inline void __nanosleep(unsigned) { emulator::give_way(); }

template <class T>
inline T __shfl_sync(unsigned mask, T value, unsigned from) {
    return emulator::brought<T>(emulator::meet(mask, value), from % emulator::WARP);
}

template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, unsigned bits) {
    return __shfl_sync(mask, value, emulator::lane() ^ bits);
}

template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by) {
    const unsigned lane = emulator::lane();
    return __shfl_sync(mask, value, lane < by ? lane : lane - by);
}

template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by) {
    const unsigned lane = emulator::lane();
    return __shfl_sync(mask, value, lane + by < emulator::WARP ? lane + by : lane);
}

// What `merge` makes of the values of all lanes of the mask, lowest first.
template <class T, class R, class Merge>
inline R merge_lanes(unsigned mask, T value, R result, Merge merge) {
    const emulator::Meeting& meeting = emulator::meet(mask, value);
    for (unsigned lane = 0; lane < emulator::WARP; lane++) {
        if (mask >> lane & 1) result = merge(result, emulator::brought<T>(meeting, lane), lane);
    }
    return result;
}

inline unsigned __ballot_sync(unsigned mask, int is_set) {
    return merge_lanes(mask, is_set, 0u, [](unsigned all, int one, unsigned lane) {
        return all | (one != 0 ? 1u << lane : 0u);
    });
}

inline int __any_sync(unsigned mask, int is_set) { return __ballot_sync(mask, is_set) != 0; }
inline int __all_sync(unsigned mask, int is_set) { return __ballot_sync(mask, is_set) == mask; }

template <class T>
inline unsigned __match_any_sync(unsigned mask, T value) {
    return merge_lanes(mask, value, 0u, [value](unsigned all, T one, unsigned lane) {
        return all | (one == value ? 1u << lane : 0u);
    });
}

template <class T>
inline T __reduce_add_sync(unsigned mask, T value) {
    return merge_lanes(mask, value, T(0), [](T sum, T one, unsigned) { return sum + one; });
}

template <class T>
inline T __reduce_max_sync(unsigned mask, T value) {
    return merge_lanes(mask, value, value, [](T most, T one, unsigned) { return max(most, one); });
}

template <class T>
inline T atomicAdd(T* at, T value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
template <class T>
inline T atomicOr(T* at, T value) { return __atomic_fetch_or(at, value, __ATOMIC_RELAXED); }
template <class T>
inline T atomicExch(T* at, T value) { return __atomic_exchange_n(at, value, __ATOMIC_RELAXED); }

template <class T>
inline T __ldg(const T* from) { return *from; }
template <class T>
inline T __ldcg(const T* from) { return *from; }

inline unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
inline float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned nibble = selector >> (4 * i) & 15;
        unsigned byte = both >> (8 * (nibble & 7)) & 255;
        if (nibble & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << (8 * i);
    }
    return result;
}

#include <ptx.cuh>
