// The vector type of the kernels in the compiler's own 128-bit vectors: the fallback on any machine. Included by simd.h
// only, inside the namespace of its instruction set. It does not include simd_common.h: GCC makes slower products of
// that for SSE2.

constexpr int kLanes = 4;
constexpr int kTileRows = 4;
constexpr int kTileVecs = 2;
constexpr int kTileRows4 = 2;
constexpr int kTileRows8 = 1;
constexpr int kIntRows = 2;
constexpr int kIntVecs = 2;
constexpr int kScoreRows = 3;
constexpr int kScoreVecs = 2;
constexpr int kValueVecs = 2;

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint32_t Pairs __attribute__((vector_size(16)));  // One pair of bf16 a lane.

inline Vec zero() { return Vec{0, 0, 0, 0}; }
inline Vec set1(float x) { return Vec{x, x, x, x}; }
inline Vec load(const float* p) { return read<Vec>(p); }
inline void store(float* p, Vec v) { memcpy(p, &v, sizeof(v)); }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec sqrt(Vec a) {
    for (int i = 0; i < kLanes; ++i) a[i] = __builtin_sqrtf(a[i]);
    return a;
}
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec select(Ints mask, Vec yes, Vec no) {
    return bits_of<Vec>((mask & bits_of<Ints>(yes)) | (~mask & bits_of<Ints>(no)));
}
inline Vec abs(Vec a) { return bits_of<Vec>(bits_of<Ints>(a) & 0x7fffffff); }
inline Vec select_greater(Vec a, Vec b, Vec yes, Vec no) { return select(a > b, yes, no); }

inline Vec iota() { return Vec{0, 1, 2, 3}; }

inline Vec load(const uint16_t* p) {
    const Pairs bits = {p[0], p[1], p[2], p[3]};
    return bits_of<Vec>(bits << 16);
}
inline void store(uint16_t* p, Vec v) {
    const Pairs u = bits_of<Pairs>(v);
    const Pairs rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const Pairs nan = bits_of<Pairs>(v != v);
    const Pairs r = (nan & 0x7fc0u) | (~nan & rounded);
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint16_t>(r[i]);
}

