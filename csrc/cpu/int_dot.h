// Products of quantized rows with integer matrices. A tile is R rows by one panel. Products of codes and elements are
// summed in integers, which are exact in any order. A few float operations follow for each group, in one order over the
// blocks. So a row's bits depend neither on R nor on how the work is cut. Layouts of matrices are in int_layouts.h and
// superblock_layouts.h; int_layouts.h explains the words. Included by linear.h and embedding.h only.
#pragma once

#include "epilogue.h"
#include "int_dot_amx.h"
#include "outliers.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kVecBytes = kLanes * 4;

// Returns the start of group g's integer sum: -z times the sum of the group's elements, or 0 where codes are centred
// before they are multiplied. z is 8, 32 or 128 for codes of 4, 6 or 8 bits. For groups of 16 elements a QBlock has
// only -128 times the sum; shifted right by 8 - kBits it is exactly -z times the sum.
template <class F>
inline int32_t start_of_sum(const QBlock& x, int g) {
    static_assert(F::kBits != 6 || F::kGroupElements == 16, "a QBlock has no starts with z = 32 for groups of 32");
    if (F::kBits == 8 && kCodesAreCentred) return 0;
    if (F::kBits < 8 && F::kGroupElements == 16) return x.start_z128_by_16[g] >> (8 - F::kBits);
    if (F::kBits == 4) return x.start_z8[g];
    return F::kGroupElements == 32 ? x.start_z128[g] : x.start_z128_by_16[g];
}

// If a task has a single tile of vectors, it fetches weights this many bytes ahead of where it reads. They go to the
// second-level cache, because what the tile reads fills the first.
constexpr int kIntPrefetchBytes = 8192;

// The prefetches of a tile: for each block `lines` lines of weights from `from` on, and lines of LoRA factors. A tile
// calls prefetch_block exactly once for each block: FactorLines::take has counted on so many calls.
struct Fetch {
    const char* from;
    int lines;
    Pieces& lora_factors;
    int64_t lora_lines;

    inline void prefetch_block() {
        for (int i = 0; i < lines; ++i, from += 64) __builtin_prefetch(from, 0, 2);
        lora_factors.fetch(lora_lines);
    }
};

// How the rows of a batch are cut into tiles: first AMX tiles, where these are faster, then tiles of vectors.
template <class F>
class TileSplit {
  public:
    struct Tile {
        int64_t begin, end;  // rows of the batch
        bool uses_amx;
    };

    explicit TileSplit(int64_t rows)
        : rows_(rows),
          amx_tiles_(AmxTiles<F>::num_tiles(rows)),
          vector_rows_(max_of<int64_t>(0, rows - amx_tiles_ * kAmxRows)),
          vector_tiles_((vector_rows_ + kIntRows - 1) / kIntRows) {}

    int64_t count() const { return amx_tiles_ + vector_tiles_; }
    bool uses_amx() const { return amx_tiles_ > 0; }

    Tile at(int64_t i) const {
        if (i < amx_tiles_) return {i * kAmxRows, min_of((i + 1) * kAmxRows, rows_), true};
        const int64_t begin = rows_ - vector_rows_, number = i - amx_tiles_;
        return {begin + vector_rows_ * number / vector_tiles_, begin + vector_rows_ * (number + 1) / vector_tiles_,
                false};
    }

  private:
    int64_t rows_, amx_tiles_, vector_rows_, vector_tiles_;
};

// The parts of a tile. `x` are its R rows, `b` is the number of a block in them, `acc` are its float sums, `v0` is the
// first of the V vectors of outputs that are worked on together. `step` points to codes; `s` is the number of that step
// in the block.

// Begins the sums at zero, or at the values in y.
template <int R>
__attribute__((always_inline)) inline void load_sums(const float* y, bool is_first, Vec (&acc)[R][kVecsPerPanel]) {
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < kVecsPerPanel; ++v) {
            acc[r][v] = is_first ? zero() : load(y + r * kMaxEpilogueWidth + v * kLanes);
        }
    }
}

// Stores the sums, times `factor`, in y.
template <int R>
__attribute__((always_inline)) inline void store_sums(const Vec (&acc)[R][kVecsPerPanel], Vec factor, float* y) {
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < kVecsPerPanel; ++v) {
            store(y + r * kMaxEpilogueWidth + v * kLanes, mul(acc[r][v], factor));
        }
    }
}

