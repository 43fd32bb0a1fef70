// Stage `project_values`: W_UV, from latent space to each head's values.
#include "tile.cuh"

// Warps that share a tile: GLM-5's latent has four units.
constexpr int VALUE_WARPS = 4;

// w_uv holds [v_dim, kv_rank] of one head behind the other, each padded to whole tiles.
// attended: [MAX_ROWS][heads][kv_rank], values: [MAX_ROWS][heads * v_dim].
// grid: (tiles of a head / 2, heads).
template <int NB>
__device__ __forceinline__ void project(
    const Matrix& w_uv, const half* attended, half* values, int heads, int v_dim,
    const Ahead& ahead, int count
) {
    release_consumer();
    prefetch(ahead);
    const int head = blockIdx.y;
    Matrix w = w_uv;
    w.rows = w_uv.rows / heads;
    w.codes += static_cast<size_t>(head) * w.tiles() * w.units() * SLOTS<F16> * SLOT_CODES;
    linear<VALUE_WARPS, NB>(
        w, blockIdx.x * (LINEAR_WARPS / VALUE_WARPS), 0, 1, attended + head * w.columns,
        heads * w.columns, count,
        [&](int t, int r, int n, const float* column) {
            const int i = t * TILE + r;
            if (i < v_dim) {
                values[(static_cast<size_t>(n) * heads + head) * v_dim + i] =
                    to_half(column[r]);
            }
        }
    );
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) project_values_8(
    const __grid_constant__ Matrix w_uv, const half* attended, half* values, int heads, int v_dim,
    const __grid_constant__ Ahead ahead, int count
) {
    project<1>(w_uv, attended, values, heads, v_dim, ahead, count);
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) project_values_16(
    const __grid_constant__ Matrix w_uv, const half* attended, half* values, int heads, int v_dim,
    const __grid_constant__ Ahead ahead, int count
) {
    project<2>(w_uv, attended, values, heads, v_dim, ahead, count);
}
