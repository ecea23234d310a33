// The layouts whose blocks are unpacked (docs/kernels.md), most of them a file's superblocks of 256 elements, into
// blocks that products read. with_format chooses the layout of a matrix. In every format `inverse_factor` is 1 over the
// matrix's factor, `v` the vector of outputs within the panel, and `header` what a superblock has beside its codes.
// Included by int_dot.h only.
#pragma once

#include "int_layouts.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kBlocksPerSuperblock = kSuperblock / kQBlock;
// Blocks that are unpacked together for several tiles of rows: some 20 KB, which fit the first-level cache.
constexpr int64_t kUnpackedBlocks = 8;
static_assert(kUnpackedBlocks % kBlocksPerSuperblock == 0, "whole superblocks are unpacked");

// What formats of superblocks share that have a Header. F has
//   Header(super, v, inverse_factor)      what a superblock has beside its codes
//   kGroup                                elements of a scale
//   unpack_block<block>(header, super, v, unpacked)   unpacks one of the four blocks of a superblock into `unpacked`
//   code(super, at, v)                    element `at` of a superblock as its code, less the zero of products
//   element<group>(header, code)          an element of a group, given its code
template <class F>
struct Superblocks {
    // Unpacks `blocks` blocks from `block` on, whole superblocks, into `unpacked`.
    static inline BlocksView unpack_blocks(const char* panel, int64_t block, int64_t blocks, UnpackArgs unpack,
                                           char* unpacked) {
        for (int64_t b = 0; b < blocks; b += kBlocksPerSuperblock) {
            const char* super = panel + (block + b) * F::kBlockBytes;
            char* to = unpacked + b * F::kUnpackedBytes;
            for (int v = 0; v < kVecsPerPanel; ++v) {
                const typename F::Header header(super, v, unpack.inverse_factor);
                for_constants<kBlocksPerSuperblock>([&](auto i) {
                    F::template unpack_block<i.kValue>(header, super, v, to + i.kValue * F::kUnpackedBytes);
                });
            }
        }
        // Codes that are not unpacked are read as they lie.
        if (!F::kUnpacksCodes) return {panel + block * F::kBlockBytes, F::kBlockBytes, unpacked, F::kUnpackedBytes};
        return {unpacked, F::kUnpackedBytes, unpacked + F::UnpackedFormat::kCodeBytes, F::kUnpackedBytes};
    }

    static inline void column(const char* panel, int64_t k, UnpackArgs unpack, Vec* out) {
        const char* super = panel + k / kSuperblock * kBlocksPerSuperblock * F::kBlockBytes;
        const int at = static_cast<int>(k % kSuperblock);
        for (int v = 0; v < kVecsPerPanel; ++v) {
            const typename F::Header header(super, v, unpack.inverse_factor);
            const Vec code = F::code(super, at, v);
            with_constant<kSuperblock / F::kGroup>(
                at / F::kGroup + 1, [&](auto g) { out[v] = F::template element<g.kValue - 1>(header, code); });
        }
    }
};

// Returns the fourth of four six-bit numbers, byte by byte. The low six bits of a, b and c are the first three numbers;
// their high two bits are the fourth's.
inline Ints fourth_of_six_bits(Ints a, Ints b, Ints c) {
    // Bits 6 and 7 of a become bits 0 and 1.
    const Ints low = and_ints(shift_right<6>(a), set1_int(0x03030303));
    // Bits 6 and 7 of b become bits 2 and 3.
    const Ints middle = and_ints(shift_right<4>(b), set1_int(0x0c0c0c0c));
    // Bits 6 and 7 of c become bits 4 and 5.
    return or_ints(or_ints(low, middle), and_ints(shift_right<2>(c), set1_int(0x30303030)));
}

// Sixteen numbers of six bits for each output of a vector, in three words that lie `stride` bytes apart. Each word has
// five numbers, from its low bits on. The sixteenth number is in the high two bits of all three words.
struct SixBits {
    Ints words[3];

    SixBits(const char* first, int64_t stride) {
        for (int i = 0; i < 3; ++i) words[i] = load_ints(first + i * stride);
    }

