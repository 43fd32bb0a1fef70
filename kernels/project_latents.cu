// Stage `project_latents`: q_a, kv_a, the indexer's wk and head weights as one matrix; then their
// norms and rope, and the new positions' cache entries.
#include "tile.cuh"

constexpr int SEGMENTS = 4;

struct Segments {
    Matrix part[SEGMENTS];
};

// latents is [splits][MAX_ROWS][width]; width = stored rows of all segments. grid: (tiles, splits).
template <int NB>
__device__ __forceinline__ void project(
    const Segments& segments, const half* normed, int hidden, float* latents, int width, int rows
) {
    release_consumer();
    int tile = blockIdx.x, column = 0;
    // A fixed index, so that the segments stay in the constant bank.
    Matrix w = segments.part[0];
#pragma unroll
    for (int i = 1; i < SEGMENTS; i++) {
        if (tile >= w.tiles()) {
            tile -= w.tiles();
            column += w.rows;
            w = segments.part[i];
        }
    }
    float* out = latents + static_cast<size_t>(blockIdx.y) * MAX_ROWS * width + column;
    linear<LINEAR_WARPS, NB>(
        w, tile, blockIdx.y, gridDim.y, normed, hidden, rows,
        [&](int t, int r, int n, const float* values) {
            out[static_cast<size_t>(n) * width + t * TILE + r] = values[r];
        }
    );
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) project_latents_8(
    const __grid_constant__ Segments segments, const half* normed, int hidden, float* latents,
    int width, int rows
) {
    project<1>(segments, normed, hidden, latents, width, rows);
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) project_latents_16(
    const __grid_constant__ Segments segments, const half* normed, int hidden, float* latents,
    int width, int rows
) {
    project<2>(segments, normed, hidden, latents, width, rows);
}

constexpr int NORM_THREADS = 512;
// Latents that a thread keeps: ranks up to 4096.
constexpr int KEPT = 8;

// Where the parts of a row of latents lie, and their sizes.
struct LatentLayout {
    int width;
    int splits;
    int q_rank;
    // Latent and roped key; `kv_at` is where they begin.
    int kv_at;
    int kv_rank;
    int rope;
    // Index key and head weights; dim is 0 in layers without an indexer.
    int key_at;
    int dim;
    int weights_at;
    int heads;
    // Positions of a sequence in the caches.
    int context;
    float eps;
    float key_eps;
    float weight_scale;
};

__device__ __forceinline__ float latent(const float* latents, const LatentLayout& l, int row, int i) {
    return sum_splits(
        latents + static_cast<size_t>(row) * l.width + i, static_cast<size_t>(MAX_ROWS) * l.width,
        l.splits
    );
}

// Loads `count` latents from `at` on into `values`, one in NORM_THREADS each; returns the scale of
// their RMSNorm.
__device__ __forceinline__ float load_for_norm(
    const float* latents, const LatentLayout& l, int row, int at, int count, float* scratch,
    float (&values)[KEPT]
) {
    float squares = 0;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int i = threadIdx.x + k * NORM_THREADS;
        values[k] = i < count ? latent(latents, l, row, at + i) : 0;
    }
#pragma unroll
    for (int k = 0; k < KEPT; k++) squares += values[k] * values[k];
    return rsqrtf(block_sum(squares, scratch) / count + l.eps);
}

// grid: (rows, 3): the query's latent; the cache's latent and roped key; the index key and the
// head weights. angles is [context][rope / 2] of (cos, sin).
extern "C" __global__ void __launch_bounds__(NORM_THREADS) norm_latents(
    const Row* rows, const float* latents, const __grid_constant__ LatentLayout l,
    const float* q_gain, const float* kv_gain, const float* key_gain, const float* key_bias,
    const float2* angles, half* query_latents, half* cache, half* index_keys, float* index_weights
) {
    release_consumer();
    __shared__ float scratch[NORM_THREADS / WARP];
    extern __shared__ float values[];
    const int row = blockIdx.x;
    const Row place = rows[row];
    const size_t entry = static_cast<size_t>(place.sequence) * l.context + place.position;
    const float2* turn = angles + static_cast<size_t>(place.position) * (l.rope / 2);
    const float* gain = blockIdx.y == 0 ? q_gain : kv_gain;
    const int normed = blockIdx.y == 0 ? l.q_rank : blockIdx.y == 1 ? l.kv_rank : 0;
    float gains[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int i = threadIdx.x + k * NORM_THREADS;
        gains[k] = i < normed ? gain[i] : 0;
    }
    wait_for_producer();
    if (blockIdx.y == 0) {
        float values[KEPT];
        const float scale = load_for_norm(latents, l, row, 0, l.q_rank, scratch, values);
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            const int i = threadIdx.x + k * NORM_THREADS;
            if (i < l.q_rank) {
                query_latents[static_cast<size_t>(row) * l.q_rank + i] =
                    to_half(values[k] * scale * gains[k]);
            }
        }
    } else if (blockIdx.y == 1) {
        float values[KEPT];
        const float scale = load_for_norm(latents, l, row, l.kv_at, l.kv_rank, scratch, values);
        half* out = cache + entry * (l.kv_rank + l.rope);
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            const int i = threadIdx.x + k * NORM_THREADS;
            if (i < l.kv_rank) out[i] = to_half(values[k] * scale * gains[k]);
        }
        // The roped key is not normalised.
        for (int i = threadIdx.x; i < l.rope / 2; i += NORM_THREADS) {
            const float even = latent(latents, l, row, l.kv_at + l.kv_rank + 2 * i);
            const float odd = latent(latents, l, row, l.kv_at + l.kv_rank + 2 * i + 1);
            out[l.kv_rank + 2 * i] = to_half(even * turn[i].x - odd * turn[i].y);
            out[l.kv_rank + 2 * i + 1] = to_half(odd * turn[i].x + even * turn[i].y);
        }
    } else if (l.dim > 0) {
        // LayerNorm, then rope on the first dimensions.
        float sum = 0;
        for (int i = threadIdx.x; i < l.dim; i += NORM_THREADS) {
            values[i] = latent(latents, l, row, l.key_at + i);
            sum += values[i];
        }
        const float mean = block_sum(sum, scratch) / l.dim;
        float squares = 0;
        for (int i = threadIdx.x; i < l.dim; i += NORM_THREADS) {
            squares += (values[i] - mean) * (values[i] - mean);
        }
        const float scale = rsqrtf(block_sum(squares, scratch) / l.dim + l.key_eps);
        for (int i = threadIdx.x; i < l.dim; i += NORM_THREADS) {
            values[i] = (values[i] - mean) * scale * key_gain[i] + key_bias[i];
        }
        __syncthreads();
        half* out = index_keys + entry * l.dim;
        for (int i = threadIdx.x; i < l.dim; i += NORM_THREADS) {
            float value = values[i];
            if (i < l.rope) {
                const float2 angle = turn[i / 2];
                const float other = values[i ^ 1];
                value = i % 2 == 0 ? value * angle.x - other * angle.y
                                   : value * angle.x + other * angle.y;
            }
            out[i] = to_half(value);
        }
        for (int i = threadIdx.x; i < l.heads; i += NORM_THREADS) {
            index_weights[row * l.heads + i] =
                latent(latents, l, row, l.weights_at + i) * l.weight_scale;
        }
    }
}
