// What the native kernels look like from outside: one argument struct and one plain function per operation, and the
// table of them that every instruction set provides. Nothing here depends on Python, on the thread pool or on an
// instruction set; this header is compiled with every set of flags, so it holds plain data only, no inline code
// but static functions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// Element types, as the Python side names them. kQ8 is rows of QBlock; the last three are of caches of keys and values.
enum DType : int32_t { kF32 = 0, kBF16 = 1, kQ8 = 2, kInt8 = 3, kFloat8E4M3 = 4, kFloat8E5M2 = 5 };

// Output channels that share a panel of a packed matrix.
constexpr int kPanel = 32;
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

// How a packed matrix holds its weights. Codes of 4 and 8 bits come with scales and, in some formats, minima; those
// from kWeightQ4K on keep the scales of a file's superblocks. All from kWeightInt4 on are multiplied as integers.
enum WeightFormat : int32_t {
    kWeightF32 = 0,
    kWeightBF16 = 1,
    kWeightInt4 = 2,
    kWeightInt8 = 3,
    kWeightQ4K = 4,
    kWeightQ6K = 5,
    kWeightQ5K = 6,
    kWeightQ3K = 7,
    kWeightQ2K = 8,
};

// Elements of a row that are quantized together, and the blocks that k is padded to in integer matrices.
constexpr int kQBlock = 64;
// Elements of k whose scales share a unit, in layouts that keep the superblocks of files.
constexpr int kSuperblock = 256;

// 64 elements of a quantized row. An integer accumulator starts at minus z times the sum of the elements that it will
// see, because codes stand for code - z (z = 8 in 4-bit matrices, 128 in 8-bit ones). One or two elements that stand
// out of their 32 would take the scale's range from the others: they are kept apart, as floats, and are zero in q.
constexpr int kMaxOutliers = 2;
struct QBlock {
    int8_t q[kQBlock];
    float scale[2];                       // of each 32 elements
    float outlier[2][kMaxOutliers];       // of each 32 elements those that are kept apart, and zeros
    uint16_t sums[2];                     // bf16: scale times the sum of each 32 elements, to be multiplied by minima
    int32_t start4[2];                    // -8 times the sum of each 32 elements
    int32_t start8[2];                    // -128 times the same
    int32_t start16[4];                   // -128 times the sum of each 16 elements
    uint8_t outlier_at[2][kMaxOutliers];  // where in the block the outliers stand
};

// How many times the next magnitude of 32 elements those that are kept apart exceed: measured, see docs/kernels.md.
constexpr float kOutlierRatio = 3.0f;

// A packed matrix [n, k]. Integer weights are factor * (scale * (code - z) + minimum), with a scale for every `group`
// (16 or 32) elements of k and a minimum, if there are any, for every 32. Gate and up projections that are `gated`
// alternate panel by panel; n counts both. Products with it are the sums of those of `segments` equal parts of k, each
// from zero, in the order of tree.h: what a process with some of them adds up does not depend on who has the others. A
// segment ends where a block does (kQBlock, kSuperblock, two elements of bf16).
struct Matrix {
    const void* data;
    const float* bias;  // padded to whole panels, or null
    int64_t n, k;
    float factor;
    int32_t format, group, minima, gated;
    int32_t segments;
};

// What becomes of the outputs y of a product. kGated is for gated matrices alone, and they take nothing else.
enum Epilogue : int32_t {
    kStore = 0,     // out = y
    kAdd = 1,       // out += scale * y, in float32, rounded once
    kGated = 2,     // out = activation(gate) * up, as floats or as quantized rows
    kScatter = 3,   // out[out_rows[r]] += row_scales[r] * y[r], in float32
    kActivated = 4  // out = activation(y), as floats or as quantized rows
};

// Element-wise functions, as the Python side names them.
enum ActivationKind : int32_t {
    kSilu = 0,
    kGelu = 1,
    kGeluTanh = 2,
    kRelu = 3,
    kRelu2 = 4,
    kIdentity = 5,
    kXielu = 6,
    kSoftcap = 7,
    kClip = 8,
    kClamped = 9,
    kLogistic = 10,
    kSoftplus = 11
};
// Of kClamped, which gates alone have: gate sigmoid(slope gate) (up + 1), gate at most the limit, up within it
// (gpt-oss).
struct Clamp {
    float slope, limit;
};

// What a program may run for fewer rows than it was recorded with.
struct RowArgs {
    int64_t rows;
};

// Kernels whose tasks are so many whole rows each.
struct RowWiseArgs : RowArgs {
    int64_t rows_per_task;  // Planned.
};