    template <int number>
    inline Vec at() const {
        if constexpr (number == 15) {
            // Bits 30 and 31 of word 0 become bits 0 and 1, of word 1 bits 2 and 3, of word 2 bits 4 and 5.
            const Ints low = or_ints(shift_right<30>(words[0]), and_ints(shift_right<28>(words[1]), set1_int(12)));
            return to_float(or_ints(low, and_ints(shift_right<26>(words[2]), set1_int(48))));
        } else {
            // Word number / 5, six bits from bit 6 * (number % 5) on.
            return to_float(and_ints(shift_right<number % 5 * 6>(words[number / 5]), set1_int(63)));
        }
    }
};

// What a superblock of Q4_K and Q5_K has beside its codes, for a vector of outputs. After the codes of each block come
// 128 bytes: the float16 superblock scales d (of scales) and dmin (of minima) after the first, a word of numbers after
// each other one. The numbers are eight scales and then eight minima. d and dmin are divided by the matrix's factor;
// dmin is negated, as GGUF subtracts minima.
template <int kCodeBytes>
struct ScalesAndMinima {
    static constexpr int kBlockBytes = kCodeBytes + kPanel * 4;
    Vec d, dmin;
    SixBits numbers;

    ScalesAndMinima(const char* super, int v, float inverse_factor)
        : numbers(super + kBlockBytes + kCodeBytes + v * kLanes * 4, kBlockBytes) {
        const uint16_t* superblock_scales = reinterpret_cast<const uint16_t*>(super + kCodeBytes) + v * kLanes;
        d = mul(load_half(superblock_scales), set1(inverse_factor));
        dmin = mul(load_half(superblock_scales + kPanel), set1(-inverse_factor));
    }

    // Returns the scale of a group, not rounded yet.
    template <int group>
    inline Vec scale() const {
        return mul(d, numbers.at<group>());
    }
};

// Q4_K: a superblock is four blocks, each with its codes and 128 bytes of scales and minima. Unpacking writes scales
// and minima only: codes are read as they lie.
struct FormatQ4K : Superblocks<FormatQ4K> {
    using UnpackedFormat = IntFormat<4, 32, 32, float>;
    static constexpr int kGroup = 32;
    static constexpr bool kUnpacksCodes = false;
    static constexpr int kBlockBytes = UnpackedFormat::kCodeBytes + kPanel * 4;
    static constexpr int kUnpackedBytes = UnpackedFormat::kScaleBytes + UnpackedFormat::kMinimaBytes;

    struct Header : ScalesAndMinima<UnpackedFormat::kCodeBytes> {
        using ScalesAndMinima::ScalesAndMinima;

        // Returns the scale of a group, rounded to float16. Sets its minimum, not rounded yet. GGUF's codes begin at 0,
        // products subtract a zero of 8: the minimum makes up for it with 8 exact scales.
        template <int group>
        inline Vec scale(Vec& minimum) const {
            const Vec exact = ScalesAndMinima::scale<group>();
            minimum = fma(dmin, numbers.at<8 + group>(), mul(exact, set1(8)));
            return round_to_half(exact);
        }
    };

    template <int block>
    static inline void unpack_block(const Header& header, const char*, int v, char* to) {
        Vec minima[2];
        float* scales = reinterpret_cast<float*>(to) + v * kLanes;
        store(scales, header.scale<2 * block>(minima[0]));
        store(scales + kPanel, header.scale<2 * block + 1>(minima[1]));
        store_ints(to + UnpackedFormat::kScaleBytes + v * kLanes * 4, as_ints(round_to_pairs(minima[0], minima[1])));
    }

    static inline Vec code(const char* super, int at, int v) {
        const char* codes = super + at / kQBlock * kBlockBytes + at % kQBlock / 8 * kPanel * 4;
        return to_float(code_at<4>(load_ints(codes + v * kLanes * 4), at % 4 * 8 + at / 4 % 2 * 4));
    }

    template <int group>
    static inline Vec element(const Header& header, Vec code) {
        Vec minimum;
        const Vec scale = header.template scale<group>(minimum);
        return add(mul(scale, code), one_of_pairs(round_to_pairs(minimum, minimum), 0));
    }
};

