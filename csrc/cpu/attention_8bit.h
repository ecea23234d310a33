// Attention to one tile of a cache of bytes. Integers are multiplied as integers. A query is rounded to 14 bits of its
// largest element. A tile's weights are multiplied by the scales of its values and rounded to 14 bits of the largest.
// Both meet the bytes in two pieces of seven bits, whose sums are exact in any order. Floats of eight bits are unpacked
// to pairs of bf16 by shifts. Unpacked numbers and products are always finite (only scales may not be), so a weight of
// zero hides a key that a row may not see. Included by attention.h only.
#pragma once

#include "attention_keys.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kPieceBits = 7;
constexpr float kPiece = 1 << kPieceBits;
constexpr float kQuerySteps = 63 * kPiece + 63;      // largest integer; both pieces are from -64 to 63
constexpr float kWeightSteps = kPiece * kPiece - 1;  // largest integer; both pieces are from 0 to 127
constexpr float kMagic = 12582912.0f;                // 1.5 * 2^23: adding it rounds to an integer
constexpr int kByteScoreVecs = kScoreVecs / 2;       // each has two sums
constexpr int kByteValueVecs = kValueVecs / 2;

// Integer sums in the compiler's own vector type: GCC keeps arrays of __m512i in memory.
typedef int32_t Sums __attribute__((vector_size(4 * kLanes)));

template <class E>
struct PreparedQueries<Int8Cache<E>> {
    // Of each row the high pieces, then the low pieces. Written in whole vectors.
    alignas(64) int8_t pieces[kQueryRows][2 * kMaxHeadSize + kLanes];
    float query_scale[kQueryRows];
    int32_t start[kQueryRows][2];  // Of the sums of both pieces: keys are stored plus 128.
};

template <class E, int kMantissa>
struct PreparedQueries<Float8Cache<E, kMantissa>> {
    alignas(64) uint16_t elements[kQueryRows][kMaxHeadSize + kLanes];
};

// Brings a row's query into the form that products with the cache need; returns where it is.
template <class E>
inline const typename E::T* prepare(PlainCache<E>, Rows<PlainCache<E>>&, int, const typename E::T* query, int) {
    return query;
}

template <class E>
inline const int8_t* prepare(Int8Cache<E>, Rows<Int8Cache<E>>& rows, int row, const typename E::T* query, int size) {
    const float largest = largest_magnitude(query, size);
    const bool divides = has_quotients(largest);
    rows.query_scale[row] = divides ? largest / kQuerySteps : largest < 1.0f ? 0.0f : __builtin_nanf("");
    const Vec inverse = set1(divides ? kQuerySteps / largest : 0.0f);
    // Adding this rounds to an integer and adds 64 to each piece, so that pieces are found as bits 0 to 6 and 7 to 13.
    const Vec magic = set1(kMagic + 64 * kPiece + 64);
    int8_t* pieces = rows.pieces[row];
    uint8_t low[kMaxHeadSize + kLanes], high[kMaxHeadSize + kLanes];
    for_vectors(size, [&](int64_t i, int lanes) {
        const Vec x = load_some(query + i, lanes);
        store_pieces(low + i, high + i, add(divides ? mul(x, inverse) : zero(), magic));
    });
    int32_t sums[2] = {0, 0};
    for (int i = 0; i < size; ++i) {
        pieces[i] = static_cast<int8_t>(high[i] - 64);
        pieces[size + i] = static_cast<int8_t>(low[i] - 64);
        sums[0] += pieces[i];
        sums[1] += pieces[size + i];
    }
    for (int i = 0; i < 2; ++i) rows.start[row][i] = -Int8Cache<E>::kKeyZero * sums[i];
    return pieces;
}

