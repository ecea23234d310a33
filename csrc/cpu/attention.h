// Attention over the paged cache with an online softmax (Milakov & Gimelshein 2018): a task's partitions, their merging
// and the kernel. One tile of keys is in attention_keys.h and attention_8bit.h, tile instructions in attention_amx.h,
// tasks in launch.cpp. A row's bits depend on its position alone: keys are met in tiles of 64 within partitions at
// fixed positions of the sequence; a partition's sums start from zero; partitions are merged in order; a key that a row
// may not see is never multiplied, whatever its slot holds. (Where attention goes both ways, bits also depend on how
// many keys a row sees.) Included by kernels.cpp, products.cpp and latent.h only.
#pragma once

#include "attention_8bit.h"
#ifdef OCTAVO_AMX
#include "attention_amx.h"
#endif

namespace octavo::OCTAVO_ISA {
namespace {

// Reads tiles and queries as they lie. Latent attention has views of its own (latent.h).
template <class E>
struct StoredView {
    const KvHead<E>& head;

    const TileRefs<E>& tile(const TileRefs<E>& refs, int) { return refs; }
    const typename E::T* query(const AttentionArgs& a, int64_t token, int64_t head_number, int) {
        return static_cast<const typename E::T*>(a.query) + token * a.query_stride + head_number * a.head_size;
    }
};

// Attends all rows of a task to the keys of one partition, from nothing. `after` is the tile to fetch during the
// partition's last tile.
template <class E, class View>
void attend_partition(const KvHead<E>& h, View& view, Rows<E>& rows, int partition, const TileRefs<E>& after) {
    int first = rows.first[0], last = rows.last[0];
    for (int r = 0; r < rows.count; ++r) {
        first = min_of(first, rows.first[r]);
        last = max_of(last, rows.last[r]);
        rows.max[r] = -__builtin_inff();
        store(rows.sums[r], zero());
    }
    memset(rows.out, 0, static_cast<size_t>(rows.count * rows.padded) * sizeof(float));
    first = max_of(first, partition_begin(partition));
    last = min_of(last, partition_begin(partition + 1) - 1);
#ifdef OCTAVO_AMX
    if constexpr (__is_same(E, PlainBf16)) {
        if (rows.see_all_keys && h.steps % kTileMaxRows == 0) {
            for (int r = 0; r < rows.count; r += kTileMaxRows) {
                attend_by_amx(h, rows, r, min_of(rows.count - r, kTileMaxRows), first, last);
            }
            return;
        }
    }
#endif
    const int groups = (rows.count + kScoreRows - 1) / kScoreRows;
    TileRefs<E> refs[2];
    const int first_tile = first / kKeyTile * kKeyTile;
    find_tile(h, first_tile, first, last, refs[0]);
    for (int tile = first_tile, turn = 0; tile <= last; tile += kKeyTile, turn ^= 1) {
        refs[turn].next = &after;
        if (tile + kKeyTile <= last) {
            find_tile(h, tile + kKeyTile, first, last, refs[turn ^ 1]);
            refs[turn].next = &refs[turn ^ 1];
        }
        const TileRefs<E>& seen = view.tile(refs[turn], tile);
        for (int g = 0; g < groups; ++g) {
            const int begin = rows.count * g / groups;
            const int count = rows.count * (g + 1) / groups - begin;
            with_constant<kScoreRows>(
                count, [&](auto r) { attend_tile<decltype(r)::kValue>(E{}, view.head, seen, rows, begin, tile); });
        }
    }
}

// Results of rows over one or more partitions: the maximum score, the sum of weights and the weighted values of each
// row. A sum is 0 while its row has seen no key.
struct Partials {
    float* max;
    float* sum;
    float* out;
};

// Merges the next partition's results into `total`, the results of the partitions before it. Results are scaled by
// 2^(`exponent` * difference of maxima).
template <class E>
void merge(const Partials& total, const Partials& part, int count, int64_t padded, float exponent) {
    for (int row = 0; row < count; row += kLanes) {
        const int n = min_of(count - row, kLanes);
        const Vec before = load_n(total.max + row, n);
        const Vec now = load_n(part.max + row, n);
        const Vec highest = max(before, now);
        float a[kLanes], b[kLanes], maxima[kLanes];
        store(a, pow2<E>(mul(sub(before, highest), set1(exponent))));
        store(b, pow2<E>(mul(sub(now, highest), set1(exponent))));
        store(maxima, highest);
        for (int r = 0; r < n; ++r) {
            const int i = row + r;
            float* out = total.out + i * padded;
            const float* more = part.out + i * padded;
            if (part.sum[i] == 0.0f) continue;
            if (total.sum[i] == 0.0f) {
                total.max[i] = part.max[i];
                total.sum[i] = part.sum[i];
                memcpy(out, more, static_cast<size_t>(padded) * sizeof(float));
                continue;
            }
            total.max[i] = maxima[r];
            total.sum[i] = total.sum[i] * a[r] + part.sum[i] * b[r];
            const Vec va = set1(a[r]), vb = set1(b[r]);
            for (int64_t j = 0; j < padded; j += kLanes) {
                store(out + j, add(mul(load(out + j), va), mul(load(more + j), vb)));
            }
        }
    }
}

// Returns where a partition's results lie. A split's results are [kv_head][partition], each [row] maxima, [row] sums,
// [row][padded] weighted values.
inline Partials partials_at(const AttentionSchedule& schedule, const AttentionSplit& split, int kv_head, int partition,
                            int64_t padded) {
    const int64_t index = static_cast<int64_t>(kv_head) * split.num_parts + partition - split.part_begin;
    float* p = schedule.partials + split.offset + index * split.num_rows * (padded + 2);
    return {p, p + split.num_rows, p + 2 * split.num_rows};
}

// Copies the results of the partition that `rows` has just seen.
template <class E>
void take_partials(const Rows<E>& rows, const Partials& to) {
    memcpy(to.max, rows.max, static_cast<size_t>(rows.count) * sizeof(float));
    for (int r = 0; r < rows.count; ++r) to.sum[r] = reduce_add(load(rows.sums[r]));
    if (to.out != rows.out) memcpy(to.out, rows.out, static_cast<size_t>(rows.count * rows.padded) * sizeof(float));
}

// Divides weighted values by the sums of weights, to which a sink adds its weight, and writes the output rows.
template <class E>
void write_rows(const AttentionArgs& a, const AttentionTask& task, int kv_head, const Rows<E>& rows,
                const Partials& total) {
    const int ratio = a.query_heads / a.kv_heads;
    for (int r = 0; r < rows.count; ++r) {
        const int index = task.row_begin + r;
        const int64_t token = task.first_token + index / ratio;
        const int64_t head = static_cast<int64_t>(kv_head) * ratio + index % ratio;
        typename E::T* out = static_cast<typename E::T*>(a.out) + (token * a.query_heads + head) * a.value_size;
        const float* row = total.out + r * rows.padded;
        float weights = total.sum[r];
        if (a.sinks) weights += exp(a.sinks[head] - total.max[r] * (rows.adjusts ? 1.0f : a.scale));
        const Vec sum = set1(weights);
        for_vectors(a.value_size, [&](int64_t i, int lanes) { store_some(out + i, div(load(row + i), sum), lanes); });
    }
}

// Returns where the keys and values of a task's sequence and of one key/value head lie.
template <class E>
KvHead<E> find_head(const AttentionArgs& a, const AttentionTask& task, int kv_head) {
    using Cached = typename E::Cached;
    const int64_t padded = padded_size(a.value_size);
    KvHead<E> h;
    const int64_t key_size = a.rotated_query ? a.rotated_size : a.head_size;
    h.steps = static_cast<int32_t>(key_size / E::kStep);
    h.block_size = a.block_size;
    h.block_shift = __builtin_ctz(static_cast<unsigned>(a.block_size));
    h.value_stride = padded * E::kStep;
    h.key_block = a.kv_heads * key_elements<E>(key_size + a.index_size, a.block_size);
    h.value_block = static_cast<int64_t>(a.kv_heads) * padded * a.block_size;
    h.keys = static_cast<const Cached*>(a.key_cache) + kv_head * (h.key_block / a.kv_heads);
    h.values = static_cast<const Cached*>(a.value_cache) + kv_head * (h.value_block / a.kv_heads);
    h.table = a.block_tables + task.seq * a.table_stride;
    return h;
}

// Returns the first key that a token of a task's sequence sees.
inline int first_key(const AttentionArgs& a, const AttentionTask& task, int token) {
    return a.window > 0 ? max_of(task.first_position + token - a.window + 1, 0) : 0;
}

// Returns the last key that a token sees. Chosen keys are counted as if there were no others.
inline int last_key(const AttentionArgs& a, const AttentionTask& task, int token) {
    const int position = task.first_position + token;
    if (a.chosen) return min_of(position, a.num_chosen - 1);
    if (a.key_ends) return max_of(position, a.key_ends[task.first_token + token] - 1);
    if (!a.bidirectional) return position;
    const int last = a.seq_lens[task.seq] - 1;
    return a.window > 0 ? min_of(position + a.window - 1, last) : last;
}

// Finds the first tile of a task, for the task before to fetch: threads mostly take tasks in turn.
template <class E>
void find_first_tile(const AttentionArgs& a, int64_t task_number, TileRefs<E>& refs) {
    const AttentionTask& task = a.schedule->tasks[task_number / a.kv_heads];
    const KvHead<E> h = find_head<E>(a, task, static_cast<int>(task_number % a.kv_heads));
    const int ratio = a.query_heads / a.kv_heads;
    const int first = max_of(first_key(a, task, task.row_begin / ratio), partition_begin(task.part_begin));
    const int last = last_key(a, task, (task.row_end - 1) / ratio);
    find_tile(h, first / kKeyTile * kKeyTile, first, last, refs);
}

// Sets what a task's rows need before they meet keys: their queries, the keys that they see, and how scores become
// weights.
template <class E, class View>
void prepare_rows(const AttentionArgs& a, const AttentionTask& task, int kv_head, View& view, Rows<E>& rows) {
    const int ratio = a.query_heads / a.kv_heads;
    rows.count = task.row_end - task.row_begin;
    rows.padded = padded_size(a.value_size);
    rows.see_all_keys = a.bidirectional && a.window == 0 && !a.key_ends;
    rows.adjusts = a.softcap > 0.0f || a.slopes || a.biases;
    rows.scale = a.scale;
    rows.softcap = a.softcap;
    rows.exponent = (rows.adjusts ? 1.0f : a.scale) * 1.44269504f;  // log2(e): weights are powers of two.
    for (int r = 0; r < rows.count; ++r) {
        const int token = (task.row_begin + r) / ratio;
        const int64_t head = static_cast<int64_t>(kv_head) * ratio + (task.row_begin + r) % ratio;
        rows.last[r] = last_key(a, task, token);
        rows.first[r] = first_key(a, task, token);
        if (rows.adjusts) {
            rows.slope[r] = a.slopes ? a.slopes[head] : 0.0f;
            const int64_t columns = 2 * a.bias_reach + kKeyTile;
            const int position = task.first_position + token;
            rows.bias[r] = a.biases ? a.biases + head * columns + a.bias_reach - position : nullptr;
        }
        rows.query[r] = prepare(E{}, rows, r, view.query(a, task.first_token + token, head, r), a.head_size);
    }
}

// Attends a task's rows, which other tasks share, to the task's partitions. The last of these tasks merges all
// partitions, writes the rows, and resets the counter for the next call.
template <class E, class View>
void attend_split(const AttentionArgs& a, const AttentionTask& task, int kv_head, const KvHead<E>& h, View& view,
                  Rows<E>& rows, const TileRefs<E>& after) {
    const AttentionSchedule& schedule = *a.schedule;
    const AttentionSplit& split = schedule.splits[task.split];
    for (int p = task.part_begin; p < task.part_end; ++p) {
        attend_partition(h, view, rows, p, after);
        take_partials(rows, partials_at(schedule, split, kv_head, p, rows.padded));
    }
    int32_t* remaining = schedule.remaining + static_cast<int64_t>(task.split) * a.kv_heads + kv_head;
    if (__atomic_sub_fetch(remaining, 1, __ATOMIC_ACQ_REL) != 0) return;
    *remaining = split.num_tasks;
    const Partials total = partials_at(schedule, split, kv_head, split.part_begin, rows.padded);
    for (int p = split.part_begin + 1; p < split.part_begin + split.num_parts; ++p) {
        const Partials part = partials_at(schedule, split, kv_head, p, rows.padded);
        merge<E>(total, part, rows.count, rows.padded, rows.exponent);
    }
    write_rows(a, task, kv_head, rows, total);
}

// Attends a task's rows to all partitions, and writes the rows.
template <class E, class View>
void attend_whole(const AttentionArgs& a, const AttentionTask& task, int kv_head, const KvHead<E>& h, View& view,
                  Rows<E>& rows, const TileRefs<E>& after) {
    alignas(64) float total_out[kQueryRows * kMaxHeadSize];
    float max[2][kQueryRows], sum[2][kQueryRows];
    const Partials part{max[0], sum[0], rows.out};
    const Partials total = task.part_end - task.part_begin == 1 ? part : Partials{max[1], sum[1], total_out};
    for (int p = task.part_begin; p < task.part_end; ++p) {
        attend_partition(h, view, rows, p, after);
        if (p == task.part_begin) {
            take_partials(rows, total);
        } else {
            take_partials(rows, part);
            merge<E>(total, part, rows.count, rows.padded, rows.exponent);
        }
    }
    write_rows(a, task, kv_head, rows, total);
}

template <class E, template <class> class View>
void attention_task(const AttentionArgs& a, int64_t task_number) {
    const AttentionSchedule& schedule = *a.schedule;
    const AttentionTask& task = schedule.tasks[task_number / a.kv_heads];
    const int kv_head = static_cast<int>(task_number % a.kv_heads);
    const KvHead<E> h = find_head<E>(a, task, kv_head);
    View<E> view{h};
    Rows<E> rows;
    prepare_rows(a, task, kv_head, view, rows);
    TileRefs<E> after;
    find_first_tile(a, min_of(task_number + 1, schedule.num_tasks - 1), after);
    if (task.split >= 0) {
        attend_split(a, task, kv_head, h, view, rows, after);
    } else {
        attend_whole(a, task, kv_head, h, view, rows, after);
    }
}

void attention(const void* args, int64_t task) {
    const AttentionArgs& a = *static_cast<const AttentionArgs*>(args);
    with_cache(a.dtype, a.cache_dtype, [&](auto cache) { attention_task<decltype(cache), StoredView>(a, task); });
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
