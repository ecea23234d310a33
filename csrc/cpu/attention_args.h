// Argument structs of attention, of rotary embedding with the cache write, and of choosing keys; the numbers that fix
// tiles and partitions of keys. Included by kernels.h.
#pragma once

#include <cstdint>

#include "kernel_types.h"

namespace octavo {

// Keys whose scores are computed together. Tiles start at multiples of this position in the sequence.
constexpr int kKeyTile = 64;
// Keys that are reduced together: a partition. Partitions are merged in order. They start at 0, 128, 256 and then at
// every multiple of 512: short sequences can be shared out evenly too, and long ones have little to merge.
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
// Most elements of the rotated part of a key in latent attention.
constexpr int kMaxRotatedSize = 128;
// A row of the value cache is padded to a multiple of so many elements.
constexpr int kValuePad = 16;

constexpr int kPositionAxes = 3;

// Rotates queries in place, and writes rotated keys and values to their slots. A token with a negative slot is not
// written; without `slots` none is. Queries are multiplied by query_scales[position], unless query_scales is null.
// Heads have head_size elements of queries, key_size of keys and value_size of values.
struct RotaryArgs : RowWiseArgs {
    void* query;
    const void *key, *value;
    const int64_t* positions;
    const int32_t* axes;       // [rotary_size / 2], or null: which of kPositionAxes positions turns each pair
    int64_t positions_stride;  // from a token's position to its position on the next axis
    const float *cos_sin, *query_scales;
    void *key_cache, *value_cache;
    const int64_t* slots;
    const void* index_key;  // [rows, index_size]: follows the key in the cache (one head only), not rotated here
    int64_t query_stride, key_stride, value_stride, index_stride;
    int64_t max_positions, num_slots;
    int32_t query_heads, kv_heads, head_size, key_size, value_size, rotary_size, block_size, dtype, cache_dtype;
    int32_t index_size;
};

// Rows [row_begin, row_end) of a sequence over partitions [part_begin, part_end), a task for each key/value head. Row r
// is head r % ratio of the head's group, of query token r / ratio. Token 0 is row first_token of the batch and stands
// at first_position. `split` is the number of the AttentionSplit if tasks share these rows, else -1.
struct AttentionTask {
    int32_t seq, first_token, first_position;
    int32_t row_begin, row_end, part_begin, part_end, split;
};

// Rows whose partitions are shared out among num_tasks tasks. `offset` is where their partial results begin, in floats.
struct AttentionSplit {
    int64_t offset;
    int32_t part_begin, num_parts, num_rows, num_tasks;
};

// The plan of a step's attention. Lengths alone decide it, so it holds for any number of calls (one a layer) that do
// not overlap.
struct AttentionSchedule {
    const AttentionTask* tasks;  // Each is kv_heads tasks of the kernel.
    const AttentionSplit* splits;
    float* partials;
    // [split][kv_head]: the number of tasks that have not finished. The last task merges, and resets it for the next
    // call.
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
    float scale, softcap;         // of the scores; a softcap of 0 caps nothing
    const float *slopes, *sinks;  // by query head, or null; see octavo.ops.Ops.paged_attention
    const int32_t* key_ends;      // by token, or null; see paged_attention too
    const float* biases;          // [query_heads, 2 * bias_reach + kKeyTile], or null
    int64_t bias_reach;           // a head's column that has the bias of distance 0
    // Latent attention only: the rotated parts of the queries, whose keys are in key_cache. value_cache then holds
    // vectors that are both keys and values.
    const void* rotated_query;
    int64_t rotated_stride, rotated_head_stride;
    int32_t rotated_size;
    int32_t index_size;                 // elements that follow a key in key_cache, for ChooseArgs
    int32_t num_chosen;                 // most keys of a token, if `chosen` is not null
    const int32_t* chosen;              // [rows, num_chosen], of ChooseArgs: the keys that each token sees
    const AttentionSchedule* schedule;  // Filled in by AttentionPlan.
};

// chosen[r] = the positions of the best `num_chosen` keys that token r sees, in order, then -1. A key's score is the
// sum over heads of weight * relu(query . key); of equal scores the earlier key is better. A key is the last `size` of
// the `key_size` elements that the cache has of its token.
constexpr int kMaxChosen = 4096;
struct ChooseArgs : RowArgs {
    const void *query, *weights, *key_cache;
    const int32_t *block_tables, *query_start, *seq_lens;
    int32_t* chosen;
    int64_t query_stride, weights_stride, table_stride, max_blocks;
    int32_t num_seqs, heads, size, key_size, block_size, num_chosen, dtype;
    int32_t merges;     // whether this call merges what the call before has left in `scratch`
    uint64_t* scratch;  // [scratch_rows, num_chosen]
    int64_t scratch_rows;
    int64_t parts;  // Planned: into how many parts a row's keys are cut.
};

}  // namespace octavo
