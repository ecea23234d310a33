// The packed layouts of integer weights (docs/kernels.md), and the view that products have of them: blocks of codes,
// scales and minima. A layout is read as it lies; or its scales, or its scales and codes, are unpacked, some blocks at
// a time, into a buffer that stays in the first-level cache (superblock_layouts.h). Packing is in pack_int.cpp.
// Included by superblock_layouts.h only.
//
// A panel is 32 output channels, in the lanes of vectors. Its blocks of 64 elements of k follow each other in memory:
//
//     matrix [N, K]        panel: outputs 0 .. 31                block, 4 bits: 1152 bytes, 1280 with minima
//     k ->                 k ->                                  +----------------------------------------------+
//   n +---------+          +---------+---------+-- ...           | codes  [8][32][4]  byte (j, output, i):      |
//   | | panel 0 |  32      | block 0 | block 1 |                 |   low half k = 8j + i, high half 8j + 4 + i  |
//   v +---------+          | 64 of k | 64 of k |                 +----------------------------------------------+
//     | panel 1 |          +---------+---------+-- ...           | scales [2][32]     float16, of 32 k each     |
//     +---------+                                                +----------------------------------------------+
//                                                                | minima [32][2]     bfloat16, if there are any|
//                                                                +----------------------------------------------+
//
// Codes of 8 bits are [16][32][4]: byte (j, output, i) has k = 4j + i. With groups of 16 elements scales are [4][32].
//
// A vector of 16 lanes has four neighbouring k of each of 16 outputs. A vector of 4-bit codes becomes two such vectors,
// one of its low and one of its high nibbles. Such a vector is the operand of a dot product of bytes:
//
//     lane:      output 0      output 1          output 15
//     bytes:   k k+1 k+2 k+3 | k k+1 k+2 k+3 | ... k+3         times the same four bytes of the row, in every lane
//
// A superblock is 256 elements of k (four blocks) whose scales share a superblock scale, as in GGUF's K-quants
// (superblock_layouts.h):
//
//     Q4_K:  | codes 64 | d, dmin | codes 64 | word 0 | codes 64 | word 1 | codes 64 | word 2 |
//         codes: 1024 bytes each; d, dmin: float16 [2][32]; words: uint32 [32] each. The three words of an
//         output are its eight scales and then its eight minima, of six bits each.
//
// Words of these files, for data:
//   row      one token's inputs (or outputs) of a product       block      64 elements of k of a panel or of a row
//   panel    32 output channels of a packed matrix              superblock 256 elements of k: four blocks, one d
//   code     the integer that stands for a weight               group      elements that share a scale: 16 or 32
//   scale    the multiplier of a group's codes                  factor     a power of two for the whole matrix
//   minimum  is added to scale * (code - z) (llama.cpp *subtracts* its min). Of 32 weights: stored as it is. Of 16:
//            stored so that a product with a zero-point term adds it (FormatQ2K::Header)
//   d, dmin  the superblock scales, of its scales and minima    pair       two bfloat16
//   word     a uint32 of an output, in a superblock: packed scales, minima or bits of codes
//   step     four bytes of codes for each output of a panel     row halves the two quantized rows of a 16-bit row
//   QBlock   a block of a row: bytes, scales, sums, outliers    outlier    an element of a row kept as a float
//   z        zero point: a stored code stands for code - z      zero-point term: -z * the sum of a group's elements
//   unpack   turn superblocks into blocks with scales of their own, in the first-level cache
// for work:
//   task     the part of a call that one thread computes        epilogue   the work on a product's outputs
//   segment  an equal part of k with a sum of its own           tile       rows by a panel, summed in registers
//   epilogue panels: the panels that one epilogue finishes together
// and for instructions:
//   lane     one number of a vector register                    vector     a register: kLanes floats
//   instruction set: the one that this file is compiled for     AMX tile   sixteen rows by a panel, on AMX
//   VNNI, AMX, I8MM: x86's dot products of bytes, x86's tile registers, ARM's products of 2 x 8 by 8 x 2 bytes
// An integer sum begins at its zero-point term, and codes are multiplied as they are stored. Two exceptions subtract z
// from the codes, and begin at 0: AMX, and codes of 8 bits on instruction sets with kCodesAreCentred.
#pragma once

#include "activation_functions.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kStepBytes = kPanel * 4;  // of a step
constexpr int kVecBytes = kLanes * 4;   // of a step's codes for a vector of outputs

// Consecutive blocks of a panel: where the codes and the scales of the first are, and how many bytes further those of
// the next. Codes and scales may be in different memory (FormatQ4K). The minima of a block follow its scales. `table`
// is the matrix's. F is the IntFormat of the blocks.
struct BlocksView {
    const char* codes;
    int64_t code_stride;
    const char* scales;
    int64_t scale_stride;
    const uint8_t* table = nullptr;

    // The first block's scales of group g, [kPanel].
    template <class F>
    inline const typename F::Scale* scales_of_group(int64_t g) const {
        return reinterpret_cast<const typename F::Scale*>(scales) + g * kPanel;
    }
    // The first block's minima of 32 elements each, bfloat16 [kPanel][2].
    template <class F>
    inline const uint16_t* minima_by_32() const {
        return reinterpret_cast<const uint16_t*>(scales + F::kScaleBytes);
    }
    // The first block's minima of the 16 elements of group g, [kPanel].
    template <class F>
    inline const float* minima_by_16(int64_t g) const {
        return reinterpret_cast<const float*>(scales + F::kScaleBytes) + g * kPanel;
    }
    inline void next_block() {
        codes += code_stride;
        scales += scale_stride;
    }
};

// What unpacking needs of a matrix: 1 over its factor, and its table.
struct UnpackArgs {
    float inverse_factor;
    const uint8_t* table;

