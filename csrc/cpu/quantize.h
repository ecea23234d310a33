// Rows of floats as quantized rows (QBlock), block by block. Included by elementwise.h and epilogue.h only.
#pragma once

#include "functions.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Rounds to nearest even as the vector stores do.
inline uint16_t narrow_scalar(float x) {
    if (x != x) return 0x7fc0;
    const uint32_t bits = bits_of<uint32_t>(x);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline Vec magnitude(Vec v) { return max(v, sub(zero(), v)); }

// Of n magnitudes the largest; infinite if one is NaN.
inline float largest(const float* x, int n) {
    const Vec infinity = set1(__builtin_inff());
    Vec highest = zero();
    for (int i = 0; i < n; i += kLanes) {
        const Vec m = magnitude(load(x + i));
        highest = max(highest, select_greater(infinity, m, m, infinity));
    }
    return reduce_max(highest);
}

inline float largest_below(const float* x, int n, float limit) {
    Vec highest = zero();
    for (int i = 0; i < n; i += kLanes) {
        const Vec m = magnitude(load(x + i));
        highest = max(highest, select_greater(set1(limit), m, m, zero()));
    }
    return reduce_max(highest);
}

// The only one of n floats whose magnitude is `absmax`, or n.
inline int only_largest(const float* x, int n, float absmax) {
    int found = n;
    for (int i = 0; i < n; ++i) {
        if (__builtin_fabsf(x[i]) != absmax) continue;
        if (found < n) return n;
        found = i;
    }
    return found;
}

// One block from kQBlock floats, of which outliers are taken out. A block that is not finite yields NaN in all that it
// is multiplied with. One below 2^-100 is zero: the quotient would overflow.
inline void quantize_block(float* x, QBlock& out) {
    constexpr int kHalf = kQBlock / 2;
    constexpr int kVecs = kHalf / kLanes;
    const Vec magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, found in the low bits.
    for (int half = 0; half < 2; ++half) {
        float* of_half = x + half * kHalf;
        float absmax = largest(of_half, kHalf);
        out.outlier[half] = 0.0f;
        out.outlier_at[half] = 0;
        if (absmax >= 0x1p-100f && absmax < __builtin_inff()) {
            const float next = largest_below(of_half, kHalf, absmax);
            if (absmax > kOutlierRatio * next) {
                if (const int at = only_largest(of_half, kHalf, absmax); at < kHalf) {
                    out.outlier[half] = of_half[at];
                    out.outlier_at[half] = half * kHalf + at;
                    of_half[at] = 0.0f;
                    absmax = next;
                }
            }
        }
        if (absmax >= 0x1p-100f && absmax < __builtin_inff()) {
            const Vec inverse = set1(127.0f / absmax);
            for (int i = 0; i < kVecs; ++i) {
                store_low_bytes(out.q + half * kHalf + i * kLanes,
                                add(mul(load(of_half + i * kLanes), inverse), magic));
            }
            out.scale[half] = absmax / 127.0f;
        } else {
            memset(out.q + half * kHalf, 0, kHalf);
            out.scale[half] = absmax >= 0x1p-100f ? __builtin_nanf("") : 0.0f;
        }
    }
    int32_t sums[4];
    sum_bytes(out.q, sums);
    for (int i = 0; i < 4; ++i) out.start16[i] = -128 * sums[i];
    for (int i = 0; i < 2; ++i) {
        const int32_t sum = sums[2 * i] + sums[2 * i + 1];
        out.start4[i] = -8 * sum;
        out.start8[i] = -128 * sum;
        out.sums[i] = narrow_scalar(out.scale[i] * static_cast<float>(sum));
    }
}

// A row of n floats that f(index, lanes) yields vector by vector.
template <class F>
inline void quantize_row(int64_t n, QBlock* out, F f) {
    alignas(64) float x[kQBlock];
    for (int64_t begin = 0; begin < n; begin += kQBlock) {
        for (int i = 0; i < kQBlock; i += kLanes) {
            const int64_t left = n - begin - i;
            store(x + i, left > 0 ? f(begin + i, left < kLanes ? static_cast<int>(left) : kLanes) : zero());
        }
        quantize_block(x, out[begin / kQBlock]);
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
