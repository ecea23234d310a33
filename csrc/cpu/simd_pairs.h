// Products of bytes for x86's sets without VNNI, on top of what their vector types define: multiply_pairs (vpmaddubsw),
// add_shorts, widen_shorts, magnitudes, with_signs. Included by simd_avx2.h and simd_avx512.h only.

// Makes the compiler finish a sum here: compilers put off additions of integers, and keep all that is to be added in
// registers.
inline Ints now(Ints sum) {
    asm("" : "+v"(sum));
    return sum;
}

// Adds the four products of unsigned codes and signed bytes in every lane. Four-bit codes cannot saturate a pair's sum.
inline Ints dot_codes4(Ints acc, Ints codes, Ints x) {
    return now(add_ints(acc, widen_shorts(multiply_pairs(codes, x))));
}

// As dot_codes4, for signed codes of eight bits: magnitudes of codes times elements that take the codes' signs.
// Elements are at least -127, so none becomes 128, and no pair exceeds 2 * 128 * 127.
#define OCTAVO_CENTRED_CODES
constexpr bool kCodesAreCentred = true;
inline Ints centred(Ints codes) { return sub_bytes(codes, set1_int(static_cast<int32_t>(0x80808080u))); }
inline Ints dot_codes8(Ints acc, Ints codes, Ints x) {
    return dot_codes4(acc, magnitudes(codes), with_signs(x, codes));
}

// Sums of pairs of products, in 16 bits: of 32 elements at most 16 * 15 * 127, which is below 2^15.
#define OCTAVO_SHORT_SUMS
inline Ints begin_sums4(int32_t) { return set1_int(0); }
inline Ints add_to_sums4(Ints sums, Ints codes, Ints x) { return now(add_shorts(sums, multiply_pairs(codes, x))); }
inline Ints end_sums4(Ints sums, int32_t zero_point_term) {
    return add_ints(set1_int(zero_point_term), widen_shorts(sums));
}

// Adds the products of two steps of codes of six bits: sums of four products fit 16 bits (4 * 63 * 127).
inline Ints dot_two_codes6(Ints acc, Ints codes, Ints x, Ints more_codes, Ints more_x) {
    const Ints sums = add_shorts(multiply_pairs(codes, x), multiply_pairs(more_codes, more_x));
    return now(add_ints(acc, widen_shorts(sums)));
}
