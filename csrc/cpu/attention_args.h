// Keys and values in their cache, and attention to them.
#pragma once

#include <cstdint>

#include "kernel_types.h"

namespace octavo {

// Keys whose scores are computed together; tiles start at multiples of this position in the sequence.
constexpr int kKeyTile = 64;
// Keys that are reduced together: partitions of the key positions, merged in order. They start at 0, 128, 256 and then
// at every multiple of 512: short sequences, too, can be shared out evenly, and long ones have little to merge.
constexpr int kKeyPartition = 512;
static constexpr int partition_of(int position) {
    return position < 128 ? 0 : position < 256 ? 1 : 2 + position / kKeyPartition;
}
static constexpr int partition_begin(int partition) {
    return partition <= 2 ? 128 * partition : (partition - 2) * kKeyPartition;
}
// Query rows (token, head of one key/value group) that one attention task serves.
constexpr int kQueryRows = 32;
constexpr int kMaxHeadSize = 512;
// Elements of the part of a latent attention's keys that is rotated.
constexpr int kMaxRotatedSize = 128;
// Elements that a row of the value cache is padded to a multiple of.
constexpr int kValuePad = 16;

// Rotates query in place, and writes rotated key and value to their slots. A negative slot is not written, and nothing
// if `slots` is null. Queries are multiplied with query_scales[position], if it is not null. Query heads have
// head_size elements, those of keys and values key_size and value_size.
constexpr int kPositionAxes = 3;

struct RotaryArgs : RowWiseArgs {
    void* query;
    const void *key, *value;
    const int64_t* positions;
    const int32_t* axes;       // [rotary_size / 2], or null: which of kPositionAxes positions turns each pair
    int64_t positions_stride;  // from a position to that of the next axis
    const float *cos_sin, *query_scales;
    void *key_cache, *value_cache;
    const int64_t* slots;
    const void* index_key;  // of the one key/value head: elements that follow its key in the cache, not rotated here
    int64_t query_stride, key_stride, value_stride, index_stride;
    int64_t max_positions, num_slots;
    int32_t query_heads, kv_heads, head_size, key_size, value_size, rotary_size, block_size, dtype, cache_dtype;
    int32_t index_size;
};

// Rows [row_begin, row_end) of a sequence for each key/value head, over partitions [part_begin, part_end). Row r is
// head r % ratio of the group for query token r / ratio; token 0 is row first_token of the batch and stands at
// first_position. `split` numbers the set of tasks that share rows, or is -1.
struct AttentionTask {
    int32_t seq, first_token, first_position;
    int32_t row_begin, row_end, part_begin, part_end, split;
};

// Rows whose partitions are shared out among tasks: where their partial results lie, in floats.
struct AttentionSplit {
    int64_t offset;
    int32_t part_begin, num_parts, num_rows, num_tasks;
};

// What the lengths of a step decide, for any number of calls over them (one a layer) that do not overlap.
struct AttentionSchedule {
    const AttentionTask* tasks;  // Each stands for kv_heads tasks.
    const AttentionSplit* splits;
    float* partials;
    // [split][kv_head]: tasks that have not finished yet. The last one merges, and sets it back for the next call.
    int32_t* remaining;
    int64_t num_tasks;
};

struct AttentionArgs : RowArgs {
    const void *query, *key_cache, *value_cache;
    const int32_t *block_tables, *query_start, *seq_lens;
    void* out;
    int64_t query_stride, table_stride, max_blocks;
    int32_t num_seqs, query_heads, kv_heads, head_size, value_size, block_size, window, bidirectional, dtype,
        cache_dtype;
    float scale, softcap;         // of the scores; a cap of 0 is none
    const float *slopes, *sinks;  // by query head, or null; see octavo.ops.Ops.paged_attention
    const int32_t* key_ends;      // by token, or null: likewise
    const float* biases;          // [query_heads, 2 * bias_reach + kKeyTile], or null: likewise
    int64_t bias_reach;           // what is added for a distance of 0 is at this column of a head
    // Of latent attention alone: the rotated parts of the queries, of which the keys are in key_cache. What is in
    // value_cache are keys and values then.
    const void* rotated_query;
    int64_t rotated_stride, rotated_head_stride;
    int32_t rotated_size;
    int32_t index_size;                 // elements behind them in the cache, which are for ChooseArgs
    int32_t num_chosen;                 // keys of a token at most, where `chosen` is not null
    const int32_t* chosen;              // [rows, num_chosen], of ChooseArgs: the keys that each token sees
    const AttentionSchedule* schedule;  // Filled in by AttentionPlan.
};

// chosen[r] = of the keys that token r sees the `num_chosen` whose sum over heads of weight * relu(query . key) is
// largest, of equals the earlier ones: their positions in order, then -1. A key is the last `size` of `key_size`
// elements that the cache has of its token.
constexpr int kMaxChosen = 4096;
struct ChooseArgs : RowArgs {
    const void *query, *weights, *key_cache;
    const int32_t *block_tables, *query_start, *seq_lens;
    int32_t* chosen;
    int64_t query_stride, weights_stride, table_stride, max_blocks;
    int32_t num_seqs, heads, size, key_size, block_size, num_chosen, dtype;
    int32_t merges;     // whether this is the call that merges what the one before has left in the scratch
    uint64_t* scratch;  // [scratch_rows, num_chosen]
    int64_t scratch_rows;
    int64_t parts;  // Planned: of the keys of each row.
};

}  // namespace octavo
