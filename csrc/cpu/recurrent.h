// Kernels of layers that carry a state from token to token: short convolutions, selective state spaces, the gated delta
// rule, gated recurrences. Each computes a sequence's tokens one by one, in float32, so results do not depend on how a
// prompt is cut into steps. Channels lie in lanes; sequences and tiles of channels are shared out. Included by
// kernels.cpp only.
#pragma once

#include "activation_functions.h"
#include "norms_and_rotary.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Returns where the state after token t is stored. The state before a step's first token is at that token's place.
inline float* state_of(const StateArgs& a, int64_t t) { return a.states + a.slots[t] * a.state_stride; }

// Returns the state at token t's `place`, for the token to change. The state of the token before is copied there if it
// is elsewhere.
inline float* continued(const StateArgs& a, int64_t t, int64_t place, int64_t num_floats, float* state) {
    float* own = state_of(a, t) + place;
    if (own != state) memcpy(own, state, static_cast<size_t>(num_floats) * sizeof(float));
    return own;
}

// Returns whether no later token overwrites token t's state.
inline bool is_kept(const StateArgs& a, int64_t t, int64_t end) { return t + 1 == end || a.slots[t + 1] != a.slots[t]; }

// Calls f(unit, first token, end, is_fresh) for the units of a task. A sequence has `units` units.
template <class F>
inline void for_units(const StateArgs& a, int64_t task, int64_t units, F f) {
    const int64_t s = task / a.parts;
    const int64_t part = task % a.parts;
    const int64_t begin = a.query_start[s];
    const int64_t end = a.query_start[s + 1];
    if (begin == end) return;
    const bool is_fresh = a.seq_lens[s] == end - begin;
    for (int64_t u = units * part / a.parts; u < units * (part + 1) / a.parts; ++u) f(u, begin, end, is_fresh);
}

inline int64_t tiles_of(int64_t channels) { return (channels + kStateTile - 1) / kStateTile; }

template <class T, int kKernel>
void conv_channels(const ConvArgs& a, int64_t first, int lanes, int64_t begin, int64_t end, bool fresh) {
    Vec weight[kKernel];
    Vec window[kKernel];  // the last is the current token's
    for (int j = 0; j < kKernel; ++j) weight[j] = load_some(a.weight + j * a.width + first, lanes);
    for (int j = 0; j + 1 < kKernel; ++j) {
        window[j] = fresh ? zero() : load_some(state_of(a, begin) + j * a.width + first, lanes);
    }
    const Vec bias = a.bias ? load_some(a.bias + first, lanes) : zero();
    for (int64_t t = begin; t < end; ++t) {
        window[kKernel - 1] = load_some(static_cast<const T*>(a.x) + t * a.x_stride + first, lanes);
        Vec sum = bias;
        for (int j = 0; j < kKernel; ++j) sum = fma(weight[j], window[j], sum);
        for (int j = 0; j + 1 < kKernel; ++j) window[j] = window[j + 1];
        store_some(static_cast<T*>(a.out) + t * a.width + first, a.kind == kSilu ? gated_by(sum, sum) : sum, lanes);
        if (!is_kept(a, t, end)) continue;
        for (int j = 0; j + 1 < kKernel; ++j) store_some(state_of(a, t) + j * a.width + first, window[j], lanes);
    }
}

void conv(const void* args, int64_t task) {
    const ConvArgs& a = *static_cast<const ConvArgs*>(args);
    for_units(a, task, tiles_of(a.width), [&](int64_t tile, int64_t begin, int64_t end, bool fresh) {
        const int64_t first = tile * kStateTile;
        for_vectors(min_of(kStateTile, a.width - first), [&](int64_t i, int lanes) {
            with_element(a.dtype, [&](auto element) {
                with_constant<kMaxConvKernel>(a.kernel, [&](auto kernel) {
                    conv_channels<typename decltype(element)::T, decltype(kernel)::kValue>(a, first + i, lanes, begin,
                                                                                           end, fresh);
                });
            });
        });
    });
}

// Writes a row's elements as floats, padded to whole vectors.
template <class T>
inline void widen(const T* x, int64_t n, float* out) {
    for_vectors(n, [&](int64_t i, int lanes) { store(out + i, load_some(x + i, lanes)); });
}