inline float reduce_add(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
// Returns 2^n, where t = 1.5 * 2^23 + n: n is in the low bits of t, and moves to the exponent.
inline Vec pow2_of_magic(Vec t) { return bits_of<Vec>((bits_of<Pairs>(t) << 23) + 0x3f800000u); }

inline Pairs load_pairs(const uint16_t* p) { return read<Pairs>(p); }
inline Pairs set1_pair(uint32_t bits) { return Pairs{bits, bits, bits, bits}; }
inline Pairs and_pairs(Pairs a, Pairs b) { return a & b; }
// Return the first or the second element of each pair: it is the low or the high half of a lane's bits.
inline Vec first_of_pairs(Pairs v) { return bits_of<Vec>(v << 16); }
inline Vec second_of_pairs(Pairs v) { return bits_of<Vec>(v & 0xffff0000u); }

// Integers. A lane of bytes holds four of them, neighbours along the reduced dimension.
inline Ints load_ints(const void* p) { return read<Ints>(p); }
inline void store_ints(void* p, Ints v) { memcpy(p, &v, sizeof(v)); }
inline Ints add_ints(Ints a, Ints b) { return bits_of<Ints>(bits_of<Pairs>(a) + bits_of<Pairs>(b)); }
inline Ints and_ints(Ints a, Ints b) { return a & b; }
inline Ints or_ints(Ints a, Ints b) { return a | b; }
template <int bits>
inline Ints shift_right(Ints v) {
    return bits_of<Ints>(bits_of<Pairs>(v) >> bits);
}
template <int bits>
inline Ints shift_left(Ints v) {
    return bits_of<Ints>(bits_of<Pairs>(v) << bits);
}
// Copies whole numbers from 0 to 255 to all bytes of their lanes.
inline Ints in_all_bytes(Vec v) { return bits_of<Ints>(__builtin_convertvector(v, Pairs) * 0x01010101u); }
inline Ints set1_int(int32_t x) { return Ints{x, x, x, x}; }
// Loads bytes, one a lane; unsigned here, signed below.
inline Ints load_bytes(const uint8_t* p) { return Ints{p[0], p[1], p[2], p[3]}; }
inline Ints load_signed_bytes(const int8_t* p) { return Ints{p[0], p[1], p[2], p[3]}; }
inline Vec to_float(Ints v) { return __builtin_convertvector(v, Vec); }
inline Ints low_nibbles(Ints v) { return v & 0x0f0f0f0f; }
inline Ints high_nibbles(Ints v) { return (v >> 4) & 0x0f0f0f0f; }
// Sixteen bytes, and the bytes at the places that the bytes of v name, from 0 to 15.
inline Ints load_table(const uint8_t* p) { return load_ints(p); }
inline Ints look_up(Ints table, Ints v) {
    uint8_t numbers[16], at[16], found[16];
    memcpy(numbers, &table, 16);
    memcpy(at, &v, 16);
    for (int i = 0; i < 16; ++i) found[i] = numbers[at[i]];
    return load_ints(found);
}
// Returns one code of each lane, from bit `shift` on, less z = 2^(bits - 1).
template <int bits>
inline Ints code_at(Ints v, int shift) {
    return bits_of<Ints>(bits_of<Pairs>(v) >> shift & ((1u << bits) - 1)) - (1 << (bits - 1));
}
// Returns the first (0) or second (1) element of each pair, as floats.
inline Vec one_of_pairs(Pairs p, int which) { return bits_of<Vec>(p << (16 - 16 * which) & 0xffff0000u); }
// Loads float16. Exact for denormals too. Infinities and NaN stay so: weights that are not finite have such scales.
inline Vec load_half(const uint16_t* p) {
    const Pairs h = {p[0], p[1], p[2], p[3]};
    const Vec magnitude = bits_of<Vec>((h & 0x7fffu) << 13) * set1(0x1p112f);
    const Pairs special = bits_of<Pairs>((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return bits_of<Vec>(bits_of<Pairs>(magnitude) | special | ((h & 0x8000u) << 16));
}
// Rounds to float16, to nearest even. Infinite from 65520 on.
inline Vec round_to_half(Vec v) {
    const Pairs bits = bits_of<Pairs>(v), sign = bits & 0x80000000u, magnitude = bits & 0x7fffffffu;
    const Pairs normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u)) & ~0x1fffu;
    const Pairs tiny = bits_of<Pairs>((bits_of<Vec>(magnitude) + set1(0.5f)) - set1(0.5f));
    const Pairs is_tiny = bits_of<Pairs>(magnitude < 0x38800000u), is_large = bits_of<Pairs>(normal >= 0x47800000u);
    const Pairs is_nan = bits_of<Pairs>(magnitude > 0x7f800000u);
    const Pairs large = 0x7f800000u | (is_nan & 0x400000u);
    return bits_of<Vec>((is_large & large) | (~is_large & ((is_tiny & tiny) | (~is_tiny & normal))) | sign);
}
inline Ints as_ints(Pairs p) { return bits_of<Ints>(p); }
// Rounds two vectors to bf16 pairs for dot_pairs. No number may be a NaN with low bits.
inline Pairs round_to_pairs(Vec first, Vec second) {
    const auto rounded = [](Vec v) {
        const Pairs u = bits_of<Pairs>(v);
        return u + 0x7fffu + ((u >> 16) & 1u);
    };
    return (rounded(first) >> 16) | (rounded(second) & 0xffff0000u);
}
// Adds the four products of unsigned codes and signed bytes in every lane. With SSE2 even and odd bytes are widened to
// 16 bits apart.
inline Ints dot_codes8(Ints acc, Ints codes, Ints x) {
#ifdef __SSE2__
    const __m128i c = bits_of<__m128i>(codes), b = bits_of<__m128i>(x);
    const __m128i even = _mm_madd_epi16(_mm_and_si128(c, _mm_set1_epi16(255)), _mm_srai_epi16(_mm_slli_epi16(b, 8), 8));
    const __m128i odd = _mm_madd_epi16(_mm_srli_epi16(c, 8), _mm_srai_epi16(b, 8));
    return acc + bits_of<Ints>(_mm_add_epi32(even, odd));
#else
    for (int i = 0; i < 4; ++i) acc += ((codes >> (8 * i)) & 255) * ((x << (24 - 8 * i)) >> 24);
    return acc;
#endif
}
inline Ints dot_codes4(Ints acc, Ints codes, Ints x) { return dot_codes8(acc, codes, x); }
// Stores the low byte of each lane's bits.
inline void store_low_bytes(int8_t* p, Vec v) {
    const Ints bits = bits_of<Ints>(v);
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(bits[i]);
}
// As dot_codes8, for elements from -64 to 63.
inline Ints dot_pieces(Ints acc, Ints codes, Ints x) { return dot_codes8(acc, codes, x); }
// Stores bits 0 to 6 of the lanes, and bits 7 to 13, as bytes.
inline void store_pieces(uint8_t* low, uint8_t* high, Vec v) {
    const Ints bits = bits_of<Ints>(v);
    for (int i = 0; i < kLanes; ++i) {
        low[i] = bits[i] & 127;
        high[i] = bits[i] >> 7 & 127;
    }
}
// Unpacks floats of eight bits (sign, exponent, kMantissa bits) to pairs of bf16: bytes 0 and 2 of a lane become
// `even`, bytes 1 and 3 `odd`. Bits are only moved, so results are 2^-120 (e4m3) or 2^-112 (e5m2) times the numbers.
// Numbers that are not normal become finite, but wrong.
template <int kMantissa>
inline void unpack_float8(Ints v, Pairs& even, Pairs& odd) {
    constexpr uint32_t kSign = 0x80008000u, kRest = (0x7fu << (7 - kMantissa)) * 0x10001u;
    const Pairs bits = bits_of<Pairs>(v);
    // An even byte is the low half of 16 bits: its exponent and mantissa move up to those of bf16, its sign to bit 15.
    even = ((bits << (7 - kMantissa)) & kRest) | ((bits << 8) & kSign);
    // An odd byte is the high half: its exponent and mantissa move down, its sign stays.
    odd = ((bits >> (1 + kMantissa)) & kRest) | (bits & kSign);
}
// Writes the sums of each 16 of 64 bytes.
inline void sum_bytes(const int8_t* p, int32_t* sums) {
    for (int i = 0; i < 4; ++i) {
        const Ints s = dot_codes4(set1_int(0), set1_int(0x01010101), load_ints(p + i * 16));
        sums[i] = (s[0] + s[1]) + (s[2] + s[3]);
    }
}
