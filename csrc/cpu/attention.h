// Attention over the paged cache with an online softmax (Milakov & Gimelshein 2018). What makes a row's bits a function
// of its position alone: keys are met in tiles of 64 and partitions of 512 at fixed positions of the sequence, a
// partition starts from nothing, partitions are merged in order, and a key that a row may not see is never multiplied
// in, whatever its slot holds. Included by kernels.cpp only.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kGroupKeys = 8;  // The smallest block: keys that are sure to lie together.
constexpr int kTileGroups = kKeyTile / kGroupKeys;

// One (sequence, key/value head) and the cache layout:
// keys [block][kv_head][D / step][block_size][step], values [block][kv_head][block_size][padded D].
template <class E>
struct Head {
    using T = typename E::T;
    const T* keys;
    const T* values;
    const int32_t* table;
    int64_t key_block, value_block;  // Elements from one block to the next.
    int64_t value_stride;
    int32_t block_size, steps;
};

// Where the keys and values of each group of a tile lie, and the tile to fetch meanwhile: blocks are scattered, so
// the processor's own prefetcher does not find the next one.
template <class E>
struct TileRefs {
    const typename E::T* keys[kTileGroups];
    const typename E::T* values[kTileGroups];
    const TileRefs* next;
};

// Only the blocks of positions first .. last are looked up: other entries of the table may be anything, so their groups
// borrow the nearest valid block (and are read at most as masked keys).
template <class E>
inline void find_tile(const Head<E>& h, int tile_begin, int first, int last, TileRefs<E>& refs) {
    for (int g = 0; g < kTileGroups; ++g) {
        const int position = tile_begin + g * kGroupKeys;
        const int64_t block = h.table[min_of(max_of(position, first), last) / h.block_size];
        const int64_t offset = position % h.block_size;
        refs.keys[g] = h.keys + block * h.key_block + offset * E::kStep;
        refs.values[g] = h.values + block * h.value_block + offset * h.value_stride;
    }
}

// acc[r][v] += query[r] . keys[v], step by step; `load` reads the lanes of vector v at step i.
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