template <class E, int kMantissa>
inline const uint16_t* prepare(Float8Cache<E, kMantissa>, Rows<Float8Cache<E, kMantissa>>& rows, int row,
                               const typename E::T* query, int size) {
    const Vec factor = set1(Float8Cache<E, kMantissa>::kFactor);
    uint16_t* elements = rows.elements[row];
    for_vectors(size, [&](int64_t i, int lanes) { store_own(elements + i, mul(load_some(query + i, lanes), factor)); });
    return elements;
}

// Vectors [vec, vec + V) of a tile's keys: where they lie, and the keys to fetch meanwhile.
template <class C, int V>
struct KeyVectors {
    const uint8_t *keys[V], *upper[V], *ahead[V];
    int64_t stride;
    bool in_halves;

    KeyVectors(const KvHead<C>& h, const TileRefs<C>& refs, int vec) {
        stride = static_cast<int64_t>(h.block_size) * C::kStep;
        in_halves = h.block_size < kLanes;
        for (int v = 0; v < V; ++v) {
            const int key = (vec + v) * kLanes, group = key / kGroupKeys;
            keys[v] = refs.keys[group] + key % kGroupKeys * C::kStep;
            ahead[v] = refs.next->keys[group] + key % kGroupKeys * C::kStep;
            upper[v] = refs.keys[min_of(group + 1, kTileGroups - 1)];
        }
    }
    // A vector of keys at one step: four neighbouring elements of each key a lane. With kInHalves it is half of two
    // blocks.
    template <bool kInHalves>
    Ints load(int v, int step) const {
#ifdef OCTAVO_ISA_AVX512
        if constexpr (kInHalves) return load_int_halves(keys[v] + step * stride, upper[v] + step * stride);
#endif
        return load_ints(keys[v] + step * stride);
    }
    // A block's scales follow its last step: of each token the key's scale and the value's.
    Pairs scales(int steps) const {
        const Ints both = in_halves && kLanes > kGroupKeys ? load<true>(0, steps) : load<false>(0, steps);
        return bits_of<Pairs>(both);
    }
};

// Computes products[r][v] = query[r] . keys[v], without the scales of the keys.
template <bool kInHalves, class E, int R, int V>
inline void multiply_keys(Int8Cache<E>, const Rows<Int8Cache<E>>& rows, int row, int steps,
                          const KeyVectors<Int8Cache<E>, V>& k, Vec (&products)[R][V]) {
    Sums high[R][V], low[R][V];
    const int8_t* q[R];
    for (int r = 0; r < R; ++r) {
        q[r] = rows.query[row + r];
        for (int v = 0; v < V; ++v) {
            high[r][v] = (Sums)set1_int(rows.start[row + r][0]);
            low[r][v] = (Sums)set1_int(rows.start[row + r][1]);
        }
    }
    const int64_t size = static_cast<int64_t>(steps) * 4;
    for (int s = 0; s < steps; ++s) {
        Ints keys[V];
        for (int v = 0; v < V; ++v) {
            keys[v] = k.template load<kInHalves>(v, s);
            prefetch(k.ahead[v] + s * k.stride);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Ints high_piece = set1_bytes(q[r] + 4 * s), low_piece = set1_bytes(q[r] + size + 4 * s);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                high[r][v] = (Sums)dot_pieces((Ints)high[r][v], keys[v], high_piece);
                low[r][v] = (Sums)dot_pieces((Ints)low[r][v], keys[v], low_piece);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        const Vec scale = set1(rows.query_scale[row + r]);
        for (int v = 0; v < V; ++v) {
            products[r][v] = mul(fma(to_float((Ints)high[r][v]), set1(kPiece), to_float((Ints)low[r][v])), scale);
        }
    }
}

template <bool kInHalves, class E, int kMantissa, int R, int V>
inline void multiply_keys(Float8Cache<E, kMantissa>, const Rows<Float8Cache<E, kMantissa>>& rows, int row, int steps,
                          const KeyVectors<Float8Cache<E, kMantissa>, V>& k, Vec (&products)[R][V]) {
    Vec sums[R][V];
    const uint16_t* q[R];
    for (int r = 0; r < R; ++r) {
        q[r] = rows.query[row + r];
        for (int v = 0; v < V; ++v) sums[r][v] = zero();
    }
    for (int s = 0; s < steps; ++s) {
        Pairs even[V], odd[V];
        for (int v = 0; v < V; ++v) {
            unpack_float8<kMantissa>(k.template load<kInHalves>(v, s), even[v], odd[v]);
            prefetch(k.ahead[v] + s * k.stride);
        }
        for (int r = 0; r < R; ++r) {
            const Pairs first = BF16::broadcast(q[r] + 4 * s), second = BF16::broadcast(q[r] + 4 * s + 2);
            for (int v = 0; v < V; ++v) {
                sums[r][v] = dot_pairs(sums[r][v], first, even[v]);
                sums[r][v] = dot_pairs(sums[r][v], second, odd[v]);
            }
        }
    }
    const Vec up = set1(Float8Cache<E, kMantissa>::kUp);
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) products[r][v] = mul(sums[r][v], up);
    }
}

