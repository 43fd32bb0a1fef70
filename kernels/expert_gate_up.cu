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

// A warp's units of all items of its block, one item behind the other: the ring stays full across
// their borders.
template <int format>
struct ItemUnits {
    const uint8_t* codes;
    const uint8_t* scales;
    const Experts* experts;
    const Routing* routing;
    // The item and the unit that come next, and the warp's units of an item.
    int item, unit, first, count;

    __device__ void locate() {
        const int tiles = experts->first.tiles();
        const int expert = routing->list[item / tiles];
        const size_t before = static_cast<size_t>(item % tiles) * experts->first.units() + first;
        codes = experts->codes(expert, SLOTS<format>) + before * SLOTS<format> * SLOT_CODES;
        scales = experts->scales(expert, SCALES<format>) + before * SCALES<format>;
    }

    __device__ void advance() {
        if (++unit == count) {
            unit = 0;
            item += gridDim.x;
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
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4;
    const Matrix& w = experts.first;
    const int tiles = w.tiles();
    const Share share(w.units(), 0, 1, warp, LINEAR_WARPS);
    int item = blockIdx.x;
    ItemUnits<format> source = {nullptr, nullptr, &experts,    routing,
                                item,    0,       share.first, share.count};
    // The list has room for what the grid may ask of it, so its length need not be known before.
    source.locate();
    const int items = routing->count * tiles;
    if (item >= items) return;
    const int own_items = (items - item + gridDim.x - 1) / gridDim.x;
    Ring<format, RING, ItemUnits<format>> ring(shared, source, own_items * share.count);
    const half* vector[NB];
#pragma unroll
    for (int n = 0; n < NB; n++) {
        const int row = min(n * 8 + g, count - 1);
        vector[n] = normed + static_cast<size_t>(row) * w.columns + share.first * UNIT;
    }
    // Two results take turns, so that one barrier an item is enough.
    for (int turn = 0; item < items; item += gridDim.x, turn ^= 1) {
        float* results = both[turn].values;
        const int expert = routing->list[item / tiles];
        // Of the thread's result: whether its row uses the expert, and the scales.
        const int row = threadIdx.x / 8;
        const int place = row < min(count, NB * 8) ? routing->place[row][expert] : -1;
        const float gate_scale = experts.gate_globals[expert] * DECODED_SCALE<format>;
        const float up_scale = experts.up_globals[expert] * DECODED_SCALE<format>;
        // FP8's.
        const size_t before = static_cast<size_t>(item % tiles) * w.units() + share.first;
        const uint8_t* scales = experts.scales(expert, SCALES<format>) + before * SCALES<format>;
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
    }
}

// Blocks take tiles of experts in turn.
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
