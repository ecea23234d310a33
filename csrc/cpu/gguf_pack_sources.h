// The sources that integer matrices are packed from: GGUF's block formats, codes that Python unpacked, and floats that
// are quantized here. Layouts are in int_layouts.h and superblock_layouts.h, the packing loop in pack_int.cpp. Included
// by pack_int.cpp only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "float_bits.h"
#include "kernels.h"

namespace octavo {
namespace {

constexpr int kScales = 4;  // of a block: one for 16 elements, the finest
constexpr int kMinima = 2;  // of a block: one for 32 elements

// A source reads 64 elements of a row, of which the first `valid` exist; the others are 0. `read_scales` finds scales
// by 16 elements and, if kHasMinima, minima by 32. `read_codes` finds codes. An element is scale * code + minimum, or
// scale * (code - kZero). If kHasTable, codes are indices into the matrix's table; these have no kZero. Both are called
// for one block after the other.

// A format whose superblocks have a layout of their own has its number as kKept and three more functions. `gather`
// turns a row of a superblock into kWords words of 32 bits: each is a lane of a vector, and the vectors lie from byte
// kWordsAt of a panel's superblock on (but not word kGap), in kParts equal parts, kPartBytes apart. `keep` writes the
// rest of the superblock. `largest_scale` returns the largest scale of a row of a superblock; it may be NaN or
// infinite.
constexpr int32_t kNotKept = -1;
constexpr int kBlocksPerSuperblock = kSuperblock / kQBlock;
constexpr int kQ4KBlock = kPanel * kQBlock / 2 + 128;
constexpr int kQ5KBlock = kPanel * kQBlock * 5 / 8 + 128;
constexpr int kQ3KWordsAt = kPanel * 2;
constexpr int kQ3KSuper = kQ3KWordsAt + kPanel * (12 + kSuperblock * 3 / 8);
constexpr int kQ2KWordsAt = 2 * kPanel * 2;
constexpr int kQ2KSuper = kQ2KWordsAt + kPanel * (16 + kSuperblock * 2 / 8);
constexpr int kTableAndBytesBlock = kPanel * (kQBlock / 2 + 2);
constexpr int kQ6KHeader = kPanel * (2 + kSuperblock / 16);
constexpr int kQ6KSuper = kQ6KHeader + kPanel * kSuperblock * 6 / 8;

// Copies a float16 superblock scale. All NaNs become one, as kernels may round NaNs like numbers.
void store_superblock_scale(const uint8_t* from, uint8_t* to) {
    const uint16_t scale = load<uint16_t>(from);
    const uint16_t stored = (scale & 0x7fff) > 0x7c00 ? 0x7e00 : scale;
    std::memcpy(to, &stored, 2);
}

// Stores sixteen numbers of six bits in three words, `step` words apart, as SixBits (superblock_layouts.h) reads them:
// five a word, and two bits of the sixteenth in each word's high bits.
void store_six_bits(const int* numbers, uint32_t* words, int step) {
    for (int i = 0; i < 3; ++i) {
        uint32_t word = static_cast<uint32_t>(numbers[15] >> (2 * i) & 3) << 30;
        for (int n = 0; n < 5; ++n) word |= static_cast<uint32_t>(numbers[5 * i + n]) << (6 * n);
        words[i * step] = word;
    }
}

// Writes the low halves of `count` bytes, then their high halves.
void split_nibbles(const uint8_t* bytes, int count, uint8_t* codes) {
    for (int i = 0; i < count; ++i) {
        codes[i] = bytes[i] & 15;
        codes[count + i] = bytes[i] >> 4;
    }
}

// Returns half of the power of two whose exponent plus 127 is `e`: e2m1 numbers are doubled. Infinite for 255.
float half_power(uint32_t e) {
    return e == 255 ? float_of(0x7f800000) : float_of(e > 1 ? (e - 1) << 23 : 0x200000 << e);
}

// A block of 32 elements in `kBytes` bytes: float16 scale, float16 minimum if there is one, then codes. Nibbles: byte e
// has element e in its low half and element e + 16 in its high half. Q5 has 32 fifth bits before its nibbles. Q8 has a
// signed byte for each element. MXFP4 has the exponent of its scale in the place of a float16.
template <bool kMinimum, int kCodeZero, int kCodeBits, int kCodeBytes, bool kTable = false,
          int kHeaderBytes = kMinimum ? 4 : 2>
struct Blocks32 {
    static constexpr int32_t kKept = kNotKept;
    static constexpr bool kHasMinima = kMinimum, kHasTable = kTable;
    static constexpr int kZero = kCodeZero, kBits = kCodeBits, kElements = 32;
    static constexpr int kHeader = kHeaderBytes, kBytes = kHeader + kCodeBytes;

