// Packing of integer matrices: rows as files hold them (GGUF's block formats, or floats that are quantized on the way)
// into the panels of a Matrix. The file's bytes are read once and the panels written once; nothing lies in between.
#pragma once

#include <vector>

#include "launch.h"

namespace octavo {

// Names of what rows can be packed from, whose places are the formats' numbers. The float types are quantized to 8
// bits, 32 elements to a scale.
std::vector<const char*> source_formats();

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
Launch plan(PackPartArgs& args, const KernelTable&, int);

// Packs a matrix [rows, k] whose codes are in words of 32 bits (octavo/quantization/packed_words.py) likewise, into a
// layout of as many bits, or of four where they are fewer. Words are anywhere: `output_stride` and `word_stride` bytes
// lie from one output to the next, and from one word of an output. With `by_outputs` a word has AWQ's nibbles of eight
// outputs: strides are those to the next eight and to the next element of k. `scales`, and `minima` and `shifts` where
// they are given, are [k / group, rows], rounded up; a shift is added to codes of less than four bits. With `order`
// element i of k is what order[i] is in the words. A task packs some neighbouring panels.
struct PackWordsArgs {
    Matrix to;
    const uint8_t* words;
    int64_t output_stride, word_stride, rows, first_row, group;
    int32_t bits, by_outputs;
    const float *scales, *minima;
    const uint8_t* shifts;
    const int32_t* order;
    // Planned.
    int64_t num_panels, together;
};

// Throws std::invalid_argument where the matrix has no room for the codes.
Launch plan(PackWordsArgs& args, const KernelTable&, int);

// The largest finite scale in these rows, from which the factor of a matrix is chosen. Results are by 32 rows.
struct MaxScaleArgs {
    const uint8_t* source;
    int64_t stride, rows, k;
    int32_t source_format;
    float* largest;
};

Launch plan(MaxScaleArgs& args);

// Bytes of an integer matrix's kPanel outputs by kQBlock elements of k.
int64_t packed_block_bytes(const Matrix& matrix);

// Bytes of an integer matrix.
int64_t packed_bytes(const Matrix& matrix);

}  // namespace octavo
