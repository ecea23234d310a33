// The packed layouts of integer weights (docs/kernels.md), and how products see them: as blocks of codes, scales and
// minima. Layouts that keep the scales of a file's superblocks are opened, some blocks at a time, into a buffer that
// stays in the cache; others are seen as they lie. Included by linear_int.h only.
#pragma once

#include "functions.h"

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

// Blocks of codes, then scales (float16, or float32 where they were opened), then minima.
template <int bits, int group, bool minima, class ScaleType = uint16_t>
struct IntFormat {
    using Flat = IntFormat;
    using Scale = ScaleType;
    static constexpr int kBits = bits;
    static constexpr int kGroup = group;
    static constexpr bool kMinima = minima;
    static constexpr int kGroups = kQBlock / group;
    static constexpr int kCodeBytes = kPanel * kQBlock * bits / 8;
    static constexpr int kScaleBytes = kPanel * kGroups * static_cast<int>(sizeof(Scale));
    static constexpr int kMinimumBytes = minima ? kPanel * 4 : 0;
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
            if constexpr (minima) {
                out[v] = add(out[v], one_of_pairs(load_pairs(added + v * kLanes * 2), at / 32));
            }
        }
    }
};

constexpr int kBlocksOfSuper = kSuperblock / kQBlock;

// The fourth of six-bit numbers of which three stand in the low bits of bytes: its bits are their high ones.
inline Ints fourth_of_six_bits(Ints a, Ints b, Ints c) {
    const Ints low = and_ints(shift_right<6>(a), set1_int(0x03030303));
    const Ints middle = and_ints(shift_right<4>(b), set1_int(0x0c0c0c0c));
    return or_ints(or_ints(low, middle), and_ints(shift_right<2>(c), set1_int(0x30303030)));
}

// Q4_K: four blocks are 256 elements. Each has its codes and 128 bytes: those of the first are the float16 units of
// scales and of minima, those of the others three words of 32 bits for each output, which are eight scales and then
// eight minima of six bits: five numbers a word from its low bits on, and the last in the high bits of all three.
struct FormatQ4K {
    using Flat = IntFormat<4, 32, true, float>;
    static constexpr int kBits = 4;
    static constexpr int kBlockBytes = Flat::kCodeBytes + kPanel * 4;
    static constexpr int kOpenedBytes = Flat::kScaleBytes + Flat::kMinimumBytes;

    // What a superblock has beside its codes, of a vector of outputs; units over the factor.
    struct Header {
        Vec unit, minimum_unit;
        Ints words[3];

        Header(const char* super, int v, float inverse) {
            const uint16_t* units = reinterpret_cast<const uint16_t*>(super + Flat::kCodeBytes) + v * kLanes;
            unit = mul(load_half(units), set1(inverse));
            minimum_unit = mul(load_half(units + kPanel), set1(-inverse));
            for (int i = 0; i < 3; ++i) {
                words[i] = load_ints(super + (i + 1) * kBlockBytes + Flat::kCodeBytes + v * kLanes * 4);
            }
        }

        template <int number>
        inline Vec six_bits() const {
            if constexpr (number == 15) {
                const Ints low = or_ints(shift_right<30>(words[0]), and_ints(shift_right<28>(words[1]), set1_int(12)));
                return to_float(or_ints(low, and_ints(shift_right<26>(words[2]), set1_int(48))));
            } else {
                return to_float(and_ints(shift_right<number % 5 * 6>(words[number / 5]), set1_int(63)));
            }
        }

        // The scale of a group, rounded to float16, and its minimum for codes whose zero is 8, not rounded yet.
        template <int group>
        inline Vec scale(Vec& minimum) const {
            const Vec exact = mul(unit, six_bits<group>());
            minimum = fma(minimum_unit, six_bits<8 + group>(), mul(exact, set1(8)));
            return round_to_half(exact);
        }
    };

    template <int block>
    static inline void open_block(const Header& header, int v, char* to) {
        Vec minima[2];
        float* scales = reinterpret_cast<float*>(to) + v * kLanes;
        store(scales, header.scale<2 * block>(minima[0]));
        store(scales + kPanel, header.scale<2 * block + 1>(minima[1]));
        store_ints(to + Flat::kScaleBytes + v * kLanes * 4, as_ints(round_to_pairs(minima[0], minima[1])));
    }

    static inline IntView open(const char* panel, int64_t block, int64_t blocks, float inverse, char* opened) {
        const char* super = panel + block * kBlockBytes;
        const IntView view = {super, kBlockBytes, opened, kOpenedBytes};
        for (int64_t b = 0; b < blocks; b += kBlocksOfSuper, super += kBlocksOfSuper * kBlockBytes) {
            for (int v = 0; v < kVecsPerPanel; ++v) {
                const Header header(super, v, inverse);
                open_block<0>(header, v, opened + b * kOpenedBytes);
                open_block<1>(header, v, opened + (b + 1) * kOpenedBytes);
                open_block<2>(header, v, opened + (b + 2) * kOpenedBytes);
                open_block<3>(header, v, opened + (b + 3) * kOpenedBytes);
            }
        }
        return view;
    }

