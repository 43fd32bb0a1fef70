// What all kernels share: launch order, the rows of a step, small warp helpers.
//
// Row invariance: every sum has an order that the shape fixes. Nothing here depends on how many
// rows a step has.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

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

// Programmatic dependent launch. A kernel starts while the one before it still runs; until this
// call it may read only what no kernel of the step writes: weights, and the step's rows.
__device__ __forceinline__ void wait_for_producer() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next kernel start as soon as all blocks of this one have called it. Called first: the
// next kernel then has its weights under way when this one ends.
__device__ __forceinline__ void release_consumer() {
    asm volatile("griddepcontrol.launch_dependents;");
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Asynchronous copies to shared memory; the bytes are visible to the thread that asked for them.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_async_8(uint32_t to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `pending` groups of copies are under way.
template <int pending>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
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
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                         ahead.from + static_cast<size_t>(i) * PIECE),
                     "r"(PIECE));
    }
}

// d += a b, a: 16 x 16, b: 16 x 8. Lane (g, q) = (lane / 4, lane % 4) holds
// a0 = (g; 2q, 2q+1), a1 = (g+8; same), a2 = (g; 2q+8, 2q+9), a3 = (g+8; same),
// b0 = (2q, 2q+1; g), b1 = (2q+8, 2q+9; g), d0, d1 = (g; 2q, 2q+1), d2, d3 = (g+8; same).
__device__ __forceinline__ void mma(
    float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1
) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)
    );
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