    static void read_scales(const uint8_t* row, int64_t block, int valid, float* scales, float* minima) {
        for (int i = 0; 32 * i < valid; ++i) {
            const uint8_t* from = row + (2 * block + i) * kBytes;
            scales[2 * i] = scales[2 * i + 1] =
                kHeader == 1 ? half_power(from[0]) : half_to_float(load<uint16_t>(from));
            if (kMinimum) minima[i] = half_to_float(load<uint16_t>(from + 2));
        }
    }

    static void read_codes(const uint8_t* row, int64_t block, int valid, const float*, uint8_t* codes) {
        for (int i = 0; 32 * i < valid; ++i) {
            const uint8_t* from = row + (2 * block + i) * kBytes + kHeader;
            uint8_t* out = codes + 32 * i;
            if (kBits == 8) {
                for (int e = 0; e < 32; ++e) out[e] = from[e] ^ 0x80;
                continue;
            }
            const uint8_t* nibbles = kBits == 5 ? from + 4 : from;
            split_nibbles(nibbles, 16, out);
            if (kBits == 5) {
                for (int byte = 0; byte < 4; ++byte) add_fifth_bits(from[byte], out + 8 * byte);
            }
        }
    }

    // Adds bit i of `bits` to code i as its bit 4, for eight codes.
    static void add_fifth_bits(uint64_t bits, uint8_t* codes) {
        const uint64_t spread = bits * 0x0101010101010101 & 0x8040201008040201;  // byte i: bit i, or 0
        // Adding 0x7f sets bit 7 of every byte that is not 0; it moves to bit 4.
        const uint64_t fifth = (spread + 0x7f7f7f7f7f7f7f7f) >> 3 & 0x1010101010101010;
        const uint64_t both = load<uint64_t>(codes) | fifth;
        std::memcpy(codes, &both, 8);
    }
};

using Q4_0 = Blocks32<false, 8, 4, 16>;
using Q4_1 = Blocks32<true, 0, 4, 16>;
using Q5_0 = Blocks32<false, 16, 5, 20>;
using Q5_1 = Blocks32<true, 0, 5, 20>;
using Q8_0 = Blocks32<false, 128, 8, 32>;
using IQ4_NL = Blocks32<false, 8, 4, 16, true>;
using MXFP4 = Blocks32<false, 8, 4, 16, true, 1>;

// NVFP4, 64 elements: four scales, eight-bit floats (e4m3) without a sign, then eight bytes of nibbles for each sixteen
// elements.
struct NVFP4 {
    static constexpr int32_t kKept = kNotKept;
    static constexpr bool kHasMinima = false, kHasTable = true;
    static constexpr int kZero = 8, kBits = 4, kElements = 64, kBytes = 36;

    static void read_scales(const uint8_t* row, int64_t block, int, float* scales, float*) {
        for (int i = 0; i < kScales; ++i) {
            const uint32_t byte = row[block * kBytes + i];
            // The bits of exponent and mantissa, moved to those of a float32, are 2^-120 times the number. Half of it:
            // e2m1 numbers are doubled. 0x7f is no number and gives 0.
            scales[i] = byte == 0x7f ? 0 : float_of((byte & 0x7f) << 20) * 0x1p119f;
        }
    }

    static void read_codes(const uint8_t* row, int64_t block, int, const float*, uint8_t* codes) {
        for (int i = 0; i < kScales; ++i) split_nibbles(row + block * kBytes + 4 + 8 * i, 8, codes + 16 * i);
    }
};

// IQ4_XS, 256 elements: the float16 superblock scale of eight scales, their high two bits, their low four bits, both
// from the lowest bits on and stored plus 32, then sixteen bytes of nibbles for each 32 elements.
struct IQ4_XS {
    static constexpr int32_t kKept = kWeightIQ4XS;
    static constexpr bool kHasMinima = false, kHasTable = true;
    static constexpr int kZero = 8, kBits = 4, kElements = 256, kBytes = 136, kNibbles = 8;

