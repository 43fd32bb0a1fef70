// Stage `keep_features`: what a drafter reads of the target's rows, behind the reduce_norm that made
// it.
#include "features.cuh"

// One block a row. residual: [MAX_ROWS][hidden]; `place` is that of the vector in an entry.
extern "C" __global__ void keep_residual(
    const Row* rows, const __grid_constant__ FeatureLayout l, int place, const float* residual,
    half* ring
) {
    release_consumer();
    const size_t row = blockIdx.x;
    half* to = ring + l.entry(rows[row]) + static_cast<size_t>(place) * l.hidden;
    wait_for_producer();
    for (int i = threadIdx.x; i < l.hidden; i += blockDim.x) {
        to[i] = to_half(residual[row * l.hidden + i] / l.unit);
    }
}

// The same of the final norm's output, [MAX_ROWS][hidden].
extern "C" __global__ void keep_normed(
    const Row* rows, const __grid_constant__ FeatureLayout l, const half* normed, half* ring
) {
    release_consumer();
    const size_t row = blockIdx.x;
    half* to = ring + l.entry(rows[row]);
    wait_for_producer();
    for (int i = threadIdx.x; i < l.hidden; i += blockDim.x) to[i] = normed[row * l.hidden + i];
}
