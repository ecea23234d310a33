// Argument structs of layers that carry a state from token to token. Included by kernels.h.
#pragma once

#include <cstdint>

#include "kernel_types.h"

namespace octavo {

// Arguments that these layers share. Sequence s has tokens query_start[s] .. query_start[s + 1] - 1. Its first token in
// a step goes on from the state in block slots[t]; the very first of the sequence begins with zeros. The state after
// token t is left in block slots[t], unless a later token of the sequence has the same block. A state is computed in
// units that do not depend on each other; a task is some units of one sequence.
struct StateArgs : RowArgs {
    float* states;
    int64_t state_stride, num_blocks;
    const int64_t* slots;
    const int32_t *query_start, *seq_lens;
    int32_t num_seqs;
    int64_t parts;  // Planned: tasks of a sequence.
};

// Channels that share a tile of a state, which is a unit.
constexpr int64_t kStateTile = 16;
constexpr int64_t kMaxStateSize = 512;
constexpr int64_t kMaxConvKernel = 8;

// out[t, c] = f(bias[c] + sum over j of weight[j, c] * x[t - kernel + 1 + j, c]), where f is kIdentity or kSilu. The
// state is the last kernel - 1 rows of x. Outputs are dense.
struct ConvArgs : StateArgs {
    const void* x;
    const float *weight, *bias;
    void* out;
    int64_t x_stride, width, kernel;
    int32_t dtype, kind;
};

// See octavo.ops.Ops.selective_scan. The state is tiles of channels of one group, [state_size, kStateTile] each. `a` is
// [state_size, channels] if `wide`, else [channels]. The time steps may be null: all 1.
struct ScanArgs : StateArgs {
    const void *x, *time, *b, *c;
    const float *a, *d, *time_bias;
    void* out;
    int64_t x_stride, time_stride, b_stride, c_stride, channels, head_size, groups, state_size;
    float time_min, time_max;
    int32_t dtype, wide;
};

// See octavo.ops.Ops.gated_delta. The state is tiles of the values of one head, [key_size, kStateTile] each.
struct DeltaArgs : StateArgs {
    const void *query, *key, *value, *decay, *beta;
    const float *a, *decay_bias;
    void* out;
    int64_t query_stride, key_stride, value_stride, decay_stride, beta_stride, key_heads, value_heads, key_size,
        value_size;
    float beta_scale, lowest;
    int32_t dtype, by_element;  // by_element: decays and their biases are by element of the key
    int32_t alternates;         // value head h has key head h % key_heads
};

// See octavo.ops.Ops.gated_recurrence. The state is one number a channel.
struct RecurrenceArgs : StateArgs {
    const void *x, *input, *decay;
    const float *a, *input_bias, *decay_bias;
    void* out;
    int64_t x_stride, input_stride, decay_stride, width;
    int32_t dtype;
};

}  // namespace octavo
