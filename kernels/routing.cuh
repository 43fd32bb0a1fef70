// Which experts a row uses, and the list of those that any row uses.
#pragma once

#include "common.cuh"

constexpr int MAX_EXPERTS = 256;
constexpr int MAX_USED = 16;
// Experts of a lane while a warp chooses a row's.
constexpr int PER_LANE = MAX_EXPERTS / WARP;
// Keeps the renormalisation finite where all chosen probabilities are zero.
constexpr float ROUTE_SUM_FLOOR = 1e-20f;

// A row's use of an expert.
struct Use {
    int expert;
    float weight;
};

struct RouteLayout {
    int experts;
    int used;
    int splits;
    int renormalise;
    float scaling;
};

// The experts of all rows, as `expert_gate_up` leaves them: `list` in rising order, `place[row][expert]` where
// the row's own list has it, -1 where it does not.
struct __align__(16) Routing {
    int count;
    int list[MAX_EXPERTS];
    signed char place[MAX_ROWS][MAX_EXPERTS];
    Use uses[MAX_ROWS][MAX_USED];
    unsigned used[MAX_EXPERTS / WARP];
};

// What choosing the experts of a step takes besides the logits.
struct Choice {
    float probability[MAX_ROWS][MAX_EXPERTS];
    // Choices as unsigned numbers of the same order; 0 is below all of them.
    unsigned key[MAX_ROWS][MAX_EXPERTS];
    // A bit for each of a row's experts.
    unsigned chosen[MAX_ROWS][MAX_EXPERTS / WARP];
};

// All threads: p = sigmoid(logit) and the choice p + bias of every expert. A barrier must follow.
__device__ __forceinline__ void load_choices(
    const float* logits, const float* bias, const RouteLayout& l, int rows, Choice& choice
) {
    const size_t split_pitch = static_cast<size_t>(MAX_ROWS) * l.experts;
    for (int expert = threadIdx.x; expert < MAX_EXPERTS; expert += blockDim.x) {
        const bool is_there = expert < l.experts;
        const float own_bias = is_there ? bias[expert] : 0;
        // The loads of some rows are under way before the first is used.
        constexpr int AT_ONCE = 4;
#pragma unroll 1
        for (int first = 0; first < rows; first += AT_ONCE) {
            float z[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int row = min(first + i, rows - 1);
                const float* logit = logits + static_cast<size_t>(row) * l.experts + expert;
                z[i] = is_there ? sum_splits(logit, split_pitch, l.splits) : 0;
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int row = first + i;
                if (row >= rows) break;
                const float p = __fdividef(1.0f, 1.0f + __expf(-z[i]));
                const unsigned bits = __float_as_uint(p + own_bias);
                const unsigned ordered = bits & 0x80000000 ? ~bits : bits | 0x80000000;
                choice.probability[row][expert] = p;
                choice.key[row][expert] = is_there ? ordered : 0;
                if (expert % WARP == 0) choice.chosen[row][expert / WARP] = 0;
            }
        }
    }
}

// One warp chooses a row's experts and weights them by p; in rising order of the expert. Ties: the
// lower expert. Each lane has PER_LANE neighbouring experts.
__device__ __forceinline__ void choose_experts(
    Choice& choice, int row, const RouteLayout& l, Use* uses
) {
    const int lane = threadIdx.x % WARP, first = lane * PER_LANE;
    unsigned key[PER_LANE];
    int index[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) key[i] = choice.key[row][first + i], index[i] = first + i;
    // Largest first; neighbours change places only if the right one is larger, so that equals stay
    // in order.
#pragma unroll
    for (int phase = 0; phase < PER_LANE; phase++) {
#pragma unroll
        for (int i = phase % 2; i + 1 < PER_LANE; i += 2) {
            const bool swap = key[i + 1] > key[i];
            const unsigned larger = max(key[i], key[i + 1]);
            const int of_larger = swap ? index[i + 1] : index[i];
            index[i + 1] = swap ? index[i] : index[i + 1];
            key[i + 1] = min(key[i], key[i + 1]);
            key[i] = larger, index[i] = of_larger;
        }
    }
    int mine = -1;
#pragma unroll 1
    for (int round = 0; round < l.used; round++) {
        const unsigned best = __reduce_max_sync(~0u, key[0]);
        // The lowest lane has the lowest expert.
        const int winner = __ffs(__ballot_sync(~0u, key[0] == best)) - 1;
        const int expert = __shfl_sync(~0u, index[0], winner);
        if (lane == round) mine = expert;
        if (lane == winner) {
#pragma unroll
            for (int i = 0; i + 1 < PER_LANE; i++) key[i] = key[i + 1], index[i] = index[i + 1];
            key[PER_LANE - 1] = 0;
        }
    }
    const float p = mine < 0 ? 0 : choice.probability[row][mine];
    const float sum = l.renormalise ? warp_sum(p) + ROUTE_SUM_FLOOR : 1;
    int place = 0;
#pragma unroll 1
    for (int i = 0; i < l.used; i++) place += __shfl_sync(~0u, mine, i) < mine;
    if (mine < 0) return;
    uses[place] = Use{mine, p / sum * l.scaling};
    atomicOr(&choice.chosen[row][mine / WARP], 1u << mine % WARP);
}

// All threads: the list and the places, from `uses` and the bits of each row.
__device__ __forceinline__ void list_experts(
    Routing& routing, const Choice& choice, int rows, const RouteLayout& l
) {
    constexpr int GROUPS = MAX_EXPERTS / WARP;
    for (int i = threadIdx.x; i < rows * MAX_EXPERTS / 4; i += blockDim.x) {
        reinterpret_cast<int*>(routing.place)[i] = -1;
    }
    if (threadIdx.x < GROUPS) {
        unsigned used = 0;
#pragma unroll 1
        for (int row = 0; row < rows; row++) used |= choice.chosen[row][threadIdx.x];
        routing.used[threadIdx.x] = used;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * MAX_USED; i += blockDim.x) {
        const int row = i / MAX_USED, place = i % MAX_USED;
        if (place < l.used) {
            routing.place[row][routing.uses[row][place].expert] = static_cast<signed char>(place);
        }
    }
    const int expert = threadIdx.x;
    if (expert < MAX_EXPERTS) {
        int before = 0, count = 0;
#pragma unroll 1
        for (int i = 0; i < GROUPS; i++) {
            if (i == expert / WARP) before = count;
            count += __popc(routing.used[i]);
        }
        const unsigned group = routing.used[expert / WARP], bit = 1u << expert % WARP;
        if (group & bit) routing.list[before + __popc(group & (bit - 1))] = expert;
        if (expert == 0) routing.count = count;
    }
}
