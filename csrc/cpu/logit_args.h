// Sampling: from logits to tokens and to what is told of them.
#pragma once

#include <cstdint>

#include "kernel_types.h"

namespace octavo {

// out[r] = the lowest index of the largest of x[r, width], or kNoToken where that is not finite or the row has a NaN.
constexpr int64_t kNoToken = -1;
struct ArgmaxArgs : RowArgs {
    const float* x;
    int64_t* out;
    int64_t stride, width;
};

// out[r] = a token drawn from logits[r, width], which become its weights, or kNoToken as in ArgmaxArgs. Arrays are by
// row; top_k 0 is all; a row of temperature 0 gives its argmax and stays as it is.
struct SampleArgs : RowArgs {
    float* logits;
    const float* temperature;
    const int64_t* top_k;
    const float *top_p, *min_p;
    const double* uniforms;  // in [0, 1)
    int64_t* out;
    int64_t stride, width;
};

// logits[samples[m], t] = -inf where bit t % 32 of words[m, t / 32] is 0, and beyond the words; a task is a mask.
struct MaskArgs {
    float* logits;
    const uint32_t* words;
    const int64_t* samples;
    int64_t stride, width, words_stride, num_words, masks, rows;
};

// out[m] = the logarithm of the sum of e^(logits[samples[m], t] / temperatures[m]) over t; a task is a sample.
struct LogSumArgs {
    const float* logits;
    const int64_t* samples;
    const float* temperatures;
    double* out;
    int64_t stride, width, num_samples, rows;
};

// Of row samples[m] of logits: ranks[m] = 1 + how many are larger than that of tokens[m], unless `tokens` is null; and
// the `count` largest, of equals those of the lowest index, largest first. A task is a sample.
struct RankArgs {
    const float* logits;
    const int64_t *samples, *tokens;
    int64_t* ranks;
    int64_t* top;       // [num_samples, count]
    float* top_values;  // [num_samples, count]
    int64_t stride, width, count, num_samples, rows;
};

}  // namespace octavo
