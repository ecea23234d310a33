// Attention of a task's rows to one tile of keys, in caches of floats: scores, weights, weighted values. With bf16,
// weights are rounded to bf16, so that they meet values in pairs of keys; their sum is not rounded. Included by
// attention_8bit.h only.
#pragma once

#include "kv_cache_formats.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kGroupKeys = 8;  // The smallest block size: so many keys always lie together.
constexpr int kTileGroups = kKeyTile / kGroupKeys;

// Fetches a line into the second-level cache: it takes far more requests at once than the first-level cache, which
// serves a task's own loads.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

inline void store_weights(float* p, Vec v) { store(p, v); }
inline void store_weights(uint16_t* p, Vec v) { store_own(p, v); }

// Keep the first or the second key of each pair in a vector of values, and zero the other.
inline Pairs keep_first(Pairs v) { return and_pairs(v, set1_pair(0x0000ffffu)); }
inline Pairs keep_second(Pairs v) { return and_pairs(v, set1_pair(0xffff0000u)); }

// The keys and values of one sequence and one key/value head in a cache (kv_cache_formats.h).
template <class E>
struct KvHead {
    using Cached = typename E::Cached;
    const Cached* keys;
    const Cached* values;
    const int32_t* table;
    int64_t key_block, value_block;  // Elements from one block to the next.
    int64_t value_stride;            // Elements from one step of keys (one, a pair or four) to the next.
    int32_t block_size, block_shift, steps;
};

// Where the keys and values of each group of eight keys of a tile lie, and the tile to fetch meanwhile: blocks are
// scattered, so the processor's own prefetcher does not find the next tile.
template <class E>
struct TileRefs {
    const typename E::Cached* keys[kTileGroups];
    const typename E::Cached* values[kTileGroups];
    const TileRefs* next;
};

// Finds a tile's groups. Only the blocks of positions first .. last are looked up, as other entries of the table may be
// anything. Groups outside borrow the nearest valid block; its keys are read at most as masked keys.
template <class E>
inline void find_tile(const KvHead<E>& h, int tile_begin, int first, int last, TileRefs<E>& refs) {
    for (int g = 0; g < kTileGroups; ++g) {
        const int position = tile_begin + g * kGroupKeys;
        const int64_t block = h.table[min_of(max_of(position, first), last) >> h.block_shift];
        const int64_t offset = position & (h.block_size - 1);
        refs.keys[g] = h.keys + block * h.key_block + offset * E::kStep;
        refs.values[g] = h.values + block * h.value_block + offset / E::kStep * h.value_stride;
    }
}

// Sets acc[r][v] = query[r] . keys[v] for R rows and V vectors of keys, step by step. load_keys(v, i) reads the lanes
// of vector v at step i; fetch(v, i) prefetches.
template <class E, int R, int V, class Load, class Fetch>
inline void score_steps(int steps, const typename E::T* const* query, Vec (&acc)[R][V], Load load_keys, Fetch fetch) {
    const typename E::T* q[R];
    for (int r = 0; r < R; ++r) {
        q[r] = query[r];
        for (int v = 0; v < V; ++v) acc[r][v] = zero();
    }
    for (int i = 0; i < steps; ++i) {
        typename E::Lanes keys[V];
        for (int v = 0; v < V; ++v) {
            keys[v] = load_keys(v, i);
            fetch(v, i);
        }
        for (int r = 0; r < R; ++r) {
            const typename E::Lanes element = E::broadcast(q[r] + i * E::kStep);
            for (int v = 0; v < V; ++v) acc[r][v] = E::madd(acc[r][v], element, keys[v]);
        }
    }
}

