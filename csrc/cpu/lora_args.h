// Adapters' factors, and the argument struct of their first product. Included by kernels.h.
#pragma once

#include <cstdint>

#include "kernel_types.h"

namespace octavo {

// An adapter's B at one panel of a product's outputs: it multiplies `count` elements of the shrunk row, from `first`
// on; its factors begin at element `offset`. `first` and `count` are multiples of a lane's elements (1 of float32, 2 of
// bf16).
struct AdapterPanel {
    int64_t offset;
    int32_t first, count;
};

// Rows of A that share a panel, and the most rows of a step with one adapter that make a task.
constexpr int kFactorPanel = 16;
constexpr int kAdapterRows = 16;
// The highest rank of an adapter, unless it replaces the matrix.
constexpr int kMaxRank = 512;

// What one adapter adds to one product: (x A^T) B^T. A [rank, k] is [panel][ceil(k / step)][kFactorPanel][step], B
// [panel][count / step][kPanel][step], where step is the number of elements of a lane (1 of float32, 2 of bf16). With
// `scales` the sum of both products is multiplied by them; then `bias` is added. Both are padded to whole panels, or
// null. Without `panels` an adapter adds nothing. An adapter that `replaces` the base's matrix has no A: the shrunk row
// is x itself, and its product with B takes the place of the base's.
//
// For a matrix whose rows are looked up, B is the same and A is [rank, k] in row order: row n becomes W[n] + B[n] A, or
// B[n] if it is replaced.
struct AdapterFactors {
    const void *a, *b;
    const AdapterPanel* panels;
    const float *scales, *bias;
    int32_t rank, replaces;
};

// Rows of a step that have the same adapter: `rows` places from `begin` on in the order by adapter.
struct AdapterRows {
    int32_t slot, begin, rows;
};

struct AdapterSchedule {
    const int32_t* rows;  // ordered by adapter, then by row
    const AdapterRows* parts;
    int64_t num_parts, splits;  // a part's outputs are shared among `splits` tasks
};

// out[r] = x[r] A^T with the A of the row's adapter, in `dtype`, the type of the factors. Rows without an adapter are
// left as they are. Rows that do not lie as the products need them are copied to `scratch`, which holds as many rows of
// k elements as shrink_scratch_rows (launch.h) says.
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

}  // namespace octavo
