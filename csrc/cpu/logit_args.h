// Argument structs of sampling: from logits to tokens, log-probabilities and ranks. Included by kernels.h.
#pragma once

#include <cstdint>

#include "kernel_types.h"

namespace octavo {

// out[r] = the lowest index of the largest of x[r, width], or kNoToken if that is not finite or the row has a NaN.
constexpr int64_t kNoToken = -1;
struct ArgmaxArgs : RowArgs {
    const float* x;
    int64_t* out;
    int64_t stride, width;
};

// out[r] = a token drawn from logits[r, width], or kNoToken as in ArgmaxArgs. Logits are overwritten by weights. Arrays
// are by row. A top_k of 0 is all tokens. A row of temperature 0 gives its argmax and stays as it is.
struct SampleArgs : RowArgs {
    float* logits;
    const float* temperature;
    const int64_t* top_k;
    const float *top_p, *min_p;
    const double* uniforms;  // in [0, 1)
    int64_t* out;
    int64_t stride, width;
};

// logits[samples[m], t] = -inf where bit t % 32 of words[m, t / 32] is 0, and where there are no more words. A task is
// a mask.
struct MaskArgs {
    float* logits;
    const uint32_t* words;
    const int64_t* samples;
    int64_t stride, width, words_stride, num_words, masks, rows;
};

// out[m] = the logarithm of the sum of e^(logits[samples[m], t] / temperatures[m]) over t. A task is a sample.
struct LogSumArgs {
    const float* logits;
    const int64_t* samples;
    const float* temperatures;
    double* out;
    int64_t stride, width, num_samples, rows;
};

// For row samples[m] of logits: ranks[m] = 1 + the number of logits larger than that of tokens[m], unless `tokens` is
// null; and the `count` largest logits with their indices, largest first, of equals the lowest index first. A task is a
// sample.
struct RankArgs {
    const float* logits;
    const int64_t *samples, *tokens;
    int64_t* ranks;
    int64_t* top;       // [num_samples, count]
    float* top_values;  // [num_samples, count]
    int64_t stride, width, count, num_samples, rows;
};

}  // namespace octavo