// Returns what nibbles stand for: themselves, or codes of eight bits of the table.
template <class F>
__attribute__((always_inline)) inline Ints codes_of(Ints nibbles, Ints table) {
    return F::kHasTable ? look_up(table, nibbles) : nibbles;
}

// Loads the table of a matrix, if it has one.
template <class F>
__attribute__((always_inline)) inline Ints table_of(const BlocksView& w) {
    return F::kHasTable ? load_table(w.table) : set1_int(0);
}

// Adds a step of eight elements of k: nibbles, two a byte. `table` is centred.
template <class F, int R, int V>
__attribute__((always_inline)) inline void add_step4(const QBlock* const* x, int64_t b, const char* step, int s,
                                                     Ints table, Ints (&sum)[R][V]) {
    const auto add = [](Ints sums, Ints codes, Ints four) __attribute__((always_inline)) {
        return F::kHasTable ? dot_codes8(sums, codes, four) : add_to_sums4(sums, codes, four);
    };
    Ints low[V], high[V];
    for (int v = 0; v < V; ++v) {
        const Ints both = load_ints(step + v * kVecBytes);
        // Elements 8s to 8s + 3 of 16 outputs, a code a byte; then elements 8s + 4 to 8s + 7.
        low[v] = codes_of<F>(low_nibbles(both), table);
        high[v] = codes_of<F>(high_nibbles(both), table);
    }
    for (int r = 0; r < R; ++r) {
        // Four elements of the row in every lane, times the low halves; below, the next four times the high halves.
        const Ints four = set1_bytes(x[r][b].q + s * 8);
        for (int v = 0; v < V; ++v) sum[r][v] = add(sum[r][v], low[v], four);
    }
    for (int r = 0; r < R; ++r) {
        const Ints four = set1_bytes(x[r][b].q + s * 8 + 4);
        for (int v = 0; v < V; ++v) sum[r][v] = add(sum[r][v], high[v], four);
    }
}

// Adds two steps of four elements of k each, with codes of 6 bits: without VNNI, sums of both fit 16 bits
// (docs/kernels.md).
template <int R, int V>
__attribute__((always_inline)) inline void add_two_steps6(const QBlock* const* x, int64_t b, const char* step, int s,
                                                          Ints (&sum)[R][V]) {
    Ints first[V], second[V];
    for (int v = 0; v < V; ++v) {
        first[v] = load_ints(step + v * kVecBytes);
        second[v] = load_ints(step + kStepBytes + v * kVecBytes);
    }
    for (int r = 0; r < R; ++r) {
        const Ints of_first = set1_bytes(x[r][b].q + s * 4), of_second = set1_bytes(x[r][b].q + s * 4 + 4);
        for (int v = 0; v < V; ++v) sum[r][v] = dot_two_codes6(sum[r][v], first[v], of_first, second[v], of_second);
    }
}

// Adds a step of four elements of k, with codes of 8 bits.
template <int R, int V>
__attribute__((always_inline)) inline void add_step8(const QBlock* const* x, int64_t b, const char* step, int s,
                                                     Ints (&sum)[R][V]) {
    Ints codes[V];
    // `centred` makes codes signed on sets that multiply signed bytes; other sets leave them.
    for (int v = 0; v < V; ++v) codes[v] = centred(load_ints(step + v * kVecBytes));
    for (int r = 0; r < R; ++r) {
        const Ints four = set1_bytes(x[r][b].q + s * 4);
        for (int v = 0; v < V; ++v) sum[r][v] = dot_codes8(sum[r][v], codes[v], four);
    }
}

// Sets `sum` to the integer sums of group g. `codes` are those of the block, from vector v0 on; `table` is centred.
template <class F, int R, int V>
__attribute__((always_inline)) inline void dot_group(const QBlock* const* x, int64_t b, const char* codes, int g,
                                                     Ints table, Ints (&sum)[R][V]) {
    constexpr int kStepsPerGroup = F::kGroupElements / F::kCodesPerByte / 4;
    for (int r = 0; r < R; ++r) {
        const int32_t start = start_of_sum<F>(x[r][b], g);
        for (int v = 0; v < V; ++v) sum[r][v] = F::kBits == 4 ? begin_sums4(start) : set1_int(start);
    }
#pragma GCC unroll 8
    for (int s = g * kStepsPerGroup; s < (g + 1) * kStepsPerGroup; ++s) {
        const char* step = codes + s * kStepBytes;
        if constexpr (F::kCodesPerByte == 2) {
            add_step4<F, R, V>(x, b, step, s, table, sum);
        } else if constexpr (F::kBits == 6) {
            if (s % 2 == 0) add_two_steps6<R, V>(x, b, step, s, sum);
        } else {
            add_step8<R, V>(x, b, step, s, sum);
        }
    }
    // Sets without VNNI have summed in 16 bits and add the start only now (simd_pairs.h).
    if constexpr (F::kBits == 4) {
        for (int r = 0; r < R; ++r) {
            const int32_t start = start_of_sum<F>(x[r][b], g);
            for (int v = 0; v < V; ++v) sum[r][v] = end_sums4(sum[r][v], start);
        }
    }
}

