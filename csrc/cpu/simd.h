// The vector type of the instruction set that this translation unit is compiled for (simd_*.h), and what the kernels
// share on top of it: the exponential, the two element types, loops over vectors and rows. OCTAVO_ISA is the namespace,
// set by the build. Everything lives in an anonymous namespace inside it, so no code compiled with one set of flags is
// linked into another. Included by activation_functions.h, sampling.h and other kernels' headers.
#pragma once

#include <string.h>

#include "kernels.h"

#if defined(OCTAVO_ISA_AVX512) || defined(OCTAVO_ISA_AVX2)
#include <immintrin.h>
#elif defined(OCTAVO_ISA_NEON)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace octavo::OCTAVO_ISA {
namespace {

template <class T>
inline T read(const void* p) {
    T value;
    memcpy(&value, p, sizeof(value));
    return value;
}
template <class To, class From>
inline To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From), "same bits");
    return read<To>(&from);
}

#if defined(OCTAVO_ISA_AVX512)
#include "simd_avx512.h"
#elif defined(OCTAVO_ISA_AVX2)
#include "simd_avx2.h"
#elif defined(OCTAVO_ISA_NEON)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

constexpr int kVecsPerPanel = kPanel / kLanes;

// Sets with instructions for bf16 have functions of their own: dot_pairs, and store_own, which stores bf16 where
// rounding need not be the same in every instruction set.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kDotsPairs = true;
#else
constexpr bool kDotsPairs = false;
inline void store_own(uint16_t* p, Vec v) { store(p, v); }
inline Vec dot_pairs(Vec acc, Pairs a, Pairs b) {
    acc = fma(first_of_pairs(a), first_of_pairs(b), acc);
    return fma(second_of_pairs(a), second_of_pairs(b), acc);
}
#endif

#if !defined(OCTAVO_ISA_AVX512) && !defined(OCTAVO_ISA_AVX2)
// As on x86: the second operand if either is NaN.
inline Vec max(Vec a, Vec b) { return select_greater(a, b, a, b); }
inline Vec min(Vec a, Vec b) { return select_greater(b, a, a, b); }
// Bit i says whether a[i] >= b[i].
inline uint32_t lanes_at_least(Vec a, Vec b) {
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= (a[i] >= b[i] ? 1u : 0u) << i;
    return bits;
}
inline float reduce_max(Vec v) {
    const float a = v[0] > v[2] ? v[0] : v[2];
    const float b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
}
#endif

#ifndef OCTAVO_ISA_AVX2  // other sets have enough registers, or the compiler's vectors
template <class T>
inline void leave_in_memory(T&) {}
#endif

#ifndef OCTAVO_CENTRED_CODES  // the set's header does not define it
// Whether dot_codes8 takes signed codes: `centred` subtracts 128, and sums start from zero.
constexpr bool kCodesAreCentred = false;
inline Ints centred(Ints codes) { return codes; }
#endif

#ifndef OCTAVO_SHORT_SUMS
// Sums over a group of up to 32 elements by codes of four bits: how they begin, grow and end. Sets without dot products
// of bytes keep them in 16 bits meanwhile.
inline Ints begin_sums4(int32_t zero_point_term) { return set1_int(zero_point_term); }
inline Ints add_to_sums4(Ints sums, Ints codes, Ints x) { return dot_codes4(sums, codes, x); }
inline Ints end_sums4(Ints sums, int32_t) { return sums; }
// Adds the products of two steps of codes of six bits.
inline Ints dot_two_codes6(Ints acc, Ints codes, Ints x, Ints more_codes, Ints more_x) {
    return dot_codes4(dot_codes4(acc, codes, x), more_codes, more_x);
}
#endif

#ifndef OCTAVO_ISA_AVX512
inline Vec reciprocal(Vec a) { return div(set1(1.0f), a); }
// Returns lanes begin .. end - 1 of v, the others of `other`.
inline Vec keep_lanes(Vec v, int begin, int end, Vec other) {
    const Vec lane = iota();
    const Vec below_end = select_greater(set1(static_cast<float>(end)), lane, v, other);
    return select_greater(set1(static_cast<float>(begin)), lane, other, below_end);
}
// Partial vectors go through a small buffer: they are rare, and must not read past the end of a row.
template <class T>
inline Vec load_n(const T* p, int n) {
    T buffer[kLanes] = {};
    memcpy(buffer, p, static_cast<size_t>(n) * sizeof(T));
    return load(buffer);
}
template <class T>
inline void store_n(T* p, Vec v, int n) {
    T buffer[kLanes];
    store(buffer, v);
    memcpy(p, buffer, static_cast<size_t>(n) * sizeof(T));
}
#endif

// Returns four bytes of a row in every lane.
inline Ints set1_bytes(const int8_t* p) { return set1_int(read<int32_t>(p)); }

// A build that names a set and does not define its OCTAVO_ISA_AVX512, OCTAVO_ISA_AVX2 or OCTAVO_ISA_NEON would compile
// portable vectors: this is checked here.
#define OCTAVO_CONCAT2(a, b) a##b
#define OCTAVO_CONCAT(a, b) OCTAVO_CONCAT2(a, b)
#define OCTAVO_STRING2(a) #a
#define OCTAVO_STRING(a) OCTAVO_STRING2(a)
static constexpr bool begins_with(const char* name, const char* beginning) {
    return *beginning == 0 || (*name == *beginning && begins_with(name + 1, beginning + 1));
}
constexpr bool kIsAvx512 =
    begins_with(OCTAVO_STRING(OCTAVO_ISA), "avx512") || begins_with(OCTAVO_STRING(OCTAVO_ISA), "amx");