// Q5_K: as Q4_K, but after the nibbles of a block come the fifth bits, a word for each 32 elements. Bit j of its byte i
// belongs to element 4j + i.
struct FormatQ5K : Superblocks<FormatQ5K> {
    using UnpackedFormat = IntFormat<8, 32, 32, float>;
    static constexpr int kGroup = 32;
    static constexpr bool kUnpacksCodes = true;
    static constexpr int kNibbleBytes = kPanel * kQBlock / 2;
    static constexpr int kCodeBytes = kNibbleBytes + kPanel * kQBlock / 8;
    static constexpr int kBlockBytes = kCodeBytes + kPanel * 4;
    static constexpr int kUnpackedBytes = UnpackedFormat::kBlockBytes;

    struct Header : ScalesAndMinima<kCodeBytes> {
        using ScalesAndMinima::ScalesAndMinima;

        // Returns the scale of a group, rounded to float16. `less` is subtracted from its codes, a whole number chosen
        // so that hardly any minimum remains; `minimum` is the remainder, not rounded yet. Codes have room for a `less`
        // of -96 to 128. The packer does the same (pack_int.cpp).
        template <int group>
        inline Vec scale(Vec& less, Vec& minimum) const {
            const Vec exact = ScalesAndMinima::scale<group>();
            const Vec below = mul(dmin, numbers.at<8 + group>());
            // How many scales the minimum is; adding 1.5 * 2^23 and subtracting it rounds to a whole number.
            const Vec steps = div(sub(zero(), below), exact), magic = set1(0x1.8p23f);
            const Vec whole = sub(add(min(max(steps, set1(-96)), set1(128)), magic), magic);
            // 0 where the quotient is huge or NaN, as it is for a scale of zero.
            less = select_greater(set1(0x1p30f), max(steps, sub(zero(), steps)), whole, zero());
            minimum = add(below, mul(less, exact));
            return round_to_half(exact);
        }
    };

    // Moves bit `bit` of every byte to bit 4 of that byte, where it counts 16.
    template <int bit>
    static inline Ints fifth_bits(Ints word) {
        const Ints ones = set1_int(0x10101010);
        if constexpr (bit < 4) {
            return and_ints(shift_left<4 - bit>(word), ones);
        } else {
            return and_ints(shift_right<bit - 4>(word), ones);
        }
    }

    // Unpacks eight elements of k of a vector of outputs: a vector of nibbles becomes two vectors of bytes.
    template <int step>
    static inline void unpack_step(const char* nibbles, Ints fifth, Ints more, char* to) {
        const Ints both = load_ints(nibbles + step * kPanel * 4);
        // Low nibbles are elements 8 * step + i: fifth bit 2 * step. High nibbles are four elements further: the next
        // bit.
        // A byte holds at most 15 + 16 + 224, so additions of lanes carry nothing from byte to byte.
        store_ints(to + 2 * step * kPanel * 4, add_ints(or_ints(low_nibbles(both), fifth_bits<2 * step>(fifth)), more));
        store_ints(to + (2 * step + 1) * kPanel * 4,
                   add_ints(or_ints(high_nibbles(both), fifth_bits<2 * step + 1>(fifth)), more));
    }

    // Unpacks the codes and the scale of a group: codes become those of the flat format, whose zero is 128. Returns the
    // minimum of the group.
    template <int group>
    static inline Vec unpack_group(const Header& header, const char* block, int v, char* to) {
        constexpr int half = group % 2;
        Vec less, minimum;
        store(reinterpret_cast<float*>(to + UnpackedFormat::kCodeBytes) + half * kPanel + v * kLanes,
              header.template scale<group>(less, minimum));
        const Ints more = in_all_bytes(sub(set1(128), less));
        // The group is one word of fifth bits, four vectors of nibbles and eight of the bytes that they become.
        const Ints fifth = load_ints(block + kNibbleBytes + (half * kPanel + v * kLanes) * 4);
        const char* nibbles = block + (4 * half * kPanel + v * kLanes) * 4;
        char* codes = to + (8 * half * kPanel + v * kLanes) * 4;
        for_constants<4>([&](auto step) { unpack_step<step.kValue>(nibbles, fifth, more, codes); });
        return minimum;
    }

