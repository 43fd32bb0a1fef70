// Stage `score_keys`: score[t] = sum over heads of w_h * ReLU(q_h . k[t]) (facts/glm5.md 3.2).
//
// Keys are the 16-row operand of the mma, heads its columns; a row with index_topk positions or
// fewer attends to all of them and has no scores.
#include "formats.cuh"

constexpr int WARPS = 4;
constexpr int POSITIONS = 2 * WARPS * TILE;
// Blocks of 32 columns of the longest key (cuda/rank.rs refuses longer ones).
constexpr int MOST_BLOCKS = 4;

// grid: (positions / POSITIONS, rows). index_queries: [rows][heads][dim], keys: [context][dim] of
// each sequence, scores: [rows][pitch]. heads is a multiple of 8, dim of 32.
extern "C" __global__ void __launch_bounds__(WARPS * WARP) score_keys(
    const Row* rows, const half* index_queries, const float* index_weights, const half* keys,
    float* scores, int pitch, int heads, int dim, int context, int top_k
) {
    release_consumer();
    const Row row = rows[blockIdx.y];
    const int visible = row.visible();
    const int begin = blockIdx.x * POSITIONS;
    // Also where there is nothing to do: who waits for this kernel waits for those before it too.
    wait_for_producer();
    if (visible <= top_k || begin >= visible) return;
    const int lane = threadIdx.x % WARP, g = lane / 4, q = lane % 4;
    const half* query = index_queries + static_cast<size_t>(blockIdx.y) * heads * dim;
    const float* weight = index_weights + blockIdx.y * heads;
    const half* sequence =
        keys + (static_cast<size_t>(row.sequence) * context + row.first) * dim;
#pragma unroll 1
    for (int tile = 0; tile < 2; tile++) {
        const int first = begin + (threadIdx.x / WARP * 2 + tile) * TILE;
        // Positions that are not there repeat the last one; their scores are not stored.
        const int upper = min(first + g, visible - 1), lower = min(first + g + 8, visible - 1);
        const half* upper_key = sequence + static_cast<size_t>(upper) * dim + 8 * q;
        const half* lower_key = sequence + static_cast<size_t>(lower) * dim + 8 * q;
        // The keys are read once, all at the same time.
        uint4 a[MOST_BLOCKS], c[MOST_BLOCKS];
#pragma unroll
        for (int d = 0; d < MOST_BLOCKS; d++) {
            if (d * BLOCK >= dim) break;
            a[d] = *reinterpret_cast<const uint4*>(upper_key + d * BLOCK);
            c[d] = *reinterpret_cast<const uint4*>(lower_key + d * BLOCK);
        }
        float upper_score = 0, lower_score = 0;
        for (int head = 0; head < heads; head += 8) {
            float acc[4] = {}, other[4] = {};
            const half* of_head = query + static_cast<size_t>(head + g) * dim + 8 * q;
#pragma unroll
            for (int d = 0; d < MOST_BLOCKS; d++) {
                if (d * BLOCK >= dim) break;
                const uint4 b = *reinterpret_cast<const uint4*>(of_head + d * BLOCK);
                mma(acc, a[d].x, c[d].x, a[d].y, c[d].y, b.x, b.y);
                mma(other, a[d].z, c[d].z, a[d].w, c[d].w, b.z, b.w);
            }
            const float even = weight[head + 2 * q], odd = weight[head + 2 * q + 1];
            upper_score += even * fmaxf(acc[0] + other[0], 0) + odd * fmaxf(acc[1] + other[1], 0);
            lower_score += even * fmaxf(acc[2] + other[2], 0) + odd * fmaxf(acc[3] + other[3], 0);
        }
        // The 4 lanes of a position hold its heads.
        for (int step = 1; step < 4; step *= 2) {
            upper_score += __shfl_xor_sync(~0u, upper_score, step);
            lower_score += __shfl_xor_sync(~0u, lower_score, step);
        }
        float* out = scores + static_cast<size_t>(blockIdx.y) * pitch + first;
        if (q == 0 && first + g < visible) out[g] = upper_score;
        if (q == 0 && first + g + 8 < visible) out[g + 8] = lower_score;
    }
}
