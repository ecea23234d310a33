// Products of quantized rows with integer matrices, one task at a time: how a task is cut into tiles, and in which
// order the tiles are computed. The tiles are in int_dot.h, int_dot_amx.h and int_dot_i8mm.h. Included by linear.h and
// embedding.h only.
#pragma once

#include "int_dot_amx.h"
#include "int_dot_i8mm.h"
#include "outliers.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Computes a tile of R rows. The vector code handles a single row, which would leave half of an I8MM instruction idle.
template <class F, int R>
inline void vector_tile(BlocksView w, int64_t blocks, const QBlock* rows, int64_t x_stride, bool is_first, Vec factor,
                        float* y, TilePrefetch prefetch) {
#ifdef OCTAVO_I8MM
    if constexpr (R > 1) {
        int_tile_i8mm<F, R>(w, blocks, rows, x_stride, is_first, factor, y, prefetch);
        return;
    }
#endif
    int_tile<F, R>(w, blocks, rows, x_stride, is_first, factor, y, prefetch);
}

// Prefetch distance in bytes when a task has one vector tile. Lines go to the second-level cache, because what the tile
// reads fills the first.
constexpr int kIntPrefetchBytes = 8192;

// The most rows of a vector tile. Where registers hold six (AVX-512 with VNNI), five take 3% less time for codes of
// 4 bits with float16 scales and no minima, on Zen 5.
template <class F>
constexpr int kTileRowsOf =
    kIntRows == 6 && F::kMultipliedBits == 4 && sizeof(typename F::Scale) == 2 && !F::kHasMinimaBy32 ? 5 : kIntRows;

// How the rows of a batch are cut into tiles: first AMX tiles, where these are faster, then tiles of vectors. AMX and
// vector tiles give a row the same bits (int_dot_amx.h), so the split may change.
template <class F>
class TileSplit {
  public:
    struct Tile {
        int64_t begin, end;  // rows of the batch
        bool is_amx;
    };

    explicit TileSplit(int64_t rows)
        : rows_(rows),
          amx_tiles_(AmxTiles<F>::num_tiles(rows)),
          vector_rows_(max_of<int64_t>(0, rows - amx_tiles_ * kAmxRows)),
          vector_tiles_((vector_rows_ + kTileRowsOf<F> - 1) / kTileRowsOf<F>) {}

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

// Adds up the row halves of a panel's y: row r becomes the sum of rows 2r and 2r + 1, for `out_rows` rows.
inline void add_row_halves(float* y, int64_t out_rows) {
    for (int64_t r = 0; r < out_rows; ++r) {
        const float* halves = y + 2 * r * kMaxEpilogueWidth;
        for (int i = 0; i < kPanel; i += kLanes) {
            store(y + r * kMaxEpilogueWidth + i, add(load(halves + i), load(halves + kMaxEpilogueWidth + i)));
        }
    }
}

// The sizes of a task that multiplies `task_rows` rows of the call, and its tuning.
template <class F>
struct TaskSizes {
    // Rows of a batch share unpacked blocks and columns of outliers (outliers.h).
    static constexpr int kBatchRows = F::kUnpackedBytes ? kUnpackedRows : kOutlierRows;

    // Sizes.
    int64_t rows_per_output;       // 2 for 16-bit inputs, stored as two 8-bit rows: add_row_halves
    int64_t rows;                  // quantized rows
    int64_t quantized_row_stride;  // QBlocks from one quantized row to the next; args.x_stride goes from one row of the
                                   // call to the next, and that may be two quantized rows
    int64_t blocks, panel_bytes;   // blocks, bytes of a panel
    int64_t epilogue_panels;       // panels that share an epilogue
    // Tuning: results do not depend on these.
    int64_t tiles_per_panel;  // of all batches
    bool any_uses_amx;
    int64_t blocks_at_once;        // the most blocks of a run
    int prefetch_lines_per_block;  // cache lines of the next weights to prefetch per tile and block
    int64_t prefetch_bytes;        // prefetch distance of a single tile