    static int scale(const uint8_t* from, int group) {
        return ((from[4 + group / 2] >> (group % 2 * 4) & 15) | (from[2 + group / 4] >> (group % 4 * 2) & 3) << 4) - 32;
    }

    static void read_scales(const uint8_t* row, int64_t block, int, float* scales, float*) {
        const uint8_t* from = row + block / 4 * kBytes;
        const float d = half_to_float(load<uint16_t>(from));
        for (int i = 0; i < kScales; ++i) {
            scales[i] = d * static_cast<float>(scale(from, static_cast<int>(block % 4) * 2 + i / 2));
        }
    }

    static void read_codes(const uint8_t* row, int64_t block, int, const float*, uint8_t* codes) {
        const uint8_t* from = row + block / 4 * kBytes + kNibbles + block % 4 * 32;
        for (int i = 0; i < 2; ++i) split_nibbles(from + 16 * i, 16, codes + 32 * i);
    }

    // The layout FormatIQ4XS (superblock_layouts.h): each block has eight words of nibbles, then 64 bytes of scales.
    static constexpr int kScalesAt = 0, kWordsAt = 0, kWords = 32, kGap = -1;
    static constexpr int kParts = kBlocksPerSuperblock, kPartBytes = kTableAndBytesBlock;
    static void gather(const uint8_t* from, uint32_t* words) {
        for (int group = 0; group < 8; ++group) {
            uint32_t four[4];
            std::memcpy(four, from + kNibbles + 16 * group, 16);
            for (int i = 0; i < 2; ++i) {
                // Eight elements are the low halves of two words, the eight that are sixteen further their high halves.
                *words++ = (four[2 * i] & 0x0f0f0f0f) | (four[2 * i + 1] & 0x0f0f0f0f) << 4;
            }
            for (int i = 0; i < 2; ++i) *words++ = (four[2 * i] >> 4 & 0x0f0f0f0f) | (four[2 * i + 1] & 0xf0f0f0f0);
        }
    }
    static void keep(const uint8_t* from, int lane, uint8_t* out) {
        uint8_t* scales = out + kPanel * kQBlock / 2;
        store_superblock_scale(from, scales + 2 * lane);
        for (int i = 0; i < 6; ++i) scales[(1 + i / 2) * kPartBytes + i % 2 * kPanel + lane] = from[2 + i];
    }

    static float largest_scale(const uint8_t* from) {
        int largest = 0;
        for (int group = 0; group < 8; ++group) largest = std::max(largest, std::abs(scale(from, group)));
        return std::fabs(half_to_float(load<uint16_t>(from))) * static_cast<float>(largest);
    }
};

// Q4_K and Q5_K, 256 elements: float16 superblock scales d (of scales) and dmin (of minima), eight scales and eight
// minima in 12 bytes, fifth bits (Q5_K), then nibbles. 32 bytes of nibbles are 64 elements: the first 32 in low halves,
// the others in high halves.
template <int kCodeBits>
struct BlocksK {
    static constexpr int32_t kKept = kCodeBits == 4 ? kWeightQ4K : kWeightQ5K;
    static constexpr bool kHasMinima = true, kHasTable = false;
    static constexpr int kZero = 0, kBits = kCodeBits, kElements = 256;
    static constexpr int kFifth = 16, kNibbles = kBits == 5 ? 48 : 16, kBytes = kNibbles + 128;

    static void read_scales(const uint8_t* row, int64_t block, int, float* scales, float* minima) {
        const uint8_t* from = row + block / 4 * kBytes;
        const float d = half_to_float(load<uint16_t>(from)), dmin = half_to_float(load<uint16_t>(from + 2));
        for (int i = 0; i < 2; ++i) {
            int scale, below;
            read_six_bits(from + 4, static_cast<int>(block % 4) * 2 + i, scale, below);
            scales[2 * i] = scales[2 * i + 1] = d * static_cast<float>(scale);
            minima[i] = -(dmin * static_cast<float>(below));
        }
    }