// Adds group g's integer sums, scaled, to `acc`. sum_of(r, v) returns a vector of integer sums as floats.
template <class F, int R, int V, class SumOf>
__attribute__((always_inline)) inline void add_scaled(const BlocksView& w, const QBlock* const* x, int64_t b, int g,
                                                      int v0, SumOf sum_of, Vec (&acc)[R][kVecsPerPanel]) {
    const auto* scales = reinterpret_cast<const typename F::Scale*>(w.scales) + g * kPanel;
    for (int v = 0; v < V; ++v) {
        const Vec weight_scale = load_scale(scales + (v0 + v) * kLanes);
        for (int r = 0; r < R; ++r) {
            const Vec row_scale = set1(x[r][b].scale[g * F::kGroupElements / 32]);
            if constexpr (F::kHasMinimaBy16) {
                const Vec added = mul(load_scale(scales + F::kGroupsPerBlock * kPanel + (v0 + v) * kLanes),
                                      set1(static_cast<float>(x[r][b].start_z128_by_16[g])));
                // acc += row scale * (scale * integer sum + minimum * start)
                acc[r][v0 + v] = fma(fma(weight_scale, sum_of(r, v), added), row_scale, acc[r][v0 + v]);
            } else {
                // acc += scale * row scale * integer sum
                acc[r][v0 + v] = fma(mul(weight_scale, row_scale), sum_of(r, v), acc[r][v0 + v]);
            }
        }
    }
}

// Adds the products of a block's minima, one for each 32 elements of k, to `acc`.
template <class F, int R, int V>
__attribute__((always_inline)) inline void add_minima(const BlocksView& w, const QBlock* const* x, int64_t b, int v0,
                                                      Vec (&acc)[R][kVecsPerPanel]) {
    const uint16_t* minima = reinterpret_cast<const uint16_t*>(w.scales + F::kScaleBytes);
    for (int v = 0; v < V; ++v) {
        const Pairs of_vector = load_pairs(minima + (v0 + v) * kLanes * 2);
        for (int r = 0; r < R; ++r) {
            acc[r][v0 + v] = dot_pairs(acc[r][v0 + v], of_vector, BF16::broadcast(x[r][b].sums));
        }
    }
}

// Computes y[r, 0 .. kPanel) for R rows over `blocks` blocks. With `is_first` sums begin at zero, otherwise at the
// values in y. The results are multiplied by `factor`.
template <class F, int R>
void int_tile(BlocksView w, int64_t blocks, const QBlock* rows, int64_t x_stride, bool is_first, Vec factor, float* y,
              Fetch fetch) {
    constexpr int V = kIntVecs;
    const QBlock* x[R];
    for (int r = 0; r < R; ++r) x[r] = rows + r * x_stride;
    const Ints table = centred(table_of<F>(w));
    Vec acc[R][kVecsPerPanel];
    load_sums<R>(y, is_first, acc);
    for (int64_t b = 0; b < blocks; ++b, w.codes += w.code_stride, w.scales += w.scale_stride) {
        fetch.prefetch_block();
#pragma GCC unroll 8
        for (int v0 = 0; v0 < kVecsPerPanel; v0 += V) {
#pragma GCC unroll 4
            for (int g = 0; g < F::kGroupsPerBlock; ++g) {
                // Where registers are few (AVX2) the float sums stay in memory while integers are summed.
                leave_in_memory(acc);
                Ints sum[R][V];
                dot_group<F, R, V>(x, b, w.codes + v0 * kVecBytes, g, table, sum);
                const auto sum_of = [&](int r, int v) __attribute__((always_inline)) { return to_float(sum[r][v]); };
                add_scaled<F, R, V>(w, x, b, g, v0, sum_of, acc);
            }
            if constexpr (F::kHasMinimaBy32) add_minima<F, R, V>(w, x, b, v0, acc);
        }
    }
    store_sums<R>(acc, factor, y);
}