    template <int block>
    static inline void unpack_block(const Header& header, const char* super, int v, char* to) {
        const char* from = super + block * kBlockBytes;
        const Vec first = unpack_group<2 * block>(header, from, v, to);
        const Vec second = unpack_group<2 * block + 1>(header, from, v, to);
        store_ints(to + UnpackedFormat::kCodeBytes + UnpackedFormat::kScaleBytes + v * kLanes * 4,
                   as_ints(round_to_pairs(first, second)));
    }

    static inline Vec code(const char* super, int k, int v) {
        const char* block = super + k / kQBlock * kBlockBytes;
        const int at = k % kQBlock, byte = at % 4 * 8;
        const Ints nibbles = load_ints(block + (at / 8 * kPanel + v * kLanes) * 4);
        const Ints word = load_ints(block + kNibbleBytes + (at / 32 * kPanel + v * kLanes) * 4);
        // code_at returns the nibble less 8 and the fifth bit less 1: 16 (bit - 1) + (nibble - 8) + 24 is the code.
        const Vec low = to_float(code_at<4>(nibbles, byte + at / 4 % 2 * 4));
        const Vec fifth = to_float(code_at<1>(word, byte + at % 32 / 4));
        return fma(fifth, set1(16), add(low, set1(24)));
    }

    template <int group>
    static inline Vec element(const Header& header, Vec code) {
        Vec less, minimum;
        const Vec scale = header.template scale<group>(less, minimum);
        return add(mul(scale, sub(code, less)), one_of_pairs(round_to_pairs(minimum, minimum), 0));
    }
};

// Q3_K: a superblock begins with the float16 superblock scale and with sixteen scales of six bits, stored plus 32.
// The codes of its four blocks follow. Think of a block's codes as eight vectors of nibbles, as codes of four bits lie.
// Each of the first four words [4][32] has the two low bits of vectors 2i and 2i + 1, in bits 0 to 1 and 2 to 3 of each
// nibble. Each of the last two words [2][32] has the third bits of four vectors, in bits 0 to 3 of each nibble.
struct FormatQ3K : Superblocks<FormatQ3K> {
    using UnpackedFormat = IntFormat<4, 16, 0, float>;
    static constexpr int kGroup = 16;
    static constexpr bool kUnpacksCodes = true;
    static constexpr int kSuperblockScaleBytes = kPanel * 2;
    static constexpr int kHeaderBytes = kSuperblockScaleBytes + 3 * kPanel * 4;
    static constexpr int kLowBytes = kPanel * kQBlock / 4;
    static constexpr int kCodeBytes = kLowBytes + kPanel * kQBlock / 8;
    static constexpr int kSuperBytes = kHeaderBytes + kBlocksPerSuperblock * kCodeBytes;
    static constexpr int kBlockBytes = kSuperBytes / kBlocksPerSuperblock;
    static constexpr int kUnpackedBytes = UnpackedFormat::kBlockBytes;

    struct Header {
        Vec d;
        SixBits numbers;

        Header(const char* super, int v, float inverse_factor)
            : d(mul(load_half(reinterpret_cast<const uint16_t*>(super) + v * kLanes), set1(inverse_factor))),
              numbers(super + kSuperblockScaleBytes + v * kLanes * 4, kPanel * 4) {}

        template <int group>
        inline Vec scale() const {
            return round_to_half(mul(d, sub(numbers.at<group>(), set1(32))));
        }
    };

    // Unpacks vector `step` of a block's nibbles: eight elements of k.
    template <int step>
    static inline void unpack_step(const Ints* low, const Ints* high, char* to) {
        // The two low bits of every nibble.
        const Ints two = and_ints(shift_right<step % 2 * 2>(low[step / 2]), set1_int(0x33333333));
        // Bit step % 4 of every nibble moves to bit 2 of it.
        const Ints third =
            step % 4 < 2 ? shift_left<2 - step % 4 % 2>(high[step / 4]) : shift_right<step % 4 % 2>(high[step / 4]);
        // Plus four: GGUF's zero is 4, that of the flat format 8. The sum is at most 11, so no nibble overflows.
        const Ints four = set1_int(0x44444444);
        store_ints(to + step * kPanel * 4, add_ints(or_ints(two, and_ints(third, four)), four));
    }

