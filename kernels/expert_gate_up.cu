// Stage `expert_gate_up`: SwiGLU of the rows' experts.
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

// activations: [MAX_ROWS][used][width].
template <int NB, int format>
__device__ __forceinline__ void run_experts(
    const Experts& experts, const Routing* routing, const half* normed, half* activations,
    int used, int width, int count, uint8_t* shared, float* results
) {
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4;
    const Matrix& w = experts.first;
    const int tiles = w.tiles(), items = routing->count * tiles;
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
    int expert = routing->list[item / tiles];
    Ring<format, RING, Strided<format>> ring(shared, source_of(item, expert), share.count);
    const half* vector[NB];
#pragma unroll
    for (int n = 0; n < NB; n++) {
        const int row = min(n * 8 + g, count - 1);
        vector[n] = normed + static_cast<size_t>(row) * w.columns + share.first * UNIT;
    }
    while (item < items) {
        const int next = item + gridDim.x;
        const int next_expert = next < items ? routing->list[next / tiles] : expert;
        // Of the thread's result: whether its row uses the expert, and the scales.
        const int row = threadIdx.x / 8;
        const int place = row < min(count, NB * 8) ? routing->place[row][expert] : -1;
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

// Blocks take tiles of experts in turn.
template <int NB>
__device__ __forceinline__ void gate_up(
    const Experts& experts, const Routing* routing, const half* normed, half* activations,
    int used, int width, const Ahead& ahead, int count
) {
    release_consumer();
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ LinearResults<NB> results;
    prefetch(ahead);
    wait_for_producer();
    switch (experts.first.format) {
        case F16:
            run_experts<NB, F16>(experts, routing, normed, activations, used, width, count,
                                 shared, results.values);
            break;
        case FP8:
            run_experts<NB, FP8>(experts, routing, normed, activations, used, width, count,
                                 shared, results.values);
            break;
        default:
            run_experts<NB, NVFP4>(experts, routing, normed, activations, used, width,
                                   count, shared, results.values);
    }
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS, 3) expert_gate_up_8(
    const __grid_constant__ Experts experts, const Routing* routing, const half* normed,
    half* activations, int used, int width, const __grid_constant__ Ahead ahead,
    int count
) {
    gate_up<1>(experts, routing, normed, activations, used, width, ahead, count);
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS) expert_gate_up_16(
    const __grid_constant__ Experts experts, const Routing* routing, const half* normed,
    half* activations, int used, int width, const __grid_constant__ Ahead ahead,
    int count
) {
    gate_up<2>(experts, routing, normed, activations, used, width, ahead, count);
}
