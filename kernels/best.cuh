// The likeliest of a vocabulary that ranks share.
#pragma once

#include "common.cuh"

struct Best {
    int id;
    float logit;
};

// Ties: the lower id. A NaN never wins, and a row of NaN keeps -infinity.
__device__ __forceinline__ bool better(Best a, Best b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

__device__ __forceinline__ Best best_of_warp(Best best) {
    for (int step = 16; step > 0; step /= 2) {
        const Best other{
            __shfl_xor_sync(~0u, best.id, step), __shfl_xor_sync(~0u, best.logit, step)
        };
        if (better(other, best)) best = other;
    }
    return best;
}

constexpr Best NONE{0x7FFFFFFF, -INFINITY};