    template <int block>
    static inline void unpack_block(const Header& header, const char* super, int v, char* to) {
        const char* from = super + kHeaderBytes + block * kCodeBytes + v * kLanes * 4;
        Ints low[4], high[2];
        for (int i = 0; i < 4; ++i) low[i] = load_ints(from + i * kPanel * 4);
        for (int i = 0; i < 2; ++i) high[i] = load_ints(from + kLowBytes + i * kPanel * 4);
        char* codes = to + v * kLanes * 4;
        for_constants<8>([&](auto step) { unpack_step<step.kValue>(low, high, codes); });
        float* scales = reinterpret_cast<float*>(to + UnpackedFormat::kCodeBytes) + v * kLanes;
        for_constants<4>(
            [&](auto g) { store(scales + g.kValue * kPanel, header.template scale<4 * block + g.kValue>()); });
    }

    static inline Vec code(const char* super, int k, int v) {
        const int at = k % kQBlock, step = at / 8, place = at % 4 * 8 + at / 4 % 2 * 4;
        const char* codes = super + kHeaderBytes + k / kQBlock * kCodeBytes;
        const Ints low = load_ints(codes + (step / 2 * kPanel + v * kLanes) * 4);
        const Ints high = load_ints(codes + kLowBytes + (step / 4 * kPanel + v * kLanes) * 4);
        // code_at returns the low bits less 2 and the third bit less 1: 4 (bit - 1) + (low - 2) + 2 is the code less
        // its zero of 4.
        const Vec two = to_float(code_at<2>(low, place + step % 2 * 2));
        const Vec third = to_float(code_at<1>(high, place + step % 4));
        return fma(third, set1(4), add(two, set1(2)));
    }

    template <int group>
    static inline Vec element(const Header& header, Vec code) {
        return mul(header.template scale<group>(), code);
    }
};

// Q2_K: a superblock begins with the float16 superblock scales d and dmin and with sixteen bytes, whose low halves are
// scales and whose high halves are minima, one for each 16 elements. Words of codes follow, one for each 16 elements.
// Think of the first eight elements as nibbles, as codes of four bits lie: they are in the low two bits of each nibble.
// The other eight elements are in its high two bits. No scale and no minimum is rounded.
struct FormatQ2K : Superblocks<FormatQ2K> {
    using UnpackedFormat = IntFormat<4, 16, 16, float>;
    static constexpr int kGroup = 16;
    static constexpr bool kUnpacksCodes = true;
    static constexpr int kSuperblockScaleBytes = 2 * kPanel * 2;
    static constexpr int kHeaderBytes = kSuperblockScaleBytes + 4 * kPanel * 4;
    static constexpr int kCodeBytes = kPanel * kQBlock / 4;
    static constexpr int kSuperBytes = kHeaderBytes + kBlocksPerSuperblock * kCodeBytes;
    static constexpr int kBlockBytes = kSuperBytes / kBlocksPerSuperblock;
    static constexpr int kUnpackedBytes = UnpackedFormat::kBlockBytes;
    static constexpr float kZeroPointTermOfOne = -128;  // zero_point_terms_z128_by_16 of QBlock / sum of 16 elements

    struct Header {
        Vec d, dmin;
        const char* numbers;

        Header(const char* super, int v, float inverse_factor)
            : numbers(super + kSuperblockScaleBytes + v * kLanes * 4) {
            const uint16_t* superblock_scales = reinterpret_cast<const uint16_t*>(super) + v * kLanes;
            d = mul(load_half(superblock_scales), set1(inverse_factor));
            // Minima are divided by -128, because products multiply them with zero_point_terms_z128_by_16, which are
            // -128 times the sums of the row's elements.
            dmin = mul(load_half(superblock_scales + kPanel), set1(-inverse_factor / kZeroPointTermOfOne));
        }

