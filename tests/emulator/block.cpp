#include "block.h"

#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#ifndef __x86_64__
#error "the emulator switches fibers on x86-64 only"
#endif

// Saves the registers that a call keeps on the running stack, and goes on with another one.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.globl emulator_switch
.hidden emulator_switch
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

thread_local emulator::Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

alignas(128) thread_local uint8_t dynamic[MAX_SHARED];

namespace {

constexpr size_t STACK = 256 * 1024;

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "emulator: block (%u, %u, %u), thread %u: %s\n", blockIdx.x,
                 blockIdx.y, blockIdx.z, threadIdx.x, what);
    std::abort();
}

struct Copy {
    uint32_t to, bytes;
    const void* from;
    unsigned group;
};

struct Fiber {
    void* stack_pointer;
    unsigned thread;
    bool is_alive;
    std::deque<Copy> copies;
    // Groups of copies that it has committed.
    unsigned groups;
};

// Lanes that meet under one mask. Two places take turns: a lane that is quick to come to the next
// meeting does not overwrite what others still read.
struct Group {
    Meeting places[2];
    unsigned turn = 0;
    uint32_t arrived = 0;
    void (*change)(Meeting&) = nullptr;
};

struct Barrier {
    std::vector<Fiber*> waiting;
};

// Blocks of a cluster, each on its own thread of the host.
struct Cluster {
    std::vector<uint8_t*> shared;
    std::atomic<unsigned> arrived{0}, round{0};
};

class Block {
   public:
    Block() {
        void* memory = mmap(nullptr, STACK * MAX_THREADS, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) fail("no memory for the stacks of its threads");
        stacks = static_cast<uint8_t*>(memory);
    }
    ~Block() { munmap(stacks, STACK * MAX_THREADS); }
    Block(const Block&) = delete;

    void run(const Work& work, Index index, Cluster* of);

    Fiber* running = nullptr;
    Cluster* cluster = nullptr;

    void ready(Fiber* fiber) { queue.push_back(fiber); }

    // Goes on with the next fiber; comes back when this one is ready again.
    void park() {
        Fiber* me = running;
        if (queue.empty()) fail("all threads of the block wait for others");
        Fiber* next = queue.front();
        queue.pop_front();
        if (next == me) return;
        resume(next);
        emulator_switch(&me->stack_pointer, next->stack_pointer);
    }

    // Whether the caller was the last: the others are ready then.
    bool arrive(Barrier& barrier, unsigned expected) {
        if (barrier.waiting.size() + 1 == expected) {
            for (Fiber* fiber : barrier.waiting) ready(fiber);
            barrier.waiting.clear();
            return true;
        }
        barrier.waiting.push_back(running);
        return false;
    }

    void end_of_fiber();
    const Meeting& meet(uint32_t mask, const void* mine, size_t bytes, void (*change)(Meeting&));

    unsigned alive = 0;
    Barrier all, second, whole_cluster;

   private:
    struct Warp {
        uint32_t alive;
        std::map<uint32_t, Group> groups;
    };

    void resume(Fiber* fiber) {
        running = fiber;
        threadIdx = {fiber->thread, 0, 0};
    }

    void complete(Warp& warp, unsigned first, Group& group) {
        if (group.change) group.change(group.places[group.turn]);
        const unsigned me = running->thread;
        for (unsigned lane = 0; lane < WARP; lane++) {
            if (group.arrived >> lane & 1 && first + lane != me) ready(&fibers[first + lane]);
        }
        (void)warp;
        group.arrived = 0;
        group.turn ^= 1;
    }

    uint8_t* stacks;
    void* scheduler = nullptr;
    std::deque<Fiber*> queue;
    std::vector<Fiber> fibers = std::vector<Fiber>(MAX_THREADS);
    std::vector<Warp> warps = std::vector<Warp>(MAX_THREADS / WARP);
};

thread_local std::unique_ptr<Block> current;
thread_local const Work* current_work;

void start_of_fiber() {
    current_work->kernel();
    current->end_of_fiber();
}

void Block::run(const Work& work, Index index, Cluster* of) {
    cluster = of;
    blockIdx = index;
    blockDim = {work.threads, 1, 1};
    gridDim = work.grid;
    alive = work.threads;
    current_work = &work;
    // NaN in every format: what a kernel reads before it writes shows.
    std::memset(dynamic, 0xFF, work.shared_bytes);
    for (unsigned t = 0; t < work.threads; t++) {
        Fiber& fiber = fibers[t];
        auto* top = reinterpret_cast<void**>(stacks + STACK * (t + 1));
        // As emulator_switch leaves a stack: six registers, then where it returns to; a function
        // begins with the stack 8 bytes off a multiple of 16.
        top[-1] = nullptr;
        top[-2] = reinterpret_cast<void*>(start_of_fiber);
        fiber.stack_pointer = top - 8;
        fiber.thread = t;
        fiber.is_alive = true;
        fiber.copies.clear();
        fiber.groups = 0;
        queue.push_back(&fiber);
    }
    for (unsigned w = 0; w * WARP < work.threads; w++) {
        const unsigned lanes = std::min(work.threads - w * WARP, unsigned(WARP));
        warps[w].alive = lanes == WARP ? ~0u : (1u << lanes) - 1;
        warps[w].groups.clear();
    }
    Fiber* first = queue.front();
    queue.pop_front();
    resume(first);
    emulator_switch(&scheduler, first->stack_pointer);
}

