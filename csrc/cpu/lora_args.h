// Adapters' factors, and the products with their first half.
#pragma once

#include <cstdint>

#include "kernel_types.h"

namespace octavo {

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

}  // namespace octavo