        // Returns the scale of a group. Sets `minimum` to the number that multiplies the group's zero-point term.
        template <int group>
        inline Vec scale(Vec& minimum) const {
            // A word has the bytes of four groups: of each the low half is the scale, the high half the minimum.
            const Ints four = load_ints(numbers + group / 4 * kPanel * 4), ones = set1_int(15);
            minimum = mul(dmin, to_float(and_ints(shift_right<group % 4 * 8 + 4>(four), ones)));
            return mul(d, to_float(and_ints(shift_right<group % 4 * 8>(four), ones)));
        }
    };

    template <int group>
    static inline void unpack_group(const Header& header, const char* codes, int v, char* to) {
        constexpr int at = group % UnpackedFormat::kGroupsPerBlock;
        const Ints word = load_ints(codes + (at * kPanel + v * kLanes) * 4);
        // Plus eight: GGUF's zero is 0, that of the flat format 8. Bit 3 of every nibble is free, so `or` adds. The
        // first vector has elements 0 to 7 of the group, the second 8 to 15.
        const Ints twos = set1_int(0x33333333), eights = set1_int(static_cast<int32_t>(0x88888888u));
        char* out = to + (2 * at * kPanel + v * kLanes) * 4;
        store_ints(out, or_ints(and_ints(word, twos), eights));
        store_ints(out + kPanel * 4, or_ints(and_ints(shift_right<2>(word), twos), eights));
        Vec minimum;
        float* scales = reinterpret_cast<float*>(to + UnpackedFormat::kCodeBytes) + at * kPanel + v * kLanes;
        store(scales, header.template scale<group>(minimum));
        store(scales + UnpackedFormat::kGroupsPerBlock * kPanel, minimum);
    }

    template <int block>
    static inline void unpack_block(const Header& header, const char* super, int v, char* to) {
        const char* codes = super + kHeaderBytes + block * kCodeBytes;
        for_constants<4>([&](auto g) { unpack_group<4 * block + g.kValue>(header, codes, v, to); });
    }

    static inline Vec code(const char* super, int at, int v) {
        const char* codes = super + kHeaderBytes + at / 16 * kPanel * 4;
        // Element `at` is in byte at % 4, in half at / 4 % 2 of the byte, in pair at / 8 % 2 of the half. code_at
        // returns the code less 2.
        const int shift = at % 4 * 8 + at / 4 % 2 * 4 + at / 8 % 2 * 2;
        return add(to_float(code_at<2>(load_ints(codes + v * kLanes * 4), shift)), set1(2));
    }

    template <int group>
    static inline Vec element(const Header& header, Vec code) {
        Vec minimum;
        const Vec scale = header.template scale<group>(minimum);
        return fma(scale, code, mul(minimum, set1(kZeroPointTermOfOne)));
    }
};

// Q6_K: a superblock begins with the float16 superblock scale and with 16 scales of eight bits, stored plus 128. The
// codes of its four blocks follow, three vectors of bytes for each 16 elements. The low six bits of vector s are
// elements 4s + i; the high two bits of all three are elements 12 + i (fourth_of_six_bits).
struct FormatQ6K {
    using UnpackedFormat = IntFormat<6, 16, 0, float>;
    static constexpr int kHeaderBytes = kPanel * (2 + kSuperblock / 16);
    static constexpr int kCodeBytes = kPanel * kQBlock * 6 / 8;
    static constexpr int kSuperBytes = kHeaderBytes + kBlocksPerSuperblock * kCodeBytes;
    static constexpr int kBlockBytes = kSuperBytes / kBlocksPerSuperblock;
    static constexpr int kUnpackedBytes = UnpackedFormat::kBlockBytes;

    static inline Vec scale(const char* super, int group, int v, Vec d) {
        const uint8_t* scales = reinterpret_cast<const uint8_t*>(super) + kPanel * (2 + group) + v * kLanes;
        return round_to_half(mul(d, to_float(add_ints(load_bytes(scales), set1_int(-128)))));
    }

    static inline Vec superblock_scale(const char* super, int v, float inverse_factor) {
        return mul(load_half(reinterpret_cast<const uint16_t*>(super) + v * kLanes), set1(inverse_factor));
    }

