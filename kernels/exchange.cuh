// What ranks exchange with: mailboxes in each other's memory, or in the host's where one GPU cannot
// reach another.
//
// A step's collectives are numbered by epochs, the same on all ranks. Each has two slots that take
// turns, which is enough: whoever writes for epoch n + 2 has received that of n + 1 from every rank,
// and a rank sends that only after it has read the slot of n (ARCHITECTURE.md, "Ranks").
#pragma once

#include "common.cuh"

constexpr int MAX_RANKS = 8;

// Of one rank, in its own memory (cuda/layout.rs has the same structs).
struct Control {
    // Of the step's first collective.
    unsigned long long epoch;
    // Whether a wait has timed out: those behind it do not wait any more.
    int failed;
    // Of the residuals after every exchange of the step so far, where tests ask for it.
    unsigned hash;
};

// A word of a hash that adds words up, so that their order does not matter.
__device__ __forceinline__ unsigned hash_word(unsigned word, unsigned place) {
    const unsigned mixed = (word ^ place * 0x9E3779B9u) * 0x85EBCA6Bu;
    return mixed ^ mixed >> 16;
}

// The first wait of a rank that timed out, in the host's memory.
struct Fault {
    int is_set;
    int peer;
    int phase;
    int row;
    unsigned long long epoch;
};

// Parts of a collective. Between GPUs one launch does all of them; on one GPU, in lock-step, a launch
// does one, for all ranks in turn.
constexpr int SEND = 1, COMBINE = 2, RECEIVE = 4;

// What tests make go wrong, at one epoch of one rank. Delays are for all of them.
struct Injection {
    int kind;
    int rank;
    int peer;
    unsigned seed;
    unsigned long long epoch;
    unsigned delay_ns;
    int padding;
};
constexpr int FLIP = 1, DROP = 2, STALL = 3;

struct Exchange {
    // Each rank's mailbox, as this rank sees it.
    uint8_t* boxes[MAX_RANKS];
    Control* control;
    Fault* fault;
    const Injection* injection;
    // Where a chain that is timed keeps the end of this collective, if it does.
    unsigned long long* trace;
    unsigned long long timeout_ns;
    // Of this collective, counted from the step's first.
    unsigned collective;
    int rank;
    int ranks;
    // Rows that a mailbox has room for.
    int capacity;
    int phases;
    // Other ranks are on this device: no kernel may take up its multiprocessors while this one waits.
    int shared_device;
};

// A word that has not arrived: a NaN that no sum gives, as `to_packet` takes it out of the data.
constexpr unsigned EMPTY = 0xFFFFFFFF;

__device__ __forceinline__ bool is_empty(uint4 v) {
    return v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY;
}

__device__ __forceinline__ uint4 empty_packet() { return make_uint4(EMPTY, EMPTY, EMPTY, EMPTY); }

__device__ __forceinline__ uint4 to_packet(float4 v) {
    const auto word = [](float x) {
        const unsigned bits = __float_as_uint(x);
        return bits == EMPTY ? 0x7FFFFFFFu : bits;
    };
    return make_uint4(word(v.x), word(v.y), word(v.z), word(v.w));
}

__device__ __forceinline__ float4 from_packet(uint4 v) {
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                       __uint_as_float(v.w));
}

// One thread's view of one collective. The step's epoch was written by a kernel that had ended before
// this one began (embed.cu).
template <bool INJECT>
struct Collective {
    const Exchange& e;
    unsigned long long epoch;
    unsigned long long begun = 0;
    unsigned polls = 0;
    bool failed;

    __device__ explicit Collective(const Exchange& e)
        : e(e), epoch(e.control->epoch + e.collective), failed(e.control->failed != 0) {}

    __device__ int slot() const { return epoch & 1; }

