// Routing: chooses each token's experts from its router's logits, in float32 and in an order that the number of experts
// alone decides. Also gathers the inputs of experts. Included by kernels.cpp only.
#pragma once

#include "norms_and_rotary.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Returns the index of the largest element that is not taken, and takes it. Of equals the first. Nothing compares
// larger than NaN.
inline int take_largest(const float* x, uint8_t* taken, int begin, int end) {
    int best = begin;
    for (int i = begin; i < end; ++i) {
        if (!taken[i] && (taken[best] || x[i] > x[best] || x[best] != x[best])) best = i;
    }
    taken[best] = 1;
    return best;
}

// Marks all experts outside the best groups as taken. Groups compare by their best expert, or by the sum of their two
// best.
void keep_best_groups(const RouteArgs& a, const float* choice, uint8_t* taken) {
    float groups[kMaxExperts];
    uint8_t kept[kMaxExperts] = {};
    const int size = a.num_experts / a.num_groups;
    for (int g = 0; g < a.num_groups; ++g) {
        groups[g] = choice[take_largest(choice, taken, g * size, (g + 1) * size)];
        if (a.group_by_two) groups[g] += choice[take_largest(choice, taken, g * size, (g + 1) * size)];
    }
    for (int i = 0; i < a.kept_groups; ++i) take_largest(groups, kept, 0, a.num_groups);
    for (int i = 0; i < a.num_experts; ++i) taken[i] = !kept[i / size];
}

// SparseMixer's inference (Liu et al. 2023). Each chosen expert weighs as much as softmax gives it among the experts
// that are not yet taken and whose relative distance to the largest is at most twice the jitter.
void sparsemixer(const RouteArgs& a, const float* logits, int32_t* ids, float* weights) {
    uint8_t taken[kMaxExperts] = {};
    for (int j = 0; j < a.top_k; ++j) {
        uint8_t before[kMaxExperts];
        memcpy(before, taken, static_cast<size_t>(a.num_experts));
        const int best = take_largest(logits, taken, 0, a.num_experts);
        float sum = 0.0f;
        for (int i = 0; i < a.num_experts; ++i) {
            const float magnitude = logits[i] < 0.0f ? -logits[i] : logits[i];
            const float distance = (logits[best] - logits[i]) / max_of(magnitude, logits[best]);
            if (!before[i] && !(distance > 2 * a.jitter)) sum += exp(logits[i] - logits[best]);
        }
        ids[j] = best;
        weights[j] = 1.0f / sum;
    }
}

void route_row(const RouteArgs& a, int64_t row) {
    alignas(64) float logits[kMaxExperts], scores[kMaxExperts], biased[kMaxExperts];
    const int64_t n = a.num_experts;
    const float* x = a.logits + row * a.stride;
    int32_t* ids = a.ids + row * a.top_k;
    float* weights = a.weights + row * a.top_k;
    const Vec one = set1(1.0f);
    for_vectors(n, [&](int64_t i, int lanes) {
        Vec v = load_some(x + i, lanes);
        if (a.softcap > 0) v = softcap(v, set1(a.softcap), set1(1.0f / a.softcap));
        store_some(logits + i, v, lanes);
    });
    if (a.scoring == kSparsemixer) return sparsemixer(a, logits, ids, weights);
    if (a.scoring == kSigmoid) {
        for_vectors(n, [&](int64_t i, int lanes) {
            store_some(scores + i, gated_by(one, load_some(logits + i, lanes)), lanes);
        });
    } else {
        float largest = logits[0];
        for (int64_t i = 1; i < n; ++i) largest = max_of(largest, logits[i]);
        for_vectors(n, [&](int64_t i, int lanes) {
            store_some(scores + i, exp(sub(load_some(logits + i, lanes), set1(largest))), lanes);
        });
        const Vec sum = set1(sum_row(scores, n, [](Vec total, Vec v, int) { return add(total, v); }));
        for_vectors(
            n, [&](int64_t i, int lanes) { store_some(scores + i, div(load_some(scores + i, lanes), sum), lanes); });
    }
    const float* choice = a.group_by_two ? scores : logits;
    if (a.bias) {
        const float* base = a.bias_logits ? logits : scores;
        for_vectors(n, [&](int64_t i, int lanes) {
            store_some(biased + i, add(load_some(base + i, lanes), load_some(a.bias + i, lanes)), lanes);
        });
        choice = biased;
    }
    uint8_t taken[kMaxExperts] = {};
    if (a.kept_groups < a.num_groups) keep_best_groups(a, choice, taken);
    float total = 0.0f;
    for (int j = 0; j < a.top_k; ++j) {
        ids[j] = take_largest(choice, taken, 0, a.num_experts);
        weights[j] = scores[ids[j]];
        total += weights[j];
    }
    // Sigmoids may all be zero.
    const float divisor = a.normalize ? total + 1e-20f : 1.0f;
    for (int j = 0; j < a.top_k; ++j) {
        weights[j] = weights[j] / divisor * a.scale;
        if (a.scales) weights[j] *= a.scales[ids[j]];
    }
}

void route(const void* args, int64_t task) {
    const RouteArgs& a = *static_cast<const RouteArgs*>(args);
    for_rows(a, task, a.rows, [&](int64_t row) { route_row(a, row); });
}

// Copies the row of x of each entry that shares its expert with others beside theirs, times its weight with
// `scale_inputs`. An entry that is alone is multiplied where it lies, unless it is scaled.
void gather_experts(const void* args, int64_t task) {
    const ExpertsPass& p = *static_cast<const ExpertsPass*>(args);
    const ExpertsArgs& a = *p.args;
    const ExpertsSchedule& s = *p.schedule;
    const int32_t* ids = a.ids + p.token_begin * a.top_k;
    const int64_t end = s.num_entries * (task + 1) / p.gather_tasks;
    const int64_t width = a.up->k;
    for (int64_t i = s.num_entries * task / p.gather_tasks; i < end; ++i) {
        char* to = s.inputs + i * p.input_bytes;
        if (a.scale_inputs) {
            const Vec weight = set1(s.weights[i]);
            with_element(a.x_dtype, [&](auto element) {
                using T = typename decltype(element)::T;
                const T* x = static_cast<const T*>(a.x) + s.tokens[i] * a.x_stride;
                const auto scaled = [&](int64_t j, int lanes) { return mul(weight, load_some(x + j, lanes)); };
                if (p.input_dtype == kQ8) return quantize_row(width, reinterpret_cast<QBlock*>(to), nullptr, scaled);
                for_vectors(width, [&](int64_t j, int lanes) {
                    store_some(reinterpret_cast<T*>(to) + j, scaled(j, lanes), lanes);
                });
            });
            continue;
        }
        const int32_t expert = ids[s.entries[i]];
        const bool is_first = i == 0 || ids[s.entries[i - 1]] != expert;
        const bool is_last = i + 1 == s.num_entries || ids[s.entries[i + 1]] != expert;
        if (is_first && is_last) continue;
        const int64_t element_bytes = p.input_dtype == kQ8 ? sizeof(QBlock) : p.input_dtype == kF32 ? 4 : 2;
        memcpy(to, static_cast<const char*>(a.x) + s.tokens[i] * a.x_stride * element_bytes,
               static_cast<size_t>(p.input_bytes));
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
