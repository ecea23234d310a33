// Products of quantized rows with integer matrices. A tile is R rows by one panel. The products of codes and elements
// are summed in integers, which are exact in any order; what is left of a block is a few float operations per output,
// in one order over the blocks, so a row's bits depend neither on R nor on how the work was cut.
// Included by linear.h and embedding.h only.
#pragma once

#include "epilogue.h"
#include "outliers.h"

namespace octavo::OCTAVO_ISA {
namespace {

// The packed blocks of one layout of integer weights (docs/kernels.md).
template <int bits, int group, bool minima>
struct IntFormat {
    static constexpr int kBits = bits;
    static constexpr int kGroup = group;
    static constexpr bool kMinima = minima;
    static constexpr int kGroups = kQBlock / group;
    static constexpr int kCodeBytes = kPanel * kQBlock * bits / 8;
    static constexpr int kScaleBytes = kPanel * kGroups * 2;
    static constexpr int kBlockBytes = kCodeBytes + kScaleBytes + (minima ? kPanel * 4 : 0);
};

template <class F>
inline int32_t start_of_sum(const QBlock& x, int g) {
    return F::kBits == 4 ? x.start4[g] : F::kGroup == 32 ? x.start8[g] : x.start16[g];
}

// How far ahead a single row tile fetches, into the second-level cache: the first has no room for what else it reads.
constexpr int kIntPrefetchBytes = 8192;

// What to fetch while a tile is computed: so many lines a block, from here on.
struct Fetch {
    const char* from;
    int lines;
};

// y[r, 0 .. kPanel) for R rows of `blocks` blocks. V vectors of outputs are worked on at a time.
template <class F, int R>
void int_tile(const char* w, int64_t blocks, const QBlock* rows, int64_t x_stride, Vec factor, float* y, Fetch fetch) {
    constexpr int V = kIntVecs;
    constexpr int kStepBytes = kPanel * 4;
    constexpr int kVecBytes = kLanes * 4;
    constexpr int kStepsPerGroup = F::kGroup * F::kBits / 32;
    const QBlock* x[R];
    for (int r = 0; r < R; ++r) x[r] = rows + r * x_stride;
    Vec acc[R][kVecsPerPanel];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < kVecsPerPanel; ++v) acc[r][v] = zero();
    }
    for (int64_t b = 0; b < blocks; ++b, w += F::kBlockBytes) {
        for (int i = 0; i < fetch.lines; ++i, fetch.from += 64) __builtin_prefetch(fetch.from, 0, 2);
#pragma GCC unroll 8
        for (int v0 = 0; v0 < kVecsPerPanel; v0 += V) {
#pragma GCC unroll 4
            for (int g = 0; g < F::kGroups; ++g) {
                Ints sum[R][V];
                for (int r = 0; r < R; ++r) {
                    const Ints start = set1_int(start_of_sum<F>(x[r][b], g));
                    for (int v = 0; v < V; ++v) sum[r][v] = start;
                }
#pragma GCC unroll 8
                for (int s = g * kStepsPerGroup; s < (g + 1) * kStepsPerGroup; ++s) {
                    const char* step = w + s * kStepBytes + v0 * kVecBytes;
                    if constexpr (F::kBits == 4) {
                        Ints low[V], high[V];
                        for (int v = 0; v < V; ++v) {
                            const Ints both = load_ints(step + v * kVecBytes);
                            low[v] = low_nibbles(both);
                            high[v] = high_nibbles(both);
                        }
                        for (int r = 0; r < R; ++r) {
                            const Ints four = set1_bytes(x[r][b].q + s * 8);
                            for (int v = 0; v < V; ++v) sum[r][v] = dot_codes4(sum[r][v], low[v], four);
                        }
                        for (int r = 0; r < R; ++r) {
                            const Ints four = set1_bytes(x[r][b].q + s * 8 + 4);
                            for (int v = 0; v < V; ++v) sum[r][v] = dot_codes4(sum[r][v], high[v], four);
                        }
                    } else {
                        Ints codes[V];
                        for (int v = 0; v < V; ++v) codes[v] = load_ints(step + v * kVecBytes);
                        for (int r = 0; r < R; ++r) {
                            const Ints four = set1_bytes(x[r][b].q + s * 4);
                            for (int v = 0; v < V; ++v) sum[r][v] = dot_codes8(sum[r][v], codes[v], four);
                        }
                    }
                }
                const uint16_t* scales = reinterpret_cast<const uint16_t*>(w + F::kCodeBytes) + g * kPanel;
                for (int v = 0; v < V; ++v) {
                    const Vec d = load_half(scales + (v0 + v) * kLanes);
                    for (int r = 0; r < R; ++r) {
                        const Vec scaled = mul(d, set1(x[r][b].scale[g * F::kGroup / 32]));
                        acc[r][v0 + v] = fma(scaled, to_float(sum[r][v]), acc[r][v0 + v]);
                    }
                }
            }
            for (int v = 0; v < V; ++v) {
                const uint16_t* minima = reinterpret_cast<const uint16_t*>(w + F::kCodeBytes + F::kScaleBytes);
                if constexpr (F::kMinima) {
                    const Pairs m = load_pairs(minima + (v0 + v) * kLanes * 2);
                    for (int r = 0; r < R; ++r) {
                        acc[r][v0 + v] = dot_pairs(acc[r][v0 + v], m, BF16::broadcast(x[r][b].sums));
                    }
                }
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < kVecsPerPanel; ++v) store(y + r * kMaxUnit + v * kLanes, mul(acc[r][v], factor));
    }
}

// Element k of a panel's rows, as floats.
template <class F>
inline void int_column(const char* w, int32_t k, Vec* column) {
    const char* block = w + k / kQBlock * F::kBlockBytes;
    const int at = k % kQBlock;
    const char* codes = block + (F::kBits == 4 ? at / 8 : at / 4) * kPanel * 4;
    const int shift = at % 4 * 8 + (F::kBits == 4 ? at / 4 % 2 * 4 : 0);
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(block + F::kCodeBytes) + at / F::kGroup * kPanel;
    const uint16_t* minima = reinterpret_cast<const uint16_t*>(block + F::kCodeBytes + F::kScaleBytes);
    for (int v = 0; v < kVecsPerPanel; ++v) {
        const Vec code = to_float(code_at<F::kBits>(load_ints(codes + v * kLanes * 4), shift));
        column[v] = mul(load_half(scales + v * kLanes), code);
        if constexpr (F::kMinima) {
            column[v] = add(column[v], one_of_pairs(load_pairs(minima + v * kLanes * 2), at / 32));
        }
    }
}

// Adds to rows of y what the outliers of a batch contribute to the panel at w.
template <class F>
void add_outliers(const char* w, const Outlier* outlier, const Outlier* end, float factor, float* y) {
    while (outlier < end) {
        const int32_t k = outlier->k;
        Vec column[kVecsPerPanel];
        int_column<F>(w, k, column);
        for (; outlier < end && outlier->k == k; ++outlier) {
            const Vec x = set1(outlier->value * factor);
            float* to = y + outlier->row * kMaxUnit;
            for (int v = 0; v < kVecsPerPanel; ++v) store(to + v * kLanes, fma(x, column[v], load(to + v * kLanes)));
        }
    }
}

// Each unit of panels meets every row before the next: rows in batches, which share what is made of weights for their
// outliers, and those in tiles. Meanwhile what follows is fetched, in equal parts.
template <class F>
void int_block(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
    alignas(64) float y[kOutlierRows * kMaxUnit];
    OutlierList outliers;
    const int64_t blocks = (a.matrix.k + kQBlock - 1) / kQBlock;
    const int64_t panel_bytes = blocks * F::kBlockBytes;
    const int64_t unit = unit_vecs(a, kVecsPerPanel) / kVecsPerPanel;
    const int64_t rows = row_end - row_begin;
    const QBlock* x = static_cast<const QBlock*>(a.x) + row_begin * a.x_stride;
    if (!outliers.collect(x, a.x_stride, blocks, rows, kOutlierRows)) {
        const int64_t middle = row_begin + rows / 2;
        int_block<F>(a, row_begin, middle, panel_begin, panel_end);
        return int_block<F>(a, middle, row_end, panel_begin, panel_end);
    }
    const int64_t all_tiles = (rows + kIntRows - 1) / kIntRows;
    const int lines = static_cast<int>((F::kBlockBytes / 64 + all_tiles - 1) / all_tiles);
    const Vec factor = set1(a.matrix.factor);
    for (int64_t panel = panel_begin; panel < panel_end; panel += unit) {
        const int64_t panels = min_of(unit, panel_end - panel);
        const char* w = static_cast<const char*>(a.matrix.data) + panel * panel_bytes;
        int64_t tile = 0;
        for (int64_t first = 0; first < rows; first += kOutlierRows) {
            const int64_t some = min_of<int64_t>(kOutlierRows, rows - first);
            const int64_t tiles = (some + kIntRows - 1) / kIntRows;
            for (int64_t t = 0; t < tiles; ++t, ++tile) {
                const int64_t begin = some * t / tiles;
                const int64_t end = some * (t + 1) / tiles;
                for (int64_t p = 0; p < panels; ++p) {
                    const char* panel_w = w + p * panel_bytes;
                    const char* next = all_tiles == 1 ? panel_w + kIntPrefetchBytes
                                                      : panel_w + panels * panel_bytes + tile * lines * blocks * 64;
                    with_constant<kIntRows>(end - begin, [&](auto r) {
                        int_tile<F, decltype(r)::kValue>(panel_w, blocks, x + (first + begin) * a.x_stride, a.x_stride,
                                                         factor, y + begin * kMaxUnit + p * kPanel, Fetch{next, lines});
                    });
                }
            }
            const int64_t batch = first / kOutlierRows;
            for (int64_t p = 0; p < panels; ++p) {
                add_outliers<F>(w + p * panel_bytes, outliers.begin(batch), outliers.end(batch), a.matrix.factor,
                                y + p * kPanel);
            }
            finish(a, {y, kMaxUnit, row_begin + first, some, panel * kPanel, panels * kPanel});
        }
    }
}

// Calls f with the format of an integer matrix.
template <class Function>
inline void with_format(const Matrix& m, Function f) {
    if (m.format == kWeightInt4) {
        m.minima ? f(IntFormat<4, 32, true>{}) : f(IntFormat<4, 32, false>{});
    } else if (m.group == 32) {
        m.minima ? f(IntFormat<8, 32, true>{}) : f(IntFormat<8, 32, false>{});
    } else {
        m.minima ? f(IntFormat<8, 16, true>{}) : f(IntFormat<8, 16, false>{});
    }
}

inline float half_value(uint16_t h) {
    float magnitude = bits_of<float>((h & 0x7fffu) << 13) * 0x1p112f;
    // A weight that is not finite has the scale NaN.
    if ((h & 0x7c00u) == 0x7c00u) magnitude = h & 0x3ffu ? __builtin_nanf("") : __builtin_inff();
    return h & 0x8000u ? -magnitude : magnitude;
}

// Row n of an integer matrix: element k goes to f(k, value).
template <class F, class Function>
inline void int_row(const Matrix& m, int64_t n, Function f) {
    const int64_t blocks = (m.k + kQBlock - 1) / kQBlock;
    const int64_t lane = n % kPanel;
    for (int64_t k = 0; k < m.k; ++k) {
        const char* w = static_cast<const char*>(m.data) + (n / kPanel * blocks + k / kQBlock) * F::kBlockBytes;
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(w + F::kCodeBytes);
        const uint16_t* minima = reinterpret_cast<const uint16_t*>(w + F::kCodeBytes + F::kScaleBytes);
        const int64_t at = k % kQBlock;
        int32_t code;
        if constexpr (F::kBits == 4) {
            const uint8_t both = static_cast<uint8_t>(w[at / 8 * kPanel * 4 + lane * 4 + at % 4]);
            code = (at / 4 % 2 == 0 ? both & 15 : both >> 4) - 8;
        } else {
            code = static_cast<uint8_t>(w[at / 4 * kPanel * 4 + lane * 4 + at % 4]) - 128;
        }
        float value = half_value(scales[at / F::kGroup * kPanel + lane]) * static_cast<float>(code);
        if constexpr (F::kMinima) value += bits_of<float>(static_cast<uint32_t>(minima[lane * 2 + at / 32]) << 16);
        f(k, m.factor * value);
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
