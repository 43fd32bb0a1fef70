// Stage `join` of a drafter (model/draft.rs): rows out of tokens and hidden states.
#include "exchange.cuh"
#include "features.cuh"

constexpr int THREADS = 1024;

// What the host writes for a draft (embed.cu).
struct Step {
    unsigned long long epoch;
    unsigned long long padding;
    Row rows[MAX_ROWS];
};

// Norms over the features before a head's fc: of `width` values each, 0 for none. Epsilon is the
// head's.
struct FeatureNorm {
    const float* gain;
    int width;
    float eps;
};

// One block a row. Takes the draft's rows from the host, and their features out of the ring into
// [MAX_ROWS][count * hidden], still short of `unit`. As with embed, the kernel behind this begins
// when it has ended.
extern "C" __global__ void __launch_bounds__(THREADS) take_draft(
    const Step* step, Row* rows, Control* control, const __grid_constant__ FeatureLayout l,
    const half* ring, const __grid_constant__ FeatureNorm norm, half* features
) {
    __shared__ Row row;
    __shared__ float scratch[THREADS / WARP];
    if (threadIdx.x == 0) {
        const uint4 own = load_system(&step->rows[blockIdx.x]);
        row = Row{static_cast<int>(own.x), static_cast<int>(own.y), static_cast<int>(own.z),
                  static_cast<int>(own.w)};
        rows[blockIdx.x] = row;
        if (blockIdx.x == 0) {
            control->epoch = load_system_64(&step->epoch);
            control->hash = 0;
        }
    }
    __syncthreads();
    const int all = l.count * l.hidden;
    const half* from = ring + l.entry(row);
    half* to = features + static_cast<size_t>(blockIdx.x) * all;
    if (norm.width == 0) {
        for (int i = threadIdx.x; i < all; i += THREADS) to[i] = from[i];
        return;
    }
    for (int first = 0; first < all; first += norm.width) {
        const auto value = [&](int i) { return __half2float(from[first + i]) * l.unit; };
        float squares = 0;
        for (int i = threadIdx.x; i < norm.width; i += THREADS) squares += value(i) * value(i);
        const float scale = rsqrtf(block_sum(squares, scratch) / norm.width + norm.eps);
        for (int i = threadIdx.x; i < norm.width; i += THREADS) {
            to[first + i] = to_half(value(i) * scale * norm.gain[first + i] / l.unit);
        }
    }
}

// What a row's residual begins as.
enum Residual : int { ZERO = 0, HIDDEN = 1, NORMED = 2 };

struct JoinLayout {
    // BF16, row by row.
    const __nv_bfloat16* table;
    const float* embedding_gain;
    const float* hidden_gain;
    // Of a norm before that one, which a head recycles its hidden state through; or null.
    const float* output_gain;
    float eps;
    int hidden;
    int residual;
};

// One block a row. joined: [MAX_ROWS][2 hidden] = RMSNorm(embedding of the row's token), then
// RMSNorm(hidden state); residual: [MAX_ROWS][hidden]. The hidden states may be the last of an
// earlier row's residual: they are read before any is written, and only by a block that is alone.
// Shared: hidden floats.
template <class Value, class Read>
__device__ __forceinline__ void join(
    const Row* rows, const JoinLayout& l, const Value* hidden, half* joined, float* residual,
    Read read
) {
    __shared__ float scratch[THREADS / WARP];
    float* values = dynamic_shared<float>();
    // The rows may be what the kernel before has written.
    wait_for_producer();
    release_consumer();
    const size_t row = blockIdx.x;
    const __nv_bfloat16* line = l.table + static_cast<size_t>(rows[row].token) * l.hidden;
    half* to = joined + row * 2 * l.hidden;
    float squares = 0;
    for (int i = threadIdx.x; i < l.hidden; i += THREADS) {
        const float x = __bfloat162float(line[i]);
        squares += x * x;
    }
    float scale = rsqrtf(block_sum(squares, scratch) / l.hidden + l.eps);
    for (int i = threadIdx.x; i < l.hidden; i += THREADS) {
        to[i] = to_half(__bfloat162float(line[i]) * scale * l.embedding_gain[i]);
    }
    const auto scale_of_values = [&] {
        float sum = 0;
        for (int i = threadIdx.x; i < l.hidden; i += THREADS) sum += values[i] * values[i];
        return rsqrtf(block_sum(sum, scratch) / l.hidden + l.eps);
    };
    // A thread reads only the values that it wrote.
    for (int i = threadIdx.x; i < l.hidden; i += THREADS) {
        values[i] = read(hidden[row * l.hidden + i]);
    }
    if (l.output_gain != nullptr) {
        scale = scale_of_values();
        for (int i = threadIdx.x; i < l.hidden; i += THREADS) values[i] *= scale * l.output_gain[i];
    }
    scale = scale_of_values();
    for (int i = threadIdx.x; i < l.hidden; i += THREADS) {
        const float normed = values[i] * scale * l.hidden_gain[i];
        to[l.hidden + i] = to_half(normed);
        residual[row * l.hidden + i] =
            l.residual == ZERO ? 0 : l.residual == HIDDEN ? values[i] : normed;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) join_floats(
    const Row* rows, const __grid_constant__ JoinLayout l, const float* hidden, half* joined,
    float* residual
) {
    join(rows, l, hidden, joined, residual, [](float x) { return x; });
}

extern "C" __global__ void __launch_bounds__(THREADS) join_halves(
    const Row* rows, const __grid_constant__ JoinLayout l, const half* hidden, half* joined,
    float* residual
) {
    join(rows, l, hidden, joined, residual, [](half x) { return __half2float(x); });
}
