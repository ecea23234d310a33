// Packing of integer matrices (int_layouts.h, docs/kernels.md): from rows as files hold them (GGUF's block formats, or
// floats that are quantized on the way) into the panels of a Matrix. The file's bytes are read once and the panels
// written once, with nothing in between. Called by module.cpp, at load.
#pragma once

#include <vector>

#include "launch.h"

namespace octavo {

// Returns the names of the source formats; a format's number is its place. Float types are quantized to 8 bits (4 where
// the name says so), 32 elements to a scale.
std::vector<const char*> source_formats();

// Packs `rows` rows of k elements, `stride` bytes apart, as outputs first_row, first_row + 1, ... of an integer matrix.
// The matrix's memory must be zero before its first part. If the matrix is gated, first_row is 0 for gate and 1 for up,
// and output i goes to lane i % 32 of panel 2 * (i / 32) + first_row. A task packs one panel, or the part's share of
// it.
struct PackPartArgs {
    Matrix to;
    const uint8_t* source;
    int64_t stride, rows, first_row;
    int32_t source_format;
};

// Throws std::invalid_argument if the matrix has no room for the source's contents (5 bits in 4, minima in none).
Launch plan(PackPartArgs& args, const KernelTable&, int);

// Packs a matrix [rows, k] whose codes are in words of 32 bits (octavo/quantization/packed_words.py), into a layout of
// as many bits, or of four if codes have fewer. Rows become outputs as in PackPartArgs. `output_stride` bytes lie from
// one output's words to the next output's, `word_stride` from one word of an output to the next. With `by_outputs` a
// word has AWQ's nibbles of eight outputs: the strides are those to the next eight outputs and to the next element of
// k. `scales`, and `minima` and `shifts` unless null, are [k / group rounded up, rows]; a shift is added to codes of
// less than four bits. With `order` element i of k is element order[i] of the words. A task packs some neighbouring
// panels.
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

// Throws std::invalid_argument if the matrix has no room for the codes.
Launch plan(PackWordsArgs& args, const KernelTable&, int);

// Finds the largest finite scale in some rows, from which the factor of a matrix is chosen. `largest` has a result for
// every 32 rows.
struct MaxScaleArgs {
    const uint8_t* source;
    int64_t stride, rows, k;
    int32_t source_format;
    float* largest;
};

Launch plan(MaxScaleArgs& args);

// Returns the bytes of a block: kPanel outputs by kQBlock elements of k.
int64_t packed_block_bytes(const Matrix& matrix);

// Returns the bytes of an integer matrix.
int64_t packed_bytes(const Matrix& matrix);

}  // namespace octavo