    // Reads the scale and the minimum of one of eight groups of 32 elements. Those of groups 0 to 3 are the low six
    // bits of a byte. Those of groups 4 to 7 share bytes 8 to 11 (low four bits) and the top two bits of bytes 0 to 7.
    static void read_six_bits(const uint8_t* packed, int group, int& scale, int& below) {
        scale = packed[group] & 63;
        below = packed[group + 4] & 63;
        if (group >= 4) {
            scale = (packed[group + 4] & 15) | packed[group - 4] >> 6 << 4;
            below = packed[group + 4] >> 4 | packed[group] >> 6 << 4;
        }
    }

    // The layouts FormatQ4K and FormatQ5K (superblock_layouts.h): each block has eight words of nibbles, two of fifth
    // bits (Q5_K), and one of numbers. The first block has d and dmin in the place of its word of numbers.
    static constexpr int kWordsOfBlock = kBits == 5 ? 11 : 9;
    static constexpr int kScalesAt = 0, kWordsAt = 0, kWords = 4 * kWordsOfBlock, kGap = kWordsOfBlock - 1;
    static constexpr int kParts = 1, kPartBytes = 0;
    static void gather(const uint8_t* from, uint32_t* words) {
        constexpr uint32_t kLow = 0x0f0f0f0f, kHigh = 0xf0f0f0f0;
        for (int block = 0; block < kBlocksPerSuperblock; ++block) {
            const uint8_t* nibbles = from + kNibbles + 32 * block;
            uint32_t* of_block = words + block * kWordsOfBlock;
            for (int step = 0; step < 4; ++step) {
                const uint32_t a = load<uint32_t>(nibbles + 8 * step), b = load<uint32_t>(nibbles + 8 * step + 4);
                // a and b are four elements each of the first 32 (low halves) and of the second 32 (high halves): a
                // goes to low halves, b to high halves.
                of_block[step] = (a & kLow) | (b & kLow) << 4;
                of_block[4 + step] = (a >> 4 & kLow) | (b & kHigh);
            }
            if (kBits == 5) {
                for (int half = 0; half < 2; ++half) {
                    uint32_t word = 0;
                    for (int i = 0; i < 8; ++i) {
                        // Bit g of byte e is element e of group g; it becomes bit i of byte e % 4, i = e / 4.
                        word |= (load<uint32_t>(from + kFifth + 4 * i) >> (2 * block + half) & 0x01010101) << i;
                    }
                    of_block[8 + half] = word;
                }
            }
        }
        int numbers[16];
        read_numbers(from, numbers);
        words[kGap] = 0;
        store_six_bits(numbers, words + kGap + kWordsOfBlock, kWordsOfBlock);
    }
    static void keep(const uint8_t* from, int lane, uint8_t* out) {
        store_superblock_scale(from, out + 4 * kPanel * kGap + 2 * lane);
        store_superblock_scale(from + 2, out + 4 * kPanel * kGap + 2 * (kPanel + lane));
    }

    // Reads eight scales and then eight minima.
    static void read_numbers(const uint8_t* from, int* numbers) {
        for (int group = 0; group < 8; ++group) {
            read_six_bits(from + 4, group, numbers[group], numbers[8 + group]);
        }
    }

    static float largest_scale(const uint8_t* from) {
        int numbers[16];
        read_numbers(from, numbers);
        return std::fabs(half_to_float(load<uint16_t>(from))) *
               static_cast<float>(*std::max_element(numbers, numbers + 8));
    }

    static void read_codes(const uint8_t* row, int64_t block, int, const float*, uint8_t* codes) {
        const uint8_t* from = row + block / 4 * kBytes;
        const int quarter = static_cast<int>(block % 4);
        const uint8_t* nibbles = from + kNibbles + 32 * quarter;
        for (int e = 0; e < 32; ++e) {
            codes[e] = nibbles[e] & 15;
            codes[e + 32] = nibbles[e] >> 4;
        }
        if (kBits == 5) {
            const uint8_t* fifth = from + kFifth;  // bit g of byte e belongs to element e of group g
            for (int e = 0; e < 32; ++e) {
                const int two = fifth[e] >> (2 * quarter);
                codes[e] = static_cast<uint8_t>(codes[e] | (two & 1) << 4);
                codes[e + 32] = static_cast<uint8_t>(codes[e + 32] | (two & 2) << 3);
            }
        }
    }
};

using Q4_K = BlocksK<4>;
using Q5_K = BlocksK<5>;

// Q6_K, 256 elements: 128 bytes of nibbles, 64 bytes of top bits, 16 signed scales and their float16 superblock scale.
// Of each half of 128 elements, runs 0 and 1 (of 32 elements) are low nibbles, runs 2 and 3 high nibbles, and the four
// runs share 32 bytes of top bits, two bits each.
struct Q6_K {
    static constexpr int32_t kKept = kWeightQ6K;
    static constexpr bool kHasMinima = false, kHasTable = false;
    static constexpr int kZero = 32, kBits = 6, kElements = 256, kBytes = 210;