    explicit UnpackArgs(const Matrix& m) : inverse_factor(1 / m.factor), table(m.table) {}
};

inline Vec load_scale(const uint16_t* p) { return load_half(p); }
inline Vec load_scale(const float* p) { return load(p); }

inline float half_value(uint16_t h) {
    float magnitude = bits_of<float>((h & 0x7fffu) << 13) * 0x1p112f;
    // Infinities and NaNs stay so: a weight that is not finite is packed with the scale NaN.
    if ((h & 0x7c00u) == 0x7c00u) magnitude = h & 0x3ffu ? __builtin_nanf("") : __builtin_inff();
    return h & 0x8000u ? -magnitude : magnitude;
}
inline float scale_value(uint16_t scale) { return half_value(scale); }
inline float scale_value(float scale) { return scale; }

// A format F of integer matrices, here or in superblock_layouts.h, has
//   kBlockBytes    bytes of a packed block; of a superblock, a fourth
//   UnpackedFormat   the IntFormat of unpacked blocks; F itself if blocks are read as they lie
//   kUnpackedBytes   bytes of the buffer that an unpacked block takes; 0 if blocks are read as they lie
//   unpack_blocks(panel, block, blocks, unpack, unpacked)
//                  returns the view of blocks block .. block + blocks - 1; parts that are not read as they lie are
//                  unpacked into `unpacked`, and unpacked scales are divided by the matrix's factor. In formats of
//                  superblocks `block` is the first of a superblock, and `blocks` a multiple of four
//   column(panel, k, unpack, out)   writes element k of the panel's outputs to `out`, as floats, divided by the factor
//   kZeroPointTermOfOne   the zero-point term of a group with the sum 1, if UnpackedFormat has minima of 16 elements
// An IntFormat also has kGroupElements, the sizes of a block's parts, and
//   kMultipliedBits   bits of a code as it is multiplied: 8 with a table, otherwise the stored bits
//
// Codes of 4 bits are two a byte, codes of more bits one a byte. Scales are float16, or float32 in an unpacked buffer.
// `minima`: 0, none; 32, a bfloat16 for each 32 elements; 16, a float32 for each 16 elements, which is multiplied by a
// zero-point term of QBlock. With `has_table` the four bits are an index into the table. The entry there, a code of
// eight bits, is multiplied.
template <int stored_bits, int group, int minima, class ScaleType = uint16_t, bool has_table = false>
struct IntFormat {
    using UnpackedFormat = IntFormat;
    using Scale = ScaleType;
    static constexpr bool kHasTable = has_table;
    static constexpr int kMultipliedBits = has_table ? 8 : stored_bits;
    static constexpr int kGroupElements = group;
    static_assert(minima == 0 || minima == 32 || (minima == 16 && group == 16 && sizeof(ScaleType) == 4));
    static constexpr bool kHasMinimaBy32 = minima == 32, kHasMinimaBy16 = minima == 16;
    static constexpr int kGroupsPerBlock = kQBlock / group;
    static constexpr int kCodesPerByte = stored_bits == 4 ? 2 : 1;
    static constexpr int kCodeBytes = kPanel * kQBlock / kCodesPerByte;
    static constexpr int kScaleBytes = kPanel * kGroupsPerBlock * static_cast<int>(sizeof(Scale));
    static constexpr int kMinimaBytes = kHasMinimaBy32 ? kPanel * 4 : kHasMinimaBy16 ? kPanel * kGroupsPerBlock * 4 : 0;
    static constexpr int kBlockBytes = kCodeBytes + kScaleBytes + kMinimaBytes;
    static constexpr int kUnpackedBytes = 0;

    static inline BlocksView unpack_blocks(const char* panel, int64_t block, int64_t, UnpackArgs unpack, char*) {
        const char* w = panel + block * kBlockBytes;
        return {w, kBlockBytes, w + kCodeBytes, kBlockBytes, unpack.table};
    }

    // Returns the codes of element `at` of a block, less their zero, for vector v of outputs.
    static inline Vec centred_codes_at(const char* block_codes, int at, int v, UnpackArgs unpack) {
        // The vector with element `at`, and the first bit of its code in a lane: byte at % 4, low or high half.
        const char* codes = block_codes + (stored_bits == 4 ? at / 8 : at / 4) * kStepBytes;
        const int shift = at % 4 * 8 + (stored_bits == 4 ? at / 4 % 2 * 4 : 0);
        const Ints found = code_at<stored_bits>(load_ints(codes + v * kVecBytes), shift);
        if constexpr (!has_table) return to_float(found);
        // code_at<4> has subtracted 8: the index is 8 more. The table's entries are codes of 8 bits, with z = 128.
        const Ints index = add_ints(found, set1_int(8));
        return to_float(add_ints(and_ints(look_up(load_table(unpack.table), index), set1_int(255)), set1_int(-128)));
    }

    static inline void column(const char* panel, int64_t k, UnpackArgs unpack, Vec* out) {
        static_assert(!kHasMinimaBy16, "only unpacked blocks have such minima");
        const char* block = panel + k / kQBlock * kBlockBytes;
        const int at = static_cast<int>(k % kQBlock);
        const Scale* scales = reinterpret_cast<const Scale*>(block + kCodeBytes) + at / group * kPanel;
        const uint16_t* added = reinterpret_cast<const uint16_t*>(block + kCodeBytes + kScaleBytes);
        for (int v = 0; v < kVecsPerPanel; ++v) {
            out[v] = mul(load_scale(scales + v * kLanes), centred_codes_at(block, at, v, unpack));
            if constexpr (kHasMinimaBy32) {
                out[v] = add(out[v], one_of_pairs(load_pairs(added + v * kLanes * 2), at / 32));
            }
        }
    }
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