// Of an adapter's B at one panel of a product's outputs: `count` columns of the shrunk row, from `first` on, and where
// their factors lie, in elements. Both counts are even.
struct AdapterPanel {
    int64_t offset;
    int32_t first, count;
};

// Rows of A that share a panel, and rows of a step with one adapter that are a task.
constexpr int kFactorPanel = 16;
constexpr int kAdapterRows = 16;
// Of an adapter, for what is not replaced whole.
constexpr int kMaxRank = 512;

// What one adapter adds to one product, beside it: (x A^T) B^T. A [rank, k] is [panel][ceil(k / step)][kFactorPanel]
// [step] and B [panel][count / step][kPanel][step], step being the elements of a lane (1 of f32, 2 of bf16). Where
// there are `scales` the sum of both products is multiplied with them, then `bias` is added, each padded to whole
// panels or null. Without panels an adapter adds nothing. One that `replaces` the base's matrix has no A: the shrunk
// row is x itself, and its product with B takes the place of the base's.
//
// Of a matrix whose rows are looked up B is likewise, and A is [rank, k] as it stands: row n becomes W[n] + B[n] A, or
// B[n] if it is replaced.
struct AdapterFactors {
    const void *a, *b;
    const AdapterPanel* panels;
    const float *scales, *bias;
    int32_t rank, replaces;
};

// y[rows, n] = x[rows, k] W^T + bias. Packed f32 weights are [panel][k][32] and multiply f32 rows, bf16 ones are
// [panel][ceil(k / 2)][32][2] and multiply bf16 rows; integer ones (docs/kernels.md) multiply quantized rows. Strides
// are in elements, those of quantized rows in blocks.
struct ShrinkArgs;
struct LinearArgs : RowArgs {
    const void* x;
    int64_t x_stride;
    Matrix matrix;
    void* out;
    int64_t out_stride;
    int32_t out_dtype, epilogue, activation;
    float scale;
    Clamp clamp;                    // of kClamped
    const int32_t* out_rows;        // of kScatter, and of kStore where it is not null
    const float* row_scales;        // kScatter only; null: all 1
    const int32_t* slots;           // whose factors a row takes, -1 is nobody's; null: there are no adapters
    const AdapterFactors* factors;  // by slot
    const void* shrunk;             // what ShrinkArgs made of x
    int64_t shrunk_stride, num_slots;
    int32_t factor_dtype;
    int32_t expands;                   // Planned: some row has an adapter.
    const ShrinkArgs* next;            // Planned: what reads factors next after this, or null.
    int64_t row_chunks, panel_chunks;  // Planned: the grid of tasks.
};

// Rows of a step that have the same adapter, places `begin` and after in the order by adapter.
struct AdapterRows {
    int32_t slot, begin, rows;
};

struct AdapterSchedule {
    const int32_t* rows;  // ordered by adapter, then by number
    const AdapterRows* parts;
    int64_t num_parts, splits;  // a part's outputs are shared among so many tasks
};

// out[r] = x[r] A^T, where A is that of the row's adapter, in `dtype`, which is that of the factors; rows without one
// are left as they are. Rows that do not lie as the products want them are copied to `scratch`, which holds as many
// rows as AdapterPlan says, of k elements.
struct ShrinkArgs : RowArgs {
    const void* x;
    int64_t x_stride;  // in elements, or in blocks of quantized rows
    const int32_t* slots;
    const AdapterFactors* factors;
    void *out, *scratch;
    int64_t out_stride, k, num_slots;
    int32_t x_dtype, dtype;
    const AdapterSchedule* schedule;  // Filled in by AdapterPlan.
};

// out[r, h] = x[r, h, k] W[h]^T for each head h; matrices are alike and have no bias. Strides are in elements, those of
// quantized rows in blocks.
struct HeadLinearArgs : RowArgs {
    const void* x;
    int64_t x_stride, x_head_stride, x_bytes;  // of an element, or of a block
    const Matrix* matrices;
    void* out;
    int64_t out_stride, out_head_stride;
    int32_t heads, out_dtype;
    // Planned: the product of a head, whose addresses and matrix are those of the first, its kernel and its tasks.
    LinearArgs product;
    void (*kernel)(const void* args, int64_t task);
    int64_t tasks_per_head;
};

// Packs weight[n, k] (rows `stride` elements apart) into every `panel_step`th panel from `out`; a task packs one panel.
struct PackArgs {
    const void* weight;
    void* out;
    int64_t stride, n, k, panel_step;
    int32_t dtype;
};