// Scores R rows against vectors [vec, vec + V) of a tile's keys, into scores [R][kKeyTile].
template <class E, int R, int V>
inline void score_vectors(const KvHead<E>& h, const TileRefs<E>& refs, const typename E::T* const* query, int vec,
                          float* scores) {
    using T = typename E::T;
    const int64_t stride = static_cast<int64_t>(h.block_size) * E::kStep;
    const T *k[V], *ahead[V];
    for (int v = 0; v < V; ++v) {
        const int key = (vec + v) * kLanes;
        k[v] = refs.keys[key / kGroupKeys] + key % kGroupKeys * E::kStep;
        ahead[v] = refs.next->keys[key / kGroupKeys] + key % kGroupKeys * E::kStep;
    }
    const auto fetch = [&](int v, int i) { prefetch(ahead[v] + i * stride); };
    const auto whole = [&](int v, int i) { return E::load_lanes(k[v] + i * stride); };
    Vec acc[R][V];
#ifdef OCTAVO_ISA_AVX512
    if (h.block_size < kLanes) {
        // With blocks of 8 keys a vector's halves lie in two blocks.
        const T* upper[V];
        for (int v = 0; v < V; ++v) upper[v] = refs.keys[(vec + v) * 2 + 1];
        const auto halves = [&](int v, int i) { return E::load_lane_halves(k[v] + i * stride, upper[v] + i * stride); };
        score_steps<E, R, V>(h.steps, query, acc, halves, fetch);
    } else {
        score_steps<E, R, V>(h.steps, query, acc, whole, fetch);
    }
#else
    score_steps<E, R, V>(h.steps, query, acc, whole, fetch);
#endif
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) store(scores + r * kKeyTile + (vec + v) * kLanes, acc[r][v]);
    }
}

// Scores R rows against vectors [begin, end) of the tile's keys. Other lanes of `scores` keep what they hold.
template <class E, int R>
inline void score_tile(const KvHead<E>& h, const TileRefs<E>& refs, const typename E::T* const* query, int begin,
                       int end, float* scores) {
    int vec = begin;
    for (; vec + kScoreVecs <= end; vec += kScoreVecs) {
        score_vectors<E, R, kScoreVecs>(h, refs, query, vec, scores);
    }
    if constexpr (kScoreVecs > 2) {
        for (; vec + 2 <= end; vec += 2) score_vectors<E, R, 2>(h, refs, query, vec, scores);
    }
    for (; vec < end; ++vec) score_vectors<E, R, 1>(h, refs, query, vec, scores);
}

// Copies of queries in the form that a cache's products need. Caches of floats read queries where they lie.
template <class E>
struct PreparedQueries {};

// The rows of one task: the keys that each may see, and its state within the current partition. Scores and `max` are
// plain products, or adjusted ones if `adjusts`. A weight is 2^(exponent * (score - max)).
template <class E>
struct Rows : PreparedQueries<E> {
    int count;
    int64_t padded;  // Elements of a row of `out`.
    float exponent;
    bool adjusts;
    bool see_all_keys;  // Every row sees all keys of the sequence.
    float scale, softcap;
    float slope[kQueryRows];
    const float* bias[kQueryRows];            // points to the bias of key 0, or null
    int first[kQueryRows], last[kQueryRows];  // Key positions that the row sees.
    const typename E::Query* query[kQueryRows];
    float max[kQueryRows + kLanes];  // Of the scores so far. Read in whole vectors.
    float sums[kQueryRows][kLanes];  // Of the weights relative to `max`, by lane.
    alignas(64) float out[kQueryRows * kMaxHeadSize];
};

// Adjusts the scores of keys [begin, end) of a row: scales them, caps them, lets them fall with the distance by
// `slope`, adds biases.
template <class E>
void adjust(const Rows<E>& rows, int row, float* scores, int tile_begin, int begin, int end) {
    alignas(64) float ramp[kLanes];
    for (int i = 0; i < kLanes; ++i) ramp[i] = static_cast<float>(i);
    const Vec scale = set1(rows.scale), slope = set1(rows.slope[row]), cap = set1(rows.softcap);
    const Vec inverse = set1(1.0f / rows.softcap);
    const float* bias = rows.bias[row];
    for (int base = begin / kLanes * kLanes; base < end; base += kLanes) {
        Vec x = mul(load(scores + base), scale);
        if (rows.softcap > 0.0f) x = softcap(x, cap, inverse);
        const Vec distance = add(load(ramp), set1(static_cast<float>(tile_begin + base - rows.last[row])));
        x = fma(slope, distance, x);
        if (bias) x = add(x, load(bias + tile_begin + base));
        store(scores + base, x);
    }
}

