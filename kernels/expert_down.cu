// Stage `expert_down`: down projections, weighted sum, the shared expert's down, into the partial
// sum. A block owns a tile of the hidden dimensions over all experts: no atomics, and a row's terms
// are added in the order of its own list.
#include "routing.cuh"
#include "tile.cuh"

// Warps for the routed experts, then one for the shared one.
constexpr int EXPERT_WARPS = 8;
constexpr int DOWN_WARPS = EXPERT_WARPS + 1;
// Slots of an expert warp's ring, and of the other warp's: two units in f16.
constexpr int DOWN_RING = 4;
constexpr int SHARED_RING = 8;
constexpr int DOWN_RINGS = EXPERT_WARPS * DOWN_RING + SHARED_RING;

struct DownExperts {
    Matrix first;
    // [experts], NVFP4's scales of the tensors; 1 in other formats.
    const float* globals;
};

// A warp's units: of the block's tile of each of its experts.
template <int format>
struct ExpertUnits {
    const uint8_t* codes;
    const uint8_t* scales;
    const Matrix* first;
    Walk walk;
    // The next place in the walk, and the unit.
    int at, unit;

    __device__ void locate() {
        const unsigned from = (walk.expert(at) * first->tiles() + blockIdx.x) * first->units();
        codes = first->template codes_of<format>(from);
        scales = first->template scales_of<format>(from);
    }

    __device__ void advance() {
        if (++unit == first->units()) {
            unit = 0, at++;
            locate();
        } else {
            codes += SLOTS<format> * SLOT_CODES;
            scales += SCALES<format>;
        }
    }
};

// terms: [used + 1][8 NB][TILE]. Stores a warp's results; `place_of(row, scale)` is where
// a row's term goes, below 0 for nowhere.
template <int NB, class Place>
__device__ __forceinline__ void store_term(float* terms, const float (&acc)[NB][4], Place place_of) {
    const int g = threadIdx.x % WARP / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < NB; n++) {
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int row = n * 8 + 2 * q + odd;
            float scale;
            const int place = place_of(row, scale);
            if (place >= 0) {
                float* term = terms + (place * NB * 8 + row) * TILE + g;
                term[0] = acc[n][odd] * scale;
                term[8] = acc[n][odd + 2] * scale;
            }
        }
    }
}

// The warps of the experts fill their rings before they wait: `expert_gate_up` lets this kernel
// start only when the list of experts is there. It is read past the L1 cache, which may still have
// the last layer's.
template <int NB, int format>
__device__ __forceinline__ void run_experts(
    const DownExperts& experts, const Routing* all, Routing& routing, const float* globals,
    const half* activations, int used, int width, int count, uint8_t* shared, float* terms
) {
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4;
    const Matrix& w = experts.first;
    const int units = w.units();
    Walk walk(all, warp, EXPERT_WARPS);
    ExpertUnits<format> source = {nullptr, nullptr, &w, walk, 0, 0};
    source.locate();
    const int places = walk.places(__ldcg(&all->count));
    Ring<format, DOWN_RING, ExpertUnits<format>> ring(
        shared + warp * DOWN_RING * SLOT, source, places * units
    );
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(Routing) / 16);
         i += EXPERT_WARPS * WARP) {
        reinterpret_cast<uint4*>(&routing)[i] = __ldcg(reinterpret_cast<const uint4*>(all) + i);
    }
    // Without the shared expert's warp, which is at its own work.
    second_barrier<EXPERT_WARPS * WARP>();
    wait_for_producer();
    // Of the unit whose vectors are loaded next, and of the one that is multiplied.
    int next_unit = 0, next_at = warp, unit = 0, at = warp;
    float acc[NB][4] = {};
    ring.run(
        places * units,
        [&](int, const half*(&next)[NB]) {
            if (next_unit == 0) {
                const int expert = routing.list[next_at];
#pragma unroll
                for (int n = 0; n < NB; n++) {
                    const int row = min(n * 8 + g, count - 1);
                    const int place = max(routing.place[row][expert], 0);
                    next[n] = activations + static_cast<unsigned>((row * used + place) * width);
                }
            } else {
#pragma unroll
                for (int n = 0; n < NB; n++) next[n] += UNIT;
            }
            if (++next_unit == units) next_unit = 0, next_at += EXPERT_WARPS;
        },
        [&](int u) {
            const int expert = routing.list[warp + u / units * EXPERT_WARPS];
            const unsigned tile = expert * w.tiles() + blockIdx.x;
            return __ldg(reinterpret_cast<const float2*>(
                w.scales_of<format>(tile * units + u % units)));
        },
        acc,
        [&](int, float(&acc)[NB][4]) {
            if (++unit < units) return;
            const int expert = routing.list[at];
            const float global = globals[expert] * DECODED_SCALE<format>;
            store_term<NB>(terms, acc, [&](int row, float& scale) {
                const int place = row < count ? routing.place[row][expert] : -1;
                scale = place < 0 ? 0 : global * routing.uses[row][place].weight;
                return place;
            });
#pragma unroll
            for (int n = 0; n < NB; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) acc[n][i] = 0;
            }
            unit = 0, at += EXPERT_WARPS;
        }
    );
}