// Scores R rows against vectors [vec, vec + V) of a tile's keys, into scores [R][kKeyTile].
template <class C, int R, int V>
inline void score_bytes(const KvHead<C>& h, const TileRefs<C>& refs, const Rows<C>& rows, int row, int vec,
                        const float* key_scales, float* scores) {
    const KeyVectors<C, V> k(h, refs, vec);
    Vec products[R][V];
    if constexpr (kLanes > kGroupKeys) {
        if (k.in_halves) {
            multiply_keys<true>(C{}, rows, row, h.steps, k, products);
        } else {
            multiply_keys<false>(C{}, rows, row, h.steps, k, products);
        }
    } else {
        multiply_keys<false>(C{}, rows, row, h.steps, k, products);
    }
    for (int v = 0; v < V; ++v) {
        const Vec scale = load(key_scales + (vec + v) * kLanes);
        for (int r = 0; r < R; ++r) store(scores + r * kKeyTile + (vec + v) * kLanes, mul(products[r][v], scale));
    }
}

// Finds the scales of keys and values in vectors [begin, end) of a tile.
template <class C>
inline void find_scales(const KvHead<C>& h, const TileRefs<C>& refs, int begin, int end, float* of_keys,
                        float* of_values) {
    for (int vec = begin; vec < end; ++vec) {
        const KeyVectors<C, 1> k(h, refs, vec);
        const Pairs both = k.scales(h.steps);
        prefetch(k.ahead[0] + h.steps * k.stride);
        store(of_keys + vec * kLanes, first_of_pairs(both));
        store(of_values + vec * kLanes, second_of_pairs(both));
    }
}

// Multiplies a row's weights in vectors [first, last) by the scales of the values. Sets the weights of keys outside
// [begin, end), which the row does not see, to 0.
inline void scale_weights(float* weights, const float* value_scales, int first, int last, int begin, int end) {
    for (int base = first * kLanes; base < last * kLanes; base += kLanes) {
        Vec w = zero();
        if (base < end && base + kLanes > begin) {
            w = mul(load(weights + base), load(value_scales + base));
            if (base < begin || base + kLanes > end) {
                w = keep_lanes(w, max_of(begin - base, 0), min_of(end - base, kLanes), zero());
            }
        }
        store(weights + base, w);
    }
}

// The weights of R rows in the form that products with values need, and the scale of those products if there is one.
template <class C, int R>
struct TileWeights;

template <class E, int R>
struct TileWeights<Int8Cache<E>, R> {
    alignas(64) uint8_t high[R][kKeyTile + kLanes], low[R][kKeyTile + kLanes];
    float scale[R];
};

template <class E, int kMantissa, int R>
struct TileWeights<Float8Cache<E, kMantissa>, R> {
    alignas(64) uint16_t weights[R][kKeyTile];
};

