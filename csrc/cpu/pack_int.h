// Packing of integer matrices: rows as files hold them (GGUF's block formats, or floats that are quantized on the way)
// into the panels of a Matrix. The file's bytes are read once and the panels written once; nothing lies in between.
#pragma once

#include "launch.h"

namespace octavo {

// What rows can be packed from. The float types are quantized to 8 bits, 32 elements to a scale.
enum SourceFormat : int32_t {
    kSourceF32,
    kSourceF16,
    kSourceBF16,
    kSourceQ4_0,
    kSourceQ4_1,
    kSourceQ5_0,
    kSourceQ5_1,
    kSourceQ8_0,
    kSourceQ4_K,
    kSourceQ5_K,
    kSourceQ6_K,
    kNumSourceFormats,
};

constexpr const char* kSourceNames[kNumSourceFormats] = {"F32",  "F16",  "BF16", "Q4_0", "Q4_1", "Q5_0",
                                                         "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"};

// Packs `rows` rows of k elements, `stride` bytes apart, as outputs first_row, first_row + 1, ... of an integer matrix
// whose memory was zero before its first part. Where the matrix is gated, first_row is 0 for gate and 1 for up, and
// output i goes to lane i % 32 of panel 2 * (i / 32) + first_row. A task packs one panel, or the share in it.
struct PackPartArgs {
    Matrix to;
    const uint8_t* source;
    int64_t stride, rows, first_row;
    int32_t source_format;
};

// Throws std::invalid_argument where the matrix has no room for what the source holds (5 bits in 4, minima in none).
Launch plan(PackPartArgs& args);

// The largest finite scale in these rows, from which the factor of a matrix is chosen. Results are by 32 rows.
struct MaxScaleArgs {
    const uint8_t* source;
    int64_t stride, rows, k;
    int32_t source_format;
    float* largest;
};

Launch plan(MaxScaleArgs& args);

// Bytes of 32 outputs by 64 elements of k.
int64_t packed_block_bytes(const Matrix& matrix);

}  // namespace octavo