#ifdef OCTAVO_I8MM
// Sets `sum` to the integer sums of group g by ARM's matrix instructions, [2 outputs][2 rows] each: two vectors for
// each pair of rows and vector of outputs.
template <class F, int kPairs, int V>
__attribute__((always_inline)) inline void dot_group_i8mm(const QBlock* const* x, int64_t b, const char* codes, int g,
                                                          Ints table, Ints (&sum)[kPairs][V][2]) {
    // An operand has eight elements of k: a step of codes of 4 bits, or two steps of codes of more bits.
    constexpr int kOperandBytes = 2 / F::kCodesPerByte * kStepBytes;
    constexpr int kOperandsPerGroup = F::kGroupElements / 8;
    for (int p = 0; p < kPairs; ++p) {
        const Ints start = starts_of_two_rows(start_of_sum<F>(x[2 * p][b], g), start_of_sum<F>(x[2 * p + 1][b], g));
        for (int v = 0; v < V; ++v) sum[p][v][0] = sum[p][v][1] = start;
    }
#pragma GCC unroll 4
    for (int i = g * kOperandsPerGroup; i < (g + 1) * kOperandsPerGroup; ++i) {
        const char* step = codes + i * kOperandBytes;
        TwoInts operands[V];
        for (int v = 0; v < V; ++v) {
            const Ints first = load_ints(step + v * kVecBytes);
            if constexpr (F::kCodesPerByte == 2) {
                // The low halves have four codes of each output, the high halves the next four. Interleaved they are
                // operands: eight codes of each of two outputs.
                operands[v] =
                    interleaved(codes_of<F>(low_nibbles(first), table), codes_of<F>(high_nibbles(first), table));
            } else {
                operands[v] = interleaved(first, load_ints(step + kStepBytes + v * kVecBytes));
            }
        }
        for (int p = 0; p < kPairs; ++p) {
            // Eight elements of each of the two rows, the other operand.
            const Ints eight = load_two_rows(x[2 * p][b].q + i * 8, x[2 * p + 1][b].q + i * 8);
            for (int v = 0; v < V; ++v) {
                for (int half = 0; half < 2; ++half) {
                    sum[p][v][half] = multiply_matrices(sum[p][v][half], operands[v].of[half], eight);
                }
            }
        }
    }
}

// As int_tile, by I8MM: two rows by two outputs at a time. If R is odd, the last row is its own neighbour.
template <class F, int R>
void int_tile_i8mm(BlocksView w, int64_t blocks, const QBlock* rows, int64_t x_stride, bool is_first, Vec factor,
                   float* y, Fetch fetch) {
    constexpr int V = kI8mmVecs;
    constexpr int kPairs = (R + 1) / 2;
    const QBlock* x[2 * kPairs];
    for (int r = 0; r < 2 * kPairs; ++r) x[r] = rows + min_of(r, R - 1) * x_stride;
    const Ints table = table_of<F>(w);
    Vec acc[R][kVecsPerPanel];
    load_sums<R>(y, is_first, acc);
    for (int64_t b = 0; b < blocks; ++b, w.codes += w.code_stride, w.scales += w.scale_stride) {
        fetch.prefetch_block();
        for (int v0 = 0; v0 < kVecsPerPanel; v0 += V) {
#pragma GCC unroll 4
            for (int g = 0; g < F::kGroupsPerBlock; ++g) {
                Ints sum[kPairs][V][2];
                dot_group_i8mm<F, kPairs, V>(x, b, w.codes + v0 * kVecBytes, g, table, sum);
                // sums_by_row gathers a row's sums.
                const auto sum_of = [&](int r, int v) __attribute__((always_inline)) {
                    return to_float(sums_by_row(sum[r / 2][v][0], sum[r / 2][v][1]).of[r % 2]);
                };
                add_scaled<F, R, V>(w, x, b, g, v0, sum_of, acc);
            }
            if constexpr (F::kHasMinimaBy32) add_minima<F, R, V>(w, x, b, v0, acc);
        }
    }
    store_sums<R>(acc, factor, y);
}
#endif

