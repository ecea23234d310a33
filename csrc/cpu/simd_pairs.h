// Products of bytes of x86's sets without VNNI, over what their vector types bring: multiply_pairs (vpmaddubsw),
// add_shorts, widen_shorts, magnitudes, with_signs. Included by simd_avx2.h and simd_avx512.h only.

// A sum that is finished here: compilers put additions of integers off, and keep all that is to be added.
inline Ints now(Ints sum) {
    asm("" : "+v"(sum));
    return sum;
}

// Adds the four products of unsigned codes and signed bytes in every lane. Four-bit codes cannot saturate a pair's sum.
inline Ints dot_codes4(Ints acc, Ints codes, Ints x) {
    return now(add_ints(acc, widen_shorts(multiply_pairs(codes, x))));
}

// The same for signed codes of eight bits: magnitudes times elements that have taken their signs. Elements are at least
// -127, so that none becomes 128, and no pair exceeds 2 * 128 * 127.
#define OCTAVO_CENTRED_CODES
constexpr bool kCodesAreCentred = true;
inline Ints centred(Ints codes) { return sub_bytes(codes, set1_int(static_cast<int32_t>(0x80808080u))); }
inline Ints dot_codes8(Ints acc, Ints codes, Ints x) {
    return dot_codes4(acc, magnitudes(codes), with_signs(x, codes));
}

// Products of pairs, summed in 16 bits: of 32 elements at most 16 * 15 * 127, which is below 2^15.
#define OCTAVO_SHORT_SUMS
inline Ints begin_sums4(int32_t) { return set1_int(0); }
inline Ints add_to_sums4(Ints sums, Ints codes, Ints x) { return now(add_shorts(sums, multiply_pairs(codes, x))); }
inline Ints end_sums4(Ints sums, int32_t start) { return add_ints(set1_int(start), widen_shorts(sums)); }

// Of codes of six bits two products each fit 16 bits: 4 * 63 * 127.
inline Ints dot_two_codes6(Ints acc, Ints codes, Ints x, Ints more_codes, Ints more_x) {
    const Ints sums = add_shorts(multiply_pairs(codes, x), multiply_pairs(more_codes, more_x));
    return now(add_ints(acc, widen_shorts(sums)));
}
