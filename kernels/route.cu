// Stage `route`: the router's logits, and the shared expert's gate and up, as one matrix. The block
// that is done last chooses the rows' experts and finishes the shared expert's SwiGLU.
#include "routing.cuh"
#include "tile.cuh"

// The shared expert's gate and up: sums [splits][MAX_ROWS][pitch], alternating by 8; activations
// [MAX_ROWS][width].
struct SharedExpert {
    float* sums;
    half* activations;
    int pitch;
    int width;
    Globals globals;
};

// Copies a routing; its size is a multiple of 16.
__device__ __forceinline__ void copy_routing(Routing* to, const Routing* from) {
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(Routing) / 16); i += blockDim.x) {
        reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
}

__device__ __forceinline__ void finish_route(
    const RouteLayout& l, const SharedExpert& expert, const float* logits, const float* bias,
    Routing* out, int count
) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Routing routing;
    // The rings are not in use any more.
    float* probabilities = reinterpret_cast<float*>(shared);
    unsigned* choices = reinterpret_cast<unsigned*>(probabilities + MAX_ROWS * MAX_EXPERTS);
    const size_t split_pitch = static_cast<size_t>(MAX_ROWS) * l.experts;
#pragma unroll 4
    for (int row = 0; row < count; row++) {
        load_choices(
            logits + static_cast<size_t>(row) * l.experts, split_pitch, bias, l,
            probabilities + row * MAX_EXPERTS, choices + row * MAX_EXPERTS
        );
    }
    for (int i = threadIdx.x; i < count * expert.width; i += LINEAR_THREADS) {
        const int row = i / expert.width, at = i % expert.width;
        const float* pair =
            expert.sums + static_cast<size_t>(row) * expert.pitch + at / 8 * TILE + at % 8;
        const size_t pitch = static_cast<size_t>(MAX_ROWS) * expert.pitch;
        const float gate = sum_splits(pair, pitch, l.splits) * expert.globals.gate;
        const float up = sum_splits(pair + 8, pitch, l.splits) * expert.globals.up;
        expert.activations[i] = to_half(silu(gate) * up * ACTIVATION_SCALE);
    }
    __syncthreads();
    for (int row = threadIdx.x / WARP; row < count; row += LINEAR_WARPS) {
        choose_experts(
            probabilities + row * MAX_EXPERTS, choices + row * MAX_EXPERTS, l, routing.uses[row]
        );
    }
    list_experts(routing, count, l);
    if (threadIdx.x == 0) routing.arrived = 0;
    __syncthreads();
    copy_routing(out, &routing);
}

// logits: [splits][MAX_ROWS][experts]. grid: (tiles of both matrices, splits).
template <int NB>
__device__ __forceinline__ void project(
    const Matrix& router, const Matrix& gate_up, const RouteLayout& l, const SharedExpert& expert,
    const half* normed, int hidden, float* logits, const float* bias, Routing* routing, int count
) {
    release_consumer();
    const size_t split = blockIdx.y;
    const int tile = blockIdx.x;
    if (tile < router.tiles()) {
        linear<LINEAR_WARPS, NB>(
            router, tile, blockIdx.y, gridDim.y, normed, hidden, count,
            [&](int t, int r, int n, const float* column) {
                const int index = t * TILE + r;
                if (index < l.experts) {
                    logits[(split * MAX_ROWS + n) * l.experts + index] = column[r];
                }
            }
        );
    } else {
        linear<LINEAR_WARPS, NB>(
            gate_up, tile - router.tiles(), blockIdx.y, gridDim.y, normed, hidden, count,
            [&](int t, int r, int n, const float* column) {
                expert.sums[(split * MAX_ROWS + n) * expert.pitch + t * TILE + r] = column[r];
            }
        );
    }
    // What a block wrote is seen by the one that counts the last arrival.
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(&routing->arrived, 1) == static_cast<int>(gridDim.x * gridDim.y) - 1;
        __threadfence();
    }
    __syncthreads();
    if (last) finish_route(l, expert, logits, bias, routing, count);
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) route_8(
    const __grid_constant__ Matrix router, const __grid_constant__ Matrix gate_up,
    const __grid_constant__ RouteLayout l, const __grid_constant__ SharedExpert expert,
    const half* normed, int hidden, float* logits, const float* bias, Routing* routing, int count
) {
    project<1>(router, gate_up, l, expert, normed, hidden, logits, bias, routing, count);
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) route_16(
    const __grid_constant__ Matrix router, const __grid_constant__ Matrix gate_up,
    const __grid_constant__ RouteLayout l, const __grid_constant__ SharedExpert expert,
    const half* normed, int hidden, float* logits, const float* bias, Routing* routing, int count
) {
    project<2>(router, gate_up, l, expert, normed, hidden, logits, bias, routing, count);
}
