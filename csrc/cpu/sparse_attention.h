// Kernels that choose keys by an index, and attention to the chosen keys ("DeepSeek sparse attention", DeepSeek-AI
// 2025). A few small heads score every key that a token sees; latent attention reads the best of them. Scores are in
// float32, each a function of its token and key. So is the choice, as no two keys are equal: of equal scores the
// earlier key is better. Included by kernels.cpp only.
#pragma once

#include "latent.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Returns a score and its key's position as one number: the better the key, the larger.
inline uint64_t ranked(float score, int position) {
    const uint32_t bits = bits_of<uint32_t>(score + 0.0f);  // -0 becomes 0
    const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(position);
}

inline int position_of(uint64_t rank) { return static_cast<int>(~static_cast<uint32_t>(rank)); }

// Returns the n-th largest of numbers that all differ, found digit by digit (of 8 bits).
inline uint64_t nth_largest(const uint64_t* x, int count, int n) {
    uint64_t found = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        int counts[256] = {};
        const uint64_t above = shift == 56 ? 0 : ~uint64_t{0} << (shift + 8);
        for (int i = 0; i < count; ++i) counts[x[i] >> shift & 255] += (x[i] & above) == found;
        int digit = 255;
        while (counts[digit] < n) n -= counts[digit--];
        found |= static_cast<uint64_t>(digit) << shift;
    }
    return found;
}

// Keeps the `n` largest numbers, in their order. Returns the least of them.
inline uint64_t keep_largest(uint64_t* x, int count, int n) {
    const uint64_t least = nth_largest(x, count, n);
    for (int i = 0, kept = 0; i < count; ++i) {
        if (x[i] >= least) x[kept++] = x[i];
    }
    return least;
}

// Returns where the index's keys of a sequence lie.
template <class E>
KvHead<E> find_index(const ChooseArgs& a, int seq) {
    KvHead<E> h{};
    h.steps = static_cast<int32_t>(a.size / E::kStep);
    h.block_size = a.block_size;
    h.block_shift = __builtin_ctz(static_cast<unsigned>(a.block_size));
    h.key_block = key_elements<E>(a.key_size, a.block_size);
    h.keys = static_cast<const typename E::T*>(a.key_cache) + (a.key_size - a.size) * a.block_size;
    h.values = h.keys;
    h.table = a.block_tables + seq * a.table_stride;
    return h;
}

// Writes totals[key], the score for one token of each of the first `num_keys` keys of a tile.
template <class E>
void score_keys(const ChooseArgs& a, const KvHead<E>& h, const TileRefs<E>& refs, int64_t row, int num_keys,
                float* totals) {
    using T = typename E::T;
    const T* query = static_cast<const T*>(a.query) + row * a.query_stride;
    const T* weights = static_cast<const T*>(a.weights) + row * a.weights_stride;
    alignas(64) float scores[kScoreRows * kKeyTile], weight[kLanes];
    const int vecs = (num_keys + kLanes - 1) / kLanes;
    for (int i = 0; i < vecs; ++i) store(totals + i * kLanes, zero());
    for (int head = 0; head < a.heads; head += kScoreRows) {
        const int count = min_of(a.heads - head, kScoreRows);
        const T* rows[kScoreRows];
        for (int r = 0; r < count; ++r) rows[r] = query + (head + r) * a.size;
        with_constant<kScoreRows>(count,
                                  [&](auto r) { score_tile<E, decltype(r)::kValue>(h, refs, rows, 0, vecs, scores); });
        for (int r = 0; r < count; ++r) {
            store(weight, load_some(weights + head + r, 1));
            for (int i = 0; i < vecs; ++i) {
                float* total = totals + i * kLanes;
                store(total, fma(set1(weight[0]), relu(load(scores + r * kKeyTile + i * kLanes)), load(total)));
            }
        }
    }
}

// The best keys so far, in the order in which they were added. Holds up to twice as many as wanted between two
// selections.
struct BestKeys {
    uint64_t ranks[2 * kMaxChosen], least = 0;
    int count = 0, wanted;

    explicit BestKeys(int n) : wanted(n) {}

    void add(uint64_t rank) {
        if (rank < least) return;
        ranks[count++] = rank;
        if (count == 2 * wanted) finish();
    }
    void finish() {
        if (count <= wanted) return;
        least = keep_largest(ranks, count, wanted);
        count = wanted;
    }
};

// A token's sequence, and its position, which is that of the last key that it sees. A row of no sequence sees no key.
struct TokenPlace {
    int seq = 0, last = -1;

    TokenPlace(const ChooseArgs& a, int64_t row) {
        while (seq < a.num_seqs && a.query_start[seq + 1] <= row) ++seq;
        if (seq < a.num_seqs) last = static_cast<int>(a.seq_lens[seq] - (a.query_start[seq + 1] - row));
    }
};

// Adds the best keys of one of the equal parts of a token's keys.
template <class E>
void add_part(const ChooseArgs& a, int64_t row, const TokenPlace& place, int64_t part, BestKeys& best) {
    const int64_t tiles = place.last / kKeyTile + 1;
    const int begin = static_cast<int>(tiles * part / a.parts) * kKeyTile;
    const int end = min_of(static_cast<int>(tiles * (part + 1) / a.parts) * kKeyTile, place.last + 1);
    const KvHead<E> h = find_index<E>(a, place.seq);
    alignas(64) float totals[kKeyTile];
    TileRefs<E> refs[2];
    find_tile(h, begin, 0, place.last, refs[0]);
    for (int tile = begin, turn = 0; tile < end; tile += kKeyTile, turn ^= 1) {
        refs[turn].next = &refs[turn ^ 1];
        find_tile(h, tile + kKeyTile, 0, place.last, refs[turn ^ 1]);
        const int num_keys = min_of(kKeyTile, end - tile);
        score_keys(a, h, refs[turn], row, num_keys, totals);
        for (int i = 0; i < num_keys; ++i) best.add(ranked(totals[i], tile + i));
    }
    best.finish();
}

