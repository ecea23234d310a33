// The operations that AVX2, AVX-512 and NEON write alike, in the compiler's own vectors. Included by simd_*.h only,
// after their types: Vec has kLanes floats, Ints as many integers, Pairs as many pairs of bf16. Sets have intrinsics
// for what compilers do not make of such code.

typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));  // the bits of any of these types
typedef int32_t SignedWords __attribute__((vector_size(4 * kLanes)));

template <class V>
inline Words as_words(V v) {
    return bits_of<Words>(v);
}

inline Vec zero() { return Vec{}; }
inline Vec load(const float* p) { return read<Vec>(p); }
inline void store(float* p, Vec v) { memcpy(p, &v, sizeof(v)); }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec abs(Vec a) { return bits_of<Vec>(as_words(a) & 0x7fffffffu); }
// Returns 2^n, where t = 1.5 * 2^23 + n: n is in the low bits of t, and moves to the exponent.
inline Vec pow2_of_magic(Vec t) { return bits_of<Vec>((as_words(t) << 23) + 0x3f800000u); }

// Rounds to bf16, to nearest even, in the high halves of lanes. The low halves are rubbish. A NaN may become anything.
inline Words rounded_to_bf16(Vec v) { return as_words(v) + 0x7fffu + ((as_words(v) >> 16) & 1u); }
// Returns pairs of the high halves of lanes.
inline Pairs pairs_of(Words first, Words second) { return bits_of<Pairs>(first >> 16 | (second & 0xffff0000u)); }

inline Pairs load_pairs(const uint16_t* p) { return read<Pairs>(p); }
inline Pairs set1_pair(uint32_t bits) { return bits_of<Pairs>(Words{} + bits); }
inline Pairs and_pairs(Pairs a, Pairs b) { return a & b; }
inline Ints as_ints(Pairs p) { return bits_of<Ints>(p); }
// Returns the first (0) or second (1) element of each pair, as floats.
inline Vec one_of_pairs(Pairs p, int which) { return bits_of<Vec>(as_words(p) << (16 - 16 * which) & 0xffff0000u); }

// Integers. A lane of bytes holds four of them, neighbours along the reduced dimension.
inline Ints load_ints(const void* p) { return read<Ints>(p); }
inline void store_ints(void* p, Ints v) { memcpy(p, &v, sizeof(v)); }
inline Ints add_ints(Ints a, Ints b) { return bits_of<Ints>(as_words(a) + as_words(b)); }
inline Ints and_ints(Ints a, Ints b) { return a & b; }
inline Ints or_ints(Ints a, Ints b) { return a | b; }
template <int bits>
inline Ints shift_right(Ints v) {
    return bits_of<Ints>(as_words(v) >> bits);
}
template <int bits>
inline Ints shift_left(Ints v) {
    return bits_of<Ints>(as_words(v) << bits);
}
// Copies whole numbers from 0 to 255 to all bytes of their lanes.
inline Ints in_all_bytes(Vec v) {
    return bits_of<Ints>(as_words(__builtin_convertvector(v, SignedWords)) * 0x01010101u);
}
inline Ints set1_int(int32_t x) { return bits_of<Ints>(Words{} + static_cast<uint32_t>(x)); }
inline Vec to_float(Ints v) { return __builtin_convertvector(bits_of<SignedWords>(v), Vec); }
inline Ints low_nibbles(Ints v) { return bits_of<Ints>(as_words(v) & 0x0f0f0f0fu); }
inline Ints high_nibbles(Ints v) { return bits_of<Ints>(as_words(v) >> 4 & 0x0f0f0f0fu); }
// Returns one code of each lane, from bit `shift` on, less z = 2^(bits - 1).
template <int bits>
inline Ints code_at(Ints v, int shift) {
    return bits_of<Ints>((as_words(v) >> shift & ((1u << bits) - 1)) - (1u << (bits - 1)));
}
// Unpacks floats of eight bits (sign, exponent, kMantissa bits) to pairs of bf16: bytes 0 and 2 of a lane become
// `even`, bytes 1 and 3 `odd`. Bits are only moved, so results are 2^-120 (e4m3) or 2^-112 (e5m2) times the numbers.
// Numbers that are not normal become finite, but wrong.
template <int kMantissa>
inline void unpack_float8(Ints v, Pairs& even, Pairs& odd) {
    constexpr uint32_t kSign = 0x80008000u, kRest = (0x7fu << (7 - kMantissa)) * 0x10001u;
    const Words bits = as_words(v);
    // An even byte is the low half of 16 bits: its exponent and mantissa move up to those of bf16, its sign to bit 15.
    even = bits_of<Pairs>((bits << (7 - kMantissa) & kRest) | (bits << 8 & kSign));
    // An odd byte is the high half: its exponent and mantissa move down, its sign stays.
    odd = bits_of<Pairs>((bits >> (1 + kMantissa) & kRest) | (bits & kSign));
}
