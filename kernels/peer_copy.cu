// A copy by loads and stores, between devices or within one: what a start qualifies links with.
#include "exchange.cuh"

// Copies `packets` of 16 bytes; runs on the device that reads or on the one that writes.
extern "C" __global__ void peer_copy(const uint8_t* from, uint8_t* to, int packets) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < packets; i += gridDim.x * blockDim.x) {
        store_system(to + i * 16ull, load_system(from + i * 16ull));
    }
}
