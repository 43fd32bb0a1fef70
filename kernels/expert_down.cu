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

// terms: [used + SHARED_WARPS][rows][16].
template <int NB, int format>
__device__ __forceinline__ void run_experts(
    const DownExperts& experts, const Routing& routing, const float* scales,
    const half* activations, int used, int width, int count, uint8_t* shared, float* terms
) {
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4;
    const Matrix& w = experts.first;
    const int units = w.units(), tile = blockIdx.x;
    const int mine = warp < routing.count ? (routing.count - warp + EXPERT_WARPS - 1) / EXPERT_WARPS : 0;
    const Ring<format, DOWN_RING> ring(shared);
    const size_t of_expert = static_cast<size_t>(w.tiles()) * units;
    const auto address = [&](int u) {
        const int expert = routing.list[warp + u / units * EXPERT_WARPS];
        const size_t unit = expert * of_expert + static_cast<size_t>(tile) * units + u % units;
        return Unit{w.codes + unit * SLOTS<format> * SLOT_CODES, w.scales + unit * SCALES<format>};
    };
    ring.start(mine * units, address);
    float acc[NB][4] = {};
    ring.run(
        mine * units, address,
        [&](int u, Vectors<NB>& part) {
            const int expert = routing.list[warp + u / units * EXPERT_WARPS];
            const half* vector[NB];
#pragma unroll
            for (int n = 0; n < NB; n++) {
                const int row = n * 8 + g;
                const int place = row < count ? routing.place[row][expert] : -1;
                vector[n] = place < 0 ? nullptr
                                      : activations + (static_cast<size_t>(row) * used + place) * width;
            }
            const int column = u % units * UNIT;
            load_vectors<NB>(part, vector, column, width - column);
        },
        acc,
        [&](int u, float(&acc)[NB][4]) {
            if (u % units != units - 1) return;
            const int at = warp + u / units * EXPERT_WARPS, expert = routing.list[at];
            const float scale = scales[at] * DECODED_SCALE<format>;
            const int q = threadIdx.x % 4;
#pragma unroll
            for (int n = 0; n < NB; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int row = n * 8 + 2 * q + i % 2;
                    const int place = row < count ? routing.place[row][expert] : -1;
                    if (place >= 0) {
                        terms[(place * NB * 8 + row) * TILE + g + i / 2 * 8] =
                            acc[n][i] * scale * routing.uses[row][place].weight;
                    }
                    acc[n][i] = 0;
                }
            }
        }
    );
}

// The shared expert's units are dealt out to SHARED_WARPS; their rings are filled before the wait.
template <int NB, int format>
__device__ __forceinline__ void run_shared(
    const Matrix& w, const half* x, int count, uint8_t* shared, float* terms
) {
    const int warp = threadIdx.x / WARP - EXPERT_WARPS, g = threadIdx.x % WARP / 4;
    const Share share(w.units(), 0, 1, warp, SHARED_WARPS);
    const size_t before = static_cast<size_t>(blockIdx.x) * w.units() + share.first;
    const uint8_t* codes = w.codes + before * SLOTS<format> * SLOT_CODES;
    const uint8_t* scales = w.scales + before * SCALES<format>;
    const auto address = [&](int u) {
        const size_t unit = static_cast<size_t>(u) * SHARED_WARPS;
        return Unit{codes + unit * SLOTS<format> * SLOT_CODES, scales + unit * SCALES<format>};
    };
    const Ring<format, DOWN_RING> ring(shared);
    ring.start(share.count, address);
    wait_for_producer();
    const half* vector[NB];
#pragma unroll
    for (int n = 0; n < NB; n++) {
        const int row = n * 8 + g;
        vector[n] = row < count ? x + static_cast<size_t>(row) * w.columns : nullptr;
    }
    float acc[NB][4] = {};
    ring.run(
        share.count, address,
        [&](int u, Vectors<NB>& part) {
            const int column = (share.first + u * SHARED_WARPS) * UNIT;
            load_vectors<NB>(part, vector, column, w.columns - column);
        },
        acc, [](int, float(&)[NB][4]) {}
    );
#pragma unroll
    for (int n = 0; n < NB; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) acc[n][i] *= w.global * DECODED_SCALE<format>;
    }
    store_tile<NB>(terms + warp * NB * 8 * TILE, acc);
}

// grid: tiles of the hidden dimensions. partial: [MAX_ROWS][hidden].
// Shared: the rings, then terms [used + SHARED_WARPS][8 NB][16].
template <int NB>
__device__ __forceinline__ void down(
    const DownExperts& experts, const Matrix& shared_down, const RouteLayout& l, const Use* uses,
    const half* activations, const half* shared_activations, float* partial, int hidden, int width,
    int count
) {
    release_consumer();
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Routing routing;
    __shared__ float scales[MAX_EXPERTS];
    float* terms = reinterpret_cast<float*>(shared + DOWN_WARPS * DOWN_RING * SLOT);
    float* shared_terms = terms + l.used * NB * 8 * TILE;
    if (threadIdx.x / WARP >= EXPERT_WARPS) {
        switch (shared_down.format) {
            case F16:
                run_shared<NB, F16>(shared_down, shared_activations, count, shared, shared_terms);
                break;
            case FP8:
                run_shared<NB, FP8>(shared_down, shared_activations, count, shared, shared_terms);
                break;
            default:
                run_shared<NB, NVFP4>(shared_down, shared_activations, count, shared, shared_terms);
        }
    } else {
        wait_for_producer();
    }
    for (int i = threadIdx.x; i < count * l.used; i += blockDim.x) {
        routing.uses[i / l.used][i % l.used] = uses[i];
    }
    list_experts(routing, count, l);
    for (int i = threadIdx.x; i < routing.count; i += blockDim.x) {
        scales[i] = experts.globals[routing.list[i]];
    }
    __syncthreads();
    if (threadIdx.x / WARP < EXPERT_WARPS) {
        switch (experts.first.format) {
            case F16:
                run_experts<NB, F16>(experts, routing, scales, activations, l.used, width, count, shared, terms);
                break;
            case FP8:
                run_experts<NB, FP8>(experts, routing, scales, activations, l.used, width, count, shared, terms);
                break;
            default:
                run_experts<NB, NVFP4>(experts, routing, scales, activations, l.used, width, count, shared, terms);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * TILE; i += blockDim.x) {
        const int row = i / TILE, r = i % TILE, at = blockIdx.x * TILE + r;
        if (at >= hidden) continue;
        float sum = 0;
        for (int k = 0; k < SHARED_WARPS; k++) sum += shared_terms[(k * NB * 8 + row) * TILE + r];
        for (int k = 0; k < l.used; k++) sum += terms[(k * NB * 8 + row) * TILE + r];
        partial[static_cast<size_t>(row) * hidden + at] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(DOWN_WARPS * WARP) expert_down_8(
    const __grid_constant__ DownExperts experts, const __grid_constant__ Matrix shared_down,
    const __grid_constant__ RouteLayout l, const Use* uses, const half* activations,
    const half* shared_activations, float* partial, int hidden, int width, int count
) {
    down<1>(experts, shared_down, l, uses, activations, shared_activations, partial, hidden, width,
            count);
}

extern "C" __global__ void __launch_bounds__(DOWN_WARPS * WARP) expert_down_16(
    const __grid_constant__ DownExperts experts, const __grid_constant__ Matrix shared_down,
    const __grid_constant__ RouteLayout l, const Use* uses, const half* activations,
    const half* shared_activations, float* partial, int hidden, int width, int count
) {
    down<2>(experts, shared_down, l, uses, activations, shared_activations, partial, hidden, width,
            count);
}