static_assert(kLanes == (kIsAvx512                                        ? 16
                         : begins_with(OCTAVO_STRING(OCTAVO_ISA), "avx2") ? 8
                                                                          : 4),
              "the vectors are not those of the instruction set that OCTAVO_ISA names");
#ifdef OCTAVO_ISA_NEON
constexpr bool kIsNeon = true;
#else
constexpr bool kIsNeon = false;
#endif
static_assert(kIsNeon == begins_with(OCTAVO_STRING(OCTAVO_ISA), "neon"), "likewise");

template <class T>
inline T min_of(T a, T b) {
    return a < b ? a : b;
}
template <class T>
inline T max_of(T a, T b) {
    return a > b ? a : b;
}

// Calls f(index, lanes) over n elements: whole vectors, then the rest.
template <class F>
inline void for_vectors(int64_t n, F f) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
    if (i < n) f(i, static_cast<int>(n - i));
}
template <class T>
inline Vec load_some(const T* p, int lanes) {
    return lanes == kLanes ? load(p) : load_n(p, lanes);
}
template <class T>
inline void store_some(T* p, Vec v, int lanes) {
    if (lanes == kLanes) {
        store(p, v);
    } else {
        store_n(p, v, lanes);
    }
}

// Stores two vectors side by side. An instruction set may have a better way for its elements.
template <class T>
inline void store_two(T* p, Vec a, Vec b) {
    store(p, a);
    store(p + kLanes, b);
}

// Returns e^x to about 1 ulp (the polynomial is that of Cephes expf): exactly 1 at 0, exactly 0 where it would be
// denormal, infinite above 88.37, NaN for NaN.
inline Vec exp(Vec x) {
    const Vec lowest = set1(-87.33654f);
    const Vec highest = set1(88.37626f);
    const Vec magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer.
    const Vec clamped = min(highest, max(lowest, x));
    const Vec t = fma(clamped, set1(1.44269504f), magic);
    const Vec n = sub(t, magic);
    const Vec r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), clamped));
    Vec p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), set1(1.0f));
    Vec result = mul(p, pow2_of_magic(t));
    result = select_greater(lowest, x, zero(), result);
    return select_greater(x, highest, set1(__builtin_inff()), result);
}
inline float exp(float x) {
    float lanes[kLanes];
    store(lanes, exp(set1(x)));
    return lanes[0];
}

// An element type as the dot products see it: `kStep` neighbours along the reduced dimension make one lane.
struct F32 {
    using T = float;
    using Lanes = Vec;
    static constexpr int kStep = 1;
    static inline Lanes load_lanes(const T* p) { return load(p); }
    static inline Lanes broadcast(const T* p) { return set1(*p); }
    static inline Lanes broadcast_last(const T* p) { return set1(*p); }
    static inline Vec madd(Vec acc, Lanes a, Lanes b) { return fma(a, b, acc); }
    static constexpr int kParts = 1;
    template <int>
    static inline Vec part(Lanes v) {
        return v;
    }
    static inline Vec madd_part(Vec acc, Vec a, Vec b) { return fma(a, b, acc); }
#ifdef OCTAVO_ISA_AVX512
    static inline Lanes load_lane_halves(const T* a, const T* b) { return load_halves(a, b); }
#endif
};

struct BF16 {
    using T = uint16_t;
    using Lanes = Pairs;
    static constexpr int kStep = 2;
    static inline Lanes load_lanes(const T* p) { return load_pairs(p); }
    static inline Lanes broadcast(const T* p) { return set1_pair(read<uint32_t>(p)); }
    // The last element of an odd row; its partner is zero.
    static inline Lanes broadcast_last(const T* p) { return set1_pair(*p); }
    static inline Vec madd(Vec acc, Lanes a, Lanes b) { return dot_pairs(acc, a, b); }
    // madd in parts, where it is two products: part 0 is the first element of each pair, part 1 the second.
    static constexpr int kParts = kDotsPairs ? 1 : 2;
    template <int which>
    static inline auto part(Lanes v) {
        if constexpr (kDotsPairs) {
            return v;
        } else {
            return which == 0 ? first_of_pairs(v) : second_of_pairs(v);
        }
    }
    static inline Vec madd_part(Vec acc, Pairs a, Pairs b) { return dot_pairs(acc, a, b); }
    static inline Vec madd_part(Vec acc, Vec a, Vec b) { return fma(a, b, acc); }
#ifdef OCTAVO_ISA_AVX512
    static inline Lanes load_lane_halves(const T* a, const T* b) { return load_pair_halves(a, b); }
#endif
};

// Calls f(Constant<n>{}) for an n in 1 .. kMost: the compiler then knows n.
template <int n>
struct Constant {
    static constexpr int kValue = n;
};
template <int kMost, class F>
inline void with_constant(int64_t n, F f) {
    if (n == kMost) {
        f(Constant<kMost>{});
    } else if constexpr (kMost > 1) {
        with_constant<kMost - 1>(n, f);
    }
}

// Calls f(Constant<0>{}), f(Constant<1>{}) .. f(Constant<count - 1>{}).
template <int count, class F>
__attribute__((always_inline)) inline void for_constants(F f) {
    if constexpr (count > 0) {
        for_constants<count - 1>(f);
        f(Constant<count - 1>{});
    }
}

// Calls f with the element type of a float array.
template <class F>
inline void with_element(int32_t dtype, F f) {
    dtype == kF32 ? f(F32{}) : f(BF16{});
}

// Calls f(row) for the rows of a task. There are `rows` rows in all.
template <class F>
inline void for_rows(const RowWiseArgs& a, int64_t task, int64_t rows, F f) {
    const int64_t end = min_of((task + 1) * a.rows_per_task, rows);
    for (int64_t row = task * a.rows_per_task; row < end; ++row) f(row);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