template <class T, bool kWide>
void scan_tile(const ScanArgs& a, int64_t tile, int64_t begin, int64_t end, bool fresh) {
    const int64_t n = a.state_size;
    const int64_t group_channels = a.channels / a.groups;
    const int64_t group = tile / tiles_of(group_channels);
    const int64_t first_in_group = tile % tiles_of(group_channels) * kStateTile;
    const int64_t count = min_of(kStateTile, group_channels - first_in_group);
    const int64_t first = group * group_channels + first_in_group;
    const int64_t place = tile * n * kStateTile;
    float* state = state_of(a, begin) + place;
    if (fresh) memset(state, 0, static_cast<size_t>(n * kStateTile) * sizeof(float));
    alignas(64) float b[kMaxStateSize + kStateTile], c[kMaxStateSize + kStateTile];
    for (int64_t t = begin; t < end; ++t) {
        state = continued(a, t, place, n * kStateTile, state);
        widen(static_cast<const T*>(a.b) + t * a.b_stride + group * n, n, b);
        widen(static_cast<const T*>(a.c) + t * a.c_stride + group * n, n, c);
        const T* x_row = static_cast<const T*>(a.x) + t * a.x_stride + first;
        T* out = static_cast<T*>(a.out) + t * a.channels + first;
        alignas(64) float steps[kStateTile] = {};
        if (a.time) {
            T raw[kStateTile] = {};
            const T* time = static_cast<const T*>(a.time) + t * a.time_stride;
            for (int64_t i = 0; i < count; ++i) raw[i] = time[(first + i) / a.head_size];
            widen(raw, kStateTile, steps);
            if (a.time_bias) {
                for (int64_t i = 0; i < count; ++i) steps[i] += a.time_bias[(first + i) / a.head_size];
            }
        }
        for_vectors(count, [&](int64_t i, int lanes) {
            const Vec x = load_some(x_row + i, lanes);
            Vec step = set1(1.0f);
            if (a.time) step = min(set1(a.time_max), max(set1(a.time_min), softplus(load(steps + i))));
            const Vec input = mul(step, x);
            Vec decay = kWide ? zero() : exp(mul(step, load_some(a.a + first + i, lanes)));
            Vec sums[4] = {zero(), zero(), zero(), zero()};
            float* h = state + i;
            for (int64_t k = 0; k < n; ++k, h += kStateTile) {
                if (kWide) decay = exp(mul(step, load_some(a.a + k * a.channels + first + i, lanes)));
                const Vec next = fma(load(h), decay, mul(input, set1(b[k])));
                store(h, next);
                sums[k % 4] = fma(next, set1(c[k]), sums[k % 4]);
            }
            Vec y = add(add(sums[0], sums[1]), add(sums[2], sums[3]));
            if (a.d) y = fma(x, load_some(a.d + first + i, lanes), y);
            store_some(out + i, y, lanes);
        });
    }
}

void scan(const void* args, int64_t task) {
    const ScanArgs& a = *static_cast<const ScanArgs*>(args);
    const int64_t tiles = a.groups * tiles_of(a.channels / a.groups);
    for_units(a, task, tiles, [&](int64_t tile, int64_t begin, int64_t end, bool fresh) {
        with_element(a.dtype, [&](auto element) {
            using T = typename decltype(element)::T;
            a.wide ? scan_tile<T, true>(a, tile, begin, end, fresh) : scan_tile<T, false>(a, tile, begin, end, fresh);
        });
    });
}

template <class T>
inline float widened(const T* x) {
    float lanes[kLanes];
    store(lanes, load_n(x, 1));
    return lanes[0];
}

// Returns log(g), by which a state decays, from a head's rate and the token's decay with its bias.
inline Vec decay_exponent(const DeltaArgs& a, Vec rate, Vec raw) {
    return a.lowest != 0.0f ? gated_by(set1(a.lowest), mul(negated(rate), raw)) : mul(rate, softplus(raw));
}