// Computes a tile of R rows. A single row would leave half of an I8MM instruction idle, so vectors take it.
template <class F, int R>
inline void int_tile_of_rows(BlocksView w, int64_t blocks, const QBlock* rows, int64_t x_stride, bool is_first,
                             Vec factor, float* y, Fetch fetch) {
#ifdef OCTAVO_I8MM
    if constexpr (R > 1) {
        int_tile_i8mm<F, R>(w, blocks, rows, x_stride, is_first, factor, y, fetch);
        return;
    }
#endif
    int_tile<F, R>(w, blocks, rows, x_stride, is_first, factor, y, fetch);
}

// Adds up pairs of rows of a panel's y: the first `out_rows` rows become the sums of rows 2r and 2r + 1.
inline void add_pairs(float* y, int64_t out_rows) {
    for (int64_t r = 0; r < out_rows; ++r) {
        const float* pair = y + 2 * r * kMaxEpilogueWidth;
        for (int i = 0; i < kPanel; i += kLanes) {
            store(y + r * kMaxEpilogueWidth + i, add(load(pair + i), load(pair + kMaxEpilogueWidth + i)));
        }
    }
}

// The sizes of a task that multiplies `task_rows` rows of the call.
template <class F>
struct TaskSizes {
    // Rows of a batch share opened blocks and columns of outliers (outliers.h).
    static constexpr int kBatchRows = F::kOpenedBytes ? kOpenedRows : kOutlierRows;

    int64_t rows_per_output;  // 2 if an input is two quantized rows (kQ16): add_pairs adds their products
    int64_t rows, x_stride;
    int64_t blocks, panel_bytes;
    int64_t epilogue_panels;
    int64_t tiles;  // of all batches
    bool uses_amx;
    int64_t blocks_at_once;
    int fetch_lines;         // lines of the next weights that each tile fetches for each block
    int64_t prefetch_bytes;  // how far ahead a single tile fetches

    TaskSizes(const LinearArgs& args, int64_t task_rows)
        : rows_per_output(args.x_is_paired ? 2 : 1),
          rows(task_rows * rows_per_output),
          x_stride(args.x_stride / rows_per_output),
          blocks((args.matrix.k + kQBlock - 1) / kQBlock),
          panel_bytes(blocks * F::kBlockBytes) {
        using Split = TileSplit<typename F::OpenedFormat>;
        // With LoRA an epilogue has as many panels as fit: it looks the rows' adapters up once for all of them.
        const int64_t max_vecs = args.expands ? kMaxEpilogueWidth / kLanes : kVecsPerPanel;
        epilogue_panels = epilogue_vecs(args, max_vecs) / kVecsPerPanel;
        tiles = rows / kBatchRows * Split(kBatchRows).count() + Split(rows % kBatchRows).count();
        uses_amx = Split(min_of<int64_t>(rows, kBatchRows)).uses_amx();
        fetch_lines = static_cast<int>(((F::kBlockBytes + 63) / 64 + tiles - 1) / tiles);
        // All blocks of a panel, or as many as are opened together. A single tile of vectors opens as few as it can, so
        // that blocks are read soon after they are fetched.
        blocks_at_once = blocks;
        if (F::kOpenedBytes > 0 || uses_amx) {
            blocks_at_once = min_of<int64_t>(blocks, tiles == 1 && !uses_amx ? kBlocksPerSuperblock : kOpenedBlocks);
        }
        prefetch_bytes = uses_amx ? blocks_at_once * F::kBlockBytes : kIntPrefetchBytes;
    }
};

// The product of a task's rows and panels, for panels in one format.
template <class F>
class IntProductTask {
  public:
    IntProductTask(const LinearArgs& args, int64_t row_begin, int64_t row_end, int64_t panel_begin)
        : args_(args),
          row_begin_(row_begin),
          sizes_(args, row_end - row_begin),
          x_(static_cast<const QBlock*>(args.x) + row_begin * args.x_stride),
          outliers_(OutlierList::of(x_, sizes_.x_stride, sizes_.blocks, sizes_.rows, kBatchRows, args.matrix.segments)),
          amx_(x_, sizes_.x_stride, sizes_.blocks, sizes_.rows, sizes_.uses_amx),
          lora_factors_(args, row_begin, row_end, panel_begin, panels_of(args.matrix)) {}