// Rounds vectors [first, last) of a row's scaled weights to integers in two pieces. Returns the integers' scale.
inline float split_weights(const float* weights, int first, int last, uint8_t* high, uint8_t* low) {
    Vec highest = zero(), sum = zero();
    for (int base = first * kLanes; base < last * kLanes; base += kLanes) {
        const Vec w = load(weights + base);
        highest = max(w, highest);
        sum = add(sum, w);
    }
    const float largest = reduce_max(highest);
    const Vec inverse = set1(largest >= 0x1p-100f ? kWeightSteps / largest : 0.0f), magic = set1(kMagic);
    for (int base = first * kLanes; base < last * kLanes; base += kLanes) {
        store_pieces(low + base, high + base, add(mul(load(weights + base), inverse), magic));
    }
    return largest / kWeightSteps + reduce_add(sum) * 0.0f;  // NaN if a weight or a scale is NaN
}

// Takes up vectors [first, last) of row r's scaled weights.
template <class E, int R>
inline void take_weights(TileWeights<Int8Cache<E>, R>& to, int r, const float* weights, int first, int last) {
    to.scale[r] = split_weights(weights, first, last, to.high[r], to.low[r]);
}

// Stores vectors [first, last) of a row's scaled weights as bf16, times `factor`.
inline void narrow_weights(const float* weights, int first, int last, float factor, uint16_t* to) {
    for (int base = first * kLanes; base < last * kLanes; base += kLanes) {
        store_own(to + base, mul(load(weights + base), set1(factor)));
    }
}

template <class E, int kMantissa, int R>
inline void take_weights(TileWeights<Float8Cache<E, kMantissa>, R>& to, int r, const float* weights, int first,
                         int last) {
    narrow_weights(weights, first, last, Float8Cache<E, kMantissa>::kFactor, to.weights[r]);
}

// Computes sums[r][v] = weights[r] . values for V vectors of columns, over keys [begin, end), four at a time.
// load_values(key, values) loads the vectors of four keys.
template <class E, int R, int V, class Load>
inline void multiply_values(const TileWeights<Int8Cache<E>, R>& w, int begin, int end, Load load_values,
                            Vec (&sums)[R][V]) {
    Sums high[R][V], low[R][V];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) high[r][v] = low[r][v] = Sums{};
    }
    for (int key = begin; key < end; key += 4) {
        Ints values[V];
        load_values(key, values);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Ints high_piece = set1_int(read<int32_t>(w.high[r] + key));
            const Ints low_piece = set1_int(read<int32_t>(w.low[r] + key));
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                high[r][v] = (Sums)dot_codes4((Ints)high[r][v], high_piece, values[v]);
                low[r][v] = (Sums)dot_codes4((Ints)low[r][v], low_piece, values[v]);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        const Vec scale = set1(w.scale[r]);
        for (int v = 0; v < V; ++v) {
            sums[r][v] = mul(fma(to_float((Ints)high[r][v]), set1(kPiece), to_float((Ints)low[r][v])), scale);
        }
    }
}

template <class E, int kMantissa, int R, int V, class Load>
inline void multiply_values(const TileWeights<Float8Cache<E, kMantissa>, R>& w, int begin, int end, Load load_values,
                            Vec (&sums)[R][V]) {
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) sums[r][v] = zero();
    }
    for (int key = begin; key < end; key += 4) {
        Ints values[V];
        Pairs even[V], odd[V];
        load_values(key, values);
        for (int v = 0; v < V; ++v) unpack_float8<kMantissa>(values[v], even[v], odd[v]);
        for (int r = 0; r < R; ++r) {
            const Pairs first = BF16::broadcast(w.weights[r] + key), second = BF16::broadcast(w.weights[r] + key + 2);
            for (int v = 0; v < V; ++v) {
                sums[r][v] = dot_pairs(sums[r][v], first, even[v]);
                sums[r][v] = dot_pairs(sums[r][v], second, odd[v]);
            }
        }
    }
    const Vec up = set1(Float8Cache<E, kMantissa>::kUp);
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) sums[r][v] = mul(sums[r][v], up);
    }
}

