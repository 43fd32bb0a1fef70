// Stage `reduce_norm`: residual += partial sums in their order; normed = RMSNorm(residual).
#include "common.cuh"

constexpr int THREADS = 1024;
// Values that a thread keeps: hidden sizes up to 16384.
constexpr int KEPT = 16;

// One block a row. partial is [MAX_ROWS][hidden].
extern "C" __global__ void __launch_bounds__(THREADS) reduce_norm(
    const float* partial, float* residual, const float* gain, float eps, half* normed,
    int hidden
) {
    release_consumer();
    __shared__ float scratch[THREADS / WARP];
    const size_t row = blockIdx.x;
    float gains[KEPT], values[KEPT], added[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int i = threadIdx.x + k * THREADS;
        gains[k] = i < hidden ? gain[i] : 0;
    }
    wait_for_producer();
    // All loads are under way before the first is used.
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int i = threadIdx.x + k * THREADS;
        values[k] = i < hidden ? residual[row * hidden + i] : 0;
        added[k] = i < hidden ? partial[row * hidden + i] : 0;
    }
    float squares = 0;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int i = threadIdx.x + k * THREADS;
        values[k] += added[k];
        squares += values[k] * values[k];
        if (i < hidden) residual[row * hidden + i] = values[k];
    }
    const float scale = rsqrtf(block_sum(squares, scratch) / hidden + eps);
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int i = threadIdx.x + k * THREADS;
        if (i < hidden) normed[row * hidden + i] = to_half(values[k] * scale * gains[k]);
    }
}
