// Stage `attend`: absorbed MLA over the selected positions; merge_splits puts the parts together.
//
// A block takes SPLIT positions of a row's list, at boundaries that the list alone fixes, and 8
// heads. Positions are the 16-row operand of q k, latent dimensions that of the sum over values.
#include <climits>

#include "tile.cuh"

constexpr int SPLIT = 64;
constexpr int WARPS = 8;
// Each warp copies one of them.
constexpr int HEADS = WARPS;

struct AttendLayout {
    int heads;
    int kv_rank;
    int rope;
    // Positions of a sequence in the cache.
    int context;
    int top_k;
    // Splits that `parts` has room for.
    int splits;
    float scale;
};

// Positions that a row attends to.
__device__ __forceinline__ int selected_count(const Row& row, int top_k) {
    return min(row.visible(), top_k);
}

// The first position of the row's sequence that the step itself writes.
__device__ __forceinline__ int first_written(const Row* rows, int count, const Row& own) {
    int first = own.position;
    for (int i = 0; i < count; i++) {
        if (rows[i].sequence == own.sequence) first = min(first, rows[i].position);
    }
    return first;
}

// What earlier steps have cached is copied before the wait: where the list is all that the row sees,
// or comes from an earlier layer (`listed`). This kernel lets none behind it start before its own
// wait is over, so what was written before an earlier layer's `attend` is there.
//
// grid: (splits, rows, heads / 8). queries: [MAX_ROWS][heads][kv_rank + rope]; selected:
// [MAX_ROWS][top_k]; parts: [MAX_ROWS][splits][heads][kv_rank] sums; bounds: [MAX_ROWS][splits]
// [heads] of (maximum, sum of the exponentials).
// Shared: keys [SPLIT][pitch], queries [8][pitch], pitch = kv_rank + rope + 8.
extern "C" __global__ void __launch_bounds__(WARPS * WARP) attend(
    const Row* rows, const __grid_constant__ AttendLayout l, const half* queries, const half* cache,
    const int* selected, int listed, float* parts, float2* bounds
) {
    uint8_t* shared = dynamic_shared<uint8_t>();
    __shared__ float scores[2][HEADS][SPLIT];
    __shared__ __align__(16) half probabilities[HEADS][SPLIT + 8];
    const Row row = rows[blockIdx.y];
    const int count = selected_count(row, l.top_k);
    const int begin = blockIdx.x * SPLIT, here = min(SPLIT, count - begin);
    if (here <= 0) return;
    const int width = l.kv_rank + l.rope, pitch = width + 8, pieces = width / 8;
    half* keys = reinterpret_cast<half*>(shared);
    half* query = keys + SPLIT * pitch;
    const int first_head = blockIdx.z * HEADS, heads = min(HEADS, l.heads - first_head);
    const bool dense = row.visible() <= l.top_k;
    const half* sequence = cache + static_cast<size_t>(row.sequence) * l.context * width;
    const int* list = selected + static_cast<size_t>(blockIdx.y) * l.top_k;
    const half* of_row = queries + (static_cast<size_t>(blockIdx.y) * l.heads + first_head) * width;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, q = lane % 4;
    // A warp copies a position at a time.
    int position[SPLIT / WARPS];
    const auto locate = [&] {
#pragma unroll
        for (int i = 0; i < SPLIT / WARPS; i++) {
            const int t = min(warp + i * WARPS, here - 1);
            // Past the L1 cache, which may still have an earlier list.
            position[i] = dense ? row.first + begin + t : __ldcg(&list[begin + t]);
        }
    };
    const auto copy_keys = [&](int from, int end) {
#pragma unroll
        for (int i = 0; i < SPLIT / WARPS; i++) {
            const int t = warp + i * WARPS;
            if (t >= here || position[i] < from || position[i] >= end) continue;
            const half* key = sequence + static_cast<size_t>(position[i]) * width;
            for (int piece = lane; piece < pieces; piece += WARP) {
                copy_async_16(shared_address(keys + t * pitch + piece * 8), key + piece * 8);
            }
        }
    };
    const bool early = dense || listed;
    int written = 0;
    if (early) {
        locate();
        written = first_written(rows, gridDim.y, row);
        copy_keys(0, written);
    }
    for (int t = here + warp; t < SPLIT; t += WARPS) {
        for (int piece = lane; piece < pieces; piece += WARP) {
            *reinterpret_cast<uint4*>(keys + t * pitch + piece * 8) = make_uint4(0, 0, 0, 0);
        }
    }
    wait_for_producer();
    release_consumer();
    if (!early) locate();
    copy_keys(written, INT_MAX);
    for (int piece = lane; piece < pieces; piece += WARP) {
        half* to = query + warp * pitch + piece * 8;
        if (warp < heads) {
            copy_async_16(shared_address(to), of_row + warp * width + piece * 8);
        } else {
            *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
        }
    }
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();

    {
        // 4 tiles of positions, the dimensions in two halves.
        const int tile = warp % 4, half = warp / 4;
        const int steps = width / 16, from = half == 0 ? 0 : steps / 2;
        const int to = half == 0 ? steps / 2 : steps;
        const uint32_t key_at = shared_address(
            keys + (tile * 16 + lane % 8 + lane / 8 % 2 * 8) * pitch + lane / 16 * 8);
        const uint32_t query_at = shared_address(query + lane % 8 * pitch + lane / 8 % 2 * 8);
        float acc[4] = {};
        for (int step = from; step < to; step++) {
            uint32_t a0, a1, a2, a3, b0, b1;
            load_matrices(key_at + step * 32, a0, a1, a2, a3);
            load_two(query_at + step * 32, b0, b1);
            mma(acc, a0, a1, a2, a3, b0, b1);
        }
        scores[half][2 * q][tile * 16 + g] = acc[0];
        scores[half][2 * q + 1][tile * 16 + g] = acc[1];
        scores[half][2 * q][tile * 16 + g + 8] = acc[2];
        scores[half][2 * q + 1][tile * 16 + g + 8] = acc[3];
    }
    __syncthreads();
    {
        // One warp a head.
        float score[SPLIT / WARP], maximum = -INFINITY, sum = 0;
#pragma unroll
        for (int i = 0; i < SPLIT / WARP; i++) {
            const int t = lane + i * WARP;
            score[i] = t < here ? (scores[0][warp][t] + scores[1][warp][t]) * l.scale : -INFINITY;
            maximum = fmaxf(maximum, score[i]);
        }
        maximum = warp_max(maximum);
#pragma unroll
        for (int i = 0; i < SPLIT / WARP; i++) {
            // The sum is over the rounded values, which the values are weighted with.
            const half p = to_half(__expf(score[i] - maximum));
            probabilities[warp][lane + i * WARP] = p;
            sum += __half2float(p);
        }
        sum = warp_sum(sum);
        if (lane == 0 && warp < heads) {
            const size_t at = (static_cast<size_t>(blockIdx.y) * l.splits + blockIdx.x) * l.heads;
            bounds[at + first_head + warp] = make_float2(maximum, sum);
        }
    }
    __syncthreads();
    float* out = parts + ((static_cast<size_t>(blockIdx.y) * l.splits + blockIdx.x) * l.heads +
                          first_head) * l.kv_rank;
    const uint32_t p_at = shared_address(&probabilities[lane % 8][lane / 8 % 2 * 8]);
    for (int tile = warp; tile < l.kv_rank / 16; tile += WARPS) {
        const uint32_t value_at = shared_address(
            keys + (lane % 8 + lane / 16 * 8) * pitch + tile * 16 + lane / 8 % 2 * 8);
        float acc[4] = {};
#pragma unroll
        for (int step = 0; step < SPLIT / 16; step++) {
            uint32_t a0, a1, a2, a3, b0, b1;
            load_transposed(value_at + step * 16 * pitch * 2, a0, a1, a2, a3);
            load_two(p_at + step * 32, b0, b1);
            mma(acc, a0, a1, a2, a3, b0, b1);
        }
        const int d = tile * 16 + g;
        if (2 * q < heads) {
            out[2 * q * l.kv_rank + d] = acc[0];
            out[2 * q * l.kv_rank + d + 8] = acc[2];
        }
        if (2 * q + 1 < heads) {
            out[(2 * q + 1) * l.kv_rank + d] = acc[1];
            out[(2 * q + 1) * l.kv_rank + d + 8] = acc[3];
        }
    }
}

