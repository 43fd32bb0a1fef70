// Stage `embed`: takes the step from the host; each row's line of the table becomes the first partial
// sum, the residual zero.
#include "exchange.cuh"

// What the host writes for a step.
struct Step {
    unsigned long long epoch;
    unsigned long long padding;
    Row rows[MAX_ROWS];
};

// One block a row. Later kernels read rows and epoch before they wait for their producer, so the one
// behind this begins when it has ended.
extern "C" __global__ void embed(
    const Step* step, Row* rows, Control* control, const __nv_bfloat16* table, float* partial,
    float* residual, int hidden
) {
    __shared__ int token;
    const size_t row = blockIdx.x;
    if (threadIdx.x == 0) {
        const uint4 own = load_system(&step->rows[row]);
        token = own.x;
        reinterpret_cast<uint4*>(rows)[row] = own;
        if (row == 0) {
            control->epoch = load_system_64(&step->epoch);
            control->hash = 0;
        }
    }
    __syncthreads();
    const __nv_bfloat16* line = table + static_cast<size_t>(token) * hidden;
    for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
        partial[row * hidden + i] = __bfloat162float(line[i]);
        residual[row * hidden + i] = 0;
    }
}