    TaskSizes(const LinearArgs& args, int64_t task_rows)
        : rows_per_output(args.x_is_paired ? 2 : 1),
          rows(task_rows * rows_per_output),
          quantized_row_stride(args.x_stride / rows_per_output),
          blocks((args.matrix.k + kQBlock - 1) / kQBlock),
          panel_bytes(blocks * F::kBlockBytes) {
        using Split = TileSplit<typename F::UnpackedFormat>;
        // With LoRA an epilogue has as many panels as fit: it looks the rows' adapters up once for all of them.
        const int64_t max_vecs = args.has_lora ? kMaxEpilogueWidth / kLanes : kVecsPerPanel;
        epilogue_panels = epilogue_vecs(args, max_vecs) / kVecsPerPanel;
        tiles_per_panel = (rows / kBatchRows) * Split(kBatchRows).count() + Split(rows % kBatchRows).count();
        any_uses_amx = Split(min_of<int64_t>(rows, kBatchRows)).uses_amx();
        prefetch_lines_per_block =
            static_cast<int>(((F::kBlockBytes + 63) / 64 + tiles_per_panel - 1) / tiles_per_panel);
        // All blocks of a panel, or as many as are unpacked together. Both are whole superblocks in formats that have
        // them: checked_source (pack_int.cpp) refuses other k, set_segments (module.cpp) other segments. A single tile
        // of vectors unpacks as few as it can, so that blocks are read soon after they are fetched.
        blocks_at_once = blocks;
        if (F::kUnpackedBytes > 0 || any_uses_amx) {
            blocks_at_once =
                min_of<int64_t>(blocks, tiles_per_panel == 1 && !any_uses_amx ? kBlocksPerSuperblock : kUnpackedBlocks);
        }
        prefetch_bytes = any_uses_amx ? blocks_at_once * F::kBlockBytes : kIntPrefetchBytes;
    }
};

// The product of a task's rows and panels, for panels in one format.
template <class F>
class IntProductTask {
  public:
    // `outliers` is used by this task alone until `run` has returned.
    IntProductTask(const LinearArgs& args, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                   OutlierList& outliers)
        : args_(args),
          row_begin_(row_begin),
          sizes_(args, row_end - row_begin),
          x_(static_cast<const QBlock*>(args.x) + row_begin * args.x_stride),
          outliers_(outliers),
          amx_(x_, sizes_.quantized_row_stride, sizes_.blocks, sizes_.rows, sizes_.any_uses_amx),
          adapter_lines_(args, row_begin, row_end, panel_begin, panels_of(args.matrix)) {
        outliers_.collect(x_, sizes_.quantized_row_stride, sizes_.blocks, sizes_.rows, kBatchRows,
                          args.matrix.segments);
    }

    // Multiplies panels panel_begin .. panel_end - 1. The loops, from the outermost to the innermost:
    //   1. epilogue panels    run                share an epilogue
    //   2. batches of rows    run                share unpacked blocks, and columns of weights unpacked for outliers
    //   3. panels             run
    //   4. segments of k      multiply_panel     have sums of their own
    //   5. runs of blocks     multiply_segment   are unpacked together
    //   6. tiles of rows      multiply_run       fetch the next weights meanwhile, in equal parts
    void run(int64_t panel_begin, int64_t panel_end) {
        for (int64_t panel = panel_begin; panel < panel_end; panel += sizes_.epilogue_panels) {
            const int64_t panels = min_of(sizes_.epilogue_panels, panel_end - panel);
            adapter_lines_.collect(panel, panels, panels * sizes_.tiles_per_panel * sizes_.blocks);
            int64_t tiles_before = 0;
            for (int64_t first = 0; first < sizes_.rows; first += kBatchRows) {
                const int64_t rows = min_of<int64_t>(kBatchRows, sizes_.rows - first);
                const Batch batch{first, rows, rows / sizes_.rows_per_output, tiles_before, Split(rows)};
                for (int64_t p = 0; p < panels; ++p) multiply_panel(batch, panel + p, panels, y_ + p * kPanel);
                tiles_before += batch.split.count();
                run_epilogue(args_, {y_, kMaxEpilogueWidth, row_begin_ + first / sizes_.rows_per_output, batch.out_rows,
                                     panel * kPanel, panels * kPanel});
                if (args_.has_lora) amx_.configure();  // adapters configured tiles of their own
            }
        }
    }

  private:
    using Unpacked = typename F::UnpackedFormat;
    using Split = TileSplit<Unpacked>;
    static constexpr int kBatchRows = TaskSizes<F>::kBatchRows;
    static_assert(kBatchRows % kAmxRows == 0, "AMX writes sixteen rows of y");

    struct Batch {
        int64_t first_row, rows;  // quantized rows of the task
        int64_t out_rows;         // their outputs: rows / rows_per_output
        int64_t tiles_before;     // tiles of earlier batches
        Split split;
    };

    // The data of a panel, and of the panel to prefetch meanwhile: the one in its place after the next epilogue.
    struct Weights {
        const char *panel, *next_panel;
    };

    // Consecutive blocks of a segment, unpacked together.
    struct Run {
        int64_t first_block, num_blocks;
        bool is_first, is_last;  // of the segment's runs
    };

