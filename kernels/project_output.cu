// Stages `project_output` and `dense_down`: a matrix into the partial sum.
#include "tile.cuh"

// partial: [MAX_ROWS][hidden]. grid: tiles.
template <int NB>
__device__ __forceinline__ void project(
    const Matrix& w, const half* x, float* partial, int hidden, int count
) {
    release_consumer();
    linear<LINEAR_WARPS, NB>(
        w, blockIdx.x, 0, 1, x, w.columns, count,
        [&](int t, int r, int n, const float* column) {
            const int i = t * TILE + r;
            if (i < hidden) partial[static_cast<size_t>(n) * hidden + i] = column[r];
        }
    );
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) project_output_8(
    const __grid_constant__ Matrix w, const half* x, float* partial, int hidden, int count
) {
    project<1>(w, x, partial, hidden, count);
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) project_output_16(
    const __grid_constant__ Matrix w, const half* x, float* partial, int hidden, int count
) {
    project<2>(w, x, partial, hidden, count);
}
