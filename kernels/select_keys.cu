// Stage `select_keys`: the top_k positions of each row, rising. Ties: the lower position wins.
//
// A cluster of blocks shares a row, each with a run of its positions. A radix search finds the k-th
// largest score, 8 bits at a time: each block counts its scores by their next 8 bits, and all blocks
// add up all counts. Then each block writes what it has of the list.
#include <cooperative_groups.h>

#include "common.cuh"

constexpr int THREADS = 512;
constexpr int BINS = 256;
constexpr int PASSES = 4;
// Blocks of a row (cuda/stages.rs).
constexpr int BLOCKS = 8;
// Scores that a thread keeps in registers; of a longer context it reads the others again.
constexpr int KEPT = 8;

// Unsigned numbers in the order of the scores.
__device__ __forceinline__ uint32_t ordered(float score) {
    const uint32_t bits = __float_as_uint(score);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// Sum of `value` over the threads before this one. `scratch` holds WARP numbers.
__device__ __forceinline__ int prefix(int value, int* scratch) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const auto scan = [lane](int sum) {
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) {
            const int other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        return sum;
    };
    const int sum = scan(value);
    __syncthreads();
    if (lane == WARP - 1) scratch[warp] = sum;
    __syncthreads();
    if (warp == 0) scratch[lane] = scan(lane < THREADS / WARP ? scratch[lane] : 0);
    __syncthreads();
    return (warp == 0 ? 0 : scratch[warp - 1]) + sum - value;
}

// Counts one in each of the threads' bins. Neighbouring scores often share a bin: one thread adds
// for all of its warp that do.
__device__ __forceinline__ void count(int* bins, bool counts, uint32_t bin) {
    const unsigned voters = __ballot_sync(~0u, counts);
    if (!counts) return;
    const unsigned same = __match_any_sync(voters, bin);
    if (threadIdx.x % WARP == __ffs(same) - 1) atomicAdd(&bins[bin], __popc(same));
}

// A row's counts that all of its blocks see.
struct Counts {
    // Two sets take turns: whoever clears one has seen all blocks count in the other, after they read
    // this one.
    int bins[2][BINS];
    // Of the block: scores above the k-th, and equal to it.
    int larger, equal;
};

// One cluster a row. scores: [rows][pitch] counted from the row's first position; selected:
// [rows][top_k], absolute positions. A row with top_k positions or fewer has no list.
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS) select_keys(
    const Row* rows, const float* scores, int pitch, int* selected, int top_k
) {
    release_consumer();
    const Row row = rows[blockIdx.y];
    const int visible = row.visible();
    if (visible <= top_k) {
        // Who waits for this kernel waits for those before it too.
        wait_for_producer();
        return;
    }
    __shared__ Counts counts;
    __shared__ int scratch[WARP];
    __shared__ uint32_t found;
    __shared__ int left;
    const auto cluster = cooperative_groups::this_cluster();
    const int block = blockIdx.x;
    for (int i = threadIdx.x; i < 2 * BINS; i += THREADS) counts.bins[i / BINS][i % BINS] = 0;
    if (threadIdx.x == 0) found = 0, left = top_k;
    __syncthreads();
    wait_for_producer();

    // The block's run, and the scores of it that this thread has: neighbours of its warp's.
    const float* score = scores + static_cast<size_t>(blockIdx.y) * pitch;
    const int each = (visible + BLOCKS - 1) / BLOCKS;
    const int begin = block * each, end = min(begin + each, visible);
    const int rounds = (end - begin + THREADS - 1) / THREADS;
    const auto read = [&](int k) {
        const int i = begin + threadIdx.x + k * THREADS;
        return i < end ? ordered(score[i]) : 0;
    };
    uint32_t kept[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) kept[k] = k < rounds ? read(k) : 0;
    const auto for_each = [&](auto visit) {
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            if (k < rounds) visit(k, kept[k]);
        }
        for (int k = KEPT; k < rounds; k++) visit(k, read(k));
    };
    const auto is_there = [&](int k) { return begin + threadIdx.x + k * THREADS < end; };

    for (int pass = 0; pass < PASSES; pass++) {
        const int shift = 24 - 8 * pass;
        const uint32_t above = pass == 0 ? 0 : ~0u << (shift + 8), so_far = found;
        int* bins = counts.bins[pass % 2];
        for_each([&](int k, uint32_t bits) {
            count(bins, is_there(k) && (bits & above) == (so_far & above), bits >> shift & 255);
        });
        cluster.sync();
        // Thread i has the bin that is i-th from the top; the one that reaches `left` is taken.
        int of_bin = 0;
        if (threadIdx.x < BINS) {
            const int bin = BINS - 1 - threadIdx.x;
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) of_bin += cluster.map_shared_rank(bins, b)[bin];
        }
        const int before = prefix(of_bin, scratch), wanted = left;
        __syncthreads();
        if (threadIdx.x < BINS) {
            // For the pass after the next; the last reader of it was the pass before.
            if (pass > 0) counts.bins[(pass + 1) % 2][threadIdx.x] = 0;
            if (before < wanted && before + of_bin >= wanted) {
                found = so_far | static_cast<uint32_t>(BINS - 1 - threadIdx.x) << shift;
                left = wanted - before;
            }
        }
        __syncthreads();
    }
    // Those above the k-th score are taken, and of those equal to it the first `left` of the row.
    const uint32_t threshold = found;
    int larger = 0, equal = 0;
    for_each([&](int k, uint32_t bits) {
        larger += is_there(k) && bits > threshold;
        equal += is_there(k) && bits == threshold;
    });
    larger = __reduce_add_sync(~0u, larger), equal = __reduce_add_sync(~0u, equal);
    if (threadIdx.x == 0) counts.larger = 0, counts.equal = 0;
    __syncthreads();
    if (threadIdx.x % WARP == 0) atomicAdd(&counts.larger, larger), atomicAdd(&counts.equal, equal);
    cluster.sync();
    // Of the blocks before this one.
    const int lane = threadIdx.x % WARP;
    const Counts* other = cluster.map_shared_rank(&counts, min(lane, BLOCKS - 1));
    const int larger_before = __reduce_add_sync(~0u, lane < block ? other->larger : 0);
    int rank = __reduce_add_sync(~0u, lane < block ? other->equal : 0);
    int* out = selected + static_cast<size_t>(blockIdx.y) * top_k + larger_before + min(rank, left);
    for_each([&](int k, uint32_t bits) {
        const bool is_equal = is_there(k) && bits == threshold;
        const bool is_larger = is_there(k) && bits > threshold;
        // Both numbers in one sum: a round has fewer than 2^15 of either.
        const int both = is_larger << 16 | static_cast<int>(is_equal);
        const int before = prefix(both, scratch);
        const int equal_before = rank + (before & 0xFFFF);
        const bool is_taken = is_larger || (is_equal && equal_before < left);
        const int place = (before >> 16) + min(equal_before, left) - min(rank, left);
        if (is_taken) out[place] = row.first + begin + threadIdx.x + k * THREADS;
        __syncthreads();
        const int all = scratch[THREADS / WARP - 1];
        out += (all >> 16) + min(rank + (all & 0xFFFF), left) - min(rank, left);
        rank += all & 0xFFFF;
    });
    // No block ends while another may read its counts.
    cluster.sync();
}
