// How the emulator runs a block: each CUDA thread is a fiber, and one thread of the host runs all
// fibers of a block in turn. A fiber gives way only where the kernel waits for other threads, so
// everything between two such places is atomic.
//
// Shared memory is thread-local storage of the host's thread that runs the block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

namespace emulator {

struct Index {
    unsigned x, y, z;
};

}  // namespace emulator

// Where the running fiber is.
extern thread_local emulator::Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr int WARP = 32;
constexpr int MAX_THREADS = 1024;
// Of an H200, which has more than a Blackwell card.
constexpr size_t MAX_SHARED = 227 * 1024;

// All shared memory is in the same storage as this: its distance from here is its address.
extern thread_local uint8_t dynamic[MAX_SHARED];

// What one launch does.
struct Work {
    std::function<void()> kernel;
    Index grid;
    unsigned threads;
    size_t shared_bytes;
    // Blocks of a cluster, in x; they run at the same time.
    unsigned cluster;
};

void run(const Work& work);

// Lets the block's other fibers run.
void give_way();
// __syncthreads, and a barrier of `threads` threads beside it.
void barrier();
void second_barrier(int threads);
// All threads of the cluster wait for each other.
void cluster_barrier();
// `mine`, shared memory of this block, as it lies in block `rank` of the cluster.
void* in_block(const void* mine, unsigned rank);

// One lane's asynchronous copies happen when it waits for them, and not before.
void copy_later(uint32_t to, const void* from, uint32_t bytes);
void commit_copies();
void wait_for_copies(int pending);

constexpr size_t MOST_BYTES = 48;
// What the lanes of a mask bring to a meeting, one place for each lane.
struct Meeting {
    alignas(16) uint8_t brought[WARP][MOST_BYTES];
};
// Waits for all lanes of the mask that still run. The last to come calls `change`, if it is there.
const Meeting& meet(uint32_t mask, const void* mine, size_t bytes, void (*change)(Meeting&));

inline unsigned lane() { return threadIdx.x % WARP; }

template <class T>
T brought(const Meeting& meeting, unsigned lane) {
    T value;
    std::memcpy(&value, meeting.brought[lane], sizeof(T));
    return value;
}

template <class T>
const Meeting& meet(uint32_t mask, const T& mine, void (*change)(Meeting&) = nullptr) {
    static_assert(sizeof(T) <= MOST_BYTES);
    return meet(mask, &mine, sizeof(T), change);
}

}  // namespace emulator
