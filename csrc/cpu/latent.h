// Latent attention (DeepSeek-AI 2024) over its compressed cache, which all heads share. A token keeps one vector, which
// is its value and the greater part of its key, and the rotated part of its key. The vectors are stored as values are;
// a tile of them is transposed to the layout of keys before it meets a task's rows. Everything else is paged attention
// (attention.h), with the same bits for any batch. Included by sparse_attention.h only.
#pragma once

#include "attention.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Rows to transpose, in the compiler's own vectors. They are never arguments, because sets with and without AVX pass
// such vectors in different ways.
typedef float Floats8 __attribute__((vector_size(32)));
typedef uint16_t Halves16 __attribute__((vector_size(32)));
typedef uint64_t Words4 __attribute__((vector_size(32)));

// Transposes 8 elements of 8 tokens: out[d][8 tokens]. Rows of `values` lie `stride` elements apart, rows of `out`
// kKeyTile elements.
inline void transpose_group(const float* values, int64_t stride, float* out) {
    Floats8 a[8], b[8];
    for (int i = 0; i < 8; ++i) memcpy(&a[i], values + i * stride, sizeof(a[i]));
    // Tokens i and i + 1, element by element: even elements in b[i], odd ones in b[i + 1].
    for (int i = 0; i < 8; i += 2) {
        b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    // Tokens i to i + 3: a[i + j] has elements j and j + 4 of them, a[i + j + 2] elements j + 2 and j + 6.
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; ++j) {
            a[i + j] = __builtin_shufflevector(b[i + j], b[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            a[i + j + 2] = __builtin_shufflevector(b[i + j], b[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    }
    for (int i = 0; i < 4; ++i) {
        // Element i of tokens 0 to 7, then element i + 4.
        const Floats8 low = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        const Floats8 high = __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        memcpy(out + i * kKeyTile, &low, sizeof(low));
        memcpy(out + (i + 4) * kKeyTile, &high, sizeof(high));
    }
}

// The same for bf16. Values are pairs of tokens [token / 2][d][2], keys are pairs of elements: out[d / 2][8 tokens][2].
inline void transpose_group(const uint16_t* values, int64_t stride, uint16_t* out) {
    Words4 a[4];
    for (int i = 0; i < 4; ++i) {
        Halves16 v;
        memcpy(&v, values + i * stride, sizeof(v));
        // From (d0 of both tokens, d1 of both) to (d0 and d1 of one token, of the other): a word of 64 bits is two
        // elements of two tokens.
        const Halves16 by_key = __builtin_shufflevector(v, v, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
        memcpy(&a[i], &by_key, sizeof(v));
    }
    // Transposes four by four words: first neighbours, then halves.
    const Words4 b[4] = {
        __builtin_shufflevector(a[0], a[1], 0, 4, 2, 6), __builtin_shufflevector(a[0], a[1], 1, 5, 3, 7),
        __builtin_shufflevector(a[2], a[3], 0, 4, 2, 6), __builtin_shufflevector(a[2], a[3], 1, 5, 3, 7)};
    const Words4 transposed[4] = {
        __builtin_shufflevector(b[0], b[2], 0, 1, 4, 5), __builtin_shufflevector(b[1], b[3], 0, 1, 4, 5),
        __builtin_shufflevector(b[0], b[2], 2, 3, 6, 7), __builtin_shufflevector(b[1], b[3], 2, 3, 6, 7)};
    for (int i = 0; i < 4; ++i) memcpy(out + i * 2 * kKeyTile, &transposed[i], sizeof(transposed[i]));
}

// A tile's keys and a task's queries, rotated parts first. It is the view of tiles and queries that attention_task
// takes.
template <class E>
struct LatentView {
    using T = typename E::T;
    static constexpr int kMaxKeySize = kMaxRotatedSize + kMaxHeadSize;

    explicit LatentView(const KvHead<E>& h) : stored(h), head(h) { head.block_size = kKeyTile; }

    const T* query(const AttentionArgs& a, int64_t token, int64_t head_number, int row) {
        const T* rotated =
            static_cast<const T*>(a.rotated_query) + token * a.rotated_stride + head_number * a.rotated_head_stride;
        const T* latent = static_cast<const T*>(a.query) + token * a.query_stride + head_number * a.head_size;
        memcpy(queries[row], rotated, static_cast<size_t>(a.rotated_size) * sizeof(T));
        memcpy(queries[row] + a.rotated_size, latent, static_cast<size_t>(a.head_size) * sizeof(T));
        head.steps = (a.rotated_size + a.head_size) / E::kStep;
        return queries[row];
    }

    const TileRefs<E>& tile(const TileRefs<E>& refs, int) { return transposed(stored, refs); }

    // Returns the tile `refs` of `from`, with its vectors also transposed to keys.
    const TileRefs<E>& transposed(const KvHead<E>& from, const TileRefs<E>& refs) {
        constexpr int64_t kRow = kKeyTile * E::kStep;
        const int64_t padded = from.value_stride / E::kStep;
        const int64_t stride = static_cast<int64_t>(from.block_size) * E::kStep;
        for (int g = 0; g < kTileGroups; ++g) {
            T* column = keys + g * kGroupKeys * E::kStep;
            for (int64_t i = 0; i < from.steps; ++i) {
                memcpy(column + i * kRow, refs.keys[g] + i * stride, kGroupKeys * E::kStep * sizeof(T));
            }
            T* latent = column + from.steps * kRow;
            for (int64_t d = 0; d < padded; d += 8) {
                transpose_group(refs.values[g] + d * E::kStep, from.value_stride, latent + d / E::kStep * kRow);
            }
            seen.keys[g] = ahead.keys[g] = column;
            seen.values[g] = refs.values[g];
            ahead.values[g] = refs.next->values[g];
        }
        seen.next = &ahead;
        return seen;
    }

    const KvHead<E>& stored;
    KvHead<E> head;
    TileRefs<E> seen, ahead;
    T queries[kQueryRows][kMaxKeySize];
    alignas(64) T keys[kMaxKeySize * kKeyTile];  // [D / step][kKeyTile][step]
};

void latent_attention(const void* args, int64_t task) {
    const AttentionArgs& a = *static_cast<const AttentionArgs*>(args);
    with_element(a.dtype, [&](auto element) { attention_task<PlainCache<decltype(element)>, LatentView>(a, task); });
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