// Computes out[r] = rescale[r] * out[r] + weights[r] . values for V vectors of columns, over keys [begin, end), four at
// a time.
template <class C, int R, int V>
inline void add_byte_vectors(const KvHead<C>& h, const TileRefs<C>& refs, const TileWeights<C, R>& weights, int begin,
                             int end, float* out, int64_t out_stride, int64_t column, const float* rescale) {
    const auto load_values = [&](int key, Ints(&values)[V]) {
        const int64_t offset = key % kGroupKeys / C::kStep * h.value_stride + column * C::kStep;
        const uint8_t* from = refs.values[key / kGroupKeys] + offset;
        const uint8_t* ahead = refs.next->values[key / kGroupKeys] + offset;
        for (int v = 0; v < V; ++v) {
            values[v] = load_ints(from + v * kLanes * C::kStep);
            if (v * kLanes * C::kStep % 64 == 0) prefetch(ahead + v * kLanes * C::kStep);
        }
    };
    Vec sums[R][V];
    multiply_values(weights, begin, end, load_values, sums);
    for (int r = 0; r < R; ++r) {
        const Vec factor = set1(rescale[r]);
        for (int v = 0; v < V; ++v) {
            float* p = out + r * out_stride + column + v * kLanes;
            store(p, fma(load(p), factor, sums[r][v]));
        }
    }
}

// Attends R rows, from `row` on, to the keys of one tile of a cache of bytes.
template <int R, class C>
void attend_tile(C, const KvHead<C>& h, const TileRefs<C>& refs, Rows<C>& rows, int row, int tile_begin) {
    alignas(64) float scores[R * kKeyTile];
    alignas(64) float weights[R * kKeyTile];
    alignas(64) float key_scales[kKeyTile], value_scales[kKeyTile];
    alignas(64) float rescale[kLanes];
    TileWeights<C, R> scaled;
    const Visible<R> seen = find_visible<C, R>(rows, row, tile_begin);
    if (seen.lowest >= seen.highest) return;
    const int first = seen.lowest / kLanes, last = (seen.highest + kLanes - 1) / kLanes;
    find_scales(h, refs, first, last, key_scales, value_scales);
    int vec = first;
    for (; vec + kByteScoreVecs <= last; vec += kByteScoreVecs) {
        score_bytes<C, R, kByteScoreVecs>(h, refs, rows, row, vec, key_scales, scores);
    }
    for (; vec < last; ++vec) score_bytes<C, R, 1>(h, refs, rows, row, vec, key_scales, scores);
    for (int r = 0; r < R; ++r) {
        if (rows.adjusts) adjust(rows, row + r, scores + r * kKeyTile, tile_begin, seen.begin[r], seen.end[r]);
    }
    update_softmax<C, R>(rows, row, scores, weights, seen.begin, seen.end, rescale);
    for (int r = 0; r < R; ++r) {
        float* w = weights + r * kKeyTile;
        scale_weights(w, value_scales, first, last, seen.begin[r], seen.end[r]);
        take_weights(scaled, r, w, first, last);
        // A row that sees none of these keys stays as it is.
        if (seen.begin[r] >= seen.end[r]) rescale[r] = 1.0f;
    }
    float* out = rows.out + row * rows.padded;
    const int from = seen.lowest / 4 * 4, until = (seen.highest + 3) / 4 * 4;
    int64_t column = 0;
    for (; column + kByteValueVecs * kLanes <= rows.padded; column += kByteValueVecs * kLanes) {
        add_byte_vectors<C, R, kByteValueVecs>(h, refs, scaled, from, until, out, rows.padded, column, rescale);
    }
    for (; column < rows.padded; column += kLanes) {
        add_byte_vectors<C, R, 1>(h, refs, scaled, from, until, out, rows.padded, column, rescale);
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
