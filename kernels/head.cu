// Stage `head`: lm_head, and the arg-max over the ranks' parts of the vocabulary.
#include "best.cuh"
#include "exchange.cuh"
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

// What the host reads of a row: all ranks say the same, or what went between them was damaged.
struct Result {
    Best best;
    // Of the normed row.
    unsigned hash;
    int padding;
};

// A rank's part of the vocabulary. Ids from `limit` on are padding; `first_id` is that of the first.
struct Part {
    const float* logits;
    int vocabulary;
    int limit;
    int first_id;
    int hidden;
    const half* normed;
    // The rank's own best ids, between the parts of the exchange.
    Best* own;
    Result* results;
};

// In the first warp.
__device__ __forceinline__ Best best_of_row(const Part& part, int row) {
    __shared__ Best of_warps[ARGMAX_THREADS / WARP];
    const float* logits = part.logits + static_cast<size_t>(row) * part.vocabulary;
    Best best = NONE;
    for (int i = threadIdx.x; i < part.limit; i += ARGMAX_THREADS) {
        const Best other{part.first_id + i, logits[i]};
        if (better(other, best)) best = other;
    }
    best = best_of_warp(best);
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = best;
    __syncthreads();
    return threadIdx.x < WARP ? best_of_warp(of_warps[threadIdx.x]) : NONE;
}

// Of the row's last hidden state: a sum that no order changes and that nearly every damage does.
__device__ __forceinline__ unsigned hash_of_row(const Part& part, int row) {
    __shared__ unsigned sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    const unsigned* words =
        reinterpret_cast<const unsigned*>(part.normed + static_cast<size_t>(row) * part.hidden);
    unsigned own = 0;
    for (int i = threadIdx.x; i < part.hidden / 2; i += ARGMAX_THREADS) {
        own += hash_word(words[i], i);
    }
    own = __reduce_add_sync(~0u, own);
    if (threadIdx.x % WARP == 0) atomicAdd(&sum, own);
    __syncthreads();
    return sum;
}

// One block a row. A mailbox: [2 slots][ranks][capacity] of Best, whose id is never EMPTY.
extern "C" __global__ void __launch_bounds__(ARGMAX_THREADS) argmax(
    const __grid_constant__ Exchange e, const __grid_constant__ Part part
) {
    if (!e.shared_device) release_consumer();
    Collective<false> c(e);
    wait_for_producer();
    const int row = blockIdx.x, lane = threadIdx.x;
    const auto place = [&](int box, int from) {
        const size_t line = (static_cast<size_t>(c.slot()) * e.ranks + from) * e.capacity + row;
        return e.boxes[box] + line * sizeof(Best);
    };
    if (e.phases & SEND) {
        const Best best = best_of_row(part, row);
        if (lane == 0) part.own[row] = best;
        if (lane < e.ranks && lane != e.rank) {
            const unsigned long long packet =
                static_cast<unsigned long long>(__float_as_uint(best.logit)) << 32 | best.id;
            store_system_64(place(lane, e.rank), packet);
        }
    }
    if ((e.phases & RECEIVE) == 0) return;
    const unsigned hash = e.ranks > 1 ? hash_of_row(part, row) + e.control->hash : 0;
    if (lane >= WARP) return;
    Best best = NONE;
    if (lane < e.ranks && lane != e.rank) {
        uint8_t* at = place(e.rank, lane);
        unsigned long long packet;
        do {
            packet = load_system_64(at);
        } while (static_cast<unsigned>(packet) == EMPTY && !c.give_up(lane, RECEIVE, row));
        best = Best{static_cast<int>(packet), __uint_as_float(packet >> 32)};
        *reinterpret_cast<unsigned long long*>(at) = ~0ull;
    }
    __syncwarp();
    if (lane == e.rank) best = part.own[row];
    best = best_of_warp(best);
    if (lane == 0) part.results[row] = Result{best, hash, 0};
}
