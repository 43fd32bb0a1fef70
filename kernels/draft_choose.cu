// Second half of a drafter's `draft_head`: its likeliest token over all ranks, with its probability,
// for the host and for the chain's next row.
#include "best.cuh"
#include "exchange.cuh"

constexpr int THREADS = 1024;

// A rank's part of the draft vocabulary.
struct DraftPart {
    const float* logits;
    // Of the rank that count, and the id of the first.
    int limit;
    int first_id;
    // Target id of each draft id, or null where they are the same.
    const int* target_ids;
    // Between the parts of the exchange: the rank's best id, and its sum.
    Best* own;
    // For the host: the id in the target's vocabulary and its probability (head.cu, `Result`).
    uint4* result;
    // The first row is the one that the token follows, and becomes the next one.
    Row* rows;
};

// Sum of the exponentials relative to the largest logit, the same in every thread.
__device__ __forceinline__ float sum_of_block(const DraftPart& part, float most) {
    __shared__ float scratch[THREADS / WARP];
    float sum = 0;
    for (int i = threadIdx.x; i < part.limit; i += THREADS) sum += __expf(part.logits[i] - most);
    return block_sum(sum, scratch);
}

// One block. A rank sends two packets, as if for two rows: (id, logit) and (id, sum of the
// exponentials relative to that logit). As with embed, the kernel behind this begins when it has
// ended.
extern "C" __global__ void __launch_bounds__(THREADS) draft_choose(
    const __grid_constant__ Exchange e, const __grid_constant__ DraftPart part
) {
    __shared__ Best of_warps[THREADS / WARP];
    Collective<false> c(e);
    wait_for_producer();
    const int lane = threadIdx.x;
    const auto place = [&](int box, int from, int which) {
        const size_t line =
            (static_cast<size_t>(c.slot()) * e.ranks + from) * e.capacity + which;
        return e.boxes[box] + line * sizeof(Best);
    };
    if (e.phases & SEND) {
        Best best = NONE;
        for (int i = lane; i < part.limit; i += THREADS) {
            const Best other{part.first_id + i, part.logits[i]};
            if (better(other, best)) best = other;
        }
        best = best_of_warp(best);
        if (lane % WARP == 0) of_warps[lane / WARP] = best;
        __syncthreads();
        best = best_of_warp(of_warps[lane % WARP]);
        const float sum = best.id == NONE.id ? 0 : sum_of_block(part, best.logit);
        if (lane == 0) {
            part.own[0] = best;
            part.own[1] = Best{best.id, sum};
        }
        if (lane < e.ranks && lane != e.rank) {
            const auto send = [&](int which, float value) {
                const unsigned long long packet =
                    static_cast<unsigned long long>(__float_as_uint(value)) << 32 | best.id;
                store_system_64(place(lane, e.rank, which), packet);
            };
            send(0, best.logit);
            send(1, sum);
        }
        __syncthreads();
    }
    if ((e.phases & RECEIVE) == 0 || lane >= WARP) return;
    Best best = NONE;
    float sum = 0;
    if (lane < e.ranks && lane != e.rank) {
        const auto receive = [&](int which) {
            uint8_t* at = place(e.rank, lane, which);
            unsigned long long packet;
            do {
                packet = load_system_64(at);
            } while (static_cast<unsigned>(packet) == EMPTY && !c.give_up(lane, RECEIVE, which));
            *reinterpret_cast<unsigned long long*>(at) = ~0ull;
            return Best{static_cast<int>(packet), __uint_as_float(packet >> 32)};
        };
        best = receive(0);
        sum = receive(1).logit;
    }
    __syncwarp();
    if (lane == e.rank) best = part.own[0], sum = part.own[1].logit;
    const Best winner = best_of_warp(best);
    // In rank order, and so the same on all ranks.
    const float relative = sum == 0 ? 0 : sum * __expf(best.logit - winner.logit);
    float total = 0;
    for (int rank = 0; rank < e.ranks; rank++) total += __shfl_sync(~0u, relative, rank);
    if (lane != 0) return;
    // Where no logit is a number the host reports it; the chain goes on with any token.
    const bool is_none = winner.id == NONE.id;
    const int draft_id = is_none ? 0 : winner.id;
    const int id = part.target_ids == nullptr ? draft_id : part.target_ids[draft_id];
    const float probability = is_none ? __uint_as_float(0x7FFFFFFF) : 1 / total;
    *part.result = make_uint4(id, __float_as_uint(probability), 0, 0);
    part.rows->token = id;
    part.rows->position++;
}
