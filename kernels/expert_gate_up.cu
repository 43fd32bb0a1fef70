// Stage `expert_gate_up`: SwiGLU of the rows' experts, and of the shared one from the sums that
// `route` left.
#include "routing.cuh"
#include "tile.cuh"

// The experts of a layer: matrices of one format and size, one behind the other.
struct Experts {
    Matrix first;
    // [experts], NVFP4's scales of the gates and of the ups; 1 in other formats.
    const float* gate_globals;
    const float* up_globals;

    __device__ const uint8_t* codes(int expert, int slots) const {
        return first.codes +
               static_cast<size_t>(expert) * first.tiles() * first.units() * slots * SLOT_CODES;
    }

    __device__ const uint8_t* scales(int expert, int bytes) const {
        return first.scales + static_cast<size_t>(expert) * first.tiles() * first.units() * bytes;
    }
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

// The last blocks take a row each.
__device__ __forceinline__ void run_shared(const SharedExpert& s, int count) {
    for (int row = gridDim.x - 1 - blockIdx.x; row < count; row += gridDim.x) {
        const float* sums = s.sums + static_cast<size_t>(row) * s.pitch;
        const size_t split_pitch = static_cast<size_t>(MAX_ROWS) * s.pitch;
        for (int i = threadIdx.x; i < s.width; i += LINEAR_THREADS) {
            const float* pair = sums + i / 8 * TILE + i % 8;
            const float gate = sum_splits(pair, split_pitch, s.splits) * s.globals.gate;
            const float up = sum_splits(pair + 8, split_pitch, s.splits) * s.globals.up;
            s.activations[static_cast<size_t>(row) * s.width + i] =
                to_half(silu(gate) * up * ACTIVATION_SCALE);
        }
    }
}

// activations: [MAX_ROWS][used][width].
template <int NB, int format>
__device__ __forceinline__ void run_experts(
    const Experts& experts, const Routing& routing, const half* normed, half* activations,
    int used, int width, int count, uint8_t* shared, float* results
) {
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4;
    const Matrix& w = experts.first;
    const int tiles = w.tiles(), items = routing.count * tiles;
    const Share share(w.units(), 0, 1, warp, LINEAR_WARPS);
    const auto source_of = [&](int item, int expert) {
        const size_t before = static_cast<size_t>(item % tiles) * w.units() + share.first;
        return Strided<format>{
            experts.codes(expert, SLOTS<format>) + before * SLOTS<format> * SLOT_CODES,
            experts.scales(expert, SCALES<format>) + before * SCALES<format>, LINEAR_WARPS
        };
    };
    int item = blockIdx.x;
    if (item >= items) return;
    int expert = routing.list[item / tiles];
    Ring<format, RING, Strided<format>> ring(shared, source_of(item, expert), share.count);
    const half* vector[NB];
#pragma unroll
    for (int n = 0; n < NB; n++) {
        const int row = min(n * 8 + g, count - 1);
        vector[n] = normed + static_cast<size_t>(row) * w.columns + share.first * UNIT;
    }
    while (item < items) {
        const int next = item + gridDim.x;
        const int next_expert = next < items ? routing.list[next / tiles] : expert;
        // Of the thread's result: whether its row uses the expert, and the scales.
        const int row = threadIdx.x / 8;
        const int place = row < min(count, NB * 8) ? routing.place[row][expert] : -1;
        const float gate_scale = experts.gate_globals[expert] * DECODED_SCALE<format>;
        const float up_scale = experts.up_globals[expert] * DECODED_SCALE<format>;
        const uint8_t* scales = source_of(item, expert).scales;
        float acc[NB][4] = {};
        ring.run(
            share.count,
            [&](int u, const half*(&next_part)[NB]) {
#pragma unroll
                for (int n = 0; n < NB; n++) next_part[n] = vector[n] + u * LINEAR_WARPS * UNIT;
            },
            [&](int u) {
                return __ldg(reinterpret_cast<const float2*>(scales + u * LINEAR_WARPS * FP8_SCALES));
            },
            acc, [](int, float(&)[NB][4]) {}
        );
        // The next item's weights are under way while this one's results are put together.
        ring = Ring<format, RING, Strided<format>>(
            shared, source_of(next < items ? next : item, next_expert),
            next < items ? share.count : 0
        );
        store_tile<NB>(results + warp * NB * 8 * TILE, acc);
        __syncthreads();
        const int r = threadIdx.x % 8, at = item % tiles * 8 + r;
        if (place >= 0 && at < width) {
            float gate = 0, up = 0;
#pragma unroll
            for (int k = 0; k < LINEAR_WARPS; k++) {
                gate += results[(k * NB * 8 + row) * TILE + r];
                up += results[(k * NB * 8 + row) * TILE + r + 8];
            }
            gate *= gate_scale;
            up *= up_scale;
            activations[(static_cast<size_t>(row) * used + place) * width + at] =
                to_half(silu(gate) * up * ACTIVATION_SCALE);
        }
        __syncthreads();
        item = next;
        expert = next_expert;
    }
}

// Blocks take tiles of experts in turn. logits: [splits][MAX_ROWS][experts]. The first block keeps
// the routing for `expert_down`.
template <int NB>
__device__ __forceinline__ void gate_up(
    const Experts& experts, const SharedExpert& shared_expert, const RouteLayout& l,
    const float* logits, const float* bias, const half* normed, Routing* keep, half* activations,
    int width, const Ahead& ahead, int count
) {
    release_consumer();
    prefetch(ahead);
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ LinearResults<NB> results;
    __shared__ Routing routing;
    // The rings are not in use yet.
    Choice& choice = *reinterpret_cast<Choice*>(shared);
    static_assert(sizeof(Choice) <= LINEAR_SHARED, "the choice lies in the rings");
    wait_for_producer();
    load_choices(logits, bias, l, count, choice);
    __syncthreads();
#pragma unroll 1
    for (int row = threadIdx.x / WARP; row < count; row += LINEAR_WARPS) {
        choose_experts(choice, row, l, routing.uses[row]);
    }
    __syncthreads();
    list_experts(routing, choice, count, l);
    __syncthreads();
    if (blockIdx.x == 0) {
        for (int i = threadIdx.x; i < static_cast<int>(sizeof(Routing) / 16); i += LINEAR_THREADS) {
            reinterpret_cast<uint4*>(keep)[i] = reinterpret_cast<const uint4*>(&routing)[i];
        }
    }
    run_shared(shared_expert, count);
    switch (experts.first.format) {
        case F16:
            run_experts<NB, F16>(
                experts, routing, normed, activations, l.used, width, count, shared, results.values
            );
            break;
        case FP8:
            run_experts<NB, FP8>(
                experts, routing, normed, activations, l.used, width, count, shared, results.values
            );
            break;
        default:
            run_experts<NB, NVFP4>(
                experts, routing, normed, activations, l.used, width, count, shared, results.values
            );
    }
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS, 3) expert_gate_up_8(
    const __grid_constant__ Experts experts, const __grid_constant__ SharedExpert shared_expert,
    const __grid_constant__ RouteLayout l, const float* logits, const float* bias,
    const half* normed, Routing* routing, half* activations, int width,
    const __grid_constant__ Ahead ahead, int count
) {
    gate_up<1>(experts, shared_expert, l, logits, bias, normed, routing, activations, width,
               ahead, count);
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) expert_gate_up_16(
    const __grid_constant__ Experts experts, const __grid_constant__ SharedExpert shared_expert,
    const __grid_constant__ RouteLayout l, const float* logits, const float* bias,
    const half* normed, Routing* routing, half* activations, int width,
    const __grid_constant__ Ahead ahead, int count
) {
    gate_up<2>(experts, shared_expert, l, logits, bias, normed, routing, activations, width,
               ahead, count);
}
