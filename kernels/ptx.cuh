// Every instruction that C++ has no name for, one function each. Nothing else in kernels/ has inline
// assembly, so that tests/emulator can run the kernels on a CPU with its own versions of these.
#pragma once

#include <cstdint>

// Programmatic dependent launch. A kernel starts while the one before it still runs; until this
// call it may read only what no kernel of the step writes, weights and the step's rows, and what was
// complete at the wait of an earlier kernel that releases its consumer behind its own wait: past the
// L1 cache, which may hold older lines.
__device__ __forceinline__ void wait_for_producer() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next kernel start as soon as all blocks of this one have called it or ended. Called first,
// where no later kernel counts on the wait: the next kernel then has its weights under way when this
// one ends.
__device__ __forceinline__ void release_consumer() {
    asm volatile("griddepcontrol.launch_dependents;");
}

// The first `threads` threads that arrive, whole warps, wait for each other: a barrier beside
// __syncthreads.
template <int threads>
__device__ __forceinline__ void second_barrier() {
    asm volatile("bar.sync 1, %0;" ::"n"(threads) : "memory");
}

__device__ __forceinline__ unsigned long long now_ns() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

// The block's dynamic shared memory.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
    extern __shared__ __align__(128) uint8_t shared[];
    return reinterpret_cast<T*>(shared);
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
    return v;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t from) {
    uint2 v;
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
    return v;
}

// Asynchronous copies to shared memory; the bytes are visible to the thread that asked for them.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_async_8(uint32_t to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `pending` groups of copies are under way.
template <int pending>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

__device__ __forceinline__ void prefetch_to_l2(const void* from, unsigned bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
}

// A load that leaves nothing in L1, of what no kernel writes.
__device__ __forceinline__ uint4 load_once(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

// A load that stays where it is written, between the instructions that hide how long it takes.
__device__ __forceinline__ uint4 load_in_order(const void* from) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

// Loads and stores that other devices see; each 32-bit word arrives as a whole, in any order.
__device__ __forceinline__ uint4 load_system(const void* from) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ void store_system(void* to, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};"
                 ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ unsigned long long load_system_64(const void* from) {
    unsigned long long v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ void store_system_64(void* to, unsigned long long v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}

// Products of two pairs of f16.
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// d += a b, a: 16 x 16, b: 16 x 8. Lane (g, q) = (lane / 4, lane % 4) holds
// a0 = (g; 2q, 2q+1), a1 = (g+8; same), a2 = (g; 2q+8, 2q+9), a3 = (g+8; same),
// b0 = (2q, 2q+1; g), b1 = (2q+8, 2q+9; g), d0, d1 = (g; 2q, 2q+1), d2, d3 = (g+8; same).
__device__ __forceinline__ void mma(
    float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1
) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)
    );
}

// Matrices of 8 x 8 f16 in shared memory: lane i of each eight has the address of a matrix's row i,
// and gets words (g; 2q, 2q+1) of each, or of the transposed ones.
__device__ __forceinline__ void load_matrices(
    uint32_t address, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d
) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_transposed(
    uint32_t address, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d
) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_two(uint32_t address, uint32_t& a, uint32_t& b) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(a), "=r"(b) : "r"(address) : "memory");
}