// Turns the scores of keys [begin[r], end[r]) of each row into weights relative to the row's new maximum; all other
// lanes of the same vectors get 0. Sums and earlier results are relative to the old maximum: rescale[r] is the factor
// that they must be multiplied by.
template <class E, int R>
inline void update_softmax(Rows<E>& rows, int row, float* scores, typename E::Weight* weights, const int* begin,
                           const int* end, float* rescale) {
    static_assert(R <= kLanes, "maxima of the rows share a vector");
    const Vec lowest = set1(-__builtin_inff());
    alignas(64) float highest[kLanes] = {};
    for (int r = 0; r < R; ++r) {
        float* s = scores + r * kKeyTile;
        Vec v = set1(rows.max[row + r]);
        for (int base = begin[r] / kLanes * kLanes; base < end[r]; base += kLanes) {
            Vec x = load(s + base);
            if (base < begin[r] || base + kLanes > end[r]) {
                x = keep_lanes(x, max_of(begin[r] - base, 0), min_of(end[r] - base, kLanes), lowest);
                store(s + base, x);
            }
            v = max(v, x);
        }
        highest[r] = reduce_max(v);
    }
    // If all scores so far are -inf, there is no maximum to be relative to: weights are 0, and so is their sum.
    const Vec exponent = set1(rows.exponent);
    const Vec now = load(highest);
    const Vec shift = select_greater(now, lowest, now, zero());
    alignas(64) float shifts[kLanes];
    store(shifts, shift);
    store(rescale, pow2<E>(mul(sub(load(rows.max + row), shift), exponent)));
    for (int r = 0; r < R; ++r) {
        const float* s = scores + r * kKeyTile;
        typename E::Weight* w = weights + r * kKeyTile;
        const Vec relative = set1(shifts[r]);
        Vec sum = zero();
        for (int base = begin[r] / kLanes * kLanes; base < end[r]; base += kLanes) {
            const Vec p = pow2<E>(mul(sub(load(s + base), relative), exponent));
            store_weights(w + base, p);
            sum = add(sum, p);
        }
        if (begin[r] < end[r]) {
            rows.max[row + r] = highest[r];
            store(rows.sums[row + r], fma(load(rows.sums[row + r]), set1(rescale[r]), sum));
        }
    }
}

// Computes out[r] = rescale[r] * out[r] + weights[r][key] * value[key] over keys [begin, end), step by step, for V
// vectors of columns. If begin or end cuts a pair of keys, the key outside is hidden.
template <class E, int R, int V>
inline void add_value_vectors(const KvHead<E>& h, const TileRefs<E>& refs, const typename E::T* weights, int begin,
                              int end, float* out, int64_t out_stride, int64_t column, const float* rescale) {
    using T = typename E::T;
    Vec acc[R][V];
    for (int r = 0; r < R; ++r) {
        const Vec factor = set1(rescale[r]);
        for (int v = 0; v < V; ++v) acc[r][v] = mul(load(out + r * out_stride + column + v * kLanes), factor);
    }
    const auto add_step = [&](int key, const T* value, const T* ahead, auto keep) {
        typename E::Lanes lanes[V];
        for (int v = 0; v < V; ++v) {
            lanes[v] = keep(E::load_lanes(value + v * kLanes * E::kStep));
            if (v * kLanes * E::kStep * sizeof(T) % 64 == 0) prefetch(ahead + v * kLanes * E::kStep);
        }
        for (int r = 0; r < R; ++r) {
            const typename E::Lanes p = E::broadcast(weights + r * kKeyTile + key);
            for (int v = 0; v < V; ++v) acc[r][v] = E::madd(acc[r][v], p, lanes[v]);
        }
    };
    const auto offset = [&](int key) { return key % kGroupKeys / E::kStep * h.value_stride + column * E::kStep; };
    const auto add_half = [&](int key, auto keep) {
        add_step(key, refs.values[key / kGroupKeys] + offset(key), refs.next->values[key / kGroupKeys] + offset(key),
                 keep);
    };
    if constexpr (E::kStep == 2) {
        if (begin % 2 != 0) {
            // A pair whose first key is outside.
            add_half(begin - 1, [](Pairs v) { return keep_second(v); });
            ++begin;
        }
    }
    const int end_whole = end / E::kStep * E::kStep;
    for (int key = begin; key < end_whole;) {
        const T* value = refs.values[key / kGroupKeys] + offset(key);
        const T* ahead = refs.next->values[key / kGroupKeys] + offset(key);
        const int group_end = min_of((key / kGroupKeys + 1) * kGroupKeys, end_whole);
        for (; key < group_end; key += E::kStep, value += h.value_stride, ahead += h.value_stride) {
            add_step(key, value, ahead, [](typename E::Lanes v) { return v; });
        }
    }
    if constexpr (E::kStep == 2) {
        // A pair whose second key is outside.
        if (end_whole != end) add_half(end_whole, [](Pairs v) { return keep_first(v); });
    }
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) store(out + r * out_stride + column + v * kLanes, acc[r][v]);
    }
}

