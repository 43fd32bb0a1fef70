// Stage `draft_attend`: an EAGLE-3 head's attention over all that its cache holds of a sequence.
//
// A cache entry holds a key and a value for each of the rank's key heads; latent attention, absorbed,
// is one key head whose value is the first part of its key. Chunks of a row's positions go to blocks
// in turn, and draft_merge puts the blocks' parts together: an order that the row's length fixes.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
// Query heads that a block takes, a warp each for the softmax.
constexpr int HEADS = WARPS;
constexpr int CHUNK = 128;
// Sums that a thread keeps: values of up to 512 dimensions.
constexpr int KEPT = HEADS * 512 / THREADS;

struct DraftLayout {
    // Of the rank; query heads share key heads in equal groups.
    int heads;
    int key_heads;
    int key_dim;
    int value_dim;
    // Where an entry's values begin, and its width.
    int value_at;
    int entry;
    // Positions of a sequence in the cache.
    int context;
    // Blocks that share a row's chunks.
    int splits;
    float scale;

    __device__ int splits_of(const Row& row) const {
        return min(splits, (row.visible() + CHUNK - 1) / CHUNK);
    }
};

// Where a row's projections lie among the results of project_latents.
struct KeyLayout {
    // Of a row; [splits][MAX_ROWS][width].
    int width;
    int splits;
    int key_at;
    int value_at;
};

// One block a row, for grouped-query attention: rope on pairs (j, j + dim / 2), the queries, and the
// row's entry of the cache. angles: [context][dim / 2] of (cos, sin); queries:
// [MAX_ROWS][heads][key_dim].
extern "C" __global__ void __launch_bounds__(THREADS) draft_keys(
    const Row* rows, const __grid_constant__ DraftLayout l, const __grid_constant__ KeyLayout at,
    const float* projected, const float2* angles, half* queries, half* cache
) {
    release_consumer();
    const Row row = rows[blockIdx.x];
    const int half_dim = l.key_dim / 2;
    const float2* turn = angles + static_cast<size_t>(row.position) * half_dim;
    half* entry =
        cache + (static_cast<size_t>(row.sequence) * l.context + row.position) * l.entry;
    half* query = queries + static_cast<size_t>(blockIdx.x) * l.heads * l.key_dim;
    const float* own = projected + static_cast<size_t>(blockIdx.x) * at.width;
    const auto value = [&](int i) {
        return sum_splits(own + i, static_cast<size_t>(MAX_ROWS) * at.width, at.splits);
    };
    wait_for_producer();
    const int pairs = (l.heads + l.key_heads) * half_dim;
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
        const int head = i / half_dim, j = i % half_dim;
        const bool is_query = head < l.heads;
        const int first = is_query ? head * l.key_dim : (head - l.heads) * l.key_dim;
        half* to = (is_query ? query : entry) + first;
        const int from = (is_query ? 0 : at.key_at) + first;
        const float low = value(from + j), high = value(from + j + half_dim);
        to[j] = to_half(low * turn[j].x - high * turn[j].y);
        to[j + half_dim] = to_half(high * turn[j].x + low * turn[j].y);
    }
    for (int i = threadIdx.x; i < l.key_heads * l.value_dim; i += THREADS) {
        entry[l.value_at + i] = to_half(value(at.value_at + i));
    }
}

// Of 8 halves with 8 floats.
__device__ __forceinline__ float dot_8(const uint4& halves, const float* x) {
    const half2* pairs = reinterpret_cast<const half2*>(&halves);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = __half22float2(pairs[i]);
        sum += pair.x * x[2 * i];
        sum += pair.y * x[2 * i + 1];
    }
    return sum;
}

