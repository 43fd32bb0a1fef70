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
