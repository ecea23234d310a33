// The kernels' interface: one argument struct and one plain function for each operation, and the table of functions
// that every instruction set provides. Some operations have their structs in headers of their own (*_args.h). Nothing
// here depends on Python, on the thread pool or on an instruction set. These headers are compiled with every set of
// flags, so they hold plain data and static functions, no other inline code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention_args.h"
#include "expert_args.h"
#include "kernel_types.h"
#include "logit_args.h"
#include "lora_args.h"
#include "state_args.h"

namespace octavo {

// y[rows, n] = x[rows, k] W^T + bias. Packed float32 weights are [panel][k][32] and multiply float32 rows; bf16 weights
// are [panel][ceil(k / 2)][32][2] and multiply bf16 rows; integer weights (docs/kernels.md) multiply quantized rows.
// With `x_is_paired` a row is two quantized rows (kQ16), whose products are added up. Strides are in elements; those of
// quantized rows and pairs are in blocks.
struct LinearArgs : RowArgs {
    const void* x;
    int64_t x_stride;
    Matrix matrix;
    void* out;
    int64_t out_stride;
    int32_t out_dtype, epilogue, activation;
    int32_t x_is_paired = 0;
    float scale;
    Clamp clamp;                    // of kClamped
    const int32_t* out_rows;        // of kScatter, and of kStore where it is not null
    const float* row_scales;        // kScatter only; null: all 1
    const int32_t* slots;           // the adapter of each row, -1: none; null: there are no adapters
    const AdapterFactors* factors;  // by slot
    const void* shrunk;             // x times the adapters' A: the output of ShrinkArgs
    int64_t shrunk_stride, num_slots;
    int32_t factor_dtype;
    int32_t has_lora;                  // Planned: some row has an adapter.
    const ShrinkArgs* next;            // Planned: the call that reads factors next after this, or null.
    int64_t row_chunks, panel_chunks;  // Planned: the grid of tasks.
};

// out[r, h] = x[r, h, k] W[h]^T for each head h. Matrices are alike and have no bias. Strides are in elements, those of
// quantized rows in blocks.
struct HeadLinearArgs : RowArgs {
    const void* x;
    int64_t x_stride, x_head_stride, x_bytes;  // of an element, or of a block
    const Matrix* matrices;
    void* out;
    int64_t out_stride, out_head_stride;
    int32_t heads, out_dtype;
    // Planned: the product of one head (with the addresses and the matrix of the first), its kernel and its tasks.
    LinearArgs product;
    void (*kernel)(const void* args, int64_t task);
    int64_t tasks_per_head;
};

// Packs weight[n, k], whose rows lie `stride` elements apart, into every `panel_step`th panel from `out` on. A task
// packs one panel.
struct PackArgs {
    const void* weight;
    void* out;
    int64_t stride, n, k, panel_step;
    int32_t dtype;
};

// out[t, :] = scale * row token_ids[t] of a matrix, as the adapter in slots[t] changes it.
struct EmbeddingArgs : RowWiseArgs {
    const int32_t* token_ids;
    Matrix matrix;
    void* out;
    float scale;
    int32_t out_dtype;
    const int32_t* slots;           // the adapter of each token, -1: none; null: there are no adapters
    const AdapterFactors* factors;  // by slot
    int64_t num_slots;
    int32_t factor_dtype;
};

// out[i, :] = x[indices[i], :]. Rows have `row_bytes` bytes; rows of x lie `x_stride_bytes` apart.
struct TakeRowsArgs : RowWiseArgs {
    const void* x;
    const int64_t* indices;
    void* out;
    int64_t x_rows, row_bytes, x_stride_bytes;
};

// out[i, :] = replacements[indices[i], :], dense float32. Rows whose index is negative stay as they are.
struct ReplaceRowsArgs : RowWiseArgs {
    const float* replacements;
    const int32_t* indices;
    void* out;
    int64_t num_replacements, width, out_stride;
    int32_t out_dtype, adds;  // adds: whether rows are added to those of `out` instead of replacing them
};

// out[i, j, :] = norm(x[i, j, :]) * weight + bias for `rows` by `inner` rows: the layer norm if `centered`, else the
// RMS norm. The bias has the weight's type and may be null. `weight_stride` is the distance from the weights (and bias)
// of one inner row to those of the next; 0 if they share one. Outputs are dense; kQ8 outputs are quantized from
// float32.
struct NormArgs : RowWiseArgs {
    const void *x, *weight, *bias;
    void* out;
    int64_t inner, hidden, x_stride, x_inner_stride, weight_stride;
    float eps;
    int32_t dtype, weight_dtype, out_dtype, centered;
};

// How rows are pooled; octavo/ops/cpu.py uses the same numbers.
enum PoolKind : int32_t { kMean = 0, kMax = 1, kMeanSqrt = 2, kWeightedMean = 3 };

// out[r, :] = rows starts[r] to ends[r] of x, both included, pooled in float32. Outputs are dense.
struct PoolArgs : RowWiseArgs {
    const void* x;
    const int64_t *starts, *ends;
    void* out;
    int64_t x_rows, x_stride, width;
    int32_t dtype, out_dtype, kind;
};

// out[r, :] = f(x[r, :]). Outputs are dense. kQ8 outputs are quantized from float32, as rows of ceil(width / kQBlock)
// blocks. With an `order` [width], f is the identity and element i is x[order[i]].
struct ActivationArgs : RowWiseArgs {
    const void* x;
    void* out;
    int64_t x_stride, width;
    const int32_t* order;
    int32_t dtype, out_dtype, kind;
    float parameter0, parameter1, parameter2, parameter3;  // of the kinds that have parameters
};

// out[r, :] += scale * x[r, :], in float32, rounded once. With `ids` the scale of row r is the sum of those weights[r,
// j] whose ids[r, j] are at least `first_id`.
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

// out[r, i] = x[r, i] * f(y[r, i / shared]), where f is kIdentity, kSilu, kLogistic or kSoftplus. Outputs are as in
// ActivationArgs.
struct MultiplyArgs : RowWiseArgs {
    const void *x, *y;
    void* out;
    int64_t x_stride, y_stride, width, shared;
    int32_t dtype, out_dtype, kind;
};

class Group;  // of processes; all_reduce.h

// Exchanges float32 rows [rows, x_width] among all processes of a group. With `sums` the output is their sum, in the
// order of summation_tree.h, plus the bias [width] unless it is null. Else it is their columns side by side; this
// process's begin at `begin`. `out` is dense, [rows, width], and may be x if x is dense.
struct ExchangeArgs : RowWiseArgs {
    const float* x;
    float* out;
    int64_t x_stride, x_width, begin, width;
    const float* bias;
    Group* group;
    int32_t sums;
    int64_t num_tasks;  // Planned.
};

// Computes one task of a kernel. `args` is the operation's own struct above.
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
    bool has_tiles = false;  // sixteen rows are one instruction
};
// The kernels of an instruction set that has products of its own and nothing else.
struct ProductKernels {
    Kernel linear, experts_up, experts_down, shrink, experts_shrink_up, experts_shrink_down;
    Kernel attention;  // by tiles; null: the kernel of the set that it builds on
};

// One table for each instruction set; the build compiles some of them (dispatch.cpp).
extern const KernelTable kTable_portable;
extern const KernelTable kTable_avx2;
extern const KernelTable kTable_avx512;
extern const KernelTable kTable_avx512_bf16;
extern const KernelTable kTable_neon;
extern const KernelTable kTable_neon_dotprod;
extern const KernelTable kTable_neon_bf16;
// Products of the sets that take all other kernels from another set.
extern const ProductKernels kProducts_avx2_vnni;
extern const ProductKernels kProducts_avx2_vnni_emulated;
extern const ProductKernels kProducts_avx512_vnni;
extern const ProductKernels kProducts_amx;
extern const ProductKernels kProducts_amx_emulated;

// These only move bits, so they are compiled once.
void pack_panel(const void* args, int64_t task);
void group_experts(const void* pass, int64_t task);
// The kernel of HeadLinearArgs: a task is one task of the product of one head.
void linear_by_head(const void* args, int64_t task);

}  // namespace octavo