    static inline BlocksView unpack_blocks(const char* panel, int64_t block, int64_t blocks, UnpackArgs unpack,
                                           char* unpacked) {
        const Ints six = set1_int(0x3f3f3f3f);
        const char* super = panel + block * kBlockBytes;
        const BlocksView view = {unpacked, kUnpackedBytes, unpacked + UnpackedFormat::kCodeBytes, kUnpackedBytes};
        for (int64_t b = 0; b < blocks; b += kBlocksPerSuperblock, super += kSuperBytes) {
            const char* from = super + kHeaderBytes;
            for (int i = 0; i < kBlocksPerSuperblock; ++i) {
                char* to = unpacked + (b + i) * kUnpackedBytes;
                for (int step = 0; step < kQBlock / 16; ++step, from += 3 * kPanel * 4) {
                    for (int v = 0; v < kVecsPerPanel; ++v) {
                        Ints three[3];
                        for (int s = 0; s < 3; ++s) three[s] = load_ints(from + (s * kPanel + v * kLanes) * 4);
                        char* out = to + (4 * step * kPanel + v * kLanes) * 4;
                        for (int s = 0; s < 3; ++s) store_ints(out + s * kPanel * 4, and_ints(three[s], six));
                        store_ints(out + 3 * kPanel * 4, fourth_of_six_bits(three[0], three[1], three[2]));
                    }
                }
                float* scales = reinterpret_cast<float*>(to + UnpackedFormat::kCodeBytes);
                for (int v = 0; v < kVecsPerPanel; ++v) {
                    const Vec d = superblock_scale(super, v, unpack.inverse_factor);
                    for (int g = 0; g < UnpackedFormat::kGroupsPerBlock; ++g) {
                        store(scales + g * kPanel + v * kLanes,
                              scale(super, i * UnpackedFormat::kGroupsPerBlock + g, v, d));
                    }
                }
            }
        }
        return view;
    }

    static inline void column(const char* panel, int64_t k, UnpackArgs unpack, Vec* out) {
        const char* super = panel + k / kSuperblock * kSuperBytes;
        const int at = static_cast<int>(k % kSuperblock), step = at % 16 / 4, shift = at % 4 * 8;
        const char* codes = super + kHeaderBytes + at / 16 * 3 * kPanel * 4;
        for (int v = 0; v < kVecsPerPanel; ++v) {
            Ints three[3];
            for (int s = 0; s < 3; ++s) three[s] = load_ints(codes + (s * kPanel + v * kLanes) * 4);
            const Ints lane = step < 3 ? three[step] : fourth_of_six_bits(three[0], three[1], three[2]);
            const Vec code = to_float(code_at<6>(lane, shift));
            out[v] = mul(scale(super, at / 16, v, superblock_scale(super, v, unpack.inverse_factor)), code);
        }
    }
};

// The layouts whose codes are indices into the matrix's table and whose scales take a byte and less: after the codes of
// each block come 64 bytes, [2][32]. Unpacking writes scales only. F::scale returns the scale of a group of the
// F::kUnpackedTogether blocks from `block` on, for vector v of outputs.
template <class F>
struct TableAndBytes {
    using UnpackedFormat = IntFormat<4, 32, 0, float, true>;
    static constexpr int kBlockBytes = UnpackedFormat::kCodeBytes + kPanel * 2;
    static constexpr int kUnpackedBytes = UnpackedFormat::kScaleBytes;

    // Returns where a block's bytes begin.
    static inline const uint8_t* after_codes(const char* panel, int64_t block) {
        return reinterpret_cast<const uint8_t*>(panel + block * kBlockBytes + UnpackedFormat::kCodeBytes);
    }

    // Returns byte i (0 or 1) of block `block`, for vector v of outputs.
    static inline Ints bytes(const char* panel, int64_t block, int i, int v) {
        return load_bytes(after_codes(panel, block) + i * kPanel + v * kLanes);
    }