    static inline void column(const char* panel, int64_t k, float inverse, Vec* out) {
        const char* super = panel + k / kSuperblock * kBlocksOfSuper * kBlockBytes;
        const int at = static_cast<int>(k % kQBlock);
        const char* codes = panel + k / kQBlock * kBlockBytes + at / 8 * kPanel * 4;
        const int group = static_cast<int>(k % kSuperblock / 32), shift = at % 4 * 8 + at / 4 % 2 * 4;
        for (int v = 0; v < kVecsPerPanel; ++v) {
            const Header header(super, v, inverse);
            const Vec code = to_float(code_at<4>(load_ints(codes + v * kLanes * 4), shift));
            with_constant<8>(group + 1, [&](auto g) {
                Vec minimum;
                const Vec scale = header.template scale<decltype(g)::kValue - 1>(minimum);
                out[v] = add(mul(scale, code), one_of_pairs(round_to_pairs(minimum, minimum), 0));
            });
        }
    }
};

// Q6_K: 256 elements are the float16 units of their scales, 16 scales of eight bits (128 more than they stand for), and
// codes of which sixteen neighbours are three vectors of lanes of four, and the fourth in their high bits.
struct FormatQ6K {
    using Flat = IntFormat<8, 16, false, float>;
    static constexpr int kBits = 6;
    static constexpr int kHeaderBytes = kPanel * (2 + kSuperblock / 16);
    static constexpr int kCodeBytes = kPanel * kQBlock * 6 / 8;
    static constexpr int kSuperBytes = kHeaderBytes + kBlocksOfSuper * kCodeBytes;
    static constexpr int kBlockBytes = kSuperBytes / kBlocksOfSuper;
    static constexpr int kOpenedBytes = Flat::kBlockBytes;

    static inline Vec scale(const char* super, int group, int v, Vec unit) {
        const uint8_t* scales = reinterpret_cast<const uint8_t*>(super) + kPanel * (2 + group) + v * kLanes;
        return round_to_half(mul(unit, to_float(add_ints(load_bytes(scales), set1_int(-128)))));
    }

    static inline Vec scale_unit(const char* super, int v, float inverse) {
        return mul(load_half(reinterpret_cast<const uint16_t*>(super) + v * kLanes), set1(inverse));
    }

    // Codes become those of the flat format, whose zero is 128.
    static inline IntView open(const char* panel, int64_t block, int64_t blocks, float inverse, char* opened) {
        const Ints less = set1_int(static_cast<int32_t>(0xa0a0a0a0u));
        const Ints six = set1_int(0x3f3f3f3f);
        const char* super = panel + block * kBlockBytes;
        const IntView view = {opened, kOpenedBytes, opened + Flat::kCodeBytes, kOpenedBytes};
        for (int64_t b = 0; b < blocks; b += kBlocksOfSuper, super += kSuperBytes) {
            const char* from = super + kHeaderBytes;
            for (int i = 0; i < kBlocksOfSuper; ++i) {
                char* to = opened + (b + i) * kOpenedBytes;
                for (int step = 0; step < kQBlock / 16; ++step, from += 3 * kPanel * 4) {
                    for (int v = 0; v < kVecsPerPanel; ++v) {
                        Ints three[3];
                        for (int s = 0; s < 3; ++s) three[s] = load_ints(from + (s * kPanel + v * kLanes) * 4);
                        char* out = to + (4 * step * kPanel + v * kLanes) * 4;
                        for (int s = 0; s < 3; ++s) {
                            store_ints(out + s * kPanel * 4, sub_bytes(and_ints(three[s], six), less));
                        }
                        store_ints(out + 3 * kPanel * 4,
                                   sub_bytes(fourth_of_six_bits(three[0], three[1], three[2]), less));
                    }
                }
                float* scales = reinterpret_cast<float*>(to + Flat::kCodeBytes);
                for (int v = 0; v < kVecsPerPanel; ++v) {
                    const Vec unit = scale_unit(super, v, inverse);
                    for (int g = 0; g < Flat::kGroups; ++g) {
                        store(scales + g * kPanel + v * kLanes, scale(super, i * Flat::kGroups + g, v, unit));
                    }
                }
            }
        }
        return view;
    }

    static inline void column(const char* panel, int64_t k, float inverse, Vec* out) {
        const char* super = panel + k / kSuperblock * kSuperBytes;
        const int at = static_cast<int>(k % kSuperblock), step = at % 16 / 4, shift = at % 4 * 8;
        const char* codes = super + kHeaderBytes + at / 16 * 3 * kPanel * 4;
        for (int v = 0; v < kVecsPerPanel; ++v) {
            Ints three[3];
            for (int s = 0; s < 3; ++s) three[s] = load_ints(codes + (s * kPanel + v * kLanes) * 4);
            const Ints lane = step < 3 ? three[step] : fourth_of_six_bits(three[0], three[1], three[2]);
            const Vec code = to_float(code_at<6>(lane, shift));
            out[v] = mul(scale(super, at / 16, v, scale_unit(super, v, inverse)), code);
        }
    }
};

// Calls f with the format of an integer matrix.
template <class Function>
inline void with_format(const Matrix& m, Function f) {
    if (m.format == kWeightQ4K) {
        f(FormatQ4K{});
    } else if (m.format == kWeightQ6K) {
        f(FormatQ6K{});
    } else if (m.format == kWeightInt4) {
        m.minima ? f(IntFormat<4, 32, true>{}) : f(IntFormat<4, 32, false>{});
    } else if (m.group == 32) {
        m.minima ? f(IntFormat<8, 32, true>{}) : f(IntFormat<8, 32, false>{});
    } else {
        m.minima ? f(IntFormat<8, 16, true>{}) : f(IntFormat<8, 16, false>{});
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
