// Norms, quantized rows, rotary embedding with the cache write, copies of rows and argmax: one pass over each row, in
// float32, in an order that the row's length alone decides. Included by kernels.cpp only.
#pragma once

#include "quantize.h"

namespace octavo::OCTAVO_ISA {
namespace {

template <class T>
void quantize_rows(const QuantizeArgs& a, int64_t begin, int64_t end) {
    const int64_t blocks = (a.width + kQBlock - 1) / kQBlock;
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
        quantize_row(a.width, a.out + row * blocks, [&](int64_t i, int lanes) { return load_some(x + i, lanes); });
    }
}

void quantize(const void* args, int64_t task) {
    const QuantizeArgs& a = *static_cast<const QuantizeArgs*>(args);
    const int64_t begin = task * a.rows_per_task;
    const int64_t end = min_of(begin + a.rows_per_task, a.rows);
    if (a.dtype == kF32) {
        quantize_rows<float>(a, begin, end);
    } else {
        quantize_rows<uint16_t>(a, begin, end);
    }
}

// Four sums in turn hide the latency of the addition; their order is a function of n.
template <class T>
inline float sum_of_squares(const T* x, int64_t n) {
    Vec sums[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        for (int j = 0; j < 4; ++j) {
            const Vec v = load(x + i + j * kLanes);
            sums[j] = fma(v, v, sums[j]);
        }
    }
    for_vectors(n - i, [&](int64_t j, int lanes) {
        const Vec v = load_some(x + i + j, lanes);
        sums[0] = fma(v, v, sums[0]);
    });
    return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

template <class T, class W>
void norm_rows(const NormArgs& a, int64_t begin, int64_t end) {
    const W* weight = static_cast<const W*>(a.weight);
    const int64_t blocks = (a.hidden + kQBlock - 1) / kQBlock;
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(a.x) + row / a.inner * a.x_outer_stride + row % a.inner * a.x_inner_stride;
        const float mean = sum_of_squares(x, a.hidden) / static_cast<float>(a.hidden);
        const Vec scale = set1(1.0f / __builtin_sqrtf(mean + a.eps));
        const auto normed = [&](int64_t i, int lanes) {
            return mul(mul(load_some(x + i, lanes), scale), load_some(weight + i, lanes));
        };
        if (a.out_dtype == kQ8) {
            quantize_row(a.hidden, static_cast<QBlock*>(a.out) + row * blocks, normed);
        } else {
            T* out = static_cast<T*>(a.out) + row * a.hidden;
            for_vectors(a.hidden, [&](int64_t i, int lanes) { store_some(out + i, normed(i, lanes), lanes); });
        }
    }
}

void norm(const void* args, int64_t task) {
    const NormArgs& a = *static_cast<const NormArgs*>(args);
    const int64_t begin = task * a.rows_per_task;
    const int64_t end = min_of(begin + a.rows_per_task, a.outer * a.inner);
    if (a.dtype == kF32) {
        if (a.weight_dtype == kF32) {
            norm_rows<float, float>(a, begin, end);
        } else {
            norm_rows<float, uint16_t>(a, begin, end);
        }
    } else if (a.weight_dtype == kF32) {
        norm_rows<uint16_t, float>(a, begin, end);
    } else {
        norm_rows<uint16_t, uint16_t>(a, begin, end);
    }
}

void take_rows(const void* args, int64_t task) {
    const TakeRowsArgs& a = *static_cast<const TakeRowsArgs*>(args);
    const int64_t begin = task * a.rows_per_task;
    const int64_t end = min_of(begin + a.rows_per_task, a.rows);
    for (int64_t i = begin; i < end; ++i) {
        memcpy(static_cast<char*>(a.out) + i * a.row_bytes,
               static_cast<const char*>(a.x) + a.indices[i] * a.x_stride_bytes, static_cast<size_t>(a.row_bytes));
    }
}

// The first 2 * half elements as two halves: (a cos - b sin, b cos + a sin). In place where x == out.
template <class T>
inline void rotate(const T* x, T* out, const float* cos_sin, int64_t half) {
    for_vectors(half, [&](int64_t i, int lanes) {
        const Vec c = load_some(cos_sin + i, lanes);
        const Vec s = load_some(cos_sin + half + i, lanes);
        const Vec a = load_some(x + i, lanes);
        const Vec b = load_some(x + half + i, lanes);
        store_some(out + i, sub(mul(a, c), mul(b, s)), lanes);
        store_some(out + half + i, add(mul(b, c), mul(a, s)), lanes);
    });
}

// Where a token's keys and values go: the first element of each, in the block of its first key/value head.
template <class E>
struct CacheSlot {
    using T = typename E::T;
    T* key;
    T* value;
    int64_t key_head, value_head;  // Elements from one head to the next.
};

template <class E>
inline CacheSlot<E> find_slot(const RotaryArgs& a, int64_t slot) {
    using T = typename E::T;
    const int64_t padded = (a.head_size + kValuePad - 1) / kValuePad * kValuePad;
    const int64_t block = slot / a.block_size;
    const int64_t offset = slot % a.block_size;
    CacheSlot<E> s;
    s.key_head = static_cast<int64_t>(a.head_size) * a.block_size;
    s.value_head = padded * a.block_size;
    s.key = static_cast<T*>(a.key_cache) + block * a.kv_heads * s.key_head + offset * E::kStep;
    s.value = static_cast<T*>(a.value_cache) + block * a.kv_heads * s.value_head +
              offset / E::kStep * E::kStep * padded + offset % E::kStep;
    return s;
}

// A token's key lies in as many cache lines as it has steps, hardly any of which are in a cache: all are asked for
// while the token before is worked on.
template <class E>
inline void prefetch_slot(const RotaryArgs& a, int64_t slot) {
    const CacheSlot<E> s = find_slot<E>(a, slot);
    const int64_t stride = static_cast<int64_t>(a.block_size) * E::kStep;
    for (int32_t g = 0; g < a.kv_heads; ++g) {
        const auto* key = s.key + g * s.key_head;
        for (int64_t i = 0; i < a.head_size / E::kStep; ++i) __builtin_prefetch(key + i * stride, 1, 3);
    }
}

template <class E>
void rotary_tokens(const RotaryArgs& a, int64_t begin, int64_t end) {
    using T = typename E::T;
    const int64_t d = a.head_size;
    const int64_t half = a.rotary_size / 2;
    const int64_t steps = d / E::kStep;
    T rotated[kMaxHeadSize];
    for (int64_t t = begin; t < end; ++t) {
        if (t + 1 < end && a.slots[t + 1] >= 0) prefetch_slot<E>(a, a.slots[t + 1]);
        const float* cos_sin = a.cos_sin + a.positions[t] * a.rotary_size;
        T* query = static_cast<T*>(a.query) + t * a.query_stride;
        for (int32_t h = 0; h < a.query_heads; ++h) rotate(query + h * d, query + h * d, cos_sin, half);
        if (a.slots[t] < 0) continue;
        const CacheSlot<E> s = find_slot<E>(a, a.slots[t]);
        for (int32_t g = 0; g < a.kv_heads; ++g) {
            const T* key = static_cast<const T*>(a.key) + t * a.key_stride + g * d;
            const T* value = static_cast<const T*>(a.value) + t * a.value_stride + g * d;
            memcpy(rotated, key, static_cast<size_t>(d) * sizeof(T));
            rotate(key, rotated, cos_sin, half);
            T* key_slot = s.key + g * s.key_head;
            const int64_t stride = static_cast<int64_t>(a.block_size) * E::kStep;
            for (int64_t i = 0; i < steps; ++i)
                memcpy(key_slot + i * stride, rotated + i * E::kStep, E::kStep * sizeof(T));
            T* value_slot = s.value + g * s.value_head;
            for (int64_t i = 0; i < d; ++i) value_slot[i * E::kStep] = value[i];
        }
    }
}

void rotary(const void* args, int64_t task) {
    const RotaryArgs& a = *static_cast<const RotaryArgs*>(args);
    const int64_t begin = task * a.tokens_per_task;
    const int64_t end = min_of(begin + a.tokens_per_task, a.tokens);
    if (a.dtype == kF32) {
        rotary_tokens<F32>(a, begin, end);
    } else {
        rotary_tokens<BF16>(a, begin, end);
    }
}

// Indices are kept as floats (exact below 2^24) next to the values. Lanes start below everything, so a NaN never wins
// and a row without a finite or +inf value yields 0.
void argmax(const void* args, int64_t task) {
    const ArgmaxArgs& a = *static_cast<const ArgmaxArgs*>(args);
    const float* x = a.x + task * a.stride;
    constexpr int kUnroll = 4;
    const Vec lowest = set1(-__builtin_inff());
    Vec best[kUnroll], where[kUnroll], index[kUnroll];
    for (int j = 0; j < kUnroll; ++j) {
        best[j] = lowest;
        where[j] = zero();
        index[j] = add(iota(), set1(static_cast<float>(j * kLanes)));
    }
    const Vec stride = set1(static_cast<float>(kUnroll * kLanes));
    int64_t i = 0;
    for (; i + kUnroll * kLanes <= a.width; i += kUnroll * kLanes) {
        for (int j = 0; j < kUnroll; ++j) {
            const Vec v = load(x + i + j * kLanes);
            where[j] = select_greater(v, best[j], index[j], where[j]);
            best[j] = select_greater(v, best[j], v, best[j]);
            index[j] = add(index[j], stride);
        }
    }
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
    for (; i < a.width; ++i) {
        if (x[i] > best_value) {
            best_value = x[i];
            best_index = i;
        }
    }
    a.out[task] = best_index;
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
