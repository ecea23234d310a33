// The vector type of the kernels in AVX-512 (F, BW, DQ, VL), with the BF16 dot product where the flags allow it.
// Included by simd.h only, inside the namespace of its instruction set.

constexpr int kLanes = 16;
// Tiles of float products are up to kTileRows rows by kTileVecs vectors. Few rows take 4 or 8 vectors, to hide latency.
// Of the tiles that fill the registers, 6 by 4 loads least often: on Zen 4 it is 4% faster than 12 by 2.
constexpr int kTileRows = 6;
constexpr int kTileVecs = 4;
constexpr int kTileRows4 = 6;
constexpr int kTileRows8 = 2;
// Integer tiles: rows, and vectors of a panel that are worked on at a time. Without VNNI a product needs registers of
// its own.
#ifdef __AVX512VNNI__
constexpr int kIntRows = 6;
#else
constexpr int kIntRows = 4;
#endif
constexpr int kIntVecs = 2;
// Attention tiles: rows, vectors of keys, and vectors of a value row.
constexpr int kScoreRows = 6;
constexpr int kScoreVecs = 4;
constexpr int kValueVecs = 4;

using Vec = __m512;
using Ints = __m512i;
using Pairs = __m512i;  // One pair of bf16 a lane.
#include "simd_common.h"

// Return the first or the second element of each pair: it is the low or the high half of a lane's bits.
inline Vec first_of_pairs(Pairs v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
inline Vec second_of_pairs(Pairs v) {
    return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline Vec set1(float x) { return _mm512_set1_ps(x); }
// Returns 1 / a to 1 or 2 units in the last place if both are normal numbers, without the divider. NaN for infinities.
inline Vec reciprocal(Vec a) {
    const Vec guess = _mm512_rcp14_ps(a);
    return _mm512_mul_ps(guess, _mm512_fnmadd_ps(a, guess, _mm512_set1_ps(2.0f)));
}
inline Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec select_greater(Vec a, Vec b, Vec yes, Vec no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), no, yes);
}
// Bit i says whether a[i] >= b[i].
inline uint32_t lanes_at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
inline Vec load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store_n(float* p, Vec v, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
inline Vec keep_lanes(Vec v, int begin, int end, Vec other) {
    return _mm512_mask_blend_ps(static_cast<__mmask16>(first_lanes(end) & ~first_lanes(begin)), other, v);
}

inline Vec widen(__m256i bits) { return first_of_pairs(_mm512_cvtepu16_epi32(bits)); }
inline __m256i narrow(Vec v) {
#ifdef __AVX512BF16__
    // The instruction flushes denormals and keeps the payloads of NaNs, but every instruction set must round alike: it
    // is used if there are neither (0xa1: quiet NaN, denormal, signaling NaN).
    if (__builtin_expect(_mm512_fpclass_ps_mask(v, 0xa1) == 0, 1)) return (__m256i)_mm512_cvtneps_pbh(v);
#endif
    __m512i r = bits_of<__m512i>(rounded_to_bf16(v) >> 16);
    // A NaN becomes 0x7fc0.
    r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(r);
}
inline Vec load(const uint16_t* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void store(uint16_t* p, Vec v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v)); }
#ifdef __AVX512BF16__
// `store_two` of simd.h.
inline void store_two(uint16_t* p, Vec a, Vec b) {
    const __mmask16 others = _kor_mask16(_mm512_fpclass_ps_mask(a, 0xa1), _mm512_fpclass_ps_mask(b, 0xa1));
    if (__builtin_expect(others == 0, 1)) return _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    store(p, a);
    store(p + kLanes, b);
}
inline void store_own(uint16_t* p, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}
inline Vec dot_pairs(Vec acc, Pairs a, Pairs b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
#endif
inline Vec load_n(const uint16_t* p, int n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
inline void store_n(uint16_t* p, Vec v, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(v)); }

inline float reduce_add(Vec v) { return _mm512_reduce_add_ps(v); }
inline float reduce_max(Vec v) { return _mm512_reduce_max_ps(v); }
inline Vec iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// Load a vector whose halves lie apart: eight keys of one cache block, eight of another.
inline Vec load_halves(const float* a, const float* b) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(a)), _mm256_loadu_ps(b), 1);
}
inline Pairs load_pair_halves(const uint16_t* a, const uint16_t* b) {
    return _mm512_inserti32x8(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a))),
                              _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)), 1);
}

