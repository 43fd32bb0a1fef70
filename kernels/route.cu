// Stage `route`: the router's logits, and the shared expert's gate and up, as one matrix.
// `choose_experts` goes on from them.
#include "tile.cuh"

// logits: [splits][MAX_ROWS][experts]; shared_sums: [splits][MAX_ROWS][rows of gate_up, which
// alternate by 8]. grid: (tiles of both matrices, splits).
template <int NB>
__device__ __forceinline__ void project(
    const Matrix& router, const Matrix& gate_up, const half* normed, int hidden, float* logits,
    int experts, float* shared_sums, int count
) {
    release_consumer();
    const size_t split = blockIdx.y;
    const int tile = blockIdx.x;
    if (tile < router.tiles()) {
        linear<LINEAR_WARPS, NB>(
            router, tile, blockIdx.y, gridDim.y, normed, hidden, count,
            [&](int t, int r, int n, const float* column) {
                const int expert = t * TILE + r;
                if (expert < experts) {
                    logits[(split * MAX_ROWS + n) * experts + expert] = column[r];
                }
            }
        );
    } else {
        linear<LINEAR_WARPS, NB>(
            gate_up, tile - router.tiles(), blockIdx.y, gridDim.y, normed, hidden, count,
            [&](int t, int r, int n, const float* column) {
                shared_sums[(split * MAX_ROWS + n) * gate_up.rows + t * TILE + r] = column[r];
            }
        );
    }
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) route_8(
    const __grid_constant__ Matrix router, const __grid_constant__ Matrix gate_up,
    const half* normed, int hidden, float* logits, int experts, float* shared_sums, int count
) {
    project<1>(router, gate_up, normed, hidden, logits, experts, shared_sums, count);
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) route_16(
    const __grid_constant__ Matrix router, const __grid_constant__ Matrix gate_up,
    const half* normed, int hidden, float* logits, int experts, float* shared_sums, int count
) {
    project<2>(router, gate_up, normed, hidden, logits, experts, shared_sums, count);
}