    // Whether to end a wait that has seen nothing yet. The first that times out says for whom.
    __device__ bool give_up(int peer, int phase, int row) {
        if (failed) return true;
        if (polls++ % 64 != 0) return false;
        const unsigned long long now = now_ns();
        if (begun == 0) begun = now;
        failed = *const_cast<volatile int*>(&e.control->failed) != 0;
        if (failed || now - begun < e.timeout_ns) return failed;
        failed = true;
        if (atomicExch(&e.control->failed, 1) == 0) {
            volatile Fault* fault = e.fault;
            fault->peer = peer;
            fault->phase = phase;
            fault->row = row;
            fault->epoch = epoch;
            __threadfence_system();
            fault->is_set = 1;
        }
        return true;
    }

    // Whether it goes wrong now; a negative peer is any.
    __device__ bool is_injected(int kind, int peer) const {
        if constexpr (INJECT) {
            const Injection& i = *e.injection;
            return i.kind == kind && i.rank == e.rank && i.epoch == epoch &&
                   (i.peer == peer || peer < 0);
        }
        return false;
    }

    // Before a part of the collective: a random wait, or one that no peer waits out.
    __device__ void delay(int phase, int row) const {
        if constexpr (INJECT) {
            const Injection& i = *e.injection;
            unsigned hash = i.seed + static_cast<unsigned>(epoch) * 0x9E3779B9u;
            hash = (hash ^ (e.rank * 64 + phase * 8 + row)) * 0x85EBCA6Bu;
            hash = (hash ^ hash >> 15) * 0xC2B2AE35u;
            unsigned long long wait = i.delay_ns == 0 ? 0 : (hash >> 8) % i.delay_ns;
            if (phase == SEND && is_injected(STALL, -1)) wait = 2 * e.timeout_ns;
            for (const unsigned long long start = now_ns(); now_ns() - start < wait;) {
                __nanosleep(200);
            }
        }
    }

    // Sends a packet to a peer; `first` is the row's first, which tests damage or lose.
    __device__ void send(uint8_t* to, uint4 packet, int peer, bool first) const {
        if (first && is_injected(DROP, peer)) return;
        if (first && is_injected(FLIP, peer)) packet.x ^= 1u << 20;
        store_system(to, packet);
    }

    // Adds what a thread leaves in the residual to the step's hash.
    __device__ void hash(float4 v, int row, int group) const {
        if constexpr (INJECT) {
            const uint4 words = to_packet(v);
            const unsigned place = (e.collective * 32 + row) * 65536 + group * 4;
            const unsigned sum = hash_word(words.x, place) + hash_word(words.y, place + 1) +
                                 hash_word(words.z, place + 2) + hash_word(words.w, place + 3);
            atomicAdd(&e.control->hash, sum);
        }
    }

    // The packets of the peers, that of rank r at `first` + r `pitch`, summed with the rank's own in
    // rank order. The places are empty again afterwards.
    __device__ float4 sum_of_ranks(float4 own, int phase, int row, uint8_t* first, unsigned pitch) {
        const auto at = [&](int r) { return first + r * static_cast<size_t>(pitch); };
        uint4 part[MAX_RANKS];
        for (;;) {
            int missing = -1;
#pragma unroll
            for (int r = 0; r < MAX_RANKS; r++) {
                if (r < e.ranks && r != e.rank) part[r] = load_system(at(r));
            }
#pragma unroll
            for (int r = 0; r < MAX_RANKS; r++) {
                if (r < e.ranks && r != e.rank && is_empty(part[r])) missing = r;
            }
            if (missing < 0 || give_up(missing, phase, row)) break;
        }
        float4 sum;
#pragma unroll
        for (int r = 0; r < MAX_RANKS; r++) {
            if (r >= e.ranks) break;
            const bool is_own = r == e.rank;
            const float4 v = is_own ? own : from_packet(part[r]);
            if (!is_own) *reinterpret_cast<uint4*>(at(r)) = empty_packet();
            if (r == 0) {
                sum = v;
            } else {
                sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
            }
        }
        return sum;
    }
};
