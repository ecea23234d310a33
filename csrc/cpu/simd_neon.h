// The vector type of the kernels in NEON, which every 64-bit ARM processor has, with the dot products of bytes
// (FEAT_DotProd), the matrix products of bytes (FEAT_I8MM) and those of bf16 (FEAT_BF16) where the flags allow them.
// Included by simd.h only, inside the namespace of its instruction set.

constexpr int kLanes = 4;
// Shapes of tiles, as in simd_avx512.h: there are 32 registers too.
constexpr int kTileRows = 12;
constexpr int kTileVecs = 2;
constexpr int kTileRows4 = 6;
constexpr int kTileRows8 = 2;
#ifdef OCTAVO_I8MM
constexpr int kIntRows = 8;
constexpr int kI8mmVecs = 2;  // as kIntVecs, for tiles by matrix instructions
#else
constexpr int kIntRows = 4;
#endif
constexpr int kIntVecs = 4;
constexpr int kScoreRows = 4;
constexpr int kScoreVecs = 4;
constexpr int kValueVecs = 4;

using Vec = float32x4_t;
using Ints = int32x4_t;
using Pairs = uint32x4_t;  // One pair of bf16 a lane.
#include "simd_common.h"

// Return the first or the second element of each pair: it is the low or the high half of a lane's bits.
inline Vec first_of_pairs(Pairs v) { return bits_of<Vec>(v << 16); }
inline Vec second_of_pairs(Pairs v) { return bits_of<Vec>(v & 0xffff0000u); }
inline Vec set1(float x) { return vdupq_n_f32(x); }
inline Vec sqrt(Vec a) { return vsqrtq_f32(a); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline Vec select_greater(Vec a, Vec b, Vec yes, Vec no) { return vbslq_f32(vcgtq_f32(a, b), yes, no); }

inline Vec iota() { return Vec{0, 1, 2, 3}; }

inline Vec load(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
// Does not use bfcvtn, which keeps the payloads of NaNs: every instruction set must round alike.
inline void store(uint16_t* p, Vec v) {
    vst1_u16(p, vshrn_n_u32(
                    vbslq_u32(vceqq_f32(v, v), bits_of<uint32x4_t>(rounded_to_bf16(v)), vdupq_n_u32(0x7fc00000)), 16));
}
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
inline void store_own(uint16_t* p, Vec v) { vst1_u16(p, bits_of<uint16x4_t>(vcvt_bf16_f32(v))); }
inline Vec dot_pairs(Vec acc, Pairs a, Pairs b) {
    return vbfdotq_f32(acc, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
}
#endif

inline float reduce_add(Vec v) {
    const float32x2_t halves = vadd_f32(vget_low_f32(v), vget_high_f32(v));
    return vget_lane_f32(halves, 0) + vget_lane_f32(halves, 1);
}

// Loads bytes, one a lane; unsigned here, signed below.
inline Ints load_bytes(const uint8_t* p) {
    const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(read<uint32_t>(p)));
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
}
inline Ints load_signed_bytes(const int8_t* p) {
    const int8x8_t bytes = vreinterpret_s8_u32(vdup_n_u32(read<uint32_t>(p)));
    return vmovl_s16(vget_low_s16(vmovl_s8(bytes)));
}
// Sixteen bytes, and the bytes at the places that the bytes of v name, from 0 to 15.
inline Ints load_table(const uint8_t* p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
inline Ints look_up(Ints table, Ints v) {
    return vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(table), vreinterpretq_u8_s32(v)));
}
inline Vec load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline Vec round_to_half(Vec v) { return vcvt_f32_f16(vcvt_f16_f32(v)); }
// Rounds two vectors to bf16 pairs for dot_pairs. No number may be a NaN with low bits.
inline Pairs round_to_pairs(Vec first, Vec second) {
    // `first`, shifted down, replaces the low halves of `second`.
    return vsriq_n_u32(bits_of<Pairs>(rounded_to_bf16(second)), bits_of<Pairs>(rounded_to_bf16(first)), 16);
}

inline int8x16_t signed_bytes(Ints v) { return vreinterpretq_s8_s32(v); }
inline uint8x16_t unsigned_bytes(Ints v) { return vreinterpretq_u8_s32(v); }
// Products of unsigned and signed bytes: of the low eight, and of the high eight.
inline int16x8_t multiply_low(Ints a, Ints b) {
    const int16x8_t wide = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(unsigned_bytes(a))));
    return vmulq_s16(wide, vmovl_s8(vget_low_s8(signed_bytes(b))));
}
inline int16x8_t multiply_high(Ints a, Ints b) {
    const int16x8_t wide = vreinterpretq_s16_u16(vmovl_high_u8(unsigned_bytes(a)));
    return vmulq_s16(wide, vmovl_high_s8(signed_bytes(b)));
}

// Without FEAT_I8MM the dot products of bytes take two signed operands: codes of eight bits, whose zero is 128, are
// made signed once for all rows, and their sums start from zero.
#define OCTAVO_CENTRED_CODES
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kCodesAreCentred = true;
inline Ints centred(Ints codes) { return veorq_s32(codes, vdupq_n_s32(static_cast<int32_t>(0x80808080u))); }
#else
constexpr bool kCodesAreCentred = false;
inline Ints centred(Ints codes) { return codes; }
#endif

