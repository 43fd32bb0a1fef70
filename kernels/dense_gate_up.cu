// Stage `dense_gate_up`: SwiGLU of a dense layer. Rows of gate and up alternate by 8 in a tile, so
// that both of a value are in one tile.
#include "tile.cuh"

// activations: [MAX_ROWS][width]. grid: tiles of 8 gates and 8 ups.
template <int NB>
__device__ __forceinline__ void gate_up(
    const Matrix& w, Globals globals, const half* x, half* activations, int width, int count
) {
    release_consumer();
    linear<LINEAR_WARPS, NB>(
        w, blockIdx.x, 0, 1, x, w.columns, count,
        [&](int t, int r, int n, const float* column) {
            const int i = t * 8 + r;
            if (r < 8 && i < width) {
                activations[static_cast<size_t>(n) * width + i] =
                    to_half(silu(column[r] * globals.gate) * (column[r + 8] * globals.up) *
                            ACTIVATION_SCALE);
            }
        }
    );
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) dense_gate_up_8(
    const __grid_constant__ Matrix w, Globals globals, const half* x, half* activations, int width,
    int count
) {
    gate_up<1>(w, globals, x, activations, width, count);
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) dense_gate_up_16(
    const __grid_constant__ Matrix w, Globals globals, const half* x, half* activations, int width,
    int count
) {
    gate_up<2>(w, globals, x, activations, width, count);
}
