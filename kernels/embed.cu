// Stage `embed`: each row's line of the table becomes the first partial sum, the residual zero.
#include "common.cuh"

extern "C" __global__ void embed(
    const Row* rows, const __nv_bfloat16* table, float* partial, float* residual, int hidden
) {
    release_consumer();
    wait_for_producer();
    const size_t row = blockIdx.x;
    const __nv_bfloat16* line = table + static_cast<size_t>(rows[row].token) * hidden;
    for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
        partial[row * hidden + i] = __bfloat162float(line[i]);
        residual[row * hidden + i] = 0;
    }
}