constexpr int MERGE_THREADS = 128;

// attended: [MAX_ROWS][heads][kv_rank]. grid: (heads, rows, kv_rank / MERGE_THREADS rounded up).
// A list has at most MERGE_THREADS splits.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS) merge_splits(
    const Row* rows, const __grid_constant__ AttendLayout l, const float* parts,
    const float2* bounds, half* attended
) {
    release_consumer();
    const int head = blockIdx.x, d = blockIdx.z * MERGE_THREADS + threadIdx.x;
    const int splits = (selected_count(rows[blockIdx.y], l.top_k) + SPLIT - 1) / SPLIT;
    const size_t first = static_cast<size_t>(blockIdx.y) * l.splits * l.heads + head;
    // Each thread has the bounds of one split; the shared weights are what its sum counts.
    __shared__ float weights[MERGE_THREADS];
    __shared__ float scratch[MERGE_THREADS / WARP];
    wait_for_producer();
    float2 bound = make_float2(-INFINITY, 0);
    if (threadIdx.x < splits) {
        bound = bounds[first + static_cast<size_t>(threadIdx.x) * l.heads];
    }
    float maximum = warp_max(bound.x);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = maximum;
    __syncthreads();
    for (int warp = 0; warp < MERGE_THREADS / WARP; warp++) maximum = fmaxf(maximum, scratch[warp]);
    weights[threadIdx.x] = threadIdx.x < splits ? __expf(bound.x - maximum) : 0;
    // Its own barriers make the weights visible.
    const float sum = block_sum(weights[threadIdx.x] * bound.y, scratch);
    if (d >= l.kv_rank) return;
    float value = 0;
#pragma unroll 16
    for (int split = 0; split < splits; split++) {
        const size_t at = first + static_cast<size_t>(split) * l.heads;
        value += weights[split] * parts[at * l.kv_rank + d];
    }
    attended[(static_cast<size_t>(blockIdx.y) * l.heads + head) * l.kv_rank + d] =
        to_half(value / sum);
}
