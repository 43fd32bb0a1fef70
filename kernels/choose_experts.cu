// Second launch of the stage `route`: the rows' experts from the router's logits, and the shared
// expert's SwiGLU.
#include "formats.cuh"
#include "routing.cuh"

constexpr int THREADS = 1024;
// Experts of a lane while a warp chooses a row's.
constexpr int PER_LANE = MAX_EXPERTS / WARP;
// Keeps the renormalisation finite where all chosen probabilities are zero.
constexpr float ROUTE_SUM_FLOOR = 1e-20f;

// What choosing the experts of a step takes besides the logits.
struct Choice {
    float probability[MAX_ROWS][MAX_EXPERTS];
    // Choices as unsigned numbers of the same order; 0 is below all of them.
    unsigned key[MAX_ROWS][MAX_EXPERTS];
    // A bit for each of a row's experts that are the rank's own.
    unsigned chosen[MAX_ROWS][MAX_EXPERTS / WARP];
};

// The shared expert's gate and up: sums [splits][MAX_ROWS][pitch], alternating by 8; activations
// [MAX_ROWS][width].
struct SharedExpert {
    const float* sums;
    half* activations;
    int splits;
    int pitch;
    int width;
    Globals globals;
};

__device__ __forceinline__ void run_shared(const SharedExpert& s, int row) {
    const float* sums = s.sums + static_cast<size_t>(row) * s.pitch;
    const size_t split_pitch = static_cast<size_t>(MAX_ROWS) * s.pitch;
    for (int i = threadIdx.x; i < s.width; i += THREADS) {
        const float* pair = sums + i / 8 * TILE + i % 8;
        const float gate = sum_splits(pair, split_pitch, s.splits) * s.globals.gate;
        const float up = sum_splits(pair + 8, split_pitch, s.splits) * s.globals.up;
        s.activations[static_cast<size_t>(row) * s.width + i] =
            to_half(silu(gate) * up * ACTIVATION_SCALE);
    }
}

// One warp chooses a row's experts and weights them by p; in rising order of the expert. Ties: the
// lower expert. Each lane has PER_LANE neighbouring experts, so the chosen ones of lower lanes come
// first.
__device__ __forceinline__ void choose_of_row(
    Choice& choice, int row, const RouteLayout& l, Routing& routing
) {
    const int lane = threadIdx.x % WARP, first = lane * PER_LANE;
    unsigned key[PER_LANE];
    // The lane's bit of each of its experts.
    unsigned bit[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) key[i] = choice.key[row][first + i], bit[i] = 1u << i;
    // Largest first; neighbours change places only if the right one is larger, so that equals stay
    // in order.
#pragma unroll
    for (int phase = 0; phase < PER_LANE; phase++) {
#pragma unroll
        for (int i = phase % 2; i + 1 < PER_LANE; i += 2) {
            const bool swap = key[i + 1] > key[i];
            const unsigned larger = max(key[i], key[i + 1]);
            const unsigned of_larger = swap ? bit[i + 1] : bit[i];
            bit[i + 1] = swap ? bit[i] : bit[i + 1];
            key[i + 1] = min(key[i], key[i + 1]);
            key[i] = larger, bit[i] = of_larger;
        }
    }
    const unsigned below = (1u << lane) - 1;
    unsigned taken = 0;
#pragma unroll 1
    for (int round = 0; round < l.used; round++) {
        const unsigned best = __reduce_max_sync(~0u, key[0]);
        const unsigned equal = __ballot_sync(~0u, key[0] == best);
        // The lowest lane has the lowest expert.
        if (key[0] == best && (equal & below) == 0) {
            taken |= bit[0];
#pragma unroll
            for (int i = 0; i + 1 < PER_LANE; i++) key[i] = key[i + 1], bit[i] = bit[i + 1];
            key[PER_LANE - 1] = 0;
        }
    }
    int place = 0;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const bool is_taken = taken >> i & 1;
        place += __popc(__ballot_sync(~0u, is_taken) & below);
        if (is_taken) sum += choice.probability[row][first + i];
    }
    sum = l.renormalise ? warp_sum(sum) + ROUTE_SUM_FLOOR : 1;
    if (taken == 0) return;
