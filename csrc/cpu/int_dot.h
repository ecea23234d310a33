// Products of quantized rows with integer matrices. A tile is R rows by one panel. Products of codes and elements are
// summed in integers, which are exact in any order. The rest of a block is a few float operations for each output, in
// one order over the blocks. So a row's bits depend neither on R nor on how the work is cut. Layouts of matrices are in
// int_layouts.h and superblock_layouts.h. Included by linear.h and embedding.h only.
#pragma once

#include "epilogue.h"
#include "int_dot_amx.h"
#include "outliers.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Returns where the integer sum of group g begins: -z times the sum of the group's elements, or 0 where codes are
// centred before they are multiplied. Zeros of 8 and 32 are powers of two, as 128 is, so the shift is exact.
template <class F>
inline int32_t start_of_sum(const QBlock& x, int g) {
    if (F::kBits == 8 && kCodesAreCentred) return 0;
    if (F::kBits < 8 && F::kGroup == 16) return x.start16[g] >> (8 - F::kBits);  // of -128 times the sum
    return F::kBits == 4 ? x.start4[g] : F::kGroup == 32 ? x.start8[g] : x.start16[g];
}

// How far ahead a single tile of rows fetches, into the second-level cache: the first has no room beside what the tile
// reads.
constexpr int kIntPrefetchBytes = 8192;

// What to fetch while a tile is computed: for each block `lines` lines from `from` on, and lines of adapters' factors.
struct Fetch {
    const char* from;
    int lines;
    Pieces& factors;
    int64_t factor_lines;

    inline void of_block() {
        for (int i = 0; i < lines; ++i, from += 64) __builtin_prefetch(from, 0, 2);
        factors.fetch(factor_lines);
    }
};

// How the rows of a batch are cut: first tiles for tile instructions, where these are faster, then tiles of vectors.
template <class F>
class RowCuts {
  public:
    struct Cut {
        int64_t begin, end;
        bool by_instructions;
    };

    explicit RowCuts(int64_t rows)
        : rows_(rows),
          whole_(IntTilesOf<F>::whole_tiles(rows)),
          rest_(max_of<int64_t>(0, rows - whole_ * kRowsOfTile)),
          narrow_((rest_ + kIntRows - 1) / kIntRows) {}

    int64_t count() const { return whole_ + narrow_; }
    bool any_by_instructions() const { return whole_ > 0; }

    Cut at(int64_t i) const {
        if (i < whole_) return {i * kRowsOfTile, min_of((i + 1) * kRowsOfTile, rows_), true};
        const int64_t begin = rows_ - rest_, narrow = i - whole_;
        return {begin + rest_ * narrow / narrow_, begin + rest_ * (narrow + 1) / narrow_, false};
    }

  private:
    int64_t rows_, whole_, rest_, narrow_;
};

// Returns how many blocks a product reads at a time: all of a panel, or as many as are opened together. A single tile
// of vectors opens as few as it can, so that blocks are read soon after they are fetched.
template <class F>
inline int64_t blocks_at_a_time(int64_t blocks, int64_t cuts, bool by_instructions) {
    if (F::kOpenedBytes == 0 && !by_instructions) return blocks;
    return min_of<int64_t>(blocks, cuts == 1 && !by_instructions ? kBlocksOfSuper : kOpenedBlocks);
}

