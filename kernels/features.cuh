// What the target leaves for a drafter: of each sequence's last positions the vectors that it reads,
// as f16 in a ring.
#pragma once

#include "common.cuh"

// cuda/layout.rs has the same struct.
struct FeatureLayout {
    // Of a sequence in the ring.
    int positions;
    // Vectors of a position, and their size.
    int count;
    int hidden;
    // What the stored values are short of: residuals grow, and are stored times ACTIVATION_SCALE.
    float unit;

    // The ring is [sequences * positions + 1][count][hidden]; the last entry takes what rows write
    // that only fill up a step, which are at position 0 of the sequence behind the last.
    __device__ size_t entry(const Row& row) const {
        const size_t line = static_cast<size_t>(row.sequence) * positions;
        return (line + row.position % positions) * count * hidden;
    }
};