// out[t, :] = scale times row token_ids[t] of a packed matrix, with what the adapter in slots[t] makes of it.
struct EmbeddingArgs : RowWiseArgs {
    const int32_t* token_ids;
    Matrix matrix;
    void* out;
    float scale;
    int32_t out_dtype;
    const int32_t* slots;           // -1 is nobody's; null: there are no adapters
    const AdapterFactors* factors;  // by slot
    int64_t num_slots;
    int32_t factor_dtype;
};

// out[i, :] = x[indices[i], :], rows of `row_bytes`, `x_stride_bytes` apart.
struct TakeRowsArgs : RowWiseArgs {
    const void* x;
    const int64_t* indices;
    void* out;
    int64_t x_rows, row_bytes, x_stride_bytes;
};

// out[i, :] = replacements[indices[i], :], dense float32, where an index is not negative; other rows stay.
struct ReplaceRowsArgs : RowWiseArgs {
    const float* replacements;
    const int32_t* indices;
    void* out;
    int64_t num_replacements, width, out_stride;
    int32_t out_dtype, adds;  // whether rows are added to those of `out`, in the place of replacing them
};

// out[i, j, :] = norm(x[i, j, :]) * weight + bias for `rows` by `inner` rows: the layer norm if it is `centered`, the
// RMS norm otherwise. The bias may be null, and is of the weight's type. Weights and bias of the inner rows are
// `weight_stride` apart, where they have their own. Outputs are dense; kQ8 outputs are quantized from float32.
struct NormArgs : RowWiseArgs {
    const void *x, *weight, *bias;
    void* out;
    int64_t inner, hidden, x_stride, x_inner_stride, weight_stride;
    float eps;
    int32_t dtype, weight_dtype, out_dtype, centered;
};

// What becomes of the rows that are pooled, as the Python side names it.
enum PoolKind : int32_t { kMean = 0, kMax = 1, kMeanSqrt = 2, kWeightedMean = 3 };

// out[r, :] = rows starts[r] .. ends[r] of x, both included, made one in float32; outputs are dense.
struct PoolArgs : RowWiseArgs {
    const void* x;
    const int64_t *starts, *ends;
    void* out;
    int64_t x_rows, x_stride, width;
    int32_t dtype, out_dtype, kind;
};

// out[r, :] = f(x[r, :]); outputs are dense. kQ8 outputs are quantized from float32, as rows of
// ceil(width / kQBlock) blocks. With an `order` [width] element i of f(x) = x is x[order[i]].
struct ActivationArgs : RowWiseArgs {
    const void* x;
    void* out;
    int64_t x_stride, width;
    const int32_t* order;
    int32_t dtype, out_dtype, kind;
    float parameter0, parameter1, parameter2, parameter3;  // of the kinds that have some
};

// out[r, :] += scale * x[r, :], in float32, rounded once. With `ids` the scale of a row is the sum of those of its
// weights[r, top_k] whose ids[r, top_k] are `first_id` at least.
struct AddArgs : RowWiseArgs {
    const void* x;
    void* out;
    int64_t x_stride, out_stride, width;
    float scale;
    int32_t dtype, out_dtype;
    const int32_t* ids;  // or null
    const float* weights;
    int32_t top_k, first_id;
};

// out[r, i] = x[r, i] * f(y[r, i / shared]), where f is kIdentity, kSilu, kLogistic or kSoftplus; outputs are as those
// of ActivationArgs.
struct MultiplyArgs : RowWiseArgs {
    const void *x, *y;
    void* out;
    int64_t x_stride, y_stride, width, shared;
    int32_t dtype, out_dtype, kind;
};

// Layers that carry a state from token to token. Sequence s has tokens query_start[s] .. query_start[s + 1]; the first
// of them goes on from the state in block slots[t], its very first one from zeros. The state after token t is left in
// block slots[t], where no later token of the sequence has the same. What lies in a state is computed in units that do
// not depend on each other, a task is some units of a sequence.
struct StateArgs : RowArgs {
    float* states;
    int64_t state_stride, num_blocks;
    const int64_t* slots;
    const int32_t *query_start, *seq_lens;
    int32_t num_seqs;
    int64_t parts;  // Planned: tasks of a sequence.
};

// Channels that share a tile of a state: a unit.
constexpr int64_t kStateTile = 16;
constexpr int64_t kMaxStateSize = 512;
constexpr int64_t kMaxConvKernel = 8;

// out[t, c] = f(bias[c] + sum over j of weight[j, c] * x[t - kernel + 1 + j, c]); f is kIdentity or kSilu. The state is
// the last kernel - 1 rows of x. Outputs are dense.
struct ConvArgs : StateArgs {
    const void* x;
    const float *weight, *bias;
    void* out;
    int64_t x_stride, width, kernel;
    int32_t dtype, kind;
};

