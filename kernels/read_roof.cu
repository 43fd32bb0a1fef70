// The fastest plain read of memory, which all other kernels are measured against.
#include "common.cuh"

constexpr int READ_THREADS = 512;
constexpr int UNDER_WAY = 8;

// Reads `count` pieces of 16 bytes; `sink` is written only if all of them are a pattern that does
// not occur, so that the reads are not dropped.
extern "C" __global__ void __launch_bounds__(READ_THREADS) read_roof(
    const uint4* from, size_t count, uint32_t* sink
) {
    release_consumer();
    const size_t threads = static_cast<size_t>(gridDim.x) * READ_THREADS;
    uint32_t all = ~0u;
    for (size_t i = blockIdx.x * static_cast<size_t>(READ_THREADS) + threadIdx.x; i < count;
         i += threads * UNDER_WAY) {
        uint4 value[UNDER_WAY];
#pragma unroll
        for (int k = 0; k < UNDER_WAY; k++) {
            value[k] = make_uint4(~0u, ~0u, ~0u, ~0u);
            if (i + k * threads < count) {
                value[k] = load_once(from + i + k * threads);
            }
        }
#pragma unroll
        for (int k = 0; k < UNDER_WAY; k++) {
            all &= value[k].x & value[k].y & value[k].z & value[k].w;
        }
    }
    wait_for_producer();
    if (all == 0xDEADBEEF) *sink = all;
}
