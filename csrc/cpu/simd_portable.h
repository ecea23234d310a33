// The vector type of the kernels in the compiler's own 128-bit vectors: the fallback on x86-64 (SSE2) and what aarch64
// builds use (NEON). Included by simd.h only, inside the namespace of its instruction set.

constexpr int kLanes = 4;
constexpr int kTileRows = 4;
constexpr int kTileRows4 = 2;
constexpr int kTileRows8 = 1;
constexpr int kScoreRows = 3;
constexpr int kScoreVecs = 2;
constexpr int kValueVecs = 2;

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint32_t Pairs __attribute__((vector_size(16)));  // One pair of bf16 a lane.

template <class To, class From>
inline To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From), "same bits");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

inline Vec zero() { return Vec{0, 0, 0, 0}; }
inline Vec set1(float x) { return Vec{x, x, x, x}; }
inline Vec load(const float* p) {
    Vec v;
    memcpy(&v, p, sizeof(v));
    return v;
}
inline void store(float* p, Vec v) { memcpy(p, &v, sizeof(v)); }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec fma(Vec a, Vec b, Vec c) {
#ifdef __aarch64__
    return bits_of<Vec>(vfmaq_f32(bits_of<float32x4_t>(c), bits_of<float32x4_t>(a), bits_of<float32x4_t>(b)));
#else
    return a * b + c;
#endif
}
inline Vec select(Ints mask, Vec yes, Vec no) {
    return bits_of<Vec>((mask & bits_of<Ints>(yes)) | (~mask & bits_of<Ints>(no)));
}
// As on x86: the second operand where either is NaN.
inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }
inline Vec min(Vec a, Vec b) { return select(a < b, a, b); }
inline Vec select_greater(Vec a, Vec b, Vec yes, Vec no) { return select(a > b, yes, no); }

inline Vec load_n(const float* p, int n) {
    float buffer[kLanes] = {};
    memcpy(buffer, p, static_cast<size_t>(n) * sizeof(float));
    return load(buffer);
}
inline void store_n(float* p, Vec v, int n) {
    float buffer[kLanes];
    store(buffer, v);
    memcpy(p, buffer, static_cast<size_t>(n) * sizeof(float));
}
inline Vec iota() { return Vec{0, 1, 2, 3}; }
inline Vec keep_lanes(Vec v, int begin, int end, Vec other) {
    const Ints lane = {0, 1, 2, 3};
    return select((lane >= begin) & (lane < end), v, other);
}

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
inline Vec load_n(const uint16_t* p, int n) {
    uint16_t buffer[kLanes] = {};
    memcpy(buffer, p, static_cast<size_t>(n) * sizeof(uint16_t));
    return load(buffer);
}
inline void store_n(uint16_t* p, Vec v, int n) {
    uint16_t buffer[kLanes];
    store(buffer, v);
    memcpy(p, buffer, static_cast<size_t>(n) * sizeof(uint16_t));
}

inline float reduce_add(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline float reduce_max(Vec v) {
    const float a = v[0] > v[2] ? v[0] : v[2];
    const float b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
}
// 2^n, where t = 1.5 * 2^23 + n.
inline Vec pow2_of_magic(Vec t) { return bits_of<Vec>((bits_of<Pairs>(t) << 23) + 0x3f800000u); }

inline Pairs load_pairs(const uint16_t* p) {
    Pairs v;
    memcpy(&v, p, sizeof(v));
    return v;
}
inline Pairs set1_pair(uint32_t bits) { return Pairs{bits, bits, bits, bits}; }
inline Vec dot_pairs(Vec acc, Pairs a, Pairs b) {
    acc = fma(bits_of<Vec>(a << 16), bits_of<Vec>(b << 16), acc);
    return fma(bits_of<Vec>(a & 0xffff0000u), bits_of<Vec>(b & 0xffff0000u), acc);
}