    // Multiplies panels panel_begin .. panel_end - 1. The loops, from the outermost to the innermost: epilogue panels,
    // batches of rows, panels, segments of k, runs of blocks, tiles of rows. Rows of a batch share the columns of
    // weights that are unpacked for their outliers. Tiles fetch the next weights meanwhile, in equal parts.
    void run(int64_t panel_begin, int64_t panel_end) {
        for (int64_t panel = panel_begin; panel < panel_end; panel += sizes_.epilogue_panels) {
            const int64_t panels = min_of(sizes_.epilogue_panels, panel_end - panel);
            lora_factors_.list(panel, panels, panels * sizes_.tiles * sizes_.blocks);
            int64_t tiles_before = 0;
            for (int64_t first = 0; first < sizes_.rows; first += kBatchRows) {
                const int64_t rows = min_of<int64_t>(kBatchRows, sizes_.rows - first);
                const Batch batch{first, rows, rows / sizes_.rows_per_output, tiles_before, Split(rows)};
                for (int64_t p = 0; p < panels; ++p) multiply_panel(batch, panel + p, panels, y_ + p * kPanel);
                tiles_before += batch.split.count();
                finish(args_, {y_, kMaxEpilogueWidth, row_begin_ + first / sizes_.rows_per_output, batch.out_rows,
                               panel * kPanel, panels * kPanel});
                if (args_.expands) amx_.configure();  // adapters configured tiles of their own
            }
        }
    }

  private:
    using Opened = typename F::OpenedFormat;
    using Split = TileSplit<Opened>;
    static constexpr int kBatchRows = TaskSizes<F>::kBatchRows;

    struct Batch {
        int64_t first, rows, out_rows;
        int64_t tiles_before;  // tiles of earlier batches
        Split split;
    };

    // Consecutive blocks of a segment, opened together.
    struct Run {
        int64_t block, count;
        bool is_first, is_last;  // of the segment's runs
    };

    void multiply_panel(const Batch& batch, int64_t panel, int64_t panels, float* y) {
        const char* w = static_cast<const char*>(args_.matrix.data) + panel * sizes_.panel_bytes;
        const char* next = w + panels * sizes_.panel_bytes;
        outliers_.make_columns<F>(w, batch.first, with_);
        sum_segments(args_.matrix, y, partial_sums_, /*step=*/kPanel, batch.out_rows, /*width=*/kPanel,
                     [&](Segment segment, float* to) { multiply_segment(batch, w, next, segment, to); });
    }

    void multiply_segment(const Batch& batch, const char* w, const char* next, Segment segment, float* to) {
        const int64_t begin = segment.begin / kQBlock;
        const int64_t end = begin + (segment.size + kQBlock - 1) / kQBlock;
        for (int64_t block = begin; block < end; block += sizes_.blocks_at_once) {
            const int64_t count = min_of(sizes_.blocks_at_once, end - block);
            multiply_run(batch, w, next, {block, count, block == begin, block + count == end}, to);
        }
        outliers_.add(batch.first, batch.rows, segment.number, args_.matrix.factor, to, kMaxEpilogueWidth);
        if (args_.x_is_paired) add_pairs(to, batch.out_rows);
    }

    void multiply_run(const Batch& batch, const char* w, const char* next, Run run, float* to) {
        const BlocksView view = F::open_blocks(w, run.block, run.count, with_, opened_);
        if (batch.split.uses_amx()) amx_.open_blocks(view, run.count);
        const Vec factor = set1(run.is_last ? args_.matrix.factor : 1);
        for (int64_t i = 0; i < batch.split.count(); ++i) {
            const typename Split::Tile tile = batch.split.at(i);
            const int64_t row = batch.first + tile.begin;
            float* y = to + tile.begin * kMaxEpilogueWidth;
            Fetch fetch{next_weights(w, next, batch.tiles_before + i, run.block), sizes_.fetch_lines,
                        lora_factors_.pieces(), lora_factors_.take(run.count)};
            if (tile.uses_amx) {
                amx_.multiply(view, run.count, row, run.block, run.is_first, factor, y,
                              [&] { fetch.prefetch_block(); });
                continue;
            }
            with_constant<kIntRows>(tile.end - tile.begin, [&](auto r) {
                int_tile_of_rows<Opened, decltype(r)::kValue>(view, run.count, x_ + row * sizes_.x_stride + run.block,
                                                              sizes_.x_stride, run.is_first, factor, y, fetch);
            });
        }
    }