    static void read_scales(const uint8_t* row, int64_t block, int, float* scales, float*) {
        const uint8_t* from = row + block / 4 * kBytes;
        const float d = half_to_float(load<uint16_t>(from + 208));
        for (int i = 0; i < kScales; ++i) {
            scales[i] = d * static_cast<float>(static_cast<int8_t>(from[192 + block % 4 * 4 + i]));
        }
    }

    static void read_codes(const uint8_t* row, int64_t block, int, const float*, uint8_t* codes) {
        const uint8_t* from = row + block / 4 * kBytes;
        const int half = static_cast<int>(block % 4) / 2, shift = static_cast<int>(block % 2) * 4;
        const uint8_t *nibbles = from + 64 * half, *top = from + 128 + 32 * half;
        constexpr uint64_t kNibbles = 0x0f0f0f0f0f0f0f0f, kLowTwo = 0x0303030303030303, kHighTwo = 0x0c0c0c0c0c0c0c0c;
        for (int e = 0; e < 32; e += 8) {
            const uint64_t two = load<uint64_t>(top + e) >> shift;
            const uint64_t first = load<uint64_t>(nibbles + e) >> shift,
                           second = load<uint64_t>(nibbles + e + 32) >> shift;
            const uint64_t eight[2] = {(first & kNibbles) | (two & kLowTwo) << 4, (second & kNibbles) | (two & kHighTwo)
                                                                                                            << 2};
            std::memcpy(codes + e, eight, 8);
            std::memcpy(codes + e + 32, eight + 1, 8);
        }
    }

    // The layout FormatQ6K (superblock_layouts.h): sixteen codes are three words, whose bytes have the last four codes
    // in their high two bits.
    static constexpr int kScalesAt = 192, kWordsAt = kQ6KHeader, kWords = kSuperblock / 16 * 3, kGap = -1;
    static constexpr int kParts = 1, kPartBytes = 0;
    static void gather(const uint8_t* from, uint32_t* words) {
        for (int block = 0; block < kBlocksPerSuperblock; ++block) {
            uint32_t codes[kQBlock / 4];
            read_codes(from, block, kQBlock, nullptr, reinterpret_cast<uint8_t*>(codes));
            for (int step = 0; step < kQBlock / 16; ++step) {
                const uint32_t fourth = codes[4 * step + 3];
                for (int i = 0; i < 3; ++i) *words++ = codes[4 * step + i] | (fourth >> (2 * i) & 0x03030303) << 6;
            }
        }
    }
    static void keep(const uint8_t* from, int lane, uint8_t* out) {
        store_superblock_scale(from + 208, out + 2 * lane);
        for (int group = 0; group < kSuperblock / 16; ++group) {
            out[(2 + group) * kPanel + lane] = from[192 + group] ^ 0x80;
        }
    }

    static float largest_scale(const uint8_t* from) {
        int largest = 0;
        for (int group = 0; group < kSuperblock / 16; ++group) {
            largest = std::max(largest, std::abs(static_cast<int>(static_cast<int8_t>(from[192 + group]))));
        }
        return std::fabs(half_to_float(load<uint16_t>(from + 208))) * static_cast<float>(largest);
    }
};

// Q3_K, 256 elements: third bits in 32 bytes (bit r of byte e is element e of run r, of 32 elements), two low bits in
// 64 bytes in the order of Q6_K's top bits, 16 scales of six bits, stored plus 32, and their float16 superblock scale.
struct Q3_K {
    static constexpr int32_t kKept = kWeightQ3K;
    static constexpr bool kHasMinima = false, kHasTable = false;
    static constexpr int kZero = 4, kBits = 3, kElements = 256, kBytes = 110, kSuperblockScaleAt = 108;

