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

// A lane's part of a unit's vectors: columns 8q..8q+7 of each of its 4 blocks, for the vectors g
// and g + 8.
template <int NB>
struct Vectors {
    uint4 part[NB][4];
    // Where the next unit's part lies. There is always something to load: a vector that is not there
    // may be any other, as its results are not kept, and what lies behind a vector's end meets
    // weights of zero.
    const half* next[NB];

    __device__ __forceinline__ void load(int block) {
#pragma unroll
        for (int n = 0; n < NB; n++) {
            part[n][block] = load_in_order(next[n] + block * BLOCK + threadIdx.x % 4 * 8);
        }
    }
};

// Units of one matrix at equal distances: what a warp of a linear kernel streams.
template <int format>
struct Strided {
    const uint8_t* codes;
    const uint8_t* scales;
    int step;

    __device__ void advance() {
        codes += static_cast<size_t>(step) * SLOTS<format> * SLOT_CODES;
        scales += static_cast<size_t>(step) * SCALES<format>;
    }
};

// One warp's ring. `Source` says where the next unit to copy lies: `codes`, `scales`, `advance()`.
template <int format, int DEPTH, class Source>
struct Ring {
    static constexpr int PARTS = SLOTS<format>;

    // Shared address of this lane's part of the oldest slot, of the first one, and of the end.
    uint32_t oldest, begin, end;
    // Where its scales lie from there.
    uint32_t to_scales;
    Source source;
    // Units that are still to be copied.
    int left;

    // Fills the ring, which begins at `slots`, with the first of `count` units; slots beyond them
    // count as copied.
    __device__ __forceinline__ Ring(uint8_t* slots, const Source& source, int count)
        : source(source), left(count) {
        const int lane = threadIdx.x % WARP;
        begin = shared_address(slots) + lane * 16;
        end = begin + DEPTH * SLOT;
        to_scales = SLOT_CODES - lane * 8;
        oldest = begin;
#pragma unroll
        for (int n = 0; n < DEPTH; n++) copy(begin + n * SLOT, n % PARTS);
    }

    // acc += the units' weights times the vectors. `where(u, next)` says where unit u's vectors lie,
    // `done(u, acc)` is called after it. FP8's scales are read through `fp8_scale(u)`.
    template <int NB, class Where, class Scale, class Done>
    __device__ __forceinline__ void run(
        int count, Where where, Scale fp8_scale, float (&acc)[NB][4], Done done
    ) {
        if (count == 0) return;
        Vectors<NB> x;
        float2 scale = make_float2(1, 1);
        where(0, x.next);
        for (int block = 0; block < 4; block++) x.load(block);
        if (format == FP8) scale = fp8_scale(0);
        for (int u = 0; u < count; u++) {
            const bool more = u + 1 < count;
            float2 next_scale = scale;
            if (more) {
                where(u + 1, x.next);
                if (format == FP8) next_scale = fp8_scale(u + 1);
            }
            unit<NB>(x, more, scale, acc);
            done(u, acc);
            scale = next_scale;
        }
    }

   private:
    // Copies part `part` of the source's unit to the slot at `to`.
    __device__ __forceinline__ void copy(uint32_t to, int part) {
        if (left > 0) {
            const int lane = threadIdx.x % WARP;
            const uint8_t* from = source.codes + part * SLOT_CODES + lane * 16;
            copy_async_16(to, from);
            copy_async_16(to + SLOT_CODES / 2, from + SLOT_CODES / 2);
            // Lanes 2i and 2i + 1 share the scales of their groups.
            if (format == NVFP4) copy_async_8(to + to_scales, source.scales + lane / 2 * 8);
        }
        commit_copies();
        // A source need not know what lies behind its last unit.
        if (part == PARTS - 1 && --left > 0) source.advance();
    }

    // The next slot's codes, once they are there. The slot is free for `refill` then.
    __device__ __forceinline__ void take(uint4& first, uint4& second, uint2& scales) {
        wait_for_copies<DEPTH - 1>();
        first = load_shared_16(oldest);
        second = load_shared_16(oldest + SLOT_CODES / 2);
        if (format == NVFP4) scales = load_shared_8(oldest + to_scales);
    }

    // Copies the slot that is DEPTH behind part `part` to where that part was.
    __device__ __forceinline__ void refill(int part) {
        copy(oldest, (part + DEPTH) % PARTS);
        oldest += SLOT;
        if (oldest == end) oldest = begin;
    }