// Loads bytes, one a lane; unsigned here, signed below.
inline Ints load_bytes(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Ints load_signed_bytes(const int8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Ints sub_bytes(Ints a, Ints b) { return _mm512_sub_epi8(a, b); }
// Sixteen bytes, in every 128 bits; and the bytes at the places that the bytes of v name, from 0 to 15.
inline Ints load_table(const uint8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Ints look_up(Ints table, Ints v) { return _mm512_shuffle_epi8(table, v); }
inline Vec load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Vec round_to_half(Vec v) { return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
// Rounds two vectors to bf16 pairs for dot_pairs. No number may be a NaN with low bits. Denormals may be flushed, as
// dot_pairs flushes them.
inline Pairs round_to_pairs(Vec first, Vec second) {
#ifdef __AVX512BF16__
    // Words 0 to 15 are `first`, 16 to 31 `second`; the permutation takes words 0, 16, 1, 17, ...
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    const __m512i halves = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                            21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(halves, both);
#else
    return pairs_of(rounded_to_bf16(first), rounded_to_bf16(second));
#endif
}
#ifdef __AVX512VNNI__
// Adds the four products of unsigned codes and signed bytes in every lane.
inline Ints dot_codes4(Ints acc, Ints codes, Ints x) { return _mm512_dpbusd_epi32(acc, codes, x); }
inline Ints dot_codes8(Ints acc, Ints codes, Ints x) { return _mm512_dpbusd_epi32(acc, codes, x); }
#else
inline Ints multiply_pairs(Ints codes, Ints x) { return _mm512_maddubs_epi16(codes, x); }
inline Ints add_shorts(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
inline Ints widen_shorts(Ints v) { return _mm512_madd_epi16(v, _mm512_set1_epi16(1)); }
inline Ints magnitudes(Ints bytes) { return _mm512_abs_epi8(bytes); }
inline Ints with_signs(Ints x, Ints signs) {
    // 0 - x where `signs` is negative.
    return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(signs), _mm512_setzero_si512(), x);
}
#include "simd_pairs.h"
#endif
// Stores the low byte of each lane's bits.
inline void store_low_bytes(int8_t* p, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_castps_si512(v)));
}
// As dot_codes8, for elements from -64 to 63, which cannot saturate vpmaddubsw either.
inline Ints dot_pieces(Ints acc, Ints codes, Ints x) { return dot_codes4(acc, codes, x); }
// Stores bits 0 to 6 of the lanes, and bits 7 to 13, as bytes.
inline void store_pieces(uint8_t* low, uint8_t* high, Vec v) {
    const __m512i seven = _mm512_set1_epi32(127), bits = _mm512_castps_si512(v);
    const auto bytes = [&](uint8_t* p, __m512i x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_and_si512(x, seven)));
    };
    bytes(low, bits);
    bytes(high, _mm512_srli_epi32(bits, 7));
}
inline Ints load_int_halves(const void* a, const void* b) {
    return load_pair_halves(static_cast<const uint16_t*>(a), static_cast<const uint16_t*>(b));
}
// Writes the sums of each 16 of 64 bytes. The bytes are read as they were stored (store_low_bytes): a longer load would
// wait until these stores have reached the cache.
inline void sum_bytes(const int8_t* p, int32_t* sums) {
    __m128i fours[4];  // sums of four bytes a lane
    for (int i = 0; i < 4; ++i) {
        const __m128i pairs =
            _mm_maddubs_epi16(_mm_set1_epi8(1), _mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i));
        fours[i] = _mm_madd_epi16(pairs, _mm_set1_epi16(1));
    }
    // Adding neighbours twice makes sums of 16.
    const __m128i s = _mm_hadd_epi32(_mm_hadd_epi32(fours[0], fours[1]), _mm_hadd_epi32(fours[2], fours[3]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(sums), s);
}
