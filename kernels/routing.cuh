// Which experts a row uses, and the list of those that any row uses.
#pragma once

#include "common.cuh"

constexpr int MAX_EXPERTS = 256;
constexpr int MAX_USED = 16;

// A row's use of an expert: its number among this rank's own, or -1 for another rank's.
struct Use {
    int expert;
    float weight;
};

struct RouteLayout {
    int experts;
    int used;
    int splits;
    int renormalise;
    float scaling;
    // The rank's own experts: all, or a share of whole ones.
    int first_own;
    int own;
};

// The rank's own experts of all rows, as `choose_experts` leaves them: `list` in rising order,
// `place[row][expert]` where the row's own list has it, -1 where it does not. `used` has a bit for
// each expert of the list (cuda/routing.rs has the same struct).
struct __align__(16) Routing {
    int count;
    int list[MAX_EXPERTS];
    signed char place[MAX_ROWS][MAX_EXPERTS];
    Use uses[MAX_ROWS][MAX_USED];
    unsigned used[MAX_EXPERTS / WARP];
};

// Every `step`-th expert of the list, from the `first` on: what one warp goes through. A lane holds one
// of 32, so that going on costs no load. They are read past the L1 cache: `expert_down` begins before
// it waits.
struct Walk {
    const int* list;
    int first, step;
    unsigned held;

    __device__ __forceinline__ Walk(const Routing* routing, int first, int step)
        : list(routing->list), first(first), step(step) {
        hold(0);
    }

    // The expert at the walk's place `at`; places are asked for in order. Behind the list's end it may
    // be any number.
    __device__ __forceinline__ unsigned expert(int at) {
        if (at % WARP == 0 && at > 0) hold(at);
        return __shfl_sync(~0u, held, at % WARP);
    }

    // Places of a list that is `count` long.
    __device__ __forceinline__ int places(int count) const {
        return count > first ? (count - first + step - 1) / step : 0;
    }

   private:
    __device__ __forceinline__ void hold(int at) {
        const int place = first + (at + static_cast<int>(threadIdx.x % WARP)) * step;
        held = __ldcg(&list[min(place, MAX_EXPERTS - 1)]);
    }
};
