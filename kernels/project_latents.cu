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
// Groups of 4 latents that a thread keeps: ranks up to 4096.
constexpr int KEPT = 2;

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

// Normalises `count` latents from `at` on, 4 a thread at a time.
__device__ __forceinline__ void norm(
    const float* latents, const LatentLayout& l, int row, int at, int count,
    const float4 (&gains)[KEPT], float* scratch, half* out
) {
    const float* first = latents + static_cast<size_t>(row) * l.width + at;
    const size_t pitch = static_cast<size_t>(MAX_ROWS) * l.width;
    float4 part[KEPT][MAX_SPLITS];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int group = threadIdx.x + k * NORM_THREADS;
#pragma unroll
        for (int split = 0; split < MAX_SPLITS; split++) {
            part[k][split] = make_float4(0, 0, 0, 0);
            if (group * 4 < count && split < l.splits) {
                part[k][split] = reinterpret_cast<const float4*>(first + split * pitch)[group];
            }
        }
    }
    float squares = 0;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        float4& v = part[k][0];
#pragma unroll
        for (int split = 1; split < MAX_SPLITS; split++) {
            const float4 add = part[k][split];
            v.x += add.x, v.y += add.y, v.z += add.z, v.w += add.w;
        }
        squares += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
    }
    const float scale = rsqrtf(block_sum(squares, scratch) / count + l.eps);
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int group = threadIdx.x + k * NORM_THREADS;
        const float4 v = part[k][0], g = gains[k];
        if (group * 4 < count) {
            const half four[4] = {
                to_half(v.x * scale * g.x), to_half(v.y * scale * g.y),
                to_half(v.z * scale * g.z), to_half(v.w * scale * g.w)
            };
            *reinterpret_cast<uint2*>(out + group * 4) = *reinterpret_cast<const uint2*>(four);
        }
    }
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
    float* values = dynamic_shared<float>();
    const int row = blockIdx.x;
    const Row place = rows[row];
    const size_t entry = static_cast<size_t>(place.sequence) * l.context + place.position;
    const float2* turn = angles + static_cast<size_t>(place.position) * (l.rope / 2);
    const float* gain = blockIdx.y == 0 ? q_gain : kv_gain;
    const int normed = blockIdx.y == 0 ? l.q_rank : blockIdx.y == 1 ? l.kv_rank : 0;
    float4 gains[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int group = threadIdx.x + k * NORM_THREADS;
        if (group * 4 < normed) gains[k] = reinterpret_cast<const float4*>(gain)[group];
    }
    wait_for_producer();
    if (blockIdx.y == 0) {
        half* out = query_latents + static_cast<size_t>(row) * l.q_rank;
        norm(latents, l, row, 0, l.q_rank, gains, scratch, out);
    } else if (blockIdx.y == 1) {
        half* out = cache + entry * (l.kv_rank + l.rope);
        norm(latents, l, row, l.kv_at, l.kv_rank, gains, scratch, out);
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