// Adds the weighted values of all columns, in about equal shares of at most kValueVecs vectors.
template <class E, int R>
inline void add_values(const KvHead<E>& h, const TileRefs<E>& refs, const typename E::T* weights, int begin, int end,
                       float* out, int64_t out_stride, const float* rescale) {
    const int64_t vecs = out_stride / kLanes;
    const int64_t shares = (vecs + kValueVecs - 1) / kValueVecs;
    for (int64_t i = 0, done = 0; i < shares; ++i) {
        const int64_t width = (vecs - done + shares - i - 1) / (shares - i);
        with_constant<kValueVecs>(width, [&](auto v) {
            add_value_vectors<E, R, decltype(v)::kValue>(h, refs, weights, begin, end, out, out_stride, done * kLanes,
                                                         rescale);
        });
        done += width;
    }
}

// Keys of a tile that R rows see: [begin[r], end[r]) by row r, [lowest, highest) by any row, [common_begin, common_end)
// by all rows.
template <int R>
struct Visible {
    int begin[R], end[R];
    int lowest = kKeyTile, highest = 0, common_begin = 0, common_end = kKeyTile;
};

template <class E, int R>
inline Visible<R> find_visible(const Rows<E>& rows, int row, int tile_begin) {
    Visible<R> v;
    for (int r = 0; r < R; ++r) {
        v.begin[r] = max_of(rows.first[row + r] - tile_begin, 0);
        v.end[r] = min_of(rows.last[row + r] + 1 - tile_begin, kKeyTile);
        if (v.begin[r] >= v.end[r]) {
            v.begin[r] = v.end[r] = 0;
            v.common_end = 0;
            continue;
        }
        v.lowest = min_of(v.lowest, v.begin[r]);
        v.highest = max_of(v.highest, v.end[r]);
        v.common_begin = max_of(v.common_begin, v.begin[r]);
        v.common_end = min_of(v.common_end, v.end[r]);
    }
    return v;
}

// Attends R rows, from `row` on, to the keys of one tile of a cache of floats.
template <int R, class E>
void attend_tile(PlainCache<E>, const KvHead<PlainCache<E>>& h, const TileRefs<PlainCache<E>>& refs,
                 Rows<PlainCache<E>>& rows, int row, int tile_begin) {
    using C = PlainCache<E>;
    alignas(64) float scores[R * kKeyTile];
    alignas(64) typename E::T weights[R * kKeyTile];
    alignas(64) float rescale[kLanes];
    const Visible<R> seen = find_visible<C, R>(rows, row, tile_begin);
    const int *begin = seen.begin, *end = seen.end;
    const int lowest = seen.lowest, highest = seen.highest;
    int common_begin = seen.common_begin, common_end = seen.common_end;
    if (lowest >= highest) return;
    score_tile<C, R>(h, refs, rows.query + row, lowest / kLanes, (highest + kLanes - 1) / kLanes, scores);
    if (rows.adjusts) {
        for (int r = 0; r < R; ++r) adjust(rows, row + r, scores + r * kKeyTile, tile_begin, begin[r], end[r]);
    }
    update_softmax<C, R>(rows, row, scores, weights, begin, end, rescale);
    // Values of steps that all rows see are added for all rows at once; those at the edges are added row by row, in the
    // same order. A pair may be cut for all rows only where all of them begin or end at the same key.
    float* out = rows.out + row * rows.padded;
    if (common_begin != lowest) common_begin = (common_begin + E::kStep - 1) / E::kStep * E::kStep;
    if (common_end != highest) common_end = common_end / E::kStep * E::kStep;
    const bool shared = common_begin < common_end;
    const auto add_row = [&](int r, int from, int until) {
        if (from >= until) return;
        add_values<C, 1>(h, refs, weights + r * kKeyTile, from, until, out + r * rows.padded, rows.padded, rescale + r);
        rescale[r] = 1.0f;
    };
    for (int r = 0; r < R; ++r) add_row(r, begin[r], shared ? common_begin : end[r]);
    if (!shared) return;
    add_values<C, R>(h, refs, weights, common_begin, common_end, out, rows.padded, rescale);
    for (int r = 0; r < R; ++r) {
        rescale[r] = 1.0f;
        add_row(r, common_end, end[r]);
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