    static int scale(const uint8_t* from, int group) {
        const int low = group < 8 ? from[96 + group] & 15 : from[88 + group] >> 4;
        return low | (from[104 + group % 4] >> (group / 4 * 2) & 3) << 4;
    }

    static void read_scales(const uint8_t* row, int64_t block, int, float* scales, float*) {
        const uint8_t* from = row + block / 4 * kBytes;
        const float d = half_to_float(load<uint16_t>(from + kSuperblockScaleAt));
        for (int i = 0; i < kScales; ++i) {
            scales[i] = d * static_cast<float>(scale(from, static_cast<int>(block % 4) * 4 + i) - 32);
        }
    }

    static void read_codes(const uint8_t* row, int64_t block, int, const float*, uint8_t* codes) {
        const uint8_t* from = row + block / 4 * kBytes;
        for (int half = 0; half < 2; ++half) {
            const int run = static_cast<int>(block % 4) * 2 + half;
            const uint8_t* low = from + 32 + run / 4 * 32;
            for (int e = 0; e < 32; e += 8) {
                const uint64_t two = load<uint64_t>(low + e) >> (run % 4 * 2) & 0x0303030303030303;
                const uint64_t third = load<uint64_t>(from + e) >> run & 0x0101010101010101;
                const uint64_t eight = two | third << 2;
                std::memcpy(codes + 32 * half + e, &eight, 8);
            }
        }
    }

    // The layout FormatQ3K (superblock_layouts.h): numbers, then for each block four words of low bits and two of third
    // bits.
    static constexpr int kScalesAt = 96, kWordsAt = kQ3KWordsAt, kWords = 27, kGap = -1;
    static constexpr int kParts = 1, kPartBytes = 0;
    static void gather(const uint8_t* from, uint32_t* words) {
        int numbers[16];
        for (int group = 0; group < 16; ++group) numbers[group] = scale(from, group);
        store_six_bits(numbers, words, 1);
        words += 3;
        for (int block = 0; block < kBlocksPerSuperblock; ++block, words += 6) {
            uint32_t codes[kQBlock / 4];
            read_codes(from, block, kQBlock, nullptr, reinterpret_cast<uint8_t*>(codes));
            for (int i = 0; i < 6; ++i) words[i] = 0;
            for (int step = 0; step < kQBlock / 8; ++step) {
                // Eight codes as nibbles; then their low bits and their third bits go to the words that they share.
                const uint32_t eight = codes[2 * step] | codes[2 * step + 1] << 4;
                words[step / 2] |= (eight & 0x33333333) << (step % 2 * 2);
                words[4 + step / 4] |= (eight >> 2 & 0x11111111) << (step % 4);
            }
        }
    }
    static void keep(const uint8_t* from, int lane, uint8_t* out) {
        store_superblock_scale(from + kSuperblockScaleAt, out + 2 * lane);
    }

    static float largest_scale(const uint8_t* from) {
        int largest = 0;
        for (int group = 0; group < 16; ++group) largest = std::max(largest, std::abs(scale(from, group) - 32));
        return std::fabs(half_to_float(load<uint16_t>(from + kSuperblockScaleAt))) * static_cast<float>(largest);
    }
};

// Q2_K, 256 elements: 16 scales and 16 minima of four bits each, two bits of each element in the order of Q6_K's top
// bits, and the float16 superblock scales d and dmin. No other layout has minima by 16. So beside another format the
// values of each 16 elements are rounded to eight bits.
struct Q2_K {
    static constexpr int32_t kKept = kWeightQ2K;
    static constexpr bool kHasMinima = false, kHasTable = false;
    static constexpr int kZero = 128, kBits = 8, kElements = 256, kBytes = 84;

    // A group of 16 elements: the bytes that hold its codes, the first bit of a code in a byte, and the values of codes
    // 0 to 3.
    struct Group {
        const uint8_t* codes;
        int shift;
        float values[4];

