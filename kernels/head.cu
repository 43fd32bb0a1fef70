// Stage `head`: lm_head and the arg-max.
#include "tile.cuh"

// logits: [MAX_ROWS][vocabulary]. grid: tiles.
template <int NB>
__device__ __forceinline__ void project(
    const Matrix& w, const half* normed, float* logits, int vocabulary, int count
) {
    release_consumer();
    linear<LINEAR_WARPS, NB>(
        w, blockIdx.x, 0, 1, normed, w.columns, count,
        [&](int t, int r, int n, const float* column) {
            const int id = t * TILE + r;
            if (id < vocabulary) logits[static_cast<size_t>(n) * vocabulary + id] = column[r];
        }
    );
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) head_8(
    const __grid_constant__ Matrix w, const half* normed, float* logits, int vocabulary, int count
) {
    project<1>(w, normed, logits, vocabulary, count);
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) head_16(
    const __grid_constant__ Matrix w, const half* normed, float* logits, int vocabulary, int count
) {
    project<2>(w, normed, logits, vocabulary, count);
}

constexpr int ARGMAX_THREADS = 1024;

struct Best {
    int id;
    float logit;
};

// Ties: the lower id. A NaN never wins, and a row of NaN keeps -infinity.
__device__ __forceinline__ bool better(float a, int a_id, float b, int b_id) {
    return a > b || (a == b && a_id < b_id);
}

// One block a row; ids from `limit` on are padding.
extern "C" __global__ void __launch_bounds__(ARGMAX_THREADS) argmax(
    const float* logits, int vocabulary, int limit, Best* best
) {
    release_consumer();
    __shared__ float values[WARP];
    __shared__ int ids[WARP];
    wait_for_producer();
    const float* row = logits + static_cast<size_t>(blockIdx.x) * vocabulary;
    float value = -INFINITY;
    int id = 0x7FFFFFFF;
    for (int i = threadIdx.x; i < limit; i += ARGMAX_THREADS) {
        if (better(row[i], i, value, id)) value = row[i], id = i;
    }
    const auto reduce = [&] {
        for (int step = 16; step > 0; step /= 2) {
            const float other = __shfl_xor_sync(~0u, value, step);
            const int other_id = __shfl_xor_sync(~0u, id, step);
            if (better(other, other_id, value, id)) value = other, id = other_id;
        }
    };
    reduce();
    if (threadIdx.x % WARP == 0) values[threadIdx.x / WARP] = value, ids[threadIdx.x / WARP] = id;
    __syncthreads();
    if (threadIdx.x < WARP) {
        value = values[threadIdx.x], id = ids[threadIdx.x];
        reduce();
        if (threadIdx.x == 0) best[blockIdx.x] = Best{id, value};
    }
}
