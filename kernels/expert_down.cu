// Stage `expert_down`: down projections, weighted sum, the shared expert's down, into the partial
// sum. A block owns a tile of the hidden dimensions over all experts: no atomics, and a row's terms
// are added in the order of its own list.
#include "routing.cuh"
#include "tile.cuh"

// Warps for the routed experts, then warps for the shared one.
constexpr int EXPERT_WARPS = 8;
constexpr int SHARED_WARPS = 2;
constexpr int DOWN_WARPS = EXPERT_WARPS + SHARED_WARPS;
// Slots of a warp's ring.
constexpr int DOWN_RING = 4;

struct DownExperts {
    Matrix first;
    // [experts], NVFP4's scales of the tensors; 1 in other formats.
    const float* globals;
};

// Tiles that a block owns.
constexpr int DOWN_TILES = 1;
constexpr int DOWN_ROWS = DOWN_TILES * TILE;

// A warp's units: for each of its experts, the units of each of the block's tiles.
template <int format>
struct ExpertUnits {
    const uint8_t* codes;
    const uint8_t* scales;
    const Matrix* first;
    const Routing* routing;
    // The last place in the list of experts, the next one, and the unit within the block's tiles.
    int last, at, unit;

    __device__ void locate(int tile) {
        const size_t of_expert = static_cast<size_t>(first->tiles()) * first->units();
        const size_t before = __ldcg(&routing->list[min(at, last)]) * of_expert +
                              static_cast<size_t>(tile) * first->units() + unit;
        codes = first->codes + before * SLOTS<format> * SLOT_CODES;
        scales = first->scales + before * SCALES<format>;
    }

    __device__ void advance() {
        codes += SLOTS<format> * SLOT_CODES;
        scales += SCALES<format>;
        if (++unit == DOWN_TILES * first->units()) {
            unit = 0;
            at += EXPERT_WARPS;
            locate(blockIdx.x * DOWN_TILES);
        }
    }
};

// terms: [used + SHARED_WARPS][8 NB][DOWN_ROWS]. Stores a tile's results and clears them;
// `place_of(row, scale)` is where a row's term goes, below 0 for nowhere.
template <int NB, class Place>
__device__ __forceinline__ void store_term(
    float* terms, int tile, float (&acc)[NB][4], Place place_of
) {
    const int g = threadIdx.x % WARP / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < NB; n++) {
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int row = n * 8 + 2 * q + odd;
            float scale;
            const int place = place_of(row, scale);
            if (place >= 0) {
                float* term = terms + (place * NB * 8 + row) * DOWN_ROWS + tile * TILE + g;
                term[0] = acc[n][odd] * scale;
                term[8] = acc[n][odd + 2] * scale;
            }
            acc[n][odd] = 0, acc[n][odd + 2] = 0;
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
    const int units = w.units(), of_item = DOWN_TILES * units;
    const int listed = __ldcg(&all->count);
    ExpertUnits<format> source = {nullptr, nullptr, &w, all, listed - 1, warp, 0};
    source.locate(blockIdx.x * DOWN_TILES);
    const int items = max(0, (listed - warp + EXPERT_WARPS - 1) / EXPERT_WARPS);
    Ring<format, DOWN_RING, ExpertUnits<format>> ring(shared, source, items * of_item);
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(Routing) / 16);
         i += EXPERT_WARPS * WARP) {
        reinterpret_cast<uint4*>(&routing)[i] = __ldcg(reinterpret_cast<const uint4*>(all) + i);
    }
    // Without the warps of the shared expert, which are at their own work.
    second_barrier<EXPERT_WARPS * WARP>();
    wait_for_producer();
    int expert = 0, unit = 0, at = warp;
    float global = 0;
    float acc[NB][4] = {};
    int next_unit = 0, next_at = warp;
    ring.run(
        items * of_item,
        [&](int, const half*(&next)[NB]) {
            const int of = routing.list[next_at];
            const int column = next_unit % units * UNIT;
#pragma unroll
            for (int n = 0; n < NB; n++) {
                if (column == 0) {
                    const int row = min(n * 8 + g, count - 1);
                    const int place = max(routing.place[row][of], 0);
                    next[n] = activations + (static_cast<size_t>(row) * used + place) * width;
                } else {
                    next[n] += UNIT;
                }
            }
            if (++next_unit == of_item) next_unit = 0, next_at += EXPERT_WARPS;
        },
        [&](int u) {
            const size_t of_expert = static_cast<size_t>(w.tiles()) * units;
            const size_t before = routing.list[warp + u / of_item * EXPERT_WARPS] * of_expert +
                                  static_cast<size_t>(blockIdx.x) * of_item + u % of_item;
            return __ldg(reinterpret_cast<const float2*>(w.scales + before * FP8_SCALES));
        },
        acc,
        [&](int, float(&acc)[NB][4]) {
            if (unit == 0) {
                expert = routing.list[at];
                global = globals[expert] * DECODED_SCALE<format>;
            }
            if (unit % units == units - 1) {
                store_term<NB>(terms, unit / units, acc, [&](int row, float& scale) {
                    const int place = row < count ? routing.place[row][expert] : -1;
                    scale = place < 0 ? 0 : global * routing.uses[row][place].weight;
                    return place;
                });
            }
            if (++unit == of_item) unit = 0, at += EXPERT_WARPS;
        }
    );
}

