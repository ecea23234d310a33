// Rows of floats as quantized rows (QBlock), block by block. Included by norms_and_rotary.h and epilogue.h only.
#pragma once

#include "activation_functions.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Returns x as bf16, rounded to nearest even as the vector stores round.
inline uint16_t narrow_scalar(float x) {
    if (x != x) return 0x7fc0;
    const uint32_t bits = bits_of<uint32_t>(x);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Returns the largest magnitude of n elements; infinity if an element is NaN.
inline float largest(const float* x, int n) {
    const Vec infinity = set1(__builtin_inff());
    Vec highest = zero();
    for (int i = 0; i < n; i += kLanes) {
        const Vec m = abs(load(x + i));
        highest = max(highest, select_greater(infinity, m, m, infinity));
    }
    return reduce_max(highest);
}

// Returns the largest magnitude below `limit` among n elements, or 0.
inline float largest_below(const float* x, int n, float limit) {
    Vec highest = zero();
    for (int i = 0; i < n; i += kLanes) {
        const Vec m = abs(load(x + i));
        highest = max(highest, select_greater(set1(limit), m, m, zero()));
    }
    return reduce_max(highest);
}

// Returns a bit for each of n elements, at most 32: whether its magnitude is at least `least`.
inline uint32_t which_reach(const float* x, int n, float least) {
    uint32_t which = 0;
    for (int i = 0; i < n; i += kLanes) which |= lanes_at_least(abs(load(x + i)), set1(least)) << i;
    return which;
}

// Moves the elements whose magnitude is at least `least` from x (n elements, at most 32) to `outlier`, and their
// places, counted from `first`, to `outlier_at`. Returns false and changes nothing if they are more than kMaxOutliers.
inline bool take_outliers(float* x, int n, float least, int first, float* outlier, uint8_t* outlier_at) {
    uint32_t wanted = which_reach(x, n, least);
    if (__builtin_popcount(wanted) > kMaxOutliers) return false;
    for (; wanted != 0; wanted &= wanted - 1) {
        const int at = __builtin_ctz(wanted);
        *outlier++ = x[at];
        *outlier_at++ = static_cast<uint8_t>(first + at);
        x[at] = 0.0f;
    }
    return true;
}

// Outliers are searched only if at most kMaxOutliers elements reach this share of the largest magnitude. Two outliers
// leave no other element above 1 / kOutlierRatio of it, so with more elements there are none to find.
constexpr float kLeftByOutliers = 1.02f / kOutlierRatio;

// Quantizes kQBlock floats. Outliers are taken out of x. A half that is not finite gets the scale NaN, so that all its
// products are NaN. A half below 2^-100 becomes zero: the quotient would overflow.
inline void quantize_block(float* x, QBlock& out) {
    constexpr int kHalf = kQBlock / 2;
    constexpr int kVecs = kHalf / kLanes;
    const Vec magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, found in the low bits.
    for (int half = 0; half < 2; ++half) {
        float* of_half = x + half * kHalf;
        float absmax = largest(of_half, kHalf);
        for (int i = 0; i < kMaxOutliers; ++i) {
            out.outlier[half][i] = 0.0f;
            out.outlier_at[half][i] = static_cast<uint8_t>(half * kHalf);
        }
        if (absmax >= 0x1p-100f && absmax < __builtin_inff() &&
            __builtin_popcount(which_reach(of_half, kHalf, kLeftByOutliers * absmax)) <= kMaxOutliers) {
            // Two outliers if the second magnitude stands out from the third, else one if the first stands out from the
            // second.
            const float second = largest_below(of_half, kHalf, absmax);
            const float third = largest_below(of_half, kHalf, second);
            const auto take = [&](float least) {
                return take_outliers(of_half, kHalf, least, half * kHalf, out.outlier[half], out.outlier_at[half]);
            };
            if (second > kOutlierRatio * third && take(second)) {
                absmax = third;
            } else if (absmax > kOutlierRatio * second && take(absmax)) {
                absmax = second;
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
    // Sums of each 16 elements, from which the zero-point terms and the factors of minima follow.
    sum_bytes(out.q, sums);
    for (int i = 0; i < 4; ++i) out.zero_point_terms_z128_by_16[i] = -128 * sums[i];
    for (int i = 0; i < 2; ++i) {
        const int32_t sum = sums[2 * i] + sums[2 * i + 1];
        out.zero_point_terms_z8[i] = -8 * sum;
        out.zero_point_terms_z128[i] = -128 * sum;
        out.element_sums[i] = narrow_scalar(out.scale[i] * static_cast<float>(sum));
    }
}

// Subtracts from x what the block's bytes stand for: x becomes the rest.
inline void subtract_block(float* x, const QBlock& block) {
    for (int i = 0; i < kQBlock; i += kLanes) {
        const Vec scale = set1(-block.scale[i / (kQBlock / 2)]);
        store(x + i, fma(scale, to_float(load_signed_bytes(block.q + i)), load(x + i)));
    }
}

// Quantizes a row of n floats, which f(index, lanes) yields vector by vector. The rest that eight bits leave is
// quantized to `rest`, unless `rest` is null.
template <class F>
inline void quantize_row(int64_t n, QBlock* out, QBlock* rest, F f) {
    alignas(64) float x[kQBlock];
    for (int64_t begin = 0; begin < n; begin += kQBlock) {
        for (int i = 0; i < kQBlock; i += kLanes) {
            const int64_t left = n - begin - i;
            store(x + i, left > 0 ? f(begin + i, left < kLanes ? static_cast<int>(left) : kLanes) : zero());
        }
        quantize_block(x, out[begin / kQBlock]);
        if (rest == nullptr) continue;
        subtract_block(x, out[begin / kQBlock]);
        quantize_block(x, rest[begin / kQBlock]);
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
