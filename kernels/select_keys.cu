// Stage `select_keys`: the top_k positions of each row, rising. Ties: the lower position wins.
//
// A radix search finds the bits of the k-th largest score, 8 at a time; then one ordered pass
// writes the positions above it and the first of those equal to it.
#include "common.cuh"

constexpr int THREADS = 1024;
constexpr int BINS = 256;

// Unsigned numbers in the order of the scores.
__device__ __forceinline__ uint32_t ordered(float score) {
    const uint32_t bits = __float_as_uint(score);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// Sum of `value` over the threads before this one; `total` gets that of all.
__device__ __forceinline__ int prefix(int value, int* scratch, int& total) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int sum = value;
    for (int step = 1; step < WARP; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();
    if (lane == WARP - 1) scratch[warp] = sum;
    __syncthreads();
    int before = 0;
    total = 0;
    for (int i = 0; i < THREADS / WARP; i++) {
        if (i < warp) before += scratch[i];
        total += scratch[i];
    }
    return before + sum - value;
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
    wait_for_producer();
    __shared__ int bins[BINS];
    __shared__ int scratch[THREADS / WARP];
    __shared__ uint32_t found;
    __shared__ int left;
    const float* score = scores + static_cast<size_t>(blockIdx.x) * pitch;
    if (threadIdx.x == 0) found = 0, left = top_k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
        __syncthreads();
        const uint32_t above = shift == 24 ? 0 : ~0u << (shift + 8);
        for (int i = threadIdx.x; i < visible; i += THREADS) {
            const uint32_t bits = ordered(score[i]);
            if ((bits & above) == (found & above)) atomicAdd(&bins[bits >> shift & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int bin = BINS - 1;
            for (; bin > 0 && bins[bin] < left; bin--) left -= bins[bin];
            found |= static_cast<uint32_t>(bin) << shift;
        }
        __syncthreads();
    }
    // `left` of the positions equal to the k-th score are taken.
    int* out = selected + static_cast<size_t>(blockIdx.x) * top_k;
    int taken = 0, equal_taken = 0;
    for (int begin = 0; begin < visible; begin += THREADS) {
        const int i = begin + threadIdx.x;
        const uint32_t bits = i < visible ? ordered(score[i]) : 0;
        const bool equal = i < visible && bits == found;
        int equals, count;
        const int rank = equal_taken + prefix(equal, scratch, equals);
        const bool take = i < visible && (bits > found || (equal && rank < left));
        const int place = taken + prefix(take, scratch, count);
        if (take) out[place] = row.first + i;
        equal_taken += equals;
        taken += count;
    }
}
