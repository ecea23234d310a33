// The vector type of the kernels in AVX2 with FMA. Included by simd.h only, inside the namespace of its instruction
// set.

constexpr int kLanes = 8;
constexpr int kTileRows = 5;
constexpr int kTileVecs = 2;
constexpr int kTileRows4 = 2;
constexpr int kTileRows8 = 1;
constexpr int kIntRows = 4;
constexpr int kIntVecs = 2;
constexpr int kScoreRows = 4;
constexpr int kScoreVecs = 2;
constexpr int kValueVecs = 2;

using Vec = __m256;
using Ints = __m256i;
using Pairs = __m256i;  // One pair of bf16 a lane.
#include "simd_common.h"

// Return the first or the second element of each pair: it is the low or the high half of a lane's bits.
inline Vec first_of_pairs(Pairs v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
inline Vec second_of_pairs(Pairs v) {
    return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec sqrt(Vec a) { return _mm256_sqrt_ps(a); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec select_greater(Vec a, Vec b, Vec yes, Vec no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_GT_OQ));
}
// Bit i says whether a[i] >= b[i].
inline uint32_t lanes_at_least(Vec a, Vec b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
}

inline Vec iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }

inline Vec load(const uint16_t* p) {
    return first_of_pairs(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void store(uint16_t* p, Vec v) {
    __m256i r = bits_of<__m256i>(rounded_to_bf16(v) >> 16);
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
    // The low words of lanes 0 to 3, then of lanes 4 to 7.
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}

inline float reduce_add(Vec v) {
    // Adds the halves, then lanes 2 and 3 to 0 and 1, then lane 1 to lane 0.
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float reduce_max(Vec v) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

// Keeps values in memory: while they are not needed they take none of the sixteen registers.
template <class T>
inline void leave_in_memory(T& values) {
    asm("" : "+m"(values));
}

// Loads bytes, one a lane; unsigned here, signed below.
inline Ints load_bytes(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Ints load_signed_bytes(const int8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Ints sub_bytes(Ints a, Ints b) { return _mm256_sub_epi8(a, b); }
// Sixteen bytes, in every 128 bits; and the bytes at the places that the bytes of v name, from 0 to 15.
inline Ints load_table(const uint8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Ints look_up(Ints table, Ints v) { return _mm256_shuffle_epi8(table, v); }
inline Vec load_half(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec round_to_half(Vec v) { return _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
// Rounds two vectors to bf16 pairs for dot_pairs. No number may be a NaN with low bits.
inline Pairs round_to_pairs(Vec first, Vec second) {
    // `first` moves to the low halves of lanes; 0xaa takes the high halves of `second`.
    return _mm256_blend_epi16(bits_of<__m256i>(rounded_to_bf16(first) >> 16), bits_of<__m256i>(rounded_to_bf16(second)),
                              0xaa);
}
#if defined(__AVXVNNI__)
#define OCTAVO_VPDPBUSD _mm256_dpbusd_avx_epi32
#elif defined(OCTAVO_EMULATE_VNNI)
// vpdpbusd as Intel's manual defines it: bytes of the second operand are unsigned, those of the third signed.
inline Ints emulated_vpdpbusd(Ints acc, Ints a, Ints b) {
    alignas(32) int32_t sums[kLanes];
    alignas(32) uint8_t unsigned_bytes[4 * kLanes];
    alignas(32) int8_t signed_bytes[4 * kLanes];
    memcpy(sums, &acc, sizeof(sums));
    memcpy(unsigned_bytes, &a, sizeof(unsigned_bytes));
    memcpy(signed_bytes, &b, sizeof(signed_bytes));
    for (int i = 0; i < 4 * kLanes; ++i) sums[i / 4] += unsigned_bytes[i] * signed_bytes[i];
    return load_ints(sums);
}
#define OCTAVO_VPDPBUSD emulated_vpdpbusd
#endif
#ifdef OCTAVO_VPDPBUSD
// Adds the four products of unsigned codes and signed bytes in every lane.
inline Ints dot_codes4(Ints acc, Ints codes, Ints x) { return OCTAVO_VPDPBUSD(acc, codes, x); }
inline Ints dot_codes8(Ints acc, Ints codes, Ints x) { return OCTAVO_VPDPBUSD(acc, codes, x); }
#else
inline Ints multiply_pairs(Ints codes, Ints x) { return _mm256_maddubs_epi16(codes, x); }
inline Ints add_shorts(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
inline Ints widen_shorts(Ints v) { return _mm256_madd_epi16(v, _mm256_set1_epi16(1)); }
inline Ints magnitudes(Ints bytes) { return _mm256_abs_epi8(bytes); }
inline Ints with_signs(Ints x, Ints signs) { return _mm256_sign_epi8(x, signs); }
#include "simd_pairs.h"
#endif
// Stores the low byte of each lane's bits.
inline void store_low_bytes(int8_t* p, Vec v) {
    const Ints low = _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(255));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
// As dot_codes8, for elements from -64 to 63, which cannot saturate vpmaddubsw either.
inline Ints dot_pieces(Ints acc, Ints codes, Ints x) { return dot_codes4(acc, codes, x); }
// Stores bits 0 to 6 of the lanes, and bits 7 to 13, as bytes.
inline void store_pieces(uint8_t* low, uint8_t* high, Vec v) {
    const __m256i seven = _mm256_set1_epi32(127), bits = _mm256_castps_si256(v);
    const __m256i a = _mm256_and_si256(bits, seven), b = _mm256_and_si256(_mm256_srli_epi32(bits, 7), seven);
    // Packing gives a0-3 b0-3 a4-7 b4-7; the permutation makes it a0-7 b0-7.
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
    // Eight bytes of low pieces, then eight of high pieces.
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(low), bytes);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(high), _mm_unpackhi_epi64(bytes, bytes));
}
// Writes the sums of each 16 of 64 bytes.
inline void sum_bytes(const int8_t* p, int32_t* sums) {
    const Ints ones = _mm256_set1_epi8(1);
    const Ints zeros = _mm256_setzero_si256();
    // Lanes are sums of four bytes; adding neighbours twice makes sums of 16, numbered below by half.
    Ints s = _mm256_hadd_epi32(dot_codes4(zeros, ones, load_ints(p)), dot_codes4(zeros, ones, load_ints(p + 32)));
    s = _mm256_hadd_epi32(s, s);  // 0 2 0 2, 1 3 1 3
    // 0 1 2 3.
    const __m128i pairs = _mm_unpacklo_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(sums), pairs);
}