        Group(const uint8_t* row, int64_t block, int i) {
            const uint8_t* from = row + block / 4 * kBytes;
            const int group = static_cast<int>(block % 4) * kScales + i, run = group / 2;
            codes = from + 16 + run / 4 * 32 + group % 2 * 16;
            shift = run % 4 * 2;
            const float scale = half_to_float(load<uint16_t>(from + 80)) * static_cast<float>(from[group] & 15);
            const float minimum = half_to_float(load<uint16_t>(from + 82)) * static_cast<float>(from[group] >> 4);
            for (int code = 0; code < 4; ++code) values[code] = scale * static_cast<float>(code) - minimum;
        }

        int code(int e) const { return codes[e] >> shift & 3; }
    };

    static void read_scales(const uint8_t* row, int64_t block, int, float* scales, float*) {
        for (int i = 0; i < kScales; ++i) {
            const Group group(row, block, i);
            bool is_there[4] = {};
            for (int e = 0; e < 16; ++e) is_there[group.code(e)] = true;
            float largest = 0;
            for (int code = 0; code < 4; ++code) {
                const float magnitude = std::fabs(group.values[code]);
                if (is_there[code] && !(magnitude <= largest)) largest = magnitude + 0 * largest;  // NaN stays NaN
            }
            scales[i] = largest / 127;
        }
    }

    // `scales` are those that were rounded to float16.
    static void read_codes(const uint8_t* row, int64_t block, int, const float* scales, uint8_t* codes) {
        for (int i = 0; i < kScales; ++i) {
            const Group group(row, block, i);
            uint8_t rounded[4];
            for (int code = 0; code < 4; ++code) {
                const float steps = group.values[code] / scales[i];
                const bool is_number = std::fabs(steps) <= 0x1p30f;
                rounded[code] = static_cast<uint8_t>(
                    kZero + (is_number ? std::clamp(static_cast<int>(std::lrintf(steps)), -127, 127) : 0));
            }
            for (int e = 0; e < 16; ++e) codes[16 * i + e] = rounded[group.code(e)];
        }
    }

    // The layout FormatQ2K (superblock_layouts.h): the bytes of scales and minima, then a word of codes for each 16
    // elements.
    static constexpr int kScalesAt = 0, kWordsAt = kQ2KWordsAt, kWords = 20, kGap = -1;
    static constexpr int kParts = 1, kPartBytes = 0;
    static void gather(const uint8_t* from, uint32_t* words) {
        std::memcpy(words, from, 16);
        words += 4;
        for (int group = 0; group < 16; ++group) {
            const uint8_t* bytes = from + 16 + group / 8 * 32 + group % 2 * 16;
            uint32_t word = 0;
            for (int four = 0; four < 4; ++four) {
                const uint32_t codes = load<uint32_t>(bytes + 4 * four) >> (group / 2 % 4 * 2) & 0x03030303;
                // Elements 0 to 3 go to bits 0 and 1 of each byte, 4 to 7 to bits 4 and 5, 8 to 11 to 2 and 3, 12 to 15
                // to 6 and 7.
                word |= codes << (four % 2 * 4 + four / 2 * 2);
            }
            words[group] = word;
        }
    }
    static void keep(const uint8_t* from, int lane, uint8_t* out) {
        store_superblock_scale(from + 80, out + 2 * lane);
        store_superblock_scale(from + 82, out + 2 * (kPanel + lane));
    }

    static float largest_scale(const uint8_t* from) {
        int scale = 0, minimum = 0;
        for (int group = 0; group < 16; ++group) {
            scale = std::max(scale, from[group] & 15);
            minimum = std::max(minimum, from[group] >> 4);
        }
        return std::max(std::fabs(half_to_float(load<uint16_t>(from + 80))) * static_cast<float>(scale),
                        std::fabs(half_to_float(load<uint16_t>(from + 82))) * static_cast<float>(minimum) / 128);
    }
};

// Codes that Python unpacked, of formats whose bytes are not read here. For 32 elements: the scales of both halves and
// the minimum (unused if there is none), as float32, then a byte for each code.
template <int kCodeBits, bool kMinimum, bool kTable = false>
struct Codes {
    static constexpr int32_t kKept = kNotKept;
    static constexpr bool kHasMinima = kMinimum, kHasTable = kTable;
    static constexpr int kZero = kMinimum ? 0 : 1 << kCodeBits >> 1, kBits = kCodeBits, kElements = 1;
    static constexpr int kHeader = 12, kBlock = kHeader + 32, kBytes = 1;

