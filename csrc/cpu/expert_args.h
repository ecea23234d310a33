// Mixtures of experts: routing, and the products of the experts that are chosen.
#pragma once

#include <cstdint>

#include "kernel_types.h"
#include "lora_args.h"

namespace octavo {

// Experts are chosen by score + bias or, with `bias_logits`, logit + bias; without a bias by logit. Of equals the first
// is taken.
enum Scoring : int32_t { kSoftmax = 0, kSigmoid = 1, kSparsemixer = 2 };
constexpr int kMaxExperts = 1024;

// ids[r, top_k], weights[r, top_k] = the experts of logits[r, num_experts]; see octavo.ops.Routing for the settings.
// The bias, and the scales of weights by expert, may be null.
struct RouteArgs : RowWiseArgs {
    const float *logits, *bias, *scales;
    int32_t* ids;
    float* weights;
    int64_t stride;
    int32_t num_experts, top_k, scoring, bias_logits, num_groups, kept_groups, group_by_two, normalize;
    float scale, softcap, jitter;
};

// Rows of one expert that are multiplied together, places `begin` and after in the order by expert.
struct ExpertRows {
    int32_t expert, begin, rows;
    int64_t cost_end;  // of the products of these rows and of all parts before, in no unit
};

// What routing has decided for some tokens, and memory between the kernels of a call. Calls that follow each other may
// share one.
struct ExpertsSchedule {
    int32_t* entries;   // token * top_k + choice, ordered by expert, then by token; counted from the pass's first token
    int32_t* tokens;    // of entries, counted from the call's first
    float* weights;     // of entries
    int32_t* slots;     // of entries, where there are adapters
    ExpertRows* parts;  // by expert
    char* inputs;       // rows of entries that share an expert, side by side
    char* inner;        // rows between the two products
    char* shrunk;       // what the A's of adapters make of the rows of a product
    char* copies;       // of rows, for each task that shrinks some
    int64_t num_entries, num_parts;
};

// out[r] = the sum over r's experts e of weight * (f(x[r] up[e]^T) down[e]^T), where f is of gate and up if matrices
// are gated, else of each output, in the order of their numbers, which is what makes the sum a matter of the row alone;
// those of each segment by themselves.
// An expert that is none (its id is negative, or too large) adds nothing. With `scale_inputs` the weights multiply x,
// which is floats then, instead of the outputs.
struct ExpertsArgs : RowArgs {
    const void* x;
    int64_t x_stride;  // in elements, or in blocks of quantized rows
    int32_t x_dtype;
    const int32_t* ids;    // [rows, top_k]
    const float* weights;  // [rows, top_k]
    const Matrix *up, *down;
    float* out;                         // dense
    int32_t num_experts, first_expert;  // of the matrices: expert e is matrix e - first_expert
    int32_t segments;                   // of equally many experts, whose sums are added up as those of a matrix
    int32_t top_k, scale_inputs, activation;
    Clamp clamp;
    const int32_t* slots;                             // of tokens, -1 is nobody's; null: there are no adapters
    const AdapterFactors *up_factors, *down_factors;  // [experts of the matrices, num_slots], or null
    int64_t num_slots, up_width, down_width;          // widths of shrunk rows
    int32_t factor_dtype;
};

// A call's tokens, as many as its memory is for: what the kernels of a pass get. Planned.
struct ExpertsPass {
    const ExpertsArgs* args;
    ExpertsSchedule* schedule;
    int64_t token_begin, token_end;
    int64_t input_bytes, inner_bytes;  // of a row
    int32_t input_dtype, inner_dtype;
    int64_t part_rows, gather_tasks, up_tasks, down_tasks;
    int64_t shrink_tasks, copy_bytes;  // where a token has an adapter; bytes of the rows that a task copies
};

}  // namespace octavo
