// Stage `select_keys`: the top_k positions of each row, rising. Ties: the lower position wins.
//
// A radix search finds the k-th largest score, 8 bits at a time; then each thread counts and writes
// a run of neighbouring positions.
#include "common.cuh"

constexpr int THREADS = 1024;
constexpr int BINS = 256;

// Unsigned numbers in the order of the scores.
__device__ __forceinline__ uint32_t ordered(float score) {
    const uint32_t bits = __float_as_uint(score);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// Sum of `value` over the threads before this one. `scratch` holds a number for each warp.
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
    if (warp == 0) scratch[lane] = scan(scratch[lane]);
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

// One block a row. scores: [rows][pitch] counted from the row's first position; selected:
// [rows][top_k], absolute positions. A row with top_k positions or fewer has no list.
extern "C" __global__ void __launch_bounds__(THREADS) select_keys(
    const Row* rows, const float* scores, int pitch, int* selected, int top_k
) {
    release_consumer();
    const Row row = rows[blockIdx.x];
    const int visible = row.visible();
    if (visible <= top_k) return;
    __shared__ int bins[BINS];
    __shared__ int scratch[THREADS / WARP];
    __shared__ uint32_t found;
    __shared__ int left;
    if (threadIdx.x == 0) found = 0, left = top_k;
    wait_for_producer();
    const float* score = scores + static_cast<size_t>(blockIdx.x) * pitch;
    const int rounds = (visible + THREADS - 1) / THREADS;
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < BINS) bins[threadIdx.x] = 0;
        __syncthreads();
        const uint32_t above = shift == 24 ? 0 : ~0u << (shift + 8), so_far = found;
#pragma unroll 4
        for (int k = 0; k < rounds; k++) {
            const int i = threadIdx.x + k * THREADS;
            const uint32_t bits = i < visible ? ordered(score[i]) : 0;
            count(bins, i < visible && (bits & above) == (so_far & above), bits >> shift & 255);
        }
        __syncthreads();
        // Thread i has the bin that is i-th from the top; the one that reaches `left` is taken.
        const int of_bin = threadIdx.x < BINS ? bins[BINS - 1 - threadIdx.x] : 0;
        const int before = prefix(of_bin, scratch), wanted = left;
        __syncthreads();
        if (threadIdx.x < BINS && before < wanted && before + of_bin >= wanted) {
            found = so_far | static_cast<uint32_t>(BINS - 1 - threadIdx.x) << shift;
            left = wanted - before;
        }
        __syncthreads();
    }
    // A thread's run of positions: those above the k-th score are taken, and of those equal to it
    // the first `left` of the row.
    const uint32_t threshold = found;
    const int each = rounds, begin = threadIdx.x * each, end = min(begin + each, visible);
    int larger = 0, equal = 0;
#pragma unroll 4
    for (int i = begin; i < end; i++) {
        const uint32_t bits = ordered(score[i]);
        larger += bits > threshold, equal += bits == threshold;
    }
    int rank = prefix(equal, scratch);
    const int taken_equal = max(0, min(equal, left - rank));
    int* out = selected + static_cast<size_t>(blockIdx.x) * top_k +
               prefix(larger + taken_equal, scratch);
    for (int i = begin; i < end; i++) {
        const uint32_t bits = ordered(score[i]);
        const bool is_equal = bits == threshold;
        if (bits > threshold || (is_equal && rank < left)) *out++ = row.first + i;
        rank += is_equal;
    }
}
