// y = W x for up to 16 vectors: the loop that every kernel with weights runs.
//
// The weights are the 16-row operand of the mma at every number of vectors, so a vector's result
// does not depend on its companions. A warp streams units of weights through a ring of slots in
// shared memory; the ring is filled before the kernel waits for its producer, so the bus is busy
// across the boundary. A lane reads only what it copied itself: no barrier.
#pragma once

#include "formats.cuh"

// Slots that a warp keeps under way: 8 warps of 6 slots are 60 KiB, so that three blocks share an
// H200's multiprocessor and one fits the 99 KiB of a Blackwell card.
constexpr int RING = 6;

// Where a unit's weights are.
struct Unit {
    const uint8_t* codes;
    const uint8_t* scales;
};

// A lane's part of a unit's vectors: columns 8q..8q+7 of each of its 4 blocks, for the vectors g
// and g + 8.
template <int blocks_of_8>
struct Vectors {
    uint4 part[blocks_of_8][4];
};

// Loads a lane's part; `vector[i]` is null where there is no such vector. `left` counts the columns
// from the unit's first to the vector's end.
template <int NB>
__device__ __forceinline__ void load_vectors(
    Vectors<NB>& x, const half* const (&vector)[NB], int column, int left
) {
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < NB; n++) {
#pragma unroll
        for (int block = 0; block < 4; block++) {
            const int at = block * BLOCK + 8 * q;
            x.part[n][block] = make_uint4(0, 0, 0, 0);
            if (vector[n] != nullptr && at < left) {
                x.part[n][block] = *reinterpret_cast<const uint4*>(vector[n] + column + at);
            }
        }
    }
}

// One warp's ring.
template <int format, int DEPTH>
struct Ring {
    uint32_t base;
    int lane;

    __device__ Ring(uint8_t* shared)
        : base(shared_address(shared + threadIdx.x / WARP * DEPTH * SLOT)),
          lane(threadIdx.x % WARP) {}

    // Copies slot `n` of a list of `count` units; counts as a group even beyond the end.
    template <class Address>
    __device__ __forceinline__ void issue(int n, int count, Address address) const {
        if (n < count * SLOTS<format>) {
            const Unit unit = address(n / SLOTS<format>);
            const uint32_t to = base + n % DEPTH * SLOT + lane * 16;
            const uint8_t* from = unit.codes + n % SLOTS<format> * SLOT_CODES + lane * 16;
            copy_async_16(to, from);
            copy_async_16(to + SLOT_CODES / 2, from + SLOT_CODES / 2);
            if (format == NVFP4) {
                // Lanes 2i and 2i + 1 share the scales of their groups.
                copy_async_8(base + n % DEPTH * SLOT + SLOT_CODES + lane * 8,
                             unit.scales + lane / 2 * 8);
            }
        }
        commit_copies();
    }

    // Fills the ring.
    template <class Address>
    __device__ __forceinline__ void start(int count, Address address) const {
#pragma unroll
        for (int n = 0; n < DEPTH; n++) issue(n, count, address);
    }

