// Kernels of norms, pooling, rotary embedding with the cache write, and copies of rows. They compute in float32, in an
// order that the row's length alone decides. Included by elementwise_kernels.h, expert_routing.h, recurrent.h and
// kernels.cpp only.
#pragma once

#include "kv_cache_formats.h"
#include "quantize.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Returns the sum over a row, where step(sum, values, lanes) adds a vector's share. Four sums in turn hide the latency
// of the addition; their order is a function of n.
template <class T, class Step>
inline float sum_row(const T* x, int64_t n, Step step) {
    Vec sums[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        for (int j = 0; j < 4; ++j) sums[j] = step(sums[j], load(x + i + j * kLanes), kLanes);
    }
    for_vectors(n - i, [&](int64_t j, int lanes) { sums[0] = step(sums[0], load_some(x + i + j, lanes), lanes); });
    return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

// Writes row `row` of the outputs, as floats or quantized, from the vectors that f(index, lanes) returns.
template <class F>
inline void write_row(void* out, int32_t out_dtype, int64_t row, int64_t width, F f) {
    if (is_quantized(out_dtype)) {
        const int64_t blocks = (width + kQBlock - 1) / kQBlock;
        QBlock* to = static_cast<QBlock*>(out) + row * (out_dtype == kQ16 ? 2 : 1) * blocks;
        quantize_row(width, to, out_dtype == kQ16 ? to + blocks : nullptr, f);
    } else {
        with_element(out_dtype, [&](auto element) {
            auto* to = static_cast<typename decltype(element)::T*>(out) + row * width;
            for_vectors(width, [&](int64_t i, int lanes) { store_some(to + i, f(i, lanes), lanes); });
        });
    }
}

template <class T, class W>
void rms_norm_row(const NormArgs& a, int64_t row, const T* x, const W* weight) {
    const float squares = sum_row(x, a.hidden, [](Vec sum, Vec v, int) { return fma(v, v, sum); });
    const Vec scale = set1(1.0f / __builtin_sqrtf(squares / static_cast<float>(a.hidden) + a.eps));
    write_row(a.out, a.out_dtype, row, a.hidden, [&](int64_t i, int lanes) {
        return mul(mul(load_some(x + i, lanes), scale), load_some(weight + i, lanes));
    });
}

template <class T, class W>
void layer_norm_row(const NormArgs& a, int64_t row, const T* x, const W* weight, const W* bias) {
    const float count = static_cast<float>(a.hidden);
    const float mean = sum_row(x, a.hidden, [](Vec sum, Vec v, int) { return add(sum, v); }) / count;
    const Vec center = set1(mean);
    const float squares = sum_row(x, a.hidden, [&](Vec sum, Vec v, int lanes) {
        // Lanes beyond the row hold zeros, whose distance from the center must not count.
        const Vec distance = sub(v, center);
        const Vec kept = lanes == kLanes ? distance : keep_lanes(distance, 0, lanes, zero());
        return fma(kept, kept, sum);
    });
    const Vec scale = set1(1.0f / __builtin_sqrtf(squares / count + a.eps));
    write_row(a.out, a.out_dtype, row, a.hidden, [&](int64_t i, int lanes) {
        const Vec normed = mul(sub(load_some(x + i, lanes), center), scale);
        const Vec weighted = mul(normed, load_some(weight + i, lanes));
        // Lanes that pad a quantized row become zero: their weight is zero.
        return bias ? add(weighted, load_some(bias + i, lanes)) : weighted;
    });
}

void norm(const void* args, int64_t task) {
    const NormArgs& a = *static_cast<const NormArgs*>(args);
    with_element(a.dtype, [&](auto element) {
        with_element(a.weight_dtype, [&](auto weight_element) {
            using T = typename decltype(element)::T;
            using W = typename decltype(weight_element)::T;
            for_rows(a, task, a.rows * a.inner, [&](int64_t row) {
                const T* x = static_cast<const T*>(a.x) + row / a.inner * a.x_stride + row % a.inner * a.x_inner_stride;
                const int64_t first = row % a.inner * a.weight_stride;
                const W* weight = static_cast<const W*>(a.weight) + first;
                const W* bias = a.bias ? static_cast<const W*>(a.bias) + first : nullptr;
                a.centered ? layer_norm_row(a, row, x, weight, bias) : rms_norm_row(a, row, x, weight);
            });
        });
    });
}

// Pools one output row. Rows are added in order, into registers. A single row stays as it is, whatever the kind.
template <class T>
void pool_row(const PoolArgs& a, int64_t row) {
    const int64_t start = a.starts[row], count = a.ends[row] - start + 1;
    const T* x = static_cast<const T*>(a.x) + start * a.x_stride;
    const float n = static_cast<float>(count);
    const float divisor = a.kind == kMean           ? n
                          : a.kind == kMeanSqrt     ? __builtin_sqrtf(n)
                          : a.kind == kWeightedMean ? n * (n + 1.0f) / 2.0f
                                                    : 1.0f;
    const auto pooled = [&](int64_t i, int lanes) {
        Vec sum = load_some(x + i, lanes);
        for (int64_t r = 1; r < count; ++r) {
            const Vec v = load_some(x + r * a.x_stride + i, lanes);
            sum = a.kind == kMax            ? max(sum, v)
                  : a.kind == kWeightedMean ? fma(v, set1(static_cast<float>(r + 1)), sum)
                                            : add(sum, v);
        }
        return count == 1 ? sum : div(sum, set1(divisor));
    };
    write_row(a.out, a.out_dtype, row, a.width, pooled);
}

void pool(const void* args, int64_t task) {
    const PoolArgs& a = *static_cast<const PoolArgs*>(args);
    for_rows(a, task, a.rows, [&](int64_t row) {
        if (a.dtype == kF32) {
            pool_row<float>(a, row);
        } else {
            pool_row<uint16_t>(a, row);
        }
    });
}

void take_rows(const void* args, int64_t task) {
    const TakeRowsArgs& a = *static_cast<const TakeRowsArgs*>(args);
    for_rows(a, task, a.rows, [&](int64_t row) {
        memcpy(static_cast<char*>(a.out) + row * a.row_bytes,
               static_cast<const char*>(a.x) + a.indices[row] * a.x_stride_bytes, static_cast<size_t>(a.row_bytes));
    });
}

void replace_rows(const void* args, int64_t task) {
    const ReplaceRowsArgs& a = *static_cast<const ReplaceRowsArgs*>(args);
    with_element(a.out_dtype, [&](auto element) {
        for_rows(a, task, a.rows, [&](int64_t row) {
            if (a.indices[row] < 0) return;
            const float* from = a.replacements + a.indices[row] * a.width;
            auto* to = static_cast<typename decltype(element)::T*>(a.out) + row * a.out_stride;
            for_vectors(a.width, [&](int64_t i, int lanes) {
                const Vec x = load_some(from + i, lanes);
                store_some(to + i, a.adds ? add(load_some(to + i, lanes), x) : x, lanes);
            });
        });
    });
}

// Rotates the first 2 * half elements, as two halves a and b: (a cos - b sin, b cos + a sin). x may be out.
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

// Returns the cosines and sines of a token: a row of the table or, if its positions on several axes differ, `mixed`,
// filled from the rows of each.
inline const float* find_rotation(const RotaryArgs& a, int64_t token, float* mixed) {
    const int64_t* positions = a.positions + token;
    const float* row = a.cos_sin + *positions * a.rotary_size;
    if (!a.axes) return row;
    bool differ = false;
    for (int axis = 1; axis < kPositionAxes; ++axis) differ |= positions[axis * a.positions_stride] != *positions;
    if (!differ) return row;
    const int64_t half = a.rotary_size / 2;
    for (int64_t i = 0; i < half; ++i) {
        row = a.cos_sin + positions[a.axes[i] * a.positions_stride] * a.rotary_size;
        mixed[i] = row[i];
        mixed[half + i] = row[half + i];
    }
    return mixed;
}

// A block of the cache. `first` is the place in it where writing begins.
template <class C>
struct CacheBlock {
    using Cached = typename C::Cached;
    Cached* keys;
    Cached* values;
    int64_t key_head, value_head;  // Elements from one head to the next.
    int64_t padded, first;

    // Return the first element of a head's key and value of the token at place `offset` in the block.
    Cached* key(int64_t head, int64_t offset) const { return keys + head * key_head + offset * C::kStep; }
    Cached* value(int64_t head, int64_t offset) const {
        const int64_t of_step = offset % C::kStep;
        Cached* step = values + head * value_head + (offset - of_step) * padded;
        if constexpr (C::kHasScales) return step + C::kOrder[of_step];
        return step + of_step;
    }
};

template <class C>
inline CacheBlock<C> find_block(const RotaryArgs& a, int64_t slot) {
    using Cached = typename C::Cached;
    const int64_t block = slot / a.block_size;
    CacheBlock<C> b;
    b.padded = padded_size(a.value_size);
    b.first = slot - block * a.block_size;
    b.key_head = key_elements<C>(a.key_size + a.index_size, a.block_size);
    b.value_head = b.padded * a.block_size;
    b.keys = static_cast<Cached*>(a.key_cache) + block * a.kv_heads * b.key_head;
    b.values = static_cast<Cached*>(a.value_cache) + block * a.kv_heads * b.value_head;
    return b;
}

// Fetches the cache lines of a token's key: as many as it has steps, hardly any of which are in a cache. Called while
// the token before is worked on.
template <class C>
inline void prefetch_slot(const RotaryArgs& a, int64_t slot) {
    const CacheBlock<C> b = find_block<C>(a, slot);
    const int64_t stride = static_cast<int64_t>(a.block_size) * C::kStep;
    for (int32_t g = 0; g < a.kv_heads; ++g) {
        const auto* key = b.key(g, b.first);
        for (int64_t i = 0; i < b.key_head / stride; ++i) __builtin_prefetch(key + i * stride, 1, 3);
    }
}

// Writes a row's steps, which lie `stride` elements apart in a block.
template <class C>
inline void write_steps(const typename C::T* row, int64_t size, int64_t stride, typename C::T* slot) {
    for (int64_t i = 0; i < size / C::kStep; ++i) {
        memcpy(slot + i * stride, row + i * C::kStep, C::kStep * sizeof(*row));
    }
}

// Writes a rotated key and a value to their places in a cache of bytes. The bytes are a function of the key and of the
// value alone.
template <class C>
inline void write_slot(C cache, const typename C::T* key, const typename C::T* value, int64_t key_size,
                       int64_t value_size, int64_t key_stride, uint8_t* key_slot, uint8_t* value_slot) {
    uint8_t bytes[kMaxHeadSize + kLanes];
    uint16_t scales[2];
    scales[0] = encode(cache, key, key_size, bytes);
    for (int64_t i = 0; i < key_size / 4; ++i) {
        uint8_t four[4];
        for (int j = 0; j < 4; ++j) four[C::kOrder[j]] = bytes[4 * i + j] ^ C::kKeyZero;
        memcpy(key_slot + i * key_stride, four, 4);
    }
    scales[1] = encode(cache, value, value_size, bytes);
    memcpy(key_slot + key_size / 4 * key_stride, scales, 4);
    for (int64_t i = 0; i < value_size; ++i) value_slot[i * 4] = bytes[i];
}

// Returns how many tokens from `t` on, up to `end`, go one after the other into one block.
inline int64_t tokens_of_block(const RotaryArgs& a, int64_t t, int64_t end) {
    const int64_t slot = a.slots[t];
    const int64_t most = min_of(end - t, a.block_size - slot % a.block_size);
    int64_t n = 1;
    while (n < most && a.slots[t + n] == slot + n) ++n;
    return n;
}

// Writes values of tokens at places [begin, end) of a block, as floats. Two values that share a step are written
// together.
template <class C>
inline void write_values(const typename C::T* values, int64_t value_stride, int64_t size, const CacheBlock<C>& block,
                         int64_t head, int64_t begin, int64_t end) {
    for (int64_t offset = begin; offset < end; ++offset, values += value_stride) {
        auto* slot = block.value(head, offset);
        if constexpr (C::kStep == 2) {
            if (offset % 2 == 0 && offset + 1 < end) {
                const auto* next = values + value_stride;
                for (int64_t i = 0; i < size; ++i) {
                    const uint32_t both = values[i] | static_cast<uint32_t>(next[i]) << 16;
                    memcpy(slot + 2 * i, &both, sizeof(both));
                }
                ++offset;
                values = next;
                continue;
            }
        }
        for (int64_t i = 0; i < size; ++i) slot[i * C::kStep] = values[i];
    }
}

// Writes the keys and values of tokens that go one after the other into one block.
template <class C>
inline void write_tokens(const RotaryArgs& a, int64_t begin, int64_t end, float* mixed) {
    using T = typename C::T;
    const int64_t half = a.rotary_size / 2;
    const int64_t stride = static_cast<int64_t>(a.block_size) * C::kStep;
    const CacheBlock<C> block = find_block<C>(a, a.slots[begin]);
    const int64_t count = end - begin;
    T rotated[kMaxHeadSize];
    // Head by head: keys of neighbouring tokens share cache lines, and the lines of all heads are too many to stay in
    // the cache.
    for (int32_t g = 0; g < a.kv_heads; ++g) {
        const T* values = static_cast<const T*>(a.value) + begin * a.value_stride + g * a.value_size;
        for (int64_t t = begin; t < end; ++t) {
            const T* key = static_cast<const T*>(a.key) + t * a.key_stride + g * a.key_size;
            auto* slot = block.key(g, block.first + t - begin);
            if (half > 0) {
                memcpy(rotated, key, static_cast<size_t>(a.key_size) * sizeof(T));
                rotate(key, rotated, find_rotation(a, t, mixed), half);
                key = rotated;
            }
            if constexpr (C::kHasScales) {
                write_slot(C{}, key, values + (t - begin) * a.value_stride, a.key_size, a.value_size, stride, slot,
                           block.value(g, block.first + t - begin));
            } else {
                write_steps<C>(key, a.key_size, stride, slot);
                const T* index = static_cast<const T*>(a.index_key) + t * a.index_stride;
                write_steps<C>(index, a.index_size, stride, slot + a.key_size / C::kStep * stride);
            }
        }
        if constexpr (!C::kHasScales) {
            write_values(values, a.value_stride, a.value_size, block, g, block.first, block.first + count);
        }
    }
}

template <class C>
void rotary_tokens(const RotaryArgs& a, int64_t begin, int64_t end) {
    using T = typename C::T;
    const int64_t d = a.head_size;
    const int64_t half = a.rotary_size / 2;
    float mixed[kMaxHeadSize];
    const auto prepare_query = [&](int64_t t) {
        const float* cos_sin = find_rotation(a, t, mixed);
        T* query = static_cast<T*>(a.query) + t * a.query_stride;
        for (int32_t h = 0; h < a.query_heads; ++h) rotate(query + h * d, query + h * d, cos_sin, half);
        if (a.query_scales) {
            const Vec scale = set1(a.query_scales[a.positions[t]]);
            for_vectors(a.query_heads * d, [&](int64_t i, int lanes) {
                store_some(query + i, mul(load_some(query + i, lanes), scale), lanes);
            });
        }
    };
    for (int64_t t = begin, next; t < end; t = next) {
        const bool is_kept = a.slots && a.slots[t] >= 0;
        next = t + (is_kept ? tokens_of_block(a, t, end) : 1);
        if (next < end && a.slots && a.slots[next] >= 0) prefetch_slot<C>(a, a.slots[next]);
        for (int64_t i = t; i < next; ++i) prepare_query(i);
        if (is_kept) write_tokens<C>(a, t, next, mixed);
    }
}

void rotary(const void* args, int64_t task) {
    const RotaryArgs& a = *static_cast<const RotaryArgs*>(args);
    const int64_t begin = task * a.rows_per_task;
    const int64_t end = min_of(begin + a.rows_per_task, a.rows);
    with_cache(a.dtype, a.cache_dtype, [&](auto cache) { rotary_tokens<decltype(cache)>(a, begin, end); });
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