// Adds the four products of bytes from 0 to 127 and signed bytes in every lane.
inline Ints dot_codes4(Ints acc, Ints codes, Ints x) {
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(acc, signed_bytes(codes), signed_bytes(x));
#else
    // Two products fit 16 bits: 2 * 127 * 128.
    const int16x8_t low = vmull_s8(vget_low_s8(signed_bytes(codes)), vget_low_s8(signed_bytes(x)));
    return vpadalq_s16(acc, vpaddq_s16(low, vmull_high_s8(signed_bytes(codes), signed_bytes(x))));
#endif
}
// As dot_codes4, for codes of eight bits as `centred` leaves them.
inline Ints dot_codes8(Ints acc, Ints codes, Ints x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(acc, unsigned_bytes(codes), signed_bytes(x));
#elif defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(acc, signed_bytes(codes), signed_bytes(x));
#else
    const Ints low = vpaddlq_s16(multiply_low(codes, x)), high = vpaddlq_s16(multiply_high(codes, x));
    return vaddq_s32(acc, vpaddq_s32(low, high));
#endif
}
// As dot_codes8, for codes that are not centred and elements from -64 to 63.
inline Ints dot_pieces(Ints acc, Ints codes, Ints x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(acc, unsigned_bytes(codes), signed_bytes(x));
#elif defined(__ARM_FEATURE_DOTPROD)
    // 128 times the sum of the elements makes up for centring.
    const Ints added = vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), signed_bytes(x)), 7);
    return vaddq_s32(vdotq_s32(acc, signed_bytes(centred(codes)), signed_bytes(x)), added);
#else
    // Two products fit 16 bits: 2 * 255 * 64.
    return vpadalq_s16(acc, vpaddq_s16(multiply_low(codes, x), multiply_high(codes, x)));
#endif
}
// Returns the low byte of each lane's bits.
inline uint32_t low_bytes(Pairs v) {
    // Low words of lanes, then low bytes of words.
    const uint16x4_t words = vmovn_u32(v);
    return vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words))), 0);
}
inline void store_low_bytes(int8_t* p, Vec v) {
    const uint32_t bytes = low_bytes(vreinterpretq_u32_f32(v));
    memcpy(p, &bytes, sizeof(bytes));
}
// Stores bits 0 to 6 of the lanes, and bits 7 to 13, as bytes.
inline void store_pieces(uint8_t* low, uint8_t* high, Vec v) {
    const Pairs bits = vreinterpretq_u32_f32(v);
    const uint32_t low_piece = low_bytes(vandq_u32(bits, vdupq_n_u32(127)));
    const uint32_t high_piece = low_bytes(vandq_u32(vshrq_n_u32(bits, 7), vdupq_n_u32(127)));
    memcpy(low, &low_piece, sizeof(low_piece));
    memcpy(high, &high_piece, sizeof(high_piece));
}
// Writes the sums of each 16 of 64 bytes.
inline void sum_bytes(const int8_t* p, int32_t* sums) {
    for (int i = 0; i < 4; ++i) sums[i] = vaddlvq_s8(vld1q_s8(p + i * 16));
}

#ifdef OCTAVO_I8MM
// Matrix instructions multiply two rows by two outputs. A vector has four lanes, one for each output. Two vectors that
// are neighbours along the reduced dimension are interleaved to two operands of two outputs each. Sums of both are then
// taken apart by row.
struct TwoInts {
    Ints of[2];
};
struct TwoVecs {
    Vec of[2];
};
struct TwoPairs {
    Pairs of[2];
};
// a0 b0 a1 b1 | a2 b2 a3 b3
inline TwoInts interleaved(Ints a, Ints b) { return {{vzip1q_s32(a, b), vzip2q_s32(a, b)}}; }
inline TwoPairs interleaved(Pairs a, Pairs b) { return {{vzip1q_u32(a, b), vzip2q_u32(a, b)}}; }
// From sums [output][row] of outputs 0, 1 and of outputs 2, 3: even lanes are row 0, odd lanes row 1.
inline TwoInts sums_by_row(Ints a, Ints b) { return {{vuzp1q_s32(a, b), vuzp2q_s32(a, b)}}; }
inline TwoVecs sums_by_row(Vec a, Vec b) { return {{vuzp1q_f32(a, b), vuzp2q_f32(a, b)}}; }
// Loads eight bytes, or four bf16, of each of two rows.
inline Ints load_two_rows(const int8_t* a, const int8_t* b) {
    return vreinterpretq_s32_s8(vcombine_s8(vld1_s8(a), vld1_s8(b)));
}
inline Pairs load_two_rows(const uint16_t* a, const uint16_t* b) {
    return vreinterpretq_u32_u16(vcombine_u16(vld1_u16(a), vld1_u16(b)));
}
inline Ints terms_of_two_rows(int32_t a, int32_t b) { return Ints{a, b, a, b}; }
// acc[output][row] += the sum over k of codes[output][k] * x[row][k]; k is 8 here and 4 below.
inline Ints multiply_matrices(Ints acc, Ints codes, Ints x) {
    return vusmmlaq_s32(acc, unsigned_bytes(codes), signed_bytes(x));
}
// Adds the two pairs of k one after the other, as dot_pairs does, with its rounding: by the architecture's manual
// (BFMatMulAdd) a row has the same bits either way.
inline Vec multiply_matrices(Vec acc, Pairs w, Pairs x) {
    return vbfmmlaq_f32(acc, vreinterpretq_bf16_u32(w), vreinterpretq_bf16_u32(x));
}
#endif