template <class T, bool kByElement>
void delta_tile(const DeltaArgs& a, int64_t tile, int64_t begin, int64_t end, bool fresh) {
    const int64_t n = a.key_size;
    const int64_t head = tile / tiles_of(a.value_size);
    const int64_t key_head = a.alternates ? head % a.key_heads : head / (a.value_heads / a.key_heads);
    const int64_t first = tile % tiles_of(a.value_size) * kStateTile;
    const int64_t count = min_of(kStateTile, a.value_size - first);
    const int64_t place = tile * n * kStateTile;
    float* state = state_of(a, begin) + place;
    if (fresh) memset(state, 0, static_cast<size_t>(n * kStateTile) * sizeof(float));
    alignas(64) float query[kMaxStateSize + kStateTile], key[kMaxStateSize + kStateTile];
    // Decays by element, and keys times them, which meet the state before it decays.
    alignas(64) float decays[kMaxStateSize + kStateTile], decayed[kMaxStateSize + kStateTile];
    const Vec rate = set1(a.a[head]);
    for (int64_t t = begin; t < end; ++t) {
        state = continued(a, t, place, n * kStateTile, state);
        widen(static_cast<const T*>(a.query) + t * a.query_stride + key_head * n, n, query);
        widen(static_cast<const T*>(a.key) + t * a.key_stride + key_head * n, n, key);
        const T* of_token = static_cast<const T*>(a.decay) + t * a.decay_stride;
        Vec decay = zero();
        if (kByElement) {
            for_vectors(n, [&](int64_t i, int lanes) {
                const Vec raw =
                    add(load_some(of_token + head * n + i, lanes), load_some(a.decay_bias + head * n + i, lanes));
                const Vec kept = exp(decay_exponent(a, rate, raw));
                store(decays + i, kept);
                store(decayed + i, mul(kept, load(key + i)));
            });
        } else {
            decay = exp(decay_exponent(a, rate, set1(widened(of_token + head) + a.decay_bias[head])));
        }
        const Vec beta =
            gated_by(set1(a.beta_scale), set1(widened(static_cast<const T*>(a.beta) + t * a.beta_stride + head)));
        const T* value = static_cast<const T*>(a.value) + t * a.value_stride + head * a.value_size + first;
        T* out = static_cast<T*>(a.out) + (t * a.value_heads + head) * a.value_size + first;
        for_vectors(count, [&](int64_t i, int lanes) {
            Vec found[4] = {zero(), zero(), zero(), zero()};
            for (int64_t k = 0; k < n; ++k) {
                const float met = kByElement ? decayed[k] : key[k];
                found[k % 4] = fma(load(state + k * kStateTile + i), set1(met), found[k % 4]);
            }
            const Vec sum = add(add(found[0], found[1]), add(found[2], found[3]));
            const Vec known = kByElement ? sum : mul(decay, sum);
            const Vec change = mul(beta, sub(load_some(value + i, lanes), known));
            Vec sums[4] = {zero(), zero(), zero(), zero()};
            float* h = state + i;
            for (int64_t k = 0; k < n; ++k, h += kStateTile) {
                const Vec kept = kByElement ? set1(decays[k]) : decay;
                const Vec next = fma(set1(key[k]), change, mul(load(h), kept));
                store(h, next);
                sums[k % 4] = fma(next, set1(query[k]), sums[k % 4]);
            }
            store_some(out + i, add(add(sums[0], sums[1]), add(sums[2], sums[3])), lanes);
        });
    }
}

void delta(const void* args, int64_t task) {
    const DeltaArgs& a = *static_cast<const DeltaArgs*>(args);
    const int64_t tiles = a.value_heads * tiles_of(a.value_size);
    for_units(a, task, tiles, [&](int64_t tile, int64_t begin, int64_t end, bool fresh) {
        with_element(a.dtype, [&](auto element) {
            using T = typename decltype(element)::T;
            a.by_element ? delta_tile<T, true>(a, tile, begin, end, fresh)
                         : delta_tile<T, false>(a, tile, begin, end, fresh);
        });
    });
}

template <class T>
void recurrence_channels(const RecurrenceArgs& a, int64_t first, int lanes, int64_t begin, int64_t end, bool fresh) {
    const Vec one = set1(1.0f);
    const Vec rate = load_some(a.a + first, lanes);
    const Vec input_bias = load_some(a.input_bias + first, lanes);
    const Vec decay_bias = load_some(a.decay_bias + first, lanes);
    Vec h = fresh ? zero() : load_some(state_of(a, begin) + first, lanes);
    for (int64_t t = begin; t < end; ++t) {
        const Vec x = load_some(static_cast<const T*>(a.x) + t * a.x_stride + first, lanes);
        const Vec input = load_some(static_cast<const T*>(a.input) + t * a.input_stride + first, lanes);
        const Vec gated = gated_by(x, add(input, input_bias));
        if (fresh && t == begin) {
            h = gated;
        } else {
            const Vec decay = load_some(static_cast<const T*>(a.decay) + t * a.decay_stride + first, lanes);
            const Vec exponent = gated_by(rate, add(decay, decay_bias));
            h = fma(exp(exponent), h, mul(sqrt(max(zero(), sub(one, exp(add(exponent, exponent))))), gated));
        }
        store_some(static_cast<T*>(a.out) + t * a.width + first, h, lanes);
        if (is_kept(a, t, end)) store_some(state_of(a, t) + first, h, lanes);
    }
}

void recurrence(const void* args, int64_t task) {
    const RecurrenceArgs& a = *static_cast<const RecurrenceArgs*>(args);
    for_units(a, task, tiles_of(a.width), [&](int64_t tile, int64_t begin, int64_t end, bool fresh) {
        const int64_t first = tile * kStateTile;
        for_vectors(min_of(kStateTile, a.width - first), [&](int64_t i, int lanes) {
            with_element(a.dtype, [&](auto element) {
                recurrence_channels<typename decltype(element)::T>(a, first + i, lanes, begin, end, fresh);
            });
        });
    });
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