// The shared expert: each of SHARED_WARPS takes an equal part of the columns of the block's tiles; its
// ring is filled before the wait.
template <int NB, int format>
__device__ __forceinline__ void run_shared(
    const Matrix& w, const half* x, int used, int count, uint8_t* shared, float* terms
) {
    const int warp = threadIdx.x / WARP - EXPERT_WARPS, g = threadIdx.x % WARP / 4;
    const int units = w.units();
    const int first = units * warp / SHARED_WARPS, end = units * (warp + 1) / SHARED_WARPS;
    // One run of units a tile; the next one's begins as many units behind as a tile has.
    struct Source {
        const uint8_t* codes;
        const uint8_t* scales;
        int unit, first, end, units;

        __device__ void advance() {
            const int step = ++unit == end ? units - (end - first) + 1 : 1;
            if (unit == end) unit = first;
            codes += static_cast<size_t>(step) * SLOTS<format> * SLOT_CODES;
            scales += static_cast<size_t>(step) * SCALES<format>;
        }
    };
    const size_t before = static_cast<size_t>(blockIdx.x) * DOWN_TILES * units + first;
    const Source source = {
        w.codes + before * SLOTS<format> * SLOT_CODES, w.scales + before * SCALES<format>, first,
        first, end, units
    };
    const int each = end - first;
    Ring<format, DOWN_RING, Source> ring(shared, source, DOWN_TILES * each);
    float upper[DOWN_TILES], lower[DOWN_TILES];
#pragma unroll
    for (int tile = 0; tile < DOWN_TILES; tile++) {
        const int row = (blockIdx.x * DOWN_TILES + tile) * TILE + g;
        upper[tile] = w.row_scale<format>(row), lower[tile] = w.row_scale<format>(row + 8);
    }
    wait_for_producer();
    const half* vector[NB];
#pragma unroll
    for (int n = 0; n < NB; n++) {
        vector[n] = x + static_cast<size_t>(min(n * 8 + g, count - 1)) * w.columns + first * UNIT;
    }
    const auto put = [&](int tile, float(&acc)[NB][4]) {
#pragma unroll
        for (int n = 0; n < NB; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) acc[n][i] *= i < 2 ? upper[tile] : lower[tile];
        }
        store_term<NB>(terms, tile, acc, [&](int, float& scale) {
            scale = w.global * DECODED_SCALE<format>;
            return used + warp;
        });
    };
    float acc[NB][4] = {};
    if (each == 0) {
        for (int tile = 0; tile < DOWN_TILES; tile++) put(tile, acc);
    }
    ring.run(
        DOWN_TILES * each,
        [&](int u, const half*(&next)[NB]) {
#pragma unroll
            for (int n = 0; n < NB; n++) next[n] = vector[n] + u % each * UNIT;
        },
        [&](int u) {
            const size_t unit = before + static_cast<size_t>(u / each) * units + u % each;
            return __ldg(reinterpret_cast<const float2*>(w.scales + unit * FP8_SCALES));
        },
        acc,
        [&](int u, float(&acc)[NB][4]) {
            if (u % each == each - 1) put(u / each, acc);
        }
    );
}

// grid: tiles of the hidden dimensions / DOWN_TILES. partial: [MAX_ROWS][hidden]; `number` experts,
// of which a row uses `used`.
// Shared: the rings, then terms [used + SHARED_WARPS][8 NB][DOWN_ROWS].
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
    float* terms = reinterpret_cast<float*>(shared + DOWN_WARPS * DOWN_RING * SLOT);
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
    for (int i = threadIdx.x; i < count * DOWN_ROWS; i += blockDim.x) {
        const int row = i / DOWN_ROWS, r = i % DOWN_ROWS, at = blockIdx.x * DOWN_ROWS + r;
        if (at >= hidden) continue;
        // The shared expert first, then the row's experts in the order of its list.
        const auto term = [&](int k) { return terms[(k * NB * 8 + row) * DOWN_ROWS + r]; };
        float sum = 0;
        for (int k = 0; k < SHARED_WARPS; k++) sum += term(used + k);
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
