// Rows of packed matrices, floats or integers, as they were before packing. Included by kernels.cpp only.
#pragma once

#include "linear_int.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Row n of a float matrix: element k goes to f(k, value).
template <class E, class Function>
inline void float_row(const Matrix& m, int64_t n, Function f) {
    using T = typename E::T;
    const int64_t steps = (m.k + E::kStep - 1) / E::kStep;
    const T* w = static_cast<const T*>(m.data) + (n / kPanel * steps * kPanel + n % kPanel) * E::kStep;
    for (int64_t k = 0; k < m.k; ++k) {
        const T x = w[k / E::kStep * kPanel * E::kStep + k % E::kStep];
        if constexpr (sizeof(T) == 4) {
            f(k, x);
        } else {
            f(k, bits_of<float>(static_cast<uint32_t>(x) << 16));
        }
    }
}

// Row token_ids[t] is one lane of one panel: gathered, because a tied embedding is stored only once, packed.
void embedding(const void* args, int64_t task) {
    const EmbeddingArgs& a = *static_cast<const EmbeddingArgs*>(args);
    const Matrix& m = a.matrix;
    for_rows(a, task, a.rows, [&](int64_t t) {
        const int64_t row = a.token_ids[t];
        const bool valid = row >= 0 && row < m.n;
        const auto read_row = [&](auto put) {
            if (!valid) {
                for (int64_t k = 0; k < m.k; ++k) put(k, 0.0f);
            } else if (m.format == kWeightF32) {
                float_row<F32>(m, row, put);
            } else if (m.format == kWeightBF16) {
                float_row<BF16>(m, row, put);
            } else {
                with_format(m, [&](auto format) { int_row<decltype(format)>(m, row, put); });
            }
        };
        if (a.out_dtype == kF32) {
            float* out = static_cast<float*>(a.out) + t * m.k;
            read_row([&](int64_t k, float x) { out[k] = a.scale * x; });
        } else {
            uint16_t* out = static_cast<uint16_t*>(a.out) + t * m.k;
            read_row([&](int64_t k, float x) { out[k] = narrow_scalar(a.scale * x); });
        }
    });
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