    __device__ __forceinline__ uint4 codes(int n, int half) const {
        uint4 value;
        const uint32_t at = base + n % DEPTH * SLOT + half * SLOT_CODES / 2 + lane * 16;
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                     : "r"(at) : "memory");
        return value;
    }

    __device__ __forceinline__ uint2 scales(int n) const {
        uint2 value;
        const uint32_t at = base + n % DEPTH * SLOT + SLOT_CODES + lane * 8;
        asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];"
                     : "=r"(value.x), "=r"(value.y) : "r"(at) : "memory");
        return value;
    }

    // acc += the units' weights times the vectors, for a ring that was started with the same list.
    // `vectors(u, x)` loads unit u's part of the vectors, `done(u, acc)` is called after it.
    template <int NB, class Address, class Load, class Done>
    __device__ __forceinline__ void run(
        int count, Address address, Load vectors, float (&acc)[NB][4], Done done
    ) const {
        Vectors<NB> x, next;
        float2 scale = make_float2(1, 1), next_scale = scale;
        if (count > 0) {
            vectors(0, x);
            if (format == FP8) scale = __ldg(reinterpret_cast<const float2*>(address(0).scales));
        }
        for (int u = 0; u < count; u++) {
            if (u + 1 < count) {
                vectors(u + 1, next);
                if (format == FP8) {
                    next_scale = __ldg(reinterpret_cast<const float2*>(address(u + 1).scales));
                }
            }
            unit<NB>(u, count, address, x, scale, acc);
            done(u, acc);
            x = next;
            scale = next_scale;
        }
    }

   private:
    template <int NB>
    __device__ __forceinline__ static void block(
        const uint32_t (&upper)[4], const uint32_t (&lower)[4], const Vectors<NB>& x, int block,
        float (&acc)[NB][4]
    ) {
#pragma unroll
        for (int n = 0; n < NB; n++) {
            const uint4 b = x.part[n][block];
            mma(acc[n], upper[0], lower[0], upper[1], lower[1], b.x, b.y);
            mma(acc[n], upper[2], lower[2], upper[3], lower[3], b.z, b.w);
        }
    }

    template <int NB, class Address>
    __device__ __forceinline__ void unit(
        int u, int count, Address address, const Vectors<NB>& x, float2 scale, float (&acc)[NB][4]
    ) const {
        float sum[NB][4] = {};
#pragma unroll
        for (int part = 0; part < SLOTS<format>; part++) {
            const int n = u * SLOTS<format> + part;
            wait_for_copies<DEPTH - 1>();
            const uint4 first = codes(n, 0), second = codes(n, 1);
            uint32_t upper[4], lower[4];
            if (format == F16) {
                upper[0] = first.x, upper[1] = first.y, upper[2] = first.z, upper[3] = first.w;
                lower[0] = second.x, lower[1] = second.y, lower[2] = second.z, lower[3] = second.w;
                issue(n + DEPTH, count, address);
                block<NB>(upper, lower, x, part, acc);
            } else if (format == FP8) {
                issue(n + DEPTH, count, address);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const uint4 c = half == 0 ? first : second;
                    decode_fp8(c.x, upper[0], upper[1]);
                    decode_fp8(c.y, upper[2], upper[3]);
                    decode_fp8(c.z, lower[0], lower[1]);
                    decode_fp8(c.w, lower[2], lower[3]);
                    block<NB>(upper, lower, x, part * 2 + half, sum);
                }
            } else {
                const uint2 packed = scales(n);
                issue(n + DEPTH, count, address);
#pragma unroll
                for (int b = 0; b < 4; b++) {
                    const uint4 c = b < 2 ? first : second;
                    const uint32_t pair = (b < 2 ? packed.x : packed.y) >> (b % 2 * 16);
                    const uint32_t upper_scale = nvfp4_scale(pair & 0xFF);
                    const uint32_t lower_scale = nvfp4_scale(pair >> 8 & 0xFF);
                    decode_nvfp4(b % 2 == 0 ? c.x : c.z, upper_scale, upper);
                    decode_nvfp4(b % 2 == 0 ? c.y : c.w, lower_scale, lower);
                    block<NB>(upper, lower, x, b, acc);
                }
            }
        }
        if (format == FP8) {
#pragma unroll
            for (int n = 0; n < NB; n++) {
                acc[n][0] += sum[n][0] * scale.x;
                acc[n][1] += sum[n][1] * scale.x;
                acc[n][2] += sum[n][2] * scale.y;
                acc[n][3] += sum[n][3] * scale.y;
            }
        }
    }
};

// Writes a warp's results as [vector][16 rows].
template <int NB>
__device__ __forceinline__ void store_tile(float* to, const float (&acc)[NB][4]) {
    const int g = threadIdx.x % WARP / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < NB; n++) {
        float* column = to + (n * 8 + 2 * q) * TILE + g;
        column[0] = acc[n][0];
        column[TILE] = acc[n][1];
        column[8] = acc[n][2];
        column[TILE + 8] = acc[n][3];
    }
}

// Warps of a block that multiplies matrices.
constexpr int LINEAR_WARPS = 8;
constexpr int LINEAR_THREADS = LINEAR_WARPS * WARP;

// The units of one warp: those of `split` of `splits` equal parts of a matrix's units, dealt out
// in turn to `warps` warps.
struct Share {
    int first;
    int step;
    int count;