// grid: (splits, rows, key heads * groups of HEADS of their query heads). parts:
// [MAX_ROWS][splits][heads][value_dim] sums; bounds: [MAX_ROWS][splits][heads] of (maximum, sum of
// the exponentials). Shared: queries [HEADS][key_dim] as floats.
extern "C" __global__ void __launch_bounds__(THREADS) draft_attend(
    const Row* rows, const __grid_constant__ DraftLayout l, const half* queries, const half* cache,
    float* parts, float2* bounds
) {
    release_consumer();
    __shared__ float scores[HEADS][CHUNK];
    __shared__ float factors[HEADS];
    float* query = dynamic_shared<float>();
    const Row row = rows[blockIdx.y];
    if (blockIdx.x >= l.splits_of(row)) return;
    const int group = l.heads / l.key_heads, blocks = (group + HEADS - 1) / HEADS;
    const int key_head = blockIdx.z / blocks, in_group = blockIdx.z % blocks * HEADS;
    const int first_head = key_head * group + in_group, heads = min(HEADS, group - in_group);
    const half* keys = cache + static_cast<size_t>(row.sequence) * l.context * l.entry +
                       static_cast<size_t>(key_head) * l.key_dim;
    const half* values = cache + static_cast<size_t>(row.sequence) * l.context * l.entry +
                         l.value_at + static_cast<size_t>(key_head) * l.value_dim;
    const half* of_row = queries + (static_cast<size_t>(blockIdx.y) * l.heads + first_head) *
                                       l.key_dim;
    wait_for_producer();
    for (int i = threadIdx.x; i < HEADS * l.key_dim; i += THREADS) {
        query[i] = i < heads * l.key_dim ? __half2float(of_row[i]) : 0;
    }
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float maximum = -INFINITY, sum = 0;
    float acc[KEPT] = {};
    for (int chunk = blockIdx.x; chunk * CHUNK < row.visible(); chunk += gridDim.x) {
        const int first = row.first + chunk * CHUNK;
        const int here = min(CHUNK, row.visible() - chunk * CHUNK);
        __syncthreads();
        // Half of the threads have a position's first heads, the others its last ones.
        const int t = threadIdx.x % CHUNK, from_head = threadIdx.x / CHUNK * (HEADS / 2);
        float score[HEADS / 2] = {};
        if (t < here) {
            const half* key = keys + static_cast<size_t>(first + t) * l.entry;
            for (int d = 0; d < l.key_dim; d += 8) {
                const uint4 part = *reinterpret_cast<const uint4*>(key + d);
#pragma unroll
                for (int h = 0; h < HEADS / 2; h++) {
                    score[h] += dot_8(part, query + (from_head + h) * l.key_dim + d);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS / 2; h++) {
            scores[from_head + h][t] = t < here ? score[h] * l.scale : -INFINITY;
        }
        __syncthreads();
        {
            // One warp a head; the sums so far are brought to the new maximum.
            float own[CHUNK / WARP], most = maximum, exponentials = 0;
#pragma unroll
            for (int i = 0; i < CHUNK / WARP; i++) {
                own[i] = scores[warp][lane + i * WARP];
                most = fmaxf(most, own[i]);
            }
            most = warp_max(most);
#pragma unroll
            for (int i = 0; i < CHUNK / WARP; i++) {
                own[i] = __expf(own[i] - most);
                exponentials += own[i];
                scores[warp][lane + i * WARP] = own[i];
            }
            const float factor = __expf(maximum - most);
            sum = sum * factor + warp_sum(exponentials);
            maximum = most;
            if (lane == 0) factors[warp] = factor;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            const int i = threadIdx.x + k * THREADS, head = i / l.value_dim;
            if (head >= heads) break;
            const half* value = values + static_cast<size_t>(first) * l.entry + i % l.value_dim;
            float add = 0;
#pragma unroll 8
            for (int j = 0; j < here; j++) {
                add += scores[head][j] * __half2float(value[static_cast<size_t>(j) * l.entry]);
            }
            acc[k] = acc[k] * factors[head] + add;
        }
    }
    const size_t line = (static_cast<size_t>(blockIdx.y) * l.splits + blockIdx.x) * l.heads;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int i = threadIdx.x + k * THREADS, head = i / l.value_dim;
        if (head >= heads) break;
        parts[(line + first_head) * l.value_dim + i] = acc[k];
    }
    if (lane == 0 && warp < heads) bounds[line + first_head + warp] = make_float2(maximum, sum);
}

// grid: (heads, rows). attended: [MAX_ROWS][heads][value_dim].
extern "C" __global__ void __launch_bounds__(THREADS) draft_merge(
    const Row* rows, const __grid_constant__ DraftLayout l, const float* parts,
    const float2* bounds, half* attended
) {
    release_consumer();
    const int head = blockIdx.x, splits = l.splits_of(rows[blockIdx.y]);
    const size_t first = static_cast<size_t>(blockIdx.y) * l.splits * l.heads + head;
    wait_for_producer();
    float maximum = -INFINITY, sum = 0;
    for (int split = 0; split < splits; split++) {
        maximum = fmaxf(maximum, bounds[first + static_cast<size_t>(split) * l.heads].x);
    }
    for (int split = 0; split < splits; split++) {
        const float2 bound = bounds[first + static_cast<size_t>(split) * l.heads];
        sum += __expf(bound.x - maximum) * bound.y;
    }
    for (int d = threadIdx.x; d < l.value_dim; d += THREADS) {
        float value = 0;
        for (int split = 0; split < splits; split++) {
            const size_t at = first + static_cast<size_t>(split) * l.heads;
            value += __expf(bounds[at].x - maximum) * parts[at * l.value_dim + d];
        }
        attended[(static_cast<size_t>(blockIdx.y) * l.heads + head) * l.value_dim + d] =
            to_half(value / sum);
    }
}