    // Returns where a tile begins to fetch weights when it begins with block `block`. A single tile fetches its own
    // panel `w`, some bytes ahead. Several tiles fetch a share each of panel `next`, which is multiplied after the
    // epilogue.
    const char* next_weights(const char* w, const char* next, int64_t tile, int64_t block) const {
        if (sizes_.tiles == 1) return w + block * F::kBlockBytes + sizes_.prefetch_bytes;
        return next + (tile * sizes_.blocks + block) * sizes_.fetch_lines * 64;
    }

    const LinearArgs& args_;
    const int64_t row_begin_;
    const TaskSizes<F> sizes_;
    const QBlock* const x_;
    const OpenWith with_{args_.matrix};
    OutlierList& outliers_;  // the thread's only one: a second task in this thread would overwrite it
    AmxTiles<Opened> amx_;
    FactorLines lora_factors_;
    alignas(64) char opened_[F::kOpenedBytes ? F::kOpenedBytes * kOpenedBlocks : 1];
    alignas(64) float y_[kBatchRows * kMaxEpilogueWidth];
    alignas(64) float partial_sums_[kBatchRows * kMaxEpilogueWidth];  // of segments, each a panel wide
    static_assert((kTreeDepth - 1) * kPanel <= kMaxEpilogueWidth, "partial sums lie side by side in a row");
};

// Computes rows row_begin .. row_end - 1 by panels panel_begin .. panel_end - 1.
template <class F>
void int_product_task(const LinearArgs& args, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                      int64_t panel_end) {
    IntProductTask<F>(args, row_begin, row_end, panel_begin).run(panel_begin, panel_end);
}

// Returns element `at` of output `lane` (0 .. kPanel - 1) in the first block of `w`, divided by the matrix's factor. It
// must agree with IntFormat::column.
template <class F>
inline float element_of_block(const BlocksView& w, int64_t at, int64_t lane) {
    using Opened = typename F::OpenedFormat;
    const auto* scales = reinterpret_cast<const typename Opened::Scale*>(w.scales);
    const uint16_t* minima = reinterpret_cast<const uint16_t*>(w.scales + Opened::kScaleBytes);
    int32_t code;
    if constexpr (Opened::kCodesPerByte == 2) {
        // Low half: the first four of eight elements; high half: the next four.
        const uint8_t both = static_cast<uint8_t>(w.codes[at / 8 * kStepBytes + lane * 4 + at % 4]);
        const int nibble = at / 4 % 2 == 0 ? both & 15 : both >> 4;
        code = Opened::kHasTable ? w.table[nibble] - 128 : nibble - 8;
    } else {
        code = static_cast<uint8_t>(w.codes[at / 4 * kStepBytes + lane * 4 + at % 4]) - (1 << (Opened::kBits - 1));
    }
    float value = scale_value(scales[at / Opened::kGroupElements * kPanel + lane]) * static_cast<float>(code);
    if constexpr (Opened::kHasMinimaBy32) {
        value += bits_of<float>(static_cast<uint32_t>(minima[lane * 2 + at / 32]) << 16);
    } else if constexpr (Opened::kHasMinimaBy16) {
        value += reinterpret_cast<const float*>(minima)[at / 16 * kPanel + lane] * F::kStartOfOne;
    }
    return value;
}

// Calls f(k, value) for each element k of row n of an integer matrix.
template <class F, class Function>
inline void for_row_elements(const Matrix& m, int64_t n, Function f) {
    alignas(64) char opened[F::kOpenedBytes ? F::kOpenedBytes * kBlocksPerSuperblock : 1];
    const int64_t blocks = (m.k + kQBlock - 1) / kQBlock;
    const char* panel = static_cast<const char*>(m.data) + n / kPanel * blocks * F::kBlockBytes;
    for (int64_t block = 0; block < blocks; block += kBlocksPerSuperblock) {
        const int64_t count = min_of<int64_t>(kBlocksPerSuperblock, blocks - block);
        BlocksView w = F::open_blocks(panel, block, count, OpenWith(m), opened);
        const int64_t end = min_of(m.k, (block + count) * kQBlock);
        for (int64_t k = block * kQBlock; k < end; ++k) {
            if (k % kQBlock == 0 && k > block * kQBlock) {
                w.codes += w.code_stride;
                w.scales += w.scale_stride;
            }
            f(k, m.factor * element_of_block<F>(w, k % kQBlock, n % kPanel));
        }
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
