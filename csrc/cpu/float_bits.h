// Conversions between floats and their bits, one number at a time, to nearest even, for packers. Kernels have vectors
// (simd.h).
#pragma once

#include <cstdint>
#include <cstring>

namespace octavo {

template <class T>
inline T load(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

inline uint32_t bits_of(float value) { return load<uint32_t>(&value); }

inline float float_of(uint32_t bits) { return load<float>(&bits); }

inline float half_to_float(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
    if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(mantissa) * 0x1p-24f));
    return float_of(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
}

inline uint16_t float_to_half(float value) {
    const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= bits_of(65536.0f)) return static_cast<uint16_t>(sign | (magnitude > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (magnitude < bits_of(0x1p-14f)) {
        // Below the normal float16 numbers: floats from 0.5 on have the same spacing, so adding 0.5 rounds.
        return static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
    }
    return static_cast<uint16_t>(sign | (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

// Rounds a float to bf16. It has no branch, so that compilers vectorize it.
inline uint16_t float_to_bf16(float value) {
    const uint32_t bits = bits_of(value), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
}

}  // namespace octavo
