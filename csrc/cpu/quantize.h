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

// One block from kQBlock floats. A block that is not finite yields NaN in all that it is multiplied with. One below
// 2^-100 is zero: the quotient would overflow.
inline void quantize_block(const float* x, QBlock& out) {
    constexpr int kVecs = kQBlock / 2 / kLanes;
    const Vec infinity = set1(__builtin_inff());
    const Vec magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, found in the low bits.
    for (int half = 0; half < 2; ++half) {
        Vec v[kVecs];
        Vec highest = zero();
        for (int i = 0; i < kVecs; ++i) {
            v[i] = load(x + half * (kQBlock / 2) + i * kLanes);
            const Vec magnitude = max(v[i], sub(zero(), v[i]));
            highest = max(highest, select_greater(infinity, magnitude, magnitude, infinity));
        }
        const float absmax = reduce_max(highest);
        if (absmax >= 0x1p-100f && absmax < __builtin_inff()) {
            const Vec inverse = set1(127.0f / absmax);
            for (int i = 0; i < kVecs; ++i) {
                store_low_bytes(out.q + half * (kQBlock / 2) + i * kLanes, add(mul(v[i], inverse), magic));
            }
            out.scale[half] = absmax / 127.0f;
        } else {
            memset(out.q + half * (kQBlock / 2), 0, kQBlock / 2);
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
