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

// The experts of all rows, as `route` leaves them: `list` in rising order, `place[row][expert]` where
// the row's own list has it, -1 where it does not.
struct __align__(16) Routing {
    int count;
    // Blocks of `route` that are done; 0 between steps.
    int arrived;
    int list[MAX_EXPERTS];
    signed char place[MAX_ROWS][MAX_EXPERTS];
    Use uses[MAX_ROWS][MAX_USED];
    unsigned used[MAX_EXPERTS / WARP];
};

// All threads: a row's probabilities, p = sigmoid(logit), and its choices, p + bias, as unsigned
// numbers of the same order; 0 is below all of them.
__device__ __forceinline__ void load_choices(
    const float* logits, size_t split_pitch, const float* bias, const RouteLayout& l,
    float* probabilities, unsigned* choices
) {
    for (int expert = threadIdx.x; expert < l.experts; expert += blockDim.x) {
        const float p = 1.0f / (1.0f + __expf(-sum_splits(logits + expert, split_pitch, l.splits)));
        const unsigned bits = __float_as_uint(p + bias[expert]);
        probabilities[expert] = p;
        choices[expert] = bits & 0x80000000 ? ~bits : bits | 0x80000000;
    }
}

// One warp chooses a row's experts and weights them by p, in rising order of the expert. Ties: the
// lower expert.
__device__ __forceinline__ void choose_experts(
    const float* probabilities, const unsigned* choices, const RouteLayout& l, Use* uses
) {
    const int lane = threadIdx.x % WARP, each = (l.experts + WARP - 1) / WARP;
    unsigned choice[PER_LANE];
    unsigned chosen = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int expert = lane * each + i;
        choice[i] = i < each && expert < l.experts ? choices[expert] : 0;
    }
    for (int round = 0; round < l.used; round++) {
        unsigned best = 0;
        int at = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            if (choice[i] > best) best = choice[i], at = i;
        }
        const unsigned best_of_all = __reduce_max_sync(~0u, best);
        // The lowest lane has the lowest expert.
        if (lane == __ffs(__ballot_sync(~0u, best == best_of_all)) - 1) {
            chosen |= 1u << at;
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                if (i == at) choice[i] = 0;
            }
        }
    }
    // The chosen of the lanes before come first.
    const int mine = __popc(chosen);
    int place = mine;
    for (int step = 1; step < WARP; step *= 2) {
        const int other = __shfl_up_sync(~0u, place, step);
        if (lane >= step) place += other;
    }
    place -= mine;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        if (chosen >> i & 1) uses[place++] = Use{lane * each + i, probabilities[lane * each + i]};
    }
    __syncwarp();
    float sum = 1;
    if (l.renormalise) {
        sum = ROUTE_SUM_FLOOR;
        for (int i = 0; i < l.used; i++) sum += uses[i].weight;
    }
    __syncwarp();
    if (lane < l.used) uses[lane].weight = uses[lane].weight / sum * l.scaling;
}

// All threads: the list and the places from `uses`, which the caller has filled.
__device__ __forceinline__ void list_experts(Routing& routing, int rows, const RouteLayout& l) {
    const int groups = (l.experts + WARP - 1) / WARP;
    __syncthreads();
    for (int i = threadIdx.x; i < groups; i += blockDim.x) routing.used[i] = 0;
    for (int expert = threadIdx.x; expert < l.experts; expert += blockDim.x) {
        for (int row = 0; row < rows; row++) routing.place[row][expert] = -1;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * l.used; i += blockDim.x) {
        const int row = i / l.used, place = i % l.used;
        const int expert = routing.uses[row][place].expert;
        routing.place[row][expert] = static_cast<signed char>(place);
        atomicOr(&routing.used[expert / WARP], 1u << expert % WARP);
    }
    __syncthreads();
    for (int expert = threadIdx.x; expert < l.experts; expert += blockDim.x) {
        const unsigned group = routing.used[expert / WARP], bit = 1u << expert % WARP;
        if (group & bit) {
            int rank = __popc(group & (bit - 1));
            for (int i = 0; i < expert / WARP; i++) rank += __popc(routing.used[i]);
            routing.list[rank] = expert;
        }
    }
    if (threadIdx.x == 0) {
        int count = 0;
        for (int i = 0; i < groups; i++) count += __popc(routing.used[i]);
        routing.count = count;
    }
    __syncthreads();
}