    __device__ Share(int units, int split, int splits, int warp, int warps) {
        const int begin = units * split / splits, end = units * (split + 1) / splits;
        first = begin + warp;
        step = warps;
        count = first < end ? (end - first + warps - 1) / warps : 0;
    }
};

// One block computes LINEAR_WARPS / WK tiles of y = W x, WK warps each. Calls
// `finish(tile, row, vector, column)` for each stored row and vector; column holds the 16 results
// of that vector. x is [rows][stride] and read after `wait_for_producer`.
template <int WK, int NB, int format, class Finish>
__device__ __forceinline__ void linear_in_format(
    const Matrix& w, int first_tile, int split, int splits, const half* x, int stride, int rows,
    uint8_t* shared, float* results, Finish finish
) {
    constexpr int TILES = LINEAR_WARPS / WK;
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4;
    const int tile = first_tile + warp / WK;
    Share share(w.units(), split, splits, warp % WK, WK);
    if (tile >= w.tiles()) share.count = 0;
    const size_t before = static_cast<size_t>(tile) * w.units() + share.first;
    const uint8_t* codes = w.codes + before * SLOTS<format> * SLOT_CODES;
    const uint8_t* scales = w.scales + before * SCALES<format>;
    const auto address = [&](int u) {
        const size_t unit = static_cast<size_t>(u) * share.step;
        return Unit{codes + unit * SLOTS<format> * SLOT_CODES, scales + unit * SCALES<format>};
    };
    const Ring<format, RING> ring(shared);
    ring.start(share.count, address);
    wait_for_producer();

    const half* vector[NB];
#pragma unroll
    for (int n = 0; n < NB; n++) {
        const int row = n * 8 + g;
        vector[n] = row < rows ? x + static_cast<size_t>(row) * stride : nullptr;
    }
    float acc[NB][4] = {};
    ring.run(
        share.count, address,
        [&](int u, Vectors<NB>& part) {
            const int column = (share.first + u * share.step) * UNIT;
            load_vectors<NB>(part, vector, column, w.columns - column);
        },
        acc, [](int, float(&)[NB][4]) {}
    );
    store_tile<NB>(results + warp * NB * 8 * TILE, acc);
    __syncthreads();
    // [tile][warp][vector][row]: the warps of a tile are summed in their order.
    const float scale = w.global * DECODED_SCALE<format>;
    constexpr int SIZE = NB * 8 * TILE;
    for (int i = threadIdx.x; i < TILES * SIZE; i += LINEAR_THREADS) {
        float* of_tile = results + i / SIZE * WK * SIZE + i % SIZE;
        float sum = 0;
#pragma unroll
        for (int k = 0; k < WK; k++) sum += of_tile[k * SIZE];
        of_tile[0] = sum * scale;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILES * SIZE; i += LINEAR_THREADS) {
        const int t = first_tile + i / SIZE, n = i % SIZE / TILE, row = i % TILE;
        if (t < w.tiles() && n < rows) {
            finish(t, row, n, results + i / SIZE * WK * SIZE + n * TILE);
        }
    }
}

// Shared memory of a linear kernel: the rings come first.
constexpr int LINEAR_SHARED = LINEAR_WARPS * RING * SLOT;

// [tile][warp][vector][row] results of a block.
template <int NB>
struct LinearResults {
    float values[LINEAR_WARPS * NB * 8 * TILE];
};

template <int WK, int NB, class Finish>
__device__ __forceinline__ void linear(
    const Matrix& w, int first_tile, int split, int splits, const half* x, int stride, int rows,
    Finish finish
) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ LinearResults<NB> results;
    switch (w.format) {
        case F16:
            linear_in_format<WK, NB, F16>(
                w, first_tile, split, splits, x, stride, rows, shared, results.values, finish
            );
            break;
        case FP8:
            linear_in_format<WK, NB, FP8>(
                w, first_tile, split, splits, x, stride, rows, shared, results.values, finish
            );
            break;
        default:
            linear_in_format<WK, NB, NVFP4>(
                w, first_tile, split, splits, x, stride, rows, shared, results.values, finish
            );
    }
}
