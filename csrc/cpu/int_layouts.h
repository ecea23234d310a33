// The packed layouts of integer weights (docs/kernels.md), and how products see them: as blocks of codes, scales and
// minima. Layouts that keep the scales of a file's superblocks (k_quants.h) are opened, some blocks at a time,
// into a buffer that stays in the cache; others are seen as they lie. Included by k_quants.h only.
//
// A panel is 32 output channels, in the lanes of vectors. Its blocks of 64 elements of k follow each other in memory:
//
//     matrix [N, K]        panel: outputs 0 .. 31                block, codes of 4 bits: 1152 bytes
//     k ->                 k ->                                  +----------------------------------------------+
//   n +---------+          +---------+---------+-- ...           | codes  [8][32][4]  byte (j, output, i):      |
//   | | panel 0 |  32      | block 0 | block 1 |                 |        low half k = 8j + i, high 8j + 4 + i |
//   v +---------+          | 64 of k | 64 of k |                 +----------------------------------------------+
//     | panel 1 |          +---------+---------+-- ...           | scales [2][32]     float16, of 32 k each     |
//     +---------+                                                +----------------------------------------------+
//                                                                | minima [32][2]     bfloat16, if there are any|
//                                                                +----------------------------------------------+
//
// A vector of 16 lanes loads four neighbouring k of 16 outputs, which is the operand of a dot product of bytes:
//
//     lane:      output 0      output 1          output 15
//     bytes:   k k+1 k+2 k+3 | k k+1 k+2 k+3 | ... k+3         times the same four bytes of the row, in every lane
//
// A superblock is 256 elements of k (four blocks) whose scales share a unit, as GGUF's K-quants have them (k_quants.h):
//
//     Q4_K:  | codes 64 | codes 64 | codes 64 | codes 64 |   each 1024 bytes, with 128 bytes of scales between them:
//            | d, dmin: float16 [2][32] | word 0 [32] | word 1 [32] | word 2 [32] |
//         three words of an output are its eight scales and eight minima of six bits
//
// Words of these files:
//   row      one token's inputs (or outputs) of a product       block      64 elements of k of a panel or of a row
//   panel    32 output channels of a packed matrix               superblock 256 elements of k: four blocks, one unit
//   code     the integer that stands for a weight                group      elements that share a scale: 16 or 32
//   scale    what a group's codes are multiplied by              minimum    what is added to a group's weights
//   unit     what a superblock's scales are multiplied by        factor     a power of two for the whole matrix
//   lane     one number of a vector register                     vector     a register: kLanes floats
//   QBlock   a block of a row: bytes, scales, sums               outlier    an element of a row kept as a float
//   start    -z times the sum of a block's elements: where an integer sum begins, as codes are stored as code + z
//   open     unpack a superblock into blocks with scales of their own, in the first-level cache
//   task     a piece of a call that one thread does              epilogue   what becomes of a product's outputs
//   segment  an equal part of k with a sum of its own            tile       rows by a panel in registers
#pragma once

#include "vector_math.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Some consecutive blocks of a panel. The minima of a block follow its scales.
struct IntView {
    const char* codes;
    int64_t code_stride;
    const char* scales;
    int64_t scale_stride;
};

inline Vec load_scale(const uint16_t* p) { return load_half(p); }
inline Vec load_scale(const float* p) { return load(p); }

inline float half_value(uint16_t h) {
    float magnitude = bits_of<float>((h & 0x7fffu) << 13) * 0x1p112f;
    // A weight that is not finite has the scale NaN.
    if ((h & 0x7c00u) == 0x7c00u) magnitude = h & 0x3ffu ? __builtin_nanf("") : __builtin_inff();
    return h & 0x8000u ? -magnitude : magnitude;
}
inline float scale_value(uint16_t scale) { return half_value(scale); }
inline float scale_value(float scale) { return scale; }

// Blocks of codes, two a byte or, of more than four bits, one; then scales (float16, or float32 where they were
// opened), then minima: of no element, bfloat16 of 32, or of 16 what a start value of QBlock is to be multiplied by,
// float32.
template <int bits, int group, int minima, class ScaleType = uint16_t>
struct IntFormat {
    using Flat = IntFormat;
    using Scale = ScaleType;
    static constexpr int kBits = bits;
    static constexpr int kGroup = group;
    static constexpr bool kMinima = minima == 32, kMinimaBy16 = minima == 16;
    static constexpr int kGroups = kQBlock / group;
    static constexpr int kCodesOfByte = bits == 4 ? 2 : 1;
    static constexpr int kCodeBytes = kPanel * kQBlock / kCodesOfByte;
    static constexpr int kScaleBytes = kPanel * kGroups * static_cast<int>(sizeof(Scale));
    static_assert(minima == 0 || minima == 32 || group == 16);
    static constexpr int kMinimumBytes = kMinima ? kPanel * 4 : kMinimaBy16 ? kPanel * kGroups * 4 : 0;
    static constexpr int kBlockBytes = kCodeBytes + kScaleBytes + kMinimumBytes;
    // What opening a block writes; blocks that are opened together.
    static constexpr int kOpenedBytes = 0;

    static inline IntView open(const char* panel, int64_t block, int64_t, float, char*) {
        const char* w = panel + block * kBlockBytes;
        return {w, kBlockBytes, w + kCodeBytes, kBlockBytes};
    }

    // Element k of a panel's rows, as floats, over the factor.
    static inline void column(const char* panel, int64_t k, float, Vec* out) {
        const char* block = panel + k / kQBlock * kBlockBytes;
        const int at = static_cast<int>(k % kQBlock);
        const char* codes = block + (bits == 4 ? at / 8 : at / 4) * kPanel * 4;
        const int shift = at % 4 * 8 + (bits == 4 ? at / 4 % 2 * 4 : 0);
        const Scale* scales = reinterpret_cast<const Scale*>(block + kCodeBytes) + at / group * kPanel;
        const uint16_t* added = reinterpret_cast<const uint16_t*>(block + kCodeBytes + kScaleBytes);
        for (int v = 0; v < kVecsPerPanel; ++v) {
            const Vec code = to_float(code_at<bits>(load_ints(codes + v * kLanes * 4), shift));
            out[v] = mul(load_scale(scales + v * kLanes), code);
            if constexpr (kMinima) {
                out[v] = add(out[v], one_of_pairs(load_pairs(added + v * kLanes * 2), at / 32));
            }
        }
    }
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