// See octavo.ops.Ops.selective_scan. The state lies in tiles of channels of one group, [state_size, kStateTile] each;
// `a` is [state_size, channels], or [channels] where it is not `wide`. The time steps may be null: all 1.
struct ScanArgs : StateArgs {
    const void *x, *time, *b, *c;
    const float *a, *d, *time_bias;
    void* out;
    int64_t x_stride, time_stride, b_stride, c_stride, channels, head_size, groups, state_size;
    float time_min, time_max;
    int32_t dtype, wide;
};

// See octavo.ops.Ops.gated_delta. The state lies in tiles of the values of one head, [key_size, kStateTile] each.
struct DeltaArgs : StateArgs {
    const void *query, *key, *value, *decay, *beta;
    const float *a, *decay_bias;
    void* out;
    int64_t query_stride, key_stride, value_stride, decay_stride, beta_stride, key_heads, value_heads, key_size,
        value_size;
    float beta_scale, lowest;
    int32_t dtype, by_element;  // of the key: decays and their biases
    int32_t alternates;         // value heads of one key head are not neighbours
};

// See octavo.ops.Ops.gated_recurrence. The state is one number a channel.
struct RecurrenceArgs : StateArgs {
    const void *x, *input, *decay;
    const float *a, *input_bias, *decay_bias;
    void* out;
    int64_t x_stride, input_stride, decay_stride, width;
    int32_t dtype;
};

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

// Experts are chosen by score + bias or, with `bias_logits`, logit + bias; without a bias by logit. Of equals the first
// is taken.
enum Scoring : int32_t { kSoftmax = 0, kSigmoid = 1, kSparsemixer = 2 };
constexpr int kMaxExperts = 1024;

// ids[r, top_k], weights[r, top_k] = the experts of logits[r, num_experts]; see octavo.ops.Routing for the settings.
// The bias, and the scales of weights by expert, may be null.
struct RouteArgs : RowWiseArgs {
    const float *logits, *bias, *scales;
    int32_t* ids;
    float* weights;
    int64_t stride;
    int32_t num_experts, top_k, scoring, bias_logits, num_groups, kept_groups, group_by_two, normalize;
    float scale, softcap, jitter;
};

// Rows of one expert that are multiplied together, places `begin` and after in the order by expert.
struct ExpertRows {
    int32_t expert, begin, rows;
    int64_t cost_end;  // of the products of these rows and of all parts before, in no unit
};

// What routing has decided for some tokens, and memory between the kernels of a call. Calls that follow each other may
// share one.
struct ExpertsSchedule {
    int32_t* entries;   // token * top_k + choice, ordered by expert, then by token; counted from the pass's first token
    int32_t* tokens;    // of entries, counted from the call's first
    float* weights;     // of entries
    int32_t* slots;     // of entries, where there are adapters
    ExpertRows* parts;  // by expert
    char* inputs;       // rows of entries that share an expert, side by side
    char* inner;        // rows between the two products
    char* shrunk;       // what the A's of adapters make of the rows of a product
    char* copies;       // of rows, for each task that shrinks some
    int64_t num_entries, num_parts;
};

// out[r] = the sum over r's experts e of weight * (f(x[r] up[e]^T) down[e]^T), where f is of gate and up if matrices
// are gated, else of each output, in the order of their numbers, which is what makes the sum a matter of the row alone;
// those of each segment by themselves.
// An expert that is none (its id is negative, or too large) adds nothing. With `scale_inputs` the weights multiply x,
// which is floats then, instead of the outputs.
struct ExpertsArgs : RowArgs {
    const void* x;
    int64_t x_stride;  // in elements, or in blocks of quantized rows
    int32_t x_dtype;
    const int32_t* ids;    // [rows, top_k]
    const float* weights;  // [rows, top_k]
    const Matrix *up, *down;
    float* out;                         // dense
    int32_t num_experts, first_expert;  // of the matrices: expert e is matrix e - first_expert
    int32_t segments;                   // of equally many experts, whose sums are added up as those of a matrix
    int32_t top_k, scale_inputs, activation;
    Clamp clamp;
    const int32_t* slots;                             // of tokens, -1 is nobody's; null: there are no adapters
    const AdapterFactors *up_factors, *down_factors;  // [experts of the matrices, num_slots], or null
    int64_t num_slots, up_width, down_width;          // widths of shrunk rows
    int32_t factor_dtype;
};

