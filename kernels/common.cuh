// What all kernels share: launch order, the rows of a step, small warp helpers.
//
// Row invariance: every sum has an order that the shape fixes. Nothing here depends on how many
// rows a step has.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include <ptx.cuh>

// Activations between stages are f16, whose 11 bits keep a row's routing close to that of f32; bf16
// has 8. Norms keep them small; what may grow (SwiGLU) is stored times ACTIVATION_SCALE, which
// the scales of the down projections make good (cuda/places.rs).
constexpr float ACTIVATION_SCALE = 1.0f / 64;

// The nearest f16; what is larger than the largest becomes that, NaN stays.
__device__ __forceinline__ half to_half(float x) {
    constexpr float largest = 65504.0f;
    return __float2half_rn(fabsf(x) > largest ? copysignf(largest, x) : x);
}

constexpr int WARP = 32;
// Rows that a step can have on the device; buffers have room for as many.
constexpr int MAX_ROWS = 16;

// One row of the step (model/rows.rs): its place in the caches is sequence * context + position.
struct Row {
    int token;
    int position;
    int sequence;
    int first;

    __device__ int visible() const { return position + 1 - first; }
};

// Parts that the columns of a matrix are summed in, at most (cuda/plan.rs, `splits`).
constexpr int MAX_SPLITS = 4;

// The sum of a value's parts, which lie `pitch` apart. All loads are under way at once.
__device__ __forceinline__ float sum_splits(const float* first, size_t pitch, int splits) {
    float part[MAX_SPLITS];
#pragma unroll
    for (int split = 0; split < MAX_SPLITS; split++) {
        part[split] = split < splits ? first[split * pitch] : 0;
    }
    float sum = part[0];
#pragma unroll
    for (int split = 1; split < MAX_SPLITS; split++) {
        if (split < splits) sum += part[split];
    }
    return sum;
}

// Weights that a later kernel reads; 0 bytes for none.
struct Ahead {
    const uint8_t* from;
    unsigned bytes;
};

// Brings weights into the L2 cache while the bus would be idle: all blocks take part, before they
// wait.
__device__ __forceinline__ void prefetch(const Ahead& ahead) {
    constexpr unsigned PIECE = 4096;
    const unsigned blocks = gridDim.x * gridDim.y * gridDim.z;
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const unsigned pieces = ahead.bytes / PIECE;
    for (unsigned i = block + threadIdx.x * blocks; i < pieces; i += blocks * blockDim.x) {
        prefetch_to_l2(ahead.from + static_cast<size_t>(i) * PIECE, PIECE);
    }
}

__device__ __forceinline__ float warp_sum(float value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
    for (int step = 16; step > 0; step /= 2) {
        value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
    }
    return value;
}

// Sum over the block, the same in every thread. `scratch` holds a float for each warp.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
    const int warps = blockDim.x / WARP;
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = value;
    __syncthreads();
    const int lane = threadIdx.x % WARP;
    return warp_sum(lane < warps ? scratch[lane] : 0);
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }
