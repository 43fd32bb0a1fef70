// Stage `reduce_norm`: residual += the ranks' partial sums in rank order; normed = RMSNorm(residual).
//
// One block a row. Its threads take groups of 4 values in turn; between ranks in the same way in
// every variant, so that all of them give the same bits.
#include "exchange.cuh"

constexpr int THREADS = 1024;
// Groups of 4 values that a thread keeps: hidden sizes up to 16384.
constexpr int KEPT = 4;
// Threads of a block that exchanges: they need more registers, and 6144 values are two groups each.
constexpr int EXCHANGE_THREADS = 768;

__device__ __forceinline__ float4 load(const float* from, int group) {
    return reinterpret_cast<const float4*>(from)[group];
}

__device__ __forceinline__ float squares_of(float4 v) {
    return (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
}

__device__ __forceinline__ void store_normed(
    half* normed, int group, float4 v, float scale, float4 gain
) {
    half out[4] = {
        to_half(v.x * scale * gain.x), to_half(v.y * scale * gain.y),
        to_half(v.z * scale * gain.z), to_half(v.w * scale * gain.w)
    };
    *reinterpret_cast<uint2*>(normed + group * 4) = *reinterpret_cast<const uint2*>(out);
}

// A rank that is alone. partial is [MAX_ROWS][hidden].
extern "C" __global__ void __launch_bounds__(THREADS) reduce_norm(
    const float* partial, float* residual, const float* gain, float eps, half* normed, int hidden
) {
    release_consumer();
    __shared__ float scratch[THREADS / WARP];
    const size_t first = static_cast<size_t>(blockIdx.x) * hidden;
    const int groups = hidden / 4;
    float4 gains[KEPT], values[KEPT], added[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int group = threadIdx.x + k * THREADS;
        if (group < groups) gains[k] = load(gain, group);
    }
    wait_for_producer();
    // All loads are under way before the first is used.
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int group = threadIdx.x + k * THREADS;
        if (group < groups) {
            values[k] = load(residual + first, group);
            added[k] = load(partial + first, group);
        }
    }
    float squares = 0;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int group = threadIdx.x + k * THREADS;
        if (group < groups) {
            float4& v = values[k];
            v.x += added[k].x, v.y += added[k].y, v.z += added[k].z, v.w += added[k].w;
            squares += squares_of(v);
            reinterpret_cast<float4*>(residual + first)[group] = v;
        }
    }
    const float scale = rsqrtf(block_sum(squares, scratch) / hidden + eps);
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int group = threadIdx.x + k * THREADS;
        if (group < groups) store_normed(normed + first, group, values[k], scale, gains[k]);
    }
}

// What all variants take. partial, residual and normed are [rows][hidden].
struct Rows {
    const float* partial;
    float* residual;
    const float* gain;
    half* normed;
    float eps;
    int hidden;
    int rows;
};

// Adds the ranks' sum of each group, `sum_of(group)`, to a row's residual, and norms it.
template <bool INJECT, class Sum>
__device__ __forceinline__ void add_and_norm(
    const Collective<INJECT>& c, const Rows& x, int row, Sum sum_of
) {
    __shared__ float scratch[EXCHANGE_THREADS / WARP];
    float4* values = dynamic_shared<float4>();
    const size_t first = static_cast<size_t>(row) * x.hidden;
    const int groups = x.hidden / 4;
    float squares = 0;
#pragma unroll 1
    for (int group = threadIdx.x; group < groups; group += EXCHANGE_THREADS) {
        float4 v = load(x.residual + first, group);
        const float4 sum = sum_of(group);
        v.x += sum.x, v.y += sum.y, v.z += sum.z, v.w += sum.w;
        squares += squares_of(v);
        reinterpret_cast<float4*>(x.residual + first)[group] = v;
        values[group] = v;
        c.hash(v, row, group);
    }
    const float scale = rsqrtf(block_sum(squares, scratch) / x.hidden + x.eps);
#pragma unroll 1
    for (int group = threadIdx.x; group < groups; group += EXCHANGE_THREADS) {
        store_normed(x.normed + first, group, values[group], scale, load(x.gain, group));
    }
    // The next row's values may take the place of these.
    __syncthreads();
}