// A thread that has ended counts as one that has come to every barrier.
void Block::end_of_fiber() {
    Fiber* me = running;
    if (!me->copies.empty()) fail("it ends with copies under way");
    me->is_alive = false;
    alive--;
    Warp& warp = warps[me->thread / WARP];
    warp.alive &= ~(1u << me->thread % WARP);
    for (auto& [mask, group] : warp.groups) {
        if (group.arrived && group.arrived == (mask & warp.alive)) {
            complete(warp, me->thread / WARP * WARP, group);
        }
    }
    if (!all.waiting.empty() && all.waiting.size() == alive) {
        for (Fiber* fiber : all.waiting) ready(fiber);
        all.waiting.clear();
    }
    if (queue.empty()) {
        if (alive != 0) fail("its block's other threads wait for ones that have ended");
        void* unused;
        emulator_switch(&unused, scheduler);
    }
    Fiber* next = queue.front();
    queue.pop_front();
    resume(next);
    emulator_switch(&me->stack_pointer, next->stack_pointer);
}

const Meeting& Block::meet(
    uint32_t mask, const void* mine, size_t bytes, void (*change)(Meeting&)
) {
    const unsigned thread = running->thread, first = thread / WARP * WARP;
    Warp& warp = warps[thread / WARP];
    if (!(mask >> (thread - first) & 1)) fail("a lane calls with a mask that does not name it");
    Group& group = warp.groups[mask];
    Meeting& meeting = group.places[group.turn];
    std::memcpy(meeting.brought[thread - first], mine, bytes);
    group.arrived |= 1u << (thread - first);
    group.change = change;
    if (group.arrived == (mask & warp.alive)) {
        complete(warp, first, group);
    } else {
        park();
    }
    return meeting;
}

Block& block() {
    if (!current) current = std::make_unique<Block>();
    return *current;
}

}  // namespace

void give_way() {
    Block& b = *current;
    b.ready(b.running);
    b.park();
}

void barrier() {
    Block& b = *current;
    if (!b.arrive(b.all, b.alive)) b.park();
}

void second_barrier(int threads) {
    Block& b = *current;
    if (!b.arrive(b.second, threads)) b.park();
}

void cluster_barrier() {
    Block& b = *current;
    if (!b.arrive(b.whole_cluster, b.alive)) {
        b.park();
        return;
    }
    Cluster& cluster = *b.cluster;
    const unsigned round = cluster.round;
    if (++cluster.arrived == cluster.shared.size()) {
        cluster.arrived = 0;
        cluster.round++;
    }
    while (cluster.round == round) sched_yield();
}

void* in_block(const void* mine, unsigned rank) {
    Cluster& cluster = *current->cluster;
    return cluster.shared[rank] + (static_cast<const uint8_t*>(mine) - dynamic);
}

void copy_later(uint32_t to, const void* from, uint32_t bytes) {
    Fiber& fiber = *current->running;
    fiber.copies.push_back({to, bytes, from, fiber.groups});
}

void commit_copies() { current->running->groups++; }

void wait_for_copies(int pending) {
    Fiber& fiber = *current->running;
    while (!fiber.copies.empty() &&
           static_cast<int>(fiber.groups - fiber.copies.front().group) > pending) {
        const Copy& copy = fiber.copies.front();
        std::memcpy(dynamic + static_cast<int32_t>(copy.to), copy.from, copy.bytes);
        fiber.copies.pop_front();
    }
}

const Meeting& meet(uint32_t mask, const void* mine, size_t bytes, void (*change)(Meeting&)) {
    return current->meet(mask, mine, bytes, change);
}

// Clusters of one block go through a queue that the host's threads share; each block of a larger
// one gets a thread of its own.
void run(const Work& work) {
    const unsigned blocks = work.grid.x * work.grid.y * work.grid.z;
    const auto index = [&](unsigned i) {
        return Index{i % work.grid.x, i / work.grid.x % work.grid.y, i / work.grid.x / work.grid.y};
    };
    if (work.cluster > 1) {
        for (unsigned first = 0; first < blocks; first += work.cluster) {
            Cluster cluster;
            cluster.shared.resize(work.cluster);
            std::atomic<unsigned> ready{0};
            std::vector<std::thread> threads;
            for (unsigned i = 0; i < work.cluster; i++) {
                threads.emplace_back([&, i] {
                    cluster.shared[i] = dynamic;
                    ready++;
                    while (ready < work.cluster) sched_yield();
                    block().run(work, index(first + i), &cluster);
                });
            }
            for (std::thread& thread : threads) thread.join();
        }
        return;
    }
    std::atomic<unsigned> next{0};
    const auto serve = [&] {
        for (unsigned i = next++; i < blocks; i = next++) block().run(work, index(i), nullptr);
    };
    const unsigned helpers = std::min(blocks, std::thread::hardware_concurrency()) - 1;
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < helpers; i++) threads.emplace_back(serve);
    serve();
    for (std::thread& thread : threads) thread.join();
}

}  // namespace emulator