// Computes y[r, 0 .. kPanel) for R rows over `blocks` blocks. With `is_first` sums begin at zero, else at what y holds.
// The results are multiplied by `factor`. V vectors of outputs are worked on at a time.
template <class F, int R>
void int_tile(IntView w, int64_t blocks, const QBlock* rows, int64_t x_stride, bool is_first, Vec factor, float* y,
              Fetch fetch) {
    constexpr int V = kIntVecs;
    constexpr int kStepBytes = kPanel * 4;
    constexpr int kVecBytes = kLanes * 4;
    // A step is one vector of code bytes for each 16 outputs: eight elements of k in codes of 4 bits, else four.
    constexpr int kStepsPerGroup = F::kGroup / F::kCodesOfByte / 4;
    const QBlock* x[R];
    for (int r = 0; r < R; ++r) x[r] = rows + r * x_stride;
    Vec acc[R][kVecsPerPanel];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < kVecsPerPanel; ++v) acc[r][v] = is_first ? zero() : load(y + r * kMaxUnit + v * kLanes);
    }
    for (int64_t b = 0; b < blocks; ++b, w.codes += w.code_stride, w.scales += w.scale_stride) {
        fetch.of_block();
#pragma GCC unroll 8
        for (int v0 = 0; v0 < kVecsPerPanel; v0 += V) {
#pragma GCC unroll 4
            for (int g = 0; g < F::kGroups; ++g) {
                // Where registers are few (AVX2) the float sums stay in memory while integers are summed.
                leave_in_memory(acc);
                Ints sum[R][V];
                for (int r = 0; r < R; ++r) {
                    const int32_t start = start_of_sum<F>(x[r][b], g);
                    for (int v = 0; v < V; ++v) sum[r][v] = F::kBits == 4 ? begin_sums4(start) : set1_int(start);
                }
#pragma GCC unroll 8
                for (int s = g * kStepsPerGroup; s < (g + 1) * kStepsPerGroup; ++s) {
                    const char* step = w.codes + s * kStepBytes + v0 * kVecBytes;
                    if constexpr (F::kBits == 4) {
                        Ints low[V], high[V];
                        for (int v = 0; v < V; ++v) {
                            const Ints both = load_ints(step + v * kVecBytes);
                            // Elements 8s to 8s + 3 of 16 outputs, a code a byte; then elements 8s + 4 to 8s + 7.
                            low[v] = low_nibbles(both);
                            high[v] = high_nibbles(both);
                        }
                        for (int r = 0; r < R; ++r) {
                            // Four elements of the row in every lane, times the low halves; below, the next four times
                            // the high halves.
                            const Ints four = set1_bytes(x[r][b].q + s * 8);
                            for (int v = 0; v < V; ++v) sum[r][v] = add_to_sums4(sum[r][v], low[v], four);
                        }
                        for (int r = 0; r < R; ++r) {
                            const Ints four = set1_bytes(x[r][b].q + s * 8 + 4);
                            for (int v = 0; v < V; ++v) sum[r][v] = add_to_sums4(sum[r][v], high[v], four);
                        }
                    } else if constexpr (F::kBits == 6) {
                        // Two steps at a time: without VNNI, sums of both fit 16 bits (docs/kernels.md).
                        if (s % 2) continue;
                        Ints first[V], second[V];
                        for (int v = 0; v < V; ++v) {
                            first[v] = load_ints(step + v * kVecBytes);
                            second[v] = load_ints(step + kStepBytes + v * kVecBytes);
                        }
                        for (int r = 0; r < R; ++r) {
                            const Ints a = set1_bytes(x[r][b].q + s * 4), c = set1_bytes(x[r][b].q + s * 4 + 4);
                            for (int v = 0; v < V; ++v) {
                                sum[r][v] = dot_two_codes6(sum[r][v], first[v], a, second[v], c);
                            }
                        }
                    } else {
                        Ints codes[V];
                        // `centred` makes codes signed on sets that multiply signed bytes, else leaves them.
                        for (int v = 0; v < V; ++v) codes[v] = centred(load_ints(step + v * kVecBytes));
                        for (int r = 0; r < R; ++r) {
                            const Ints four = set1_bytes(x[r][b].q + s * 4);
                            for (int v = 0; v < V; ++v) sum[r][v] = dot_codes8(sum[r][v], codes[v], four);
                        }
                    }
                }
                if constexpr (F::kBits == 4) {
                    for (int r = 0; r < R; ++r) {
                        const int32_t start = start_of_sum<F>(x[r][b], g);
                        for (int v = 0; v < V; ++v) sum[r][v] = end_sums4(sum[r][v], start);
                    }
                }
                const auto* scales = reinterpret_cast<const typename F::Scale*>(w.scales) + g * kPanel;
                for (int v = 0; v < V; ++v) {
                    const Vec d = load_scale(scales + (v0 + v) * kLanes);
                    for (int r = 0; r < R; ++r) {
                        const Vec of_row = set1(x[r][b].scale[g * F::kGroup / 32]);
                        if constexpr (F::kMinimaBy16) {
                            const Vec added = mul(load_scale(scales + F::kGroups * kPanel + (v0 + v) * kLanes),
                                                  set1(static_cast<float>(x[r][b].start16[g])));
                            // acc += row scale * (scale * integer sum + minimum * start value)
                            acc[r][v0 + v] = fma(fma(d, to_float(sum[r][v]), added), of_row, acc[r][v0 + v]);
                        } else {
                            // acc += scale * row scale * integer sum
                            acc[r][v0 + v] = fma(mul(d, of_row), to_float(sum[r][v]), acc[r][v0 + v]);
                        }
                    }
                }
            }
            for (int v = 0; v < V; ++v) {
                const uint16_t* minima = reinterpret_cast<const uint16_t*>(w.scales + F::kScaleBytes);
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

#ifdef OCTAVO_MATRICES
// As int_tile, by ARM's matrix instructions: two rows by two outputs at a time. If R is odd, the last row is its own
// neighbour. Groups have the integer sums of int_tile, and float operations follow in the same order.
template <class F, int R>
void int_tile_by_matrices(IntView w, int64_t blocks, const QBlock* rows, int64_t x_stride, bool is_first, Vec factor,
                          float* y, Fetch fetch) {
    constexpr int V = kMatrixVecs;
    constexpr int kPairs = (R + 1) / 2;
    constexpr int kStepBytes = kPanel * 4;
    constexpr int kVecBytes = kLanes * 4;
    // A step is eight elements of k: one vector of codes of four bits, or two of codes of more bits.
    constexpr int kVecsPerStep = 2 / F::kCodesOfByte;
    constexpr int kStepsPerGroup = F::kGroup / 8;
    const QBlock* x[2 * kPairs];
    for (int r = 0; r < 2 * kPairs; ++r) x[r] = rows + min_of(r, R - 1) * x_stride;
    Vec acc[R][kVecsPerPanel];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < kVecsPerPanel; ++v) acc[r][v] = is_first ? zero() : load(y + r * kMaxUnit + v * kLanes);
    }
    for (int64_t b = 0; b < blocks; ++b, w.codes += w.code_stride, w.scales += w.scale_stride) {
        fetch.of_block();
        for (int v0 = 0; v0 < kVecsPerPanel; v0 += V) {
#pragma GCC unroll 4
            for (int g = 0; g < F::kGroups; ++g) {
                Ints sum[kPairs][V][2];
                for (int p = 0; p < kPairs; ++p) {
                    const Ints start =
                        starts_of_two_rows(start_of_sum<F>(x[2 * p][b], g), start_of_sum<F>(x[2 * p + 1][b], g));
                    for (int v = 0; v < V; ++v) sum[p][v][0] = sum[p][v][1] = start;
                }
#pragma GCC unroll 4
                for (int s = g * kStepsPerGroup; s < (g + 1) * kStepsPerGroup; ++s) {
                    const char* step = w.codes + s * kVecsPerStep * kStepBytes + v0 * kVecBytes;
                    TwoInts codes[V];
                    for (int v = 0; v < V; ++v) {
                        const Ints first = load_ints(step + v * kVecBytes);
                        if constexpr (F::kBits == 4) {
                            // An output's first four codes and its next four lie side by side: eight k of two outputs
                            // are an operand.
                            codes[v] = interleaved(low_nibbles(first), high_nibbles(first));
                        } else {
                            codes[v] = interleaved(first, load_ints(step + kStepBytes + v * kVecBytes));
                        }
                    }
                    for (int p = 0; p < kPairs; ++p) {
                        // Eight elements of each of the two rows, the other operand.
                        const Ints eight = load_two_rows(x[2 * p][b].q + s * 8, x[2 * p + 1][b].q + s * 8);
                        for (int v = 0; v < V; ++v) {
                            for (int i = 0; i < 2; ++i) {
                                sum[p][v][i] = multiply_matrices(sum[p][v][i], codes[v].of[i], eight);
                            }
                        }
                    }
                }
                const auto* scales = reinterpret_cast<const typename F::Scale*>(w.scales) + g * kPanel;
                for (int v = 0; v < V; ++v) {
                    const Vec d = load_scale(scales + (v0 + v) * kLanes);
                    for (int r = 0; r < R; ++r) {
                        const Vec of_row = set1(x[r][b].scale[g * F::kGroup / 32]);
                        // Sums lie as [2 outputs][2 rows] by instruction; sums_by_row gathers a row's.
                        const Vec found = to_float(sums_by_row(sum[r / 2][v][0], sum[r / 2][v][1]).of[r % 2]);
                        if constexpr (F::kMinimaBy16) {
                            const Vec added = mul(load_scale(scales + F::kGroups * kPanel + (v0 + v) * kLanes),
                                                  set1(static_cast<float>(x[r][b].start16[g])));
                            acc[r][v0 + v] = fma(fma(d, found, added), of_row, acc[r][v0 + v]);
                        } else {
                            acc[r][v0 + v] = fma(mul(d, of_row), found, acc[r][v0 + v]);
                        }
                    }
                }
            }
            if constexpr (F::kMinima) {
                const uint16_t* minima = reinterpret_cast<const uint16_t*>(w.scales + F::kScaleBytes);
                for (int v = 0; v < V; ++v) {
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
#endif

// Computes a tile of R rows. A single row would leave half of a matrix instruction idle, so vectors take it.
template <class F, int R>
inline void int_tile_of_rows(IntView w, int64_t blocks, const QBlock* rows, int64_t x_stride, bool is_first, Vec factor,
                             float* y, Fetch fetch) {
#ifdef OCTAVO_MATRICES
    if constexpr (R > 1) {
        int_tile_by_matrices<F, R>(w, blocks, rows, x_stride, is_first, factor, y, fetch);
    } else {
        int_tile<F, R>(w, blocks, rows, x_stride, is_first, factor, y, fetch);
    }
#else
    int_tile<F, R>(w, blocks, rows, x_stride, is_first, factor, y, fetch);
#endif
}

// Adds up pairs of rows of a panel's y: the first `outputs` rows become the sums of rows 2r and 2r + 1.
inline void add_pairs(float* y, int64_t outputs) {
    for (int64_t r = 0; r < outputs; ++r) {
        const float* pair = y + 2 * r * kMaxUnit;
        for (int i = 0; i < kPanel; i += kLanes) {
            store(y + r * kMaxUnit + i, add(load(pair + i), load(pair + kMaxUnit + i)));
        }
    }
}

// Computes the product of rows and panels. A unit of panels meets every row before the next unit does. Rows come in
// batches, which share the columns of weights that are unpacked for their outliers. A batch comes in tiles. Meanwhile
// the next weights are fetched, in equal parts.
template <class F>
void int_block(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
    using Flat = typename F::Flat;
    constexpr int kRows = F::kOpenedBytes ? kOpenedRows : kOutlierRows;
    alignas(64) float y[kRows * kMaxUnit];
    alignas(64) float waiting[kRows * kMaxUnit];  // sums of segments, each a panel wide
    static_assert((kTreeDepth - 1) * kPanel <= kMaxUnit);
    alignas(64) char opened[F::kOpenedBytes ? F::kOpenedBytes * kOpenedBlocks : 1];
    const int64_t blocks = (a.matrix.k + kQBlock - 1) / kQBlock;
    const int64_t panel_bytes = blocks * F::kBlockBytes;
    // With adapters a unit is as many panels as fit: they share the cost of finding and beginning with adapters.
    const int64_t unit = unit_vecs(a, a.expands ? kMaxUnit / kLanes : kVecsPerPanel) / kVecsPerPanel;
    // Both rows of a pair are rows here, until their outputs are added up (add_pairs).
    const int64_t rows_of_one = a.x_is_paired ? 2 : 1;
    const int64_t rows = (row_end - row_begin) * rows_of_one, x_stride = a.x_stride / rows_of_one;
    const QBlock* x = static_cast<const QBlock*>(a.x) + row_begin * a.x_stride;
    OutlierList& outliers = OutlierList::of(x, x_stride, blocks, rows, kRows, a.matrix.segments);
    using Cuts = RowCuts<Flat>;
    const int64_t all_cuts = rows / kRows * Cuts(kRows).count() + Cuts(rows % kRows).count();
    const bool by_instructions = Cuts(min_of<int64_t>(rows, kRows)).any_by_instructions();
    const int lines = static_cast<int>(((F::kBlockBytes + 63) / 64 + all_cuts - 1) / all_cuts);
    const int64_t step = blocks_at_a_time<F>(blocks, all_cuts, by_instructions);
    IntTilesOf<Flat> instructions(x, x_stride, blocks, rows, by_instructions);
    const int64_t soon = by_instructions ? step * F::kBlockBytes : kIntPrefetchBytes;  // how far ahead of a single tile
    const float inverse = 1 / a.matrix.factor;
    const int64_t all_panels = panels_of(a.matrix);
    FactorLines factors(a, row_begin, row_end, panel_begin, all_panels);
    for (int64_t panel = panel_begin; panel < panel_end; panel += unit) {
        const int64_t panels = min_of(unit, panel_end - panel);
        const char* w = static_cast<const char*>(a.matrix.data) + panel * panel_bytes;
        factors.list(panel, panels, panels * all_cuts * blocks);
        int64_t cuts_before = 0;
        for (int64_t first = 0; first < rows; first += kRows) {
            const int64_t some = min_of<int64_t>(kRows, rows - first), outputs = some / rows_of_one;
            const Cuts cuts(some);
            for (int64_t p = 0; p < panels; ++p) {
                const char* panel_w = w + p * panel_bytes;
                float* panel_y = y + p * kPanel;
                outliers.make_columns<F>(panel_w, first, inverse);
                sum_segments(a.matrix, panel_y, waiting, kPanel, outputs, kPanel, [&](Segment segment, float* to) {
                    const int64_t segment_begin = segment.begin / kQBlock;
                    const int64_t segment_end = segment_begin + (segment.size + kQBlock - 1) / kQBlock;
                    for (int64_t block = segment_begin; block < segment_end; block += step) {
                        const int64_t count = min_of(step, segment_end - block);
                        const bool is_last = block + count == segment_end;
                        const IntView view = F::open(panel_w, block, count, inverse, opened);
                        if (cuts.any_by_instructions()) instructions.open(view, count);
                        for (int64_t i = 0; i < cuts.count(); ++i) {
                            const auto cut = cuts.at(i);
                            const char* next = all_cuts == 1 ? panel_w + block * F::kBlockBytes + soon
                                                             : panel_w + panels * panel_bytes +
                                                                   ((cuts_before + i) * blocks + block) * lines * 64;
                            const bool is_first = block == segment_begin;
                            const Vec factor = set1(is_last ? a.matrix.factor : 1);
                            Fetch fetch{next, lines, factors.pieces(), factors.take(count)};
                            if (cut.by_instructions) {
                                instructions.multiply(view, count, first + cut.begin, block, is_first, factor,
                                                      to + cut.begin * kMaxUnit, [&] { fetch.of_block(); });
                                continue;
                            }
                            with_constant<kIntRows>(cut.end - cut.begin, [&](auto r) {
                                int_tile_of_rows<Flat, decltype(r)::kValue>(
                                    view, count, x + (first + cut.begin) * x_stride + block, x_stride, is_first, factor,
                                    to + cut.begin * kMaxUnit, fetch);
                            });
                        }
                    }
                    outliers.add(first, some, segment.number, a.matrix.factor, to, kMaxUnit);
                    if (a.x_is_paired) add_pairs(to, outputs);
                });
            }
            cuts_before += cuts.count();
            finish(a, {y, kMaxUnit, row_begin + first / rows_of_one, outputs, panel * kPanel, panels * kPanel});
            if (a.expands) instructions.configure();  // adapters configured tiles of their own
        }
    }
}

// Calls f(k, value) for each element k of row n of an integer matrix.
template <class F, class Function>
inline void int_row(const Matrix& m, int64_t n, Function f) {
    using Flat = typename F::Flat;
    using Scale = typename Flat::Scale;
    alignas(64) char opened[F::kOpenedBytes ? F::kOpenedBytes * kBlocksOfSuper : 1];
    const int64_t blocks = (m.k + kQBlock - 1) / kQBlock;
    const int64_t lane = n % kPanel;
    const char* panel = static_cast<const char*>(m.data) + n / kPanel * blocks * F::kBlockBytes;
    for (int64_t block = 0; block < blocks; block += kBlocksOfSuper) {
        const int64_t count = min_of<int64_t>(kBlocksOfSuper, blocks - block);
        IntView w = F::open(panel, block, count, 1 / m.factor, opened);
        const int64_t end = min_of(m.k, (block + count) * kQBlock);
        for (int64_t k = block * kQBlock; k < end; ++k) {
            const int64_t at = k % kQBlock;
            if (at == 0 && k > block * kQBlock) {
                w.codes += w.code_stride;
                w.scales += w.scale_stride;
            }
            const Scale* scales = reinterpret_cast<const Scale*>(w.scales);
            const uint16_t* minima = reinterpret_cast<const uint16_t*>(w.scales + Flat::kScaleBytes);
            int32_t code;
            if constexpr (Flat::kBits == 4) {
                // Low half: the first four of eight elements; high half: the next four.
                const uint8_t both = static_cast<uint8_t>(w.codes[at / 8 * kPanel * 4 + lane * 4 + at % 4]);
                code = (at / 4 % 2 == 0 ? both & 15 : both >> 4) - 8;
            } else {
                code =
                    static_cast<uint8_t>(w.codes[at / 4 * kPanel * 4 + lane * 4 + at % 4]) - (1 << (Flat::kBits - 1));
            }
            float value = scale_value(scales[at / Flat::kGroup * kPanel + lane]) * static_cast<float>(code);
            if constexpr (Flat::kMinima) {
                value += bits_of<float>(static_cast<uint32_t>(minima[lane * 2 + at / 32]) << 16);
            } else if constexpr (Flat::kMinimaBy16) {
                value += reinterpret_cast<const float*>(minima)[at / 16 * kPanel + lane] * F::kStartOfOne;
            }
            f(k, m.factor * value);
        }
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
