// Kernels of sampling: argmax, masks of tokens, and drawing one token a row by temperature, min-p, top-k and top-p,
// then a race of exponential numbers. Thresholds are found by radix selection on the bits of the probabilities, whose
// order is that of the numbers, so nothing is sorted. Every sum runs in an order that the row's length alone decides.
// Included by kernels.cpp and logprobs.h only.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Elements whose probabilities are summed together; these sums are then added in order.
constexpr int64_t kSumChunk = 512;

// Returns whether a row holds a NaN. `sum` is the row's sum in any order. The sum of a row without NaN is NaN only if
// infinities meet or sums overflow: then each element is looked at.
inline bool has_nan(const float* p, int64_t n, float sum) {
    if (sum == sum) return false;
    for (int64_t i = 0; i < n; ++i) {
        if (p[i] != p[i]) return true;
    }
    return false;
}

inline bool is_finite(float x) { return x > -__builtin_inff() && x < __builtin_inff(); }

// Returns the lowest index of a row's largest element, or kNoToken. Indices are kept as floats (exact below 2^24) next
// to the values. Lanes begin below everything, so a NaN never wins.
inline int64_t argmax_of_row(const float* x, int64_t width) {
    constexpr int kUnroll = 4;
    const Vec lowest = set1(-__builtin_inff());
    Vec best[kUnroll], where[kUnroll], index[kUnroll], sums[kUnroll];
    for (int j = 0; j < kUnroll; ++j) {
        best[j] = lowest;
        where[j] = zero();
        sums[j] = zero();
        index[j] = add(iota(), set1(static_cast<float>(j * kLanes)));
    }
    const Vec stride = set1(static_cast<float>(kUnroll * kLanes));
    int64_t i = 0;
    for (; i + kUnroll * kLanes <= width; i += kUnroll * kLanes) {
        for (int j = 0; j < kUnroll; ++j) {
            const Vec v = load(x + i + j * kLanes);
            where[j] = select_greater(v, best[j], index[j], where[j]);
            best[j] = select_greater(v, best[j], v, best[j]);
            index[j] = add(index[j], stride);
            sums[j] = add(sums[j], v);
        }
    }
    const int64_t done = i;
    float best_value = -__builtin_inff();
    int64_t best_index = 0;
    for (int j = 0; j < kUnroll; ++j) {
        float values[kLanes], indices[kLanes];
        store(values, best[j]);
        store(indices, where[j]);
        for (int lane = 0; lane < kLanes; ++lane) {
            const int64_t at = static_cast<int64_t>(indices[lane]);
            if (values[lane] > best_value || (values[lane] == best_value && at < best_index)) {
                best_value = values[lane];
                best_index = at;
            }
        }
    }
    for (; i < width; ++i) {
        if (x[i] > best_value) {
            best_value = x[i];
            best_index = i;
        }
    }
    float sum = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    for (int64_t j = done; j < width; ++j) sum += x[j];
    return is_finite(best_value) && !has_nan(x, width, sum) ? best_index : kNoToken;
}

void argmax(const void* args, int64_t task) {
    const ArgmaxArgs& a = *static_cast<const ArgmaxArgs*>(args);
    a.out[task] = argmax_of_row(a.x + task * a.stride, a.width);
}

// Returns the largest element of a row, or NaN if the row holds one.
inline float max_of_row(const float* p, int64_t n) {
    Vec largest = set1(-__builtin_inff()), sums = zero();
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const Vec v = load(p + i);
        largest = select_greater(v, largest, v, largest);  // drops NaN
        sums = add(sums, v);
    }
    float found = reduce_max(largest), sum = reduce_add(sums);
    for (; i < n; ++i) {
        found = p[i] > found ? p[i] : found;
        sum += p[i];
    }
    return has_nan(p, n, sum) ? __builtin_nanf("") : found;
}

inline float sum_chunk(const float* p, int64_t n) {
    Vec total = zero();
    for_vectors(n, [&](int64_t i, int lanes) { total = add(total, load_some(p + i, lanes)); });
    return reduce_add(total);
}
inline double sum_weights(const float* p, int64_t n) {
    double total = 0;
    for (int64_t i = 0; i < n; i += kSumChunk) total += sum_chunk(p + i, min_of(kSumChunk, n - i));
    return total;
}

inline void drop_below(float* p, int64_t n, float floor) {
    const Vec limit = set1(floor);
    for_vectors(n, [&](int64_t i, int lanes) {
        const Vec v = load_some(p + i, lanes);
        store_some(p + i, select_greater(limit, v, zero(), v), lanes);
    });
}

// Returns the largest probability p such that the probabilities of at least p number `wanted` or more (by_mass false)
// or sum to `wanted` or more (true). Returns 0 if even all of them do not. Probabilities are in [0, 1]; zeros and NaN
// do not count.
inline float find_floor(const float* p, int64_t n, double wanted, bool by_mass) {
    constexpr int kBits[3] = {12, 10, 10};
    uint32_t prefix = 0;  // the highest bits of the result, as far as known
    int shift = 32;
    double found = 0;  // count or mass of the probabilities above the prefix
    for (int level = 0; level < 3; ++level) {
        const uint32_t buckets = 1u << kBits[level];
        const int above = shift;
        shift -= kBits[level];
        double weight[1 << 12];
        for (uint32_t b = 0; b < buckets; ++b) weight[b] = 0;
        for (int64_t i = 0; i < n; ++i) {
            if (!(p[i] > 0)) continue;
            const uint32_t bits = bits_of<uint32_t>(p[i]);
            if (level > 0 && (bits >> above) != prefix) continue;
            weight[(bits >> shift) & (buckets - 1)] += by_mass ? static_cast<double>(p[i]) : 1.0;
        }
        int64_t b = buckets - 1;
        while (b >= 0 && found + weight[b] < wanted) found += weight[b--];
        if (b < 0) return 0;
        prefix = (prefix << kBits[level]) | static_cast<uint32_t>(b);
    }
    return bits_of<float>(prefix);
}