    // Writes the products of a batch and a panel, one of `panels` epilogue panels, to y [rows][kMaxEpilogueWidth].
    void multiply_panel(const Batch& batch, int64_t panel, int64_t panels, float* y) {
        const char* data = static_cast<const char*>(args_.matrix.data) + panel * sizes_.panel_bytes;
        const Weights w{data, data + panels * sizes_.panel_bytes};
        sum_segments(args_.matrix, y, partial_sums_, /*step=*/kPanel, batch.out_rows, /*width=*/kPanel,
                     [&](Segment segment, float* to) { multiply_segment(batch, w, segment, to); });
    }

    // Writes the sums of one segment of k to `to`.
    void multiply_segment(const Batch& batch, Weights w, Segment segment, float* to) {
        const int64_t begin = segment.begin / kQBlock;
        const int64_t end = begin + (segment.size + kQBlock - 1) / kQBlock;
        for (int64_t block = begin; block < end; block += sizes_.blocks_at_once) {
            const int64_t count = min_of(sizes_.blocks_at_once, end - block);
            multiply_run(batch, w, {block, count, block == begin, block + count == end}, to);
        }
        outliers_.add<F>(w.panel, unpack_args_, batch.first_row, segment.number, args_.matrix.factor, to,
                         kMaxEpilogueWidth);
        if (args_.x_is_paired) add_row_halves(to, batch.out_rows);
    }

    // Adds the products of a run of blocks to `to`; the segment's first run begins the sums.
    void multiply_run(const Batch& batch, Weights w, Run run, float* to) {
        const BlocksView view = F::unpack_blocks(w.panel, run.first_block, run.num_blocks, unpack_args_, unpacked_);
        const char* amx_codes = batch.split.uses_amx() ? amx_.unpack_codes(view, run.num_blocks) : nullptr;
        const Vec factor = set1(run.is_last ? args_.matrix.factor : 1);
        for (int64_t i = 0; i < batch.split.count(); ++i) {
            const typename Split::Tile tile = batch.split.at(i);
            const int64_t row = batch.first_row + tile.begin;
            float* y = to + tile.begin * kMaxEpilogueWidth;
            TilePrefetch prefetch{next_weights(w, batch.tiles_before + i, run.first_block),
                                  sizes_.prefetch_lines_per_block, adapter_lines_.cache_lines(),
                                  adapter_lines_.take(run.num_blocks)};
            if (tile.is_amx) {
                amx_.multiply(view, amx_codes, run.num_blocks, row, run.first_block, run.is_first, factor, y,
                              [&] { prefetch.prefetch_block(); });
                continue;
            }
            with_constant<kTileRowsOf<Unpacked>>(tile.end - tile.begin, [&](auto r) {
                vector_tile<Unpacked, decltype(r)::kValue>(
                    view, run.num_blocks, x_ + row * sizes_.quantized_row_stride + run.first_block,
                    sizes_.quantized_row_stride, run.is_first, factor, y, prefetch);
            });
        }
    }

    // Returns where a tile begins to prefetch weights when it begins with block `block`. `tile` is its number among all
    // tiles by the panel:
    //   one tile in the task   in its own panel, some bytes ahead
    //   several                in its share of `next_panel`
    //   the last panels        past the matrix: a prefetch does not fault
    const char* next_weights(Weights w, int64_t tile, int64_t block) const {
        if (sizes_.tiles_per_panel == 1) return w.panel + block * F::kBlockBytes + sizes_.prefetch_bytes;
        return w.next_panel + (tile * sizes_.blocks + block) * sizes_.prefetch_lines_per_block * 64;
    }

    const LinearArgs& args_;
    const int64_t row_begin_;
    const TaskSizes<F> sizes_;
    const QBlock* const x_;
    const UnpackArgs unpack_args_{args_.matrix};
    OutlierList& outliers_;
    AmxTiles<Unpacked> amx_;
    AdapterLines adapter_lines_;
    // On the stack of a pool thread, at most: 24 KB above, 24 KB of unpacked blocks, 48 KB for each of the two below.
    alignas(64) char unpacked_[F::kUnpackedBytes ? F::kUnpackedBytes * kUnpackedBlocks : 1];
    alignas(64) float y_[kBatchRows * kMaxEpilogueWidth];
    alignas(64) float partial_sums_[kBatchRows * kMaxEpilogueWidth];  // of segments, each a panel wide
    static_assert((kTreeDepth - 1) * kPanel <= kMaxEpilogueWidth, "partial sums lie side by side in a row");
};

// Computes rows row_begin .. row_end - 1 by panels panel_begin .. panel_end - 1.
template <class F>
void int_product_task(const LinearArgs& args, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                      int64_t panel_end) {
    static_assert(sizeof(IntProductTask<F>) <= 150 << 10, "it lies on the stack of a pool thread");
    IntProductTask<F>(args, row_begin, row_end, panel_begin, OutlierList::of_thread()).run(panel_begin, panel_end);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
