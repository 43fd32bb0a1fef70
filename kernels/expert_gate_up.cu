// Stage `expert_gate_up`: the rows' experts, and SwiGLU of each; also the shared expert's SwiGLU
// from the sums that `route` left.
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

// The shared expert's gate and up: sums [splits][MAX_ROWS][pitch], alternating by 8.
struct SharedSums {
    const float* sums;
    int pitch;
    int width;
    Globals globals;
};

template <int NB, int format>
__device__ __forceinline__ void run_experts(
    const Experts& experts, const Routing& routing, const half* normed, half* activations,
    int used, int width, int count, uint8_t* shared, float* results
) {
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4;
    const Matrix& w = experts.first;
    const int tiles = w.tiles(), items = routing.count * tiles;
    const Share share(w.units(), 0, 1, warp, LINEAR_WARPS);
    const Ring<format, RING> ring(shared);
    const auto address_of = [&](int item) {
        const int expert = routing.list[item / tiles];
        const size_t before = static_cast<size_t>(item % tiles) * w.units() + share.first;
        const uint8_t* codes =
            experts.codes(expert, SLOTS<format>) + before * SLOTS<format> * SLOT_CODES;
        const uint8_t* scales = experts.scales(expert, SCALES<format>) + before * SCALES<format>;
        return [=](int u) {
            const size_t unit = static_cast<size_t>(u) * LINEAR_WARPS;
            return Unit{codes + unit * SLOTS<format> * SLOT_CODES, scales + unit * SCALES<format>};
        };
    };
    int item = blockIdx.x;
    if (item < items) ring.start(share.count, address_of(item));
    for (; item < items; item += gridDim.x) {
        const int expert = routing.list[item / tiles];
        const float gate_scale = experts.gate_globals[expert] * DECODED_SCALE<format>;
        const float up_scale = experts.up_globals[expert] * DECODED_SCALE<format>;
        const half* vector[NB];
#pragma unroll
        for (int n = 0; n < NB; n++) {
            const int row = n * 8 + g;
            const bool uses = row < count && routing.place[row][expert] >= 0;
            vector[n] = uses ? normed + static_cast<size_t>(row) * w.columns : nullptr;
        }
        float acc[NB][4] = {};
        ring.run(
            share.count, address_of(item),
            [&](int u, Vectors<NB>& part) {
                const int column = (share.first + u * LINEAR_WARPS) * UNIT;
                load_vectors<NB>(part, vector, column, w.columns - column);
            },
            acc, [](int, float(&)[NB][4]) {}
        );
        // The next item's weights are under way while this one's results are put together.
        if (item + gridDim.x < items) ring.start(share.count, address_of(item + gridDim.x));
        store_tile<NB>(results + warp * NB * 8 * TILE, acc);
        __syncthreads();
        for (int i = threadIdx.x; i < NB * 8 * 8; i += LINEAR_THREADS) {
            const int row = i / 8, r = i % 8, at = item % tiles * 8 + r;
            if (row >= count || routing.place[row][expert] < 0 || at >= width) continue;
            float gate = 0, up = 0;
#pragma unroll
            for (int k = 0; k < LINEAR_WARPS; k++) {
                gate += results[(k * NB * 8 + row) * TILE + r];
                up += results[(k * NB * 8 + row) * TILE + r + 8];
            }
            gate *= gate_scale;
            up *= up_scale;
            const size_t use = static_cast<size_t>(row) * used + routing.place[row][expert];
            activations[use * width + at] = to_half(silu(gate) * up * ACTIVATION_SCALE);
        }
        __syncthreads();
    }
}

// logits: [splits][MAX_ROWS][experts]; uses: [MAX_ROWS][used]; activations:
// [MAX_ROWS][used][width]; shared_activations: [MAX_ROWS][shared width]. The last block of the grid
// does the shared expert and writes `uses`, the others take expert tiles in turn.
template <int NB>
__device__ __forceinline__ void gate_up(
    const Experts& experts, const RouteLayout& l, const SharedSums& sums, const float* logits,
    const float* bias, const half* normed, Use* uses, half* activations, half* shared_activations,
    int width, int count
) {
    release_consumer();
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ LinearResults<NB> results;
    __shared__ Routing routing;
    // The rings are not in use yet.
    float* probabilities = reinterpret_cast<float*>(shared);
    unsigned* choices = reinterpret_cast<unsigned*>(probabilities + MAX_ROWS * MAX_EXPERTS);
    wait_for_producer();
    const size_t split_pitch = static_cast<size_t>(MAX_ROWS) * l.experts;
#pragma unroll 4
    for (int row = 0; row < count; row++) {
        load_choices(
            logits + static_cast<size_t>(row) * l.experts, split_pitch, bias, l,
            probabilities + row * MAX_EXPERTS, choices + row * MAX_EXPERTS
        );
    }
    __syncthreads();
    for (int row = threadIdx.x / WARP; row < count; row += LINEAR_WARPS) {
        choose_experts(
            probabilities + row * MAX_EXPERTS, choices + row * MAX_EXPERTS, l, routing.uses[row]
        );
    }
    list_experts(routing, count, l);
    if (blockIdx.x == gridDim.x - 1) {
        for (int i = threadIdx.x; i < count * l.used; i += LINEAR_THREADS) {
            uses[i] = routing.uses[i / l.used][i % l.used];
        }
        for (int i = threadIdx.x; i < count * sums.width; i += LINEAR_THREADS) {
            const int row = i / sums.width, at = i % sums.width;
            const float* pair =
                sums.sums + static_cast<size_t>(row) * sums.pitch + at / 8 * TILE + at % 8;
            const size_t pitch = static_cast<size_t>(MAX_ROWS) * sums.pitch;
            const float gate = sum_splits(pair, pitch, l.splits);
            const float up = sum_splits(pair + 8, pitch, l.splits);
            shared_activations[i] = to_half(
                silu(gate * sums.globals.gate) * (up * sums.globals.up) * ACTIVATION_SCALE);
        }
    }
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

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) expert_gate_up_8(
    const __grid_constant__ Experts experts, const __grid_constant__ RouteLayout l,
    const __grid_constant__ SharedSums sums, const float* logits, const float* bias,
    const half* normed, Use* uses, half* activations, half* shared_activations, int width, int count
) {
    gate_up<1>(experts, l, sums, logits, bias, normed, uses, activations, shared_activations, width,
               count);
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) expert_gate_up_16(
    const __grid_constant__ Experts experts, const __grid_constant__ RouteLayout l,
    const __grid_constant__ SharedSums sums, const float* logits, const float* bias,
    const half* normed, Use* uses, half* activations, half* shared_activations, int width, int count
) {
    gate_up<2>(experts, l, sums, logits, bias, normed, uses, activations, shared_activations, width,
               count);
}
