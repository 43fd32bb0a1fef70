// Stage `expert_gate_up`: SwiGLU of the rows' experts.
#include "routing.cuh"
#include "tile.cuh"

// The experts of a layer: matrices of one format and size, one behind the other.
struct Experts {
    Matrix first;
    // [experts], NVFP4's scales of the gates and of the ups; 1 in other formats.
    const float* gate_globals;
    const float* up_globals;

    // A tile's first unit, counted over all experts.
    __device__ unsigned unit(unsigned expert, int tile) const {
        return (expert * first.tiles() + tile) * first.units();
    }
};

// A warp's units of its block's tile, of all experts that the block goes through: the ring stays full
// across their borders.
template <int format>
struct TileUnits {
    const uint8_t* codes;
    const uint8_t* scales;
    const Experts* experts;
    Walk walk;
    // The place in the walk and the unit that come next; the warp's first unit of a tile, and how many
    // it has.
    int at, unit, first, count;

    __device__ void locate() {
        const unsigned from = experts->unit(walk.expert(at), blockIdx.x) + first;
        codes = experts->first.template codes_of<format>(from);
        scales = experts->first.template scales_of<format>(from);
    }

    __device__ void advance() {
        if (++unit == count) {
            unit = 0, at++;
            locate();
        } else {
            codes += LINEAR_WARPS * SLOTS<format> * SLOT_CODES;
            scales += LINEAR_WARPS * SCALES<format>;
        }
    }
};

// activations: [MAX_ROWS][used][width].
template <int NB, int format>
__device__ __forceinline__ void run_experts(
    const Experts& experts, const Routing* routing, const half* normed, half* activations,
    int used, int width, int count, uint8_t* shared, LinearResults<NB> (&both)[2]
) {
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, tile = blockIdx.x;
    const Matrix& w = experts.first;
    const Share share(w.units(), 0, 1, warp, LINEAR_WARPS);
    Walk walk(routing, blockIdx.y, gridDim.y);
    TileUnits<format> source = {nullptr, nullptr, &experts,    walk,
                                0,       0,       share.first, share.count};
    // The list has room for what the grid may ask of it, so its length need not be known before.
    source.locate();
    const int places = walk.places(routing->count);
    if (places == 0) return;
    Ring<format, RING, TileUnits<format>> ring(
        shared + warp * RING * SLOT, source, places * share.count
    );
    const half* vector[NB];
#pragma unroll
    for (int n = 0; n < NB; n++) {
        const int row = min(n * 8 + g, count - 1);
        vector[n] = normed + static_cast<size_t>(row) * w.columns + share.first * UNIT;
    }
    // Of the thread's result.
    const int row = threadIdx.x / 8, r = threadIdx.x % 8, column = tile * 8 + r;
    const bool is_there = row < min(count, NB * 8) && column < width;
    // Two results take turns, so that one barrier an expert is enough.
    for (int at = 0; at < places; at++) {
        float* results = both[at % 2].values;
        const unsigned expert = walk.expert(at);
        // Whether the row uses the expert, and the scales.
        const int place = is_there ? routing->place[row][expert] : -1;
        const float gate_scale = experts.gate_globals[expert] * DECODED_SCALE<format>;
        const float up_scale = experts.up_globals[expert] * DECODED_SCALE<format>;
        // FP8's.
        const uint8_t* scales =
            w.scales_of<format>(experts.unit(expert, tile) + share.first);
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
        store_tile<NB>(results + warp * NB * 8 * TILE, acc);
        __syncthreads();
        if (place >= 0) {
            float gate = 0, up = 0;
#pragma unroll
            for (int k = 0; k < LINEAR_WARPS; k++) {
                gate += results[(k * NB * 8 + row) * TILE + r];
                up += results[(k * NB * 8 + row) * TILE + r + 8];
            }
            gate *= gate_scale;
            up *= up_scale;
            activations[(static_cast<size_t>(row) * used + place) * width + column] =
                to_half(silu(gate) * up * ACTIVATION_SCALE);
        }
    }
}

// grid: (tiles of an expert, blocks that share the list of experts).
template <int NB>
__device__ __forceinline__ void gate_up(
    const Experts& experts, const Routing* routing, const half* normed, half* activations,
    int used, int width, const Ahead& ahead, int count
) {
    uint8_t* shared = dynamic_shared<uint8_t>();
    __shared__ LinearResults<NB> results[2];
    prefetch(ahead);
    wait_for_producer();
    // Not before: `expert_down` reads the list of experts before it waits.
    release_consumer();
    switch (experts.first.format) {
        case F16:
            run_experts<NB, F16>(experts, routing, normed, activations, used, width, count,
                                 shared, results);
            break;
        case FP8:
            run_experts<NB, FP8>(experts, routing, normed, activations, used, width, count,
                                 shared, results);
            break;
        default:
            run_experts<NB, NVFP4>(experts, routing, normed, activations, used, width,
                                   count, shared, results);
    }
}

// Registers as if for three blocks: two, and one of `expert_down`, which begins early.
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