#pragma unroll 1
    for (unsigned rest = taken; rest != 0; rest &= rest - 1) {
        const int expert = first + __ffs(rest) - 1, own = expert - l.first_own;
        const bool is_own = own >= 0 && own < l.own;
        routing.uses[row][place] =
            Use{is_own ? own : -1, choice.probability[row][expert] / sum * l.scaling};
        if (is_own) {
            routing.place[row][own] = static_cast<signed char>(place);
            atomicOr(&choice.chosen[row][own / WARP], 1u << own % WARP);
        }
        place++;
    }
}

// A warp for each group of 32 experts lists those that any row has chosen.
__device__ __forceinline__ void list_experts(Routing& routing, const Choice& choice, int rows) {
    constexpr int GROUPS = MAX_EXPERTS / WARP;
    const int lane = threadIdx.x % WARP, group = threadIdx.x / WARP;
    if (group >= GROUPS) return;
    unsigned used = 0;
    if (lane < GROUPS) {
#pragma unroll 1
        for (int row = 0; row < rows; row++) used |= choice.chosen[row][lane];
    }
    int before = 0, count = 0;
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
        if (i == group) before = count;
        count += __popc(__shfl_sync(~0u, used, i));
    }
    const unsigned own = __shfl_sync(~0u, used, group), bit = 1u << lane;
    if (own & bit) routing.list[before + __popc(own & (bit - 1))] = threadIdx.x;
    if (lane == 0) routing.used[group] = own;
    if (threadIdx.x == 0) routing.count = count;
}

// The first block chooses, the others do the shared expert of a row each. logits:
// [splits][MAX_ROWS][experts]. grid: 1 + rows.
extern "C" __global__ void __launch_bounds__(THREADS) choose_experts(
    const __grid_constant__ RouteLayout l, const __grid_constant__ SharedExpert shared_expert,
    const float* logits, const float* bias, Routing* out, int count
) {
    release_consumer();
    __shared__ Choice choice;
    __shared__ Routing routing;
    static_assert(THREADS % MAX_EXPERTS == 0, "a thread an expert, some rows at once");
    const int expert = threadIdx.x % MAX_EXPERTS;
    const bool is_there = expert < l.experts;
    const float own_bias = is_there ? bias[expert] : 0;
    wait_for_producer();
    if (blockIdx.x > 0) {
        run_shared(shared_expert, blockIdx.x - 1);
        return;
    }
    // p = sigmoid(logit), choice = p + bias.
#pragma unroll 2
    for (int row = threadIdx.x / MAX_EXPERTS; row < count; row += THREADS / MAX_EXPERTS) {
        const float* logit = logits + static_cast<size_t>(row) * l.experts + expert;
        const float z =
            is_there ? sum_splits(logit, static_cast<size_t>(MAX_ROWS) * l.experts, l.splits) : 0;
        const float p = __fdividef(1.0f, 1.0f + __expf(-z));
        const unsigned bits = __float_as_uint(p + own_bias);
        const unsigned ordered = bits & 0x80000000 ? ~bits : bits | 0x80000000;
        choice.probability[row][expert] = p;
        choice.key[row][expert] = is_there ? ordered : 0;
        routing.place[row][expert] = -1;
        if (expert % WARP == 0) choice.chosen[row][expert / WARP] = 0;
    }
    __syncthreads();
    if (threadIdx.x / WARP < count) choose_of_row(choice, threadIdx.x / WARP, l, routing);
    __syncthreads();
    list_experts(routing, choice, count);
    __syncthreads();
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(Routing) / 16); i += THREADS) {
        reinterpret_cast<uint4*>(out)[i] = reinterpret_cast<const uint4*>(&routing)[i];
    }
}