// Runs a variant's parts, each for all rows of this block.
template <bool INJECT, class Part>
__device__ __forceinline__ void run_parts(const Exchange& e, int rows, Part part) {
    if (!e.shared_device) release_consumer();
    Collective<INJECT> collective(e);
    wait_for_producer();
#pragma unroll 1
    for (int phase = SEND; phase <= RECEIVE; phase *= 2) {
        if ((e.phases & phase) == 0) continue;
#pragma unroll 1
        for (int row = blockIdx.x; row < rows; row += gridDim.x) {
            collective.delay(phase, row);
            part(collective, phase, row);
        }
    }
    if (e.trace != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *e.trace = now_ns();
}

// Every rank writes its partial sum into all mailboxes and sums what lies in its own.
// A mailbox: [2 slots][ranks][capacity][hidden].
template <bool INJECT>
__device__ __forceinline__ void push(const Exchange& e, const Rows& x) {
    run_parts<INJECT>(e, x.rows, [&](Collective<INJECT>& c, int phase, int row) {
        const float* own = x.partial + static_cast<size_t>(row) * x.hidden;
        const auto place = [&](int box, int from, int group) {
            const size_t line = (static_cast<size_t>(c.slot()) * e.ranks + from) * e.capacity + row;
            return e.boxes[box] + (line * x.hidden + group * 4) * sizeof(float);
        };
        if (phase == SEND) {
            for (int group = threadIdx.x; group < x.hidden / 4; group += EXCHANGE_THREADS) {
                const uint4 packet = to_packet(load(own, group));
                // Each rank begins with another, so that they do not all write to one.
                for (int i = 1; i < e.ranks; i++) {
                    const int peer = (e.rank + i) % e.ranks;
                    c.send(place(peer, e.rank, group), packet, peer, group == 0);
                }
            }
        } else if (phase == RECEIVE) {
            const unsigned pitch = e.capacity * x.hidden * sizeof(float);
            add_and_norm(c, x, row, [&](int group) {
                uint8_t* first = place(e.rank, 0, group);
                return c.sum_of_ranks(load(own, group), phase, row, first, pitch);
            });
        }
    });
}

// Every rank puts its partial sum into its own mailbox, raises a flag in all others, and reads the
// others' mailboxes. A mailbox: [2 slots][capacity][hidden], then flags [ranks][capacity], which hold
// the last epoch that a rank has published for a row. In the host's memory it needs no peer access.
template <bool INJECT>
__device__ __forceinline__ void pull(const Exchange& e, const Rows& x) {
    run_parts<INJECT>(e, x.rows, [&](Collective<INJECT>& c, int phase, int row) {
        const float* own = x.partial + static_cast<size_t>(row) * x.hidden;
        const size_t line = static_cast<size_t>(c.slot()) * e.capacity + row;
        const auto place = [&](int box, int group) {
            return e.boxes[box] + (line * x.hidden + group * 4) * sizeof(float);
        };
        const auto flag = [&](int box, int from) {
            const size_t flags = 2 * static_cast<size_t>(e.capacity) * x.hidden * sizeof(float);
            return e.boxes[box] + flags + (static_cast<size_t>(from) * e.capacity + row) * 8;
        };
        const int peer = threadIdx.x;
        const bool has_peer = peer < e.ranks && peer != e.rank;
        if (phase == SEND) {
            for (int group = threadIdx.x; group < x.hidden / 4; group += EXCHANGE_THREADS) {
                uint4 packet = to_packet(load(own, group));
                if (group == 0 && c.is_injected(FLIP, -1)) packet.x ^= 1u << 20;
                store_system(place(e.rank, group), packet);
            }
            __syncthreads();
            if (has_peer && !c.is_injected(DROP, peer)) {
                __threadfence_system();
                store_system_64(flag(peer, e.rank), c.epoch);
            }
        } else if (phase == RECEIVE) {
            if (has_peer) {
                while (load_system_64(flag(e.rank, peer)) < c.epoch) {
                    if (c.give_up(peer, phase, row)) break;
                }
                __threadfence_system();
            }
            __syncthreads();
            add_and_norm(c, x, row, [&](int group) {
                uint4 part[MAX_RANKS];
#pragma unroll
                for (int r = 0; r < MAX_RANKS; r++) {
                    if (r < e.ranks && r != e.rank) part[r] = load_system(place(r, group));
                }
                float4 sum;
#pragma unroll
                for (int r = 0; r < MAX_RANKS; r++) {
                    if (r >= e.ranks) break;
                    const float4 v = r == e.rank ? load(own, group) : from_packet(part[r]);
                    if (r == 0) {
                        sum = v;
                    } else {
                        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
                    }
                }
                return sum;
            });
        }
    });
}

// Each rank owns a share of the columns: it gets that share of all partial sums, sums it and gives
// the sum to all. A mailbox: [2 slots][ranks][capacity][share], then [2 slots][capacity][hidden].
template <bool INJECT>
__device__ __forceinline__ void owner(const Exchange& e, const Rows& x) {
    const int groups = x.hidden / 4, share = (groups + e.ranks - 1) / e.ranks;
    run_parts<INJECT>(e, x.rows, [&](Collective<INJECT>& c, int phase, int row) {
        const float* own = x.partial + static_cast<size_t>(row) * x.hidden;
        const auto part_place = [&](int box, int from, int in_share) {
            const size_t line = (static_cast<size_t>(c.slot()) * e.ranks + from) * e.capacity + row;
            return e.boxes[box] + (line * share + in_share) * sizeof(float4);
        };
        const auto sum_place = [&](int box, int group) {
            const size_t parts = 2 * static_cast<size_t>(e.ranks) * e.capacity * share;
            const size_t line = static_cast<size_t>(c.slot()) * e.capacity + row;
            return e.boxes[box] + (parts + line * groups + group) * sizeof(float4);
        };
        if (phase == SEND) {
            // The rank's own share last.
            for (int i = threadIdx.x; i < share * (e.ranks - 1); i += EXCHANGE_THREADS) {
                const int peer = (e.rank + 1 + i / share) % e.ranks, in_share = i % share;
                const int group = peer * share + in_share;
                if (group >= groups) continue;
                c.send(part_place(peer, e.rank, in_share), to_packet(load(own, group)), peer,
                       in_share == 0);
            }
        } else if (phase == COMBINE) {
            const unsigned pitch = e.capacity * share * sizeof(float4);
            for (int in_share = threadIdx.x; in_share < share; in_share += EXCHANGE_THREADS) {
                const int group = e.rank * share + in_share;
                if (group >= groups) continue;
                uint8_t* first = part_place(e.rank, 0, in_share);
                const uint4 sum =
                    to_packet(c.sum_of_ranks(load(own, group), phase, row, first, pitch));
                for (int i = 1; i <= e.ranks; i++) {
                    const int peer = (e.rank + i) % e.ranks;
                    store_system(sum_place(peer, group), sum);
                }
            }
        } else {
            add_and_norm(c, x, row, [&](int group) {
                uint8_t* at = sum_place(e.rank, group);
                uint4 sum = load_system(at);
                while (is_empty(sum) && !c.give_up(group / share, phase, row)) sum = load_system(at);
                *reinterpret_cast<uint4*>(at) = empty_packet();
                return from_packet(sum);
            });
        }
    });
}

#define VARIANT(name)                                                                            \
    extern "C" __global__ void __launch_bounds__(EXCHANGE_THREADS) reduce_norm_##name(                    \
        const __grid_constant__ Exchange e, const __grid_constant__ Rows x                       \
    ) {                                                                                          \
        name<false>(e, x);                                                                       \
    }                                                                                            \
    /* The same with what tests make go wrong. */                                                \
    extern "C" __global__ void __launch_bounds__(EXCHANGE_THREADS) reduce_norm_##name##_injected(         \
        const __grid_constant__ Exchange e, const __grid_constant__ Rows x                       \
    ) {                                                                                          \
        name<true>(e, x);                                                                        \
    }

VARIANT(push)
VARIANT(pull)
VARIANT(owner)
