// What the argument structs of all kernels are made of: element types, packed matrices, epilogues of products,
// activations. The structs themselves are in kernels.h and *_args.h.
#pragma once

#include <cstdint>

namespace octavo {

// Element types; octavo/ops/cpu.py uses the same numbers. kQ8 is rows of QBlock. kQ16 is pairs of such rows, one after
// the other: the elements in eight bits, and the rest that these leave in eight more. kInt8 and the float8 types are
// for caches of keys and values only.
enum DType : int32_t { kF32 = 0, kBF16 = 1, kQ8 = 2, kInt8 = 3, kFloat8E4M3 = 4, kFloat8E5M2 = 5, kQ16 = 6 };

inline bool is_quantized(int32_t dtype) { return dtype == kQ8 || dtype == kQ16; }

// Output channels that share a panel of a packed matrix.
constexpr int kPanel = 32;
// How a matrix holds its weights. Formats below zero are not packed: rows lie one after the other, are looked up, and
// are in no product. All from kWeightInt4 on are multiplied as integers: codes of 4 and 8 bits with scales and, in some
// formats, minima. In kWeightTable and kWeightPowers a code of four bits is the index of a number of the matrix's
// table; scales of kWeightPowers are powers of two, a byte each. All from kWeightQ4K on keep the scales of a file's
// superblocks.
enum WeightFormat : int32_t {
    kRowsF32 = -2,
    kRowsBF16 = -1,
    kWeightF32 = 0,
    kWeightBF16 = 1,
    kWeightInt4 = 2,
    kWeightInt8 = 3,
    kWeightTable = 4,
    kWeightPowers = 5,
    kWeightQ4K = 6,
    kWeightQ6K = 7,
    kWeightQ5K = 8,
    kWeightQ3K = 9,
    kWeightQ2K = 10,
    kWeightIQ4XS = 11,
};

inline bool is_integer(int32_t format) { return format >= kWeightInt4; }
inline bool keeps_superblocks(int32_t format) { return format >= kWeightQ4K; }

// Elements of a row that are quantized together. Integer matrices pad k to a multiple.
constexpr int kQBlock = 64;
// Elements of k whose scales share a superblock scale, in layouts that keep a file's superblocks.
constexpr int kSuperblock = 256;

// Numbers of the table of a matrix whose codes are indices.
constexpr int kTableSize = 16;

// 64 elements of a quantized row. A code stands for code - z (z = 8 for 4 bits, 32 for 6, 128 for 8), so an
// integer accumulator starts at -z times the sum of the elements that it will see. One or two elements that stand out
// of their 32 would take the scale's range from the others: they are kept apart, as floats, and are zero in q.
constexpr int kMaxOutliers = 2;
struct QBlock {
    int8_t q[kQBlock];
    float scale[2];                    // of each 32 elements
    float outlier[2][kMaxOutliers];    // of each 32 elements; 0 where there is none
    uint16_t element_sums[2];          // bf16: scale times the sum of each 32 elements; minima are multiplied by it
    int32_t zero_point_terms_z8[2];    // -8 times the sum of each 32 elements
    int32_t zero_point_terms_z128[2];  // -128 times the sum of each 32 elements
    int32_t zero_point_terms_z128_by_16[4];  // -128 times the sum of each 16 elements
    uint8_t outlier_at[2][kMaxOutliers];     // where in the block the outliers stand
};

// Elements are outliers if their magnitudes exceed the next one of their 32 so many times. Measured: see
// docs/kernels.md.
constexpr float kOutlierRatio = 3.0f;

// A packed matrix [n, k]. Integer weights are factor * (scale * (code - z) + minimum), with a scale for every `group`
// (16 or 32) elements of k and a minimum, if there are any, for every 32. In a `gated` matrix gate and up projections
// alternate panel by panel; n counts both. A product is the sum of `segments` partial products: k is cut into that many
// equal parts, each is summed from zero, and the parts are added in the order of summation_tree.h. So the sum of a
// process's parts does not depend on who holds the others. A segment ends where a block ends (kQBlock, kSuperblock, two
// elements of bf16). If codes are indices, `table` has the codes of eight bits that they stand for.
struct Matrix {
    const void* data;
    const float* bias;  // padded to whole panels, or null
    int64_t n, k;
    float factor;
    int32_t format, group, minima, gated;
    int32_t segments;
    uint8_t table[kTableSize];
};

inline bool has_table(const Matrix& m) {
    return m.format == kWeightTable || m.format == kWeightPowers || m.format == kWeightIQ4XS;
}

// What becomes of the outputs y of a product. Gated matrices take kGated and nothing else; kGated takes gated matrices
// alone.
enum Epilogue : int32_t {
    kStore = 0,     // out = y
    kAdd = 1,       // out += scale * y, in float32, rounded once
    kGated = 2,     // out = activation(gate) * up, as floats or as quantized rows
    kScatter = 3,   // out[out_rows[r]] += row_scales[r] * y[r], in float32
    kActivated = 4  // out = activation(y), as floats or as quantized rows
};

// Element-wise functions; octavo/ops/cpu.py uses the same numbers.
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
// Parameters of kClamped, a function of gate and up: gate * sigmoid(slope * gate) * (up + 1), where gate is at most
// `limit` and up within [-limit, limit] (gpt-oss).
struct Clamp {
    float slope, limit;
};

// Arguments of a call that a program may run for fewer rows than it was recorded with.
struct RowArgs {
    int64_t rows;
};

// Arguments of kernels whose tasks are rows_per_task whole rows each.
struct RowWiseArgs : RowArgs {
    int64_t rows_per_task;  // Planned.
};

}  // namespace octavo
