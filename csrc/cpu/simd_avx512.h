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
using Pairs = __m512i;  // One pair of bf16 a lane.

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
// Returns 1 / a to 1 or 2 units in the last place if both are normal numbers, without the divider. NaN for infinities.
inline Vec reciprocal(Vec a) {
    const Vec guess = _mm512_rcp14_ps(a);
    return _mm512_mul_ps(guess, _mm512_fnmadd_ps(a, guess, _mm512_set1_ps(2.0f)));
}
inline Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec abs(Vec a) { return _mm512_abs_ps(a); }
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

inline Vec widen(__m256i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)); }
inline __m256i narrow(Vec v) {
#ifdef __AVX512BF16__
    // The instruction flushes denormals and keeps the payloads of NaNs, but every instruction set must round alike: it
    // is used if there are neither (0xa1: quiet NaN, denormal, signaling NaN).
    if (__builtin_expect(_mm512_fpclass_ps_mask(v, 0xa1) == 0, 1)) return (__m256i)_mm512_cvtneps_pbh(v);
#endif
    const __m512i u = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
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
#endif
// Stores bf16 where rounding need not be the same in every instruction set.
inline void store_own(uint16_t* p, Vec v) {
#ifdef __AVX512BF16__
    const __m256i r = (__m256i)_mm512_cvtneps_pbh(v);
#else
    const __m256i r = narrow(v);
#endif
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), r);
}
inline Vec load_n(const uint16_t* p, int n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
inline void store_n(uint16_t* p, Vec v, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(v)); }

inline float reduce_add(Vec v) { return _mm512_reduce_add_ps(v); }
inline float reduce_max(Vec v) { return _mm512_reduce_max_ps(v); }
inline Vec iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
// Returns 2^n, where t = 1.5 * 2^23 + n: n is in the low bits of t, and moves to the exponent.
inline Vec pow2_of_magic(Vec t) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(t), 23), _mm512_set1_epi32(0x3f800000)));
}

inline Pairs load_pairs(const uint16_t* p) { return _mm512_loadu_si512(p); }
inline Pairs set1_pair(uint32_t bits) { return _mm512_set1_epi32(static_cast<int>(bits)); }
inline Pairs and_pairs(Pairs a, Pairs b) { return _mm512_and_si512(a, b); }
// Return the first or the second element of each pair: it is the low or the high half of a lane's bits.
inline Vec first_of_pairs(Pairs v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
inline Vec second_of_pairs(Pairs v) {
    return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline Vec dot_pairs(Vec acc, Pairs a, Pairs b) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    acc = fma(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), acc);
    return fma(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), acc);
#endif
}

// Load a vector whose halves lie apart: eight keys of one cache block, eight of another.
inline Vec load_halves(const float* a, const float* b) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(a)), _mm256_loadu_ps(b), 1);
}
inline Pairs load_pair_halves(const uint16_t* a, const uint16_t* b) {
    return _mm512_inserti32x8(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a))),
                              _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)), 1);
}

// Integers. A lane of bytes holds four of them, neighbours along the reduced dimension.
using Ints = __m512i;

inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline void store_ints(void* p, Ints v) { _mm512_storeu_si512(p, v); }
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints sub_bytes(Ints a, Ints b) { return _mm512_sub_epi8(a, b); }
inline Ints and_ints(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints or_ints(Ints a, Ints b) { return _mm512_or_si512(a, b); }
template <int bits>
inline Ints shift_right(Ints v) {
    return _mm512_srli_epi32(v, bits);
}
template <int bits>
inline Ints shift_left(Ints v) {
    return _mm512_slli_epi32(v, bits);
}
// Copies whole numbers from 0 to 255 to all bytes of their lanes.
inline Ints in_all_bytes(Vec v) { return _mm512_mullo_epi32(_mm512_cvtps_epi32(v), _mm512_set1_epi32(0x01010101)); }
inline Ints set1_int(int32_t x) { return _mm512_set1_epi32(x); }
// Loads bytes, one a lane; unsigned here, signed below.
inline Ints load_bytes(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Ints load_signed_bytes(const int8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec to_float(Ints v) { return _mm512_cvtepi32_ps(v); }
inline Ints low_nibbles(Ints v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Ints high_nibbles(Ints v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
// Sixteen bytes, in every 128 bits; and the bytes at the places that the bytes of v name, from 0 to 15.
inline Ints load_table(const uint8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Ints look_up(Ints table, Ints v) { return _mm512_shuffle_epi8(table, v); }
// Returns one code of each lane, from bit `shift` on, less z = 2^(bits - 1).
template <int bits>
inline Ints code_at(Ints v, int shift) {
    const Ints code = _mm512_and_si512(_mm512_srl_epi32(v, _mm_cvtsi32_si128(shift)), set1_int((1 << bits) - 1));
    return _mm512_sub_epi32(code, set1_int(1 << (bits - 1)));
}
// Returns the first (0) or second (1) element of each pair, as floats.
inline Vec one_of_pairs(Pairs p, int which) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_sll_epi32(p, _mm_cvtsi32_si128(16 - 16 * which)), set1_int(-65536)));
}
inline Vec load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Vec round_to_half(Vec v) { return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
inline Ints as_ints(Pairs p) { return p; }
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
    const auto rounded = [](Vec v) {
        const __m512i u = _mm512_castps_si512(v);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
        return _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    };
    const __m512i high = _mm512_and_si512(rounded(second), _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
    // `first` moves to the low halves of lanes, `second` stays in the high halves.
    return _mm512_or_si512(_mm512_srli_epi32(rounded(first), 16), high);
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
// Unpacks floats of eight bits (sign, exponent, kMantissa bits) to pairs of bf16: bytes 0 and 2 of a lane become
// `even`, bytes 1 and 3 `odd`. Bits are only moved, so results are 2^-120 (e4m3) or 2^-112 (e5m2) times the numbers.
// Numbers that are not normal become finite, but wrong.
template <int kMantissa>
inline void unpack_float8(Ints v, Pairs& even, Pairs& odd) {
    const __m512i sign = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
    const __m512i rest = _mm512_set1_epi16(0x7f << (7 - kMantissa));
    // An even byte is the low half of 16 bits: its exponent and mantissa move up to those of bf16, its sign to bit 15.
    even = _mm512_or_si512(_mm512_and_si512(_mm512_slli_epi16(v, 7 - kMantissa), rest),
                           _mm512_and_si512(_mm512_slli_epi16(v, 8), sign));
    // An odd byte is the high half: its exponent and mantissa move down, its sign stays.
    odd = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(v, 1 + kMantissa), rest), _mm512_and_si512(v, sign));
}
inline Ints load_int_halves(const void* a, const void* b) {
    return load_pair_halves(static_cast<const uint16_t*>(a), static_cast<const uint16_t*>(b));
}
// Writes the sums of each 16 of 64 bytes.
inline void sum_bytes(const int8_t* p, int32_t* sums) {
    // Sums of four bytes a lane; plus the lanes two apart, plus their neighbours: every lane of 128 bits has the sum of
    // its 16 bytes. Lanes 0, 4, 8 and 12 are stored.
    __m512i s = dot_codes4(_mm512_setzero_si512(), _mm512_set1_epi8(1), load_ints(p));
    s = _mm512_add_epi32(s, _mm512_shuffle_epi32(s, _MM_PERM_BADC));
    s = _mm512_add_epi32(s, _mm512_shuffle_epi32(s, _MM_PERM_CDAB));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(sums), _mm512_castsi512_si128(_mm512_maskz_compress_epi32(0x1111, s)));
}