template <class E, int R, int V, bool kFetch>
inline void score_vectors(const Head<E>& h, const TileRefs<E>& refs, const typename E::T* const* query, int vec,
                          float* scores) {
    using T = typename E::T;
    const int64_t stride = static_cast<int64_t>(h.block_size) * E::kStep;
    const T *k[V], *ahead[V];
    for (int v = 0; v < V; ++v) {
        const int key = (vec + v) * kLanes;
        k[v] = refs.keys[key / kGroupKeys] + key % kGroupKeys * E::kStep;
        ahead[v] = refs.next->keys[key / kGroupKeys] + key % kGroupKeys * E::kStep;
    }
    const auto fetch = [&](int v, int i) {
        if (kFetch) __builtin_prefetch(ahead[v] + i * stride);
    };
    const auto whole = [&](int v, int i) { return E::load_lanes(k[v] + i * stride); };
    Vec acc[R][V];
#ifdef OCTAVO_ISA_AVX512
    if (h.block_size < kLanes) {
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

// Scores of R rows against vectors [begin, end) of the tile's keys; other lanes of `scores` keep what they held.
template <class E, int R, bool kFetch>
inline void score_tile(const Head<E>& h, const TileRefs<E>& refs, const typename E::T* const* query, int begin, int end,
                       float* scores) {
    int vec = begin;
    for (; vec + kScoreVecs <= end; vec += kScoreVecs) {
        score_vectors<E, R, kScoreVecs, kFetch>(h, refs, query, vec, scores);
    }
    if constexpr (kScoreVecs > 2) {
        for (; vec + 2 <= end; vec += 2) score_vectors<E, R, 2, kFetch>(h, refs, query, vec, scores);
    }
    for (; vec < end; ++vec) score_vectors<E, R, 1, kFetch>(h, refs, query, vec, scores);
}

// A row's softmax within a partition: the maximum so far, and by lane the sum of exponentials relative to it.
struct RowState {
    float max;
    float sums[kLanes];
};

// Turns the scores of keys [begin, end) of the tile into weights (0 for all others in its vectors), in place. Returns
// the factor by which what was summed up before must shrink.
inline float soften(RowState& state, float* scores, int begin, int end, float scale) {
    const int vec_begin = begin / kLanes;
    const int vec_end = (end + kLanes - 1) / kLanes;
    const Vec lowest = set1(-__builtin_inff());
    const Vec scales = set1(scale);
    Vec highest = lowest;
    for (int v = vec_begin; v < vec_end; ++v) {
        const int base = v * kLanes;
        const Vec s =
            keep_lanes(mul(load(scores + base), scales), max_of(begin - base, 0), min_of(end - base, kLanes), lowest);
        store(scores + base, s);
        highest = max(highest, s);
    }
    const float new_max = max_of(state.max, reduce_max(highest));
    const float shrink = new_max == state.max ? 1.0f : exp(state.max - new_max);
    const Vec shift = set1(new_max);
    Vec sum = zero();
    for (int v = vec_begin; v < vec_end; ++v) {
        const int base = v * kLanes;
        // A hidden key's -inf becomes exactly 0; no lane is left to arithmetic on garbage.
        const Vec p = keep_lanes(exp(sub(load(scores + base), shift)), max_of(begin - base, 0),
                                 min_of(end - base, kLanes), zero());
        store(scores + base, p);
        sum = add(sum, p);
    }
    store(state.sums, fma(load(state.sums), set1(shrink), sum));
    state.max = new_max;
    return shrink;
}

// out[r] += weights[r][key] * value[key] over keys [begin, end), key by key.
template <class E, int R, int V, bool kFetch>
inline void add_value_vectors(const Head<E>& h, const TileRefs<E>& refs, const float* weights, int begin, int end,
                              float* out, int64_t out_stride, int64_t column) {
    Vec acc[R][V];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) acc[r][v] = load(out + r * out_stride + column + v * kLanes);
    }
    for (int key = begin; key < end;) {
        const typename E::T* value = refs.values[key / kGroupKeys] + key % kGroupKeys * h.value_stride + column;
        const typename E::T* ahead = refs.next->values[key / kGroupKeys] + key % kGroupKeys * h.value_stride + column;
        const int group_end = min_of((key / kGroupKeys + 1) * kGroupKeys, end);
        for (; key < group_end; ++key, value += h.value_stride, ahead += h.value_stride) {
            Vec vv[V];
            for (int v = 0; v < V; ++v) {
                vv[v] = load(value + v * kLanes);
                if (kFetch && v * kLanes * sizeof(*ahead) % 64 == 0) __builtin_prefetch(ahead + v * kLanes);
            }
            for (int r = 0; r < R; ++r) {
                const Vec p = set1(weights[r * kKeyTile + key]);
                for (int v = 0; v < V; ++v) acc[r][v] = fma(p, vv[v], acc[r][v]);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) store(out + r * out_stride + column + v * kLanes, acc[r][v]);
    }
}

template <class E, int R, bool kFetch>
inline void add_values(const Head<E>& h, const TileRefs<E>& refs, const float* weights, int begin, int end, float* out,
                       int64_t out_stride) {
    if (begin >= end) return;
    int64_t column = 0;
    for (; column + kValueVecs * kLanes <= out_stride; column += kValueVecs * kLanes) {
        add_value_vectors<E, R, kValueVecs, kFetch>(h, refs, weights, begin, end, out, out_stride, column);
    }
    for (; column < out_stride; column += kLanes) {
        add_value_vectors<E, R, 1, kFetch>(h, refs, weights, begin, end, out, out_stride, column);
    }
}

// The rows of one task: what each may see, and its state within the current partition.
template <class E>
struct Rows {
    int count;
    int64_t padded;                           // Elements of a row of `out`.
    int first[kQueryRows], last[kQueryRows];  // Key positions that the row sees.
    const typename E::T* query[kQueryRows];
    RowState state[kQueryRows];
    alignas(64) float out[kQueryRows * kMaxHeadSize];
};

// R rows (from `row`) against the keys of one tile.
template <class E, int R, bool kFetch>
void attend_tile(const Head<E>& h, const TileRefs<E>& refs, Rows<E>& rows, int row, int tile_begin, float scale) {
    alignas(64) float scores[R * kKeyTile];
    int begin[R], end[R];  // Keys of this tile that each row sees.
    int lowest = kKeyTile, highest = 0, common_begin = 0, common_end = kKeyTile;
    for (int r = 0; r < R; ++r) {
        begin[r] = max_of(rows.first[row + r] - tile_begin, 0);
        end[r] = min_of(rows.last[row + r] + 1 - tile_begin, kKeyTile);
        if (begin[r] >= end[r]) {
            begin[r] = end[r] = 0;
            common_end = 0;
            continue;
        }
        lowest = min_of(lowest, begin[r]);
        highest = max_of(highest, end[r]);
        common_begin = max_of(common_begin, begin[r]);
        common_end = min_of(common_end, end[r]);
    }
    if (lowest >= highest) return;
    score_tile<E, R, kFetch>(h, refs, rows.query + row, lowest / kLanes, (highest + kLanes - 1) / kLanes, scores);
    float* out = rows.out + row * rows.padded;
    for (int r = 0; r < R; ++r) {
        if (begin[r] == end[r]) continue;
        const float shrink = soften(rows.state[row + r], scores + r * kKeyTile, begin[r], end[r], scale);
        if (shrink == 1.0f) continue;
        float* o = out + r * rows.padded;
        for (int64_t i = 0; i < rows.padded; i += kLanes) store(o + i, mul(load(o + i), set1(shrink)));
    }
    // Keys that all rows see are added for all at once; those at the edges, in the same order, row by row.
    const bool shared = common_begin < common_end;
    for (int r = 0; r < R; ++r) {
        const int until = shared ? common_begin : end[r];
        add_values<E, 1, false>(h, refs, scores + r * kKeyTile, begin[r], until, out + r * rows.padded, rows.padded);
    }
    if (!shared) return;
    add_values<E, R, kFetch>(h, refs, scores, common_begin, common_end, out, rows.padded);
    for (int r = 0; r < R; ++r) {
        add_values<E, 1, false>(h, refs, scores + r * kKeyTile, common_end, end[r], out + r * rows.padded, rows.padded);
    }
}

template <class E, int R, bool kFetch>
inline void attend_rows(const Head<E>& h, const TileRefs<E>& refs, Rows<E>& rows, int row, int count, int tile_begin,
                        float scale) {
    if (count == R) {
        attend_tile<E, R, kFetch>(h, refs, rows, row, tile_begin, scale);
    } else if constexpr (R > 1) {
        attend_rows<E, R - 1, kFetch>(h, refs, rows, row, count, tile_begin, scale);
    }
}

template <class E>
void attend_partition(const Head<E>& h, Rows<E>& rows, int partition, float scale) {
    int first = rows.first[0], last = rows.last[0];
    for (int r = 0; r < rows.count; ++r) {
        first = min_of(first, rows.first[r]);
        last = max_of(last, rows.last[r]);
        rows.state[r].max = -__builtin_inff();
        store(rows.state[r].sums, zero());
    }
    memset(rows.out, 0, static_cast<size_t>(rows.count * rows.padded) * sizeof(float));
    first = max_of(first, partition * kKeyPartition);
    last = min_of(last, (partition + 1) * kKeyPartition - 1);
    const int groups = (rows.count + kScoreRows - 1) / kScoreRows;
    TileRefs<E> refs[2];
    const int first_tile = first / kKeyTile * kKeyTile;
    find_tile(h, first_tile, first, last, refs[0]);
    for (int tile = first_tile, turn = 0; tile <= last; tile += kKeyTile, turn ^= 1) {
        refs[turn].next = &refs[turn];
        if (tile + kKeyTile <= last) {
            find_tile(h, tile + kKeyTile, first, last, refs[turn ^ 1]);
            refs[turn].next = &refs[turn ^ 1];
        }
        for (int g = 0; g < groups; ++g) {
            const int begin = rows.count * g / groups;
            const int count = rows.count * (g + 1) / groups - begin;
            if (g == 0) {
                attend_rows<E, kScoreRows, true>(h, refs[turn], rows, begin, count, tile, scale);
            } else {
                attend_rows<E, kScoreRows, false>(h, refs[turn], rows, begin, count, tile, scale);
            }
        }
    }
}

// A row over one or more partitions. `sum` is 0 while it has seen no key.
struct Partial {
    float max, sum;
    float* out;
};

inline void merge(Partial& total, const Partial& part, int64_t padded) {
    if (part.sum == 0.0f) return;
    if (total.sum == 0.0f) {
        total.max = part.max;
        total.sum = part.sum;
        memcpy(total.out, part.out, static_cast<size_t>(padded) * sizeof(float));
        return;
    }
    const float highest = max_of(total.max, part.max);
    const float a = exp(total.max - highest);
    const float b = exp(part.max - highest);
    total.max = highest;
    total.sum = total.sum * a + part.sum * b;
    for (int64_t i = 0; i < padded; i += kLanes) {
        store(total.out + i, add(mul(load(total.out + i), set1(a)), mul(load(part.out + i), set1(b))));
    }
}

template <class E>
void write_row(const AttentionArgs& a, const AttentionTask& task, int kv_head, int r, const Partial& row) {
    const int ratio = a.query_heads / a.kv_heads;
    const int index = task.row_begin + r;
    const int64_t token = a.query_start[task.seq] + index / ratio;
    const int64_t head = static_cast<int64_t>(kv_head) * ratio + index % ratio;
    typename E::T* out = static_cast<typename E::T*>(a.out) + (token * a.query_heads + head) * a.head_size;
    const Vec sum = set1(row.sum);
    int i = 0;
    for (; i + kLanes <= a.head_size; i += kLanes) store(out + i, div(load(row.out + i), sum));
    if (i < a.head_size) store_n(out + i, div(load(row.out + i), sum), a.head_size - i);
}

// Partial results of a split lie as [kv_head][partition][row][2 + padded]: maximum, sum, weighted values.
inline Partial partial_at(const AttentionArgs& a, const AttentionSplit& split, int kv_head, int partition, int row,
                          int64_t padded) {
    const int64_t index =
        (static_cast<int64_t>(kv_head) * split.num_parts + partition - split.part_begin) * split.num_rows + row;
    float* p = a.partials + split.offset + index * (padded + 2);
    return Partial{p[0], p[1], p + 2};
}

template <class E>
void attention_task(const AttentionArgs& a, const AttentionTask& task, int kv_head) {
    using T = typename E::T;
    Rows<E> rows;
    rows.count = task.row_end - task.row_begin;
    rows.padded = (a.head_size + kValuePad - 1) / kValuePad * kValuePad;

    Head<E> h;
    h.steps = a.head_size / E::kStep;
    h.block_size = a.block_size;
    h.value_stride = rows.padded;
    h.key_block = static_cast<int64_t>(a.kv_heads) * a.head_size * a.block_size;
    h.value_block = static_cast<int64_t>(a.kv_heads) * rows.padded * a.block_size;
    h.keys = static_cast<const T*>(a.key_cache) + kv_head * (h.key_block / a.kv_heads);
    h.values = static_cast<const T*>(a.value_cache) + kv_head * (h.value_block / a.kv_heads);
    h.table = a.block_tables + task.seq * a.table_stride;

    const int ratio = a.query_heads / a.kv_heads;
    const int query_start = a.query_start[task.seq];
    const int first_position = a.seq_lens[task.seq] - (a.query_start[task.seq + 1] - query_start);
    for (int r = 0; r < rows.count; ++r) {
        const int index = task.row_begin + r;
        const int position = first_position + index / ratio;
        rows.last[r] = position;
        rows.first[r] = a.window > 0 ? max_of(position - a.window + 1, 0) : 0;
        const int64_t head = static_cast<int64_t>(kv_head) * ratio + index % ratio;
        rows.query[r] =
            static_cast<const T*>(a.query) + (query_start + index / ratio) * a.query_stride + head * a.head_size;
    }

    if (task.split >= 0) {
        const AttentionSplit& split = a.splits[task.split];
        for (int p = task.part_begin; p < task.part_end; ++p) {
            attend_partition(h, rows, p, a.scale);
            for (int r = 0; r < rows.count; ++r) {
                float* out = partial_at(a, split, kv_head, p, r, rows.padded).out;
                out[-2] = rows.state[r].max;
                out[-1] = reduce_add(load(rows.state[r].sums));
                memcpy(out, rows.out + r * rows.padded, static_cast<size_t>(rows.padded) * sizeof(float));
            }
        }
        int32_t* remaining = a.remaining + static_cast<int64_t>(task.split) * a.kv_heads + kv_head;
        if (__atomic_sub_fetch(remaining, 1, __ATOMIC_ACQ_REL) != 0) return;
        for (int r = 0; r < rows.count; ++r) {
            Partial total{0, 0, rows.out};
            for (int p = split.part_begin; p < split.part_begin + split.num_parts; ++p) {
                merge(total, partial_at(a, split, kv_head, p, r, rows.padded), rows.padded);
            }
            write_row<E>(a, task, kv_head, r, total);
        }
        return;
    }

    alignas(64) float total_out[kQueryRows * kMaxHeadSize];
    Partial total[kQueryRows];
    for (int r = 0; r < rows.count; ++r) total[r] = Partial{0, 0, total_out + r * rows.padded};
    for (int p = task.part_begin; p < task.part_end; ++p) {
        attend_partition(h, rows, p, a.scale);
        for (int r = 0; r < rows.count; ++r) {
            const Partial part{rows.state[r].max, reduce_add(load(rows.state[r].sums)), rows.out + r * rows.padded};
            merge(total[r], part, rows.padded);
        }
    }
    for (int r = 0; r < rows.count; ++r) write_row<E>(a, task, kv_head, r, total[r]);
}

void attention(const void* args, int64_t task) {
    const AttentionArgs& a = *static_cast<const AttentionArgs*>(args);
    const AttentionTask& t = a.tasks[task / a.kv_heads];
    const int kv_head = static_cast<int>(task % a.kv_heads);
    if (a.dtype == kF32) {
        attention_task<F32>(a, t, kv_head);
    } else {
        attention_task<BF16>(a, t, kv_head);
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