// A call's tokens, as many as its memory is for: what the kernels of a pass get. Planned.
struct ExpertsPass {
    const ExpertsArgs* args;
    ExpertsSchedule* schedule;
    int64_t token_begin, token_end;
    int64_t input_bytes, inner_bytes;  // of a row
    int32_t input_dtype, inner_dtype;
    int64_t part_rows, gather_tasks, up_tasks, down_tasks;
    int64_t shrink_tasks, copy_bytes;  // where a token has an adapter; bytes of the rows that a task copies
};

// out[r] = the lowest index of the largest of x[r, width], or kNoToken where that is not finite or the row has a NaN.
constexpr int64_t kNoToken = -1;
struct ArgmaxArgs : RowArgs {
    const float* x;
    int64_t* out;
    int64_t stride, width;
};

// out[r] = a token drawn from logits[r, width], which become its weights, or kNoToken as in ArgmaxArgs. Arrays are by
// row; top_k 0 is all; a row of temperature 0 gives its argmax and stays as it is.
struct SampleArgs : RowArgs {
    float* logits;
    const float* temperature;
    const int64_t* top_k;
    const float *top_p, *min_p;
    const double* uniforms;  // in [0, 1)
    int64_t* out;
    int64_t stride, width;
};

// logits[samples[m], t] = -inf where bit t % 32 of words[m, t / 32] is 0, and beyond the words; a task is a mask.
struct MaskArgs {
    float* logits;
    const uint32_t* words;
    const int64_t* samples;
    int64_t stride, width, words_stride, num_words, masks, rows;
};

// out[m] = the logarithm of the sum of e^(logits[samples[m], t] / temperatures[m]) over t; a task is a sample.
struct LogSumArgs {
    const float* logits;
    const int64_t* samples;
    const float* temperatures;
    double* out;
    int64_t stride, width, num_samples, rows;
};

class Group;  // of processes; collective.h

// What all processes of a group have of rows [rows, x_width] of float32: with `sums` their sum, in the order of
// tree.h, plus the bias [width] unless it is null; else their columns side by side, this process's from `begin`
// on. `out` is dense, [rows, width], and may be x where that is dense.
struct ExchangeArgs : RowWiseArgs {
    const float* x;
    float* out;
    int64_t x_stride, x_width, begin, width;
    const float* bias;
    Group* group;
    int32_t sums;
    int64_t num_tasks;  // Planned.
};

// Of row samples[m] of logits: ranks[m] = 1 + how many are larger than that of tokens[m], unless `tokens` is null; and
// the `count` largest, of equals those of the lowest index, largest first. A task is a sample.
struct RankArgs {
    const float* logits;
    const int64_t *samples, *tokens;
    int64_t* ranks;
    int64_t* top;       // [num_samples, count]
    float* top_values;  // [num_samples, count]
    int64_t stride, width, count, num_samples, rows;
};

// One task of a kernel. `args` is the operation's own struct above.
using Kernel = void (*)(const void* args, int64_t task);

struct KernelTable {
    const char* name;
    Kernel linear, embedding, take_rows, norm, activation, add, rotary, attention, argmax, sample, mask, log_sum, rank,
        route;
    Kernel gather_experts, experts_up, experts_down;  // of an ExpertsPass, after group_experts
    Kernel experts_shrink_up, experts_shrink_down;    // before either, where there are adapters
    Kernel multiply, conv, scan, delta, recurrence;
    Kernel shrink, pool;
    Kernel latent_attention, chosen_attention, choose, merge_chosen;
    Kernel replace_rows;
};
// What an instruction set with products of its own brings.
struct ProductKernels {
    Kernel linear, experts_up, experts_down, shrink, experts_shrink_up, experts_shrink_down;
    Kernel attention;  // or null: that of the set it is taken from
};

// One instance per instruction set that was compiled in; see dispatch.cpp.
extern const KernelTable kTable_portable;
extern const KernelTable kTable_avx2;
extern const KernelTable kTable_avx512;
extern const KernelTable kTable_avx512_bf16;
extern const KernelTable kTable_neon;
extern const KernelTable kTable_neon_dotprod;
extern const KernelTable kTable_neon_bf16;
// Products of the sets that have nothing else of their own.
extern const ProductKernels kProducts_avx2_vnni;
extern const ProductKernels kProducts_avx2_vnni_emulated;
extern const ProductKernels kProducts_avx512_vnni;
extern const ProductKernels kProducts_amx;
extern const ProductKernels kProducts_amx_emulated;

// These move bits only, so they are compiled once.
void pack_panel(const void* args, int64_t task);
void group_experts(const void* pass, int64_t task);
// Calls the kernel of products for each head.
void linear_by_head(const void* args, int64_t task);

}  // namespace octavo