    static void read_scales(const uint8_t* row, int64_t block, int valid, float* scales, float* minima) {
        for (int i = 0; 32 * i < valid; ++i) {
            const uint8_t* from = row + (2 * block + i) * kBlock;
            scales[2 * i] = load<float>(from);
            scales[2 * i + 1] = load<float>(from + 4);
            if (kMinimum) minima[i] = load<float>(from + 8);
        }
    }

    static void read_codes(const uint8_t* row, int64_t block, int valid, const float*, uint8_t* codes) {
        for (int i = 0; 32 * i < valid; ++i) std::memcpy(codes + 32 * i, row + (2 * block + i) * kBlock + kHeader, 32);
    }
};

// Floats, quantized here. With 8 bits the scale of 32 elements is their largest magnitude over 127. With 4 bits it is
// the element of the largest magnitude over -8, so that this element has a code of its own. The scale is NaN if there
// is a NaN or an infinity, so that the output is NaN too.
template <class Element, int kCodeBits = 8>
struct Floats {
    static constexpr int32_t kKept = kNotKept;
    static constexpr bool kHasMinima = false, kHasTable = false;
    static constexpr int kZero = 1 << kCodeBits >> 1, kBits = kCodeBits, kElements = 1, kBytes = sizeof(Element);
    static constexpr int kHighest = kZero - 1, kLowest = kBits == 8 ? -kHighest : -kZero;

    static void read_scales(const uint8_t* row, int64_t block, int valid, float* scales, float*) {
        float values[kQBlock];
        read(row, block, valid, values);
        for (int i = 0; i < 2; ++i) {
            int32_t largest = 0;  // magnitudes compare as the integers that their bits are
            float lowest = 0;
            for (int e = 0; e < 32; ++e) {
                const int32_t magnitude = load<int32_t>(values + 32 * i + e) & 0x7fffffff;
                largest = magnitude > largest ? magnitude : largest;
                lowest = values[32 * i + e] < lowest ? values[32 * i + e] : lowest;
            }
            const bool finite = largest < 0x7f800000;
            const float highest = float_of(static_cast<uint32_t>(largest));
            const float scale = kBits == 8 ? highest / 127 : (lowest == -highest ? highest : -highest) / 8;
            scales[2 * i] = scales[2 * i + 1] = finite ? scale : float_of(0x7fc00000);
        }
    }

    // `scales` are those that were rounded to float16.
    static void read_codes(const uint8_t* row, int64_t block, int valid, const float* scales, uint8_t* codes) {
        float values[kQBlock];
        read(row, block, valid, values);
        for (int i = 0; i < 2; ++i) {
            const float scale = scales[2 * i];
            const float inverse = scale != 0 && std::fabs(scale) <= 0x1p127f ? 1 / scale : 0;
            // The sum rounds to an integer, found in the last bits of the float. Rounding a scale to float16 makes it
            // too small by less than half, so the integer is far from overflowing.
            constexpr float kRound = 0x1.8p23f;
            float sums[32];
            for (int e = 0; e < 32; ++e) sums[e] = values[32 * i + e] * inverse + kRound;
            int32_t steps[32];
            std::memcpy(steps, sums, sizeof(steps));
            for (int e = 0; e < 32; ++e) {
                const int32_t step = steps[e] - static_cast<int32_t>(bits_of(kRound));
                const int32_t below = step < kHighest ? step : kHighest;
                codes[32 * i + e] = static_cast<uint8_t>((below > kLowest ? below : kLowest) + kZero);
            }
        }
    }

  private:
    static void read(const uint8_t* row, int64_t block, int valid, float* values) {
        Element stored[kQBlock] = {};
        std::memcpy(stored, row + block * kQBlock * kBytes, static_cast<size_t>(valid) * kBytes);
        for (int e = 0; e < kQBlock; ++e) values[e] = stored[e].value();
    }
};

struct F32Element {
    float bits;
    float value() const { return bits; }
};

struct F16Element {
    uint16_t bits;
    float value() const { return half_to_float(bits); }
};

struct BF16Element {
    uint16_t bits;
    float value() const { return float_of(static_cast<uint32_t>(bits) << 16); }
};

}  // namespace
}  // namespace octavo