    template <int NB>
    __device__ __forceinline__ static void block(
        const uint32_t (&a)[8], Vectors<NB>& x, bool more, int block, float (&even)[NB][4],
        float (&odd)[NB][4]
    ) {
#pragma unroll
        for (int n = 0; n < NB; n++) {
            const uint4 b = x.part[n][block];
            mma(even[n], a[0], a[1], a[2], a[3], b.x, b.y);
            mma(odd[n], a[4], a[5], a[6], a[7], b.z, b.w);
        }
        // The next unit's part takes this one's place.
        if (more) x.load(block);
    }

    // A unit: two sums run side by side, so that an mma need not wait for the one before it.
    template <int NB>
    __device__ __forceinline__ void unit(
        Vectors<NB>& x, bool more, float2 scale, float (&acc)[NB][4]
    ) {
        float even[NB][4], odd[NB][4] = {};
#pragma unroll
        for (int n = 0; n < NB; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) even[n][i] = format == FP8 ? 0 : acc[n][i];
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            uint4 first, second;
            uint2 packed;
            take(first, second, packed);
            refill(part);
            if (format == F16) {
                const uint32_t a[8] = {first.x,  first.y,  first.z,  first.w,
                                       second.x, second.y, second.z, second.w};
                block<NB>(a, x, more, part, even, odd);
            } else if (IS_FP8<format>) {
#pragma unroll
                for (int half_of = 0; half_of < 2; half_of++) {
                    const uint4 c = half_of == 0 ? first : second;
                    uint32_t a[8];
                    decode_fp8(c.x, a[0], a[2]);
                    decode_fp8(c.y, a[4], a[6]);
                    decode_fp8(c.z, a[1], a[3]);
                    decode_fp8(c.w, a[5], a[7]);
                    block<NB>(a, x, more, part * 2 + half_of, even, odd);
                }
            } else {
#pragma unroll
                for (int b = 0; b < 4; b++) {
                    const uint4 c = b < 2 ? first : second;
                    uint32_t of_upper, of_lower, upper[4], lower[4];
                    nvfp4_scales(b < 2 ? packed.x : packed.y, b % 2, of_upper, of_lower);
                    decode_nvfp4(b % 2 == 0 ? c.x : c.z, of_upper, upper);
                    decode_nvfp4(b % 2 == 0 ? c.y : c.w, of_lower, lower);
                    const uint32_t a[8] = {upper[0], lower[0], upper[1], lower[1],
                                           upper[2], lower[2], upper[3], lower[3]};
                    block<NB>(a, x, more, b, even, odd);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < NB; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float sum = even[n][i] + odd[n][i];
                acc[n][i] = format == FP8 ? acc[n][i] + sum * (i < 2 ? scale.x : scale.y) : sum;
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
    const Strided<format> source = {
        w.codes + before * SLOTS<format> * SLOT_CODES, w.scales + before * SCALES<format>,
        share.step
    };
    Ring<format, RING, Strided<format>> ring(shared + warp * RING * SLOT, source, share.count);
    __shared__ float row_scales[TILES * TILE];
    if (format == FP8_ROWS && threadIdx.x < TILES * TILE) {
        const int row = first_tile * TILE + threadIdx.x;
        row_scales[threadIdx.x] = row < w.rows ? w.row_scale<format>(row) : 0;
    }
    wait_for_producer();

    const half* vector[NB];
#pragma unroll
    for (int n = 0; n < NB; n++) {
        vector[n] = x + static_cast<size_t>(min(n * 8 + g, rows - 1)) * stride + share.first * UNIT;
    }
    float acc[NB][4] = {};
    ring.run(
        share.count,
        [&](int u, const half*(&next)[NB]) {
#pragma unroll
            for (int n = 0; n < NB; n++) next[n] = vector[n] + u * share.step * UNIT;
        },
        [&](int u) {
            return __ldg(reinterpret_cast<const float2*>(
                source.scales + static_cast<size_t>(u) * share.step * FP8_SCALES));
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
        of_tile[0] =
            format == FP8_ROWS ? sum * scale * row_scales[i / SIZE * TILE + i % TILE] : sum * scale;
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
    uint8_t* shared = dynamic_shared<uint8_t>();
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
        case FP8_ROWS:
            linear_in_format<WK, NB, FP8_ROWS>(
                w, first_tile, split, splits, x, stride, rows, shared, results.values, finish
            );
            break;
        default:
            linear_in_format<WK, NB, NVFP4>(
                w, first_tile, split, splits, x, stride, rows, shared, results.values, finish
            );
    }
}