// Returns 32 bits for a token, mixed from the token and the 53 bits of a row's random number. The mixers are
// MurmurHash3's finalizer (Appleby) and lowbias32 (Wellons).
inline uint32_t race_bits(uint32_t token, uint32_t low, uint32_t high) {
    uint32_t x = token * 0x9E3779B1u + low;
    x ^= x >> 16;
    x *= 0x85EBCA6Bu;
    x ^= x >> 13;
    x *= 0xC2B2AE35u;
    x ^= x >> 16;
    x += high;
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

// Draws a token from weights [n], the largest of which is 1. Each token's exponential number, divided by its weight, is
// a time, and the first token wins (see `Ops.sample`). A token's time is at least its uniform number over its weight,
// so most tokens lose before their logarithm is taken.
inline int64_t race(const float* p, int64_t n, double uniform) {
    constexpr int64_t kBlock = 256;
    const uint64_t bits = static_cast<uint64_t>(uniform * 9007199254740992.0);  // 2^53
    const uint32_t low = static_cast<uint32_t>(bits);
    const uint32_t high = static_cast<uint32_t>(bits >> 32) * 0x27D4EB2Fu, fine = high + 0x165667B1u;
    int64_t winner = -1;
    double best = __builtin_inf();
    const auto enter = [&](int64_t token) {
        const double coarse = race_bits(static_cast<uint32_t>(token), low, high);
        const double rest = race_bits(static_cast<uint32_t>(token), low, fine);
        const double u = (coarse + (rest + 0.5) * 0x1p-32) * 0x1p-32;
        const double time = -__builtin_log1p(-u) / static_cast<double>(p[token]);
        if (time < best) {
            best = time;
            winner = token;
        }
    };
    for (int64_t i = 0; i < n && winner < 0; ++i) {
        if (p[i] == 1.0f) enter(i);
    }
    for (int64_t start = 0; start < n; start += kBlock) {
        const float limit = static_cast<float>(best) * 1.00001f;
        const int64_t end = min_of(start + kBlock, n);
        int32_t may_win = 0;
        for (int64_t i = start; i < end; ++i) {
            const int32_t upper = static_cast<int32_t>(race_bits(static_cast<uint32_t>(i), low, high) >> 8);
            may_win |= static_cast<float>(upper) * 0x1p-24f <= p[i] * limit;
        }
        if (!may_win) continue;
        for (int64_t i = start; i < end; ++i) {
            if (!(p[i] > 0)) continue;
            const int32_t upper = static_cast<int32_t>(race_bits(static_cast<uint32_t>(i), low, high) >> 8);
            if (static_cast<float>(upper) * 0x1p-24f <= p[i] * limit) enter(i);
        }
    }
    return winner;
}

// The kernel of SampleArgs: a task is a row, whose logits are overwritten.
void sample(const void* args, int64_t task) {
    const SampleArgs& a = *static_cast<const SampleArgs*>(args);
    float* p = a.logits + task * a.stride;
    const int64_t n = a.width;
    if (!(a.temperature[task] > 0)) {
        a.out[task] = argmax_of_row(p, n);
        return;
    }
    a.out[task] = kNoToken;
    const float largest = max_of_row(p, n);
    if (!is_finite(largest)) return;  // there is no distribution to draw from

    const Vec shift = set1(largest), temperature = set1(a.temperature[task]);
    for_vectors(n, [&](int64_t i, int lanes) {
        store_some(p + i, exp(div(sub(load_some(p + i, lanes), shift), temperature)), lanes);
    });
    // The most likely token has weight 1 exactly: min-p is a bound on the weights themselves.
    if (a.min_p[task] > 0) drop_below(p, n, a.min_p[task]);
    if (a.top_k[task] > 0 && a.top_k[task] < n) {
        drop_below(p, n, find_floor(p, n, static_cast<double>(a.top_k[task]), false));
    }
    if (a.top_p[task] < 1) {
        const double wanted = static_cast<double>(a.top_p[task]) * sum_weights(p, n);
        drop_below(p, n, find_floor(p, n, wanted, true));
    }

    a.out[task] = race(p, n, a.uniforms[task]);
}

void mask(const void* args, int64_t task) {
    const MaskArgs& a = *static_cast<const MaskArgs*>(args);
    const uint32_t* words = a.words + task * a.words_stride;
    float* row = a.logits + a.samples[task] * a.stride;
    for (int64_t begin = 0; begin < a.width; begin += 32) {
        const uint32_t word = begin / 32 < a.num_words ? words[begin / 32] : 0;
        const int64_t length = min_of<int64_t>(32, a.width - begin);
        float* p = row + begin;
        if (word == ~0u) continue;
        if (length == 32 && word == 0) {
            for (int i = 0; i < 32; ++i) p[i] = -__builtin_inff();
        } else if (length == 32) {
            for (int i = 0; i < 32; ++i) p[i] = word >> i & 1 ? p[i] : -__builtin_inff();
        } else {
            for (int64_t i = 0; i < length; ++i) p[i] = word >> i & 1 ? p[i] : -__builtin_inff();
        }
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
