// Mixtures of experts: argument structs of routing and of the experts' products. Included by kernels.h.
#pragma once

#include <cstdint>

#include "kernel_types.h"
#include "lora_args.h"

namespace octavo {

// How logits become scores. Experts are chosen by score + bias or, with `bias_logits`, by logit + bias; without a bias
// by logit. Of equals the first is taken.
enum Scoring : int32_t { kSoftmax = 0, kSigmoid = 1, kSparsemixer = 2 };
constexpr int kMaxExperts = 1024;

// ids[r, top_k], weights[r, top_k] = the experts of logits[r, num_experts] and their weights; see octavo.ops.Routing
// for the settings. `bias` and `scales` (of weights, by expert) may be null.
struct RouteArgs : RowWiseArgs {
    const float *logits, *bias, *scales;
    int32_t* ids;
    float* weights;
    int64_t stride;
    int32_t num_experts, top_k, scoring, bias_logits, num_groups, kept_groups, group_by_two, normalize;
    float scale, softcap, jitter;
};

// Rows of one expert that are multiplied together: `rows` places from `begin` on in the order of experts.
struct ExpertRows {
    int32_t expert, begin, rows;
    int64_t cost_end;  // of the products of these rows and of all parts before, in an arbitrary unit
};

// Routing's decisions for some tokens, and memory between the kernels of a call. Calls that follow each other may share
// one.
struct ExpertsSchedule {
    int32_t* entries;   // token * top_k + choice, ordered by expert, then token; tokens count from the pass's first
    int32_t* tokens;    // of entries; tokens count from the call's first
    float* weights;     // of entries
    int32_t* slots;     // of entries, where there are adapters
    ExpertRows* parts;  // by expert
    char* inputs;       // input rows of entries that share an expert, side by side
    char* inner;        // rows between the two products
    char* shrunk;       // the rows of a product times the adapters' A
    char* copies;       // of input rows, for each task of experts_shrink_*
    int64_t num_entries, num_parts;
};

// out[r] = the sum over r's experts e of weight * (f(x[r] up[e]^T) down[e]^T). f takes gate and up if matrices are
// gated, else each output. Experts are added in the order of their numbers, each segment of experts by itself, so the
// sum depends on the row alone. An expert whose id is not one of the matrices' adds nothing. With `scale_inputs` the
// weights multiply x, which must be floats, instead of the outputs.
struct ExpertsArgs : RowArgs {
    const void* x;
    int64_t x_stride;  // in elements, or in blocks of quantized rows
    int32_t x_dtype;
    const int32_t* ids;    // [rows, top_k]
    const float* weights;  // [rows, top_k]
    const Matrix *up, *down;
    float* out;                         // dense
    int32_t num_experts, first_expert;  // of the matrices here: expert e is matrix e - first_expert
    int32_t segments;                   // of equally many experts; their sums are added as a matrix's segments are
    int32_t top_k, scale_inputs, activation;
    float slope, limit;                               // of kClamped, as in Clamp
    const int32_t* slots;                             // the adapter of each token, -1: none; null: no adapters
    const AdapterFactors *up_factors, *down_factors;  // [experts of the matrices, num_slots], or null
    int64_t num_slots, up_width, down_width;          // widths of shrunk rows
    int32_t factor_dtype;
};

// One pass of a call: as many of its tokens as the scratch memory holds. The kernels' arguments. Planned.
struct ExpertsPass {
    const ExpertsArgs* args;
    ExpertsSchedule* schedule;
    int64_t token_begin, token_end;
    int64_t input_bytes, inner_bytes;  // of a row
    int32_t input_dtype, inner_dtype;
    int64_t part_rows, gather_tasks, up_tasks, down_tasks;
    int64_t shrink_tasks, copy_bytes;  // 0 if no token has an adapter; bytes of the rows that a task copies
};

}  // namespace octavo
