// Stage `reduce_norm`: residual += partial sums in their order; normed = RMSNorm(residual).
#include "common.cuh"

constexpr int THREADS = 1024;
// Groups of 4 values that a thread keeps: hidden sizes up to 16384.
constexpr int KEPT = 4;

// One block a row. partial is [MAX_ROWS][hidden].
extern "C" __global__ void __launch_bounds__(THREADS) reduce_norm(
    const float* partial, float* residual, const float* gain, float eps, half* normed, int hidden
) {
    release_consumer();
    __shared__ float scratch[THREADS / WARP];
    const size_t first = static_cast<size_t>(blockIdx.x) * hidden;
    const int groups = hidden / 4;
    const auto load = [](const float* from, int group) {
        return reinterpret_cast<const float4*>(from)[group];
    };
    float4 gains[KEPT], values[KEPT], added[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int group = threadIdx.x + k * THREADS;
        if (group < groups) gains[k] = load(gain, group);
    }
    wait_for_producer();
    // All loads are under way before the first is used.
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int group = threadIdx.x + k * THREADS;
        if (group < groups) {
            values[k] = load(residual + first, group);
            added[k] = load(partial + first, group);
        }
    }
    float squares = 0;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int group = threadIdx.x + k * THREADS;
        if (group < groups) {
            float4& v = values[k];
            v.x += added[k].x, v.y += added[k].y, v.z += added[k].z, v.w += added[k].w;
            squares += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
            reinterpret_cast<float4*>(residual + first)[group] = v;
        }
    }
    const float scale = rsqrtf(block_sum(squares, scratch) / hidden + eps);
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int group = threadIdx.x + k * THREADS;
        if (group < groups) {
            half out[4] = {
                to_half(values[k].x * scale * gains[k].x), to_half(values[k].y * scale * gains[k].y),
                to_half(values[k].z * scale * gains[k].z), to_half(values[k].w * scale * gains[k].w)
            };
            *reinterpret_cast<uint2*>(normed + first + group * 4) =
                *reinterpret_cast<const uint2*>(out);
        }
    }
}