// The shared expert, one warp; its ring is filled before the wait.
template <int NB, int format>
__device__ __forceinline__ void run_shared(
    const Matrix& w, const half* x, int used, int count, uint8_t* shared, float* terms
) {
    const int g = threadIdx.x % WARP / 4, units = w.units();
    const unsigned first = blockIdx.x * units;
    const Strided<format> source = {w.codes_of<format>(first), w.scales_of<format>(first), 1};
    Ring<format, SHARED_RING, Strided<format>> ring(
        shared + EXPERT_WARPS * DOWN_RING * SLOT, source, units
    );
    const int row = blockIdx.x * TILE + g;
    const float upper = w.row_scale<format>(row), lower = w.row_scale<format>(row + 8);
    wait_for_producer();
    const half* vector[NB];
#pragma unroll
    for (int n = 0; n < NB; n++) {
        vector[n] = x + static_cast<size_t>(min(n * 8 + g, count - 1)) * w.columns;
    }
    float acc[NB][4] = {};
    ring.run(
        units,
        [&](int u, const half*(&next)[NB]) {
#pragma unroll
            for (int n = 0; n < NB; n++) next[n] = vector[n] + u * UNIT;
        },
        [&](int u) {
            return __ldg(reinterpret_cast<const float2*>(source.scales + u * FP8_SCALES));
        },
        acc, [](int, float(&)[NB][4]) {}
    );
#pragma unroll
    for (int n = 0; n < NB; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) acc[n][i] *= i < 2 ? upper : lower;
    }
    store_term<NB>(terms, acc, [&](int, float& scale) {
        scale = w.global * DECODED_SCALE<format>;
        return used;
    });
}

// grid: tiles of the hidden dimensions. partial: [MAX_ROWS][hidden]; `number` experts,
// of which a row uses `used`.
// Shared: the rings, then terms [used + 1][8 NB][TILE].
template <int NB>
__device__ __forceinline__ void down(
    const DownExperts& experts, const Matrix& shared_down, const Routing* all, int number, int used,
    const half* activations, const half* shared_activations, float* partial, int hidden, int width,
    int count
) {
    release_consumer();
    uint8_t* shared = dynamic_shared<uint8_t>();
    __shared__ Routing routing;
    __shared__ float globals[MAX_EXPERTS];
    // No more than the warps of the experts have threads.
    static_assert(MAX_EXPERTS == EXPERT_WARPS * WARP);
    if (threadIdx.x < number) globals[threadIdx.x] = experts.globals[threadIdx.x];
    float* terms = reinterpret_cast<float*>(shared + DOWN_RINGS * SLOT);
    if (threadIdx.x / WARP >= EXPERT_WARPS) {
        switch (shared_down.format) {
            case F16:
                run_shared<NB, F16>(shared_down, shared_activations, used, count, shared, terms);
                break;
            case FP8:
                run_shared<NB, FP8>(shared_down, shared_activations, used, count, shared, terms);
                break;
            case FP8_ROWS:
                run_shared<NB, FP8_ROWS>(
                    shared_down, shared_activations, used, count, shared, terms
                );
                break;
            default:
                run_shared<NB, NVFP4>(shared_down, shared_activations, used, count, shared, terms);
        }
    } else {
        switch (experts.first.format) {
            case F16:
                run_experts<NB, F16>(experts, all, routing, globals, activations, used, width,
                                     count, shared, terms);
                break;
            case FP8:
                run_experts<NB, FP8>(experts, all, routing, globals, activations, used, width,
                                     count, shared, terms);
                break;
            default:
                run_experts<NB, NVFP4>(experts, all, routing, globals, activations, used, width,
                                       count, shared, terms);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * TILE; i += blockDim.x) {
        const int row = i / TILE, r = i % TILE, at = blockIdx.x * TILE + r;
        if (at >= hidden) continue;
        // The shared expert first, then the row's experts in the order of its list.
        const auto term = [&](int k) { return terms[(k * NB * 8 + row) * TILE + r]; };
        float sum = term(used);
        for (int k = 0; k < used; k++) {
            // Other ranks' experts have no term here.
            if (routing.uses[row][k].expert >= 0) sum += term(k);
        }
        partial[static_cast<size_t>(row) * hidden + at] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(DOWN_WARPS * WARP, 3) expert_down_8(
    const __grid_constant__ DownExperts experts, const __grid_constant__ Matrix shared_down,
    const Routing* routing, int number, int used, const half* activations,
    const half* shared_activations, float* partial, int hidden, int width, int count
) {
    down<1>(experts, shared_down, routing, number, used, activations, shared_activations, partial,
            hidden, width, count);
}

extern "C" __global__ void __launch_bounds__(DOWN_WARPS * WARP, 2) expert_down_16(
    const __grid_constant__ DownExperts experts, const __grid_constant__ Matrix shared_down,
    const Routing* routing, int number, int used, const half* activations,
    const half* shared_activations, float* partial, int hidden, int width, int count
) {
    down<2>(experts, shared_down, routing, number, used, activations, shared_activations, partial,
            hidden, width, count);
}
