// Kernels that measure logits: the logarithm of a row's sum of exponentials, ranks, and the largest elements. Sums run
// in an order that the row's length alone decides. Included by kernels.cpp only.
#pragma once

#include <cmath>
#include <utility>

#include "sampling.h"

namespace octavo::OCTAVO_ISA {
namespace {

void log_sum(const void* args, int64_t task) {
    const LogSumArgs& a = *static_cast<const LogSumArgs*>(args);
    const float* x = a.logits + a.samples[task] * a.stride;
    const float largest = max_of_row(x, a.width);
    const Vec shift = set1(largest), temperature = set1(a.temperatures[task]);
    double total = 0;
    int64_t i = 0;
    while (i + kLanes <= a.width) {
        Vec sum = zero();
        const int64_t end = min_of(i + kSumChunk, a.width / kLanes * kLanes);
        for (; i < end; i += kLanes) sum = add(sum, exp(div(sub(load(x + i), shift), temperature)));
        total += reduce_add(sum);
    }
    for (; i < a.width; ++i) total += exp((x[i] - largest) / a.temperatures[task]);
    a.out[task] = static_cast<double>(largest) / static_cast<double>(a.temperatures[task]) + std::log(total);
}

// The `count` best elements offered so far, by value and then by index: a heap whose root is the worst of them.
struct Best {
    float* values;
    int64_t* indices;
    int64_t count, held = 0;

    bool is_worse(int64_t a, int64_t b) const {
        return values[a] < values[b] || (values[a] == values[b] && indices[a] > indices[b]);
    }
    void swap(int64_t a, int64_t b) {
        std::swap(values[a], values[b]);
        std::swap(indices[a], indices[b]);
    }
    void sift_down(int64_t at) {
        for (int64_t child; (child = 2 * at + 1) < held; at = child) {
            if (child + 1 < held && is_worse(child + 1, child)) ++child;
            if (!is_worse(child, at)) return;
            swap(at, child);
        }
    }
    // Offers an element. Indices come in ascending order: of equals, the held ones stay.
    void offer(float value, int64_t index) {
        if (held < count) {
            values[held] = value;
            indices[held] = index;
            for (int64_t at = held++; at > 0 && is_worse(at, (at - 1) / 2); at = (at - 1) / 2) swap(at, (at - 1) / 2);
        } else if (value > values[0]) {
            values[0] = value;
            indices[0] = index;
            sift_down(0);
        }
    }
    // Sorts the best first. Nothing can be offered afterwards.
    void sort() {
        while (held > 1) {
            swap(0, --held);
            sift_down(0);
        }
    }
};

void rank(const void* args, int64_t task) {
    const RankArgs& a = *static_cast<const RankArgs*>(args);
    const float* x = a.logits + a.samples[task] * a.stride;
    if (a.tokens != nullptr) {
        const float chosen = x[a.tokens[task]];
        Vec larger = zero();  // counts, exact below 2^24 a lane
        int64_t i = 0, num_larger = 0;
        for (; i + kLanes <= a.width; i += kLanes) {
            larger = add(larger, select_greater(load(x + i), set1(chosen), set1(1.0f), zero()));
        }
        for (; i < a.width; ++i) num_larger += x[i] > chosen;
        float counts[kLanes];
        store(counts, larger);
        for (const float count : counts) num_larger += static_cast<int64_t>(count);
        a.ranks[task] = 1 + num_larger;
    }
    if (a.count == 0) return;
    Best best{a.top_values + task * a.count, a.top + task * a.count, a.count};
    constexpr int64_t kChunk = 8 * kLanes;  // looked at only if its largest may be among the best
    int64_t i = 0;
    for (; i + kChunk <= a.width; i += kChunk) {
        if (best.held == a.count) {
            Vec largest = load(x + i);
            for (int64_t j = kLanes; j < kChunk; j += kLanes) largest = max(largest, load(x + i + j));
            if (!(reduce_max(largest) > best.values[0])) continue;
        }
        for (int64_t j = i; j < i + kChunk; ++j) best.offer(x[j], j);
    }
    for (; i < a.width; ++i) best.offer(x[i], i);
    best.sort();
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
