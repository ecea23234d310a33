// Caches of keys and values: their layouts, and the encoding of rows as bytes. A cache holds floats of the step's own
// type, or bytes with a scale for each token and head. A row's bytes are a function of that row alone. In the layouts
// the last dimension is a lane: keys are [block][kv_head][D / step][block_size][step], values
// [block][kv_head][block_size / step][padded D][step]. Caches of bytes have one more step of keys: a token's two
// scales, of its key and of its value, as a pair of bf16. Included by norms_and_rotary.h and attention_keys.h only.
#pragma once

#include "activation_functions.h"

namespace octavo::OCTAVO_ISA {
namespace {

// A cache of floats. `T` is an element of the step, `Cached` an element of the cache; `Query` and `Weight` are what
// keys and values are multiplied with.
template <class E>
struct PlainCache : E {
    using Cached = typename E::T;
    using Query = typename E::T;
    using Weight = typename E::T;
    static constexpr bool kHasScales = false;
};

// What caches of bytes share.
template <class E>
struct ByteCache {
    using T = typename E::T;
    using Cached = uint8_t;
    using Weight = float;  // until the scales of values are known
    static constexpr int kStep = 4;
    static constexpr bool kHasScales = true;
};

// Integers from -127 to 127; keys are stored plus 128. The scale is the largest magnitude over 127, rounded up.
template <class E>
struct Int8Cache : ByteCache<E> {
    using Query = int8_t;
    static constexpr uint8_t kKeyZero = 128;
    // Where in a lane's four bytes the four neighbours along the reduced dimension lie.
    static constexpr int kOrder[4] = {0, 1, 2, 3};
};

// Floats of eight bits. Scales are powers of two that bring the largest magnitude into the type's last binade, or into
// the one before, as the last is not whole. Numbers that are then below the normal numbers, a 10,000th of the largest
// and less, are zero.
template <class E, int kMantissaBits>
struct Float8Cache : ByteCache<E> {
    using Query = uint16_t;
    static constexpr uint8_t kKeyZero = 0;
    static constexpr int kOrder[4] = {0, 2, 1, 3};  // even bytes unpack to one pair of bf16, odd bytes to another
    static constexpr int kMantissa = kMantissaBits;
    static constexpr float kLargest = kMantissa == 3 ? 448.0f : 57344.0f;
    static constexpr float kLeast = kMantissa == 3 ? 0x1p-6f : 0x1p-14f;
    // Unpacked elements are 1 / (kFactor * kUp) times their value: queries and weights are multiplied by kFactor, sums
    // by kUp.
    static constexpr float kFactor = 0x1p64f;
    static constexpr float kUp = kMantissa == 3 ? 0x1p56f : 0x1p48f;
};

// Calls f with the type of a cache that holds `cache_dtype` in a step of `dtype`.
template <class F>
inline void with_cache(int32_t dtype, int32_t cache_dtype, F f) {
    with_element(dtype, [&](auto element) {
        using E = decltype(element);
        switch (cache_dtype) {
            case kInt8:
                return f(Int8Cache<E>{});
            case kFloat8E4M3:
                return f(Float8Cache<E, 3>{});
            case kFloat8E5M2:
                return f(Float8Cache<E, 2>{});
            default:
                return f(PlainCache<E>{});
        }
    });
}

// Returns the number of elements that a head's keys take in a block.
template <class C>
inline int64_t key_elements(int64_t head_size, int64_t block_size) {
    return (head_size + (C::kHasScales ? C::kStep : 0)) * block_size;
}
inline int64_t padded_size(int64_t head_size) { return (head_size + kValuePad - 1) / kValuePad * kValuePad; }

// Returns the largest magnitude of a row; infinity if there is a NaN.
template <class T>
inline float largest_magnitude(const T* x, int64_t n) {
    const Vec infinity = set1(__builtin_inff());
    Vec highest = zero();
    for_vectors(n, [&](int64_t i, int lanes) {
        const Vec v = load_some(x + i, lanes);
        const Vec magnitude = abs(v);
        highest = max(highest, select_greater(infinity, magnitude, magnitude, infinity));
    });
    return reduce_max(highest);
}

// Rows whose elements are divided by a scale. Smaller rows are stored as zeros; infinite ones have the scale NaN. So
// quotients are finite.
inline bool has_quotients(float largest) { return largest >= 0x1p-100f && largest < __builtin_inff(); }
inline uint16_t scale_without_quotients(float largest) { return largest < 0x1p-100f ? 0 : 0x7fc0; }

// Encodes a row of n elements as bytes. Returns its scale as bf16.
template <class E>
inline uint16_t encode(Int8Cache<E>, const typename E::T* x, int64_t n, uint8_t* bytes) {
    const float largest = largest_magnitude(x, n);
    if (!has_quotients(largest)) {
        memset(bytes, 0, static_cast<size_t>(n));
        return scale_without_quotients(largest);
    }
    const uint32_t scale = (bits_of<uint32_t>(largest / 127.0f) + 0xffffu) & 0xffff0000u;
    const Vec inverse = set1(1.0f / bits_of<float>(scale));
    const Vec magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, found in the low bits.
    for_vectors(n, [&](int64_t i, int lanes) {
        store_low_bytes(reinterpret_cast<int8_t*>(bytes) + i, add(mul(load_some(x + i, lanes), inverse), magic));
    });
    return static_cast<uint16_t>(scale >> 16);
}

template <class E, int kMantissa>
inline uint16_t encode(Float8Cache<E, kMantissa>, const typename E::T* x, int64_t n, uint8_t* bytes) {
    using C = Float8Cache<E, kMantissa>;
    const float largest = largest_magnitude(x, n);
    if (!has_quotients(largest)) {
        memset(bytes, 0, static_cast<size_t>(n));
        return scale_without_quotients(largest);
    }
    const uint32_t scale = (bits_of<uint32_t>(largest / C::kLargest) + 0x7fffffu) & 0x7f800000u;
    // What the bytes unpack to: 2^-120 (e4m3) or 2^-112 (e5m2) times the quotient.
    constexpr float kDown = 1.0f / C::kUp / C::kFactor;
    const Vec inverse = set1(1.0f / bits_of<float>(scale));
    const Vec split = set1(0x1p23f / (1 << kMantissa) + 1.0f);  // Rounds to 1 + kMantissa bits (Veltkamp 1968).
    const Vec least = set1(bits_of<float>(bits_of<uint32_t>(C::kLeast) - 1));
    alignas(64) float narrowed[kLanes];
    for_vectors(n, [&](int64_t i, int lanes) {
        const Vec v = mul(load_some(x + i, lanes), inverse);
        const Vec wide = mul(v, split);
        const Vec rounded = sub(wide, sub(wide, v));
        const Vec magnitude = abs(rounded);
        store(narrowed, mul(select_greater(magnitude, least, rounded, zero()), set1(kDown)));
        for (int j = 0; j < kLanes; ++j) {
            // Sign, and the low bits of the exponent with the mantissa.
            const uint32_t bits = bits_of<uint32_t>(narrowed[j]);
            bytes[i + j] = static_cast<uint8_t>((bits >> 24 & 0x80) | (bits >> (23 - kMantissa) & 0x7f));
        }
    });
    return static_cast<uint16_t>(scale >> 16);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
