// Stage `project_queries`: q_b with rope, the indexer's queries; then W_UK folded into the query.
#include "tile.cuh"

struct QueryLayout {
    int q_rank;
    // Of a head of q_b: dimensions without and with rope.
    int nope;
    int rope;
    int heads;
    int kv_rank;
    // Of the indexer; its rope dimensions come first.
    int index_heads;
    int index_dim;
};

// Rope on the pair that `r` belongs to.
__device__ __forceinline__ float turned(const float* values, int r, float2 angle) {
    return r % 2 == 0 ? values[r] * angle.x - values[r + 1] * angle.y
                      : values[r] * angle.x + values[r - 1] * angle.y;
}

// grid: tiles of q_b, then those of wq_b where the step scores keys.
// without_rope: [MAX_ROWS][heads][nope], queries: [MAX_ROWS][heads][kv_rank + rope] (the roped part
// here, the absorbed one in absorb_queries), index_queries: [MAX_ROWS][index_heads][index_dim].
template <int NB>
__device__ __forceinline__ void project(
    const Row* rows, const Matrix& q_b, const Matrix& wq_b, const QueryLayout& l,
    const half* query_latents, const float2* angles, half* without_rope, half* queries,
    half* index_queries, int count
) {
    release_consumer();
    const int tile = blockIdx.x;
    // A thread finishes one result; its angle is loaded before the wait.
    const int own_row = threadIdx.x % TILE, own_vector = min(threadIdx.x / TILE, count - 1);
    const float2* turn = angles + static_cast<size_t>(rows[own_vector].position) * (l.rope / 2);
    float2 angle = make_float2(1, 0);
    if (tile < q_b.tiles()) {
        const int d = (tile * TILE + own_row) % (l.nope + l.rope);
        if (d >= l.nope) angle = turn[(d - l.nope) / 2];
    } else {
        const int d = ((tile - q_b.tiles()) * TILE + own_row) % l.index_dim;
        if (d < l.rope) angle = turn[d / 2];
    }
    if (tile < q_b.tiles()) {
        linear<LINEAR_WARPS, NB>(
            q_b, tile, 0, 1, query_latents, l.q_rank, count,
            [&](int t, int r, int n, const float* values) {
                const int i = t * TILE + r, head = i / (l.nope + l.rope), d = i % (l.nope + l.rope);
                if (head >= l.heads) return;
                if (d < l.nope) {
                    without_rope[(static_cast<size_t>(n) * l.heads + head) * l.nope + d] =
                        to_half(values[r]);
                    return;
                }
                half* query = queries + (static_cast<size_t>(n) * l.heads + head) *
                                            (l.kv_rank + l.rope);
                query[l.kv_rank + d - l.nope] = to_half(turned(values, r, angle));
            }
        );
    } else {
        linear<LINEAR_WARPS, NB>(
            wq_b, tile - q_b.tiles(), 0, 1, query_latents, l.q_rank, count,
            [&](int t, int r, int n, const float* values) {
                const int i = t * TILE + r, d = i % l.index_dim;
                if (i >= l.index_heads * l.index_dim) return;
                index_queries[static_cast<size_t>(n) * l.index_heads * l.index_dim + i] =
                    to_half(d < l.rope ? turned(values, r, angle) : values[r]);
            }
        );
    }
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) project_queries_8(
    const Row* rows, const __grid_constant__ Matrix q_b, const __grid_constant__ Matrix wq_b,
    const __grid_constant__ QueryLayout l, const half* query_latents, const float2* angles,
    half* without_rope, half* queries, half* index_queries, int count
) {
    project<1>(rows, q_b, wq_b, l, query_latents, angles, without_rope, queries, index_queries, count);
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) project_queries_16(
    const Row* rows, const __grid_constant__ Matrix q_b, const __grid_constant__ Matrix wq_b,
    const __grid_constant__ QueryLayout l, const half* query_latents, const float2* angles,
    half* without_rope, half* queries, half* index_queries, int count
) {
    project<2>(rows, q_b, wq_b, l, query_latents, angles, without_rope, queries, index_queries, count);
}

// Warps that share a tile: a head's dimensions without rope are at most two units.
constexpr int ABSORB_WARPS = 2;

// queries = W_UK^T q for each head. w_uk holds [kv_rank, nope] of one head behind the other, each
// padded to whole tiles. grid: (tiles of a head / 4, heads).
template <int NB>
__device__ __forceinline__ void absorb(
    const Matrix& w_uk, const QueryLayout& l, const half* without_rope, half* queries,
    const Ahead& ahead, int count
) {
    release_consumer();
    prefetch(ahead);
    const int head = blockIdx.y;
    Matrix w = w_uk;
    w.rows = w_uk.rows / l.heads;
    w.codes += static_cast<size_t>(head) * w.tiles() * w.units() * SLOTS<F16> * SLOT_CODES;
    linear<ABSORB_WARPS, NB>(
        w, blockIdx.x * (LINEAR_WARPS / ABSORB_WARPS), 0, 1, without_rope + head * l.nope,
        l.heads * l.nope, count,
        [&](int t, int r, int n, const float* values) {
            const int i = t * TILE + r;
            if (i < l.kv_rank) {
                queries[(static_cast<size_t>(n) * l.heads + head) * (l.kv_rank + l.rope) + i] =
                    to_half(values[r]);
            }
        }
    );
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) absorb_queries_8(
    const __grid_constant__ Matrix w_uk, const __grid_constant__ QueryLayout l,
    const half* without_rope, half* queries, const __grid_constant__ Ahead ahead, int count
) {
    absorb<1>(w_uk, l, without_rope, queries, ahead, count);
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) absorb_queries_16(
    const __grid_constant__ Matrix w_uk, const __grid_constant__ QueryLayout l,
    const half* without_rope, half* queries, const __grid_constant__ Ahead ahead, int count
) {
    absorb<2>(w_uk, l, without_rope, queries, ahead, count);
}
