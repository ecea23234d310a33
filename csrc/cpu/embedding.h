// Lookup of embeddings: rows of matrices, packed or not, floats or integers, as they were before packing, and their
// changes by adapters. Included by kernels.cpp only.
#pragma once

#include "int_product.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Calls f(k, value) for each element k of row n of a packed float matrix.
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

// Returns element `at` of output `lane` (0 .. kPanel - 1) in the first block of `w`, divided by the matrix's factor. It
// must agree with IntFormat::column.
template <class F>
inline float element_of_block(const BlocksView& w, int64_t at, int64_t lane) {
    using Unpacked = typename F::UnpackedFormat;
    int32_t code;
    if constexpr (Unpacked::kCodesPerByte == 2) {
        // Low half: the first four of eight elements; high half: the next four.
        const uint8_t both = static_cast<uint8_t>(w.codes[at / 8 * kStepBytes + lane * 4 + at % 4]);
        const int nibble = at / 4 % 2 == 0 ? both & 15 : both >> 4;
        code = Unpacked::kHasTable ? w.table[nibble] - 128 : nibble - 8;
    } else {
        code = static_cast<uint8_t>(w.codes[at / 4 * kStepBytes + lane * 4 + at % 4]) -
               (1 << (Unpacked::kMultipliedBits - 1));
    }
    const int64_t group = at / Unpacked::kGroupElements;
    float value = scale_value(w.scales_of_group<Unpacked>(group)[lane]) * static_cast<float>(code);
    if constexpr (Unpacked::kHasMinimaBy32) {
        value += bits_of<float>(static_cast<uint32_t>(w.minima_by_32<Unpacked>()[lane * 2 + at / 32]) << 16);
    } else if constexpr (Unpacked::kHasMinimaBy16) {
        value += w.minima_by_16<Unpacked>(group)[lane] * F::kZeroPointTermOfOne;
    }
    return value;
}

// Calls f(k, value) for each element k of row n of a packed integer matrix.
template <class F, class Function>
inline void int_row(const Matrix& m, int64_t n, Function f) {
    alignas(64) char unpacked[F::kUnpackedBytes ? F::kUnpackedBytes * kBlocksPerSuperblock : 1];
    const int64_t blocks = (m.k + kQBlock - 1) / kQBlock;
    const char* panel = static_cast<const char*>(m.data) + n / kPanel * blocks * F::kBlockBytes;
    for (int64_t block = 0; block < blocks; block += kBlocksPerSuperblock) {
        const int64_t count = min_of<int64_t>(kBlocksPerSuperblock, blocks - block);
        BlocksView w = F::unpack_blocks(panel, block, count, UnpackArgs(m), unpacked);
        const int64_t end = min_of(m.k, (block + count) * kQBlock);
        for (int64_t k = block * kQBlock; k < end; ++k) {
            if (k % kQBlock == 0 && k > block * kQBlock) w.next_block();
            f(k, m.factor * element_of_block<F>(w, k % kQBlock, n % kPanel));
        }
    }
}

// Elements of a row that are finished together if an adapter changes them.
constexpr int64_t kEmbeddedAtOnce = 256;

// Calls put(j, value) for each element j of row `row` of an adapter's B.
template <class E, class Function>
inline void factor_row(const AdapterFactors& f, int64_t row, Function put) {
    using T = typename E::T;
    const AdapterPanel& panel = f.panels[row / kPanel];
    const T* b = static_cast<const T*>(f.b) + panel.offset + row % kPanel * E::kStep;
    for (int64_t j = 0; j < panel.count; ++j) {
        const T x = b[j / E::kStep * kPanel * E::kStep + j % E::kStep];
        if constexpr (sizeof(T) == 4) {
            put(j, x);
        } else {
            put(j, bits_of<float>(static_cast<uint32_t>(x) << 16));
        }
    }
}

// Writes token t's row as its adapter changes it. `read_row` yields the elements of the base's row in order.
template <class E, class ReadRow>
inline void adapted_row(const EmbeddingArgs& a, int64_t t, const AdapterFactors& f, ReadRow read_row) {
    const int64_t row = a.token_ids[t], width = a.matrix.k;
    alignas(64) float part[kEmbeddedAtOnce];
    alignas(64) float shrunk[kMaxRank];
    const auto finish = [&](int64_t begin, int64_t count) {
        with_element(a.out_dtype, [&](auto element) {
            auto* out = static_cast<typename decltype(element)::T*>(a.out) + t * width + begin;
            for_vectors(count, [&](int64_t i, int lanes) {
                Vec sum = load_some(part + i, lanes);
                const typename E::T* at = static_cast<const typename E::T*>(f.a) + begin + i;
                for (int64_t j = 0; j < f.rank && !f.replaces; ++j, at += width) {
                    sum = fma(set1(shrunk[j]), load_some(at, lanes), sum);
                }
                store_some(out + i, mul(set1(a.scale), sum), lanes);
            });
        });
    };
    const auto put = [&](int64_t k, float x) {
        if (k >= width) return;  // a padded factor has elements beyond the row
        part[k % kEmbeddedAtOnce] = x;
        const int64_t count = k % kEmbeddedAtOnce + 1;
        if (count == kEmbeddedAtOnce || k + 1 == width) finish(k + 1 - count, count);
    };
    if (f.replaces) return factor_row<E>(f, row, put);
    factor_row<E>(f, row, [&](int64_t j, float x) { shrunk[j] = x; });
    read_row(put);
}

// Calls f with a pointer to row n of a table that is not packed.
template <class F>
inline void with_table_row(const Matrix& m, int64_t n, F f) {
    with_element(m.format == kRowsF32 ? kF32 : kBF16,
                 [&](auto element) { f(static_cast<const typename decltype(element)::T*>(m.data) + n * m.k); });
}

// Calls f(k, value) for each element k of row n of a table that is not packed.
template <class Function>
inline void table_row(const Matrix& m, int64_t n, Function f) {
    with_table_row(m, n, [&](const auto* row) {
        alignas(64) float part[kLanes];
        for_vectors(m.k, [&](int64_t i, int lanes) {
            store(part, load_some(row + i, lanes));
            for (int lane = 0; lane < lanes; ++lane) f(i + lane, part[lane]);
        });
    });
}

// Writes row n of a table that is not packed as the output of token t.
inline void copy_row(const EmbeddingArgs& a, int64_t t, int64_t n) {
    const Vec scale = set1(a.scale);
    with_table_row(a.matrix, n, [&](const auto* row) {
        with_element(a.out_dtype, [&](auto element) {
            auto* out = static_cast<typename decltype(element)::T*>(a.out) + t * a.matrix.k;
            for_vectors(a.matrix.k, [&](int64_t i, int lanes) {
                store_some(out + i, mul(scale, load_some(row + i, lanes)), lanes);
            });
        });
    });
}

// The kernel. In a packed matrix a row is one lane of one panel and must be gathered: a tied embedding is stored only
// once.
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
            } else if (m.format < 0) {
                table_row(m, row, put);
            } else {
                with_format(m, [&](auto format) { int_row<decltype(format)>(m, row, put); });
            }
        };
        const int32_t slot = a.slots && valid ? a.slots[t] : -1;
        if (slot >= 0 && a.factors[slot].panels != nullptr) {
            return with_element(a.factor_dtype,
                                [&](auto element) { adapted_row<decltype(element)>(a, t, a.factors[slot], read_row); });
        }
        if (m.format < 0 && valid) return copy_row(a, t, row);
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