void write_chosen(const ChooseArgs& a, int64_t row, const BestKeys& best) {
    int32_t* chosen = a.chosen + row * a.num_chosen;
    for (int i = 0; i < a.num_chosen; ++i) chosen[i] = i < best.count ? position_of(best.ranks[i]) : -1;
}

// The kernel: a task is one part of a row's keys. If there is only one part, its best keys are the result; else
// merge_chosen comes after.
void choose(const void* args, int64_t task) {
    const ChooseArgs& a = *static_cast<const ChooseArgs*>(args);
    const int64_t row = task / a.parts;
    const TokenPlace place(a, row);
    BestKeys best(a.num_chosen);
    if (place.last < a.num_chosen) {  // all keys are chosen
        for (int i = 0; i <= place.last; ++i) best.ranks[best.count++] = ranked(0.0f, i);
    } else {
        with_element(a.dtype, [&](auto element) {
            add_part<PlainCache<decltype(element)>>(a, row, place, task % a.parts, best);
        });
    }
    if (a.parts == 1) return write_chosen(a, row, best);
    uint64_t* ranks = a.scratch + task * a.num_chosen;
    for (int i = 0; i < a.num_chosen; ++i) ranks[i] = i < best.count ? best.ranks[i] : 0;
}

// The kernel of the second call: a task is a row, and merges the best keys of its parts.
void merge_chosen(const void* args, int64_t row) {
    const ChooseArgs& a = *static_cast<const ChooseArgs*>(args);
    BestKeys best(a.num_chosen);
    const uint64_t* ranks = a.scratch + row * a.parts * a.num_chosen;
    // If there are few keys, every part has all of them.
    const int64_t parts = TokenPlace(a, row).last < a.num_chosen ? 1 : a.parts;
    for (int64_t i = 0; i < parts * a.num_chosen; ++i) {
        if (ranks[i] != 0) best.add(ranks[i]);
    }
    best.finish();
    write_chosen(a, row, best);
}

// A view of the chosen keys of one token, gathered tile by tile as if they lay side by side.
template <class E>
struct ChosenView : LatentView<E> {
    using T = typename E::T;
    using Base = LatentView<E>;

    explicit ChosenView(const KvHead<E>& h) : Base(h), gathered(h) { gathered.block_size = kKeyTile; }

    const T* query(const AttentionArgs& a, int64_t token, int64_t head_number, int row) {
        chosen = a.chosen + token * a.num_chosen;
        num_chosen = a.num_chosen;
        return Base::query(a, token, head_number, row);
    }

    const TileRefs<E>& tile(const TileRefs<E>&, int tile_begin) {
        const KvHead<E>& h = this->stored;
        const int64_t stride = static_cast<int64_t>(h.block_size) * E::kStep;
        const T* sources[kKeyTile];
        int parity[kKeyTile];
        for (int i = 0; i < kKeyTile; ++i) {
            // Keys beyond the last chosen one are read but not seen.
            const int position = max_of(chosen[min_of(tile_begin + i, num_chosen - 1)], 0);
            const int64_t block = h.table[position >> h.block_shift], offset = position & (h.block_size - 1);
            const T* key = h.keys + block * h.key_block + offset * E::kStep;
            T* to = keys + i * E::kStep;
            for (int64_t s = 0; s < h.steps; ++s) {
                memcpy(to + s * kKeyTile * E::kStep, key + s * stride, E::kStep * sizeof(T));
            }
            sources[i] = h.values + block * h.value_block + offset / E::kStep * h.value_stride;
            parity[i] = static_cast<int>(offset % E::kStep);
        }
        for (int i = 0; i < kKeyTile; i += E::kStep) {
            gather_values(sources + i, parity + i, h.value_stride, values + i / E::kStep * h.value_stride);
        }
        for (int g = 0; g < kTileGroups; ++g) {
            refs.keys[g] = keys + g * kGroupKeys * E::kStep;
            refs.values[g] = values + g * kGroupKeys / E::kStep * h.value_stride;
        }
        refs.next = &refs;
        return Base::transposed(gathered, refs);
    }

    static void gather_values(const float* const* from, const int*, int64_t n, float* to) {
        memcpy(to, from[0], static_cast<size_t>(n) * sizeof(float));
    }

    // Pairs the values of two tokens, each of which may be either half of a pair in the cache.
    static void gather_values(const uint16_t* const* from, const int* parity, int64_t n, uint16_t* to) {
        for (int64_t i = 0; i < n; i += 2) {
            to[i] = from[0][i + parity[0]];
            to[i + 1] = from[1][i + parity[1]];
        }
    }

    KvHead<E> gathered;
    TileRefs<E> refs;
    const int32_t* chosen;
    int num_chosen;
    alignas(64) T keys[kMaxRotatedSize * kKeyTile];  // [D / step][kKeyTile][step]
    alignas(64) T values[kMaxHeadSize * kKeyTile];   // [kKeyTile / step][padded D][step]
};

void chosen_attention(const void* args, int64_t task) {
    const AttentionArgs& a = *static_cast<const AttentionArgs*>(args);
    with_element(a.dtype, [&](auto element) { attention_task<PlainCache<decltype(element)>, ChosenView>(a, task); });
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