    static inline BlocksView unpack_blocks(const char* panel, int64_t block, int64_t blocks, UnpackArgs unpack,
                                           char* unpacked) {
        constexpr int kGroups = 2 * F::kUnpackedTogether;
        float* scales = reinterpret_cast<float*>(unpacked);
        for (int64_t b = block; b < block + blocks; b += F::kUnpackedTogether, scales += kGroups * kPanel) {
            for (int v = 0; v < kVecsPerPanel; ++v) {
                Vec of_groups[kGroups];
                for_constants<kGroups>([&](auto group) {
                    of_groups[group.kValue] = F::scale(panel, b, group.kValue, v, unpack.inverse_factor);
                });
                for (int g = 0; g < kGroups; ++g) store(scales + g * kPanel + v * kLanes, of_groups[g]);
            }
        }
        return {panel + block * kBlockBytes, kBlockBytes, unpacked, kUnpackedBytes, unpack.table};
    }

    static inline void column(const char* panel, int64_t k, UnpackArgs unpack, Vec* out) {
        const int64_t block = k / kQBlock, first = block / F::kUnpackedTogether * F::kUnpackedTogether;
        const int at = static_cast<int>(k % kQBlock), group = static_cast<int>(block - first) * 2 + at / 32;
        for (int v = 0; v < kVecsPerPanel; ++v) {
            out[v] = mul(F::scale(panel, first, group, v, unpack.inverse_factor),
                         UnpackedFormat::centred_codes_at(panel + block * kBlockBytes, at, v, unpack));
        }
    }
};

// Scales that are powers of two: a byte is the exponent, as a float32 has it, and is divided by the factor already.
struct FormatPowers : TableAndBytes<FormatPowers> {
    static constexpr int kUnpackedTogether = 1;

    static inline Vec scale(const char* panel, int64_t block, int group, int v, float) {
        return bits_of<Vec>(shift_left<23>(bytes(panel, block, group, v)));
    }
};

// IQ4_XS: the first block of a superblock has the float16 superblock scales. Of the eight scales, of six bits and
// stored plus 32, the second block has the high two bits, four a byte, and the last two blocks have the low four bits,
// two a byte, all from the low bits on.
struct FormatIQ4XS : TableAndBytes<FormatIQ4XS> {
    static constexpr int kUnpackedTogether = kBlocksPerSuperblock;

    static inline Vec scale(const char* panel, int64_t block, int group, int v, float inverse_factor) {
        const auto* superblock_scales = reinterpret_cast<const uint16_t*>(after_codes(panel, block));
        const Vec d = mul(load_half(superblock_scales + v * kLanes), set1(inverse_factor));
        // code_at has subtracted 2 from the high bits and 8 from the low: 16 * 2 + 8 - 32 is to be added.
        const Ints high = code_at<2>(bytes(panel, block + 1, group / 4, v), group % 4 * 2);
        const Ints low = code_at<4>(bytes(panel, block + 2 + group / 4, group / 2 % 2, v), group % 2 * 4);
        return round_to_half(mul(d, to_float(add_ints(add_ints(low, shift_left<4>(high)), set1_int(8)))));
    }
};

// Calls f with the format of an integer matrix, as a value of its type.
template <class Function>
inline void with_format(const Matrix& m, Function f) {
    if (m.format == kWeightQ4K) {
        f(FormatQ4K{});
    } else if (m.format == kWeightQ6K) {
        f(FormatQ6K{});
    } else if (m.format == kWeightQ5K) {
        f(FormatQ5K{});
    } else if (m.format == kWeightQ3K) {
        f(FormatQ3K{});
    } else if (m.format == kWeightQ2K) {
        f(FormatQ2K{});
    } else if (m.format == kWeightIQ4XS) {
        f(FormatIQ4XS{});
    } else if (m.format == kWeightPowers) {
        f(FormatPowers{});
    } else if (m.format == kWeightTable) {
        m.group == 32 ? f(IntFormat<4, 32, 0, uint16_t, true>{}) : f(IntFormat<4, 16, 0, uint16_t, true>{});
    } else if (m.format == kWeightInt4) {
        m.minima ? f(IntFormat<4, 32, 32>{}) : f(IntFormat<4, 32, 0>{});
    } else if (m.group == 32) {
        m.minima ? f(IntFormat<8, 32, 32>{}) : f(IntFormat<8, 32, 0>{});
    } else {
        m.minima ? f(IntFormat<8, 16, 32>{}) : f(IntFormat<8, 16, 0>{});
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
